"""A plan counts what load_model then holds: to the byte, for every published form, from headers alone."""

import json
import warnings

import pytest
import torch
import transformers
from conftest import tiny_config, tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_bitsandbytes_checkpoints import FORMS
from test_gguf_packed import write as write_gguf
from test_prequantized import CASES, EXPERTS, plain_model, write, write_experts, write_mxfp4

from ts_core.errors import CheckpointError, OptionError, StorageError
from ts_core.testing import seeded
from ts_hf import gguf_header, load_model
from ts_hf.gguf_header import read_gguf_header, spec_from_gguf
from ts_hf.header_spec import find_spec
from ts_quant import QuantizedTensor
from ts_quant.references.gguf import DECODERS

package = pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def planned(path):
    """Packed weights and their bytes, the bytes of all others, and the bytes of packed ones by block."""
    spec = find_spec(str(path), dtype="bfloat16")
    packed = [t for block in spec.blocks for t in block.tensors if t.codec != "none"]
    assert not any(t.trained for t in packed)
    others = sum(t.bytes for block in spec.blocks for t in block.tensors if t.codec == "none")
    return (
        sum(t.bytes for t in packed),
        others,
        [sum(t.bytes for t in block.tensors if t.codec != "none") for block in spec.stack],
        sum(t.numel for t in packed),
    )


def loaded(path):
    model = load_model(path)
    stack = model.model.layers
    kept = {id(p): p.detach() for p in model.parameters() if isinstance(p, QuantizedTensor)}
    assert kept
    return (
        sum(t.packed_bytes for t in kept.values()),
        sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in kept),
        [sum(kept[id(p)].packed_bytes for p in block.parameters() if id(p) in kept) for block in stack],
        sum(t.numel() for t in kept.values()),
    )


@pytest.mark.parametrize("case", CASES)
def test_published_forms(case, tmp_path):
    quantization, pack, _ = CASES[case]
    write(tmp_path, quantization, pack)
    expected = loaded(tmp_path)
    assert planned(tmp_path) == expected
    assert planned(tmp_path / "config.json") == expected  # by the method's rule, without the headers
    # Of a family that nobody knows: from the headers alone.
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "brand_new"}))
    assert planned(tmp_path) == expected


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    case=st.sampled_from(sorted(CASES)),
    hidden=st.sampled_from([64, 96]),
    inner=st.sampled_from([96, 192]),
    layers=st.integers(2, 3),
    tied=st.booleans(),
)
def test_published_forms_of_any_size(tmp_path_factory, case, hidden, inner, layers, tied):
    quantization, pack, _ = CASES[case]
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "head_dim": 16}
    with seeded(0):
        config = tiny_config(**sizes, pad_token_id=None, tie_word_embeddings=tied)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    write(folder, quantization, pack, model)
    assert planned(folder) == loaded(folder)


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_stored_one_by_one(case, tmp_path):
    write_experts(tmp_path / "model", case)
    assert planned(tmp_path / "model") == loaded(tmp_path / "model")


def test_stacked_experts(tmp_path):
    write_mxfp4(tmp_path / "model")
    assert planned(tmp_path / "model") == loaded(tmp_path / "model")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
def test_what_bitsandbytes_wrote(form, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("bitsandbytes")
    tiny_model(hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(tmp_path / "plain")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain",
        quantization_config=transformers.BitsAndBytesConfig(**FORMS[form][0]),
        dtype=torch.bfloat16,
        device_map="cpu",
    )
    theirs.save_pretrained(tmp_path / "packed")
    assert planned(tmp_path / "packed") == loaded(tmp_path / "packed")


def test_modelopts_own_file_beside_the_config(tmp_path):
    write(tmp_path, None, CASES["modelopt nvfp4"][1])
    described = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(described))
    assert planned(tmp_path) == loaded(tmp_path)


def test_what_was_exported_in_16_bits(tmp_path):
    quantization, pack, _ = CASES["awq"]

    def some(weight, name):
        return pack(weight, name) if "q_proj" in name or "down" in name else ({name: weight}, weight)

    write(tmp_path, quantization, some)
    assert planned(tmp_path) == loaded(tmp_path)


def test_a_plain_checkpoint_counts_in_the_dtype_it_is_loaded_in(tmp_path):
    plain_model().save_pretrained(tmp_path)  # in float32
    spec = find_spec(str(tmp_path), dtype="bfloat16")
    assert spec.bytes == sum(p.numel() * p.element_size() for p in load_model(tmp_path).parameters())
    assert find_spec(str(tmp_path)).bytes == 2 * spec.bytes
    assert find_spec(str(tmp_path / "model.safetensors"), dtype="bfloat16").bytes == spec.bytes


# -- GGUF


