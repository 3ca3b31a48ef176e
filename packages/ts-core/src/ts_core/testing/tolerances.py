r"""How far a result may be from a float64 reference: one table, derived from dtype and length.

With unit roundoff $u$ (half the spacing of floats at 1: $2^{-24}$ for fp32, $2^{-11}$ for fp16, $2^{-8}$ for
bf16), a sum of $n$ terms accumulated in any order in a format of roundoff $u_a$ and rounded once to the
output format $u_o$ satisfies

$$|\hat s - s| \le u_o |s| + \gamma(n) \sum_i |x_i|, \qquad \gamma(n) = \min(n, \lambda \sqrt n)\, u_a .$$

$n u_a$ is the worst case. $\lambda \sqrt n\, u_a$ holds with probability at least
$1 - 2 n \exp(-\lambda^2 / 2)$ for roundings that are independent with mean zero (Higham and Mary, "A new
approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41, 2019); $\lambda = 6$ leaves 3e-8
a term. Below 36 terms the worst case is the smaller, and it is what is used.

`tolerance` returns `rtol` $= 2 u_o + \gamma(n)$ and `atol` $= \gamma(n) \cdot$ `scale`, where `scale` is the
size of $\sum_i |x_i|$ when terms cancel. The factor 2 lets a result sit on the other side of a rounding
boundary than the rounded reference. Elementwise functions count as `length` = number of roundings on the way.
"""

from __future__ import annotations

import math
from typing import TypedDict

import torch

from ..dtypes import dtype_name
from ..errors import ArgumentError, ArgumentTypeError

__all__ = ["UNIT_ROUNDOFF", "Tolerance", "assert_bit_equal", "assert_near", "tolerance"]

UNIT_ROUNDOFF: dict[torch.dtype, float] = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e5m2: 2.0**-3,
}
# Smallest positive subnormal: below it a correctly rounded result may be 0.
_TINY: dict[torch.dtype, float] = {
    torch.float64: 2.0**-1074,
    torch.float32: 2.0**-149,
    torch.float16: 2.0**-24,
    torch.bfloat16: 2.0**-133,
    torch.float8_e4m3fn: 2.0**-9,
    torch.float8_e5m2: 2.0**-16,
}
_LAMBDA = 6.0
_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Tolerance(TypedDict):
    """Keyword arguments for `torch.testing.assert_close`."""

    rtol: float
    atol: float


def tolerance(
    dtype: torch.dtype,
    length: int = 1,
    *,
    accumulate: torch.dtype = torch.float32,
    scale: float = 1.0,
    worst_case: bool = False,
) -> Tolerance:
    """Return the tolerance for results of `dtype` that are sums of `length` terms.

    Args:
        dtype: Floating dtype of the result.
        length: Number of terms added up, or of roundings on the way.
        accumulate: Dtype of the accumulator; float64 results imply float64.
        scale: Size of the sum of absolute terms, for the absolute part.
        worst_case: Use `length * u` instead of `6 * sqrt(length) * u`: for inputs chosen so that roundings
            add up, such as long sums of one constant.

    Returns:
        A dict with `rtol` and `atol`: `torch.testing.assert_close(a, b, **tolerance(torch.float32, 4096))`.

    Raises:
        ArgumentTypeError: A dtype without an entry in the table.
        ArgumentError: `length < 1` or a negative `scale`.

    Example:
        >>> round(tolerance(torch.bfloat16)["rtol"], 5)
        0.00781
    """
    for name, value in (("dtype", dtype), ("accumulate", accumulate)):
        if value not in UNIT_ROUNDOFF:
            known = ", ".join(dtype_name(d) for d in UNIT_ROUNDOFF)
            raise ArgumentTypeError(f"[tolerance] {name}: expected one of {known}, given {value!r}")
    if length < 1:
        raise ArgumentError(f"[tolerance] length: expected an integer >= 1, given {length!r}")
    if not scale >= 0.0:
        raise ArgumentError(f"[tolerance] scale: expected a number >= 0, given {scale!r}")
    if dtype is torch.float64:
        accumulate = torch.float64
    terms = float(length) if worst_case else min(float(length), _LAMBDA * math.sqrt(length))
    gamma = terms * UNIT_ROUNDOFF[accumulate]
    return Tolerance(rtol=2.0 * UNIT_ROUNDOFF[dtype] + gamma, atol=gamma * scale + _TINY[dtype])


