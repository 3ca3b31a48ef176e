"""Which weights keep more bits: measured errors, and a choice within a budget of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ts_core import registry
from ts_core.errors import OptionError

from .codecs import resolve
from .error_fit import square_error
from .functional import quantize
from .tensor import QuantizedTensor

__all__ = [
    "NEXT_CODEC",
    "Candidate",
    "choose",
    "keep_precise_share",
    "measure",
    "precise_names",
    "relative_error",
]

NEXT_CODEC = {"nf4": "int8", "nvfp4": "fp8"}
"""The codec that a weight moves up to; "fp8" is what this GPU computes."""

_AUTO, _TOP = 0.05, 0.5


def keep_precise_share(value: Any) -> float:
    """Check `keep_precise` and return the share of extra bytes it stands for.

    Args:
        value: 0, False, None, "auto", True or a fraction up to 0.5.

    Returns:
        The fraction; "auto" and True are 0.05.

    Raises:
        OptionError: Anything else.

    Example:
        >>> keep_precise_share("auto"), keep_precise_share(None)
        (0.05, 0.0)
    """
    if value is None or value is False:
        return 0.0
    if value is True or (isinstance(value, str) and value == "auto"):
        return _AUTO
    if isinstance(value, str) or not isinstance(value, int | float) or not 0.0 <= value <= _TOP:
        raise OptionError(
            f"option keep_precise: expected 0, False, None, 'auto', True or a fraction up to {_TOP}, "
            f"given {value!r}"
        )
    return float(value)


def relative_error(
    tensor: torch.Tensor, packed: QuantizedTensor, *, out: torch.Tensor | None = None
) -> float:
    r"""Measure $\|W - \hat W\|_F / \|W\|_F$, summed in float64; 0 for a weight of zeros.

    Args:
        tensor: The weight.
        packed: What became of it.
        out: Where to decode to, float32; `None` allocates.

    Returns:
        The relative error.

    Example:
        >>> weight = torch.ones(2, 64)
        >>> relative_error(weight, quantize(weight, "int8"))
        0.0
    """
    if tensor.numel() == 0 or tensor.is_meta:
        return 0.0
    whole = square_error(tensor.detach())
    lost = square_error(tensor.detach(), packed.dequantize(torch.float32, out=out))
    return float((lost / whole) ** 0.5) if whole else 0.0


@dataclass(frozen=True)
class Candidate:
    """A weight that could move up one codec.

    Attributes:
        key: Whatever names it.
        plain: Bytes in its codec.
        extra: Bytes more in the next one.
        gain: Relative error less in the next one.
    """

    key: Any
    plain: int
    extra: int
    gain: float


def measure(
    key: Any,
    tensor: torch.Tensor,
    codec: str,
    block_size: int,
    double_quant: bool = False,
    *,
    scratch: torch.Tensor | None = None,
) -> Candidate:
    """Encode a weight in its codec and in the next one, and compare.

    Args:
        key: Whatever names it.
        tensor: The weight.
        codec: A codec of `NEXT_CODEC`.
        block_size: Values per scale.
        double_quant: Quantize the scales too.
        scratch: Memory to decode to, float32, at least as many values as the weight has; `None` allocates.

    Returns:
        Bytes and gain; nothing of the encoded weight is kept.

    Example:
        >>> measure("w", torch.linspace(-1, 1, 128), "nf4", 64).extra
        64
    """
    sizes, errors = [], []
    if scratch is None:
        scratch = torch.empty(tensor.numel(), dtype=torch.float32, device=tensor.device)
    decoded = scratch[: tensor.numel()].view(tensor.shape)
    for each in (codec, NEXT_CODEC[codec]):
        how: Any = {"block_size": block_size, "double_quant": double_quant, "name": str(key)}
        made = quantize(tensor.detach(), each, **how)
        sizes.append(made.packed_bytes)
        errors.append(relative_error(tensor, made, out=decoded))
        del made
    return Candidate(key, sizes[0], sizes[1] - sizes[0], errors[0] - errors[1])


def choose(candidates: Sequence[Candidate], share: float) -> list[Any]:
    """Choose what moves up.

    By falling gain per extra byte (of equal ones the earlier first), everything is taken whose extra bytes
    fit in what is left of `share` times the plain bytes of all candidates. What gains nothing stays.

    Args:
        candidates: In the order of the model.
        share: Extra bytes as a fraction of the plain ones.

    Returns:
        Their keys, in the order of choice. The sum of their extra bytes is within the budget.

    Example:
        >>> choose([Candidate("a", 100, 90, 0.1), Candidate("b", 20, 18, 0.1)], 0.2)
        ['b']
    """
    left = int(share * sum(one.plain for one in candidates))
    chosen = []
    for one in sorted(candidates, key=lambda one: -one.gain / max(one.extra, 1)):
        if one.gain > 0 and one.extra <= left:
            left -= one.extra
            chosen.append(one.key)
    return chosen


def precise_names(
    weights: Iterable[tuple[Any, torch.Tensor]],
    codec: str,
    block_size: int,
    share: float,
    double_quant: bool = False,
) -> frozenset[Any]:
    """Measure weights one by one and choose those that move up one codec.

    Args:
        weights: Pairs (key, weight), in the order of the model.
        codec: Their codec.
        block_size: Values per scale.
        share: Extra bytes as a fraction of the plain ones.
        double_quant: Quantize the scales too.

    Returns:
        The keys; none where there is no next codec.

    Example:
        >>> precise_names([("w", torch.randn(2, 64))], "int8", 64, 0.5)
        frozenset()
    """
    if not share or codec not in NEXT_CODEC or resolve(NEXT_CODEC[codec]) not in registry.codecs():
        return frozenset()
    found = [measure(key, weight, codec, block_size, double_quant) for key, weight in weights]
    return frozenset(choose(found, share))
