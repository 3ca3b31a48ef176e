"""Reads safetensors files one tensor at a time, trusting nothing in them.

A file is `N` (8 bytes, unsigned little-endian), a JSON header of `N` bytes, then the data. The header maps a
tensor's name to `{"dtype", "shape", "data_offsets": [begin, end]}`, offsets counted from the end of the
header, and may hold `"__metadata__"`, a map of strings (https://github.com/huggingface/safetensors).
Everything is checked when the file is opened, before a single byte of data is read: tensors must tile the
data exactly, in any order, with no hole and no overlap. Data may begin at any byte: nothing here needs
alignment. Reads go straight from the file into the new tensor (`pread`), so memory use is the tensors asked
for, not the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ts_core.errors import ArgumentError, CheckpointError, StateError, StorageError, message

__all__ = ["MAX_HEADER_BYTES", "SafetensorsReader", "TensorInfo"]

# The format's own limit; a longer header is refused by every reader of the format.
MAX_HEADER_BYTES = 100_000_000
_U64 = 2**64
# One system call moves at most 2 GiB - 4 KiB on Linux.
_CHUNK_BYTES = 1 << 30

# Bits per element. The first group has a torch dtype; the second can be listed but not read.
_BITS: dict[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
_TORCH: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}

# torch dtype -> its name in the format.
STORED_NAMES = {dtype: name for name, dtype in _TORCH.items()}


@dataclass(frozen=True)
class TensorInfo:
    """What a file says about one tensor.

    Attributes:
        name: Name of the tensor.
        stored_dtype: The format's own name of the dtype, such as "BF16".
        dtype: The torch dtype, or None for the sub-byte ones, which can be listed but not read.
        shape: Sizes of the dimensions.
        begin: First byte of the data, counted from the start of the file.
        nbytes: Length of the data.
    """

    name: str
    stored_dtype: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    begin: int
    nbytes: int


class _DuplicateKeyError(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(f"the key {key!r} occurs twice")
            seen.add(key)
    return result


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _U64


class SafetensorsReader:
    """An open safetensors file.

    Args:
        path: The file.

    Raises:
        CheckpointError: The file is damaged or hostile; the message names the file and the fault.
        StorageError: The file cannot be opened.

    Example:
        >>> import tempfile, safetensors.torch
        >>> folder = tempfile.mkdtemp()
        >>> safetensors.torch.save_file({"w": torch.arange(3.0)}, f"{folder}/a.safetensors")
        >>> with SafetensorsReader(f"{folder}/a.safetensors") as reader:
        ...     reader.keys(), reader.read("w")
        (['w'], tensor([0., 1., 2.]))
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the file and check its whole header."""
        self.path = Path(path)
        self.metadata: dict[str, str] = {}
        self._infos: dict[str, TensorInfo] = {}
        self._lock = threading.Lock()
        try:
            # Opened by hand: the reader owns the file until close().
            self._file = self.path.open("rb", buffering=0)
        except OSError as error:
            raise StorageError(
                error.errno, f"cannot open checkpoint file: {error.strerror}", str(path)
            ) from error
        try:
            self._parse(os.fstat(self._file.fileno()).st_size)
        except BaseException:
            self._file.close()
            raise

    # -- access -------------------------------------------------------------------------------------------

    def keys(self) -> list[str]:
        """Return the names of the tensors, in the order of their data in the file."""
        return list(self._infos)

    def __contains__(self, name: object) -> bool:
        """Tell whether there is a tensor of this name."""
        return name in self._infos

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self._infos)

    def __iter__(self) -> Iterator[str]:
        """Go through the names, as `keys` does."""
        return iter(self._infos)

    def info(self, name: str) -> TensorInfo:
        """Return what the header says about one tensor.

        Args:
            name: Name of the tensor.

        Returns:
            Its dtype, shape and place in the file.

        Raises:
            CheckpointError: No such tensor.
        """
        try:
            return self._infos[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: there is no tensor {name!r} in this file") from None

    def read(self, name: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read one tensor.

        Args:
            name: Name of the tensor.
            out: A contiguous CPU tensor of the same dtype and shape to read into; it is overwritten. By
                default a new tensor is made.

        Returns:
            The tensor on the CPU (`out` if given), with its own memory.

        Raises:
            CheckpointError: No such tensor, a dtype torch does not have, or the file is shorter than when it
                was opened.
            ArgumentError: `out` does not match.
            StateError: The reader is closed.

        Example:
            >>> reader.read("w", out=torch.empty(3))  # doctest: +SKIP
        """
        info = self.info(name)
        if self._file.closed:
            raise StateError(f"[SafetensorsReader.read] {self.path} was closed")
        if info.dtype is None:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has dtype {info.stored_dtype}, which torch lacks"
            )
        if out is None:
            out = torch.empty(info.shape, dtype=info.dtype, device="cpu")
        elif (
            out.dtype != info.dtype
            or tuple(out.shape) != info.shape
            or out.device.type != "cpu"
            or not out.is_contiguous()
        ):
            given = f"{out.dtype} {tuple(out.shape)} on {out.device}, contiguous: {out.is_contiguous()}"
            expected = f"a contiguous CPU tensor of {info.dtype} {info.shape}"
            raise ArgumentError(message("SafetensorsReader.read", "out", expected, given))
        if info.nbytes:
            flat = out.detach()
            flat = torch.view_as_real(flat) if flat.is_complex() else flat
            self._fill(flat.reshape(-1).view(torch.uint8).numpy().data, info)
        return out

    def read_part(self, name: str, offset: int, out: torch.Tensor) -> None:
        """Read some bytes of one tensor, as they are stored; several threads may do so at once.

        Args:
            name: Name of the tensor.
            offset: First byte, counted from the tensor's own.
            out: Contiguous uint8 CPU tensor that is written: as many bytes as it has are read.

        Raises:
            CheckpointError: No such tensor, or the file is shorter than when it was opened.
            StorageError: It cannot be read.
            ArgumentError: The tensor does not have these bytes, or `out` is none of this kind.
            StateError: The reader is closed.
        """
        info = self.info(name)
        if self._file.closed:
            raise StateError(f"[SafetensorsReader.read_part] {self.path} was closed")
        if out.dtype != torch.uint8 or out.device.type != "cpu" or not out.is_contiguous():
            given = f"{out.dtype} on {out.device}, contiguous: {out.is_contiguous()}"
            raise ArgumentError(
                message("SafetensorsReader.read_part", "out", "a contiguous uint8 CPU tensor", given)
            )
        if offset < 0 or offset + out.numel() > info.nbytes:
            expected, span = f"a range of the tensor's {info.nbytes} bytes", (offset, offset + out.numel())
            raise ArgumentError(message("SafetensorsReader.read_part", "offset", expected, span))
        if out.numel():
            self._fill(out.detach().view(-1).numpy().data, info, offset)

    def expect(self, name: str, offset: int = 0, nbytes: int | None = None) -> None:
        """Have the system begin to read a tensor into its cache, while this thread does something else.

        Args:
            name: Name of the tensor; it is read soon.
            offset: First byte that is, counted from the tensor's own.
            nbytes: How many are; None: all that follow.

        Raises:
            CheckpointError: No such tensor.
        """
        info = self.info(name)
        count = info.nbytes - offset if nbytes is None else nbytes
        if count > 0 and not self._file.closed and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # a hint, which not every file system takes
                os.posix_fadvise(self._file.fileno(), info.begin + offset, count, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Close the file; tensors already read stay valid."""
        self._file.close()

    def __enter__(self) -> SafetensorsReader:
        """Return itself; leaving the block closes the file."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _fill(self, view: memoryview, info: TensorInfo, offset: int = 0) -> None:
        begin, done = info.begin + offset, 0
        while done < len(view):
            part = view[done : done + _CHUNK_BYTES]
            try:
                if hasattr(os, "preadv"):
                    count = os.preadv(self._file.fileno(), [part], begin + done)
                else:  # pragma: no cover - Windows
                    with self._lock:
                        self._file.seek(begin + done)
                        count = self._file.readinto(part) or 0
            except OSError as error:
                raise StorageError(
                    error.errno, f"reading {info.name!r}: {error.strerror}", str(self.path)
                ) from error
            if count <= 0:
                raise self._bad(f"ends inside tensor {info.name!r}: the file shrank while it was open")
            done += count

    # -- header -------------------------------------------------------------------------------------------

    def _bad(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: not a valid safetensors file: {what}")

    def _header(self, file_bytes: int) -> tuple[bytes, int]:
        if file_bytes < 8:
            raise self._bad(f"it has {file_bytes} bytes, the length prefix alone takes 8")
        length = int.from_bytes(self._exactly(8), "little")
        limit = min(file_bytes - 8, MAX_HEADER_BYTES)
        if not 2 <= length <= limit:
            raise self._bad(f"its header length is {length}; between 2 and {limit} is possible here")
        return self._exactly(length), 8 + length

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self._file.read(count - len(data))
            if not part:
                raise self._bad("the file shrank while it was read")
            data += part
        return bytes(data)

    def _parse(self, file_bytes: int) -> None:
        raw, start = self._header(file_bytes)
        try:
            header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
        except _DuplicateKeyError as error:
            raise self._bad(f"in its header {error}") from None
        # RecursionError: deeply nested lists; ValueError: not JSON, or an integer of thousands of digits.
        except (ValueError, RecursionError) as error:
            raise self._bad(f"its header is not JSON ({type(error).__name__}: {str(error)[:120]})") from None
        if not isinstance(header, dict):
            raise self._bad("its header is not a JSON object")
        metadata = header.pop("__metadata__", None)
        if metadata is not None:
            if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
                raise self._bad("__metadata__ is not a map of strings")
            self.metadata = metadata
        infos = [self._tensor(name, entry, start) for name, entry in header.items()]
        infos.sort(key=lambda info: (info.begin, info.nbytes))
        position = start
        for info in infos:
            if info.begin != position:
                kind = "overlaps the tensor before it" if info.begin < position else "leaves a hole before it"
                raise self._bad(f"tensor {info.name!r} {kind}")
            position += info.nbytes
        if position != file_bytes:
            kind = "is truncated" if position > file_bytes else "has trailing bytes"
            raise self._bad(f"it {kind}: the header describes {position} bytes, the file has {file_bytes}")
        self._infos = {info.name: info for info in infos}

    def _tensor(self, name: str, entry: object, start: int) -> TensorInfo:
        where = f"tensor {name[:200]!r}"
        if any("\ud800" <= character <= "\udfff" for character in name):
            raise self._bad(f"{where}: the name is not valid Unicode")
        if not isinstance(entry, dict):
            raise self._bad(f"{where} is not described by a JSON object")
        stored, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if not isinstance(stored, str) or stored not in _BITS:
            raise self._bad(f"{where} has the unknown dtype {str(stored)[:40]!r}")
        if not isinstance(shape, list) or not all(_size(side) for side in shape):
            raise self._bad(f"{where}: shape is not a list of sizes")
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(_size(offset) for offset in offsets):
            raise self._bad(f"{where}: data_offsets is not a pair of sizes")
        begin, end = offsets
        if end < begin:
            raise self._bad(f"{where}: data_offsets run backwards ({begin} to {end})")
        # Python integers do not overflow; the limit is what torch and 64-bit readers can hold. Sides beside
        # a zero count too: they still have to be strides.
        count, span = 1, 1
        for side in shape:
            count, span = count * side, span * max(side, 1)
            if span * _BITS[stored] >= 2**63:
                raise self._bad(f"{where}: the size of shape {shape[:8]} overflows 64 bits")
        bits = count * _BITS[stored]
        if bits % 8 or bits // 8 != end - begin:
            raise self._bad(
                f"{where}: {stored} {shape[:8]} takes {bits / 8:g} bytes, data_offsets give {end - begin}"
            )
        return TensorInfo(name, stored, _TORCH.get(stored), tuple(shape), start + begin, end - begin)