def assert_near(
    actual: torch.Tensor,
    reference: torch.Tensor,
    *,
    length: int = 1,
    scale: torch.Tensor | float = 0.0,
    dtype: torch.dtype | None = None,
    accumulate: torch.dtype = torch.float32,
    worst_case: bool = False,
) -> None:
    """Assert that `actual` is within the tolerance of a float64 reference, element by element.

    Args:
        actual: What is tested; any device, floating.
        reference: The float64 truth, same shape.
        length: As in `tolerance`.
        scale: Sum of absolute terms, a number or a tensor that broadcasts to `reference`. 0: no cancellation.
        dtype: The format the result was rounded to; by default that of `actual`.
        accumulate: As in `tolerance`.
        worst_case: As in `tolerance`.

    Raises:
        AssertionError: Shapes differ, or an element is too far; the message names the worst one.

    Example:
        >>> assert_near(torch.tensor([0.1]), torch.tensor([0.1], dtype=torch.float64))
    """
    if actual.shape != reference.shape:
        raise AssertionError(f"shapes differ: {tuple(actual.shape)} against {tuple(reference.shape)}")
    limits = tolerance(dtype or actual.dtype, length, accumulate=accumulate, worst_case=worst_case)
    tiny = _TINY[dtype or actual.dtype]
    got = actual.detach().to("cpu", torch.float64)
    want = reference.detach().to("cpu", torch.float64)
    size = torch.as_tensor(scale, dtype=torch.float64, device="cpu")
    gamma = limits["atol"] - tiny
    allowed = limits["rtol"] * want.abs() + gamma * size + tiny
    equal = (got == want) | (got.isnan() & want.isnan())
    # An infinite reference would allow anything.
    bad = ~equal & ~(((got - want).abs() <= allowed) & want.isfinite())
    if bool(bad.any()):
        ratio = torch.where(bad, (got - want).abs() / allowed, 0.0).nan_to_num(nan=math.inf)
        worst = int(ratio.flatten().argmax())
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), want.shape))
        raise AssertionError(
            f"{int(bad.sum())} of {bad.numel()} elements are too far from the reference; worst at {index}: "
            f"got {got.flatten()[worst].item()!r}, expected {want.flatten()[worst].item()!r} "
            f"within {allowed.expand_as(want).flatten()[worst].item():.3g}"
        )


def assert_bit_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that two tensors have the same dtype, shape and bits.

    So -0.0 differs from 0.0, and a NaN equals itself.

    Args:
        actual: What is tested; any device.
        expected: What it should be; any device.

    Raises:
        AssertionError: They differ; the message counts the elements and shows the first.

    Example:
        >>> assert_bit_equal(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    """
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise AssertionError(
            f"expected {dtype_name(expected.dtype)} {tuple(expected.shape)}, "
            f"got {dtype_name(actual.dtype)} {tuple(actual.shape)}"
        )
    bits = _SAME_WIDTH[expected.dtype.itemsize]
    got = actual.detach().cpu().contiguous().flatten()
    want = expected.detach().cpu().contiguous().flatten()
    differ = got.view(bits) != want.view(bits)
    if bool(differ.any()):
        first = int(differ.nonzero()[0])
        raise AssertionError(
            f"{int(differ.sum())} of {differ.numel()} elements differ in their bits; first at flat index "
            f"{first}: got {got[first].item()!r}, expected {want[first].item()!r}"
        )
