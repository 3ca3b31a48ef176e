"""Several documents in one row: full rows instead of padding, with attention kept inside each document.

A row holds documents one after the other; `position_ids` start at 0 with each of them. transformers reads the
borders from those positions: the eager and SDPA masks block what lies across a border, sliding windows count
inside the document, and flash attention gets the lengths (of one row: see `flatten_rows`). That works without
`attention_mask` and without a cache, so both are left out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ts_core.errors import ArgumentError, ArgumentTypeError, OptionError, message
from ts_core.options import integer

from .losses import backbone

__all__ = [
    "PackedCollator",
    "best_fit",
    "check_isolation",
    "document_ids",
    "flatten_rows",
    "pack_sequences",
]

IGNORE = -100
#: Model types whose documents were seen not to reach each other (tests); others are tried before training.
#: gpt_oss of transformers 5.24 is not among them: its masks are made without the positions.
ISOLATING = frozenset(
    {
        "cohere", "deepseek_v3", "gemma2", "gemma3_text", "gpt2", "granite", "llama", "mistral", "mixtral",
        "olmo2", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2",
    }
)  # fmt: skip


def best_fit(lengths: Sequence[int], max_len: int) -> list[list[int]]:
    """Put items into as few rows as best-fit decreasing finds: the longest first, each where it fits closest.

    At most `11/9 * optimum + 1` rows (Johnson 1973, https://dspace.mit.edu/handle/1721.1/57819).

    Args:
        lengths: Length of each item, 0 to `max_len`.
        max_len: Length of a row, >= 1.

    Returns:
        The indices of each row's items, longest first; every index once. Equal lengths stay in order.

    Raises:
        ArgumentError: A length below 0 or above `max_len`.

    Example:
        >>> best_fit([3, 5, 2, 6], 8)
        [[3, 2], [1, 0]]
    """
    max_len = integer("max_len", max_len, minimum=1)
    sizes = [int(length) for length in lengths]
    for index, size in enumerate(sizes):
        if not 0 <= size <= max_len:
            raise ArgumentError(
                message("best_fit", f"lengths[{index}]", f"0 to max_len ({max_len})", size, "Split it first")
            )
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free, row), sorted
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        place = bisect_left(room, (sizes[index], 0))
        if place < len(room):
            free, row = room.pop(place)
        else:
            free, row = max_len, len(rows)
            rows.append([])
        rows[row].append(index)
        insort(room, (free - sizes[index], row))
    return rows


def _tokens(name: str, index: int, values: Any) -> Tensor:
    """Return a document as int64 on the CPU."""
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        given = f"{type(values).__name__} ({error})"
        raise ArgumentTypeError(
            message("pack_sequences", f"{name}[{index}]", "token ids in a list or 1-D tensor", given)
        ) from error
    if tensor.numel() == 0 and tensor.dim() == 1:
        return torch.empty(0, dtype=torch.int64)  # an empty list has a floating dtype
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ArgumentTypeError(message("pack_sequences", f"{name}[{index}]", "integers", tensor.dtype))
    if tensor.dim() != 1:
        given = f"shape {tuple(tensor.shape)}"
        raise ArgumentError(message("pack_sequences", f"{name}[{index}]", "one dimension", given))
    return tensor.detach().to("cpu", torch.int64)


def _pieces(
    sequences: Sequence[Any], labels: Sequence[Any] | None, max_len: int
) -> list[tuple[Tensor, Tensor]]:
    """Cut every document into (tokens, labels) of at most `max_len`; a piece's first label does not count."""
    if labels is not None and len(labels) != len(sequences):
        expected = f"one for each of {len(sequences)} sequences"
        raise ArgumentError(message("pack_sequences", "labels", expected, len(labels)))
    pieces = []
    for index, sequence in enumerate(sequences):
        tokens = _tokens("sequences", index, sequence)
        targets = tokens if labels is None else _tokens("labels", index, labels[index])
        if targets.shape != tokens.shape:
            raise ArgumentError(
                message("pack_sequences", f"labels[{index}]", f"{len(tokens)} labels", len(targets))
            )
        for start in range(0, len(tokens), max_len):
            piece = targets[start : start + max_len].clone()
            piece[0] = IGNORE
            pieces.append((tokens[start : start + max_len], piece))
    return pieces


def _fill(rows: list[list[tuple[Tensor, Tensor]]], max_len: int, pad_id: int) -> dict[str, Any]:
    shape = (len(rows), max_len)
    ids = torch.full(shape, pad_id, dtype=torch.int64)
    positions = torch.zeros(shape, dtype=torch.int64)
    targets = torch.full(shape, IGNORE, dtype=torch.int64)
    count = 0
    for row, pieces in enumerate(rows):
        start = 0
        for tokens, labels in pieces:
            end = start + len(tokens)
            ids[row, start:end], targets[row, start:end] = tokens, labels
            positions[row, start:end] = torch.arange(len(tokens))
            start = end
        positions[row, start:] = torch.arange(max_len - start)  # padding is a document of its own
        count += start
    return {"input_ids": ids, "position_ids": positions, "labels": targets, "num_tokens": count}


def pack_sequences(
    sequences: Sequence[Sequence[int] | Tensor],
    max_len: int,
    *,
    labels: Sequence[Sequence[int] | Tensor] | None = None,
    pad_id: int = 0,
) -> dict[str, Any]:
    """Put documents into rows of `max_len` tokens (see `best_fit`).

    Call the model with `input_ids`, `position_ids` and `use_cache=False`, and no `attention_mask`. Loss and
    gradients are those of the documents run one by one: no label counts across a border.

    Args:
        sequences: Token ids of each document: lists or 1-D integer tensors. Empty ones are left out; those
            longer than `max_len` are cut, and each piece is a document of its own.
        max_len: Tokens of a row, >= 1.
        labels: Labels of each document, as long as it, not shifted; None takes the tokens.
        pad_id: Token that fills the rest of a row.

    Returns:
        `input_ids`, `position_ids`, `labels`: int64 `(rows, max_len)` on the CPU. `position_ids` start at 0
        with each document, and with the padding; `labels` are -100 at each document's first token (nothing
        predicts it) and in the padding. `num_tokens`: how many tokens are no padding, an int.

    Raises:
        ArgumentTypeError: Something that is no token ids.
        ArgumentError: Labels of another length, or no token at all.

    Example:
        >>> batch = pack_sequences([[5, 6, 7], [8, 9]], 6)
        >>> batch["input_ids"].tolist(), batch["position_ids"].tolist(), batch["labels"].tolist()
        ([[5, 6, 7, 8, 9, 0]], [[0, 1, 2, 0, 1, 0]], [[-100, 6, 7, -100, 9, -100]])
    """
    max_len = integer("max_len", max_len, minimum=1)
    pad_id = integer("pad_id", pad_id)
    pieces = _pieces(sequences, labels, max_len)
    if not pieces:
        raise ArgumentError(
            message("pack_sequences", "sequences", "at least one token", f"{len(sequences)} sequences")
        )
    rows = best_fit([len(tokens) for tokens, _ in pieces], max_len)
    return _fill([[pieces[index] for index in row] for row in rows], max_len, pad_id)


class PackedCollator:
    """Collates examples into packed rows; for a `DataLoader` or transformers' `Trainer`.

    Examples are mappings with `input_ids` and, if they have them, `labels` (else the tokens) and
    `attention_mask` (what it marks with 0 is taken for padding and dropped); other entries are left out.

    Args:
        max_len: Tokens of a row; None takes the longest example of the batch.
        pad_id: Token that fills the rest of a row.
        share_rows: With False, each example (each piece of a longer one) has a row of its own.

    Raises:
        OptionError: `max_len` below 1.

    Example:
        >>> batch = PackedCollator(4)([{"input_ids": [5, 6]}, {"input_ids": [7, 8]}])
        >>> batch["input_ids"].tolist(), batch["use_cache"]
        ([[5, 6, 7, 8]], False)
    """

    def __init__(self, max_len: int | None = None, pad_id: int = 0, *, share_rows: bool = True) -> None:
        """Check the options."""
        self.max_len = None if max_len is None else integer("max_len", max_len, minimum=1)
        self.pad_id = integer("pad_id", pad_id)
        self.share_rows = share_rows

    def __call__(self, examples: Sequence[Any]) -> dict[str, Any]:
        """Return `input_ids`, `position_ids`, `labels` and `use_cache` (False); see `pack_sequences`."""
        batch = self.pack(examples)
        del batch["num_tokens"]
        return {**batch, "use_cache": False}

    def pack(self, examples: Sequence[Any]) -> dict[str, Any]:
        """Return what `pack_sequences` does."""
        sequences, labels = [], []
        for index, example in enumerate(examples):
            if "input_ids" not in example:
                raise ArgumentError(
                    message("PackedCollator", f"examples[{index}]", "input_ids", f"keys {sorted(example)}")
                )
            tokens = _tokens("input_ids", index, example["input_ids"])
            given = example.get("labels")
            target = tokens if given is None else _tokens("labels", index, given)
            mask = example.get("attention_mask")
            if mask is not None:
                kept = torch.as_tensor(mask).to("cpu").bool()
                if kept.shape != tokens.shape or target.shape != tokens.shape:
                    given = f"{tuple(kept.shape)} and {tuple(target.shape)} for {tuple(tokens.shape)}"
                    expected = "attention_mask and labels as long as input_ids"
                    raise ArgumentError(message("PackedCollator", f"examples[{index}]", expected, given))
                tokens, target = tokens[kept], target[kept]
            sequences.append(tokens)
            labels.append(target)
        longest = max((len(tokens) for tokens in sequences), default=0)
        max_len = self.max_len or max(longest, 1)
        if self.share_rows:
            return pack_sequences(sequences, max_len, labels=labels, pad_id=self.pad_id)
        return _fill([[piece] for piece in _pieces(sequences, labels, max_len)], max_len, self.pad_id)


def document_ids(position_ids: Tensor) -> Tensor:
    """Number the documents of packed rows, row by row: a document begins where the position is 0.

    Args:
        position_ids: `(rows, max_len)`, of `pack_sequences`; padding counts as a document.

    Returns:
        int64 of the same shape, from 0; for `segments` of `sequence_logprobs`.

    Example:
        >>> document_ids(torch.tensor([[0, 1, 0], [0, 0, 1]])).tolist()
        [[0, 0, 1], [2, 3, 3]]
    """
    return ((position_ids == 0).reshape(-1).cumsum(0) - 1).reshape(position_ids.shape)


def flatten_rows(batch: dict[str, Any]) -> dict[str, Any]:
    """Lay packed rows one behind the other, `(1, rows * max_len)`: flash attention reads one row's borders.

    With more rows than one transformers hands flash attention no lengths, and every token would see all
    earlier ones of its row.

    Args:
        batch: From `pack_sequences` or `PackedCollator`; tensors of two dimensions are laid out.

    Returns:
        The batch in one row.

    Example:
        >>> flatten_rows(pack_sequences([[1, 2], [3, 4]], 2))["input_ids"].tolist()
        [[1, 2, 3, 4]]
    """
    return {
        key: value.reshape(1, -1) if isinstance(value, Tensor) and value.dim() == 2 else value
        for key, value in batch.items()
    }


@torch.no_grad()
def check_isolation(model: nn.Module) -> None:
    """Refuse a model in which a document of a packed row would see another one.

    Types that the tests cover are known; any other is called once, on a row of 18 tokens in which the same
    document follows two different ones: what it computes must be the same.

    Args:
        model: A transformers `*ForCausalLM`, or a PEFT model around one.

    Raises:
        OptionError: Its documents reach each other (recurrent layers, linear attention, position biases), or
            it takes no `position_ids`.

    Example:
        >>> check_isolation(model)  # doctest: +SKIP
    """
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if text.model_type in ISOLATING:
        return
    size = int(text.vocab_size)
    before = [torch.arange(5) + 2, torch.arange(5) + 11]
    tail = torch.tensor([1, 3, 2, 4])
    row = torch.cat([before[0], tail, before[1], tail]) % size
    positions = torch.cat([torch.arange(5), torch.arange(4)] * 2)
    device = model.get_input_embeddings().weight.device  # type: ignore[operator]
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        base: Any = backbone(model)
        hidden: Tensor = (
            base(input_ids=row[None].to(device), position_ids=positions[None].to(device), use_cache=False)
            .last_hidden_state[0]
            .float()
        )
    except TypeError as error:
        raise OptionError(f"option packing: {type(base).__name__} takes no position_ids ({error})") from error
    finally:
        for module in training:
            module.training = True
    first, second = hidden[5:9], hidden[14:18]
    if not bool(((first - second).abs() <= 1e-3 + 0.02 * first.abs()).all()):
        raise OptionError(
            f"option packing: in {type(base).__name__} ({text.model_type}) a document of a packed row "
            "reaches the next one: it has layers that do not read position_ids. Train it without packing"
        )
