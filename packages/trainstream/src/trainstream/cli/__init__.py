"""The command line: `trainstream --help` lists the commands."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from trainstream.cli.plan import command as _plan
from ts_core.errors import TrainStreamError

__all__ = ["app", "main"]

app = typer.Typer(
    name="trainstream",
    help="Train and fine-tune models larger than the memory you have.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("plan")(_plan)


def _version(shown: bool) -> None:
    if shown:
        from importlib.metadata import version

        typer.echo(f"trainstream {version('trainstream')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train and fine-tune models larger than the memory you have."""


@app.command(epilog="Keys and their defaults: trainstream finetune --keys")
def finetune(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG.yaml] [KEY=VALUE ...]", help="A YAML file of keys, and keys."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per event on stdout.")] = False,
    ram: Annotated[
        str | None, typer.Option("--ram", help="RAM to use at most, such as 8GiB (the key ram).")
    ] = None,
    vram: Annotated[
        str | None, typer.Option("--vram", help="GPU memory to use at most (the key vram).")
    ] = None,
    disk: Annotated[
        str | None,
        typer.Option("--disk", help="Disk space to use at most for what is beyond (the key disk)."),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    keys: Annotated[bool, typer.Option("--keys", help="List the keys with their defaults and exit.")] = False,
) -> None:
    """Fine-tune a model: LoRA on an nf4 base, or every weight.

    Without arguments: SmolLM2-135M on Python source text.

    Exit codes: 0 done, 2 something in the request is wrong, 130 stopped by Ctrl-C, 1 anything else.
    """
    from trainstream.cli.console import Console
    from trainstream.cli.settings import describe, from_words

    if keys:
        typer.echo(describe())
        return
    console = Console(as_json)
    try:
        budgets = {"ram": ram, "vram": vram, "disk": disk}
        given = [f"{name}={size}" for name, size in budgets.items() if size is not None]
        settings, explicit = from_words([*(words or []), *given])
        # Checked before the heavy imports: a typing mistake should be answered at once.
        from trainstream.cli.finetune import run

        code = run(settings, explicit, console)
    except KeyboardInterrupt:
        console.close_bar()
        console.event("interrupted", step=0, checkpoint=None, resume=None)
        console.note("stopped before training began; nothing to save")
        code = 130
    except TrainStreamError as error:
        code = _failed(console, error, 2, debug)
    except Exception as error:  # every other fault: still one line unless asked
        code = _failed(console, error, 1, debug)
    if code:
        raise typer.Exit(code)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Measure again what is kept from before.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Say what this machine gives, what is missing, and the command that mends it.

    Exit codes: 0 training is possible, 1 it is not, 130 stopped by Ctrl-C.
    """

    def work(console: Any) -> int:
        try:
            from trainstream.cli.doctor import run
        except (ImportError, OSError) as error:
            return _no_torch(console, error)
        return run(console, force=force)

    _carry_out(work, as_json, debug)


@app.command()
def report(
    place: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="A run folder, a folder of runs, an event file or a trace."),
    ] = Path("runs"),
    html: Annotated[
        Path | None, typer.Option("--html", help="Write one page that needs no network to this file.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write a trace for Perfetto or chrome://tracing here.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", help="A torch.profiler trace of some steps, if it is not in the run."),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", help="What `trainstream plan --json` printed before, to compare with."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Show what a run did: memory by tier, what limits a step, predicted against measured.

    Without --html, --trace or --json: a summary in the terminal. RUN is ./runs if it is left out, and the
    newest run of such a folder is taken.

    Exit codes: 0 done, 2 something in the request is wrong, 130 stopped by Ctrl-C, 1 anything else.
    """

    def work(console: Any) -> int:
        from trainstream.cli.report import run

        return run(console, place, html=html, trace=trace, profile=profile, plan=plan)

    _carry_out(work, as_json, debug)


