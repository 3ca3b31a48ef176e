"""Rows of tokens from text, JSONL and chats."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ts_core.errors import ArgumentError, ArgumentTypeError, OptionError, StorageError
from ts_hf import stdlib_text, text_dataset
from ts_hf.tokens import Document, Rows, read_documents

texts = st.lists(
    st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=60),
    min_size=3,
    max_size=12,
)


def decode(tokenizer, ids):
    return tokenizer.decode([i for i in ids if i != tokenizer.pad_token_id], skip_special_tokens=False)


@given(
    documents=texts,
    seq_len=st.integers(2, 9),
    held_out=st.sampled_from([0.0, 0.1, 0.5]),
    seed=st.integers(0, 5),
)
def test_blocks_hold_the_text_in_order_and_parts_are_disjoint(tokenizer, documents, seq_len, held_out, seed):
    documents = [f"{index}: some {text}" for index, text in enumerate(documents)]
    data = text_dataset(documents, tokenizer, seq_len, held_out=held_out, seed=seed)
    again = text_dataset(documents, tokenizer, seq_len, held_out=held_out, seed=seed)
    assert torch.equal(data.train.input_ids, again.train.input_ids)
    assert torch.equal(data.held_out.input_ids, again.held_out.input_ids)
    assert data.train.input_ids.shape[1] == seq_len
    assert torch.equal(data.train.labels, data.train.input_ids)
    assert data.documents == len(documents)
    joined = [t for text in documents for t in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    if held_out == 0.0:
        assert len(data.held_out) == 0
        assert data.train.input_ids.reshape(-1).tolist() == joined[: len(joined) // seq_len * seq_len]
    else:
        kept = len(joined) - data.tokens
        assert 0 <= kept < 2 * seq_len
        seen = decode(tokenizer, data.train.input_ids.reshape(-1).tolist())
        other = decode(tokenizer, data.held_out.input_ids.reshape(-1).tolist())
        whole = {text for text in documents if f"{text}</s>" in seen}
        assert not any(f"</s>{text}</s>" in f"</s>{other}" for text in whole)


def test_one_text_is_cut_at_a_line(tokenizer):
    text = "".join(f"line {index}\n" for index in range(100))
    data = text_dataset(text, tokenizer, 10)
    held = decode(tokenizer, data.held_out.input_ids.reshape(-1).tolist())
    assert held.startswith("line 9")
    assert decode(tokenizer, data.train.input_ids.reshape(-1).tolist()).startswith("line 0")


@given(
    pairs=st.lists(st.tuples(st.text("ab ", max_size=6), st.text("cd", max_size=6)), min_size=2, max_size=8),
    seq_len=st.integers(2, 12),
)
def test_prompts_are_masked_and_rows_are_padded(tokenizer, pairs, seq_len):
    entries = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    usable = []
    for prompt, completion in pairs:
        before = tokenizer(prompt)["input_ids"]
        ids = [*before, *tokenizer(completion)["input_ids"], tokenizer.eos_token_id][:seq_len]
        labels = [-100 if index < len(before) else token for index, token in enumerate(ids)]
        if any(label != -100 for label in labels[1:]):
            usable.append((ids, labels))
    if not usable:
        with pytest.raises(ArgumentError, match="no training row"):
            text_dataset(entries, tokenizer, seq_len, held_out=0.0)
        return
    data = text_dataset(entries, tokenizer, seq_len, held_out=0.0)
    width = max(len(ids) for ids, _ in usable)
    assert data.train.input_ids.shape == (len(usable), width)
    assert data.dropped == len(pairs) - len(usable)
    for row, (ids, labels) in zip((data.train[i] for i in range(len(usable))), usable, strict=True):
        space = width - len(ids)
        assert row["input_ids"].tolist() == ids + [tokenizer.pad_token_id] * space
        assert row["labels"].tolist() == labels + [-100] * space
        assert row["attention_mask"].tolist() == [1] * len(ids) + [0] * space
    assert data.train.num_items == sum(label != -100 for _, labels in usable for label in labels[1:])


@given(
    texts=st.lists(st.text("ab ", min_size=1, max_size=30).filter(str.strip), min_size=1, max_size=6),
    pairs=st.lists(st.tuples(st.text("ab ", max_size=6), st.text("cd", max_size=6)), max_size=4),
    seq_len=st.integers(2, 12),
)
def test_packed_rows_hold_each_document_by_itself(tokenizer, texts, pairs, seq_len):
    expected = []
    for text in texts:
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        pieces = [ids[start : start + seq_len] for start in range(0, len(ids), seq_len)]
        expected += [(piece, [-100, *piece[1:]]) for piece in pieces]  # text and prompts may be mixed
    for prompt, completion in pairs:
        before = tokenizer(prompt)["input_ids"]
        ids = [*before, *tokenizer(completion)["input_ids"], tokenizer.eos_token_id][:seq_len]
        labels = [-100 if index < max(len(before), 1) else token for index, token in enumerate(ids)]
        if any(label != -100 for label in labels):
            expected.append((ids, labels))
    entries = [*texts, *({"prompt": prompt, "completion": completion} for prompt, completion in pairs)]
    data = text_dataset(entries, tokenizer, seq_len, held_out=0.0, packing=True)
    assert data.train.input_ids.shape[1] == seq_len
    assert data.tokens == sum(len(ids) for ids, _ in expected)
    found = []
    for ids, labels, positions in zip(
        data.train.input_ids.tolist(),
        data.train.labels.tolist(),
        data.train.position_ids.tolist(),
        strict=True,
    ):
        starts = [index for index, position in enumerate(positions) if position == 0]
        for a, b in zip(starts, [*starts[1:], seq_len], strict=True):
            assert positions[a:b] == list(range(b - a))
            if set(ids[a:b]) != {tokenizer.pad_token_id}:
                found.append((ids[a:b], labels[a:b]))
    assert sorted(found) == sorted(expected)
    assert data.train.num_items == sum(label != -100 for _, labels in expected for label in labels)


def test_packed_rows_go_to_a_model_by_batches_alone(tokenizer):
    data = text_dataset(["aaaa", "bb", "cc"], tokenizer, 4, held_out=0.0, packing=True).train
    (batch,) = data.batches(9)
    assert set(batch) == {"input_ids", "labels", "position_ids", "use_cache"}
    assert batch["use_cache"] is False
    with pytest.raises(ArgumentTypeError, match="packed"):
        data[0]
    with pytest.raises(OptionError, match="packing"):
        text_dataset(["aaaa"], tokenizer, 4, packing="yes")
    one = {"prompt": "aaaaaa", "completion": "b"}  # nothing of it is learned
    with pytest.raises(ArgumentError, match="no training row"):
        text_dataset([one], tokenizer, 4, held_out=0.0, packing=True)


def test_chats_learn_the_assistants_turns(tokenizer):
    messages = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "zed"},
    ]
    data = text_dataset([{"messages": messages}, {"messages": messages[:3]}], tokenizer, 100, held_out=0.0)
    for row, learned in ((0, "yo</s>zed</s>"), (1, "yo</s>")):
        labels = data.train.labels[row].tolist()
        assert decode(tokenizer, [label for label in labels if label != -100]) == learned
    assert (
        decode(tokenizer, data.train.input_ids[1].tolist()) == "<system>be</s><user>hi</s><assistant>yo</s>"
    )


def test_chats_need_a_usable_template(tokenizer):
    import copy

    chat = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 2
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(ArgumentError, match="no chat template"):
        text_dataset(chat, bare, 20)
    bare.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ArgumentError, match="rewrites earlier turns"):
        text_dataset(chat, bare, 20)


def test_files(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("plain\ntext")
    (tmp_path / "b.jsonl").write_text(
        '{"text": "one\\u2028two"}\n\n"three"\n{"text": "four\u2028", "other": 1}\n'
    )
    (tmp_path / "c.json").write_text(json.dumps([{"text": "five"}, {"text": " "}]))
    (tmp_path / "d.md").write_text("  \n")
    found = [document.text for document in read_documents(tmp_path)]
    assert found == ["plain\ntext", "one\u2028two", "three", "four\u2028", "five"]
    assert read_documents([tmp_path / "a.txt", "text\nhere", Document(text="x")]) == [
        Document(text="plain\ntext"), Document(text="text\nhere"), Document(text="x")
    ]  # fmt: skip
    assert read_documents(str(tmp_path / "b.jsonl"), field=None)[1].text == "three"
    assert read_documents([{"body": "b", "text": "t"}], field="body")[0].text == "b"
    assert len(text_dataset(tmp_path, tokenizer, 8).train) > 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            '{"text": "a"}\n{"txt": "b"}',
            "line 2: expected text, prompt and completion, or messages, it has: txt",
        ),
        ('{"text": "a"}\n{', "line 2: not JSON"),
        ("[1, 2]", "line 1: expected a JSON object or a string, given list"),
        ('{"messages": [1]}', "line 1: messages must be"),
        ('{"messages": []}', "line 1: messages must be"),
    ],
)
def test_bad_lines_are_named(content, words, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ArgumentError, match=rf"bad\.jsonl, {words}"):
        read_documents(path)


def test_bad_sources(tmp_path, tokenizer):
    with pytest.raises(StorageError, match="no such file"):
        read_documents("data/none.jsonl")
    with pytest.raises(StorageError):
        read_documents(tmp_path / "none.bin" if (tmp_path / "none.bin").exists() else [tmp_path / "none.txt"])
    with pytest.raises(ArgumentTypeError):
        read_documents(5)
    (tmp_path / "x.json").write_text("[")
    with pytest.raises(ArgumentError, match="not JSON"):
        read_documents(tmp_path / "x.json")
    (tmp_path / "x.bin").write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(ArgumentError, match="not a UTF-8"):
        read_documents(tmp_path / "x.bin")
    with pytest.raises(ArgumentError, match="string field 'body'"):
        read_documents([{"text": "t"}], field="body")
    with pytest.raises(ArgumentError, match="no document"):
        text_dataset([], tokenizer, 8)
    with pytest.raises(ArgumentError, match="mixed"):
        text_dataset(["a", {"prompt": "b", "completion": "c"}], tokenizer, 8)
    with pytest.raises(ArgumentError, match="no training row of 500 tokens"):
        text_dataset(["a", "b"], tokenizer, 500)
    for bad in ({"seq_len": 1}, {"seq_len": 8, "held_out": 1.0}, {"seq_len": 8, "seed": "x"}):
        with pytest.raises(OptionError):
            text_dataset(["aaaa", "bbbb"], tokenizer, **bad)


@given(
    rows=st.integers(0, 9),
    size=st.integers(1, 4),
    seed=st.one_of(st.none(), st.integers(0, 9)),
    drop=st.booleans(),
)
def test_batches_hold_each_row_once(rows, size, seed, drop):
    ids = torch.arange(rows * 2).reshape(rows, 2)
    data = Rows(ids, ids.clone(), torch.ones_like(ids))
    batches = list(data.batches(size, seed=seed, drop_last=drop))
    seen = [row for batch in batches for row in batch["input_ids"][:, 0].tolist()]
    assert len(set(seen)) == len(seen) == (rows // size * size if drop else rows)
    if seed is None:
        assert seen == sorted(seen)
    assert all(set(batch) == {"input_ids", "labels", "attention_mask"} for batch in batches)
    assert all(len(batch["labels"]) == size for batch in batches[:-1])
    assert [b["input_ids"].tolist() for b in batches] == [
        b["input_ids"].tolist() for b in data.batches(size, seed=seed, drop_last=drop)
    ]


@settings(max_examples=3, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([20_000, 200_000]))
def test_stdlib_text_is_deterministic_and_within_the_limit(limit):
    found = stdlib_text(limit)
    assert found == stdlib_text(limit)
    total = sum(len(text.encode()) for text in found)
    assert limit // 2 < total <= limit
    assert any("import" in text for text in found)


def test_stdlib_text_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(StorageError, match="no source file"):
        stdlib_text(1000)
    (tmp_path / "bad.py").write_bytes(b"\xff")
    (tmp_path / "good.py").write_text("x = 1\n")
    assert stdlib_text(1000) == ["x = 1\n"]
