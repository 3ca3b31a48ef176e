"""What the block runtime costs per block, and where the time goes; one JSON line per figure, then a table.

    python benchmarks/bench_overhead.py [--device cpu|cuda] [--blocks 32] [--runs 40] [--out FILE]

A stack of blocks too small for their computation to matter runs forward and backward, resident and paged in
turn. overhead = (median paged - median resident) / blocks, in us; the spread is that of the differences of
neighbouring runs (quartiles). Cells: block (`linear`: one 64 x 64 Linear; `llama`: attention and SwiGLU with
seven Linears and two norms), weights (frozen or trained), policy of saved activations, and slots (`all`: one
per block, nothing is copied after the first run; `2`: every weight is copied in forward and in backward, from
host memory). With `recompute` the resident stack checkpoints with torch's own function; with `offload` it
keeps, and the paged one parks every saved tensor in host memory. Sums of outputs and gradients are compared.

The profile (cProfile, which makes Python dearer than it is) gives what each part takes beyond the resident
run and its share; a library function counts for the part that called it. Parts: `entry` into a block, `slot
use` (is the block there, what comes next), `fill` (bringing weights), `binding` of views, `hooks` of saved
tensors, `parking` of activations, `gate`, `sink` and `guard` (gradients), `checkpoint`.

`--mode block` runs each block as one node of the graph, `--mode captured` replays it (CUDA graphs on a GPU).

On a machine that others use, `--clock cpu` counts the time of this thread alone (CPU runs; one torch thread).
"""

import argparse
import copy
import cProfile
import gc
import itertools
import json
import os
import platform
import pstats
import statistics
import sys
import time
import types
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ts_paging
from ts_core import registry
from ts_paging import activations, block, disk, files, layout, pager, sink, slots
from ts_paging.blockmode import BlockMode
from ts_paging.captured import Captures
from ts_paging.pager import WeightPager

DIM, TOKENS = 64, 8
POLICIES = ("keep", "offload", "recompute")


class Linear(nn.Module):
    """One Linear and what makes backward need its output."""

    def __init__(self):
        """Make the weights."""
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x):
        """Return tanh(x W' + b)."""
        return torch.tanh(self.linear(x))


