"""The codecs of this package, registered with `ts_core.registry` under their names.

A codec is one object (see `PackedCodec`): it says how the values of a tensor are packed, and packs and
decodes them. To add one, write its kernels (`csrc/cpu`, `csrc/cuda`, `csrc/bind_<name>.cpp`) and a module
here that declares its operations and makes the object, and list that below.
"""

import torch

from ts_core import registry
from ts_core.hardware import register_rates

from .base import Packed, PackedCodec, Part, check_parts, decode, encoding_names, parts_of
from .blockwise import BlockCodec
from .bnb import BNB_FP4_CODEC, BNB_INT8_CODEC
from .fp8 import FP8_BLOCK_CODEC, FP8_ROW_CODEC, MXFP8_CODEC, fp8_choice
from .fp_published import FP8_EXPORT_CODEC, MXFP4_CODEC, NVFP4_EXPORT_CODEC
from .gguf import GGUF_CODECS
from .groups import AWQ_CODEC, GPTQ_CODEC
from .int8 import INT8_CODEC
from .meta import Meta
from .nf4 import NF4_CODEC
from .nvfp4 import NVFP4_CODEC
from .stacked import STACKED_CODEC

__all__ = [
    "AWQ_CODEC",
    "BNB_FP4_CODEC",
    "BNB_INT8_CODEC",
    "FP8_BLOCK_CODEC",
    "FP8_EXPORT_CODEC",
    "FP8_ROW_CODEC",
    "GGUF_CODECS",
    "GPTQ_CODEC",
    "INT8_CODEC",
    "MXFP4_CODEC",
    "MXFP8_CODEC",
    "NF4_CODEC",
    "NVFP4_CODEC",
    "NVFP4_EXPORT_CODEC",
    "STACKED_CODEC",
    "BlockCodec",
    "Meta",
    "Packed",
    "PackedCodec",
    "Part",
    "check_parts",
    "decode",
    "encoding_names",
    "fp8_choice",
    "parts_of",
    "resolve",
]

for _codec in (
    MXFP8_CODEC,
    FP8_ROW_CODEC,
    FP8_BLOCK_CODEC,
    NVFP4_CODEC,
    NF4_CODEC,
    INT8_CODEC,
    BNB_FP4_CODEC,
    BNB_INT8_CODEC,
):
    registry.register_codec(_codec)
_PUBLISHED = (GPTQ_CODEC, AWQ_CODEC, MXFP4_CODEC, NVFP4_EXPORT_CODEC, FP8_EXPORT_CODEC, STACKED_CODEC)
for _published in (*GGUF_CODECS.values(), *_PUBLISHED):
    registry.register_codec(_published)
register_rates("decode_weights_per_s", "ts_quant.rates:decode_rates")


def resolve(name: str, device: torch.device | str | None = None) -> str:
    """Return the codec that a name stands for: "fp8" is a choice, every other name itself.

    Args:
        name: What a user wrote.
        device: Where the weights are going to compute; `None` is the current GPU, if there is one.

    Returns:
        Name of a codec.

    Example:
        >>> resolve("fp8", "cpu"), resolve("nf4")
        ('mxfp8', 'nf4')
    """
    return fp8_choice(device) if name == "fp8" else name
