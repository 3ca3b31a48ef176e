"""`trainstream finetune`: data, model, held-out loss, training, held-out loss, result."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import shlex
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import trainstream
from trainstream import _folders
from trainstream._budget import host_used
from trainstream._session import Session, host_peak_bytes
from trainstream.cli import loop, models, output, storage
from trainstream.cli.background import BackgroundWriter
from trainstream.cli.console import Console, tiers_text
from trainstream.cli.data import load_data, read_sources, spread
from trainstream.cli.interrupt import Interrupt
from trainstream.cli.settings import FIXED_ON_RESUME, Settings, changed, merge
from trainstream.integrations._plan_file import read_plan, write_plan
from trainstream.packing import isolate_documents
from ts_core import registry
from ts_core.errors import CheckpointError, OptionError, StorageError
from ts_core.memory import format_bytes
from ts_core.usage import PeakSampler
from ts_hf.tokens import Rows
from ts_quant import QuantizedTensor

__all__ = ["run"]

BUILT_IN_STEPS = 80
RUNS = output.RUNS
# What wrap() is told by a key of its own.
_OWN_KEYS = {
    "lr": "learning_rate",
    "max_grad_norm": "max_grad_norm",
    "accumulation_steps": "gradient_accumulation_steps",
    "quantize": "quantize",
    "device": "device",
    "blocks": "model",
    "ram_budget": "ram",
    "vram_budget": "vram",
    "disk_budget": "disk",
}


def run(settings: Settings, explicit: dict[str, Any], console: Console) -> int:
    """Carry out one fine-tune.

    Args:
        settings: What to do.
        explicit: The keys that were typed, by full name; a resumed run compares them with its checkpoint.
        console: Where progress and results go.

    Returns:
        The exit code: 0, or 128 + the signal that stopped it.

    Raises:
        TrainStreamError: Something in the request cannot be carried out.
    """
    checkpoint = None
    if settings.resume_from_checkpoint:
        checkpoint = _find_checkpoint(settings)
        settings = _resumed_settings(settings, explicit, checkpoint)
    for name in settings.wrap.keys() & _OWN_KEYS.keys():
        raise OptionError(f"option wrap.{name}: give it as {_OWN_KEYS[name]}=...")
    trainstream._options.WrapOptions.from_kwargs(**settings.wrap)  # before anything slow
    folder = Path(settings.output_dir).expanduser() if settings.output_dir else _default_folder(settings)
    with output.claim(folder, resuming=checkpoint is not None):
        if settings.export_decoded_base:
            models.check_replaceable(Path(settings.export_decoded_base).expanduser())
        with _quiet_libraries(), PeakSampler(read=host_used) as sampler:
            return _Run(settings, checkpoint, console, folder, sampler).carry_out()


def _default_folder(settings: Settings) -> Path:
    first = RUNS / f"{models.base_name(settings)}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, number = first, 1
    while folder.exists():
        number += 1
        folder = first.with_name(f"{first.name}-{number}")
    return folder


def _find_checkpoint(settings: Settings) -> storage.Checkpoint:
    wanted = str(settings.resume_from_checkpoint)
    folder = Path(settings.output_dir or RUNS) if wanted == "latest" else Path(wanted)
    return storage.read_state(storage.latest(folder.expanduser()))


def _resumed_settings(
    settings: Settings, explicit: dict[str, Any], checkpoint: storage.Checkpoint
) -> Settings:
    """Take the settings of the checkpoint, and from the command line what may change within a run."""
    saved = checkpoint.data["settings"]
    saved = {**Settings().to_json(), **saved}  # it may be of a release without some key
    folder = checkpoint.folder.resolve().parent
    changes = dict(explicit)
    given_dir = changes.pop("output_dir", None)
    if given_dir is not None and Path(given_dir).resolve() not in (folder, *folder.parents):
        raise OptionError(f"option output_dir: a resumed run continues in its own folder, {folder}")
    for name, value in changes.items():
        if name in FIXED_ON_RESUME and merge({name: value}).to_json()[name] != saved.get(name):
            raise OptionError(
                f"option {name}: the checkpoint was made with {saved.get(name)!r}; a resumed run keeps it. "
                "Leave the option out, or start a new run"
            )
    changes.pop("resume_from_checkpoint", None)
    resumed = merge(changed(saved), changes)
    resumed.wrap.update(settings.wrap)
    return dataclasses.replace(resumed, output_dir=str(checkpoint.folder.parent))


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Silence progress bars and advice of the libraries used, which a user of this command cannot act on."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # PEFT imports it where it is installed
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


class _Run:
    """The state of one command, from the settings to the result."""

    def __init__(
        self,
        settings: Settings,
        checkpoint: storage.Checkpoint | None,
        console: Console,
        folder: Path,
        sampler: PeakSampler,
    ) -> None:
        self.settings = settings
        self.sampler = sampler
        self.checkpoint = checkpoint
        self.console = console
        self.output_dir = folder
        self.started = time.perf_counter()
        self.progress = loop.Progress()
        self.loss_before: float | None = None
        self.loss_after: float | None = None
        self.writer: BackgroundWriter | None = None

    def carry_out(self) -> int:
        self._prepare()
        with Interrupt(self._announce) as self.interrupt:
            resumed = self.checkpoint is not None
            if not resumed:
                self.loss_before = self._evaluate("before")
                _folders.sweep(self.output_dir)
                # Dropout then does not depend on what was drawn before the first step.
                torch.manual_seed(self.settings.seed)
            with self.writer.waited_for() if self.writer else contextlib.nullcontext():
                if not self._stopping():
                    self._train()
            if self._stopping():
                return self._stopped()
            result = self._save_result()
            self.loss_after = self._evaluate("after")
            if self._stopping():
                self.console.note(f"stopped during the last evaluation; the result is in {result['saved']}")
                self.console.event("interrupted", step=self.progress.step, checkpoint=None, resume=None)
                return self.interrupt.exit_code
            self._finish(result)
        return 0

    def _stopping(self) -> bool:
        return bool(self.interrupt.requested)

    def _announce(self, line: str) -> None:
        self.console.note(line)

    # ------------------------------------------------------------------------------------- before

    def _prepare(self) -> None:
        settings, console = self.settings, self.console
        saved = self.checkpoint.data if self.checkpoint else {}
        threads = settings.threads or saved.get("threads")
        if threads:
            # Sums are split by threads: the same number again is what makes a resumed run bit-identical.
            torch.set_num_threads(int(threads))
        torch.manual_seed(settings.seed)
        self.device = models.choose_device(settings.device)
        self.dtype, why = models.choose_dtype(saved.get("dtype") or settings.dtype, self.device)
        if saved.get("dtype") and settings.dtype == "auto":
            why = "as before the run was resumed"
        weights = self.checkpoint.folder if self.checkpoint and settings.method == "full" else None
        sources = read_sources(settings)  # a fault in the data should not wait for the model
        console.note(f"loading {settings.model} ...")
        self.base = base = models.load_base(settings, self.dtype, self.device, weights)
        self.data = load_data(settings, base.tokenizer, sources)
        self.total_steps = self._count_steps(saved)
        self.base_path = self._base_path()
        model = base.model
        if settings.method == "lora":
            model = models.add_adapters(model, settings, self.base_path)
        if self.checkpoint and settings.method == "lora":
            models.load_adapter(model, self.checkpoint.folder)
        if settings.packing:
            isolate_documents(model)
        plan = read_plan(self.checkpoint.folder) if self.checkpoint else None
        self.model, self.optimizer, self.scheduler = loop.make_optimizer(
            model, settings, self.total_steps, self.device, plan
        )
        self.names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        if settings.save_in_background is not False:
            bound = None if settings.save_in_background is True else int(settings.save_in_background)
            self.writer = BackgroundWriter(self.session, bound, self._saved)
        if self.checkpoint:
            self._restore(self.checkpoint)
        self._announce_start(why)

    def _announce_start(self, why: str) -> None:
        settings, console = self.settings, self.console
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        named = list(self.model.named_parameters())
        total = sum(p.numel() for _, p in named)
        of_base = sum(p.numel() for name, p in named if ".lora_" not in name)
        codec = self._codec()
        dtype = str(self.dtype).removeprefix("torch.")
        rows = settings.per_device_train_batch_size * settings.gradient_accumulation_steps
        console.event(
            "start",
            model=self.base.name,
            method=settings.method,
            quantize=codec,
            dtype=dtype,
            dtype_reason=why,
            device=str(self.device),
            threads=torch.get_num_threads(),
            trained_parameters=trained,
            total_parameters=total,
            base_parameters=of_base,
            train_rows=len(self.data.train),
            held_out_rows=len(self.data.held_out),
            step=self.progress.step,
            total_steps=self.total_steps,
            output_dir=str(self.output_dir),
        )
        plan = self.session.plan
        console.event("plan", adapting=self.session.adapting, **plan.to_dict())
        console.note(
            f"model: {self.base.name}, {of_base / 1e6:.1f} M parameters, base {codec}, {self.device}"
        )
        console.note(f"compute: {dtype} ({why})")
        console.note(f"data: {self.data.summary}")
        console.note(
            f"training: {settings.method}, {trained / 1e6:.2f} M parameters, {self.total_steps} steps of "
            f"{rows} x {settings.max_length} tokens"
            + (f", from step {self.progress.step}" if self.progress.step else "")
        )
        if plan.paged or settings.ram or settings.vram or settings.disk:
            rest = " (the first steps are measured, then blocks return as room allows)"
            console.note(f"plan:{rest if self.session.adapting else ''}\n{plan.table()}")

    @property
    def session(self) -> Session:
        """The session of the wrapped model."""
        session: Session = self.model._trainstream_session
        return session

    def _count_steps(self, saved: dict[str, Any]) -> int:
        settings = self.settings
        rows = settings.per_device_train_batch_size * settings.gradient_accumulation_steps
        if settings.max_steps:
            return settings.max_steps
        if settings.num_train_epochs is None and not settings.data:
            return BUILT_IN_STEPS
        return max(1, math.ceil((settings.num_train_epochs or 1.0) * len(self.data.train) / rows))

    def _base_path(self) -> str:
        """Say where plain PEFT will find the base of the adapter."""
        if self.settings.export_decoded_base:
            return str(Path(self.settings.export_decoded_base).expanduser().resolve())
        return self.base.folder or str((self.output_dir / "base").resolve())

    def _restore(self, checkpoint: storage.Checkpoint) -> None:
        saved, state = checkpoint.data, checkpoint.state
        if saved["parameters"] != self.names:
            raise CheckpointError(
                f"[resume] {checkpoint.folder}: its trained parameters are not those of the model"
            )
        if saved["fingerprint"] != self.data.fingerprint:
            raise CheckpointError(
                f"[resume] the training data is not what {checkpoint.folder} was made with; restore the "
                "files, or start a new run"
            )
        try:
            self.optimizer.load_state_dict(state["optimizer"])
            self.scheduler.load_state_dict(state["scheduler"])
            loop.restore_random_state(state["random"])
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"[resume] {checkpoint.folder}: {error}") from error
        self.progress.step = int(saved["step"])
        self.progress.losses = [(int(step), float(loss)) for step, loss in saved["losses"]]
        self.loss_before = saved["loss_before"]
        self.console.note(f"resuming {checkpoint.folder} at step {self.progress.step}")

    # ------------------------------------------------------------------------------------- during

    def _evaluate(self, when: str) -> float | None:
        settings = self.settings
        rows = self._measured_rows()
        available = len(self.data.held_out)
        if not len(rows):
            return None
        loss = loop.evaluate(self.model, rows, settings, self.interrupt)
        if loss is not None:
            perplexity = math.exp(min(loss, 700.0))
            self.console.event(
                "eval", when=when, loss=loss, perplexity=perplexity, rows=len(rows), of=available
            )
            self.console.note(
                f"held-out loss {when} training: {loss:.4f} (perplexity {perplexity:.2f}; "
                f"{_rows_text(len(rows), available)})"
            )
        return loss

    def _measured_rows(self) -> Rows:
        settings = self.settings
        return spread(self.data.held_out, settings.eval_batches * settings.per_device_train_batch_size)

    def _train(self) -> None:
        if self.total_steps <= self.progress.step:
            self.console.note(f"nothing to train: step {self.progress.step} of {self.total_steps} is done")
        self.console.start_bar(self.total_steps, self.progress.step)
        events, before = self.output_dir / output.EVENTS_FILE, self.progress.step
        fresh = not events.exists()
        full = False
        try:
            if self.settings.events:
                self.session.record(events)
            if self.settings.trace:
                self.session.trace(self.output_dir / output.TRACE_FILE)
            with self.writer.errors() if self.writer else contextlib.nullcontext():
                loop.train(
                    self.model,
                    self.optimizer,
                    self.scheduler,
                    self.data.train,
                    self.settings,
                    total_steps=self.total_steps,
                    progress=self.progress,
                    console=self.console,
                    interrupt=self.interrupt,
                    save=self._save_checkpoint,
                    poll=self.writer.poll if self.writer else lambda: None,
                )
        except StorageError:
            full = True  # what was written is in the way
            raise
        finally:
            self.console.close_bar()
            self.session.end_records()
            if fresh and (full or self.progress.step == before):
                events.unlink(missing_ok=True)

    def _save_checkpoint(self, *, at_once: bool = False) -> Path:
        final = self.output_dir / f"checkpoint-{self.progress.step}"
        data = {
            "step": self.progress.step,
            "settings": self.settings.to_json(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "fingerprint": self.data.fingerprint,
            "parameters": self.names,
            "losses": self.progress.losses,
            "loss_before": self.loss_before,
            "version": trainstream.__version__,
        }
        # state_dict() also waits for pending updates, so it comes before the weights.
        state = {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": loop.random_state(),
        }

        if self.writer and not at_once:
            self.writer.save(final, data, state, self.settings.loss_chunk_size)
            return final

        def write(staging: Path) -> None:
            models.save_weights(self.model, staging)
            write_plan(staging, self.session, loss_chunk_size=self.settings.loss_chunk_size)
            storage.write_state(staging, data, state)

        # An attempt that fails leaves nothing, and the checkpoints before it as they were.
        with output.storage_errors(final):
            _folders.write_folder(final, write)
        self._saved(final)
        return final

    def _saved(self, final: Path) -> None:
        storage.prune(self.output_dir, self.settings.save_total_limit)
        self.console.event("checkpoint", step=int(final.name.rpartition("-")[2]), path=str(final))

    def _stopped(self) -> int:
        step = self.progress.step
        if step == 0 or (self.checkpoint and step == self.checkpoint.data["step"]):
            kept = self.checkpoint.folder if self.checkpoint else None
        else:
            kept = self._save_checkpoint(at_once=True)
        command = f"trainstream finetune resume={shlex.quote(str(kept))}" if kept else None
        self.console.event("interrupted", step=step, checkpoint=str(kept) if kept else None, resume=command)
        if command:
            self.console.note(f"stopped after step {step}; saved {kept}\nto go on:  {command}")
        else:
            self.console.note("stopped before the first step; nothing to save")
        return self.interrupt.exit_code

    # -------------------------------------------------------------------------------------- after

    def _save_result(self) -> dict[str, Any]:
        settings, base = self.settings, self.base
        lora = settings.method == "lora"
        folder = self.output_dir / ("adapter" if lora else "model")
        decoded = None
        if settings.export_decoded_base or (lora and base.folder is None):
            decoded = Path(self.base_path if lora else settings.export_decoded_base or "")
            models.save_decoded_base(self.model, base.tokenizer, decoded)
        models.save_result(self.model, base.tokenizer, folder)
        return {
            "saved": str(folder),
            "base": self.base_path if lora else None,
            "decoded": bool(decoded),
            "quantize": self._codec(),
        }

    def _codec(self) -> str:
        """How the base is stored: most of its packed weights; a file's own format may have been kept."""
        packed = Counter(p.codec for p in self.model.parameters() if isinstance(p, QuantizedTensor))
        return packed.most_common(1)[0][0] if packed else "none"

    def _finish(self, result: dict[str, Any]) -> None:
        progress, console = self.progress, self.console
        vram = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
        report = trainstream.memory_report(self.model)
        summary = {
            "loss_before": self.loss_before,
            "loss_after": self.loss_after,
            "perplexity_before": None if self.loss_before is None else math.exp(min(self.loss_before, 700.0)),
            "perplexity_after": None if self.loss_after is None else math.exp(min(self.loss_after, 700.0)),
            "held_out_rows_measured": len(self._measured_rows()),
            "held_out_rows": len(self.data.held_out),
            "train_loss": progress.losses[-1][1] if progress.losses else None,
            "steps": progress.step,
            "tokens": progress.tokens,
            "tokens_per_s": progress.tokens_per_s,
            "peak_ram_bytes": host_peak_bytes(),
            "peak_ram_used_bytes": self.sampler.peak_bytes,
            "ram_budget_bytes": self.session.options.ram_budget,
            "peak_vram_bytes": vram,
            "trained_parameters": sum(p.numel() for p in self.model.parameters() if p.requires_grad),
            "seconds": time.perf_counter() - self.started,
            "tiers": report["tiers"],
            "moved": report["moved"],
            "paged_groups": len(self.session.plan.paged),
            **result,
        }
        path = self.output_dir / output.RESULT_FILE
        with output.storage_errors(path):
            path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        console.event("result", **summary)
        for line in _summary_lines(summary):
            console.say(line)


