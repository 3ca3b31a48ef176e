"""The block spec of a checkpoint that is not here, or not loaded: from its config and its files' headers.

A header names every tensor of a file with dtype and shape in its first kilobytes. On a hub those are read
with HTTP range requests, so that a plan for a model of hundreds of gigabytes takes a few small reads.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ts_core.errors import CheckpointError, OptionError, StorageError, TrainStreamError
from ts_core.spec import BlockSpec, ModelSpec, TensorSpec, block_of

from .checkpoint import INDEX_NAME, SINGLE_NAME
from .config_spec import FAMILIES, spec_from_config
from .gguf_header import read_gguf_header, spec_from_gguf
from .prequantized import recognise, take_modelopt
from .safetensors_reader import _BITS, MAX_HEADER_BYTES
from .stored_spec import Held, as_held, described, held_weights

__all__ = ["Fetch", "find_spec", "http_fetch", "read_header", "spec_from_headers"]

#: Given an address, first byte and end, returns these bytes, or fewer where the file ends.
Fetch = Callable[[str, int, int], bytes]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_SMALL = 32 << 20  # a config or an index
_FIRST = 64 << 10  # of a file: most headers are shorter
_MANY = 12  # files of a hub whose headers are read though the config says nearly the same
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_IN_STACK = re.compile(r"^((?:.*\.)?(?:layers|h|blocks|block|layer))\.([0-9]{1,6})\.(.+)$")
_EXPERT = re.compile(r"^(.*\bexperts)\.(\d+)\.(.+)$")
_KINDS = (
    ("head", re.compile(r"(^|\.)(lm_head|output|embed_out|score)\.")),
    ("embedding", re.compile(r"(^|\.)(embed_tokens|wte|tok_embeddings|word_embeddings|embed_in)\.")),
    ("norm", re.compile(r"(^|\.)(norm|final_layernorm|ln_f|final_layer_norm)\.")),
)


def http_fetch(address: str, begin: int, end: int) -> bytes:
    """Read a range of a file over HTTP.

    Args:
        address: Of the file.
        begin: First byte.
        end: One past the last.

    Returns:
        The bytes, fewer where the file ends.

    Raises:
        StorageError: The server does not have it or cannot be reached; with the status and what to do.
    """
    request = urllib.request.Request(address, headers={"Range": f"bytes={begin}-{end - 1}"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            data: bytes = answer.read(end if answer.status == 200 else end - begin)
            return data[begin:end] if answer.status == 200 else data  # the server knows no ranges
    except urllib.error.HTTPError as error:
        hint = {
            401: "it needs an account's consent or a token: download its config.json and give that",
            403: "it needs an account's consent or a token: download its config.json and give that",
            404: "there is no such model or file",
            416: "the file is empty",
        }.get(error.code, str(error.reason))
        raise StorageError(f"{address}: HTTP status {error.code}: {hint}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise StorageError(
            f"{address}: cannot be read ({reason}); give a folder or a config.json that is here"
        ) from error


def read_header(read: Callable[[int, int], bytes], where: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Read the header of a safetensors file.

    Args:
        read: Returns the bytes from begin to end, fewer where the file ends.
        where: For messages.

    Returns:
        Stored dtype and shape by name.

    Raises:
        CheckpointError: It is none.
    """

    def bad(what: str) -> CheckpointError:
        return CheckpointError(f"{where}: not a safetensors file: {what}")

    start = read(0, _FIRST)
    if len(start) < 8:
        raise bad(f"it has {len(start)} bytes")
    length = int.from_bytes(start[:8], "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise bad(f"its header would have {length} bytes")
    raw = start[8 : 8 + length]
    if len(raw) < length:
        raw += read(8 + len(raw), 8 + length)
    if len(raw) < length:
        raise bad("it ends within its header")
    try:
        header = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise bad(f"its header is not JSON ({str(error)[:100]})") from None
    if not isinstance(header, dict):
        raise bad("its header is not a JSON object")
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        stored, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
        sizes = isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**48 for n in shape)
        if stored not in _BITS or not sizes:
            raise bad(f"tensor {name[:100]!r} has dtype {str(stored)[:20]} and shape {str(shape)[:60]}")
        found[name] = (str(stored), tuple(shape))  # type: ignore[arg-type]
    return found


