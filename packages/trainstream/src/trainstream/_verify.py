"""Trains a model resident and streamed, and compares every bit: the checks behind `trainstream verify`.

Placement must not change a bit of a result. So the same steps are run from the same start, once with
everything resident and once for each way to stream, and losses, gradients and weights are compared by
checksum. What is not a matter of placement (that every trained parameter is reached, that packed documents do
not see each other, that micro-batches add up, that clipping clips) is checked beside it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import trainstream
from ts_core.errors import StateError, TrainStreamError

__all__ = ["Check", "Trace", "Verifier"]

#: How blocks that stream treat what backward needs.
WAYS = {
    "keep": {"activation_offload": False, "recompute": False},
    "offload": {"activation_offload": True, "recompute": False},
    "recompute": {"activation_offload": False, "recompute": True},
}
RESIDENT: dict[str, Any] = {"param_offload": False, "activation_offload": False, "recompute": False}
_MICRO = 2  # micro-batches of a step
_CLIP = 0.5  # of the norm found
_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the certificate.

    Attributes:
        name: What was checked.
        status: "ok", "failed", or "skipped" where it does not apply.
        detail: For people.
        data: For programs.
    """

    name: str
    status: str
    detail: str
    data: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Trace:
    """What a few steps did.

    Attributes:
        losses: Of every micro-batch, as hexadecimal floats.
        grads: Name -> checksum of the gradient, for each step.
        weights: Name -> checksum after the last step.
        reached: Names of parameters that had a gradient that was not zero.
        changed: Names of parameters that changed.
        norms: The gradient's norm before each step, in float64.
        told: The norm that the optimizer said.
        paged: How many groups were streamed.
        complaint: What the session itself found unreached, "" for nothing.
    """

    losses: list[str] = dataclasses.field(default_factory=list)
    grads: list[dict[str, str]] = dataclasses.field(default_factory=list)
    weights: dict[str, str] = dataclasses.field(default_factory=dict)
    reached: set[str] = dataclasses.field(default_factory=set)
    changed: set[str] = dataclasses.field(default_factory=set)
    norms: list[float] = dataclasses.field(default_factory=list)
    told: list[float] = dataclasses.field(default_factory=list)
    paged: int = 0
    complaint: str = ""

    def digest(self) -> str:
        """One checksum of losses, gradients and weights."""
        text = repr((self.losses, [sorted(g.items()) for g in self.grads], sorted(self.weights.items())))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def difference(self, other: Trace) -> str:
        """Say where another trace first differs, "" if nowhere."""
        for index, (a, b) in enumerate(zip(self.losses, other.losses, strict=True)):
            if a != b:
                pass_ = f"micro-batch {index % _MICRO + 1} of step {index // _MICRO + 1}"
                return f"the loss of {pass_} is {float.fromhex(b):.9g} instead of {float.fromhex(a):.9g}"
        for index, (mine, theirs) in enumerate(zip(self.grads, other.grads, strict=True)):
            names = _unequal(mine, theirs)
            if names:
                return f"gradients of step {index + 1} differ in {_some(names)}"
        names = _unequal(self.weights, other.weights)
        return f"weights after the last step differ in {_some(names)}" if names else ""


