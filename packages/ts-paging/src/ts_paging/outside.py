"""What a block computes with besides its arguments and what is in its modules.

A replay sees none of the Python of a block. So before a block is recorded, its code runs once more and is
watched: which tensors it reads, which names it looks up, whether it draws random numbers of Python. A tensor
from elsewhere cannot be followed; a name can: as long as it stands for the same, the code does the same.
"""

from __future__ import annotations

import builtins
import contextvars
import dis
import functools
import gc
import operator
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from .own import parts_of
from .recording import CannotRecord
from .structure import RANDOM, Held, draws, foreign

__all__ = ["FromOutside", "Names", "Reads", "backwards_of", "leads_elsewhere"]

_REFUSED = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
#: Takes what Python has made of numbers just now.
_FRESH = "aten::lift_fresh"
_COPIES = ("aten::_to_copy", "aten::copy_")
_Leaf: Any = type(get_gradient_edge(torch.zeros((), requires_grad=True)).node)
_GONE = object()
_is_not: Callable[[Any, Any], bool] = operator.is_not
_CONSTANT = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type)
_FIXED = (*_CONSTANT, functools.partial, nn.Module)


class FromOutside(Exception):
    """A block computes with a tensor that has a graph and is neither an argument nor in its modules."""


def leads_elsewhere(outputs: Iterable[Tensor], begin: Any) -> bool:
    """Whether a graph leads to tensors that need a gradient and are not what it began with.

    Args:
        outputs: Results of the graph.
        begin: The node that it began with.
    """
    seen: set[Any] = {begin, None}
    todo: list[Any] = [tensor.grad_fn for tensor in outputs]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            if type(node) is _Leaf:
                return True
            todo += [edge[0] for edge in node.next_functions]
    return False


def backwards_of(outputs: Iterable[Tensor], begin: Any) -> Iterator[Any]:
    """Return the backward functions in a graph that are written in Python."""
    seen: set[Any] = {begin, None}
    todo: list[Any] = [tensor.grad_fn for tensor in outputs]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            written = getattr(type(node), "_forward_cls", None)
            if written is not None:
                yield written.backward
            todo += [following for following, _ in node.next_functions]


def _address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        raise CannotRecord(f"it works on a {type(tensor).__name__}") from None


class Reads(TorchDispatchMode):
    """Watches which tensors operations read.

    Attributes:
        strange: Those that are neither known nor results of operations, each once.
    """

    def __init__(self, known: Iterable[int], device: torch.device) -> None:
        """Know storages by their address.

        Args:
            known: Addresses.
            device: Where all of it is to happen.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {0, *known}
        self._device = device.type
        self.strange: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation.

        Raises:
            CannotRecord: The host has to know its result, or it makes something on another device.
        """
        kwargs = kwargs or {}
        name = func._schema.name
        if any(tag in func.tags for tag in _REFUSED):
            raise CannotRecord(f"{name} gives a result whose size or value the host has to know")
        if any(isinstance(each, torch.Generator) for each in (*args, *kwargs.values())):
            raise CannotRecord(RANDOM)
        for tensor in self._of((args, kwargs)):
            # One number of the host is part of what is launched; more, or a copy of it, is read by the host.
            elsewhere = tensor.device.type not in (self._device, "meta")
            if elsewhere and (tensor.dim() or name in _COPIES):
                raise CannotRecord(f"{name} reads a tensor on {tensor.device}")
            address = _address(tensor)
            if address not in self._known and name != _FRESH:
                self.strange.append(tensor)
            self._known.add(address)
        made = func(*args, **kwargs)
        for tensor in self._of(made):
            if tensor.device.type not in (self._device, "meta") and name != _FRESH:
                raise CannotRecord(f"{name} makes a tensor on {tensor.device}")
            self._known.add(_address(tensor))
        return made

    @staticmethod
    def _of(values: Any) -> Iterator[Tensor]:
        for each in tree_flatten(values)[0]:
            if isinstance(each, Tensor):
                for part in parts_of(each):
                    if part.layout is torch.strided and part.numel():
                        yield part


