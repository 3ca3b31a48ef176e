"""`load_model`: a causal LM from a folder, the hub or a GGUF file, packed while it is read."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ts_core import registry
from ts_core.dtypes import dtype_name, parse_dtype
from ts_core.errors import CheckpointError, DeviceError, DoesNotFitError, OptionError
from ts_core.headroom import require_ram
from ts_core.memory import format_bytes, host_budget
from ts_core.options import boolean, choice, fraction, integer
from ts_paging.files import FileTensors
from ts_quant.codecs import resolve as resolve_codec
from ts_quant.error_fit import fit_numel
from ts_quant.precision import NEXT_CODEC, keep_precise_share

from .build import build_model, import_transformers, initialize, load_config, move_buffers
from .checkpoint import Checkpoint, Source, resolve
from .offload import FileHome, open_files, ram_limit
from .packed_checkpoint import PackedCheckpoint
from .prequantized import Scheme, recognise, take_quantization
from .receipt import log_receipt, print_receipt, receipt_of
from .streaming import OUTSIDE, Packing, UnknownTablesError, make_plan, packable, stream

__all__ = ["load_model", "load_tokenizer", "packed_bytes"]

LOGGER = logging.getLogger("trainstream")
CODECS = ("int8", "nf4")
_NAMED = ("fp8", "mxfp8", "fp8_row", "fp8_block", "nvfp4")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WITH_LESS_RAM = "Give disk_offload=DIR or quantize='nf4', free memory, or take a smaller model"
# What a checkpoint may hold although no model has a place for it any more.
_KNOWN_LEFTOVERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.attn\.(masked_)?bias$")


@dataclass(frozen=True)
class _Options:
    quantize: str | None
    dtype: torch.dtype
    block_size: int
    ram_fraction: float
    trust_remote_code: bool
    device: torch.device
    files: FileTensors | None
    fit: tuple[int, int] = (0, 1)
    double_quant: bool = False
    keep_precise: float = 0.0

    @property
    def extras(self) -> list[str]:
        """What was asked for beside a codec."""
        values = self.fit[0], self.double_quant, self.keep_precise
        names = "error_rank", "double_quant", "keep_precise"
        return [f"{name}={value}" for name, value in zip(names, values, strict=True) if value]


def packed_bytes(shape: int | Sequence[int], codec: str, block_size: int, double_quant: bool = False) -> int:
    """Return the bytes that a tensor takes in a codec: codes and scales.

    Args:
        shape: Its shape, or its number of values where they lie in one dimension.
        codec: "int8", "nf4", "mxfp8", "fp8_row", "fp8_block" or "nvfp4"; "fp8": what this GPU computes.
        block_size: Values per scale.
        double_quant: Whether the scales are quantized too.

    Returns:
        Bytes.

    Example:
        >>> packed_bytes(128, "nf4", 64), packed_bytes(128, "int8", 64)
        (72, 136)
    """
    found: Any = registry.codec(resolve_codec(choice("codec", codec, (*CODECS, *_NAMED))))
    return int(found.packed_bytes(shape, found.meta(block_size, double_quant=double_quant)))


def _quantize_option(value: object) -> str | None:
    chosen = choice("quantize", value, ("auto", "none", None, False, *CODECS, *_NAMED))
    return resolve_codec(chosen) if isinstance(chosen, str) and chosen != "none" else None


def _check_double_quant(codec: str | None, double_quant: bool) -> bool:
    """Refuse a codec without scales to quantize before anything is read."""
    if boolean("double_quant", double_quant) and codec in registry.codecs():
        found: Any = registry.codec(str(codec))
        found.meta(64, double_quant=True)
    return double_quant


def _device_option(value: object) -> torch.device:
    try:
        device: torch.device = torch.device(value)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        raise OptionError(f"option device: expected 'cpu', 'cuda' or 'cuda:N', given {value!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise OptionError(f"option device: expected 'cpu', 'cuda' or 'cuda:N', given {value!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError("[load_model] device='cuda': PyTorch sees no CUDA device here; use device='cpu'")
    return device


def _free_bytes() -> int:
    """RAM that the model may take: what is free, and no more than the environment's budget."""
    free, limit = host_budget().available_bytes, ram_limit()
    return free if limit is None else min(free, limit)


