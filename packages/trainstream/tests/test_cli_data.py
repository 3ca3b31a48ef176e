import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import byte_tokenizer

from trainstream.cli.data import batch, batch_indices, expand, fingerprint, load_data, spread
from trainstream.cli.settings import merge
from ts_core.errors import ArgumentError
from ts_hf.tokens import Rows

TOKENIZER = byte_tokenizer()


def padded(lengths):
    width = max(lengths)
    ids = torch.full((len(lengths), width), 77)
    labels = torch.full((len(lengths), width), -100)
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length] = labels[row, :length] = torch.arange(length)
        mask[row, :length] = 1
    return Rows(ids, labels, mask)


def test_files_folders_and_globs(tmp_path):
    for name in ("a.txt", "b.md", "d.jsonl", ".hidden.txt", "picture.png", "sub/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = [path.relative_to(tmp_path).as_posix() for path in expand([str(tmp_path)])]
    assert found == ["a.txt", "b.md", "d.jsonl", "sub/e.txt"]
    found = expand([str(tmp_path / "*.md"), str(tmp_path / "b.md"), str(tmp_path / "picture.png")])
    assert [path.name for path in found] == ["b.md", "picture.png"]
    assert len(expand([str(tmp_path / "**/*.txt")])) == 2


def test_sources_that_match_nothing_are_named(tmp_path):
    with pytest.raises(ArgumentError, match=r"missing\.txt: no such file"):
        expand([str(tmp_path / "missing.txt")])
    (tmp_path / "picture.png").write_text("x")
    with pytest.raises(ArgumentError, match="no text"):
        expand([str(tmp_path)])


@given(st.from_regex(r"[a-z]{1,8}", fullmatch=True))
def test_names_of_no_file_are_refused_whatever_they_are(name):
    with pytest.raises(ArgumentError, match=name):
        expand([f"/nonexistent/{name}*"])


def test_the_built_in_text_is_python_source():
    data = load_data(merge({"seq_len": 64}), TOKENIZER)
    assert len(data.train) > 1000
    assert 0.005 < len(data.held_out) / len(data.train) < 0.2
    assert "import " in TOKENIZER.decode(data.train.input_ids[:50].flatten())


def test_short_documents_hold_out_rows(tmp_path):
    for i in range(6):
        (tmp_path / f"{i}.txt").write_text("abcdefg")
    data = load_data(merge({"data": str(tmp_path), "seq_len": 8}), TOKENIZER)
    assert (len(data.train), len(data.held_out)) == (5, 1)
    data = load_data(merge({"data": str(tmp_path), "eval_data": str(tmp_path), "seq_len": 16}), TOKENIZER)
    assert (len(data.train), len(data.held_out)) == (3, 3)
    data = load_data(merge({"data": str(tmp_path), "seq_len": 32}), TOKENIZER)
    assert (len(data.train), len(data.held_out)) == (1, 0)


@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 2**40), st.integers(0, 5))
def test_every_pass_visits_every_row_once(batch_size, count, seed, epoch):
    seen = [i for step in range(count * (epoch + 1)) for i in batch_indices(step, batch_size, count, seed)]
    part = seen[epoch * count : (epoch + 1) * count]
    assert sorted(part) == list(range(count))


def test_passes_have_different_orders():
    first, second = (batch_indices(epoch, 50, 50, 0) for epoch in (0, 1))
    assert first != second
    assert batch_indices(0, 50, 50, 0) == first
    assert batch_indices(0, 50, 50, 1) != first


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_batches_lose_common_padding_only(lengths, data):
    indices = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=4))
    made = batch(padded(lengths), indices)
    chosen = [lengths[i] for i in indices]
    assert made["input_ids"].shape == (len(chosen), max(chosen))
    mask = made.get("attention_mask", torch.ones_like(made["input_ids"]))
    assert mask.sum(1).tolist() == chosen
    assert torch.equal(made["labels"].eq(-100), mask.eq(0))


@given(st.integers(1, 30), st.integers(1, 30))
def test_spread_takes_different_rows_in_order(count, wanted):
    rows = Rows(torch.arange(count)[:, None], torch.arange(count)[:, None])
    taken = spread(rows, wanted).input_ids[:, 0].tolist()
    assert len(taken) == min(count, wanted)
    assert taken == sorted(set(taken))


def test_fingerprints_tell_data_apart():
    a, b = padded([3, 2]), padded([3, 2])
    assert fingerprint(a) == fingerprint(b)
    b.labels[0, 1] = -100
    assert fingerprint(a) != fingerprint(b)
    flat = Rows(a.input_ids.reshape(3, 2), a.labels.reshape(3, 2))
    assert fingerprint(a) != fingerprint(flat)
