"""What a quantized tensor remembers about its packing, besides the packed tensors: a small frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ts_core.errors import ArgumentError, message

__all__ = ["Meta", "Value"]

Value = bool | int | float | str

_NAME_LIMIT, _COUNT_LIMIT = 64, 32


class Meta(NamedTuple):
    """How a codec packed a tensor: values per scale, and options by name.

    It compares and hashes by value, and `plain` turns it into what pickles and compiled code can hold.

    Attributes:
        block_size: Consecutive values that share a scale; 0 where the format does not work that way.
        options: Pairs (name, value) sorted by name; values are bool, int, float or str.

    Example:
        >>> Meta.make(0, group=128, symmetric=True)
        Meta(block_size=0, options=(('group', 128), ('symmetric', True)))
        >>> Meta.make(0, group=128).get("group")
        128
    """

    block_size: int
    options: tuple[tuple[str, Value], ...] = ()

    @classmethod
    def make(cls, block_size: int, **options: Value) -> Meta:
        """Make one from named options; those that are None or False are left out.

        Args:
            block_size: Values per scale.
            **options: The options.

        Returns:
            The value.
        """
        kept = ((key, value) for key, value in options.items() if value is not None and value is not False)
        return cls(block_size, tuple(sorted(kept)))

    @classmethod
    def of(cls, value: Any) -> Meta:
        """Take what `plain` returned, from a place that may hold anything.

        Args:
            value: A `Meta`, an integer (a block size alone), or a pair (block_size, options), the options as
                pairs or as a mapping.

        Returns:
            The value; types are checked, what it means is for the codec to check.

        Raises:
            ArgumentError: It is none of these, or an option is not a plain value.
        """
        if isinstance(value, Meta):
            return value
        if type(value) is int:
            return cls(value)
        if not (isinstance(value, (tuple, list)) and len(value) == 2 and type(value[0]) is int):
            raise ArgumentError(
                message("Meta.of", "value", "a block size, with named options or without", repr(value)[:200])
            )
        pairs = tuple(value[1].items()) if isinstance(value[1], Mapping) else value[1]
        if not isinstance(pairs, (tuple, list)) or len(pairs) > _COUNT_LIMIT or not all(map(_is_pair, pairs)):
            raise ArgumentError(
                message("Meta.of", "options", "pairs (name, bool, int, float or str)", repr(pairs)[:200])
            )
        return cls(value[0], tuple(sorted((key, item) for key, item in pairs)))

    def get(self, name: str, default: Any = None) -> Any:
        """Return an option, or the default where it is not set.

        Args:
            name: Its name.
            default: What to return without it.
        """
        return dict(self.options).get(name, default)

    def plain(self) -> int | tuple[int, tuple[tuple[str, Value], ...]]:
        """Return it in plain types: the block size alone if there is nothing else to say."""
        return (self.block_size, self.options) if self.options else self.block_size


def _is_pair(pair: Any) -> bool:
    return (
        isinstance(pair, (tuple, list))
        and len(pair) == 2
        and isinstance(pair[0], str)
        and 0 < len(pair[0]) <= _NAME_LIMIT
        and type(pair[1]) in (bool, int, float, str)
        and not (isinstance(pair[1], str) and len(pair[1]) > _NAME_LIMIT)
    )
