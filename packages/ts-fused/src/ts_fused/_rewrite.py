"""Copies of other people's functions with something else in them; the originals stay as they are."""

from __future__ import annotations
import __future__

import ast
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["eagerly", "innermost", "method_tree", "rebuilt", "recompiled"]

_FUTURES = 0
for _name in __future__.all_feature_names:
    _FUTURES |= getattr(__future__, _name).compiler_flag


def innermost(function: Any) -> Any:
    """Return what the decorators stand around."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def rebuilt(function: Any, make: Callable[[types.FunctionType], types.FunctionType]) -> Any:
    """Copy a function, and the decorators around it, with another one inside.

    Raises:
        ValueError: A decorator does not hold what it wraps in one place.
    """
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        made: Any = make(function)
    else:
        replaced = rebuilt(inner, make)
        cells = function.__closure__ or ()
        if sum(cell.cell_contents is inner for cell in cells) != 1:
            raise ValueError(f"the decorator around {function.__name__} does not hold it in one place")
        closure = tuple(types.CellType(replaced) if c.cell_contents is inner else c for c in cells)
        made = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
        )
        made.__wrapped__ = replaced
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def eagerly(code: Callable[..., Any]) -> Callable[..., Any]:
    """Run the code but while a compiler looks on, which would look its global names up in the real module."""

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return type(module).forward(module, *args, **kwargs)
        return code(module, *args, **kwargs)

    return forward


def method_tree(function: types.FunctionType) -> ast.FunctionDef:
    """Parse the source of a method.

    Raises:
        ValueError: There is none, or it is not that of the code that runs.
    """
    try:
        lines, first = inspect.getsourcelines(function)
        # Not dedented: that would change strings of several lines.
        tree = ast.parse("if 1:\n" + "".join(lines) if lines[0][:1].isspace() else "\n" + "".join(lines))
    except (OSError, TypeError, SyntaxError, IndexError) as error:
        raise ValueError(f"its source cannot be read: {error}") from error
    ast.increment_lineno(tree, first - 2)
    body = tree.body[0].body if isinstance(tree.body[0], ast.If) else tree.body
    found = body[0]
    if len(body) != 1 or not isinstance(found, ast.FunctionDef):
        raise ValueError("its source is not that of one method")
    found.decorator_list = []
    found.returns = None
    arguments = found.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    for each in (*every, arguments.vararg, arguments.kwarg):
        if each is not None:
            each.annotation = None
    if not _same_code(_compiled(function, found, ()), function.__code__):
        raise ValueError("its source is not that of the code that runs")
    return found


def _imported(function: types.FunctionType, name: str) -> bool:
    """Guess it by where the value says that it comes from; a wrong guess makes code that is refused."""
    here = function.__globals__
    if name not in here or name in function.__code__.co_freevars:
        return False
    value = here[name]
    return isinstance(value, types.ModuleType) or getattr(value, "__module__", None) not in (
        None,
        here.get("__name__"),
    )


def _compiled(function: types.FunctionType, tree: ast.FunctionDef, more: tuple[str, ...]) -> types.CodeType:
    """Compile a method inside a function whose arguments are what it takes from outside."""
    names = (*function.__code__.co_freevars, *more)
    # Calls of what a name's module has are other instructions where the name was imported; nothing runs.
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    imports = "".join(f"import {name}\n" for name in sorted(used) if _imported(function, name))
    outer = ast.parse(f"{imports}def outer({', '.join(names)}): pass")
    assert isinstance(outer.body[-1], ast.FunctionDef)
    outer.body[-1].body = [tree]
    ast.fix_missing_locations(outer)
    code = function.__code__
    compiled = compile(outer, code.co_filename, "exec", flags=code.co_flags & _FUTURES, dont_inherit=True)
    inner = next(c for c in compiled.co_consts if isinstance(c, types.CodeType))
    return next(c for c in inner.co_consts if isinstance(c, types.CodeType) and c.co_name == tree.name)


def _same_code(a: types.CodeType, b: types.CodeType) -> bool:
    names = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount")
    if any(getattr(a, name) != getattr(b, name) for name in names) or len(a.co_consts) != len(b.co_consts):
        return False
    return all(
        _same_code(x, y)
        if isinstance(x, types.CodeType) and isinstance(y, types.CodeType)
        else type(x) is type(y) and x == y
        for x, y in zip(a.co_consts, b.co_consts, strict=True)
    )


def recompiled(
    function: types.FunctionType, tree: ast.FunctionDef, name: str, value: object
) -> types.FunctionType:
    """Make a function of a changed tree, in which one more name means a value; globals are the real ones."""
    code = _compiled(function, tree, (name,))
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells[name] = types.CellType(value)
    return types.FunctionType(
        code,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(cells[free] for free in code.co_freevars),
    )
