"""Whole small models of transformers and PEFT, patched and as they come."""

import contextlib
import copy

import pytest
import torch

from ts_core.testing import assert_bit_equal, seeded
from ts_fused import patch_fused

pytestmark = pytest.mark.filterwarnings("ignore")

TINY = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager",
}  # fmt: skip


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", exc_type=ImportError)


@pytest.fixture(scope="module")
def peft():
    return pytest.importorskip("peft", exc_type=ImportError)


def build(transformers, family, dtype=torch.float32, **changes):
    options = {**TINY, **changes}
    if family == "GPT2":
        options = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        options |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    if family == "Phi3":
        del options["head_dim"]
    config = getattr(transformers, f"{family}Config")(**options)
    with seeded(0):
        head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
        model = getattr(transformers, family + head)(config).to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def losses(model, steps=4, lr=1e-2):
    """A few steps of training; the loss of each."""
    ids = torch.arange(22).reshape(2, 11) * 7 % 61
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    found = []
    for _ in range(steps):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def kinds_of(patch):
    found = {}
    for name in patch.patched:
        found[patch.reports[name].kind] = found.get(patch.reports[name].kind, 0) + 1
    return found


# (family, changes of the config, what is patched): two blocks and a final norm.
CASES = [
    (
        "Llama",
        {"attention_bias": True, "mlp_bias": True},
        {"rms_norm": 5, "rotary": 2, "gated_mlp": 2, "add_rms_norm": 2},
    ),
    (
        "Llama",
        {"hidden_act": "gelu_pytorch_tanh"},
        {"rms_norm": 5, "rotary": 2, "gated_mlp": 2, "add_rms_norm": 2},
    ),
    ("Llama", {"hidden_act": "gelu"}, {"rms_norm": 5, "rotary": 2, "add_rms_norm": 2}),
    ("Llama", {"hidden_act": "relu"}, {"rms_norm": 5, "rotary": 2, "add_rms_norm": 2}),
    ("Qwen2", {}, {"rms_norm": 5, "rotary": 2, "gated_mlp": 2, "add_rms_norm": 2}),
    ("Qwen3", {}, {"rms_norm": 9, "rotary": 2, "gated_mlp": 2, "add_rms_norm": 2}),
    ("Mistral", {}, {"rms_norm": 5, "rotary": 2, "gated_mlp": 2, "add_rms_norm": 2}),
    ("Gemma", {}, {"rms_norm": 5, "rotary": 2, "gated_mlp": 2, "add_rms_norm": 2}),
    ("Gemma2", {"sliding_window": 4}, {"rms_norm": 9, "rotary": 2, "gated_mlp": 2, "add_rms_norm": 2}),
    ("Gemma3", {"sliding_window": 4}, {"rms_norm": 13, "rotary": 2, "gated_mlp": 2, "add_rms_norm": 2}),
    ("Phi3", {}, {"rms_norm": 5, "rotary": 2, "gated_mlp": 2, "add_rms_norm": 2}),
    ("Mixtral", {"num_local_experts": 4}, {"rms_norm": 5, "rotary": 2, "add_rms_norm": 2}),
    ("GPT2", {}, {}),
]


@pytest.mark.parametrize(
    ("family", "changes", "expected"), CASES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_patched_models_train_as_they_did(transformers, family, changes, expected):
    if family == "Gemma3":
        pytest.importorskip("transformers.models.gemma3")
        model = _gemma3(transformers, changes)
    else:
        model = build(transformers, family, **changes)
    plain = copy.deepcopy(model)
    patch = patch_fused(model)
    assert kinds_of(patch) == expected, {n: r for n, r in patch.reports.items() if not r.agrees}
    torch.testing.assert_close(torch.tensor(losses(model)), torch.tensor(losses(plain)), rtol=2e-4, atol=2e-5)
    assert patch.undo() == ()
    assert not any("forward" in m.__dict__ for m in model.modules())


def _gemma3(transformers, changes):
    config = transformers.Gemma3TextConfig(**{**TINY, **changes})
    with seeded(0):
        return transformers.Gemma3ForCausalLM(config)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
        {
            "rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 32,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        },
    ],
    ids=lambda s: s["rope_type"],
)  # fmt: skip
def test_every_scaling_of_the_angles(transformers, scaling):
    model = build(transformers, "Llama", rope_parameters={**scaling, "rope_theta": 10000.0})
    ids = torch.arange(22).reshape(2, 11) * 7 % 61
    want = model(ids).logits
    patch = patch_fused(model, kinds=["rotary"])
    assert kinds_of(patch) == {"rotary": 2}
    torch.testing.assert_close(model(ids).logits, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "changes"), [("Cohere", {}), ("Glm", {}), ("Phi", {}), ("GPTNeoX", {}), ("StableLm", {})]
)
def test_other_rotary_functions_agree_or_are_left_alone(transformers, family, changes):
    model = build(transformers, family, **changes)
    ids = torch.arange(22).reshape(2, 11) * 7 % 61
    want = model(ids).logits
    patch = patch_fused(model)
    assert kinds_of(patch).get("rotary") == 2, {n: r for n, r in patch.reports.items() if not r.agrees}
    torch.testing.assert_close(model(ids).logits, want, rtol=1e-4, atol=1e-5)


