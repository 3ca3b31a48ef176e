"""A block's run on fixed memory: what is recorded, and what a recording is compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .blockmode import Run
from .calls import Call
from .fixed import Fixed, Pack
from .recording import CannotRecord

__all__ = [
    "Expected", "Memory", "Trial", "bytes_of", "eagerly", "equal", "known_storages",
    "of_residents", "reserve", "standing",
]  # fmt: skip


class Trial(Run):
    """A run on fixed memory, to be recorded or compared with."""

    def __init__(self, run: Run, leaves: Sequence[Tensor], stand: dict[int, Tensor]) -> None:
        """Take a run's place, with other arguments.

        Args:
            run: The run.
            leaves: The tensors among the arguments.
            stand: What stands for Parameters that are not paged, by their id.
        """
        self.__dict__.update(run.__dict__)
        self.call = Call(list(leaves), run.call.spec)
        self.stand = stand
        self.saved: dict[int, torch.UntypedStorage] | None = None

    def _saving(self, leaves: Sequence[Tensor]) -> Any:
        saved = self.saved
        if saved is None:
            return contextlib.nullcontext()

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                saved.setdefault(storage.data_ptr(), storage)
            return tensor if tensor.grad_fn is None else tensor.detach()

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


class Memory:
    """Fixed memory of all recordings of one structure and one form of inputs.

    Attributes:
        inputs: For the tensors among the arguments.
        carried: For Parameters that are not paged, and buffers, where several blocks use the recordings.
        given: For the gradients of the outputs.
        outputs: The outputs.
        found: The gradients.
    """

    def __init__(self, inputs: list[Fixed], carried: list[Fixed]) -> None:
        """Begin with what comes in."""
        self.inputs, self.carried = inputs, carried
        self.given: list[Fixed] = []
        self.outputs: Pack | None = None
        self.found: Pack | None = None

    def nbytes(self) -> int:
        """Return the bytes reserved."""
        packs = [pack.nbytes for pack in (self.outputs, self.found) if pack is not None]
        return sum(packs) + sum(each.nbytes for each in (*self.inputs, *self.carried, *self.given))


@contextlib.contextmanager
def standing(run: Run, memory: Memory) -> Iterator[dict[int, Tensor]]:
    """Put fixed memory into the places of buffers; yields what stands for Parameters, by their id."""
    residents = run.interior.residents
    values = [fixed.value for fixed in memory.carried]
    stand = {id(p): value for p, value in zip(residents, values, strict=False)}
    if not values:
        yield {}
        return
    places = [
        (m._buffers, k) for m in run.block.module.modules() for k, b in m._buffers.items() if b is not None
    ]
    before = [place[key] for place, key in places]
    for (place, key), value in zip(places, values[len(residents) :], strict=True):
        place[key] = value
    try:
        yield stand
    finally:
        for (place, key), own in zip(places, before, strict=True):
            place[key] = own


Expected = tuple[list[Tensor], list[Tensor], list[Tensor | None]]


def eagerly(trial: Trial, look: Callable[[Sequence[Tensor], Any], object] | None = None) -> Expected:
    """Return the outputs, gradients to start from, and the gradients that come of these.

    Args:
        trial: The run.
        look: Told the outputs of the graph, and the node that it begins with.
    """
    flat, _ = trial.inner(trial.call.leaves)
    outs = trial._outputs
    if not outs:
        raise CannotRecord("none of its outputs needs a gradient")
    if look is not None:
        look(outs, trial._node)
    start = [out.detach().clone() for out in outs]
    found = torch.autograd.grad(outs, trial.edges(), start, allow_unused=True)
    outputs = [each.detach().clone() for each in flat if isinstance(each, Tensor)]
    trial._outputs, trial._node = [], None
    return outputs, start, [None if each is None else each.clone() for each in found]


def of_residents(run: Run) -> range:
    """Indices of the gradients that become some Parameter's ``.grad`` as they are."""
    return range(len(run.wanted), len(run.wanted) + len(run.residents))


def reserve(memory: Memory, expected: Expected, device: torch.device, lasting: range) -> None:
    """Reserve memory for results like these; those in `lasting` stay when the others are dropped."""
    outputs, start, found = expected
    memory.outputs, memory.found = Pack(outputs, device), Pack(found, device, lasting)
    memory.given = [Fixed(each) for each in start]


def known_storages(trial: Trial, memory: Memory) -> set[int]:
    """Addresses of storages that are not of a run's own making."""
    tensors: list[Any] = [fixed.value for fixed in (*memory.inputs, *memory.carried)]
    tensors += [*trial.block.views, *trial.interior.residents, *trial.block.module.buffers()]
    parts: list[Tensor] = []
    for tensor in tensors:
        parts += tensor.packed.values() if getattr(tensor, "packed", None) is not None else [tensor]
    return {part.untyped_storage().data_ptr() for part in parts}


def equal(one: Tensor | None, two: Tensor | None) -> bool:
    """Whether two results have the same bits."""
    if one is None or two is None or one.dtype is not two.dtype or one.shape != two.shape:
        return False
    return torch.equal(
        one.contiguous().view(-1).view(torch.uint8), two.contiguous().view(-1).view(torch.uint8)
    )


def bytes_of(storage: torch.UntypedStorage, *, held: bool) -> Tensor:
    """Return bytes of a recording's pool; those not held may be used by others of its recordings too."""
    make: Any = torch._C._construct_storage_from_data_pointer
    view = storage if held else make(storage.data_ptr(), storage.device, storage.nbytes())
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(view)
