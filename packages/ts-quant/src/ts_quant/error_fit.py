r"""A low-rank fit of what quantization loses, and adapters that start from it.

With a weight $W$ of shape (out, in), $Q_0 = \mathrm{q}(W)$, and $B_t A_t$ the best approximation of rank $r$
of $W - Q_t$, the alternation is $Q_{t+1} = \mathrm{q}(W - B_t A_t)$.

Source: Li et al. 2023, LoftQ, arXiv:2310.08659, algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .functional import quantize
from .tensor import QuantizedTensor

__all__ = ["fit_numel", "fits", "init_lora_from_error", "quantize_with_error"]

_CHUNK, _CHUNK_CUDA = (
    1 << 16,
    1 << 22,
)  # elements that are widened to float64 at a time; on a CPU in its cache


def fits(tensor: torch.Tensor, rank: int) -> bool:
    """Whether factors of this rank are made for a weight.

    Args:
        tensor: The weight.
        rank: Rank of the fit.

    Returns:
        True for matrices with values (not on the meta device) that are larger than their two factors.

    Example:
        >>> fits(torch.ones(64, 64), 8), fits(torch.ones(64, 64), 32), fits(torch.ones(2, 64, 64), 8)
        (True, False, False)
    """
    return not tensor.is_meta and fit_numel(tuple(tensor.shape), rank) > 0


def fit_numel(shape: Sequence[int], rank: int) -> int:
    """Return how many values the factors of a weight have; 0 if none are made for it.

    Args:
        shape: Of the weight.
        rank: Rank of the fit.

    Returns:
        The values of both factors together.

    Example:
        >>> fit_numel((64, 64), 8), fit_numel((64, 64), 32), fit_numel((2, 64, 64), 8)
        (1024, 0, 0)
    """
    both = rank * sum(shape)
    return both if len(shape) == 2 and both < math.prod(shape) else 0


def _rows(matrix: torch.Tensor) -> int:
    """Rows that are widened together."""
    return max((_CHUNK_CUDA if matrix.is_cuda else _CHUNK) // max(matrix.shape[1], 1), 1)


def _chunks(matrix: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a matrix in float64, some rows at a time."""
    rows = _rows(matrix)
    for first in range(0, matrix.shape[0], rows):
        yield matrix[first : first + rows].double()