def _tensor(
    name: str, stored: str, shape: tuple[int, ...], use: str, active: float, plain: str | None = None
) -> TensorSpec:
    size = math.prod(shape) * _BITS[stored] // 8
    if stored in _FLOATS:
        dtype = plain or _FLOATS[stored]
        if name.rpartition(".")[2] in ("scales", "weight_scale", "weight_scale_inv", "absmax"):
            return TensorSpec(name, shape, dtype, "other", 1.0, False, "stored", size)
        return TensorSpec(name, shape, dtype, use, active)
    # Packed: elements by what a byte of it holds, never trained.
    last = name.rpartition(".")[2]
    packs = 2 if last in ("qweight", "blocks", "weight_packed") or stored in ("F4", "U8") else 1
    whole = last in ("weight", "blocks", "qweight", "weight_packed")
    logical = (*shape[:-1], shape[-1] * packs * max(_BITS[stored] // 8, 1)) if packs > 1 and shape else shape
    return TensorSpec(
        name,
        logical if whole else shape,
        "bfloat16",
        use if whole else "other",
        active,
        False,
        "stored",
        size,
    )


def spec_from_headers(
    headers: Mapping[str, tuple[str, tuple[int, ...]]],
    config: Mapping[str, Any] | None = None,
    *,
    source: str = "",
    dtype: str | None = None,
) -> ModelSpec:
    """Make the spec of a checkpoint from its headers.

    Args:
        headers: Stored dtype and shape of every tensor by name.
        config: Its config, for experts and attention heads.
        source: For people.
        dtype: Of plain weights once they are loaded; None is as they are stored.

    Returns:
        The spec; experts that are stored one by one are stacked.

    Raises:
        CheckpointError: There is no layer stack among the names.

    Example:
        >>> names = {f"layers.{i}.up_proj.weight": ("BF16", (32, 16)) for i in range(2)}
        >>> spec_from_headers(names).numel
        1024
    """
    values = {**(config or {}), **((config or {}).get("text_config") or {})}
    stacks: dict[str, int] = {}
    for name, (_, shape) in headers.items():
        if match := _IN_STACK.match(name):
            stacks[match[1]] = stacks.get(match[1], 0) + math.prod(shape)
    if not stacks:
        raise CheckpointError(f"{source or 'checkpoint'}: no layer stack among its {len(headers)} tensors")
    stack = max(stacks, key=lambda prefix: stacks[prefix])
    blocks: dict[int, dict[str, tuple[str, tuple[int, ...]]]] = {}
    around: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {}
    for name, (stored, shape) in headers.items():
        match = _IN_STACK.match(name)
        if match and match[1] == stack:
            blocks.setdefault(int(match[2]), {})[match[3]] = (stored, shape)
        else:
            kind = next((k for k, pattern in _KINDS if pattern.search(name)), "other")
            around.setdefault(kind, []).append((name, stored, shape))
    hidden = _hidden(values, around)
    notes: list[str] = []
    made = [
        _stack_block(f"{stack}.{index}", own, values, hidden, notes, dtype)
        for index, own in sorted(blocks.items())
    ]
    groups = {
        kind: BlockSpec(
            found[0][0].rpartition(".")[0] or kind,
            kind,
            tuple(_tensor(n, s, shape, _use(kind, shape), 1.0, dtype) for n, s, shape in found),
            hidden,
            kernels=1,
        )
        for kind, found in around.items()
    }
    first = [groups[kind] for kind in ("embedding", "other") if kind in groups]
    last = [groups[kind] for kind in ("norm", "head") if kind in groups]
    tied = "head" not in groups and "embedding" in groups
    return ModelSpec((*first, *made, *last), tied, source, tuple(dict.fromkeys(notes)))


def _use(kind: str, shape: tuple[int, ...]) -> str:
    return {"embedding": "gather", "head": "matmul"}.get(kind, "other") if len(shape) == 2 else "other"


def _hidden(values: Mapping[str, Any], around: Mapping[str, list[tuple[str, str, tuple[int, ...]]]]) -> int:
    for name in ("hidden_size", "n_embd", "d_model"):
        if isinstance(values.get(name), int):
            return int(values[name])
    for kind in ("norm", "embedding", "head"):
        for _, _, shape in around.get(kind, []):
            if shape:
                return shape[-1]
    return 0


def _stack_block(
    name: str,
    own: Mapping[str, tuple[str, tuple[int, ...]]],
    values: Mapping[str, Any],
    hidden: int,
    notes: list[str],
    dtype: str | None,
) -> BlockSpec:
    experts: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    tensors = []
    for inner, (stored, shape) in own.items():
        if match := _EXPERT.match(inner):
            experts.setdefault(f"{match[1]}.{match[3]}", []).append((stored, shape))
        elif len(shape) >= 3 and "experts" in inner:
            share = _share(values, shape[0], notes)
            tensors.append(_tensor(inner, stored, shape, "experts", share, dtype))
        else:
            matrix = len(shape) == 2 and inner.rpartition(".")[2] in ("weight", "qweight", "weight_packed")
            tensors.append(_tensor(inner, stored, shape, "matmul" if matrix else "other", 1.0, dtype))
    for inner, found in experts.items():
        stored, shape = found[0]
        share = _share(values, len(found), notes)
        tensors.append(_tensor(inner, stored, (len(found), *shape), "experts", share, dtype))
    if not hidden:
        hidden = min((min(t.shape) for t in tensors if len(t.shape) == 2), default=1)
    heads, size = values.get("num_attention_heads", values.get("n_head")), values.get("head_dim")
    query = heads * size if isinstance(heads, int) and isinstance(size, int) else hidden
    return block_of(name, tensors, hidden, query=query)


def _share(values: Mapping[str, Any], count: int, notes: list[str]) -> float:
    taken = values.get("num_experts_per_tok")
    if isinstance(taken, int) and 0 < taken <= count:
        return taken / count
    notes.append(f"how many of {count} experts a token takes is not said: 8 assumed")
    return min(8, count) / count


# ------------------------------------------------------------------------------------------------ finding


def find_spec(
    name: str, *, fetch: Fetch | None = None, endpoint: str | None = None, dtype: str | None = None
) -> ModelSpec:
    """Find out what a model consists of, without its weights.

    Args:
        name: A folder in the Hugging Face layout, a `config.json`, a safetensors or GGUF file, a folder with
            one of these, or the name of a model on a hub: then what is in the local cache, else a few small
            reads over HTTP.
        fetch: What reads them; None is `http_fetch`.
        endpoint: Of the hub; None is `HF_ENDPOINT` or the public one.
        dtype: Of plain weights once they are loaded, such as "bfloat16"; None is as they are stored.

    Returns:
        The spec. Weights that are stored packed count as `load_model` holds them: to the byte where the
        headers of the files are here, else by their method's rule.

    Raises:
        OptionError: It is none of these.
        CheckpointError: A file is broken, or says too little.
        StorageError: A file or the hub cannot be read.
    """
    if not name.strip():
        raise OptionError(f"option model: expected a folder, a file or a name on the hub, given {name!r}")
    path = Path(name).expanduser()
    if path.is_dir():
        return _of_folder(path, name, dtype)
    if path.is_file():
        if path.suffix == ".json":
            config = _with(_json(_data(path), str(path)), dtype)
            return spec_from_config(config, source=name)
        if path.suffix == ".safetensors":
            return spec_from_headers(_local(path), source=name, dtype=dtype)
        if path.suffix == ".gguf":
            return spec_from_gguf(read_gguf_header(path), source=name, dtype=dtype)
        raise OptionError(
            f"option model: {name} is neither a config.json nor a safetensors or GGUF file nor a folder with "
            "one"
        )
    if not _HUB_ID.fullmatch(name) or path.suffix in (".json", ".safetensors", ".gguf"):
        raise OptionError(f"option model: there is no {name}{_near(path)}")
    cached = _cached(name)
    if cached is not None:
        return _of_folder(cached, name, dtype)
    base = (endpoint or os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    return _of_hub(name, f"{base}/{name}/resolve/main", fetch or http_fetch, dtype)


def _with(config: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Return a config whose plain weights have another dtype."""
    return config if dtype is None else {**config, "dtype": dtype}


def _data(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StorageError(error.errno, f"cannot be read: {error.strerror}", str(path)) from error


def _near(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return f" (nor a folder {path.parent})"
    near = difflib.get_close_matches(path.name, names, n=2)
    return f"; did you mean {' or '.join(str(path.parent / n) for n in near)}?" if near else ""


def _json(data: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not JSON: {str(error)[:100]}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: not a JSON object")
    return value


def _local(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    try:
        with path.open("rb") as file:

            def read(begin: int, end: int) -> bytes:
                file.seek(begin)
                return file.read(end - begin)

            return read_header(read, str(path))
    except OSError as error:
        raise StorageError(error.errno, f"cannot be read: {error.strerror}", str(path)) from error


def _of_folder(folder: Path, name: str, dtype: str | None = None) -> ModelSpec:
    config = None
    if (folder / "config.json").is_file():
        config = _json(_data(folder / "config.json"), str(folder / "config.json"))
        if described(config) is None and (stored := take_modelopt(folder)) is not None:
            config["quantization_config"] = stored
        config = _with(config, dtype)
        if described(config) is None and config.get("model_type") in FAMILIES:
            return spec_from_config(config, source=name)
    index = folder / INDEX_NAME
    files: Iterable[Path] = [folder / SINGLE_NAME] if (folder / SINGLE_NAME).is_file() else []
    if not files and index.is_file():
        files = [folder / shard for shard in _shards(_json(_data(index), str(index)), str(index))]
    if not files and config is None:
        files = sorted(folder.glob("*.safetensors"))
    if files and all(file.is_file() for file in files):
        headers = {key: value for file in files for key, value in _local(file).items()}
        return _by_headers(headers, config, name, dtype)
    if config is None:
        return _of_gguf_folder(folder, name, dtype)
    return spec_from_config(config, source=name)


def _of_gguf_folder(folder: Path, name: str, dtype: str | None) -> ModelSpec:
    found = sorted(folder.glob("*.gguf"))
    if len(found) == 1:
        return spec_from_gguf(read_gguf_header(found[0]), source=str(found[0]), dtype=dtype)
    if found:
        shown = ", ".join(file.name for file in found[:4])
        raise OptionError(f"option model: {name} has {len(found)} GGUF files ({shown}); name one of them")
    raise OptionError(f"option model: {name} has neither a config.json nor a safetensors or GGUF file")


def _by_headers(
    headers: Mapping[str, tuple[str, tuple[int, ...]]],
    config: Mapping[str, Any] | None,
    name: str,
    dtype: str | None,
) -> ModelSpec:
    """Make the spec where the headers of all files are known."""
    stored = described(config) if config is not None else None
    if stored is None or config is None:
        return spec_from_headers(headers, config, source=name, dtype=dtype)
    try:
        held, hidden = held_weights(headers, stored)
    except TrainStreamError as error:
        if config.get("model_type") not in FAMILIES:
            raise
        spec = spec_from_config(config, source=name)
        return dataclasses.replace(spec, notes=(*spec.notes, f"load_model refuses it: {error}"))
    if config.get("model_type") in FAMILIES:
        plain = {key: value for key, value in config.items() if key != "quantization_config"}
        spec = spec_from_config(plain, source=name)
    else:
        whole = {key: entry for key, entry in headers.items() if key not in hidden}
        whole |= {key: ("BF16", _shape(weight, config)) for key, weight in held.items()}
        spec = spec_from_headers(whole, config, source=name, dtype=dtype)
    method = recognise(stored).method
    spec = as_held(spec, held, method)
    nbytes = sum(t.bytes for b in spec.blocks for t in b.tensors if t.codec != "none")
    count = sum(t.codec != "none" for b in spec.blocks for t in b.tensors)
    note = f"{count} weights stored as {method} are kept so and frozen: {nbytes / 2**30:.3g} GiB"
    return dataclasses.replace(spec, notes=(*spec.notes, note))


def _shape(weight: Held, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return a weight's sizes; where they are not told, a matrix as wide as the model, if that can be."""
    if weight.shape is not None:
        return weight.shape
    width = _hidden({**config, **(config.get("text_config") or {})}, {})
    return (weight.numel // width, width) if width and weight.numel % width == 0 else (weight.numel, 1)


def _shards(index: Mapping[str, Any], where: str) -> list[str]:
    named = index.get("weight_map")
    files = sorted(set(named.values())) if isinstance(named, dict) else []
    if not files or not all(isinstance(f, str) and re.fullmatch(r"[\w.-]+", f) for f in files):
        raise CheckpointError(f"{where}: weight_map does not name files of the same folder")
    return files


def _cached(name: str) -> Path | None:
    """Return the folder of the local cache that holds a hub's model, if its config is there."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    found = cache.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json")
    newest = max(found, key=lambda file: file.stat().st_mtime, default=None)
    return None if newest is None else newest.parent


def _of_hub(name: str, base: str, fetch: Fetch, dtype: str | None = None) -> ModelSpec:
    where = f"{base}/config.json"
    try:
        found = fetch(where, 0, _SMALL)
    except StorageError as error:
        raise StorageError(f"there is no {name!r} here, and the hub did not give it: {error}") from error
    config = _with(_json(found, where), dtype)
    known = config.get("model_type") in FAMILIES
    if known and described(config) is None:
        return spec_from_config(config, source=name)
    try:
        index = f"{base}/{INDEX_NAME}"
        files = _shards(_json(fetch(index, 0, _SMALL), index), index)
    except StorageError:
        files = [SINGLE_NAME]
    if known and len(files) > _MANY:
        return spec_from_config(config, source=name)  # by its method's rule: a read for each file takes long
    headers: dict[str, tuple[str, tuple[int, ...]]] = {}
    try:
        for file in files:

            def read(begin: int, end: int, file: str = file) -> bytes:
                return fetch(f"{base}/{file}", begin, end)

            headers |= read_header(read, f"{base}/{file}")
    except StorageError:
        return spec_from_config(config, source=name)  # no safetensors: what transformers makes of it
    spec = _by_headers(headers, config, name, dtype)
    return dataclasses.replace(spec, notes=(*spec.notes, f"headers of {len(files)} files read from {base}"))
