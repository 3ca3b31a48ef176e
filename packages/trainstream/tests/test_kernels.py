"""`kernels=`, `fused_lora=`, `attention=` through `wrap()`: what runs fused, and nothing else changes."""

import contextlib
import copy
import itertools
import json
import pickle
import warnings

import peft
import pytest
import torch
import torch.nn.functional as F
from architectures import layers_of, make
from conftest import tiny_llama
from grid_models import (
    BUILD,
    NIGHTLY,
    WRAP_POLICIES,
    adamw,
    batch,
    compare,
    offload_adamw,
    one,
    retained,
    reverse_order,
    same_bits,
    train,
)
from test_peft import base_model, ids, logits, lora
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import trainstream
from trainstream._session import session_of
from ts_core.testing import devices
from ts_fused import _checked_lora, checked
from ts_quant import QuantizedTensor

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning", "ignore::UserWarning"),
]
FUSED = {"kernels": True, "fused_lora": True}
KERNELS = ("rms_norm", "rotary", "gated_mlp", "add_rms_norm")
OFF = {"kernels": False, "fused_lora": False, "attention": None}


@pytest.fixture(autouse=True)
def _small_sizes_too(monkeypatch):
    """Fused paths at every size: on a CPU small ones run the modules' own code, which is faster there."""
    monkeypatch.setattr(_checked_lora, "WORTH_IT", 0)
    monkeypatch.setattr(checked, "WORTH_IT", {})


