"""`finetune packing=true`: rows full of documents that see themselves alone, as the Trainer packs them."""

import json
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file
from test_cli_finetune import equal, finetune, invoke, last, quick, weights
from test_trainer import InOrder, arguments
from tiny_models import byte_tokenizer, save_tiny_model
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM

from trainstream.cli.data import batch, batch_indices, load_data, spread
from trainstream.cli.loop import chunked_loss
from trainstream.cli.settings import describe, merge
from ts_core.errors import ArgumentError

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]
LONG, SHORT = 10, 6  # tokens; a row takes one of each
STEPS = ["steps=3", "batch_size=2", "log_steps=1", "warmup=0", "scheduler=constant", "eval_batches=0"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, and four long and four short examples; a token is a byte, and each ends with one more."""
    root = tmp_path_factory.mktemp("packing")
    save_tiny_model(root / "tiny")
    texts = [chr(97 + i) * 3 + "bcdefghijk"[: LONG - 4] for i in range(4)]
    texts += ["xyzuvw"[i : i + 2] + "abc"[: SHORT - 3] for i in range(4)]
    lines = [json.dumps({"prompt": text[:2], "completion": text[2:]}) for text in texts]
    (root / "examples.jsonl").write_text("\n".join(lines))
    (root / "texts").mkdir()
    for index, size in enumerate((30, 7, 19, 3, 12, 5)):
        (root / f"texts/{index}.txt").write_text("the quick brown fox jumps over it"[index : index + size])
    return root


@pytest.fixture(autouse=True)
def _here(place, monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.chdir(place)
    yield
    torch.set_num_threads(threads)


def rows_of(data, seq_len=16, **more):
    return load_data(merge({"data": data, "eval_data": data, "seq_len": seq_len, **more}), byte_tokenizer())


def packed_row(rows, index):
    return type(rows)(*(None if t is None else t[index : index + 1] for t in vars(rows).values()))


def documents(row):
    """The documents of a packed row, padding as the last one if there is any."""
    starts = [*torch.nonzero(row.position_ids[0] == 0).flatten().tolist(), row.position_ids.shape[1]]
    return [{"input_ids": row.input_ids[0, a:b], "labels": row.labels[0, a:b]} for a, b in pairwise(starts)]


def test_losses_and_weights_are_the_trainers(place, tmp_path):
    words = ["model=tiny", "method=full", "data=examples.jsonl", "eval_data=examples.jsonl", "packing=true"]
    events = finetune(*words, *STEPS, f"output_dir={tmp_path}/run")
    packed = rows_of("examples.jsonl", packing=True).train
    assert packed.input_ids.shape == (4, LONG + SHORT)
    order = [index for step in range(3) for index in batch_indices(step, 2, 4, 0)]
    examples = [document for index in order for document in documents(packed_row(packed, index))]
    assert len(examples) == 3 * 2 * 2
    trainer = InOrder(
        model=AutoModelForCausalLM.from_pretrained(place / "tiny", dtype=torch.float32),
        args=arguments(
            tmp_path / "trainer", per_device_train_batch_size=4, max_steps=3, learning_rate=5e-3,
            max_grad_norm=1.0, weight_decay=0.0,
        ),
        train_dataset=examples,
        trainstream={"packing": LONG + SHORT},
    )  # fmt: skip
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [e["loss"] for e in events if e["event"] == "step"] == pytest.approx(logged, rel=1e-6)
    found = weights(tmp_path / "run/model")
    named = dict(trainer.model.named_parameters())
    assert all(torch.equal(value, named[name]) for name, value in found.items())
    assert last(events, "result")["tokens"] == 3 * 2 * (LONG + SHORT)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("data", ["examples.jsonl", "texts"])
def test_the_loss_is_that_of_the_documents_one_by_one(place, data, attention):
    rows = rows_of(data, packing=True).held_out
    model = AutoModelForCausalLM.from_pretrained(
        place / "tiny", dtype=torch.float32, attn_implementation=attention
    )
    with torch.no_grad():
        together = chunked_loss(model, batch(rows, range(len(rows))), 1, 8)
        alone = 0.0
        for index in range(len(rows)):
            for document in documents(packed_row(rows, index)):
                one = {name: tensor[None] for name, tensor in document.items()}
                alone += chunked_loss(model, one, 1, 8).item()
    assert together.item() == pytest.approx(alone, rel=1e-5)


def test_examples_are_the_same_packed_or_not(place):
    model = AutoModelForCausalLM.from_pretrained(place / "tiny", dtype=torch.float32)
    totals = []
    for packing in (False, True):
        rows = rows_of("examples.jsonl", packing=packing).train
        with torch.no_grad():
            totals.append(chunked_loss(model, batch(rows, range(len(rows))), rows.num_items, 8).item())
        assert len(rows) == (4 if packing else 8)
        assert rows.num_items == 4 * (LONG - 2) + 4 * (SHORT - 2)
    assert totals[0] == pytest.approx(totals[1], rel=1e-6)


def test_spread_rows_keep_their_documents(place):
    rows = rows_of("texts", packing=True).train
    assert torch.equal(spread(rows, 1).position_ids, rows.position_ids[:1])


def test_a_packed_run_resumes_bit_identical_and_stays_packed(place, tmp_path):
    words = quick("model=tiny", "data=texts", "packing=true", "lora_dropout=0.1", "eval_batches=0")
    shared = [*words, "steps=4", "save_steps=2"]
    finetune(*shared, f"output_dir={tmp_path}/run")
    whole = weights(tmp_path / "run/adapter")
    checkpoint = tmp_path / "run/checkpoint-2"
    refused = invoke(f"resume={checkpoint}", "packing=false")
    assert refused.exit_code == 2
    assert "option packing: the checkpoint was made with True" in refused.stderr
    finetune(f"resume={checkpoint}", f"output_dir={tmp_path}/run", "eval_batches=0")
    assert equal(weights(tmp_path / "run/adapter"), whole)
    assert load_file(checkpoint / "adapter_model.safetensors")


def test_a_checkpoint_of_a_release_without_the_key_is_one_without_packing(place, tmp_path):
    words = quick("model=tiny", "data=texts", "eval_batches=0", "steps=2", "save_steps=1")
    finetune(*words, f"output_dir={tmp_path}/run")
    path = tmp_path / "run/checkpoint-1/trainstream_state.json"
    content = json.loads(path.read_text())
    del content["data"]["settings"]["packing"]
    path.write_text(json.dumps(content))
    refused = invoke(f"resume={path.parent}", "packing=true")
    assert "option packing: the checkpoint was made with False" in refused.stderr
    finetune(f"resume={path.parent}", "packing=false", "eval_batches=0")


def test_a_model_whose_documents_reach_each_other_is_refused_by_name(place, tmp_path):
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=258, hidden_size=32, n_layer=1, n_head=4)
    BloomForCausalLM(config).save_pretrained(tmp_path / "bloom")
    byte_tokenizer().save_pretrained(tmp_path / "bloom")
    words = quick(f"model={tmp_path}/bloom", "data=texts", f"output_dir={tmp_path}/run", "packing=true")
    result = invoke(*words)
    assert result.exit_code == 2
    assert "option packing" in result.stderr
    assert not list(tmp_path.glob("run/checkpoint-*"))


def test_it_is_among_the_keys_and_is_true_or_false():
    assert "packing (sample_packing)" in describe()
    result = invoke("packing=512")
    assert (result.exit_code, "packing" in result.stderr) == (2, True)


def test_no_document_that_teaches_anything(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "x" * 30, "completion": "y"}))
    with pytest.raises(ArgumentError, match="no training row"):
        rows_of(str(tmp_path / "a.jsonl"), packing=True)
