"""`wrap()` and `unwrap()`: compose the packages around one model.

Everything that can fail is done before the first change: options are checked, the optimizer is made,
memory is counted, and moved or quantized weights are staged beside the originals. Committing them is
plain assignment, so a failed `wrap()` leaves model and optimizer as they were.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import ts_quant
from trainstream._autos import undecided
from trainstream._budget import cap_device, limits
from trainstream._copies import give_back, reserve, use_fast_copies
from trainstream._decide import Decided, decide, make_plan, moment_formats
from trainstream._device import answer_with
from trainstream._entry import expect_frozen, expect_model, note_wrapped, strangers
from trainstream._inventory import Inventory
from trainstream._kernels import Kernels
from trainstream._matmul import Products
from trainstream._options import WrapOptions
from trainstream._paging import Tiers, asked, start_paging
from trainstream._places import Places, beside, stand_in
from trainstream._recorder import check_environment
from trainstream._session import Instead, Session, converting, session_of, zero_grad
from trainstream._staging import bring_back, commit, frozen_weights, stage
from trainstream._tuner import Tuner, offloads_by_itself, settle
from trainstream._uncached import train_uncached
from trainstream._unused import Facts, unused
from ts_core.blocks import block_map, find_blocks
from ts_core.errors import OptionError, StateError
from ts_core.planner import Layout
from ts_core.usage import keep_heap_tight, release_free_memory
from ts_optim import OffloadAdamW, grad_sumsq, narrow_grads
from ts_quant import init_lora_from_error
from ts_quant.precision import NEXT_CODEC

__all__ = ["unwrap", "wrap"]

_SHORT = "RAM is short: every second block that offloaded its activations recomputes from now on"


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
    # What is made here lasts: a tensor made under torch.inference_mode() could not be trained with later.
    with torch.inference_mode(False):
        return _wrapped(model, optimizer, options)


def _wrapped(
    model: nn.Module, optimizer: Optimizer | None, given: dict[str, Any]
) -> tuple[nn.Module, Optimizer | None]:
    """Do what `wrap` says."""
    expect_model(model, optimizer)
    checked = asked_for = WrapOptions.from_kwargs(**given)
    check_environment()
    blocks = find_blocks(model, checked.blocks)
    expect_frozen(checked, blocks)
    frozen = len(frozen_weights(model, blocks))
    device = _target_device(model, checked)
    use_fast_copies(device, checked)
    want = asked(checked, len(blocks), cpu=device.type == "cpu")
    formats = moment_formats(optimizer, checked)
    adopted, how = _adopt(model, optimizer, checked, formats[0])
    formats = formats if isinstance(adopted, OffloadAdamW) else formats[:1]
    inventory = Inventory(model, block_map(model, checked.blocks), blocks)
    tiers = Tiers(device, checked.disk_offload, checked.disk_budget)
    bounds = limits(model, optimizer, device, checked, Tiers.folder(checked.disk_offload))
    decided = decide(model, inventory, blocks, device, adopted, want, bounds, checked, formats)
    want = decided.want or want
    if decided.depth != checked.prefetch_depth:
        checked = dataclasses.replace(checked, prefetch_depth=decided.depth)
    if isinstance(adopted, OffloadAdamW) and adopted.moment_format != decided.moments:
        adopted, how = _adopt(model, optimizer, checked, decided.moments)
    undo: list[Callable[[], None]] = []
    renamed: list[Callable[[], None]] = []
    pager = None
    try:
        paged = _assign(inventory, decided.layout, tiers)
        if device.type == "cuda":
            reserve(p for p in paged.values() if tiers.tier_of(p) == "host")
        size = checked.quant_block_size
        fit = checked.error_rank, checked.error_iters
        coded = model, decided.packed, device, decided.codec, size
        double = checked.double_quant
        staged = stage(*coded, paged, tiers, adopted, decided.precise, fit, double)
        tiers.renamed(staged.replaced)
        paged = {id(p): p for p in (staged.replaced.get(key, p) for key, p in paged.items())}
        undo = commit(model, adopted, staged)
        products = Products(model, device, checked)
        undo.append(products.undo)
        kernels = Kernels(model, blocks, device, checked)
        undo.append(kernels.undo)
        groups = block_map(model, checked.blocks)
        inventory = Inventory(model, groups, blocks)  # of what is there now: the session holds no other
        if decided.hooked or paged or (checked.capture is True and blocks):
            room = bounds.budgets.device
            pager = start_paging(inventory, want, decided.layout, paged, tiers, checked, room)
            undo.append(pager.detach)
            renamed = answer_with(model, device)
            undo += renamed
        placement = None
        if isinstance(adopted, OffloadAdamW) and paged:
            placement = adopted.placement
            undo.append(partial(adopted.set_placement, placement))
            adopted.set_placement(beside(inventory, decided.settling, placement))
            adopted.set_memory(tiers.memory_for)
            adopted.rehouse([p for p in paged.values() if p.requires_grad])
        tuner = None
        if decided.adapts and pager is not None:
            tuner = Tuner(pager, inventory, decided, want, tiers, bounds, options=checked)
        if bounds.device_cap is not None:
            cap_device(device, bounds.device_cap)
    except BaseException:
        for step in reversed(undo):
            step()
        tiers.close()
        raise
    undo.clear()
    staged.discard()
    del staged
    tight = bounds.cap is not None or 2 * decided.layout.device_bytes > bounds.budgets.device
    if device.type == "cpu" and tight:
        keep_heap_tight()  # it costs page faults: a third of the time of small steps
    if device.type == "cpu" and (paged or decided.packed):
        release_free_memory()
    layout, unsettled = decided.layout, list[str]()
    wanted = layout.settled if pager is not None else ()
    if pager is not None and wanted and not settle(unsettled.append, pager, inventory, wanted):
        decided = dataclasses.replace(decided, layout=dataclasses.replace(layout, settled=()))
        if tuner is not None:
            tuner.nothing_settled()
    plan = make_plan(inventory, groups, model, device, decided, adopted, want, pager, bounds, checked)
    plan = products.in_plan(kernels.in_plan(plan))
    session = Session(model, adopted, checked, groups, plan, pager, tiers, tuner)
    session.kernels = kernels
    session.placement = placement
    session.adopt(Places(inventory, decided, want, bounds, checked, tiers))
    if pager is not None:
        pager.when_short = partial(session.events.add, _SHORT)
        if (mode := pager.block_mode) is not None:
            mode.tell = mode.caution = session.events.add
            if checked.capture is True:  # asked for: a user who reads no events learns it too
                mode.caution = partial(session.events.add, level=logging.WARNING)
    if isinstance(adopted, OffloadAdamW):
        unsettled += _configure(session, adopted, given=adopted is optimizer)
    session.undo += [*renamed, *train_uncached(session)]
    started = init_lora_from_error(model, only_fresh=True)
    unsettled += _quality(session, decided, started)
    told_of = [how, *strangers(model, adopted)]
    for line in [*_story(session, told_of, decided, len(blocks)), *unsettled]:
        session.events.add(line)
    facts = Facts(
        options=asked_for,
        cpu=device.type == "cpu",
        given=optimizer,
        adopted=adopted,
        blocks=len(blocks),
        want=want,
        codec=decided.codec,
        packed=len(decided.packed),
        frozen=frozen,
        paged=len(paged),
        fixed=sum(
            asks is True and not u.pageable for u, asks in zip(inventory.blocks, want.paged, strict=True)
        ),
        files=tiers.files is not None,
        spills=tuner is not None
        and decided.governed
        and offloads_by_itself(device)
        and checked.activation_offload == checked.recompute == "auto",
    )
    for line in unused(facts):
        session.events.add(line)
    told = {
        "adapts": decided.adapts and decided.governed,
        "on_cpu": device.type == "cpu",
        "settles": bool(decided.settling),
        "packs": bool(frozen),
    }
    for line in [*decided.why, *checked.notes(**told)]:
        session.decide(line)
    kernels.adopt(session)
    products.adopt(session)
    for line in undecided(facts, session.events.events):
        session.decide(line)
    model.__dict__["_trainstream_session"] = session
    note_wrapped(model)
    if pager is not None:
        stand_in(model, "zero_grad", zero_grad)
        stand_in(model, "_apply", converting(pager))
    session.start()
    return model, adopted


def _assign(inventory: Inventory, layout: Layout, tiers: Tiers) -> dict[int, nn.Parameter]:
    """Tell the tiers which Parameters go to the disk; return all that are paged."""
    paged = inventory.paged(layout.paged)
    for index, tier in enumerate(layout.tiers):
        if tier == "disk":
            tiers.to_disk([p for p in inventory.units[index].pageable if id(p) in paged])
    return paged


def _configure(session: Session, optimizer: OffloadAdamW, *, given: bool) -> list[str]:
    """Tell an optimizer what the options say and what its parameters are called; return what to say of it."""
    lines = []
    options, pager = session.options, session.pager
    changes: dict[str, Any] = {}
    if given:
        for name in ("max_grad_norm", "accumulation_steps", "threads"):
            if getattr(options, name) is not None:
                changes[name] = getattr(options, name)
    if optimizer.accumulate_fp32 is None:
        changes["accumulate_fp32"] = True
        session.undo.append(partial(optimizer.reconfigure, accumulate_fp32=None))
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if any(p.dtype in (torch.bfloat16, torch.float16) for p in trained):
            lines.append("gradients of 16-bit weights add up in fp32: from the second pass on .grad is fp32")
    optimizer.reconfigure(**changes)
    optimizer.attach(session.model)
    if pager is not None:
        # Its updates wait for gradients themselves, but for those that run from a hook.
        pager.sink.late = pager.sink.narrow = not optimizer.works_in_backward
        pager.sink.narrow_by = narrow_grads
        if optimizer.needs_norm:
            pager.sink.square_sum = grad_sumsq
    return lines


def _story(session: Session, how: Sequence[str], decided: Decided, count: int) -> list[str]:
    """Say what was done."""
    plan, options = session.plan, session.options
    lines = [f"wrapped: {count} blocks, computing on {plan.device}", *how]
    if session.pager is not None:
        tiers = [row.tier for row in plan.blocks]
        where = ", ".join(f"{tiers.count(t)} from {t}" for t in ("host", "disk") if t in tiers)
        kept = ", ".join(f"{plan.policy.count(p)} {p}" for p in ("keep", "offload", "recompute"))
        lines.append(f"paging: {where + _through(plan.slots) if where else 'none'}; activations: {kept}")
    if decided.adapts:
        lines.append("the first steps are measured; then blocks return and activations stay as room allows")
    if options.quantize not in ("auto", "none"):
        held = [p for p in session.model.parameters() if isinstance(p, ts_quant.QuantizedTensor)]
        before = len(held) - len(decided.packed)
        text = f"quantize={options.quantize}: {len(decided.packed)} weights are packed"
        if before:
            codecs = ", ".join(sorted({p.codec for p in held}))
            text += f" here; {before} were packed before and stay as they are ({codecs})"
        elif not decided.packed:
            text += ": no block holds a frozen weight that a codec can hold"
        lines.append(text)
    return lines


def _through(slots: int) -> str:
    """Say how many blocks' weights there is room for on the device at a time."""
    if not slots:
        return ""
    return f", through {slots} slots" if slots > 1 else ", through one slot: none is brought ahead"


