"""Typed errors: every one is a `TrainStreamError` and also the builtin a caller would catch.

A message says the function, the argument, what was expected, what was given and what to do.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "CheckpointError",
    "DeviceError",
    "DoesNotFitError",
    "MissingDependencyError",
    "OptionError",
    "StateError",
    "StorageError",
    "TrainStreamError",
    "message",
    "missing",
]


class TrainStreamError(Exception):
    """Base of all errors raised on purpose by TrainStream packages."""


class OptionError(TrainStreamError, ValueError):
    """An option has a value outside the accepted ones."""


class ArgumentError(TrainStreamError, ValueError):
    """An argument of the right kind has a value that cannot be used (shape, range, layout)."""


class ArgumentTypeError(TrainStreamError, TypeError):
    """An argument is of the wrong kind (not a tensor, wrong dtype)."""


class DoesNotFitError(TrainStreamError, MemoryError):
    """The work needs more memory than the budget allows; raised before anything is allocated."""


class StorageError(TrainStreamError, OSError):
    """A file or disk operation failed."""


class CheckpointError(TrainStreamError, ValueError):
    """A checkpoint is damaged, hostile or not what it says it is."""


class DeviceError(TrainStreamError, RuntimeError):
    """A device is missing, or refused an operation."""


class StateError(TrainStreamError, RuntimeError):
    """A call came in an order or state in which it cannot be carried out."""


class MissingDependencyError(TrainStreamError, ImportError):
    """An optional package is needed for this call; the message holds the install command."""


def message(function: str, argument: str, expected: str, given: object, hint: str | None = None) -> str:
    """Compose the standard text of an error about one argument.

    Args:
        function: Name of the public function that was called.
        argument: Name of the argument at fault.
        expected: What would have been accepted.
        given: What was given; strings are inserted as they are, anything else by `repr`.
        hint: What the caller can do about it.

    Returns:
        `"[function] argument: expected ..., given .... hint"`, as the native code words it too.

    Example:
        >>> message("quantize", "block_size", "an even integer >= 2", 3)
        '[quantize] block_size: expected an even integer >= 2, given 3'
    """
    shown = given if isinstance(given, str) else repr(given)
    text = f"[{function}] {argument}: expected {expected}, given {shown}"
    return f"{text}. {hint}" if hint else text


def missing(function: str, package: str, install: str) -> MissingDependencyError:
    """Make the error for an optional package that is not installed.

    Args:
        function: Name of the public function that needs the package.
        package: Import name of the package.
        install: The command that installs it.

    Returns:
        The error, for the caller to raise (`from` the original `ImportError`).

    Example:
        >>> str(missing("plot", "matplotlib", "pip install matplotlib"))
        "[plot] needs the package 'matplotlib', which is not installed. Run: pip install matplotlib"
    """
    return MissingDependencyError(
        f"[{function}] needs the package {package!r}, which is not installed. Run: {install}",
        name=package,
    )
