"""Autocast of a second run: as it was at the first one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["autocast_now"]


def autocast_now(device_type: str) -> Callable[[], Any]:
    """Return what makes autocast as it is now."""
    states = [
        (
            kind,
            torch.is_autocast_enabled(kind),
            torch.get_autocast_dtype(kind),
            torch.is_autocast_cache_enabled(),
        )
        for kind in dict.fromkeys((device_type, "cpu"))
    ]

    def again() -> Any:
        stack = contextlib.ExitStack()
        for kind, enabled, dtype, cache in states:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))
        return stack

    return again
