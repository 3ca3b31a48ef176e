"""Recordings, one risk at a time, from one product to a block: the first test that fails names the cause.

Those that make sense on a CPU run there with the stand-in, too.
"""

import gc
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ts_core.testing import devices
from ts_paging.fixed import copy_all
from ts_paging.pinned import PinnedAllocator
from ts_paging.recording import CannotRecord, recorder_for
from ts_paging.rng import RandomState, as_it_was
from ts_paging.trial import bytes_of

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
on_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
everywhere = pytest.mark.parametrize("device", devices())


def recorder_of(device):
    return recorder_for(torch.device(device, 0) if device == "cuda" else torch.device(device))


def same(one, two):
    return torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8))


def recorded(recorder, run, keep=True):
    """Warm up and record; results are kept until the next replay."""
    recorder.warm_up(run)
    recording, made = recorder.record(run)
    if keep:
        recording.keep([made] if isinstance(made, torch.Tensor) else list(made))
    return recording, made


@everywhere
def test_step_01_one_product(device):
    x, w = torch.randn(16, 64, device=device), torch.randn(64, 32, device=device)
    recording, y = recorded(recorder_of(device), lambda: x @ w)
    for _ in range(3):
        x.normal_()
        recording.replay()
        assert same(y, x @ w)


@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_02_products_of_a_library_that_holds_a_workspace(device, dtype):
    """Large enough for a product that is split, whose parts are summed up in the workspace."""
    x = torch.randn(64, 4096, device=device, dtype=dtype)
    layer = nn.Linear(4096, 64, device=device, dtype=dtype)
    with torch.no_grad():
        recording, y = recorded(recorder_of(device), lambda: layer(x))
        for _ in range(3):
            x.normal_()
            recording.replay()
            assert same(y, layer(x))


