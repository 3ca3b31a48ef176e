"""What a wrapped model moved, waited for and computed since the last look; how near that is to the bound.

The counters are read, not the model: a look costs some microseconds.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from torch import nn

from trainstream._bound import Verdict, Work, busy, judge, rates_for

if TYPE_CHECKING:
    from trainstream._session import Session

__all__ = ["Meter", "Reading", "products"]

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_MOVED = ("h2d_bytes", "d2h_bytes", "disk_read_bytes")


def products(model: nn.Module, session: Session) -> tuple[int, int] | None:
    """Count the weights of a model that enter matrix products, and those of them that are trained.

    Args:
        model: The model.
        session: Of it.

    Returns:
        Both counts, or None where not every weight is used by every token (experts).
    """
    config: Any = getattr(model, "config", None)
    if any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS):
        return None
    used = {name for group in session.block_map.groups for name, _ in group.tied_to}
    used |= {owner for group in session.block_map.groups for _, owner in group.tied_to}
    counted = trained = 0
    for group in session.block_map.groups:
        for name in group.parameters:
            if group.kind == "embedding" and name not in used:
                continue  # rows are looked up
            parameter = model.get_parameter(name)
            if parameter.dim() >= 2:
                counted += parameter.numel()
                trained += parameter.numel() if parameter.requires_grad else 0
    return counted, trained


@dataclasses.dataclass(frozen=True)
class Reading:
    """What happened between two looks.

    Attributes:
        tokens: Trained on, as far as told.
        moved: `h2d_bytes`, `d2h_bytes`, `disk_read_bytes`.
        stall_s: Seconds that training waited for the `optimizer`, and for `weights`.
        busy_s: Seconds that each resource needed at least.
        verdict: The bound and the limiter.
    """

    tokens: int
    moved: dict[str, int]
    stall_s: dict[str, float]
    busy_s: dict[str, float]
    verdict: Verdict


class Meter:
    """Reads the counters of one session; each look costs some microseconds.

    Attributes:
        dtype: What the model computes in.
        rates: Of the machine.
    """

    def __init__(self, session: Session) -> None:
        """Count from now on."""
        model, device = session.model, session.plan.device
        wide = [p.dtype for p in model.parameters() if p.dim() >= 2 and p.is_floating_point()]
        self.dtype = str(wide[0]).removeprefix("torch.") if wide else "float32"
        self.rates = rates_for(device, self.dtype)
        self._compute = "gpu" if device.startswith("cuda") else "cpu"
        self._products = products(model, session)
        self._tokens = 0
        self._last = self._counters(session)

    def tell(self, tokens: int) -> None:
        """Count tokens that are trained on."""
        self._tokens += tokens

    def take(self, session: Session, seconds: float) -> Reading:
        """Say what happened since the last look.

        Args:
            session: Of the model.
            seconds: How long ago that was; 0.0 if not known.
        """
        counters = self._counters(session)
        since = {name: value - self._last[name] for name, value in counters.items()}
        self._last = counters
        tokens, self._tokens = self._tokens, 0
        moved = {name: int(since[name]) for name in _MOVED}
        work = Work(**moved, optimizer_s=since["kernel_s"], flops=self._flops(session, tokens))
        busy_s = busy(work, self.rates, compute=self._compute)
        stall_s = {"optimizer": since["wait_s"], "weights": since["weights_s"]}
        return Reading(tokens, moved, stall_s, busy_s, judge(busy_s, seconds))

    def _flops(self, session: Session, tokens: int) -> float | None:
        """2 a weight and token forward, 2 back to inputs, 2 to trained weights; recomputed blocks again."""
        if not tokens or self._products is None:
            return None
        counted, trained = self._products
        policies = session.plan.policy
        again = policies.count("recompute") / len(policies) if policies else 0.0
        return 2.0 * tokens * (counted * (2.0 + again) + trained)

    def _counters(self, session: Session) -> dict[str, float]:
        from trainstream._report import moved_bytes

        counters = getattr(session.optimizer, "counters", None)
        told: dict[str, Any] = counters() if counters is not None else {}
        found: dict[str, float] = dict(moved_bytes(session, told))
        found["kernel_s"] = float(told.get("kernel_s", 0.0))
        found["wait_s"] = float(told.get("wait_s", 0.0))
        found["weights_s"] = session.pager.wait_s if session.pager is not None else 0.0
        return found
