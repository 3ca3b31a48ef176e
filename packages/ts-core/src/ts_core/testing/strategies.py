"""Hypothesis strategies for tensors: few draws, many kinds of values and layouts.

A tensor is drawn as (flavour, layout, seed), not element by element: large shapes stay cheap, and a failing
example shrinks to the plainest flavour, a contiguous layout and seed 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ArgumentError, message, missing

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["FLAVOURS", "LAYOUTS", "float_tensors", "make_tensor", "shapes"]

FLAVOURS: tuple[str, ...] = (
    "normal",
    "zeros",
    "negative_zero",
    "constant",
    "sparse",
    "integers",
    "mixed_scale",
    "denormal",
    "large",
    "outlier",
)
"""Kinds of values: the first is what a failing example shrinks to."""

LAYOUTS: tuple[str, ...] = ("contiguous", "offset", "strided", "transposed", "expanded")
"""Kinds of memory layout: the first is what a failing example shrinks to."""


def _strategies() -> Any:
    try:
        from hypothesis import strategies
    except ImportError as error:
        raise missing("ts_core.testing", "hypothesis", "pip install hypothesis") from error
    return strategies


def shapes(
    *,
    min_dims: int = 1,
    max_dims: int = 3,
    min_side: int = 1,
    max_side: int = 65,
    max_numel: int = 4096,
) -> SearchStrategy[tuple[int, ...]]:
    """Draw shapes, with the sizes around powers of two that kernels get wrong drawn often.

    Args:
        min_dims: Fewest dimensions; 0 allows scalars.
        max_dims: Most dimensions.
        min_side: Smallest size of a dimension; 0 allows empty tensors.
        max_side: Largest size of a dimension.
        max_numel: Most elements; a longer draw has its sides cut, never rejected.

    Returns:
        A strategy of tuples of ints.

    Raises:
        MissingDependencyError: hypothesis is not installed.
        ArgumentError: Limits that no shape can meet.

    Example:
        >>> strategy = shapes(max_dims=2, max_numel=100)
    """
    possible = 0 <= min_dims <= max_dims and 0 <= min_side <= max_side
    if not possible or max_numel < max(min_side, 1) ** min_dims:
        raise ArgumentError(
            "[shapes] expected 0 <= min_dims <= max_dims, 0 <= min_side <= max_side, room for the smallest "
            f"shape; given dims {min_dims}..{max_dims}, sides {min_side}..{max_side}, max_numel {max_numel}"
        )
    st = _strategies()
    edges = [n + d for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) for d in (-1, 0, 1)]
    edges = sorted({n for n in edges if min_side <= n <= max_side})
    side = st.integers(min_side, max_side)
    if edges:
        side = st.one_of(side, st.sampled_from(edges))

    def fit(drawn: list[int]) -> tuple[int, ...]:
        result: list[int] = []
        room = max_numel
        for position, size in enumerate(drawn):
            # What the remaining dimensions need at least.
            rest = max(min_side, 1) ** (len(drawn) - position - 1)
            size = max(min(size, room // rest), min_side)
            result.append(size)
            room //= max(size, 1)
        return tuple(result)

    top = max_dims
    while max(min_side, 1) ** top > max_numel:
        top -= 1
    drawn: SearchStrategy[tuple[int, ...]] = st.lists(side, min_size=min_dims, max_size=top).map(fit)
    return drawn


def _values(flavour: str, numel: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Make `numel` float64 values of one flavour that are finite in `dtype`."""
    info = torch.finfo(dtype)
    normal = torch.randn(numel, generator=generator, dtype=torch.float64)
    uniform = torch.rand(numel, generator=generator, dtype=torch.float64)
    if flavour == "zeros":
        return torch.zeros_like(normal)
    if flavour == "negative_zero":
        return torch.where(uniform < 0.5, 0.0, -0.0).to(torch.float64)
    if flavour == "constant":
        return torch.full_like(normal, float(torch.randn((), generator=generator)))
    if flavour == "sparse":
        return torch.where(uniform < 0.1, normal, 0.0)
    if flavour == "integers":
        return (normal * 3.0).round()
    if flavour == "mixed_scale":
        span = min(math.log2(info.max), 60.0) / 2.0
        return normal * torch.exp2((uniform - 0.5) * span)
    if flavour == "denormal":
        # Below the smallest normal number, down to the smallest subnormal.
        return normal.sign() * uniform * info.smallest_normal
    if flavour == "large":
        return normal.sign() * (0.5 + uniform / 2.0) * (info.max / 2.0)
    if flavour == "outlier":
        values = normal.clone()
        if numel:
            values[int(torch.randint(numel, (1,), generator=generator))] = 1e3
        return values
    return normal


