"""Copy rates and the cost of host memory: the engine and the arena beside torch; one JSON line per figure.

    python benchmarks/bench_copy.py [--mib 256] [--repeat 8] [--out FILE]

Figures named GB/s (1e9 bytes) count bytes moved, the best of `--repeat` runs; "both" counts both directions.
On a machine without a GPU host-to-host copies stand in for both directions.

- `page_lock`: the rate of locking one buffer. `arena reserve`: of an arena's thread, seen from the outside.
- `h2d`, `d2h`, `both`, `pageable`, `cpu memcpy`: whole copies.
- `block`: the tensors of a decoder layer (7 matrices, 5 vectors), one call each or one call for all, in us of
  the calling thread (`issue`) and as a rate; `late`: from the call to the end of a small copy that is needed
  while a block is on its way, with and without priority.
- `host memory`: us to get and drop a buffer of 32 MiB: arena, page lock, torch's own.
- `activations`: one decoder layer's saved storages out and back through `HostActivations`, with the arena and
  with a page lock for each, and by `torch.autograd.graph.save_on_cpu`.
"""

import argparse
import json
import platform
import time
from pathlib import Path

import torch

from ts_core import registry
from ts_paging import CopyEngine, HostArena, PinnedAllocator
from ts_paging.activations import HostActivations, park_hook

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def settle():
    """Wait for the device."""
    if CUDA:
        torch.cuda.synchronize()


def best_seconds(run, repeat):
    """Seconds of the fastest run, after one that does not count."""
    run()
    seconds = []
    for _ in range(repeat):
        settle()
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def best(run, nbytes, repeat):
    """GB/s of the fastest run."""
    return nbytes / best_seconds(run, repeat) / 1e9


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


def whole_copies(report, nbytes, repeat):
    """Large single copies, as before."""
    allocator = PinnedAllocator()
    start = time.perf_counter()
    pinned = [allocator.empty(nbytes) for _ in range(2)]
    if allocator.pinned:
        report("page_lock", gb_per_s=2 * nbytes / (time.perf_counter() - start) / 1e9)
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
            report(f"engine {name}", gb_per_s=best(ours(engine, pairs), moved, repeat))
            theirs = [
                (way, there[0], plain) if way == "h2d" else (way, plain_back, there[1]) for way, _, _ in pairs
            ]
            report(f"torch pinned {name}", gb_per_s=best(torch_plain(theirs), moved, repeat))
        staged = [("h2d", there[0], pageable)]
        report("engine pageable h2d", gb_per_s=best(ours(engine, staged), nbytes, repeat))
        report("torch pageable h2d", gb_per_s=best(torch_plain(staged), nbytes, repeat))
    report("cpu memcpy", gb_per_s=best(lambda: pageable.copy_(pinned[0]), nbytes, repeat))


