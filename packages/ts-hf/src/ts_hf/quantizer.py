"""`from_pretrained(..., quantization_config=TrainStreamConfig("nf4"))`: packing in transformers' own loader.

transformers reads the weights and hands over one at a time; each matrix of the blocks is packed before the
next one comes. The result is what `load_model` gives: the same parameters, bit for bit, and a receipt.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ts_core.dtypes import dtype_name
from ts_core.errors import CheckpointError, OptionError
from ts_core.options import fraction, integer
from ts_quant.precision import keep_precise_share

from .checkpoint import Checkpoint
from .loading import _check_double_quant, _make_packing, _Options, _quantize_option
from .receipt import log_receipt, receipt_of
from .safetensors_reader import SafetensorsReader
from .streaming import Packing, stream_again

__all__ = ["METHOD", "TrainStreamConfig", "TrainStreamQuantizer"]

METHOD = "trainstream"
_TAKEN = (
    "quantize",
    "quant_block_size",
    "error_rank",
    "error_iters",
    "double_quant",
    "keep_precise",
    "ram_fraction",
)
# What load_model takes besides, and where from_pretrained has it.
_ELSEWHERE = {
    "dtype": ": give from_pretrained(dtype=)",
    "trust_remote_code": ": give from_pretrained(trust_remote_code=)",
    "device": ": give from_pretrained(device_map=)",
    "disk_offload": ": only ts_hf.load_model(disk_offload=) keeps weights in files",
    "random_weights": ": only ts_hf.load_model(random_weights=) draws weights",
}


@register_quantization_config(METHOD)
class TrainStreamConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """What `load_model` takes about packing, for `from_pretrained(quantization_config=)`.

    Args:
        quantize: "int8", "nf4", "fp8", "mxfp8", "fp8_row", "fp8_block", "nvfp4", "auto", or "none".
        quant_block_size: Values per scale; even.
        error_rank: Rank of a fit of each packed matrix's error, where LoRA adapters start.
        error_iters: How often a matrix is quantized and its fit made anew.
        double_quant: Quantize the scales of int8 and nf4 too.
        keep_precise: Extra bytes, as a fraction up to 0.5 of what the packed matrices take, for those that
            lose most: nf4 ones become int8, nvfp4 ones fp8. They are read twice, from safetensors files.
            "auto" and True are 0.05; 0, False and None are off.
        ram_fraction: Share of the free RAM that "auto" lets the model take.

    Raises:
        OptionError: A value outside the accepted ones.

    Example:
        >>> from transformers import AutoModelForCausalLM
        >>> AutoModelForCausalLM.from_pretrained(  # doctest: +SKIP
        ...     "path/to/model", quantization_config=TrainStreamConfig("nf4"), dtype="bfloat16"
        ... )
    """

    def __init__(
        self,
        quantize: str | None = "nf4",
        quant_block_size: int = 64,
        error_rank: int = 0,
        error_iters: int = 1,
        double_quant: bool = False,
        ram_fraction: float = 0.85,
        keep_precise: float | str | bool | None = 0,
        **kwargs: Any,
    ) -> None:
        """Check the options."""
        unknown = sorted(kwargs.keys() - {"quant_method"})
        if unknown:
            raise OptionError(
                f"option {unknown[0]}: TrainStreamConfig has no such option"
                f"{_ELSEWHERE.get(unknown[0], '')}; it takes {', '.join(_TAKEN)}"
            )
        chosen = _quantize_option(quantize)
        self.quant_method = METHOD
        self.quantize = quantize
        self.quant_block_size = integer("quant_block_size", quant_block_size, minimum=2, multiple_of=2)
        self.error_rank = integer("error_rank", error_rank, minimum=0)
        self.error_iters = integer("error_iters", error_iters, minimum=1)
        self.double_quant = _check_double_quant(chosen, double_quant)
        self.ram_fraction = fraction("ram_fraction", ram_fraction)
        keep_precise_share(keep_precise)
        self.keep_precise = keep_precise


def _require_plain(files: Any) -> None:
    """Refuse codes of a method that transformers does not know: it would take them for the weights."""
    for path in (Path(name) for name in files or ()):
        if path.suffix != ".safetensors":
            continue
        with SafetensorsReader(path) as reader:
            for name in reader:
                dtype = reader.info(name).dtype
                plain = dtype is not None and dtype.is_floating_point and dtype.itemsize > 1
                if name.endswith(".weight") and not plain:
                    raise CheckpointError(
                        f"{path}: tensor {name!r} is stored as {reader.info(name).stored_dtype}, which is no "
                        "plain weight, and transformers knows no method for it; ts_hf.load_model may"
                    )


def _found_again(files: Any) -> list[Path]:
    """Return the files of a checkpoint, if they can be read a second time, by the names in them."""
    paths = [Path(name) for name in files or ()]
    folders = {path.parent for path in paths}
    if len(folders) == 1 and all(path.suffix == ".safetensors" for path in paths):
        try:
            with Checkpoint(folders.pop()) as checkpoint:
                if {path.name for path in checkpoint.files} == {path.name for path in paths}:
                    return paths
        except CheckpointError:
            pass  # files of other names than load_model reads
    raise OptionError(
        "option keep_precise: what loses most is read a second time, from model.safetensors or its shards in "
        f"one folder; from_pretrained reads {', '.join(path.name for path in paths) or 'a state_dict'}. Use "
        "keep_precise=0"
    )


class _Pack(ConversionOps):  # type: ignore[misc]
    """Packs one parameter that was read."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing

    def convert(self, input_dict: dict[str, Any], *, model: Any, **kwargs: Any) -> dict[str, Any]:
        made = {}
        for name, given in input_dict.items():
            value = given[0] if isinstance(given, list) else given
            old = model.get_parameter(name)
            if value.shape != old.shape:  # transformers leaves that to who packs
                raise CheckpointError(
                    f"{model.name_or_path}: {name!r} has shape {tuple(value.shape)} in the checkpoint and "
                    f"{tuple(old.shape)} in the model"
                )
            made[name] = self.packing.store(name, value.to(old.dtype), old)
        return made


