"""`trainstream verify`: a model, cut to a few layers, trained streamed and resident; a certificate."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import trainstream
import ts_hf
from trainstream._verify import Check, Verifier
from trainstream.cli import models
from trainstream.cli.console import Console
from trainstream.cli.settings import merge
from trainstream.integrations._plan_file import packed_count
from ts_core.errors import CheckpointError, DoesNotFitError, OptionError
from ts_core.memory import device_budget, format_bytes, host_budget
from ts_hf.receipt import not_printed

__all__ = ["Request", "run"]

_LAYERS = 4
_MOST_LAYERS = 8  # if that many are needed to have one of each kind
_EXPERTS = 8
_SHARE = 0.6  # of what is free
_EXPERT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
#: Bytes a parameter: a copy to start from, and the run's weights, gradients and state.
_FULL, _LORA = {2: 20.0, 4: 24.0}, 2.2


@dataclass(frozen=True)
class Request:
    """What is to be verified.

    Attributes:
        model: As typed.
        steps: Optimizer steps of each run.
        layers: How many are kept; None: the rule above.
        whole: Cut nothing.
        method: "auto", "full" or "lora".
        quantize: Codec of the frozen base, or "none".
        length: Tokens of a row.
        device: "auto", "cpu", "cuda" or "cuda:N".
        dtype: "auto" or its name.
        random: Draw the weights even if the checkpoint has some.
        trust_remote_code: Run model code that comes with it.
    """

    model: str
    steps: int = 3
    layers: int | None = None
    whole: bool = False
    method: str = "auto"
    quantize: str = "none"
    length: int = 32
    device: str = "auto"
    dtype: str = "auto"
    random: bool = False
    trust_remote_code: bool = False


@dataclass
class _Subject:
    """A model and how it came about."""

    model: Any
    method: str
    weights: str
    layers: str
    parameters: int


def _config(request: Request) -> tuple[Any, str, bool]:
    """Return the config, where weights come from, and whether there are any on this machine."""
    from transformers import AutoConfig

    builtin = request.model.lower() in ("smollm2", "smollm2-135m")
    place = str(ts_hf.smollm2_path()) if builtin else request.model
    path = Path(place).expanduser()
    if path.name == "config.json" and path.is_file():
        path = path.parent
        place = str(path)
    source = ts_hf.checkpoint.resolve(place, trust_remote_code=request.trust_remote_code, weights=False)
    folder = source.path
    options: dict[str, Any] = {"trust_remote_code": request.trust_remote_code}
    if source.kind == "gguf":
        folder, options["gguf_file"] = folder.parent, folder.name
    try:
        config = AutoConfig.from_pretrained(str(folder), **options)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{place}: its config cannot be read: {' '.join(str(error).split())}"
        ) from error
    return config, place, source.kind == "gguf" or (path.is_dir() and any(path.glob("*.safetensors")))


def _kinds(text: Any) -> int:
    """How many layers from the first on have one of each kind."""
    kinds = list(getattr(text, "layer_types", None) or [])
    return max((kinds.index(kind) + 1 for kind in set(kinds)), default=1)


def _changes(text: Any, layers: int, random: bool) -> dict[str, Any]:
    """What to change in a config to keep the first layers, and of drawn experts no more than a few."""
    found: dict[str, Any] = {"num_hidden_layers": layers}
    if getattr(text, "layer_types", None):
        found["layer_types"] = list(text.layer_types)[:layers]
    if random:
        for name in _EXPERT_NAMES:
            if (getattr(text, name, None) or 0) > _EXPERTS:
                found[name] = _EXPERTS
        for name in _CHOSEN_NAMES:
            if any(key in found for key in _EXPERT_NAMES) and getattr(text, name, None):
                found[name] = min(int(getattr(text, name)), _EXPERTS)
    return found


def _count(config: Any, request: Request) -> int:
    """Count the parameters of a config; no weight is made."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=request.trust_remote_code)
    return sum(p.numel() for p in model.parameters())


def _room(device: torch.device) -> int:
    host = host_budget().available_bytes
    return int(_SHARE * (min(host, device_budget(device).available_bytes) if device.type == "cuda" else host))


def _cut(
    config: Any, request: Request, random: bool, room: int, width: int
) -> tuple[dict[str, Any], str, int]:
    """Choose changes of the config and the method, so that the runs fit.

    Returns:
        The changes, "full" or "lora", and how many parameters are left.

    Raises:
        DoesNotFitError: Not even one layer fits.
    """
    import copy

    text = config.get_text_config()
    total = int(text.num_hidden_layers)
    wanted = request.layers or min(max(_LAYERS, _kinds(text)), _MOST_LAYERS)
    tries = (
        [total]
        if request.whole
        else [n for n in dict.fromkeys([min(wanted, total), 2, 1]) if n <= min(wanted, total)]
    )
    quantized = request.quantize != "none"
    methods = ["lora"] if quantized and request.method == "auto" else ["full", "lora"]
    methods = [request.method] if request.method != "auto" else methods
    least = 0
    for layers in tries:
        changes = {} if request.whole or (layers == total and not random) else _changes(text, layers, random)
        small = copy.deepcopy(config)
        for name, value in changes.items():
            setattr(small.get_text_config(), name, value)
        count = _count(small, request)
        for method in methods:
            least = int(count * (_FULL[width] if method == "full" else _LORA * width))
            if least <= room:
                return changes, method, count
    raise DoesNotFitError(
        f"verify {request.model}: {tries[-1]} of {total} layers need about {format_bytes(least)}, there is "
        f"room for {format_bytes(room)}; "
        + ("leave --whole out" if request.whole else "use a machine with more memory, or --dtype bfloat16")
    )


