"""Placement of blocks as the options ask for it: which are paged, and what happens to saved activations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import ts_paging
from trainstream._options import WrapOptions
from ts_core import registry
from ts_core.errors import OptionError
from ts_paging.activations import FileActivations, HostActivations
from ts_paging.files import FileTensors
from ts_paging.pager import WeightPager
from ts_quant import QuantizedTensor

__all__ = ["Placement", "Tier", "paged_parameters", "place_blocks", "start_paging"]


@dataclasses.dataclass(frozen=True)
class Placement:
    """What the options ask for.

    Attributes:
        paged: Indices of the blocks whose weights are paged.
        policy: Activation policy of every block.
    """

    paged: frozenset[int]
    policy: tuple[str, ...]

    @property
    def hooked(self) -> bool:
        """Whether any block needs the block runtime."""
        return bool(self.paged) or set(self.policy) > {"keep"} or self.policy[:1] not in ((), ("keep",))


def _indices(name: str, value: Any, count: int) -> frozenset[int]:
    """Turn True, False, a share or a list into block indices; a share takes blocks evenly over the stack."""
    if isinstance(value, str) or value is False or value is None:
        return frozenset()
    if value is True:
        return frozenset(range(count))
    if isinstance(value, Sequence):
        wrong = [index for index in value if not 0 <= index < count]
        if wrong:
            raise OptionError(f"option {name}: the model has {count} blocks, given index {wrong[0]}")
        return frozenset(value)
    chosen = math.ceil(float(value) * count)
    return frozenset(index * count // chosen for index in range(chosen))


def place_blocks(options: WrapOptions, count: int) -> Placement:
    """Decide for `count` blocks.

    ``activation_offload=True`` leaves the last block's activations, which backward needs at once. A block
    named by `recompute` recomputes, whatever `activation_offload` says.

    Raises:
        OptionError: An index that the stack does not have, or paging of a model without blocks.
    """
    paged = _indices("param_offload", options.param_offload, count)
    recompute = _indices("recompute", options.recompute, count)
    offload = _indices("activation_offload", options.activation_offload, count)
    if options.activation_offload is True:
        offload -= {count - 1}
    if not count:
        for name in ("param_offload", "recompute", "activation_offload"):
            if getattr(options, name) not in ("auto", False, 0.0, []):
                raise OptionError(f"option {name}: the model has no stack of blocks; name one with blocks=")
    policy = tuple(
        "recompute" if index in recompute else "offload" if index in offload else "keep"
        for index in range(count)
    )
    return Placement(paged, policy)


def paged_parameters(
    model: nn.Module, blocks: Sequence[nn.Module], placement: Placement
) -> dict[int, nn.Parameter]:
    """Return the Parameters to page, by id.

    Trained Parameters beside frozen ones (adapters, norms) stay on the device: they are small, and their
    optimizer is resident. In a block that is trained as a whole all are paged. A Parameter that is used
    outside paged blocks too stays.
    """
    inside = {id(module) for index in placement.paged for module in blocks[index].modules()}
    outside = {
        id(parameter)
        for module in model.modules()
        if id(module) not in inside
        for parameter in module._parameters.values()
    }
    chosen: dict[int, nn.Parameter] = {}
    for index in placement.paged:
        parameters = list(blocks[index].parameters())
        adapters = not all(p.requires_grad for p in parameters)
        for parameter in parameters:
            plain = type(parameter) is nn.Parameter or isinstance(parameter, QuantizedTensor)
            if plain and id(parameter) not in outside and not (adapters and parameter.requires_grad):
                chosen[id(parameter)] = parameter
    return chosen


class Tier:
    """Where paged weights live: page-locked host memory under a GPU, files under a CPU.

    Attributes:
        name: ``host`` or ``disk``.
        files: The files of the disk tier, else None.
    """

    def __init__(self, device: torch.device, options: WrapOptions) -> None:
        """Make the tier below `device`; ``disk_offload`` names the directory of files."""
        self.name = "host" if device.type == "cuda" else "disk"
        self.files = FileTensors(options.disk_offload) if self.name == "disk" else None

    def store(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the same bytes in this tier."""
        if isinstance(tensor, QuantizedTensor):
            packed = {key: self.store(part) for key, part in tensor.packed.items()}
            return QuantizedTensor(packed, tensor.codec, tuple(tensor.shape), tensor.dtype, tensor.block_size)
        if not ts_paging.layout.is_dense(tensor):
            tensor = tensor.contiguous()
        if self.files is not None:
            return self.files.place(tensor)
        raw = registry.host_allocator().empty(tensor.numel() * tensor.element_size())
        host = (
            raw.view(tensor.dtype).as_strided(tensor.size(), tensor.stride()) if raw.numel() else tensor.cpu()
        )
        return host.copy_(tensor)

    def close(self) -> None:
        """Remove the files."""
        if self.files is not None:
            self.files.close()


def start_paging(
    blocks: Sequence[tuple[str, nn.Module]],
    placement: Placement,
    paged: dict[int, nn.Parameter],
    tier: Tier,
    device: torch.device,
    options: WrapOptions,
) -> WeightPager:
    """Attach a pager to blocks whose Parameters are in their tier already."""
    files = tier.files
    pager = WeightPager(
        device,
        slots=min(2, max(len(placement.paged), 1)),
        gradients=files,
        activations=FileActivations(files.store) if files is not None else HostActivations(),
        min_offload_bytes=int(options.min_offload_bytes),
        pages=lambda parameter: id(parameter) in paged,
    )
    pager.attach([(name, block, placement.policy[index]) for index, (name, block) in enumerate(blocks)])
    return pager
