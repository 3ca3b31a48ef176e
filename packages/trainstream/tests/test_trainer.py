import copy
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_config
from torch.nn import functional as F
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import trainstream
from trainstream.integrations import huggingface
from trainstream.integrations.huggingface import TrainStreamCallback, TrainStreamTrainer, wrap_hf
from ts_core.errors import ArgumentTypeError, OptionError
from ts_optim import OffloadAdamW
from ts_quant import QuantizedTensor

# PEFT uses a name that transformers has renamed.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]


def build(seed=0, **changes):
    torch.manual_seed(seed)
    config = tiny_config(vocab_size=97, eos_token_id=None, pad_token_id=None, max_position_embeddings=64)
    for name, value in changes.items():
        setattr(config, name, value)
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config).float()


def arguments(folder, **changes):
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 1,
        "max_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "weight_decay": 0.1,
        **changes,
    }
    return TrainingArguments(**settings)


class InOrder(TrainStreamTrainer):
    """Batches in the order of the data set, so that windows are known."""

    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Gradients(TrainerCallback):
    """Keeps the gradients and parameters of each step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


def random_rows(count, length=9, seed=0, labels=None):
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, 97, (length,), generator=generator) for _ in range(count)]
    rows = []
    for index, row in enumerate(ids):
        target = row.clone()
        if labels is not None:
            target[: length - labels[index]] = -100
        rows.append({"input_ids": row, "labels": target})
    return rows


def window_loss(model, rows):
    total, count = torch.zeros(()), 0
    for row in rows:
        logits = model(input_ids=row["input_ids"][None]).logits[0, :-1]
        target = row["labels"][1:]
        total = total + F.cross_entropy(logits, target, ignore_index=-100, reduction="sum")
        count += int((target != -100).sum())
    return total / count, count


def norm(grads):
    return math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))


class Restricted(LlamaForCausalLM):
    """A causal LM whose forward takes no arguments for the loss."""

    accepts_loss_kwargs = False

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


def run(folder, model, rows, options=None, **changes):
    keep = Gradients()
    trainer = InOrder(
        model=model,
        args=arguments(folder, **changes),
        train_dataset=rows,
        callbacks=[keep],
        trainstream=options,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return trainer, keep.steps, losses


@pytest.mark.parametrize("kind", ["chunked", "small chunks", "whole logits", "no loss arguments", "neither"])
def test_the_loss_is_divided_by_the_labels_of_the_whole_window(tmp_path, kind):
    rows = random_rows(3, labels=[1, 7, 3])
    model = build()
    if kind in ("no loss arguments", "neither"):
        model.__class__ = Restricted
    oracle = copy.deepcopy(model)
    loss, count = window_loss(oracle, rows)
    loss.backward()
    assert count == 11
    options = {"small chunks": {"loss_chunk_size": 3}, "whole logits": {"chunked_loss": False}}
    options = options.get("whole logits" if kind == "neither" else kind)
    _, steps, losses = run(tmp_path, model, rows, options, gradient_accumulation_steps=3)
    expected = {n: p.grad for n, p in oracle.named_parameters()}
    assert losses == pytest.approx([loss.item()], rel=1e-5)
    for name, gradient in steps[0].items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)


def test_a_label_at_position_0_does_not_count(tmp_path):
    rows = random_rows(4)
    model = build()
    loss, count = window_loss(copy.deepcopy(model), rows)
    assert count == 32
    _, _, losses = run(tmp_path, model, rows, gradient_accumulation_steps=4)
    assert losses == pytest.approx([loss.item()], rel=1e-5)


def test_the_last_incomplete_window_has_its_own_divisor(tmp_path):
    rows = random_rows(5, labels=[1, 7, 3, 2, 6])
    model = build()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.0)
    expected = []
    for window in (rows[:3], rows[3:]):
        loss, _ = window_loss(twin, window)
        loss.backward()
        expected.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    _, _, losses = run(
        tmp_path,
        model,
        rows,
        gradient_accumulation_steps=3,
        max_steps=-1,
        num_train_epochs=1,
        weight_decay=0.0,
    )
    assert losses == pytest.approx(expected, rel=1e-4)


def test_gradients_do_not_depend_on_how_a_step_is_cut(tmp_path):
    rows = random_rows(3, labels=[1, 7, 3])
    model = build()
    _, (cut,), (first,) = run(tmp_path / "a", copy.deepcopy(model), rows, gradient_accumulation_steps=3)
    _, (whole,), (second,) = run(tmp_path / "b", copy.deepcopy(model), rows, per_device_train_batch_size=3)
    assert first == pytest.approx(second, rel=1e-6)
    assert norm({n: cut[n] - whole[n] for n in whole}) <= 1e-5 * norm(whole)


@pytest.mark.parametrize("kind", [LlamaForCausalLM, Restricted])
@pytest.mark.parametrize("chunked", [True, False])
def test_a_micro_batch_without_labels_adds_nothing(tmp_path, kind, chunked):
    rows = random_rows(2, labels=[0, 5])
    model = build()
    model.__class__ = kind
    loss, _ = window_loss(copy.deepcopy(model), rows[1:])
    options = {"chunked_loss": chunked}
    _, steps, losses = run(tmp_path, model, rows, options, gradient_accumulation_steps=2)
    assert losses == pytest.approx([loss.item()], rel=1e-5)
    assert all(torch.isfinite(g).all() for g in steps[0].values())
    if not chunked and kind is LlamaForCausalLM:
        return  # the model's own loss divides 0 by 0 there
    rows = random_rows(1, labels=[0])
    before = copy.deepcopy(model.state_dict())
    _, steps, losses = run(tmp_path / "b", trainstream.unwrap(model), rows, options, weight_decay=0.0)
    assert losses == [0.0]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_training_equals_the_stock_trainer(tmp_path):
    rows = random_rows(12)
    model = build()
    settings = {
        "max_steps": 6,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "adam_beta2": 0.95,
    }
    stock_model = copy.deepcopy(model)
    stock = Trainer(model=stock_model, args=arguments(tmp_path / "a", **settings), train_dataset=rows)
    stock.train()
    ours = TrainStreamTrainer(model=model, args=arguments(tmp_path / "b", **settings), train_dataset=rows)
    ours.train()
    assert isinstance(ours.optimizer.optimizer, OffloadAdamW)
    groups = [(len(g["params"]), g["weight_decay"]) for g in ours.optimizer.param_groups]
    assert groups == [(len(g["params"]), g["weight_decay"]) for g in stock.optimizer.param_groups]
    for key in ("loss", "grad_norm", "learning_rate"):
        expected = [entry[key] for entry in stock.state.log_history if key in entry]
        assert [entry[key] for entry in ours.state.log_history if key in entry] == pytest.approx(
            expected, rel=2e-4
        )
    for a, b in zip(model.parameters(), stock_model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_metrics_are_logged_beside_the_loss(tmp_path):
    trainer, _, _ = run(tmp_path, build(), random_rows(2), max_steps=2)
    entry = next(entry for entry in trainer.state.log_history if "loss" in entry)
    names = ["pinned_gb", "host_state_gb", "d2h_gb", "h2d_gb", "stall_s", "peak_vram_gb", "tokens_per_s"]
    assert all(isinstance(entry[f"ts_{name}"], float) for name in names)
    assert entry["ts_host_state_gb"] > 0
    assert entry["ts_tokens_per_s"] > 0


def test_the_callback_gives_a_stock_trainer_the_metrics(tmp_path):
    model = build()
    optimizer = OffloadAdamW(model.parameters(), lr=1e-2)
    trainer = Trainer(
        model=model,
        args=arguments(tmp_path, include_num_input_tokens_seen="all", max_steps=2),
        train_dataset=random_rows(2),
        optimizers=(optimizer, None),
        callbacks=[TrainStreamCallback(optimizer)],
    )
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["ts_host_state_gb"] > 0 and "ts_tokens_per_s" in entry for entry in entries)
    with pytest.raises(ArgumentTypeError, match="OffloadAdamW"):
        TrainStreamCallback(torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("chunked", [True, False])
def test_evaluation_equals_the_stock_trainer(tmp_path, chunked):
    model, rows = build(), random_rows(6, labels=[8, 3, 5, 9, 2, 7])
    settings = {"per_device_eval_batch_size": 2}
    stock = Trainer(model=copy.deepcopy(model), args=arguments(tmp_path / "a", **settings), eval_dataset=rows)
    ours = TrainStreamTrainer(
        model=model,
        args=arguments(tmp_path / "b", **settings),
        eval_dataset=rows,
        trainstream={"chunked_loss": chunked},
    )
    assert ours.evaluate()["eval_loss"] == pytest.approx(stock.evaluate()["eval_loss"], rel=1e-5)


def test_metrics_that_need_logits_get_them(tmp_path):
    rows = random_rows(4)
    seen = {}

    def accuracy(prediction):
        seen["shape"] = prediction.predictions.shape
        return {"accuracy": 0.5}

    trainer = TrainStreamTrainer(
        model=build(), args=arguments(tmp_path), eval_dataset=rows, compute_metrics=accuracy
    )
    metrics = trainer.evaluate()
    assert seen["shape"] == (4, 9, 97)
    assert metrics["eval_accuracy"] == 0.5
    plain = TrainStreamTrainer(model=trainer.model, args=arguments(tmp_path), eval_dataset=rows)
    assert metrics["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)
    assert trainer.predict(rows).predictions.shape == (4, 9, 97)


def lora(model, **changes):
    return get_peft_model(
        model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **changes)
    )


@pytest.mark.parametrize("kind", ["full", "lora dropout", "bf16"])
def test_a_resumed_run_is_bit_identical(tmp_path, kind):
    rows = random_rows(20)

    def make(seed):
        model = build(seed if kind != "lora dropout" else 0)
        torch.manual_seed(seed)
        if kind == "bf16":
            model = model.bfloat16()
        return lora(model, lora_dropout=0.2, init_lora_weights=False) if kind == "lora dropout" else model

    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "linear"}
    whole = TrainStreamTrainer(model=make(0), args=arguments(tmp_path, **settings), train_dataset=rows)
    whole.train()
    expected = {n: p.detach().clone() for n, p in whole.model.named_parameters()}
    again = TrainStreamTrainer(model=make(1), args=arguments(tmp_path, **settings), train_dataset=rows)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    losses = [
        {entry["step"]: entry["loss"] for entry in t.state.log_history if "loss" in entry}
        for t in (whole, again)
    ]
    assert losses[0] == losses[1]
    assert all(torch.equal(expected[n], p) for n, p in again.model.named_parameters())


def test_a_save_that_breaks_never_shows_as_a_checkpoint(tmp_path):
    rows = random_rows(20)

    class Breaks(TrainStreamTrainer):
        def _save_rng_state(self, output_dir):
            if self.state.global_step == 4:
                raise OSError(28, "No space left on device")
            super()._save_rng_state(output_dir)

    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    broken = Breaks(model=build(), args=arguments(tmp_path, **settings), train_dataset=rows)
    with pytest.raises(OSError, match="No space"):
        broken.train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2"]
    again = TrainStreamTrainer(model=build(), args=arguments(tmp_path, **settings), train_dataset=rows)
    again.train(resume_from_checkpoint=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-2",
        "checkpoint-4",
        "checkpoint-6",
    ]


def test_old_checkpoints_go_and_the_best_one_stays(tmp_path):
    rows = random_rows(20)
    settings = {
        "max_steps": 8,
        "save_strategy": "steps",
        "eval_strategy": "steps",
        "save_steps": 2,
        "eval_steps": 2,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "score",
        "greater_is_better": True,
    }
    scores = iter([1.0, 9.0, 2.0, 3.0])
    trainer = TrainStreamTrainer(
        model=build(),
        args=arguments(tmp_path, **settings),
        train_dataset=rows,
        eval_dataset=rows[:2],
        compute_metrics=lambda prediction: {"score": next(scores)},
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4"]


def test_save_total_limit_keeps_the_newest(tmp_path):
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    TrainStreamTrainer(
        model=build(), args=arguments(tmp_path, **settings), train_dataset=random_rows(9)
    ).train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-6"]


def test_a_frozen_quantized_model_is_saved_decoded(tmp_path):
    model = build()
    model.requires_grad_(False)
    model.model.norm.weight.requires_grad_(True)
    trainer, _, _ = run(tmp_path, model, random_rows(1), {"quantize": "nf4"})
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, QuantizedTensor)
    trainer.save_model(str(tmp_path / "saved"))
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    ids = torch.arange(9)[None]
    torch.testing.assert_close(loaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


@pytest.mark.parametrize("way", [{}, {"every_n_layers": 2}, {"use_reentrant": False}])
def test_activation_checkpointing_becomes_recompute(tmp_path, way):
    rows = random_rows(2)
    model = build(attention_dropout=0.1)
    _, (plain,), _ = run(tmp_path / "a", copy.deepcopy(model), rows)
    trainer, (checkpointed,), _ = run(
        tmp_path / "b",
        copy.deepcopy(model),
        rows,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs=way or None,
    )
    expected = ("recompute", "keep") if "every_n_layers" in way else ("recompute", "recompute")
    assert trainer.model._trainstream_session.plan.policy == expected
    assert not any(getattr(module, "gradient_checkpointing", False) for module in trainer.model.modules())
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)
    trainer, _, _ = run(tmp_path / "c", model, rows, {"recompute": [1]}, gradient_checkpointing=True)
    assert trainer.model._trainstream_session.plan.policy == ("keep", "recompute")


def test_a_scheduler_and_optimizer_of_the_users_own(tmp_path):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    trainer = TrainStreamTrainer(
        model=model,
        args=arguments(tmp_path, max_steps=3),
        train_dataset=random_rows(3),
        optimizers=(optimizer, scheduler),
    )
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, OffloadAdamW)
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates == pytest.approx([5e-3, 2.5e-3, 1.25e-3])


def test_training_twice_goes_on_with_the_same_wrapping(tmp_path):
    trainer, _, _ = run(tmp_path, build(), random_rows(2))
    optimizer = trainer.optimizer.optimizer
    trainer.train()
    assert trainer.optimizer.optimizer is optimizer


@pytest.mark.parametrize("wanted", [True, None])
@pytest.mark.parametrize("obstacle", ["smoothing", "function", "router"])
def test_what_needs_whole_logits_is_never_silent(tmp_path, obstacle, wanted, caplog):
    model = build()
    changes, extra = {}, {}
    if obstacle == "smoothing":
        changes["label_smoothing_factor"] = 0.1
    elif obstacle == "function":
        extra["compute_loss_func"] = lambda outputs, labels, num_items_in_batch=None: outputs.logits.mean()
    else:
        model.config.output_router_logits = True
    kwargs = {
        "model": model,
        "args": arguments(tmp_path, **changes),
        "train_dataset": random_rows(2),
        **extra,
    }
    if wanted:
        with pytest.raises(OptionError, match="chunked_loss"):
            TrainStreamTrainer(**kwargs, trainstream={"chunked_loss": True})
        return
    trainer = TrainStreamTrainer(**kwargs)
    assert "chunked loss is off" in caplog.text
    if obstacle != "router":
        trainer.train()


def test_paged_weights_train_alike_and_resume_in_another_placement(tmp_path):
    rows = random_rows(12)
    changes = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    expected = run(tmp_path / "resident", build(), rows, {}, **changes)[0]
    paged = {"param_offload": True, "recompute": [0], "activation_offload": True, "min_offload_bytes": 0}
    ours = run(tmp_path / "paged", build(), rows, paged, **changes)[0]
    assert ours.model._trainstream_session.plan.paged
    for (name, p), q in zip(ours.model.named_parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(p, q), name
    # The checkpoint of the paged run goes on resident, and the other way round.
    for first, options in (("paged", {}), ("resident", paged)):
        trainer = InOrder(
            model=build(7),
            args=arguments(tmp_path / first, **changes),
            train_dataset=rows,
            trainstream=options,
        )
        trainer.train(resume_from_checkpoint=str(tmp_path / first / "checkpoint-3"))
        for (name, p), q in zip(trainer.model.named_parameters(), expected.model.parameters(), strict=True):
            assert torch.equal(p, q), name


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"packing": "yes"}, "packing"),
        ({"packing": 0}, "packing"),
        ({"chunked_loss": "yes"}, "chunked_loss"),
        ({"loss_chunk_size": 0}, "loss_chunk_size"),
        ({"lr": 1e-3}, "learning_rate"),
        ({"max_grad_norm": 1.0}, "max_grad_norm"),
        ({"accumulation_steps": 2}, "gradient_accumulation_steps"),
        ({"lossless": True}, "lossless"),
        ({"optimizer_mod": "cpu"}, "optimizer_mode"),
    ],
)
def test_options_that_cannot_be_carried_out_are_refused(tmp_path, options, says):
    with pytest.raises(OptionError, match=says):
        TrainStreamTrainer(model=build(), args=arguments(tmp_path), trainstream=options)


def test_it_works_as_a_mixin(tmp_path):
    """The loss of the class behind it is kept: replacing it in silence would train something else."""

    class Other(Trainer):
        def __init__(self, *args, extra=None, **kwargs):
            self.extra = extra
            self._metrics = {"train": []}  # a name that TRL's Trainers use
            super().__init__(*args, **kwargs)

        def compute_loss(self, *args, **kwargs):
            self._metrics["train"].append(1)
            loss = super().compute_loss(*args, **kwargs)
            return (loss[0] * 2, *loss[1:]) if isinstance(loss, tuple) else loss * 2

    class Both(TrainStreamTrainer, Other):
        pass

    rows = random_rows(2, labels=[1, 7])
    expected = window_loss(build(), rows)[0].item()
    for options, factor, calls in (({}, 2, 2), ({"chunked_loss": True}, 1, 0)):
        trainer = Both(
            model=build(),
            args=arguments(tmp_path, gradient_accumulation_steps=2),
            train_dataset=rows,
            extra=3,
            trainstream=options,
        )
        trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)
        trainer.train()
        assert trainer.extra == 3
        assert len(trainer._metrics["train"]) == calls
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert losses == pytest.approx([factor * expected], rel=1e-5)


def test_wrap_hf_takes_the_decoder_layers():
    model = lora(build())
    _, optimizer = wrap_hf(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    assert isinstance(optimizer, OffloadAdamW)
    assert sum(row["kind"] == "block" for row in trainstream.memory_report(model)["blocks"]) == 2
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    wrap_hf(plain)
    assert huggingface.load_model is not None


@pytest.mark.parametrize("first", [Trainer, TrainStreamTrainer])
def test_checkpoints_go_from_the_stock_trainer_to_ours_and_back(tmp_path, first):
    rows = random_rows(20)
    second = TrainStreamTrainer if first is Trainer else Trainer
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    whole = first(model=build(), args=arguments(tmp_path, **settings), train_dataset=rows)
    whole.train()
    other = second(model=build(1), args=arguments(tmp_path, **settings), train_dataset=rows)
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for a, b in zip(whole.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_state_stays_where_wrap_put_it(tmp_path, monkeypatch):
    moved = []
    monkeypatch.setattr("accelerate.optimizer.move_to_device", lambda state, device: moved.append(1) or state)
    run(tmp_path, build(), random_rows(1))
    assert not moved
