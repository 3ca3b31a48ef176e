"""What happens to `p.grad` before a backward pass adds to it, and what stands there once it is used up."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.utils._pytree import tree_map

from ts_core.arriving import ArrivingGradient, settled_gradient
from ts_core.errors import StateError
from ts_core.guard import guard_of

__all__ = ["Arrivals", "ConsumedGradient", "gradient_of", "posted_gradient"]

_LOW = (torch.bfloat16, torch.float16)
_aten = torch.ops.aten
_NEEDS_MEMORY = frozenset(
    {
        torch.Tensor.numpy,
        torch.Tensor.tolist,
        torch.Tensor.data_ptr,
        torch.Tensor.untyped_storage,
        torch.Tensor.__dlpack__,
    }
)


class ConsumedGradient(torch.Tensor):
    """Stands in `p.grad` for a gradient that `eager=True` has used; it has no memory and no value.

    Shape, dtype and device are the gradient's. It can be zeroed, as `zero_grad(set_to_none=False)` does, and
    holds zeros from then on; any other use raises `StateError`. The next backward pass starts from None, or
    from what it was zeroed to.

    Attributes:
        value: What it was zeroed to, or None.
    """

    value: torch.Tensor | None

    @staticmethod
    def __new__(cls: type[ConsumedGradient], grad: torch.Tensor) -> ConsumedGradient:
        """Make one like a gradient."""
        make: Any = torch.Tensor._make_wrapper_subclass
        made: ConsumedGradient = make(
            cls, grad.shape, strides=grad.stride(), dtype=grad.dtype, device=grad.device, requires_grad=False
        )
        made.value = None
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Say what it is, and read nothing."""
        return f"ConsumedGradient(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def _zero(self) -> None:
        if self.value is None:
            self.value = torch.empty_strided(
                self.shape, self.stride(), dtype=self.dtype, device=self.device
            ).zero_()
        else:
            self.value.zero_()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse what would reach for memory; leave the rest to the dispatcher."""
        if func in _NEEDS_MEMORY:
            return func(_read(args[0]), *args[1:], **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Zero it; otherwise work on what it was zeroed to, or refuse."""
        if func is _aten.zero_.default:
            args[0]._zero()
            return args[0]
        if func is _aten._foreach_zero_.default:
            for each in args[0]:
                each._zero() if isinstance(each, cls) else each.zero_()
            return None
        if func is _aten.detach.default and args[0].value is None:
            return cls(args[0])
        return func(*tree_map(_read, args), **tree_map(_read, kwargs or {}))


def _read(value: Any) -> Any:
    if not isinstance(value, ConsumedGradient):
        return value
    if value.value is None:
        raise StateError(
            f"[OffloadAdamW] the gradient of a parameter of shape {tuple(value.shape)} is gone: with "
            "eager=True it was used during backward(). To clip, make the optimizer with max_grad_norm (the "
            "norm is then last_grad_norm); a GradScaler, or other code that reads or edits gradients, needs "
            "eager=False"
        )
    return value.value


def gradient_of(param: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that a step has to use: None too where it was used during backward.

    One that is still arriving is waited for.

    Args:
        param: A parameter, seen past its own class.
    """
    grad = settled_gradient(param)
    return grad.value if isinstance(grad, ConsumedGradient) else grad


def posted_gradient(param: torch.Tensor) -> tuple[torch.Tensor | None, ArrivingGradient | None]:
    """Return what `gradient_of` does, or the tensor that it is arriving in, and what tells when it is there.

    Args:
        param: A parameter, seen past its own class.
    """
    grad = param.grad
    if isinstance(grad, ArrivingGradient) and grad.value is None:
        return grad.payload, grad
    return gradient_of(param), None


class Arrivals:
    """Prepares `p.grad` for a gradient that arrives: drops what is used up, and makes sums fp32.

    The sum of 16-bit gradients is kept in fp32 from the second one on:

        p.grad <- fp32(g1) + fp32(g2);  p.grad <- p.grad + fp32(gk)

    The hook runs in the parameter's own place in the graph, or, for a guarded one, where its gradients land:
    the sums are the same. It does not keep this object alive.

    Attributes:
        wide: Sum in fp32 from now on; what has begun so goes on so.
    """

    def __init__(self, *, wide: bool) -> None:
        """Watch nothing yet.

        Args:
            wide: Sum in fp32.
        """
        self.wide = wide
        self._params: dict[int, torch.Tensor] = {}
        self._opened: set[int] = set()

    def watch(self, param: torch.Tensor) -> None:
        """Prepare this parameter's gradients from now on; one that needs no gradient is left for later."""
        key = id(param)
        if key in self._params or not (param.requires_grad and param.is_leaf):
            return
        self._params[key] = param  # so that its id stays its own
        me = weakref.ref(self)

        def hook(grad: torch.Tensor) -> torch.Tensor | None:
            arrivals = me()
            return None if arrivals is None else arrivals._before(key, grad)

        hook.leaves_gradient = True  # type: ignore[attr-defined]
        register: Any = param.register_hook  # torch leaves it untyped
        unserializable: Any = torch.utils.hooks.unserializable_hook
        register(unserializable(hook))

    def _before(self, key: int, grad: torch.Tensor) -> torch.Tensor | None:
        param = self._params[key]
        with torch._C.DisableTorchFunctionSubclass():
            if param.grad is None and key not in self._opened:
                return None  # the first of a step: there is nothing to add it to
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            held = settled_gradient(param)
            if isinstance(held, ConsumedGradient):
                param.grad = held = held.value
            if self.wide and held is not None and held.dtype in _LOW and param.dtype in _LOW:
                self._widen(param, held)
                self._opened.add(key)
            # A parameter that takes gradients of any dtype is given more exact ones than others are.
            if key in self._opened and grad.dtype is not param.dtype and param.dtype in _LOW:
                return grad.to(param.dtype).to(grad.dtype)
        return None

    def _widen(self, param: torch.Tensor, held: torch.Tensor) -> None:
        """Put an fp32 copy in the place of a 16-bit gradient, which others may still hold."""
        entry = guard_of(param)
        if entry is not None and entry.wide_memory is not None and held.device.type == "cpu":
            wide = entry.wide_memory(param)
        else:
            wide = torch.empty_like(held, dtype=torch.float32)
        wide.copy_(held)
        param.grad = None
        cast(Any, param).grad_dtype = None  # it refuses an fp32 gradient otherwise
        param.grad = wide
