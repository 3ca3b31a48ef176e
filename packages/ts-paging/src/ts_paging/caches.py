"""Key-value caches among the arguments of a block that runs a second time."""

from __future__ import annotations

import copy
from typing import Any

__all__ = ["Once", "as_found", "is_cache"]

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def is_cache(value: Any) -> bool:
    """Whether an argument is a key-value cache that a block adds to, by what it can do."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def as_found(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
    """Return arguments with each cache as it is now: a block that adds to what comes back leaves it alone.

    Left out altogether, attention would get keys and values of other strides, and take another path.
    """
    return tuple([_copied(value) for value in args]), {key: _copied(value) for key, value in kwargs.items()}


def _copied(value: Any) -> Any:
    if not is_cache(value):
        return value
    found = copy.copy(value)
    found.layers = [copy.copy(layer) for layer in value.layers]
    return found


class Once:
    """What came in, for the first run, and not longer.

    A cache comes to hold keys and values whose graph leads to what is kept for the second run. Kept there
    itself, neither would go unless a backward pass came through: no collector sees such a ring.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hold it."""
        self._held: _Arguments | None = args, kwargs

    def taken(self) -> _Arguments | None:
        """Return what is held and hold it no longer; None: it was taken."""
        held, self._held = self._held, None
        return held
