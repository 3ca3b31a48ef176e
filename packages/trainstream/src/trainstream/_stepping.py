"""One optimizer step over micro-batches that the caller hands over: `session.train_step`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainstream._replay import explain, out_of_memory, run_again
from ts_core.errors import ArgumentError, StateError

if TYPE_CHECKING:
    from trainstream._session import Session

__all__ = ["train_step"]


def train_step(
    session: Session, batches: Sequence[Any], loss: Callable[[Any, Any], Tensor] | None = None
) -> Tensor:
    """Do what `Session.train_step` says."""
    optimizer = session.optimizer
    if optimizer is None:
        raise StateError("session.train_step: no parameter requires grad, so nothing is trained")
    batches = list(batches)
    if not batches:
        raise ArgumentError("session.train_step(batches): expected at least one micro-batch, given none")
    optimizer.zero_grad()
    losses = [
        run_again(session, partial(_forward_and_backward, session, batch, loss, len(batches)))
        for batch in batches
    ]
    if not session.told:  # a loop of one's own may know better, with padding left out
        session.tell(sum(map(_ids_in, batches)))
    try:
        optimizer.step()
    except Exception as error:
        if out_of_memory(error):
            session.relief.due = "memory ran out in the optimizer's step"
            explain(
                error,
                "It ran out in the optimizer's step, which cannot run again by itself; room is made before "
                "the next pass. OffloadAdamW checks before it writes: with it, weights are as they were",
            )
        raise
    return torch.stack(losses).mean() if len(losses) > 1 else losses[0]


def _forward_and_backward(
    session: Session, batch: Any, loss_of: Callable[[Any, Any], Tensor] | None, count: int
) -> Tensor:
    output = _call(session.model, batch)
    loss = _loss_in(output) if loss_of is None else loss_of(output, batch)
    del output
    (loss / count if count > 1 else loss).backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def _call(model: Callable[..., Any], batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


def _ids_in(batch: Any) -> int:
    """Count the token ids of a micro-batch, if it is a language model's; else 0."""
    first = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if isinstance(batch, Mapping):
        first = batch.get("input_ids")
    ids = isinstance(first, Tensor) and first.dim() == 2 and not first.is_floating_point()
    return first.numel() if ids else 0


def _loss_in(output: Any) -> Tensor:
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None and isinstance(output, Tensor):
        found = output
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise ArgumentError(
            "session.train_step(batches): the model's output has no loss of one element; put labels into the "
            "micro-batches, or pass loss=, a function of the output and the micro-batch"
        )
    return found
