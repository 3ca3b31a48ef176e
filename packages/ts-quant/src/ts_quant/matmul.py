"""Which packed weights multiply on tensor cores, and with what options.

A weight in a format that its GPU multiplies is not decoded in `F.linear` for bf16 inputs: the activation is
quantized in the weight's own format and tensor cores take both. That depends on the weight (codec, shape,
dtype, device) and on the input's dtype alone, never on how many rows the input has: the same model computes
the same on every batch. Where it does not hold, weights are decoded.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ts_core import registry
from ts_core.options import boolean, fraction

from .products import PRODUCTS, Product

__all__ = ["DECODE", "DEFAULT", "Matmul", "emulated", "how", "matmul_of", "multiplies", "set_matmul"]

_LOG = logging.getLogger("trainstream")


class Matmul(NamedTuple):
    """How a packed weight is multiplied.

    Attributes:
        tensor_cores: Multiply packed operands where the device can; False decodes.
        outliers: nvfp4: share of the input channels, the largest of a call, that stay in bf16.
        backward: The input gradient from packed operands too; False: from the decoded weight, in bf16.
    """

    tensor_cores: bool = True
    outliers: float = 0.0
    backward: bool = False


DEFAULT = Matmul()
"""Tensor cores where they are, nothing else."""

DECODE = Matmul(tensor_cores=False)
"""Decode before each use."""


class _Here:
    emulates = 0


_here, _counting = _Here(), threading.Lock()
_found: dict[tuple[str, int], str] = {}


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Compute as tensor cores would, on any device: slow, for tests and quality figures.

    It holds in every thread: those of autograd run the backward passes of GPUs and what these recompute.

    Example:
        >>> from ts_quant import quantize
        >>> weight = quantize(torch.ones(16, 32, dtype=torch.bfloat16), "fp8_row")
        >>> with emulated():
        ...     y = torch.nn.functional.linear(torch.full((1, 32), 0.11, dtype=torch.bfloat16), weight)
        >>> float(y[0, 0])  # 32 * 0.11 where 0.11 is the row's maximum, and exact
        3.515625
    """
    with _counting:
        _here.emulates += 1
    try:
        yield
    finally:
        with _counting:
            _here.emulates -= 1


def multiplies(codec: str, device: torch.device) -> bool:
    """Say whether a device multiplies the operands of a codec.

    Compute capability and CUDA version decide, and a product that is tried out once for each GPU and codec.

    Args:
        codec: Name of a codec.
        device: Where the weight is.

    Returns:
        True if it does; on a CPU never.

    Example:
        >>> multiplies("fp8_row", torch.device("cpu"))
        False
    """
    if device.type != "cuda" or codec not in PRODUCTS:
        return False
    if torch.compiler.is_compiling():
        # Nothing can be tried out here; what was found wrong before is not used either.
        return not _found.get((codec, device.index or 0)) and _should(codec, device)
    return not why_not(codec, device)


def why_not(codec: str, device: torch.device) -> str:
    """Say why a GPU does not multiply the operands of a codec; a product is tried out at the first call.

    Args:
        codec: One of those that have products.
        device: A GPU.

    Returns:
        The reason, or an empty string.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    key = codec, index
    if key not in _found:
        if not _should(codec, device):
            _found[key] = "it has no tensor cores for this format"
        elif torch.cuda.is_current_stream_capturing() or torch._C._len_torch_dispatch_stack():
            return ""  # nothing can be looked at now
        else:
            from .verify import try_product

            _found[key] = try_product(codec, torch.device("cuda", index))
            if _found[key]:
                _LOG.warning("%s on %s is decoded before it is multiplied: %s", codec, device, _found[key])
    return _found[key]


def _should(codec: str, device: torch.device) -> bool:
    """Whether compute capability and CUDA version promise it."""
    if torch.version.hip is not None:
        return False
    properties = torch.cuda.get_device_properties(device)
    major, minor = (torch.version.cuda or "0.0").split(".")[:2]
    return PRODUCTS[codec].on(properties.major, properties.minor, (int(major), int(minor)))


def how(
    codec: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device, options: Matmul
) -> tuple[Product, bool, bool] | None:
    """Decide how `F.linear` computes.

    Args:
        codec: Codec of the weight.
        shape: Its shape.
        dtype: Of the input, cast already.
        device: Where it is.
        options: What the weight was told.

    Returns:
        The product, whether it is emulated, and whether the input gradient is packed too; None: decode.
    """
    if not options.tensor_cores or dtype is not torch.bfloat16 or codec not in PRODUCTS:
        return None
    emulates = _here.emulates > 0
    if not emulates and not multiplies(codec, device):
        return None
    product = PRODUCTS[codec]
    if not product.accepts(shape):
        return None
    return product, emulates, options.backward and product.accepts(shape, backward=True)


def matmul_of(weight: Any) -> Matmul:
    """Return what a packed weight was told."""
    found: Matmul = getattr(weight, "matmul_options", DEFAULT)
    return found


def set_matmul(
    model: nn.Module,
    *,
    tensor_cores: bool | None = None,
    outliers: float | None = None,
    fp8_backward: bool | None = None,
    nvfp4_backward: bool | None = None,
    device: torch.device | None = None,
) -> dict[str, int]:
    """Tell every packed weight of a model how to multiply; `None` leaves an option as it is.

    Args:
        model: Any module, not wrapped; its packed weights are changed in place, their bytes are not.
        tensor_cores: Multiply packed operands where the device can; False decodes everywhere.
        outliers: nvfp4: share of the input channels (0 to 0.1), the largest of a call, that stay in bf16.
        fp8_backward: Input gradients of fp8 weights from packed operands too.
        nvfp4_backward: The same for nvfp4 weights.
        device: Where the model computes, for the counts; `None`: where each weight is.

    Returns:
        `{"weights": how many there are, "tensor_cores": how many of them multiply packed there,
        "fp8_backward", "nvfp4_backward": of how many the input gradient is packed too, "outliers": how many
        split outliers off}`.

    Raises:
        OptionError: An option outside its accepted values.

    Example:
        >>> set_matmul(nn.Linear(4, 4), outliers=0.01)["weights"]
        0
    """
    given = {"tensor_cores": tensor_cores, "fp8_backward": fp8_backward, "nvfp4_backward": nvfp4_backward}
    for name, value in given.items():
        if value is not None:
            boolean(name, value)
    share = None if outliers is None else float(fraction("outliers", outliers, 0.0, 0.1))
    counts = dict.fromkeys(("weights", "tensor_cores", "fp8_backward", "nvfp4_backward", "outliers"), 0)
    for parameter in model.parameters():
        codec = getattr(parameter, "codec", None)
        if codec not in registry.codecs() or not hasattr(parameter, "matmul_options"):
            continue
        backward = "nvfp4_backward" if codec == "nvfp4" else "fp8_backward"
        changes: dict[str, Any] = {"tensor_cores": tensor_cores}
        if codec in PRODUCTS:
            changes["backward"] = given[backward]
        if codec == "nvfp4":
            changes["outliers"] = share
        kept = {name: value for name, value in changes.items() if value is not None}
        options = parameter.matmul_options = matmul_of(parameter)._replace(**kept)
        counts["weights"] += 1
        where = parameter.device if device is None else device
        chosen = how(codec, tuple(parameter.shape), parameter.dtype, where, options)
        if chosen is not None:
            counts["tensor_cores"] += 1
            counts[backward] += chosen[2]
            counts["outliers"] += options.outliers > 0
    return counts
