"""Packed rows through the Trainer: the losses and gradients of the documents one by one."""

import copy

import pytest
import torch
from test_trainer import InOrder, arguments, build, norm, run, window_loss
from transformers import BloomConfig, BloomForCausalLM, DataCollatorForSeq2Seq, Trainer

from trainstream.integrations.huggingface import TrainStreamTrainer
from trainstream.packing import PackedCollator
from ts_core.errors import OptionError

pytestmark = pytest.mark.usefixtures("one_thread")


def ragged(lengths, seed=0, answers=None):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index, length in enumerate(lengths):
        ids = torch.randint(3, 97, (length,), generator=generator)
        labels = ids.clone()
        if answers is not None:
            labels[: length - answers[index]] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


@pytest.mark.parametrize("packing", [True, 24])
@pytest.mark.parametrize("options", [{}, {"chunked_loss": False}, {"param_offload": True, "recompute": True}])
def test_gradients_are_those_of_the_documents_one_by_one(tmp_path, packing, options):
    rows = ragged([9, 4, 13, 6, 2, 11], answers=[3, 3, 9, 1, 1, 8])
    model = build()
    oracle = copy.deepcopy(model)
    loss, _ = window_loss(oracle, rows)
    loss.backward()
    changes = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    _, (gradients,), losses = run(tmp_path, model, rows, {"packing": packing, **options}, **changes)
    expected = {n: p.grad for n, p in oracle.named_parameters()}
    assert losses == pytest.approx([loss.item()], rel=1e-5)
    assert norm({n: gradients[n] - expected[n] for n in expected}) <= 1e-5 * norm(expected)


def test_fewer_tokens_are_computed_and_only_real_ones_counted(tmp_path):
    seen, counted = [], []

    class Watch(InOrder):
        def compute_loss(self, model, inputs, *args, **kwargs):
            seen.append(tuple(inputs["input_ids"].shape))
            assert "num_tokens" not in inputs
            return super().compute_loss(model, inputs, *args, **kwargs)

        def create_optimizer(self, *args):
            optimizer = super().create_optimizer(*args)
            self._ts_metrics.count_tokens = counted.append
            return optimizer

    rows = ragged([9, 4, 13, 6, 2, 11])
    trainer = Watch(
        model=build(),
        args=arguments(tmp_path, per_device_train_batch_size=6),
        train_dataset=rows,
        trainstream={"packing": True},
    )
    trainer.train()
    assert seen == [(4, 13)]
    assert counted == [45]


def test_evaluation_has_one_document_a_row(tmp_path):
    rows = ragged([9, 4, 13, 6])
    model = build()
    shapes = []

    def accuracy(prediction):
        shapes.append(prediction.predictions.shape)
        return {}

    options = {"packing": True}
    settings = arguments(tmp_path, per_device_eval_batch_size=4)
    ours = TrainStreamTrainer(model=model, args=settings, eval_dataset=rows, trainstream=options)
    expected = window_loss(copy.deepcopy(model), rows)[0].item()
    assert ours.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    ours = TrainStreamTrainer(
        model=model, args=settings, eval_dataset=rows, trainstream=options, compute_metrics=accuracy
    )
    ours.evaluate()
    assert shapes == [(4, 13, 97)]


def test_a_packed_run_resumes_bit_identical(tmp_path):
    rows = ragged([9, 4, 13, 6, 2, 11, 7, 5])
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "per_device_train_batch_size": 2}
    options = {"packing": 16}
    whole = TrainStreamTrainer(
        model=build(), args=arguments(tmp_path, **settings), train_dataset=rows, trainstream=options
    )
    whole.train()
    again = TrainStreamTrainer(
        model=build(5),
        args=arguments(tmp_path, **settings),
        train_dataset=rows,
        trainstream={**options, "param_offload": True, "recompute": True},
    )
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for (name, p), q in zip(again.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_what_cannot_be_packed_is_refused(tmp_path):
    rows = ragged([4, 4])
    with pytest.raises(OptionError, match="data_collator"):
        TrainStreamTrainer(
            model=build(),
            args=arguments(tmp_path),
            train_dataset=rows,
            data_collator=DataCollatorForSeq2Seq(None),
            trainstream={"packing": True},
        )
    bloom = BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=4))
    with pytest.raises(OptionError, match="packing"):
        TrainStreamTrainer(
            model=bloom, args=arguments(tmp_path), train_dataset=rows, trainstream={"packing": 8}
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"packing": 1}, "packing: expected an integer >= 2"),  # a row of one token has nothing to predict
        ({"pack": True}, "no option 'pack'"),
        ({"packng": True}, "did you mean packing"),
        ({"save_in_backgroud": True}, "did you mean save_in_background"),
    ],
)
def test_wrong_options_of_the_trainer(tmp_path, options, words):
    with pytest.raises(OptionError, match=words):
        TrainStreamTrainer(model=build(), args=arguments(tmp_path), trainstream=options)


def test_the_collator_works_with_a_stock_trainer(tmp_path):
    rows = ragged([9, 4, 13, 6])
    model = build()
    expected = window_loss(copy.deepcopy(model), rows)[0].item()
    trainer = Trainer(
        model=model,
        args=arguments(tmp_path, per_device_train_batch_size=4),
        train_dataset=rows,
        data_collator=PackedCollator(),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == pytest.approx([expected], rel=1e-5)
