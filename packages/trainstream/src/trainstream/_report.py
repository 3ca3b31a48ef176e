"""`memory_report()`: where the bytes of a wrapped model are, as plain data."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from trainstream._session import Session, session_of
from ts_core.blocks import parameter_bytes
from ts_core.errors import StateError
from ts_optim.gradients import gradient_of
from ts_paging.files import locate
from ts_quant import QuantizedTensor

__all__ = ["block_table", "memory_report", "moved_bytes", "tier_bytes"]


def memory_report(model: nn.Module) -> dict[str, Any]:
    """Say where every byte of a wrapped model is, what moved and what was decided.

    Args:
        model: A model that `wrap()` returned.

    Returns:
        JSON-ready data:

        - ``events``: lines of text, oldest first.
        - ``params``: ``paged_blocks`` (how many blocks do not stay on the device), ``quantize`` (codec of
          frozen block weights), ``total`` and ``trainable`` (elements).
        - ``plan``: the plan as data, and ``history`` with the measured peaks and times of the latest steps.
        - ``kernels``: ``modules``, a row for each that looks like one with a fused path (``name``, ``kind``,
          ``fused``, ``variant``, why not in ``reason``, how far it is from the module's own code), and
          ``attention``: the backend that comes ``first`` (None: torch's own order) and the seconds measured.
        - ``experts``: ``copied``, expert copies made so far (0: experts are not paged).
        - ``captured``: where blocks may be captured, ``blocks`` (how many replayed in the latest pass),
          ``replays``, ``recordings``, ``shapes``, ``bytes`` (that recordings hold) and ``fallbacks`` (reason
          -> names of blocks that did not replay for it); else an empty dictionary.
        - ``tiers``: bytes now in ``device`` (the slots of paged blocks included), ``peer``, ``host`` and
          ``disk``. On a CPU run ``device`` is the RAM that holds weights, buffers and gradients, ``host`` the
          RAM that holds optimizer state.
        - ``moved``: ``h2d_bytes``, ``d2h_bytes`` and ``disk_read_bytes`` so far.
        - ``times``: seconds in optimizer steps so far, as the optimizer counts them.
        - ``blocks``: one row per block: name, kind, tier, codec, policy, parameters, trainable, bytes;
          ``runs`` of its forward and ``fills`` of its slot so far, where it is paged or has a policy.

    Raises:
        StateError: The model is not wrapped.

    Example:
        >>> model, optimizer = trainstream.wrap(torch.nn.Linear(4, 4))
        >>> memory_report(model)["tiers"]["device"]
        80
    """
    session = session_of(model)
    if session is None:
        raise StateError("memory_report(model): expected a wrapped model; call trainstream.wrap(model) first")
    stats = session.optimizer.stats() if hasattr(session.optimizer, "stats") else {}  # type: ignore[union-attr]
    parameters = list(model.parameters())
    mode = None if session.pager is None else session.pager.block_mode
    return {
        "events": list(session.events.events),
        "params": {
            "paged_blocks": len(session.plan.paged),
            "quantize": session.plan.numerics.quantize,
            "total": sum(p.numel() for p in parameters),
            "trainable": sum(p.numel() for p in parameters if p.requires_grad),
        },
        "plan": {**session.plan.to_dict(), "history": [dict(entry) for entry in session.history]},
        "kernels": {} if session.kernels is None else session.kernels.report(),
        "experts": {"copied": 0},
        "captured": mode.report() if mode is not None else {},
        "tiers": tier_bytes(session),
        "moved": moved_bytes(session, stats),
        "times": {key: value for key, value in stats.items() if key.endswith("_s")},
        "blocks": block_table(session),
    }


def moved_bytes(session: Session, stats: dict[str, Any]) -> dict[str, int]:
    """Return what was copied so far: `h2d_bytes`, `d2h_bytes`, `disk_read_bytes`.

    Args:
        session: Of the wrapped model.
        stats: The optimizer's `stats()` or `counters()`, or an empty dictionary.
    """
    moved = {key: int(stats.get(key, 0)) for key in ("h2d_bytes", "d2h_bytes")}
    moved["disk_read_bytes"] = 0
    pager = session.pager
    if pager is not None:
        moved["disk_read_bytes"] = pager.disk_bytes
        if session.plan.device.startswith("cuda"):
            moved["h2d_bytes"] += pager.host_bytes + pager.activations.brought_bytes
            moved["d2h_bytes"] += pager.sink.d2h_bytes + pager.activations.parked_bytes
    return moved


def tier_bytes(session: Session) -> dict[str, int]:
    """Count the bytes that are now in each tier; see `memory_report`."""
    stats = session.optimizer.stats() if hasattr(session.optimizer, "stats") else {}  # type: ignore[union-attr]
    tiers = {"device": 0, "peer": 0, "host": 0, "disk": 0}
    if session.pager is not None:
        tiers["device"] += sum(slot.buffer.numel() for slot in session.pager.slots)
    model = session.model
    on_cuda = session.plan.device.startswith("cuda")
    for tensor in [*model.parameters(), *model.buffers()]:
        with torch._C.DisableTorchFunctionSubclass():  # nothing is read: it waits for no update
            grad = gradient_of(tensor)
        for each in [tensor] if grad is None else [tensor, grad]:
            place = "host" if on_cuda and each.device.type == "cpu" else "device"
            if each.device.type == "cpu" and _in_files(each):
                place = "disk"
            tiers[place] += parameter_bytes(each)
    if "host_state_bytes" in stats:
        tiers["host"] += int(stats["host_state_bytes"])
        tiers["disk"] += int(stats.get("disk_state_bytes", 0))
        tiers["device"] += int(stats.get("device_state_bytes", 0))
    elif session.optimizer is not None:
        for state in session.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    tiers["device" if value.is_cuda or not on_cuda else "host"] += parameter_bytes(value)
    return tiers


def _in_files(tensor: Tensor) -> bool:
    if isinstance(tensor, QuantizedTensor):
        return all(locate(part) is not None for part in tensor.packed.values())
    with torch._C.DisableTorchFunctionSubclass():  # no memory of a paged weight leaves us
        return locate(tensor.detach()) is not None


def block_table(session: Session) -> list[dict[str, Any]]:
    """Return one row per block; see `memory_report`."""
    parameters = dict(session.model.named_parameters(remove_duplicate=False))
    rows = []
    hooked = (*session.pager.blocks, *session.pager.edges) if session.pager is not None else ()
    runs = {b.name: (b.runs, b.fills) for b in hooked}
    for group, plan in zip(session.block_map.groups, session.plan.blocks, strict=True):
        own = [parameters[name] for name in group.parameters if name in parameters]
        rows.append(
            {
                **dataclasses.asdict(plan),
                "parameters": sum(p.numel() for p in own),
                "trainable": sum(p.numel() for p in own if p.requires_grad),
                "bytes": sum(parameter_bytes(p) for p in own),
                "runs": runs.get(group.name, (0, 0))[0],
                "fills": runs.get(group.name, (0, 0))[1],
            }
        )
    return rows
