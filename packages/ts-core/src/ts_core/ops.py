"""Declaring native operations to PyTorch: one schema, its kernels, its fake kernel, its contract.

An `OpLibrary` wraps `torch.library.Library(..., "DEF")`. It is used instead of the `custom_op` decorator
because a call then costs 1-3 us rather than 15-31 us.

Differentiation lives outside the ops, in `torch.autograd.Function`s whose forward and backward call them
(grad mode is off there). An op called in grad mode on a tensor that requires grad would otherwise return a
result cut off from the graph, so it raises `StateError` instead. After an op that writes to a tensor, that
tensor's version counter has moved, as after PyTorch's own in-place operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors of a call, those in lists too; None and numbers are left out."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


def _written(schema: torch._C.FunctionSchema) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Find what an op writes to: positions of positional arguments, names of keyword-only ones."""
    chosen = [
        (index, argument)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return (
        tuple(index for index, argument in chosen if not argument.kwarg_only),
        tuple(argument.name for _, argument in chosen if argument.kwarg_only),
    )


def _guarded(
    name: str, kernel: Kernel, check: Check | None, schema: torch._C.FunctionSchema, *, real: bool
) -> Kernel:
    """Wrap a kernel: refuse to be recorded by autograd, check the contract, run, mark what was written."""
    positions, keywords = _written(schema)
    marks = real and bool(positions or keywords)
    lists = any("List[Tensor]" in str(a.type) for a in schema.arguments)
    # This wrapper runs at every call: names bound here, and no generator unless the schema needs one.
    grad_enabled, tensor_class = torch.is_grad_enabled, torch.Tensor
    increment_version = torch._C._increment_version

    # The dispatcher passes a written tensor that has no default by position, however the caller wrote it.
    plain = not keywords and all(str(schema.arguments[p].type) == "Tensor" for p in positions)

    def named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
        values = [args[p] for p in positions if p < len(args)]
        return _tensors_in([*values, *(kwargs.get(keyword) for keyword in keywords)])

    def refuse() -> None:
        raise StateError(
            f"[{name}] expected tensors that do not require grad, or grad mode off; given one that requires "
            "grad. The op has no autograd formula: call the public function that wraps it, or use "
            "torch.no_grad()"
        )

    def run(*args: Any, **kwargs: Any) -> Any:
        if grad_enabled():
            for value in args:
                if isinstance(value, tensor_class) and value.requires_grad:
                    refuse()
            if (kwargs or lists) and any(t.requires_grad for t in _tensors_in((*args, *kwargs.values()))):
                refuse()
        if check is not None:
            check(*args, **kwargs)
        result = kernel(*args, **kwargs)
        if marks:
            # Native code writes behind autograd's back: a backward that saved the old values must raise.
            increment_version([args[p] for p in positions] if plain else list(named(args, kwargs)))
        return result

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
        self._library.impl(short, _guarded(name, cpu, check, parsed, real=True), "CPU")
        self._library.impl(short, _guarded(name, cuda or cpu, check, parsed, real=True), "CUDA")
        torch.library.register_fake(name, _guarded(name, fake, check, parsed, real=False), lib=self._library)
        # Without this PyTorch's own fallback adds a node that warns only in backward, long after the mistake.
        self._library.impl(short, torch.library.fallthrough_kernel, "Autograd")
        positions, keywords = _written(parsed)
        written = tuple(parsed.arguments[index].name for index in positions) + keywords
        _DEFINED[name] = DefinedOp(name=name, schema=schema, overload=overload, mutates=written)
        return overload
