import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ts_core.errors import ArgumentError, ArgumentTypeError, OptionError
from ts_core.testing import assert_bit_equal, devices
from ts_fused import AttentionChoice, AttentionTimes, attention, time_attention

CPU = torch.device("cpu")


def heads(device="cpu", dtype=torch.float32, tokens=16):
    return [torch.randn(1, 2, tokens, 8, device=device, dtype=dtype) for _ in range(3)]


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen = []

    def forward(self, x, attention_mask=None):
        self.seen.append(tuple(torch._C._get_sdp_priority_order()))
        q = self.linear(x)
        return scaled_dot_product_attention(
            q, q, q, attn_mask=attention_mask, is_causal=attention_mask is None
        )


@pytest.mark.parametrize("device", devices())
def test_backends_are_timed(device):
    drawn = torch.get_rng_state()
    q, k, v = heads(device, torch.float32 if device == "cpu" else torch.bfloat16)
    drawn = torch.get_rng_state()
    times = time_attention(q, k, v, repeats=2, is_causal=True, dropout_p=0.1 if device != "cpu" else 0.0)
    assert_bit_equal(torch.get_rng_state(), drawn)
    assert "math" in times.backends
    assert all(seconds > 0 for seconds in (times.own, *times.backends.values()))
    if device == "cpu":
        assert set(times.backends) == {"flash", "math"}
    only = time_attention(q, k, v, backends=["math"], repeats=1)
    assert list(only.backends) == ["math"]
    with sdpa_kernel(SDPBackend.MATH):
        assert list(time_attention(q, k, v, repeats=1).backends) == ["math"]


def test_hooks_of_the_caller_see_nothing():
    seen = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t),
        torch.no_grad(),
    ):
        time_attention(*heads(), repeats=1)
    assert seen == []


@pytest.mark.parametrize(
    ("times", "fastest"),
    [
        (AttentionTimes(1.0, {"flash": 0.9, "math": 2.0}), "flash"),
        (AttentionTimes(1.0, {"flash": 0.97, "math": 2.0}), None),  # noise
        (AttentionTimes(1.0, {}), None),
    ],
)
def test_another_backend_must_win_clearly(times, fastest):
    assert times.fastest == fastest


def test_wrong_arguments_are_named():
    q, k, v = heads()
    for bad, error, match in (
        (lambda: time_attention(q.long(), k, v), ArgumentTypeError, "q: expected a floating tensor"),
        (lambda: time_attention(q, k[0], v), ArgumentError, "k: expected"),
        (lambda: time_attention(q, k, v, backends=["fa3"]), OptionError, "fa3"),
        (lambda: time_attention(q, k, v, repeats=0), OptionError, "repeats"),
        (lambda: AttentionChoice("fa3", CPU), OptionError, "fa3"),
    ):
        with pytest.raises(error, match=match):
            bad()


def test_on_a_cpu_there_is_one_fused_kernel():
    for name, why in (("auto", "one fused kernel"), ("cudnn", "no cudnn"), ("efficient", "no efficient")):
        choice = AttentionChoice(name, CPU)
        assert (choice.backend, choice.open) == (None, False)
        assert why in choice.why
        module = Attends()
        choice.put([module])
        assert "forward" not in module.__dict__


def open_choice(monkeypatch, small=1, decided=lambda choice: None):
    """An undecided one: what decides on a GPU, on CPU tensors."""
    monkeypatch.setattr(attention, "_SMALL", small)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    choice = AttentionChoice("auto", torch.device("cuda"), decided)
    assert choice.open
    return choice


def test_the_first_call_that_counts_decides(monkeypatch):
    told = []
    choice = open_choice(monkeypatch, 4 * 2 * 16 * 16 * 8, told.append)
    monkeypatch.setattr(
        attention,
        "time_attention",
        lambda q, k, v, **options: AttentionTimes(1.0, {"efficient": 0.5, "math": 0.6}),
    )
    module = Attends()
    usual = tuple(torch._C._get_sdp_priority_order())
    choice.put([module])
    x, short = torch.randn(1, 2, 16, 8), torch.randn(1, 2, 8, 8)
    with torch.no_grad():
        module(x)  # nothing is trained
    module(x, torch.zeros(16, 16))  # masked
    module(short)  # too small
    assert choice.open
    module(x)
    assert (choice.open, choice.backend, told) == (False, "efficient", [choice])
    module.seen.clear()
    module(x)
    module(x, torch.zeros(16, 16))
    with sdpa_kernel(SDPBackend.MATH):
        module(x)  # someone else has chosen
    first = int(SDPBackend.EFFICIENT_ATTENTION.value)
    assert [order[0] == first for order in module.seen] == [True, False, False]
    assert sorted(module.seen[0]) == sorted(usual)
    assert tuple(torch._C._get_sdp_priority_order()) == usual
    with pytest.raises(RuntimeError):
        module(torch.randn(3, 3))  # the order comes back after an error too
    assert tuple(torch._C._get_sdp_priority_order()) == usual
    choice.undo()
    assert "forward" not in module.__dict__


def test_measuring_without_memory_does_not_end_the_step(monkeypatch):
    def full(*args, **options):
        raise torch.OutOfMemoryError("full")

    told = []
    choice = open_choice(monkeypatch, 1, told.append)
    monkeypatch.setattr(attention, "time_attention", full)
    module, x = Attends(), torch.randn(1, 2, 16, 8)
    want = module(x)
    choice.put([module])
    assert_bit_equal(module(x), want)
    assert (choice.open, choice.backend, told) == (False, None, [choice])
    assert "no memory" in choice.why


def test_it_gives_up_where_nothing_attends(monkeypatch):
    told = []
    choice = open_choice(monkeypatch, 1, told.append)
    module = nn.Linear(8, 8)
    choice.put([module])
    for size in range(1, 20):
        module(torch.randn(size, 8))
    assert not choice.open
    assert "no block calls" in choice.why
    assert told == [choice]


def test_deterministic_mode_leaves_cudnn_out(monkeypatch):
    choice = AttentionChoice("cudnn", torch.device("cuda"))
    usual = torch._C._get_sdp_priority_order()
    with choice.first():
        assert torch._C._get_sdp_priority_order()[0] == int(SDPBackend.CUDNN_ATTENTION.value)
    torch.use_deterministic_algorithms(True)
    try:
        with choice.first():
            assert torch._C._get_sdp_priority_order() == usual
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_named_one_computes_on_a_cpu():
    module, x = Attends(), torch.randn(1, 2, 16, 8)
    want = {}
    for name, backend in (("math", SDPBackend.MATH), ("flash", SDPBackend.FLASH_ATTENTION)):
        with sdpa_kernel(backend):
            want[name] = module(x)
    for name in want:
        choice = AttentionChoice(name, CPU)
        choice.put([module])
        assert_bit_equal(module(x), want[name])
        choice.undo()


def test_what_the_fused_kernel_of_a_cpu_cannot_compute_is_computed_all_the_same():
    class Drops(nn.Module):
        def forward(self, x):
            return scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    module, x = Drops(), torch.randn(1, 2, 16, 8)
    torch.manual_seed(0)
    want = module(x)
    AttentionChoice("flash", CPU).put([module])
    torch.manual_seed(0)
    assert_bit_equal(module(x), want)
