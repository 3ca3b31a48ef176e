"""Checkpoints of `trainstream finetune` that a thread writes while training goes on."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from trainstream._folders import replace_folder
from trainstream._saves import weight_files
from trainstream._session import Session
from trainstream.cli import output, storage
from trainstream.integrations._plan_file import write_plan
from ts_hf.background import BackgroundSave, save_in_background

__all__ = ["BackgroundWriter"]


class BackgroundWriter:
    """Writes one checkpoint at a time; what is saved is the state of the step at which it was asked to.

    A folder gets its name when everything in it is on the disk, as without a thread.

    Args:
        session: Of the wrapped model.
        copy_bytes: Bound of what a step copies because it is not written yet; None: chosen by the free RAM.
        finished: Called by `poll` and `settle`, in the training thread, with each finished folder.
    """

    def __init__(self, session: Session, copy_bytes: int | None, finished: Callable[[Path], object]) -> None:
        """Nothing is under way yet."""
        self._session = session
        self._copy_bytes = session.copy_bytes() if copy_bytes is None else copy_bytes
        self._finished = finished
        self._saving: BackgroundSave | None = None
        self._final = Path()
        self._failed = False

    def save(self, final: Path, data: dict[str, Any], state: Any, loss_chunk_size: int) -> None:
        """Begin to write a checkpoint; one under way is waited for.

        Args:
            final: Its folder.
            data: As for `storage.write_state`.
            state: As for `storage.write_state`.
            loss_chunk_size: For the plan beside them.

        Raises:
            StorageError: It, or the one before, could not be written.
        """
        self.settle()
        final.parent.mkdir(parents=True, exist_ok=True)
        staging = final.parent / f".saving-{os.getpid()}-{final.name}"
        shutil.rmtree(staging, ignore_errors=True)
        discard = partial(shutil.rmtree, staging, ignore_errors=True)
        # Losses are added to the list, and a schedule goes on, while the thread writes.
        tree, tensors = storage.flatten(state)
        frozen = json.dumps({"data": data, "tree": tree})
        session = self._session
        with output.storage_errors(final):
            try:
                staging.mkdir()
                files = weight_files(session.model, staging)
                (staging / "README.md").unlink(missing_ok=True)  # an empty model card of PEFT's
                write_plan(staging, session, loss_chunk_size=loss_chunk_size)
                files.append((staging / storage.TENSOR_FILE, tensors, None))
            except BaseException:
                discard()
                raise

        def finish() -> None:
            storage.seal(staging, **json.loads(frozen))
            replace_folder(staging, final)

        def failed() -> None:
            self._failed = True
            discard()

        self._final, self._failed = final, False
        optimizer = session.optimizer
        self._saving = session.saving = save_in_background(
            files,
            finish,
            optimizers=[] if optimizer is None else [optimizer],
            copy_bytes=self._copy_bytes,
            failed=failed,
        )

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is under way."""
        return self._saving is not None

    def poll(self) -> None:
        """Tell of a checkpoint that is finished by now.

        Raises:
            StorageError: It could not be written.
        """
        if self._saving is not None and self._saving.done:
            self.settle()

    def settle(self) -> None:
        """Wait for the checkpoint under way, if there is one.

        Raises:
            StorageError: It could not be written.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        if self._session.saving is saving:
            self._session.saving = None
        with output.storage_errors(self._final):
            saving.wait()
        self._finished(self._final)

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Name the checkpoint where a step of the optimizer raises what went wrong with it.

        Raises:
            StorageError: It could not be written.
        """
        try:
            yield
        except Exception:
            saving = self._saving
            if saving is None:
                raise
            with contextlib.suppress(Exception):
                saving.wait()
            if not self._failed:
                raise
            self._saving = self._session.saving = None
            with output.storage_errors(self._final):
                raise

    @contextlib.contextmanager
    def waited_for(self) -> Iterator[None]:
        """Wait at the end, also when something else went wrong before: that error counts."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):
                self.settle()
            raise
        self.settle()
