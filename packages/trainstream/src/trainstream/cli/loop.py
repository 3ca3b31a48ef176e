"""The training loop of `trainstream finetune`. It is also an example: nothing here is hidden in a class.

model, optimizer = trainstream.wrap(model, AdamW(...))
hidden = backbone(model)(input_ids=ids).last_hidden_state
loss = causal_lm_loss_for(model, hidden, labels)  # the logits of a chunk of tokens at a time
loss.backward(); optimizer.step()
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import trainstream
import ts_hf
from trainstream._session import session_of
from trainstream.cli.console import Console, tiers_text
from trainstream.cli.data import batch, batch_indices, to_device
from trainstream.cli.interrupt import Interrupt
from trainstream.cli.settings import Settings
from trainstream.integrations._plan_file import SavedPlan
from trainstream.packing import flatten_rows
from ts_core.errors import DoesNotFitError
from ts_core.memory import format_bytes
from ts_hf.tokens import Rows

__all__ = [
    "Progress",
    "compute_device",
    "evaluate",
    "make_optimizer",
    "random_state",
    "restore_random_state",
    "train",
]


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        step: Optimizer steps done.
        tokens: Tokens trained on in this process.
        seconds: Time spent training in this process.
        losses: (step, mean loss since the previous entry).
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[tuple[int, float]] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Training speed of this process."""
        return self.tokens / self.seconds if self.seconds else 0.0


def make_optimizer(
    model: Any, settings: Settings, total_steps: int, device: torch.device, saved: SavedPlan | None = None
) -> tuple[Any, Any, Any]:
    """Wrap the model: from here on TrainStream keeps the optimizer state and knows where every byte is.

    Args:
        model: The model, on the device or on the CPU.
        settings: Optimizer, budgets and `wrap` options are used.
        total_steps: For the schedule.
        device: Where the model computes.
        saved: The plan of the run that is resumed, whose numerics are kept.

    Returns:
        The wrapped model, the optimizer to use, and a learning-rate scheduler.

    Raises:
        DoesNotFitError: A budget is too small; the message has the numbers.
    """
    from transformers import get_scheduler

    rate = settings.learning_rate or (5e-4 if settings.method == "lora" else 2e-5)
    adamw = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        weight_decay=settings.weight_decay,
    )
    budgets = {"ram_budget": settings.ram, "vram_budget": settings.vram, "disk_budget": settings.disk}
    options: dict[str, Any] = {key: size for key, size in budgets.items() if size is not None}
    options = {**settings.wrap, **options, "device": device}
    options = options if saved is None else saved.force(options, model)
    _check_loss(model, settings, device)
    try:
        model, optimizer = trainstream.wrap(
            model, adamw, max_grad_norm=settings.max_grad_norm or None, **options
        )
    except DoesNotFitError as error:
        raise DoesNotFitError(f"{error}; {_loss_text(model, settings)}") from error
    if saved is not None:
        saved.check(model._trainstream_session)
    scheduler = get_scheduler(
        settings.lr_scheduler_type,
        optimizer,
        num_warmup_steps=round(settings.warmup_ratio * total_steps),
        num_training_steps=total_steps,
    )
    return model, optimizer, scheduler


def _loss_bytes(model: Any, settings: Settings) -> int:
    """Return what the logits of one chunk take, and the gradient of the output head where it is trained."""
    weight = model.get_output_embeddings().weight
    tokens = min(settings.loss_chunk_size, settings.per_device_train_batch_size * (settings.max_length - 1))
    gradient = 4 * weight.numel() if weight.requires_grad else 0
    return int(tokens * weight.shape[0] * weight.dtype.itemsize + gradient)


def _loss_text(model: Any, settings: Settings) -> str:
    return (
        f"the loss takes {format_bytes(_loss_bytes(model, settings))} with "
        f"loss_chunk_size={settings.loss_chunk_size} (a smaller one takes less, but may round otherwise: it "
        "is yours to choose)"
    )


def _check_loss(model: Any, settings: Settings, device: torch.device) -> None:
    """Refuse a budget that not even the loss fits in: the chunk size decides bits, so it stays as it is."""
    name, budget = ("vram", settings.vram) if device.type == "cuda" else ("ram", settings.ram)
    if budget is not None and _loss_bytes(model, settings) > budget:
        raise DoesNotFitError(f"option {name}={format_bytes(budget)}: {_loss_text(model, settings)}")


def compute_device(model: Any) -> torch.device:
    """Say where a model computes; the first parameter of a wrapped one may be somewhere else."""
    session = session_of(model)
    return next(model.parameters()).device if session is None else torch.device(session.plan.device)


