"""Helpers that the tests of every TrainStream package share.

Importing this package needs neither pytest nor hypothesis; each helper imports what it needs when it is
called. `ts_core.testing.plugin` is the pytest plugin that a package loads with `-p ts_core.testing.plugin`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .device_params import devices, seeded
    from .opcheck import Sample, opcheck_all
    from .strategies import FLAVOURS, LAYOUTS, float_tensors, make_tensor, shapes
    from .tolerances import Tolerance, assert_bit_equal, assert_near, tolerance

    gpu: Any

__all__ = [
    "FLAVOURS",
    "LAYOUTS",
    "Sample",
    "Tolerance",
    "assert_bit_equal",
    "assert_near",
    "devices",
    "float_tensors",
    "gpu",
    "make_tensor",
    "opcheck_all",
    "seeded",
    "shapes",
    "tolerance",
]

_HOME = {
    "FLAVOURS": "strategies",
    "LAYOUTS": "strategies",
    "Sample": "opcheck",
    "Tolerance": "tolerances",
    "assert_bit_equal": "tolerances",
    "assert_near": "tolerances",
    "devices": "device_params",
    "float_tensors": "strategies",
    "gpu": "device_params",
    "make_tensor": "strategies",
    "opcheck_all": "opcheck",
    "seeded": "device_params",
    "shapes": "strategies",
    "tolerance": "tolerances",
}


def __getattr__(name: str) -> Any:
    # No submodule may be named like something it holds: importing it would put the module in that place.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
