import copy
import types

import pytest
import torch
from torch import nn

from ts_core.errors import ArgumentTypeError, OptionError
from ts_core.testing import assert_bit_equal, devices, make_tensor
from ts_fused import check_fused, patch_fused, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LlamaNorm(nn.Module):
    def __init__(self, size=32, eps=1e-5):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(size)), eps

    def forward(self, hidden_states):
        return reference.rms_norm(hidden_states, self.weight, self.variance_epsilon)


class GemmaNorm(LlamaNorm):
    def forward(self, hidden_states):
        return reference.rms_norm(hidden_states, self.weight, self.variance_epsilon, offset=1.0)


class LateRounding(LlamaNorm):
    """Rounds after the weight, as some modules do."""

    def forward(self, hidden_states):
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (x * self.weight.float()).to(hidden_states.dtype)


class MeanNorm(LlamaNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


class GatedNorm(LlamaNorm):
    def forward(self, hidden_states, gate):
        return super().forward(hidden_states) * gate


class OtherEpsilon(LlamaNorm):
    """Has an epsilon of the usual name and adds another one."""

    def forward(self, hidden_states):
        return reference.rms_norm(hidden_states, self.weight, 0.1 * self.variance_epsilon)


class EpsilonOutside(LlamaNorm):
    """Adds epsilon to the root: the same but for small inputs."""

    def forward(self, hidden_states):
        x = hidden_states.float()
        x = x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


class MLP(nn.Module):
    def __init__(self, act, bias=False):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 48, bias=bias), nn.Linear(32, 48, bias=bias)
        self.down_proj, self.act_fn = nn.Linear(48, 32, bias=bias), act

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class ClampedMLP(MLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).clamp(max=1.0))


class CappedMLP(MLP):
    """Caps what is far from zero, as some models do."""

    def forward(self, x):
        gate, up = self.gate_proj(x).clamp(max=10.0), self.up_proj(x).clamp(-10.0, 10.0)
        return self.down_proj(self.act_fn(gate) * up)


class DroppingMLP(MLP):
    """Drops out of what its own code calls, while it is trained."""

    def forward(self, x):
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(nn.functional.dropout(hidden, 0.5, self.training))