@pytest.mark.parametrize("kind", [*sorted(DECODERS), "F16", "Q2_K"])
def test_gguf_files(kind, tmp_path, tokenizer, monkeypatch):
    monkeypatch.setenv("TRAINSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    written = "Q4_0" if kind in ("F16", "Q2_K") else kind
    write_gguf(tmp_path / "m.gguf", tokenizer, written)
    if kind != written:  # the same file, were the matrices of a type that is not kept
        monkeypatch.setattr(gguf_header, "GGUF_CODECS", {})
        assert planned(tmp_path / "m.gguf")[0] == 0
        return
    assert planned(tmp_path / "m.gguf") == loaded(tmp_path / "m.gguf")
    assert planned(tmp_path) == planned(tmp_path / "m.gguf")  # the folder that holds it


def test_gguf_biases_and_tables(tmp_path, tokenizer):
    write_gguf(tmp_path / "m.gguf", tokenizer, "Q4_K", architecture="qwen2", rope_factors=torch.ones(32))
    assert planned(tmp_path / "m.gguf") == loaded(tmp_path / "m.gguf")


def test_the_header_says_what_the_package_gguf_reads(tmp_path, tokenizer):
    write_gguf(tmp_path / "m.gguf", tokenizer, "Q5_K")
    header = read_gguf_header(tmp_path / "m.gguf")
    theirs = package.GGUFReader(str(tmp_path / "m.gguf"))
    assert {t.name: t.tensor_type.name for t in theirs.tensors} == {
        name: kind for name, (kind, _) in header.tensors.items()
    }
    for tensor in theirs.tensors:
        assert header.tensors[tensor.name][1] == tuple(int(n) for n in reversed(tensor.shape))
    assert header.values["general.architecture"] == "llama"
    assert header.values["llama.embedding_length"] == 256
    assert header.values["tokenizer.ggml.tokens"] == 260


def test_ggml_s_types_have_the_package_s_numbers():
    kinds = {kind.name: int(kind) for kind in package.GGMLQuantizationType}
    ours = {name: number for number, name in enumerate(gguf_header._TYPES) if name}
    assert {name: kinds[name] for name in ours if name in kinds} == {
        name: number for name, number in ours.items() if name in kinds
    }
    assert set(kinds) & {name for name in ours} >= {"F32", "Q4_K", "BF16", "IQ4_XS"}


def test_what_is_left_to_transformers_is_decoded_as_a_whole():
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS

    from ts_hf.gguf_streaming import _ALONE

    theirs = {name for name, processor in TENSOR_PROCESSORS.items() if processor.__name__ not in _ALONE}
    assert theirs - {"t5encoder"} <= gguf_header.DECODED
    tensors = {"token_embd.weight": ("Q4_0", (64, 32)), "output_norm.weight": ("F32", (32,))}
    tensors |= {f"blk.{i}.ffn_up_exps.weight": ("Q4_0", (4, 64, 32)) for i in range(2)}
    tensors |= {f"blk.{i}.ffn_gate_inp.weight": ("F32", (4, 32)) for i in range(2)}
    values = {"general.architecture": "llama", "llama.expert_count": 4, "llama.expert_used_count": 1}
    spec = spec_from_gguf(gguf_header.GgufHeader(values, tensors), dtype="float16")
    assert spec.bytes == 2 * (64 * 32 + 32 + 2 * (4 * 64 * 32 + 4 * 32))
    assert {t.active for t in spec.stack[0].tensors} == {0.25, 1.0}
    assert "decoded to 16 bits" in spec.notes[0]


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), -5, 2**63, True, [], "x"])
@pytest.mark.parametrize("name", ["split.count", "llama.embedding_length", "llama.attention.head_count"])
def test_values_that_make_no_sense_count_as_none(name, odd):
    tensors = {"token_embd.weight": ("F16", ()), "blk.0.attn_q.weight": ("F16", (8, 8))}
    values = {"general.architecture": "llama"}
    spec = spec_from_gguf(gguf_header.GgufHeader({**values, name: odd}, tensors))
    assert spec == spec_from_gguf(gguf_header.GgufHeader(values, tensors))


def test_gguf_files_that_are_no_model(tmp_path, tokenizer):
    with pytest.raises(CheckpointError, match="GGUF"):
        find_spec(_written(tmp_path / "bad.gguf", b"GGML1234"))
    write_gguf(tmp_path / "m.gguf", tokenizer, "Q4_0")
    with pytest.raises(OptionError, match=r"2 GGUF files .*name one of them"):
        find_spec(str(tmp_path))
    with pytest.raises(StorageError, match="cannot be read"):
        read_gguf_header(tmp_path)
    with pytest.raises(OptionError, match="one of 3 parts"):
        spec_from_gguf(gguf_header.GgufHeader({"split.count": 3}, {}))
    with pytest.raises(CheckpointError, match="no layer stack"):
        spec_from_gguf(gguf_header.GgufHeader({}, {}))
    odd = {"blk.0.attn_q.weight": ("Q4_0", (3, 5))}
    with pytest.raises(CheckpointError, match="attn_q"):
        spec_from_gguf(gguf_header.GgufHeader({}, odd))


def _written(path, data):
    path.write_bytes(data)
    return str(path)


@given(data=st.binary(max_size=120), at=st.integers(0, 400), cut=st.integers(0, 400))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_a_header_or_refused(tmp_path_factory, data, at, cut):
    folder = tmp_path_factory.mktemp("bytes")
    writer = package.GGUFWriter(str(folder / "whole.gguf"), "llama")
    writer.add_block_count(1)
    writer.add_token_list(["a", "bc"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_tensor("blk.0.attn_q.weight", torch.zeros(2, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    good = (folder / "whole.gguf").read_bytes()
    for damaged in (b"GGUF" + data, good[:cut], good[:at] + data[:8] + good[at + 8 :]):
        try:
            find_spec(_written(folder / "m.gguf", damaged))
        except (CheckpointError, OptionError):
            continue
