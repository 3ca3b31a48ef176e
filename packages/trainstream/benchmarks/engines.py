"""The engines that `compare.py` compares: how each builds its model, its optimizer and its step.

Weights are random in real shapes, and the same in every engine. Libraries are imported where an engine needs
them, so one that is missing fails alone. Full fine-tunes compute under bf16 autocast over fp32 weights, but
for those whose weights are bf16; the head and its loss are each engine's own best.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

__all__ = ["ENGINES", "SHAPES", "Engine", "Setting", "build", "is_ours", "is_streamed", "make", "vocabulary"]

#: Hidden, intermediate, layers, heads, key-value heads, vocabulary, tied head. Qwen2 but for `FAMILIES`.
SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 512, False),
    "tiny-llama": (64, 128, 2, 4, 2, 512, False),
    "0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
    "8b-llama": (4096, 14336, 32, 32, 8, 128256, False),
    "8b-qwen3": (4096, 12288, 36, 32, 8, 151936, False),
    "14b": (5120, 13824, 48, 40, 8, 152064, False),
}
#: Shape -> (class prefix in transformers, name of the family, more of its config).
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tiny-llama": ("Llama", "llama", {}),
    "8b-llama": ("Llama", "llama", {"rms_norm_eps": 1e-5, "rope_theta": 500000.0}),
    "8b-qwen3": ("Qwen3", "qwen3", {"head_dim": 128, "rope_theta": 1000000.0}),
}
QWEN2: tuple[str, str, dict[str, Any]] = ("Qwen2", "qwen2", {})
SHAPE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
#: Engine -> what it is. Words after "trainstream": a codec, and options of `wrap()` or a format of weights.
ENGINES = {
    "trainstream": "everything fits: weights on the GPU; a full fine-tune has optimizer state on the host",
    "trainstream-nf4": "the same over a frozen nf4 base",
    "trainstream-int8": "the same over a frozen int8 base",
    "trainstream-stream": "every block paged and recomputed; with --vram-budget as wrap() decides",
    "trainstream-stream-nf4": "the same over a frozen nf4 base",
    "trainstream-stream-keep": "every block paged, activations kept",
    "trainstream-stream-keep-nf4": "the same over a frozen nf4 base",
    "trainstream-offload": "activations of every block but the last on the host",
    "trainstream-recompute": "every block recomputed",
    "trainstream-full": "fp32 weights under bf16 autocast, options by --wrap",
    "trainstream-full-eager": "the same, updated during backward (OffloadAdamW's eager=True)",
    "trainstream-full-bf16": "bf16 weights, fp32 masters on the host, options by --wrap",
    "stock": "plain PyTorch / PEFT, resident, fused AdamW",
    "stock-ckpt": "the same with transformers' checkpointing",
    "stock-save-on-cpu": "the same under torch.autograd.graph.save_on_cpu(pin_memory=True)",
    "bnb": "bitsandbytes nf4 and PEFT",
    "bnb-ckpt": "the same with checkpointing",
    "bnb-liger": "the same with checkpointing and Liger kernels",
    "torchao": "torchao's CPUOffloadOptimizer over fused AdamW",
    "torchao-grads": "the same with offload_gradients=True",
    "deepspeed": "DeepSpeed ZeRO-2, optimizer on the host, bf16, checkpointing",
}


@dataclasses.dataclass
class Setting:
    """What an engine is asked for.

    Attributes:
        engine: A name of `ENGINES`.
        shape: A name of `SHAPES`.
        kind: "lora" or "full".
        batch: Rows of a step.
        device: "cuda" or "cpu".
        lr: Learning rate.
        wrap: Options for `trainstream.wrap`.
        clip: Largest norm of the gradients, or None.
        vram_budget: For engines that stream, of which `wrap()` then decides what is paged.
        equality: Eager attention, for runs that are compared bit for bit.
        bare: Model and loss alone: no optimizer, nothing wrapped.
    """

    engine: str
    shape: str
    kind: str
    batch: int
    device: str
    lr: float = 1e-4
    wrap: dict[str, Any] = dataclasses.field(default_factory=dict)
    clip: float | None = None
    vram_budget: str | None = None
    equality: bool = False
    bare: bool = False

    @property
    def weight_dtype(self) -> str:
        """How trained or frozen weights are stored."""
        low = self.kind == "lora" or self.engine == "deepspeed" or self.engine.endswith("-bf16")
        return "bf16" if low else "fp32"

    @property
    def autocast(self) -> bool:
        """Whether the step computes under bf16 autocast."""
        return self.kind == "full" and self.weight_dtype == "fp32"

    @property
    def options(self) -> dict[str, Any]:
        """Options for `trainstream.wrap`, those that the engine's name stands for included."""
        if not is_ours(self.engine):
            return {}
        words = self.engine.split("-")[1:]
        named: dict[str, Any] = {}
        if self.vram_budget is not None and "stream" in words:
            named["vram_budget"] = self.vram_budget
        elif "stream" in words:
            named |= {"param_offload": True, "recompute": "keep" not in words}
        named |= {"activation_offload": True} if "offload" in words else {}
        named |= {"recompute": True} if "recompute" in words else {}
        if self.kind == "lora":
            named["quantize"] = next((word for word in words if word in ("nf4", "int8")), "none")
        if self.clip is not None:
            named["max_grad_norm"] = self.clip
        named |= self.wrap
        if "vram_budget" in named:
            named["device"] = self.device
        return named


