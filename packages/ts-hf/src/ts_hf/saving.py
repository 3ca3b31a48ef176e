"""Writes safetensors files one tensor at a time, so that saving a model needs RAM for one tensor of it.

A file is `N` (8 bytes, unsigned little-endian), a JSON header of `N` bytes padded with spaces to a multiple
of 8, then the data: the tensors in the order of the reference implementation (widest dtype first, then by
name), without gaps, so each begins at a multiple of its element size
(https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ts_core.errors import ArgumentError, ArgumentTypeError, message
from ts_core.guard import guard_of
from ts_core.headroom import require_ram
from ts_core.memory import format_bytes, parse_bytes
from ts_quant import QuantizedTensor

from .build import import_transformers
from .checkpoint import INDEX_NAME, SINGLE_NAME
from .safetensors_reader import MAX_HEADER_BYTES, STORED_NAMES

__all__ = ["save_model", "save_safetensors"]

MAX_SHARD_SIZE = "5GB"
#: What transformers writes into the header of a model.
METADATA = {"format": "pt"}
# The reference implementation's order of dtypes, from the last in a file to the first.
_ORDER = (
    *("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
    *("I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64"),
)
_RANK = {name: rank for rank, name in enumerate(_ORDER)}
# Handed to the system at once; a mapped tensor is read while it is written.
_CHUNK_BYTES = 64 << 20


def save_safetensors(
    tensors: Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write tensors to a safetensors file, one after the other.

    What `safetensors.torch.save_file` writes, byte for byte, but no tensor is copied that lies in RAM or in a
    mapped file as the format wants it; one on a GPU, packed or with gaps is copied while its turn lasts. A
    packed tensor is written as the values it decodes to.

    Args:
        tensors: Name to tensor.
        path: The file. It gets its name when it is complete (not yet synced to the disk), so one that is
            there already stays whole until then.
        metadata: Texts kept in the header.

    Returns:
        Bytes of the file.

    Raises:
        ArgumentTypeError: A value is no tensor, a name or a metadata entry no text, or a dtype that the
            format does not have.
        ArgumentError: Tensors share memory, or a tensor has no values (meta device).
        OSError: The file cannot be written.

    Example:
        >>> import safetensors.torch, tempfile
        >>> path = tempfile.mkdtemp() + "/a.safetensors"
        >>> save_safetensors({"w": torch.arange(3.0)}, path)
        80
        >>> safetensors.torch.load_file(path)
        {'w': tensor([0., 1., 2.])}
    """
    plain = plain_tensors(tensors)
    return write_file(plain, path, metadata, lambda name: contextlib.nullcontext(plain[name]))


def plain_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors without graph and guard, checked: what `write_file` writes."""
    plain = {name: _plain(name, tensor) for name, tensor in tensors.items()}
    _refuse_shared(plain)
    return plain


def write_file(
    plain: Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None,
    claim: Callable[[str], contextlib.AbstractContextManager[torch.Tensor]],
) -> int:
    """Write what `plain_tensors` returned; `claim` gives the values of one while they are written."""
    final = Path(path)
    order = sorted(plain, key=lambda name: (-_RANK[STORED_NAMES[plain[name].dtype]], name))
    header = _header(plain, order, metadata)
    working = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        with working.open("wb") as file:
            file.write(len(header).to_bytes(8, "little"))
            file.write(header)
            for name in order:
                with claim(name) as tensor:
                    write_tensor(file, tensor)
            size = file.tell()
        working.replace(final)
    except BaseException:
        with contextlib.suppress(OSError):
            working.unlink(missing_ok=True)
        raise
    return size


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without graph and guard; a paged weight is waited for, and nobody else notices."""
    what = f"tensors[{name!r}]"
    if not isinstance(name, str):
        raise ArgumentTypeError(message("save_safetensors", "tensors", "names that are texts", name))
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(message("save_safetensors", what, "a tensor", type(tensor).__name__))
    if tensor.dtype not in STORED_NAMES or tensor.layout != torch.strided:
        given = f"{tensor.dtype}, {tensor.layout}"
        raise ArgumentTypeError(
            message("save_safetensors", what, "a strided tensor of a stored dtype", given)
        )
    if tensor.device.type == "meta":
        raise ArgumentError(
            message("save_safetensors", what, "a tensor with values", "one on the meta device")
        )
    if isinstance(tensor, QuantizedTensor):
        return tensor.detach()
    entry = guard_of(tensor)
    if entry is not None:
        entry.wait()
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (steps + 1) * tensor.itemsize


