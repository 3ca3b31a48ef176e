"""A frozen embedding that is not on the device: the rows that are asked for are gathered where they live."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ts_core.guard import guard_of

from .block import PagedBlock, _bind

if TYPE_CHECKING:
    from .pager import WeightPager

__all__ = ["GatheredRows", "gathers"]

#: What can be asked of the weight without bringing any of it.
_METADATA = frozenset(
    {
        *[
            getattr(Tensor, name).__get__
            for name in ("dtype", "shape", "ndim", "requires_grad", "is_leaf", "layout", "itemsize")
        ],
        *[
            getattr(Tensor, name)
            for name in ("size", "dim", "numel", "nelement", "element_size", "is_floating_point", "__len__")
        ],
    }
)


def gathers(module: nn.Module) -> bool:
    """Whether rows of a module's weight can be gathered: a frozen ``nn.Embedding`` without ``max_norm``."""
    return isinstance(module, nn.Embedding) and not module.weight.requires_grad and module.max_norm is None


class _Table(Tensor):
    """Stands in the place of the weight: ``F.embedding`` gathers from it, anything else brings the whole."""

    edge: GatheredRows

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding and type(args[1]) is cls and kwargs.get("max_norm") is None:
            return args[1].edge.gather(args[0])
        if func is Tensor.device.__get__:
            return args[0].edge.pager.device
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = tree_map(lambda v: v.edge.whole() if type(v) is cls else v, (args, kwargs))
        return func(*args, **kwargs)


class GatheredRows(PagedBlock):
    """An embedding whose rows are taken from host memory or a file; it needs no slot.

    The module's own forward runs, with a weight that knows how to be looked up: whatever a subclass does to
    the ids or to the result stays in force.

    Attributes:
        gathered_bytes: Bytes of rows brought so far.
    """

    def __init__(self, pager: WeightPager, name: str, module: nn.Module) -> None:
        """Collect the weight."""
        super().__init__(pager, name, module, "keep")
        self.gathered_bytes = 0

    def compute(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a function while the weight can be looked up; one that is trained by now is brought whole."""
        with self.pager.turns.forward(self):  # the module's weight is exchanged meanwhile
            return self._looked_up(function, args, kwargs)

    def _looked_up(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.runs += 1
        weight = self.parameters[0]
        with torch._C.DisableTorchFunctionSubclass():
            trained = weight.requires_grad and torch.is_grad_enabled()
            bound: Any = self.whole() if trained else weight.detach().as_subclass(_Table)
        if trained:
            self.views = [bound]
            (bound,) = _bind(self, (0,), self._anchor)
            self.views = []
        else:
            bound.edge = self
        with self._bound([bound]):
            output = function(*args, **kwargs)
        return self._gated(output) if trained else output

    def gather(self, ids: Tensor) -> Tensor:
        """Return the rows of these ids on the device, each brought once; the weight has no gradient here."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            weight = self._current()
            needed, places = torch.unique(ids, return_inverse=True)
            rows = weight.index_select(0, needed.to(weight.device))
            self.fills += 1
            self.gathered_bytes += rows.nbytes
            return F.embedding(places.view(ids.shape), rows.to(self.pager.device))

    def whole(self) -> Tensor:
        """Return all of the weight on the device."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self.fills += 1
            return self._current().to(self.pager.device)

    def _current(self) -> Tensor:
        entry = guard_of(self.parameters[0])
        if entry is not None:
            entry.wait()
        return self.parameters[0].detach()
