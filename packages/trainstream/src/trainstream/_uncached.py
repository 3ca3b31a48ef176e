"""No key-value cache in training where blocks are captured.

A transformers model makes a cache in every call that does not say otherwise, and a block that is given one
cannot be captured. Training has no use for it, so such a call gets ``use_cache=False``. Under gradient
checkpointing transformers does the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainstream._paging import captured

if TYPE_CHECKING:
    from trainstream._session import Session

__all__ = ["Uncached", "train_uncached"]

#: What models call the argument that is a cache.
_CACHES = ("past_key_values", "cache", "past_key_value", "layer_past", "cache_params")
_SAID = (
    "capture: the model is called with use_cache=False while it trains; a call that says use_cache=True is "
    "left alone"
)


class Uncached:
    """Is called before a pass of a module that can make a cache, and lets it make none in training.

    A copy or pickle of the model has one that does nothing.
    """

    def __init__(
        self, session: Session | None = None, names: tuple[str, ...] = (), made: bool = True
    ) -> None:
        """Remember how the module is called.

        Args:
            session: Its pager says whether blocks may be captured; None: do nothing.
            names: Names of the parameters of its ``forward`` that can be given by position, in order.
            made: Whether ``use_cache`` is other than False by default, whatever the configuration says.
        """
        self._session, self._names, self._made = session, names, made

    @torch._disable_dynamo  # as torch.compiler.disable, which would import the compiler here and now
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments with ``use_cache=False``, or None: they stay as they are."""
        session = self._session
        if session is None or session.pager is None or session.pager.block_mode is None:
            return None
        if not (self._made and module.training and torch.is_grad_enabled()):
            return None
        config = getattr(module, "config", None)
        given = dict(zip(self._names, args, strict=False)) | kwargs
        wanted = getattr(config, "use_cache", None)
        if wanted is False or any(given.get(name) is not None for name in ("use_cache", *_CACHES)):
            return None
        named = given.get("return_dict")
        named = getattr(config, "return_dict", True) if named is None else named
        if named:
            session.events.add(_SAID, once=True)
            return self._saying(False, args, kwargs)
        # In a tuple what comes after the cache would move up. Modules inside are not told that it is one.
        return self._saying(True, args, kwargs) if wanted else None

    def _saying(
        self, value: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with ``use_cache``."""
        place = self._names.index("use_cache") if "use_cache" in self._names else len(args)
        if place < len(args):
            return (*args[:place], value, *args[place + 1 :]), kwargs
        return args, {**kwargs, "use_cache": value}

    def __deepcopy__(self, memo: dict[int, Any]) -> Uncached:
        """A copy does nothing."""
        return Uncached()

    def __reduce__(self) -> tuple[type[Uncached], tuple[()]]:
        """The same for a pickled one."""
        return Uncached, ()


def train_uncached(session: Session) -> list[Callable[[], None]]:
    """Let calls of the model in training say ``use_cache=False`` unless they say something else.

    All modules around the blocks that have such an argument are looked after: some give those inside what
    their own configuration says. What is given by a call, a configuration that wants no cache, evaluation and
    passes without gradients stay as they are; so does everything while no pager may capture blocks.

    Args:
        session: The session of the model, with its options and blocks.

    Returns:
        What takes the hooks away.
    """
    if not captured(session.options, torch.device(session.plan.device)):
        return []
    undo: list[Callable[[], None]] = []
    blocks = [session.model.get_submodule(group.name) for group in session.block_map.blocks]
    for module in _around(session.model, blocks):
        try:
            asked = inspect.signature(module.forward).parameters
        except (TypeError, ValueError):  # not Python's, as that of a scripted module
            continue
        if "use_cache" not in asked:
            continue
        kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = tuple(name for name, each in asked.items() if each.kind in kinds)
        hook = Uncached(session, names, asked["use_cache"].default is not False)
        undo.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
    return undo


def _around(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """List the modules that blocks are in, from the outside."""
    wanted = {id(block) for block in blocks}
    inside = {id(module) for block in blocks for module in block.modules()}
    return [
        module
        for module in model.modules()
        if id(module) not in inside and any(id(part) in wanted for part in module.modules())
    ]