class Llama(nn.Module):
    """A decoder block in the manner of Llama, without rotary embedding."""

    def __init__(self, heads=4):
        """Make the weights."""
        super().__init__()
        self.heads = heads
        self.input_norm, self.post_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(DIM, 2 * DIM, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x):
        """Attention and SwiGLU, each with its residual."""
        h = self.input_norm(x)
        q, k, v = (p(h).view(*h.shape[:-1], self.heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(h.transpose(1, 2).flatten(2))
        h = self.post_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


BLOCKS = {"linear": Linear, "llama": Llama}


class Pinned:
    """Gradients of a GPU run in page-locked memory."""

    def like(self, tensor):
        """Return an uninitialised host tensor like a dense one."""
        raw = registry.host_allocator().empty(max(tensor.nbytes, 1))
        return raw.view(tensor.dtype).as_strided(tensor.size(), tensor.stride())


class Cell:
    """One combination, resident and paged."""

    def __init__(self, args, kind, trained, policy, slot_count):
        """Build two stacks with the same weights and page one of them."""
        torch.manual_seed(0)
        self.name = f"{kind} {'trained' if trained else 'frozen'} {policy} {slot_count}"
        self.facts = {"block": kind, "trained": trained, "policy": policy, "slots": slot_count}
        self.policy, self.cuda = policy, args.device == "cuda"
        self.clock = time.thread_time if args.clock == "cpu" else time.perf_counter
        device = torch.device(args.device, 0) if self.cuda else torch.device("cpu")
        stack = nn.ModuleList(BLOCKS[kind]() for _ in range(args.blocks)).requires_grad_(trained)
        self.stacks = {"resident": copy.deepcopy(stack).to(device), "paged": stack}
        if self.cuda:
            for parameter in stack.parameters():
                parameter.data = Pinned().like(parameter).copy_(parameter.data)
        self.pager = WeightPager(
            device,
            slots=args.blocks if slot_count == "all" else slot_count,
            gradients=Pinned() if self.cuda else None,
            min_offload_bytes=0,
        )
        self.pager.attach([(str(index), each, policy) for index, each in enumerate(stack)])
        if args.mode != "graph":
            self.pager.block_mode = BlockMode(Captures(device) if args.mode == "captured" else None)
        self.x = torch.randn(1, TOKENS, DIM, device=device)
        self.grad = torch.randn(1, TOKENS, DIM, device=device)

    def sync(self):
        """Wait for the GPU."""
        if self.cuda:
            torch.cuda.synchronize()

    def forward(self, which, x):
        """Run the stack."""
        for each in self.stacks[which]:
            if which == "resident" and self.policy == "recompute":
                x = checkpoint(each, x, use_reentrant=False)
            else:
                x = each(x)
        return x

    def run(self, which):
        """Return seconds forward and backward, and what was computed."""
        for parameter in self.stacks[which].parameters():
            parameter.grad = None
        x = self.x.clone().requires_grad_()
        self.sync()
        start = self.clock()
        out = self.forward(which, x)
        self.sync()
        middle = self.clock()
        out.backward(self.grad)
        self.sync()
        end = self.clock()
        return middle - start, end - middle, (out, x.grad)

    def results(self, which):
        """Everything that a run computes, on the host."""
        computed = [t.detach().cpu() for t in self.run(which)[2]]
        grads = [p.grad for p in self.stacks[which].parameters()]
        return [*computed, *(g.detach().cpu().clone() for g in grads if g is not None)]

    def close(self):
        """Stop paging."""
        self.pager.detach()


def measure(cell, runs):
    """Alternate the two stacks; overhead per block with its spread."""
    equal = all(
        itertools.starmap(torch.equal, zip(cell.results("resident"), cell.results("paged"), strict=True))
    )
    for which in cell.stacks:
        for _ in range(3):
            cell.run(which)
    times = {which: ([], []) for which in cell.stacks}
    gc.collect()
    gc.disable()  # a collection in the midst belongs to neither
    try:
        for _ in range(runs):
            for which, (forward, backward) in times.items():
                first, second, _ = cell.run(which)
                forward.append(first)
                backward.append(second)
    finally:
        gc.enable()
    # The first run is watched in graph mode, whatever the mode: compared again after those that were timed.
    equal &= all(
        itertools.starmap(torch.equal, zip(cell.results("resident"), cell.results("paged"), strict=True))
    )
    count = len(cell.stacks["paged"])
    found = {"bit_equal": equal}
    for index, phase in enumerate(("forward", "backward")):
        resident, paged = times["resident"][index], times["paged"][index]
        gaps = [(p - r) / count * 1e6 for r, p in zip(resident, paged, strict=True)]
        low, _, high = statistics.quantiles(gaps, n=4) if len(gaps) > 1 else (gaps[0],) * 3
        middle = (statistics.median(paged) - statistics.median(resident)) / count * 1e6
        found |= {
            f"{phase}_resident_us": round(statistics.median(resident) / count * 1e6, 2),
            f"{phase}_paged_us": round(statistics.median(paged) / count * 1e6, 2),
            f"{phase}_overhead_us": round(middle, 2),
            f"{phase}_quartiles_us": [round(low, 2), round(high, 2)],
            # The fastest runs of both: what other work on the machine disturbs least.
            f"{phase}_least_us": round((min(paged) - min(resident)) / count * 1e6, 2),
        }
    return found


# ---- the profile ----

#: Part -> what belongs to it: modules, or names in one module.
PARTS = {
    "entry": (block, ("PagedBlock._forward", "PagedBlock.compute", "PagedBlock._compute")),
    "slot use": (block, ("PagedBlock.stale", "PagedBlock.stamp", "PagedBlock.filled", "PagedBlock.in_files")),
    "binding": (block, ("PagedBlock._bound", "_Bind.")),
    "hooks": (block, ("PagedBlock._hooks", "_Weight.", "refuse_create_graph", "_version")),
    "gate": (block, ("PagedBlock._gated", "_Gate.")),
    "checkpoint": (block, ("PagedBlock._recomputed", "PagedBlock._cached", "_is_cache")),
}
PAGER_USE = ("WeightPager.use", "WeightPager._hint", "_slot_of")
MODULES = {sink: "sink", activations: "parking", slots: "fill", files: "fill", disk: "fill", layout: "fill"}
LIBRARY = {
    "torch/utils/checkpoint.py": "checkpoint",
    "torch/autograd/graph.py": "hooks",
    "ts_core/guard.py": "guard",
    "ts_core/registry.py": "fill",
    "ts_paging/copy.py": "fill",
    "ts_paging/pinned.py": "fill",
    "torch/_compile.py": "torch.compiler.disable",
    "torch/_dynamo/": "torch.compiler.disable",
    "torch/nn/": "model",
    "bench_overhead.py": "model",
}


def codes(module):
    """Yield (qualified name, code object) of every function that a module defines."""
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        members = vars(value) if isinstance(value, type) else {"": value}
        for key, member in members.items():
            member = getattr(member, "__func__", member)  # static and class methods
            member = getattr(member, "fget", member)
            member = getattr(member, "__wrapped__", member)
            if isinstance(member, types.FunctionType):
                yield from nested(member.__code__, f"{name}.{key}" if key else name)


def nested(code, name):
    """Yield a code object and those of the functions inside."""
    yield name, code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from nested(inner, name)


def part_table():
    """(file, line, name) as cProfile writes them -> part."""
    table = {}
    for module, part in MODULES.items():
        table |= {key_of(code): part for _, code in codes(module)}
    for name, code in codes(pager):
        table[key_of(code)] = "slot use" if name.startswith(PAGER_USE) else "fill"
    for name, code in codes(block):
        table[key_of(code)] = next(
            (part for part, (_, names) in PARTS.items() if name.startswith(names)), "other"
        )
    return table


def key_of(code):
    """How pstats names a function."""
    return code.co_filename, code.co_firstlineno, code.co_name


def parts_of(profile, table):
    """Seconds of each part: own time, with that of library functions given to their callers."""
    stats = pstats.Stats(profile).stats
    total = {}

    def owner(function):
        if function in table:
            return table[function]
        path = function[0].replace(os.sep, "/")
        if function[2] == "_engine_run_backward":  # lies beside the saved-tensor hooks
            return None
        return next((part for word, part in LIBRARY.items() if word in path), None)

    def give(function, seconds, depth, seen):
        part = owner(function)
        callers = {} if part else {c: v for c, v in stats[function][4].items() if c not in seen}
        weight = sum(value[3] for value in callers.values())
        if part or not weight or depth > 12:
            total[part or "engine and operations"] = total.get(part or "engine and operations", 0) + seconds
            return
        for caller, value in callers.items():
            give(caller, seconds * value[3] / weight, depth + 1, seen | {function})

    for function, (_, _, own, _, callers) in stats.items():
        if owner(function) or not callers:
            give(function, own, 0, frozenset())
            continue
        rest = own
        for caller, value in callers.items():
            rest -= value[2]
            give(caller, value[2], 1, frozenset({function}))
        give(function, max(rest, 0), 99, frozenset())
    return total, stats


def profiled(cell, which, runs):
    """A profile of forward and backward, whichever thread runs the backward's Python."""
    profile = cProfile.Profile(*([cell.clock] if cell.clock is time.thread_time else []))
    for _ in range(runs):
        for parameter in cell.stacks[which].parameters():
            parameter.grad = None
        x = cell.x.clone().requires_grad_()
        profile.enable()
        out = cell.forward(which, x)
        profile.disable()
        cell.sync()
        if cell.cuda:  # backward runs in a thread of the engine's
            out.register_hook(lambda grad: profile.enable())
            x.register_hook(lambda grad: profile.disable())
            out.backward(cell.grad)
            cell.sync()
            continue
        profile.enable()
        out.backward(cell.grad)
        profile.disable()
    return profile


def report_profile(cell, runs, report, table):
    """Print the parts of the paged run beside the resident one's, and the dearest functions."""
    parts, stats = parts_of(profiled(cell, "paged", runs), table)
    base, _ = parts_of(profiled(cell, "resident", runs), table)
    scale = 1e6 / runs / len(cell.stacks["paged"])
    # What the resident run has too (its modules, its checkpoints) is no overhead.
    extra = {part: seconds - base.get(part, 0) for part, seconds in parts.items()}
    rest = extra.pop("model", 0) + extra.pop("engine and operations", 0)
    extra["model, engine and operations"] = rest
    whole = sum(max(seconds, 0) for seconds in extra.values())
    shares = {
        part: {"us": round(seconds * scale, 2), "share_frac": round(max(seconds, 0) / whole, 4)}
        for part, seconds in sorted(extra.items(), key=lambda item: -item[1])
    }
    ordered = sorted(stats.items(), key=lambda item: -item[1][2])[:25]
    functions = [
        {
            "function": f"{Path(function[0]).name}:{function[1]} {function[2]}",
            "calls": round(calls / runs / len(cell.stacks["paged"]), 2),
            "own_us": round(own_s * scale, 2),
            "total_us": round(total_s * scale, 2),
        }
        for function, (_, calls, own_s, total_s, _) in ordered
    ]
    report({"what": "profile", **cell.facts, "runs": runs, "parts": shares, "functions": functions})
    print(f"# {cell.name}: profiled us per block beyond the resident run")
    for part, value in shares.items():
        print(f"#   {part:32s} {value['us']:8.2f} {value['share_frac']:6.1%}")


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--runs", type=int, default=40, help="timed runs of each stack, taken in turn")
    parser.add_argument("--profile-runs", type=int, default=20, help="0: no profile")
    parser.add_argument("--only", default="", help="cells whose name contains this: 'llama trained'")
    parser.add_argument("--mode", choices=["graph", "block", "captured"], default="graph")
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, once: does the script work")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    args = parser.parse_args()
    if args.clock == "cpu":
        if args.device == "cuda":
            parser.error("--clock cpu is for CPU runs")
        torch.set_num_threads(1)
    if args.smoke:
        args.blocks, args.runs, args.profile_runs, args.only = 2, 1, 1, "linear trained"
    if args.device == "cuda":
        registry.set_host_allocator(ts_paging.PinnedAllocator())
        registry.set_copy_engine(ts_paging.CopyEngine())
    setting = {
        "bench": "overhead",
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "blocks": args.blocks,
        "clock": args.clock,
        "mode": args.mode,
    }

    def report(line):
        text = json.dumps({**setting, **line})
        print(text, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(text + "\n")

    rows, table, failed = [], part_table(), False
    for kind, trained, policy, count in itertools.product(BLOCKS, (False, True), POLICIES, ("all", 2)):
        cell = Cell(args, kind, trained, policy, count)
        if args.only in cell.name:
            found = measure(cell, args.runs)
            failed |= not found["bit_equal"]
            report({"what": "overhead", **cell.facts, "runs": args.runs, **found})
            rows.append((cell.name, found))
            if args.profile_runs and trained:
                report_profile(cell, args.profile_runs, report, table)
        cell.close()
    print_table(rows)
    return int(failed)


def print_table(rows):
    """Overhead per block, for people."""
    head = f"{'forward us (quartiles)':>28s} {'backward us (quartiles)':>28s}"
    print(f"# {'block weights policy slots':32s} {head}")
    for name, found in rows:
        cells = []
        for phase in ("forward", "backward"):
            low, high = found[f"{phase}_quartiles_us"]
            cells.append(f"{found[f'{phase}_overhead_us']:.1f} ({low:.1f} - {high:.1f})")
        verdict = "" if found["bit_equal"] else "  NOT BIT-EQUAL"
        print(f"# {name:32s} {cells[0]:>28s} {cells[1]:>28s}{verdict}")


if __name__ == "__main__":
    sys.exit(main())
