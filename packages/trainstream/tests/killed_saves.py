"""A program that trains in forked processes, each killed at one moment of a save if it is to be.

    python killed_saves.py cases.json [processes at once]

A case says what to train, and when it dies: "armed_by" is the function whose second call begins the save in
question, "kill" is [function, number of its call from then on, "before" or "after"]. The libraries are
imported once, before anything has a thread. Prints the exit code of every case, 3 for a run to the end.
"""

import importlib
import json
import os
import signal
import sys
from pathlib import Path


def place(name):
    """Find `module:path.of.function`; return its owner and last name."""
    module, _, path = name.partition(":")
    owner = importlib.import_module(module)
    *parts, last = path.split(".")
    for part in parts:
        owner = getattr(owner, part)
    return owner, last


def patch(name, around):
    owner, last = place(name)
    real = getattr(owner, last)

    def replaced(*args, **kwargs):
        return around(real, *args, **kwargs)

    setattr(owner, last, replaced)


def arm(case):
    calls = {"saves": 0, "kill": 0}
    target, number, when = case["kill"]

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def killing(real, *args, **kwargs):
        if calls["saves"] < 2:
            return real(*args, **kwargs)
        calls["kill"] += 1
        if calls["kill"] == number and when == "before":
            die()
        result = real(*args, **kwargs)
        if calls["kill"] == number and when == "after":
            die()
        return result

    def counting(real, *args, **kwargs):
        calls["saves"] += 1
        return real(*args, **kwargs)

    patch(target, killing)
    patch(case["armed_by"], counting)  # around the other one, where they are the same


def run(case):
    if case["kind"] == "cli":
        from typer.testing import CliRunner

        from trainstream.cli import app

        result = CliRunner().invoke(app, ["finetune", "--debug", *case["words"]])
        print(result.stdout, flush=True)
        print(result.stderr, file=sys.stderr)
        return
    import torch
    from test_trainer import InOrder, arguments, build, lora, random_rows

    torch.set_num_threads(1)
    model = lora(build(), lora_dropout=0.2) if case["lora"] else build()
    trainer = InOrder(
        model=model,
        args=arguments(case["folder"], **case["arguments"]),
        train_dataset=random_rows(12),
        trainstream=case["options"],
    )
    trainer.train()


def start(case):
    pid = os.fork()
    if pid:
        return pid
    try:
        os.chdir(case.get("cwd", "."))
        if "kill" in case:
            arm(case)
        run(case)
    finally:
        sys.stderr.flush()
        os._exit(3)


def main(cases, at_once=2):
    """Each case is a dict; two at once are right for two cores."""
    for name in ("peft", "transformers.models.llama.modeling_llama", "trainstream.cli.finetune"):
        importlib.import_module(name)
    importlib.import_module("trainstream.integrations.huggingface")
    codes, running = {}, {}
    for index in range(len(cases) + at_once):
        while running and (index >= len(cases) or len(running) == at_once):
            pid, status = os.wait()
            codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
        if index < len(cases):
            running[start(cases[index])] = index
    print(json.dumps([codes[index] for index in range(len(cases))]))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), *map(int, sys.argv[2:]))
