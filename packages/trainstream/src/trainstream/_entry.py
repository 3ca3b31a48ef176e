"""What `wrap()` refuses about a model and its optimizer, before anything is done."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from trainstream._options import WrapOptions
from trainstream._session import session_of
from ts_core.errors import ArgumentTypeError, OptionError, StateError

__all__ = ["expect_frozen", "expect_model", "note_wrapped", "strangers"]

#: Wrapped models that are alive, by id: a part of one must not be wrapped by itself.
_wrapped: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


def note_wrapped(model: nn.Module) -> None:
    """Remember that a model is wrapped now."""
    _wrapped[id(model)] = model


def expect_model(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Look whether this can be wrapped at all.

    Raises:
        ArgumentTypeError: No module, or no optimizer.
        StateError: It is wrapped already, holds a wrapped one, or is part of one.
        OptionError: It has no values yet, or some that no graph can use.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"wrap(model): expected a torch.nn.Module, given {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(
            f"wrap(optimizer): expected a torch.optim.Optimizer or None, given {type(optimizer).__name__}"
        )
    for name, module in model.named_modules():
        if session_of(module) is not None:
            what = f"its module {name!r}" if name else "the model"
            whom = "that module" if name else "model"
            raise StateError(f"wrap(model): {what} is wrapped already; call trainstream.unwrap({whom}) first")
    for whole in list(_wrapped.values()):
        if session_of(whole) is not None and any(module is model for module in whole.modules()):
            raise StateError(
                f"wrap(model): it is part of a {type(whole).__name__} that is wrapped already; "
                "call trainstream.unwrap() on that one first"
            )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type == "meta":
            raise OptionError(
                f"wrap(model): {name!r} is on the meta device and has no values; load the model's weights "
                "first"
            )
        if tensor.is_inference():
            raise OptionError(
                f"wrap(model): {name!r} was made under torch.inference_mode(), and no graph can use it; make "
                "or load the model outside of it (torch.no_grad() does no harm)"
            )


def expect_frozen(options: WrapOptions, blocks: Sequence[nn.Module]) -> None:
    """Look whether there can be anything to pack, where a codec was named.

    Raises:
        OptionError: There is no stack of blocks, or all of its matrices are trained.
    """
    if options.quantize in ("auto", "none"):
        return
    head = f"option quantize={options.quantize!r}"
    if not blocks:
        raise OptionError(f"{head}: the model has no stack of blocks; name one with blocks=")
    matrices = [p for block in blocks for p in block.parameters() if p.dim() >= 2]
    if matrices and all(p.requires_grad for p in matrices):
        raise OptionError(
            f"{head}: packed weights are frozen, and every matrix of the {len(blocks)} blocks is trained; "
            "freeze the base (model.requires_grad_(False), then adapters, as LoRA does), or leave quantize "
            "out"
        )


def strangers(model: nn.Module, optimizer: Optimizer | None) -> list[str]:
    """Say where the optimizer and the model do not go together altogether."""
    if optimizer is None:
        return []
    own = {id(p): (name, p) for name, p in model.named_parameters()}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    lines = []
    if others := len(held - own.keys()):
        lines.append(
            f"optimizer: {others} of its {len(held)} parameters are not the model's; they are updated where "
            "they are, and no budget counts them"
        )
    left = [name for key, (name, p) in own.items() if p.requires_grad and key not in held]
    if left:
        more = ", ..." if len(left) > 1 else ""
        lines.append(
            f"optimizer: it does not hold {len(left)} parameters that require grad ({left[0]}{more}); their "
            "gradients add up, and nothing updates them"
        )
    return lines
