"""The bytes of a tensor: which they are, and how to put them back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ts_core.errors import ArgumentTypeError, message

__all__ = ["Layout", "copy_exactly", "flat_bytes", "is_dense", "is_wrapper", "layout_of", "stored_form"]

_wraps: Callable[[object], bool] = is_traceable_wrapper_subclass
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Layout:
    """Shape, strides (of elements) and dtype of a tensor whose elements fill its memory without gaps."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self) -> torch.Tensor:
        """Make an uninitialised tensor of this layout."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype)

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """View uint8 memory of `nbytes` bytes as such a tensor."""
        return memory.view(self.dtype).as_strided(self.shape, self.strides)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of this shape and dtype has its elements in the same order in memory."""
        return _order(tuple(tensor.stride()), self.shape) == _order(self.strides, self.shape)


def _order(strides: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    # The stride of a dimension of size 1 is arbitrary.
    return tuple(stride for stride, size in zip(strides, shape, strict=True) if size != 1)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a stretch of memory, each byte belonging to one of them.

    Args:
        tensor: Any strided tensor.

    Returns:
        False for views with gaps, repeated rows or overlaps.

    Example:
        >>> is_dense(torch.zeros(3, 4).t()), is_dense(torch.zeros(3, 4)[:, :2])
        (True, False)
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return True
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory of its own but wraps others, as a quantized one does."""
    return type(tensor) is not torch.Tensor and bool(_wraps(tensor))


def stored_form(tensor: object, function: str) -> torch.Tensor:
    """Return a dense CPU tensor with the same values: the tensor itself without its graph, or a copy.

    Args:
        tensor: What the user gave.
        function: Name of the public function, for the message.

    Returns:
        A dense tensor; strides are kept if they were dense, otherwise as `torch.empty_like` makes them.

    Raises:
        ArgumentTypeError: Not a strided CPU tensor, or a wrapper around others.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(message(function, "tensor", "a tensor", tensor))
    if is_wrapper(tensor):
        hint = "Store the tensors that it holds, one by one"
        raise ArgumentTypeError(message(function, "tensor", "a plain tensor", type(tensor).__name__, hint))
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        given = f"a {tensor.layout} one on {tensor.device}"
        hint = "Copy it to the host first"
        raise ArgumentTypeError(message(function, "tensor", "a strided CPU tensor", given, hint))
    with torch._C.DisableTorchFunctionSubclass():
        plain = tensor.detach().as_subclass(torch.Tensor)
    plain = plain.resolve_conj().resolve_neg()
    if is_dense(plain):
        return plain
    return copy_exactly(torch.empty_like(plain), plain)


def layout_of(tensor: torch.Tensor) -> Layout:
    """Describe a dense tensor."""
    return Layout(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View the memory of a dense tensor as uint8, in the order of its addresses.

    Args:
        tensor: A dense tensor with at least one element.

    Returns:
        A uint8 view of shape `(nbytes,)`.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def copy_exactly(dst: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    """Copy bit patterns, NaN payloads included, between tensors of one shape and dtype; returns `dst`."""
    with torch.no_grad():
        _integers(dst.detach()).copy_(_integers(src))
    return dst


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    # A float-aware copy may quieten NaNs; integers have none. complex128 is two of eight bytes.
    if tensor.dtype == torch.complex128:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGER[tensor.dtype.itemsize])
