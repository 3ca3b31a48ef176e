"""Declaring native operations to PyTorch: one schema, its kernels, its fake kernel, its contract.

An `OpLibrary` wraps `torch.library.Library(..., "DEF")`. It is used instead of the `custom_op` decorator
because a call then costs 1-3 us rather than 15-31 us.

Differentiation lives outside the ops, in `torch.autograd.Function`s whose forward and backward call them
(grad mode is off there). An op called in grad mode on a tensor that requires grad would otherwise return a
result cut off from the graph, so it raises `StateError` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .errors import ArgumentError, StateError

__all__ = ["DefinedOp", "OpLibrary", "defined_ops"]

# Typed here because torch leaves it unannotated.
_LIBRARY: Any = torch.library.Library

Kernel = Callable[..., Any]
Check = Callable[..., None]


@dataclass(frozen=True)
class DefinedOp:
    """One operation that an `OpLibrary` declared.

    Attributes:
        name: Qualified name, `"namespace::name"`.
        schema: The schema as given to `define`.
        overload: What to call; faster than going through `torch.ops`.
        mutates: Names of the arguments that the op writes to.
    """

    name: str
    schema: str
    overload: torch._ops.OpOverload
    mutates: tuple[str, ...]


_DEFINED: dict[str, DefinedOp] = {}


def defined_ops(namespace: str | None = None) -> tuple[DefinedOp, ...]:
    """List the operations declared so far in this process.

    Args:
        namespace: Only those of this namespace, such as "ts_quant"; `None` lists all.

    Returns:
        The operations, in the order of their declaration.

    Example:
        >>> [op.name for op in defined_ops("no_such_namespace")]
        []
    """
    prefix = "" if namespace is None else f"{namespace}::"
    return tuple(op for name, op in _DEFINED.items() if name.startswith(prefix))


def _tensor_arguments(schema: torch._C.FunctionSchema) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the positions of positional tensors and the names of keyword-only ones."""
    positions: list[int] = []
    keywords: list[str] = []
    for index, argument in enumerate(schema.arguments):
        if "Tensor" not in str(argument.type):
            continue
        if argument.kwarg_only:
            keywords.append(argument.name)
        else:
            positions.append(index)
    return tuple(positions), tuple(keywords)


def _requires_grad(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    return isinstance(value, (list, tuple)) and any(_requires_grad(item) for item in value)


def _guarded(name: str, kernel: Kernel, check: Check | None, schema: torch._C.FunctionSchema) -> Kernel:
    """Wrap a kernel so that it refuses to be recorded by autograd and runs the contract check first."""
    positions, keywords = _tensor_arguments(schema)
    grad_enabled = torch.is_grad_enabled

    def refuse() -> None:
        raise StateError(
            f"[{name}] expected tensors that do not require grad, or grad mode off; given one that requires "
            "grad. The op has no autograd formula: call the public function that wraps it, or use "
            "torch.no_grad()"
        )

    def run(*args: Any, **kwargs: Any) -> Any:
        if grad_enabled():
            count = len(args)
            for position in positions:
                if position < count and _requires_grad(args[position]):
                    refuse()
            for keyword in keywords:
                if keyword in kwargs and _requires_grad(kwargs[keyword]):
                    refuse()
        if check is not None:
            check(*args, **kwargs)
        return kernel(*args, **kwargs)

    run.__name__ = run.__qualname__ = name.replace("::", "_")
    run.__doc__ = kernel.__doc__
    return run


class OpLibrary:
    """Declares operations in one namespace of `torch.ops`.

    Keep the object alive in a module variable: PyTorch withdraws the ops when the library is collected.

    Example:
        >>> library = OpLibrary("ts_core_doc")
        >>> double = library.define(
        ...     "double(Tensor x) -> Tensor", cpu=lambda x: x + x, fake=lambda x: torch.empty_like(x)
        ... )
        >>> double(torch.ones(2))
        tensor([2., 2.])
    """

    def __init__(self, namespace: str) -> None:
        """Open the namespace.

        Args:
            namespace: The first part of each op's name; the package's import name.

        Raises:
            ArgumentError: Not a Python identifier.
        """
        if not isinstance(namespace, str) or not namespace.isidentifier():
            raise ArgumentError(f"[OpLibrary] namespace: expected a Python identifier, given {namespace!r}")
        self.namespace = namespace
        self._library = _LIBRARY(namespace, "DEF")

    @property
    def ops(self) -> tuple[DefinedOp, ...]:
        """The operations declared in this namespace."""
        return defined_ops(self.namespace)

    def define(
        self,
        schema: str,
        *,
        cpu: Kernel,
        cuda: Kernel | None = None,
        fake: Kernel,
        check: Check | None = None,
        tags: Sequence[torch.Tag] = (),
    ) -> torch._ops.OpOverload:
        """Declare one operation and its kernels.

        Args:
            schema: `"name(Tensor x, Tensor(a!) out, int n) -> ()"`; a written tensor carries `(a!)`.
            cpu: Kernel for CPU tensors. It runs below autograd, with the arguments as the caller passed them:
                those left at their default are not passed, so its signature repeats the schema's defaults.
            cuda: Kernel for CUDA tensors; `None` registers `cpu`, for a callable that dispatches by itself.
            fake: Kernel for meta and fake tensors: allocates outputs, computes nothing.
            check: Contract of the arguments, called with the same arguments before each of the kernels, the
                fake one included, so that a bad call fails alike when traced and when run. Leave it out if
                the native code checks and `fake` does the same.
            tags: Additional `torch.Tag`s; `pt2_compliant_tag` is always there.

        Returns:
            The overload to call.

        Raises:
            StateError: The namespace has an op of this name already.
            ArgumentError: The schema names an overload or another namespace, or cannot be parsed.
        """
        short = schema.split("(", 1)[0].strip()
        name = f"{self.namespace}::{short}"
        if not short.isidentifier():
            raise ArgumentError(f"[OpLibrary.define] schema: expected 'name(...) -> ...', given {schema!r}")
        if name in _DEFINED:
            raise StateError(f"[OpLibrary.define] {name} is declared already")
        all_tags = (torch.Tag.pt2_compliant_tag, *tags)
        try:
            self._library.define(schema, tags=all_tags)
        except RuntimeError as error:
            raise ArgumentError(
                f"[OpLibrary.define] schema {schema!r} is refused by PyTorch: {error}"
            ) from error
        overload: torch._ops.OpOverload = getattr(getattr(torch.ops, self.namespace), short).default
        parsed = overload._schema
        self._library.impl(short, _guarded(name, cpu, check, parsed), "CPU")
        self._library.impl(short, _guarded(name, cuda or cpu, check, parsed), "CUDA")
        torch.library.register_fake(name, _guarded(name, fake, check, parsed), lib=self._library)
        # Without this PyTorch's own fallback adds a node that warns only in backward, long after the mistake.
        self._library.impl(short, torch.library.fallthrough_kernel, "Autograd")
        written = tuple(
            a.name for a in parsed.arguments if a.alias_info is not None and a.alias_info.is_write
        )
        _DEFINED[name] = DefinedOp(name=name, schema=schema, overload=overload, mutates=written)
        return overload