def _unequal(mine: dict[str, str], theirs: dict[str, str]) -> list[str]:
    return [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def checksum(tensor: Tensor) -> str:
    """Return a checksum of a tensor's bytes, wherever it is."""
    plain = tensor.detach().cpu().contiguous()
    return hashlib.sha256(plain.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


@contextlib.contextmanager
def repeatable() -> Iterator[None]:
    """Let a GPU compute in one order, where it has a choice: another one is no fault of streaming."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    before, warn = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    context = sdpa_kernel(SDPBackend.MATH) if torch.cuda.is_available() else contextlib.nullcontext()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with context, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)


class Verifier:
    """Runs the checks on copies of one model; the model itself is not changed.

    Args:
        model: On the CPU, with what is to be trained requiring grad.
        device: Where to compute.
        steps: Optimizer steps of each run.
        rows, length: Of a micro-batch.
        progress: Called after each run.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        steps: int = 3,
        rows: int = 2,
        length: int = 32,
        progress: Callable[[], object] = lambda: None,
    ) -> None:
        """Draw the tokens; nothing is run."""
        self._model = model
        self._device = device
        self._steps = steps
        self._progress = progress
        config: Any = model.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self._vocabulary = int(text.vocab_size)
        self._dtype = next(p.dtype for p in model.parameters() if p.is_floating_point() and p.dim() > 1)
        generator = torch.Generator().manual_seed(20)
        shape = (steps, _MICRO, rows, length)
        self._tokens = torch.randint(0, self._vocabulary, shape, generator=generator)
        # Rounding of sums in another order, in parts of the largest value.
        self._slack = {torch.float32: 1e-4, torch.float16: 1e-2}.get(self._dtype, 5e-2)

    #: How many runs there are, for a progress bar.
    RUNS = 11

    # --------------------------------------------------------------------------------- training

    def _wrapped(self, options: dict[str, Any], clip: float | None = None) -> tuple[Any, Any]:
        from trainstream.integrations.huggingface import wrap_hf  # here: it imports much that has much to say

        model = copy.deepcopy(self._model).train()
        trained = [p for p in model.parameters() if p.requires_grad]
        adamw = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.01)
        # It names the decoder layers, so that a model cut to one layer has a stack, too.
        return wrap_hf(model, adamw, max_grad_norm=clip, device=self._device, **options)

    def train(self, options: dict[str, Any], *, steps: int | None = None, clip: float | None = None) -> Trace:
        """Train a copy and write down what happened.

        Args:
            options: Of `wrap()`.
            steps: Fewer than all.
            clip: Largest norm of the gradient.
        """
        trace = Trace()
        model, optimizer = self._wrapped(options, clip)
        names = {name: p for name, p in model.named_parameters() if p.requires_grad}
        before = {name: checksum(p) for name, p in names.items()}
        try:
            trace.paged = len(model._trainstream_session.plan.paged)
            torch.manual_seed(7)  # dropout
            for step in range(steps or self._steps):
                for micro in self._tokens[step].to(self._device):
                    loss = self._loss(model, micro) / _MICRO
                    loss.backward()  # type: ignore[no-untyped-call]
                    trace.losses.append(float(loss).hex())
                self._look(trace, names)
                try:
                    optimizer.step()
                except StateError as error:  # raised once, after the update: some parameter does not train
                    trace.complaint = str(error)
                trace.told.append(float(getattr(optimizer, "last_grad_norm", None) or math.nan))
                optimizer.zero_grad()
            trace.weights = {name: checksum(p) for name, p in names.items()}
            trace.changed = {name for name in names if trace.weights[name] != before[name]}
        finally:
            trainstream.unwrap(model)
        self._progress()
        return trace

    def _loss(self, model: Any, ids: Tensor, **inputs: Any) -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False, **inputs).loss
        return loss

    def _look(self, trace: Trace, names: dict[str, nn.Parameter]) -> None:
        grads, squares = {}, 0.0
        for name, parameter in names.items():
            if parameter.grad is None:
                continue
            grads[name] = checksum(parameter.grad)
            square = float(parameter.grad.double().square().sum())
            squares += square
            if square > 0.0:
                trace.reached.add(name)
        trace.grads.append(grads)
        trace.norms.append(math.sqrt(squares))

    # ----------------------------------------------------------------------------------- checks

    def run(self) -> Iterator[Check]:
        """Make all checks; each is yielded when it is done."""
        with repeatable():
            resident = self.train(RESIDENT)
            yield self._repeats(resident)
            yield self._guard("plain PyTorch", self._plain)
            streamed: list[Trace] = []
            for way, options in WAYS.items():
                stream = partial(self._streams, resident, way, options, streamed)
                yield self._guard(f"streamed, {way}", stream)
            yield self._reached([resident, *streamed])
            yield self._guard("accumulation", self._accumulates)
            yield self._guard("clipping", lambda: self._clips(resident))
            yield self._guard("packing", self._packs)

    def _guard(self, name: str, check: Callable[[], Check]) -> Check:
        """A run that fails is a check that failed; the others are still made."""
        try:
            return check()
        except (TrainStreamError, RuntimeError, ValueError, TypeError) as error:
            text = " ".join(str(error).split())
            return Check(name, "failed", f"{type(error).__name__}: {text}")

    def _repeats(self, resident: Trace) -> Check:
        found = resident.difference(self.train(RESIDENT))
        detail = found or f"two resident runs are equal in every bit, checksum {resident.digest()}"
        return Check("repeatable", "failed" if found else "ok", detail, {"checksum": resident.digest()})

    def _plain(self) -> Check:
        """The first forward and backward of the model as it is, without us.

        Fused kernels (on over packed weights) round otherwise than PyTorch's own: they are off here.
        """
        model: Any = copy.deepcopy(self._model).to(self._device).train()
        torch.manual_seed(7)
        loss = self._loss(model, self._tokens[0][0].to(self._device)) / _MICRO
        loss.backward()  # type: ignore[no-untyped-call]
        name = "plain PyTorch"
        self._progress()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        wrapped, _ = self._wrapped({**RESIDENT, "param_offload": True, "kernels": False, "fused_lora": False})
        try:
            torch.manual_seed(7)
            theirs_loss = self._loss(wrapped, self._tokens[0][0].to(self._device)) / _MICRO
            theirs_loss.backward()  # type: ignore[no-untyped-call]
            want = float(theirs_loss.detach())
            theirs = {n: p.grad for n, p in wrapped.named_parameters() if p.grad is not None}
            differ = [n for n in {**grads, **theirs} if n not in grads or n not in theirs]
            differ += [n for n, g in grads.items() if n in theirs and checksum(g) != checksum(theirs[n])]
        finally:
            trainstream.unwrap(wrapped)
        if float(loss).hex() != want.hex():
            return Check(name, "failed", f"its first loss is {float(loss):.9g}, wrapped it is {want:.9g}")
        if differ:
            return Check(name, "failed", f"first gradients differ in {_some(differ)}")
        return Check(
            name, "ok", f"first loss and {len(grads)} first gradients are those of the unwrapped model"
        )

    def _streams(self, resident: Trace, way: str, options: dict[str, Any], traces: list[Trace]) -> Check:
        trace = self.train({**options, "param_offload": True})
        traces.append(trace)
        found = resident.difference(trace)
        data = {"checksum": trace.digest(), "paged_groups": trace.paged}
        name = f"streamed, {way}"
        if not trace.paged:
            return Check(name, "failed", "no group of weights was streamed", data)
        count = len(trace.losses), len(trace.grads), len(trace.weights)
        detail = (
            f"{trace.paged} groups streamed: {count[0]} losses, gradients of {count[1]} steps and {count[2]} "
            "weights equal resident ones"
        )
        return Check(name, "failed" if found else "ok", found or detail, data)

    def _reached(self, traces: list[Trace]) -> Check:
        names = set(traces[0].weights)
        missed = [n for t in traces for n in sorted(names - (t.reached & t.changed))]
        missed = list(dict.fromkeys(missed))
        data = {"trained": len(names), "missed": missed}
        complaint = next((t.complaint for t in traces if t.complaint), "")
        if missed or complaint:
            detail = f"no gradient, or no change: {_some(missed)}" if missed else complaint
            return Check("reached", "failed", detail, data)
        return Check("reached", "ok", f"all {len(names)} trained parameters got a gradient and changed", data)

    def _accumulates(self) -> Check:
        """Two micro-batches add up to the gradient of one batch of both."""
        found: list[dict[str, Tensor]] = []
        micro, rows, length = self._tokens[0].shape
        for batches in (self._tokens[0], self._tokens[0].reshape(1, micro * rows, length)):
            model, _ = self._wrapped({**WAYS["keep"], "param_offload": True})
            try:
                for ids in batches.to(self._device):
                    (self._loss(model.eval(), ids) / len(batches)).backward()  # type: ignore[no-untyped-call]
                grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
                found.append({n: g.detach().double().cpu() for n, g in grads.items()})
            finally:
                trainstream.unwrap(model)
            self._progress()
        norm = math.sqrt(sum(float(g.square().sum()) for g in found[1].values()))
        off = math.sqrt(sum(float((found[0][n] - g).square().sum()) for n, g in found[1].items()))
        error = off / norm if norm else math.inf
        fine = found[0].keys() == found[1].keys() and error <= self._slack
        detail = f"{micro} micro-batches add up to the gradient of one batch, {error:.1e} apart"
        return Check(
            "accumulation", "ok" if fine else "failed", detail, {"error": error, "allowed": self._slack}
        )

    def _clips(self, resident: Trace) -> Check:
        """A limit below the norm is kept, streamed as resident, and changes the weights."""
        limit = _CLIP * resident.norms[0]
        clipped = [
            self.train({**o, **WAYS["keep"]}, steps=1, clip=limit)
            for o in (RESIDENT, {"param_offload": True})
        ]
        found = clipped[0].difference(clipped[1])
        told, want = clipped[1].told[0], clipped[1].norms[0]
        data = {"norm": told, "reference": want, "limit": limit}
        if found:
            return Check("clipping", "failed", f"clipped, {found}", data)
        if not abs(told - want) <= 1e-5 * want:
            return Check("clipping", "failed", f"the norm is {want:.9g}, clipping says {told:.9g}", data)
        return Check(
            "clipping", "ok", f"clipped at half its norm ({want:.6g}), streamed equals resident", data
        )

    def _packs(self) -> Check:
        """Two documents in a row: the second does not see the first."""
        if "position_ids" not in inspect.signature(type(self._model).forward).parameters:
            base = getattr(self._model, "get_base_model", lambda: self._model)()
            if "position_ids" not in inspect.signature(type(base).forward).parameters:
                self._progress()
                return Check("packing", "skipped", "the model takes no position ids")
        length = self._tokens.shape[-1]
        cut = length // 2
        row = self._tokens[0, 0, :1].to(self._device)
        other = torch.cat([(row[:, :cut] + 1) % self._vocabulary, row[:, cut:]], dim=1)
        places = torch.cat([torch.arange(cut), torch.arange(length - cut)])[None].to(self._device)
        model, _ = self._wrapped({**WAYS["keep"], "param_offload": True})
        try:
            with torch.no_grad():
                run: Any = model.eval()
                packed, swapped = (
                    run(input_ids=ids, position_ids=places, use_cache=False).logits[:, cut:].float()
                    for ids in (row, other)
                )
                alone = run(input_ids=row[:, cut:], use_cache=False).logits.float()
        finally:
            trainstream.unwrap(model)
        self._progress()
        scale = float(alone.abs().max()) or 1.0
        leak = float((packed - swapped).abs().max()) / scale
        error = float((packed - alone).abs().max()) / scale
        fine = leak <= self._slack and error <= self._slack
        data = {"leak": leak, "error": error, "allowed": self._slack}
        if not fine:
            why = "the first document changes the second" if leak > self._slack else "it is not as if alone"
            return Check(
                "packing", "failed", f"packed documents see each other: {why} ({max(leak, error):.1e})", data
            )
        seen = "not a bit of it" if leak == 0.0 else f"{leak:.1e}"
        return Check(
            "packing", "ok", f"another first document changes {seen}; as if alone within {error:.1e}", data
        )
