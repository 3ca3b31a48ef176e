"""Block mode: a block as one node of the graph, with a graph of its own inside.

The outer graph sees one function from the block's inputs to its outputs. Inside, the block runs on tensors
that begin a graph of their own; backward brings the weights once, at its top, and then goes through that
graph, or through that of a second run. So no saved tensor is asked about, and a block can be captured and
replayed.

That is right only while nothing leaves a block but its outputs, and nothing else uses what comes in. What
stands against it is looked for at every call; such a block runs in graph mode, and `BlockMode.reasons` says
why. Every block's first run is one in graph mode that is watched.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ts_core.errors import StateError
from ts_core.memory import format_bytes

from .activations import park_hook
from .autocast import autocast_now
from .block import PagedBlock, _version, refuse_create_graph, written_between
from .buffers import as_they_were
from .calls import Call, OpaqueArgument, flatten
from .outside import FromOutside, Names, leads_elsewhere
from .own import Own
from .paying import Timing
from .rng import RandomState, as_it_was
from .soleuse import comes_twice, stands_against, watch_use, what_others_sent
from .structure import RANDOM, Structure

if TYPE_CHECKING:
    from .captured import Captures

__all__ = ["BlockMode", "Interior", "Run"]

_will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
_has_any_global_hook: Callable[[], bool] = nn.modules.module._has_any_global_hook
_top_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
_FROM_OUTSIDE = "it uses a tensor with a graph that is neither an argument nor in its modules"
_RESTLESS = 3  # times that a block may be found changed before its changes are taken for a habit


class _Inside(torch.autograd.Function):
    """Where the graph inside a block begins; asked for gradients only by what has left the block."""

    @staticmethod
    def forward(ctx: Any, name: str, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        ctx.set_materialize_grads(False)
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        raise StateError(
            f"block {ctx.name!r}: a tensor that was made inside it left it other than as its output, and "
            "backward came through that one; wrap the model with capture=False"
        )


class _Block(torch.autograd.Function):
    """One run of a block, seen from outside."""

    @staticmethod
    def forward(ctx: Any, run: Run, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        return run.forward(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        run = ctx.run
        refuse_create_graph(run.block)
        if run.timing is not None:
            run.timing.mark()
        with torch.no_grad():
            found = run.backward(grads)
        if run.timing is not None:
            run.timing.mark()
        return None, None, *found


_inside = cast(Callable[..., tuple[Tensor, ...]], _Inside.apply)
_block = cast(Callable[..., tuple[Tensor, ...]], _Block.apply)


class Interior:
    """What block mode knows about one block.

    Attributes:
        structure: As it was at the latest look.
        sites: (place, key, Parameter) of the Parameters that are not paged.
        residents: These Parameters, each once.
        reason: Why it runs in graph mode, or empty.
        probed: Its first run was watched, and went well.
        plain: None of these wraps other tensors, as a packed one does.
        own: Parameters that are not paged, and buffers.
        alone: Its recordings serve no other block.
        changes: How often its structure was found changed.
        renewals: How often what its code looks up outside was found changed.
        measuring, idle: How long runs take is being measured; its latest run needed no gradient.
        looking: What its next run in graph mode is looked at with.
    """

    def __init__(self, block: PagedBlock) -> None:
        """Look at the block."""
        self.changes = 0
        self.reason = ""
        self.alone = False
        self.renewals = 0
        self.measuring = self.idle = False
        self.looking: Names | None = None
        self.look(block)

    def look(self, block: PagedBlock) -> None:
        """Take the structure of now; the next run is watched again."""
        self.structure = Structure(block.module)
        paged = {id(parameter) for parameter in block.parameters}
        self.sites: list[tuple[dict[str, Any], str, nn.Parameter]] = [
            (owner._parameters, key, parameter)
            for owner in block.module.modules()
            for key, parameter in owner._parameters.items()
            if parameter is not None and id(parameter) not in paged
        ]
        self.residents = list({id(p): p for *_, p in self.sites}.values())
        self.plain = all(type(p.data) is Tensor for p in self.residents)
        buffers = [b for m in block.module.modules() for b in m._buffers.values() if b is not None]
        self.own = Own([*self.residents, *buffers])
        # Kept, so that the engine can be asked whether it will come to it.
        self.anchor = torch.zeros((), device=block.pager.device, requires_grad=True)
        self.anchor_node = get_gradient_edge(self.anchor).node
        self.probed = False
        self.known: dict[Any, Any] = {}  # what captures know about this block
        self.generation = -1

    @contextlib.contextmanager
    def bound(self, tensors: dict[int, Tensor]) -> Iterator[None]:
        """Put tensors into the places of Parameters that are not paged, by the id of these."""
        changed = [(place, key, p) for place, key, p in self.sites if id(p) in tensors]
        for place, key, parameter in changed:
            place[key] = tensors[id(parameter)]
        try:
            yield
        finally:
            for place, key, parameter in changed:
                place[key] = parameter


class Run:
    """One run of a block forward, and its backward, eagerly.

    Attributes:
        block: The block.
        mode: Its block mode.
        call: Its arguments.
        wanted: Indices of those tensors among them that need a gradient.
        trained: Indices of the paged Parameters that do.
        residents: The others that do.
        policy: ``keep``, ``offload`` or ``recompute``.
        timing: Measures how long it takes, if that is asked.
    """

    timing: Timing | None = None

    def __init__(
        self, mode: BlockMode, block: PagedBlock, interior: Interior, call: Call, function: Any, policy: str
    ) -> None:
        """Find out what needs gradients."""
        self.mode, self.block, self.interior, self.call = mode, block, interior, call
        self.function, self.policy = function, policy
        self.wanted = [index for index, leaf in enumerate(call.leaves) if leaf.requires_grad]
        with torch._C.DisableTorchFunctionSubclass():
            self.trained = [i for i, p in enumerate(block.parameters) if p.requires_grad]
            self.residents = [p for p in interior.residents if p.requires_grad]
        self.stamp = block._stamp
        self.flat: list[Any] = []
        self.spec: TreeSpec | None = None
        self.places: list[int] = []
        self._outputs: list[Tensor] = []
        self._node: Any = None
        self._own, self._own_versions = list[Tensor](), list[int]()  # read besides: Parameters not paged
        self._standing: list[tuple[Tensor | None, int]] = []
        self._spent = False
        self._parked: weakref.ref[Any] | None = None
        # Whose outputs came in, and what their gradients have to be if nobody else uses them.
        self._makers = [_maker(call.leaves[index]) for index in self.wanted]
        self._expected: dict[int, Tensor] = {}
        self.stand: dict[int, Tensor] = {}  # what stands for Parameters that are not paged, by their id

    def outer(self) -> Any:
        """Run, as one node of the graph that is being recorded."""
        call = self.call
        tensors = [call.leaves[index] for index in self.wanted] + list(self.residents)
        made = _block(self, self.interior.anchor if self.trained else None, *tensors)
        if self.timing is not None:
            self.timing.mark()
        flat, spec = self.flat, self.spec
        self.flat = []
        assert spec is not None
        for index, tensor in zip(self.places, made, strict=True):
            flat[index] = tensor
        return flat[0] if spec.is_leaf() else tree_unflatten(flat, spec)

    # -- forward

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Compute the outputs that need a gradient, without the outer graph.

        Args:
            tensors: The wanted arguments, then the trained residents.
        """
        call = self.call
        # Others', for a second run: seen without their graph, so that whoever else holds them can be told.
        call.leaves = [leaf.detach() if leaf.requires_grad else leaf for leaf in call.leaves]
        self._versions = [_version(leaf) for leaf in call.leaves]
        again = self.policy == "recompute"
        self._random = RandomState(self.block.pager.device)
        if again:
            self._cast = autocast_now(self.block.pager.device.type)
            self._buffers = self.block._buffers_now()
            self._own = list(self.interior.residents)
            self._own_versions = [_version(tensor) for tensor in self._own]
        flat, self.spec = self.inner(call.leaves)
        self.expect_closed()
        if again:
            self.block._expect_constant(self._buffers)
            self._standing = self.block._residents.now()
        outputs = self._outputs
        self.flat = [_own(value, self.block) for value in flat]
        if again:
            self._outputs, self._node = [], None
        else:
            self.call = Call([], ((), ()))
        if [_version(leaf) for leaf in call.leaves] != self._versions:
            raise StateError(
                f"block {self.block.name!r}: it writes into its inputs in place, which it did not do when it "
                "first ran; wrap the model with capture=False"
            )
        self._parked = self.block.pager.activations.latest()
        return tuple([self.flat[index] for index in self.places]) if outputs else ()

    def inner(self, leaves: Sequence[Tensor]) -> tuple[list[Any], TreeSpec]:
        """Run the block on tensors that begin a graph of their own.

        Args:
            leaves: The tensors among its arguments.

        Returns:
            Its outputs, flat, and how they belong together; `_outputs` are those with a graph.
        """
        block, wanted = self.block, self.wanted
        count, residents = len(wanted), len(self.residents)
        with torch.enable_grad():
            begin = _inside(
                block.name, self.interior.anchor, *[leaves[i] for i in wanted],
                *[self.stand.get(id(p), p) for p in self.residents],
                *[block.views[i] for i in self.trained],
            )  # fmt: skip
            node = begin[0].grad_fn
            given = list(leaves)
            for index, tensor in zip(wanted, begin, strict=False):
                given[index] = tensor
            bound = list(block.views)
            for index, tensor in zip(self.trained, begin[count + residents :], strict=True):
                bound[index] = tensor
            own = self.stand | {id(p): begin[count + i] for i, p in enumerate(self.residents)}
            args, kwargs = self.call.rebuild(given)
            del begin, given
            block.runs += 1
            with self._saving(leaves), block._bound(bound), self.interior.bound(own):
                output = self.function(*args, **kwargs)
        flat, spec = tree_flatten(output)
        self.places = [i for i, t in enumerate(flat) if isinstance(t, Tensor) and t.requires_grad]
        self._outputs, self._node = [flat[index] for index in self.places], node
        return flat, spec

    def expect_closed(self) -> None:
        """Look at the graph inside; random numbers are as before where it leads elsewhere.

        Raises:
            FromOutside: It does: a gradient would be lost.
        """
        if leads_elsewhere(self._outputs, self._node):
            self._random.put_back()
            self.block.runs -= 1
            self.interior.reason = _FROM_OUTSIDE
            self.mode.note(self.block, self.interior.reason)
            raise FromOutside

    def _saving(self, leaves: Sequence[Tensor]) -> Any:
        """Hooks of what the block saves, where that leaves the device."""
        if self.policy != "offload":
            return contextlib.nullcontext()
        slot, pager = self.block.slot, self.block.pager
        inputs = frozenset(leaf.untyped_storage()._cdata for leaf in leaves)
        park = park_hook(pager.activations, inputs, pager.min_offload_bytes)
        address = -1 if slot is None else slot.address
        resident = frozenset(p.data_ptr() for p in self.residents)

        def pack(tensor: Tensor) -> Any:
            plain = type(tensor) is Tensor and tensor.layout is torch.strided
            if plain and tensor.data_ptr() not in resident and tensor.untyped_storage().data_ptr() != address:
                parked = park(tensor)
                if parked is not tensor:
                    return parked
            return (tensor if tensor.grad_fn is None else tensor.detach()), tensor._version

        def unpack(packed: Any) -> Tensor:
            if type(packed) is tuple:
                tensor, version = packed
                if tensor._version != version:
                    raise written_between(self.block)
                return tensor  # type: ignore[no-any-return]
            return packed.tensor()  # type: ignore[no-any-return]

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    # -- backward

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of what `forward` was given; those of paged weights go to the sink."""
        if self._spent:
            raise RuntimeError(
                f"Trying to backward through the graph a second time, in block {self.block.name!r}: what it "
                "saved has been freed. Specify retain_graph=True the first time"
            )
        self._look_at(grads)
        self.ready()
        found = self.gradients(grads)
        for maker, grad in zip(self._makers, found, strict=False):
            if maker is not None and grad is not None:
                maker[0]._expected[maker[1]] = grad
        block, count = self.block, len(self.wanted) + len(self.residents)
        if self.trained and _will_execute(self.interior.anchor_node):
            pairs = zip(self.trained, found[count:], strict=True)
            block.pager.sink.add_all([(block.parameters[i], grad) for i, grad in pairs if grad is not None])
        if not _keeps_graph():
            self.free()
        return found[:count]

    def _look_at(self, grads: Sequence[Tensor | None]) -> None:
        """See whether the block that got an output is the only one that sent a gradient for it."""
        for index, grad in self._expected.items():
            others = what_others_sent(grads[index], grad)
            if others:
                reason = self.interior.reason = "what it returns is used by others than the next block"
                self.mode.note(self.block, f"{reason}; gradients added up in another order once ({others})")
        self._expected.clear()

    def ready(self) -> None:
        """Have the weights in their place, as they were in forward."""
        block = self.block
        block.pager.turns.backward(block)
        block.pager.activations.approach(self._parked)
        with torch._C.DisableTorchFunctionSubclass():
            if block.slot is not None and block.stamp() != self.stamp:
                raise written_between(block)
        if self.policy == "recompute" and self.changed():
            raise written_between(block)
        if block.slot is not None:
            block.pager.use(block, backward=True)

    def changed(self) -> bool:
        """Whether what a second run reads was written since forward; the pager knows of paged weights."""
        self.block._residents.expect(self._standing)
        now = [[_version(tensor) for tensor in tensors] for tensors in (self.call.leaves, self._own)]
        return now != [self._versions, self._own_versions]

    def gradients(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Go through the graph inside, after a second run if its first one was dropped."""
        again = self.policy == "recompute"
        if again:
            there = as_they_were(self._buffers, self.block.name)
            with as_it_was(self._random, self.block.pager.device), self._cast(), there:
                self.inner(self.call.leaves)
        pairs = [(out, grad) for out, grad in zip(self._outputs, grads, strict=True) if grad is not None]
        edges = self.edges()
        found: list[Tensor | None] = [None] * len(edges)
        if pairs:
            outs, given = zip(*pairs, strict=True)
            keep = _keeps_graph() and not again
            found = list(torch.autograd.grad(outs, edges, given, retain_graph=keep, allow_unused=True))
        if again:
            self._outputs, self._node = [], None
        return found

    def edges(self) -> list[GradientEdge]:
        """Where the gradients of the graph inside arrive."""
        count = len(self.wanted) + len(self.residents) + len(self.trained)
        return [GradientEdge(self._node, index) for index in range(count)]

    def free(self) -> None:
        """Backward is through: drop what was kept for it."""
        self._spent = True
        self._own = []
        self._outputs, self._node = [], None
        self.call, self._makers = Call([], ((), ())), []


