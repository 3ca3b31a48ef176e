"""Checks a state dict, ours or torch.optim.AdamW's, completely before anything of it is used."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import torch

from ts_core.errors import ArgumentTypeError, CheckpointError, OptionError

from .options import check_group, hyper_of

__all__ = ["checked_groups", "checked_states"]

# torch's ways of computing the same thing: no part of the checkpoint's meaning.
_DROPPED = (
    "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay",
)  # fmt: skip
_WHERE = "[OffloadAdamW.load_state_dict]"
_KNOWN = {"step", "exp_avg", "exp_avg_sq", "master", "ema"}


def checked_groups(state_dict: Any, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check the groups of a state dict against the optimizer's.

    Args:
        state_dict: What `state_dict()` of this class or of torch's AdamW returned.
        groups: The optimizer's groups.

    Returns:
        Copies of the loaded groups without torch's implementation switches; "params" still holds numbers.

    Raises:
        ArgumentTypeError: Not a state dict.
        CheckpointError: Other groups, sizes, names or hyperparameters than can be taken over.
    """
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
        raise ArgumentTypeError(f"{_WHERE} state_dict: expected a dict with 'state' and 'param_groups'")
    saved = state_dict["param_groups"]
    if len(saved) != len(groups):
        raise CheckpointError(
            f"{_WHERE} param_groups: expected {len(groups)} groups as the optimizer has, given {len(saved)}"
        )
    result = []
    for i, (mine, other) in enumerate(zip(groups, saved, strict=True)):
        if len(mine["params"]) != len(other["params"]):
            raise CheckpointError(
                f"{_WHERE} param_groups[{i}]: expected {len(mine['params'])} parameters, given "
                f"{len(other['params'])}"
            )
        names, given = mine.get("param_names"), other.get("param_names")
        if names is not None and given is not None and list(names) != list(given):
            first = next(a for a in zip(names, given, strict=True) if a[0] != a[1])
            raise CheckpointError(
                f"{_WHERE} param_groups[{i}]: expected the optimizer's order of parameters, given "
                f"{first[1]!r} where {first[0]!r} stands"
            )
        try:
            hyper = hyper_of(other)
        except (OptionError, KeyError) as error:
            raise CheckpointError(f"{_WHERE} param_groups[{i}]: {error}") from error
        switch = check_group(other, hyper[-1])
        if switch is not None:
            raise CheckpointError(
                f"{_WHERE} param_groups[{i}]: {switch} is not supported; this is AdamW without AMSGrad, "
                "minimizing, with decoupled decay"
            )
        kept = deepcopy({k: v for k, v in other.items() if k not in _DROPPED and k != "params"})
        if names is not None:
            kept.setdefault("param_names", names)
        result.append({**kept, "params": list(other["params"])})
    return result


def _check_entry(where: str, param: torch.Tensor, entry: dict[str, Any]) -> None:
    extra = entry.keys() - _KNOWN
    missing = {"step", "exp_avg", "exp_avg_sq"} - entry.keys()
    if extra or missing:
        text = f"without {sorted(missing)}" if missing else f"with {sorted(extra)}"
        raise CheckpointError(
            f"{where}: expected step, exp_avg, exp_avg_sq (and master, ema), given one {text}"
        )
    step = float(entry["step"])
    if not math.isfinite(step) or step < 0 or step != int(step):
        raise CheckpointError(f"{where}.step: expected a whole number >= 0, given {step}")
    for name in entry.keys() - {"step"}:
        t = entry[name]
        if not isinstance(t, torch.Tensor) or t.shape != param.shape or not t.is_floating_point():
            given = f"{t.dtype} {tuple(t.shape)}" if isinstance(t, torch.Tensor) else type(t).__name__
            raise CheckpointError(
                f"{where}.{name}: expected a floating tensor of shape {tuple(param.shape)} as the parameter "
                f"at this position, given {given}. Was the optimizer made with the same parameters in the "
                "same order?"
            )


def checked_states(
    state_dict: dict[str, Any], loaded: list[dict[str, Any]], groups: list[dict[str, Any]]
) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """Match the state entries with the optimizer's parameters, by position.

    Args:
        state_dict: The state dict.
        loaded: Its groups, from `checked_groups`.
        groups: The optimizer's groups.

    Returns:
        Pairs of parameter and non-empty entry.

    Raises:
        CheckpointError: An entry of another shape, with missing or unknown parts, or of no parameter.
    """
    owner: dict[Any, torch.Tensor] = {}
    for mine, other in zip(groups, loaded, strict=True):
        owner.update(zip(other["params"], mine["params"], strict=True))
    result = []
    for number, entry in state_dict["state"].items():
        where = f"{_WHERE} state[{number!r}]"
        if number not in owner:
            raise CheckpointError(f"{where}: belongs to no parameter of param_groups")
        if entry:
            _check_entry(where, owner[number], entry)
            result.append((owner[number], entry))
    return result
