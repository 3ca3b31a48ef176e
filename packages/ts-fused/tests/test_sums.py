"""Layers that normalize a sum they have just formed: where that is one operation, and what stays the same."""

import copy
import functools
import pickle
import types
import weakref

import pytest
import torch
from test_checked import LlamaNorm
from test_model_patches import build, kinds_of, lora_model, outputs, peft, transformers  # noqa: F401
from torch import nn
from torch.nn.utils import parametrize

from ts_core.testing import assert_bit_equal, devices
from ts_fused import check_fused, patch_fused

pytestmark = pytest.mark.filterwarnings("ignore")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Layer(nn.Module):
    """Two sums that norms follow, one in a branch, and one that none does."""

    scale = 1.0

    def __init__(self, size=32):
        super().__init__()
        self.first, self.second, self.third = LlamaNorm(size), LlamaNorm(size), LlamaNorm(size)
        self.attention, self.mlp = nn.Linear(size, size), nn.Linear(size, size)

    @decorated
    def forward(self, x: torch.Tensor, *, branch: bool = True):
        """A string of
        several lines."""
        residual = x
        x = self.first(x)
        x = self.attention(x) * self.scale
        x = residual + x

        residual = x  # kept
        x = self.second(x)
        x = self.mlp(x)
        if branch:
            x = x + residual
            return self.mlp(x), self.third(x)
        total = residual + x
        normed = self.third(total)
        return total, normed


def parts(layer, x, **options):
    """Outputs and gradients."""
    x = x.clone().requires_grad_()
    outs = layer(x, **options)
    seeds = [torch.linspace(-1, 1, o.numel(), device=o.device).reshape(o.shape).to(o.dtype) for o in outs]
    return outs, torch.autograd.grad(outs, [x, *layer.parameters()], seeds, allow_unused=True)


def patched_pair(layer, **changes):
    """The layer with its norms alone fused, and with its sums too."""
    norms, sums = copy.deepcopy(layer), copy.deepcopy(layer)
    patch_fused(norms, kinds=["rms_norm"], **changes)
    patch = patch_fused(sums, kinds=["rms_norm", "add_rms_norm"], **changes)
    return norms, sums, patch


class Half(nn.Module):
    def forward(self, x):
        return 0.5


def randomized(module):
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.3 + 0.1)
    return module


def count_sums(monkeypatch):
    calls = []
    real = torch.ops.ts_fused.add_rms_norm_forward.default
    monkeypatch.setattr(
        "ts_fused._ops.add_rms_norm_forward", lambda *args: calls.append(args[0].shape) or real(*args)
    )
    return calls


@pytest.mark.parametrize("branch", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", devices())
def test_bits_of_sum_and_norm_in_one(dtype, device, branch, monkeypatch):
    layer = randomized(Layer()).to(device, dtype)
    norms, sums, patch = patched_pair(layer)
    assert patch.patched == ("", "first", "second", "third")
    assert patch.reports[""].variant == "second, third"
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(9)).to(device, dtype)
    (outs, grads), calls = parts(norms, x, branch=branch), count_sums(monkeypatch)
    found, found_grads = parts(sums, x, branch=branch)
    assert len(calls) == (1 if branch else 2)
    for a, b in zip(found, outs, strict=True):
        assert_bit_equal(a, b)
    exact = parts(copy.deepcopy(layer).double(), x.double(), branch=branch)[1]
    for ours, theirs, want in zip(found_grads, grads, exact, strict=True):
        if ours is None or dtype is torch.float32:
            assert ours is theirs if ours is None or theirs is None else torch.equal(ours, theirs)
            continue
        # A gradient is rounded once, not twice: nearer as a rule, and never much farther.
        far, farther = (float((g.double() - want).norm()) for g in (ours, theirs))
        assert far <= 2.0 * farther
    assert patch.undo() == ()
    assert not any("forward" in module.__dict__ for module in sums.modules())


