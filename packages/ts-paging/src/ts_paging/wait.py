"""How host threads wait for copies and files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ts_core.errors import OptionError
from ts_core.options import choice, integer

__all__ = ["WaitPolicy"]

_MODES = ("poll", "spin", "block")


@dataclass(frozen=True)
class WaitPolicy:
    """How a host thread waits.

    Attributes:
        mode: "poll" looks without pause for `spin_us`, then sleeps `sleep_us` between looks; "spin" looks
            without end (a core per waiter); "block" sleeps until it is signalled.
        spin_us: Microseconds, >= 0.
        sleep_us: Microseconds, >= 1.

    Raises:
        OptionError: A value outside these.

    Example:
        >>> WaitPolicy("block").mode
        'block'
    """

    mode: str = "poll"
    spin_us: int = 50
    sleep_us: int = 100

    def __post_init__(self) -> None:
        """Check the values."""
        choice("mode", self.mode, _MODES)
        integer("spin_us", self.spin_us, minimum=0, maximum=10**9)
        integer("sleep_us", self.sleep_us, minimum=1, maximum=10**9)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> WaitPolicy:
        """Read `TRAINSTREAM_EVENT_WAIT`, `TRAINSTREAM_EVENT_SPIN_US` and `TRAINSTREAM_EVENT_SLEEP_US`.

        Args:
            environ: Where to look; `None` is `os.environ`.

        Returns:
            The policy; what is not set has its default.

        Raises:
            OptionError: A variable has a value outside the accepted ones; the message names it.

        Example:
            >>> WaitPolicy.from_env({"TRAINSTREAM_EVENT_WAIT": "spin"}).mode
            'spin'
        """
        environ = os.environ if environ is None else environ
        mode = choice("TRAINSTREAM_EVENT_WAIT", environ.get("TRAINSTREAM_EVENT_WAIT") or "poll", _MODES)
        spin = _microseconds(environ, "TRAINSTREAM_EVENT_SPIN_US", cls.spin_us, 0)
        return cls(mode, spin, _microseconds(environ, "TRAINSTREAM_EVENT_SLEEP_US", cls.sleep_us, 1))

    def native(self) -> tuple[int, int, int]:
        """Return (mode, spin_us, sleep_us) as the native module takes them."""
        return _MODES.index(self.mode), self.spin_us, self.sleep_us


def _microseconds(environ: Mapping[str, str], name: str, default: int, minimum: int) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    # isdigit alone takes superscripts, which int() does not.
    if not (text.isascii() and text.isdigit()):
        raise OptionError(f"option {name}: expected an integer >= {minimum} (microseconds), given {text!r}")
    return integer(name, int(text), minimum=minimum, maximum=10**9)
