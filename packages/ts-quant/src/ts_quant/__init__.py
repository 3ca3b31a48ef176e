"""Block-wise codecs for frozen weights: int8 and nf4, on CPU and CUDA.

`quantize` and `dequantize` work on tensors, `quantize_model` on the frozen block weights of a module. A
`QuantizedTensor` stays a tensor (and a `torch.nn.Parameter`) to everything around it.
"""

from importlib.metadata import version

from ts_core.errors import MissingDependencyError

try:
    from . import _C
except ImportError as error:
    raise MissingDependencyError(
        "[ts_quant] the native module ts_quant._C could not be loaded "
        f"({error}). Install the package from its folder: pip install ./packages/ts-core ./packages/ts-quant",
        name="ts_quant._C",
    ) from error

from .bnb_checkpoint import bitsandbytes_names, from_bitsandbytes
from .codecs import BlockCodec, Meta, PackedCodec, Part
from .error_fit import init_lora_from_error
from .functional import dequantize, quantize
from .matmul import Matmul, set_matmul
from .model import dequantize_model, quantize_model
from .storage import from_safetensors_dict, to_safetensors_dict
from .tensor import QuantizedTensor
from .verify import check_input_gradients

__all__ = [
    "BlockCodec",
    "Matmul",
    "Meta",
    "PackedCodec",
    "Part",
    "QuantizedTensor",
    "bitsandbytes_names",
    "check_input_gradients",
    "dequantize",
    "dequantize_model",
    "from_bitsandbytes",
    "from_safetensors_dict",
    "init_lora_from_error",
    "quantize",
    "quantize_model",
    "set_matmul",
    "to_safetensors_dict",
]

__version__ = version("ts-quant")

#: Whether this build has CUDA kernels.
with_cuda: bool = _C.with_cuda