class Names:
    """Names outside a block that its code looks up, and what each stood for.

    A context: what Python calls in it is noted, but for PyTorch, the standard library and our own code.

    Attributes:
        hidden: What cannot be followed, or empty.
        ready: A run has been through.
    """

    def __init__(self, within: Iterable[Any] = ()) -> None:
        """Nothing is noted yet.

        Args:
            within: The modules of the block, which its structure looks after.
        """
        self.hidden, self.ready = "", False
        self._codes: dict[types.CodeType, Mapping[str, Any]] = {}
        self._free: dict[types.CodeType, dict[str, Any]] = {}
        self._names: list[tuple[Mapping[str, Any], str]] = []
        self._values: list[Any] = []
        self._within = list(within)
        self._held = Held(self._within)
        self._called_on: dict[int, Any] = {}
        self._made: dict[int, Any] = {}
        self._variables: list[tuple[contextvars.ContextVar[Any], Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._seen: set[Any] = set()

    def __enter__(self) -> Names:
        """Begin to note."""
        self._before = sys.getprofile()
        self._drawn = _drawn()
        # Callbacks of the collector, and finalizers that it runs, would be taken for the block's own code.
        self._collects = gc.isenabled()
        gc.disable()
        sys.setprofile(self._called)
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """End, and look up what the names stand for."""
        sys.setprofile(self._before)
        if self._collects:
            gc.enable()
        if kind is not None:
            return
        if _drawn() != self._drawn:
            self.hidden = RANDOM
        for code, place in self._codes.items():
            for chain in _chains(code):
                self._follow(place, chain)
        self._look_into_closures()
        for key, value in self._called_on.items():
            if key not in self._made:
                self._held.follow(value)
        self._codes, self._free, self._called_on, self._made = {}, {}, {}, {}
        self.hidden = self.hidden or self._held.lost
        self.ready = True

    def _called(self, frame: types.FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "c_call":
            if draws(getattr(argument, "__self__", None)):
                self.hidden = RANDOM
            return
        if event != "call":
            return
        if frame.f_globals.get("__name__") == "random":
            self.hidden = RANDOM
        if not _foreign(frame.f_globals):
            return
        if code.co_argcount and code.co_varnames[0] == "self":
            owner = frame.f_locals.get("self")
            if not isinstance(owner, Tensor):
                (self._made if code.co_name == "__init__" else self._called_on).setdefault(id(owner), owner)
        if code in self._codes:
            return
        self._codes[code] = frame.f_globals
        if code.co_freevars:
            values = frame.f_locals
            self._free[code] = {name: values[name] for name in code.co_freevars if name in values}

    def note(self, function: Any) -> None:
        """Also note a function that another thread calls."""
        code, place = getattr(function, "__code__", None), getattr(function, "__globals__", None)
        if code is not None and place is not None and _foreign(place):
            self._codes.setdefault(code, place)

    def _follow(self, place: Mapping[str, Any], chain: Sequence[str]) -> None:
        """Remember what a name stands for, and of what it stands for the attributes that are asked for."""
        for number, name in enumerate(chain):
            value = place.get(name, _GONE)
            if (id(place), name) not in self._seen and not (value is _GONE and hasattr(builtins, name)):
                self._seen.add((id(place), name))
                self._names.append((place, name))
                self._values.append(value)
                self._look_into(value)
            asked = chain[number + 1 : number + 2]
            if isinstance(value, type):
                place = _of_class(value, asked[0]) if asked else {}
            else:
                own = getattr(value, "__dict__", None)
                place = own if type(own) is dict else {}
                if asked and asked[0] not in place and not isinstance(value, types.ModuleType):
                    place = _of_class(type(value), asked[0])
            if not place:
                return

    def _look_into(self, value: Any) -> None:
        """Remember what an object, or a container, holds."""
        if id(value) in self._seen or isinstance(value, (*_CONSTANT, Tensor)):
            return
        if isinstance(value, contextvars.ContextVar):
            self._seen.add(id(value))
            self._variables.append((value, value.get(None)))
        else:
            self._held.follow(value)

    def _look_into_closures(self) -> None:
        """Find the variables of enclosing functions, where these are data."""
        made_inside = {each for code in self._codes for each in code.co_consts}
        data = {
            code: held
            for code, held in self._free.items()
            if code not in made_inside and not all(isinstance(v, _FIXED) for v in held.values())
        }
        if not data:
            return
        functions = [f for f in gc.get_referrers(*data) if isinstance(f, types.FunctionType)]
        for code, held in data.items():
            found = False
            for function in functions:
                if function.__code__ is not code:
                    continue
                cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
                if all(_cell(cells[name]) is value for name, value in held.items()):
                    found = True
                    self._cells += [(cells[name], value) for name, value in held.items()]
                    for value in held.values():
                        self._look_into(value)
            if not found:
                self.hidden = f"{code.co_name} uses variables of a function that has ended"

    def changed(self) -> str:
        """Return what stands for something else now, or is other inside; empty: nothing."""
        now = [place.get(name, _GONE) for place, name in self._names]
        if any(map(_is_not, now, self._values)):
            for (_, name), one, two in zip(self._names, now, self._values, strict=True):
                if one is not two and not _alike(one, two):
                    return name
        if not self._held.same():
            return "a list, a dictionary or an object"
        for variable, value in self._variables:
            if variable.get(None) is not value:
                return variable.name
        if any(_cell(cell) is not value for cell, value in self._cells):
            return "a variable of an enclosing function"
        return ""


def _of_class(kind: type, name: str) -> Mapping[str, Any]:
    """Return where a class, or one it comes from, has an attribute; empty: nowhere."""
    return next((vars(each) for each in kind.__mro__ if name in vars(each)), {})


def _alike(one: Any, two: Any) -> bool:
    return type(one) is type(two) and type(one) in (bool, int, float, str) and repr(one) == repr(two)


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # emptied
        return _GONE


def _foreign(place: Mapping[str, Any]) -> bool:
    return foreign(str(place.get("__name__") or ""))


def _drawn() -> Any:
    """States of Python's generator and NumPy's, in a form that can be compared."""
    numpy: Any = sys.modules.get("numpy")
    state = () if numpy is None else numpy.random.get_state()
    return random.getstate(), tuple(each.tobytes() if hasattr(each, "tobytes") else each for each in state)


@functools.lru_cache(maxsize=1024)
def _chains(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """Return the global names that code looks up, with the attributes that it asks these for at once."""
    found: dict[tuple[str, ...], None] = {}
    chain: list[str] = []
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain.append(step.argval)
        elif step.opname != "EXTENDED_ARG":
            if chain:
                found[tuple(chain)] = None
            chain = [step.argval] if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else []
    return tuple(found)