def layer_of(nbytes):
    """Sizes of a decoder layer's parameters, about `nbytes` together: 7 matrices, 5 vectors."""
    unit = nbytes / (2 * 1 + 2 * 0.25 + 3 * 2.7)
    matrices = [1, 0.25, 0.25, 1, 2.7, 2.7, 2.7]
    return [int(unit * share) // 256 * 256 for share in matrices] + [10240, 10240, 10240, 2048, 2048]


def blocks(report, nbytes, repeat):
    """The tensors of one block: a call each against one call, and a copy that is needed meanwhile."""
    allocator = PinnedAllocator()
    sizes = layer_of(nbytes)
    srcs = [allocator.empty(n).fill_(1) for n in sizes]
    slot = torch.zeros(sum(sizes), dtype=torch.uint8, device=DEVICE)
    dsts = list(slot.split(sizes))
    small = allocator.empty(1 << 20).fill_(1)
    target = torch.zeros(1 << 20, dtype=torch.uint8, device=DEVICE)
    with CopyEngine(max_inflight_bytes=8 * nbytes) as engine:

        def each():
            return [engine.h2d(dst, src) for dst, src in zip(dsts, srcs, strict=True)]

        def many():
            return [engine.h2d_many(dsts, srcs)]

        for name, issue in {"a call each": each, "one call": many}.items():
            issuing, whole = [], []
            for _ in range(repeat + 1):
                settle()
                start = time.perf_counter()
                tickets = issue()
                issuing.append(time.perf_counter() - start)
                for ticket in tickets:
                    ticket.wait_stream()
                settle()
                whole.append(time.perf_counter() - start)
            report(f"block {name} issue", us=min(issuing[1:]) * 1e6, tensors=len(sizes))
            report(f"block {name}", gb_per_s=sum(sizes) / min(whole[1:]) / 1e9)
        for priority in (0, 1):
            late = []
            for _ in range(repeat + 1):
                settle()
                ahead = engine.h2d_many(dsts, srcs)
                start = time.perf_counter()
                ticket = engine.h2d(target, small, priority=priority)
                while not ticket.done():
                    pass
                late.append(time.perf_counter() - start)
                ahead.wait()
            report(f"late, priority {priority}", us=sorted(late[1:])[repeat // 2] * 1e6)


def host_memory(report, nbytes, repeat):
    """What a buffer costs: from an arena that has room, by a page lock of its own, from torch's cache."""
    arena = HostArena()
    start = time.perf_counter()
    arena.reserve(4 * nbytes)
    report("arena reserve returns", us=(time.perf_counter() - start) * 1e6)
    arena.synchronize()
    took = time.perf_counter() - start
    report("arena reserve", gb_per_s=arena.reserved_bytes / took / 1e9, slab_mib=arena.slab_bytes >> 20)
    size = min(32 << 20, nbytes)

    def from_arena():
        for _ in range(100):
            arena.empty(size)

    def from_torch():
        for _ in range(100):
            torch.empty(size, dtype=torch.uint8, pin_memory=CUDA)

    report("host memory arena", us=best_seconds(from_arena, repeat) * 1e4)
    report("host memory torch", us=best_seconds(from_torch, repeat) * 1e4)
    allocator = PinnedAllocator()
    report("host memory page lock", us=best_seconds(lambda: allocator.empty(size), repeat) * 1e6)
    arena.close()


def activations(report, nbytes, repeat):
    """The storages that a decoder layer saves, out and back, beside nothing else."""
    sizes = [
        max(int(nbytes / 19 * share), 4096) // 4096 * 4096 for share in [1] * 10 + [2.7, 2.7, 2.7] + [0.1] * 6
    ]

    def data():
        return [torch.ones(n, dtype=torch.uint8, device=DEVICE) for n in sizes]

    def out_and_back(memory):
        store = HostActivations(memory)

        def run():
            decide = park_hook(store, frozenset(), 0)
            tensors = data()
            saved = [decide(tensor) for tensor in tensors]
            tensors.clear()
            engine.synchronize()
            store.approach(store.latest())
            for view in reversed(saved):
                view.tensor().add_(0)
            settle()

        return run

    def on_cpu():
        hooks = torch.autograd.graph.save_on_cpu(pin_memory=CUDA)
        tensors = data()
        saved = [hooks.pack_hook(tensor) for tensor in tensors]
        tensors.clear()
        for packed in reversed(saved):
            hooks.unpack_hook(packed).add_(0)
        settle()

    arena = HostArena()
    arena.reserve(2 * nbytes)
    arena.synchronize()
    allocator = PinnedAllocator()
    moved = 2 * sum(sizes)
    with CopyEngine() as engine:
        before = registry.set_copy_engine(engine)
        try:
            report("activations arena", gb_per_s=best(out_and_back(arena.empty), moved, repeat))
            report("activations page lock", gb_per_s=best(out_and_back(allocator.empty), moved, repeat))
        finally:
            registry.set_copy_engine(before)
    report("activations save_on_cpu", gb_per_s=best(on_cpu, moved, repeat))
    arena.close()


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

    def report(name, **values):
        figures = {key: round(value, 3) for key, value in values.items()}
        line = json.dumps({"bench": "copy", "what": name, **figures, **setting})
        print(line, flush=True)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(line + "\n")

    for part in (whole_copies, blocks, host_memory, activations):
        part(report, nbytes, arguments.repeat)


if __name__ == "__main__":
    main()
