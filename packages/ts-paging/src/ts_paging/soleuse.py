"""Whether what comes into a block is used by that block alone.

If others use it too (a loss on hidden states, a tensor that every block takes), the engine adds up their
gradients one by one as they arrive. A block that is one node hands over one sum instead, and the total has
other bits. So the gradients that the block's own operations send are compared with what arrives in all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_flatten

from .calls import is_constant

__all__ = ["comes_twice", "leaves_behind", "stands_against", "watch_use", "what_others_sent"]

_TWICE = "one tensor comes into it twice"


def comes_twice(given: Sequence[Tensor]) -> str:
    """Say so if one that needs a gradient is among tensors twice: its gradients would add up otherwise."""
    wanted = [id(tensor) for tensor in given if tensor.requires_grad]
    return _TWICE if len(set(wanted)) < len(wanted) else ""


def stands_against(
    given: Sequence[Tensor], wanted: Sequence[Tensor], output: Any, written: bool, known: set[int]
) -> str:
    """Return why a block that ran cannot be one node of the graph, or empty.

    Args:
        given: The tensors among its arguments.
        wanted: Those that need a gradient, each once.
        output: What it returned.
        written: It wrote into its arguments or buffers.
        known: ids of what its output may depend on.
    """
    flat = tree_flatten(output)[0]
    tensors = [each for each in flat if isinstance(each, Tensor)]
    others = [each for each in flat if not isinstance(each, Tensor)]
    if written:
        return "it writes into its inputs or buffers"
    if not tensors or any(type(t) is not Tensor for t in tensors) or not all(map(is_constant, others)):
        return "it does not return plain tensors"
    if len(wanted) < sum(t.requires_grad for t in given):
        return _TWICE
    if not known.issuperset(map(id, leaves_behind(wanted, tensors))):
        return "it uses a trained tensor that is neither an argument nor in its modules"
    return ""


def watch_use(inputs: Sequence[Tensor], outputs: Sequence[Tensor], told: Callable[[bool], object]) -> None:
    """Look at the backward pass that follows.

    Args:
        inputs: What came into the block and needs a gradient.
        outputs: What the block returned, of the graph that its operations are part of.
        told: Called once for each input, with whether nobody else uses it.
    """
    edges = [get_gradient_edge(tensor) for tensor in inputs]
    parts: dict[tuple[Any, int], list[Tensor]] = {(edge.node, edge.output_nr): [] for edge in edges}
    ends = {edge.node for edge in edges}
    todo = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen: set[Any] = set(todo) | ends
    while todo:
        node = todo.pop()
        found = [(i, edge) for i, edge in enumerate(node.next_functions) if edge in parts]
        if found:
            node.register_hook(_sends([(index, parts[edge]) for index, edge in found]))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    for (node, number), each in parts.items():
        node.register_prehook(_arrives(number, each, told))


def what_others_sent(arrived: Tensor | None, sent: Tensor) -> str:
    """Describe what was added to a gradient on its way; empty: nothing that changes a value.

    The engine hands on the very tensor that one block sent. Another one with the same values is no sum in
    another order either: a hook may have copied it, or somebody has sent zeros. To tell waits for the device.
    """
    if arrived is sent:
        return ""
    if arrived is None:
        return "nothing arrived"
    with torch.no_grad():
        if _same(arrived, sent):
            return ""
        if arrived.shape != sent.shape:
            return f"of shape {tuple(arrived.shape)} instead of {tuple(sent.shape)}"
        norms = [each.double().norm().item() for each in (arrived - sent, sent)]
    return "what others sent has a norm of {:.3g}, beside {:.3g}".format(*norms)


def leaves_behind(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves that outputs depend on otherwise than through inputs."""
    seen: set[Any] = {get_gradient_edge(tensor).node for tensor in inputs}
    todo = [tensor.grad_fn or get_gradient_edge(tensor).node for tensor in outputs if tensor.requires_grad]
    found = []
    while todo:
        node: Any = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        todo += [following for following, _ in node.next_functions if following is not None]
    return found


def _sends(places: list[tuple[int, list[Tensor]]]) -> Callable[[Any, Any], None]:
    def hook(grad_inputs: Any, grad_outputs: Any) -> None:
        for index, part in places:
            if grad_inputs[index] is not None:
                part.append(grad_inputs[index])

    return hook


def _arrives(number: int, parts: list[Tensor], told: Callable[[bool], object]) -> Callable[[Any], None]:
    def hook(grad_outputs: Any) -> None:
        total = grad_outputs[number]
        if total is None:
            return
        with torch.no_grad():
            mine = [*parts]
            parts.clear()
            while len(mine) > 1:
                mine[:2] = [mine[0] + mine[1]]
            told(bool(mine) and _same(mine[0], total))

    return hook


def _same(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and bool(torch.all((one == two) | ((one != one) & (two != two))))