class BlockMode:
    """Decides how the blocks of a pager run, and runs those that can as one node each.

    Attributes:
        captures: Runs them without launching each kernel; None: eagerly.
        reasons: Block name -> why its latest run was in graph mode, or was not captured.
        tell, caution: Told what was recorded; told once why something was not, or may not stay so.
        turn: Number of the pass.
    """

    def __init__(self, captures: Captures | None = None, tell: Callable[[str], object] | None = None) -> None:
        """Know nothing yet."""
        self.captures = captures
        self.tell = self.caution = tell or (lambda line: None)
        self.reasons: dict[str, str] = {}
        self.turn = 0
        self._told: set[str] = set()
        self._count = 0

    def moment(self, block: PagedBlock) -> Any:
        """Return the moment, if how long a run of the block takes is being measured; else None."""
        interior, captures = block.interior, self.captures
        return captures.meter.now() if captures and interior and interior.measuring else None

    def enter(
        self, block: PagedBlock, function: Any, args: Any, kwargs: Any, policy: str, begin: Any = None
    ) -> Run | None:
        """Return a run in block mode, or None where graph mode has to be taken.

        Raises:
            FromOutside: Likewise, as was found out by running it.
        """
        pager = block.pager
        if pager.blocks and block is pager.blocks[0]:
            self._next_turn(len(pager.blocks))
        interior = block.interior
        if interior is None:
            block.interior = interior = Interior(block)
        elif not interior.structure.holds():
            self._changed(block, interior)
        try:
            call = flatten(args, kwargs)
        except OpaqueArgument as what:
            self._refuse(block, interior, str(what))
            return None
        reason = interior.reason or self._reason(block, interior) or comes_twice(call.leaves)
        if reason:
            self._refuse(block, interior, reason)
            return None
        self.reasons.pop(block.name, None)  # one that has passed is no reason not to look at it anew
        run = Run(self, block, interior, call, function, policy)
        interior.idle = not run.wanted and not run.trained and not run.residents
        if not interior.probed:
            if self.captures is not None:
                self.captures.saw(run)
            return None
        if interior.idle:
            return None
        if self.captures is not None:
            return self.captures.enter(run, begin)
        return run

    def _next_turn(self, count: int) -> None:
        """A pass begins: say so if more recordings have been made in the one before."""
        self.turn += 1
        captures = self.captures
        if captures is None or captures.recordings == self._count:
            return
        self._count = captures.recordings
        self.tell(
            f"capture: {captures.replayed(self.turn - 1)} of {count} blocks replay, from "
            f"{captures.recordings} recordings for {captures.shapes} forms of inputs, which hold "
            f"{format_bytes(captures.pool_bytes())}"
        )

    def report(self) -> dict[str, Any]:
        """Return what became of capturing, as plain data.

        Returns:
            ``blocks`` (how many replayed in the latest pass), ``replays`` (forward, so far), ``recordings``,
            ``shapes`` (forms of inputs that are recorded), ``bytes`` (that recordings hold) and ``fallbacks``
            (reason -> names of the blocks whose latest run was not a replay for it).
        """
        fallbacks: dict[str, list[str]] = {}
        for name, reason in self.reasons.items():
            fallbacks.setdefault(reason, []).append(name)
        captures = self.captures
        return {
            "blocks": 0 if captures is None else captures.replayed(self.turn),
            "replays": 0 if captures is None else sum(captures.replays.values()),
            "recordings": 0 if captures is None else captures.recordings,
            "shapes": 0 if captures is None else captures.shapes,
            "bytes": 0 if captures is None else captures.pool_bytes(),
            "fallbacks": fallbacks,
        }

    def _refuse(self, block: PagedBlock, interior: Interior, reason: str) -> None:
        interior.probed = False
        self.note(block, reason)

    def note(self, block: PagedBlock, reason: str, what: str = "graph mode") -> None:
        """Remember why a block does not run as it was asked to; say so the first time."""
        self.reasons[block.name] = reason
        self.tell_once(reason, f"capture: block {block.name} runs in {what}: {reason}")

    def tell_once(self, what: str, line: str) -> None:
        """Say a line, the first time that something is spoken of."""
        if what not in self._told:
            self._told.add(what)
            self.caution(line)

    def _changed(self, block: PagedBlock, interior: Interior) -> None:
        interior.changes += 1
        interior.look(block)
        if interior.changes > _RESTLESS:
            interior.reason = "settings inside it change from run to run"

    def _reason(self, block: PagedBlock, interior: Interior) -> str:
        """Look for what stands against block mode now."""
        hooked = interior.structure.hooked()
        if hooked is not None:
            return f"hooks are registered on {('its module ' + hooked) if hooked else 'the block'}"
        if _has_any_global_hook():
            return "hooks are registered on all modules"
        if _top_hooks(True) is not None:
            return "hooks on saved tensors are set around it"
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return "a function transform is under way"
        if torch.autograd.forward_ad._current_level >= 0:
            return "forward-mode differentiation is under way"
        governor = block.pager.governor
        if governor is not None and not getattr(governor, "measured", True):
            return "what it saves is being measured"
        return ""

    @contextlib.contextmanager
    def watched(self, block: PagedBlock, args: Any, kwargs: Any) -> Iterator[Callable[[Any], None]]:
        """Watch a run in graph mode; yields what is to be told its output."""
        interior = block.interior
        if interior is None or interior.reason or (interior.probed and interior.looking is None):
            yield lambda output: None
            return
        looking, interior.looking = interior.looking, None
        given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        buffers = [b for b in block.module.buffers() if b is not None]
        before = [_version(tensor) for tensor in (*given, *buffers)]
        known = {id(tensor) for tensor in (*given, *interior.residents, block._anchor)}

        def came(output: Any) -> None:
            wanted = list({id(t): t for t in given if t.requires_grad}.values())
            written = [_version(tensor) for tensor in (*given, *buffers)] != before
            interior.reason = stands_against(given, wanted, output, written, known)
            if not interior.reason and block.name not in self.reasons:
                tensors = [t for t in tree_flatten(output)[0] if isinstance(t, Tensor)]
                self._watch_use(interior, wanted, tensors)

        with looking or contextlib.nullcontext():
            yield came
        if looking and RANDOM in (looking.hidden, interior.structure.lost):
            interior.reason = RANDOM  # a second run in block mode would draw at another moment

    def _watch_use(self, interior: Interior, wanted: list[Tensor], outputs: list[Tensor]) -> None:
        """Take the block for looked at once backward has shown that nobody else uses what comes in."""
        open_ones = len(wanted)
        if not open_ones:
            interior.probed = True
            return

        def told(alone: bool) -> None:
            nonlocal open_ones
            open_ones -= 1
            if not alone:
                interior.reason = "what comes into it is used elsewhere, too"
            elif not open_ones:
                interior.probed = True

        watch_use(wanted, outputs, told)


def _own(value: Any, block: PagedBlock) -> Any:
    """Return an output as the outer graph gets it: nothing of a slot leaves its block."""
    if not isinstance(value, Tensor):
        return value
    address = None if block.slot is None else block.slot.address
    if type(value) is Tensor and value.untyped_storage().data_ptr() == address:
        return value.detach().clone()
    return value.detach() if value.requires_grad else value


def _maker(leaf: Tensor) -> tuple[Run, int] | None:
    run = getattr(leaf.grad_fn, "run", None)
    return (run, leaf.output_nr) if isinstance(run, Run) else None