FAMILIES = {
    # name -> changes of the config, the norms that follow sums; layers of other orders are left alone
    "Llama": ({}, "post_attention_layernorm"),
    "Mistral": ({}, "post_attention_layernorm"),
    "Qwen2": ({}, "post_attention_layernorm"),
    "Qwen3": ({}, "post_attention_layernorm"),
    "Mixtral": ({"num_local_experts": 4}, "post_attention_layernorm"),
    "Phi3": ({"resid_pdrop": 0.0}, "post_attention_layernorm"),
    "Granite": ({"residual_multiplier": 0.3}, "post_attention_layernorm"),
    "Gemma": ({}, "post_attention_layernorm"),
    "Gemma2": ({"sliding_window": 4}, "pre_feedforward_layernorm"),
    "Olmo2": ({}, None),
    "Olmo": ({}, None),
    "Cohere": ({}, None),
    "GPT2": ({}, None),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_models_keep_their_bits(transformers, family):  # noqa: F811
    changes, name = FAMILIES[family]
    model = build(transformers, family, **changes)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "norm" in key:
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
    norms, sums, patch = patched_pair(model)
    assert kinds_of(patch).get("add_rms_norm", 0) == (0 if name is None else 2)
    assert {r.variant for r in patch.reports.values() if r.kind == "add_rms_norm"} == {name} - {None}
    ids = torch.arange(22).reshape(2, 11) * 7 % 61
    found = []
    for each in (norms, sums):
        loss = each(ids, labels=ids, use_cache=False).loss
        found.append((loss, *torch.autograd.grad(loss, list(each.parameters()), allow_unused=True)))
    for a, b in zip(*found, strict=True):
        assert a is b if a is None or b is None else torch.equal(a, b)


def _forward_hook(layer):
    layer.second.register_forward_hook(lambda module, args, output: output * 2)


def _pre_hook(layer):
    layer.second.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def _backward_hook(layer):
    layer.second.register_full_backward_hook(lambda module, grads, outs: (grads[0] * 2,))


def _another_norm(layer):
    layer.second = nn.LayerNorm(32)


def _another_forward(layer):
    layer.second.forward = lambda x: x * 2


def _parametrized(layer):
    parametrize.register_parametrization(layer.second, "weight", nn.Tanh())


@pytest.mark.parametrize(
    "change", [_forward_hook, _pre_hook, _backward_hook, _another_norm, _another_forward, _parametrized]
)
def test_whoever_changes_or_watches_a_norm_has_its_calls(change, monkeypatch):
    layer = randomized(Layer())
    norms, sums, _ = patched_pair(layer)
    for each in (norms, sums):
        change(each)
    calls = count_sums(monkeypatch)
    x = torch.randn(2, 5, 32)
    for a, b in zip(parts(sums, x)[1], parts(norms, x)[1], strict=True):
        assert a is b if a is None or b is None else torch.equal(a, b)
    assert len(calls) == 0
    parts(sums, x, branch=False)
    assert len(calls) == 1  # the other norm


def test_hooks_of_every_module_see_the_norm():
    layer = Layer()
    patch_fused(layer)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(module))
    try:
        layer(torch.randn(2, 32))
    finally:
        handle.remove()
    assert layer.second in seen


def test_terms_of_other_kinds_are_added_by_pytorch(monkeypatch):
    """Another dtype under autocast, a shape that is spread, a number."""
    layer = randomized(Layer())
    norms, sums, _ = patched_pair(layer)
    calls = count_sums(monkeypatch)
    x = torch.randn(2, 5, 32)
    with torch.autocast("cpu", torch.bfloat16):
        for a, b in zip(parts(sums, x)[1], parts(norms, x)[1], strict=True):
            assert a is b if a is None or b is None else torch.equal(a, b)
    for spread in (nn.Linear(32, 1), Half()):
        norms.attention = sums.attention = spread
        with torch.no_grad():
            assert torch.equal(sums(x)[0], norms(x)[0])
    assert calls == []


class Widened(LlamaNorm):
    """Under autocast its result is fp32, as that of PyTorch's own norm is on a GPU."""

    def forward(self, x):
        return super().forward(x.float() if torch.is_autocast_enabled(x.device.type) else x)


def test_a_norm_that_autocast_changes_runs_its_own_code_there(monkeypatch):
    layer, x = Layer(), torch.randn(2, 5, 32, dtype=torch.bfloat16)
    layer.second = Widened()
    layer.to(torch.bfloat16)
    layer.attention = nn.Identity()
    assert patch_fused(layer).patched == ("", "first", "second", "third")
    calls = count_sums(monkeypatch)
    for enabled in (False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert layer.second(x).dtype is (torch.float32 if enabled else torch.bfloat16)
            layer(x)
    assert len(calls) == 1


def test_copies_pickles_and_compiled_layers():
    layer = randomized(Layer())
    x = torch.randn(3, 32)
    want = layer(x)
    patch_fused(layer)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert not any(isinstance(m.__dict__.get("forward"), type(layer.forward)) for m in other.modules())
        torch.testing.assert_close(other(x), want)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), want)


