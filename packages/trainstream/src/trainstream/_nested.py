"""Nested state as JSON data and named tensors, so that a checkpoint needs no pickle."""

from __future__ import annotations

from typing import Any

import torch

from ts_core.errors import CheckpointError

__all__ = ["flatten", "unflatten"]


def flatten(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split nested state (dicts, lists, tuples, numbers, texts, tensors) into JSON data and named tensors.

    Dict keys keep their type (optimizer states are keyed by integers), which JSON objects would lose.

    Args:
        state: For example `optimizer.state_dict()`.

    Returns:
        A JSON-serialisable tree, and the tensors it refers to, by name; they are the state's own.

    Raises:
        CheckpointError: The state holds something else, which would need pickle.

    Example:
        >>> tree, tensors = flatten({0: {"step": torch.tensor(3.0)}, "lr": 0.1})
        >>> unflatten(tree, tensors)
        {0: {'step': tensor(3.)}, 'lr': 0.1}
    """
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            name = path.strip(".") or "value"
            while name in tensors:
                name += "_"
            # The state itself, not a copy of it, unless it is in there twice: a file holds no views.
            plain = value.detach()
            address = plain.untyped_storage().data_ptr()
            tensors[name] = plain.clone() if address in seen else plain
            seen.add(address)
            return {"tensor": name}
        if isinstance(value, dict):
            return {"dict": [[walk(k, path), walk(v, f"{path}.{k}")] for k, v in value.items()]}
        if isinstance(value, (list, tuple)):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [walk(item, f"{path}.{index}") for index, item in enumerate(value)]}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise CheckpointError(
            f"[flatten] {path.strip('.') or 'state'}: expected tensors, numbers, texts and containers of "
            f"them, given {type(value).__name__}; it cannot be saved without pickle"
        )

    return walk(state, ""), tensors


def unflatten(tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Rebuild the state that `flatten` split.

    Args:
        tree: The JSON data.
        tensors: The tensors by name.

    Returns:
        The state; tensors are the given objects.

    Raises:
        CheckpointError: The tree is malformed or names a tensor that is not there.
    """
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        kind, value = next(iter(tree.items()))
        if kind == "tensor" and value in tensors:
            return tensors[value]
        if kind == "dict":
            return {unflatten(k, tensors): unflatten(v, tensors) for k, v in value}
        if kind == "list":
            return [unflatten(item, tensors) for item in value]
        if kind == "tuple":
            return tuple(unflatten(item, tensors) for item in value)
    raise CheckpointError(f"[unflatten] malformed checkpoint state near {str(tree)[:80]!r}")
