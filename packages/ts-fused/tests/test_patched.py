"""What `patch_fused` does around the comparisons: stand-ins, shared inputs, likeness, sizes."""

import copy
import pickle
from types import MethodType

import pytest
import torch
from test_checked import LlamaNorm
from torch import nn
from torch.nn.utils import parametrize

from ts_core.testing import assert_bit_equal, devices
from ts_fused import _checked_lora, check_fused, checked, patch_fused


class Lora(nn.Module):
    """A linear layer with one adapter, in the form that PEFT gives it."""

    disable_adapters, merged = False, False

    def __init__(self, inputs, outputs, rank=3):
        super().__init__()
        self.base_layer = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, outputs, bias=False)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
        self.scaling, self.active_adapters = {"default": 0.5}, ["default"]
        self.calls = [0]

    def forward(self, x):
        self.calls[0] += 1
        return (
            self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * self.scaling["default"]
        )


class Attention(nn.Module):
    """Takes angles that nothing gives it while it is looked at."""

    def __init__(self, size=16):
        super().__init__()
        self.q, self.k, self.v, self.o = (Lora(size, n) for n in (size, 8, 8, size))
        self.norm = nn.LayerNorm(size)

    def forward(self, x, angles):
        q, k, v = self.norm(self.q(x)), self.k(x), self.v(x)
        scale, shift = angles
        return self.o(q * scale + shift + k.sum(-1, keepdim=True) * v.sum(-1, keepdim=True))


class GatedMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(16, 32), nn.Linear(16, 32)
        self.down_proj, self.act_fn = nn.Linear(32, 16), nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Chain(nn.Module):
    """No two of its layers have the same input."""

    def __init__(self, size=16):
        super().__init__()
        self.first, self.second, self.twice = Lora(size, size), Lora(size, size), Lora(size, size)

    def forward(self, x):
        return self.twice(self.twice(self.second(self.first(x))))


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=3e-5)


def run(module, *args):
    out = module(*args)
    trained = [p for p in module.parameters() if p.requires_grad]
    return out, torch.autograd.grad(out.square().sum(), trained, allow_unused=True)


ANGLES = (2.0, 0.5)


def forget_calls(module):
    """Comparisons run the layers' code, in small twins that share their counters."""
    for child in module.children():
        if isinstance(child, Lora):
            child.calls[0] = 0


def layers_called(module):
    return [child.calls[0] for child in module.children() if isinstance(child, Lora)]


@pytest.mark.parametrize("device", devices())
def test_layers_with_one_input_are_computed_as_one(device, monkeypatch):
    attention = Attention().to(device)
    plain = copy.deepcopy(attention)
    patch = patch_fused(attention, kinds=["lora"])
    assert {name: report.variant for name, report in patch.shared.items()} == {"q": "q, k, v"}
    assert patch.patched == ("q", "k", "v", "o")
    forget_calls(attention)
    widths = []
    monkeypatch.setattr(
        "ts_fused._checked_group.run_projections",
        lambda x, ps, f=_checked_lora.run_projections: widths.append(len(ps)) or f(x, ps),
    )
    x = torch.randn(2, 5, 16, device=device)
    close(run(attention, x, ANGLES), run(plain, x, ANGLES))
    assert widths == [3]
    assert layers_called(attention) == [0, 0, 0, 0]
    # Each by itself too, and none from an earlier call.
    for _ in range(2):
        close(attention.k(x), plain.k(x))
    assert widths == [3]
    assert patch.undo() == ()
    assert not any("forward" in module.__dict__ for module in attention.modules())


def test_other_calls_of_the_layers_are_their_own():
    """An input that is changed between, a hook that changes it, adapters that are off, a failing parent."""
    attention = Attention()
    plain = copy.deepcopy(attention)
    patch_fused(attention, kinds=["lora"])
    x = torch.randn(2, 16)

    def doubled(module, args):
        return (args[0] * 2,)

    def written(module, args, output):
        with torch.no_grad():
            x.mul_(0.5)

    for make in (
        lambda m: m.k.register_forward_pre_hook(doubled),
        lambda m: m.q.register_forward_hook(written),
    ):
        handles = [make(m) for m in (attention, plain)]
        x.copy_(torch.randn(2, 16))
        before = x.clone()
        with torch.no_grad():
            got = attention(x, ANGLES)
            x.copy_(before)
            close(got, plain(x, ANGLES))
        for handle in handles:
            handle.remove()
    attention.v.disable_adapters = plain.v.disable_adapters = True  # our small layer has no code for it
    close(attention(x, ANGLES), plain(x, ANGLES))
    with pytest.raises(TypeError):
        attention(x, None)
    assert attention.forward.__wrapped__ is not None
    close(attention.q(x), plain.q(x))


