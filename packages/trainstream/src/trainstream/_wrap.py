"""`wrap()` and `unwrap()`: compose the packages around one model.

Everything that can fail is done before the first change: options are checked, the optimizer is made,
memory is counted, and moved or quantized weights are staged beside the originals. Committing them is
plain assignment, so a failed `wrap()` leaves model and optimizer as they were.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import ts_quant
from trainstream._options import WrapOptions
from trainstream._paging import Placement, Tier, paged_parameters, place_blocks, start_paging
from trainstream._session import Session, session_of
from ts_core import memory, registry
from ts_core.blocks import BlockMap, block_map, find_blocks, parameter_bytes
from ts_core.errors import ArgumentTypeError, DoesNotFitError, OptionError, StateError
from ts_core.plan import BlockPlan, Numerics, Plan
from ts_optim import OffloadAdamW
from ts_paging.pager import WeightPager
from ts_quant.model import quantizable_weights

__all__ = ["unwrap", "wrap"]

_HOST_STATE_BYTES = 12  # per trained element: fp32 master weight and two fp32 moments


def wrap(
    model: nn.Module, optimizer: Optimizer | None = None, **options: Any
) -> tuple[nn.Module, Optimizer | None]:
    """Make `model` train with optimizer state on the host, and weights packed and paged where asked.

    The same model object comes back. A ``torch.optim.AdamW`` (or ``Adam`` without coupled decay) is
    replaced by an `OffloadAdamW` that takes over its parameter groups, hyperparameters and state; the group
    dictionaries are shared, so a scheduler made before keeps working. Any other optimizer is kept as it is.

    Args:
        model: Any module. Its layer stack is found by itself, or given as ``blocks=``.
        optimizer: An optimizer over (some of) its parameters; None makes an `OffloadAdamW` over every
            parameter that requires grad, with ``lr=`` (1e-3). None is returned when nothing requires grad.
        **options: See the options page of the documentation. Values outside the accepted ones are refused.

    Returns:
        The model and the optimizer to use.

    Raises:
        OptionError: An unknown option, a value outside the accepted ones, or one that this release cannot
            carry out (also a ``ValueError``).
        ArgumentTypeError: `model` is no module or `optimizer` no optimizer (also a ``TypeError``).
        DoesNotFitError: It cannot fit (also a ``MemoryError``); the message has the numbers.
        StateError: The model is wrapped already (also a ``RuntimeError``).

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> model, optimizer = trainstream.wrap(model, optimizer)
        >>> model(torch.randn(2, 8)).sum().backward()
        >>> optimizer.step()
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"wrap(model): expected a torch.nn.Module, given {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(
            f"wrap(optimizer): expected a torch.optim.Optimizer or None, given {type(optimizer).__name__}"
        )
    if session_of(model) is not None:
        raise StateError("wrap(model): the model is wrapped already; call trainstream.unwrap(model) first")
    checked = WrapOptions.from_kwargs(**options)
    blocks = find_blocks(model, checked.blocks)
    device = _target_device(model, checked)
    _use_fast_copies(device)
    placement = place_blocks(checked, len(blocks))
    paged = paged_parameters(model, blocks, placement)
    adopted, how = _adopt(model, optimizer, checked)
    codec, why = _choose_codec(model, blocks, adopted, device, paged, checked)
    tier = Tier(device, checked) if placement.hooked else None
    pager = None
    undo: list[Callable[[], None]] = []
    try:
        staged = _stage(model, blocks, device, codec, checked.quant_block_size, paged, tier)
        paged = {id(staged.replaced.get(key, p)): staged.replaced.get(key, p) for key, p in paged.items()}
        undo = _commit(model, adopted, staged)
        groups = block_map(model, checked.blocks)
        if tier is not None:
            names = [group.name for group in groups.blocks]
            named = list(zip(names, blocks, strict=True))
            pager = start_paging(named, placement, paged, tier, device, checked)
    except BaseException:
        for step in reversed(undo):
            step()
        if tier is not None:
            tier.close()
        raise
    plan = _plan(groups, model, device, codec, adopted, placement, tier, pager, checked)
    session = Session(model, adopted, checked, groups, plan, pager, tier)
    session.events.add(f"wrapped: {len(blocks)} blocks, computing on {device}")
    session.events.add(how)
    if tier is not None:
        kept = ", ".join(f"{placement.policy.count(p)} {p}" for p in ("keep", "offload", "recompute"))
        paging = f"{len(placement.paged)} blocks from {tier.name} through {plan.slots} slots"
        session.events.add(f"paging: {paging}; activations: {kept}")
    if why:
        session.decide(why)
    if checked.quantize not in ("auto", "none"):
        packed = sum(isinstance(p, ts_quant.QuantizedTensor) for p in model.parameters())
        none = "" if packed else ": no block holds a frozen weight of two or more dimensions"
        session.events.add(f"quantize={checked.quantize}: {packed} weights are packed{none}")
    for line in checked.notes():
        session.decide(line)
    model.__dict__["_trainstream_session"] = session
    session.start()
    return model, adopted


