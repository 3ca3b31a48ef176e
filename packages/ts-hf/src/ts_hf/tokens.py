"""Text, JSONL and chat files as token rows, split into a training and a held-out part by document.

Plain text is joined (an end-of-text token after each document) and cut into rows of exactly `seq_len` tokens.
Examples with a prompt and an answer, and chats, become one padded row each, with the labels of the prompt set
to -100. Packed, rows hold whole documents of either kind, which do not see each other (`ts_hf.packing`).
Everything is deterministic: the same input, tokenizer and seed give the same rows.
"""

from __future__ import annotations

import json
import os
import random
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ts_core.errors import ArgumentError, ArgumentTypeError, StorageError, message
from ts_core.options import boolean, fraction, integer

from .packing import pack_sequences

__all__ = ["Document", "Rows", "TextData", "read_documents", "stdlib_text", "text_dataset"]

IGNORE = -100
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_SKIPPED_PARTS = frozenset(
    # Tests and tables: code pages and help topics would be a large, repetitive part of a short limit.
    {
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "encodings",
        "pydoc_data",
    }
)


@dataclass(frozen=True)
class Document:
    """One piece of data: a text, a prompt with its completion, or a chat; the others are None.

    Attributes:
        text: Plain text; every token is learned.
        prompt: What comes before the completion; not learned.
        completion: What is learned.
        messages: A chat, a list of `{"role", "content"}`; the assistant's turns are learned.
    """

    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Token rows of one length, as a `torch.utils.data.Dataset` of dicts that a model takes.

    Args:
        input_ids: `(N, S)` int64.
        labels: `(N, S)` int64, -100 where nothing is learned.
        attention_mask: `(N, S)` int64, or None if no token is padding.
        position_ids: `(N, S)` int64 of rows packed with documents, from 0 with each; None for others.

    Example:
        >>> rows = Rows(torch.tensor([[1, 2]]), torch.tensor([[1, 2]]))
        >>> len(rows), sorted(rows[0])
        (1, ['input_ids', 'labels'])
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> None:
        """Hold the tensors; nothing is copied."""
        self.input_ids = input_ids
        self.labels = labels
        self.attention_mask = attention_mask
        self.position_ids = position_ids

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.input_ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one row, as the keyword arguments of a model.

        Raises:
            ArgumentTypeError: The rows are packed. A collator would not know that, and documents would see
                each other; `batches` says it to the model.
        """
        if self.position_ids is not None:
            raise ArgumentTypeError(
                message("Rows", "index", "rows that are not packed", "packed ones", "Take them by batches()")
            )
        row = {"input_ids": self.input_ids[index], "labels": self.labels[index]}
        if self.attention_mask is not None:
            row["attention_mask"] = self.attention_mask[index]
        return row

    @property
    def num_items(self) -> int:
        """Labels that a causal-LM loss over all rows is averaged over."""
        return int((self.labels[:, 1:] != IGNORE).sum())

    def batches(
        self, batch_size: int, *, seed: int | None = None, drop_last: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Go through the rows once.

        Args:
            batch_size: Rows per batch.
            seed: Shuffle with this seed; None keeps the order.
            drop_last: Leave out a last batch that is not full.

        Yields:
            Dicts of `(B, S)` tensors, with an `attention_mask` if rows are padded; of packed rows with
            `position_ids` and `use_cache=False`.
        """
        integer("batch_size", batch_size, minimum=1)
        order = list(range(len(self)))
        if seed is not None:
            random.Random(seed).shuffle(order)
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            if drop_last and len(chosen) < batch_size:
                return
            batch: dict[str, Any] = {"input_ids": self.input_ids[chosen], "labels": self.labels[chosen]}
            if self.position_ids is not None:
                batch.update(position_ids=self.position_ids[chosen], use_cache=False)
            if self.attention_mask is not None:
                batch["attention_mask"] = self.attention_mask[chosen]
            yield batch


@dataclass(frozen=True)
class TextData:
    """What `text_dataset` makes.

    Attributes:
        train: Rows to train on.
        held_out: Rows of documents that are in no training row.
        documents: How many documents there were.
        dropped: Examples without a single label left after cutting them to `seq_len`, and text at the end of
        a
            part that did not fill a row (counted as one).
        tokens: Tokens of all rows, without padding.
    """

    train: Rows
    held_out: Rows
    documents: int
    dropped: int
    tokens: int


