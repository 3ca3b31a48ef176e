"""What a codec is: one object that says how values are packed, and packs and decodes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ts_core import registry
from ts_core.dtypes import dtype_name
from ts_core.errors import ArgumentError, ArgumentTypeError, OptionError, message

from .._ops import FLOATS
from .meta import Meta

__all__ = ["Packed", "PackedCodec", "Part", "check_parts", "decode", "encoding_names", "parts_of"]

Packed = dict[str, torch.Tensor]


class Part(NamedTuple):
    """One packed tensor of a codec.

    Attributes:
        dtype: Its dtype.
        shape: Its shape; it is contiguous.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]


class PackedCodec:
    """Base of the codecs of this package.

    A subclass sets `name`, says in `parts` what it makes of a tensor, and decodes. One that only reads what
    others published leaves `encode` alone. Whatever a subclass is handed as `meta` may also be an integer:
    the block size alone.

    Attributes:
        name: The name users write.
        encodes: Whether `encode` packs; False for published formats that are kept as they came.
    """

    name: str
    encodes: bool = True

    def __repr__(self) -> str:
        """Name the codec."""
        return f"{type(self).__name__}({self.name!r})"

    def meta(self, block_size: int, *, double_quant: bool = False) -> Meta:
        """Make what `encode` is to be told from the options of `quantize`.

        Args:
            block_size: Values per scale; a format with a fixed layout ignores it.
            double_quant: Quantize the scales too.

        Returns:
            The description of the packing that the tensor keeps.

        Raises:
            OptionError: The codec has no such option.
        """
        if double_quant:
            raise OptionError(f"option double_quant: the codec {self.name!r} has no scales to quantize again")
        return Meta(block_size)

    def meta_of(self, meta: Meta | int) -> Meta:
        """Take a description, or a block size alone.

        Args:
            meta: Either.

        Returns:
            The description.
        """
        return meta if isinstance(meta, Meta) else self.meta(meta)

    def check_meta(self, meta: Meta, function: str) -> None:
        """Refuse a description that no tensor of this codec can have; it may come from a file.

        Args:
            meta: The description.
            function: Whose argument it is.

        Raises:
            ArgumentError: It does not fit.
        """

    def parts(self, shape: Sequence[int], meta: Meta | int) -> dict[str, Part]:
        """List the packed tensors of a tensor.

        Args:
            shape: Its shape.
            meta: Description of the packing.

        Returns:
            Dtype and shape of each by name, in the order of the packed tensors.

        Raises:
            ArgumentError: The format cannot hold such a shape.
        """
        raise NotImplementedError

    def packed_bytes(self, shape: int | Sequence[int], meta: Meta | int) -> int:
        """Return the bytes that a tensor takes when packed.

        Args:
            shape: Its shape, or the number of values of a one-dimensional one.
            meta: Description of the packing.

        Returns:
            Bytes of all packed tensors.
        """
        dims = (shape,) if isinstance(shape, int) else tuple(shape)
        return sum(dtype.itemsize * math.prod(size) for dtype, size in self.parts(dims, meta).values())

    def encode(self, tensor: torch.Tensor, meta: Meta | int, *, name: str = "tensor") -> Packed:
        """Pack a tensor of any shape and layout.

        Args:
            tensor: float32, float16 or bfloat16, finite; CPU or CUDA. Not written.
            meta: Description of the packing.
            name: What to call the tensor in messages.

        Returns:
            The packed tensors by name, on the tensor's device.

        Raises:
            OptionError: The codec only decodes what was published in its format.
            ArgumentTypeError: Not one of the three dtypes.
            ArgumentError: A description that does not fit, or a NaN or an infinity in the tensor.
        """
        raise OptionError(
            f"[quantize] codec {self.name!r}: it decodes weights that were published in this format and "
            f"makes none; {name!r} can be packed as one of " + ", ".join(map(repr, encoding_names()))
        )

    def decode(
        self,
        packed: Packed,
        shape: Sequence[int],
        dtype: torch.dtype,
        meta: Meta | int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Decode to a new tensor or into a given one.

        Args:
            packed: The packed tensors.
            shape: Shape of the result.
            dtype: float32, float16 or bfloat16.
            meta: Description of the packing.
            out: Contiguous tensor of `shape` and `dtype` on the same device that is written; `None`
                allocates.

        Returns:
            The values, computed in fp32 and rounded once; `out` if given.

        Raises:
            ArgumentError: Sizes, layout or device do not fit together.
            ArgumentTypeError: A dtype does not fit.
        """
        raise NotImplementedError

    def narrow(
        self, packed: Packed, shape: Sequence[int], start: int, length: int, meta: Meta | int
    ) -> Packed | None:
        """Cut rows out of the packed tensors without decoding.

        Args:
            packed: The packed tensors.
            shape: Shape of the packed tensor, at least one dimension.
            start: First index along dimension 0.
            length: How many indices.
            meta: Description of the packing.

        Returns:
            Views of the packed tensors, or `None` if that cannot be done.
        """
        return None

    def reshape(
        self, packed: Packed, shape: Sequence[int], size: Sequence[int], meta: Meta | int
    ) -> Packed | None:
        """Give the packed tensors of the same values in another shape, without decoding.

        Args:
            packed: The packed tensors.
            shape: Shape of the packed tensor.
            size: The other shape, of as many values.
            meta: Description of the packing.

        Returns:
            Views of the packed tensors, or `None` if that cannot be done.
        """
        return None

    def check_fixed(self, meta: Meta, function: str) -> None:
        """Raise `ArgumentError` unless the description is the only one that a fixed layout has."""
        wanted = self.meta(2)
        if meta != wanted:
            raise ArgumentError(message(function, "meta", f"{wanted} for {self.name!r}", meta))

    def check_source(self, tensor: torch.Tensor, name: str) -> None:
        """Raise `ArgumentTypeError` unless the tensor has one of the dtypes that are encoded."""
        if tensor.dtype not in FLOATS:
            raise ArgumentTypeError(
                message("quantize", name, "a float32, float16 or bfloat16 tensor", dtype_name(tensor.dtype))
            )

    def check_out(self, out: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Raise unless `out` has the shape and the dtype."""
        if out.dtype != dtype:
            raise ArgumentTypeError(
                message("dequantize", "out", f"a {dtype_name(dtype)} tensor", dtype_name(out.dtype))
            )
        if out.shape != torch.Size(shape):
            raise ArgumentError(message("dequantize", "out", f"shape {tuple(shape)}", str(tuple(out.shape))))

    def not_finite(self, name: str, tensor: torch.Tensor, where: str) -> ArgumentError:
        """Make the error for a NaN or an infinity; `where` says near which element."""
        return ArgumentError(
            message(
                "quantize",
                name,
                "finite values",
                f"a NaN or an infinity {where}, in shape {tuple(tensor.shape)}",
                "Look at how the checkpoint was written; torch.nan_to_num replaces such values",
            )
        )


def encoding_names() -> list[str]:
    """List the registered codecs that pack; the others only decode what was published in their format."""
    return [name for name in registry.codecs() if getattr(registry.codec(name), "encodes", True)]


def parts_of(codec: str, shape: Sequence[int], meta: Meta | int) -> dict[str, Part] | None:
    """List the packed tensors of a registered codec; `None` for one from elsewhere that does not say."""
    found: Any = registry.codec(codec)
    return found.parts(tuple(shape), meta) if hasattr(found, "parts") else None


def check_parts(
    packed: Mapping[str, Any], codec: str, shape: tuple[int, ...], meta: Meta, function: str
) -> None:
    """Check that packed tensors are what a codec makes of a tensor.

    Args:
        packed: The packed tensors.
        codec: Name of a registered codec.
        shape: Shape of the tensor.
        meta: Description of the packing.
        function: Whose arguments they are.

    Raises:
        OptionError: Unknown codec.
        ArgumentError: A tensor is missing or left over, or has another size, layout or device than expected.
        ArgumentTypeError: A tensor has another dtype than expected.
    """
    for name, tensor in packed.items():
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentTypeError(message(function, f"packed[{name!r}]", "a tensor", type(tensor).__name__))
    found: Any = registry.codec(codec)
    if not hasattr(found, "parts"):  # a codec from elsewhere checks when it decodes
        return
    found.check_meta(meta, function)
    parts: dict[str, Part] = found.parts(shape, meta)
    if set(packed) != set(parts):
        raise ArgumentError(message(function, "packed", f"the tensors {sorted(parts)}", str(sorted(packed))))
    device = next(iter(packed.values())).device
    for name, (kind, size) in parts.items():
        tensor = packed[name]
        if tensor.dtype != kind:
            given = dtype_name(tensor.dtype)
            raise ArgumentTypeError(message(function, f"packed[{name!r}]", dtype_name(kind), given))
        if tuple(tensor.shape) != size or not tensor.is_contiguous() or tensor.device != device:
            raise ArgumentError(
                message(
                    function,
                    f"packed[{name!r}]",
                    f"a contiguous tensor of shape {size} on {device}",
                    f"shape {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}",
                )
            )


def decode(
    packed: Packed,
    codec: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    meta: Meta,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode packed tensors to any floating dtype; those without a kernel go through fp32."""
    found = registry.codec(codec)
    size = tuple(shape)
    if dtype in FLOATS:
        return found.decode(packed, size, dtype, meta, out)
    if not dtype.is_floating_point:
        raise ArgumentTypeError(message("dequantize", "dtype", "a floating dtype", dtype_name(dtype)))
    exact = found.decode(packed, size, torch.float32, meta)
    return exact.to(dtype) if out is None else out.copy_(exact)