def unwrap(model: nn.Module) -> nn.Module:
    """Finish pending work, remove every hook and forget the session; the model is usable as before.

    Paged weights come back to the device, or to RAM if it has no room for them. Weights that `wrap()`
    quantized stay quantized (their exact values are gone); `ts_quant.dequantize_model` decodes them. The
    optimizer stays usable.

    Args:
        model: A model that `wrap()` returned.

    Returns:
        The same model.

    Raises:
        StateError: The model is not wrapped.

    Example:
        >>> model = trainstream.unwrap(model)
    """
    session = session_of(model)
    if session is None:
        raise StateError("unwrap(model): expected a wrapped model")
    session.stop()
    if session.pager is not None:
        paged = [p for block in session.pager.blocks for p in block.parameters]
        session.pager.detach()
        _bring_back(model, session.optimizer, {id(p): p for p in paged}, torch.device(session.plan.device))
    if session.tier is not None:
        session.tier.close()
    del model.__dict__["_trainstream_session"]
    return model


def _bring_back(
    model: nn.Module, optimizer: Optimizer | None, paged: dict[int, nn.Parameter], device: torch.device
) -> None:
    """Move paged weights out of their tier, to the device, or to RAM where it has no room."""
    staged = _Staged()
    for key, parameter in paged.items():
        value: Any = parameter.detach()
        grad = parameter.grad
        try:
            value = _copied(value, device)
            grad = None if grad is None else grad.to(device, copy=True)
        except torch.OutOfMemoryError:
            value = _copied(value, torch.device("cpu"))
            grad = None if grad is None else grad.cpu()
        if isinstance(value, ts_quant.QuantizedTensor):
            staged.replaced[key] = nn.Parameter(value, requires_grad=False)
        else:
            staged.data.append((parameter, value, grad))
    _commit(model, optimizer, staged)


def _copied(value: Tensor, device: torch.device) -> Tensor:
    """Copy to `device` even if it is there: a mapped file must not stay behind."""
    if isinstance(value, ts_quant.QuantizedTensor):
        packed = {key: part.to(device, copy=True) for key, part in value.packed.items()}
        shape = tuple(value.shape)
        return ts_quant.QuantizedTensor(packed, value.codec, shape, value.dtype, value.block_size)
    return value.to(device, copy=True)


