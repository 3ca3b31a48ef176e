"""Tiny models of many architectures, and one training run of each beside the plain model.

`tools/make_support.py` makes the support matrix of the documentation out of `compare` and `isolated`.
"""

from __future__ import annotations

import copy
import tempfile
import warnings

import peft
import torch
import transformers
from torch import nn

import trainstream
from trainstream import packing
from trainstream.integrations.huggingface import wrap_hf
from trainstream.packing import pack_sequences
from ts_hf.packing import ISOLATING
from ts_quant import QuantizedTensor

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}
MIXED = ["sliding_attention", "full_attention"] * 2
#: Name in the documentation, config class, and what differs from `SMALL`; every layer type of the class.
ARCHITECTURES = {
    "Llama": ("LlamaConfig", {"head_dim": 8, "tie_word_embeddings": True}),
    "Mistral": ("MistralConfig", {"head_dim": 8, "sliding_window": 4}),
    "Mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen2": ("Qwen2Config", {}),
    "Qwen2-MoE": (
        "Qwen2MoeConfig",
        {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 2},
    ),
    "Qwen3": ("Qwen3Config", {"head_dim": 8}),
    "Qwen3-MoE": ("Qwen3MoeConfig", {**MOE, "num_experts": 4, "head_dim": 8, "mlp_only_layers": [0]}),
    "Gemma 2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 4, "layer_types": MIXED}),
    "Gemma 3": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 4, "layer_types": MIXED}),
    "Phi-3": ("Phi3Config", {}),
    "GPT-2": ("GPT2Config", {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "OLMo-2": ("Olmo2Config", {}),
    "Granite": ("GraniteConfig", {"logits_scaling": 4.0, "residual_multiplier": 0.5}),
    "DeepSeek-V3": ("DeepseekV3Config", LATENT),
    "gpt-oss": (
        "GptOssConfig",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
            "layer_types": MIXED,
        },
    ),
    "Cohere": ("CohereConfig", {"logit_scale": 0.3}),
    "SmolLM3": ("SmolLM3Config", {"no_rope_layers": [1, 0, 1, 0]}),
    "StarCoder2": ("Starcoder2Config", {"sliding_window": 4}),
}
PLACES = {
    "resident": {},
    "paged": {"param_offload": True, "recompute": [1], "activation_offload": True, "min_offload_bytes": 0},
}
TRAININGS = ("full", "LoRA")
CODECS = ("none", "nf4")
STEPS = 5


def make(name):
    """Build the model, float32, in train mode."""
    kind, changes = ARCHITECTURES[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**SMALL, **changes})
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    torch.manual_seed(1)
    for p in model.parameters():
        if p.dim() > 1:
            p.data.normal_(0, 0.1)  # far enough from zero for each part to matter
    return model.train()


def layers_of(model):
    decoder = model.get_decoder()
    return list(getattr(decoder, "layers", None) or decoder.h)


def trained(model, training, codec):
    """Choose what is trained, pack what is not, and put adapters in."""
    if training == "LoRA":
        model.requires_grad_(False)
    elif codec != "none":  # whole layers are trained between packed ones
        for index, layer in enumerate(layers_of(model)):
            layer.requires_grad_(index % 2 == 0)
    if codec != "none":
        trainstream.quantize_model(model, codec, blocks=layers_of(model))
    return model


def adapters(model):
    torch.manual_seed(2)
    conv = any(type(module).__name__ == "Conv1D" for module in model.modules())
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", fan_in_fan_out=conv
    )
    model = peft.get_peft_model(model, config)
    torch.manual_seed(3)
    for key, p in model.named_parameters():
        if "lora_B" in key:
            p.data.normal_(0, 0.05)
    return model


def decoded(model):
    """The same values without packing."""
    for module in model.modules():
        for key, p in list(module._parameters.items()):
            if isinstance(p, QuantizedTensor):
                module._parameters[key] = nn.Parameter(p.dequantize().clone(), requires_grad=False)
    return model


def steps(model, optimizer):
    """Train, and return the losses and every gradient of every step by name."""
    losses, gradients = [], []
    for step in range(STEPS):
        ids = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients


def adamw(model):
    # A key's bias has no gradient but rounding, which a small eps would turn into whole steps.
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-5)


def near(ours, plain, name, share=1e-4):
    plain = plain.detach().double()
    size = float(plain.norm())
    off = float((ours.detach().cpu().double() - plain).norm())
    assert off <= share * size + 1e-7, f"{name}: off by {off:.2e} of {size:.2e}"


def compare(name, training, codec, place):
    """Train five steps beside the plain model; raise `AssertionError` where they differ.

    Returns:
        How many matrices are packed.
    """
    ours = trained(make(name), training, codec)
    count = sum(isinstance(p, QuantizedTensor) for p in ours.parameters())
    plain = decoded(copy.deepcopy(ours))
    if training == "LoRA":
        ours, plain = adapters(ours), adapters(plain)
    with tempfile.TemporaryDirectory() as folder:
        ours, optimizer = wrap_hf(
            ours, adamw(ours), quantize=None, disk_offload=folder, profile=False, **PLACES[place]
        )
        try:
            with warnings.catch_warnings():
                # A router's choices leave an expert without a token in some step.
                warnings.simplefilter("ignore", UserWarning)
                losses, gradients = steps(ours, optimizer)
            expected, wanted = steps(plain, adamw(plain))
            for step, (got, want) in enumerate(zip(gradients, wanted, strict=True)):
                assert abs(losses[step] - expected[step]) <= 1e-5 * abs(expected[step]), (
                    f"loss of step {step}"
                )
                assert got.keys() == want.keys(), f"gradients of step {step}: {got.keys() ^ want.keys()}"
                for key, gradient in got.items():
                    near(gradient, want[key], f"gradient of {key}, step {step}")
            left = dict(plain.named_parameters())
            for key, p in ours.named_parameters():
                if p.requires_grad:
                    near(p, left[key], key)
        finally:
            trainstream.unwrap(ours)
    return count


@torch.no_grad()
def isolated(name):
    """Check that documents of a packed row do not reach each other; `OptionError` if they do.

    Returns:
        Whether the model keeps them apart by itself; if not, `isolate_documents` (the Trainer and the command
        line call it) does.
    """
    model = make(name).eval()
    text = model.config.get_text_config().model_type
    generator = torch.Generator().manual_seed(4)
    documents = [torch.randint(3, 97, (length,), generator=generator) for length in (7, 5)]
    batch = pack_sequences(documents, 12)

    def run(ids):
        return model(input_ids=ids, position_ids=batch["position_ids"], use_cache=False).logits[0, 7:]

    changed = batch["input_ids"].clone()
    changed[0, :7] = (changed[0, :7] + 13) % 97
    packing.isolate_documents(model)
    torch.testing.assert_close(run(changed), run(batch["input_ids"]), rtol=1e-5, atol=1e-5)
    return text in ISOLATING
