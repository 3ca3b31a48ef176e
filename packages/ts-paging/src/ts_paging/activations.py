"""What a block saves for backward: kept, or moved out storage by storage and brought back ahead of its use.

A storage moves once, however many saved tensors view it, and every view is rebuilt on it by size, stride and
offset. What one run of a block parks is a `Run`; runs remember which came before. When backward turns to a
run, what is left of it comes first, and then the run before it, as far as the bound on bytes allows, so that
these copies run beside the computation.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ts_core import registry
from ts_core.errors import StateError
from ts_core.memory import host_budget, parse_bytes
from ts_core.options import integer

from .copy import d2h_many, h2d_many
from .disk import DiskStore
from .pinned import PinnedAllocator

__all__ = ["ActivationStore", "FileActivations", "HostActivations", "Parked", "Run", "park_hook"]

# Copies of one call: enough to be worth a call, few enough that the first bytes are used early.
_BATCH_BYTES = 64 << 20
_FLOOR_BYTES = 4 << 30


class Parked(Protocol):
    """One storage that left the device."""

    views: int

    def bring(self) -> Tensor:
        """Return its bytes as a uint8 tensor on the device, valid for the current stream."""
        ...


class ActivationStore(Protocol):
    """Where storages go; counts them and their bytes both ways."""

    parked: int
    parked_bytes: int
    brought_bytes: int

    def begin(self) -> Run:
        """Start a run of a block."""
        ...

    def park(self, data: Tensor, run: Run | None = None) -> Parked:
        """Move a uint8 device tensor's bytes out; the caller drops the tensor afterwards."""
        ...

    def latest(self) -> weakref.ref[Run] | None:
        """Return the run that began last, for `approach`; None if nothing is parked."""
        ...

    def approach(self, run: weakref.ref[Run] | None) -> None:
        """Start bringing a run that backward comes to next, if it is still wanted."""
        ...

    def short(self) -> bool:
        """Whether what is parked takes memory that is short now."""
        ...


class Run:
    """What one run of a block parked, in the order it was saved."""

    __slots__ = ("__weakref__", "before", "parts")

    def __init__(self, before: weakref.ref[Run] | None) -> None:
        """Come after another one."""
        self.before = before
        self.parts: list[weakref.ref[_Away]] = []


def _alive(reference: StorageWeakRef) -> Tensor | None:
    """Return the bytes of a storage that somebody else still holds."""
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return None if storage is None else _bytes_of(storage)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _Away:
    """A storage that is parked, and its way back."""

    __slots__ = (
        "__weakref__", "ahead", "arriving", "back", "came", "device", "home", "left", "nbytes", "place",
        "run", "spent", "store", "stream", "taken", "views",
    )  # fmt: skip

    def __init__(self, store: _Store, data: Tensor, run: Run) -> None:
        self.store, self.run = store, run
        self.nbytes = data.numel()
        self.device = data.device
        self.views = 1  # saved tensors that view it
        self.spent = 0  # the turn in which all of them had it
        self.taken = 0  # and how many of them this backward pass has asked for
        # A copy that is still under way, or somebody else, may hold the storage: then nothing need come back.
        self.home = StorageWeakRef(data.untyped_storage())  # type: ignore[no-untyped-call]
        self.back: Tensor | None = None  # on its way, or here and not yet asked for by all
        self.ahead = False  # not asked for yet
        self.came: StorageWeakRef | None = None  # the latest that came, while autograd uses it
        self.arriving: Any = None  # ticket of the way back
        self.stream = 0  # whose allocation `back` is
        self.place: Any = None  # where it is parked
        self.left: Any = None  # ticket of the way out

    def bring(self) -> Tensor:
        """Return its bytes as a uint8 tensor on the device, valid for the current stream."""
        return self.store._bring(self)


