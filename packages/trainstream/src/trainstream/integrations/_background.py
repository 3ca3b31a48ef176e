"""The Trainer's checkpoints, written by a thread while training goes on."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainstream._folders import replace_folder
from trainstream._saves import optimizer_file, plain_optimizer, read_optimizer, weight_files
from trainstream._session import session_of
from ts_core.errors import OptionError
from ts_core.memory import parse_bytes
from ts_hf.background import Files, save_in_background

__all__ = ["BackgroundCheckpoints", "background_option", "load_optimizer"]

_SCHEDULER = "scheduler.pt"


def background_option(value: Any) -> BackgroundCheckpoints | None:
    """Return what `save_in_background` asks for: False, True, or the bound of the copies."""
    if value is False or value is None:
        return None
    if value is True:
        return BackgroundCheckpoints(None)
    try:
        return BackgroundCheckpoints(parse_bytes(value))
    except OptionError as error:
        raise OptionError(
            "option save_in_background: expected True, False, or the bytes that copies may take, such as "
            f'"2GiB", given {value!r}'
        ) from error


class BackgroundCheckpoints:
    """Collects what a checkpoint's large files hold, and has a thread write them.

    Args:
        copy_bytes: Bound of the copies; None: the default of `save_in_background`.
    """

    def __init__(self, copy_bytes: int | None) -> None:
        """Nothing is under way yet."""
        self._copy_bytes = copy_bytes
        self._files: list[Any] | None = None

    def check(self, arguments: Any) -> None:
        """Refuse arguments that need a checkpoint at once.

        Raises:
            OptionError: Several processes, or a push to the hub.
        """
        for name, bad in (
            ("world_size > 1", arguments.world_size > 1),
            ("push_to_hub", arguments.push_to_hub),
        ):
            if bad:
                raise OptionError(f"option save_in_background is not available with {name}; leave it out")

    @property
    def collecting(self) -> bool:
        """Whether a checkpoint is being collected."""
        return self._files is not None

    def add_weights(self, model: Any, folder: str) -> None:
        """Take the model's weights, instead of `save_pretrained`."""
        assert self._files is not None
        self._files += weight_files(model, Path(folder))

    def add_optimizer(self, trainer: Any, folder: str) -> None:
        """Take the optimizer's state; the scheduler's, which is small, is written."""
        assert self._files is not None
        self._files.append(optimizer_file(trainer.optimizer, Path(folder)))
        torch.save(trainer.lr_scheduler.state_dict(), Path(folder) / _SCHEDULER)

    def save(self, trainer: Any, run: Path, write: Callable[[], None], after: Callable[[Path], None]) -> None:
        """Write a checkpoint: the small files now, the large ones in the thread.

        Args:
            trainer: Its `_staging` is set while `write` runs.
            run: The folder of the run.
            write: Writes the checkpoint as the Trainer does.
            after: Called with the folder that holds the finished small files.

        Raises:
            Exception: What went wrong with the checkpoint before.
        """
        self.wait(trainer)
        staging = run / f".saving-{os.getpid()}-background"
        shutil.rmtree(staging, ignore_errors=True)
        discard = partial(shutil.rmtree, staging, ignore_errors=True)
        best = trainer.state.best_model_checkpoint
        self._files, trainer._staging = [], str(staging)
        try:
            write()
            for saved in staging.iterdir():
                after(saved)
            best = trainer.state.best_model_checkpoint
            files: Files = self._files
        except BaseException:
            discard()
            raise
        finally:
            self._files = trainer._staging = None

        def finish() -> None:
            for saved in staging.iterdir():
                replace_folder(saved, run / saved.name)
            discard()
            trainer._rotate(run, best)

        session = session_of(trainer.model)
        bound = self._copy_bytes
        if bound is None and session is not None:
            bound = session.copy_bytes()
        saving = save_in_background(
            files,
            finish,
            optimizers=[plain_optimizer(trainer.optimizer)],
            copy_bytes=bound,
            failed=discard,
        )
        self._saving = saving
        if session is not None:
            session.saving = saving

    _saving: Any = None

    def wait(self, trainer: Any) -> None:
        """Wait for the checkpoint under way.

        Raises:
            Exception: What went wrong with it.
        """
        session = session_of(trainer.model)
        saving, self._saving = self._saving, None
        if session is not None and session.saving is saving:
            session.saving = None
        if saving is not None:
            saving.wait()

    @contextlib.contextmanager
    def waited_for(self, trainer: Any) -> Iterator[None]:
        """Wait at the beginning and at the end, also when something else went wrong in between."""
        self.wait(trainer)
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # the first error counts
                self.wait(trainer)
            raise
        self.wait(trainer)


def load_optimizer(trainer: Any, folder: str | None) -> bool:
    """Load what `add_optimizer` saved; False if the checkpoint is of another kind."""
    if folder is None or not (Path(folder) / "optimizer.safetensors").is_file():
        return False
    trainer.optimizer.load_state_dict(read_optimizer(Path(folder)))
    trainer.lr_scheduler.load_state_dict(torch.load(Path(folder) / _SCHEDULER, weights_only=True))
    return True