def _rows_text(measured: int, available: int) -> str:
    return f"{measured} of {available} rows" + (", evenly spread" if measured < available else "")


def _summary_lines(summary: dict[str, Any]) -> Iterator[str]:
    if summary["loss_before"] is not None and summary["loss_after"] is not None:
        yield (
            f"held-out loss    {summary['loss_before']:.4f} -> {summary['loss_after']:.4f}   (perplexity "
            f"{summary['perplexity_before']:.2f} -> {summary['perplexity_after']:.2f}; "
            f"{_rows_text(summary['held_out_rows_measured'], summary['held_out_rows'])})"
        )
    yield f"speed            {summary['tokens_per_s']:.0f} tokens/s, {summary['seconds']:.0f} s in all"
    memory = f"peak memory      {format_bytes(summary['peak_ram_bytes'])} RAM"
    if summary["ram_budget_bytes"]:
        used, budget = summary["peak_ram_used_bytes"], summary["ram_budget_bytes"]
        memory = f"peak memory      {format_bytes(used)} of {format_bytes(budget)} RAM"
    yield memory + (
        f", {format_bytes(summary['peak_vram_bytes'])} VRAM" if summary["peak_vram_bytes"] else ""
    )
    yield f"where            {tiers_text(summary['tiers'])}"
    if any(summary["moved"].values()):
        moved = {name.removesuffix("_bytes").replace("_", " "): n for name, n in summary["moved"].items()}
        paged = f", {summary['paged_groups']} groups paged at the end"
        yield f"moved            {tiers_text(moved)}{paged}"
    yield f"trained          {summary['trained_parameters']:,} parameters, {summary['steps']} steps"
    yield f"saved            {summary['saved']}"
    path = str(Path(summary["saved"]).resolve())
    if summary["base"]:
        kind = "decoded base" if summary["decoded"] else "base"
        yield f"{kind:16} {summary['base']}"
        # A base kept as it was published is the one that the adapter was trained on.
        codec = summary["quantize"]
        if not summary["decoded"] and codec != "none" and getattr(registry.codec(codec), "encodes", True):
            yield (
                f"note             the adapter was trained and measured on the {codec}-decoded "
                "base; export_decoded_base=DIR saves that base"
            )
        yield "use it           from transformers import AutoModelForCausalLM; from peft import PeftModel"
        base = repr(summary["base"])
        yield f"                 base = AutoModelForCausalLM.from_pretrained({base}, dtype='auto')"
        yield f"                 model = PeftModel.from_pretrained(base, {path!r})"
    else:
        yield f"use it           transformers.AutoModelForCausalLM.from_pretrained({path!r})"


logging.getLogger("trainstream").addHandler(logging.NullHandler())
