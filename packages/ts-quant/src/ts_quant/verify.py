"""Checks on load: products of packed operands and input gradients against plain references.

The limits are relative errors in the Frobenius norm on values that are spread normally; what the formats lose
there is in the documentation, and anything that is laid out wrongly is off by 1 or more.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from ts_core.errors import DeviceError

from ._scaled_linear import Form, scaled_linear
from .functional import dequantize, quantize
from .matmul import Matmul, how
from .products import PRODUCTS
from .scaled_mm import ROUNDING, emulate, multiply
from .tensor import QuantizedTensor

__all__ = ["check_input_gradients", "gradient_error", "try_product"]

_DECODED_LIMIT = 2.0**-6
_PACKED_LIMIT = {"fp8_row": 0.08, "fp8_block": 0.08, "mxfp8": 0.08, "nvfp4": 0.25}
_TRIED = (512, 1024)
_ROWS = 20  # no multiple of anything
_LARGEST = 1 << 21  # values of what is looked at: it is decoded to fp32


def _noise(shape: tuple[int, ...], device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16().to(device)


def try_product(codec: str, device: torch.device) -> str:
    """Multiply once on a device, forward and backward, and compare with the emulation of the same operands.

    Args:
        codec: Name of a codec with packed products.
        device: A GPU. It is waited for.

    Returns:
        What was wrong, or an empty string.
    """
    # Whatever mode the first use is in: this is a computation of its own.
    with torch.inference_mode(False), torch.autocast(device.type, enabled=False):
        return _try_product(codec, device)


def _try_product(codec: str, device: torch.device) -> str:
    product = PRODUCTS[codec]
    try:
        with torch.no_grad():
            weight = quantize(_noise(_TRIED, device, 1), codec)
            pairs = [(_noise((_ROWS, _TRIED[1]), device, 2), product.weight(weight.packed, _TRIED))]
            made = product.transpose(weight.packed, _TRIED)
            pairs.append(
                (_noise((_ROWS, _TRIED[0]), device, 3), product.transposed(weight.packed, made, _TRIED))
            )
            for x, right in pairs:
                left = product.activation(x)
                got = multiply(product.kind, left, right).float()
                want = emulate(product.kind, left, right).float()
                bound = (2 * ROUNDING + 2.0**-7) * want.abs().max()
                worst = float((got - want).abs().max() / bound)
                if not worst <= 1.0:
                    return f"a product is {worst:.3g} times farther from the reference than rounding explains"
        for backward in (False, True):
            error = _error_of(weight, Form(product, _TRIED, False, backward, 0.0), device)
            limit = _PACKED_LIMIT[codec] if backward else _DECODED_LIMIT
            if not error <= limit:
                return f"the input gradient is {error:.3g} from the decoded weight's, {limit:g} is allowed"
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return str(error).splitlines()[0][:200]
    return ""


def _error_of(weight: QuantizedTensor, form: Form, device: torch.device) -> float:
    x = _noise((_ROWS, form.shape[1]), device, 4).requires_grad_()

    def decode(packed: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        return weight.dequantize(dtype)

    with torch.enable_grad():
        y = scaled_linear(x, None, weight.packed, form, decode, x)
    grad = _noise(tuple(y.shape), device, 5)
    (got,) = torch.autograd.grad(y, x, grad)
    return _relative(got, grad, weight)


def _relative(got: torch.Tensor, grad: torch.Tensor, weight: QuantizedTensor) -> float:
    want = grad.float() @ dequantize(weight, torch.float32)
    scale = want.norm().clamp_min(torch.finfo(torch.float32).tiny)
    if not scale.isfinite():  # so is the weight: nothing can be said of its product
        return 0.0
    return float((got.float() - want).norm() / scale)


def gradient_error(weight: QuantizedTensor, rows: int = _ROWS) -> float:
    """Return the relative error of the input gradient of `F.linear` with a packed weight.

    Args:
        weight: (outputs, inputs).
        rows: Rows of the input and of the gradient, which are normally spread.

    Returns:
        Against the product of the gradient and the decoded weight in fp32, in the Frobenius norm.

    Example:
        >>> gradient_error(quantize(torch.eye(64), "nf4")) < 1e-6
        True
    """
    dtype, device = weight.dtype, weight.device
    x = _noise((rows, weight.shape[1]), device, 4).to(dtype).requires_grad_()
    with torch.enable_grad():
        y = nn.functional.linear(x, weight)
    grad = _noise((rows, weight.shape[0]), device, 5).to(dtype)
    (got,) = torch.autograd.grad(y, x, grad)
    return _relative(got, grad, weight)


def check_input_gradients(model: nn.Module, device: torch.device | None = None) -> int:
    """Compare the input gradient of one weight of each format in a model with the decoded reference.

    Args:
        model: Any module.
        device: Where it computes; `None`: where each weight is.

    Returns:
        How many formats were looked at.

    Raises:
        DeviceError: One is farther from the reference than its format explains.

    Example:
        >>> check_input_gradients(nn.Linear(4, 4))
        0
    """
    seen: set[Any] = set()
    for name, weight in model.named_parameters():
        if not isinstance(weight, QuantizedTensor) or weight.dim() != 2 or 0 in weight.shape:
            continue
        key = weight.codec, weight.dtype, weight.meta, weight.matmul_options
        if key in seen:
            continue
        some = _some_rows(weight)
        if some is None:
            continue
        seen.add(key)
        if device is not None and some.device != device:
            some = cast(QuantizedTensor, some.to(device))
        error = gradient_error(some)
        limit = _limit(some)
        if not error <= limit:
            raise DeviceError(
                f"[check_input_gradients] {name}: the input gradient of {weight.codec} on {some.device} is "
                f"{error:.3g} from that of the decoded weight, {limit:g} is allowed. This should not be: "
                "please report it; set_matmul(model, tensor_cores=False) decodes before each product"
            )
    return len(seen)


def _some_rows(weight: QuantizedTensor) -> QuantizedTensor | None:
    """Return a piece of a weight that is packed too, or all of it if it is small."""
    with torch.no_grad():
        plain: torch.Tensor = weight.detach()
        if plain.numel() <= _LARGEST:
            return plain if isinstance(plain, QuantizedTensor) else None
        rows = max(512, _LARGEST // weight.shape[1] // 512 * 512)
        narrowed = plain[:rows]
        return narrowed if isinstance(narrowed, QuantizedTensor) else None


def _limit(weight: QuantizedTensor) -> float:
    options: Matmul = weight.matmul_options
    chosen = how(weight.codec, tuple(weight.shape), weight.dtype, weight.device, options)
    return _PACKED_LIMIT[weight.codec] if chosen is not None and chosen[2] else _DECODED_LIMIT
