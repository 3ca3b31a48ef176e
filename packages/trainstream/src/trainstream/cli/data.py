"""From files to training rows: text, JSON lines with text, prompt and completion, or chat messages.

Text becomes full rows of `seq_len` tokens, each document ended by the end-of-text token. A prompt or a chat
becomes one row of its own, whose loss counts the completion or the assistant's turns only.
"""

from __future__ import annotations

import glob
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from ts_core.errors import ArgumentError

__all__ = [
    "Document",
    "Row",
    "batch_indices",
    "collate",
    "fingerprint",
    "hold_out",
    "read_documents",
    "stdlib_files",
    "to_rows",
]

IGNORE = -100
_TEXT_SUFFIXES = frozenset(
    [
        ".txt",
        ".md",
        ".rst",
        ".py",
        ".pyi",
        ".c",
        ".h",
        ".cpp",
        ".cc",
        ".hpp",
        ".cu",
        ".rs",
        ".go",
        ".java",
        ".js",
        ".ts",
        ".tex",
        ".html",
        ".css",
        ".sh",
        ".toml",
        ".yaml",
        ".yml",
        ".csv",
    ]
)


@dataclass(frozen=True)
class Document:
    """One training document.

    Attributes:
        source: Where it comes from, for messages: a file, or `file:line`.
        text: The text of a plain document, else None.
        prompt: The part that is read but not learnt, if `completion` is set.
        completion: The part that is learnt.
        messages: A chat: dicts with `role` and `content`.
    """

    source: str
    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: list[dict[str, str]] | None = None


@dataclass(frozen=True)
class Row:
    """Tokens of one training row and their labels (`IGNORE` where no loss is taken), of equal length."""

    input_ids: list[int]
    labels: list[int]


@dataclass
class Rows:
    """What `to_rows` made, and what it had to leave out.

    Attributes:
        rows: The rows.
        dropped: How many documents gave nothing to learn within `seq_len` tokens.
        tokens: Tokens in all documents.
    """

    rows: list[Row] = field(default_factory=list)
    dropped: int = 0
    tokens: int = 0


# ------------------------------------------------------------------------------------------ reading