def _sizes(model: Any) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return shape and bytes of every parameter, tied ones once."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    return {
        n: (tuple(p.shape), p.numel() * p.dtype.itemsize)
        for n, p in model.named_parameters()
        if n not in tied
    }


def _bytes_as(codec: str | None, model: Any, names: frozenset[str], options: _Options) -> int:
    """Return what the model takes with the matrices of these names packed, at most."""
    packed = other = 0
    for name, (shape, size) in _sizes(model).items():
        if codec and name in names:
            packed += packed_bytes(shape, codec, options.block_size, options.double_quant)
            other += fit_numel(shape, options.fit[0]) * options.dtype.itemsize
        else:
            other += size
    return other + packed + (int(options.keep_precise * packed) if codec in NEXT_CODEC else 0)


def _make_packing(
    model: Any, options: _Options, kept: str | None = None, *, in_memory: bool = False
) -> tuple[Packing, str]:
    """Decide what is stored how and where, before any weight is read; `kept`: as it is in the checkpoint."""
    names, skipped = packable(model)
    files = options.files
    # A RAM budget below the model means files even where none were asked for.
    limit = None if in_memory else ram_limit()
    if files is None and limit is not None and options.device.type == "cpu":
        packed = options.quantize if options.quantize != "auto" else None
        need = _bytes_as(packed, model, names, options)
        files = open_files(tempfile.gettempdir()) if need > limit else None
    home = None
    if files is not None:
        home = FileHome(files, frozenset(n for n, why in skipped.items() if why == OUTSIDE))
    if kept is not None:
        return Packing(None, options.block_size, names, skipped, home), _kept_reason(options, kept)
    codec, reason = _choose_codec(model, names, options, home is not None)
    if home is None and options.device.type == "cpu" and all(p.is_meta for p in model.parameters()):
        require_ram("load_model", _bytes_as(codec, model, names, options), _WITH_LESS_RAM)
    if codec is None:
        reason = "; ".join((reason, *(f"{extra} ignored: nothing is packed" for extra in options.extras)))
    elif options.keep_precise and codec not in NEXT_CODEC:
        reason += f"; keep_precise={options.keep_precise} ignored: {codec} has no codec above it"
    packing = Packing(codec, options.block_size, names, skipped, home, options.fit)
    packing.double_quant = options.double_quant
    packing.share = options.keep_precise if codec in NEXT_CODEC else 0.0
    return packing, reason


def _kept_reason(options: _Options, method: str) -> str:
    """Say that the checkpoint decides, and what of the caller's options that leaves aside."""
    reason = f"kept as published: {method}"
    chosen = [f"quantize={options.quantize!r}"] if options.quantize not in ("auto", None) else []
    asked = chosen + options.extras
    if asked:
        reason += f"; {', '.join(asked)} ignored: the checkpoint's weights are quantized already"
    return reason


def _choose_codec(
    model: Any, names: frozenset[str], options: _Options, in_files: bool
) -> tuple[str | None, str]:
    """Pick the codec for quantize="auto": none while everything fits, else int8, else nf4."""
    if options.quantize != "auto":
        return options.quantize, "asked for"
    if in_files:
        return None, "the weights are in files"
    full = _bytes_as(None, model, names, options)
    free = _free_bytes()
    room = free * options.ram_fraction
    if full <= room:
        return None, f"{format_bytes(full)} fits in {format_bytes(int(room))}"
    for codec in CODECS:
        packed = _bytes_as(codec, model, names, options)
        if packed <= room:
            return codec, f"{format_bytes(full)} does not fit in {format_bytes(int(room))}, {codec} does"
    if packed > free:
        raise DoesNotFitError(
            f"[load_model] the model takes {format_bytes(full)} in {dtype_name(options.dtype)} and "
            f"{format_bytes(packed)} in nf4; this process may use {format_bytes(free)} of RAM. Give "
            "disk_offload=DIR to keep the weights in files, free memory, raise the container's limit, or "
            "take a smaller model"
        )
    return "nf4", f"only nf4 fits, beyond ram_fraction={options.ram_fraction}"


