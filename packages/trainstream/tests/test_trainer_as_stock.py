"""What transformers' own tests ask of a Trainer and ours once did otherwise."""

import json

import pytest
import torch
import transformers
from test_trainer import Gradients, arguments, build, random_rows
from transformers import Trainer

from trainstream.integrations.huggingface import TrainStreamTrainer
from ts_core.errors import OptionError, StateError
from ts_optim import OffloadAdamW

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", ["sgd", "adafactor", "rmsprop"])
@pytest.mark.parametrize("options", [{}, {"param_offload": True, "recompute": True}])
def test_other_optimizers_are_kept_as_they_are(tmp_path, name, options):
    rows = random_rows(6)
    made = []
    for cls, extra in (
        (Trainer, {}),
        (TrainStreamTrainer, {"trainstream": {"chunked_loss": False, **options}}),
    ):
        args = arguments(tmp_path, optim=name, max_steps=3, gradient_accumulation_steps=2)
        made.append(cls(model=build(), args=args, train_dataset=rows, **extra))
        made[-1].train()
    stock, ours = made
    assert type(ours.optimizer.optimizer) is type(stock.optimizer.optimizer)
    for (key, p), q in zip(ours.model.named_parameters(), stock.model.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_unscaled_once_before_they_are_clipped(tmp_path, monkeypatch, dtype):
    args = arguments(tmp_path, optim="sgd", max_steps=2, max_grad_norm=0.1)
    trainer = TrainStreamTrainer(model=build().to(dtype), args=args, train_dataset=random_rows(4))
    calls = []
    monkeypatch.setattr(trainer.accelerator, "unscale_gradients", lambda *_: calls.append(1))
    trainer.train()
    assert len(calls) == 2  # a GradScaler raises when it is asked twice in a step


@pytest.mark.parametrize("name", ["lomo", "galore_adamw_layerwise"])
def test_an_optimizer_that_updates_in_backward_is_refused(tmp_path, name):
    with pytest.raises(OptionError, match=f"optim='{name}'"):
        TrainStreamTrainer(model=build(), args=arguments(tmp_path, optim=name))


@pytest.mark.parametrize("chunked", [True, False])
def test_a_mean_over_each_micro_batch_can_be_asked_for(tmp_path, chunked):
    rows, kept = random_rows(4), []
    for cls, extra in ((Trainer, {}), (TrainStreamTrainer, {"trainstream": {"chunked_loss": chunked}})):
        gradients = Gradients()
        args = arguments(tmp_path, gradient_accumulation_steps=4)
        trainer = cls(model=build(), args=args, train_dataset=rows, callbacks=[gradients], **extra)
        trainer.model_accepts_loss_kwargs = False
        trainer.train()
        kept.append(gradients.steps[0])
    for name, right in kept[0].items():
        torch.testing.assert_close(kept[1][name], right, rtol=1e-4, atol=1e-7, msg=name)


def test_a_compiled_model_has_its_own_loss(tmp_path, caplog):
    trainer = TrainStreamTrainer(
        model=build(), args=arguments(tmp_path, torch_compile=True), train_dataset=random_rows(2)
    )
    assert not trainer._chunked
    assert "torch_compile" in caplog.text


def test_another_trainer_wraps_the_model_again(tmp_path):
    """With its own options and an optimizer that it logs about, not with what the first one left."""
    rows, made = random_rows(6), []
    for cls in (Trainer, TrainStreamTrainer):
        model = build()
        for first, options in ((True, {"param_offload": True}), (False, {"recompute": True})):
            extra = {} if cls is Trainer else {"trainstream": {"chunked_loss": False, **options}}
            args = arguments(tmp_path, max_steps=2, learning_rate=1e-2 if first else 1e-3)
            trainer = cls(model=model, args=args, train_dataset=rows, **extra)
            trainer.train()
        made.append(trainer)
    stock, ours = made
    assert isinstance(ours.optimizer.optimizer, OffloadAdamW)
    session = ours.model._trainstream_session
    assert session.optimizer is ours.optimizer.optimizer
    assert session.options.recompute is True
    assert session.options.param_offload == "auto"
    assert "ts_tokens_per_s" in next(entry for entry in ours.state.log_history if "loss" in entry)
    for (key, p), q in zip(ours.model.named_parameters(), stock.model.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize("kind", ["BartForConditionalGeneration", "BartForCausalLM"])
def test_labels_that_are_not_shifted_stay_so(tmp_path, kind):
    small = {f"{part}_{what}": 1 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    config = transformers.BartConfig(
        vocab_size=97, d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16, dropout=0.0, **small
    )
    made = []
    for cls in (Trainer, TrainStreamTrainer):
        torch.manual_seed(0)
        model = getattr(transformers, kind)(config)
        for name, parameter in model.named_parameters():
            if kind == "BartForCausalLM" and "encoder_attn" in name:
                parameter.requires_grad_(False)  # without an encoder nothing reaches it
        args = arguments(tmp_path, max_steps=2, gradient_accumulation_steps=2)
        made.append(cls(model=model, args=args, train_dataset=random_rows(6)))
        made[-1].train()
    stock, ours = ([entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in made)
    assert ours == pytest.approx(stock, rel=1e-5)
    for (key, p), q in zip(made[1].model.named_parameters(), made[0].model.parameters(), strict=True):
        if "k_proj.bias" not in key:  # its gradient is rounding alone: a softmax does not see it
            torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-4, atol=1e-5, msg=key)


def test_labels_that_a_collator_has_shifted_are_not_shifted_again(tmp_path):
    labels = torch.tensor([[5, 6, -100, 7, 8, 9]])
    rows = {"input_ids": torch.tensor([[1, 5, 6, 2, 7, 8]]), "labels": labels}
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    model = build()
    trainer = TrainStreamTrainer(model=model, args=arguments(tmp_path), train_dataset=random_rows(2))
    inputs = {**rows, "shift_labels": shifted}
    count = trainer._get_num_items_in_batch([inputs], torch.device("cpu"))
    assert int(count) == 4
    found = trainer.compute_loss(model, dict(inputs), num_items_in_batch=count)
    right = model(**inputs, num_items_in_batch=count).loss
    torch.testing.assert_close(found, right)
    # What the collator says holds, also where labels are something else.
    found = trainer.compute_loss(model, {**inputs, "labels": labels.flip(1)}, num_items_in_batch=count)
    torch.testing.assert_close(found, right)


def test_a_best_checkpoint_that_was_saved_before_its_evaluation_is_named(tmp_path):
    settings = {
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "epoch",  # after the step that ends an epoch was saved
        "metric_for_best_model": "score",
        "greater_is_better": True,
    }
    scores = iter([3.0, 1.0])
    trainer = TrainStreamTrainer(
        model=build(),
        args=arguments(tmp_path, **settings),
        train_dataset=random_rows(2),
        eval_dataset=random_rows(2),
        compute_metrics=lambda prediction: {"score": next(scores)},
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    for step, best in ((2, None), (3, str(tmp_path / "checkpoint-2")), (4, str(tmp_path / "checkpoint-2"))):
        saved = json.loads((tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text())
        assert saved["best_model_checkpoint"] == best


def test_a_full_evaluation_in_another_dtype_is_refused_where_weights_are_paged(tmp_path):
    trainer = TrainStreamTrainer(
        model=build(), args=arguments(tmp_path, bf16_full_eval=True), train_dataset=random_rows(2),
        eval_dataset=random_rows(2), trainstream={"param_offload": True},
    )  # fmt: skip
    trainer.train()
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with pytest.raises(StateError, match="dtype while the model is wrapped"):
        trainer.evaluate()
    for name, parameter in trainer.model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, before[name])


def test_training_again_from_model_init_starts_anew(tmp_path):
    losses = {}
    for cls in (Trainer, TrainStreamTrainer):
        trainer = cls(
            model_init=lambda: build(3), args=arguments(tmp_path, max_steps=3), train_dataset=random_rows(3)
        )
        for run in range(2):
            trainer.train()
            losses[cls, run] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[Trainer, 0] == losses[Trainer, 1]
    for again in range(2):
        assert losses[TrainStreamTrainer, again] == pytest.approx(losses[Trainer, again], rel=1e-5)
