"""Checks of option values: one wording for every rejected option.

Each function returns the accepted value, so a constructor reads `self.mode = choice("mode", mode, MODES)`.
A bool is never taken for an integer or a fraction here: `True` and `1` are different options
throughout TrainStream (`offload=True` against `accumulation_steps=1`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from .errors import OptionError

__all__ = ["boolean", "choice", "fraction", "integer", "not_yet", "number"]

T = TypeVar("T")


def _listed(values: Iterable[object]) -> str:
    return ", ".join(repr(value) for value in values)


def _same(a: object, b: object) -> bool:
    # Type first: True == 1 and 0 == False, and comparing a tensor or an array would not give a bool.
    return type(a) is type(b) and bool(a == b)


def choice(name: str, value: object, accepted: Sequence[T]) -> T:
    """Return `value` if it is one of `accepted`.

    Values match when they are equal and of the same type, so `True` does not match `1`.

    Args:
        name: Name of the option, for the message.
        value: What the user gave.
        accepted: Every accepted value.

    Returns:
        The matching element of `accepted`.

    Raises:
        OptionError: `value` is none of them.

    Example:
        >>> choice("mode", "cpu", ("cpu", "gpu"))
        'cpu'
    """
    for candidate in accepted:
        if candidate is value or _same(candidate, value):
            return candidate
    raise OptionError(f"option {name}: expected one of {_listed(accepted)}, given {value!r}")


def not_yet(name: str, value: object, available: Sequence[T]) -> T:
    """Return `value` if this release can do it, and say so plainly if it cannot.

    For options whose full range is known but not built yet: they must never be ignored silently.

    Args:
        name: Name of the option, for the message.
        value: What the user gave.
        available: The values this release carries out.

    Returns:
        The matching element of `available`.

    Raises:
        OptionError: `value` is not among them.

    Example:
        >>> not_yet("schedule", "auto", ("auto", "microbatch"))
        'auto'
    """
    for candidate in available:
        if candidate is value or _same(candidate, value):
            return candidate
    raise OptionError(
        f"option {name}={value!r} is not available in this release; available: {_listed(available)}"
    )


def integer(
    name: str,
    value: Any,
    *,
    minimum: int | None = None,
    maximum: int | None = None,
    multiple_of: int | None = None,
) -> int:
    """Return `value` as an `int` if it is a whole number within the limits.

    Args:
        name: Name of the option, for the message.
        value: Anything with `__index__` (so `numpy` integers too), but no bool and no float.
        minimum: Smallest accepted value.
        maximum: Largest accepted value.
        multiple_of: The value must be divisible by this.

    Returns:
        The value as a plain `int`.

    Raises:
        OptionError: Not an integer, outside the limits, or not such a multiple.

    Example:
        >>> integer("block_size", 64, minimum=2, multiple_of=2)
        64
    """
    limits = [] if minimum is None else [f">= {minimum}"]
    limits += [] if maximum is None else [f"<= {maximum}"]
    limits += [] if multiple_of is None else [f"divisible by {multiple_of}"]
    expected = " ".join(["an integer", " and ".join(limits)]).strip()
    result: int | None = None
    # A tensor has __index__ too, but reading one from a GPU would wait for the device.
    if not isinstance(value, bool) and not hasattr(value, "requires_grad"):
        try:
            result = operator.index(value)
        except TypeError:
            result = None
    if (
        result is None
        or (minimum is not None and result < minimum)
        or (maximum is not None and result > maximum)
        or (multiple_of is not None and result % multiple_of)
    ):
        raise OptionError(f"option {name}: expected {expected}, given {value!r}")
    return result


def number(
    name: str,
    value: Any,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> float:
    """Return `value` as a `float` if it is a finite number within the limits.

    Args:
        name: Name of the option, for the message.
        value: An int or a float (or anything with `__float__` that is neither bool, str nor tensor).
        minimum: Smallest accepted value.
        maximum: Largest accepted value.
        above: The value must be greater than this.
        below: The value must be less than this.

    Returns:
        The value as a plain `float`.

    Raises:
        OptionError: Not a number, not finite, or outside the limits.

    Example:
        >>> number("eps", 1e-8, minimum=0.0)
        1e-08
    """
    limits = [f">= {minimum}"] if minimum is not None else []
    limits += [f"<= {maximum}"] if maximum is not None else []
    limits += [f"> {above}"] if above is not None else []
    limits += [f"< {below}"] if below is not None else []
    expected = " ".join(["a finite number", " and ".join(limits)]).strip()
    result = math.nan
    if hasattr(value, "__float__") and not isinstance(value, bool) and not hasattr(value, "requires_grad"):
        try:
            result = float(value)
        except (TypeError, ValueError, OverflowError):
            result = math.nan
    inside = (
        math.isfinite(result)
        and (minimum is None or result >= minimum)
        and (maximum is None or result <= maximum)
        and (above is None or result > above)
        and (below is None or result < below)
    )
    if not inside:
        raise OptionError(f"option {name}: expected {expected}, given {value!r}")
    return result


def fraction(name: str, value: Any, lo: float = 0.0, hi: float = 1.0) -> float:
    """Return `value` as a `float` if `lo <= value <= hi`.

    Args:
        name: Name of the option, for the message.
        value: An int or a float, but no bool.
        lo: Smallest accepted value.
        hi: Largest accepted value.

    Returns:
        The value as a plain `float`.

    Raises:
        OptionError: Not a number, NaN, or outside the limits.

    Example:
        >>> fraction("vram_headroom", 0.1, 0.0, 1.0)
        0.1
    """
    return number(name, value, minimum=lo, maximum=hi)


def boolean(name: str, value: object) -> bool:
    """Return `value` if it is `True` or `False`.

    Args:
        name: Name of the option, for the message.
        value: What the user gave; 0, 1 and strings are refused.

    Returns:
        The value.

    Raises:
        OptionError: Not a bool.

    Example:
        >>> boolean("verbose", True)
        True
    """
    if not isinstance(value, bool):
        raise OptionError(f"option {name}: expected True or False, given {value!r}")
    return value