def _refuse_shared(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors whose memory overlaps: read back, they would be two."""
    spans: dict[torch.device, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() and not isinstance(tensor, QuantizedTensor):
            spans.setdefault(tensor.device, []).append((*_span(tensor), name))
    for found in spans.values():
        found.sort()
        for before, after in itertools.pairwise(found):
            if after[0] < before[1]:
                raise ArgumentError(
                    message(
                        "save_safetensors",
                        "tensors",
                        "tensors that do not share memory",
                        f"{before[2]!r} and {after[2]!r}",
                        "Leave one of a tied pair out, or clone it",
                    )
                )


def _header(
    tensors: Mapping[str, torch.Tensor], order: list[str], metadata: Mapping[str, str] | None
) -> bytes:
    entries: dict[str, Any] = {}
    if metadata is not None:
        if not all(isinstance(text, str) for pair in metadata.items() for text in pair):
            raise ArgumentTypeError(message("save_safetensors", "metadata", "texts", metadata))
        entries["__metadata__"] = dict(metadata)
    end = 0
    for name in order:
        if name == "__metadata__":
            raise ArgumentError(
                message("save_safetensors", "tensors", "another name", name, "The format uses it itself")
            )
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.itemsize
        entries[name] = {
            "dtype": STORED_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ArgumentError(
            message(
                "save_safetensors",
                "tensors",
                f"a header of at most {format_bytes(MAX_HEADER_BYTES)}",
                format_bytes(len(text)),
            )
        )
    return text


def write_tensor(file: BinaryIO, tensor: torch.Tensor) -> None:
    """Write the values of one tensor, row by row."""
    if not tensor.numel():
        return
    if isinstance(tensor, QuantizedTensor):
        tensor = tensor.dequantize()
    with torch.no_grad():
        tensor = tensor.to("cpu").resolve_conj().resolve_neg().contiguous()
    values: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    raw = memoryview(values)
    for begin in range(0, len(raw), _CHUNK_BYTES):
        file.write(raw[begin : begin + _CHUNK_BYTES])


# ----------------------------------------------------------------------------------------- whole models


def save_model(
    model: Any,
    folder: str | os.PathLike[str],
    *,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> list[Path]:
    """Write a transformers model as `model.save_pretrained` does, with RAM for one tensor.

    `config.json`, `generation_config.json`, and `model.safetensors`, or shards and their index where the
    weights are larger than `max_shard_size`. Tied weights are written once, packed ones decoded. Conversions
    that transformers made while it loaded the weights (fused experts) are undone.

    Args:
        model: A transformers model without adapters.
        folder: Made if it is not there.
        state_dict: The weights to write; None: the model's own.
        max_shard_size: Bytes of one file, as an integer or "5GB".

    Returns:
        The files with weights, in order.

    Raises:
        ArgumentTypeError: Not a transformers model.
        OSError: A file cannot be written.

    Example:
        >>> save_model(model, "path/to/folder")  # doctest: +SKIP
        [PosixPath('path/to/folder/model.safetensors')]
    """
    written = []
    for path, tensors in model_files(model, folder, state_dict=state_dict, max_shard_size=max_shard_size):
        save_safetensors(tensors, path, METADATA)
        written.append(path)
    return written


def model_files(
    model: Any,
    folder: str | os.PathLike[str],
    *,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> list[tuple[Path, dict[str, torch.Tensor]]]:
    """Write what `save_model` writes beside the weights, and return which weights make which file."""
    if not isinstance(model, import_transformers().PreTrainedModel):
        raise ArgumentTypeError(message("save_model", "model", "a transformers model", type(model).__name__))
    limit = parse_bytes(max_shard_size, name="max_shard_size")
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    _save_configs(model, place)
    state = _state_to_save(model, state_dict)
    largest = max((tensor.numel() * tensor.itemsize for tensor in state.values()), default=0)
    require_ram("save_model", largest, "One tensor is written at a time. Free what else this process holds.")
    shards = list(_split(state, limit))
    names = [SINGLE_NAME]
    if len(shards) > 1:
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        total = sum(tensor.numel() * tensor.itemsize for tensor in state.values())
        count = model.num_parameters()
        if state_dict is not None:
            count = sum(tensor.numel() for tensor in state.values())
        index = {
            "metadata": {"total_parameters": count, "total_size": total},
            "weight_map": {key: name for name, shard in zip(names, shards, strict=True) for key in shard},
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (place / INDEX_NAME).write_text(text, encoding="utf-8")
    return [
        (place / name, {key: state[key] for key in shard}) for name, shard in zip(names, shards, strict=True)
    ]


def _save_configs(model: Any, folder: Path) -> None:
    """Write the configs as `save_pretrained` does; of a custom model its code too."""
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    if model.is_remote_code():
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, str(folder), config=model.config)
    model.config.save_pretrained(str(folder))
    if model.can_generate():
        model.generation_config.save_pretrained(str(folder))


def _state_to_save(model: Any, given: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """Return what is written under which name: no copies, tied weights once."""
    from transformers.core_model_loading import revert_weight_conversion

    # keep_vars: the Parameters themselves, so that paged ones can be waited for when their turn comes.
    state: dict[str, Any] = model.state_dict(keep_vars=True) if given is None else dict(given)
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        state.pop(name, None)
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    for target, source in tied.items():
        if target in state and source in state and _same(state[target], state[source]):
            del state[target]
    with torch.no_grad():
        converted: dict[str, Any] = revert_weight_conversion(model, state)
    return {name: value for name, value in converted.items() if isinstance(value, torch.Tensor)}


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two entries of a state dict are one tensor, the Parameter itself or what `detach()` gives."""
    if a is b or isinstance(a, QuantizedTensor) or isinstance(b, QuantizedTensor):
        return a is b
    with torch._C.DisableTorchFunctionSubclass():
        return a.device == b.device and a.shape == b.shape and 0 != a.data_ptr() == b.data_ptr()


def _split(state: Mapping[str, torch.Tensor], limit: int) -> Iterator[list[str]]:
    """Cut the tensors, in their order, into shards of at most `limit` bytes; a larger one is alone."""
    alone: list[list[str]] = []
    current: list[str] = []
    size = 0
    for name, tensor in state.items():
        nbytes = tensor.numel() * tensor.itemsize
        if nbytes > limit:
            alone.append([name])
            continue
        if size + nbytes > limit and current:
            alone.append(current)
            current, size = [], 0
        current.append(name)
        size += nbytes
    yield from alone
    if current or not alone:
        yield current