def test_a_hundred_layers_share_one_code():
    stack = nn.Sequential(*(Layer() for _ in range(3)))
    for i, layer in enumerate(stack):
        layer.layer_idx = i
    patch_fused(stack)
    codes = {id(layer.__dict__["forward"]._run) for layer in stack}
    assert len(codes) == 1


class Base(nn.Module):
    def forward(self, x):
        return x * 2


class Child(Base):
    """Calls its parent's code, which needs the class itself."""

    def __init__(self):
        super().__init__()
        self.norm = LlamaNorm()

    def forward(self, x):
        x = x + super().forward(x)
        x = self.norm(x)
        return x


class Apart(nn.Module):
    """Something happens between, or the norm does not get the sum."""

    def __init__(self):
        super().__init__()
        self.norm, self.other = LlamaNorm(), LlamaNorm()

    def forward(self, x):
        y = x + x
        y = y * 2
        y = self.norm(y)
        z = x + y
        y = self.norm(x)
        y += z
        y = self.norm(y)
        w = y - x
        w = self.other(w)
        v = y + x
        v = torch.relu(self.norm(v))
        return v + w


def test_code_that_needs_its_class_and_code_of_another_form(monkeypatch):
    child = Child()
    x = torch.randn(4, 32)
    want = child(x)
    assert patch_fused(child).patched == ("", "norm")
    calls = count_sums(monkeypatch)
    torch.testing.assert_close(child(x), want)
    assert len(calls) == 1
    assert patch_fused(Apart()).patched == ("norm", "other")


def test_source_that_is_not_the_codes_is_not_used():
    class Other(Child):
        pass

    Other.forward = types.FunctionType(  # its names and lines are those of a class elsewhere in this file
        Child.forward.__code__.replace(co_code=Layer.forward.__wrapped__.__code__.co_code),
        Child.forward.__globals__, "forward", None, Child.forward.__closure__,
    )  # fmt: skip
    assert check_fused(Other(), kinds=["add_rms_norm"]).kind == ""
    scope = {"Child": Child}
    exec(
        "class Typed(Child):\n    def forward(self, x):\n        x = x + x\n        x = self.norm(x)\n", scope
    )
    assert check_fused(scope["Typed"](), kinds=["add_rms_norm"]).kind == ""  # no source


class Frees(Child):
    """Tells whether what the norm returned is still there when nothing of the layer needs it."""

    def forward(self, x):
        x = x + x
        y = x
        x = self.norm(x)
        self.normed = weakref.ref(x)
        x = y * 2
        self.alive = self.normed() is not None
        return x


class Locals(Child):
    def forward(self, x):
        x = x + x
        x = self.norm(x)
        return x * len(locals())


@torch.no_grad()
def test_code_has_the_names_that_it_had(monkeypatch):
    layer = Frees()
    patch_fused(layer)
    calls = count_sums(monkeypatch)
    layer(torch.randn(4, 32))
    assert len(calls) == 1
    assert not layer.alive
    assert check_fused(Locals(), kinds=["add_rms_norm"]).kind == ""


def test_a_norm_that_disagrees_is_named():
    layer = Layer()
    layer.second.forward_calls = 0

    class Odd(LlamaNorm):
        def forward(self, x):
            return super().forward(x) * 2

    layer.second = Odd()
    report = check_fused(layer, kinds=["add_rms_norm"])
    assert (report.kind, report.agrees) == ("add_rms_norm", False)
    assert report.reason.startswith("second: outputs differ")


def test_adapters_and_trained_norms(transformers, peft):  # noqa: F811
    plain = lora_model(transformers, peft, modules_to_save=["post_attention_layernorm"])
    model = copy.deepcopy(plain)
    patch_fused(model)
    got, want = outputs(model), outputs(plain)
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-4)
    for name, grad in want[1].items():
        if grad is not None:
            torch.testing.assert_close(got[1][name], grad, rtol=2e-3, atol=2e-4, msg=name)
