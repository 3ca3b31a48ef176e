"""Fused kernels of transformer blocks and losses, forward and backward, on CPU and CUDA.

Importing this package never touches a GPU.
"""

from importlib.metadata import version

from ts_core.errors import MissingDependencyError

try:
    from . import _C  # noqa: F401  (a missing native module is reported here, with what to do)
except ImportError as error:
    raise MissingDependencyError(
        f"[ts_fused] the native module could not be loaded ({error}). Run: pip install nanobind-backend, and "
        "install ts-core and ts-fused from the same source tree: pip install ./packages/ts-core "
        "./packages/ts-fused"
    ) from error

from .attention import AttentionChoice, AttentionTimes, time_attention
from .checked import FusedCheck, check_fused
from .cross_entropy import causal_lm_loss, chunked_cross_entropy
from .gated_mlp import gated_mlp
from .logprobs import sequence_logprobs
from .lora import LoraAdapter, LoraProjection, lora_linear, lora_linears
from .patched import FusedPatch, patch_fused
from .preference import PreferenceLoss, dpo_loss, kto_loss, orpo_loss, simpo_loss
from .rms_norm import add_rms_norm, rms_norm
from .rotary import rotary

__version__ = version("ts-fused")
__all__ = [
    "AttentionChoice",
    "AttentionTimes",
    "FusedCheck",
    "FusedPatch",
    "LoraAdapter",
    "LoraProjection",
    "PreferenceLoss",
    "add_rms_norm",
    "causal_lm_loss",
    "check_fused",
    "chunked_cross_entropy",
    "dpo_loss",
    "gated_mlp",
    "kto_loss",
    "lora_linear",
    "lora_linears",
    "orpo_loss",
    "patch_fused",
    "rms_norm",
    "rotary",
    "sequence_logprobs",
    "simpo_loss",
    "time_attention",
]
