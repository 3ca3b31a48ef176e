"""The block spec of a model from its config alone: shapes by arithmetic, without transformers and weights.

The families below are written out because that takes milliseconds, where importing transformers takes
seconds; their specs equal those of the models that transformers builds. Any other model is built, on the
meta device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ts_core.blocks import find_blocks
from ts_core.errors import CheckpointError, OptionError
from ts_core.spec import BlockSpec, ModelSpec, TensorSpec, block_of, spec_of

from .stored_spec import described, left_plain, rule_of

__all__ = ["FAMILIES", "spec_from_config"]


@dataclasses.dataclass(frozen=True)
class _Family:
    """How a family of decoders differs from Llama.

    Attributes:
        bias: Projections with a bias: ``q``, ``k``, ``v``, ``o``; "config" asks `attention_bias` and
            `mlp_bias`.
        heads_norm: Width of norms on queries and keys: ``head``, ``all`` or none.
        norms: Norms of a block.
        packed: Whether q, k, v and gate, up are one matrix each.
        moe: Name of the experts' module, where the config may route.
        shared: Name of the shared expert's module.
        latent: Whether attention is compressed (DeepSeek).
    """

    bias: str = "config"
    heads_norm: str = ""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    packed: bool = False
    moe: str = ""
    shared: str = ""
    latent: bool = False


_FOUR = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
FAMILIES: dict[str, _Family] = {
    "llama": _Family(),
    "mistral": _Family(bias=""),
    "qwen2": _Family(bias="qkv"),
    "qwen3": _Family(heads_norm="head"),
    "qwen3_moe": _Family(heads_norm="head", moe="mlp"),
    "qwen2_moe": _Family(bias="qkv", moe="mlp", shared="shared_expert"),
    "mixtral": _Family(bias="", moe="mlp"),
    "gemma": _Family(),
    "gemma2": _Family(norms=_FOUR),
    "gemma3_text": _Family(heads_norm="head", norms=_FOUR),
    "phi3": _Family(bias="", packed=True),
    "olmo2": _Family(heads_norm="all", norms=_FOUR[1::2]),
    "smollm3": _Family(),
    "granite": _Family(),
    "seed_oss": _Family(),
    "glm4_moe": _Family(heads_norm="config", moe="mlp", shared="shared_experts"),
    "deepseek_v3": _Family(moe="mlp", shared="shared_experts", latent=True),
    "kimi_k2": _Family(moe="mlp", shared="shared_experts", latent=True),
    "gpt_oss": _Family(bias="qkvo", moe="mlp"),
}
#: What transformers takes where a config does not say.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2_moe": {"num_experts": 60, "qkv_bias": True},
    "seed_oss": {"attention_bias": True, "head_dim": 128},
    "deepseek_v3": {"first_k_dense_replace": 3, "q_lora_rank": 1536},
    "kimi_k2": {"first_k_dense_replace": 3, "q_lora_rank": 1536},
    "glm4_moe": {"first_k_dense_replace": 1},
    "gpt_oss": {"head_dim": 64},
    "gemma": {"tie_word_embeddings": True, "head_dim": 256},
    "gemma2": {"tie_word_embeddings": True, "head_dim": 256},
    "gemma3_text": {"tie_word_embeddings": True, "head_dim": 256},
    "smollm3": {"tie_word_embeddings": True},
    "mistral": {"num_key_value_heads": 8},
}


class _Reader:
    """Reads numbers of a config, and says what is missing."""

    def __init__(self, config: Mapping[str, Any], kind: str) -> None:
        self.config = {
            **_DEFAULTS.get(kind, {}),
            **{k: v for k, v in config.items() if v is not None or k == "q_lora_rank"},
        }
        self.kind = kind

    def number(self, *names: str, otherwise: int | None = None) -> int:
        for name in names:
            value = self.config.get(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise CheckpointError(f"config: {name}: expected a whole number above 0, given {value!r}")
                return value
        if otherwise is None:
            raise CheckpointError(f"config of a {self.kind} model: {names[0]} is missing")
        return otherwise

    def flag(self, name: str, otherwise: bool = False) -> bool:
        return bool(self.config.get(name, otherwise))

    def optional(self, name: str) -> Any:
        return self.config.get(name)


def spec_from_config(config: Mapping[str, Any], *, source: str = "") -> ModelSpec:
    """Make the spec of a causal language model from its `config.json`.

    Args:
        config: The parsed file.
        source: For people.

    Returns:
        The spec. Weights that the checkpoint stores packed (`quantization_config`) count as stored.

    Raises:
        CheckpointError: A number is missing or none, or transformers cannot build the model.
        OptionError: It names no `model_type`.

    Example:
        >>> config = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "vocab_size": 100,
        ...           "num_hidden_layers": 2, "num_attention_heads": 2}
        >>> spec_from_config(config).numel
        8400
    """
    if not isinstance(config, Mapping):
        raise CheckpointError(f"config: expected a JSON object, given {type(config).__name__}")
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise OptionError("config: no model_type; it is not the config of a transformers model")
    if kind in FAMILIES:
        spec = _by_arithmetic(_Reader(config, kind), FAMILIES[kind], source)
    else:
        spec = _by_transformers(config, source)
    return _as_stored(spec, config)


def _dtype(config: Mapping[str, Any]) -> str:
    given = config.get("dtype") or config.get("torch_dtype")
    return given if given in ("bfloat16", "float16", "float32") else "bfloat16"


def _by_arithmetic(read: _Reader, family: _Family, source: str) -> ModelSpec:
    hidden, layers = read.number("hidden_size"), read.number("num_hidden_layers")
    vocabulary = read.number("vocab_size")
    kinds = read.optional("layer_types")
    blocks = []
    for index in range(layers):
        tensors, query = _block(read, family, index)
        blocks.append(
            block_of(
                f"model.layers.{index}",
                [dataclasses.replace(t, dtype=t.dtype or _dtype(read.config)) for t in tensors],
                hidden,
                query=query,
                window=_window(read, kinds, index),
            )
        )
    wide = TensorSpec("weight", (vocabulary, hidden), _dtype(read.config), "gather")
    tied = read.flag("tie_word_embeddings")
    head = () if tied else (dataclasses.replace(wide, use="matmul"),)
    around = (
        BlockSpec("model.embed_tokens", "embedding", (wide,), hidden, kernels=1),
        BlockSpec("model.norm", "norm", (TensorSpec("weight", (hidden,), wide.dtype),), hidden, kernels=1),
        BlockSpec("lm_head", "head", head, hidden, kernels=1),
    )
    return ModelSpec((around[0], *blocks, *around[1:]), tied, source)


def _window(read: _Reader, kinds: Any, index: int) -> int:
    window = read.optional("sliding_window")
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        return 0
    if isinstance(kinds, list) and index < len(kinds):
        return window if "sliding" in str(kinds[index]) else 0
    return window if read.kind == "mistral" else 0


def _block(read: _Reader, family: _Family, index: int) -> tuple[list[TensorSpec], int]:
    """Return the weights of one block in the order of use, and the width of its queries."""
    tensors: list[TensorSpec] = []

    def add(name: str, *shape: int, use: str = "", active: float = 1.0, dtype: str = "") -> None:
        kind = use or ("matmul" if len(shape) == 2 else "other")
        tensors.append(TensorSpec(name, shape, dtype, kind, active))

    hidden = read.number("hidden_size")
    if family.norms[0] == "input_layernorm":
        add("input_layernorm.weight", hidden)
    query = (_latent if family.latent else _attention)(read, family, add)
    if "post_attention_layernorm" in family.norms:
        add("post_attention_layernorm.weight", hidden)
    if "pre_feedforward_layernorm" in family.norms:
        add("pre_feedforward_layernorm.weight", hidden)
    if family.moe and _is_routed(read, index):
        _experts(read, family, add)
    else:
        _mlp(read, family, "mlp", read.number("intermediate_size"), add)
    if "post_feedforward_layernorm" in family.norms:
        add("post_feedforward_layernorm.weight", hidden)
    return tensors, query


_Add = Callable[..., None]


def _attention(read: _Reader, family: _Family, add: _Add) -> int:
    hidden, heads = read.number("hidden_size"), read.number("num_attention_heads")
    groups = read.number("num_key_value_heads", otherwise=heads)
    size = read.number("head_dim", otherwise=max(hidden // heads, 1))
    widths = {"q": heads * size, "k": groups * size, "v": groups * size}
    everything = family.bias == "config" and read.flag("attention_bias")
    biased = family.bias if family.bias != "config" else "qkvo" if everything else ""
    if read.kind == "seed_oss":
        biased = ("qkv" if everything else "") + ("o" if read.flag("attention_out_bias") else "")
    if read.kind == "qwen2_moe" and not read.flag("qkv_bias"):
        biased = ""
    if read.kind == "glm4_moe":
        biased = biased.replace("o", "")
    if family.packed:
        add("self_attn.qkv_proj.weight", sum(widths.values()), hidden)
    for name, width in widths.items() if not family.packed else ():
        add(f"self_attn.{name}_proj.weight", width, hidden)
        if name in biased:
            add(f"self_attn.{name}_proj.bias", width)
    norm = family.heads_norm
    if norm == "head" or (norm == "config" and read.flag("use_qk_norm")):
        add("self_attn.q_norm.weight", size)
        add("self_attn.k_norm.weight", size)
    elif norm == "all":
        add("self_attn.q_norm.weight", widths["q"])
        add("self_attn.k_norm.weight", widths["k"])
    if read.kind == "gpt_oss":
        add("self_attn.sinks", heads)
    add("self_attn.o_proj.weight", hidden, widths["q"])
    if "o" in biased:
        add("self_attn.o_proj.bias", hidden)
    return widths["q"]


def _latent(read: _Reader, family: _Family, add: _Add) -> int:
    """Attention over compressed keys and values (arXiv:2412.19437)."""
    hidden, heads = read.number("hidden_size"), read.number("num_attention_heads")
    plain = read.number("qk_nope_head_dim", otherwise=128)
    turned = read.number("qk_rope_head_dim", otherwise=64)
    value, rank = read.number("v_head_dim", otherwise=128), read.number("kv_lora_rank", otherwise=512)
    low = read.optional("q_lora_rank") or 0
    if low:
        add("self_attn.q_a_proj.weight", low, hidden)
        add("self_attn.q_a_layernorm.weight", low)
        add("self_attn.q_b_proj.weight", heads * (plain + turned), low)
    else:
        add("self_attn.q_proj.weight", heads * (plain + turned), hidden)
    add("self_attn.kv_a_proj_with_mqa.weight", rank + turned, hidden)
    add("self_attn.kv_a_layernorm.weight", rank)
    add("self_attn.kv_b_proj.weight", heads * (plain + value), rank)
    add("self_attn.o_proj.weight", hidden, heads * value)
    return heads * value


def _is_routed(read: _Reader, index: int) -> bool:
    dense = read.optional("mlp_only_layers")
    if isinstance(dense, list) and index in dense:
        return False
    if read.kind in ("deepseek_v3", "kimi_k2", "glm4_moe"):
        return index >= int(read.optional("first_k_dense_replace") or 0)
    step = read.optional("decoder_sparse_step")
    return not isinstance(step, int) or step < 1 or (index + 1) % step == 0


def _experts(read: _Reader, family: _Family, add: _Add) -> None:
    hidden = read.number("hidden_size")
    count = read.number("n_routed_experts", "num_local_experts", "num_experts")
    share = read.number("num_experts_per_tok") / count
    oss = read.kind == "gpt_oss"
    own = "intermediate_size" if oss or read.kind == "mixtral" else "moe_intermediate_size"
    inner = read.number(own)
    fine = "float32" if read.kind in ("deepseek_v3", "kimi_k2", "glm4_moe") else ""
    router = "router" if oss else "gate"
    add(f"mlp.{router}.weight", count, hidden, use="other", dtype=fine)
    if oss:
        add("mlp.router.bias", count)
    up = (hidden, 2 * inner) if oss else (2 * inner, hidden)
    add("mlp.experts.gate_up_proj", count, *up, use="experts", active=share)
    if oss:
        add("mlp.experts.gate_up_proj_bias", count, 2 * inner, use="experts", active=share)
    down = (inner, hidden) if oss else (hidden, inner)
    add("mlp.experts.down_proj", count, *down, use="experts", active=share)
    if oss:
        add("mlp.experts.down_proj_bias", count, hidden, use="experts", active=share)
    if family.shared:
        shared = read.optional("n_shared_experts")
        wide = inner * int(shared if shared is not None else 1)
        if read.kind == "qwen2_moe":
            wide = read.number("shared_expert_intermediate_size")
        _mlp(read, dataclasses.replace(family, packed=False), f"mlp.{family.shared}", wide, add)
    if read.kind == "qwen2_moe":
        add("mlp.shared_expert_gate.weight", 1, hidden)


def _mlp(read: _Reader, family: _Family, name: str, inner: int, add: _Add) -> None:
    hidden = read.number("hidden_size")
    bias = family.bias == "config" and read.flag("mlp_bias")
    if family.packed:
        add(f"{name}.gate_up_proj.weight", 2 * inner, hidden)
    for part, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
        if family.packed and part != "down":
            continue
        add(f"{name}.{part}_proj.weight", *shape)
        if bias:
            add(f"{name}.{part}_proj.bias", shape[0])


def _by_transformers(config: Mapping[str, Any], source: str) -> ModelSpec:
    """Build the model on the meta device: seconds for the import, no memory for the weights."""
    from .build import import_transformers

    transformers = import_transformers()
    kind = config["model_type"]
    plain = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    try:
        made = transformers.AutoConfig.for_model(kind, **plain)
    except ValueError as error:
        near = ", ".join(sorted(FAMILIES))
        raise CheckpointError(
            f"config: model_type {kind!r} is unknown to transformers {transformers.__version__} "
            f"(known without it: {near})"
        ) from error
    dtype = getattr(torch, _dtype(config))
    failed: Exception | None = None
    for auto in ("AutoModelForCausalLM", "AutoModelForImageTextToText"):
        try:
            with torch.device("meta"):
                model = getattr(transformers, auto).from_config(made, dtype=dtype)
            find_blocks(model)
            return spec_of(model, source=source)
        except Exception as error:  # a model's own code raises what it likes
            failed = failed or error
    text = " ".join(str(failed).split())[:300]
    raise CheckpointError(f"config: transformers cannot build a {kind} model: {text}") from failed


def _as_stored(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """Let weights that the checkpoint stores packed count as stored."""
    stored = described(config)
    if stored is None:
        return spec
    method = str(stored.get("quant_method", "unnamed"))
    rule = rule_of(stored)
    if rule is None:
        return dataclasses.replace(
            spec, notes=(*spec.notes, f"stored as {method}, which is unknown here: counted as 16-bit")
        )
    uses = ("experts",) if method == "mxfp4" else ("matmul", "experts")
    blocks = []
    for block in spec.blocks:
        tensors = tuple(
            dataclasses.replace(t, codec=method, stored_bytes=rule(t.shape), trained=False)
            if block.kind == "block"
            and t.use in uses
            and len(t.shape) >= 2
            and "bias" not in t.name
            and not left_plain(stored, f"{block.name}.{t.name.removesuffix('.weight')}")
            else t
            for t in block.tensors
        )
        blocks.append(dataclasses.replace(block, tensors=tensors))
    packed = [t for block in blocks for t in block.tensors if t.codec != "none"]
    each = sum(t.bytes for t in packed) / max(sum(t.numel for t in packed), 1)
    note = f"stored as {method}: {each:.3g} bytes a weight, kept so and frozen"
    return dataclasses.replace(spec, blocks=tuple(blocks), notes=(*spec.notes, note))
