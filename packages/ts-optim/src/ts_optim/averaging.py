"""Data parallel training: rank 0's weights everywhere, and gradients averaged between ranks before a step.

    p.grad <- (g_0 + g_1 + ... + g_{N-1}) / N

Gradients travel in buckets of up to 64 MiB, 16-bit ones as fp32: they are rounded once, when they come back.
A parameter that has a gradient on some ranks counts as zero on the others. Every rank gets the same bits.

Source: Li et al., "PyTorch Distributed", https://arxiv.org/abs/2006.15704 (buckets, and what is unused).
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from ts_core.errors import ArgumentError, OptionError, StateError

from .gradients import gradient_of
from .slots import check_param

__all__ = ["Averaging"]

_BUCKET_BYTES = 64 << 20
_LOW = (torch.bfloat16, torch.float16)
_ABSENT, _THERE, _WIDE, _UNFIT = 0, 1, 2, 3  # the largest of all ranks holds
#: By default group: the group that sums host tensors, where the default one does not.
_HOST_GROUPS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _takes(group: Any, device: str) -> bool:
    return any(torch.device(each).type == device for each in group._device_types)


def _host_group() -> Any:
    """Return the group for host tensors; the first call of a process makes it, on all ranks together."""
    world = dist.group.WORLD
    if world is None or _takes(world, "cpu"):
        return world
    if world not in _HOST_GROUPS:
        _HOST_GROUPS[world] = dist.new_group(backend="gloo")
    return _HOST_GROUPS[world]


def _buckets(tensors: Sequence[torch.Tensor], key: Callable[[torch.Tensor], Any]) -> Iterator[list[int]]:
    """Yield indices of tensors of one key each, in order, up to the size of a bucket (at least one)."""
    open_: dict[Any, tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        kind = key(tensor)
        members, held = open_.get(kind, ([], 0))
        size = tensor.numel() * max(4, tensor.element_size())
        if members and held + size > _BUCKET_BYTES:
            yield members
            members, held = [], 0
        open_[kind] = ([*members, index], held + size)
    for members, _ in open_.values():
        yield members


def _split(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.split_with_sizes(flat, [tensor.numel() for tensor in like])


class Averaging:
    """What the optimizers of all ranks do together. Every method has to be called by all ranks alike."""

    def __init__(self) -> None:
        """Join the ranks of this process's default group.

        Raises:
            OptionError: There is no group.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise OptionError(
                "option distributed=True: this process is in no group; call "
                "torch.distributed.init_process_group before the optimizer is made (torchrun starts ranks)"
            )
        self._world = dist.get_world_size()

    def share_weights(self, params: Sequence[torch.Tensor]) -> None:
        """Give every rank the weights that rank 0 has.

        Args:
            params: The parameters, in the same order on all ranks.

        Raises:
            ArgumentError: Ranks differ in number, shapes or dtypes; nothing is written then.
            StateError: A rank is gone.
        """
        if self._world == 1:
            return
        self._check_alike(params)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for members in _buckets(params, lambda p: p.dtype):
                chosen = [params[index] for index in members]
                flat = torch.cat([p.detach().to("cpu").contiguous().view(-1) for p in chosen])
                self._together(dist.broadcast, flat.view(torch.uint8), 0)
                if dist.get_rank():
                    for param, values in zip(chosen, _split(flat, chosen), strict=True):
                        param.copy_(values.view(param.shape))

    def _check_alike(self, params: Sequence[torch.Tensor]) -> None:
        words = ";".join(f"{tuple(p.shape)}{p.dtype}" for p in params)
        digest = hashlib.sha256(words.encode()).digest()[:7]
        mine = torch.tensor([len(params), int.from_bytes(digest, "big")])
        all_ranks = [torch.empty_like(mine) for _ in range(self._world)]
        self._together(dist.all_gather, all_ranks, mine)
        differ = [rank for rank, other in enumerate(all_ranks) if not torch.equal(other, all_ranks[0])]
        if differ:
            raise ArgumentError(
                f"[OffloadAdamW] params: with distributed=True every rank needs the same parameters in the "
                f"same order; ranks {differ} differ from rank 0 in number, shapes or dtypes (rank 0 has "
                f"{int(all_ranks[0][0])}, this rank {len(params)})"
            )

    def average(self, params: Sequence[torch.Tensor], name: Callable[[torch.Tensor], str]) -> None:
        """Replace gradients by their average over the ranks.

        Args:
            params: The parameters, in the same order on all ranks.
            name: Names one in messages.

        Raises:
            ArgumentTypeError, ArgumentError: A gradient of this rank cannot be used.
            StateError: One of another rank cannot be used, or a rank is gone. Weights and state are as they
                were; after the latter, some gradients may be averages already.
        """
        if self._world == 1:
            return
        grads = [gradient_of(param) for param in params]
        marks, problem = self._marks(params, grads, name)
        self._together(dist.all_reduce, marks, dist.ReduceOp.MAX)
        if problem is not None:
            raise problem
        if bool((marks == _UNFIT).any()):
            which = name(params[int((marks == _UNFIT).nonzero()[0])])
            raise StateError(
                f"[OffloadAdamW.step] another rank has a gradient of {which} that cannot be used; its own "
                "message says why. No rank has taken the step"
            )
        kinds = marks.tolist()
        used = [index for index, mark in enumerate(kinds) if mark != _ABSENT]
        chosen = [params[index] for index in used]
        for members in _buckets(chosen, self._kind):
            indices = [used[i] for i in members]
            self._average_bucket([(params[i], grads[i], _dtype_of(params[i], kinds[i])) for i in indices])

    @staticmethod
    def _marks(
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor | None],
        name: Callable[[torch.Tensor], str],
    ) -> tuple[torch.Tensor, Exception | None]:
        """Say of each parameter whether it has a gradient that fits; return what is wrong with the first."""
        marks = torch.zeros(len(params), dtype=torch.uint8)
        problem: Exception | None = None
        for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
            if grad is None:
                continue
            marks[index] = _WIDE if param.dtype in _LOW and grad.dtype not in _LOW else _THERE
            try:
                check_param(param, grad, name(param))
            except Exception as error:
                marks[index] = _UNFIT
                problem = problem or error
        return marks, problem

    @staticmethod
    def _kind(param: torch.Tensor) -> tuple[torch.dtype, bool]:
        world = dist.group.WORLD
        on_device = param.device.type != "cpu" and _takes(world, param.device.type)
        return torch.float64 if param.dtype is torch.float64 else torch.float32, on_device

    def _average_bucket(
        self, members: Sequence[tuple[torch.Tensor, torch.Tensor | None, torch.dtype]]
    ) -> None:
        dtype, on_device = self._kind(members[0][0])
        device = members[0][0].device if on_device else torch.device("cpu")
        flat = torch.zeros(sum(p.numel() for p, *_ in members), dtype=dtype, device=device)
        parts = _split(flat, [param for param, *_ in members])
        for (param, grad, _), part in zip(members, parts, strict=True):
            if grad is not None:
                part.view(param.shape).copy_(grad)
        self._together(dist.all_reduce, flat, dist.ReduceOp.SUM, host=not on_device)
        flat.div_(self._world)
        for (param, grad, dtype), part in zip(members, parts, strict=True):
            if grad is None or grad.dtype is not dtype or not _writable(grad):
                grad = torch.empty_like(param, dtype=dtype)
                param.grad = None
                if dtype is not param.dtype:  # it is refused otherwise
                    cast(Any, param).grad_dtype = None
                param.grad = grad
            grad.copy_(part.view(param.shape))

    @staticmethod
    def _together(collective: Callable[..., Any], *args: Any, host: bool = True) -> None:
        try:
            collective(*args, group=_host_group() if host else None)
        except RuntimeError as error:
            raise StateError(
                f"[OffloadAdamW] an exchange with the other ranks failed: {error}. Weights and state of this "
                "rank are as they were before the step; start all ranks again from a checkpoint"
            ) from error


def _dtype_of(param: torch.Tensor, mark: int) -> torch.dtype:
    """Dtype of a gradient on all ranks: what is rounded on one of them only would part their weights."""
    return torch.float32 if mark == _WIDE else param.dtype


def _writable(grad: torch.Tensor) -> bool:
    """Whether elements have memory of their own; an expanded gradient's do not."""
    return all(stride for size, stride in zip(grad.shape, grad.stride(), strict=True) if size > 1)
