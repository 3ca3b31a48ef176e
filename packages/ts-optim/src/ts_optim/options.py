"""Checks of OffloadAdamW's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ts_core.errors import OptionError
from ts_core.options import boolean, choice, integer, number

from .placement import PlacePolicy, place_by_size

__all__ = ["Hyper", "OffloadOptions", "check_group", "hyper_of"]

_MOMENTS = {
    "auto": "float32", "float32": "float32", "fp32": "float32", torch.float32: "float32",
    "bfloat16": "bfloat16", "bf16": "bfloat16", torch.bfloat16: "bfloat16",
    "int8": "int8", "8bit": "int8", torch.int8: "int8",
}  # fmt: skip

_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")

#: lr, beta1, beta2, eps, weight_decay
Hyper = tuple[float, float, float, float, float]

# Names of torch.optim.AdamW's switches that change its arithmetic, and the value we compute with.
_FIXED = {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}


@dataclass(frozen=True)
class OffloadOptions:
    """The checked options of one optimizer, apart from the parameter groups' own.

    Raises:
        OptionError: A value outside the accepted ones.
    """

    mode: str = "cpu"
    max_grad_norm: float | None = None
    accumulation_steps: int | None = 1
    eager: bool | None = None
    pin_moments: bool | None = None
    moment_dtype: str | torch.dtype = "float32"
    threads: int | None = None
    distributed: bool = False
    place: PlacePolicy = place_by_size
    measure_grad_norm: bool = False
    skip_nonfinite: bool = False
    ema: float | None = None
    measure_updates: bool = False
    accumulate_fp32: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every field."""
        choice("mode", self.mode, ("cpu", "gpu", "auto"))
        choice("moment_dtype", self.moment_dtype, tuple(_MOMENTS))
        choice("eager", self.eager, (None, False, True))
        boolean("distributed", self.distributed)
        if self.distributed:
            self._check_distributed()
        if self.max_grad_norm is not None:
            number("max_grad_norm", self.max_grad_norm, above=0.0)
        if self.accumulation_steps is not None:
            integer("accumulation_steps", self.accumulation_steps, minimum=1)
        if self.threads is not None:
            integer("threads", self.threads, minimum=1, maximum=4096)
        choice("pin_moments", self.pin_moments, (None, False, True))
        boolean("measure_grad_norm", self.measure_grad_norm)
        boolean("skip_nonfinite", self.skip_nonfinite)
        boolean("measure_updates", self.measure_updates)
        choice("accumulate_fp32", self.accumulate_fp32, (None, False, True))
        if self.accumulate_fp32 and not _GRAD_DTYPE:
            raise OptionError("option accumulate_fp32=True needs torch 2.10 or later (Tensor.grad_dtype)")
        if self.eager and self.accumulation_steps is None:
            raise OptionError(
                "option accumulation_steps=None: with eager=True a weight is updated as soon as its gradient "
                "is complete, so say after how many backward passes that is"
            )
        if self.ema is not None:
            number("ema", self.ema, minimum=0.0, below=1.0)
        integer("seed", self.seed, minimum=0, maximum=2**63 - 1)
        self._check_gpu_mode()
        if not callable(self.place):
            raise OptionError(
                f"option place: expected a function of a parameter that returns 'host' or 'device', "
                f"given {self.place!r}"
            )
        if self.pin_moments and not torch.cuda.is_available():
            raise OptionError("option pin_moments=True needs a CUDA device; None pins where there is one")

    def _check_distributed(self) -> None:
        if self.mode != "cpu":
            raise OptionError(
                f"option mode={self.mode!r}: with distributed=True gradients are averaged on the host; take "
                "mode='cpu'"
            )
        if self.eager:
            raise OptionError(
                "option eager=True: with distributed=True gradients are averaged by step(), before which no "
                "weight can be updated; leave eager None"
            )

    def _check_gpu_mode(self) -> None:
        if self.mode != "gpu":
            return
        if self.moments == "int8":
            raise OptionError(
                f"option moment_dtype={self.moment_dtype!r}: mode='gpu' updates float32 and bfloat16 moments "
                "in host memory. Take mode='cpu' for int8"
            )
        if not torch.cuda.is_available():
            raise OptionError("option mode='gpu' needs a CUDA device; mode='cpu' updates on host threads")
        if self.pin_moments is False:
            raise OptionError(
                "option pin_moments=False: mode='gpu' reads and writes page-locked memory; leave it None"
            )

    @property
    def moments(self) -> str:
        """The format of moments: "float32", "bfloat16" or "int8"."""
        return _MOMENTS[self.moment_dtype]

    @property
    def in_backward(self) -> bool:
        """Whether updates run during backward: nothing has to be known of all gradients first."""
        return bool(self.eager) and self.max_grad_norm is None and not self.skip_nonfinite

    @property
    def needs_norm(self) -> bool:
        """Whether a step has to look at all gradients first."""
        return self.max_grad_norm is not None or self.measure_grad_norm or self.skip_nonfinite


def _scalar(name: str, value: Any) -> float:
    """Read a float or a one-element tensor (as schedulers and torch's own optimizers take for lr)."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise OptionError(f"option {name}: expected a number or a tensor of one element, given {value!r}")
        value = float(value)
    return number(name, value, minimum=0.0)


def hyper_of(group: dict[str, Any]) -> Hyper:
    """Read and check the five numbers of a parameter group.

    Args:
        group: A parameter group with lr, betas, eps, weight_decay.

    Returns:
        lr, beta1, beta2, eps, weight_decay as floats.

    Raises:
        OptionError: One of them is out of range or no number.
    """
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise OptionError(f"option betas: expected two numbers in [0, 1), given {betas!r}")
    beta1, beta2 = (_scalar(f"betas[{i}]", beta) for i, beta in enumerate(betas))
    for i, beta in enumerate((beta1, beta2)):
        number(f"betas[{i}]", beta, below=1.0)
    lr = _scalar("lr", group["lr"])
    eps = _scalar("eps", group["eps"])
    weight_decay = _scalar("weight_decay", group["weight_decay"])
    return lr, beta1, beta2, eps, weight_decay


def check_group(group: dict[str, Any], weight_decay: float) -> str | None:
    """Find a switch of torch's AdamW in a parameter group that changes the arithmetic.

    Args:
        group: A parameter group, ours or one of a torch state dict.
        weight_decay: Its decay; without any, coupled and decoupled are the same.

    Returns:
        "name=value" of the first such switch, or None.
    """
    for name, value in _FIXED.items():
        given = group.get(name, value)
        harmless = name == "decoupled_weight_decay" and weight_decay == 0.0
        if bool(given) is not value and not harmless:
            return f"{name}={given!r}"
    return None
