import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import byte_tokenizer

from trainstream.cli.data import (
    IGNORE,
    Document,
    Row,
    batch_indices,
    collate,
    fingerprint,
    hold_out,
    parse_json_line,
    read_documents,
    read_stdlib,
    stdlib_files,
    to_rows,
)
from ts_core.errors import ArgumentError

TOKENIZER = byte_tokenizer()
CHAT_TOKENIZER = byte_tokenizer(chat=True)
END = 256


def test_files_folders_and_globs(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.md").write_text("two")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe")
    (tmp_path / ".hidden.txt").write_text("secret")
    (tmp_path / "empty.txt").write_text("  \n")
    (tmp_path / "d.jsonl").write_text(
        json.dumps({"text": "thr\u2028ee"}) + "\n\n" + json.dumps({"text": " "}) + "\n"
    )
    texts = [d.text for d in read_documents([str(tmp_path)])]
    assert texts == ["one", "two", "thr\u2028ee"]
    assert [d.text for d in read_documents([str(tmp_path / "*.md"), str(tmp_path / "b.md")])] == ["two"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing.txt", None, "no such file"),
        ("bad.txt", b"ab\xff", "not UTF-8"),
        ("empty.txt", b" \n", "files are empty"),
        ("bad.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', r"bad.jsonl:2.*found keys \['txt'\]"),
        ("bad.jsonl", b"{", r"bad.jsonl:1 is not JSON"),
        ("bad.jsonl", b"[1]", "found list"),
        ("bad.jsonl", b'{"messages": [{"role": "user"}]}', "expected"),
    ],
)
def test_unusable_data_is_named(tmp_path, name, content, says):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ArgumentError, match=says):
        read_documents([str(tmp_path / name)])


def test_a_folder_without_text_is_named(tmp_path):
    (tmp_path / "c.bin").write_bytes(b"\xff")
    with pytest.raises(ArgumentError, match="no text"):
        read_documents([str(tmp_path)])


def test_the_built_in_text_is_python_source():
    assert any(path.name == "argparse.py" for path in stdlib_files())
    documents = read_stdlib()
    assert len(documents) > 20
    assert all(document.text for document in documents)


_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["text", "prompt", "completion", "messages", "role", "content"]), inner
        ),
    ),
    max_leaves=8,
)


@given(st.one_of(_JSON.map(json.dumps), st.text(max_size=20)))
def test_any_line_is_a_document_or_refused_by_place(line):
    refused = pytest.raises(ArgumentError, match="f:1")
    try:
        document = parse_json_line(line, "f:1")
    except ArgumentError:
        with refused:
            parse_json_line(line, "f:1")
    else:
        assert document is None or document.text or document.prompt is not None or document.messages


@given(st.integers(0, 60), st.integers(2, 30))
def test_held_out_documents_are_apart(count, every):
    documents = [Document(str(i), text="x") for i in range(count)]
    train, held = hold_out(documents, every)
    assert sorted(d.source for d in train + held) == sorted(d.source for d in documents)
    assert not {d.source for d in train} & {d.source for d in held}
    assert (len(held) >= 1 and len(train) >= 1) if count >= 2 else not held


@given(st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=5), st.integers(2, 16))
def test_texts_fill_rows_without_loss_or_gap(texts, seq_len):
    rows = to_rows([Document(str(i), text=text) for i, text in enumerate(texts)], TOKENIZER, seq_len)
    stream = [i for text in texts for i in [*TOKENIZER(text)["input_ids"], END]]
    joined = [i for row in rows.rows for i in row.input_ids]
    assert joined == stream[: len(joined)]
    assert len(stream) - len(joined) < seq_len
    assert all(row.labels == row.input_ids and len(row.labels) == seq_len for row in rows.rows)
    assert rows.tokens == len(stream)


def decode(row):
    return TOKENIZER.decode(
        [i for i, label in zip(row.input_ids, row.labels, strict=True) if label != IGNORE]
    )


def test_only_the_completion_is_learnt():
    (row,) = to_rows([Document("x", prompt="2+2=", completion="4")], TOKENIZER, 32).rows
    assert TOKENIZER.decode(row.input_ids) == "2+2=4<|end|>"
    assert decode(row) == "4<|end|>"


def test_only_the_assistant_is_learnt():
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "bye"},
        {"role": "assistant", "content": "ciao"},
    ]
    (row,) = to_rows([Document("x", messages=messages)], CHAT_TOKENIZER, 99).rows
    assert TOKENIZER.decode(row.input_ids).startswith("<system>be brief;<user>hi;<assistant>hello;")
    assert decode(row) == "hello;ciao;"


def test_a_chat_without_template_is_refused():
    with pytest.raises(ArgumentError, match="chat template"):
        to_rows([Document("f:3", messages=[{"role": "user", "content": "a"}])], TOKENIZER, 8)


def test_examples_with_nothing_left_to_learn_are_dropped_and_counted():
    made = to_rows([Document("x", prompt="a" * 50, completion="b")], TOKENIZER, 16)
    assert (made.rows, made.dropped) == ([], 1)
    # A label at position 0 has no prediction.
    assert to_rows([Document("x", prompt="", completion="b")], TOKENIZER, 2).dropped == 0
    assert to_rows([Document("x", prompt="", completion="")], TOKENIZER, 2).dropped == 1


@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 2**40), st.integers(0, 5))
def test_every_pass_visits_every_row_once(batch, count, seed, epoch):
    seen = [i for step in range(count * (epoch + 1)) for i in batch_indices(step, batch, count, seed)]
    part = seen[epoch * count : (epoch + 1) * count]
    assert sorted(part) == list(range(count))


def test_passes_have_different_orders():
    first, second = (batch_indices(epoch, 50, 50, 0) for epoch in (0, 1))
    assert first != second
    assert batch_indices(0, 50, 50, 0) == first
    assert batch_indices(0, 50, 50, 1) != first


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_padding_is_masked_and_ignored(lengths):
    rows = [Row(list(range(1, n + 1)), list(range(1, n + 1))) for n in lengths]
    batch = collate(rows, pad_id=77)
    assert batch["input_ids"].shape == (len(lengths), max(lengths))
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    assert mask.sum(1).tolist() == lengths
    assert torch.equal(batch["labels"].eq(IGNORE), mask.eq(0))
    assert torch.equal(batch["input_ids"].eq(77), mask.eq(0))


def test_fingerprints_tell_data_apart():
    a, b = [Row([1, 2], [1, 2])], [Row([1, 2], [IGNORE, 2])]
    assert fingerprint(a) == fingerprint(list(a)) != fingerprint(b)
