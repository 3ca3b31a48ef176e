"""One step of more than 2^31 parameters, in the memory of a few million.

`beyond_32_bits.py float32|bfloat16|int8` is a process of its own: an index that wraps meets memory that
must not be touched. Long tensors are one stretch of memory that is mapped again and again, all but their last
piece, which goes beyond 2^31 and has memory of its own: there the result has to be that of the same step on
this piece alone.
"""

import ctypes
import json
import mmap
import os
import sys

import torch

from ts_optim import _C, adamw_blocks_, adamw_step_, grad_sumsq

PIECE, PIECES = 3 << 18, 2731
_NUMEL = PIECE * PIECES
_GUARD = 1 << 33  # bytes that may not be touched, before and after
_CODES = 1  # that a rounded int8 moment may be apart

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_FIXED, _NORESERVE = 0x10, 0x4000


def _map(address, size, access, flags, file=-1, offset=0):
    found = _libc.mmap(address, size, access, flags, file, offset)
    if found in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    return found


def long(piece, count=PIECES):
    """Return a tensor whose last piece, and all others together, start with these values."""
    size = piece.nbytes
    assert size % mmap.PAGESIZE == 0
    file = os.memfd_create("pieces")
    os.ftruncate(file, 2 * size)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    start = _map(None, 2 * _GUARD + size * count, 0, private) + _GUARD
    for index in range(count):
        access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED
        _map(start + index * size, size, access, flags, file, size if index == count - 1 else 0)
    os.close(file)
    memory = (ctypes.c_uint8 * (size * count)).from_address(start)
    made = torch.frombuffer(memory, dtype=piece.dtype)
    made[: piece.numel()] = made[-piece.numel() :] = piece
    return made


def values(moments):
    """Tensors of one piece: weights, gradients, moments with their scales, and a 16-bit copy."""
    generator = torch.Generator().manual_seed(0)
    p, g, m = (torch.randn(PIECE, generator=generator) * size for size in (1.0, 0.1, 0.1))
    v = m.square() * (0.5 + torch.rand(PIECE, generator=generator))
    scales = [torch.empty(PIECE // _C.BLOCK) for _ in range(2)]
    if moments == "int8":
        codes = [torch.empty(PIECE, dtype=torch.uint8) for _ in range(2)]
        _C.pack_moments_(m, v, *codes, *scales, 1)
        m, v = codes
    elif moments == "bfloat16":
        m, v = m.bfloat16(), v.bfloat16()
    return [p, g.bfloat16(), m, v, *(scales if moments == "int8" else []), p.bfloat16()]


def step(tensors, moments):
    """Update in place; in the order of memory, on one thread: all but the last piece share theirs."""
    p, g, m, v, *scales, low = ([t] for t in tensors)
    hyper = torch.tensor([[1e-2, 0.9, 0.999, 1e-8, 0.1]], dtype=torch.float64)
    steps = [torch.tensor(3.0)]
    if moments == "float32":
        adamw_step_(p, g, m, v, steps, low, hyper, [0], 1.0, None, False, 1)
    else:
        scales = scales or [[], []]
        adamw_blocks_(p, g, m, v, *scales, steps, low, [], hyper, [0], [0], [0], 1.0, 1.0, False, False, 1)


def main(moments):
    """Print what differs."""
    once = values(moments)
    whole = [long(t) for t in once]
    names = ["p", "g", "m", "v", *(["m_scale", "v_scale"] if moments == "int8" else []), "low"]
    alone = float(grad_sumsq([once[1]], 1))
    off = abs(float(grad_sumsq([whole[1]], 1)) / (alone * PIECES) - 1.0)
    step(whole, moments)
    step(once, moments)
    differ = {"norm": off} if off > 1e-12 else {}
    for name, long_one, piece in zip(names, whole, once, strict=True):
        last = long_one[-piece.numel() :]
        # Stochastic rounding depends on the index; what is rounded does not.
        if name in ("m", "v") and moments == "bfloat16":
            equal = torch.allclose(last.float(), piece.float(), rtol=2**-7, atol=0.0)
        elif name in ("m", "v") and moments == "int8":
            equal = int((last.int() - piece.int()).abs().max()) <= _CODES
        else:
            equal = torch.equal(last, piece)
        if not equal:
            differ[name] = float((last.float() - piece.float()).abs().max())
    print(json.dumps({"numel": _NUMEL, "differ": differ}))


if __name__ == "__main__":
    main(sys.argv[1])