class Operators(TorchDispatchMode):
    """Counts the operators of this library that run."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "ts_fused":
            name = func.__name__.split(".")[0]
            self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def operators(run):
    with Operators() as seen:
        run()
    return seen.counts


def rows_of(model, **only):
    rows = trainstream.memory_report(model)["kernels"]["modules"]
    return [row for row in rows if all(row[key] == value for key, value in only.items())]


def events(model, head):
    return [line for line in trainstream.memory_report(model)["events"] if line.startswith(head)]


def stand_ins(model):
    return [name for name, module in model.named_modules() if "forward" in module.__dict__]


# -- placement does not change a bit of what fused kernels compute


def lora_model(codec="none", dtype=torch.float32, **changes):
    model = base_model(codec).to(dtype)
    return lora(model, target_modules="all-linear", **changes)


GRID = {
    "llama": lambda: BUILD["llama"](),
    "gemma2": lambda: BUILD["gemma2"](),
    "mixtral": lambda: BUILD["mixtral"](),
    "lora": lambda: lora_model(),
    "lora nf4": lambda: lora_model("nf4"),
    "lora nf4 bf16": lambda: lora_model("nf4", torch.bfloat16),
    "lora int8, half of them dropout": lambda: lora_model("int8", lora_dropout=0.2),
}
PRODUCT = list(itertools.product(GRID, WRAP_POLICIES, (one, reverse_order, retained)))
ROWS = PRODUCT if NIGHTLY else PRODUCT[::7]  # 7 and 9 share no factor: every policy and sequence comes


def fused_run(kind, sequence, device, **options):
    torch.manual_seed(0)
    model = GRID[kind]().train()
    model, optimizer = trainstream.wrap(
        model,
        offload_adamw(model.parameters()),
        quantize=None,
        device=device,
        **FUSED,
        attention="math",
        **options,
    )
    try:
        assert rows_of(model, fused=True)
        return train(model, optimizer, sequence, device)
    finally:
        trainstream.unwrap(model)
        assert stand_ins(model) == []


_resident = {}


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("kind", "policy", "sequence"), ROWS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_paged_and_resident_have_the_same_bits(kind, policy, sequence, device, tmp_path):
    key = kind, sequence, device
    if key not in _resident:
        _resident[key] = fused_run(kind, sequence, device)
    expected = _resident[key]
    found = fused_run(
        kind, sequence, device, param_offload=True, disk_offload=str(tmp_path), **WRAP_POLICIES[policy]
    )
    compare(found, expected)


def test_some_kept_some_offloaded_some_recomputed(tmp_path):
    expected = fused_run("lora nf4", one, "cpu")
    mixed = {"param_offload": [1], "recompute": [0], "activation_offload": 1.0, "min_offload_bytes": 0}
    compare(fused_run("lora nf4", one, "cpu", disk_offload=str(tmp_path), **mixed), expected)


# -- what runs


def test_auto_is_on_over_packed_weights_only():
    for codec, on in (("none", False), ("nf4", True)):
        model = lora_model(codec)
        model, _ = trainstream.wrap(model, adamw(model.parameters()), quantize=None)
        numerics = session_of(model).plan.numerics
        assert (numerics.kernels, numerics.fused_lora, numerics.attention) == (on, on, None)
        assert bool(rows_of(model)) == on
        said = (
            "2 gated MLPs, 2 residual sums with their norms fused"
            if on
            else "the model's own modules compute"
        )
        assert said in events(model, "kernels=auto")[0]
        assert ("14 LoRA layers fused" if on else "as PEFT does") in events(model, "fused_lora=auto")[0]
        trainstream.unwrap(model)


@pytest.mark.parametrize("place", [{}, {"param_offload": True, "recompute": True}])
def test_off_has_the_bits_of_the_plain_model(place, tmp_path):
    plain = BUILD["llama"]()
    model = copy.deepcopy(plain)
    model, _ = trainstream.wrap(model, adamw(model.parameters()), disk_offload=str(tmp_path), **OFF, **place)
    for each in (plain, model):
        each(input_ids=batch(0), labels=batch(0)).loss.backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert same_bits(p.grad, q.grad)
    assert trainstream.memory_report(model)["kernels"]["modules"] == []
    trainstream.unwrap(model)


def test_every_module_is_reported_and_what_is_fused_runs():
    model = lora_model()
    model, _ = trainstream.wrap(model, adamw(model.parameters()), **FUSED)
    kinds = {kind: len(rows_of(model, kind=kind, fused=True)) for kind in KERNELS}
    assert kinds == {"rms_norm": 5, "rotary": 2, "gated_mlp": 2, "add_rms_norm": 2}
    single = [row for row in rows_of(model, kind="lora") if row["variant"] == "linear"]
    shared = [row["variant"] for row in rows_of(model, kind="lora") if row["variant"] != "linear"]
    assert len(single) == 14
    assert sorted(shared) == ["gate_proj, up_proj"] * 2 + ["q_proj, k_proj, v_proj"] * 2
    assert "4 groups of them by their common input" in events(model, "fused_lora=True")[0]
    json.dumps(trainstream.memory_report(model))
    ran = operators(lambda: model(input_ids=ids(0), labels=ids(0)).loss.backward())
    assert ran == {
        # Nothing before the first norm is trained.
        "rms_norm_forward": 3, "add_rms_norm_forward": 2, "rms_norm_backward": 4, "rotary_heads": 4,
        "gated_forward": 2, "gated_backward": 2,
    }  # fmt: skip
    trainstream.unwrap(model)
    assert operators(lambda: model(input_ids=ids(0), labels=ids(0)).loss.backward()) == {}


def test_each_option_by_itself():
    for options, kinds in (
        ({"kernels": True, "fused_lora": False}, set(KERNELS)),
        ({"kernels": None, "fused_lora": True}, {"lora"}),
    ):
        model = lora_model()
        model, _ = trainstream.wrap(model, adamw(model.parameters()), **options)
        assert {row["kind"] for row in rows_of(model, fused=True)} == kinds
        trainstream.unwrap(model)


class OddNorm(nn.Module):
    """Looks like an RMSNorm and is none."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(32)), 1e-6

    def forward(self, x):
        return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)


def test_what_does_not_agree_is_left_alone_and_named():
    model = BUILD["llama"]()
    for layer in model.model.layers:
        layer.input_layernorm = OddNorm()
    plain = copy.deepcopy(model)
    model, _ = trainstream.wrap(model, adamw(model.parameters()), **FUSED)
    left = rows_of(model, fused=False)
    assert [row["name"] for row in left] == [f"model.layers.{i}.input_layernorm" for i in range(4)]
    assert "differ" in left[0]["reason"]
    assert "not fused: 4 norms (model.layers.0.input_layernorm, ...): outputs differ" in "".join(
        events(model, "not fused")
    )
    torch.testing.assert_close(model(batch(0)).logits, plain(batch(0)).logits, rtol=1e-5, atol=1e-6)
    trainstream.unwrap(model)