def stdlib_files() -> list[Path]:
    """Return the top modules of the running Python's standard library, sorted: the built-in training text."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(root.glob("*.py"))


def expand(sources: Iterable[str]) -> list[Path]:
    """Turn files, folders and globs into a sorted list of files, each once.

    Raises:
        ArgumentError: A source matches nothing, or a folder holds no text files.
    """
    found: dict[Path, None] = {}
    for source in sources:
        path = Path(source).expanduser()
        if path.is_dir():
            inside = [p for p in sorted(path.rglob("*")) if _readable(p.relative_to(path)) and p.is_file()]
            if not inside:
                raise ArgumentError(f"data={source}: the folder holds no text or .jsonl files")
        elif path.is_file():
            inside = [path]
        else:
            inside = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207
            inside = [p for p in inside if p.is_file()]
            if not inside:
                raise ArgumentError(f"data={source}: no such file or folder")
        found.update(dict.fromkeys(inside))
    return list(found)


def _readable(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    return not hidden and path.suffix.lower() in {*_TEXT_SUFFIXES, ".jsonl"}


def read_documents(sources: Sequence[str]) -> list[Document]:
    """Read every document of the sources.

    Args:
        sources: Files, folders (searched for text and .jsonl files) or globs.

    Returns:
        The documents in the order of the files; empty texts are left out.

    Raises:
        ArgumentError: Nothing is found, a file is not UTF-8, or a JSON line is not one of the known forms.
    """
    documents: list[Document] = []
    for path in expand(sources):
        try:
            content = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ArgumentError(f"data: {path} is not UTF-8 text (byte {error.start})") from error
        except OSError as error:
            raise ArgumentError(f"data: cannot read {path}: {error.strerror}") from error
        if path.suffix.lower() == ".jsonl":
            documents += _json_lines(path, content)
        elif content.strip():
            documents.append(Document(str(path), text=content))
    if not documents:
        raise ArgumentError(f"data={','.join(sources)}: the files are empty")
    return documents


def read_stdlib() -> list[Document]:
    """Read the built-in training text, one document per file."""
    texts = [(path, path.read_text(encoding="utf-8", errors="replace")) for path in stdlib_files()]
    return [Document(f"stdlib/{path.name}", text=text) for path, text in texts if text.strip()]


def _json_lines(path: Path, content: str) -> Iterator[Document]:
    # Not splitlines(): JSON strings may hold U+2028 and the like unescaped.
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            document = parse_json_line(line, f"{path}:{number}")
            if document is not None:
                yield document


def parse_json_line(line: str, source: str) -> Document | None:
    """Read one JSON line.

    Args:
        line: An object with `text`, with `prompt` and `completion`, or with `messages`.
        source: `file:line`, for messages.

    Returns:
        The document, or None for an empty text.

    Raises:
        ArgumentError: Not JSON, or none of the three forms.
    """
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ArgumentError(f"data: {source} is not JSON: {error}") from error
    if isinstance(record, dict):
        if _texts(record, "prompt", "completion"):
            return Document(source, prompt=record["prompt"], completion=record["completion"])
        if _texts(record, "text"):
            return Document(source, text=record["text"]) if record["text"].strip() else None
        messages = record.get("messages")
        if isinstance(messages, list) and messages and all(_is_message(m) for m in messages):
            return Document(source, messages=[{"role": m["role"], "content": m["content"]} for m in messages])
    found = f"keys {sorted(record)}" if isinstance(record, dict) else type(record).__name__
    raise ArgumentError(
        f'data: {source}: expected {{"text"}}, {{"prompt", "completion"}} or '
        f'{{"messages": [{{"role", "content"}}, ...]}}, found {found}'
    )


def _texts(record: dict[str, Any], *keys: str) -> bool:
    return all(isinstance(record.get(key), str) for key in keys)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and _texts(value, "role", "content")


# ----------------------------------------------------------------------------------- splitting, rows


def hold_out(documents: Sequence[Document], every: int = 20) -> tuple[list[Document], list[Document]]:
    """Set whole documents aside for the held-out loss: every 20th, at least one if there are two or more.

    Args:
        documents: All documents.
        every: The distance between two that are set aside.

    Returns:
        Those to train on and those held out; the two share no document. A single document is not split
        here: the caller holds out its last rows.

    Example:
        >>> train, held = hold_out([Document("a", "x"), Document("b", "y"), Document("c", "z")])
        >>> [d.source for d in held]
        ['c']
    """
    count = len(documents)
    if count < 2:
        return list(documents), []
    step = min(every, count)
    held = [d for index, d in enumerate(documents) if index % step == step - 1]
    return [d for index, d in enumerate(documents) if index % step != step - 1], held


def to_rows(documents: Sequence[Document], tokenizer: Any, seq_len: int) -> Rows:
    """Turn documents into rows of at most `seq_len` tokens.

    Args:
        documents: Texts, prompts with completions, or chats.
        tokenizer: A transformers tokenizer.
        seq_len: Tokens per row. Texts are joined, each ended by the end-of-text token, and cut into rows of
            exactly this length (what is left at the end is dropped); a prompt or chat is cut at it.

    Returns:
        The rows with counts.

    Raises:
        ArgumentError: A chat is given and the tokenizer has no chat template.
    """
    result = Rows()
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    texts = [document.text for document in documents if document.text is not None]
    # All at once: fast tokenizers spread a batch over the cores.
    tokenized = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    stream = [int(i) for ids in tokenized for i in (*ids, *end)]
    result.tokens += len(stream)
    for document in documents:
        if document.text is not None:
            continue
        row = _dialogue(document, tokenizer, end)
        result.tokens += len(row.input_ids)
        row = Row(row.input_ids[:seq_len], row.labels[:seq_len])
        # Position 0 has no prediction: a row whose only label is there teaches nothing.
        if all(label == IGNORE for label in row.labels[1:]):
            result.dropped += 1
        else:
            result.rows.append(row)
    for start in range(0, len(stream) - seq_len + 1, seq_len):
        piece = stream[start : start + seq_len]
        result.rows.append(Row(piece, piece))
    return result


def _ids(tokenizer: Any, text: str) -> list[int]:
    # Long texts are cut into rows afterwards, so the warning about the model's length does not apply.
    return [int(i) for i in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]


def _dialogue(document: Document, tokenizer: Any, end: list[int]) -> Row:
    if document.messages is None:
        prompt = _ids(tokenizer, document.prompt or "")
        answer = _ids(tokenizer, document.completion or "") + end
        return Row(prompt + answer, [IGNORE] * len(prompt) + answer)
    if getattr(tokenizer, "chat_template", None) is None:
        raise ArgumentError(
            f"data: {document.source} holds chat messages, but the model's tokenizer has no chat template; "
            'use an instruction-tuned model, or lines with "prompt" and "completion"'
        )
    return _chat(document.messages, lambda *a, **k: _render(tokenizer, *a, **k))


def _render(tokenizer: Any, messages: list[dict[str, str]], add_generation_prompt: bool = False) -> list[int]:
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    return _ids(tokenizer, text)


def _chat(messages: list[dict[str, str]], render: Callable[..., list[int]]) -> Row:
    """Label the assistant's turns: from the end of what prompts a turn to the end of that turn."""
    ids = render(messages)
    labels = [IGNORE] * len(ids)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            start = _shared(ids, render(messages[:index], add_generation_prompt=True))
            stop = _shared(ids, render(messages[: index + 1]))
            labels[start:stop] = ids[start:stop]
    return Row(ids, labels)


