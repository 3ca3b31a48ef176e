"""Train and fine-tune models larger than the memory you have, with one call.

Example:
    >>> model, optimizer = trainstream.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
"""

from importlib.metadata import version
from typing import Any

__all__ = [
    "HardwareProfile",
    "OffloadAdamW",
    "QuantizedTensor",
    "TrainStreamError",
    "causal_lm_loss",
    "chunked_cross_entropy",
    "dequantize",
    "dpo_loss",
    "find_blocks",
    "init_lora_from_error",
    "memory_report",
    "profile_hardware",
    "quantize",
    "quantize_model",
    "rms_norm",
    "sequence_logprobs",
    "unwrap",
    "wrap",
]

try:
    from trainstream import _session
    from trainstream._report import memory_report
    from trainstream._wrap import unwrap, wrap
    from ts_core.blocks import find_blocks
    from ts_core.errors import TrainStreamError
    from ts_core.hardware import HardwareProfile, profile_hardware
    from ts_core.usage import host_usage
    from ts_fused import causal_lm_loss, chunked_cross_entropy, dpo_loss, rms_norm, sequence_logprobs
    from ts_optim import OffloadAdamW
    from ts_quant import QuantizedTensor, dequantize, init_lora_from_error, quantize, quantize_model
except (ImportError, OSError) as _error:
    # `trainstream doctor` has to start where a package is broken: it says which, and what mends it. So the
    # error is raised by the first use of a name instead.
    _broken: Exception = _error
    for _name in __all__:  # all of them: half a package is none
        globals().pop(_name, None)

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _broken

else:
    _session.baseline_bytes = host_usage().used_bytes

__version__ = version("trainstream")
