"""What each way to store frozen weights costs: perplexity on unseen text, before and after a short fine-tune.

    python quality.py --windows 24 --seq 512 --train-steps 30 --out quality.jsonl
    python quality.py --formats none nf4 nf4-k nf4-l nf4-dq --model FOLDER
    python quality.py --table quality.jsonl

The model is SmolLM2-135M-Instruct unless `--model` names a folder; the text is the standard library of the
running Python, of which a fifth of the files is held out; the windows are spread evenly over these. For each
format a fresh process loads the model, packs the frozen matrices of its blocks, and prints: perplexity of the
held-out windows, the same after `--train-steps` steps of LoRA (r=16 on every linear layer of the blocks) on
the other files, the relative weight error |W - decoded| / |W| over all packed matrices, with a fit (`-l`)
also |W - decoded - BA| / |W|, the error over normally distributed ones of the same shapes, bytes a packed
weight, and the median step. The last line compares all with `none`; `--table` makes Markdown of such lines,
with the standard error of each difference, from the differences window by window.

Formats: `none`; `int8`, `nf4`, `mxfp8`, `fp8_row`, `fp8_block`, `nvfp4`, and `fp8`, which takes the layout
that this GPU computes; `-dq` adds double_quant, `-k` keep_precise=0.05, `-l` error_rank of the adapters'
rank (LoftQ) with two iterations. How fp8 and nvfp4 are multiplied: as this machine does it, or with `-w`
weights only (decoded before each use), with `-t` as tensor cores take them, inputs packed too; `-o` is that
with outliers=0.01, `-b` with fp8_backward or nvfp4_backward. Where no tensor cores take a format, `-t`, `-o`
and `-b` compute the same from the same operands, slowly; the key `product` of a line says which it was. A
format that this machine or release does not have is a line with its error.

SmolLM2 is published here as 4-bit weights (GGUF Q4_1), which 4-bit codecs store again with less loss than
they would cause in weights that were never packed. So look at the order of the formats, and at the error on
normal weights. `--noise 0.05` adds to every matrix of the blocks, before anything is measured, normal noise
of that share of its root mean square, so that no weight lies on a grid any more.

`--live` prints `LIVE {json}` after each step and `RESULT {json}` at the end of a format; `--format F` runs
one in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FORMATS = (
    "none", "int8", "int8-dq", "int8-l", "nf4", "nf4-dq", "nf4-k", "nf4-l", "fp8", "mxfp8", "mxfp8-t",
    "mxfp8-b", "fp8_row", "fp8_row-t", "fp8_row-b", "fp8_row-l", "fp8_block", "fp8_block-t", "fp8_block-b",
    "nvfp4", "nvfp4-w", "nvfp4-k", "nvfp4-l", "nvfp4-t", "nvfp4-o", "nvfp4-b",
)  # fmt: skip
RANK = 16
EXTRAS: dict[str, dict[str, Any]] = {
    "dq": {"double_quant": True},
    "k": {"keep_precise": 0.05},
    "l": {"error_rank": RANK, "error_iters": 2},
    "w": {},
    "t": {},
    "o": {"outliers": 0.01},
    "b": {},
}
ON_TENSOR_CORES = ("t", "o", "b")
SEED = 0


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model on the CPU, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = getattr(torch, args.dtype)
    if args.model is None:
        from ts_hf import load_gguf, smollm2_path

        return load_gguf(smollm2_path(), dtype)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    return model, AutoTokenizer.from_pretrained(args.model)


def rows_of(args: argparse.Namespace, tokenizer: Any) -> tuple[Any, Any]:
    """Token ids of training rows and of held-out windows, `[rows, seq]`."""
    import ts_hf

    texts = ts_hf.stdlib_text(args.text_bytes)
    data = ts_hf.text_dataset(texts, tokenizer, args.seq, held_out=0.2, seed=SEED)
    held = data.held_out.input_ids
    count = min(args.windows, len(held))
    return data.train.input_ids, held[[index * len(held) // count for index in range(count)]]


def add_noise(model: Any, share: float) -> None:
    """Move the matrices of the blocks by normal noise of a share of their root mean square."""
    import torch

    from ts_core.blocks import find_blocks

    generator = torch.Generator().manual_seed(SEED + 1)
    for block in find_blocks(model):
        for parameter in (p for p in block.parameters() if p.dim() == 2):
            drawn = torch.randn(parameter.shape, generator=generator)
            size = share * parameter.float().square().mean().sqrt()
            parameter.copy_(parameter.float() + size * drawn)


def losses(model: Any, windows: Any, device: str) -> list[float]:
    """The mean loss a token of each window."""
    import torch

    model.eval()
    found = []
    with torch.no_grad():
        for row in windows:
            ids = row[None].to(device)
            found.append(round(float(model(input_ids=ids, labels=ids, use_cache=False).loss), 6))
    model.train()
    return found


def perplexity(window_losses: list[float]) -> float:
    """The exponential of the mean loss a token."""
    return round(math.exp(statistics.fmean(window_losses)), 4)


def weight_error(before: dict[str, Any], model: Any) -> dict[str, Any]:
    """Relative error of packed matrices, of normal ones stored alike, bytes a weight, and their number."""
    import torch

    from ts_quant import QuantizedTensor, quantize

    wrong = fitted = whole = normal_wrong = normal_whole = 0.0
    size = count = tensors = 0
    generator = torch.Generator().manual_seed(SEED)
    seen = set()
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, QuantizedTensor):
            continue
        given = before[name].float()
        rest = given - parameter.dequantize().float()
        wrong += float(rest.square().sum())
        if parameter.error_a is not None:
            rest -= parameter.error_b.float() @ parameter.error_a.float()
        fitted += float(rest.square().sum())
        whole += float(given.square().sum())
        size += parameter.packed_bytes
        count += given.numel()
        tensors += 1
        if (kind := (tuple(given.shape), parameter.codec)) not in seen:
            seen.add(kind)
            drawn = torch.randn(given.shape, generator=generator)
            double = bool(parameter.meta.get("double_quant", False))
            again = quantize(drawn, parameter.codec, double_quant=double)
            normal_wrong += float((drawn - again.dequantize().float()).square().sum())
            normal_whole += float(drawn.square().sum())
    if not count:
        return dict.fromkeys(("weight_error", "normal_weight_error", "bytes_per_weight", "packed"), 0)
    return {
        "weight_error": round(math.sqrt(wrong / whole), 5),
        **({"fitted_weight_error": round(math.sqrt(fitted / whole), 5)} if fitted < wrong else {}),
        "normal_weight_error": round(math.sqrt(normal_wrong / normal_whole), 5),
        "bytes_per_weight": round(size / count, 4),
        "packed": tensors,
    }


def options_of(name: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The codec of a format, what `quantize_model` gets, and what `wrap` gets."""
    codec, *words = name.split("-")
    packing = {key: value for word in words for key, value in EXTRAS[word].items()}
    options = {"outliers": packing.pop("outliers")} if "outliers" in packing else {}
    if "b" in words:
        options["nvfp4_backward" if codec == "nvfp4" else "fp8_backward"] = True
    return codec, packing, options


