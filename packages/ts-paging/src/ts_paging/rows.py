"""A frozen embedding that is not on the device: the rows that are asked for are gathered where they live."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ts_core.guard import guard_of

from .block import PagedBlock

if TYPE_CHECKING:
    from .pager import WeightPager

__all__ = ["GatheredRows", "gathers"]


def gathers(module: nn.Module) -> bool:
    """Whether rows of a module's weight can be gathered: a frozen ``nn.Embedding`` without ``max_norm``."""
    return isinstance(module, nn.Embedding) and not module.weight.requires_grad and module.max_norm is None


class GatheredRows(PagedBlock):
    """An embedding whose rows are taken from host memory or a file; it needs no slot.

    The module's own forward computes with a small table that holds the rows of this call, each once, and ids
    that point into it: whatever a subclass does to the result stays in force.

    Attributes:
        gathered_bytes: Bytes of rows brought so far.
    """

    def __init__(self, pager: WeightPager, name: str, module: nn.Module) -> None:
        """Collect the weight."""
        super().__init__(pager, name, module, "keep")
        self.gathered_bytes = 0

    def compute(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a function with the rows of its first argument; without ids the whole weight is brought."""
        module = cast(nn.Embedding, self.module)
        ids = args[0] if args else kwargs.get("input")
        if not isinstance(ids, Tensor) or ids.is_floating_point() or module.weight.requires_grad:
            with self._bound([self._whole()]):
                return function(*args, **kwargs)
        self.runs += 1
        self.fills += 1
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            weight = self.parameters[0]
            entry = guard_of(weight)
            if entry is not None:
                entry.wait()
            needed, places = torch.unique(ids, return_inverse=True)
            rows = weight.detach().index_select(0, needed.to(weight.device))
            self.gathered_bytes += rows.nbytes
            rows = rows.to(self.pager.device)
        padding, module.padding_idx = (
            module.padding_idx,
            None,
        )  # it concerns gradients only, and there are none
        try:
            with self._bound([rows]):
                rest = args[1:] if args else ()
                given = {key: value for key, value in kwargs.items() if key != "input"}
                return function(places.view(ids.shape), *rest, **given)
        finally:
            module.padding_idx = padding

    def _whole(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.parameters[0].to(self.pager.device)
