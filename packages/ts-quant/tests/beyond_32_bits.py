"""Decode (or with `encode` pack) more than 2^31 values with every codec, in the memory of a few million.

Run as a process of its own: an index that wraps around meets memory that must not be touched. Long tensors
are one stretch of memory that is mapped again and again, so what lies in them is periodic, and so is what
comes out of it. The period divides no power of two: an index that wraps within the tensor is out of step.
"""

import ctypes
import json
import mmap
import os
import sys

import torch
from test_every_codec import PACKINGS, plausible

from ts_core import registry
from ts_core.testing import make_tensor

ROWS, COLUMNS, PERIODS = 3072, 4096, 171
SHAPE, WHOLE = (ROWS, COLUMNS), (ROWS * PERIODS, COLUMNS)
_REAL_BYTES = 1 << 26  # up to here a tensor is simply repeated

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FIXED, _NORESERVE = 0x10, 0x4000
_GUARD = 1 << 33  # bytes that may not be touched, before and after


def _map(address, size, access, flags, file=-1):
    found = _libc.mmap(address, size, access, flags, file, 0)
    if found in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    return found


class Periodic:
    """One period of memory, seen `PERIODS` times in a row."""

    def __init__(self, period):
        """Take the period's values, at most 2^31 bytes of them."""
        size = period.nbytes
        assert size % mmap.PAGESIZE == 0
        file = os.memfd_create("period")
        os.ftruncate(file, size)
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self.reserved = 2 * _GUARD + size * PERIODS
        self.start = _map(None, self.reserved, 0, private)
        for index in range(PERIODS):
            where = self.start + _GUARD + index * size
            _map(where, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, file)
        os.close(file)
        memory = (ctypes.c_uint8 * (size * PERIODS)).from_address(self.start + _GUARD)
        self.tensor = torch.frombuffer(memory, dtype=period.dtype)
        self.once = self.tensor[: period.numel()]
        self.once.copy_(period.flatten())

    def close(self):
        """Give the addresses back; the tensors must not be used any more."""
        _libc.munmap(self.start, self.reserved)


def repeated(period, open_ones):
    """The values of a period, `PERIODS` times over, along the first dimension."""
    shape = (period.shape[0] * PERIODS, *period.shape[1:])
    if period.nbytes * PERIODS <= _REAL_BYTES:
        return period.repeat(PERIODS, *[1] * (period.dim() - 1))
    open_ones.append(Periodic(period))
    return open_ones[-1].tensor.view(shape)


def one_period(packing, transposed):
    """Packed tensors of one period. Where the codes of a row are not side by side, all values are alike."""
    name, meta = packing
    codec = registry.codec(name)
    if codec.encodes:
        return codec.encode(make_tensor(SHAPE, dtype=torch.bfloat16), meta)
    generator = torch.Generator().manual_seed(0)
    parts = {key: plausible(part, generator) for key, part in codec.parts(SHAPE, meta).items()}
    if transposed:
        parts = {key: torch.full_like(part, part.flatten()[0].item()) for key, part in parts.items()}
    return parts


def decode(packing, out):
    """Decode all; the last period to be written has to be what one period alone decodes to."""
    name, meta = packing
    codec, opened = registry.codec(name), []
    sizes = {key: part.shape for key, part in codec.parts(WHOLE, meta).items()}
    transposed = name in ("gptq", "awq")
    once = one_period(packing, transposed)
    want = codec.decode(once, SHAPE, torch.bfloat16, meta)
    packed = {
        key: part
        if tuple(part.shape) == tuple(sizes[key])
        else repeated(part.flatten() if transposed else part, opened).view(sizes[key])
        for key, part in once.items()
    }
    out.once.fill_(float("nan"))
    codec.decode(packed, WHOLE, torch.bfloat16, meta, out=out.tensor.view(WHOLE))
    good = torch.equal(out.once.view(torch.int16), want.flatten().view(torch.int16))
    for one in opened:
        one.close()
    return good


def encode(packing, source):
    """Pack all; every part has to be that of one period, over and over."""
    name, meta = packing
    codec = registry.codec(name)
    once = codec.encode(source.once.view(SHAPE), meta)
    good = True
    for key, part in codec.encode(source.tensor.view(WHOLE), meta).items():
        alike = part if part.shape == once[key].shape else part.view(PERIODS, -1)
        good = good and bool((alike == once[key].flatten()).all())
    return good


def chosen(every):
    """All ways to pack, or one of each kind of codec that has a kernel of its own."""
    kinds = {}
    for packing in PACKINGS:
        if packing[0] not in ("stacked", "bnb_fp4"):  # pieces of other codecs, the kernel of nf4
            kinds.setdefault(type(registry.codec(packing[0])), packing)
    return PACKINGS if every else list(kinds.values())


def main(what, every):
    """Print a line with the codec before it runs, and one with what came of it."""
    dense = Periodic(make_tensor(SHAPE, dtype=torch.bfloat16))
    for packing in chosen(every):
        if what is encode and not registry.codec(packing[0]).encodes:
            continue
        print(json.dumps({"codec": packing[0], "meta": str(packing[1])}), flush=True)
        print(json.dumps({"good": what(packing, dense)}), flush=True)


if __name__ == "__main__":
    main({"encode": encode, "decode": decode}[sys.argv[1]], sys.argv[2] == "all")