def test_a_model_without_anything_to_fuse():
    model = BUILD["stack"]()
    plain = copy.deepcopy(model)
    model, _ = trainstream.wrap(model, adamw(model.parameters()), **FUSED)
    assert rows_of(model) == []
    assert events(model, "kernels=True") == ["kernels=True: nothing fused"]
    for each in (plain, model):
        torch.manual_seed(1)
        each(batch(0), batch(0)).loss.backward()
    assert all(same_bits(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    trainstream.unwrap(model)


# -- copies, pickles, saving, hooks


@pytest.mark.parametrize("place", [{}, {"param_offload": True}])
def test_copies_and_pickles_are_plain_models(place, tmp_path):
    plain = BUILD["llama"]()
    model = copy.deepcopy(plain)
    model, _ = trainstream.wrap(
        model, adamw(model.parameters()), **FUSED, attention="math", disk_offload=str(tmp_path), **place
    )
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert operators(lambda m=other: m(batch(0))) == {}
        with sdpa_kernel(SDPBackend.MATH):
            assert same_bits(other(batch(0)).logits, plain(batch(0)).logits)
    assert operators(lambda: model(batch(0))) != {}
    trainstream.unwrap(model)
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert stand_ins(other) == []
        assert same_bits(other(batch(0)).logits, plain(batch(0)).logits)


def test_names_and_saved_files_are_those_of_the_plain_model(tmp_path):
    plain = lora_model("nf4")
    model = copy.deepcopy(plain)
    model, _ = trainstream.wrap(model, adamw(model.parameters()), quantize=None, **FUSED)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.save_pretrained(tmp_path)
    back = peft.PeftModel.from_pretrained(base_model("nf4"), tmp_path)
    torch.testing.assert_close(logits(back), logits(plain), rtol=1e-5, atol=1e-6)
    trainstream.unwrap(model)


def test_hooks_see_what_they_saw():
    """What a fused path would leave out runs when someone looks at it."""
    model = BUILD["llama"]()
    model, _ = trainstream.wrap(model, adamw(model.parameters()), **FUSED)
    seen = []
    layer = model.model.layers[1]
    for module in (layer.mlp.act_fn, layer.mlp, layer.input_layernorm, layer.self_attn.q_proj):
        module.register_forward_hook(lambda module, args, output: seen.append(module))
    model(batch(0))
    assert seen == [layer.input_layernorm, layer.self_attn.q_proj, layer.mlp.act_fn, layer.mlp]
    trainstream.unwrap(model)


def test_a_failed_wrap_leaves_no_trace(monkeypatch):
    model = BUILD["llama"]()
    monkeypatch.setattr(trainstream._wrap, "start_paging", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainstream.wrap(model, None, recompute=True, **FUSED, attention="math")
    assert stand_ins(model) == []


# -- adapters


@pytest.mark.parametrize("place", [{}, {"param_offload": True, "recompute": [0]}])
@pytest.mark.parametrize("codec", ["none", "nf4"])
def test_adapters_switch_mix_go_off_and_come_later(codec, place, tmp_path):
    plain = lora_model(codec)
    lora(base_model("none"), name="other", r=2).save_pretrained(tmp_path)
    model = copy.deepcopy(plain)
    model, _ = trainstream.wrap(
        model, adamw(model.parameters()), quantize=None, disk_offload=str(tmp_path), **FUSED, **place
    )

    def same():
        torch.testing.assert_close(logits(model), logits(plain), rtol=1e-5, atol=1e-5)

    same()
    for each in (plain, model):
        each.load_adapter(tmp_path / "other", "second")
    for name in ("second", "default"):
        for each in (plain, model):
            each.set_adapter(name)
        same()
    for each in (plain, model):
        each.base_model.set_adapter(["default", "second"])
    same()
    with plain.disable_adapter(), model.disable_adapter():
        same()
    if codec == "none":
        for change in ("merge_adapter", "unmerge_adapter"):
            for each in (plain, model):
                getattr(each, change)()
            same()
    trainstream.unwrap(model)
    same()


def test_adapters_that_are_put_in_after_wrap():
    base = BUILD["llama"]()
    model, _ = trainstream.wrap(base, adamw(base.parameters()), **FUSED)
    plain = lora(BUILD["llama"](), target_modules="all-linear")
    late = lora(model, target_modules="all-linear")
    torch.testing.assert_close(logits(late), logits(plain), rtol=1e-5, atol=1e-6)
    trainstream.unwrap(base)
    assert stand_ins(base) == []


def test_layers_that_are_asked_for_out_of_turn():
    """A sibling whose turn does not come, comes twice, or gets another tensor."""
    model = lora_model().eval()
    plain = copy.deepcopy(model)
    model, _ = trainstream.wrap(model, adamw(model.parameters()), **FUSED)
    for ours, theirs in zip(layers_of(model), layers_of(plain), strict=True):
        x = torch.randn(2, 3, 32)
        torch.testing.assert_close(ours.self_attn.k_proj(x), theirs.self_attn.k_proj(x))
        for attention in (ours.self_attn, theirs.self_attn):
            # A pre-hook gives one of them another input.
            attention.v_proj.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-5, atol=1e-6)
    trainstream.unwrap(model)


# -- the whole of training


def curve(model, optimizer, steps):
    losses = []
    for step in range(steps):
        loss = model(input_ids=ids(step % 3), labels=ids(step % 3), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


FAMILIES = {
    # name -> modules that are fused, of each kind in the order of the report
    "Llama": (9, 4, 4, 4),
    "Qwen2": (9, 4, 4, 4),
    "Qwen3": (17, 4, 4, 4),
    "Mistral": (9, 4, 4, 4),
    "Gemma 2": (17, 4, 4, 4),
    "Gemma 3": (25, 4, 4, 4),
    "Phi-3": (9, 4, 4, 4),
    "GPT-2": (0, 0, 0, 0),
    "Mixtral": (9, 4, 0, 4),
    "Qwen3-MoE": (17, 4, 1, 4),
}


@pytest.mark.parametrize(
    ("family", "packed"),
    [(f, p) for i, f in enumerate(FAMILIES) for p in (False, True) if NIGHTLY or p == bool(i % 2)],
)
def test_loss_curves_are_those_of_the_models_own_code(family, packed):
    ours, theirs = make(family), make(family)
    for model in (ours, theirs):
        if packed:
            model.requires_grad_(False)
            trainstream.quantize_model(model, "nf4", blocks=layers_of(model))
            for name, p in model.named_parameters():
                p.requires_grad_("norm" in name or "ln_" in name)
    ours, optimizer = trainstream.wrap(ours, adamw(ours.parameters()), quantize=None, **FUSED)
    counts = tuple(len(rows_of(ours, kind=k, fused=True)) for k in KERNELS)
    assert counts == FAMILIES[family], rows_of(ours, fused=False)
    steps = 8
    got, want = curve(ours, optimizer, steps), curve(theirs, adamw(theirs.parameters()), steps)
    assert want[-1] < 0.97 * want[0] or packed
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=2e-3, atol=1e-4)
    assert any(isinstance(p, QuantizedTensor) for p in ours.parameters()) == packed
    trainstream.unwrap(ours)


def test_adapters_in_bf16_learn_as_they_did():
    plain = lora_model("nf4", torch.bfloat16)
    ours = copy.deepcopy(plain)
    ours, optimizer = trainstream.wrap(ours, adamw(ours.parameters()), quantize=None)
    got, want = curve(ours, optimizer, 16), curve(plain, adamw(plain.parameters()), 16)
    assert want[-1] < 0.95 * want[0]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=0.02, atol=0.02)
    trainstream.unwrap(ours)


# The compiler makes an instance of every autograd function, which torch itself advises against.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("when", ["before", "after"] if NIGHTLY else ["after"])
def test_a_compiled_model_runs_fused_paths(when):
    torch.compiler.reset()
    plain = lora(tiny_llama(num_hidden_layers=1), target_modules=["q_proj", "v_proj", "up_proj"]).eval()
    model = copy.deepcopy(plain)
    compiled = [torch.compile(model, backend="aot_eager")] if when == "before" else []
    model, _ = trainstream.wrap(model, adamw(model.parameters()), **FUSED, attention="math")
    run = compiled[0] if compiled else torch.compile(model, backend="aot_eager")
    for each in (run, plain):
        each(input_ids=ids(0), labels=ids(0)).loss.backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if p.requires_grad:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5, msg=name)
    torch.compiler.reset()
    trainstream.unwrap(model)