def test_norms_of_a_patched_bf16_model_keep_their_bits(transformers):
    for family in ("Llama", "Gemma2"):
        model = build(transformers, family, torch.bfloat16)
        ids = torch.arange(22).reshape(2, 11) * 7 % 61
        want = model(ids).logits
        assert kinds_of(patch_fused(model, kinds=["rms_norm"]))["rms_norm"] >= 5
        assert_bit_equal(model(ids).logits, want)


def lora_model(transformers, peft, dtype=torch.float32, **options):
    model = build(transformers, "Llama", dtype, attention_bias=True)
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **options}
    with seeded(1):
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name or "lora_embedding_B" in name:
                    parameter.normal_(std=0.05)
    return model


def outputs(model, train=True):
    ids = torch.arange(22).reshape(2, 11) * 7 % 61
    model.train(train)
    with seeded(3):
        out = model(ids, labels=ids)
        names, params = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
        grads = torch.autograd.grad(out.loss, params, allow_unused=True)
    return out.logits.detach(), dict(zip(names, grads, strict=True))


def same(got, want, rtol=1e-4, atol=1e-6):
    torch.testing.assert_close(got[0], want[0], rtol=rtol, atol=max(atol, 1e-6 * float(want[0].abs().max())))
    for name, grad in want[1].items():
        if grad is None:
            assert got[1][name] is None, name
        else:
            torch.testing.assert_close(
                got[1][name], grad, rtol=rtol, atol=max(atol, rtol * float(grad.abs().max())), msg=name
            )


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 14),
        ({"use_rslora": True}, 14),
        ({"lora_dropout": 0.5}, 14),
        ({"use_dora": True}, 0),
        ({"lora_bias": True}, 0),
        ({"bias": "lora_only"}, 14),
        ({"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"k_proj": 32}}, 14),
        ({"target_modules": ["q_proj", "lm_head", "embed_tokens"]}, 3),
        ({"modules_to_save": ["lm_head"]}, 14),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)
def test_adapters_of_every_kind(transformers, peft, options, count):
    """The fused path, or the layer's own code where that is what it must be: PEFT's numbers either way."""
    plain = lora_model(transformers, peft, **options)
    model = copy.deepcopy(plain)
    patch = patch_fused(model, kinds=["lora"])
    assert kinds_of(patch).get("lora", 0) == count, {n: r for n, r in patch.reports.items() if not r.agrees}
    for train in (True, False):
        same(outputs(model, train), outputs(plain, train))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("adapter_dtype", [torch.float32, torch.bfloat16])
def test_adapters_on_a_bf16_base(transformers, peft, autocast, adapter_dtype):
    plain = lora_model(transformers, peft, torch.bfloat16)
    for name, parameter in plain.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(adapter_dtype)
    model = copy.deepcopy(plain)
    assert kinds_of(patch_fused(model, kinds=["lora"])) == {"lora": 14}
    context = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with context:
        got, want = outputs(model), outputs(plain)
    assert all(g.dtype == want[1][n].dtype for n, g in got[1].items())
    torch.testing.assert_close(got[0].float(), want[0].float(), rtol=0.1, atol=0.05)
    for name, grad in want[1].items():
        apart = (got[1][name].double() - grad.double()).norm() / grad.double().norm()
        assert apart < 0.1, name


def test_several_adapters_disabled_merged_and_unmerged(transformers, peft):
    plain = lora_model(transformers, peft)
    plain.add_adapter("second", peft.LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "up_proj"]))
    base = build(transformers, "Llama", attention_bias=True)
    model = copy.deepcopy(plain)
    patch_fused(model, kinds=["lora"])
    ids = torch.arange(22).reshape(2, 11) * 7 % 61
    for name in ("default", "second"):
        for m in (plain, model):
            m.set_adapter(name)
        same(outputs(model), outputs(plain))
    for m in (plain, model):
        m.base_model.set_adapter(["default", "second"])
    same(outputs(model), outputs(plain))
    with model.disable_adapter():
        assert_bit_equal(model(ids).logits, base(ids).logits)
    want = plain(ids).logits
    model.merge_adapter()
    torch.testing.assert_close(model(ids).logits, want, rtol=1e-4, atol=1e-4)
    model.unmerge_adapter()
    torch.testing.assert_close(model(ids).logits, want, rtol=1e-4, atol=1e-4)


def test_patched_adapters_train_as_they_did(transformers, peft):
    plain = lora_model(transformers, peft)
    model = copy.deepcopy(plain)
    assert kinds_of(patch_fused(model)) == {
        "rms_norm": 5,
        "rotary": 2,
        "gated_mlp": 2,
        "add_rms_norm": 2,
        "lora": 14,
    }
    got, want = losses(model, 8), losses(plain, 8)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=5e-4, atol=5e-5)
    assert want[-1] < want[0]