def test_layers_with_other_inputs_are_not_put_together():
    chain = Chain()
    plain = copy.deepcopy(chain)
    patch = patch_fused(chain)
    assert patch.shared == {}
    assert patch.patched == ("first", "second", "twice")
    x = torch.randn(3, 16)
    close(run(chain, x), run(plain, x))


def test_a_group_that_disagrees_is_reported(monkeypatch):
    attention = Attention()
    monkeypatch.setattr("ts_fused._checked_group.lora_linears", lambda x, ps: tuple(x for _ in ps))
    patch = patch_fused(attention, kinds=["lora"])
    assert not patch.shared["q"].agrees
    assert "not torch.float32" in patch.shared["q"].reason or "differ" in patch.shared["q"].reason
    assert patch.patched == ("q", "k", "v", "o")  # each by itself
    assert "forward" not in attention.__dict__


def test_modules_that_are_alike_are_compared_once(monkeypatch):
    compared = []
    monkeypatch.setitem(
        checked._CHECKS,
        "rms_norm",
        (checked.looks_like_norm, lambda *args: compared.append(args) or checked.check_norm(*args)),
    )
    model = nn.Sequential(
        *(LlamaNorm() for _ in range(3)), LlamaNorm(16), LlamaNorm(eps=1e-3), LlamaNorm().half()
    )
    assert len(patch_fused(model, kinds=["rms_norm"]).patched) == 6
    assert len(compared) == 4
    odd = LlamaNorm()
    odd.state = object()  # nobody knows what it does
    assert len(patch_fused(nn.Sequential(odd, LlamaNorm()), kinds=["rms_norm"]).patched) == 2
    assert len(compared) == 6


def test_copies_and_pickles_have_their_own_code():
    attention = Attention()
    patch_fused(attention)
    forget_calls(attention)
    x = torch.randn(2, 16)
    for other in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
        close(other(x, ANGLES), attention(x, ANGLES))
        assert layers_called(other) == [1, 1, 1, 1]
    assert layers_called(attention) == [0, 0, 0, 0]
    alone = copy.deepcopy(attention.q)
    close(alone(x), attention.q(x))
    assert alone.calls == [1]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_of_patched_modules_are_patched_too(copied):
    attention = Attention()
    names = patch_fused(attention).patched
    other = copied(attention)
    patch = patch_fused(other)
    assert patch.patched == names == ("q", "k", "v", "o")
    assert [report.agrees for report in patch.shared.values()] == [True]
    forget_calls(other)
    x = torch.randn(2, 16)
    close(other(x, ANGLES), attention(x, ANGLES))
    assert layers_called(other) == [0, 0, 0, 0]
    patch.undo()
    close(other(x, ANGLES), attention(x, ANGLES))
    assert layers_called(other) == [1, 1, 1, 1]


def _hooked_dropout(layer):
    layer.lora_dropout["default"].register_forward_hook(lambda module, args, output: output * 2)


def _parametrized_factor(layer):
    parametrize.register_parametrization(layer.lora_A["default"], "weight", nn.Tanh())


def _parametrized_base(layer):
    parametrize.register_parametrization(layer.base_layer, "weight", nn.Tanh())
    layer.base_layer.requires_grad_(False)


def _parametrized_bias(layer):
    parametrize.register_parametrization(layer.base_layer, "bias", nn.Tanh())
    layer.base_layer.requires_grad_(False)


class Halving(nn.Module):
    def forward(self, x):
        return x * 0.5