# -- attention


def sdpa_model():
    model = BUILD["llama"]()
    model.config._attn_implementation = "sdpa"
    return model.eval()


@pytest.mark.parametrize("place", [{}, {"param_offload": True, "recompute": True}])
def test_a_named_backend_computes(place, tmp_path):
    plain = sdpa_model()
    expected = {}
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            plain(batch(0), labels=batch(0)).loss.backward()
        expected[backend] = [p.grad.clone() for p in plain.parameters()]
        plain.zero_grad()
    names = {SDPBackend.MATH: "math", SDPBackend.FLASH_ATTENTION: "flash"}
    for backend, name in names.items():
        model = sdpa_model()
        model, _ = trainstream.wrap(
            model, adamw(model.parameters()), attention=name, disk_offload=str(tmp_path), **place
        )
        assert session_of(model).plan.numerics.attention == name
        model(batch(0), labels=batch(0)).loss.backward()
        assert all(same_bits(p.grad, g) for p, g in zip(model.parameters(), expected[backend], strict=True))
        assert events(model, "attention=") == [f"attention={name}: {name} first"]
        trainstream.unwrap(model)
        assert stand_ins(model) == []
    ones = zip(expected[SDPBackend.MATH], expected[SDPBackend.FLASH_ATTENTION], strict=True)
    assert not all(same_bits(a, b) for a, b in ones)