class PackedMLP(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(32, 96, bias=False), nn.Linear(48, 32, bias=False)
        self.activation_fn = act

    def forward(self, hidden_states):
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(up * self.activation_fn(gate))


class SwappedMLP(PackedMLP):
    def forward(self, hidden_states):
        up, gate = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(up * self.activation_fn(gate))


def gelu_tanh(x):
    return nn.functional.gelu(x, approximate="tanh")


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("make", "kind", "variant"),
    [
        (LlamaNorm, "rms_norm", "offset 0"),
        (GemmaNorm, "rms_norm", "offset 1"),
        (lambda: MLP(nn.SiLU()), "gated_mlp", "silu"),
        (lambda: MLP(gelu_tanh, bias=True), "gated_mlp", "gelu_tanh"),
        (lambda: PackedMLP(nn.SiLU()), "gated_mlp", "silu"),
    ],
)
def test_modules_that_agree(device, dtype, make, kind, variant):
    module = make().to(device, dtype)
    before = copy.deepcopy(module.state_dict())
    report = check_fused(module)
    assert (report.kind, report.agrees, report.variant, report.reason) == (kind, True, variant, "")
    for name, value in module.state_dict().items():
        assert_bit_equal(value, before[name])
    x = make_tensor((2, 3, 32), dtype=dtype, device=device).requires_grad_()
    own, fused = module(x), report.forward(x)
    limit = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(fused, own, rtol=limit, atol=limit)
    leaves = [x, *module.parameters()]
    for a, b in zip(
        torch.autograd.grad(fused.sum(), leaves), torch.autograd.grad(own.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=limit, atol=limit * float(b.abs().max()))


@pytest.mark.parametrize(
    ("module", "kind", "reason"),
    [
        (LateRounding().bfloat16(), "rms_norm", "another order"),
        (MeanNorm(), "rms_norm", "differ"),
        (GatedNorm(), "rms_norm", "did not run"),
        (OtherEpsilon(), "rms_norm", "differ"),
        (EpsilonOutside(eps=1e-6), "rms_norm", "differ"),
        (EpsilonOutside(eps=1e-6).bfloat16(), "rms_norm", "differ"),
        (MLP(nn.GELU()), "gated_mlp", "neither silu nor"),
        (MLP(nn.ReLU()), "gated_mlp", "neither silu nor"),
        (MLP(lambda x: x.relu().square()), "gated_mlp", "neither silu nor"),
        (ClampedMLP(nn.SiLU()), "gated_mlp", "differ"),
        (CappedMLP(nn.SiLU()), "gated_mlp", "differ"),
        (DroppingMLP(nn.SiLU()), "gated_mlp", "differ"),
        (DroppingMLP(nn.SiLU()).eval(), "gated_mlp", "differ"),
        (SwappedMLP(nn.SiLU()), "gated_mlp", "differ"),
        (MLP(nn.SiLU()).double(), "gated_mlp", ""),
        (LlamaNorm().to("meta"), "rms_norm", "no kernel"),
        (nn.Linear(4, 4), "", "looks like nothing"),
        (nn.LayerNorm(4), "", "looks like nothing"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_modules_that_are_left_alone(module, kind, reason):
    drawn = torch.get_rng_state()
    report = check_fused(module)
    assert_bit_equal(torch.get_rng_state(), drawn)
    if isinstance(module, MLP) and module.down_proj.weight.dtype == torch.float64:
        # No parameter has a dtype with kernels, so it is checked in fp32; calls in float64 run its own code.
        x = torch.randn(2, 32, dtype=torch.float64)
        assert_bit_equal(report.forward(x), module(x))
        return
    assert (report.kind, report.agrees, report.forward) == (kind, False, None)
    assert reason in report.reason


def test_late_rounding_agrees_where_it_makes_no_difference():
    assert check_fused(LateRounding()).agrees
    assert not check_fused(LateRounding(), torch.zeros(1, dtype=torch.bfloat16)).agrees


def rotate_half(x):
    return torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)


def halves(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def partial(q, k, cos, sin, unsqueeze_dim=1):
    size = cos.shape[-1]
    a, b = halves(q[..., :size], k[..., :size], cos, sin, unsqueeze_dim)
    return torch.cat([a, q[..., size:]], -1), torch.cat([b, k[..., size:]], -1)


def neighbours(q, k, cos, sin, unsqueeze_dim=1):
    a, b = reference.rotary(q.float(), k.float(), cos, sin, unsqueeze_dim=unsqueeze_dim, interleaved=True)
    return a.to(q.dtype), b.to(k.dtype)


def once(q, k, cos, sin, unsqueeze_dim=1):
    half = cos.shape[-1] // 2
    return reference.rotary(
        q,
        k,
        cos[..., :half],
        sin[..., :half],
        unsqueeze_dim=unsqueeze_dim,
        interleaved=True,
        rotary_dim=2 * half,
    )


def wrong_way(q, k, cos, sin, unsqueeze_dim=1):
    return halves(q, k, cos, -sin, unsqueeze_dim)


def attention(function):
    """A module whose code calls a function by the name that models give it."""
    scope = {"torch": torch, "apply_rotary_pos_emb": function}
    exec(
        "def forward(self, x, position_embeddings, scale=1.0, *, flag=None):\n"
        "    q, k = (p(x).view(*x.shape[:-1], -1, 16).transpose(1, 2) for p in (self.q_proj, self.k_proj))\n"
        "    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)\n"
        "    return (q * k).transpose(1, 2).flatten(2) * scale\n",
        scope,
    )

    def deprecated(inner):
        def wrapped(*args, **kwargs):
            kwargs.pop("old", None)
            return inner(*args, **kwargs)

        wrapped.__wrapped__ = inner
        return wrapped

    kind = type("Attention", (nn.Module,), {"forward": deprecated(scope["forward"])})
    module = kind()
    module.q_proj, module.k_proj = nn.Linear(32, 32), nn.Linear(32, 32)
    return module


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("function", "variant"),
    [
        (halves, "halves"),
        (partial, "halves"),
        (neighbours, "interleaved"),
        (once, "interleaved, angles once"),
    ],
)
def test_attention_that_calls_a_rotary_function(device, dtype, function, variant):
    module = attention(function).to(device, dtype)
    other = type(module)()
    other.q_proj, other.k_proj = module.q_proj, module.k_proj
    report = check_fused(module)
    assert (report.kind, report.agrees, report.variant, report.reason) == ("rotary", True, variant, "")
    x = make_tensor((2, 5, 32), dtype=dtype, device=device).requires_grad_()
    angle = make_tensor((1, 5, 8), device=device, seed=1)
    angles = torch.cat([angle, angle], -1)
    position = (angles.cos().to(dtype), angles.sin().to(dtype))
    own = module(x, position, 2.0)
    patch = patch_fused(module)
    assert patch.patched == ("",)
    fused = module(x, position_embeddings=position, scale=2.0, old=1)
    limit = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 6e-3}[dtype]
    torch.testing.assert_close(fused, own, rtol=limit, atol=limit)
    leaves = [x, *module.parameters()]
    for a, b in zip(
        torch.autograd.grad(fused.sum(), leaves), torch.autograd.grad(own.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=limit, atol=limit * float(b.abs().max()))
    # Another module of the class runs the class's own code, and so does this one afterwards.
    assert_bit_equal(other(x, position, 2.0), own)
    assert patch.undo() == ()
    assert_bit_equal(module(x, position, 2.0), own)


def test_the_fused_rotary_function_hands_on_what_was_not_checked():
    seen = []

    def spying(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        seen.append(q.dtype)
        return halves(q, k, cos, sin, unsqueeze_dim)

    module = attention(spying)
    patch_fused(module)
    seen.clear()
    angles = torch.randn(1, 5, 16)
    module(torch.randn(2, 5, 32), (angles, angles))
    assert seen == []
    module.double()
    module(torch.randn(2, 5, 32).double(), (angles.double(), angles.double()))
    module.half()
    assert module(torch.randn(2, 5, 32).half(), (angles, angles)).dtype == torch.float32
    assert seen == [torch.float64, torch.float16]


def test_one_angle_for_all_tokens_is_left_to_the_modules_own_code():
    def broadcasts(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        turned = [torch.cat((-t[..., 8:], t[..., :8]), -1) for t in (q, k)]
        return q * cos + turned[0] * sin, k * cos + turned[1] * sin

    module, x, angle = attention(broadcasts), torch.randn(2, 5, 32), torch.randn(1, 1, 16)
    want = module(x, (angle, angle))
    assert patch_fused(module).patched == ("",)
    assert_bit_equal(module(x, (angle, angle)), want)


def test_attention_that_is_left_alone():
    assert "differ" in check_fused(attention(wrong_way)).reason
    broken = check_fused(attention(lambda *a: 1 / 0))
    assert not broken.agrees
    assert broken.reason


class Layer(nn.Module):
    """The parts of a PEFT layer that the check knows."""

    def __init__(self, names=("default",), active=("default",), bias=False, p=0.0, base=None):
        super().__init__()
        self.base_layer = (base or nn.Linear(32, 24)).requires_grad_(False)
        self.lora_A = nn.ModuleDict({n: nn.Linear(32, 4, bias=False) for n in names})
        self.lora_B = nn.ModuleDict({n: nn.Linear(4, 24, bias=bias) for n in names})
        self.lora_dropout = nn.ModuleDict({n: nn.Dropout(p) if p else nn.Identity() for n in names})
        self.scaling = {n: 2.0 + i for i, n in enumerate(names)}
        self.active_adapters, self._disable_adapters, self.merged_adapters = list(active), False, []
        self.lora_variant = {}
        self.own_runs = 0

    disable_adapters = property(lambda self: self._disable_adapters)
    merged = property(lambda self: bool(self.merged_adapters))

    def forward(self, x):
        self.own_runs += 1
        result = self.base_layer(x)
        kind = result.dtype
        if self.disable_adapters or self.merged:
            return result
        for name in self.active_adapters:
            if name in self.lora_A:
                a, b = self.lora_A[name], self.lora_B[name]
                result = result + b(a(self.lora_dropout[name](x.to(a.weight.dtype)))) * self.scaling[name]
        return result.to(kind)


def run(layer, x):
    before = layer.own_runs
    return layer(x), layer.own_runs - before


@pytest.mark.parametrize("device", devices())
def test_lora_layers_with_any_choice_of_adapters(device):
    x = make_tensor((2, 3, 32), device=device)
    for active in ((), ("a",), ("a", "b"), ("b", "missing")):
        layer = Layer(("a", "b"), active).to(device)
        want = layer(x)
        assert patch_fused(layer, kinds=["lora"]).patched == ("",)
        got, own = run(layer, x)
        assert own == 0
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        layer.base_layer.bfloat16()
        got, own = run(layer, x.bfloat16())
        assert (own, got.dtype) == (0, torch.bfloat16)
        torch.testing.assert_close(got.float(), want, rtol=3e-2, atol=3e-2)


def test_lora_layers_run_their_own_code_where_they_must():
    x = torch.randn(2, 32)
    layer = Layer()
    patch_fused(layer)
    assert run(layer, x)[1] == 0
    layer._disable_adapters = True
    got, own = run(layer, x)
    assert own == 1
    assert_bit_equal(got, layer.base_layer(x))
    layer._disable_adapters, layer.merged_adapters = False, ["default"]
    assert run(layer, x)[1] == 1
    layer.merged_adapters = []
    layer.lora_variant = {"default": object()}
    assert run(layer, x)[1] == 1
    layer.lora_variant = {}
    handle = layer.base_layer.register_forward_hook(lambda *a: None)
    assert run(layer, x)[1] == 1
    handle.remove()
    layer.base_layer.weight.requires_grad_(True)
    assert run(layer, x)[1] == 1
    layer.base_layer.weight.requires_grad_(False)
    assert run(layer, x)[1] == 0
    dropping = Layer(p=0.5)
    patch_fused(dropping)
    assert run(dropping, x)[1] == 1
    dropping.eval()
    assert run(dropping, x)[1] == 0


def test_lora_layers_that_are_left_alone():
    assert "bias" in check_fused(Layer(bias=True)).reason
    conv = nn.Conv1d(32, 24, 1)
    assert check_fused(Layer(base=conv)).kind == ""
    assert not check_fused(Layer(active=("default",)).double().to("meta")).agrees


def test_patching_a_model_and_undoing_it():
    model = nn.ModuleDict(
        {"norm": LlamaNorm(), "mlp": MLP(nn.SiLU()), "exact": MLP(nn.GELU()), "head": nn.Linear(4, 4)}
    )
    state = torch.get_rng_state()
    patch = patch_fused(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert patch.patched == ("norm", "mlp")
    assert set(patch.reports) == {"norm", "mlp", "exact"}
    assert patch_fused(model).patched == ()
    assert "already" in patch_fused(model).reports["norm"].reason
    mine = types.MethodType(lambda self, x: x, model["mlp"])
    model["mlp"].forward = mine
    assert patch.undo() == ("mlp",)
    assert model["mlp"].forward is mine
    assert "forward" not in model["norm"].__dict__
    assert patch.patched == ()
    assert patch_fused(model, kinds=["gated_mlp"]).patched == ()
    assert list(patch_fused(model, kinds=["rms_norm"]).reports) == ["norm"]


def test_a_copy_of_a_patched_model_is_a_model_of_its_own():
    model = nn.ModuleDict(
        {"norm": LlamaNorm(), "mlp": MLP(nn.SiLU()), "lora": Layer(), "attention": attention(halves)}
    )
    patch_fused(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    x, angles = torch.randn(2, 5, 32), torch.randn(1, 5, 16)
    for name in ("norm", "mlp", "lora"):
        assert copied[name](x).any(), name
        assert not model[name](x).any(), name
    assert copied["attention"](x, (angles, angles)).any()
    assert not model["attention"](x, (angles, angles)).any()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_patched_model_compiles():
    model = nn.Sequential(LlamaNorm(), MLP(nn.SiLU()))
    patch_fused(model)
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(2, 32, requires_grad=True)
    torch.testing.assert_close(compiled(x), model(x))
    a = torch.autograd.grad(compiled(x).sum(), x)[0]
    torch.testing.assert_close(a, torch.autograd.grad(model(x).sum(), x)[0])


def test_bad_input_is_named():
    for call, error, text in [
        (lambda: check_fused(3), ArgumentTypeError, "module: "),
        (lambda: patch_fused(3), ArgumentTypeError, "model: "),
        (lambda: check_fused(LlamaNorm(), 3), ArgumentTypeError, "sample: "),
        (lambda: check_fused(LlamaNorm(), torch.zeros(2).double()), ArgumentTypeError, "float64"),
        (lambda: check_fused(LlamaNorm(), kinds=["attention"]), OptionError, "kinds"),
    ]:
        with pytest.raises(error, match=text):
            call()
