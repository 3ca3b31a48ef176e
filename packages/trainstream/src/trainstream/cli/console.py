"""What a run says: a progress bar and lines for people, or one JSON object per event for programs."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from tqdm import tqdm

__all__ = ["Console", "tiers_text"]


class Console:
    """Writes progress to stderr, and results to stdout: as text, or as JSON lines.

    Every JSON line is an object with the key `event`; numbers that are not finite become null.

    Args:
        as_json: Write one JSON object per event to stdout.
    """

    def __init__(self, as_json: bool = False) -> None:
        """Start without a bar."""
        self.as_json = as_json
        self._bar: tqdm[Any] | None = None
        self._shown: dict[str, str] = {}

    def event(self, kind: str, **data: Any) -> None:
        """Report an event to programs; people get the matching `note`, `say` or progress bar."""
        if self.as_json:
            print(json.dumps({"event": kind, **_finite(data)}), flush=True)

    def note(self, text: str) -> None:
        """Tell people about progress, on stderr, above the bar if there is one."""
        if self._bar is not None and not self._bar.disable:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def say(self, text: str = "") -> None:
        """Tell people a result, on stdout; silent when stdout is for JSON."""
        if not self.as_json:
            print(text, flush=True)

    def start_bar(self, total: int, done: int, unit: str = "step") -> None:
        """Show a bar of optimizer steps; it hides itself where stderr is no terminal."""
        self._bar = tqdm(
            total=total, initial=done, unit=unit, disable=None, file=sys.stderr, dynamic_ncols=True
        )

    def show(self, **shown: str) -> None:
        """Show these values beside the bar from the next step on."""
        self._shown.update(shown)

    def advance(self, **shown: str) -> None:
        """Move the bar by one step."""
        self.show(**shown)
        if self._bar is not None:
            self._bar.set_postfix(self._shown, refresh=False)
            self._bar.update()

    @property
    def has_bar(self) -> bool:
        """Whether a bar is visible."""
        return self._bar is not None and not self._bar.disable

    def close_bar(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def tiers_text(tiers: dict[str, int]) -> str:
    """Write bytes by tier for people, leaving out the empty ones.

    Example:
        >>> tiers_text({"device": 1 << 30, "host": 0})
        'device 1.0 GiB'
    """
    from ts_core.memory import format_bytes  # here: it needs torch, and doctor must start without

    return ", ".join(f"{tier} {format_bytes(size)}" for tier, size in tiers.items() if size)