class Doubling(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2.0


def _no_dropout_but_in_its_place(layer):
    layer.lora_dropout["default"] = Halving()
    layer.eval()


def _base_of_another_class(layer):
    layer.base_layer = Doubling(16, layer.base_layer.out_features).requires_grad_(False)


CHANGES = [
    _hooked_dropout, _no_dropout_but_in_its_place, _base_of_another_class,
    _parametrized_factor, _parametrized_base, _parametrized_bias,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_layers_changed_after_the_comparison_run_their_own_code(change):
    attention, x = Attention(), torch.randn(2, 16)
    patch_fused(attention)
    change(attention.k)
    forget_calls(attention)
    got, calls = attention(x, ANGLES), layers_called(attention)
    assert calls[1] == 1
    for layer in (attention.q, attention.k, attention.v, attention.o, attention):
        del layer.__dict__["forward"]
    close(got, attention(x, ANGLES))


def test_dropout_may_go_on_while_the_layer_is_in_eval():
    attention, x = Attention(), torch.randn(2, 16)
    patch_fused(attention)
    attention.k.lora_dropout["default"] = nn.Dropout(0.5)
    attention.eval()
    forget_calls(attention)
    attention(x, ANGLES)
    assert layers_called(attention)[1] == 0
    attention.k.lora_dropout["default"].train()
    attention(x, ANGLES)
    assert layers_called(attention)[1] == 1


def test_hooks_of_every_module_see_what_would_be_left_out():
    model, x = nn.Sequential(GatedMlp()), torch.randn(2, 16)
    attention = Attention()
    seen = []
    patch_fused(model)
    patch_fused(attention)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(module))
    try:
        model(x)
        attention(x, ANGLES)
    finally:
        handle.remove()
    assert model[0].act_fn in seen
    assert attention.k.base_layer in seen
    assert attention.k.lora_A["default"] in seen


@pytest.mark.parametrize("mode", [False, True])
@pytest.mark.parametrize("scaled_in", [False, True])
def test_both_modes_of_a_module_are_compared(mode, scaled_in):
    class Norm(LlamaNorm):
        def forward(self, x):
            return super().forward(x) * (2.0 if self.training is scaled_in else 1.0)

    class Mlp(GatedMlp):
        def forward(self, x):
            return super().forward(x) * (2.0 if self.training is scaled_in else 1.0)

    assert patch_fused(nn.Sequential(Norm(), Mlp()).train(mode)).patched == ()
    copied = LlamaNorm().train(mode)
    copied.__class__, copied.forward = Norm, MethodType(Norm.forward, copied)  # as copies of patched ones are
    assert patch_fused(copied).patched == ()


def test_another_activation_runs_the_modules_own_code():
    mlp, x = GatedMlp(), torch.randn(2, 16)
    assert patch_fused(mlp).patched == ("",)
    mlp.act_fn = nn.ReLU()
    close(mlp(x), GatedMlp.forward(mlp, x))


def test_a_forward_that_was_there_before_comes_back():
    attention = Attention()
    own = attention.forward
    attention.forward = lambda *args: own(*args) * 1.0
    before = attention.forward
    patch = patch_fused(attention, kinds=["lora"])
    attention.q.forward = lambda x: x  # someone comes after
    assert patch.undo() == ("q",)
    assert attention.forward is before


def test_a_norm_runs_in_dtypes_that_were_compared_only():
    class Late(LlamaNorm):
        def forward(self, hidden_states):
            x = hidden_states.float()
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            return (x * self.weight.float()).to(hidden_states.dtype)

    norm = Late()
    with torch.no_grad():
        norm.weight.normal_()
    report = check_fused(norm)
    assert report.agrees
    x = torch.randn(64, 32, dtype=torch.bfloat16)
    assert_bit_equal(report.forward(x), Late.forward(norm, x))  # would round in another order
    assert report.forward(x.float()).dtype is torch.float32


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", devices())
def test_pytorchs_norm_under_autocast(device, weight):
    """On a GPU autocast widens its inputs; the result is what the module itself gives, in its dtype."""
    norm = nn.RMSNorm(64, eps=1e-5, device=device, dtype=weight)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    for enabled in (True, False):
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            want = norm(x)
            patch = patch_fused(norm)
            got = norm(x)
            patch.undo()
        assert got.dtype is want.dtype
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7)


def test_small_sizes_run_the_modules_own_code_on_a_cpu(monkeypatch):
    monkeypatch.undo()
    attention, x = Attention(), torch.randn(2, 16)
    patch_fused(attention)
    forget_calls(attention)
    attention(x, ANGLES)
    assert layers_called(attention) == [1, 1, 1, 1]
    monkeypatch.setattr(_checked_lora, "WORTH_IT", 2 * 16 * 32)
    attention(x, ANGLES)
    assert layers_called(attention) == [1, 1, 1, 2]  # the three together have that many outputs