@contextlib.contextmanager
def _quiet(cut: bool) -> Iterator[None]:
    """A checkpoint of which only the first layers are read has tensors left over: that is meant."""
    from trainstream.cli.finetune import _quiet_libraries

    logger = logging.getLogger("trainstream")
    level = logger.level
    try:
        if cut:
            logger.setLevel(logging.ERROR)
        with _quiet_libraries():
            yield
    finally:
        logger.setLevel(level)


def _subject(request: Request, device: torch.device, dtype: torch.dtype) -> _Subject:
    """Load or draw the model, and say what is trained."""
    config, place, has_weights = _config(request)
    text = config.get_text_config()
    total = int(text.num_hidden_layers)
    if request.layers is not None and request.layers > total:
        raise OptionError(f"option --layers: the model has {total}, given {request.layers}")
    random = request.random or not (has_weights or request.whole)
    nested = text is not config
    changes, method, count = _cut(config, request, random or nested, _room(device), dtype.itemsize)
    random = random or (nested and bool(changes))
    torch.manual_seed(0)
    load: dict[str, Any] = {
        "quantize": request.quantize,
        "dtype": dtype,
        "trust_remote_code": request.trust_remote_code,
    }
    with _quiet(bool(changes)), not_printed():
        if random:
            for name, value in changes.items():
                setattr(text, name, value)
            model = ts_hf.load_model(config, random_weights=True, **load)
        else:
            model = ts_hf.load_model(place, **load, **changes)
        if packed_count(model) and request.method == "auto":
            method = "lora"  # what is stored packed is frozen
        if method == "lora":
            model = models.add_adapters(model, merge({"lora_r": 4}), request.model)
            _start_adapters(model)
    layers = f"{changes.get('num_hidden_layers', total)} of {total} layers"
    if any(name in changes for name in _EXPERT_NAMES):
        layers += f", {_EXPERTS} experts"
    return _Subject(model, method, "drawn at random" if random else "the checkpoint's", layers, count)


def _start_adapters(model: Any) -> None:
    """B starts at zero, which hides A from the first gradient: draw it."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)


def run(console: Console, request: Request) -> int:
    """Answer the command.

    Args:
        console: Where the certificate goes; one event "check" as each is done and one "verify" at the end.
        request: What to verify.

    Returns:
        Exit code: 0, or 1 if something differs.

    Raises:
        TrainStreamError: The model cannot be loaded, or does not fit.
    """
    device = models.choose_device(request.device)
    if request.dtype == "auto":
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    else:
        dtype = getattr(torch, merge({"dtype": request.dtype}).dtype)
    console.note(f"loading {request.model} ...")
    subject = _subject(request, device, dtype)
    facts = {
        "model": request.model,
        "layers": subject.layers,
        "parameters": subject.parameters,
        "weights": subject.weights,
        "method": subject.method,
        "quantize": request.quantize,
        "dtype": str(dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "steps": request.steps,
        "version": trainstream.__version__,
        "torch": str(torch.__version__),
    }
    verifier = Verifier(
        subject.model, device, steps=request.steps, length=request.length, progress=console.advance
    )
    console.start_bar(Verifier.RUNS, 0, unit="run")
    checks: list[Check] = []
    try:
        with _quiet(cut=True):
            for check in verifier.run():
                checks.append(check)
                console.event("check", **asdict(check))
                if not console.as_json and console.has_bar:
                    console.note(_line(check))
    finally:
        console.close_bar()
    ok = all(check.status != "failed" for check in checks)
    console.event("verify", ok=ok, **facts, checks=[asdict(check) for check in checks])
    for line in _certificate(facts, checks, ok):
        console.say(line)
    return 0 if ok else 1


def _line(check: Check) -> str:
    return f"{check.status:<8} {check.name:<20} {check.detail}"


def _certificate(facts: dict[str, Any], checks: list[Check], ok: bool) -> Iterator[str]:
    codec = "" if facts["quantize"] == "none" else f", base {facts['quantize']}"
    yield "TrainStream certificate"
    size = f"{facts['parameters'] / 1e6:.2f} M parameters, weights {facts['weights']}"
    how = f"{facts['method']}{codec}, {facts['dtype']}, AdamW, {facts['steps']} steps"
    yield f"model    {facts['model']}: {facts['layers']}, {size}"
    yield f"training {how}, on {facts['device']}"
    yield f"software trainstream {facts['version']}, torch {facts['torch']}"
    yield ""
    for check in checks:
        yield _line(check)
    yield ""
    failed = [check.name for check in checks if check.status == "failed"]
    yield (
        "VERIFIED: streaming changes no bit of this training" if ok else f"NOT VERIFIED: {', '.join(failed)}"
    )


def check_request(request: Request) -> Request:
    """Check what was typed, before anything slow.

    Raises:
        OptionError: A value outside the accepted ones.
    """
    if request.method not in ("auto", "full", "lora"):
        raise OptionError(f"option --method: expected auto, full or lora, given {request.method!r}")
    if request.method == "full" and request.quantize != "none":
        raise OptionError("option --quantize: a full fine-tune freezes nothing; use --method lora")
    if request.whole and request.layers is not None:
        raise OptionError("options --whole and --layers: give one of them")
    quantize = merge({"quantize": request.quantize}).quantize or "none"
    return replace(request, quantize=quantize)