def train(
    model: Any,
    optimizer: Any,
    scheduler: Any,
    rows: Rows,
    settings: Settings,
    *,
    total_steps: int,
    progress: Progress,
    console: Console,
    interrupt: Interrupt,
    save: Callable[[], object],
    poll: Callable[[], object] = lambda: None,
) -> None:
    """Train from `progress.step` to `total_steps`, or until an interrupt is requested.

    An interrupt ends the loop between two micro-batches; a step that is then unfinished is abandoned, and
    model, optimizer and random numbers are those of the last finished step.

    Args:
        model: The wrapped model.
        optimizer: What `wrap` returned.
        scheduler: Stepped once per optimizer step.
        rows: Training rows.
        settings: Batch sizes and intervals are used.
        total_steps: Where to stop.
        progress: Updated.
        console: Told about losses.
        interrupt: Asked before every micro-batch.
        save: Called every `save_steps` steps.
        poll: Called after every step.
    """
    device = compute_device(model)
    accumulation = settings.gradient_accumulation_steps
    save_steps = settings.save_steps
    if save_steps is None:
        save_steps = 20 if settings.method == "lora" else 200
    model.train()
    since_log: list[torch.Tensor] = []
    while progress.step < total_steps:
        start = time.perf_counter()
        before_step = random_state()
        size = settings.per_device_train_batch_size
        first = progress.step * accumulation
        batches = [
            batch(rows, batch_indices(first + k, size, len(rows), settings.seed)) for k in range(accumulation)
        ]
        # One divisor for the whole step, so that accumulation gives the gradient of one large batch.
        items = sum(ts_hf.count_items(micro["labels"]) for micro in batches)
        step_loss = torch.zeros((), device=device)
        for micro in batches:
            if interrupt.requested:
                optimizer.zero_grad(set_to_none=True)
                restore_random_state(before_step)
                return
            step_loss += _micro_batch(model, micro, items, settings.loss_chunk_size, device)
        trained = _told(model, batches)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.tokens += trained
        progress.seconds += time.perf_counter() - start
        since_log.append(step_loss)
        _report(model, scheduler, settings, total_steps, progress, console, since_log)
        if save_steps and progress.step % save_steps == 0 and progress.step < total_steps:
            save()
        poll()


def _told(model: Any, batches: list[dict[str, torch.Tensor]]) -> int:
    """Count the tokens of a step, and tell the event file."""
    trained = sum(micro["input_ids"].numel() for micro in batches)
    session = session_of(model)
    if session is not None:
        session.tell(trained)
    return trained


def _micro_batch(
    model: Any, micro: dict[str, torch.Tensor], items: int, chunk_size: int, device: torch.device
) -> torch.Tensor:
    """Run forward and backward; where memory runs out, room is made and both run again."""

    def run() -> torch.Tensor:
        loss = chunked_loss(model, to_device(micro, device), items, chunk_size)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    session = session_of(model)
    return run() if session is None else session.replayed(run)


def chunked_loss(model: Any, micro: dict[str, torch.Tensor], items: int, chunk_size: int) -> torch.Tensor:
    """Return the summed cross-entropy of a micro-batch over `items`, without its logits ever existing whole.

    Args:
        model: The model.
        micro: `input_ids`, `labels` and perhaps `attention_mask` or, of packed rows, `position_ids`.
        items: The divisor: labels counted over the whole step.
        chunk_size: Tokens whose logits exist at a time.
    """
    if "position_ids" in micro and "flash" in str(getattr(model.config, "_attn_implementation", "")):
        micro = flatten_rows(micro)
    inputs = {name: tensor for name, tensor in micro.items() if name != "labels"}
    hidden = ts_hf.backbone(model)(**inputs, use_cache=False).last_hidden_state
    return ts_hf.causal_lm_loss_for(model, hidden, micro["labels"], items, chunk_size)


def _report(
    model: Any,
    scheduler: Any,
    settings: Settings,
    total_steps: int,
    progress: Progress,
    console: Console,
    since_log: list[torch.Tensor],
) -> None:
    due = progress.step % settings.logging_steps == 0 or progress.step == total_steps
    if due:
        loss = float(torch.stack(since_log).mean())
        since_log.clear()
        progress.losses.append((progress.step, loss))
        session = session_of(model)
        for recorder in session.recorders if session is not None else ():
            recorder.loss(progress.step, loss)
        tiers = trainstream.memory_report(model)["tiers"]
        console.event(
            "step",
            step=progress.step,
            total_steps=total_steps,
            loss=loss,
            learning_rate=float(scheduler.get_last_lr()[0]),
            tokens_per_s=progress.tokens_per_s,
            tiers=tiers,
        )
        if not console.has_bar:
            console.note(
                f"step {progress.step}/{total_steps}  loss {loss:.4f}  {progress.tokens_per_s:.0f} tokens/s  "
                f"memory: {tiers_text(tiers)}"
            )
        console.show(loss=f"{loss:.4f}", memory=tiers_text(tiers))
    console.advance(tokens_per_s=f"{progress.tokens_per_s:.0f}")


def evaluate(model: Any, rows: Rows, settings: Settings, interrupt: Interrupt | None = None) -> float | None:
    """Return the mean loss per predicted token over rows, or None if there are none or an interrupt came.

    Args:
        model: Wrapped or not.
        rows: Held-out rows; all are used.
        settings: Batch size and chunk size are used.
        interrupt: Asked before every micro-batch.
    """
    size = settings.per_device_train_batch_size
    device = compute_device(model)
    total, items = 0.0, 0
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for start in range(0, len(rows), size):
                if interrupt is not None and interrupt.requested:
                    return None
                micro = batch(rows, range(start, min(start + size, len(rows))))
                count = ts_hf.count_items(micro["labels"])
                loss = chunked_loss(model, to_device(micro, device), count, settings.loss_chunk_size)
                total += float(loss) * count
                items += count
    finally:
        model.train(was_training)
    return total / items if items else None


# ---------------------------------------------------------------------------------------- randomness


def random_state() -> dict[str, Any]:
    """Return the state of every random generator that a model may use (dropout: torch's)."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Set the generators to what `random_state` returned."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
