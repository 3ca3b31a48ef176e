"""How many cores this process may keep busy."""

from __future__ import annotations

import math
import os
from pathlib import Path

from ._cgroup import cpu_quota

__all__ = ["usable_cores"]


def usable_cores(root: str | Path = "/") -> int:
    """Count the cores that this process may keep busy.

        cores = max(1, min(cores of its affinity mask, ceil(CPU quota of its control groups)))

    A container that may run two cores on a machine of sixty-four is throttled if it starts more threads than
    that: the quota of a period is used up early, and all of them stand still for the rest of it.

    Args:
        root: Directory that holds `proc` and `sys`; another one than "/" serves tests.

    Returns:
        At least 1.

    Example:
        >>> usable_cores() >= 1
        True
    """
    mask = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    quota = cpu_quota(root)
    return max(1, len(mask) if quota is None else min(len(mask), math.ceil(quota)))
