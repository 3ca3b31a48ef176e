"""Keys and values of long contexts in blocks that live in host RAM, quantized or both.

A layer keeps its latest tokens on the device as they are. Once `block_tokens` of them are there, they become
a block: stored where and how the cache was asked to, never changed again. A forward of a layer gets all of
them back as one tensor. On a GPU the blocks of the next layer are copied while this one computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from ts_core import registry
from ts_core.errors import ArgumentError, MissingDependencyError, OptionError, StateError, message
from ts_core.options import choice, integer

__all__ = ["BlockCache"]

#: Values that share a scale: of one token's value vector, of one channel of the keys over tokens.
_GROUP = 64


def _codec(name: str) -> registry.Codec | None:
    if name == "none":
        return None
    try:
        import ts_quant  # noqa: F401  (registers its codecs)
    except ImportError as error:
        raise MissingDependencyError(
            f"option quantize={name!r}: the codecs are in ts-quant, which is not installed ({error}); "
            'install it from its folder, or use quantize="none"',
            name="ts_quant",
        ) from error
    return registry.codec(name)


class _Stored:
    """A tensor that is put away: as it is or encoded, on the device or in host RAM. Never changed again."""

    def __init__(self, tensor: Tensor, codec: registry.Codec | None, on_host: bool) -> None:
        self.shape, self.dtype, self.device = tuple(tensor.shape), tensor.dtype, tensor.device
        self.codec = codec
        tensor = tensor.contiguous()
        parts = {"": tensor} if codec is None else codec.encode(tensor, _GROUP)
        self._leaving: dict[str, registry.CopyTicket] = {}
        self._arriving: dict[str, tuple[Tensor, registry.CopyTicket]] = {}
        self.travels = on_host and self.device.type != "cpu"
        self.parts = (
            {name: self._to_host(name, part) for name, part in parts.items()} if self.travels else parts
        )

    def _to_host(self, name: str, part: Tensor) -> Tensor:
        flat = registry.host_allocator().empty(part.numel() * part.element_size())
        host = flat.view(part.dtype).view(part.shape)
        self._leaving[name] = registry.copy_engine().d2h(host, part)
        return host

    def prefetch(self) -> None:
        """Start copying to the device."""
        if not self.travels or self._arriving:
            return
        for name, part in self.parts.items():
            leaving = self._leaving.pop(name, None)
            if leaving is not None:
                leaving.wait_stream(torch.cuda.current_stream(self.device))
            there = torch.empty_like(part, device=self.device)
            self._arriving[name] = there, registry.copy_engine().h2d(there, part)

    def take(self) -> Tensor:
        """Return the tensor on the device; what was copied there for it is let go."""
        parts = self.parts
        if self.travels:
            self.prefetch()
            parts = {}
            for name, (there, ticket) in self._arriving.items():
                ticket.wait_stream(torch.cuda.current_stream(self.device))
                parts[name] = there
            self._arriving = {}
        return parts[""] if self.codec is None else self.codec.decode(parts, self.shape, self.dtype, _GROUP)

    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.parts.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> _Stored:
        return self


class _Block:
    """Keys and values of some tokens, `(batch, heads, tokens, size)`, and which rows of them count."""

    def __init__(self, keys: Tensor, values: Tensor, codec: registry.Codec | None, on_host: bool) -> None:
        self.tokens = keys.shape[-2]
        # Channels of keys differ in size by much more than tokens do: each channel gets its own scales
        # (https://arxiv.org/abs/2402.02750).
        self._turned = codec is not None
        keys = keys.transpose(-1, -2) if self._turned else keys
        self._stored = _Stored(keys, codec, on_host), _Stored(values, codec, on_host)
        self.rows: Tensor | None = None

    def prefetch(self) -> None:
        for stored in self._stored:
            stored.prefetch()

    def take(self) -> tuple[Tensor, Tensor]:
        keys, values = (stored.take() for stored in self._stored)
        keys = keys.transpose(-1, -2) if self._turned else keys
        if self.rows is not None:
            keys, values = keys.index_select(0, self.rows), values.index_select(0, self.rows)
        return keys[..., : self.tokens, :], values[..., : self.tokens, :]

    def nbytes(self) -> int:
        return sum(stored.nbytes() for stored in self._stored)

    def batch(self) -> int:
        return self._stored[1].shape[0] if self.rows is None else len(self.rows)


class _BlockLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of full attention; `keys` and `values` are the tokens that are in no block yet."""

    def __init__(self, codec: registry.Codec | None, on_host: bool, block_tokens: int) -> None:
        super().__init__()
        self._codec, self._on_host, self._block_tokens = codec, on_host, block_tokens
        self.blocks: list[_Block] = []
        # What is put away as codes does not come back as it was.
        self.is_croppable = codec is None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise StateError(
                "[BlockCache.update] keys that need a gradient: this cache is for evaluation and generation; "
                "use torch.no_grad(), or train with use_cache=False"
            )
        super().update(key_states, value_states)
        found = self.whole()
        self._put_away()
        return found

    def _put_away(self) -> None:
        size, length = self._block_tokens, self.keys.shape[-2]
        full = length // size * size
        for start in range(0, full, size):
            keys, values = (t[..., start : start + size, :] for t in (self.keys, self.values))
            self.blocks.append(_Block(keys, values, self._codec, self._on_host))
        if full:
            self._keep(lambda tensor: tensor[..., full:, :])

    def _keep(self, cut: Callable[[Tensor], Tensor]) -> None:
        """Keep a part of the latest tokens; cloned, since a view would keep all that it was cut from."""
        latest: tuple[Tensor, Tensor] = (self.keys, self.values)  # type: ignore[has-type]
        kept = [cut(tensor) for tensor in latest]
        # None left: without a batch, so that tokens of any other one can follow.
        self.keys, self.values = (t.clone() if t.numel() else t.new_empty(0) for t in kept)

    def whole(self) -> tuple[Tensor, Tensor]:
        """Return all keys and values on the device."""
        tail: tuple[Tensor, Tensor] = (self.keys, self.values)
        if not self.blocks:
            return tail
        parts = [*(block.take() for block in self.blocks), tail]
        return torch.cat([keys for keys, _ in parts], -2), torch.cat([values for _, values in parts], -2)

    def prefetch(self) -> None:
        for block in self.blocks:
            block.prefetch()

    def offload(self) -> None:
        """Do nothing: blocks are where they belong."""

    def get_seq_length(self) -> int:
        if not self.is_initialized:
            return 0
        tail = self.keys.shape[-2] if self.keys.numel() else 0
        return sum(block.tokens for block in self.blocks) + tail

    def reset(self) -> None:
        self.blocks = []
        # Dropped: transformers before 5.18 would leave so many tokens of zeros.
        self.keys = self.values = None  # type: ignore[assignment]
        self.is_initialized = False
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ArgumentError(
                message("BlockCache.crop", "tokens_to_remove", "0 or negative: how many", tokens_to_remove)
            )
        if tokens_to_remove == 0 or not self.is_initialized:
            return
        left = -tokens_to_remove
        tail = self.keys.shape[-2] if self.keys.numel() else 0
        if tail:
            self._keep(lambda tensor: tensor[..., : max(tail - left, 0), :])
        left -= min(left, tail)
        while left and self.blocks:
            last = self.blocks[-1]
            removed = min(left, last.tokens)
            last.tokens -= removed
            left -= removed
            if not last.tokens:
                self.blocks.pop()

    def _choose(self, choose: Callable[[Tensor], Tensor]) -> None:
        """Take other rows of the batch: of blocks only the numbers of the rows are changed."""
        if not self.is_initialized:
            return
        made: dict[int, Tensor] = {}  # blocks that have seen the same choices share them
        for block in self.blocks:
            before = block.rows
            if id(before) not in made:
                rows = torch.arange(block.batch(), device=self.device) if before is None else before
                made[id(before)] = choose(rows)
            block.rows = made[id(before)]
        if self.keys.numel():
            self.keys, self.values = choose(self.keys), choose(self.values)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._choose(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._choose(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._choose(lambda rows: rows[indices.to(rows.device)])


class BlockCache(DynamicCache):  # type: ignore[misc]
    """A transformers `Cache` whose blocks of keys and values live in host RAM and/or quantized.

    For evaluation and generation of contexts whose keys and values do not fit beside the model, wrapped or
    not. Not quantized it computes the bits of `DynamicCache`. Only full attention is kept in blocks: layers
    with a sliding window hold no more than the window, and recurrent ones have no tokens; both stay as
    transformers makes them.

    On the device are at any time: the latest tokens of each layer (less than `block_tokens`), and the whole
    keys and values of the layer that computes and of those fetched ahead.

    The argument that takes it is called `cache`, in earlier releases of transformers 5 `past_key_values`.

    Args:
        config: Of the model: `model.config`.
        place: "host" puts blocks into (page-locked) host RAM, "device" leaves them where they are computed.
        quantize: "none", or a codec for the blocks: "int8" (1.06 bytes a value) or "nf4" (0.56). Keys have a
            scale for every 64 tokens of a channel, values one for every 64 of a token's values; the latest
            tokens stay exact until they become a block.
        block_tokens: Tokens of a block, a multiple of 64.
        prefetch_depth: How many layers are fetched ahead; 0 fetches when they are needed.

    Raises:
        OptionError: A value outside of these.
        MissingDependencyError: `quantize` without ts-quant.

    Example:
        >>> cache = BlockCache(model.config, quantize="int8")  # doctest: +SKIP
        >>> model.generate(**inputs, cache=cache, max_new_tokens=100)  # doctest: +SKIP
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        place: str = "host",
        quantize: str = "none",
        block_tokens: int = 256,
        prefetch_depth: int = 1,
    ) -> None:
        """Make empty layers."""
        if not isinstance(config, PreTrainedConfig):
            raise OptionError(f"option config: expected a model's config, given {type(config).__name__}")
        on_host = choice("place", place, ("host", "device")) == "host"
        codec = _codec(choice("quantize", quantize, ("none", "int8", "nf4")))
        size = integer("block_tokens", block_tokens, minimum=_GROUP, multiple_of=_GROUP)
        self._depth = integer("prefetch_depth", prefetch_depth, minimum=0)
        super().__init__(config=config)
        self.layers: list[Any] = [
            _BlockLayer(codec, on_host, size) if type(layer) is DynamicLayer else layer
            for layer in self.layers
        ]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add a layer's new keys and values `(batch, heads, tokens, size)`.

        Returns:
            All of the layer's, on the device of the new ones.

        Raises:
            StateError: They need a gradient.
        """
        kept = [i for i, layer in enumerate(self.layers) if isinstance(layer, _BlockLayer)]
        if layer_idx in kept and self._depth and key_states.device.type != "cpu":
            at = kept.index(layer_idx)
            for ahead in range(1, min(self._depth, len(kept) - 1) + 1):
                self.layers[kept[(at + ahead) % len(kept)]].prefetch()
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def stored_bytes(self) -> int:
        """Return the bytes of all blocks, without the latest tokens, which are in none yet."""
        layers = [layer for layer in self.layers if isinstance(layer, _BlockLayer)]
        return sum(block.nbytes() for layer in layers for block in layer.blocks)

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        """Go through the layers: all keys, all values, and the window of a sliding one."""
        for layer in self.layers:
            if isinstance(layer, _BlockLayer) and layer.is_initialized:
                yield (*layer.whole(), None)
            else:
                yield layer.keys, layer.values, getattr(layer, "_sliding_window_tensor", None)
