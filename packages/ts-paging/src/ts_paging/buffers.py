"""What a second run reads of its module: buffers as they were, and weights that stay where they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ts_core.errors import StateError
from ts_core.guard import guard_of

__all__ = ["HeldBuffer", "Residents", "as_they_were", "version_of", "written_between"]

#: Where a buffer is, it, a copy of it (None: it is large), and its version.
HeldBuffer = tuple[dict[str, Tensor | None], str, Tensor, Tensor | None, int]


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written; -1 where nobody counts."""
    return -1 if tensor.is_inference() else tensor._version


def written_between(name: str, what: str = "one of the tensors needed for backward") -> StateError:
    """Say what autograd says of an ordinary weight, which it cannot see here."""
    return StateError(
        f"paged block {name!r}: {what} was modified in place since the forward pass (an optimizer step, or "
        "an edit of a weight or an activation); run forward again, or call backward before the change"
    )


@contextlib.contextmanager
def as_they_were(buffers: list[HeldBuffer], name: str = "") -> Iterator[None]:
    """Put copies of copies of buffers in their places: the run may come again.

    Args:
        buffers: As they were when the module ran first.
        name: Of the module, for the message.

    Raises:
        StateError: One that is too large for a copy was written since.
    """
    for place, key, buffer, copied, version in buffers:
        if copied is None and (place.get(key) is not buffer or version_of(buffer) != version):
            raise written_between(name, f"the buffer {key!r}")
    small = [(place, key, copied) for place, key, _, copied, _ in buffers if copied is not None]
    now = [place.get(key) for place, key, _ in small]
    for place, key, copied in small:
        place[key] = copied.clone()
    try:
        yield
    finally:
        for (place, key, _), value in zip(small, now, strict=True):
            place[key] = value


class Residents:
    """The weights of a module that stay where they are: a second run reads what is in their places then.

    Autograd keeps weights for backward and compares their versions; a run that comes again keeps nothing.
    """

    def __init__(self, name: str, module: nn.Module, paged: set[int]) -> None:
        """Find them.

        Args:
            name: Of the module.
            module: The module.
            paged: ids of the Parameters that are paged: their block knows of those.
        """
        self._name = name
        self._sites = [
            (owner._parameters, key, path)
            for path, owner in module.named_modules()
            for key, parameter in owner._parameters.items()
            if parameter is not None and id(parameter) not in paged
        ]

    def now(self) -> list[tuple[Tensor | None, int]]:
        """Return what is in every place and its version; asked after a run, so that updates have landed."""
        if not self._sites:
            return []
        with torch._C.DisableTorchFunctionSubclass():
            found = [place.get(key) for place, key, _ in self._sites]
            try:
                return [(p, p._version) if type(p) is nn.Parameter else self._seen(p) for p in found]
            except RuntimeError:  # an inference tensor counts no writes
                return [self._seen(p) for p in found]

    @staticmethod
    def _seen(parameter: Tensor | None) -> tuple[Tensor | None, int]:
        if parameter is None:
            return None, -1
        entry = guard_of(parameter)
        # One that the run did not read, and whose update counts as a write when it lands.
        pending = entry is not None and entry.pending is not None
        return parameter, -2 if pending else version_of(parameter)

    def expect(self, seen: list[tuple[Tensor | None, int]]) -> None:
        """Compare with what `now` returned after the first run.

        Raises:
            StateError: A weight was written or exchanged since; the message names it.
        """
        if not seen:
            return
        with torch._C.DisableTorchFunctionSubclass():
            for (place, key, path), (parameter, version) in zip(self._sites, seen, strict=True):
                same = place.get(key) is parameter
                if not same or (version >= 0 and parameter is not None and parameter._version != version):
                    name = f"{self._name}.{path}.{key}" if path else f"{self._name}.{key}"
                    raise written_between(self._name, f"the parameter {name!r}")
