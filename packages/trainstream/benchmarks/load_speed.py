"""How fast load_model reads and quantizes a checkpoint, beside a plain read, and what RAM it takes.

    python load_speed.py --smoke
    python load_speed.py --shape 7b --folder /fast/disk --repeat 3 --threads 8
    python load_speed.py --shape 7b --forms none nf4 --device cuda --out result.jsonl

Writes a random bf16 checkpoint of a Llama shape (shards of 2 GB; with --keep it stays in --folder, and is
used again), then loads it in a fresh process for each form: none, int8, nf4, fp8 (RAM or, with --device cuda,
the GPU) and disk_offload (the weights stay where they are on the disk). Each repeat starts the processes of
all forms, reads the same files front to back, 8 MiB at a time, and has the forms load one after the other.
Before each read and each load the files' pages are dropped from the system's cache (--warm leaves them).
--staged has tensors travel as they do to a GPU (read ahead in pieces, then copied) although they stay in RAM.

Fields: `load_gb_per_s` and `probe_gb_per_s`, bytes of the checkpoint per second; `share_of_probe`, their
ratio; `final_bytes`, what the loaded model takes in RAM; `above_final_bytes`, the peak of anonymous and
shared memory during the load less that before it and less the model; `allowed_bytes`, the largest tensor and
a tenth of the model; `cpu_s_per_gb`, processor time of the load, which other work on the machine leaves
alone. Dropping pages asks the kernel and it may keep some (`cached_frac` of the files was still there), and a
file system of a virtual machine has a cache of its own: judge the ratio. What takes time beside the loads is
told on standard error.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from measure import machine

FORMS = ("none", "int8", "nf4", "fp8", "disk_offload")
SHAPES = {
    "tiny": (128, 352, 3, 4, 2, 512),
    "0.5b": (1280, 3456, 22, 20, 4, 32000),
    "1b": (2048, 5632, 22, 32, 4, 32000),
    "7b": (4096, 11008, 32, 32, 32, 32000),
}
SHARD_BYTES = 2 << 30
PIECE = 8 << 20
INDEX = "model.safetensors.index.json"


def config_of(shape: str) -> Any:
    """The Llama config of a shape."""
    from transformers import LlamaConfig

    hidden, inner, layers, heads, kv_heads, vocabulary = SHAPES[shape]
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )


def write_checkpoint(folder: Path, shape: str) -> int:
    """Write the checkpoint shard by shard; return the bytes of its files."""
    import torch
    from transformers import LlamaForCausalLM

    from ts_hf import save_safetensors

    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(shape)
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {n: tuple(p.shape) for n, p in LlamaForCausalLM(config).named_parameters()}
    pool = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    shards: list[list[str]] = [[]]
    size = 0
    for name, dims in shapes.items():
        nbytes = 2 * torch.Size(dims).numel()
        if size + nbytes > SHARD_BYTES and shards[-1]:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    index: dict[str, str] = {}
    total = 0
    # A shard's tensors serve the next one, whose shapes are the same, and it is written out meanwhile.
    spare: dict[tuple[int, ...], list[Any]] = {}
    with concurrent.futures.ThreadPoolExecutor() as writing:
        written = []
        for number, names in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            tensors = {
                name: (spare.get(shapes[name]) or [filled(pool, shapes[name])]).pop() for name in names
            }
            total += save_safetensors(tensors, folder / file, {"format": "pt"})
            index |= dict.fromkeys(names, file)
            written.append(writing.submit(write_out, folder / file))
            for name, tensor in tensors.items():
                spare.setdefault(shapes[name], []).append(tensor)
        for future in written:
            future.result()
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    (folder / INDEX).write_text(text)
    return total


def write_out(path: Path) -> None:
    """Wait until a file is on the disk: only then its pages can be dropped."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def filled(pool: Any, dims: tuple[int, ...]) -> Any:
    """A tensor of pseudo-random values: the pool, again and again."""
    import torch

    made = torch.empty(dims, dtype=pool.dtype)
    for part in made.view(-1).split(pool.numel()):
        part.copy_(pool[: part.numel()])
    return made


