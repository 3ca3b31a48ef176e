"""Pytest plugin: the marker `gpu` and the hypothesis profiles `ci` and `nightly`.

A package loads it in its pytest settings: `addopts = ["-p", "ts_core.testing.plugin"]`. The environment
variable `HYPOTHESIS_PROFILE` picks the profile: `ci` (25 examples, the same ones each run) is the default,
`nightly` draws 1000.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

__all__ = ["pytest_configure"]


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and the profiles if hypothesis is installed."""
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped where there is none")
    try:
        from hypothesis import HealthCheck, settings
    except ImportError:
        return
    # Building tensors takes long enough on a busy machine to look slow to the health check.
    slow = [HealthCheck.too_slow]
    settings.register_profile(
        "ci", max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=slow
    )
    settings.register_profile(
        "nightly", max_examples=1000, deadline=None, print_blob=True, suppress_health_check=slow
    )
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