def _shared(whole: list[int], part: list[int]) -> int:
    """Return how many leading tokens the two have in common."""
    count = 0
    for a, b in zip(whole, part, strict=False):
        if a != b:
            break
        count += 1
    return count


# ------------------------------------------------------------------------------------------ batches


def batch_indices(step: int, batch_size: int, count: int, seed: int) -> list[int]:
    """Return which rows make micro-batch number `step`.

    Each pass over the data has its own order, drawn from the seed and the number of the pass, and the passes
    follow each other without a gap. So the position in the data is the number of the micro-batch alone: a
    resumed run needs nothing else to go on with the right rows.

    Args:
        step: Number of the micro-batch, from 0.
        batch_size: Rows in it.
        count: Rows in the data set.
        seed: Seed of the run.

    Returns:
        `batch_size` indices below `count`.

    Example:
        >>> sorted(batch_indices(0, 2, 4, 0) + batch_indices(1, 2, 4, 0))
        [0, 1, 2, 3]
    """
    picked = []
    for position in range(step * batch_size, (step + 1) * batch_size):
        epoch, offset = divmod(position, count)
        picked.append(_order(epoch, count, seed)[offset])
    return picked


_orders: dict[tuple[int, int, int], list[int]] = {}


def _order(epoch: int, count: int, seed: int) -> list[int]:
    key = (epoch, count, seed)
    if key not in _orders:
        if len(_orders) > 2:
            _orders.clear()
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
        _orders[key] = torch.randperm(count, generator=generator).tolist()
    return _orders[key]


def collate(rows: Sequence[Row], pad_id: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Pad rows to the longest of them.

    Args:
        rows: At least one.
        pad_id: Token at the padding; its label is `IGNORE`.
        device: Where the tensors go.

    Returns:
        `input_ids` and `labels`, int64 [rows, longest]; `attention_mask` too if any row is shorter.
    """
    longest = max(len(row.input_ids) for row in rows)
    ids = [row.input_ids + [pad_id] * (longest - len(row.input_ids)) for row in rows]
    labels = [row.labels + [IGNORE] * (longest - len(row.labels)) for row in rows]
    batch = {"input_ids": torch.tensor(ids, device=device), "labels": torch.tensor(labels, device=device)}
    if any(len(row.input_ids) < longest for row in rows):
        mask = [[1] * len(row.input_ids) + [0] * (longest - len(row.input_ids)) for row in rows]
        batch["attention_mask"] = torch.tensor(mask, device=device)
    return batch


def fingerprint(rows: Sequence[Row]) -> str:
    """Return a hash of the rows, by which a resumed run knows that the data is still the same."""
    digest = sha256()
    for row in rows:
        digest.update(torch.tensor([row.input_ids, row.labels]).numpy().tobytes())
    return digest.hexdigest()[:32]