@register_quantizer(METHOD)
class TrainStreamQuantizer(HfQuantizer):  # type: ignore[misc]
    """Packs while transformers reads; afterwards nothing of it stays but the packed weights."""

    requires_calibration = False

    def __init__(self, quantization_config: TrainStreamConfig, **kwargs: Any) -> None:
        """Nothing is decided before the model is built."""
        super().__init__(quantization_config, **kwargs)
        self._packing: Packing | None = None
        self._reason = ""
        self._dtype = torch.float32
        self._files: list[Path] = []
        self._started = time.perf_counter()

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse what cannot be packed.

        Raises:
            OptionError: Weights that accelerate would keep on the disk.
        """
        places = kwargs.get("device_map")
        if isinstance(places, dict) and "disk" in places.values():
            raise OptionError(
                "option device_map with weights on the disk is not available with TrainStreamConfig; use "
                "load_model(..., disk_offload=DIR)"
            )

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        given = self.quantization_config
        options = _Options(
            quantize=_quantize_option(given.quantize),
            dtype=model.dtype,
            block_size=given.quant_block_size,
            ram_fraction=given.ram_fraction,
            trust_remote_code=False,
            device=torch.device("cpu"),
            files=None,
            fit=(given.error_rank, given.error_iters),
            double_quant=given.double_quant,
            keep_precise=keep_precise_share(given.keep_precise),
        )
        # transformers holds the weights in memory, whatever budget there is
        self._packing, self._reason = _make_packing(model, options, in_memory=True)
        self._dtype = model.dtype
        _require_plain(kwargs.get("checkpoint_files"))
        if self._packing.share:
            self._files = _found_again(kwargs.get("checkpoint_files"))
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether a parameter is a matrix of the blocks."""
        return self._packing is not None and self._packing.packs(param_name)

    def get_quantize_ops(self) -> ConversionOps:
        """Return what packs a parameter."""
        assert self._packing is not None
        return _Pack(self._packing)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        assert self._packing is not None
        if self._packing.share:
            self._move_up(model)
        conversions = getattr(model, "_weight_conversions", None)
        self.remove_quantization_config(model)
        if conversions is not None:
            model._weight_conversions = conversions  # saving undoes them
        model.trainstream_receipt = {
            "source": model.name_or_path,
            "tensors": len(model.state_dict()),
            "unused": [],
            "initialized": [],
            "dtype": dtype_name(model.dtype),
            "reason": self._reason,
            **receipt_of(model, self._packing, self._started),
        }
        log_receipt(model.trainstream_receipt)
        return model

    def _move_up(self, model: Any) -> None:
        """Read what loses most once more, and pack it in the next codec."""
        assert self._packing is not None
        names = self._packing.choose_precise(name for name, _ in model.named_parameters())
        if not names:
            return
        with Checkpoint(self._files[0].parent) as checkpoint:
            found = stream_again(model, checkpoint, self._packing, names, self._dtype)
        if lost := sorted(names - found):
            raise OptionError(
                f"option keep_precise: {lost[0]!r} was not found in {self._files[0].parent} a second time "
                "(from_pretrained was given key_mapping?); use load_model, or keep_precise=0"
            )

    @property
    def is_trainable(self) -> bool:
        """Adapters train on packed weights."""
        return True

    def is_serializable(self, **kwargs: Any) -> bool:
        """Packed weights are saved by `save_model`, decoded."""
        return False
