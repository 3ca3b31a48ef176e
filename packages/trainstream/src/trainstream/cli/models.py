"""The model of a run: loading the base, putting adapters on it, and saving what came out."""

from __future__ import annotations

import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ts_hf
from trainstream._folders import write_folder
from trainstream.cli.output import storage_errors
from trainstream.cli.settings import Settings
from ts_core.errors import ArgumentError, CheckpointError, DeviceError, OptionError
from ts_hf.receipt import not_printed
from ts_paging.files import FileTensors

__all__ = [
    "add_adapters",
    "base_name",
    "check_replaceable",
    "choose_device",
    "choose_dtype",
    "load_base",
    "save_decoded_base",
    "save_result",
]


@dataclass
class Base:
    """A loaded base model.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer.
        name: A short name for messages and folders.
        folder: Where transformers can load the original from, or None if it came out of a GGUF file.
    """

    model: Any
    tokenizer: Any
    name: str
    folder: str | None


def choose_device(wanted: str) -> torch.device:
    """Turn the setting into a device: `auto` is the first GPU, or else the CPU.

    Raises:
        OptionError: No such kind of device.
        DeviceError: PyTorch sees no such GPU here.
    """
    if wanted == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise OptionError(f"option device: expected auto, cpu, cuda or cuda:N, given {wanted!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise OptionError(f"option device: expected auto, cpu, cuda or cuda:N, given {wanted!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(
            f"option device={wanted}: PyTorch sees {torch.cuda.device_count()} GPUs here; use cpu"
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def choose_dtype(wanted: str, device: torch.device) -> tuple[torch.dtype, str]:
    """Pick the dtype to compute in.

    Args:
        wanted: `auto`, `bfloat16` or `float32`.
        device: Where the model computes.

    Returns:
        The dtype, and why, in a few words. On a CPU `auto` measures one matrix product in both: processors
        without bf16 instructions are several times slower in bf16 than in fp32.
    """
    if wanted != "auto":
        return getattr(torch, wanted), "as asked"
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        return (torch.bfloat16, "this GPU computes bf16") if fast else (torch.float32, "this GPU has no bf16")
    bf16, fp32 = _matmul_seconds(torch.bfloat16), _matmul_seconds(torch.float32)
    # bf16 must clearly win: it also rounds.
    dtype = torch.bfloat16 if bf16 * 1.2 < fp32 else torch.float32
    return dtype, f"measured: one product takes {bf16 * 1e3:.1f} ms in bf16, {fp32 * 1e3:.1f} ms in fp32"


def _matmul_seconds(dtype: torch.dtype) -> float:
    x, w = torch.ones(512, 768, dtype=dtype), torch.ones(2048, 768, dtype=dtype)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        torch.nn.functional.linear(x, w)
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def load_base(
    settings: Settings, dtype: torch.dtype, device: torch.device, weights: Path | None = None
) -> Base:
    """Load the base model and its tokenizer.

    Args:
        settings: `model`, `quantize` and `trust_remote_code` are used.
        dtype: What the weights are cast to, and what packed ones decode to.
        device: Where they go.
        weights: A folder with later weights of the same model (a checkpoint of a full fine-tune).

    Returns:
        The base. With a budget it is on the CPU, in files where RAM is not to hold it; `wrap` brings it to
        the device as the budgets allow.
    """
    files = _files_for(settings)
    if files is not None or settings.vram or os.environ.get("TRAINSTREAM_VRAM"):
        device = torch.device("cpu")
    builtin = _is_builtin(settings)
    source = str(ts_hf.smollm2_path()) if builtin else settings.model
    codec = settings.quantize or ("nf4" if settings.method == "lora" else "none")
    with not_printed():
        model = ts_hf.load_model(
            str(weights or source),
            quantize=codec,
            dtype=dtype,
            quant_block_size=settings.wrap.get("quant_block_size", 64),
            double_quant=settings.wrap.get("double_quant", False),
            device=device,
            disk_offload=files,
            trust_remote_code=settings.trust_remote_code,
        )
    tokenizer = ts_hf.load_tokenizer(source, trust_remote_code=settings.trust_remote_code)
    path = Path(source).expanduser()
    folder = None if path.is_file() else str(path.resolve()) if path.is_dir() else source
    return Base(model, tokenizer, base_name(settings), folder)


def _files_for(settings: Settings) -> FileTensors | None:
    """Make the files that hold the base, if RAM has a budget."""
    if not (settings.ram or os.environ.get("TRAINSTREAM_RAM")):
        return None
    budget = settings.disk or os.environ.get("TRAINSTREAM_DISK") or None
    return FileTensors(settings.wrap.get("disk_offload") or tempfile.gettempdir(), budget=budget)


def base_name(settings: Settings) -> str:
    """Return a short name of the base model, for messages and folders; nothing is loaded."""
    path = Path(settings.model).expanduser()
    name = "smollm2-135m" if _is_builtin(settings) else path.stem if path.is_file() else path.name
    return re.sub(r"[^\w.-]+", "-", name) or "model"


def _is_builtin(settings: Settings) -> bool:
    return settings.model.lower() in ("smollm2", "smollm2-135m")


def add_adapters(model: Any, settings: Settings, base_path: str) -> Any:
    """Freeze the base and put LoRA adapters on it.

    Args:
        model: The base model.
        settings: Rank, scale, dropout and target modules are used.
        base_path: What the adapter's config names as its base; plain PEFT loads the base from there.

    Returns:
        A `peft.PeftModel`. The adapters are fp32: they are small, and their updates would round away in bf16.

    Raises:
        ArgumentError: No module has such a name.
    """
    from peft import LoraConfig, get_peft_model

    targets: Any = list(settings.target_modules)
    if targets == ["all-linear"]:
        targets = "all-linear"
    # PEFT writes alpha as it is given; whole numbers look better whole.
    alpha = int(settings.lora_alpha) if settings.lora_alpha.is_integer() else settings.lora_alpha
    config = LoraConfig(
        r=settings.lora_r,
        lora_alpha=alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    model.config.name_or_path = model.name_or_path = base_path
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise ArgumentError(f"option target_modules={','.join(settings.target_modules)}: {error}") from error


# --------------------------------------------------------------------------------------------- saving


def _base_state_dict(base: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a base without the adapters that PEFT put into it; nothing is copied."""
    state: dict[str, torch.Tensor] = base.state_dict(keep_vars=True)
    return {
        name.replace(".base_layer.", "."): tensor for name, tensor in state.items() if ".lora_" not in name
    }


def save_decoded_base(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save the base exactly as it was trained on, for `transformers.AutoModelForCausalLM.from_pretrained`.

    Each packed weight is written as its decoded values in the dtype of the run, so the saved model computes
    what the packed one did. Written atomically.

    Args:
        model: A transformers model, or a PEFT model around one.
        tokenizer: Saved beside it.
        folder: Made, or replaced if a model is there already.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model

    def write(staging: Path) -> None:
        ts_hf.save_model(base, staging, state_dict=_base_state_dict(base))
        tokenizer.save_pretrained(staging)

    _write_model(folder, write)


def save_result(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save a PEFT adapter, or a whole model, with the tokenizer. Written atomically."""

    def write(staging: Path) -> None:
        save_weights(model, staging)
        tokenizer.save_pretrained(staging)

    _write_model(folder, write)


def save_weights(model: Any, folder: Path) -> None:
    """Write the trained weights in the standard format: a PEFT adapter, or safetensors of the model."""
    if hasattr(model, "peft_config"):
        # "auto" would ask the hub whether the vocabulary was resized; it is not.
        model.save_pretrained(folder, save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)  # an empty model card
    else:
        ts_hf.save_model(model, folder)


def load_adapter(model: Any, folder: Path) -> None:
    """Read the adapter that `save_weights` wrote into a model that has adapters already."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    result = set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"))
    missing = [name for name in result.missing_keys if ".lora_" in name]
    if missing or result.unexpected_keys:
        wrong = (missing + list(result.unexpected_keys))[0]
        raise CheckpointError(f"[resume] {folder}: the adapter does not fit the model, first at {wrong}")


def check_replaceable(folder: Path) -> None:
    """Refuse a folder for a model that holds something else, which saving would remove.

    Raises:
        OptionError: It is a file, or a folder with other content.
    """
    if folder.exists() and not (folder.is_dir() and _is_model(folder)):
        raise OptionError(f"{folder} exists and holds no model; choose another folder")


def _write_model(folder: Path, write: Callable[[Path], None]) -> None:
    check_replaceable(folder)
    with storage_errors(folder):
        write_folder(folder, write, hidden=True)


def _is_model(folder: Path) -> bool:
    empty = not any(folder.iterdir())
    return empty or any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