def _ignored(model: Any, names: set[str], attribute: str) -> set[str]:
    patterns = getattr(model, attribute, None) or ()
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


def _missing(model: Any, loaded: set[str]) -> set[str]:
    """Return the parameters without a value that tying will not give one."""
    buffers = {name for name, _ in model.named_buffers()}
    missing = {name for name in model.state_dict() if name not in loaded and name not in buffers}
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    groups: dict[str, set[str]] = {}
    for target, source in tied.items():
        groups.setdefault(source, {source}).add(target)
    for group in groups.values():
        if group - missing:
            missing -= group
    return {name for name in missing if not name.endswith("_extra_state")}


def _fail_missing(model: Any, folder: Path, missing: set[str]) -> None:
    lost = sorted(missing - _ignored(model, missing, "_keys_to_ignore_on_load_missing"))
    if lost:
        raise CheckpointError(
            f"{folder}: {len(lost)} parameters of {type(model).__name__} are in no file of this checkpoint, "
            f"first: {lost[0]!r}"
        )


def _fill(
    model: Any, folder: Path, packing: Packing, options: _Options, scheme: Scheme | None = None
) -> dict[str, Any]:
    """Stream the checkpoint of a folder into an empty model; return what the receipt says about it."""
    opened = Checkpoint(folder) if scheme is None else PackedCheckpoint(folder, scheme, options.dtype)
    with opened as checkpoint:
        plan = make_plan(model, checkpoint)
        if all(target.converter is None for target in plan.targets):
            # Found before anything is read; with conversions the names are known only afterwards.
            _fail_missing(model, folder, _missing(model, {target.name for target in plan.targets}))
        loaded = stream(model, checkpoint, plan, packing, dtype=options.dtype, device=options.device)
        tensors, stored = len(checkpoint), checkpoint.nbytes
        aside = checkpoint.aside if isinstance(checkpoint, PackedCheckpoint) else []
    missing = _missing(model, loaded)
    _fail_missing(model, folder, missing)
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    absent = {name for name in {*tied, *tied.values()} if name not in loaded} | missing
    initialize(model, missing, options.device)
    model.tie_weights(missing_keys=absent, recompute_mapping=False)
    model._weight_conversions = [entry for entry in plan.mapping if entry.was_used()]
    buffers = [
        name for name in model.state_dict() if name not in loaded and name not in absent and name not in tied
    ]
    return {
        "tensors": tensors,
        "checkpoint_bytes": stored,
        "unused": plan.unused,
        "aside": aside,
        "initialized": sorted(missing),
        "buffers_from_init": [name for name in buffers if name not in dict(model.named_parameters())],
    }


def _warn_unused(model: Any, unused: list[str], folder: Path) -> None:
    known = _ignored(model, set(unused), "_keys_to_ignore_on_load_unexpected")
    surprising = [
        name for name in unused if name not in known and not any(re.search(p, name) for p in _KNOWN_LEFTOVERS)
    ]
    if surprising:
        LOGGER.warning(
            "%s: %d tensors of the checkpoint have no place in %s and were not used, first: %s",
            folder,
            len(surprising),
            type(model).__name__,
            surprising[0],
        )


def _load_generation_config(model: Any, folder: Path) -> None:
    if not model.can_generate():
        return
    config_class = import_transformers().GenerationConfig
    if (folder / "generation_config.json").is_file():
        model.generation_config = config_class.from_pretrained(str(folder))
    else:
        # Old checkpoints keep generation settings in config.json.
        model.generation_config = config_class.from_pretrained(
            str(folder), config_file_name="config.json", _from_model_config=True
        )


