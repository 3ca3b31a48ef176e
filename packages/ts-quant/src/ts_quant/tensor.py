"""`QuantizedTensor`: packed bytes that behave as the floating tensor they stand for.

Operations decode and run, with three exceptions: `F.linear` saves only the packed bytes for backward and
decodes again there; moves, copies and views of whole rows act on the packed bytes; writes are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.utils._pytree import tree_map

from ts_core import registry
from ts_core.dtypes import dtype_name
from ts_core.errors import ArgumentError, ArgumentTypeError, StateError, message

from ._linear import linear
from ._scaled_linear import Form, packed_gradient
from .codecs import Meta, Packed, Part, check_parts, decode, parts_of
from .matmul import DEFAULT, Matmul, how
from .products import PRODUCTS, TRANSPOSED

__all__ = ["QuantizedTensor"]

Handler = Callable[..., Any]

_HANDLERS: dict[Any, Handler] = {}
_PREFIX = "packed_"
# PEFT writes to weights when it merges: who meets these errors most often.
_ADAPTERS = "to merge a PEFT adapter into packed weights, call ts_hf.merge_adapters(model)"


class QuantizedTensor(torch.Tensor):
    """A frozen tensor in the packed form of a codec.

    Shape, dtype and device are those of the tensor it stands for. It can be the data of a frozen parameter:
    `nn.Parameter(qt, requires_grad=False)`.

    Attributes:
        codec: Name of the codec.
        meta: How the codec packed it: values per scale and the like.
        error_a: (rank, columns), or None: with `error_b` a fit of what packing lost, kept for adapters to
            start from. It is no part of the value.
        error_b: (rows, rank), or None.
        matmul_options: How `F.linear` multiplies with it; `set_matmul` changes that.

    Example:
        >>> from ts_quant import quantize
        >>> qt = quantize(torch.ones(4, 64))
        >>> qt.shape, qt.packed["codes"].shape
        (torch.Size([4, 64]), torch.Size([128]))
    """

    codec: str
    meta: Meta
    error_a: torch.Tensor | None
    error_b: torch.Tensor | None
    matmul_options: Matmul
    # What the tensor presents, kept here as well: reading .shape or .dtype goes through __torch_function__.
    _names: tuple[str, ...]
    _shape: tuple[int, ...]
    _dtype: torch.dtype

    @staticmethod
    def __new__(
        cls: type[QuantizedTensor],
        packed: Mapping[str, torch.Tensor],
        codec: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        meta: Meta | int,
    ) -> QuantizedTensor:
        """Wrap packed tensors, unchecked; `from_packed` checks them.

        Args:
            cls: The class.
            packed: The codec's tensors by name; kept, not copied.
            codec: Name of the codec.
            shape: Shape that is presented.
            dtype: Floating dtype that is presented.
            meta: Description of the packing, or a block size alone.

        Returns:
            The tensor.
        """
        first = next(iter(packed.values()))
        self = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=first.device, requires_grad=False
        )
        self.codec = codec
        self.meta = meta if isinstance(meta, Meta) else Meta(meta)
        self._names = tuple(packed)
        self._shape = tuple(shape)
        self._dtype = dtype
        self.error_a = self.error_b = None
        self.matmul_options = DEFAULT
        for name, tensor in packed.items():
            setattr(self, _PREFIX + name, tensor)
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is left to do after `__new__`."""

    @classmethod
    def from_packed(
        cls,
        packed: Mapping[str, torch.Tensor],
        codec: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        meta: Meta | int,
    ) -> QuantizedTensor:
        """Wrap packed tensors after checking that they are what the codec makes of such a tensor.

        Args:
            packed: The codec's tensors by name; kept, not copied.
            codec: Name of a registered codec.
            shape: Shape that is presented.
            dtype: Floating dtype that is presented.
            meta: Description of the packing, or a block size alone.

        Returns:
            The tensor.

        Raises:
            OptionError: Unknown codec.
            ArgumentError: A tensor is missing or left over, or has another size than expected.
            ArgumentTypeError: A tensor has another dtype than expected.
        """
        described = _check(packed, codec, tuple(shape), dtype, meta)
        names = parts_of(codec, shape, described) or packed
        return cls({name: packed[name] for name in names}, codec, shape, dtype, described)

    @property
    def block_size(self) -> int:
        """Consecutive values that share a scale; 0 where the format does not work that way."""
        return self.meta.block_size

    @property
    def packed(self) -> Packed:
        """The packed tensors by name; the tensors themselves, not copies."""
        return {name: getattr(self, _PREFIX + name) for name in self._names}

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.packed.values())

    @property
    def error_factors(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The tensors `error_a` and `error_b`, or None."""
        return None if self.error_a is None or self.error_b is None else (self.error_a, self.error_b)

    def with_error(self, a: torch.Tensor, b: torch.Tensor) -> QuantizedTensor:
        """Return the tensor with a low-rank fit of its error beside it.

        Args:
            a: (rank, columns), floating; kept, not copied.
            b: (rows, rank), floating.

        Returns:
            A tensor over the same packed bytes.

        Raises:
            ArgumentError: Shapes that do not fit a matrix of this shape, or no floating tensors.
        """
        good = all(isinstance(t, torch.Tensor) and t.is_floating_point() and t.dim() == 2 for t in (a, b))
        if not good or a.shape[0] != b.shape[1] or (b.shape[0], a.shape[1]) != self._shape:
            given = ", ".join(str(tuple(getattr(t, "shape", ()))) for t in (a, b))
            expected = f"floating matrices (rank, columns) and (rows, rank) for the shape {self._shape}"
            raise ArgumentError(message("QuantizedTensor.with_error", "a, b", expected, given))
        made = QuantizedTensor(self.packed, self.codec, self._shape, self._dtype, self.meta)
        made.error_a, made.error_b, made.matmul_options = a, b, self.matmul_options
        return made

    def dequantize(
        self, dtype: torch.dtype | None = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Decode; see `ts_quant.dequantize`.

        Args:
            dtype: Floating dtype of the result; `None`: that of `out`, else the one presented.
            out: Contiguous tensor that is written; `None` allocates.

        Returns:
            A plain tensor; `out` if given.
        """
        if dtype is None:
            dtype = self._dtype if out is None else out.dtype
        with torch.no_grad():
            return decode(self.packed, self.codec, self._shape, dtype, self.meta, out)

    def with_packed(self, packed: Mapping[str, torch.Tensor]) -> QuantizedTensor:
        """Return the same tensor over copies of its packed tensors that lie elsewhere, without its fit.

        Args:
            packed: The copies by name; kept, unchecked.

        Returns:
            The tensor.
        """
        made = QuantizedTensor(packed, self.codec, self._shape, self._dtype, self.meta)
        made.matmul_options = self.matmul_options
        return made

    def slot_parts(self, device: torch.device) -> dict[str, Part] | None:
        """List what `F.linear` with bf16 inputs computes with on a device.

        Args:
            device: Where.

        Returns:
            Dtype and shape by name: the packed tensors, and those of the transposed weight where the input
            gradient is packed too. None: the weight is decoded there.
        """
        chosen = how(self.codec, self._shape, self._dtype, device, self.matmul_options)
        if chosen is None:
            return None
        product, _, backward = chosen
        parts = {name: Part(t.dtype, tuple(t.shape)) for name, t in self.packed.items()}
        return {**parts, **product.transposed_parts(self._shape)} if backward else parts

    def complete_slot(self, parts: Mapping[str, torch.Tensor]) -> None:
        """Make the packed tensors of the transposed weight, if there is room for them.

        Args:
            parts: All tensors of `slot_parts`; those that `packed` has are there, the others are written.
        """
        if "codes" + TRANSPOSED in parts:
            with torch.no_grad():
                PRODUCTS[self.codec].transpose(parts, self._shape, parts)

    def input_gradient(self, grad: torch.Tensor) -> torch.Tensor | None:
        """Return the input gradient of `F.linear` from packed operands, or None where it is not asked for.

        Args:
            grad: `(..., rows)`, the gradient of the output; no graph is made.

        Returns:
            `(..., columns)` in its dtype; None: multiply by the decoded weight.
        """
        chosen = how(self.codec, self._shape, grad.dtype, grad.device, self.matmul_options)
        if chosen is None or not chosen[2] or grad.dtype != self._dtype or not grad.numel():
            return None
        form = Form(chosen[0], self._shape, chosen[1], True, self.matmul_options.outliers)
        with torch.no_grad():
            return packed_gradient(grad, form, self.packed, torch.Size((*grad.shape[:-1], self._shape[1])))

    def _like(self, packed: Mapping[str, torch.Tensor], **changes: Any) -> QuantizedTensor:
        shape, dtype = changes.get("shape", self._shape), changes.get("dtype", self._dtype)
        made = QuantizedTensor(packed, self.codec, shape, dtype, self.meta)
        made.matmul_options = self.matmul_options
        if tuple(shape) == self._shape:
            made.error_a, made.error_b = self.error_a, self.error_b
        return made

    def _each(self, function: Callable[[torch.Tensor], torch.Tensor], **changes: Any) -> QuantizedTensor:
        made = self._like({name: function(tensor) for name, tensor in self.packed.items()}, **changes)
        if made.error_a is not None and made.error_b is not None:
            made.error_a, made.error_b = function(made.error_a), function(made.error_b)
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Say what it is in one line, without its values."""
        return (
            f"QuantizedTensor({self.codec}, shape={tuple(self.shape)}, dtype={dtype_name(self.dtype)}, "
            f"device={self.device}, block_size={self.block_size}, packed_bytes={self.packed_bytes})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        """Copy the packed bytes and what else was set on the tensor."""
        if id(self) in memo:
            return cast(QuantizedTensor, memo[id(self)])
        copied = self._each(torch.clone)
        memo[id(self)] = copied
        own = {"codec", "meta", "matmul_options", "error_a", "error_b", "_names", "_shape", "_dtype"}
        own |= {_PREFIX + name for name in self._names}
        for key, value in self.__dict__.items():
            if key not in own:
                setattr(copied, key, value)
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle the packed tensors; loads with `torch.load(weights_only=True)`."""
        is_parameter = bool(getattr(self, "_is_param", False))
        state = (self.packed, self.codec, tuple(self.shape), self.dtype, self.meta.plain(), is_parameter)
        if self.matmul_options != DEFAULT:
            return _rebuild, (*state, self.error_factors, tuple(self.matmul_options))
        return _rebuild, state if self.error_factors is None else (*state, self.error_factors)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        """Name the inner tensors, for torch.compile and `nn.Module.to`; nothing computes with the fit."""
        context = self.codec, self.dtype, self.meta.plain(), tuple(self.matmul_options)
        return [_PREFIX + name for name in self._names], context

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> QuantizedTensor:
        """Put the inner tensors together again."""
        codec, dtype, meta, matmul = context
        packed = {name.removeprefix(_PREFIX): tensor for name, tensor in inner.items()}
        made = QuantizedTensor(packed, codec, outer_size, dtype, Meta.of(meta))
        made.matmul_options = Matmul(*matmul)
        return made

    def _stable_hash_for_caching(self) -> str:
        """Name what compiled code depends on, for torch.compile's cache."""
        parts = (
            self.codec,
            tuple(self.shape),
            self.dtype,
            self.meta.plain(),
            self._names,
            tuple(self.matmul_options),
        )
        return repr(parts)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Take `F.linear` aside; refuse what would make the tensor trainable or swap its data."""
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear:
            x, weight, bias = _linear_arguments(*args, **kwargs)
            if isinstance(weight, cls) and not isinstance(x, cls) and not isinstance(bias, cls):
                layout = (weight.codec, weight._shape, weight._dtype, weight.meta)
                return linear(x, bias, weight.packed, *layout, weight.matmul_options)
        elif func in _GUARDED:
            _GUARDED[func](*args[1:], **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on the packed bytes if it is one of moving, else on decoded tensors."""
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(func, *args, **kwargs)
        _refuse_writes(func, args, kwargs)
        return func(*tree_map(_decoded, tuple(args)), **tree_map(_decoded, kwargs))


def _check_requires_grad(requires_grad: bool = True) -> None:
    if requires_grad:
        raise StateError(
            "[QuantizedTensor] requires_grad: expected False, given True: a packed weight is frozen. Use "
            "nn.Parameter(qt, requires_grad=False) and train an adapter beside it, or train dequantize(qt); "
            "before load_state_dict(assign=True), freeze the module"
        )


def _check_data(data: Any) -> None:
    raise StateError(f"[QuantizedTensor] data cannot be replaced: assign a new Parameter; {_ADAPTERS}")


# What would change the tensor behind the back of its packed bytes.
def _no_storage(*args: Any) -> None:
    raise StateError(
        "[QuantizedTensor] a packed weight has no plain storage to read or save. To save the model with "
        "ordinary weights, call ts_hf.save_model(model, folder) or ts_quant.dequantize_model(model); to keep "
        "it packed, store what ts_quant.to_safetensors_dict(name, weight) returns"
    )


_GUARDED: dict[Any, Callable[..., None]] = {
    torch.Tensor.storage: _no_storage,
    torch.Tensor.data_ptr: _no_storage,
    torch.Tensor.requires_grad_: _check_requires_grad,
    cast(Any, torch.Tensor.requires_grad).__set__: _check_requires_grad,
    cast(Any, torch.Tensor.data).__set__: _check_data,
}


def _linear_arguments(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    return input, weight, bias


def _decoded(value: Any) -> Any:
    return value.dequantize() if isinstance(value, QuantizedTensor) else value


def _check(packed: Mapping[str, Any], codec: str, shape: tuple[Any, ...], dtype: Any, meta: Any) -> Meta:
    function = "QuantizedTensor.from_packed"
    if any(type(size) is not int or size < 0 for size in shape):
        raise ArgumentError(message(function, "shape", "integers >= 0", shape))
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ArgumentTypeError(message(function, "dtype", "a floating dtype", str(dtype)))
    if not packed:
        raise ArgumentError(message(function, "packed", "packed tensors", "none"))
    described = Meta.of(meta)
    check_parts(packed, codec, shape, described, function)
    return described


def _rebuild(
    packed: Packed,
    codec: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    meta: Any,
    is_parameter: bool,
    error: tuple[torch.Tensor, torch.Tensor] | None = None,
    matmul: tuple[Any, ...] = DEFAULT,
) -> QuantizedTensor:
    """Make a tensor from a pickle; the parts may come from anywhere, so they are checked."""
    made = QuantizedTensor.from_packed(packed, codec, shape, dtype, meta)
    made.matmul_options = Matmul(*matmul)
    if error is not None:
        made = made.with_error(*error)
    if is_parameter:
        made._is_param = True
    return made


torch.serialization.add_safe_globals([_rebuild, QuantizedTensor])


def _refuse_writes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if `func` would write to a QuantizedTensor."""
    if not func._schema.is_mutable:
        return
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(item, QuantizedTensor) for item in values):
            raise StateError(
                f"[{func}] {argument.name}: expected a tensor that can be written, given a QuantizedTensor, "
                f"whose values are packed. Compute on dequantize() and quantize() the result; {_ADAPTERS}"
            )


def _on(*ops: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for op in ops:
            _HANDLERS[op] = handler
        return handler

    return register


_aten = cast(Any, torch.ops.aten)


@_on(_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default)
def _same(func: Any, self: QuantizedTensor) -> QuantizedTensor:
    return self._like(self.packed)


@_on(_aten.clone.default)
def _clone(func: Any, self: QuantizedTensor, *, memory_format: Any = None) -> QuantizedTensor:
    return self._each(torch.clone)


@_on(_aten._to_copy.default)
def _to_copy(
    func: Any, self: QuantizedTensor, *, dtype: torch.dtype | None = None, **where: Any
) -> torch.Tensor:
    if dtype is not None and not dtype.is_floating_point:
        return cast(torch.Tensor, func(self.dequantize(torch.float32), dtype=dtype, **where))
    device, pin_memory = where.get("device"), where.get("pin_memory")
    moves = (device is not None and torch.device(device) != self.device) or pin_memory
    if not moves:  # the presented dtype alone changes: the bytes are shared
        return self._like(self.packed, dtype=dtype or self.dtype)
    kept = {"device": device, "pin_memory": pin_memory, "non_blocking": where.get("non_blocking", False)}
    return self._each(lambda t: cast(torch.Tensor, func(t, **kept)), dtype=dtype or self.dtype)


@_on(_aten._pin_memory.default)
def _pin_memory(func: Any, self: QuantizedTensor, device: Any = None) -> QuantizedTensor:
    return self._each(lambda t: t.pin_memory())


@_on(_aten.is_pinned.default)
def _is_pinned(func: Any, self: QuantizedTensor, device: Any = None) -> bool:
    return all(t.is_pinned() for t in self.packed.values())


@_on(_aten.record_stream.default)
def _record_stream(func: Any, self: QuantizedTensor, stream: Any) -> None:
    for tensor in self.packed.values():
        tensor.record_stream(stream)


@_on(_aten.empty_like.default)
def _empty_like(func: Any, self: QuantizedTensor, **options: Any) -> torch.Tensor:
    options.pop("memory_format", None)
    dtype, device = options.pop("dtype", None) or self.dtype, options.pop("device", None) or self.device
    return torch.empty(self.shape, dtype=dtype, device=device, **options)


def _interchangeable(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    return (a.codec, a.shape, a.meta) == (b.codec, b.shape, b.meta)


@_on(_aten.equal.default)
def _equal(func: Any, a: torch.Tensor, b: torch.Tensor) -> bool:
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor) and _interchangeable(a, b):
        pairs = zip(a.packed.values(), b.packed.values(), strict=True)
        if a.dtype == b.dtype and all(torch.equal(x, y) for x, y in pairs):
            return True
    return bool(torch.equal(_decoded(a), _decoded(b)))


@_on(_aten.copy_.default)
def _copy_(func: Any, self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not isinstance(self, QuantizedTensor):
        return cast(torch.Tensor, func(self, _decoded(src), non_blocking))
    if not isinstance(src, QuantizedTensor):
        raise ArgumentTypeError(
            message(
                "QuantizedTensor.copy_",
                "src",
                "a QuantizedTensor (packed bytes are copied, never encoded again)",
                f"a {dtype_name(src.dtype)} tensor",
                f"Replace the parameter: module.weight = nn.Parameter(ts_quant.quantize(src, {self.codec!r}, "
                f"block_size={self.block_size}), requires_grad=False), or load with assign=True; {_ADAPTERS}",
            )
        )
    if not _interchangeable(self, src):
        raise ArgumentError(message("QuantizedTensor.copy_", "src", f"one like {self!r}", repr(src)))
    for name, tensor in self.packed.items():
        tensor.copy_(src.packed[name], non_blocking)
    # The fit belongs to the bytes.
    factors = src.error_factors or (None, None)
    self.error_a, self.error_b = (None if t is None else t.to(self.device, copy=True) for t in factors)
    return self


def _rows(self: QuantizedTensor, start: int, length: int) -> Packed | None:
    """Cut rows along dimension 0 out of the packed bytes, if they begin and end between blocks."""
    found: Any = registry.codec(self.codec)
    if not hasattr(found, "narrow"):
        return None
    return cast("Packed | None", found.narrow(self.packed, tuple(self.shape), start, length, self.meta))


@_on(_aten.select.int)
def _select(func: Any, self: QuantizedTensor, dim: int, index: int) -> torch.Tensor:
    rows = self.shape[0]
    if dim % self.dim() == 0 and -rows <= index < rows:
        row = _rows(self, index % rows, 1)
        if row is not None:
            return self._like(row, shape=self.shape[1:])
    return cast(torch.Tensor, func(self.dequantize(), dim, index))


@_on(_aten.slice.Tensor)
def _slice(
    func: Any,
    self: QuantizedTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> torch.Tensor:
    if dim % self.dim() == 0 and step == 1:
        first, last, _ = slice(start, end).indices(self.shape[0])
        length = max(last - first, 0)
        cut = _rows(self, first, length)
        if cut is not None:
            return self._like(cut, shape=(length, *self.shape[1:]))
    return cast(torch.Tensor, func(self.dequantize(), dim, start, end, step))


@_on(_aten.unbind.int)
def _unbind(func: Any, self: QuantizedTensor, dim: int = 0) -> list[torch.Tensor]:
    if dim % self.dim() == 0 and self.shape[0] and _rows(self, 0, 1) is not None:
        return [_select(_aten.select.int, self, 0, index) for index in range(self.shape[0])]
    return cast(list[torch.Tensor], func(self.dequantize(), dim))


@_on(_aten.view.default, _aten._unsafe_view.default)
def _view(func: Any, self: QuantizedTensor, size: Sequence[int]) -> torch.Tensor:
    wanted = tuple(torch.empty(self.shape, device="meta").view(size).shape)
    found: Any = registry.codec(self.codec)
    packed = None
    if wanted == self._shape:
        packed = self.packed
    elif hasattr(found, "reshape"):
        packed = found.reshape(self.packed, self._shape, wanted, self.meta)
    if packed is None:
        return cast(torch.Tensor, func(self.dequantize(), size))
    return self._like(packed, shape=wanted)


@_on(_aten.expand.default)
def _expand(func: Any, self: QuantizedTensor, size: Sequence[int], *, implicit: bool = False) -> torch.Tensor:
    same = len(size) == self.dim() and all(
        wanted in (-1, there) for wanted, there in zip(size, self.shape, strict=True)
    )
    return self._like(self.packed) if same else self.dequantize().expand(*size)