def files_of(folder: Path) -> list[Path]:
    """The files with weights."""
    return sorted(folder.glob("*.safetensors"))


def drop_pages(paths: list[Path]) -> None:
    """Ask the kernel to forget the pages of files."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cached_frac(paths: list[Path]) -> float | None:
    """The share of files whose pages are in the system's cache."""
    mincore = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None)
    if mincore is None:
        return None
    resident = total = 0
    for path in paths:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as m:
            pages = -(-len(m) // mmap.PAGESIZE)
            found = (ctypes.c_ubyte * pages)()
            # A read-only map lends no buffer to ctypes; numpy takes its address.
            import numpy

            address = numpy.frombuffer(m, dtype=numpy.uint8).ctypes.data
            if mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(m)), found):
                return None
            resident += sum(value & 1 for value in found)
            total += pages
    return round(resident / max(total, 1), 3)


def probe(paths: list[Path]) -> float:
    """Read files front to back; return GB/s."""
    buffer = bytearray(PIECE)
    count = 0
    start = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while read := file.readinto(buffer):
                count += read
    return count / (time.perf_counter() - start) / 1e9


def load_once(arguments: argparse.Namespace, folder: Path, form: str, offload: str) -> dict:
    """Load in this process, which has just started, when a line comes in; return what was measured."""
    import torch

    from ts_core.usage import PeakSampler, host_usage
    from ts_hf import load_model, streaming

    device = arguments.device
    if arguments.staged:
        streaming.carries = lambda device: True
    torch.set_num_threads(arguments.threads)
    words: dict[str, Any] = {"quantize": None if form == "disk_offload" else form, "device": device}
    if form == "none":
        words["quantize"] = None
    if form == "disk_offload":
        words |= {"disk_offload": offload, "device": "cpu"}
    # Imports, and the start of kernels and threads, are no part of a load.
    load_model(
        config_of("tiny"), random_weights=True, **{k: v for k, v in words.items() if k != "disk_offload"}
    )
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
    paths = files_of(folder)
    if not arguments.warm:
        drop_pages(paths)
    cached = cached_frac(paths)
    before = host_usage().used_bytes
    with PeakSampler(interval_s=0.002) as sampler:
        start, busy = time.perf_counter(), time.process_time()
        model = load_model(str(folder), **words)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
    receipt = model.trainstream_receipt
    final = 0 if device.startswith("cuda") else receipt["bytes_after"] - receipt["file_bytes"]
    largest = 2 * max(p.numel() for p in model.parameters())
    return {
        "seconds": round(seconds, 3),
        "cpu_seconds": round(busy, 3),
        "cached_frac": cached,
        "final_bytes": final,
        "share_packed": round(receipt["share_packed"], 4),
        "above_final_bytes": sampler.peak_bytes - before - final,
        "allowed_bytes": largest + final // 10,
    }