class _Store:
    """What the stores share: the order of return, and how much of it is under way.

    Attributes:
        parked: Storages parked so far.
        parked_bytes: Their bytes.
        brought_bytes: Bytes brought back so far.
        max_ahead_bytes: Bytes on the device at most that came back and are not used yet; one storage alone
            may be larger.
    """

    def __init__(self, max_ahead_bytes: int | str) -> None:
        ahead = parse_bytes(max_ahead_bytes, name="max_ahead_bytes")
        self.max_ahead_bytes = integer("max_ahead_bytes", ahead, minimum=0)
        self.parked = 0
        self.parked_bytes = 0
        self.brought_bytes = 0
        # Autograd has a thread per device. Reentrant: dropping a tensor may run anything.
        self._lock = threading.RLock()
        self._latest: weakref.ref[Run] | None = None
        self._current: weakref.ref[Run] | None = None
        self._ahead: deque[weakref.ref[_Away]] = deque()
        self._here: list[weakref.ref[_Away]] = []
        self._here_bytes = 0
        self._turn = 0

    def begin(self) -> Run:
        """Start a run of a block; it comes after the one that began before."""
        with self._lock:
            run = Run(self._latest)
            self._latest = weakref.ref(run)
        return run

    def park(self, data: Tensor, run: Run | None = None) -> Parked:
        """Start moving the bytes out."""
        away = _Away(self, data, self.begin() if run is None else run)
        self._send(away, data)
        away.run.parts.append(weakref.ref(away))
        self.parked += 1
        self.parked_bytes += away.nbytes
        return away

    def latest(self) -> weakref.ref[Run] | None:
        """Return the run that began last, for `approach`; None if nothing was parked."""
        return self._latest

    def approach(self, run: weakref.ref[Run] | None) -> None:
        """Start bringing a run that backward comes to next, if it is still wanted."""
        found = None if run is None else run()
        if found is not None:
            with self._lock:
                self._current = None  # it may be another backward pass through the same run
                self._turn_to(found)
                self._pump()

    def short(self) -> bool:
        """Whether what is parked takes memory that is short now: not here."""
        return False

    def _send(self, away: _Away, data: Tensor) -> None:
        raise NotImplementedError

    def _fetch(self, aways: Sequence[_Away], urgent: bool) -> None:
        """Give each a `back` and what `_arrive` waits for."""
        raise NotImplementedError

    def _arrive(self, away: _Away, back: Tensor) -> None:
        """Wait until what is on its way is there: the current stream on a GPU, else this thread."""
        raise NotImplementedError

    def _bring(self, away: _Away) -> Tensor:
        with self._lock:
            self._turn_to(away.run)
            back = away.back
            if back is None:
                back = _alive(away.home)
                if back is None and away.came is not None:
                    back = _alive(away.came)
                if back is None:
                    self._start([away], urgent=True)
                    back = away.back
                    assert back is not None  # _start makes it
            try:
                self._arrive(away, back)
            except BaseException:
                self._release(away)
                away.came = None  # it is brought again, if anybody asks
                raise
            self._asked(away)
            away.taken += 1
            if away.taken >= away.views:
                # Autograd holds what it still uses.
                away.taken = 0
                away.spent = self._turn
                self._release(away)
            self._pump()
            return back

    def _turn_to(self, run: Run) -> None:
        if self._current is not None and self._current() is run:
            return
        before = None if run.before is None else run.before()
        # What came for other runs and was not asked for will not be asked for soon.
        self._here = [ref for ref in self._here if (away := ref()) is not None and away.back is not None]
        for away in [away for ref in self._here if (away := ref()) is not None]:
            if away.run is not run and away.run is not before:
                self._release(away)
        held = [away for ref in self._here if (away := ref()) is not None and away.ahead]
        self._here_bytes = sum(away.nbytes for away in held)
        self._current = weakref.ref(run)
        self._turn += 1
        # Backward asks for what was saved last first.
        self._ahead = deque(reversed(run.parts))
        if before is not None:
            self._ahead.extend(reversed(before.parts))

    def _pump(self) -> None:
        """Start bringing what comes next, as far as the bound allows."""
        batch: list[_Away] = []
        batch_bytes = 0
        while self._ahead:
            away = self._ahead[0]()
            if away is not None and away.back is None and away.taken == 0 and away.spent != self._turn:
                under_way = self._here_bytes + batch_bytes
                if under_way + away.nbytes > self.max_ahead_bytes and (under_way or not self.max_ahead_bytes):
                    break
                batch.append(away)
                batch_bytes += away.nbytes
                if batch_bytes >= _BATCH_BYTES:
                    self._start(batch, urgent=False)
                    batch, batch_bytes = [], 0
            self._ahead.popleft()
        if batch:
            self._start(batch, urgent=False)

    def _start(self, aways: list[_Away], urgent: bool) -> None:
        away_now = []
        for away in aways:
            away.back = _alive(away.home)
            if away.back is None:
                away_now.append(away)
        if away_now:
            self._fetch(away_now, urgent)
        for away in aways:
            self._here.append(weakref.ref(away))
            self._here_bytes += away.nbytes
            away.ahead = True
        self.brought_bytes += sum(away.nbytes for away in away_now)

    def _asked(self, away: _Away) -> None:
        if away.ahead:
            away.ahead = False
            self._here_bytes -= away.nbytes

    def _release(self, away: _Away) -> None:
        self._asked(away)
        if away.back is not None:
            away.came = StorageWeakRef(away.back.untyped_storage())  # type: ignore[no-untyped-call]
            away.back = None


