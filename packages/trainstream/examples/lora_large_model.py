"""LoRA on a large base model, quantized while it is read.

    python lora_large_model.py --size 7b --quantize nf4             random weights of that shape
    python lora_large_model.py --model path/to/model --steps 50     a real one
    python lora_large_model.py --size tiny --stock                  plain PyTorch and PEFT, to compare

Weights of a --size are random, drawn and packed one matrix at a time: speed and memory are those of a real
model of that shape, the loss is not.
"""

from __future__ import annotations

import argparse
import time

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig

import trainstream
from trainstream.integrations.huggingface import load_model
from ts_hf import backbone, causal_lm_loss_for

# hidden, feed-forward, layers, heads, key-value heads, vocabulary
SIZES = {
    "tiny": (256, 512, 4, 4, 2, 1000),
    "1b": (2048, 8192, 16, 32, 8, 128256),
    "7b": (4096, 11008, 32, 32, 32, 32000),
    "8b": (4096, 14336, 32, 32, 8, 128256),
    "14b": (5120, 13824, 48, 40, 8, 152064),
    "70b": (8192, 28672, 80, 64, 8, 128256),
}


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="tiny", help="shape of a random model")
    parser.add_argument("--model", help="folder, hub id or .gguf file instead of --size")
    parser.add_argument("--quantize", default="nf4", help="nf4, int8, fp8, nvfp4 or none")
    parser.add_argument("--prefer", default="exact", help="wrap()'s prefer: exact or speed")
    parser.add_argument(
        "--stock", action="store_true", help="plain PyTorch instead: no wrap, whole logits, bf16 base"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--rank", type=int, default=16)
    return parser.parse_args()


def load(arguments: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    """Load the base, or draw it at random, packed as it comes."""
    quantize = "none" if arguments.stock else arguments.quantize
    if arguments.model:
        return load_model(arguments.model, quantize=quantize, device=device)
    hidden, inner, layers, heads, kv_heads, vocabulary = SIZES[arguments.size]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        bos_token_id=None,
        eos_token_id=None,
    )
    return load_model(config, quantize=quantize, random_weights=True, device=device)


def main() -> None:
    """Run the example."""
    arguments = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = load(arguments, device)
    model = get_peft_model(
        model, LoraConfig(r=arguments.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    if not arguments.stock:
        model, optimizer = trainstream.wrap(model, optimizer, prefer=arguments.prefer)
    model.train()
    ids = torch.randint(0, model.config.vocab_size, (arguments.batch, arguments.seq), device=device)
    times = []
    for step in range(arguments.steps):
        start = time.perf_counter()
        if arguments.stock:
            loss = model(input_ids=ids, labels=ids).loss
        else:
            # From hidden states: logits exist for 1024 tokens at a time, never as a whole.
            hidden = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
            loss = causal_lm_loss_for(model, hidden, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        times.append(time.perf_counter() - start)
        print(f"step {step + 1}: loss {value:.4f}, {times[-1]:.2f} s", flush=True)
    typical = sorted(times)[len(times) // 2]
    print(f"{arguments.batch * arguments.seq / typical:.0f} tokens/s")
    if device.type == "cuda":
        print(f"peak VRAM {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    if not arguments.stock:
        tiers = trainstream.memory_report(model)["tiers"]
        print("memory by tier:", {tier: f"{size / 2**20:.0f} MiB" for tier, size in tiers.items() if size})


if __name__ == "__main__":
    main()
