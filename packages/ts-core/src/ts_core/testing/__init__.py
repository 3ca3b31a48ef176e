"""Helpers that the tests of every TrainStream package share.

Importing this package needs neither pytest nor hypothesis; each helper imports what it needs when it is
called. `ts_core.testing.plugin` is the pytest plugin that a package loads with `-p ts_core.testing.plugin`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .devices import devices, seeded
    from .opcheck import Sample, opcheck_all
    from .strategies import FLAVOURS, LAYOUTS, float_tensors, make_tensor, shapes
    from .tolerance import Tolerance, assert_bit_equal, assert_near, tolerance

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
    "Tolerance": "tolerance",
    "assert_bit_equal": "tolerance",
    "assert_near": "tolerance",
    "devices": "devices",
    "float_tensors": "strategies",
    "gpu": "devices",
    "make_tensor": "strategies",
    "opcheck_all": "opcheck",
    "seeded": "devices",
    "shapes": "strategies",
    "tolerance": "tolerance",
}


def __getattr__(name: str) -> Any:
    # The submodule `tolerance` holds the function `tolerance`: import_module would leave the submodule under
    # that name in this package, so the function is stored over it.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
