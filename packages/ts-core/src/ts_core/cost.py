"""What a plan costs: time of one step and bytes of every tier, from plain numbers.

A step is two phases, forward and backward. In each of them the compute of the device, the launches of the
host, the link both ways, the disk and (in the forward phase) the optimizer on the host go on side by side, so

    t_step = fill + max(gpu, launch, link, disk, adamw)  of the forward phase
                  + max(gpu, launch, link, disk)         of the backward phase
    link   = max(h2d bytes / h2d rate, d2h bytes / d2h rate, all bytes / rate of both ways)

Decoding takes the same multiprocessors as the matmuls and adds to `gpu`. With a single slot nothing comes
while a block computes, and the link adds to it too.

What goes on beside the longest costs a little all the same (`_BESIDE` of its own time).

Everything is linear in how many blocks of a class are placed in one way, but for a few maxima (slots, what is
under way), so the same tables serve one plan and a hundred thousand at once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .hardware import HardwareProfile
from .job import MOMENT_BYTES, PLACES, POLICIES, Job, Packing, Setting
from .spec import BlockSpec, ModelSpec, check

__all__ = ["Tables", "matmul_rate", "tables"]

# Columns of the tables.
DEV, HOST, PIN, DISK, GPU_F, GPU_B, RUN_F, RUN_B, H2D_F, H2D_B, D2H_F, D2H_B, IO_F, IO_B, ADAM, ACT = range(
    16
)
WIDTH = 16
_BYTES = [DEV, HOST, PIN, DISK, ACT]

#: Bytes that PyTorch's own kernels move in the device's memory for each byte that autograd saves: unfused
#: norms, rotary embedding, activations and casts read and write it again and again.
_TRAFFIC = 16.0
#: Launches of Python, modules and autograd around each kernel, in launches.
_HOST_WORK = 3.0
_BACKWARD_KERNELS = 2.0
_ADAPTER_KERNELS = 6
_ADAPTER_BYTES = 16  # a parameter in fp32, its gradient and both moments; all stay on the device
_LOGIT_COPIES = 2  # chunks of fp32 logits at once


@dataclasses.dataclass(frozen=True)
class Tables:
    """What each way of placing a group adds, for one setting.

    Attributes:
        counts: Groups of each class.
        block: Whether a class is one of the stack.
        allowed: Places that a class may have.
        place: [classes, 4 places, columns].
        policy: [classes, 3 policies, columns]; zero for classes that are not of the stack.
        fixed: [columns]: whatever is chosen.
        slot: [classes]: device bytes of a shared slot.
        stored: [classes]: bytes that come through the link.
        grads: [classes]: gradients of one group before they leave the device.
        saved: [classes]: activations of one block of a micro-batch.
        last: Index of the class of the stack's last block.
        frozen_last: Whether that class is frozen: its slots still hold the weights when a pass turns.
        reloads: How often weights come in a phase.
        setting: The setting.
        rates: h2d, d2h, both, disk read.
        tokens: Of a step.
    """

    counts: tuple[int, ...]
    block: tuple[bool, ...]
    allowed: tuple[tuple[str, ...], ...]
    place: Tensor
    policy: Tensor
    fixed: Tensor
    slot: Tensor
    stored: Tensor
    grads: Tensor
    saved: Tensor
    last: int
    frozen_last: bool
    reloads: int
    setting: Setting
    rates: tuple[float, float, float, float]
    tokens: int


def _rate(table: Mapping[str, float], key: str, otherwise: float) -> float:
    return table.get(key) or (min(table.values()) if table else otherwise)


def matmul_rate(hardware: HardwareProfile, dtype: str, size: float) -> float:
    """Return operations a second of a product of `size`^3 multiplications, between the sizes measured.

    Args:
        hardware: The profile.
        dtype: Of the operands.
        size: Cube root of the number of multiplications.

    Returns:
        Operations a second (two a multiplication).
    """
    table = hardware.rates.get("matmul_flops_per_s", {})
    own = {int(k.split("/")[1]): rate for k, rate in table.items() if k.startswith(f"{dtype}/")}
    if not own:
        own = {int(k.split("/")[1]): rate for k, rate in table.items() if "/" in k} or {4096: 1e14}
    sizes = sorted(own)
    if size <= sizes[0]:
        return own[sizes[0]] * max(size / sizes[0], 1e-3)
    for low, high in itertools.pairwise(sizes):
        if size <= high:
            share = math.log(size / low) / math.log(high / low)
            return float(own[low] * (own[high] / own[low]) ** share)
    return own[sizes[-1]]


@dataclasses.dataclass(frozen=True)
class _Weights:
    """Sums over the weights of one group."""

    frozen_bytes: int  # as stored under the plan
    packed: int  # elements that have to be decoded
    trained: int
    trained_bytes: int
    low: int  # trained elements that need an fp32 master
    adapters: int
    decoded_bytes: int
    flops: float  # a token, forward
    largest: int
    movable: bool


def _weights(block: BlockSpec, job: Job, packing: Packing) -> _Weights:
    frozen = packed = trained = trained_bytes = low = adapters = decoded = largest = 0
    flops = 0.0
    total = sum(t.numel for t in block.tensors)
    own = sum(t.numel for t in block.tensors if t.trained and t.codec == "none") if not job.lora_rank else 0
    few = 2 * own < total  # the few that are trained stay on the device, like adapters
    for tensor in block.tensors:
        wide = len(tensor.shape) >= 2
        if tensor.use in ("matmul", "experts") and wide:
            flops += 2.0 * tensor.numel * tensor.active
            largest = max(largest, tensor.numel // (tensor.shape[0] if tensor.use == "experts" else 1))
            if job.lora_rank and tensor.use == "matmul" and block.kind == "block":
                adapters += job.lora_rank * sum(tensor.shape[-2:])
        if not job.lora_rank and tensor.trained and tensor.codec == "none":
            if few:
                adapters += tensor.numel
                continue
            trained += tensor.numel
            trained_bytes += tensor.nbytes
            low += tensor.numel * (tensor.itemsize <= 2)
        elif tensor.codec != "none":
            frozen += tensor.bytes
            packed += tensor.numel
        elif packing.name != "none" and wide and block.kind == "block" and tensor.use != "gather":
            frozen += math.ceil(tensor.numel * packing.bytes_per_weight)
            packed += tensor.numel
        else:
            frozen += tensor.nbytes
        decoded += tensor.nbytes
    return _Weights(
        frozen, packed, trained, trained_bytes, low, adapters, decoded, flops, largest,
        block.kind in ("block", "embedding", "head") and bool(frozen or trained),
    )  # fmt: skip


class _Builder:
    """Fills the tables of one setting."""

    def __init__(
        self, spec: ModelSpec, job: Job, hardware: HardwareProfile, setting: Setting, cpu: bool
    ) -> None:
        self.spec, self.job, self.hw, self.setting, self.cpu = spec, job, hardware, setting, cpu
        self.k = job.batch // setting.micro
        self.reloads = self.k if setting.schedule == "microbatch" else 1
        self.tm = setting.micro * job.seq_len
        self.ts = job.batch * job.seq_len
        # Activations of all micro-batches are there at once where each block takes them in turn.
        self.held = self.tm if setting.schedule == "microbatch" else self.ts
        rates = hardware.rates
        decode = rates.get("decode_weights_per_s", {})
        copy = hardware.device_copy_bytes_per_s
        self.decode = _rate(decode, setting.packing.name, copy / 3)
        self.adam = _rate(rates.get("adamw_params_per_s", {}), setting.moments, 3e8)
        self.copy = copy
        self.launch = hardware.launch_s * _HOST_WORK

    def forward(self, block: BlockSpec, weights: _Weights) -> tuple[float, float]:
        """Seconds of one forward pass of all micro-batches: on the device, and of launching."""
        dtype = "float32" if self.job.dtype_bytes == 4 else "bfloat16"
        size = (self.tm * max(weights.largest, 1)) ** (1 / 3)
        rate = matmul_rate(self.hw, dtype, size)
        reach = min(self.job.seq_len, block.window or self.job.seq_len)
        flops = weights.flops + 2.0 * block.query * reach
        moved = self.saved_bytes(block, weights) * _TRAFFIC / 3 / self.copy
        read = self.k * weights.decoded_bytes / self.copy
        seconds = max(self.ts * flops / rate, read) + self.ts * moved
        adapters = (
            sum(t.use == "matmul" for t in block.tensors) if weights.adapters and self.job.lora_rank else 0
        )
        return seconds, self.k * self.launch * (block.kernels + _ADAPTER_KERNELS * adapters)

    def backward(self, block: BlockSpec, weights: _Weights) -> tuple[float, float]:
        """The same of a backward pass, without recomputation."""
        seconds, launch = self.forward(block, weights)
        every = max(weights.trained + weights.packed + weights.frozen_bytes / 2, 1.0)
        return seconds * (1.0 + min(weights.trained / every, 1.0)), launch * _BACKWARD_KERNELS

    def saved_bytes(self, block: BlockSpec, weights: _Weights) -> float:
        """Bytes a token that autograd keeps."""
        saved = block.saved * self.job.dtype_bytes
        if weights.adapters and self.job.lora_rank:  # each adapter casts its input to fp32
            saved += 4.0 * sum(t.shape[-1] for t in block.tensors if t.use == "matmul" and len(t.shape) >= 2)
        return saved

    def placed(self, block: BlockSpec, w: _Weights) -> dict[str, list[float]]:
        """Rows of the places that a group may have."""
        rows = {"device": self._device(block, w)}
        if not w.movable:
            return rows
        below = self._below(block, w)
        if not self.cpu:
            if w.trained:
                rows["settled"] = self._settled(w)
            rows["host"] = below
        rows["disk"] = self._disk(block, w, below)
        return rows

    def _decoding(self, w: _Weights, times: int) -> float:
        return w.packed * times / self.decode

    def _device(self, block: BlockSpec, w: _Weights) -> list[float]:
        row = [0.0] * WIDTH
        row[DEV] = w.frozen_bytes + 2 * w.trained_bytes + self._state(w)
        passes = 1 if block.kind == "head" else 2
        row[GPU_F] = self._decoding(w, self.k)
        row[GPU_B] = self._decoding(w, self.k) if passes == 2 else 0.0
        if self.cpu:
            row[ADAM] = w.trained / self.adam
        else:
            row[GPU_F] += (3 * w.trained_bytes + 2 * self._state(w)) / self.copy
        return row

    def _state(self, w: _Weights) -> float:
        return w.trained * MOMENT_BYTES[self.setting.moments] + 4.0 * w.low

    def _settled(self, w: _Weights) -> list[float]:
        row = [0.0] * WIDTH
        row[DEV] = w.decoded_bytes
        row[HOST] = row[PIN] = self._state(w) + w.trained_bytes + 4.0 * (w.trained - w.low)
        row[H2D_F] = w.trained_bytes
        row[D2H_B] = w.trained_bytes * self.reloads
        row[ADAM] = w.trained / self.adam
        return row

    def _below(self, block: BlockSpec, w: _Weights) -> list[float]:
        """A group that comes from page-locked RAM; what it takes there is counted as HOST and PIN."""
        row = [0.0] * WIDTH
        row[HOST] = w.frozen_bytes + 2 * w.trained_bytes + self._state(w)
        if self._gathered(block, w):  # only rows cross the link
            row[H2D_F] = float(self.ts * block.hidden * self.job.dtype_bytes)
            return row
        row[PIN] = row[HOST]
        weights = float(w.frozen_bytes + w.trained_bytes)
        row[H2D_F] = weights * self.reloads
        row[H2D_B] = 0.0 if block.kind == "head" else weights * self.reloads
        row[D2H_B] = w.trained_bytes * self.reloads
        row[GPU_F] = self._decoding(w, self.reloads)
        row[GPU_B] = 0.0 if block.kind == "head" else self._decoding(w, self.reloads)
        row[ADAM] = w.trained / self.adam
        return row

    def _gathered(self, block: BlockSpec, w: _Weights) -> bool:
        return block.kind == "embedding" and not w.trained and not self.spec.tied

    def _disk(self, block: BlockSpec, w: _Weights, below: list[float]) -> list[float]:
        row = list(below)
        row[DISK], row[HOST], row[PIN] = below[HOST], 0.0, 0.0
        read, write = self.hw.disk_read_bytes_per_s, self.hw.disk_write_bytes_per_s
        row[IO_F], row[IO_B] = below[H2D_F] / read, below[H2D_B] / read
        row[IO_B] += below[D2H_B] / write
        row[IO_F] += self._state(w) * (1 / read + 1 / write) + w.trained_bytes / write
        if self.cpu:
            row[H2D_F] = row[H2D_B] = row[D2H_B] = 0.0
        return row

    def kept(self, block: BlockSpec, w: _Weights) -> dict[str, list[float]]:
        """Rows of the policies of a block."""
        saved = self.saved_bytes(block, w)
        keep, off, again = ([0.0] * WIDTH for _ in range(3))
        keep[DEV] = keep[ACT] = saved * self.held
        if self.cpu:
            off[DISK] = saved * self.held
            off[IO_F] = saved * self.ts / self.hw.disk_write_bytes_per_s
            off[IO_B] = saved * self.ts / self.hw.disk_read_bytes_per_s
        else:
            off[HOST] = off[PIN] = saved * self.held
            off[D2H_F] = off[H2D_B] = saved * self.ts
        again[DEV] = again[ACT] = float(block.hidden * self.job.dtype_bytes * self.held)
        again[GPU_B], again[RUN_B] = self.forward(block, w)
        again[GPU_B] += self._decoding(w, self.k)
        return dict(zip(POLICIES, (keep, off, again), strict=True))

    def common(self, block: BlockSpec, w: _Weights, head: int) -> list[float]:
        """What a group takes wherever it is."""
        row = [0.0] * WIDTH
        row[DEV] = float(_ADAPTER_BYTES * w.adapters)
        if block.kind == "block":
            row[GPU_F], row[RUN_F] = self.forward(block, w)
            row[GPU_B], row[RUN_B] = self.backward(block, w)
        elif head:
            rate = matmul_rate(self.hw, "bfloat16", (self.tm * max(head, 1)) ** (1 / 3))
            seconds = 2.0 * self.ts * head / rate
            row[GPU_F] = seconds * (3 if w.trained else 2)  # the loss works out its gradient at once
            row[RUN_F] = self.k * self.launch * 12 * math.ceil(self.tm / self.job.loss_chunk)
        return row


def _whole(rows: list[Any]) -> Tensor:
    """Return them as a tensor in which bytes are whole numbers, whose sums are exact."""
    tensor = torch.tensor(rows, dtype=torch.float64)
    tensor[..., _BYTES] = tensor[..., _BYTES].ceil()
    return tensor


def tables(
    spec: ModelSpec, job: Job, hardware: HardwareProfile, setting: Setting, *, cpu: bool = False
) -> Tables:
    """Work out what each way of placing a group takes under one setting.

    Args:
        spec: The model.
        job: What is trained.
        hardware: Rates.
        setting: What holds for all blocks.
        cpu: Whether the model computes in RAM: then only files are below it.

    Returns:
        The tables.

    Raises:
        ArgumentError: The spec has no weights, or words that nothing is known about.
    """
    check(spec)
    build = _Builder(spec, job, hardware, setting, cpu)
    fixed = [0.0] * WIDTH
    counts: list[int] = []
    block: list[bool] = []
    allowed: list[tuple[str, ...]] = []
    place: list[list[list[float]]] = []
    policy: list[list[list[float]]] = []
    sizes: list[tuple[float, float, float, float]] = []
    last, frozen_last, biggest, vocabulary = -1, False, 0, 0
    for members in spec.classes():
        first = spec.blocks[members[0]]
        if len(members) > 1:  # they differ in how far they attend, at most
            reach = [min(spec.blocks[i].window or job.seq_len, job.seq_len) for i in members]
            first = dataclasses.replace(first, window=max(round(sum(reach) / len(reach)), 1))
        w = _weights(first, job, setting.packing)
        heads = first.kind == "head" or (spec.tied and first.kind == "embedding")
        head = max((t.numel for t in first.tensors if len(t.shape) == 2), default=0) if heads else 0
        vocabulary = max([vocabulary, *(max(t.shape) for t in first.tensors if head and len(t.shape) == 2)])
        common = build.common(first, w, head)
        for column in range(WIDTH):
            fixed[column] += common[column] * len(members)
        rows = build.placed(first, w)
        if set(rows) == {"device"} and first.kind != "block":
            for column in range(WIDTH):
                fixed[column] += rows["device"][column] * len(members)
            rows = {"device": [0.0] * WIDTH}
        biggest = max(biggest, w.largest if w.packed else 0)
        if first.kind == "block":
            last, frozen_last = len(counts), not w.trained
        counts.append(len(members))
        block.append(first.kind == "block")
        allowed.append(tuple(rows))
        place.append([rows.get(name, [0.0] * WIDTH) for name in PLACES])
        kept = build.kept(first, w) if first.kind == "block" else {}
        policy.append([kept.get(name, [0.0] * WIDTH) for name in POLICIES])
        gathered = build._gathered(first, w)
        staged = w.frozen_bytes if w.packed else 0  # packed bytes arrive beside the slot
        grads = w.trained_bytes * (2 if heads else 1)
        saved = build.saved_bytes(first, w) * build.tm if first.kind == "block" else 0.0
        sizes.append(
            (0 if gathered else w.decoded_bytes + staged, w.frozen_bytes + w.trained_bytes, grads, saved)
        )
    logits = _LOGIT_COPIES * min(job.loss_chunk, build.tm) * vocabulary * 4.0
    # Temporaries of the block at work: the gradients of what it saved, a part at a time.
    work = max((s[3] for s in sizes), default=0.0) / 2 + 4.0 * spec.hidden * job.dtype_bytes * build.tm
    fixed[ACT] += max(logits, work)
    fixed[DEV] += max(logits, work) + 2 * biggest * job.dtype_bytes
    tensor = torch.tensor(sizes, dtype=torch.float64).ceil()
    rates = (hardware.h2d_bytes_per_s, hardware.d2h_bytes_per_s, hardware.both_bytes_per_s)
    return Tables(
        counts=tuple(counts), block=tuple(block), allowed=tuple(allowed),
        place=_whole(place), policy=_whole(policy), fixed=_whole(fixed),
        slot=tensor[:, 0], stored=tensor[:, 1], grads=tensor[:, 2], saved=tensor[:, 3],
        last=last, frozen_last=frozen_last, reloads=build.reloads, setting=setting,
        rates=(*rates, hardware.disk_read_bytes_per_s), tokens=build.ts,
    )  # fmt: skip