def _quality(session: Session, decided: Decided, started: int) -> list[str]:
    """Say what became of the options that make packing lose less."""
    options, lines = session.options, []
    if options.keep_precise and decided.codec not in NEXT_CODEC:
        lines.append(f"keep_precise={options.keep_precise:g} ignored: nothing is packed as nf4 or nvfp4")
    elif options.keep_precise:
        above = NEXT_CODEC[decided.codec]
        lines.append(
            f"keep_precise={options.keep_precise:g}: {len(decided.precise)} of {len(decided.packed)} weights "
            f"are {above}, by measured error"
        )
    if options.error_rank and not decided.packed:
        lines.append(f"error_rank={options.error_rank} ignored: no weight is packed here")
    elif options.error_rank:
        lines.append(f"error_rank={options.error_rank}: a fit of the error is kept with packed matrices")
    if options.double_quant:
        what = ": scales are quantized too" if decided.packed else " ignored: no weight is packed here"
        lines.append(f"double_quant=True{what}")
    if started:
        lines.append(f"error fit: {started} adapters start from it")
    return lines


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
        DoesNotFitError: What lives in files has no room in RAM; nothing is changed (also a ``MemoryError``).

    Example:
        >>> model = trainstream.unwrap(model)
    """
    session = session_of(model)
    if session is None:
        raise StateError("unwrap(model): expected a wrapped model")
    with torch.inference_mode(False):  # as in wrap()
        _unwrapped(model, session)
    return model


def _unwrapped(model: nn.Module, session: Session) -> None:
    """Do what `unwrap` says."""
    session.relief.places.require_room_to_return()
    session.stop()
    device = torch.device(session.plan.device)
    if session.options.vram_budget is not None:
        cap_device(device, None)
    if session.pager is not None:
        paged = [p for b in (*session.pager.blocks, *session.pager.edges) for p in b.parameters]
        session.pager.detach()
        session.tiers.to_host(paged)
        bring_back(model, session.optimizer, {id(p): p for p in paged}, device, session.events.add)
        if isinstance(session.optimizer, OffloadAdamW):
            if session.placement is not None:
                session.optimizer.set_placement(session.placement)
            session.optimizer.rehouse([p for p in paged if p.requires_grad])
            session.optimizer.set_memory(None)
    session.tiers.close()
    for step in session.undo:
        step()
    give_back()
    for name in ("zero_grad", "_apply"):
        if isinstance(model.__dict__.get(name), Instead):
            del model.__dict__[name]
    del model.__dict__["_trainstream_session"]


def _target_device(model: nn.Module, options: WrapOptions) -> torch.device:
    if options.device is not None:
        return torch.device(options.device)
    devices = {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
    if len(devices) > 1:
        raise OptionError(
            "option device: the model's tensors are on "
            f"{', '.join(sorted(map(str, devices)))}; name the one to compute on"
        )
    return devices.pop() if devices else torch.device("cpu")


def _adopt(
    model: nn.Module, optimizer: Optimizer | None, options: WrapOptions, moments: str
) -> tuple[Optimizer | None, str]:
    """Return the optimizer to use, with moments of that format, and the event that says how it came about."""
    needs_gpu = options.optimizer_mode == "gpu" and not torch.cuda.is_available()
    if needs_gpu and not isinstance(optimizer, OffloadAdamW):
        raise OptionError("option optimizer_mode='gpu' needs a CUDA device; 'cpu' updates on host threads")
    settings: dict[str, Any] = {
        "max_grad_norm": options.max_grad_norm,
        "accumulation_steps": options.accumulation_steps,
        "threads": options.threads,
        "moment_dtype": moments,
        "mode": options.optimizer_mode,
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
        _expect("moment_dtype", options.moment_dtype, "auto", optimizer.moment_format)
        _expect("optimizer_mode", options.optimizer_mode, "cpu", optimizer.mode)
        return optimizer, "optimizer: the given OffloadAdamW"
    reason = _cannot_take_over(optimizer)
    if reason:
        for name in ("max_grad_norm", "accumulation_steps"):
            if getattr(options, name) is not None:
                raise OptionError(f"option {name}: needs an AdamW that wrap() can take over, given {reason}")
        return (
            optimizer,
            f"optimizer: {type(optimizer).__name__} kept as it is ({reason}); its state follows the weights",
        )
    return _take_over(
        optimizer, settings
    ), f"optimizer: {type(optimizer).__name__} taken over by OffloadAdamW"


def _expect(name: str, asked: str, default: str, made_with: str) -> None:
    if asked not in (default, made_with):
        raise OptionError(
            f"option {name}: asked for {asked!r}, the given OffloadAdamW has {made_with!r}; make it "
            "with the one you want, or leave the option out"
        )


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
    # What a group added later does not name is as in the optimizer that was given.
    taken.defaults.update({key: optimizer.defaults[key] for key in ("lr", "betas", "eps", "weight_decay")})
    # It also watches the old optimizer's steps, and would warn that there were none.
    watched = weakref.ref(optimizer)

    def stepped(*_: Any) -> None:
        old = watched()
        if old is not None:
            old._opt_called = True  # type: ignore[attr-defined]

    taken.register_step_post_hook(stepped)
    return taken