@on_gpu
def test_step_03_workspaces_that_are_given_back_meanwhile(device):
    """As a compiler that records graphs does; what takes that memory must not be written by a replay."""
    x = torch.randn(64, 4096, device=device, dtype=torch.bfloat16)
    layer = nn.Linear(4096, 64, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        recording, y = recorded(recorder_of(device), lambda: layer(x))
        expected = layer(x)
        torch._C._cuda_clearCublasWorkspaces()
        others = [torch.zeros(1 << 22, device=device) for _ in range(32)]
        recording.replay()
        torch.cuda.synchronize()
        assert same(y, expected)
        assert all(int(other.count_nonzero()) == 0 for other in others)


@everywhere
def test_step_04_forward_and_backward_in_one(device):
    """Backward is launched by another thread, on the stream of the recording."""
    layer = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(device)
    x = torch.randn(8, 32, device=device, requires_grad=True)
    out = [torch.empty_like(t) for t in (x, *layer.parameters())]

    def run():
        grads = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
        for place, grad in zip(out, grads, strict=True):
            place.copy_(grad)

    recorder = recorder_of(device)
    recorder.warm_up(run)
    recording, _ = recorder.record(run)
    for _ in range(3):
        with torch.no_grad():
            x.normal_()
        recording.replay()
        expected = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
        assert all(map(same, out, expected))


@everywhere
def test_step_05_forward_in_one_and_backward_in_another(device):
    layer = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(device)
    x = torch.randn(8, 32, device=device, requires_grad=True)
    grad, out = torch.ones(8, 32, device=device), torch.empty(8, 32, device=device)
    found = torch.empty_like(x)
    recorder, saved, state = recorder_of(device), {}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved.setdefault(storage.data_ptr(), bytes_of(storage, held=False))
        return tensor

    def forward():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            state["y"] = layer(x)
        out.copy_(state["y"].detach())

    def backward():
        found.copy_(torch.autograd.grad(state["y"], x, grad)[0])

    recorder.warm_up(forward)
    recorder.warm_up(backward)
    saved.clear()
    state.clear()  # a graph that is kept keeps its leaves' nodes, and these the stream that they were made on
    first, _ = recorder.record(forward)
    known = {t.untyped_storage().data_ptr() for t in (x, *layer.parameters())}
    own = [data for address, data in saved.items() if address not in known]
    assert own
    first.keep(own)
    second, _ = recorder.record(backward)
    state.clear()
    other, _ = recorder.record(lambda: torch.full((1 << 16,), 7.0, device=device).mul_(2))
    for _ in range(3):
        with torch.no_grad():
            x.normal_()
        first.replay()
        copies = [each.clone() for each in own]
        other.replay()  # uses the pool for something else
        copy_all(list(zip(own, copies, strict=True)))
        second.replay()
        y = layer(x)
        assert same(out, y.detach())
        assert same(found, torch.autograd.grad(y, x, grad)[0])


@everywhere
def test_step_06_recordings_that_share_a_pool_in_any_order(device):
    recorder = recorder_of(device)
    x = torch.randn(64, 64, device=device)
    outs = [torch.empty(64, 64, device=device) for _ in range(3)]
    recordings = []
    for index, out in enumerate(outs):

        def run(index=index, out=out):
            y = x * (index + 1)
            out.copy_((y @ y).relu() + y)

        recorder.warm_up(run)
        recordings.append(recorder.record(run)[0])
    for order in ([0, 1, 2], [2, 0, 1], [1, 1, 0, 2]):
        x.normal_()
        for index in order:
            recordings[index].replay()
        for index, out in enumerate(outs):
            y = x * (index + 1)
            assert same(out, (y @ y).relu() + y)


@everywhere
@pytest.mark.parametrize("eager_between", [False, True])
def test_step_07_random_numbers(device, eager_between):
    """Those of a replay follow what was drawn before, and what is drawn after follows those of the replay."""
    x, at = torch.ones(1000, device=device), torch.device(device)
    out = torch.empty_like(x)

    def run():
        out.copy_(F.dropout(F.dropout(x, 0.3), 0.1))

    def both(once):
        torch.manual_seed(5)
        found = []
        for _ in range(3):
            once()
            found.append(out.clone())
            if eager_between:
                found.append(torch.rand(10, device=device))
        return found

    expected = both(run)
    recorder, before = recorder_of(device), RandomState(at)
    recorder.warm_up(run)
    recording, _ = recorder.record(run)
    before.put_back()
    assert all(map(same, both(recording.replay), expected))
    state = RandomState(at)
    recording.replay()
    first = out.clone()
    with as_it_was(state, at):
        recording.replay()
    assert same(out, first)


@on_gpu
@pytest.mark.filterwarnings("ignore::UserWarning")  # why a backend is not there
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH", "CUDNN_ATTENTION"])
def test_step_08_attention_kernels(device, backend, dropout):
    """Their seeds and offsets are tensors while recording, and numbers otherwise."""
    q, k, v = (
        torch.randn(1, 4, 128, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    grad, out = torch.randn_like(q), [torch.empty_like(q) for _ in range(4)]

    def run():
        with sdpa_kernel(getattr(SDPBackend, backend)):
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        found = (y, *torch.autograd.grad(y, (q, k, v), grad))
        for place, value in zip(out, found, strict=True):
            place.copy_(value.detach())

    at = torch.device(device, 0)
    try:
        before = RandomState(at)
        run()
    except RuntimeError as error:
        pytest.skip(f"not here: {str(error).splitlines()[0]}")
    expected = [each.clone() for each in out]
    before.put_back()
    run()
    repeats = all(map(same, out, expected))
    recorder = recorder_of(device)
    recorder.warm_up(run)
    recording, _ = recorder.record(run)
    before.put_back()
    recording.replay()
    if repeats:
        assert all(map(same, out, expected))
    else:  # its backward adds in any order
        assert same(out[0], expected[0])
        assert all(torch.allclose(a, b, atol=2e-2) for a, b in zip(out, expected, strict=True))


@on_gpu
@pytest.mark.parametrize(
    "beside",
    ["page-locked memory", "device memory", "copies", "events", "synchronize", "kernels"],
)
def test_step_09_other_threads_go_on_while_a_graph_is_recorded(device, beside):
    side = torch.cuda.Stream()
    host = torch.ones(1 << 16).pin_memory()

    def work():
        with torch.cuda.stream(side):
            if beside == "page-locked memory":
                PinnedAllocator().empty(1 << 21).fill_(1).to(device, non_blocking=True)
            elif beside == "device memory":
                torch.empty(1 << 28, device=device, dtype=torch.uint8)
            elif beside == "copies":
                host.to(device, non_blocking=True).cpu()
            elif beside == "events":
                event = torch.cuda.Event()
                event.record()
                event.query()
                event.synchronize()
            elif beside == "synchronize":
                side.synchronize()
            else:
                torch.ones(1 << 16, device=device).mul_(2)

    errors = []

    def careful():
        try:
            for _ in range(3):
                work()
        except Exception as error:
            errors.append(error)

    x = torch.ones(1 << 16, device=device)

    def run():
        y = x * 2
        other = threading.Thread(target=careful)
        other.start()
        other.join()
        return y + 1

    recorder = recorder_of(device)
    recording, y = recorded(recorder, run)
    x.fill_(3.0)
    recording.replay()
    assert errors == []
    assert same(y, torch.full_like(y, 7.0))


@on_gpu
def test_step_10_what_cannot_be_recorded_leaves_all_else_usable(device):
    recorder = recorder_of(device)
    x = torch.ones(8, device=device)
    kept, y = recorded(recorder, lambda: x * 2)
    before = torch.cuda.memory_allocated()
    with pytest.raises(CannotRecord):
        recorder.record(lambda: (x * 3).sum().item())
    assert float(x.sum()) == 8.0
    kept.replay()
    assert float(y.sum()) == 16.0
    assert F.dropout(torch.ones(4096, device=device)).sum() > 0
    torch.ones(1 << 16).pin_memory().to(device)
    PinnedAllocator().empty(1 << 20)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        shared = torch.ones(1 << 20, device=device)
    shared.record_stream(torch.cuda.current_stream())
    del shared
    torch.cuda.synchronize()
    again, z = recorded(recorder, lambda: x + 1)
    again.replay()
    kept.replay()
    assert float(z.sum()) == 16.0
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    recording, out = recorded(recorder, lambda: F.dropout(torch.ones(4096, device=device)))
    recording.replay()
    assert float(out.sum()) > 0


@on_gpu
def test_step_11_an_error_of_python_while_recording(device):
    recorder = recorder_of(device)
    x = torch.ones(8, device=device)

    def run():
        (x * 3).sum()
        raise KeyError("of the block")

    for _ in range(3):
        with pytest.raises(KeyError):
            recorder.record(run)
    recording, y = recorded(recorder, lambda: x + 1)
    recording.replay()
    assert float(y.sum()) == 16.0


@on_gpu
def test_step_12_memory_comes_back_with_the_last_recording(device):
    def held():
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))

    recorder = recorder_of(device)
    x = torch.ones(1 << 24, device=device)
    torch.cuda.empty_cache()
    before = held()
    for _ in range(2):
        recording, y = recorded(recorder, lambda: (x * 2 + 1) * 3)
        assert recorder.pool_bytes() >= x.nbytes
        recording.replay()
        assert float(y[0]) == 9.0
        del recording, y
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert recorder.pool_bytes() == 0
        assert held() <= before


@on_gpu
def test_step_13_a_graph_that_is_dropped_while_it_runs(device):
    recorder = recorder_of(device)
    a, out = torch.randn(4096, 4096, device=device), torch.empty(4096, 4096, device=device)

    def run():
        y = a
        for _ in range(20):
            y = y @ a / 64
        out.copy_(y)

    recording, _ = recorded(recorder, run, keep=False)
    run()
    expected = out.clone()
    out.zero_()
    recording.replay()
    del recording
    rest = [torch.zeros(4096, 4096, device=device) for _ in range(4)]
    torch.cuda.synchronize()
    assert same(out, expected)
    assert all(int(each.count_nonzero()) == 0 for each in rest)


@on_gpu
def test_step_14_replays_on_other_streams_and_threads(device):
    """Backward replays in a thread of the engine, on the stream of forward."""
    recorder = recorder_of(device)
    x, out = torch.ones(1 << 20, device=device), torch.empty(1 << 20, device=device)
    recording, _ = recorded(recorder, lambda: out.copy_(x * 2), keep=False)
    side = torch.cuda.Stream()
    for number in range(20):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.fill_(float(number))

            def other():
                with torch.cuda.stream(side):
                    recording.replay()

            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            found = out.clone()
        torch.cuda.current_stream().wait_stream(side)
        assert float(found[-1]) == 2.0 * number


@everywhere
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_step_15_autocast(device, dtype):
    layer = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)).to(device)
    x = torch.randn(8, 64, device=device)

    def run():
        with torch.autocast(device, dtype=dtype), torch.no_grad():
            return layer(x)

    recording, y = recorded(recorder_of(device), run)
    for _ in range(2):
        with torch.no_grad():
            x.normal_()
            layer[0].weight.mul_(1.1)  # a cast that was kept would be the old one
        recording.replay()
        assert same(y, run())


