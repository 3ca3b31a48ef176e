"""The codecs of this package, registered with `ts_core.registry` under their names.

A codec is one object: a format (layout and operations) plus what callers need to know about it. To add one,
write its kernels, declare its operations, and register it here.
"""

from __future__ import annotations

import math

import torch

from ts_core import registry
from ts_core.dtypes import dtype_name
from ts_core.errors import ArgumentError, ArgumentTypeError, message
from ts_core.hardware import register_rates

from ._ops import FLOATS, INT8, NF4, Format, check_block_size

__all__ = ["INT8_CODEC", "NF4_CODEC", "BlockCodec", "decode"]

Packed = dict[str, torch.Tensor]


class BlockCodec:
    """A codec that stores one code per element and one fp32 absmax per block.

    Example:
        >>> NF4_CODEC.packed_bytes(128, 64)
        72
    """

    def __init__(self, layout: Format) -> None:
        """Wrap a format.

        Args:
            layout: Layout and operations.
        """
        self._format = layout

    def __repr__(self) -> str:
        """Name the codec."""
        return f"BlockCodec({self.name!r})"

    @property
    def name(self) -> str:
        """The name users write."""
        return self._format.name

    def layout(self, numel: int, block_size: int) -> dict[str, tuple[torch.dtype, int]]:
        """List the packed tensors of `numel` values.

        Args:
            numel: Number of values.
            block_size: Values per scale.

        Returns:
            By name, the dtype and the number of elements; each tensor is one-dimensional and contiguous.
        """
        return {
            "codes": (self._format.codes, -(-numel // self._format.per_byte)),
            "absmax": (torch.float32, -(-numel // block_size)),
        }

    def packed_bytes(self, numel: int, block_size: int) -> int:
        """Return the bytes that `numel` values take when encoded.

        Args:
            numel: Number of values.
            block_size: Values per scale.

        Returns:
            Bytes of codes and scales.
        """
        return sum(dtype.itemsize * count for dtype, count in self.layout(numel, block_size).values())

    def encode(self, tensor: torch.Tensor, block_size: int, *, name: str = "tensor") -> Packed:
        """Encode a tensor of any shape and layout.

        Args:
            tensor: float32, float16 or bfloat16, finite; CPU or CUDA. Not written.
            block_size: Values per scale, even, >= 2.
            name: What to call the tensor in messages.

        Returns:
            `{"codes", "absmax"}` on the tensor's device. On CUDA the call waits for the device once, for the
            check below.

        Raises:
            ArgumentTypeError: Not one of the three dtypes.
            ArgumentError: A bad block size, or a NaN or an infinity in the tensor.
        """
        if tensor.dtype not in FLOATS:
            raise ArgumentTypeError(
                message("quantize", name, "a float32, float16 or bfloat16 tensor", dtype_name(tensor.dtype))
            )
        check_block_size("quantize", block_size)
        with torch.no_grad():
            codes, absmax = self._format.quantize(tensor, block_size)
            # A block's absmax is its largest magnitude compared as bits: not finite if any element is not.
            if not absmax.is_meta and not bool(torch.isfinite(absmax).all()):
                bad = int((~torch.isfinite(absmax)).nonzero()[0]) * block_size
                raise ArgumentError(
                    message(
                        "quantize",
                        name,
                        "finite values",
                        f"a NaN or an infinity among the elements from flat index {bad} on, in shape "
                        f"{tuple(tensor.shape)}",
                        "Look at how the checkpoint was written; torch.nan_to_num replaces such values",
                    )
                )
        return {"codes": codes, "absmax": absmax}

    def decode(
        self,
        packed: Packed,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        block_size: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Decode to a new tensor or into a given one.

        Args:
            packed: As `encode` returned it.
            shape: Shape of the result.
            dtype: float32, float16 or bfloat16.
            block_size: As in `encode`.
            out: Contiguous tensor of `shape` and `dtype` on the same device that is written; `None`
                allocates.

        Returns:
            The values, computed in fp32 and rounded once; `out` if given.

        Raises:
            ArgumentError: Sizes, layout or device do not fit together.
            ArgumentTypeError: A dtype does not fit.
        """
        codes, absmax = packed["codes"], packed["absmax"]
        if out is None:
            return self._format.dequantize(codes, absmax, shape, dtype, block_size)
        if out.dtype != dtype:
            raise ArgumentTypeError(
                message("dequantize", "out", f"a {dtype_name(dtype)} tensor", dtype_name(out.dtype))
            )
        if out.shape != torch.Size(shape):
            raise ArgumentError(message("dequantize", "out", f"shape {tuple(shape)}", str(tuple(out.shape))))
        self._format.dequantize_out(codes, absmax, out, block_size)
        return out

    def narrow(
        self, packed: Packed, shape: tuple[int, ...], start: int, length: int, block_size: int
    ) -> Packed | None:
        """Cut rows out of the packed tensors without decoding.

        Args:
            packed: As `encode` returned it.
            shape: Shape of the encoded tensor, at least one dimension.
            start: First index along dimension 0.
            length: How many indices.
            block_size: As in `encode`.

        Returns:
            Views of the packed tensors, or `None` if the cut does not fall between blocks.
        """
        row = math.prod(shape[1:])
        if (start * row) % block_size or (length * row) % block_size:
            return None
        first, count, per_byte = start * row, length * row, self._format.per_byte
        return {
            "codes": packed["codes"].narrow(0, first // per_byte, count // per_byte),
            "absmax": packed["absmax"].narrow(0, first // block_size, count // block_size),
        }


NF4_CODEC = BlockCodec(NF4)
"""4 bits a value: 16 quantiles of the normal distribution, times the block's absmax."""

INT8_CODEC = BlockCodec(INT8)
"""8 bits a value: 255 even steps from -absmax to absmax."""

for _codec in (NF4_CODEC, INT8_CODEC):
    registry.register_codec(_codec)
register_rates("decode_weights_per_s", "ts_quant.rates:decode_rates")


def decode(
    packed: Packed,
    codec: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    block_size: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode packed tensors to any floating dtype; those without a kernel go through fp32."""
    found = registry.codec(codec)
    if dtype in FLOATS:
        return found.decode(packed, shape, dtype, block_size, out)
    if not dtype.is_floating_point:
        raise ArgumentTypeError(message("dequantize", "dtype", "a floating dtype", dtype_name(dtype)))
    exact = found.decode(packed, shape, torch.float32, block_size)
    return exact.to(dtype) if out is None else out.copy_(exact)
