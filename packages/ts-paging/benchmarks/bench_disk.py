"""Disk rates: the store beside a plain probe in the manner of dd; one JSON line per figure.

    python benchmarks/bench_disk.py [--mib 1024] [--directory DIR] [--repeat 3] [--out FILE]

The probe writes and reads one file by direct I/O in pieces of 4 MiB from aligned memory, with one and with as
many threads as the store has. Figures are GB/s (1e9 bytes), the best of `--repeat` runs.
"""

import argparse
import concurrent.futures
import json
import mmap
import os
import platform
import tempfile
import time
from pathlib import Path

import torch

from ts_paging import DiskStore, PinnedAllocator

PIECE = 4 << 20


def best(run, nbytes, repeat):
    """GB/s of the fastest run."""
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return nbytes / min(seconds) / 1e9


class Probe:
    """One preallocated file, read and written by direct I/O."""

    def __init__(self, directory, nbytes, threads):
        """Make and reserve the file."""
        self.path = Path(directory) / f"trainstream-probe-{os.getpid()}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_DIRECT", 0)
        self.file = os.open(self.path, flags, 0o600)
        os.posix_fallocate(self.file, 0, nbytes)
        self.nbytes = nbytes
        self.threads = threads
        self.buffers = [mmap.mmap(-1, PIECE) for _ in range(threads)]

    def run(self, call):
        """Carry out `call` (os.preadv or os.pwritev) for every piece of the file."""

        def work(index):
            for offset in range(index * PIECE, self.nbytes, self.threads * PIECE):
                done = call(self.file, [self.buffers[index]], offset)
                if done != PIECE:
                    raise OSError(f"{done} bytes of {PIECE} at {offset}")

        with concurrent.futures.ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(work, range(self.threads)))

    def close(self):
        """Remove the file."""
        os.close(self.file)
        self.path.unlink()


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of a tensor, a multiple of 4")
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, once: does the script work")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.mib, arguments.repeat = 4, 1
    nbytes = arguments.mib << 20
    setting = {"machine": platform.machine(), "cores": os.cpu_count(), "mib": arguments.mib}

    def report(name, value, **more):
        line = {"bench": "disk", "what": name, "gb_per_s": round(value, 3), **more, **setting}
        print(json.dumps(line), flush=True)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(json.dumps(line) + "\n")

    for threads in dict.fromkeys((1, arguments.threads)):
        probe = Probe(arguments.directory, nbytes, threads)
        try:
            write = best(lambda p=probe: p.run(os.pwritev), nbytes, arguments.repeat)
            report("probe write", write, threads=threads)
            report(
                "probe read",
                best(lambda p=probe: p.run(os.preadv), nbytes, arguments.repeat),
                threads=threads,
            )
        finally:
            probe.close()
    tensor = PinnedAllocator().empty(nbytes)
    tensor.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8))
    out = torch.empty(nbytes + 64, dtype=torch.uint8)[1 : nbytes + 1]
    with DiskStore(arguments.directory, threads=arguments.threads) as store:
        more = {"threads": arguments.threads, "direct": store.direct}
        store.write("x", tensor)
        report("store write", best(lambda: store.write("x", tensor), nbytes, arguments.repeat), **more)
        report("store read", best(lambda: store.read("x", tensor), nbytes, arguments.repeat), **more)
        report("store read unaligned", best(lambda: store.read("x", out), nbytes, arguments.repeat), **more)
        if not torch.equal(out, tensor):
            raise SystemExit("bytes differ")


if __name__ == "__main__":
    main()