@dataclasses.dataclass
class Engine:
    """What a step is made of.

    Attributes:
        model: Has the trained parameters.
        optimizer: Whatever the engine updates with.
        loss_of: Forward pass of token ids, and the loss. Takes positions of packed documents and labels too.
        backward: Takes the loss.
        step: Clips, updates and drops the gradients.
    """

    model: Any
    optimizer: Any
    loss_of: Callable[..., Any]
    backward: Callable[[Any], None]
    step: Callable[[], None]

    @property
    def trained(self) -> list[Any]:
        """The trained parameters."""
        return [p for p in self.model.parameters() if p.requires_grad]


def is_ours(engine: str) -> bool:
    """Whether an engine is TrainStream's."""
    return engine.startswith("trainstream")


def is_streamed(engine: str) -> bool:
    """Whether an engine pages weights."""
    return "stream" in engine.split("-")[1:]


def vocabulary(shape: str) -> int:
    """Number of different tokens."""
    return SHAPES[shape][SHAPE_KEYS.index("vocab_size")]


def build(shape: str, dtype, device: str, replace=None, home: str | None = None, attention: str = "sdpa"):
    """Make the model with random weights drawn on `device` and kept on `home` (None: there).

    ``replace(linear)`` swaps each block linear.
    """
    import torch
    import transformers

    prefix, _, more = FAMILIES.get(shape, QWEN2)
    given = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "use_cache": False, **more}
    sizes = dict(zip(SHAPE_KEYS, SHAPES[shape], strict=True))
    config = getattr(transformers, f"{prefix}Config")(**sizes, **given)
    config._attn_implementation = attention
    home = home or device
    with torch.device("meta"):
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).to(dtype)
    generator = torch.Generator(device).manual_seed(0)
    for name, module in list(model.named_modules()):
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() == 1:
                value = torch.full(parameter.shape, float(key == "weight"), dtype=dtype, device=device)
            else:
                value = torch.empty(parameter.shape, dtype=dtype, device=device).normal_(
                    0, 0.02, generator=generator
                )
            module._parameters[key] = torch.nn.Parameter(value.to(home), requires_grad=True)
            del value  # an exception that somebody keeps holds this frame, and the last one with it
        if replace is not None and isinstance(module, torch.nn.Linear) and ".layers." in name:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, replace(module))
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(home)
    return model


def add_lora(model):
    """LoRA r=16 on all seven projections, frozen base."""
    import peft
    import torch

    torch.manual_seed(0)  # the adapters start alike in every engine
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def bnb_linear(linear):
    """The same linear as bitsandbytes' NF4 layer."""
    import bitsandbytes as bnb
    import torch

    layer = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=linear.bias is not None,
        compute_dtype=torch.bfloat16, compress_statistics=False, quant_type="nf4", device="meta",
    )  # fmt: skip
    layer.weight = bnb.nn.Params4bit(
        linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=False, module=layer
    )
    if linear.bias is not None:
        layer.bias = torch.nn.Parameter(linear.bias.data, requires_grad=False)
    return layer.to(linear.weight.device)


