"""Disk rates: the disk tier beside a plain probe in the manner of dd; one JSON line per figure.

    python benchmarks/bench_disk.py [--mib 1024] [--directory DIR] [--repeat 5] [--out FILE]

The probe writes and reads one file by direct I/O in pieces of 4 MiB from huge pages, with one and with as
many threads as the store has. Probe and tier take turns in each repetition. Figures are the median rate in
GB/s (1e9 bytes), lowest and highest, and the median's share of the best probe's.

    store write / read      a tensor of page-aligned memory; as chosen, by io_uring, by threads
    store read unaligned    into memory at an odd address: through staging buffers
    adopted read            a stretch of another file at an offset that no block begins at
    ring                    to the GPU (to CPU memory where there is none): the same stretch, and our file
    lease                   copies read, changed and written back, 1 MiB at a time, three under way
    mapping                 the same change through the mapping, for comparison: in RAM while there is enough
"""

import argparse
import concurrent.futures
import json
import mmap
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch

from ts_core import registry
from ts_paging import CopyEngine, DiskStore, PinnedAllocator
from ts_paging.files import FileTensors

PIECE = 4 << 20


class Probe:
    """One preallocated file, read and written by direct I/O."""

    def __init__(self, directory, nbytes, threads):
        """Make and reserve the file."""
        self.path = Path(directory) / f"trainstream-probe-{os.getpid()}-{threads}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_DIRECT", 0)
        self.file = os.open(self.path, flags, 0o600)
        os.posix_fallocate(self.file, 0, nbytes)
        self.nbytes = nbytes
        self.threads = threads
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.buffers = [mmap.mmap(-1, PIECE, flags=private) for _ in range(threads)]
        for buffer in self.buffers:
            buffer.madvise(mmap.MADV_HUGEPAGE)  # fewer segments of a transfer: up to twice the rate
            buffer[:] = bytes(PIECE)

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


def store_of(directory, threads, backend):
    """A store that uses one of the two ways to direct I/O."""
    os.environ["TRAINSTREAM_IO"] = backend
    try:
        return DiskStore(directory, threads=threads)
    finally:
        del os.environ["TRAINSTREAM_IO"]


def update(files, tensor, step):
    """Add one to a tensor by leases of `step` bytes, read ahead and written behind."""
    parts = [tensor[begin : begin + step] for begin in range(0, tensor.numel(), step)]
    ahead, behind = files.lease(parts[:1]), None
    for index in range(len(parts)):
        lease, ahead = ahead, None
        if index + 1 < len(parts):
            ahead = files.lease(parts[index + 1 : index + 2])
        lease.tensors()[0].add_(1)
        lease.write_back()
        if behind is not None:
            behind.close()
        behind = lease
    behind.close()


def cases(arguments, nbytes, device):
    """(name, kind of the probe, bytes moved, what to run, facts) of everything that is measured."""
    directory, threads = arguments.directory, arguments.threads
    tensor = PinnedAllocator().empty(nbytes)
    tensor.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8))
    odd = torch.empty(nbytes + 64, dtype=torch.uint8)[1 : nbytes + 1]
    probes = [Probe(directory, nbytes, count) for count in dict.fromkeys((1, threads))]
    found = []
    for probe in probes:
        for kind, call in (("write", os.pwritev), ("read", os.preadv)):
            run = lambda p=probe, c=call: p.run(c)  # noqa: E731
            found.append((f"probe {kind}", kind, nbytes, run, {"threads": probe.threads}))
    stores = {}
    for backend in ("auto", "uring", "threads"):
        store = stores[backend] = store_of(directory, threads, backend)
        store.write("x", tensor)
        more = {"threads": threads, "direct": store.direct, "uring": store.uring}
        found += [
            (f"store write {backend}", "write", nbytes, lambda s=store: s.write("x", tensor), more),
            (f"store read {backend}", "read", nbytes, lambda s=store: s.read("x", tensor), more),
            (f"store read unaligned {backend}", "read", nbytes, lambda s=store: s.read("x", odd), more),
        ]
    files = FileTensors(directory)
    other = Path(directory) / f"trainstream-other-{os.getpid()}"
    with other.open("wb") as file:
        file.write(b"0" * 1240)
        tensor.numpy().tofile(file)
        file.flush()
        os.fsync(file.fileno())
    adopted, placed = files.adopt(other, 1240, torch.uint8, (nbytes,)), files.place(tensor)
    # Files of their own: pages that a mapping left unwritten would be written by the next direct read.
    leased, mapped = files.place(tensor), files.place(tensor)
    for key in map(files.key_of, (placed, leased, mapped)):
        files.read_async(key, tensor).wait()
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    keys = files.key_of(adopted), files.key_of(placed)
    found += [
        ("adopted read", "read", nbytes, lambda: files.read_async(keys[0], tensor).wait(), {}),
        ("ring adopted", "read", nbytes, lambda: files.bring(keys[0], target).wait_stream(), {}),
        ("ring", "read", nbytes, lambda: files.bring(keys[1], target).wait_stream(), {}),
        ("lease", "read", 2 * nbytes, lambda: update(files, leased, 1 << 20), {}),
        ("mapping", "read", 2 * nbytes, lambda: mapped.add_(1), {}),
    ]

    def close():
        for probe in probes:
            probe.close()
        for store in stores.values():
            store.close()
        files.close()
        other.unlink()

    def check():
        good = torch.equal(odd, stores["auto"].read("x")) and torch.equal(target.cpu(), placed)
        if not good or not torch.equal(leased, mapped):
            raise SystemExit("bytes differ")

    return found, check, close


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of a tensor, a multiple of 4")
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, once: does the script work")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.mib, arguments.repeat = 4, 1
    nbytes = arguments.mib << 20
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    registry.set_host_allocator(PinnedAllocator())
    registry.set_copy_engine(CopyEngine())
    found, check, close = cases(arguments, nbytes, device)
    rates = {name_of(case): [] for case in found}
    try:
        for _ in range(arguments.repeat):
            for case in found:
                start = time.perf_counter()
                case[3]()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                rates[name_of(case)].append(case[2] / (time.perf_counter() - start) / 1e9)
        check()
    finally:
        close()
    best = {
        kind: max(statistics.median(rates[name_of(c)]) for c in found if c[0] == f"probe {kind}")
        for kind in ("read", "write")
    }
    for case in found:
        values = rates[name_of(case)]
        middle = statistics.median(values)
        line = {
            "bench": "disk",
            "what": case[0],
            "gb_per_s": round(middle, 3),
            "lowest": round(min(values), 3),
            "highest": round(max(values), 3),
            "of_probe": round(middle / best[case[1]], 3),
            **case[4],
            "runs": len(values),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "mib": arguments.mib,
        }
        print(json.dumps(line), flush=True)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(json.dumps(line) + "\n")


def name_of(case):
    """What tells two figures apart."""
    return case[0], case[4].get("threads")


if __name__ == "__main__":
    main()