def make_tensor(
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    flavour: str = "normal",
    layout: str = "contiguous",
    seed: int = 0,
) -> torch.Tensor:
    """Make one tensor of a given flavour and layout; what `float_tensors` draws from, without hypothesis.

    Args:
        shape: Sizes of the dimensions.
        dtype: Floating dtype.
        device: Where the tensor lies.
        flavour: One of `FLAVOURS`: "denormal" is below the smallest normal number, "large" at half the
            largest one.
        layout: One of `LAYOUTS`: "offset" starts one element into its storage (so it is not 16-byte aligned),
            "strided" takes every second element, "transposed" has its last two dimensions swapped, "expanded"
            repeats its first row with stride 0.
        seed: Seed of the values.

    Returns:
        The tensor, of exactly this shape; a layout that a shape cannot have (transposed in one dimension) is
        contiguous.

    Raises:
        ArgumentError: Unknown flavour or layout.

    Example:
        >>> make_tensor((2, 3), layout="transposed").is_contiguous()
        False
    """
    for name, value, accepted in (("flavour", flavour, FLAVOURS), ("layout", layout, LAYOUTS)):
        if value not in accepted:
            raise ArgumentError(message("make_tensor", name, f"one of {', '.join(accepted)}", repr(value)))
    shape = tuple(shape)
    generator = torch.Generator().manual_seed(seed)
    numel = math.prod(shape)
    values = _values(flavour, numel, dtype, generator).to(dtype).reshape(shape).to(device)
    if layout == "offset":
        base = torch.zeros(numel + 1, dtype=dtype, device=device)
        return base[1:].view(shape).copy_(values)
    if layout == "strided" and shape:
        wide = torch.zeros((*shape[:-1], shape[-1] * 2), dtype=dtype, device=device)
        return wide[..., ::2].copy_(values)
    if layout == "transposed" and len(shape) >= 2:
        return values.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "expanded" and shape and shape[0] > 1:
        return values[:1].expand(shape)
    return values


def float_tensors(
    dtype: torch.dtype = torch.float32,
    shape: Sequence[int] | SearchStrategy[tuple[int, ...]] | None = None,
    device: str | torch.device = "cpu",
    *,
    flavours: Sequence[str] = FLAVOURS,
    layouts: Sequence[str] = LAYOUTS,
) -> SearchStrategy[torch.Tensor]:
    """Draw floating tensors: zeros, denormals, large values and outliers, contiguous or not; all finite.

    Args:
        dtype: Floating dtype.
        shape: A shape, a strategy of shapes, or `None` for `shapes()`.
        device: Where the tensors lie.
        flavours: The kinds of values to draw from; see `make_tensor`.
        layouts: The kinds of layout to draw from; pass `("contiguous",)` for functions that demand it.

    Returns:
        A strategy of tensors.

    Raises:
        MissingDependencyError: hypothesis is not installed.

    Example:
        >>> strategy = float_tensors(torch.bfloat16, (4, 8), layouts=("contiguous", "strided"))
    """
    st = _strategies()
    if shape is None:
        shape = shapes()
    size = shape if hasattr(shape, "map") else st.just(tuple(shape))
    drawn: SearchStrategy[torch.Tensor] = st.builds(
        make_tensor,
        size,
        dtype=st.just(dtype),
        device=st.just(device),
        flavour=st.sampled_from(list(flavours)),
        layout=st.sampled_from(list(layouts)),
        seed=st.integers(0, 2**31 - 1),
    )
    return drawn
