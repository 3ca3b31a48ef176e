"""The command line: `trainstream finetune [config.yaml] [key=value ...]` and `trainstream doctor`."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated, Any

import typer

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
    from trainstream.cli.console import Console

    console = Console(as_json)
    try:
        from trainstream.cli.doctor import run

        code = run(console, force=force)
    except KeyboardInterrupt:
        code = 130
    except Exception as error:  # every fault: one line unless asked
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
