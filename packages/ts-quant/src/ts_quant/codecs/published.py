"""What codecs share that decode weights in the form others published them, and never make any."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ts_core.errors import ArgumentError, message

from .._decode_ops import DecodeOps
from .base import Packed, PackedCodec
from .meta import Meta

__all__ = ["PublishedCodec"]


class PublishedCodec(PackedCodec):
    """A codec that keeps what others packed, byte for byte, and decodes it.

    A subclass says in `arguments` how its operation is called.
    """

    encodes = False
    operation: DecodeOps

    def arguments(
        self, packed: Packed, shape: tuple[int, ...], meta: Meta
    ) -> tuple[list[torch.Tensor], tuple[int, ...], tuple[int, ...]]:
        """Say how the operation is called.

        Args:
            packed: The packed tensors.
            shape: Shape of the result.
            meta: Description of the packing.

        Returns:
            The operation's tensors, the shape it gives the result (of as many values), its integers.
        """
        raise NotImplementedError

    def decode(
        self,
        packed: Packed,
        shape: Sequence[int],
        dtype: torch.dtype,
        meta: Meta | int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Decode; see the base class."""
        size = tuple(shape)
        tensors, viewed, numbers = self.arguments(packed, size, self.meta_of(meta))
        if out is None:
            return self.operation.new(*tensors, viewed, dtype, *numbers).view(size)
        self.check_out(out, size, dtype)
        if not out.is_contiguous():
            raise ArgumentError(
                message("dequantize", "out", "a contiguous tensor", f"strides {out.stride()}")
            )
        self.operation.out(*tensors, out.view(viewed), *numbers)
        return out
