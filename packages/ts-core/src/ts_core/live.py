"""What is known of a model that is there, beside its spec: exact bytes, and what options have fixed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from .job import PLACES, Setting
from .planner import GroupSpec
from .spec import BlockSpec, ModelSpec

__all__ = ["Live", "classes_of", "compute_bytes"]


@dataclasses.dataclass(frozen=True)
class Live:
    """Of every group of a spec, in its order.

    Attributes:
        sizes: Given a codec and a format of moments, returns what each group takes.
        paged: True where it has to be paged, False where it must not be, None where the search decides.
        policies: What is fixed of its saved activations, None where the search decides; ignored of groups
            that are not of the stack.
        settling: Indices of groups whose optimizer works on the host while they compute on a device: their
            weights may have a slot of their own there.
        returns: Whether the state of these may come to the device too, once a run is under way.
        adapters: For each group how many linear layers have an adapter, the values a token of their inputs,
            and of what the first halves of the adapters make of these: the sum of their ranks.
        fused: Whether fused kernels compute; None: over packed weights.
        logit_copies: Chunks of logits in fp32 that are there at once, where the loss is not known to be
            computed in chunks; None: it is.
    """

    sizes: Callable[[str, str], Sequence[GroupSpec]]
    paged: tuple[bool | None, ...]
    policies: tuple[str | None, ...]
    settling: frozenset[int] = frozenset()
    returns: bool = True
    adapters: tuple[tuple[int, int, int], ...] = ()
    fused: bool | None = None
    logit_copies: float | None = None

    def allowed(self, index: int, places: Sequence[str]) -> tuple[str, ...]:
        """Return which of these places a group may have, in the order of `PLACES`."""
        group, forced = self.sizes("none", "float32")[index], self.paged[index]
        fine = set(places)
        if not group.pageable or forced is False:
            fine &= {"device", "settled"}
        elif forced:
            fine &= {"host", "disk"}
        if index in self.settling and not self.returns and len(fine) > 1:
            fine.discard("device")
        return tuple(name for name in PLACES if name in fine)


def classes_of(spec: ModelSpec, setting: Setting, live: Live | None) -> list[tuple[int, ...]]:
    """Return the indices of interchangeable groups, class by class in order of first use.

    Args:
        spec: The model.
        setting: Its codec and moments decide what a group takes.
        live: What is known beside the spec.

    Returns:
        As `ModelSpec.classes`, of groups that may have the same places and policies too.
    """
    if live is None:
        return spec.classes()
    sizes = live.sizes(setting.packing.name, setting.moments)
    found: dict[object, list[int]] = {}
    for index, block in enumerate(spec.blocks):
        key: object = index
        if block.kind == "block":
            alike = dataclasses.replace(sizes[index], name="")
            fixed = live.paged[index], live.policies[index], index in live.settling
            key = block.likeness, alike, fixed, live.adapters[index] if live.adapters else None
        found.setdefault(key, []).append(index)
    return [tuple(members) for members in found.values()]


def compute_bytes(spec: ModelSpec) -> int:
    """Return the bytes of a value that computes: those of the widest matrix of the stack.

    Args:
        spec: The model.

    Example:
        >>> compute_bytes(ModelSpec(()))
        2
    """
    return _widest(spec.stack)


@functools.lru_cache(maxsize=8)
def _widest(stack: tuple[BlockSpec, ...]) -> int:
    sizes = [t.itemsize for block in stack for t in block.tensors if t.use == "matmul" and t.codec == "none"]
    return max((size for size in sizes if size in (2, 4)), default=2)
