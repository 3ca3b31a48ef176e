"""The options `outliers`, `fp8_backward` and `nvfp4_backward`: how packed weights are multiplied."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torch import nn

from trainstream._options import WrapOptions
from trainstream._session import Session
from ts_core.plan import Plan
from ts_quant import Matmul, QuantizedTensor, check_input_gradients, set_matmul

__all__ = ["Products"]

_FP8 = ("mxfp8", "fp8_row", "fp8_block")


class Products:
    """What multiplies how in a wrapped model.

    Attributes:
        counts: What `set_matmul` returned.
    """

    def __init__(self, model: nn.Module, device: torch.device, options: WrapOptions) -> None:
        """Tell the packed weights, and compare the input gradient of each format with the decoded reference.

        Args:
            model: With its weights packed, and not paged yet.
            device: Where it is going to compute.
            options: The checked options.

        Raises:
            DeviceError: An input gradient is wrong on this device; nothing is changed.
        """
        self._options, self._device = options, device
        packed = {n: p for n, p in model.named_parameters() if isinstance(p, QuantizedTensor)}
        self._codecs = {p.codec for p in packed.values()}
        self.undo = partial(_give_back, model, {name: p.matmul_options for name, p in packed.items()})
        self.counts = set_matmul(
            model,
            outliers=options.outliers,
            fp8_backward=options.fp8_backward,
            nvfp4_backward=options.nvfp4_backward,
            device=device,
        )
        try:
            check_input_gradients(model, device)
        except BaseException:
            self.undo()
            raise

    def in_plan(self, plan: Plan) -> Plan:
        """Write into a plan what decides bits."""
        options = self._options
        numerics = dataclasses.replace(
            plan.numerics,
            outliers=options.outliers,
            fp8_backward=options.fp8_backward,
            nvfp4_backward=options.nvfp4_backward,
        )
        return dataclasses.replace(plan, numerics=numerics)

    def adopt(self, session: Session) -> None:
        """Say in the events of a session what was done; unwrapping undoes it."""
        session.undo.append(self.undo)
        for line in self.lines():
            session.events.add(line)

    def lines(self) -> list[str]:
        """Return what to say."""
        options, counts, lines = self._options, self.counts, []
        if counts["tensor_cores"]:
            lines.append(
                f"matmul: {counts['tensor_cores']} of {counts['weights']} packed weights multiply on tensor "
                "cores, their inputs quantized as they are; the others are decoded"
            )
        if options.outliers:
            head = f"outliers={options.outliers:g}"
            lines.append(f"{head}{self._of('outliers', ('nvfp4',), 'keep this share of channels in bf16')}")
        for name, codecs in (("fp8_backward", _FP8), ("nvfp4_backward", ("nvfp4",))):
            if getattr(options, name):
                lines.append(f"{name}=True{self._of(name, codecs, 'have a packed input gradient')}")
        return lines

    def _of(self, name: str, codecs: tuple[str, ...], what: str) -> str:
        there = self._codecs.intersection(codecs)
        if not there:
            return f" ignored: no weight is packed as {' or '.join(codecs)}"
        count = self.counts[name]
        if not count:
            return f" ignored: {' and '.join(sorted(there))} is decoded on {self._device}"
        return f": {count} weights {what}"


def _give_back(model: nn.Module, before: dict[str, Matmul]) -> None:
    """Tell every packed weight what it was told before."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, QuantizedTensor):
            parameter.matmul_options = before.get(name, Matmul())
