"""A made-up run, as its event file tells it."""

import json
import os
import platform

GIB = 1 << 30


def block(index, **changes):
    return {
        "name": f"layers.{index}", "kind": "block", "tier": "host", "codec": "nf4", "policy": "keep",
        "bytes": 4 << 20, "settled": False, "optimizer": "", "parameters": 100, "trainable": 0,
        "runs": 10, "fills": 20, **changes,
    }  # fmt: skip


def step_line(step, **changes):
    return {
        "event": "step", "run": "r1", "time": 1000.0 + step, "step": step, "step_s": 0.5, "tokens": 512,
        "tiers": {"device": 2 * GIB, "peer": 0, "host": 6 * GIB, "disk": 0},
        "moved": {"h2d_bytes": 20 * GIB, "d2h_bytes": GIB, "disk_read_bytes": 0},
        "stall_s": {"optimizer": 0.05, "weights": 0.1}, "busy_s": {"gpu": 0.2, "h2d": 0.45, "d2h": 0.02},
        "bound_s": 0.45, "share_of_bound": 0.9, "limiter": "h2d", "device_peak_bytes": 3 * GIB,
        "host_used_bytes": 8 * GIB, "host_peak_bytes": 9 * GIB, "adapting": step <= 2, **changes,
    }  # fmt: skip


def made_up(steps=12, name="a <b>model</b>", ended=True, pid=None):
    lines = [
        {
            "event": "run", "run": "r1", "time": 1000.0, "format": 1, "version": "0", "rank": 0,
            "pid": os.getpid() if pid is None else pid, "host": platform.node(), "device": "cuda:0",
            "device_name": "a card", "model": name, "dtype": "bfloat16", "parameters": 7, "trainable": 1,
            "options": {"vram_budget": "</script><script>alert(1)</script>"}, "baseline_bytes": GIB,
            "rates": {"h2d": 50e9, "measured": True},
        },
        {"event": "note", "run": "r1", "time": 1000.1, "text": "it's \"said\" & <i>done</i>\x1b[31m"},
        {
            "event": "plan", "run": "r1", "time": 1000.2, "step": 0, "blocks": [block(0), block(1)],
            "plan": {
                "device": "cuda:0", "budgets": {"device": 4 * GIB, "host": 16 * GIB, "disk": 99 * GIB},
                "predicted": {"device": 2 * GIB, "host": 6 * GIB, "disk": 0, "activations": GIB},
                "blocks": [block(0), block(1)],
            },
        },
    ]  # fmt: skip
    lines += [step_line(step) for step in range(1, steps + 1)]
    lines.append({"event": "loss", "run": "r1", "time": 1005.0, "step": 5, "loss": 2.5})
    if ended:
        last = {"event": "end", "run": "r1", "time": 1000.0 + steps + 1, "step": steps}
        lines.append({**last, "tiers": {"device": GIB}, "blocks": [block(0, fills=99), block(1)]})
    return lines


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def torch_trace():
    """Two steps on a GPU with every kind of lane."""

    def event(category, name, start, length, **args):
        return {
            "ph": "X",
            "cat": category,
            "name": name,
            "ts": start,
            "dur": length,
            "pid": 9,
            "tid": 1,
            "args": args,
        }

    events = [event("user_annotation", "ts/step", at, 90) for at in (0, 100)]
    for at in (0, 100):
        events += [
            event("kernel", "gemm", at + 10, 30),
            event("kernel", "ts::quant::decode_kernel<nf4>", at + 42, 10),
            event("gpu_memcpy", "Memcpy HtoD", at + 5, 20, bytes=1000),
            event("gpu_memcpy", "Memcpy DtoH", at + 60, 5, bytes=500),
            event("ts_span", "ts/optim/update", at + 50, 30),
            event("ts_span", "ts/paging/wait", at + 2, 3),
        ]
    return {"traceEvents": events, "baseTimeNanoseconds": 990_000_000_000}