def stdlib_text(limit_bytes: int = 4_000_000) -> list[str]:
    """Collect Python source: the modules of the running Python's standard library, without its tests.

    Args:
        limit_bytes: Stop before the texts together are longer than this, in UTF-8.

    Returns:
        One string per file, in the order of a fixed shuffle of the sorted relative paths, so that a short
        limit
        still gives a mixture.

    Raises:
        StorageError: There is no source of the standard library here.

    Example:
        >>> texts = stdlib_text(100_000)
        >>> 0 < sum(len(text.encode()) for text in texts) <= 100_000
        True
    """
    limit = integer("limit_bytes", limit_bytes, minimum=1)
    root = Path(sysconfig.get_path("stdlib"))
    names: list[str] = []
    for folder, inner, files in os.walk(root):
        inner[:] = [
            name for name in inner if name not in _SKIPPED_PARTS
        ]  # not even walked: site-packages is large
        below = Path(folder).relative_to(root)
        names += [(below / name).as_posix() for name in files if name.endswith(".py")]
    names.sort()
    random.Random(0).shuffle(names)
    texts: list[str] = []
    total = 0
    for name in names:
        try:
            text = (root / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        size = len(text.encode())
        if not 0 < size <= limit - total:
            continue
        texts.append(text)
        total += size
    if not texts:
        raise StorageError(f"[stdlib_text] no source file of at most {limit} bytes under {root}")
    return texts


def _as_document(entry: Any, field: str | None, where: str) -> Document:
    if isinstance(entry, str):
        return Document(text=entry)
    if isinstance(entry, dict):
        wanted = ["text"] if field is None else [field]
        if field is None and isinstance(entry.get("messages"), list):
            messages = tuple(entry["messages"])
            if messages and all(
                isinstance(turn, dict) and "role" in turn and "content" in turn for turn in messages
            ):
                return Document(messages=messages)
            raise ArgumentError(f"[text_dataset] {where}: messages must be a list of {{role, content}}")
        if (
            field is None
            and isinstance(entry.get("prompt"), str)
            and isinstance(entry.get("completion"), str)
        ):
            return Document(prompt=entry["prompt"], completion=entry["completion"])
        for name in wanted:
            if isinstance(entry.get(name), str):
                return Document(text=entry[name])
        has = ", ".join(sorted(map(str, entry))[:8]) or "nothing"
        expected = f"a string field {field!r}" if field else "text, prompt and completion, or messages"
        raise ArgumentError(f"[text_dataset] {where}: expected {expected}, it has: {has}")
    raise ArgumentError(
        f"[text_dataset] {where}: expected a JSON object or a string, given {type(entry).__name__}"
    )


def _read_file(path: Path, field: str | None) -> Iterator[Document]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise StorageError(error.errno, f"cannot read data file: {error.strerror}", str(path)) from error
    except UnicodeDecodeError as error:
        raise ArgumentError(f"[text_dataset] {path}: not a UTF-8 text file ({error})") from error
    if path.suffix.lower() not in _JSON_SUFFIXES:
        if text.strip():
            yield Document(text=text)
        return
    if path.suffix.lower() == ".json" and text.lstrip().startswith("["):
        lines: Iterable[tuple[int, str]] = ()
        try:
            entries = list(enumerate(json.loads(text), 1))
        except ValueError as error:
            raise ArgumentError(f"[text_dataset] {path}: not JSON ({error})") from error
        for number, entry in entries:
            yield _as_document(entry, field, f"{path}, entry {number}")
    else:
        # Not splitlines(): a JSON string may hold U+2028 as it is.
        lines = enumerate(text.split("\n"), 1)
    for number, line in lines:
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ArgumentError(f"[text_dataset] {path}, line {number}: not JSON ({error})") from error
        yield _as_document(entry, field, f"{path}, line {number}")


def read_documents(source: Any, field: str | None = None) -> list[Document]:
    """Read documents from files or from memory.

    Args:
        source: A path (`.jsonl`, `.ndjson` and `.json` hold one entry per line or a list; any other file is
        one
            text; a folder stands for its files, sorted), a text, or a list of paths, texts and entries. A
            string
            is a path if such a file or folder exists, otherwise a text.
        field: The field of a JSON entry that holds its text; by default "messages", "prompt" with
        "completion",
            or "text", whichever is there.

    Returns:
        The documents, in order; empty ones are left out.

    Raises:
        ArgumentError: An entry without usable fields, a line that is not JSON; the message names file and
        line.
        StorageError: A file that cannot be read.

    Example:
        >>> [document.text for document in read_documents(["one", {"text": "two"}])]
        ['one', 'two']
    """
    if isinstance(source, (list, tuple)):
        found = [
            document
            for index, item in enumerate(source)
            for document in (
                [_as_document(item, field, f"entry {index}")]
                if isinstance(item, dict)
                else read_documents(item, field)
            )
        ]
    elif isinstance(source, Document):
        found = [source]
    elif isinstance(source, Path) or (isinstance(source, str) and _exists(source)):
        path = Path(source)
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        found = [document for file in files for document in _read_file(file, field)]
    elif isinstance(source, str):
        if "\n" not in source and Path(source).suffix.lower() in (*_JSON_SUFFIXES, ".txt"):
            raise StorageError(f"[text_dataset] {source}: there is no such file")
        found = [Document(text=source)]
    else:
        raise ArgumentTypeError(message("text_dataset", "source", "paths, texts or entries", type(source)))
    return [document for document in found if document.text is None or document.text.strip()]


def _exists(text: str) -> bool:
    try:
        return len(text) < 4096 and "\n" not in text and bool(text) and Path(text).exists()
    except (OSError, ValueError):
        return False


# -- tokens -----------------------------------------------------------------------------------------------


def _encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def _end_token(tokenizer: Any) -> list[int]:
    end = getattr(tokenizer, "eos_token_id", None)
    return [] if end is None else [int(end)]


def _chat_ids(tokenizer: Any, messages: Sequence[dict[str, Any]], prompt: bool) -> list[int]:
    made = tokenizer.apply_chat_template(list(messages), tokenize=True, add_generation_prompt=prompt)
    return list(made["input_ids"] if hasattr(made, "keys") else made)


def _chat_row(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Encode a chat; the labels are the assistant's turns, each with the tokens that end it."""
    if not getattr(tokenizer, "chat_template", None):
        raise ArgumentError(
            "[text_dataset] the data has messages, but the tokenizer has no chat template; use prompt and "
            "completion"
        )
    ids = _chat_ids(tokenizer, messages, prompt=False)
    labels = [IGNORE] * len(ids)
    for index, turn in enumerate(messages):
        if turn["role"] != "assistant":
            continue
        before = _chat_ids(tokenizer, messages[:index], prompt=True)
        after = _chat_ids(tokenizer, messages[: index + 1], prompt=False)
        if ids[: len(after)] != after or after[: len(before)] != before:
            raise ArgumentError(
                "[text_dataset] this chat template rewrites earlier turns when a turn is added, so the "
                "assistant's "
                "tokens cannot be told apart; use prompt and completion"
            )
        labels[len(before) : len(after)] = after[len(before) :]
    return ids, labels


def _supervised_row(tokenizer: Any, document: Document) -> tuple[list[int], list[int]]:
    if document.messages is not None:
        return _chat_row(tokenizer, document.messages)
    prompt = _encode(tokenizer, document.prompt or "", special=True)
    answer = _encode(tokenizer, document.completion or "", special=False) + _end_token(tokenizer)
    return prompt + answer, [IGNORE] * len(prompt) + answer


def _blocks(tokenizer: Any, documents: Sequence[Document], seq_len: int) -> tuple[torch.Tensor, int]:
    stream: list[int] = []
    for document in documents:
        stream += _encode(tokenizer, document.text or "", special=True) + _end_token(tokenizer)
    rows = len(stream) // seq_len
    made = torch.tensor(stream[: rows * seq_len], dtype=torch.long).reshape(rows, seq_len)
    return made, int(len(stream) > rows * seq_len)


def _pad_id(tokenizer: Any) -> int:
    pad = getattr(tokenizer, "pad_token_id", None)
    return (_end_token(tokenizer) or [0])[0] if pad is None else int(pad)


def _examples(
    tokenizer: Any, documents: Sequence[Document], seq_len: int
) -> tuple[list[tuple[list[int], list[int]]], int]:
    """Encode documents one by one: tokens and labels, a text whole, others cut; and how many gave none."""
    rows: list[tuple[list[int], list[int]]] = []
    for document in documents:
        if document.text is not None:
            ids = _encode(tokenizer, document.text, special=True) + _end_token(tokenizer)
            labels = ids
        else:
            ids, labels = (part[:seq_len] for part in _supervised_row(tokenizer, document))
        # The first label is predicted by nothing, so it does not make a row worth keeping.
        if any(label != IGNORE for label in labels[1:]):
            rows.append((ids, labels))
    return rows, len(documents) - len(rows)


def _packed(tokenizer: Any, documents: Sequence[Document], seq_len: int) -> tuple[Rows, int, int]:
    examples, dropped = _examples(tokenizer, documents, seq_len)
    if not examples:
        none = torch.empty((0, seq_len), dtype=torch.long)
        return Rows(none, none, None, none), dropped, 0
    ids, labels = zip(*examples, strict=True)
    made = pack_sequences(ids, seq_len, labels=labels, pad_id=_pad_id(tokenizer))
    rows = Rows(made["input_ids"], made["labels"], None, made["position_ids"])
    return rows, dropped, made["num_tokens"]


def _padded(tokenizer: Any, documents: Sequence[Document], seq_len: int) -> tuple[Rows, int]:
    rows, dropped = _examples(tokenizer, documents, seq_len)
    width = max((len(ids) for ids, _ in rows), default=1)
    pad = _pad_id(tokenizer)
    input_ids = torch.full((len(rows), width), pad, dtype=torch.long)
    labels_out = torch.full((len(rows), width), IGNORE, dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for index, (ids, labels) in enumerate(rows):
        input_ids[index, : len(ids)] = torch.tensor(ids)
        labels_out[index, : len(ids)] = torch.tensor(labels)
        mask[index, : len(ids)] = 1
    return Rows(input_ids, labels_out, mask), dropped


def _split(documents: list[Document], share: float, seed: int) -> tuple[list[Document], list[Document]]:
    """Choose the held-out documents; a single text is cut at a line near the end."""
    if share == 0.0:
        return documents, []
    if len(documents) == 1 and documents[0].text is not None:
        text = documents[0].text
        cut = text.rfind("\n", 0, max(1, round(len(text) * (1.0 - share)))) + 1
        cut = cut or round(len(text) * (1.0 - share))
        return [Document(text=text[:cut])], [Document(text=text[cut:])]
    order = list(range(len(documents)))
    random.Random(seed).shuffle(order)
    count = min(max(1, round(len(documents) * share)), len(documents) - 1)
    chosen = set(order[:count])
    return (
        [document for index, document in enumerate(documents) if index not in chosen],
        [document for index, document in enumerate(documents) if index in chosen],
    )


def text_dataset(
    source: Any,
    tokenizer: Any,
    seq_len: int,
    *,
    held_out: float = 0.1,
    seed: int = 0,
    field: str | None = None,
    packing: bool = False,
) -> TextData:
    """Turn text, JSONL or chat data into token rows for training and evaluation.

    Args:
        source: As in `read_documents`.
        tokenizer: A transformers tokenizer; its chat template is used for "messages".
        seq_len: Tokens per row of text, and the longest padded row.
        held_out: Share of the documents that is kept for evaluation, at least one if it is not 0.
        seed: Decides which documents those are.
        field: As in `read_documents`.
        packing: Put documents into full rows of `seq_len` tokens, each seeing itself alone; a text that is
            longer is cut into pieces, each a document of its own. The model must keep them apart
            (`isolate_documents`).

    Returns:
        Training and held-out rows. Text: rows of exactly `seq_len` tokens, labels equal to the tokens.
        Prompts
        and chats: rows padded on the right to the longest one, labels -100 on prompts and padding. Packed:
        rows with `position_ids`, labels -100 on each document's first token, prompts and padding.

    Raises:
        ArgumentError: No documents, texts mixed with prompts or chats (unless packed), too little text for
            one training row, or a chat without a usable template.
        StorageError: A file that cannot be read.

    Example:
        >>> data = text_dataset(stdlib_text(), tokenizer, 256)  # doctest: +SKIP
        >>> for batch in data.train.batches(4, seed=0):  # doctest: +SKIP
        ...     loss = model(**batch).loss
    """
    seq_len = integer("seq_len", seq_len, minimum=2)
    share = fraction("held_out", held_out, 0.0, 0.9)
    documents = read_documents(source, field)
    if not documents:
        raise ArgumentError("[text_dataset] source: there is no document in it")
    plain = [document.text is not None for document in documents]
    packing = boolean("packing", packing)
    if any(plain) and not all(plain) and not packing:
        raise ArgumentError("[text_dataset] source: plain texts are mixed with prompts or chats; split them")
    parts: list[Rows] = []
    dropped = tokens = 0
    for part in _split(documents, share, integer("seed", seed)):
        if packing:
            rows, lost, count = _packed(tokenizer, part, seq_len)
        elif plain[0]:
            ids, lost = _blocks(tokenizer, part, seq_len)
            rows, count = Rows(ids, ids.clone()), ids.numel()
        else:
            rows, lost = _padded(tokenizer, part, seq_len)
            count = 0 if rows.attention_mask is None else int(rows.attention_mask.sum())
        parts.append(rows)
        tokens += count
        dropped += lost
    if not len(parts[0]):
        raise ArgumentError(
            f"[text_dataset] source: {len(documents)} documents give no training row of {seq_len} tokens; "
            "give more data or a smaller seq_len"
        )
    return TextData(parts[0], parts[1], len(documents), dropped, tokens)
