"""What a block computes besides its tensors: the modules inside, their settings, and whether they change.

Two blocks whose structures are equal run the same code on tensors of the same shapes, but for the number that
tells a layer its place. A structure also watches what it was made of: an adapter that is switched off, a
module that is exchanged or put into evaluation mode is another structure.
"""

from __future__ import annotations

import functools
import itertools
import operator
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .stand_in import StandIn

__all__ = ["Held", "Structure"]

_TABLES = ("_parameters", "_buffers", "_modules")
#: Dictionaries of functions that others have registered on a module, and that would not run in a replay.
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
_IGNORED = frozenset(
    {*_TABLES, *_HOOKS, "_is_full_backward_hook", "_non_persistent_buffers_set", "_state_dict_hooks",
     "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}
)  # fmt: skip
#: Names of the attribute that numbers the layers of a stack. Whether it matters is found out by a comparison.
_NUMBERS = frozenset(
    {"layer_idx", "layer_index", "layer_id", "layer_number", "block_idx", "block_index", "block_id"}
)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_DEPTH = 6  # of containers in containers that are looked into
_is_not: Callable[[Any, Any], bool] = operator.is_not


class _Same:
    """An object as part of a key: equal to itself alone, and held, so that no other one gets its id."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)

    def __repr__(self) -> str:
        return f"_Same({id(self._value)})"


class Held:
    """Containers, and what was in them: a look at all of them is a few calls."""

    def __init__(self) -> None:
        """Hold none."""
        self._places: list[Any] = []  # containers; of mappings, their values
        self._values: list[Any] = []

    def add(self, place: Any) -> None:
        """Take what a container holds now for what it should."""
        self._places.append(place.values() if isinstance(place, Mapping) else place)
        self._values += self._places[-1]

    def same(self) -> bool:
        """Whether all hold what they did."""
        places, values = self._places, self._values
        if sum(map(len, places)) != len(values):
            return False
        return not any(map(_is_not, itertools.chain.from_iterable(places), values))


class Structure:
    """The structure of one block as it is now.

    Attributes:
        key: Equal for blocks that run the same code on tensors of the same shapes.
    """

    def __init__(self, module: nn.Module) -> None:
        """Look at a module and all inside it."""
        self._held = Held()
        self._hooks: list[tuple[str, dict[int, Any]]] = []
        self._seen: set[int] = set()
        self._names = {id(inner): name for name, inner in module.named_modules(remove_duplicate=False)}
        entries: list[Hashable] = []
        for name, inner in module.named_modules(remove_duplicate=False):
            state = vars(inner)
            self._watch(state)
            entries += self._watch_kinds(type(inner))
            for table in _TABLES:
                self._watch(state[table])
            self._hooks += [(name, hooks) for key in _HOOKS if (hooks := state.get(key)) is not None]
            settings = [
                (key, self._describe(value, inner, name, _DEPTH))
                for key, value in sorted(state.items())
                if key not in _IGNORED and key not in _NUMBERS
            ]
            with torch._C.DisableTorchFunctionSubclass():
                tensors = [(k, _form(t)) for table in _TABLES[:2] for k, t in state[table].items()]
            entries.append((name, type(inner), tuple(settings), tuple(tensors)))
        self.key: Hashable = tuple(entries)

    def _watch(self, place: dict[Any, Any]) -> None:
        if id(place) not in self._seen:
            self._seen.add(id(place))
            self._held.add(place)

    def _watch_kinds(self, kind: type) -> Iterator[Hashable]:
        """Watch what a module has of its class: methods that are exchanged there, and settings."""
        for each in kind.__mro__[:-1]:
            if id(each) not in self._seen:
                self._seen.add(id(each))
                self._held.add(vars(each))
                yield each, tuple(map(_Same, vars(each).values()))

    def _describe(self, value: Any, owner: nn.Module, name: str, depth: int) -> Hashable:
        """Return what makes a setting equal to another one; watch what can change inside it."""
        if type(value) is str and name and value.endswith("." + name):
            return "path", name  # of the module itself, whose beginning numbers the layer
        if type(value) in _PLAIN:
            return type(value), value
        if isinstance(value, StandIn):
            return StandIn
        if isinstance(value, types.MethodType):
            return "method", _Same(value.__func__), self._describe(value.__self__, owner, name, depth - 1)
        if id(value) in self._names:
            return "module", self._names[id(value)]
        inner: tuple[Any, ...] | None = None
        if isinstance(value, functools.partial):
            inner = (value.func, *value.args, *value.keywords.items())
        elif depth > 0 and isinstance(value, types.FunctionType) and value.__closure__:
            inner = (value.__code__, *[_content(cell) for cell in value.__closure__])
        elif depth > 0 and callable(value) and _is_object(value):
            # What stands in the place of a method, and knows its module.
            self._watch(vars(value))
            inner = (type(value), *vars(value).items())
        if inner is not None:
            return "callable", *[self._describe(each, owner, name, depth - 1) for each in inner]
        if depth > 0 and isinstance(value, (list, tuple, set, frozenset)):
            if isinstance(value, list):
                self._held.add(value)
            each = [self._describe(one, owner, name, depth - 1) for one in value]
            return type(value), *(sorted(each, key=repr) if isinstance(value, (set, frozenset)) else each)
        if depth > 0 and isinstance(value, dict):
            self._watch(value)
            return type(value), *[(k, self._describe(v, owner, name, depth - 1)) for k, v in value.items()]
        if _is_object(value):
            self._watch(vars(value))  # a configuration that the modules share
            for each in vars(value).values():
                if type(each) is dict:
                    self._watch(each)
        return "object", _Same(value)

    def holds(self) -> bool:
        """Whether nothing has changed since."""
        return self._held.same()

    def hooked(self) -> str | None:
        """Return the name of a module inside that has hooks of others (empty: the block itself), or None."""
        return next((name for name, hooks in self._hooks if hooks), None)


def _is_object(value: Any) -> bool:
    """Whether a value has attributes of its own that can change."""
    others = (nn.Module, Tensor, type, types.FunctionType)
    return type(getattr(value, "__dict__", None)) is dict and not isinstance(value, others)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _form(tensor: Any) -> Hashable:
    if tensor is None:
        return None
    strides = tuple(tensor.stride()) if tensor.layout is torch.strided else None
    return tuple(tensor.shape), tensor.dtype, strides, getattr(tensor, "codec", None)
