"""Checks every operation that a package declared, so that none is forgotten."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import StateError
from ..ops import DefinedOp, defined_ops

__all__ = ["TEST_UTILS", "Sample", "opcheck_all"]

TEST_UTILS: tuple[str, ...] = ("test_schema", "test_faketensor", "test_autograd_registration")


@dataclass(frozen=True)
class Sample:
    """Arguments of one call: `op(*args, **kwargs)`."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


Samples = Sequence[Any] | Callable[[], Sequence[Any]]


def _as_sample(given: Any) -> Sample:
    return given if isinstance(given, Sample) else Sample(tuple(given))


def _with_grad(value: Any) -> tuple[Any, bool]:
    """Copy a value with every floating tensor in it requiring grad; tell whether there was one."""
    if isinstance(value, torch.Tensor):
        floating = value.is_floating_point() or value.is_complex()
        return (value.detach().clone().requires_grad_(), True) if floating else (value, False)
    if isinstance(value, (list, tuple)):
        pairs = [_with_grad(item) for item in value]
        return type(value)(item for item, _ in pairs), any(found for _, found in pairs)
    return value, False


def _check_autograd_refusal(op: DefinedOp, sample: Sample) -> None:
    args, in_args = _with_grad(sample.args)
    pairs = {name: _with_grad(value) for name, value in sample.kwargs.items()}
    if not in_args and not any(found for _, found in pairs.values()):
        return
    with torch.enable_grad():
        try:
            op.overload(*args, **{name: value for name, (value, _) in pairs.items()})
        except StateError:
            return
    raise AssertionError(
        f"{op.name}: ran in grad mode on a tensor that requires grad: its result has no graph"
    )


def opcheck_all(
    namespace: str,
    samples: Mapping[str, Samples],
    *,
    test_utils: Sequence[str] = TEST_UTILS,
) -> int:
    """Check all operations of one namespace with `torch.library.opcheck`.

    Each sample is called with the schema's mutations and aliases verified, with fake tensors against real
    ones, and with a look at what is registered for autograd; and once in grad mode with tensors that require
    grad, which the op must refuse.

    Args:
        namespace: Namespace of the `OpLibrary`, such as "ts_quant".
        samples: By the op's name (without the namespace), a list of samples, or a function that makes one. A
            sample is a `Sample` or the tuple of positional arguments. Tensors are on the device to be
            checked and do not require grad.
        test_utils: What `torch.library.opcheck` runs; "test_aot_dispatch_dynamic" can be added.

    Returns:
        The number of samples that passed.

    Raises:
        AssertionError: An op has no sample, a sample names no op, or a check failed; the message says which.

    Example:
        >>> opcheck_all("no_such_namespace", {})
        0
    """
    ops = {op.name.split("::", 1)[1]: op for op in defined_ops(namespace)}
    untested = sorted(name for name in ops if name not in samples)
    unknown = sorted(set(samples) - set(ops))
    if untested or unknown:
        raise AssertionError(
            f"{namespace}: ops without a sample: {untested}; samples of unknown ops: {unknown}"
        )
    count = 0
    for name, op in ops.items():
        given = samples[name]
        made = [_as_sample(item) for item in (given() if callable(given) else given)]
        if not made:
            raise AssertionError(f"{op.name}: the list of samples is empty")
        for index, sample in enumerate(made):
            try:
                torch.library.opcheck(
                    op.overload, sample.args, dict(sample.kwargs), test_utils=tuple(test_utils)
                )
            except Exception as error:
                raise AssertionError(f"{op.name}, sample {index}: {error}") from error
            _check_autograd_refusal(op, sample)
            count += 1
    return count
