"""What a plan costs: time of one step and bytes of every tier, from plain numbers.

A step is two phases, forward and backward. In each of them the compute of the device, the launches of the
host, the link both ways, the disk and (in the forward phase) the optimizer on the host go on side by side, so

    t_step = fill + max(gpu, launch, link, disk, adamw)  of the forward phase
                  + max(gpu, launch, link, disk)         of the backward phase
    link   = max(h2d bytes / h2d rate, d2h bytes / d2h rate, all bytes / rate of both ways)

Decoding takes the same multiprocessors as the matmuls and adds to `gpu`. With a single slot nothing comes
while a block computes, and the link adds to it too; with more, it brings only what they have room for while
no block computes, so the seconds outside the stack add to the link's forward ones.

What goes on beside the longest costs a little all the same (`Constants.beside` of its own time).

Everything is linear in how many blocks of a class are placed in one way, but for a few maxima (slots, what is
under way), so the same tables serve one plan and a hundred thousand at once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .constants import constants
from .hardware import HardwareProfile
from .job import MOMENT_BYTES, PLACES, POLICIES, Job, Packing, Setting
from .live import Live, classes_of
from .planner import GroupSpec, from_files
from .recorded import Recorded, recorded
from .spec import BlockSpec, ModelSpec, check, is_gate, saved_parts

__all__ = ["Tables", "group_sizes", "matmul_rate", "tables"]

# Columns of the tables.
DEV, HOST, PIN, DISK, GPU_F, GPU_B, RUN_F, RUN_B, H2D_F, H2D_B, D2H_F, D2H_B, IO_F, IO_B, ADAM, ACT = range(
    16
)
WIDTH = 16
_BYTES = [DEV, HOST, PIN, DISK, ACT]

_BACKWARD_KERNELS = 2.0
_ADAPTER_BYTES = 16  # a parameter in fp32, its gradient and both moments; all stay on the device
_HANDLING = 2e-6  # seconds to wait for a group that comes, and to let it go
_NOTHING = Recorded(0.0, 0.0, 0.0, 0.0, 0.0)
_ALIGN = 256  # bytes that a weight in a slot starts at a multiple of


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
        free: Which classes are of the stack and have no policy fixed.
        moving: Bytes on the device that the blocks with a fixed policy have under way.
        logits: Bytes of logits that are there at once, before any block is in backward.
        work: Temporaries of the block in backward.
        slot: [classes]: device bytes of a shared slot.
        staged: [classes]: of these, packed bytes that arrive beside it.
        ring: [classes]: host memory that brings one of them from files.
        copies: [classes]: memory for copies of one of them while it is updated in files.
        stored: [classes]: bytes that come through the link.
        grads: [classes]: gradients of one group before they leave the device.
        saved: [classes]: activations of one block of a micro-batch.
        last: Index of the class of the stack's last block.
        frozen_last: Whether that class is frozen: its slots still hold the weights when a pass turns.
        reloads: How often weights come in a phase.
        setting: The setting.
        rates: h2d, d2h, both, disk read.
        tokens: Of a step.
        recorded: [classes, 4]: with captured blocks, memory at fixed addresses of one structure, what one
            pair of recordings holds where nothing is shared, how many structures there are at most of those
            with one place and policy, and how many policies there can be; else None.
        pool: Of memory that all recordings share.
        outside: Seconds of the forward phase beside a GPU in which no block is at work.
    """

    counts: tuple[int, ...]
    block: tuple[bool, ...]
    allowed: tuple[tuple[str, ...], ...]
    place: Tensor
    policy: Tensor
    fixed: Tensor
    free: tuple[bool, ...]
    moving: float
    logits: float
    work: float
    slot: Tensor
    staged: Tensor
    ring: Tensor
    copies: Tensor
    stored: Tensor
    grads: Tensor
    saved: Tensor
    last: int
    frozen_last: bool
    reloads: int
    setting: Setting
    rates: tuple[float, float, float, float]
    tokens: int
    recorded: Tensor | None = None
    pool: float = 0.0
    outside: float = 0.0


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
    slot: int  # bytes of what is not an adapter, decoded
    coded: int  # bytes of what has to be decoded