def _from_pretrained(folder: Path, config: Any, options: _Options, why: Exception) -> Any:
    """Load with transformers' own loader, where its internals are not the ones known here."""
    if options.files is not None:
        raise OptionError(
            "option disk_offload is not available with transformers "
            f"{import_transformers().__version__}, whose conversion tables are elsewhere ({why})"
        )
    if options.quantize not in (None, "auto"):
        raise OptionError(
            f"option quantize={options.quantize!r} is not available with transformers "
            f"{import_transformers().__version__}, whose conversion tables are elsewhere ({why}); available: "
            "None"
        )
    return (
        import_transformers()
        .AutoModelForCausalLM.from_pretrained(
            str(folder),
            config=config,
            dtype=options.dtype,
            use_safetensors=True,
            trust_remote_code=options.trust_remote_code,
        )
        .to(options.device)
    )


def _nothing_read() -> dict[str, Any]:
    lists: dict[str, Any] = {name: [] for name in ("unused", "initialized", "buffers_from_init")}
    return {"tensors": 0, "checkpoint_bytes": 0, **lists}


def _load_random(config: Any, options: _Options) -> tuple[Any, Packing, dict[str, Any], str]:
    from .build import SMALL_NUMEL
    from .random_init import fill_random

    def empty() -> Any:
        trusted = options.trust_remote_code
        return build_model(config, options.dtype, trust_remote_code=trusted, keep_numel=SMALL_NUMEL)

    drawn_from = torch.get_rng_state()
    model = empty()
    packing, reason = _make_packing(model, options)
    measures = packing.share
    fill_random(model, packing, options.device)
    if measures and packing.choose_precise(name for name, _ in model.named_parameters()):
        # The same values once more, now that it is known which of them take more bits.
        torch.set_rng_state(drawn_from)
        del model
        model = empty()
        fill_random(model, packing, options.device)
    return model, packing, _nothing_read(), reason


def _load_folder(
    folder: Path, config: Any, options: _Options, scheme: Scheme | None
) -> tuple[Any, Packing, dict[str, Any], str]:
    model = build_model(config, options.dtype, trust_remote_code=options.trust_remote_code)
    packing, reason = _make_packing(model, options, None if scheme is None else scheme.method)
    try:
        found = _fill(model, folder, packing, options, scheme)
    except UnknownTablesError as why:
        if scheme is not None:
            raise OptionError(
                f"[load_model] a checkpoint stored as {scheme.method} is not available with transformers "
                f"{import_transformers().__version__}, whose conversion tables are elsewhere ({why})"
            ) from why
        model = _from_pretrained(folder, config, options, why)
        packing = Packing(None, options.block_size, frozenset(), {})
        return model, packing, _nothing_read(), "loaded by transformers"
    _warn_unused(model, found["unused"], folder)
    _load_generation_config(model, folder)
    return model, packing, found, reason


def _folder_of(source: Source, dtype: torch.dtype | None) -> Path:
    """Return a source as a folder; with dtype None the weights in it do not matter."""
    if source.kind == "folder":
        return source.path
    from .gguf import converted_folder, tokenizer_folder

    return tokenizer_folder(source.path) if dtype is None else converted_folder(source.path, dtype=dtype)


def _load_packed_gguf(
    path: Path, options: _Options, overrides: dict[str, Any]
) -> tuple[Any, Packing, dict[str, Any], str] | None:
    """Load a GGUF file as it is stored, unless plain weights are asked for or it is none of the known."""
    from .gguf_packed import load_packed

    if options.quantize is None:
        return None
    return load_packed(
        path,
        options.dtype,
        options.device,
        overrides,
        lambda model, kept: _make_packing(model, options, kept),
    )


