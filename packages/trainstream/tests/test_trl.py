"""TRL's Trainers with one class name changed: the same losses and weights."""

import copy

import pytest
import torch
from peft import LoraConfig
from test_trainer import build
from tiny_models import byte_tokenizer

from ts_optim import OffloadAdamW

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from trainstream.integrations.huggingface import TrainStreamTrainer  # noqa: E402

# TRL sets a name that transformers has renamed, on the values that TRL itself chooses.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]


class SFT(TrainStreamTrainer, trl.SFTTrainer):
    pass


class DPO(TrainStreamTrainer, trl.DPOTrainer):
    pass


def settings(kind, folder, **changes):
    return kind(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": 2,
            "max_steps": 3,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "bf16": False,
            "dataloader_pin_memory": False,
            "save_strategy": "no",
            **changes,
        }
    )


def losses_of(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def model_for(seed=0):
    return build(seed, vocab_size=258, eos_token_id=256, pad_token_id=257)


def equal(ours, stock):
    for (name, p), q in zip(ours.model.named_parameters(), stock.model.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-4, atol=2e-5, msg=name)


TEXTS = [{"text": f"sentence number {i} of {i * i}"} for i in range(8)]
PAIRS = [
    {"prompt": f"{i} plus {i} is", "chosen": f" {2 * i}", "rejected": f" {3 * i + 1} or so"}
    for i in range(1, 9)
]


@pytest.mark.parametrize("kind", ["full", "lora", "packed", "accumulated", "checkpointed"])
def test_sft_gives_the_losses_of_trl(tmp_path, kind):
    changes = {
        "packed": {"packing": True, "max_length": 48, "packing_strategy": "bfd"},
        "accumulated": {"gradient_accumulation_steps": 2},
    }.get(kind, {})
    changes["gradient_checkpointing"] = kind == "checkpointed"
    adapters = LoraConfig(r=4, target_modules=["q_proj", "down_proj"]) if kind == "lora" else None
    made = []
    for place, cls in (("a", trl.SFTTrainer), ("b", SFT)):
        torch.manual_seed(3)
        made.append(
            cls(
                model=model_for(),
                args=settings(trl.SFTConfig, tmp_path / place, **changes),
                train_dataset=datasets.Dataset.from_list(TEXTS),
                processing_class=byte_tokenizer(),
                peft_config=adapters,
            )
        )
    stock, ours = made
    assert losses_of(ours) == pytest.approx(losses_of(stock), rel=1e-4)
    assert isinstance(ours.optimizer.optimizer, OffloadAdamW)
    equal(ours, stock)
    logged = next(entry for entry in ours.state.log_history if "loss" in entry)
    assert "entropy" in logged
    assert "ts_tokens_per_s" in logged


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_dpo_gives_the_losses_of_trl(tmp_path, kind):
    adapters = LoraConfig(r=4, target_modules=["q_proj", "down_proj"]) if kind == "lora" else None
    made = []
    for place, cls in (("a", trl.DPOTrainer), ("b", DPO)):
        torch.manual_seed(3)
        model = model_for()
        made.append(
            cls(
                model=model,
                ref_model=None if adapters else copy.deepcopy(model),
                args=settings(trl.DPOConfig, tmp_path / place, gradient_checkpointing=False),
                train_dataset=datasets.Dataset.from_list(PAIRS),
                processing_class=byte_tokenizer(),
                peft_config=adapters,
            )
        )
    stock, ours = made
    found = losses_of(ours)
    assert found == pytest.approx(losses_of(stock), rel=1e-4)
    assert found[0] == pytest.approx(0.693147, abs=1e-5)
    equal(ours, stock)
