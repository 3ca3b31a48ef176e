"""The rotary function that an attention module calls by name, replaced for that module alone."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ._compare import Verdict, differences, random_tensor, run_with_gradients
from ._ops import FLOATS, MAX_ROTARY_DIM
from ._rewrite import eagerly, innermost, rebuilt
from .rotary import rotary

__all__ = ["check_rotary", "rotary_function"]

_NAME = "apply_rotary_pos_emb"


def rotary_function(module: nn.Module) -> Callable[..., Any] | None:
    """Return the function of that name that the module's code refers to."""
    code = innermost(type(module).forward)
    if not isinstance(code, types.FunctionType) or _NAME not in code.__code__.co_names:
        return None
    found = code.__globals__.get(_NAME)
    return found if callable(found) else None


def _with_global(function: types.FunctionType, name: str, value: object) -> types.FunctionType:
    """Copy a function with one global name meaning something else."""
    return types.FunctionType(
        function.__code__,
        {**function.__globals__, name: value},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


# How the angles are laid out: (variant, interleaved, share of the width that is used, width of a pair).
_FORMS = (
    ("halves", False, False, False),
    ("interleaved", True, False, False),
    ("interleaved, angles once", True, True, False),
    ("halves, angles once", False, False, True),
)


def _fused(own: Callable[..., Any], form: Any, partial: bool, keeps_dtype: bool) -> Callable[..., Any]:
    _, interleaved, first_half, once = form

    def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        where = kwargs.get("unsqueeze_dim", 1)
        plain = not args and not set(kwargs) - {"unsqueeze_dim"} and where in (1, 2)
        if not plain or not all(isinstance(t, Tensor) for t in (q, k, cos, sin)):
            return own(q, k, cos, sin, *args, **kwargs)
        width = cos.shape[-1] * (2 if once else 1)
        fits = (
            q.dim() == k.dim() == 4
            and cos.dim() == 3
            and (sin.shape, sin.dtype) == (cos.shape, cos.dtype)
            and cos.shape[1] == q.shape[3 - where] == k.shape[3 - where]  # one angle may stand for all tokens
            and (q.shape[0], q.shape[-1]) == (k.shape[0], k.shape[-1])
            and q.dtype == k.dtype
            and q.dtype in FLOATS
            and cos.dtype in FLOATS
            and (keeps_dtype or cos.dtype == q.dtype)
            and q.device == k.device == cos.device == sin.device
            and cos.shape[0] in (1, q.shape[0])
            and width <= min(q.shape[-1], MAX_ROTARY_DIM)
            and (partial or width == q.shape[-1])
            and not (torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad))
        )
        if not fits:
            return own(q, k, cos, sin, *args, **kwargs)
        if first_half:
            cos, sin = cos[..., : width // 2], sin[..., : width // 2]
        return rotary(q, k, cos, sin, unsqueeze_dim=where, interleaved=interleaved, rotary_dim=width)

    return apply_rotary_pos_emb


def _never(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("the fused path refused what was tried")


def _agrees(own: Callable[..., Any], form: Any, device: torch.device, dtype: torch.dtype) -> Verdict:
    """Compare on heads that turn whole, in fp32 and in the dtype, and on heads that turn in part."""
    total, fused = Verdict(), _fused(_never, form, True, True)
    partial, keeps = True, True
    short = torch.bfloat16 if dtype is torch.float32 else dtype
    for kind, angle_kind, dim, where in (
        (torch.float32, torch.float32, 16, 1),
        (torch.float32, torch.float32, 16, 2),
        (dtype, dtype, 16, 1),
        (torch.float32, torch.float32, 24, 1),
        (short, torch.float32, 16, 1),
    ):
        heads = ((2, 3, 5, dim), (2, 1, 5, dim)) if where == 1 else ((2, 5, 3, dim), (2, 5, 1, dim))
        q, k = (random_tensor(s, device, kind, i).requires_grad_() for i, s in enumerate(heads))
        width = 8 if form[3] else 16
        cos, sin = (random_tensor((2, 5, width), device, angle_kind, 7 + i) for i in range(2))
        options = {} if where == 1 else {"unsqueeze_dim": 2}
        try:
            theirs, ours = (
                run_with_gradients(lambda a, b, f=f, c=cos, s=sin, o=options: f(a, b, c, s, **o), (q, k))
                for f in (own, fused)
            )
            found = differences(ours, theirs, kind)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            found = Verdict(reason=f"{error!r}"[:200])
        # Heads that turn in part, and angles of another dtype than the heads', are optional.
        if found.reason and dim == 24:
            partial = False
        elif found.reason and kind != angle_kind:
            keeps = False
        elif found.reason:
            return found
        else:
            total = total.and_(found)
    return total.with_forward(form[0], _fused(own, form, partial, keeps))


def check_rotary(module: nn.Module, device: torch.device, dtype: torch.dtype) -> Verdict:
    """Find the form of the function that the module calls, and give the module a code of its own."""
    own = rotary_function(module)
    assert own is not None
    first = None
    for form in _FORMS:
        verdict = _agrees(own, form, device, dtype)
        if verdict.forward is not None:
            make = functools.partial(_with_global, name=_NAME, value=verdict.forward)
            code = rebuilt(type(module).forward, make)
            return verdict.with_forward(verdict.variant, eagerly(code))
        first = first or verdict
    assert first is not None
    return first
