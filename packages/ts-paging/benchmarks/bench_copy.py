"""Copy rates: the engine beside plain torch copies and the CPU's own memcpy; one JSON line per figure.

    python benchmarks/bench_copy.py [--mib 256] [--repeat 8] [--out FILE]

Figures are GB/s (1e9 bytes) of bytes moved, the best of `--repeat` runs; "both" counts both directions. On a
machine without a GPU host-to-host copies stand in for both directions. `page_lock` is the rate of locking.
"""

import argparse
import json
import platform
import time
from pathlib import Path

import torch

from ts_paging import CopyEngine, PinnedAllocator

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def best(run, nbytes, repeat):
    """GB/s of the fastest run, after one that does not count."""
    run()
    seconds = []
    for _ in range(repeat):
        if CUDA:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return nbytes / min(seconds) / 1e9


def ours(engine, pairs):
    """A run of the engine: all copies started, then all waited for."""

    def run():
        tickets = [getattr(engine, way)(dst, src) for way, dst, src in pairs]
        for ticket in tickets:
            ticket.wait()

    return run


def torch_plain(pairs):
    """The same copies by torch alone, each on a stream of its own."""
    streams = [torch.cuda.Stream() for _ in pairs] if CUDA else []

    def run():
        if not CUDA:
            for _, dst, src in pairs:
                dst.copy_(src)
            return
        for stream, (_, dst, src) in zip(streams, pairs, strict=True):
            with torch.cuda.stream(stream):
                dst.copy_(src, non_blocking=True)
        torch.cuda.synchronize()

    return run


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256, help="size of a copy")
    parser.add_argument("--repeat", type=int, default=8)
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, once: does the script work")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.mib, arguments.repeat = 4, 1
    nbytes = arguments.mib << 20
    setting = {
        "device": torch.cuda.get_device_name() if CUDA else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "mib": arguments.mib,
        "threads": torch.get_num_threads(),
    }

    def report(name, value):
        line = json.dumps({"bench": "copy", "what": name, "gb_per_s": round(value, 3), **setting})
        print(line, flush=True)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(line + "\n")

    allocator = PinnedAllocator()
    start = time.perf_counter()
    pinned = [allocator.empty(nbytes) for _ in range(2)]
    if allocator.pinned:
        report("page_lock", 2 * nbytes / (time.perf_counter() - start) / 1e9)
    for tensor in pinned:
        tensor.fill_(1)
    there = [torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    plain = torch.ones(nbytes, dtype=torch.uint8, pin_memory=CUDA)
    plain_back = torch.ones(nbytes, dtype=torch.uint8, pin_memory=CUDA)
    pageable = torch.ones(nbytes, dtype=torch.uint8)
    up, down = ("h2d", there[0], pinned[0]), ("d2h", pinned[1], there[1])
    with CopyEngine(max_inflight_bytes=4 * nbytes) as engine:
        for name, pairs in {"h2d": [up], "d2h": [down], "both": [up, down]}.items():
            moved = nbytes * len(pairs)
            report(f"engine {name}", best(ours(engine, pairs), moved, arguments.repeat))
            theirs = [
                (way, there[0], plain) if way == "h2d" else (way, plain_back, there[1]) for way, _, _ in pairs
            ]
            report(f"torch pinned {name}", best(torch_plain(theirs), moved, arguments.repeat))
        staged = [("h2d", there[0], pageable)]
        report("engine pageable h2d", best(ours(engine, staged), nbytes, arguments.repeat))
        report("torch pageable h2d", best(torch_plain(staged), nbytes, arguments.repeat))
    report("cpu memcpy", best(lambda: pageable.copy_(pinned[0]), nbytes, arguments.repeat))


if __name__ == "__main__":
    main()
