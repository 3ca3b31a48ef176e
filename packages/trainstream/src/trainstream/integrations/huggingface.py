"""TrainStream in transformers: a Trainer, a callback, and `wrap` for transformers models."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import serialization
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import SaveStrategy, get_last_checkpoint

import trainstream as ts
from trainstream._folders import replace_folder, sweep
from trainstream._options import WrapOptions
from trainstream._session import session_of
from trainstream.integrations._background import background_option, load_optimizer
from trainstream.integrations._batches import RowPacking, packing_option, recompute_of, refuse_misspelled
from trainstream.integrations._chunking import chunking_obstacle, loss_in_chunks
from trainstream.integrations._clipping import can_clip, clip_gradients_
from trainstream.integrations._metrics import LogMetrics, takes_numbers_only
from trainstream.integrations._plan_file import SavedPlan, read_plan, write_plan
from ts_core.errors import ArgumentTypeError, OptionError
from ts_core.headroom import RamGuard
from ts_core.options import boolean, integer
from ts_hf import (
    BlockCache,
    count_items,
    load_model,
    reference_logprobs,
    save_model,
    sequence_logprobs_for,
)

__all__ = [
    "BlockCache",
    "TrainStreamCallback",
    "TrainStreamTrainer",
    "load_model",
    "reference_logprobs",
    "sequence_logprobs_for",
    "wrap_hf",
]

LOGGER = logging.getLogger("trainstream")

# wrap() options that TrainingArguments state already: one thing must not have two places.
_FROM_ARGUMENTS = {
    "lr": "learning_rate",
    "max_grad_norm": "max_grad_norm",
    "accumulation_steps": "gradient_accumulation_steps",
    "device": "use_cpu",
    "optimizer": "optim",
}
_ADAMW = ("adamw_torch", "adamw_torch_fused")
_UPDATES_IN_BACKWARD = ("layerwise", "lomo")
_CHUNK_SIZE = 1024
_EVALUATE_IN_PIECES = (
    "Predictions of the whole evaluation set add up in RAM: set eval_accumulation_steps, "
    "preprocess_logits_for_metrics or batch_eval_metrics, use fewer rows, or evaluate without compute_metrics"
)
_CHECKPOINT = re.compile(r"^checkpoint-(\d+)$")


def wrap_hf(
    model: nn.Module, optimizer: Optimizer | None = None, **options: Any
) -> tuple[nn.Module, Optimizer | None]:
    """Call `trainstream.wrap` with the decoder layers of a transformers model as its blocks.

    Args:
        model: A transformers model, or a PEFT model around one.
        optimizer: As for `wrap`.
        **options: As for `wrap`; `blocks` is filled in unless it is given.

    Returns:
        The model and the optimizer to use, as `wrap` does.

    Raises:
        OptionError: As `wrap`.

    Example:
        >>> model, optimizer = wrap_hf(model, torch.optim.AdamW(model.parameters()))  # doctest: +SKIP
    """
    if options.get("blocks") is None:
        layers = _decoder_layers(model)
        if layers:
            options["blocks"] = layers
    return ts.wrap(model, optimizer, **options)


def _decoder_layers(model: nn.Module) -> list[nn.Module]:
    base: Any = model
    base = base.get_base_model() if hasattr(base, "get_base_model") else base
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else None
    layers = getattr(decoder, "layers", None)
    return list(layers) if isinstance(layers, nn.ModuleList) else []


class TrainStreamTrainer(Trainer):  # type: ignore[misc]
    """transformers' `Trainer` with the optimizer state on the host and the loss computed in chunks.

    Everything of `Trainer` keeps its meaning: schedules, accumulation, clipping, evaluation, callbacks,
    checkpoints, `resume_from_checkpoint`. Activation (gradient) checkpointing of the arguments becomes the
    option `recompute`. It can stand in front of another Trainer class as a mixin, TRL's for instance:
    `class MyTrainer(TrainStreamTrainer, SFTTrainer)`. A loss that such a class computes itself is kept.

    The loss of a step is the sum over its micro-batches of the cross-entropy of every label after the shift,
    divided by the number of such labels in the whole step; so the gradient does not depend on how a step is
    cut into micro-batches, and the logged loss is that number.

    Args:
        *args: As `Trainer`.
        trainstream: Options: any of `wrap()` (except those that `TrainingArguments` states: learning rate,
            clipping, accumulation, device), and

            - `chunked_loss` (True): compute the loss from hidden states, `loss_chunk_size` (1024) tokens at a
              time, so that logits never exist as a whole. If it is not given and the model or the arguments
              do not allow it (no decoder and output head found, label smoothing, `compute_loss_func`), the
              model's own loss is used and a warning says why; if it is given as True, that is an error.
              In front of a class that computes its own loss, only True replaces that.
            - `events` (None): a file for JSON lines, one for every step and event; see the page "events".
            - `packing` (False): put the documents of a training batch into full rows, with attention kept
              inside each: True for rows as long as the longest of the batch, N for rows of N tokens. Examples
              hold `input_ids` and perhaps `labels`. Evaluation has one document a row.
            - `save_in_background` (False): True or a bound of its copies, such as "2GiB": a thread writes the
              checkpoints while training goes on, the optimizer's state as `optimizer.safetensors`.
        **kwargs: As `Trainer`.

    Raises:
        OptionError: An unknown option, one that is not available yet, one that `TrainingArguments` states, or
            an `optim` that updates during backward.

    Example:
        >>> trainer = TrainStreamTrainer(  # doctest: +SKIP
        ...     model=model, args=TrainingArguments("out"), train_dataset=rows, trainstream={"threads": 4}
        ... )
        >>> trainer.train()  # doctest: +SKIP
    """

    def __init__(self, *args: Any, trainstream: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Check the options, then build the Trainer; the model is wrapped when training starts."""
        options = dict(trainstream or {})
        chunked = options.pop("chunked_loss", None)
        self._chunked_asked = None if chunked is None else boolean("chunked_loss", chunked)
        size = options.pop("loss_chunk_size", None)
        self._chunk_size_asked = None if size is None else integer("loss_chunk_size", size, minimum=1)
        self._loss_chunk_size = self._chunk_size_asked or _CHUNK_SIZE
        events = options.pop("events", None)
        if events is not None and not isinstance(events, (str, os.PathLike)):
            raise OptionError(f"option events: expected a path or None, given {type(events).__name__}")
        self._events_file: str | os.PathLike[str] | None = events
        packing = packing_option(options.pop("packing", False))
        self._background = background_option(options.pop("save_in_background", False))
        for name in options.keys() & _FROM_ARGUMENTS.keys():
            raise OptionError(
                f"option {name}: the Trainer takes it from TrainingArguments.{_FROM_ARGUMENTS[name]}"
            )
        refuse_misspelled(options)
        WrapOptions.from_kwargs(**options)
        self._wrap_options = options
        self._need_logits = False
        self._saved_plan: SavedPlan | None = None
        self._ts_metrics: LogMetrics | None = None
        self._ram_guard = RamGuard("evaluate", _EVALUATE_IN_PIECES)
        super().__init__(*args, **kwargs)
        self._check_optim()
        if self._background is not None:
            self._background.check(self.args)
        if self.args.n_gpu > 1:
            LOGGER.warning("TrainStreamTrainer trains on one GPU; the other visible ones stay idle")
            self.args._n_gpu = 1
        self._packing = RowPacking(self, packing) if packing else None
        given = options.get("recompute", "auto") != "auto"
        recompute = recompute_of(self.args, _decoder_layers(self.model), given)
        if recompute is not None:
            self._wrap_options["recompute"] = recompute
        self._takes_loss_kwargs = bool(self.model_accepts_loss_kwargs)  # type: ignore[has-type]
        self._chunked = self._decide_chunked()
        # A causal LM that cannot be told the divisor returns the mean of its own micro-batch.
        own = self._takes_loss_kwargs or self._foreign_loss() or self._why_not_chunked()
        self._rescaled = not (self._chunked or own)
        if self._chunked or self._rescaled:
            # The loss is normalized here, whatever the model's forward accepts: this makes Trainer count the
            # labels, and keeps it from dividing by the number of micro-batches once more.
            self.model_accepts_loss_kwargs = True

    def _check_optim(self) -> None:
        name = str(getattr(self.args.optim, "value", self.args.optim))
        own = self.optimizer is not None or self.optimizer_cls_and_kwargs is not None
        if not own and any(part in name for part in _UPDATES_IN_BACKWARD):
            raise OptionError(
                f"option optim={name!r} is not available with TrainStreamTrainer: it updates weights during "
                f"backward, past the pager; use {' or '.join(_ADAMW)}, or another one that updates in step()"
            )
        if not own and name not in _ADAMW:
            LOGGER.info("optim=%s is kept as it is: only AdamW's state is offloaded", name)

    def _decide_chunked(self) -> bool:
        if self._chunked_asked is False or (self._foreign_loss() and not self._chunked_asked):
            return False
        reason = self._why_not_chunked()
        if reason and self._chunked_asked:
            raise OptionError(f"option chunked_loss=True: {reason}; use chunked_loss=False")
        if reason:
            LOGGER.warning("chunked loss is off: %s; the model's own loss is used", reason)
        return not reason

    def _foreign_loss(self) -> bool:
        """Whether a class behind this one computes a loss of its own, as TRL's Trainers do."""
        mro = type(self).__mro__
        behind = mro[mro.index(TrainStreamTrainer) + 1 :]
        return next(cls for cls in behind if "compute_loss" in cls.__dict__) is not Trainer

    def _why_not_chunked(self) -> str:
        if self.label_smoother is not None:
            return "label_smoothing_factor needs whole logits"
        if self.compute_loss_func is not None:
            return "compute_loss_func needs the model's outputs"
        if self.args.torch_compile:
            return "torch_compile compiles the model as a whole"
        return chunking_obstacle(self.model)

    # ------------------------------------------------------------------------------------ optimizer

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move the model, except one whose place is wrap()'s to decide: it may be larger than the device."""
        if session_of(model) is None and not self._placed_by_wrap():
            super()._move_model_to_device(model, device)

    def _placed_by_wrap(self) -> bool:
        options = self._wrap_options
        asked = options.get("param_offload", "auto")
        budgets = ("vram_budget", "ram_budget", "disk_budget")
        given = any(options.get(name) is not None for name in budgets)
        in_environment = any(os.environ.get(f"TRAINSTREAM_{name}") for name in ("VRAM", "RAM", "DISK"))
        return given or in_environment or asked not in ("auto", False)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Let Trainer make its AdamW (decay groups, rate, betas, eps), then wrap the model with it."""
        before: Any = self.optimizer  # type: ignore[has-type]
        if session_of(self.model) is not None and before is None:
            LOGGER.warning("the model was wrapped before: it is wrapped again, with this Trainer's options")
            ts.unwrap(self.model)
        optimizer = super().create_optimizer() if model is None else super().create_optimizer(model)
        if session_of(self.model) is None:
            plain = getattr(optimizer, "optimizer", optimizer)
            options = dict(self._wrap_options)
            if self.args.device.type in ("cpu", "cuda"):
                options["device"] = self.args.device
            if self._saved_plan is not None:
                options = self._saved_plan.force(options, self.model)
            wrapped: Any = wrap_hf(self.model, plain, **options)[1]
            self.optimizer = wrapped
            if isinstance(wrapped, ts.OffloadAdamW):
                # accelerate would copy all optimizer state to the GPU and back; it stays where wrap put it.
                self.optimizer = self.accelerator.prepare_optimizer(wrapped, device_placement=False)
                self.optimizer._is_accelerate_prepared = True  # so that prepare() leaves it alone
            session = session_of(self.model)
            self._ts_metrics = LogMetrics(wrapped, session)
            if session is not None and self._events_file is not None:
                session.record(self._events_file)
        session = session_of(self.model)
        if self._saved_plan is not None and session is not None:
            self._saved_plan.check(session)
        return self.optimizer

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clip by the norm that the optimizer would take, so that placement does not change its bits."""
        alone = session_of(self.model) is not None and self.accelerator.num_processes == 1
        if not alone or not can_clip(self.optimizer):
            return super()._clip_grad_norm(model)
        self.accelerator.unscale_gradients()
        return clip_gradients_(self.optimizer, self.args.max_grad_norm)

    # ----------------------------------------------------------------------------------------- loss

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Count the labels of a whole step after the shift: position 0 of a row is predicted by nothing."""
        counted = self._chunked or self._rescaled
        # Labels that a collator has shifted already are for the model's own loss.
        usual = all("labels" in batch and "shift_labels" not in batch for batch in batch_samples)
        if not counted or not batch_samples or not usual:
            return super()._get_num_items_in_batch(batch_samples, device)
        count = sum(int(count_items(batch["labels"])) for batch in batch_samples)
        items = torch.tensor(count, device=device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            items = self.accelerator.gather(items).sum()
        return items

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Run forward and backward of a micro-batch; where memory runs out, make room and run it again."""
        tokens = inputs.pop("num_tokens", None)  # of a packed batch: without padding
        if self._ts_metrics is not None and isinstance(inputs.get("input_ids"), torch.Tensor):
            self._ts_metrics.count_tokens(inputs["input_ids"].numel() if tokens is None else int(tokens))
        run: Callable[[], torch.Tensor] = partial(super().training_step, model, inputs, num_items_in_batch)
        session = session_of(self.model)
        return run() if session is None else session.replayed(run)

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Make a data loader, for training with packed rows if they are asked for."""
        if self._packing is None:
            return super()._get_dataloader(*args, **kwargs)
        own = self.data_collator  # type: ignore[has-type]
        self.data_collator = self._packing.collator(kwargs.get("is_training", False))
        try:
            return super()._get_dataloader(*args, **kwargs)
        finally:
            self.data_collator = own

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Compute the loss from hidden states in chunks, or as Trainer does where logits are asked for."""
        if not self.model_accepts_loss_kwargs:
            num_items_in_batch = None  # somebody wants a mean over each micro-batch: Trainer divides it
        usual = inputs.get("labels") is not None and "shift_labels" not in inputs
        if not self._chunked or self._need_logits or not usual:
            return self._whole_loss(model, inputs, return_outputs, num_items_in_batch, **kwargs)
        # The model is not called as a whole, so accelerate's autocast around its forward is entered here.
        with self.accelerator.autocast():
            loss = loss_in_chunks(
                self.accelerator.unwrap_model(model), inputs, num_items_in_batch, self._loss_chunk_size
            )
        if (
            self.args.average_tokens_across_devices
            and num_items_in_batch is not None
            and self.accelerator.num_processes > 1
        ):
            loss = loss * self.accelerator.num_processes
        return (loss, {"loss": loss}) if return_outputs else loss

    def _whole_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool,
        num_items: torch.Tensor | int | None,
        **kwargs: Any,
    ) -> Any:
        """Let Trainer compute the loss from whole logits, and see to its divisor where the model cannot."""
        if self._foreign_loss() or not self.model_accepts_loss_kwargs:
            return super().compute_loss(model, inputs, return_outputs, num_items, **kwargs)
        accepted, self.model_accepts_loss_kwargs = self.model_accepts_loss_kwargs, self._takes_loss_kwargs
        try:
            loss, outputs = super().compute_loss(
                model, inputs, return_outputs=True, num_items_in_batch=num_items, **kwargs
            )
        finally:
            self.model_accepts_loss_kwargs = accepted
        labels = inputs.get("labels")
        if accepted and not self._takes_loss_kwargs and num_items is not None and labels is not None:
            own = count_items(labels)
            # A mean over no label is NaN; such a micro-batch adds nothing to the step.
            loss = loss * own / num_items if own else outputs["logits"].sum() * 0.0
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Evaluate with the chunked loss, or with whole logits if metrics or predictions need them."""
        self._need_logits = not prediction_loss_only
        self._ram_guard.check()
        try:
            return super().prediction_step(
                model, inputs, prediction_loss_only, ignore_keys=ignore_keys, **kwargs
            )
        finally:
            self._need_logits = False

    # ----------------------------------------------------------------------------------------- logs

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with TrainStream's metrics beside the training loss."""
        limiter = None
        if self._ts_metrics is not None and "loss" in logs:
            logs.update(self._ts_metrics.take())
            if takes_numbers_only(self.callback_handler.callbacks):
                limiter = logs.pop("ts_limiter", None)
            session = session_of(self.model)
            for recorder in session.recorders if session is not None else ():
                recorder.loss(self.state.global_step, logs["loss"])
        super().log(logs, *args, **kwargs)
        if limiter is not None:
            self.state.log_history[-1]["ts_limiter"] = limiter

    # ---------------------------------------------------------------------------------- checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; `resume_from_checkpoint=True` takes the last complete checkpoint."""
        if self.args.should_save:
            sweep(Path(self.args.output_dir))
        place = resume_from_checkpoint
        if place is True:
            place = get_last_checkpoint(self.args.output_dir)
        self._saved_plan = read_plan(Path(place)) if place else None
        self._loss_chunk_size = self._chunk_size_asked or _CHUNK_SIZE
        if self._saved_plan is not None and self._chunked:
            asked = self._chunk_size_asked
            self._loss_chunk_size = self._saved_plan.chunk_size(asked, self._loss_chunk_size)
        train = partial(super().train, resume_from_checkpoint, *args, **kwargs)
        if self._background is None:
            return train()
        with self._background.waited_for(self):
            return train()

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self._background is not None:  # the best model is loaded, old checkpoints go
            self._background.wait(self)
        return super()._finalize_training(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._background is not None and self._background.collecting:
            self._background.add_optimizer(self, output_dir)
        else:
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the optimizer's state out of a mapped file: RAM may have no room for it beside the state."""
        if load_optimizer(self, checkpoint):
            return
        config: Any = serialization.config
        with config.patch("load.mmap", True):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _write_plan(self, folder: Path) -> None:
        session = session_of(self.model)
        if session is not None and self.args.should_save:
            write_plan(folder, session, loss_chunk_size=self._loss_chunk_size if self._chunked else None)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint beside its place, make it durable, and rename it into place."""
        if self.args.world_size > 1 or self.args.push_to_hub:
            super()._save_checkpoint(model, trial)
            self._write_plan(Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}")
            return
        run = Path(self._get_output_dir(trial))
        if self._background is not None:
            write = partial(super()._save_checkpoint, model, trial)
            self._background.save(self, run, write, partial(self._complete, run))
            return
        staging = run / f".saving-{os.getpid()}-checkpoint"
        shutil.rmtree(staging, ignore_errors=True)
        self._staging = str(staging)
        try:
            super()._save_checkpoint(model, trial)
            for saved in staging.iterdir():
                self._complete(run, saved)
                replace_folder(saved, run / saved.name)
        finally:
            self._staging = None
            shutil.rmtree(staging, ignore_errors=True)
        self._rotate(run, self.state.best_model_checkpoint)

    def _complete(self, run: Path, saved: Path) -> None:
        self._write_plan(saved)
        self._correct_paths(saved, run)

    _staging: str | None = None

    def _get_output_dir(self, trial: Any) -> str:
        return self._staging or super()._get_output_dir(trial)

    def _correct_paths(self, saved: Path, run: Path) -> None:
        """Name the best checkpoint, this or an earlier one, by its place: Trainer looked beside this one."""
        name = f"checkpoint-{self.state.best_global_step}"
        known = self.args.save_strategy != SaveStrategy.NO and self.state.best_global_step
        if known and (saved.name == name or (run / name).exists()):
            self.state.best_model_checkpoint = str(run / name)
            self.state.save_to_json(str(saved / "trainer_state.json"))

    def _rotate(self, run: Path, best: str | None) -> None:
        """Remove the oldest checkpoints beyond `save_total_limit`, never the best or the newest one."""
        limit = self.args.save_total_limit
        if limit is None or limit <= 0 or not self.args.should_save:
            return
        kept_best = Path(best).name if best else None
        found = sorted(
            (int(match[1]), path) for path in run.iterdir() if (match := _CHECKPOINT.match(path.name))
        )
        names = [path for _, path in found]
        removable = [path for path in names[:-1] if path.name != kept_best]
        if limit == 1 and kept_best is not None and names and names[-1].name != kept_best:
            limit = (
                2  # as transformers does: the last one is needed to resume, the best one to load at the end
            )
        for path in removable[: max(0, len(names) - limit)]:
            with contextlib.suppress(OSError):
                (path / "trainer_state.json").unlink()
            shutil.rmtree(path, ignore_errors=True)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save the model, tensor by tensor; packed weights of a model without adapters are saved decoded."""
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        if state_dict is None and isinstance(model, PreTrainedModel) and not model._hf_peft_config_loaded:
            # Trainer's own _save does the rest around these two calls; it writes weights by save_pretrained.
            folder = self.args.output_dir if output_dir is None else output_dir
            with _saved_by(model, partial(self._save_streaming, model)):
                super()._save(folder)
            return
        super()._save(output_dir, state_dict)

    def _save_streaming(self, model: Any, folder: str, **_: Any) -> None:
        if self._background is not None and self._background.collecting:
            self._background.add_weights(model, folder)
        elif self.args.should_save:
            save_model(model, folder)


@contextlib.contextmanager
def _saved_by(model: Any, save: Callable[..., None]) -> Iterator[None]:
    """Let `save` stand in for the model's `save_pretrained`."""
    before = model.__dict__.get("save_pretrained")
    model.__dict__["save_pretrained"] = save
    try:
        yield
    finally:
        del model.__dict__["save_pretrained"]
        if before is not None:
            model.__dict__["save_pretrained"] = before


class TrainStreamCallback(TrainerCallback):  # type: ignore[misc]
    """Adds TrainStream's metrics to the logs of a stock `Trainer` that was given an `OffloadAdamW`.

    They are in `trainer.state.log_history` and in what later callbacks (the printed line too) are shown.

    Args:
        optimizer: The optimizer given to the Trainer.

    Raises:
        ArgumentTypeError: It is no `OffloadAdamW`.

    Example:
        >>> optimizer = OffloadAdamW(model.parameters(), lr=1e-4)  # doctest: +SKIP
        >>> Trainer(model, args, optimizers=(optimizer, None), callbacks=[TrainStreamCallback(optimizer)])
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """Start counting now."""
        if not isinstance(optimizer, ts.OffloadAdamW):
            raise ArgumentTypeError(
                f"TrainStreamCallback(optimizer): expected an OffloadAdamW, given {type(optimizer).__name__}"
            )
        self._metrics = LogMetrics(optimizer)
        self._tokens_seen = 0.0

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the metrics to logs that carry a training loss."""
        if logs is None or "loss" not in logs:
            return
        # Counted by Trainer if include_num_input_tokens_seen is set; else the speed is left out.
        seen = float(getattr(state, "num_input_tokens_seen", 0) or 0)
        self._metrics.count_tokens(int(seen - self._tokens_seen))
        entries = self._metrics.take()
        if seen == self._tokens_seen:
            del entries["ts_tokens_per_s"]
        self._tokens_seen = seen
        logs.update(entries)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(entries)