def layout_of(name: str, device: str) -> str:
    """The codec of a format; "fp8" is what a device computes."""
    from ts_quant.codecs import fp8_choice

    codec = name.split("-")[0]
    return fp8_choice(device) if codec == "fp8" else codec


@contextlib.contextmanager
def multiplied(name: str, device: str) -> Iterator[None]:
    """Multiply in here as a format says: on tensor cores, or else emulated."""
    import torch

    from ts_quant.matmul import emulated, multiplies

    wanted = any(word in ON_TENSOR_CORES for word in name.split("-"))
    here = multiplies(layout_of(name, device), torch.device(device))
    with emulated() if wanted and not here else contextlib.nullcontext():
        yield


def measure(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Everything about one format."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with multiplied(name, device):
        return _measure(args, name, device)


def fine_tune(args: argparse.Namespace, name: str, model: Any, optimizer: Any, train: Any) -> list[float]:
    """Train on rows drawn by the seed; the seconds of each step."""
    import torch

    generator, times = torch.Generator().manual_seed(SEED), []
    for step in range(args.train_steps):
        ids = train[torch.randint(len(train), (args.batch,), generator=generator)]
        begin = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = float(loss.detach())
        times.append(time.perf_counter() - begin)
        if args.live:
            print("LIVE " + json.dumps({"format": name, "step": step, "loss": round(value, 5)}), flush=True)
    return times


def product_of(name: str, model: Any, device: str) -> str:
    """Tell the packed weights of a format how to multiply; say how they do."""
    import torch

    from ts_quant import set_matmul
    from ts_quant.matmul import multiplies

    where, words = torch.device(device), name.split("-")[1:]
    counts = set_matmul(model, tensor_cores=False if "w" in words else None, device=where)
    if not counts["tensor_cores"]:
        return "decoded" if counts["weights"] else "none"
    if multiplies(layout_of(name, device), where):
        return "tensor cores"
    # Else they are those that keep_precise stores in a format which is multiplied here.
    return "emulated" if any(word in ON_TENSOR_CORES for word in words) else "mixed"


def _measure(args: argparse.Namespace, name: str, device: str) -> dict[str, Any]:
    import peft
    import torch

    import trainstream

    codec, packing, options = options_of(name)
    torch.manual_seed(SEED)
    model, tokenizer = load(args)
    train, windows = rows_of(args, tokenizer)
    model.requires_grad_(False)
    if args.noise:
        add_noise(model, args.noise)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    report = trainstream.quantize_model(model, codec, **packing) if codec != "none" else {}
    weights = weight_error(before, model)
    del before
    product = product_of(name, model, device)
    settings = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    adapted = peft.get_peft_model(model, settings).to(device)
    adapted.config.use_cache = False
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr)
    adapted, optimizer = trainstream.wrap(adapted, optimizer, quantize="none", **options)
    first = losses(adapted, windows, device)
    times = fine_tune(args, name, adapted, optimizer, train.to(device))
    tuned = losses(adapted, windows, device) if args.train_steps else None
    return {
        "bench": "quality",
        "format": name,
        "model": args.model or "SmolLM2-135M-Instruct",
        "noise": args.noise,
        "perplexity": perplexity(first),
        "tuned_perplexity": tuned and perplexity(tuned),
        **weights,
        "kept_precise": report.get("kept_precise", 0),
        "product": product,
        "step_s": round(statistics.median(times), 4) if times else None,
        "windows": len(windows),
        "seq": args.seq,
        "train_steps": args.train_steps,
        "batch": args.batch,
        "lr": args.lr,
        "seed": SEED,
        "text": f"the standard library of Python {platform.python_version()}, files held out",
        "date": datetime.date.today().isoformat(),
        "dtype": args.dtype,
        "device": torch.cuda.get_device_name(0) if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "losses": first,
        "tuned_losses": tuned,
    }