class Child:
    """A process that loads once, when it is told."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, form: str) -> None:
        """Start it; it imports, and makes the device ready."""
        words = [sys.executable, __file__, "--child", form, "--checkpoint", str(folder)]
        words += ["--device", arguments.device, "--threads", str(arguments.threads)]
        words += [word for word in ("--warm", "--staged") if getattr(arguments, word[2:])]
        self.form = form
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        pipe: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen(words, text=True, **pipe)

    def expect(self, word: str) -> None:
        """Wait until it has written a line that is this word."""
        for line in self.process.stdout or ():
            if line.strip() == word:
                return
        self.fail()

    def load(self) -> dict:
        """Have it load; return what it measured."""
        out, _ = self.process.communicate("go\n")
        if self.process.returncode:
            self.fail()
        return json.loads(out.splitlines()[-1])

    def fail(self) -> NoReturn:
        """End with what it said."""
        self.process.wait()
        self.errors.seek(0)
        raise SystemExit(f"{self.form}: {self.errors.read()[-2000:]}")


def run(arguments: argparse.Namespace, folder: Path) -> tuple[dict[str, list[dict]], list[float]]:
    """Probe and load, several times; return each form's loads, and GB/s of the plain reads."""
    loads: dict[str, list[dict]] = {form: [] for form in arguments.forms}
    probes: list[float] = []
    paths = files_of(folder)
    size = sum(path.stat().st_size for path in paths)
    for number in range(arguments.repeat):
        children = []
        try:
            with told(f"repeat {number + 1}: starting"):
                children += [Child(arguments, folder, form) for form in arguments.forms]
                for child in children:
                    child.expect("ready")
            with told("plain read"):
                if not arguments.warm:
                    drop_pages(paths)
                probes.append(probe(paths))
            for child in children:
                with told(child.form):
                    loads[child.form].append(child.load())
                # Should the run be ended early, this much is known.
                rate = size / loads[child.form][-1]["seconds"] / 1e9
                print(f"  {rate:.3f} GB/s, plain read {probes[-1]:.3f}", file=sys.stderr, flush=True)
        finally:
            for child in children:
                child.process.kill()
    return loads, probes


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """Say how long something took."""
    start = time.perf_counter()
    yield
    print(f"{what}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def line_of(
    arguments: argparse.Namespace, form: str, loads: list[dict], probes: list[float], nbytes: int
) -> dict:
    """The figures of one form."""
    rates = [nbytes / entry["seconds"] / 1e9 for entry in loads]
    rate, plain = statistics.median(rates), statistics.median(probes)
    return {
        "benchmark": "load_speed",
        "shape": arguments.shape,
        "form": form,
        "checkpoint_bytes": nbytes,
        "load_gb_per_s": round(rate, 3),
        "load_gb_per_s_all": [round(value, 3) for value in rates],
        "probe_gb_per_s": round(plain, 3),
        "probe_gb_per_s_all": [round(value, 3) for value in probes],
        "share_of_probe": round(rate / plain, 3),
        **{key: loads[-1][key] for key in ("final_bytes", "share_packed", "allowed_bytes", "cached_frac")},
        "cpu_s_per_gb": round(statistics.median(e["cpu_seconds"] for e in loads) / nbytes * 1e9, 3),
        "above_final_bytes": max(entry["above_final_bytes"] for entry in loads),
        "load": round(os.getloadavg()[0], 1),
        "warm": arguments.warm,
        "staged": arguments.staged,
        "model_device": arguments.device,
        "load_threads": arguments.threads,
    }


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument(
        "--folder", help="where the checkpoint is written, made if missing; default: temporary"
    )
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint in --folder; use one there")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--staged", action="store_true", help="to RAM as if it were a GPU")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--warm", action="store_true", help="leave the files in the system's cache")
    parser.add_argument("--out", help="append the lines to this file")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, once")
    parser.add_argument("--child", choices=FORMS, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.keep and not arguments.folder:
        parser.error("--keep needs --folder")
    return arguments


def main() -> int:
    """Measure every form."""
    arguments = parse()
    if arguments.child:
        checkpoint = Path(arguments.checkpoint)
        with tempfile.TemporaryDirectory(dir=checkpoint.parent) as offload:
            print(json.dumps(load_once(arguments, checkpoint, arguments.child, offload)), flush=True)
        return 0
    if arguments.smoke:
        arguments.shape, arguments.repeat, arguments.threads = "tiny", 1, 1
        arguments.forms = ["none", "nf4", "disk_offload"]
    if arguments.folder:
        Path(arguments.folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="load-speed-") as place:
        folder = Path(arguments.folder if arguments.keep else place) / f"checkpoint-{arguments.shape}"
        # The index is written last.
        if not (folder / INDEX).is_file():
            with told("writing the checkpoint"):
                write_checkpoint(folder, arguments.shape)
        nbytes = sum(path.stat().st_size for path in files_of(folder))
        on = machine()
        loads, probes = run(arguments, folder)
        for form in arguments.forms:
            line = json.dumps({**line_of(arguments, form, loads[form], probes, nbytes), "machine": on})
            print(line, flush=True)
            if arguments.out:
                with Path(arguments.out).open("a") as file:
                    file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
