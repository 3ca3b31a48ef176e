"""Layers that add to the residual stream and normalize the sum: both in one pass over memory.

Looked for is `total = a + b`, maybe `residual = total`, and `normed = self.norm(total)`, one after the other
in the source of a layer's `forward`. Nothing of the layer is assumed: these statements alone are exchanged in
a copy of its code, whatever the two terms are (a product with a multiplier, a dropout) and whatever happens
before and after. Sums that go into anything else but a norm do not have this form.
"""

from __future__ import annotations

import ast
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ._checked_norm import NormForm, check_norm, looks_like_norm
from ._compare import Verdict, any_global_hook, differences, random_tensor, run_with_gradients, twin_of
from ._rewrite import eagerly, innermost, method_tree, rebuilt, recompiled
from ._stand_in import FusedForward
from .rms_norm import add_rms_norm, sum_and_norm

__all__ = ["check_sums", "norms_of_sums"]

_HELPER, _NORMED = "_ts_sum_and_norm", "_ts_normed"
_SEES_NAMES = {"locals", "vars", "dir", "eval", "exec"}  # with which code would notice one name more
_NAMES: weakref.WeakKeyDictionary[Any, tuple[str, ...]] = weakref.WeakKeyDictionary()


def _bodies(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements, those in branches and loops too, but not of functions inside."""
    for name in ("body", "orelse", "finalbody"):
        body = getattr(tree, name, None)
        if isinstance(body, list):
            yield body
            for statement in body:
                if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    yield from _bodies(statement)


def _assigned(statement: ast.stmt) -> tuple[str, ast.expr] | None:
    """Return name and value of an assignment to one name."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target = statement.targets[0]
    return (target.id, statement.value) if isinstance(target, ast.Name) else None


def _norm_of(value: ast.expr, owner: str, total: str) -> str | None:
    """Return the name of the child if the value is `owner.name(total)`."""
    if not isinstance(value, ast.Call) or value.keywords or len(value.args) != 1:
        return None
    code, argument = value.func, value.args[0]
    if not isinstance(argument, ast.Name) or argument.id != total or not isinstance(code, ast.Attribute):
        return None
    return code.attr if isinstance(code.value, ast.Name) and code.value.id == owner else None


class _Place(NamedTuple):
    """A sum and the norm of it, in a list of statements."""

    body: list[ast.stmt]
    first: int
    last: int
    total: str
    norm: str


def _place(body: list[ast.stmt], at: int, owner: str) -> _Place | None:
    first = _assigned(body[at])
    if first is None or not isinstance(first[1], ast.BinOp) or not isinstance(first[1].op, ast.Add):
        return None
    total, last = first[0], at + 1
    following = _assigned(body[last]) if last < len(body) else None
    if following is not None and isinstance(following[1], ast.Name) and following[1].id == total:
        if following[0] == owner:
            return None
        last += 1
        following = _assigned(body[last]) if last < len(body) else None
    norm = None if following is None or total == owner else _norm_of(following[1], owner, total)
    return None if norm is None else _Place(body, at, last, total, norm)


def _places(tree: ast.FunctionDef) -> list[_Place]:
    arguments = [*tree.args.posonlyargs, *tree.args.args]
    if not arguments or any(isinstance(node, (ast.Global, ast.Nonlocal)) for node in ast.walk(tree)):
        return []
    owner = arguments[0].arg
    found = (_place(body, at, owner) for body in _bodies(tree) for at in range(len(body)))
    return [place for place in found if place is not None]


def _put_helper(place: _Place) -> None:
    """Write `_normed, total = helper(a, b, self.norm, "norm")`, and `normed, _normed = _normed, None` later.

    Two names for the rest of the call would keep the normalized values beyond their last use.
    """
    total: Any = place.body[place.first]
    call: Any = place.body[place.last]
    pair = ast.Tuple([ast.Name(_NORMED, ast.Store()), ast.Name(place.total, ast.Store())], ast.Store())
    given = [total.value.left, total.value.right, call.value.func, ast.Constant(place.norm)]
    helped = ast.Call(ast.Name(_HELPER, ast.Load()), given, [])
    both = ast.Tuple([*call.targets, ast.Name(_NORMED, ast.Store())], ast.Store())
    moved = ast.Tuple([ast.Name(_NORMED, ast.Load()), ast.Constant(None)], ast.Load())
    made = (ast.Assign([pair], helped), ast.Assign([both], moved))
    for statement, like in zip(made, (total, call), strict=True):
        for node in ast.walk(statement):
            if not hasattr(node, "lineno"):
                ast.copy_location(node, like)
    place.body[place.first], place.body[place.last] = made


def norms_of_sums(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a layer's norms that its code calls with a sum it has just formed.

    Args:
        module: Any module.

    Returns:
        Names of children that look like norms, each once; empty if the source is not at hand.
    """
    norms = [name for name, child in module._modules.items() if child is not None and looks_like_norm(child)]
    if not norms:
        return ()
    code = innermost(type(module).forward)
    if not isinstance(code, types.FunctionType) or not set(norms) & set(code.__code__.co_names):
        return ()
    if _SEES_NAMES & set(code.__code__.co_names):
        return ()
    if code not in _NAMES:
        try:
            _NAMES[code] = tuple(place.norm for place in _places(method_tree(code)))
        except ValueError:
            _NAMES[code] = ()
    return tuple(name for name in norms if name in _NAMES[code])


def _sum_and_norm(forms: dict[str, tuple[type, NormForm]]) -> Callable[..., Any]:
    def helper(a: Any, b: Any, norm: Any, name: str) -> tuple[Any, Any]:
        kind, form = forms[name]
        if type(norm) is kind and type(a) is Tensor and type(b) is Tensor:
            own = norm.__dict__
            weight = own["_parameters"].get("weight")
            stands = own.get("forward")
            # Whoever watches or changes the calls of the norm sees them.
            if (
                weight is not None
                and a.dtype is b.dtype
                and form.holds(a, weight)
                and a.shape == b.shape
                and a.device == b.device == weight.device
                and (stands is None or type(stands) is FusedForward)
                and not (own["_forward_hooks"] or own["_forward_pre_hooks"])
                and not (own["_backward_hooks"] or own["_backward_pre_hooks"])
                and not any_global_hook()
            ):
                return sum_and_norm(a, b, weight, getattr(norm, form.epsilon), form.offset)
        total = a + b
        return norm(total), total

    return helper


def _compare(norm: Any, form: NormForm, device: torch.device) -> Verdict:
    """Compare the sum and the norm's own code with both in one, where the norm was found to agree."""
    hidden, total = norm.weight.numel(), Verdict()
    for kind, of_weight in sorted(form.pairs, key=str):
        twin = twin_of(norm, {}, True)
        a, b = (random_tensor((3, 5, hidden), device, kind, i).requires_grad_() for i in range(2))
        weight = random_tensor((hidden,), device, of_weight, 2).requires_grad_()
        epsilon = getattr(norm, form.epsilon)

        def own(a: Tensor, b: Tensor, w: Tensor, twin: nn.Module = twin) -> tuple[Tensor, Tensor]:
            both = a + b
            return torch.func.functional_call(twin, {"weight": w}, (both,)), both

        ours = run_with_gradients(
            lambda a, b, w, e=epsilon: add_rms_norm(a, b, w, e, offset=form.offset), (a, b, weight)
        )
        found = differences(ours, run_with_gradients(own, (a, b, weight)), kind, exact_rounding=True)
        if found.reason:
            return found
        total = total.and_(found)
    return total


def check_sums(module: nn.Module, device: torch.device, dtype: torch.dtype) -> Verdict:
    """Check the norms that follow sums, and make the layer's code with both in one."""
    forms: dict[str, tuple[type, NormForm]] = {}
    total = Verdict()
    for name in norms_of_sums(module):
        norm: Any = module._modules[name]
        found = check_norm(norm, device, dtype)
        if found.form is not None:
            forms[name] = (type(norm), found.form)
            found = _compare(norm, found.form, device)
        if found.reason:
            return Verdict(reason=f"{name}: {found.reason}")
        total = total.and_(found)
    helper = _sum_and_norm(forms)

    def made(function: types.FunctionType) -> types.FunctionType:
        tree = method_tree(function)
        for place in _places(tree):
            if place.norm in forms:
                _put_helper(place)
        return recompiled(function, tree, _HELPER, helper)

    return total.with_forward(", ".join(forms), eagerly(rebuilt(type(module).forward, made)))
