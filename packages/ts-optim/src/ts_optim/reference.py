"""What the kernels compute, in plain PyTorch: the oracle of the tests, and the path of float64 parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["adamw_", "adamw_float32", "decode_int8", "encode_int8", "grad_norm", "random16", "round_bf16"]

#: Elements that share the two scales of int8 moments.
BLOCK = 256

_NEAREST = 0x8000
_ONE = 127 << 23
# A code with its fraction has 18 bits behind the point, and a code is 2^18 of the bits of a float.
_POINT = 18
# The code of the largest value, the code below which they are wider, and by what power of two.
_ROOT = (255, 128, 1)
_RATIO = (127, 31, 2)


def adamw_(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    grad_scale: float = 1.0,
) -> None:
    """Apply one AdamW step in place, in the dtype of `param`.

        g <- grad * grad_scale;  m <- m + (1 - beta1) (g - m);  v <- v + (1 - beta2) (g^2 - v)
        p <- p (1 - lr wd) - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    Args:
        param: Any floating dtype, shape and layout; written.
        grad: Same shape; read.
        exp_avg: First moment m, same shape; written.
        exp_avg_sq: Second moment v, same shape; written.
        step: t, 1 at the first step.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Added to the denominator.
        weight_decay: Decoupled decay wd.
        grad_scale: Multiplies the gradient.

    Source: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101.
    """
    g = grad * grad_scale
    exp_avg.add_(g - exp_avg, alpha=1.0 - betas[0])
    exp_avg_sq.add_(g * g - exp_avg_sq, alpha=1.0 - betas[1])
    denom = exp_avg_sq.sqrt().div_(math.sqrt(1.0 - betas[1] ** step)).add_(eps)
    param.mul_(1.0 - lr * weight_decay).addcdiv_(exp_avg, denom, value=-lr / (1.0 - betas[0] ** step))


def grad_norm(grads: Sequence[torch.Tensor]) -> float:
    """Return the 2-norm of all elements of `grads` together, in float64.

    Args:
        grads: Any floating dtypes, shapes and devices.

    Returns:
        The norm; NaN or infinite if an element is.
    """
    return math.sqrt(sum(float(g.double().square().sum()) for g in grads))


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Compute a b + c with one rounding to float32: the sum in float64, rounded to odd, loses nothing."""
    x, y = a.double() * b.double(), c.double()  # the product is exact
    total = x + y
    rest = total - x
    error = (x - (total - rest)) + (y - rest)
    bits = total.view(torch.int64)
    away = torch.where((error > 0) == (total > 0), 1, -1)
    inexact = (error != 0) & (bits & 1 == 0) & total.isfinite()
    return torch.where(inexact, bits + away, bits).view(torch.float64).float()


