"""Options of `wrap()`: every accepted value, its default, and what this release carries out.

A value outside the accepted ones is refused with the accepted ones named. A value that belongs to a
mechanism which is not built yet is refused too, and the message says so: no option is ignored silently.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ts_core import memory, options
from ts_core.errors import OptionError
from ts_quant.codecs import resolve

__all__ = ["WrapOptions"]

_MIB = 1 << 20
_SMALL_FLOATS = ("fp8", "mxfp8", "fp8_row", "fp8_block", "nvfp4")
_MOMENTS = {
    "auto": "auto",
    "float32": "float32",
    "fp32": "float32",
    torch.float32: "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    torch.bfloat16: "bfloat16",
    "int8": "int8",
    "8bit": "int8",
}
#: What other libraries call an option, where the names are too far apart to be guessed.
_ELSEWHERE = {
    "learning_rate": "lr",
    "gradient_checkpointing": "recompute",
    "activation_checkpointing": "recompute",
    "gradient_accumulation_steps": "accumulation_steps",
    "load_in_4bit": "quantize",
    "load_in_8bit": "quantize",
    "vram": "vram_budget",
    "ram": "ram_budget",
    "disk": "disk_budget",
}
#: Environment variables that set a budget, and the option each one stands for.
_BUDGET_VARIABLES = {
    "TRAINSTREAM_VRAM": "vram_budget",
    "TRAINSTREAM_RAM": "ram_budget",
    "TRAINSTREAM_DISK": "disk_budget",
}


def _share(name: str, value: Any, *, indices: bool) -> None:
    """Check ``"auto"``, a bool, a fraction, or (where `indices`) a list of block indices."""
    if value == "auto" if isinstance(value, str) else isinstance(value, bool):
        return
    if indices and isinstance(value, Sequence) and not isinstance(value, str):
        for index in value:
            options.integer(f"{name}[...]", index, minimum=0)
        return
    accepted = "'auto', True, False, 0.0-1.0" + (" or a list of block indices" if indices else "")
    if not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise OptionError(f"option {name}: expected {accepted}, given {value!r}")


def _off(name: str, value: Any, off: tuple[Any, ...]) -> None:
    """Refuse a value of a mechanism that is not built yet; the values in `off` leave it off."""
    if not any(value is x or (type(value) is type(x) and value == x) for x in off):
        if isinstance(value, float | int) and not isinstance(value, bool) and value == 0 and 0.0 in off:
            return
        options.not_yet(name, value, off)


def _bytes(name: str, value: Any, also: str = "") -> int:
    try:
        return memory.parse_bytes(value, name=name)
    except OptionError as error:
        if not also:
            raise
        raise OptionError(
            f'option {name}: expected {also}, a number of bytes or a size such as "20GiB", given {value!r}'
        ) from error


def _budget(name: str, value: Any, source: str = "") -> int:
    size = _bytes(name + source, value, "" if source else "None")
    if size == 0 and name != "disk_budget":
        raise OptionError(f"option {name}{source}: expected a size above 0, given {value!r}")
    return size


def _auto_share(name: str, value: Any, top: float) -> float:
    """``outliers`` and ``keep_precise``: 0, False, None, "auto", True or a fraction up to `top`."""
    if value is None or value is False:
        return 0.0
    if value is True or (isinstance(value, str) and value == "auto"):
        return 0.01 if name == "outliers" else 0.05
    if isinstance(value, bool | str) or not isinstance(value, int | float) or not 0.0 <= value <= top:
        raise OptionError(
            f"option {name}: expected 0, False, None, 'auto', True or a fraction up to {top}, given {value!r}"
        )
    return float(value)


@dataclasses.dataclass
class WrapOptions:
    """Every option of `wrap()`, checked when made; the documentation has a page on what each does."""

    optimizer_mode: str = "cpu"
    offload: str | bool = "auto"
    activation_offload: Any = "auto"
    param_offload: Any = "auto"
    quantize: str | bool | None = "auto"
    quant_block_size: int = 64
    prefer: str = "exact"
    recompute: Any = "auto"
    attention: str | None = "auto"
    outliers: Any = 0
    nvfp4_backward: bool = False
    fp8_backward: bool = False
    kernels: str | bool | None = "auto"
    fused_lora: str | bool | None = "auto"
    keep_precise: Any = 0
    error_rank: int = 0
    error_iters: int = 1
    double_quant: bool = False
    disk_offload: Any = None
    moe_paging: bool = False
    host_arena: Any = "auto"
    peer: Any = "auto"
    moment_dtype: Any = "auto"
    device: Any = None
    blocks: Sequence[nn.Module] | None = None
    distributed: bool | None = None
    guard_params: bool = True
    max_grad_norm: float | None = None
    accumulation_steps: int | None = None
    vram_headroom: float = 0.10
    check_memory: bool = True
    max_inflight_bytes: Any = None
    max_activation_slowdown: float = 0.15
    prefetch_depth: int = 1
    plan_tokens: int | None = None
    min_offload_bytes: Any = _MIB
    threads: int | None = None
    profile: bool = True
    lr: float = 1e-3
    verbose: bool = False
    vram_budget: Any = None
    ram_budget: Any = None
    disk_budget: Any = None
    schedule: str = "auto"
    capture: str | bool = "auto"
    lossless: str | bool = "auto"

    def __post_init__(self) -> None:
        """Check every option: against what is accepted at all, then against what this release can do."""
        self._check_choices()
        self._check_numbers()
        self._check_placement()
        self._check_quantization()
        self._check_environment()

    @classmethod
    def from_kwargs(cls, **given: Any) -> WrapOptions:
        """Make options from keyword arguments; an unknown name is refused with the nearest known ones."""
        known = {field.name for field in dataclasses.fields(cls)}
        for name in given:
            if name not in known:
                import difflib

                near = [_ELSEWHERE[name]] if name in _ELSEWHERE else []
                near = near or difflib.get_close_matches(name, sorted(known), n=3)
                hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(sorted(known))}"
                raise OptionError(f"wrap() has no option {name!r}; {hint}")
        made = cls(**given)
        # 0 is what a plan with a single slot comes to; it is not asked for.
        options.integer("prefetch_depth", made.prefetch_depth, minimum=1)
        return made

    def _check_choices(self) -> None:
        tri = ("auto", True, False)
        for name, accepted, off in (
            ("optimizer_mode", ("cpu", "gpu", "auto"), None),
            ("offload", ("auto", True), None),
            ("prefer", ("exact", "speed"), None),
            ("attention", ("auto", "cudnn", "efficient", "flash", "math", None), None),
            ("kernels", (*tri, None), None),
            ("fused_lora", (*tri, None), None),
            ("schedule", ("auto", "block", "microbatch"), ("auto", "microbatch")),
            ("capture", tri, None),
            ("lossless", tri, ("auto", False)),
            ("distributed", (None, True, False), None),
        ):
            value = options.choice(name, getattr(self, name), accepted)
            if off is not None:
                options.not_yet(name, value, off)
        switches = ("nvfp4_backward", "fp8_backward", "moe_paging", "guard_params", "check_memory", "profile")
        for name in (*switches, "verbose"):
            options.boolean(name, getattr(self, name))
        options.not_yet("moe_paging", self.moe_paging, (False,))

    def _check_numbers(self) -> None:
        options.integer("quant_block_size", self.quant_block_size, minimum=2, multiple_of=2)
        options.integer("prefetch_depth", self.prefetch_depth, minimum=0)
        for name in ("accumulation_steps", "plan_tokens"):
            if getattr(self, name) is not None:
                options.integer(name, getattr(self, name), minimum=1)
        if self.threads is not None:
            options.integer("threads", self.threads, minimum=1)
        options.number("lr", self.lr, minimum=0.0)
        if self.max_grad_norm is not None:
            options.number("max_grad_norm", self.max_grad_norm, above=0.0)
        options.fraction("vram_headroom", self.vram_headroom)
        options.number("max_activation_slowdown", self.max_activation_slowdown, minimum=0.0)
        self.min_offload_bytes = _bytes("min_offload_bytes", self.min_offload_bytes)

    def _check_placement(self) -> None:
        for name, indices in (("activation_offload", False), ("param_offload", True), ("recompute", True)):
            value = getattr(self, name)
            _share(name, value, indices=indices)
        for name in ("host_arena", "peer"):
            value = getattr(self, name)
            if not (value is None or value is False or (isinstance(value, str) and value == "auto")):
                size = options.integer(name, _bytes(name, value, "'auto', False, None"), minimum=1)
                setattr(self, name, size)
                if name == "peer":
                    _off(name, value, ("auto", False, None))
        if self.disk_offload is not None and not isinstance(self.disk_offload, str | os.PathLike):
            raise OptionError(
                f"option disk_offload: expected None or a directory, given {self.disk_offload!r}"
            )
        if self.disk_offload is not None and not os.path.isdir(self.disk_offload):  # noqa: PTH112
            raise OptionError(
                f"option disk_offload: expected an existing directory, given {os.fspath(self.disk_offload)!r}"
            )
        if self.max_inflight_bytes is not None:
            size = _bytes("max_inflight_bytes", self.max_inflight_bytes, "None")
            self.max_inflight_bytes = options.integer("max_inflight_bytes", size, minimum=1)
        for name in ("vram_budget", "ram_budget", "disk_budget"):
            if getattr(self, name) is not None:
                setattr(self, name, _budget(name, getattr(self, name)))
        if self.device is not None:
            self.device = self._device(self.device)
        if self.blocks is not None and (
            not isinstance(self.blocks, Sequence | nn.ModuleList)
            or not all(isinstance(block, nn.Module) for block in self.blocks)
        ):
            raise OptionError(
                f"option blocks: expected None or a list of modules, given {type(self.blocks).__name__}"
            )
        if self.blocks is not None and not len(self.blocks):
            raise OptionError(
                "option blocks: expected None or at least one module, given an empty list, with which "
                "nothing would be packed or paged; leave it out to have the stack found"
            )
        group = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self.distributed is True or (
            self.distributed is None and group and torch.distributed.get_world_size() > 1
        ):
            options.not_yet("distributed", True, (False,))

    @staticmethod
    def _device(value: Any) -> torch.device:
        try:
            device = torch.device(value)
        except (RuntimeError, TypeError) as error:
            raise OptionError(
                f"option device: expected 'cpu', 'cuda' or 'cuda:N', given {value!r}"
            ) from error
        if device.type not in ("cpu", "cuda"):
            raise OptionError(f"option device: expected 'cpu', 'cuda' or 'cuda:N', given {value!r}")
        if device.type == "cuda":
            count = torch.cuda.device_count()
            if count == 0 or (device.index or 0) >= count:
                raise OptionError(f"option device={value!r}: this process sees {count} CUDA devices")
            device = torch.device(
                "cuda", torch.cuda.current_device() if device.index is None else device.index
            )
        return device

    def _check_quantization(self) -> None:
        accepted = ("auto", "none", None, False, "int8", "nf4", *_SMALL_FLOATS)
        value = options.choice("quantize", self.quantize, accepted)
        # "fp8" is a choice that is made here, once: plans and checkpoints hold the layout.
        self.quantize = "none" if value in (None, False) else resolve(str(value))
        try:
            moments = _MOMENTS.get(self.moment_dtype)
        except TypeError:
            moments = None
        if moments is None:
            options.choice("moment_dtype", self.moment_dtype, tuple(_MOMENTS))
        self.moment_dtype = moments
        if moments == "int8" and self.optimizer_mode == "gpu":
            raise OptionError(
                "option moment_dtype='int8' with optimizer_mode='gpu': the kernel that updates moments in "
                "host memory takes float32 and bfloat16; give optimizer_mode='cpu' for int8, or "
                "moment_dtype='bfloat16'"
            )
        self.outliers = _auto_share("outliers", self.outliers, 0.1)
        self.keep_precise = _auto_share("keep_precise", self.keep_precise, 0.5)
        self.error_rank = options.integer("error_rank", self.error_rank, minimum=0)
        self.error_iters = options.integer("error_iters", self.error_iters, minimum=1)
        options.boolean("double_quant", self.double_quant)

    def _check_environment(self) -> None:
        for variable, option in _BUDGET_VARIABLES.items():
            text = os.environ.get(variable)
            if text and getattr(self, option) is None:
                setattr(self, option, _budget(option, text, f" (environment variable {variable})"))

    def notes(
        self, *, adapts: bool = False, on_cpu: bool = False, settles: bool = False, packs: bool = True
    ) -> list[str]:
        """Return one line for each ``"auto"`` that is not decided elsewhere.

        Args:
            adapts: Placement and activations are decided by measurement.
            on_cpu: The model computes on the CPU.
            settles: The optimizer of trained weights works on the host until there is room for its state.
            packs: There are weights that a codec could hold.
        """
        lines = []
        if settles and self.offload == "auto":
            lines.append("offload=auto: the optimizer's state returns after the first steps, as room allows")
        if adapts:
            lines.append("param_offload, activation_offload, recompute: by measurement of the first steps")
        if not settles:
            nothing = "to take over" if self.offload == "auto" else "to hold there"
            lines.append(
                f"offload={self.offload}: no optimizer state is on the host of a GPU: nothing {nothing}"
            )
        if self.vram_budget is not None and on_cpu:
            lines.append("vram_budget ignored: the model computes on the CPU")
        if self.prefer == "speed" and self.quantize == "auto" and packs:
            lines.append("prefer=speed: a codec is taken before anything streams")
        for name, choice in (
            ("activation_offload", "saved activations stay on the device"),
            ("param_offload", "weights stay on the device, which has room for them"),
            ("recompute", "no block recomputes"),
            (
                "capture",
                "blocks run eagerly"
                if on_cpu
                else "paged blocks are captured where that pays, by measurement of the first steps",
            ),
        ):
            measured = adapts and name in ("activation_offload", "param_offload", "recompute")
            if getattr(self, name) == "auto" and not measured:
                lines.append(f"{name}=auto: {choice}")
        return lines
