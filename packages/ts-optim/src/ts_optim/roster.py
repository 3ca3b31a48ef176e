"""The works of a step, put together from what stays the same from step to step.

Whether it did is asked of all parameters at once: some tenths of a microsecond for each, where going through
them one by one takes ten. If gradients and parameters look as they did in the step before, one look tells.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, repeat
from operator import is_
from typing import Any, SupportsIndex, overload

import torch
from torch._C._dynamo.guards import TensorGuards

from ts_core.arriving import ArrivingGradient
from ts_core.guard import guard_of

from .kernel import PlainCall, Terms
from .slots import Bucket, Slot, State, flat_gradient, key_of
from .transfer import Work

__all__ = ["Positions", "Prompt", "Roster"]

_LOW = (torch.bfloat16, torch.float16)
_PLAIN = {torch.Tensor, type(None)}
_T: Any = torch.Tensor  # its attributes are untyped
_GRAD, _DTYPE, _LAYOUT, _DEVICE = (
    getattr(_T, name).__get__ for name in ("grad", "dtype", "layout", "device")
)


def _same(now: Collection[Any], before: Sequence[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


class Positions:
    """Index, group and parameter of each parameter of some groups, each parameter once.

    Attributes:
        all: In the order of groups; an index counts repeated parameters too.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        """Number the parameters."""
        self._lists = [list(group["params"]) for group in groups]
        seen: set[int] = set()
        self.all: list[tuple[int, int, torch.Tensor]] = []
        index = 0
        for number, params in enumerate(self._lists):
            for param in params:
                if id(param) not in seen:
                    seen.add(id(param))
                    self.all.append((index, number, param))
                index += 1

    def current(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Tell whether the groups hold the same parameters as then, in the same order."""
        return len(groups) == len(self._lists) and all(
            _same(group["params"], before) for group, before in zip(groups, self._lists, strict=True)
        )


class Prompt(Sequence[Work]):
    """The works of a step in which all kernel calls are ready: no update waits, and no gradient is awaited.

    The works themselves are made when somebody looks at one.
    """

    def __init__(
        self,
        calls: Sequence[tuple[list[int], PlainCall]],
        grads: list[torch.Tensor],
        listed: Callable[[list[torch.Tensor]], list[Work]],
    ) -> None:
        """Take what is needed.

        Args:
            calls: Kernel calls, each with the positions of its gradients.
            grads: All gradients, contiguous.
            listed: Makes the works of all gradients.
        """
        self._calls, self._grads, self._listed = calls, grads, listed
        self._works: list[Work] | None = None

    def run(self, terms: Terms) -> None:
        """Update all of them, without measures."""
        for places, call in self._calls:
            whole = len(places) == len(self._grads)
            call.run(self._grads if whole else [self._grads[i] for i in places], terms)

    def _all(self) -> list[Work]:
        if self._works is None:
            self._works = self._listed(self._grads)
        return self._works

    def __len__(self) -> int:
        """How many there are."""
        return len(self._grads)

    def __iter__(self) -> Iterator[Work]:
        """Go through all of them."""
        return iter(self._all())

    @overload
    def __getitem__(self, at: SupportsIndex) -> Work: ...
    @overload
    def __getitem__(self, at: slice) -> list[Work]: ...
    def __getitem__(self, at: SupportsIndex | slice) -> Work | list[Work]:
        """Return one, or some."""
        return self._all()[at]


class Roster:
    """The parameters that have been updated before, with their slots, as lists of one attribute each."""

    def __init__(
        self,
        positions: Positions,
        slots: Mapping[torch.Tensor, Slot],
        state: Mapping[torch.Tensor, State],
    ) -> None:
        """Note what is there.

        Args:
            positions: Of the parameters.
            slots: Those there are; outdated ones are left out.
            state: The entries of all parameters.
        """
        self.positions = positions
        rows: list[tuple[int, int, Slot]] = []
        self._others: list[torch.Tensor] = []
        for index, group, param in positions.all:
            slot, entry = slots.get(param), state.get(param)
            if slot is None or entry is None or not slot.current(key_of(param), entry):
                self._others.append(param)
            else:
                rows.append((index, group, slot))
        self._indices = [index for index, _, _ in rows]
        self._groups = [group for _, group, _ in rows]
        self._slots = [slot for _, _, slot in rows]
        self._params = [slot.param for slot in self._slots]
        self._keys: list[list[Any]] = [[slot.key[i] for slot in self._slots] for i in range(5)]
        self._known = list(slots.values())
        self._owners, self._entries = list(state.keys()), list(state.values())
        self._held = [t for entry in self._entries for t in entry.values()]
        #: What parameters and gradients looked like when all had a contiguous one and were found to fit.
        self._looks: TensorGuards | None = None
        self._deferrable = any(slot.deferrable for slot in self._slots)
        self._calls: list[tuple[list[int], PlainCall]] = []
        if all(slot.direct and slot.dense and slot.bucket[0] == "plain" for slot in self._slots):
            buckets: dict[Bucket, list[int]] = {}
            for place, slot in enumerate(self._slots):
                buckets.setdefault(slot.bucket, []).append(place)
            for places in buckets.values():
                picked = [rows[place] for place in places]
                numbers, groups = [index for index, _, _ in picked], [group for _, group, _ in picked]
                self._calls.append((places, PlainCall([slot for _, _, slot in picked], groups, numbers)))

    def current(self, slots: Mapping[torch.Tensor, Slot], state: Mapping[torch.Tensor, State]) -> bool:
        """Tell whether slots and state hold the same objects as then."""
        if not (_same(slots.values(), self._known) and _same(state.keys(), self._owners)):
            return False
        entries = state.values()
        if not _same(entries, self._entries) or sum(map(len, entries)) != len(self._held):
            return False
        return all(map(is_, chain.from_iterable(map(dict.values, entries)), self._held))

    def _unchanged(self, grads: list[Any]) -> bool:
        """Tell whether class, dtype, device, shape, strides and place are those of `_looks`.

        Of gradients the place may be another; gradients of other classes (those that are arriving, or used
        up) and missing ones are changes.
        """
        looks, params = self._looks, self._params
        if looks is None or not looks.check(*params, *grads):
            return False
        return _equal(map(_T.data_ptr, params), self._keys[0])

    def _whole(self, grads: list[torch.Tensor], sums: bool) -> Sequence[Work]:
        """Return the works of all: their gradients are ordinary, contiguous tensors that fit."""

        def listed(grads: list[torch.Tensor]) -> list[Work]:
            nothing = [None] * len(grads)
            return _listed(self._indices, self._groups, self._slots, self._params, grads, nothing, sums)

        waits = self._deferrable and not all(map(is_, map(guard_of, self._params), repeat(None)))
        return listed(grads) if waits or not self._calls else Prompt(self._calls, grads, listed)

    def works(self, sums: bool) -> Sequence[Work] | None:
        """Make the works of those that have a gradient.

        Args:
            sums: Ask for the sums of squares that came with gradients.

        Returns:
            None: something has to be looked at one by one; a parameter whose memory was exchanged, a gradient
            of another class, dtype or shape, the first gradient of a parameter.
        """
        grads: list[Any] = list(map(_GRAD, self._params))
        if any(_GRAD(p) is not None for p in self._others):
            return None
        if self._unchanged(grads):
            return self._whole(grads, sums)
        coming = [g if type(g) is ArrivingGradient and g.value is None else None for g in grads]
        late = any(each is not None for each in coming)
        if late:
            grads = [g if c is None else c.payload for g, c in zip(grads, coming, strict=True)]
        if not _PLAIN.issuperset(map(type, grads)):
            return None
        columns: list[Any] = [self._indices, self._groups, self._slots, self._params, coming, *self._keys]
        if not all(grad is not None for grad in grads):
            there = [grad is not None for grad in grads]
            columns = [list(compress(column, there)) for column in columns]
            grads = list(compress(grads, there))
        indices, groups, slots, params, coming, addresses, dtypes, devices, shapes, strides = columns
        given = list(map(_DTYPE, grads))
        if late:  # a payload may be narrower than the gradient it stands for
            given = [d if c is None else c.dtype for d, c in zip(given, coming, strict=True)]
        if not (
            _equal(map(_T.data_ptr, params), addresses)
            and _equal(map(_T.stride, params), strides)
            and _equal(map(_T.size, params), shapes)
            and _equal(map(_DTYPE, params), dtypes)
            and _equal(map(_DEVICE, params), devices)
            and {torch.strided}.issuperset(map(_LAYOUT, grads))
            and _equal(map(_T.size, grads), shapes)
            and _alike(given, dtypes)
        ):
            return None
        if not late and len(grads) == len(self._params) and all(map(_T.is_contiguous, grads)):
            self._looks = TensorGuards(*params, *grads, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        return _listed(indices, groups, slots, params, grads, coming, sums)


def _listed(
    indices: Sequence[int],
    groups: Sequence[int],
    slots: Sequence[Slot],
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    coming: Sequence[ArrivingGradient | None],
    sums: bool,
) -> list[Work]:
    """Make works of gradients that fit."""
    guards = list(map(guard_of, params))
    plain = map(_T.is_contiguous, grads)
    flats = [
        (grad if guard is None else grad.detach()) if whole and slot.direct else flat_gradient(slot, grad)
        for whole, slot, guard, grad in zip(plain, slots, guards, grads, strict=True)
    ]
    known = [
        guard.square_sum_of(grad if arriving is None else arriving) if sums and guard is not None else None
        for guard, grad, arriving in zip(guards, grads, coming, strict=True)
    ]
    return list(map(Work, indices, groups, slots, flats, known, guards, coming))


def _equal(now: Iterable[Any], before: list[Any]) -> bool:
    return list(now) == before


def _alike(given: list[torch.dtype], own: list[torch.dtype]) -> bool:
    """Tell whether gradients have their parameters' dtypes, or fp32 for 16-bit ones."""
    return given == own or all(
        a is b or (a is torch.float32 and b in _LOW) for a, b in zip(given, own, strict=True)
    )
