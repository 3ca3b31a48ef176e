"""Guarded Parameters: the true value of a paged weight, readable and writable from anywhere.

While its block is paged, a Parameter is a host tensor (or a file mapped into memory); the copy in a slot is a
cache. Its class is swapped in place, so that every use outside the block goes through here: it waits for an
update under way, notes writes that version counters do not see, and keeps the gradient hooks that are run
when gradients land. The object stays the same: optimizers, tied modules and user variables keep theirs.

Whoever pages the weights guards them; an optimizer that finds a Parameter guarded may return from its step
before the update is done, and leaves in `Guard.pending` what waits for it.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from .arriving import ArrivingGradient, settled_gradient
from .errors import StateError

__all__ = ["Guard", "GuardedParameter", "guard", "guard_of", "release"]

#: Uses that hand out memory which can be written without moving the version counter.
_ESCAPES = frozenset(
    {
        torch.Tensor.data.__get__,  # type: ignore[attr-defined]
        torch.Tensor.data.__set__,  # type: ignore[attr-defined]
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        torch.Tensor.__dlpack__,
        torch.Tensor.data_ptr,
        torch.Tensor.untyped_storage,
        torch.Tensor.storage,
        torch.Tensor.set_,
        torch.Tensor.share_memory_,
    }
)
#: Of these, the ones whose result nobody can follow, or that put other memory in the place of the value.
_FOR_GOOD = frozenset(
    {
        torch.Tensor.data.__set__,  # type: ignore[attr-defined]
        torch.Tensor.data_ptr,
        torch.Tensor.set_,
        torch.Tensor.share_memory_,
    }
)
_HOOKS: dict[Any, str] = {
    torch.Tensor.register_hook: "hooks",
    torch.Tensor.register_post_accumulate_grad_hook: "landed_hooks",
}


#: Uses that read neither the value nor the gradient, so they need not wait for an update under way. Assigning
#: a gradient is one: the update holds the tensor it uses.
_PASSIVE = frozenset(
    {
        torch.Tensor.grad.__set__,  # type: ignore[union-attr]
        torch.Tensor.grad.__delete__,  # type: ignore[union-attr]
        *[
            getattr(torch.Tensor, name).__get__
            for name in (
                "device", "dtype", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_nested",
                "is_quantized", "is_sparse", "itemsize", "layout", "nbytes", "ndim", "requires_grad",
                "retains_grad", "shape",
            )
        ],
        *[
            getattr(torch.Tensor, name)
            for name in (
                "__len__", "dim", "element_size", "get_device", "is_complex", "is_contiguous",
                "is_floating_point", "is_inference", "is_pinned", "is_shared", "is_signed", "nelement",
                "numel", "size", "storage_offset", "stride",
            )
        ],
        *_HOOKS,
    }
)  # fmt: skip
#: Optimizer kernels that write the tensors of their first list and leave their version counters alone.
_SILENT = frozenset(
    kernel
    for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
    if (kernel := getattr(torch, name, None)) is not None
)
_READS_GRAD = torch.Tensor.grad.__get__  # type: ignore[union-attr]
#: Functions that may write what they are given without a name that says so.
_MAY_WRITE = frozenset({"embedding", "embedding_bag"})
Divert = Callable[[Any, Tensor], None]
_table: dict[int, Guard] = {}


class Guard:
    """What is known about one guarded Parameter.

    Attributes:
        pending: Waits for the update under way, or None. If it raises (the update failed, or the wait was
            interrupted) it stays: every use raises or waits again until whoever put it there takes it away.
        rank: Order of use within a forward pass; what is used first is updated first.
        waits: Whether reads that autograd does not record wait for the update under way. If not, they may
            see the value before it, after it, or partly either; everything else waits all the same.
        escaped: Memory of the value was handed out in a way that leaves the version counter alone; a slot
            filled earlier cannot be trusted any more. See `note_filled` for when that is over.
        for_good: Whether it stays so whatever happens.
        hooks: Gradient hooks, run on the sum of a backward pass before it lands in ``.grad``.
        landed_hooks: Hooks run on the Parameter after that.
        divert: Takes a gradient that reached the Parameter itself (a penalty computed on it).
        wide_memory: Gives fp32 host memory for its accumulated gradient, or None; whoever lands gradients
            sets it before the hooks run.
    """

    __slots__ = (
        "__weakref__",
        "_before",
        "_holders",
        "_measured",
        "divert",
        "escaped",
        "for_good",
        "hooks",
        "landed_hooks",
        "parameter",
        "pending",
        "rank",
        "waits",
        "wide_memory",
    )

    def __init__(self, parameter: nn.Parameter, divert: Divert) -> None:
        """Take over the hooks registered before: their handles keep working."""
        self.parameter = weakref.ref(parameter)
        self.pending: Callable[[], None] | None = None
        self.rank = 0
        self.waits = True
        self.escaped = False
        self.for_good = False
        self._holders = -1
        self.divert = divert
        native: Any = parameter  # torch's stubs know these attributes otherwise
        self.hooks: Any = native._backward_hooks or OrderedDict()
        self.landed_hooks: Any = native._post_accumulate_grad_hooks or OrderedDict()
        self.wide_memory: Callable[[Tensor], Tensor] | None = None
        self._before: Tensor | None = None
        self._measured: tuple[TensorWeakRef, int, float | None] | None = None
        if parameter.requires_grad:
            native._backward_hooks = OrderedDict({0: self._arrives})
            native._post_accumulate_grad_hooks = OrderedDict({0: self._arrived})

    def _arrives(self, grad: Tensor) -> None:
        # Set aside what was there, so that what the engine now stores is this pass's share alone.
        parameter = self.parameter()
        if parameter is not None:
            with torch._C.DisableTorchFunctionSubclass():
                self._before, parameter.grad = parameter.grad, None

    def _arrived(self, parameter: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            share, parameter.grad, self._before = parameter.grad, self._before, None
        if share is not None:
            self.divert(parameter, share)

    def give_back(self, parameter: nn.Parameter) -> None:
        """Make the hooks the Parameter's own again."""
        native: Any = parameter
        # Never None: torch would leave ours in place.
        native._backward_hooks = self.hooks
        native._post_accumulate_grad_hooks = self.landed_hooks

    def note_filled(self, parameter: Tensor) -> None:
        """Note that a slot is being filled with the value as it is now.

        While nothing has escaped, whoever holds the value's memory are ours, and are counted. Once it has,
        and no more than those hold it again, nobody can write it unseen any more: `escaped` ends. For frozen
        values only: an optimizer comes and goes as a holder of trained ones, which are brought again after
        each update anyway.

        Args:
            parameter: The Parameter, seen past its own class.
        """
        if parameter.requires_grad or self.for_good or parameter.layout is not torch.strided:
            return
        storage = parameter.untyped_storage()
        # There is one Python object for it, whoever asks, which counts once.
        holders = int(torch._C._storage_Use_Count(storage._cdata)) + sys.getrefcount(storage)
        if not self.escaped:
            self._holders = holders
        elif holders <= self._holders:
            self.escaped = False

    def note_square_sum(self, grad: Tensor, value: float | None) -> None:
        """Keep the sum of squares of a gradient that has just landed.

        Args:
            grad: What ``.grad`` holds now; not kept alive.
            value: Sum of the squares of its elements in the order of memory, in float64. None: it comes
                later, by `complete_square_sum`, and counts if nobody has read ``.grad`` by then.
        """
        self._measured = TensorWeakRef(grad), grad._version, value

    def complete_square_sum(self, grad: Tensor, value: float) -> None:
        """Bring a sum of squares that was announced; arguments are those of `note_square_sum`."""
        noted = self._measured
        if noted is not None and noted[2] is None and noted[0]() is grad:
            self._measured = noted[0], noted[1], value

    def square_sum_of(self, grad: Tensor) -> float | None:
        """Return what was noted for a gradient, or None.

        None as soon as it is another tensor, its version has moved, or somebody has read ``.grad`` through
        the Parameter since it landed: what was read can be edited without a trace (``p.grad.data``).

        Args:
            grad: What ``.grad`` holds now, read without asking the Parameter's class.
        """
        if self._measured is None:
            return None
        reference, version, value = self._measured
        return value if reference() is grad and grad._version == version else None

    def wait(self) -> None:
        """Wait for the update under way, if any.

        Raises:
            Exception: The update failed; `pending` stays.
        """
        pending = self.pending
        if pending is not None:
            pending()
            if self.pending is pending:
                self.pending = None


