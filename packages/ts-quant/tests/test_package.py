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
from ts_quant.codecs import INT8_CODEC, NF4_CODEC

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


def test_example_runs(tmp_path, capsys, monkeypatch):
    from safetensors.torch import save_file

    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file({"a.weight": make_tensor((64, 128), dtype=torch.bfloat16), "a.bias": torch.ones(64)}, source)
    monkeypatch.setattr(sys, "argv", ["quantize_file.py", str(source), str(target), "--json"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    report = json.loads(capsys.readouterr().out)
    assert report["tensors"] == 1
    assert 0.05 < report["relative_error"] < 0.15
    assert target.stat().st_size < source.stat().st_size