def low_rank(matrix: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Return the best approximation $B A$ of a matrix, by its largest singular values.

    The right singular vectors $V$ are eigenvectors of $E^T E$, summed in float64; then $B A = (E V) V^T$,
    the singular value shared evenly between the two. Where it is the shorter side, $E E^T$ stands in.

    Args:
        matrix: (rows, columns), float32, on any device.
        rank: At most the shorter side.

    Returns:
        B (rows, rank) and A (rank, columns), float32, on the same device.

    Example:
        >>> b, a = low_rank(torch.outer(torch.arange(1.0, 5.0), torch.ones(6)), 1)
        >>> torch.allclose(b @ a, torch.outer(torch.arange(1.0, 5.0), torch.ones(6)))
        True
    """
    if matrix.shape[0] < matrix.shape[1]:
        b, a = low_rank(matrix.T, rank)
        return a.T.contiguous(), b.T.contiguous()
    gram = torch.zeros(2 * matrix.shape[1:], dtype=torch.float64, device=matrix.device)
    for part in _chunks(matrix):
        gram.addmm_(part.T, part)
    vectors = torch.linalg.eigh(gram).eigenvectors[:, -rank:].flip(1)
    del gram
    left = torch.cat([part @ vectors for part in _chunks(matrix)])
    root = torch.linalg.vector_norm(left, dim=0).sqrt()
    b = torch.where(root > 0, left / root, 0.0)
    return b.float(), (root[:, None] * vectors.T).float()


def square_error(tensor: torch.Tensor, other: torch.Tensor | None = None) -> float:
    """Return the sum of squares of a tensor, or of what another differs by, in float64."""
    parts = [
        _chunks(t.reshape(max(t.shape[0], 1) if t.dim() else 1, -1)) for t in (tensor, other) if t is not None
    ]
    if other is None:
        return sum(float(part.square().sum()) for part in parts[0])
    return sum(float((x - y).square().sum()) for x, y in zip(*parts, strict=True))


def quantize_with_error(
    tensor: torch.Tensor,
    codec: str,
    rank: int,
    iters: int = 1,
    *,
    block_size: int = 64,
    double_quant: bool = False,
    name: str = "tensor",
) -> QuantizedTensor:
    r"""Encode a matrix and keep a low-rank fit of the error with it.

    The iterate with the smallest $\|W - Q - BA\|_F$ is kept, so more of them never make it worse. One
    iteration leaves the packed bytes as `quantize` makes them. On top of the weight, two float32 matrices of
    its size are alive.

    Args:
        tensor: Weight of shape (out, in), of a dtype that `quantize` takes.
        codec: Name of the codec.
        rank: Rank of the fit; 0, or a tensor that `fits` says no to, gives what `quantize` does.
        iters: How often to quantize and refit, >= 1.
        block_size: Values per scale.
        double_quant: Quantize the scales too, where the codec can.
        name: What to call the tensor in messages.

    Returns:
        The tensor; its `error_a` (rank, in) and `error_b` (out, rank) have the dtype of `tensor`.

    Raises:
        ArgumentError: A NaN or an infinity in the tensor.

    Example:
        >>> made = quantize_with_error(torch.randn(64, 32), "nf4", 4)
        >>> made.error_b.shape, made.error_a.shape
        (torch.Size([64, 4]), torch.Size([4, 32]))

    Source: LoftQ, arXiv:2310.08659.
    """
    tensor = tensor.detach()
    best = quantize(tensor, codec, block_size=block_size, double_quant=double_quant, name=name)
    if not fits(tensor, rank):
        return best
    with torch.no_grad():
        made, least = best, float("inf")
        for step in range(iters):
            rest = tensor.float() - made.dequantize().float()
            b, a = (part.to(tensor.dtype) for part in low_rank(rest, rank))
            lost = _not_fitted(rest, a, b)
            del rest
            if lost < least:
                best, least = made.with_error(a, b), lost
            if step + 1 < iters:
                target = (tensor.float() - b.float() @ a.float()).clamp_(*_range(tensor.dtype))
                again = quantize(
                    target, best.codec, block_size=block_size, double_quant=double_quant, name=name
                )
                del target
                made = best.with_packed(again.packed)
                del again
    return best


def _not_fitted(rest: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the square of the norm of what the factors leave of an error, in float64."""
    wide = a.double()
    parts = zip(_chunks(rest), b.double().split(_rows(rest)), strict=True)  # type: ignore[no-untyped-call]
    return sum(float((part - rows @ wide).square().sum()) for part, rows in parts)


def _range(dtype: torch.dtype) -> tuple[float, float]:
    """Return what a dtype can hold: the decoded weight has to stay finite in it."""
    limits = torch.finfo(dtype)
    return limits.min, limits.max


def init_lora_from_error(model: nn.Module, *, only_fresh: bool = False) -> int:
    r"""Start LoRA adapters from the quantization error of the weights they adapt.

    For a PEFT LoRA layer over a packed weight with factors, $A$ and $B / \mathrm{scaling}$ become the first
    $r$ components of the fit, so that the layer begins at $x (Q + BA)^T$. An adapter of a higher rank than
    the fit has zeros in what is left of $B$; what is left of $A$ keeps its values, so that the rest can
    learn. Layers without factors, DoRA layers and adapters with a scaling of zero are left alone.

    Args:
        model: Any module; recognised are modules with `lora_A`, `lora_B` (modules by adapter name), `scaling`
            and a `base_layer`. Every adapter is set: of several, activate one at a time.
        only_fresh: Leave adapters alone whose B is not zero: they were trained.

    Returns:
        How many adapters of layers were set.

    Example:
        >>> init_lora_from_error(nn.Linear(4, 4))
        0

    Source: LoftQ, arXiv:2310.08659.
    """
    return sum(
        _start(layer, name, only_fresh)
        for layer in model.modules()
        if isinstance(getattr(layer, "lora_A", None), nn.ModuleDict)
        and isinstance(getattr(layer, "lora_B", None), nn.ModuleDict)
        for name in layer.lora_A  # type: ignore[union-attr]
    )


def _start(layer: Any, name: str, only_fresh: bool) -> bool:
    """Set one adapter of one layer; return whether that could be done."""
    weight = getattr(getattr(layer, "base_layer", None), "weight", None)
    factors = weight.error_factors if isinstance(weight, QuantizedTensor) else None
    scaling = getattr(layer, "scaling", {}).get(name, 0)
    dora = getattr(layer, "use_dora", {})
    if factors is None or name not in layer.lora_B or not scaling or dict(dora).get(name, False):
        return False
    fit_a, fit_b = factors
    if getattr(layer, "fan_in_fan_out", False):
        fit_a, fit_b = fit_b.T, fit_a.T
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    rank = a.shape[0]
    if tuple(a.shape) != (rank, fit_a.shape[1]) or tuple(b.shape) != (fit_b.shape[0], rank):
        return False
    with torch.no_grad():
        if only_fresh and bool(b.any()):
            return False
        shared = min(rank, fit_a.shape[0])
        a[:shared] = fit_a[:shared].to(a)
        b.zero_()
        b[:, :shared] = (fit_b[:, :shared].float() / scaling).to(b)
    return True
