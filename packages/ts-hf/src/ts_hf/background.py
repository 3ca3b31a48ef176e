"""Saving while training goes on: a thread writes the state of the step at which it was asked to.

Until the next optimizer step nothing changes, so the thread writes tensors where they lie. When that step
begins, those that it will change and that are not in the file yet are kept: each is copied to RAM, up to a
bound, and beyond the bound the step waits for the thread. So what a save takes beside the tensor that is
being written is that bound at most, and a step waits at most for what does not fit in it.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from ts_core.errors import StateError
from ts_core.memory import host_budget, parse_bytes
from ts_quant import QuantizedTensor

from .saving import plain_tensors, write_file

__all__ = ["BackgroundSave", "save_in_background"]

LOGGER = logging.getLogger("trainstream")
#: The default bound of the copies: the smaller of this and a tenth of the RAM that is free.
COPY_BYTES = 1 << 30
_WAITING, _WRITING, _WRITTEN = range(3)
Files = Sequence[tuple[Path, Mapping[str, torch.Tensor], Mapping[str, str] | None]]


class _Entry:
    """One tensor of a save: the values to write, and how far it is."""

    __slots__ = ("changes", "copied", "state", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, changes: bool) -> None:
        self.tensor = tensor
        self.changes = changes
        self.copied = False
        self.state = _WAITING
        self.version = _version(tensor)

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.itemsize

    @property
    def exposed(self) -> bool:
        """Whether the next step would change what is still to be written."""
        return self.changes and not self.copied and self.state != _WRITTEN


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the addresses of the memory behind tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        found = [t.detach() for t in tensors if not isinstance(t, QuantizedTensor)]
        return {t.untyped_storage().data_ptr() for t in found if t.layout is torch.strided and t.numel()}


def _changing(optimizers: Sequence[Optimizer]) -> set[int]:
    """Return the memory that a step of these optimizers writes: parameters and state."""
    parameters = (p for o in optimizers for group in o.param_groups for p in group["params"])
    state = (
        value
        for o in optimizers
        for entry in dict(o.state).values()
        for value in (entry.values() if isinstance(entry, Mapping) else ())
        if isinstance(value, torch.Tensor)
    )
    return _storages(itertools.chain(parameters, state))


class BackgroundSave:
    """A save under way; see `save_in_background`.

    Attributes:
        copied_bytes: What had to be copied because a step began before it was written.
        waited_s: Seconds that steps waited for it.
    """

    def __init__(
        self,
        files: Files,
        finish: Callable[[], object],
        optimizers: Sequence[Optimizer],
        copy_bytes: int,
        failed: Callable[[], object],
    ) -> None:
        """Note what is to be written, and start."""
        self.copied_bytes = 0
        self.waited_s = 0.0
        self._finish, self._failed = finish, failed
        self._limit = copy_bytes
        self._lock = threading.Condition()
        self._over = False
        self._error: Exception | None = None
        changing = _changing(optimizers)
        self._files: list[tuple[Path, dict[str, _Entry], Mapping[str, str] | None]] = []
        for path, tensors, metadata in files:
            plain = plain_tensors(tensors)
            entries = {name: _Entry(t, bool(_storages([t]) & changing)) for name, t in plain.items()}
            self._files.append((path, entries, metadata))
        self._hooks = [o.register_step_pre_hook(self._before_step) for o in optimizers]
        _open.add(self)
        self._thread = threading.Thread(target=self._run, name="trainstream-save")
        self._thread.start()

    # ------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            for path, entries, metadata in self._files:
                plain = {name: entry.tensor for name, entry in entries.items()}
                write_file(plain, path, metadata, lambda name, of=entries: self._claim(name, of[name]))  # type: ignore[misc]
            self._finish()
        except Exception as error:
            self._error = error.with_traceback(None)
            self._failed()
        finally:
            with self._lock:
                self._over = True
                self._files = []
                self._lock.notify_all()
            if self._error is None:
                _open.discard(self)

    @contextlib.contextmanager
    def _claim(self, name: str, entry: _Entry) -> Iterator[torch.Tensor]:
        """Have one tensor written while no step changes it."""
        with self._lock:
            entry.state = _WRITING
        if not entry.copied:
            self._check_unchanged(name, entry)
        yield entry.tensor
        if not entry.copied:
            self._check_unchanged(name, entry)
        with self._lock:
            entry.state = _WRITTEN
            if entry.copied:
                entry.tensor = torch.empty(0)
            self._lock.notify_all()

    def _check_unchanged(self, name: str, entry: _Entry) -> None:
        if _version(entry.tensor) != entry.version:
            raise StateError(
                f"[save_in_background] {name!r} was changed by something other than a step of the optimizer "
                "while it was still to be saved; wait for a save (wait()) before you write into weights"
            )

    # ------------------------------------------------------------------------------------- the others

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.preserve()

    def preserve(self) -> None:
        """Make sure that what a step changes can be changed: it is written, or copied within the bound.

        Raises:
            Exception: What went wrong with the save, once.
        """
        started = time.perf_counter()
        with self._lock:
            while not self._over and self._exposed_bytes() > self._limit:
                self._lock.wait()
        # The last ones first: the thread comes from the other side.
        for entry in reversed(self._entries()):
            with self._lock:
                if entry.exposed and entry.state == _WAITING:
                    entry.tensor = entry.tensor.to("cpu", copy=True)
                    entry.copied = True
                    self.copied_bytes += entry.nbytes
        with self._lock:
            while not self._over and any(entry.exposed for entry in self._entries()):
                self._lock.wait()
        self.waited_s += time.perf_counter() - started
        self._raise()
        if self._over:
            self._remove_hooks()

    def _entries(self) -> list[_Entry]:
        return [entry for _, entries, _ in self._files for entry in entries.values()]

    def _exposed_bytes(self) -> int:
        return sum(entry.nbytes for entry in self._entries() if entry.exposed)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            _open.discard(self)
            self._remove_hooks()
            raise error

    @property
    def done(self) -> bool:
        """Whether everything is written, or failed."""
        return self._over

    def wait(self) -> None:
        """Wait until everything has its name.

        Raises:
            Exception: What went wrong (StorageError, OSError, StateError), once.
        """
        self._thread.join()
        self._remove_hooks()
        self._raise()


#: Saves under way, and those that failed and nobody was told.
_open: set[BackgroundSave] = set()


@atexit.register
def _at_exit() -> None:
    for save in list(_open):
        try:
            save.wait()
        except Exception as error:
            LOGGER.error("a save in the background failed: %s", error)


def default_copy_bytes() -> int:
    """Return the bound of the copies where none is given."""
    return min(COPY_BYTES, host_budget().available_bytes // 10)


def save_in_background(
    files: Files,
    finish: Callable[[], object] = lambda: None,
    *,
    optimizers: Sequence[Optimizer] = (),
    copy_bytes: int | str | None = None,
    failed: Callable[[], object] = lambda: None,
) -> BackgroundSave:
    """Write safetensors files in a thread, with the values that the tensors have now.

    The next step of one of the optimizers copies what it changes and what is not written yet, up to
    `copy_bytes`, and waits for the rest. Weights that are changed by anything else before they are written
    make the save fail with a `StateError`; nothing wrong is ever written. What goes wrong is raised by the
    next step or by `wait()`, and logged at the end of the process, which waits for the thread.

    Args:
        files: For each file its path, the tensors by name, and texts for its header or None.
        finish: Called in the thread when all files are written: renames them into place, say.
        optimizers: Whose steps change the tensors; none with updates during backward (`eager=True`).
        copy_bytes: Bound of the copies, such as "2GiB"; None: 1 GiB, or a tenth of the free RAM if less.
        failed: Called in the thread when something went wrong: removes what was written, say.

    Returns:
        The save under way; `wait()` for it before another one is asked for.

    Raises:
        ArgumentError: As `save_safetensors`; so does ArgumentTypeError.

    Example:
        >>> import tempfile
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> path = Path(tempfile.mkdtemp()) / "a.safetensors"
        >>> save_in_background([(path, {"w": weight}, None)]).wait()
        >>> path.stat().st_size
        72
    """
    limit = default_copy_bytes() if copy_bytes is None else parse_bytes(copy_bytes, name="copy_bytes")
    for optimizer in optimizers:
        if getattr(optimizer, "works_in_backward", False):
            raise StateError(
                "[save_in_background] with eager=True weights change during backward; save without it"
            )
        synchronize = getattr(optimizer, "synchronize", None)
        if synchronize is not None:
            synchronize()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()  # the thread has another current stream
    return BackgroundSave(files, finish, optimizers, limit, failed)