class GuardedParameter(nn.Parameter):
    """A Parameter whose uses wait for its pending update; see the module's documentation."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Wait for guarded arguments, note escapes, then run the operation on plain tensors."""
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            _refuse_grad(args[1] if len(args) > 1 else kwargs.get("inputs"))
        patient: list[tuple[Tensor, Guard]] = []  # read now; waited for after that if memory was handed out
        for value in (*args, *kwargs.values()):
            if type(value) is cls:
                entry = _table.get(id(value))
                if entry is not None:
                    if entry.pending is not None and func not in _PASSIVE:
                        if entry.waits or not _only_reads(func, kwargs):
                            entry.wait()
                        else:
                            patient.append((value, entry))
                    if func in _ESCAPES:
                        entry.escaped = True
                        entry.for_good = entry.for_good or func in _FOR_GOOD
                    if func == _READS_GRAD:
                        entry._measured = None
            elif isinstance(value, (list, tuple)):
                for each in value:
                    if type(each) is cls:
                        entry = _table.get(id(each))
                        if entry is not None and not entry.waits and _only_reads(func, kwargs):
                            patient.append((each, entry))
                        else:
                            _wait(each)
        place = _HOOKS.get(func)
        if place is not None and (entry := _table.get(id(args[0]))) is not None:
            hooks = getattr(entry, place)
            handle = RemovableHandle(hooks)
            hooks[handle.id] = args[1] if len(args) > 1 else kwargs["hook"]
            return handle
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if type(result) is ArrivingGradient and func == _READS_GRAD:
                result = settled_gradient(args[0])
            if func in _SILENT:
                torch.autograd.graph.increment_version(args[0] if args else kwargs["self"])
            _note_views((args, kwargs), result)
            for value, entry in patient:
                # A view can be written through later, and a state_dict is made of views.
                if _shares(value, result):
                    entry.wait()
            return result

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copy to an ordinary Parameter."""
        if id(self) not in memo:
            _wait(self)
            with torch._C.DisableTorchFunctionSubclass():
                copy = self.detach().clone(memory_format=torch.preserve_format)
                memo[id(self)] = nn.Parameter(copy, self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __copy__(self) -> nn.Parameter:
        """Make an ordinary Parameter of the same memory."""
        _wait(self)
        entry = _table.get(id(self))
        if entry is not None:
            entry.escaped = True
        with torch._C.DisableTorchFunctionSubclass():
            return nn.Parameter(self.detach(), self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary Parameter."""
        _wait(self)
        with torch._C.DisableTorchFunctionSubclass():
            plain: Any = nn.Parameter(self.detach(), self.requires_grad)
            return plain.__reduce_ex__(protocol)


