"""Fine-tune a transformers model with `TrainStreamTrainer`, on text that needs no download.

    python hf_finetune.py --model path/to/model            every weight
    python hf_finetune.py --model path/to/model --lora     adapters
    python hf_finetune.py --lora --compare                 the same run with the stock Trainer, side by side

Without --model a small Llama with random weights is built, so that the script runs anywhere.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from trainstream.integrations.huggingface import TrainStreamTrainer, load_model


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder, hub id or .gguf file; default: a small random Llama")
    parser.add_argument("--lora", action="store_true", help="train adapters instead of every weight")
    parser.add_argument("--compare", action="store_true", help="run the stock Trainer on a copy as well")
    parser.add_argument(
        "--activation-offload",
        default="auto",
        help="wrap()'s activation_offload: auto, true, false or a share",
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=64)
    return parser.parse_args()


def option(text: str) -> str | bool | float:
    """Turn the text of an option into what `wrap()` expects."""
    words: dict[str, str | bool] = {"auto": "auto", "true": True, "false": False}
    return words[text.lower()] if text.lower() in words else float(text)


def build(arguments: argparse.Namespace) -> torch.nn.Module:
    """Load or make the model, with adapters if asked."""
    torch.manual_seed(0)
    if arguments.model:
        model = load_model(arguments.model, quantize=None, dtype=torch.float32)
    else:
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256,
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=4,
                num_attention_heads=4,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
    if arguments.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model


def rows(arguments: argparse.Namespace, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """Make training rows from the bytes of a source file: text with structure, and no tokenizer needed."""
    with open(argparse.__file__, "rb") as file:  # noqa: PTH123
        tokens = torch.tensor(list(file.read())) % vocabulary
    count = len(tokens) // arguments.seq
    return [{"input_ids": row, "labels": row} for row in tokens[: count * arguments.seq].view(count, -1)]


def run(
    trainer_class: type[Trainer], model: torch.nn.Module, arguments: argparse.Namespace, **extra: object
) -> list[float]:
    """Train with one class; return the losses."""
    data = rows(arguments, min(256, model.config.vocab_size))
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.batch,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = trainer_class(model=model, args=settings, train_dataset=data, **extra)
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    tokens = arguments.steps * arguments.batch * arguments.seq
    print(
        f"{trainer_class.__name__}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, {tokens / seconds:.0f} tokens/s"
    )
    return losses


def main() -> None:
    """Run the example."""
    arguments = parse()
    model = build(arguments)
    plain = copy.deepcopy(model) if arguments.compare else None
    options = {"activation_offload": option(arguments.activation_offload)}
    ours = run(TrainStreamTrainer, model, arguments, trainstream=options)
    if plain is not None:
        stock = run(Trainer, plain, arguments)
        worst = max(abs(a - b) for a, b in zip(ours, stock, strict=True))
        print(f"largest difference between the two losses: {worst:.2e}")


if __name__ == "__main__":
    main()