def checkpointed(model):
    """Non-reentrant activation checkpointing, as transformers switches it on."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    return model


def make(setting: Setting) -> Engine:
    """Build an engine."""
    import torch

    engine = setting.engine
    if engine == "bnb-liger":
        import liger_kernel.transformers as liger

        getattr(liger, f"apply_liger_kernel_to_{FAMILIES.get(setting.shape, QWEN2)[1]}")()
    options = setting.options
    at_home = "vram_budget" in options and not setting.bare
    model = build(
        setting.shape,
        torch.bfloat16 if setting.weight_dtype == "bf16" else torch.float32,
        setting.device,
        bnb_linear if engine.startswith("bnb") else None,
        home="cpu" if at_home else None,
        attention="eager" if setting.equality else "sdpa",
    )
    if engine.endswith("ckpt") or engine in ("bnb-liger", "deepspeed"):
        model = checkpointed(model)
    if engine.startswith("bnb"):
        model.is_loaded_in_4bit = True
    if setting.kind == "lora":
        model = add_lora(model)
    model.train()
    if at_home and setting.device == "cuda":
        torch.cuda.empty_cache()  # weights were drawn there
    if engine == "deepspeed" and not setting.bare:
        return _deepspeed(setting, model)
    loss_of = _computing(setting, _own_loss(model) if is_ours(engine) else _stock_loss(model))
    if setting.bare:
        return Engine(model, None, loss_of, _backward, _nothing)
    trained = [p for p in model.parameters() if p.requires_grad]
    if engine.startswith("torchao"):
        return _torchao(setting, model, trained, loss_of)
    fused = setting.device == "cuda" and not at_home
    optimizer = torch.optim.AdamW(trained, lr=setting.lr, fused=fused)
    if is_ours(engine):
        import trainstream

        if engine.endswith("-eager"):
            optimizer = trainstream.OffloadAdamW(trained, lr=setting.lr, eager=True)
        model, optimizer = trainstream.wrap(model, optimizer, **options)

    def step() -> None:
        if setting.clip is not None and not is_ours(engine):
            torch.nn.utils.clip_grad_norm_(trained, setting.clip)
        optimizer.step()
        optimizer.zero_grad()

    return Engine(model, optimizer, loss_of, _backward, step)


def _backward(loss: Any) -> None:
    loss.backward()


def _nothing() -> None:
    pass


def _own_loss(model: Any) -> Callable[..., Any]:
    from ts_hf.losses import backbone, causal_lm_loss_for

    def loss_of(ids: Any, positions: Any = None, labels: Any = None) -> Any:
        hidden = backbone(model)(input_ids=ids, position_ids=positions).last_hidden_state
        return causal_lm_loss_for(model, hidden, ids if labels is None else labels)

    return loss_of


def _stock_loss(model: Any) -> Callable[..., Any]:
    def loss_of(ids: Any, positions: Any = None, labels: Any = None) -> Any:
        return model(input_ids=ids, position_ids=positions, labels=ids if labels is None else labels).loss

    return loss_of


def _computing(setting: Setting, loss_of: Callable[..., Any]) -> Callable[..., Any]:
    """The loss under autocast, or with saved tensors on the host, where the engine has them so."""
    import torch

    if setting.engine == "stock-save-on-cpu":

        def saving(*rows: Any) -> Any:
            with torch.autograd.graph.save_on_cpu(pin_memory=setting.device == "cuda"):
                return loss_of(*rows)

        return saving
    if not setting.autocast:
        return loss_of

    def cast(*rows: Any) -> Any:
        with torch.autocast(setting.device, dtype=torch.bfloat16):
            return loss_of(*rows)

    return cast


def _torchao(setting: Setting, model: Any, trained: list[Any], loss_of: Callable[..., Any]) -> Engine:
    import torch
    from torchao.optim import CPUOffloadOptimizer

    optimizer = CPUOffloadOptimizer(
        trained, torch.optim.AdamW, offload_gradients=setting.engine == "torchao-grads", lr=setting.lr,
        fused=True,
    )  # fmt: skip

    def step() -> None:
        if setting.clip is not None:
            # Gradients are on their way before their norm is known: what it updates with is the host's copy.
            optimizer.stream.synchronize()
            held = [optimizer.param_d2h_map.get(p, p) for p in trained]
            torch.nn.utils.clip_grad_norm_(held, setting.clip)
        optimizer.step()
        optimizer.zero_grad()

    return Engine(model, optimizer, loss_of, _backward, step)


def _deepspeed(setting: Setting, model: Any) -> Engine:
    """One process that is its own group; the library makes its host optimizer with the compiler there."""
    local = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({**local, "MASTER_PORT": str(20000 + os.getpid() % 20000)})
    import deepspeed

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": setting.batch,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": setting.lr, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
    }
    if setting.clip is not None:
        config["gradient_clipping"] = setting.clip
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    return Engine(engine, optimizer, _stock_loss(engine), engine.backward, engine.step)