def _weights(block: BlockSpec, job: Job, packing: Packing) -> _Weights:
    frozen = packed = trained = trained_bytes = low = adapters = decoded = largest = slot = coded = 0
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
            coded += tensor.bytes
            packed += tensor.numel
        elif packing.name != "none" and wide and block.kind == "block" and tensor.use != "gather":
            frozen += math.ceil(tensor.numel * packing.bytes_per_weight)
            coded += math.ceil(tensor.numel * packing.bytes_per_weight)
            packed += tensor.numel
        else:
            frozen += tensor.nbytes
        decoded += tensor.nbytes
        slot += -(-tensor.nbytes // _ALIGN) * _ALIGN
    return _Weights(
        frozen, packed, trained, trained_bytes, low, adapters, decoded, flops, largest,
        block.kind in ("block", "embedding", "head") and bool(frozen or trained), slot, coded,
    )  # fmt: skip


def _group(block: BlockSpec, w: _Weights, setting: Setting, *, tied: bool) -> GroupSpec:
    """What a group takes, from its weights; a live model knows it exactly."""
    heads = block.kind == "head" or (tied and block.kind == "embedding")
    state = round(w.trained * MOMENT_BYTES[setting.moments]) + 4 * w.low
    whole = w.frozen_bytes + 2 * w.trained_bytes + state
    gathered = block.kind == "embedding" and not w.trained and not tied
    return GroupSpec(
        name=block.name,
        kind=block.kind,
        fixed=_ADAPTER_BYTES * w.adapters,
        device=whole,
        paged=whole,
        slot=0 if gathered else w.slot,
        scratch=w.trained_bytes * (2 if heads else 1),
        pageable=w.movable,
        staged=w.coded,
        updated=whole - w.frozen_bytes,
    )


def group_sizes(spec: ModelSpec, job: Job, setting: Setting) -> list[GroupSpec]:
    """Say what every group takes, worked out from the spec alone.

    Args:
        spec: The model.
        job: What is trained.
        setting: Its codec and format of moments.

    Returns:
        One for each group, in order.
    """
    return [
        _group(block, _weights(block, job, setting.packing), setting, tied=spec.tied) for block in spec.blocks
    ]


class _Builder:
    """Fills the tables of one setting, of the group at `index`."""

    index = 0

    def __init__(
        self,
        spec: ModelSpec,
        job: Job,
        hardware: HardwareProfile,
        setting: Setting,
        cpu: bool,
        live: Live | None = None,
        state_below: bool = False,
    ) -> None:
        self.state_below = state_below
        self.live, self.sizes = live, live.sizes(setting.packing.name, setting.moments) if live else None
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
        self.c = constants()
        self.traffic = self.c.traffic if cpu else self.c.gpu_traffic
        self.launch = hardware.launch_s * (self.c.host_work if cpu else self.c.gpu_host_work)

    def forward(self, block: BlockSpec, weights: _Weights) -> tuple[float, float]:
        """Seconds of one forward pass of all micro-batches: on the device, and of launching."""
        dtype = "float32" if self.job.dtype_bytes == 4 else "bfloat16"
        size = (self.tm * max(weights.largest, 1)) ** (1 / 3)
        rate = matmul_rate(self.hw, dtype, size)
        reach = min(self.job.seq_len, block.window or self.job.seq_len)
        flops = weights.flops + 2.0 * block.query * reach
        moved = self.saved_bytes(block, weights) * self.traffic / 3 / self.copy
        read = self.k * weights.decoded_bytes / self.copy
        seconds = max(self.ts * flops / rate, read) + self.ts * moved
        return seconds, self._launching(block, 1.0, self.c.captured)

    def _launching(self, block: BlockSpec, times: float, captured: float) -> float:
        """Seconds of the host: so many times a forward pass, or that many launches of a recording."""
        plain = times * self.launch * (block.kernels + self.c.adapter_kernels * self.adapted(block)[0])
        if self.job.capture:  # a block of few kernels has little around its recording
            plain = min(self.hw.launch_s * captured, plain / 2)
        return self.k * plain

    def backward(self, block: BlockSpec, weights: _Weights) -> tuple[float, float]:
        """The same of a backward pass, without recomputation."""
        seconds = self.forward(block, weights)[0]
        every = max(weights.trained + weights.packed + weights.frozen_bytes / 2, 1.0)
        seconds *= 1.0 + min(weights.trained / every, 1.0)
        return seconds, self._launching(block, _BACKWARD_KERNELS, self.c.captured_back)

    def structures(self, w: _Weights, count: int) -> float:
        """How many structures its blocks have at most, of those with one place and policy."""
        if self.fused(w):  # each module has functions of its own
            return float(count)
        return 1.0 if w.trained else 2.0  # into the first block comes nothing that needs a gradient

    def recorded(self, block: BlockSpec, w: _Weights, g: GroupSpec) -> Recorded:
        """What recordings of it take."""
        size = self.job.dtype_bytes
        adapters = 4.0 * w.adapters
        if self.live is not None and not w.adapters:  # a live model has them: with gradient and both moments
            adapters = g.fixed / 4
        return recorded(
            float(block.hidden * size * self.tm), self.saved_bytes(block, w) * self.tm, adapters,
            float(g.scratch), float(2 * size * w.packed), self.tm,
        )  # fmt: skip

    def saved_bytes(self, block: BlockSpec, weights: _Weights) -> float:
        """Bytes a token that autograd keeps.

        What a linear layer reads is kept for the gradient of its weight alone, but for what attention
        returns; of queries and keys, those that are rotated. A norm keeps its input in fp32, and where its
        weight is trained the result before that.
        """
        size = self.job.dtype_bytes
        read, made, norms = saved_parts(block.tensors, block.hidden)
        if not read + made:
            return self.c.saved * block.saved * size
        if self.fused(weights):  # norms keep their input, a gated MLP both of its own, adapters theirs once
            gates = sum(t.shape[0] for t in block.tensors if is_gate(t.name))
            kept = size * (read + made - gates + norms * block.hidden)
            return self.c.saved * kept + size * self.adapted(block)[2]
        if weights.trained:
            kept = size * (read + made) + (4 + size) * norms * block.hidden
        else:
            kept = size * (made + block.query) + 4 * norms * block.hidden
        # Each adapter casts its input to fp32, and keeps that and what its first half makes of it.
        return self.c.saved * kept + 4.0 * sum(self.adapted(block)[1:])

    def fused(self, w: _Weights) -> bool:
        """Whether fused kernels compute: over frozen packed weights, where nothing else is said."""
        if self.live is not None and self.live.fused is not None:
            return self.live.fused and not w.trained
        return w.packed > 0 and not w.trained

    def adapted(self, block: BlockSpec) -> tuple[int, int, int]:
        """Linear layers of a block with an adapter, values a token of their inputs, and of their ranks."""
        if self.live is not None and self.live.adapters and not self.job.lora_rank:
            return self.live.adapters[self.index]
        if not self.job.lora_rank or block.kind != "block":
            return 0, 0, 0
        wide = [t.shape[-1] for t in block.tensors if t.use == "matmul" and len(t.shape) >= 2]
        return len(wide), sum(wide), self.job.lora_rank * len(wide)

    def group(self, block: BlockSpec, w: _Weights) -> GroupSpec:
        """What it takes."""
        if self.sizes is not None:
            return self.sizes[self.index]
        return _group(block, w, self.setting, tied=self.spec.tied)

    def placed(self, block: BlockSpec, w: _Weights, g: GroupSpec) -> dict[str, list[float]]:
        """Rows of the places that a group may have."""
        rows = {"device": self._device(block, w, g)}
        if not (w.movable and g.pageable):
            return rows
        below = self._below(block, w, g)
        if not self.cpu:
            if w.trained and (self.live is None or self.index in self.live.settling):
                rows["settled"] = self._settled(w, g)
            rows["host"] = below
        rows["disk"] = self._disk(w, below)
        if self.state_below and "settled" in rows:
            del rows["device"]
        if self.live is None:
            return rows
        return {name: rows[name] for name in self.live.allowed(self.index, tuple(rows))}

    def _decoding(self, w: _Weights, times: int) -> float:
        return w.packed * times / self.decode

    def _device(self, block: BlockSpec, w: _Weights, g: GroupSpec) -> list[float]:
        row = [0.0] * WIDTH
        row[DEV], row[HOST], row[PIN] = g.device, g.host, g.host
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

    def _settled(self, w: _Weights, g: GroupSpec) -> list[float]:
        row = [0.0] * WIDTH
        row[DEV] = g.slot
        row[HOST] = row[PIN] = g.paged
        row[H2D_F] = w.trained_bytes
        row[D2H_B] = w.trained_bytes * self.reloads
        row[GPU_F] = _HANDLING
        row[ADAM] = w.trained / self.adam
        return row

    def _below(self, block: BlockSpec, w: _Weights, g: GroupSpec) -> list[float]:
        """A group that comes from page-locked RAM; what it takes there is counted as HOST and PIN."""
        row = [0.0] * WIDTH
        row[HOST] = row[PIN] = g.paged
        row[GPU_F] = row[GPU_B] = _HANDLING * self.reloads
        if self._gathered(block, w):  # only rows cross the link
            row[PIN] = 0.0
            row[H2D_F] = float(self.ts * block.hidden * self.job.dtype_bytes)
            return row
        weights = float(w.frozen_bytes + w.trained_bytes)
        row[H2D_F] = weights * self.reloads
        row[H2D_B] = 0.0 if block.kind == "head" else weights * self.reloads
        row[D2H_B] = w.trained_bytes * self.reloads
        row[GPU_F] += self._decoding(w, self.reloads)
        row[GPU_B] += 0.0 if block.kind == "head" else self._decoding(w, self.reloads)
        row[ADAM] = w.trained / self.adam
        return row

    def _gathered(self, block: BlockSpec, w: _Weights) -> bool:
        return block.kind == "embedding" and not w.trained and not self.spec.tied

    def _disk(self, w: _Weights, below: list[float]) -> list[float]:
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
        if self.job.capture:  # a replay of backward has it in; of the others, what is saved is copied
            again[RUN_B] = 0.0
            for row in (keep, off):
                row[GPU_F] = row[GPU_B] = saved * self.ts / self.copy
        return dict(zip(POLICIES, (keep, off, again), strict=True))

    def common(self, block: BlockSpec, w: _Weights, g: GroupSpec, head: int) -> list[float]:
        """What a group takes wherever it is."""
        row = [0.0] * WIDTH
        row[DEV] = float(g.fixed)
        if block.kind == "block":
            row[GPU_F], row[RUN_F] = self.forward(block, w)
            row[GPU_B], row[RUN_B] = self.backward(block, w)
            if self.job.capture:
                taken = self.recorded(block, w, g)
                row[GPU_F] += self.k * taken.forward / self.copy
                row[GPU_B] += self.k * taken.backward / self.copy
        elif head:
            rate = matmul_rate(self.hw, "bfloat16", (self.tm * max(head, 1)) ** (1 / 3))
            seconds = 2.0 * self.ts * head / rate
            row[GPU_F] = seconds * (3 if w.trained else 2)  # the loss works out its gradient at once
            row[RUN_F] = self.k * self.launch * 12 * math.ceil(self.tm / self.job.loss_chunk)
            if not self.cpu:
                row[RUN_F] += self.k * self.hw.launch_s * self.c.outside
        return row


def _whole(rows: list[Any]) -> Tensor:
    """Return them as a tensor in which bytes are whole numbers, whose sums are exact."""
    tensor = torch.tensor(rows, dtype=torch.float64)
    tensor[..., _BYTES] = tensor[..., _BYTES].ceil()
    return tensor


def _held(records: Sequence[tuple[Recorded, float]], free: Sequence[bool], job: Job) -> Tensor:
    both = 2.0 if "recompute" in job.policies and len(job.policies) > 1 else 1.0
    rows = [
        (taken.fixed, taken.pair, sorts, both if each else 1.0)
        for (taken, sorts), each in zip(records, free, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64).ceil()


def tables(
    spec: ModelSpec,
    job: Job,
    hardware: HardwareProfile,
    setting: Setting,
    *,
    cpu: bool = False,
    live: Live | None = None,
    state_below: bool = False,
) -> Tables:
    """Work out what each way of placing a group takes under one setting.

    Args:
        spec: The model.
        job: What is trained.
        hardware: Rates.
        setting: What holds for all blocks.
        cpu: Whether the model computes in RAM: then only files are below it.
        live: What is known of a live model beside its spec.
        state_below: Whether the optimizer's state of what can leave the device has to be on the host.

    Returns:
        The tables.

    Raises:
        ArgumentError: The spec has no weights, or words that nothing is known about.
    """
    check(spec)
    build = _Builder(spec, job, hardware, setting, cpu, live, state_below)
    fixed = [0.0] * WIDTH
    counts: list[int] = []
    block: list[bool] = []
    allowed: list[tuple[str, ...]] = []
    place: list[list[list[float]]] = []
    policy: list[list[list[float]]] = []
    free: list[bool] = []
    sizes: list[tuple[float, ...]] = []
    records: list[tuple[Recorded, float]] = []
    last, frozen_last, biggest, vocabulary, moving, trained_head, outside = -1, False, 0, 0, 0.0, 0, 0.0
    for members in classes_of(spec, setting, live):
        first, build.index = spec.blocks[members[0]], members[0]
        if len(members) > 1:  # they differ in how far they attend, at most
            reach = [min(spec.blocks[i].window or job.seq_len, job.seq_len) for i in members]
            first = dataclasses.replace(first, window=max(round(sum(reach) / len(reach)), 1))
        w = _weights(first, job, setting.packing)
        g = build.group(first, w)
        heads = first.kind == "head" or (spec.tied and first.kind == "embedding")
        head = max((t.numel for t in first.tensors if len(t.shape) == 2), default=0) if heads else 0
        vocabulary = max([vocabulary, *(max(t.shape) for t in first.tensors if head and len(t.shape) == 2)])
        trained_head = max(trained_head, head if w.trained else 0)
        common = build.common(first, w, g, head)
        outside += max(common[GPU_F], common[RUN_F]) if head and not cpu else 0.0
        for column in range(WIDTH):
            fixed[column] += common[column] * len(members)
        rows = build.placed(first, w, g)
        if set(rows) == {"device"} and first.kind != "block":
            for column in range(WIDTH):
                fixed[column] += rows["device"][column] * len(members)
            rows = {"device": [0.0] * WIDTH}
        biggest = max(biggest, w.largest if w.packed else 0)
        if first.kind == "block":
            last, frozen_last = len(counts), not w.trained
        taken = build.recorded(first, w, g) if job.capture and first.kind == "block" else _NOTHING
        records.append((taken, build.structures(w, len(members))))
        counts.append(len(members))
        block.append(first.kind == "block")
        allowed.append(tuple(rows))
        place.append([rows.get(name, [0.0] * WIDTH) for name in PLACES])
        kept = build.kept(first, w) if first.kind == "block" else {}
        saved = build.saved_bytes(first, w) * build.tm if first.kind == "block" else 0.0
        chosen = live.policies[members[0]] if live is not None and kept else None
        if chosen is not None:  # nothing to choose: it takes what it takes
            for column in range(WIDTH):
                fixed[column] += kept[chosen][column] * len(members)
            moving = max(moving, {"keep": 0.0, "offload": 2 * saved, "recompute": saved}[chosen])
            kept = {}
        free.append(bool(kept))
        policy.append([kept.get(name, [0.0] * WIDTH) for name in POLICIES])
        stored = w.frozen_bytes + w.trained_bytes
        ring, copies = from_files(max(g.slot, g.staged), 0, cpu=cpu), from_files(0, g.updated, cpu=cpu)
        sizes.append((g.slot, g.staged, ring, copies, stored, g.scratch, saved))
    chunk = min(job.loss_chunk, build.tm)
    if live is not None and live.logit_copies is not None:
        logits = live.logit_copies * chunk * vocabulary * 4.0
    else:  # a chunk in the compute dtype, the gradient of the hidden states, and in fp32 that of the head
        logits = (chunk * vocabulary + build.tm * spec.hidden) * job.dtype_bytes + 4.0 * trained_head
    # Temporaries of the block at work: the gradients of what it saved, a part at a time.
    work = (
        max((s[6] for s in sizes), default=0.0) * build.c.work
        + 4.0 * spec.hidden * job.dtype_bytes * build.tm
    )
    fixed[DEV] += 2 * biggest * job.dtype_bytes
    pool = max((taken.pool for taken, _ in records), default=0.0) + work + 2.0 * biggest * job.dtype_bytes
    held = _held(records, free, job)
    tensor = torch.tensor(sizes, dtype=torch.float64).ceil()
    rates = (hardware.h2d_bytes_per_s, hardware.d2h_bytes_per_s, hardware.both_bytes_per_s)
    return Tables(
        counts=tuple(counts), block=tuple(block), allowed=tuple(allowed),
        place=_whole(place), policy=_whole(policy), fixed=_whole(fixed),
        free=tuple(free), moving=math.ceil(moving), logits=math.ceil(logits), work=math.ceil(work),
        slot=tensor[:, 0], staged=tensor[:, 1],
        ring=tensor[:, 2], copies=tensor[:, 3], stored=tensor[:, 4], grads=tensor[:, 5], saved=tensor[:, 6],
        last=last, frozen_last=frozen_last, reloads=build.reloads, setting=setting,
        rates=(*rates, hardware.disk_read_bytes_per_s), tokens=build.ts,
        recorded=held if job.capture else None, pool=math.ceil(pool) if job.capture else 0.0,
        outside=outside,
    )  # fmt: skip