@on_gpu
def test_step_16_kernels_that_are_launched_for_the_first_time(device):
    """Their code is loaded then; if this fails, all that is recorded has to be run once before."""
    recorder = recorder_of(device)
    x = torch.linspace(0.1, 0.9, 64, device=device, dtype=torch.float64)
    recording, y = recorder.record(lambda: torch.special.ndtri(x) + torch.special.erfcx(x))
    recording.replay()
    assert torch.allclose(y, torch.special.ndtri(x) + torch.special.erfcx(x))


@everywhere
def test_step_17_copies_of_several_dtypes_are_one(device):
    made = [
        torch.arange(number * 8, device=device).to(dtype)
        for number, dtype in enumerate(
            [torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.uint8], 1
        )
    ]
    odd = torch.arange(3, device=device).to(torch.bfloat16)
    for sources in (made, [*made, odd], [odd, *made, odd.clone()]):
        targets = [torch.zeros_like(source) for source in sources]
        copy_all(list(zip(targets, sources, strict=True)))
        assert all(map(torch.equal, targets, sources))


@on_gpu
def test_step_18_a_recording_on_a_stream_of_the_user(device):
    recorder = recorder_of(device)
    x = torch.ones(64, device=device)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        recording, y = recorded(recorder, lambda: x * 2)
        x.fill_(4.0)
        recording.replay()
        assert float(y[0]) == 8.0


@on_gpu
def test_step_19_tensors_of_a_pool_seen_as_bytes(device):
    recorder = recorder_of(device)
    x = torch.arange(64.0, device=device)
    recording, y = recorded(recorder, lambda: x * 2)
    seen = bytes_of(y.untyped_storage(), held=False)
    recording.replay()
    assert same(seen[: y.nbytes], y)
    copied = seen.clone()
    seen.zero_()
    assert int(y.count_nonzero()) == 0
    copy_all([(seen, copied)])
    assert same(y, x * 2)