def _load(
    name_or_path: Any, options: _Options, random: bool, overrides: dict[str, Any]
) -> tuple[str, Any, Packing, dict[str, Any], str]:
    """Find the model, build and fill it; returns its name, itself, and what was stored how and why."""
    if isinstance(name_or_path, import_transformers().PretrainedConfig):
        if not random:
            raise OptionError("option random_weights: a config has no weights; pass random_weights=True")
        source, shown = name_or_path, type(name_or_path).__name__
    else:
        trusted = options.trust_remote_code
        found_at = resolve(name_or_path, trust_remote_code=trusted, weights=not random)
        shown = found_at.name
        if found_at.kind == "gguf" and not random:
            packed = _load_packed_gguf(found_at.path, options, dict(overrides))
            if packed is not None:
                return shown, *packed
        source = _folder_of(found_at, options.dtype)
    config = load_config(source, overrides, options.trust_remote_code)
    stored = take_quantization(config, source if isinstance(source, Path) else None)
    scheme = None if stored is None or random else recognise(stored)
    if random:
        return shown, *_load_random(config, options)
    return shown, *_load_folder(source, config, options, scheme)


def load_model(
    name_or_path: Any,
    quantize: str | bool | None = "auto",
    dtype: str | torch.dtype = torch.bfloat16,
    quant_block_size: int = 64,
    keep_precise: float | str | bool | None = 0,
    error_rank: int = 0,
    error_iters: int = 1,
    double_quant: bool = False,
    disk_offload: str | os.PathLike[str] | FileTensors | None = None,
    random_weights: bool = False,
    ram_fraction: float = 0.85,
    trust_remote_code: bool = False,
    device: str | torch.device = "cpu",
    **config_overrides: Any,
) -> Any:
    """Load a causal language model, packing its frozen block weights while it is read.

    Tensors are read one at a time, so RAM need not hold the unpacked model: the peak is the finished model
    plus what one parameter needs. With `quantize=None` the result computes exactly what
    `AutoModelForCausalLM.from_pretrained` does. Only safetensors and GGUF files are read, never pickle.

    Args:
        name_or_path: A folder in the Hugging Face layout, a hub id, a `.gguf` file, or with `random_weights`
            also a transformers config.
        quantize: "int8", "nf4", "fp8" (the layout that this GPU computes, or one named: "mxfp8", "fp8_row",
            "fp8_block") or "nvfp4" packs the matrices inside the blocks (never embeddings, output head,
            norms, biases) and freezes them; None, "none" or False packs nothing; "auto" packs only if the
            model in `dtype` exceeds `ram_fraction` of the RAM this process may use, int8 before nf4. A
            checkpoint whose weights are quantized already keeps them as they are stored, whatever this says,
            and the log tells; of a GGUF file None makes plain weights, for training all of them.
        dtype: bf16, fp16 or fp32, as a torch dtype or by name; every floating weight is cast to it.
        quant_block_size: Values per scale; even.
        keep_precise: Extra bytes, as a fraction up to 0.5 of what the packed matrices take: nf4 matrices
            become int8 and nvfp4 ones fp8 within them, chosen by measured error as `quantize_model` does.
            Those are read twice. "auto" and True are 0.05; 0, False and None are off.
        error_rank: Rank of a fit of each packed matrix's error, kept with it: `wrap()` and
            `ts_quant.init_lora_from_error` start LoRA adapters from it. 0: none.
        error_iters: How often a matrix is quantized and its fit made anew.
        double_quant: Quantize the scales of int8 and nf4 too: 8 bits each, and one fp32 per 256 of them.
        disk_offload: An existing directory, or a `ts_paging.files.FileTensors`. The weights (those of the
            blocks, and of at least 1 MiB outside them; packed ones packed) are written to private files there
            while they are read, and are mapped from them: RAM never holds more than one tensor of the model,
            and "auto" packs nothing. What the checkpoint holds as it is wanted, on the same file system, is
            used where it is instead: nothing is copied, the file is never written, and it must not be
            written by others while the model is used (it may be removed or replaced); what is written to such
            a weight goes to memory. The files are `model.trainstream_files`; they go with the model. Only
            with device="cpu" in this release. Where the environment sets a budget (`TRAINSTREAM_RAM`) below
            the model's size, files in the system's temporary directory are used even if this is None.
        random_weights: Draw the weights as the model class does instead of reading any; only `config.json` is
            needed. `torch.manual_seed` fixes them.
        ram_fraction: Share of the free RAM that "auto" lets the model take.
        trust_remote_code: Let Python code of the checkpoint run.
        device: "cpu" or a CUDA device: where the tensors end up, and where they are packed.
        **config_overrides: Attributes of the config to change, and `attn_implementation`.

    Returns:
        The model in evaluation mode, with its `generation_config`, and `trainstream_receipt`, a dict:
        `tensors` read, `parameters`, `bytes_before` (all weights in `dtype`), `bytes_after`, `file_bytes` (of
        them in files), `adopted_bytes` (of these in the checkpoint's own), `share_packed` (of the
        parameters), `packed_tensors`, `kept_precise` (how many of them one codec up), `formats` (how many are
        stored in which codec), `decoded` (what was stored quantized and could not stay so: reason), `aside`
        (scales of activations), `skipped` (name: reason), `unused` (checkpoint tensors without a place),
        `initialized`, `quantize`, `reason`, `seconds`. It is printed (by rank 0) in a few lines, and logged
        in one to the logger "trainstream".

    Raises:
        OptionError: A bad option, an unknown config attribute, or a checkpoint quantized by a method that is
            not read; the message names it.
        CheckpointError: Damaged, contradictory or incomplete files; the message names the file.
        DoesNotFitError: With "auto", a model that exceeds RAM even in nf4.
        MissingDependencyError: transformers or gguf is missing.

    Example:
        >>> model = load_model("path/to/model", quantize="nf4")  # doctest: +SKIP
        >>> model.trainstream_receipt["share_packed"]  # doctest: +SKIP
        0.79
    """
    started = time.perf_counter()
    chosen = _quantize_option(quantize)
    options = _Options(
        chosen,
        parse_dtype(dtype, accepted=_DTYPES),
        integer("quant_block_size", quant_block_size, minimum=2, multiple_of=2),
        fraction("ram_fraction", ram_fraction),
        boolean("trust_remote_code", trust_remote_code),
        _device_option(device),
        None,
        (integer("error_rank", error_rank, minimum=0), integer("error_iters", error_iters, minimum=1)),
        _check_double_quant(chosen, double_quant),
        keep_precise_share(keep_precise),
    )
    if disk_offload is not None and options.device.type != "cpu":
        raise OptionError(
            f"option disk_offload with device={str(options.device)!r} is not available in this release; load "
            "with device='cpu' and let wrap(device=...) bring the weights to the GPU"
        )
    options = replace(options, files=open_files(disk_offload))
    random = boolean("random_weights", random_weights)
    shown, model, packing, found, reason = _load(name_or_path, options, random, dict(config_overrides))
    move_buffers(model, options.device)
    if packing.home is not None:
        packing.home.gather(model)
        model.trainstream_files = packing.home.files
    model.eval()
    model.config.name_or_path = model.name_or_path = shown
    model.trainstream_receipt = {
        "source": shown,
        **found,
        "dtype": dtype_name(options.dtype),
        "reason": reason,
        **receipt_of(model, packing, started),
    }
    log_receipt(model.trainstream_receipt)
    print_receipt(model.trainstream_receipt)
    return model


def load_tokenizer(name_or_path: str | os.PathLike[str], *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a folder, hub id or GGUF file.

    Args:
        name_or_path: As in `load_model`.
        trust_remote_code: Let Python code of the checkpoint run.

    Returns:
        A transformers tokenizer; a chat template is kept.

    Raises:
        CheckpointError: There is no tokenizer that transformers can read.

    Example:
        >>> tokenizer = load_tokenizer("path/to/model")  # doctest: +SKIP
    """
    source = resolve(name_or_path, trust_remote_code=trust_remote_code, weights=False)
    folder = _folder_of(source, None)
    try:
        return import_transformers().AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: no tokenizer could be loaded: {error}") from error
