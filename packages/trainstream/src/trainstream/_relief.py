"""Making room in a session that is under way, step by step, until nothing is left to give."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainstream._copies import let_go
from trainstream._places import Places
from ts_core.memory import format_bytes
from ts_core.usage import release_free_memory

if TYPE_CHECKING:
    from trainstream._session import Session

__all__ = ["Relief"]

_SMALL_BUFFER_BYTES = 1 << 20  # of a buffer that a copy is kept of

Kept = tuple[dict[str, Tensor | None], str, Tensor, Tensor | None, int]


class Relief:
    """What a session does when memory is short.

    In this order: activations are kept no longer (of blocks whose policy is automatic); then half of what is
    resident, or settled, streams; then all of it. What an option has fixed stays fixed.

    Attributes:
        places: The units of the model.
        due: Why room has to be made before the next pass, or an empty text.
        replaying: Whether whoever runs the pass under way makes room, and runs it again, by himself.
    """

    def __init__(self, session: Session, places: Places) -> None:
        """Look after a session."""
        self._session = session
        self.places = places
        self.due = ""
        self.replaying = False
        self._outside: list[nn.Parameter] | None = None
        self._sites: list[tuple[dict[str, Tensor | None], str]] | None = None
        self._copies: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}

    # -- what a micro-batch needs to run again ---------------------------------------------------------

    def trained(self) -> Iterator[nn.Parameter]:
        """Go through the Parameters whose gradients add up from one micro-batch to the next."""
        optimizer = self._session.optimizer
        held: set[int] = set()
        for group in optimizer.param_groups if optimizer is not None else ():
            held.update(map(id, group["params"]) if self._outside is None else ())
            yield from group["params"]
        if self._outside is None:
            self._outside = [
                p for p in self._session.model.parameters() if p.requires_grad and id(p) not in held
            ]
        yield from self._outside

    def buffers(self) -> list[Kept]:
        """Return the model's buffers, with a copy of each small one that holds until the next call.

        All are copied each time: running statistics are written without moving a version counter.
        """
        if self._sites is None:
            self._sites = [
                (owner._buffers, key)
                for owner in self._session.model.modules()
                for key, buffer in owner._buffers.items()
                if buffer is not None
            ]
        found: list[Kept] = []
        sources: list[Tensor] = []
        copies: list[Tensor] = []
        for place, key in self._sites:
            buffer = place.get(key)
            if buffer is None or buffer.is_inference():
                continue
            small = buffer.layout is torch.strided and buffer.nbytes <= _SMALL_BUFFER_BYTES
            copy = self._copy_of((id(place), key), buffer) if small else None
            if copy is not None:
                sources.append(buffer.detach())
                copies.append(copy)
            found.append((place, key, buffer, copy, buffer._version))
        if copies:
            torch._foreach_copy_(copies, sources)
        return found

    def _copy_of(self, site: tuple[int, str], buffer: Tensor) -> Tensor:
        # By site: a module may put a new tensor there in each pass, and the old ones must not add up.
        known = self._copies.get(site)
        if known is None or known[0] is not buffer:
            known = self._copies[site] = buffer, torch.empty_like(buffer, requires_grad=False)
        return known[1]

    def _forget(self) -> None:
        self._outside = self._sites = None
        self._copies.clear()

    # -- making room -----------------------------------------------------------------------------------

    def possible(self) -> bool:
        """Whether anything is left that can make room."""
        return bool(self.places.keepers(self._session) or self.places.removable())

    def relieve(self, *, hard: bool = False) -> str:
        """Make room, after a pass has failed and before the next one begins.

        Args:
            hard: Let all stream that can, not half of it.

        Returns:
            What was done, in words.
        """
        session, places = self._session, self.places
        self.pause_adapting()
        self.due = ""
        gc.collect()  # what the failed pass has left in cycles
        kept = places.keepers(session)
        if kept:
            places.forget_activations(session)
            done = f"{kept} blocks keep their activations no longer"
        else:
            self._keep_nothing()
            done = self._stream_some(hard)
        self._empty_caches()
        places.write_down(session)
        return done

    def _keep_nothing(self) -> None:
        """Let a pass of this size keep nothing from now on, as the one that failed kept nothing.

        It may have waited for a measurement, which has ended now: the room that is counted was not there.
        """
        tuner = self._session.tuner
        governor = tuner.governor if tuner is not None else None
        if governor is not None and governor.largest:  # a pass has begun
            governor.overrun()

    def _stream_some(self, hard: bool) -> str:
        places = self.places
        candidates = places.removable()
        if not candidates:
            return "memory that was only cached was given back"
        half = sum(map(places.gives, candidates)) // 2
        return self.stream(candidates if hard else places.enough_of(candidates, half))

    def stream(self, chosen: list[int]) -> str:
        """Let units stream from now on; say what that gives."""
        freed = sum(map(self.places.gives, chosen))
        self._forget()
        self.places.evict(self._session, chosen)
        return f"{len(chosen)} groups stream from now on, which frees {format_bytes(freed)}"

    def make_room(self, wanted: int, why: str) -> int:
        """Let so many bytes' worth of units stream, between two passes; say in the events why.

        Args:
            wanted: Bytes.
            why: What made it necessary.

        Returns:
            Bytes that this frees; fewer than wanted if there is no more.
        """
        places = self.places
        candidates = places.removable()
        if wanted <= 0 or not candidates:
            return 0
        chosen = places.enough_of(candidates, wanted)
        freed = sum(map(places.gives, chosen))
        self.pause_adapting()
        done = self.stream(chosen)
        places.write_down(self._session)
        self._session.events.add(f"{why}: {done}")
        return freed

    def to_files(self, wanted: int) -> int:
        """Let what lives in RAM live in files; between two passes.

        Args:
            wanted: Bytes of RAM to free.

        Returns:
            Bytes that this frees.
        """
        places, session = self.places, self._session
        if places.tiers.device.type == "cpu":
            return self.make_room(wanted, "RAM is short")
        rows = session.plan.blocks
        chosen: list[int] = []
        freed = 0
        for index in sorted(places.paged):
            if freed < wanted and rows[index].tier == "host":
                chosen.append(index)
                freed += places.decided.specs[index].paged
        if chosen:
            self._forget()
            places.evict(session, chosen, dict.fromkeys(chosen, "disk"))
            places.write_down(session)
            session.events.add(
                f"RAM is short: {len(chosen)} groups, {format_bytes(freed)}, live in files now"
            )
        return freed

    def pause_adapting(self) -> None:
        """What has just left must not return by what was measured before."""
        session = self._session
        if not session.adapting or session.tuner is None:
            return
        session.adapting = False
        session.tuner.stop()
        session.tuner.give_up_offloading()
        if session.tuner.governor is not None:
            session.tuner.governor.hold = False

    def _empty_caches(self) -> None:
        let_go()
        if self.places.tiers.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            release_free_memory()