@app.command()
def top(
    place: Annotated[
        Path, typer.Argument(metavar="FILE", help="An event file, a run folder or a folder of runs.")
    ] = Path("runs"),
    once: Annotated[bool, typer.Option("--once", help="Show it once and exit.")] = False,
    interval: Annotated[float, typer.Option("--interval", help="Seconds between two looks.", min=0.1)] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each look.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Watch a running job: bytes by tier, speed, what it waits for. Ctrl-C ends the watching.

    A job writes the file with TRAINSTREAM_EVENTS=FILE; `trainstream finetune` writes it into its folder.

    Exit codes: 0 done, 2 something in the request is wrong, 1 anything else.
    """

    def work(console: Any) -> int:
        from trainstream.cli.top import run

        return run(console, place, once=once, interval=interval)

    _carry_out(work, as_json, debug)


@app.command()
def verify(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A folder, a config.json, a .gguf file, a hub id, or smollm2."),
    ],
    steps: Annotated[int, typer.Option("--steps", help="Optimizer steps of each run.", min=2)] = 3,
    layers: Annotated[
        int | None, typer.Option("--layers", help="Layers to keep (default 4, or one of each kind).", min=1)
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="Cut nothing; needs the memory of the model.")
    ] = False,
    method: Annotated[
        str, typer.Option("--method", help="auto, full or lora; auto: full if that fits.")
    ] = "auto",
    quantize: Annotated[
        str, typer.Option("--quantize", help="Codec of the frozen base, such as nf4.")
    ] = "none",
    length: Annotated[int, typer.Option("--seq", help="Tokens of a row.", min=8)] = 32,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[
        str, typer.Option("--dtype", help="auto (bf16 on a GPU, else fp32), bf16, fp32.")
    ] = "auto",
    random: Annotated[
        bool, typer.Option("--random", help="Draw the weights instead of reading them.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run model code that comes with the model.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per check on stdout.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Prove that streaming changes nothing: a few steps streamed and resident, compared bit by bit.

    Also: every trained parameter is reached, packed documents are isolated, micro-batches add up, clipping
    clips. The model is cut to a few layers; of a hub id only the config is fetched, unless --whole is given.

    Exit codes: 0 verified, 1 something differs, 2 something in the request is wrong, 130 stopped by Ctrl-C.
    """

    def work(console: Any) -> int:
        from trainstream.cli.verify import Request, check_request, run

        asked = Request(
            model, steps, layers, whole, method, quantize, length, device, dtype, random, trust_remote_code
        )
        return run(console, check_request(asked))

    _carry_out(work, as_json, debug)


def _no_torch(console: Any, error: Exception) -> int:
    """What doctor says where torch itself does not load; nothing else can be looked at then."""
    text = " ".join(str(error).split())
    fix = (
        "pip install --force-reinstall torch (a build for your CUDA driver: https://pytorch.org/get-started)"
    )
    check = {
        "name": "torch",
        "status": "failed",
        "value": f"cannot be imported: {text}",
        "fix": fix,
        "data": {},
    }
    console.event("doctor", ok=False, checks=[check], profile=None)
    console.say(f"torch  failed   {check['value']}\n                -> {fix}")
    console.say("\ntraining is impossible here: torch")
    return 1


def _carry_out(work: Callable[[Any], int], as_json: bool, debug: bool) -> None:
    """Run a command; an error is one line, and the exit code says what kind it was."""
    from trainstream.cli.console import Console

    console = Console(as_json)
    try:
        code = work(console)
    except KeyboardInterrupt:
        console.close_bar()
        code = 130
    except BrokenPipeError:  # `trainstream report | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 141
    except TrainStreamError as error:
        code = _failed(console, error, 2, debug)
    except Exception as error:  # every other fault: still one line unless asked
        code = _failed(console, error, 1, debug)
    if code:
        raise typer.Exit(code)


def _failed(console: Any, error: Exception, code: int, debug: bool) -> int:
    console.close_bar()
    text = " ".join(str(error).split()) or type(error).__name__
    if code == 1:
        text = f"{type(error).__name__}: {text} (--debug shows the traceback)"
    console.event("error", type=type(error).__name__, message=text)
    if debug:
        traceback.print_exc()
    print(f"trainstream: {text}", file=sys.stderr, flush=True)
    return code


def main() -> None:
    """Entry point of the `trainstream` command."""
    app()
