"""The package as a whole: import, codecs, example, documentation examples."""

import doctest
import importlib
import json
import pkgutil
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ts_quant
from ts_core import registry, runtime
from ts_core.testing import make_tensor
from ts_quant import _C
from ts_quant.codecs import INT8_CODEC, NF4_CODEC, encoding_names

EXAMPLE = Path(__file__).parents[1] / "examples" / "quantize_file.py"


def test_import_is_lean():
    code = (
        "import sys, torch, ts_quant; "
        "heavy = {'bitsandbytes', 'safetensors', 'transformers', 'numba', 'hypothesis', 'pytest'}; "
        "print(sorted(heavy & set(sys.modules)), torch.cuda.is_initialized())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split("\n")[0] == "[] False"


def test_uses_the_pool_of_the_process():
    assert runtime.thread_pool_capsule is not None
    assert _C.pool_address() > 0
    assert ts_quant.with_cuda == _C.with_cuda


def test_a_missing_native_module_says_how_to_install():
    code = (
        "import sys; sys.modules['ts_quant._C'] = None\n"
        "from ts_core.errors import MissingDependencyError\n"
        "try:\n    import ts_quant\n"
        "except MissingDependencyError as error:\n    print(error)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install ./packages/ts-core ./packages/ts-quant" in out.stdout


@pytest.mark.parametrize("codec", [NF4_CODEC, INT8_CODEC])
@given(numel=st.integers(0, 5000), half=st.integers(1, 100))
def test_codecs_know_their_sizes(codec, numel, half):
    packed = codec.encode(make_tensor((numel,)), 2 * half)
    assert codec.packed_bytes(numel, 2 * half) == sum(t.numel() * t.itemsize for t in packed.values())
    assert codec.packed_bytes((numel,), 2 * half) == codec.packed_bytes(numel, codec.meta(2 * half))
    for name, (dtype, shape) in codec.parts((numel,), 2 * half).items():
        assert (packed[name].dtype, tuple(packed[name].shape)) == (dtype, shape)


def test_codecs_are_registered():
    assert registry.codec("nf4") is NF4_CODEC
    assert registry.codec("int8") is INT8_CODEC
    assert isinstance(NF4_CODEC, registry.Codec)
    assert repr(NF4_CODEC) == "NestedBlockCodec('nf4')"


@given(start=st.integers(0, 5), length=st.integers(0, 5), half=st.integers(1, 12))
def test_narrow(start, length, half):
    x = make_tensor((10, 3, 8))
    packed = NF4_CODEC.encode(x, 2 * half)
    cut = NF4_CODEC.narrow(packed, (10, 3, 8), start, length, 2 * half)
    if (24 * start) % (2 * half) or (24 * length) % (2 * half):
        assert cut is None
    else:
        whole = NF4_CODEC.decode(packed, (10, 3, 8), x.dtype, 2 * half)
        part = NF4_CODEC.decode(cut, (length, 3, 8), x.dtype, 2 * half)
        assert torch.equal(part, whole[start : start + length])


@pytest.mark.parametrize(
    "name",
    sorted(m.name for m in pkgutil.walk_packages(ts_quant.__path__, "ts_quant.") if m.name != "ts_quant._C"),
)
def test_documentation_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


@pytest.mark.parametrize(
    "options",
    [["--codec", name] for name in (*encoding_names(), "fp8")]
    + [["--codec", "nf4", "--double-quant"], ["--codec", "int8", "--double-quant", "--block-size", "32"]],
    ids=" ".join,
)
def test_example_runs(options, tmp_path, capsys, monkeypatch):
    """What it writes is read back by it; names beside the packed ones and the file's metadata are kept."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    weight = make_tensor((128, 256), dtype=torch.bfloat16)
    save_file({"a.weight": weight, "a.bias": torch.ones(128)}, source, {"format": "pt"})
    for more in (["--json"], []):
        monkeypatch.setattr(sys, "argv", ["quantize_file.py", str(source), str(target), *options, *more])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    first, *others = capsys.readouterr().out.splitlines()
    report = json.loads(first)
    assert report["tensors"] == 1
    four_bit = options[1] in ("nf4", "nvfp4")
    assert (0.05 if four_bit else 0.003) < report["relative_error"] < (0.15 if four_bit else 0.04)
    assert report["bytes_after"] < (0.35 if four_bit else 0.6) * report["bytes_before"]
    assert target.stat().st_size < source.stat().st_size
    assert others[-1].startswith("1 tensors packed, ")
    with safe_open(target, "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert torch.equal(file.get_tensor("a.bias"), torch.ones(128))