def random16(seed: int, step: int, number: int, numel: int) -> torch.Tensor:
    """Return the 16 random bits of each element of a tensor in one step.

    Philox4x32-10 with the key `seed`. Its counter holds element / 512 * 16 + element % 16 in the low, and the
    number of the tensor in the high half. To each of the 4 words step * 0x61616161 is added: near the golden
    section in every byte. With k = element / 16 % 32, an element takes the low 16 bits of word k / 8,
    turned right by k % 4 bytes, with the top bit flipped where k % 8 is 4 or more. They are uniform in every
    step, and spread evenly over the steps.

    Args:
        seed: 64 bits.
        step: 1 at the first step.
        number: Index of the parameter in the optimizer.
        numel: Elements.

    Returns:
        int64 `[numel]` in [0, 65536).

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
    """
    i = torch.arange(numel)
    counter = i // (2 * BLOCK) * 16 + i % 16
    mask = 0xFFFFFFFF
    c = [counter & mask, counter >> 32, torch.full_like(i, number & mask), torch.full_like(i, number >> 32)]
    k0, k1 = seed & mask, seed >> 32 & mask

    def multiply(x: torch.Tensor, m: int) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = x & 0xFFFF, x >> 16  # products below 2^48
        middle = high * m + (low * m >> 16)
        return middle >> 16, (middle << 16 | low * m & 0xFFFF) & mask

    for _ in range(10):
        high0, low0 = multiply(c[0], 0xD2511F53)
        high1, low1 = multiply(c[2], 0xCD9E8D57)
        c = [high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0]
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    words = torch.stack([(word + step * 0x61616161) & mask for word in c])
    k = i // 16 % 32
    word = words.gather(0, (k // 8)[None])[0]
    turn = k % 4 * 8
    return ((word >> turn | word << 32 - turn) & 0xFFFF) ^ (k % 8 // 4 * 0x8000)


def round_bf16(x: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Round float32 to bfloat16 so that the mean is exact.

    The 16 bits that are cut off are the chance to go up. Finite values stay finite.

    Args:
        x: float32, any shape.
        random: Integers in [0, 65536), same shape.

    Returns:
        bfloat16, same shape.

    Source: Gupta et al., https://arxiv.org/abs/1502.02551.
    """
    bits = x.view(torch.int32).long()
    size = bits & 0x7FFFFFFF
    size = torch.minimum(size + random, size.clamp(min=0x7F7FFFFF)) & 0xFFFF0000
    return (size | bits & -0x80000000).int().view(torch.float32).bfloat16()


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32).long()


def _float(bits: torch.Tensor) -> torch.Tensor:
    return bits.int().view(torch.float32)


def _encode(
    below: torch.Tensor, form: tuple[int, int, int], chance: torch.Tensor, least: int
) -> torch.Tensor:
    """Round to codes, at least `least`; `below` is the bits of floats less those of the largest."""
    top, bend, wide = form
    x = below + (top - bend << _POINT)
    return (torch.maximum(x, x >> wide) + (bend << _POINT) + (chance << _POINT - 16) >> _POINT).clamp(
        min=least
    )


def _decode(codes: torch.Tensor, form: tuple[int, int, int]) -> torch.Tensor:
    """Return the bits of the floats that codes stand for, less those of the largest; not for code 0."""
    top, bend, wide = form
    x = codes - bend << _POINT
    return torch.minimum(x, x << wide) - (top - bend << _POINT)


def encode_int8(
    exp_avg: torch.Tensor,
    root: torch.Tensor,
    random: torch.Tensor | None = None,
    *,
    nearest: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pack moments into one byte each.

        s = max(root, 2^-62) if root > 0;  v_scale = max(s);  v_code = round(s / v_scale), never 0 for s > 0
        r = |m| / s;  m_scale = max(r);  m_code = sign(m), round(r / m_scale)

    in blocks of 256 elements. Divisions are differences of the bits of floats, which is about the same and
    undone exactly. A code of s has 32 values an octave for 4 octaves below v_scale and 16 for 8 more; one of
    r has 32 for 3 and 8 for 4 more. Both hold 0 and the largest. In a block with NaN or infinity, or where r
    reaches 2^64, all v become NaN.

    Args:
        exp_avg: m, float32, flat.
        root: sqrt(v), float32, flat.
        random: 16 bits for each element, which round s (and r, if not `nearest`); None, as on loading, rounds
            both to nearest.
        nearest: Round r to nearest.

    Returns:
        m codes (uint8: a sign bit and 7 bits), v codes (uint8), m scales and v scales (float32, one a block).

    Source: block-wise states, Dettmers et al., https://arxiv.org/abs/2110.02861.
    """
    n = root.numel()
    smallest = 1.25 * 2.0**-63 if random is None else 2.0**-62
    random = torch.full((n,), _NEAREST) if random is None else random
    pad = (0, -n % BLOCK)
    m, s, chance = (torch.nn.functional.pad(t, pad).view(-1, BLOCK) for t in (exp_avg, root, random))
    s = torch.where(s == 0, 0.0, s.clamp(min=smallest))
    r = torch.where(s == 0, -0x60000000, _bits(m.abs()) - _bits(s))
    most = r.amax(1)
    good = s.isfinite().all(1) & (m.isfinite() | (s == 0)).all(1) & (most < 64 << 23)
    v_scale = torch.where(good, s.amax(1), math.nan)
    v_code = _encode(_bits(s) - _bits(v_scale)[:, None], _ROOT, chance, 1)
    v_code = torch.where((s > 0) & (v_scale > 0)[:, None], v_code, 0)
    some = (v_scale > 0) & (most >= -40 << 23)
    m_scale = torch.where(some, _float(torch.where(some, most + _ONE, 0)), torch.where(good, 0.0, math.nan))
    chance = torch.full_like(chance, _NEAREST) if nearest else chance
    size = _encode(r - most[:, None], _RATIO, chance, 0)
    m_code = torch.where(some[:, None], size + 128 * m.signbit(), 0)
    return m_code.byte().view(-1)[:n], v_code.byte().view(-1)[:n], m_scale, v_scale


def decode_int8(
    m_code: torch.Tensor, v_code: torch.Tensor, m_scale: torch.Tensor, v_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack moments: s = v_scale code, v = s^2, m = m_scale code s. Packed again they give the same bytes.

    Args:
        m_code: uint8, flat.
        v_code: uint8, flat.
        m_scale: float32, one for each 256.
        v_scale: float32, one for each 256.

    Returns:
        m and v, float32, flat.
    """
    n = v_code.numel()
    scales = [t.repeat_interleave(BLOCK)[:n] for t in (m_scale, v_scale)]
    bits = _decode(v_code.long(), _ROOT) + _bits(scales[1])
    root = torch.where(v_code > 0, _float(bits), scales[1].where(scales[1].isnan(), 0.0))
    code = m_code.long() & 127
    size = torch.where(code > 0, _decode(code, _RATIO) + _bits(scales[0]) + _bits(root) - _ONE, 0)
    size = _float(size)
    return torch.where(m_code > 127, -size, size), root * root


def adamw_float32(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    grad_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute one AdamW step to the bit of the kernels: each operation and fma is rounded to float32 once.

    Args:
        param: float32.
        grad: float32.
        exp_avg: float32.
        exp_avg_sq: float32.
        step: t, 1 at the first step.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Added to the denominator.
        weight_decay: Decoupled decay.
        grad_scale: Multiplies the gradient.

    Returns:
        New weights, m, v and sqrt(v).
    """

    def number(x: float) -> torch.Tensor:
        return torch.tensor(x, dtype=torch.float32)

    w1, w2 = number(1.0 - betas[0]), number(1.0 - betas[1])
    g = grad * number(grad_scale)
    m = _fma(w1, g, _fma(-w1, exp_avg, exp_avg))
    v = _fma(w2 * g, g, _fma(-w2, exp_avg_sq, exp_avg_sq))
    v = torch.where(v > torch.finfo(torch.float32).max, torch.finfo(torch.float32).max, v)
    root = v.double().sqrt().float()  # correctly rounded, which torch's own float32 one may not be
    denom = _fma(root, number(1.0 / math.sqrt(1.0 - betas[1] ** step)), number(eps))
    step_size = number(-lr / (1.0 - betas[0] ** step))
    return _fma(step_size, m / denom, param * number(1.0 - lr * weight_decay)), m, v, root
