"""What a block computes besides its tensors: the modules inside, their settings, and whether they change.

Two blocks whose structures are equal run the same code on tensors of the same shapes, but for the number that
tells a layer its place. A structure also watches what it was made of: an adapter that is switched off, a
module that is exchanged or put into evaluation mode is another structure.
"""

from __future__ import annotations

import collections
import functools
import random
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from . import _C
from .stand_in import StandIn

__all__ = ["RANDOM", "Held", "Structure", "draws", "foreign"]

RANDOM = "it may draw random numbers of Python or NumPy, or from a generator of its own"

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
_DEPTH = 12  # of containers in containers that are looked into
_MOST = 4096  # of containers and objects, beyond the modules of a block
#: Packages whose code looks up nothing that changes what a block computes, but for what is in a form.
_OURS = frozenset(
    {"torch", "ts_core", "ts_paging", "ts_quant", "ts_optim", "ts_fused", "ts_hf", "trainstream"}
)
#: What has nothing inside that is data of Python.
_LEAVES = (
    Tensor, StandIn, type, types.BuiltinFunctionType, types.ModuleType, types.CodeType, weakref.ref, range,
)  # fmt: skip


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
    """Containers, and what was in them: a look at all of them is a few calls.

    Attributes:
        lost: What cannot be followed, or empty.
    """

    def __init__(self, known: Iterable[Any] = ()) -> None:
        """Hold none.

        Args:
            known: What others look after: it is not followed.
        """
        self.lost = ""
        self._places: list[Any] = []  # what can be gone through; a dictionary stands for its values
        self._expected: list[tuple[Any, ...]] = []
        self._known = {id(each) for each in known}
        self._followed: dict[int, Any] = {}  # held, so that no other one gets its id

    def add(self, place: Any) -> None:
        """Take what a container holds now for what it should."""
        if type(place) is dict:
            self._places.append(place)
            self._expected.append(tuple(place.values()))
        else:
            self._take(place.values() if isinstance(place, Mapping) else place)

    def _take(self, place: Any) -> None:
        self._places.append(place)
        self._expected.append(tuple(place))

    def same(self) -> bool:
        """Whether all hold what they did: the same objects, in the same order."""
        return _C.same(self._places, self._expected)

    def follow(self, value: Any, depth: int = _DEPTH) -> None:
        """Hold what a value has inside, however deep, as far as that is data that can change."""
        if type(value) in _PLAIN or isinstance(value, _LEAVES) or id(value) in self._known:
            return
        if id(value) in self._followed:
            return
        if depth == 0 or len(self._followed) >= _MOST:
            self.lost = self.lost or "it holds more than can be looked at in each pass"
            return
        self._followed[id(value)] = value
        if draws(value) or isinstance(value, torch.Generator):
            self.lost = RANDOM
            return
        for each in self._inside(value):
            self.follow(each, depth - 1)

    def _inside(self, value: Any) -> Iterable[Any]:
        """Hold one value's own content; returns what to follow from there."""
        if isinstance(value, (dict, types.MappingProxyType)):
            self._take(value.keys())
            self.add(value)
            return list(value.values())
        if isinstance(value, (list, set, collections.deque)):
            self._take(value)
        if isinstance(value, (list, set, collections.deque, tuple, frozenset)):
            return list(value)
        if isinstance(value, functools.partial):
            return value.func, value.args, value.keywords
        if isinstance(value, types.MethodType):
            return (value.__self__,)
        if isinstance(value, types.FunctionType):
            cells = (value.__closure__ or ()) if foreign(value.__module__) else ()
            for cell in cells:
                self._take(_Looked(functools.partial(_content, cell)))
            return [value.__defaults__, value.__kwdefaults__, *map(_content, cells)]
        if hasattr(value, "tobytes") and type(value).__module__ == "numpy":
            self._take(_Looked(_Bytes(value)))
            return ()
        return self._inside_object(value)

    def _inside_object(self, value: Any) -> Iterable[Any]:
        kind, state = type(value), getattr(value, "__dict__", None)
        found: list[Any] = []
        if type(state) is dict:
            self.add(state)
            found += state.values()
        if isinstance(value, nn.Module):
            return found
        if not foreign(kind.__module__) and kind is not types.SimpleNamespace:
            return ()  # a logger, a lock: it leads anywhere
        hashable: Any = kind
        for name in _slots(hashable):
            self._take(_Looked(functools.partial(getattr, value, name, None)))
            found.append(getattr(value, name, None))
        for each in kind.__mro__:
            if foreign(each.__module__) and id(each) not in self._followed:
                self._followed[id(each)] = each
                self.add(vars(each))
                found += self.of_class(each)
        return found

    @staticmethod
    def of_class(kind: type) -> list[Any]:
        """Return the data that a class has, but for constants."""
        skipped = (types.FunctionType, property, classmethod, staticmethod)
        held = [(k, v) for k, v in vars(kind).items() if not k.startswith("__")]
        return [v for _, v in held if not isinstance(v, skipped)]