class HostActivations(_Store):
    """Parks storages in host memory.

    A storage leaves on the copy engine's stream when it is saved, and its device memory is free when the copy
    is through, without the host waiting. It returns as the module says.

    Attributes:
        parked: Storages parked so far.
        parked_bytes: Their bytes.
        brought_bytes: Bytes brought back so far.
        max_ahead_bytes: Bytes on the device at most that came back and are not used yet.
        floor_bytes: Below this much RAM left, memory is short.
    """

    def __init__(
        self,
        memory: Callable[[int], Tensor] | None = None,
        *,
        max_ahead_bytes: int | str = 1 << 30,
        floor_bytes: int | str | None = None,
        available: Callable[[], int] | None = None,
    ) -> None:
        """Park nothing yet.

        Args:
            memory: Gives host memory (nbytes -> uint8 tensor); None: the registered host allocator.
            max_ahead_bytes: Bytes on the device at most that came back and are not used yet; one storage
                alone may be larger. 0: each comes when it is asked for.
            floor_bytes: RAM that stays free; None: 4 GiB, or a tenth of all of it if that is more.
            available: Returns the bytes of RAM that are left; None asks the system.

        Raises:
            OptionError: A size is no size.
        """
        super().__init__(max_ahead_bytes)
        self.memory = memory or (lambda nbytes: registry.host_allocator().empty(nbytes))
        if floor_bytes is None:
            budget = host_budget()  # what is available is this rank's share, and so is the floor
            self.floor_bytes = max(budget.whole_bytes // 10, _FLOOR_BYTES) // budget.ranks
        else:
            self.floor_bytes = parse_bytes(floor_bytes, name="floor_bytes")
        self._available = available or (lambda: host_budget().available_bytes)

    def short(self) -> bool:
        """Whether less RAM is left than the floor: then offload less."""
        return self._available() < self.floor_bytes

    def _send(self, away: _Away, data: Tensor) -> None:
        away.place = self.memory(away.nbytes)
        away.left = d2h_many([away.place], [data])

    def _fetch(self, aways: Sequence[_Away], urgent: bool) -> None:
        for device in dict.fromkeys(away.device for away in aways):
            group = [away for away in aways if away.device == device]
            stream = _stream_of(device)
            backs = [torch.empty(away.nbytes, dtype=torch.uint8, device=device) for away in group]
            after = [away.left for away in group]
            hosts = [away.place for away in group]
            ticket = h2d_many(backs, hosts, priority=1 if urgent else 0, after=after)
            for away, back in zip(group, backs, strict=True):
                away.back, away.arriving, away.stream = back, ticket, stream

    def _arrive(self, away: _Away, back: Tensor) -> None:
        if away.arriving is None:
            return
        if away.device.type == "cpu":
            away.arriving.wait()
            away.arriving = None
            return
        away.arriving.wait_stream()
        if _stream_of(away.device) != away.stream:
            back.record_stream(torch.cuda.current_stream(away.device))


def _stream_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return int(torch._C._cuda_getCurrentRawStream(device.index))


class FileActivations(_Store):
    """Parks storages of a CPU run in files: the tier below RAM.

    Attributes:
        store: The files.
        parked: Storages parked so far.
        parked_bytes: Their bytes.
        brought_bytes: Bytes brought back so far.
        max_ahead_bytes: Bytes of RAM at most that came back and are not used yet.
    """

    def __init__(self, store: DiskStore, *, max_ahead_bytes: int | str = 32 << 20) -> None:
        """Use a store; keys start with ``activation``.

        Args:
            store: The files.
            max_ahead_bytes: Bytes of RAM at most that came back and are not used yet; one storage alone may
                be larger. 0: each comes when it is asked for.

        Raises:
            OptionError: No size.
        """
        super().__init__(max_ahead_bytes)
        self.store = store
        self._memory = PinnedAllocator(pinned=False)
        self._number = itertools.count()
        self._keys: dict[weakref.ref[_Away], str] = {}
        self._unwanted: deque[weakref.ref[_Away]] = deque()

    def begin(self) -> Run:
        """Start a run of a block; it comes after the one that began before."""
        self.sweep()
        return super().begin()

    def approach(self, run: weakref.ref[Run] | None) -> None:
        """Start bringing a run that backward comes to next, if it is still wanted."""
        self.sweep()
        super().approach(run)

    def short(self) -> bool:
        """Whether what is parked takes memory that is short now: files do not."""
        self.sweep()
        return False

    def sweep(self) -> None:
        """Remove the files of storages that nobody needs any more.

        Not done where a storage is let go: Python drops what a signal handler raises there, Ctrl-C too.
        """
        with self._lock:
            while self._unwanted:
                with contextlib.suppress(KeyError, StateError):
                    self.store.delete(self._keys[self._unwanted[0]])
                self._keys.pop(self._unwanted.popleft(), None)

    def _send(self, away: _Away, data: Tensor) -> None:
        self.sweep()
        away.place = f"activation.{next(self._number)}"  # never one that an interrupted call took
        away.left = self.store.write_async(away.place, data)
        # No function of Python's own runs when it goes, so that nothing can be raised there.
        self._keys[weakref.ref(away, self._unwanted.append)] = away.place

    def _fetch(self, aways: Sequence[_Away], urgent: bool) -> None:
        for away in aways:
            away.left.wait()
            # Starts on a page, as direct I/O wants it.
            back = self._memory.empty(away.nbytes)
            away.arriving = self.store.read_async(away.place, back)
            away.back = back

    def _arrive(self, away: _Away, back: Tensor) -> None:
        if away.arriving is not None:
            away.arriving.wait()
            away.arriving = None


class _View:
    """How one saved tensor lies in a parked storage."""

    __slots__ = ("dtype", "offset", "parked", "probe", "size", "stride", "version")

    def __init__(self, parked: Parked, tensor: Tensor, probe: Tensor) -> None:
        self.parked = parked
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.probe = probe
        self.version = probe._version

    def tensor(self) -> Tensor:
        if self.probe._version != self.version:
            raise StateError(
                "one of the tensors needed for backward was modified in place since the forward pass, and "
                "moved out before; run forward again, or call backward before the change"
            )
        # Strides are kept: a compacted copy would take another matmul path, with other bits.
        base = self.parked.bring()
        view = torch.empty(0, dtype=self.dtype, device=base.device)
        return view.set_(base.untyped_storage(), self.offset, self.size, self.stride)


def _probe(tensor: Tensor) -> Tensor:
    """Return an empty tensor that shares the version counter: it tells of writes and holds no memory."""
    probe = tensor.detach()
    probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return probe


def park_hook(store: ActivationStore, inputs: frozenset[int], least_bytes: int) -> Callable[[Tensor], Any]:
    """Make the function that decides about one saved tensor of one run of a block.

    Parameters, the block's inputs (which the block before holds anyway) and small storages stay. Any other
    storage is parked once, however many saved tensors view it; one changed in place since is parked again,
    and what was saved before the change cannot be used any more, as without offloading.

    Args:
        store: Where storages go.
        inputs: ``_cdata`` of the storages of the block's inputs.
        least_bytes: Smaller storages stay.

    Returns:
        Function from a saved tensor to the tensor itself or a `_View`.
    """
    seen: dict[tuple[int, int], tuple[Parked, Tensor, StorageWeakRef]] = {}
    run: Run | None = None

    def decide(tensor: Tensor) -> Any:
        nonlocal run
        storage = tensor.untyped_storage()
        if (
            isinstance(tensor, nn.Parameter)
            or storage._cdata in inputs
            or storage.nbytes() < max(least_bytes, 1)
        ):
            return tensor
        key = (storage._cdata, tensor._version)
        entry = seen.get(key)
        if entry is None:
            if run is None:
                run = store.begin()
            parked = store.park(_bytes_of(storage), run)
            # The weak reference keeps the storage's identity from being given to another one.
            weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            seen[key] = entry = (parked, _probe(tensor), weak)
        else:
            entry[0].views += 1
        return _View(entry[0], tensor, entry[1])

    return decide
