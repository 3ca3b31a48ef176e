"""A gradient whose bytes are still on their way to the host, or lie there in a narrower format.

It stands in `p.grad` of a guarded Parameter from the end of `backward()` on, so that the copy need not be
waited for there. Whoever reads `.grad` through the Parameter gets the ordinary tensor that it becomes;
whoever comes past the Parameter's class works on that tensor all the same. An optimizer that knows the class
takes the payload as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

__all__ = ["ArrivingGradient", "Landing", "settled_gradient"]

_NEEDS_MEMORY = frozenset(
    {
        torch.Tensor.data.__get__,  # type: ignore[attr-defined]
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        torch.Tensor.__dlpack__,
        torch.Tensor.tolist,
        torch.Tensor.data_ptr,
        torch.Tensor.untyped_storage,
        torch.Tensor.storage,
        torch.Tensor.share_memory_,
        torch.Tensor.pin_memory,
    }
)


class Landing(Protocol):
    """A copy under way."""

    def done(self) -> bool:
        """Look whether it is through."""
        ...

    def wait(self) -> None:
        """Wait until it is through, or raise what went wrong."""
        ...


class ArrivingGradient(Tensor):
    """A CPU gradient that becomes an ordinary tensor when somebody uses it.

    Attributes:
        payload: Where its bytes arrive: a CPU tensor of its shape and strides, in its dtype or in a narrower
            one that holds the same values. Not to be read before `wait()`.
        value: The ordinary tensor once it is made; it is the truth from then on.
    """

    payload: Tensor
    value: Tensor | None
    _landing: Landing
    _widened: Callable[[], Tensor]
    _lock: Any

    @staticmethod
    def __new__(
        cls: type[ArrivingGradient],
        payload: Tensor,
        landing: Landing,
        dtype: torch.dtype,
        memory: Callable[[], Tensor],
    ) -> ArrivingGradient:
        """Stand for a payload.

        Args:
            cls: This class.
            payload: See the attribute.
            landing: Its copy.
            dtype: Of the gradient.
            memory: Gives a CPU tensor of the gradient's shape, strides and dtype, for a payload in another.
        """
        make: Any = torch.Tensor._make_wrapper_subclass
        made: ArrivingGradient = make(
            cls,
            payload.shape,
            strides=payload.stride(),
            dtype=dtype,
            device=payload.device,
            requires_grad=False,
        )
        made.payload, made.value = payload, None
        made._landing, made._widened, made._lock = landing, memory, threading.RLock()
        return made

    @property
    def arrived(self) -> bool:
        """Whether the payload can be read without waiting."""
        return self.value is not None or self._landing.done()

    def wait(self) -> None:
        """Wait for the payload.

        Raises:
            Exception: What went wrong with the copy.
        """
        if self.value is None:
            self._landing.wait()

    def settled(self) -> Tensor:
        """Return the ordinary tensor, made at the first call.

        Raises:
            Exception: What went wrong with the copy.
        """
        with self._lock:
            if self.value is None:
                self._landing.wait()
                value = self.payload
                if value.dtype is not self.dtype:
                    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                        value = self._widened()
                        value.copy_(self.payload)
                self.value = value
            return self.value

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Show the ordinary tensor."""
        return repr(self.settled())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy to an ordinary tensor."""
        if id(self) not in memo:
            memo[id(self)] = self.settled().clone(memory_format=torch.preserve_format)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary tensor."""
        plain: Any = self.settled()
        return plain.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Give memory where it is asked for; leave the rest to the dispatcher."""
        if func in _NEEDS_MEMORY:
            args, kwargs = tree_map(_plain, args), tree_map(_plain, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Work on the ordinary tensor."""
        result = func(*tree_map(_plain, args), **tree_map(_plain, kwargs or {}))
        first = args[0] if args else None
        # In place: what was written is this one's value, and the same object is the result.
        return first if isinstance(first, cls) and result is first.value else result


def _plain(value: Any) -> Any:
    return value.settled() if isinstance(value, ArrivingGradient) else value


def settled_gradient(parameter: Tensor) -> Tensor | None:
    """Return ``.grad`` as an ordinary tensor, which stands there from then on.

    Args:
        parameter: Seen past its own class.

    Raises:
        Exception: What went wrong with the copy.
    """
    grad = parameter.grad
    if isinstance(grad, ArrivingGradient):
        grad = grad.settled()
        parameter.grad = grad
    return grad
