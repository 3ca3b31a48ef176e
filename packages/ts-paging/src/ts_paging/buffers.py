"""A module's buffers in a second run: as they were in the first one, and left alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor

__all__ = ["HeldBuffer", "as_they_were"]

#: Where a buffer is, it, a copy of it (None: it is large), and its version.
HeldBuffer = tuple[dict[str, Tensor | None], str, Tensor, Tensor | None, int]


@contextlib.contextmanager
def as_they_were(buffers: list[HeldBuffer]) -> Iterator[None]:
    """Put copies of copies of buffers in their places: the run may come again."""
    small = [(place, key, copied) for place, key, _, copied, _ in buffers if copied is not None]
    now = [place.get(key) for place, key, _ in small]
    for place, key, copied in small:
        place[key] = copied.clone()
    try:
        yield
    finally:
        for (place, key, _), value in zip(small, now, strict=True):
            place[key] = value