def one(words: list[str], name: str, live: bool, timeout: float) -> dict[str, Any]:
    """Run one format in a fresh process."""
    command = [sys.executable, str(Path(__file__).resolve()), *words, "--format", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"bench": "quality", "format": name, "error": f"no result within {timeout} s"}
    found: dict[str, Any] | None = None
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            found = json.loads(line.removeprefix("RESULT "))
        if live and line.startswith(("LIVE ", "RESULT ")):
            print(line, flush=True)
    if found is not None:
        return found
    said = [line for line in done.stderr.splitlines() if "Error" in line] or ["no output"]
    return {"bench": "quality", "format": name, "error": said[-1].strip()[:300]}


def compared(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Perplexities over those of `none`, as shares above it."""
    good = {line["format"]: line for line in lines if "error" not in line}
    base = good.get("none")
    table = {}
    for name, line in good.items():
        row = {key: line[key] for key in ("weight_error", "normal_weight_error", "bytes_per_weight")}
        for key in ("perplexity", "tuned_perplexity"):
            if base is not None and line[key] is not None and base[key] is not None:
                row[f"{key}_above"] = round(line[key] / base[key] - 1, 5)
        table[name] = row
    errors = {line["format"]: line["error"] for line in lines if "error" in line}
    return {"bench": "quality", "what": "compared", "formats": table, "errors": errors}


def above(line: dict[str, Any], base: dict[str, Any], key: str) -> str:
    """A perplexity, and by how many percent it is above the base's, with the standard error of that."""
    if not line[key]:
        return "-"
    logs = [a - b for a, b in zip(line[key], base[key], strict=True)]
    cell = f"{perplexity(line[key]):.3f}"
    if line is base:
        return cell
    spread = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    return f"{cell} ({100 * math.expm1(statistics.fmean(logs)):+.2f} +- {100 * spread:.2f} %)"


def table(lines: list[dict[str, Any]]) -> str:
    """The lines of a run as a Markdown table; the last line of each format counts."""
    good = {line["format"]: line for line in lines if "format" in line and "error" not in line}
    base = good["none"]
    for name, line in good.items():
        alike = ["noise", "windows", "seq", "text", *(["train_steps"] if line["train_steps"] else [])]
        changed = [key for key in alike if line[key] != base[key]]
        if changed:
            raise SystemExit(f"{name} and none were not measured alike: {', '.join(changed)}")
    rows = [
        "| format | bytes a weight | weight error | normal weights | perplexity, untrained | "
        f"after {base['train_steps']} steps |",
        "|---|---|---|---|---|---|",
    ]
    for name, line in good.items():
        wrong = f"{100 * line['weight_error']:.2f} %"
        if "fitted_weight_error" in line:
            wrong += f", with the fit {100 * line['fitted_weight_error']:.2f} %"
        cells = [
            name,
            f"{line['bytes_per_weight']:.3f}" if line["packed"] else "2.000",
            wrong if line["packed"] else "-",
            f"{100 * line['normal_weight_error']:.2f} %" if line["packed"] else "-",
            above(line, base, "losses"),
            above(line, base, "tuned_losses"),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    noise = f" with noise of {base['noise']:g}" if base["noise"] else ""
    rows.append(
        f"\n{base['model']}{noise} in {base['dtype']}; {base['windows']} windows of {base['seq']} tokens of "
        f"{base['text']}; LoRA r={RANK}, {base['train_steps']} steps of {base['batch']} x {base['seq']} "
        f"tokens, lr {base['lr']:g}, seed {base['seed']}; {base['device']}, torch {base['torch']}, "
        f"{base['date']}. +-: standard error over the windows."
    )
    return "\n".join(rows)


def main() -> int:
    """Run every format."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of a model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), help="default: all")
    parser.add_argument("--windows", type=int, default=24, help="held-out windows (default %(default)s)")
    parser.add_argument("--seq", type=int, default=512, help="tokens of a window (default %(default)s)")
    parser.add_argument("--train-steps", type=int, default=30, help="0: no fine-tune (default %(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="rows of a step (default %(default)s)")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--noise", type=float, default=0.0, help="share of each matrix's RMS (default 0)")
    parser.add_argument("--table", type=Path, help="print the lines of this file as a Markdown table")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--text-bytes", type=int, default=1_500_000, help="of source (default %(default)s)")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one format")
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    parser.add_argument("--live", action="store_true", help="print every step")
    parser.add_argument("--format", help="run this one in this process")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does the script work")
    args = parser.parse_args()
    if args.table:
        print(table([json.loads(line) for line in args.table.read_text().splitlines()]))
        return 0
    if args.smoke:
        args.formats, args.windows, args.seq, args.train_steps, args.batch = ["none", "nf4"], 1, 32, 1, 1
        args.text_bytes, args.dtype = 200_000, "float32"  # bfloat16 is slow on a CPU
    if args.format:
        print("\nRESULT " + json.dumps(measure(args, args.format)), flush=True)
        return 0
    unknown = [name for name in args.formats if set(name.split("-")[1:]) - set(EXTRAS)]
    if unknown:
        parser.error(f"unknown formats {', '.join(unknown)}; known: {', '.join(FORMATS)}")
    words = [word for word in sys.argv[1:] if word != "--out"]
    if args.out:
        words.remove(str(args.out))
    lines = []
    for name in args.formats:
        lines.append(one(words, name, args.live, args.timeout))
        emit(args.out, lines[-1])
    emit(args.out, compared(lines))
    return int(all("error" in line for line in lines))


def emit(out: Path | None, line: dict[str, Any]) -> None:
    """Print a line and append it to the file."""
    text = json.dumps(line)
    print(text, flush=True)
    if out:
        with out.open("a") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