def _refuse_grad(inputs: Any) -> None:
    for each in (inputs,) if isinstance(inputs, Tensor) else inputs or ():
        if guard_of(each) is not None:
            raise StateError(
                f"torch.autograd.grad for a paged weight of shape {tuple(each.shape)}: its gradient does not "
                "pass through the Parameter; call backward() and read its .grad, or unwrap the model first"
            )


def _only_reads(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a function makes something new of a value, outside of any graph, and writes nothing."""
    if torch.is_grad_enabled() or func in _ESCAPES or func == _READS_GRAD:
        return False
    if kwargs.get("out") is not None or kwargs.get("inplace"):
        return False
    name = str(getattr(func, "__name__", "_")).partition(".")[0]  # an overload is "mul_.Tensor"
    writes = (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__set", "__del"))
    return not writes and name not in _MAY_WRITE


def _note_views(given: Any, result: Any) -> None:
    """A view can hand out memory in turn (``p.detach().numpy()``), and nobody tells us then.

    ``as_subclass`` alone makes one that we are not told of.
    """
    if not isinstance(result, (Tensor, list, tuple)):
        return
    results = [r for r in _flat(result) if isinstance(r, Tensor)]
    for parameter in _flat(given) if results else ():
        entry = _table.get(id(parameter)) if type(parameter) is GuardedParameter else None
        if entry is not None and not entry.escaped:
            entry.escaped = _shares(parameter, [r for r in results if r is not parameter])


def _shares(parameter: Tensor, result: Any) -> bool:
    """Whether a result is, or holds, a tensor over the Parameter's memory."""
    memory = parameter.untyped_storage()._cdata
    return any(
        r.layout is torch.strided and r.untyped_storage()._cdata == memory
        for r in _flat(result)
        if isinstance(r, Tensor) and not r.is_meta and _has_storage(r)
    )


def _flat(value: Any) -> Iterator[Any]:
    """Go through lists, tuples and dictionaries, as deep as functions take and return them."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def _has_storage(tensor: Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # wrappers, functional tensors
        return False
    return True


def _wait(parameter: Tensor) -> None:
    entry = _table.get(id(parameter))
    if entry is not None and entry.pending is not None:
        entry.wait()


def guard(parameter: nn.Parameter, divert: Divert) -> Guard:
    """Guard a Parameter in place.

    Args:
        parameter: An ordinary ``nn.Parameter`` (exactly this class).
        divert: Called with the Parameter and the gradient of a pass that reached it directly.

    Returns:
        Its guard; the same one if it is guarded already.
    """
    known = guard_of(parameter)
    if known is not None:
        return known
    key = id(parameter)
    entry = Guard(parameter, divert)
    entry.parameter = weakref.ref(parameter, lambda _: _table.pop(key, None) and None)
    _table[key] = entry
    parameter.__class__ = GuardedParameter
    return entry


def guard_of(parameter: Tensor) -> Guard | None:
    """Return the guard of a Parameter, or None."""
    entry = _table.get(id(parameter))
    return entry if entry is not None and entry.parameter() is parameter else None


def release(parameter: nn.Parameter) -> None:
    """Wait for what is pending and make the Parameter an ordinary one again; hooks added meanwhile stay.

    Args:
        parameter: A guarded Parameter; any other is left alone.

    Raises:
        Exception: The pending update failed. The Parameter is an ordinary one all the same; only an
            interrupted wait leaves it guarded.
    """
    entry = guard_of(parameter)
    if entry is None:
        return
    failure = None
    try:
        entry.wait()
    except Exception as error:
        failure = error
    try:
        with torch._C.DisableTorchFunctionSubclass():
            settled_gradient(parameter)
    except Exception as error:
        failure = failure or error
    _table.pop(id(parameter), None)
    parameter.__class__ = nn.Parameter
    entry.give_back(parameter)
    if failure is not None:
        raise failure
