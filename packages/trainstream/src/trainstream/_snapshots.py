"""`session.snapshot()` and `session.rollback()`: a state of training to come back to."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainstream._replay import RandomState
from ts_core import memory
from ts_core.errors import DoesNotFitError, StateError
from ts_core.guard import guard_of
from ts_core.memory import format_bytes
from ts_optim import OffloadAdamW
from ts_paging.files import locate

if TYPE_CHECKING:
    from trainstream._session import Session

__all__ = ["Snapshot", "rolled_back"]

_SPARE = 256 << 20  # bytes of RAM that a snapshot leaves


@dataclasses.dataclass
class Snapshot:
    """Copies of everything that training changes.

    Attributes:
        step: Steps that the session had seen.
        nbytes: Bytes of the copies.
        where: ``RAM`` or ``files``.
    """

    step: int
    nbytes: int
    where: str
    weights: list[tuple[nn.Parameter, Tensor]]
    buffers: list[tuple[dict[str, Any], str, Tensor, Tensor]]
    state: list[tuple[Tensor, dict[str, Any]]]
    groups: list[dict[str, Any]]
    random: RandomState

    @classmethod
    def take(cls, session: Session) -> Snapshot:
        """Copy what is there now.

        Raises:
            DoesNotFitError: Neither RAM nor the disk has room.
        """
        model, optimizer = session.model, session.optimizer
        _settle(session)
        groups = optimizer.param_groups if optimizer is not None else []
        entries = dict(optimizer.state) if optimizer is not None else {}
        trained = [p for p in model.parameters() if p.requires_grad]
        owners = [
            (o._buffers, key) for o in model.modules() for key, b in o._buffers.items() if b is not None
        ]
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            buffers = [(place, key, b) for place, key in owners if isinstance(b := place.get(key), Tensor)]
            tensors = [*trained, *[b for *_, b in buffers]]
            tensors += [t for e in entries.values() for t in e.values() if isinstance(t, Tensor)]
            nbytes = sum(t.numel() * t.element_size() for t in tensors)
            keep = _Keeper(session, nbytes)
            return cls(
                step=session.steps,
                nbytes=nbytes,
                where=keep.where,
                weights=[(p, keep(p.detach())) for p in trained],
                buffers=[(place, key, b, keep(b.detach())) for place, key, b in buffers],
                state=[(p, {k: keep(v) for k, v in entry.items()}) for p, entry in entries.items()],
                groups=[copy.deepcopy({k: v for k, v in g.items() if k != "params"}) for g in groups],
                random=RandomState(session.plan.device),
            )

    def restore(self, session: Session) -> None:
        """Write everything back where it is now, whatever tier that is."""
        optimizer = session.optimizer
        _settle(session)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for parameter, value in self.weights:
                parameter.copy_(value)
            for place, key, buffer, value in self.buffers:
                place[key] = buffer
                buffer.copy_(value)
        if optimizer is not None:
            self._restore_state(optimizer)
            optimizer.zero_grad()
        self.random.restore()

    def _restore_state(self, optimizer: torch.optim.Optimizer) -> None:
        live = optimizer.state
        known = {id(parameter) for parameter, _ in self.state}
        for parameter in [p for p in live if id(p) not in known]:
            del live[parameter]
        with torch.no_grad():
            for parameter, entry in self.state:
                now = live[parameter]
                for key, value in entry.items():
                    if isinstance(value, Tensor):
                        now[key].copy_(value)
                    else:
                        now[key] = copy.deepcopy(value)
        for group, saved in zip(optimizer.param_groups, self.groups, strict=False):
            group.update(copy.deepcopy(saved))
        if isinstance(optimizer, OffloadAdamW):
            optimizer.state = live  # views that it has made of the state are made anew

    def discard(self) -> None:
        """Give up the copies, and their files."""
        kept = [v for _, v in self.weights] + [v for *_, v in self.buffers]
        kept += [v for _, entry in self.state for v in entry.values() if isinstance(v, Tensor)]
        for tensor in kept:
            place = locate(tensor)
            if place is not None:
                place[0].drop(tensor)


class _Keeper:
    """Copies to RAM, or to files where RAM is short."""

    def __init__(self, session: Session, nbytes: int) -> None:
        places = session.relief.places
        room = memory.host_budget().available_bytes - _SPARE
        if places.tiers.device.type == "cpu" and places.limits.cap is not None:
            room = min(room, places.limits.room - places.limits.used())
        self._files = None
        self.where = "RAM"
        if nbytes <= room:
            return
        directory = places.tiers.folder(places.tiers.directory)
        free = memory.disk_budget(directory)
        if nbytes > free:
            raise DoesNotFitError(
                f"session.snapshot: {format_bytes(nbytes)} to copy, where {format_bytes(max(room, 0))} of "
                f"RAM and {format_bytes(free)} of {directory!r} are free; save a checkpoint instead"
            )
        self._files, self.where = places.tiers.make_files(), "files"

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        if self._files is not None and value.numel() and value.layout is torch.strided:
            return self._files.place(value.cpu())
        return value.to("cpu", copy=True)


def _settle(session: Session) -> None:
    """Wait for updates under way."""
    synchronize = getattr(session.optimizer, "synchronize", None)
    if synchronize is not None:
        synchronize()
    for parameter in session.model.parameters():
        entry = guard_of(parameter)
        if entry is not None:
            entry.wait()


def rolled_back(session: Session, snapshot: Snapshot | None) -> str:
    """Restore a snapshot; return what to say of it.

    Raises:
        StateError: There is none.
    """
    if snapshot is None:
        raise StateError("session.rollback: nothing to go back to; call session.snapshot() first")
    snapshot.restore(session)
    return f"rolled back to the snapshot after step {snapshot.step}"
