"""AdamW for weights whose optimizer state lives in host memory.

`OffloadAdamW` is a `torch.optim.Optimizer`; `grad_sumsq`, `adamw_step_` and `adamw_blocks_` are the
operations it is made of. `narrow_grads` is for gradients that leave a device.
"""

from importlib.metadata import version

from ts_core.errors import MissingDependencyError
from ts_core.hardware import register_rates

try:
    from . import _C as _C
except ImportError as error:
    raise MissingDependencyError(
        f"[ts_optim] the native module cannot be loaded ({error}). Install the package again by path "
        "(pip install ./packages/ts-core ./packages/ts-optim), together with nanobind-backend"
    ) from error

from ._ops import adamw_blocks_, adamw_step_, grad_sumsq, narrow_grads
from .offload import OffloadAdamW
from .placement import place_by_size

__version__ = version("ts-optim")

__all__ = [
    "OffloadAdamW",
    "adamw_blocks_",
    "adamw_step_",
    "grad_sumsq",
    "narrow_grads",
    "place_by_size",
]

register_rates("adamw_params_per_s", "ts_optim.rates:adamw_rates")
