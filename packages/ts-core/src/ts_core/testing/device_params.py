"""Which devices a test runs on, and a seed that stays inside one test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..errors import missing

if TYPE_CHECKING:
    import pytest

    gpu: pytest.MarkDecorator

__all__ = ["devices", "gpu", "seeded"]


def _pytest() -> Any:
    try:
        import pytest
    except ImportError as error:
        raise missing("ts_core.testing", "pytest", "pip install pytest") from error
    return pytest


def __getattr__(name: str) -> Any:
    if name == "gpu":
        return _pytest().mark.gpu
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def devices() -> list[Any]:
    """List the devices to run a test on, for `pytest.mark.parametrize`.

    Returns:
        `pytest.param("cpu")`, and `pytest.param("cuda")` with the marker `gpu`, skipped where no GPU is
        usable.

    Raises:
        MissingDependencyError: pytest is not installed.

    Example:
        >>> [parameter.values[0] for parameter in devices()]
        ['cpu', 'cuda']
    """
    pytest = _pytest()
    no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    return [pytest.param("cpu"), pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])]


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[torch.Generator]:
    """Run a piece of test code with torch's generators seeded, and put their states back afterwards.

    Args:
        seed: Seed of the CPU generator and of every CUDA one.

    Yields:
        A separate CPU generator with the same seed, for functions that take one.

    Example:
        >>> with seeded(0):
        ...     first = torch.rand(3)
        >>> with seeded(0):
        ...     second = torch.rand(3)
        >>> torch.equal(first, second)
        True
    """
    cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(seed)
        yield torch.Generator().manual_seed(seed)