def backend_of(model, **inputs):
    """Which CPU kernel ran: flash has an operator of its own."""

    class Seen(TorchDispatchMode):
        names = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names = (*self.names, func.__name__)
            return func(*args, **(kwargs or {}))

    with Seen() as seen, torch.no_grad():
        model(input_ids=batch(0), **inputs)
    flash = any("flash" in name for name in seen.names)
    math = any("safe_softmax" in name or "_softmax" in name for name in seen.names)
    return {(True, False): "flash", (False, True): "math"}[flash, math]


def test_masks_and_switches_of_others_go_first():
    model = sdpa_model()
    model, _ = trainstream.wrap(model, adamw(model.parameters()), attention="math")
    assert backend_of(model) == "math"
    padded = torch.ones(2, 9, dtype=torch.long)
    padded[0, :3] = 0
    assert backend_of(model, attention_mask=padded) == "flash"  # torch's own order
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert backend_of(model) == "flash"
    assert backend_of(model) == "math"
    trainstream.unwrap(model)
    assert backend_of(model) == "flash"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (None, "torch's own order of backends"),
        ("auto", "torch's own order of backends: a CPU has one fused kernel"),
        ("cudnn", "torch's own order of backends: a CPU has no cudnn kernel"),
        ("efficient", "torch's own order of backends: a CPU has no efficient kernel"),
    ],
)
def test_on_a_cpu_there_is_little_to_choose(asked, said):
    model = sdpa_model()
    model, _ = trainstream.wrap(model, adamw(model.parameters()), attention=asked)
    assert events(model, "attention=") == [f"attention={asked}: {said}"]
    assert stand_ins(model) == []
    report = trainstream.memory_report(model)["kernels"]["attention"]
    assert report == {"first": None, "own_s": None, "backends_s": {}}
    trainstream.unwrap(model)


def wide_model():
    """Attention large enough to be measured: 2 rows of 1,024 tokens, 8 heads of 64."""
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    return tiny_llama(**sizes, max_position_embeddings=1024, attn_implementation="sdpa")


def computed_by(model, tokens):
    """Names of the fused backends that compute this model's attention here, forward and backward."""
    config, names = model.config, {"cudnn": "CUDNN", "efficient": "EFFICIENT", "flash": "FLASH"}
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    found = set()
    for name, value in names.items():
        q, k, v = (
            torch.randn(*tokens.shape, n, config.head_dim, device="cuda", dtype=model.dtype).requires_grad_()
            for n in heads
        )
        backend = sdpa_kernel([getattr(SDPBackend, f"{value}_ATTENTION")])
        with warnings.catch_warnings(), contextlib.suppress(RuntimeError), backend:
            warnings.simplefilter("ignore")  # of what stands against a backend, before that raises
            made = F.scaled_dot_product_attention(
                *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=heads[0] != heads[1]
            )
            made.backward(torch.ones_like(made))
            found.add(name)
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("place", [{}, {"param_offload": True, "recompute": [0]}])
def test_the_fastest_backend_is_measured_once_and_kept(place):
    model = wide_model().cuda().bfloat16().train()
    tokens = torch.randint(0, 97, (2, 1024), device="cuda")
    fused = computed_by(model, tokens)
    assert "flash" in fused
    model, optimizer = trainstream.wrap(model, adamw(model.parameters()), **place)
    assert events(model, "attention=") == ["attention=auto: to be measured on the first step's shape"]
    model(tokens[:, :8], labels=tokens[:, :8]).loss.backward()  # too small to matter
    choice = session_of(model).kernels.attention
    assert choice.open
    generator = torch.cuda.get_rng_state()
    model(tokens, labels=tokens).loss.backward()
    assert torch.equal(torch.cuda.get_rng_state(), generator)
    assert not choice.open
    report = trainstream.memory_report(model)["kernels"]["attention"]
    assert report["own_s"] > 0
    assert set(report["backends_s"]) == fused
    assert report["first"] == session_of(model).plan.numerics.attention == choice.backend
    assert len(events(model, "attention=auto")) == 2
    optimizer.step()
    model(tokens, labels=tokens).loss.backward()
    assert len(events(model, "attention=auto")) == 2
    trainstream.unwrap(model)