def _target_device(model: nn.Module, options: WrapOptions) -> torch.device:
    if options.device is not None:
        return torch.device(options.device)
    devices = {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
    if torch.device("meta") in devices:
        raise OptionError("wrap(model): the model has parameters on the meta device; load its weights first")
    if len(devices) > 1:
        raise OptionError(
            "option device: the model's tensors are on "
            f"{', '.join(sorted(map(str, devices)))}; name the one to compute on"
        )
    return devices.pop() if devices else torch.device("cpu")


def _use_fast_copies(device: torch.device) -> None:
    """Put ts-paging's pinned allocator and copy engine in the place of torch's, once a GPU is used."""
    if device.type == "cuda":
        import ts_paging

        if not isinstance(registry.copy_engine(), ts_paging.CopyEngine):
            registry.set_host_allocator(ts_paging.PinnedAllocator())
            registry.set_copy_engine(ts_paging.CopyEngine())


def _adopt(
    model: nn.Module, optimizer: Optimizer | None, options: WrapOptions
) -> tuple[Optimizer | None, str]:
    """Return the optimizer to use, and the event that says how it came about."""
    settings: dict[str, Any] = {
        "max_grad_norm": options.max_grad_norm,
        "accumulation_steps": options.accumulation_steps,
        "threads": options.threads,
        "moment_dtype": options.moment_dtype,
    }
    if optimizer is None:
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained:
            return None, "optimizer: none, no parameter requires grad"
        return OffloadAdamW(
            trained, lr=options.lr, **settings
        ), f"optimizer: OffloadAdamW made, lr {options.lr:g}"
    own = {id(p) for p in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if own and not any(id(p) in own for p in held):
        raise OptionError(
            "wrap(optimizer): it holds none of the model's parameters, so the model would not train"
        )
    if isinstance(optimizer, OffloadAdamW):
        for name in ("max_grad_norm", "accumulation_steps", "threads"):
            if getattr(options, name) is not None:
                setattr(optimizer, name, getattr(options, name))
        return optimizer, "optimizer: the given OffloadAdamW"
    reason = _cannot_take_over(optimizer)
    if reason:
        for name in ("max_grad_norm", "accumulation_steps"):
            if getattr(options, name) is not None:
                raise OptionError(f"option {name}: needs an AdamW that wrap() can take over, given {reason}")
        return (
            optimizer,
            f"optimizer: {type(optimizer).__name__} kept as it is ({reason}); its state stays put",
        )
    return _take_over(
        optimizer, settings
    ), f"optimizer: {type(optimizer).__name__} taken over by OffloadAdamW"


def _cannot_take_over(optimizer: Optimizer) -> str:
    """Return why `OffloadAdamW` cannot stand in for `optimizer`, or an empty string."""
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):
        return type(optimizer).__name__
    for group in optimizer.param_groups:
        for flag in ("amsgrad", "maximize", "differentiable"):
            if group.get(flag):
                return f"{type(optimizer).__name__} with {flag}=True"
        decoupled = type(optimizer) is torch.optim.AdamW or group.get("decoupled_weight_decay")
        if not decoupled and group["weight_decay"] != 0:
            return "Adam with coupled weight decay"
    return ""


def _take_over(optimizer: Optimizer, settings: dict[str, Any]) -> OffloadAdamW:
    """Make an `OffloadAdamW` on the same group dictionaries, carrying hyperparameters and state."""
    groups = optimizer.param_groups
    taken = OffloadAdamW(groups, **settings)
    if optimizer.state:
        taken.load_state_dict(optimizer.state_dict())
    # Loading replaces the dictionaries; a scheduler made before wrap() writes into the old ones.
    for old, new in zip(groups, taken.param_groups, strict=True):
        old.update({key: value for key, value in new.items() if key != "params"})
    taken.param_groups = groups
    # It also watches the old optimizer's steps, and would warn that there were none.
    watched = weakref.ref(optimizer)

    def stepped(*_: Any) -> None:
        old = watched()
        if old is not None:
            old._opt_called = True  # type: ignore[attr-defined]

    taken.register_step_post_hook(stepped)
    return taken


def _frozen(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [weight.parameter for weight in quantizable_weights(model, blocks)]


def _choose_codec(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    optimizer: Optimizer | None,
    device: torch.device,
    paged: dict[int, nn.Parameter],
    options: WrapOptions,
) -> tuple[str, str]:
    """Return the codec of frozen block weights and the line that says why, or raise if nothing fits."""
    wanted = str(options.quantize)
    codecs = ["none", "int8", "nf4"] if wanted == "auto" else [wanted]
    if device.type != "cuda":
        # The weights are in RAM already; what is added is optimizer state.
        if options.check_memory:
            _check_host(optimizer)
        return codecs[0], "quantize=auto: none, the weights are in RAM already" if wanted == "auto" else ""
    staying = [t for t in [*model.parameters(), *model.buffers()] if id(t) not in paged]
    resident = sum(parameter_bytes(t) for t in staying if t.device != device)
    frozen = [p for p in _frozen(model, blocks) if p.device != device and id(p) not in paged]
    budget = memory.device_budget(device)
    room = int(budget.available_bytes * (1 - options.vram_headroom))
    needs = {}
    for codec in codecs:
        packed = sum(_packed_bytes(p, codec, options.quant_block_size) - parameter_bytes(p) for p in frozen)
        needs[codec] = resident + packed
        if needs[codec] <= room or not options.check_memory:
            if options.check_memory:
                _check_host(optimizer)
            if wanted != "auto":
                return codec, ""
            sizes = f"{memory.format_bytes(needs[codec])} of {memory.format_bytes(room)}"
            return codec, f"quantize=auto: {codec}, weights need {sizes}"
    listed = ", ".join(f"{codec} {memory.format_bytes(size)}" for codec, size in needs.items())
    raise DoesNotFitError(
        f"wrap(model): weights need {listed}; {device} has room for {memory.format_bytes(room)} "
        f"({options.vram_headroom:.0%} headroom). Use a smaller model, quantize='nf4' or a larger card"
    )


def _packed_bytes(parameter: Tensor, codec: str, block_size: int) -> int:
    if codec == "none":
        return parameter_bytes(parameter)
    return int(registry.codec(codec).packed_bytes(parameter.numel(), block_size))


def _check_host(optimizer: Optimizer | None) -> None:
    if not isinstance(optimizer, OffloadAdamW):
        return
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    need = sum(p.numel() * _HOST_STATE_BYTES for p in trained)
    # An fp32 parameter in RAM is its own master weight.
    need -= sum(p.numel() * 4 for p in trained if p.dtype == torch.float32 and p.device.type == "cpu")
    room = memory.host_budget().available_bytes
    if need > room:
        raise DoesNotFitError(
            f"wrap(model): optimizer state of {sum(p.numel() for p in trained):,} trained parameters needs "
            f"{memory.format_bytes(need)} of RAM, {memory.format_bytes(room)} are available. Train fewer "
            "parameters (LoRA), or pass check_memory=False to try all the same"
        )


@dataclasses.dataclass
class _Staged:
    """New values of a model's tensors, made beside the old ones.

    Attributes:
        data: Triples (tensor of the model, its value and its gradient on the target device).
        replaced: id of a Parameter -> the Parameter that takes its place, where the kind of tensor changes.
    """

    data: list[tuple[Tensor, Tensor, Tensor | None]] = dataclasses.field(default_factory=list)
    replaced: dict[int, nn.Parameter] = dataclasses.field(default_factory=dict)


def _stage(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    device: torch.device,
    codec: str,
    block_size: int,
    paged: dict[int, nn.Parameter],
    tier: Tier | None,
) -> _Staged:
    staged = _Staged()
    quantized = {id(p) for p in _frozen(model, blocks)} if codec != "none" else set()
    for tensor in [*model.parameters(), *model.buffers()]:
        value = tensor.detach()
        if id(tensor) in quantized:
            value = ts_quant.quantize(value.to(device), codec, block_size=block_size)
            value = tier.store(value) if tier is not None and id(tensor) in paged else value
            staged.replaced[id(tensor)] = nn.Parameter(value, requires_grad=False)
        elif tier is not None and id(tensor) in paged:
            if isinstance(value, ts_quant.QuantizedTensor):
                staged.replaced[id(tensor)] = nn.Parameter(tier.store(value), requires_grad=False)
            else:
                grad = None if tensor.grad is None else tensor.grad.cpu()
                staged.data.append((tensor, tier.store(value), grad))
        elif tensor.device != device and isinstance(value, ts_quant.QuantizedTensor):
            staged.replaced[id(tensor)] = nn.Parameter(value.to(device), requires_grad=False)
        elif tensor.device != device:
            grad = None if tensor.grad is None else tensor.grad.to(device)
            staged.data.append((tensor, value.to(device), grad))
    return staged


def _exchange(tensor: Tensor, value: Tensor, grad: Tensor | None) -> None:
    tensor.grad = None
    tensor.data = value
    tensor.grad = grad


def _commit(model: nn.Module, optimizer: Optimizer | None, staged: _Staged) -> list[Callable[[], None]]:
    """Put the staged values in place; return what takes each of them back, in order."""
    undo: list[Callable[[], None]] = []
    for tensor, value, grad in staged.data:
        undo.append(partial(_exchange, tensor, tensor.data, tensor.grad))
        _exchange(tensor, value, grad)
    places: list[Any] = [module._parameters for module in model.modules()]
    # A frozen weight may be listed in the optimizer: left there, the original would never be freed.
    places += [dict(enumerate(group["params"])) for group in optimizer.param_groups] if optimizer else []
    for place in places:
        for key, parameter in place.items():
            if id(parameter) in staged.replaced:
                undo.append(partial(place.__setitem__, key, parameter))
                place[key] = staged.replaced[id(parameter)]
    if optimizer is not None:
        for group, params in zip(optimizer.param_groups, places[-len(optimizer.param_groups) :], strict=True):
            undo.append(partial(group.__setitem__, "params", group["params"]))
            group["params"] = list(params.values())
    return undo


def _plan(
    groups: BlockMap,
    model: nn.Module,
    device: torch.device,
    codec: str,
    optimizer: Optimizer | None,
    placement: Placement,
    tier: Tier | None,
    pager: WeightPager | None,
    options: WrapOptions,
) -> Plan:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    rows = []
    index = -1
    for group in groups.groups:
        block = group.kind == "block"
        index += block
        own = [parameters[name] for name in group.parameters if name in parameters]
        codecs = {p.codec for p in own if isinstance(p, ts_quant.QuantizedTensor)}
        rows.append(
            BlockPlan(
                name=group.name,
                kind=group.kind,
                tier=tier.name if tier is not None and block and index in placement.paged else "device",
                policy=placement.policy[index] if block else "keep",
                codec=codecs.pop() if len(codecs) == 1 else "mixed" if codecs else "none",
                bytes=sum(parameter_bytes(p) for p in own),
            )
        )
    used = {row.codec for row in rows} - {"none"}
    return Plan(
        device=str(device),
        blocks=tuple(rows),
        numerics=Numerics(
            quantize=used.pop() if len(used) == 1 else "mixed" if used else codec,
            quant_block_size=options.quant_block_size,
            moment_dtype=options.moment_dtype,
        ),
        optimizer="cpu" if isinstance(optimizer, OffloadAdamW) else "none",
        slots=len(pager.slots) if pager is not None else 0,
    )