class _Looked:
    """A place that holds one thing: what a function returns now."""

    def __init__(self, look: Callable[[], Any]) -> None:
        self._look = look

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        yield self._look()


class _Bytes:
    """Returns the same object for as long as an array has the same bytes."""

    def __init__(self, array: Any) -> None:
        self._array, self._bytes = array, array.tobytes()

    def __call__(self) -> Any:
        now = self._array.tobytes()
        if now != self._bytes:
            self._bytes = now
        return self._bytes


@functools.lru_cache(maxsize=1024)
def _slots(kind: Any) -> tuple[str, ...]:
    """Return the names of what a class written in Python keeps in slots."""
    return tuple(
        [
            name
            for each in kind.__mro__
            if "__slots__" in vars(each)
            for name, held in vars(each).items()
            if isinstance(held, types.MemberDescriptorType)
        ]
    )


def foreign(module: str | None) -> bool:
    """Whether code of a module is looked into: it is not PyTorch's, the standard library's or our own."""
    package = str(module or "").partition(".")[0]
    return package not in _OURS and package not in sys.stdlib_module_names


def draws(value: Any) -> bool:
    """Whether random numbers are drawn from a value that are not the device's."""
    module = str(type(value).__module__)
    return isinstance(value, random.Random) or module.startswith("numpy.random")


class Structure:
    """The structure of one block as it is now.

    Attributes:
        key: Equal for blocks that run the same code on tensors of the same shapes.
        lost: What inside cannot be followed, or empty.
    """

    def __init__(self, module: nn.Module) -> None:
        """Look at a module and all inside it."""
        self._held = Held(module.modules())
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
            for key, value in state.items():
                if key not in _IGNORED:
                    self._held.follow(value)
            with torch._C.DisableTorchFunctionSubclass():
                tensors = [(k, _form(t)) for table in _TABLES[:2] for k, t in state[table].items()]
            for tensor in [t for table in _TABLES[:2] for t in state[table].values()]:
                if hasattr(tensor, "packed"):
                    self._watch(vars(tensor))  # the tensors that it consists of are its attributes
            entries.append((name, type(inner), tuple(settings), tuple(tensors)))
        self._hooked = [hooks for _, hooks in self._hooks]
        self.key: Hashable = tuple(entries)
        self.lost = self._held.lost

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
                if foreign(each.__module__):
                    for value in Held.of_class(each):
                        self._held.follow(value)
                yield each, tuple(map(_Same, vars(each).values()))

    def _describe(self, value: Any, owner: nn.Module, name: str, depth: int) -> Hashable:
        """Return what makes a setting equal to another one."""
        if type(value) is str and name and value.endswith("." + name):
            return "path", name  # of the module itself, whose beginning numbers the layer
        if type(value) in (float, complex):
            return type(value), repr(value)  # zeros have signs
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
            inner = (type(value), *vars(value).items())
        if inner is not None:
            return "callable", *[self._describe(each, owner, name, depth - 1) for each in inner]
        if depth > 0 and isinstance(value, (list, tuple, set, frozenset)):
            each = [self._describe(one, owner, name, depth - 1) for one in value]
            return type(value), *(sorted(each, key=repr) if isinstance(value, (set, frozenset)) else each)
        if depth > 0 and isinstance(value, dict):
            return type(value), *[(k, self._describe(v, owner, name, depth - 1)) for k, v in value.items()]
        return "object", _Same(value)

    def holds(self) -> bool:
        """Whether nothing has changed since."""
        return self._held.same()

    def hooked(self) -> str | None:
        """Return the name of a module inside that has hooks of others (empty: the block itself), or None."""
        if not any(self._hooked):
            return None
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
