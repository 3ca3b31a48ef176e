"""Checkpoints of quantized weights: kept byte for byte, computed with as their published definition says."""

import json
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers
from conftest import tiny_config
from safetensors.torch import load_file, save_file

from ts_core import memory
from ts_core.errors import CheckpointError, DoesNotFitError, OptionError
from ts_core.testing import seeded
from ts_hf import load_model
from ts_hf.prequantized import recognise, take_quantization
from ts_quant import QuantizedTensor, quantize
from ts_quant.references import fp_published, groups

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "pad_token_id": None}


def random_bytes(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def e4m3_bytes(*shape, low=16, high=112):
    """Finite codes of both signs."""
    return torch.randint(low, high, shape, dtype=torch.uint8) | (random_bytes(*shape) & 128)


def gptq(weight, name, bits=4, v1=True, order=False, group=32):
    rows, columns = weight.shape
    codes = torch.randint(0, 1 << bits, (columns, rows))
    zeros = torch.randint(0, 1 << bits, (-(-columns // group), rows))
    scales = (torch.rand(len(zeros), rows) * 0.01).half()
    g_idx = (torch.arange(columns) // group).int()
    g_idx = g_idx[torch.randperm(columns)] if order else g_idx
    qweight, qzeros = groups.pack_gptq(codes, zeros, bits, int(v1))
    value = ((codes - zeros[g_idx.long()]).float() * scales.float()[g_idx.long()]).t()
    stem = name.removesuffix("weight")
    pieces = {"qweight": qweight, "qzeros": qzeros, "scales": scales, "g_idx": g_idx}
    return {stem + piece: tensor for piece, tensor in pieces.items()}, value


def awq(weight, name):
    rows, columns = weight.shape
    codes, zeros = torch.randint(0, 16, (columns, rows)), torch.randint(0, 16, (-(-columns // 32), rows))
    scales = (torch.rand(len(zeros), rows) * 0.01).half()
    qweight, qzeros = groups.pack_awq(codes, zeros)
    group = torch.arange(columns) // 32
    stem = name.removesuffix("weight")
    pieces = {"qweight": qweight, "qzeros": qzeros, "scales": scales}
    value = ((codes - zeros[group]).float() * scales.float()[group]).t()
    return {stem + piece: tensor for piece, tensor in pieces.items()}, value


def nvfp4(weight, name, divided=False):
    rows, columns = weight.shape
    codes, scales = random_bytes(rows, columns // 2), torch.randint(40, 70, (rows, columns // 16)).byte()
    tensor_scale = torch.tensor(0.0123) if not divided else torch.tensor([81.3])
    value = fp_published.nvfp4(codes, scales, tensor_scale, divided=divided)
    names = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
    names = names if divided else ("weight", "weight_scale", "weight_scale_2", "input_scale")
    pieces = (codes, scales.view(torch.float8_e4m3fn), tensor_scale, torch.ones(1))
    stem = name.removesuffix("weight")
    return {stem + piece: tensor for piece, tensor in zip(names, pieces, strict=True)}, value


def fp8(weight, name, kind):
    rows, columns = weight.shape
    codes = e4m3_bytes(rows, columns)
    tile = {"tensor": (rows, columns), "channel": (1, columns), "block": (32, 48), "inverse": (32, 48)}[kind]
    count = -(-rows // tile[0]), -(-columns // tile[1])
    scales = torch.rand(count) * 0.01
    scales = scales.bfloat16() if kind == "channel" else scales
    value = fp_published.fp8(codes, scales, *tile)
    stored = scales.reshape(()) if kind == "tensor" else scales
    last = "weight_scale_inv" if kind == "inverse" else "weight_scale"
    stem = name.removesuffix("weight")
    return {name: codes.view(torch.float8_e4m3fn), stem + last: stored}, value


def bnb4(weight, name):
    qt = quantize(weight, "nf4", block_size=64)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    pieces = {
        name: qt.packed["codes"].reshape(-1, 1),
        f"{name}.absmax": qt.packed["absmax"],
        f"{name}.quant_map": torch.tensor(NF4_LEVELS),
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode())).byte(),
    }
    return pieces, qt.dequantize()


def bnb8(weight, name):
    codes, absmax = torch.randint(-127, 128, weight.shape).to(torch.int8), torch.rand(len(weight)) * 0.1
    stem = name.removesuffix("weight")
    pieces = {name: codes, f"{stem}SCB": absmax, f"{name}_format": torch.tensor(0, dtype=torch.uint8)}
    return pieces, codes.float() * absmax[:, None] * 7.874015718698502e-3  # 1 / 127, as bitsandbytes has it


NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


def compressed(kind, **weights):
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"weights": weights}},
    }


def compressed_fp8(strategy, **more):
    return compressed("float-quantized", type="float", num_bits=8, strategy=strategy, **more)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
CASES = {
    "gptq": (GPTQ, gptq, "gptq"),
    "gptq v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, lambda w, n: gptq(w, n, v1=False), "gptq"),
    "gptq act-order": ({**GPTQ, "desc_act": True}, lambda w, n: gptq(w, n, order=True), "gptq"),
    "gptq 8 bits": ({**GPTQ, "bits": 8}, lambda w, n: gptq(w, n, bits=8), "gptq"),
    "gptq one group": ({**GPTQ, "group_size": -1}, lambda w, n: gptq(w, n, group=w.shape[1]), "gptq"),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq, "awq"),
    "modelopt nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4, "nvfp4_export"),
    "modelopt fp8": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        lambda w, n: fp8(w, n, "tensor"),
        "fp8_export",
    ),
    "compressed nvfp4": (
        compressed("nvfp4-pack-quantized", type="float", num_bits=4),
        lambda w, n: nvfp4(w, n, divided=True),
        "nvfp4_export",
    ),
    "compressed fp8 tensor": (compressed_fp8("tensor"), lambda w, n: fp8(w, n, "tensor"), "fp8_export"),
    "compressed fp8 channel": (compressed_fp8("channel"), lambda w, n: fp8(w, n, "channel"), "fp8_export"),
    "compressed fp8 block": (
        compressed_fp8("block", block_structure=[32, 48]),
        lambda w, n: fp8(w, n, "block"),
        "fp8_export",
    ),
    "fp8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [32, 48], "activation_scheme": "dynamic"},
        lambda w, n: fp8(w, n, "inverse"),
        "fp8_export",
    ),
    "bitsandbytes nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, bnb4, "nf4"),
    "bitsandbytes int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb8, "bnb_int8"),
}


def plain_model(**changes):
    with seeded(0):
        config = tiny_config(**SIZES, **changes)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def in_blocks(model):
    return [name for name, p in model.named_parameters() if ".layers." in name and p.dim() == 2]


def write(folder, quantization, pack, model=None):
    """Write a checkpoint in the published layout; returns what it decodes to, and the stored tensors."""
    model = plain_model() if model is None else model
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with seeded(1), torch.no_grad():
        for name in in_blocks(model):
            pieces, value = pack(state.pop(name), name)
            state |= pieces
            model.get_parameter(name).copy_(value)
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = {**model.config.to_dict(), "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return model, stored


def packed_of(model):
    return {name: p.detach() for name, p in model.named_parameters() if isinstance(p, QuantizedTensor)}


def raw(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_is_kept_and_computes_what_it_decodes_to(case, tmp_path, ids):
    quantization, pack, codec = CASES[case]
    expected, stored = write(tmp_path / "model", quantization, pack)
    model = load_model(tmp_path / "model", dtype="fp32")
    kept = packed_of(model)
    assert sorted(kept) == sorted(in_blocks(expected))
    in_file = {raw(tensor) for tensor in stored.values()}
    for name, tensor in kept.items():
        assert tensor.codec == codec
        assert torch.equal(tensor.dequantize(), expected.get_parameter(name))
        if codec != "nf4":  # its packed tensors are named and shaped alike
            assert all(raw(part) in in_file for part in tensor.packed.values())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)
    receipt = model.trainstream_receipt
    assert receipt["formats"] == {codec: len(kept)}
    assert receipt["reason"].startswith(f"kept as published: {quantization['quant_method']}")
    assert receipt["quantize"] is None
    assert receipt["decoded"] == {}
    assert receipt["unused"] == []
    assert receipt["share_packed"] > 0.5
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("case", CASES)
def test_adapters_train_on_it_and_its_bytes_stay(case, tmp_path, ids):
    quantization, pack, _ = CASES[case]
    write(tmp_path / "model", quantization, pack)
    model = load_model(tmp_path / "model")
    before = {
        f"{name}.{part}": raw(tensor)
        for name, weight in packed_of(model).items()
        for part, tensor in weight.packed.items()
    }
    with seeded(2):
        adapted = peft.get_peft_model(
            model,
            peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False),
        )
    trained = [p for p in adapted.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in trained]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    adapted(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in trained)
    optimizer.step()
    assert not any(torch.equal(p, s) for p, s in zip(trained, start, strict=True))
    weights = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): weight
        for name, weight in adapted.state_dict().items()
        if isinstance(weight, QuantizedTensor)
    }
    after = {
        f"{name}.{part}": raw(tensor)
        for name, weight in weights.items()
        for part, tensor in weight.packed.items()
    }
    assert after == before


def gpt_oss():
    config = transformers.GptOssConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=3,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        pad_token_id=0,
        eos_token_id=1,
    )
    with seeded(0):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.zero_()
    return model


def write_mxfp4(folder):
    model = gpt_oss()
    state = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    with seeded(1), torch.no_grad():
        for name in [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            experts, inputs, outputs = state.pop(name).shape
            blocks = random_bytes(experts, outputs, inputs // 32, 16)
            scales = torch.randint(112, 124, blocks.shape[:-1], dtype=torch.uint8)
            state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            value = fp_published.mxfp4(blocks.flatten(2), scales).transpose(1, 2)
            model.get_parameter(name).copy_(value)
    folder.mkdir()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = {**model.config.to_dict(), "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    return model, state


def test_mxfp4_experts_are_kept_and_computed_with(tmp_path, ids):
    expected, stored = write_mxfp4(tmp_path / "model")
    model = load_model(tmp_path / "model", attn_implementation="eager")
    kept = packed_of(model)
    assert len(kept) == 4
    for name, tensor in kept.items():
        assert tensor.codec == "mxfp4"
        assert raw(tensor.packed["codes"]) == raw(stored[f"{name}_blocks"])
        assert raw(tensor.packed["scales"]) == raw(stored[f"{name}_scales"])
        assert torch.equal(tensor.dequantize(), expected.get_parameter(name))
        assert isinstance(tensor[1], QuantizedTensor)  # one expert is decoded at a time
    expected.set_attn_implementation("eager")
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)


def test_mxfp4_is_what_transformers_decodes(tmp_path):
    write_mxfp4(tmp_path / "model")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
        dtype=torch.bfloat16,
    )
    ours = load_model(tmp_path / "model")
    for name, tensor in packed_of(ours).items():
        assert torch.equal(tensor.dequantize(), theirs.get_parameter(name)), name


def test_fp8_blocks_are_what_transformers_decodes(tmp_path):
    quantization = CASES["fp8 blocks"][0]
    write(tmp_path / "model", {**quantization, "weight_block_size": [32, 32]}, pack_32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(32, 32)),
        dtype=torch.bfloat16,
    )
    ours = load_model(tmp_path / "model")
    for name, tensor in packed_of(ours).items():
        torch.testing.assert_close(tensor.dequantize(), theirs.get_parameter(name).bfloat16())


def pack_32(weight, name):
    rows, columns = weight.shape
    codes, scales = e4m3_bytes(rows, columns), torch.rand(rows // 32, columns // 32) * 0.01
    value = fp_published.fp8(codes, scales, 32, 32)
    stem = name.removesuffix("weight")
    return {name: codes.view(torch.float8_e4m3fn), f"{stem}weight_scale_inv": scales}, value


EXPERTS = ["gptq", "awq", "modelopt nvfp4", "modelopt fp8", "fp8 blocks", "bitsandbytes int8"]


def write_experts(folder, case):
    """A mixture whose experts are stored one by one, as they are published."""
    quantization, pack, _ = CASES[case]
    with seeded(0):
        config = tiny_config(
            "qwen3_moe", **{**SIZES, "moe_intermediate_size": 32, "tie_word_embeddings": False}
        )
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    names = [n for n in state if ".layers." in n and state[n].dim() == 2 and not n.endswith("gate.weight")]
    plain = dict(state)
    with seeded(1):
        for name in names:
            pieces, value = pack(state.pop(name), name)
            state |= pieces
            plain[name] = value.contiguous()
    save_file(plain, folder / "model.safetensors", {"format": "pt"})
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    save_file({k: t.contiguous() for k, t in state.items()}, folder / "model.safetensors", {"format": "pt"})
    described = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(described))
    return expected


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_are_stacked_as_they_are_stored(case, tmp_path, ids):
    expected = write_experts(tmp_path / "model", case)
    model = load_model(tmp_path / "model", dtype="fp32")
    kept = packed_of(model)
    experts = {name: tensor for name, tensor in kept.items() if ".experts." in name}
    assert len(experts) == 4
    assert model.trainstream_receipt["decoded"] == {}
    for name, tensor in kept.items():
        assert torch.equal(tensor.dequantize(), expected.get_parameter(name))
    for tensor in experts.values():
        assert tensor.codec == "stacked"
        one = tensor[2]
        assert isinstance(one, QuantizedTensor)
        assert torch.equal(one.dequantize(), tensor.dequantize()[2])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)


def test_experts_that_are_not_stored_alike_are_decoded(tmp_path):
    write_experts(tmp_path / "model", "gptq")
    place = tmp_path / "model" / "model.safetensors"
    stored = load_file(place)
    name = next(name for name in stored if "experts.1.down_proj.g_idx" in name)
    stored[name] = stored[name].flip(0)
    save_file(stored, place, {"format": "pt"})
    model = load_model(tmp_path / "model", dtype="fp32")
    receipt = model.trainstream_receipt
    assert receipt["formats"]["stacked"] in (3, 4)
    assert set(receipt["decoded"].values()) <= {"part of a larger parameter"}


def test_what_was_exported_in_16_bits_stays(tmp_path, ids):
    def some(weight, name):
        if "layers.0" in name or "down_proj" in name:
            return {name: weight.bfloat16()}, weight.bfloat16().float()
        return gptq(weight, name)

    expected, _ = write(tmp_path / "model", GPTQ, some)
    model = load_model(tmp_path / "model", dtype="fp32")
    assert len(packed_of(model)) == 6
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)


def test_the_options_are_ignored_with_a_word(tmp_path, caplog):
    write(tmp_path / "model", GPTQ, gptq)
    with caplog.at_level("INFO", "trainstream"):
        model = load_model(tmp_path / "model", quantize="nf4", error_rank=4, double_quant=True)
    assert {tensor.codec for tensor in packed_of(model).values()} == {"gptq"}
    said = "quantize='nf4', error_rank=4, double_quant=True ignored: the checkpoint's weights are quantized"
    assert said in model.trainstream_receipt["reason"]
    assert said in caplog.text


def test_the_head_is_decoded(tmp_path, ids):
    expected, stored = write(tmp_path / "model", compressed_fp8("tensor"), lambda w, n: fp8(w, n, "tensor"))
    with seeded(3):
        pieces, value = fp8(stored["lm_head.weight"], "lm_head.weight", "channel")
    save_file(stored | pieces, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with torch.no_grad():
        expected.lm_head.weight.copy_(value)
    model = load_model(tmp_path / "model", dtype="fp32")
    assert not isinstance(model.lm_head.weight, QuantizedTensor)
    assert model.trainstream_receipt["decoded"] == {"lm_head.weight": "outside the blocks"}
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)


def test_modelopts_own_file_is_read(tmp_path):
    _, pack, codec = CASES["modelopt nvfp4"]
    write(tmp_path / "model", None, pack)
    described = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    place = tmp_path / "model" / "hf_quant_config.json"
    place.write_text(json.dumps(described))
    model = load_model(tmp_path / "model")
    assert {tensor.codec for tensor in packed_of(model).values()} == {codec}
    assert len(model.trainstream_receipt["aside"]) == len(packed_of(model))  # scales of activations
    place.write_text('{"producer": {}}')
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json"):
        load_model(tmp_path / "model")


UNKNOWN = {
    "'hqq'": {"quant_method": "hqq"},
    "'unnamed'": {"bits": 4},
    "gptq with 3 bits": {**GPTQ, "bits": 3},
    "'marlin'": {**GPTQ, "checkpoint_format": "marlin"},
    "'gemv'": {"quant_method": "awq", "version": "GEMV"},
    "W4A8_AWQ": {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
    "'pack-quantized'": compressed("pack-quantized", type="int", num_bits=4),
    "'int-quantized'": compressed("int-quantized", type="int", num_bits=8),
    "sparse": {**compressed_fp8("tensor"), "sparsity_config": {"format": "sparse-24-bitmask"}},
    "transforms": {**compressed_fp8("tensor"), "transform_config": {"config_groups": {"a": 1}}},
}


@pytest.mark.parametrize("named", UNKNOWN)
def test_what_is_not_known_is_refused_by_name(named, llama_folder):
    config = json.loads((llama_folder / "config.json").read_text())
    config["quantization_config"] = UNKNOWN[named]
    (llama_folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(OptionError, match=rf"{named}.*; read are .*save them as bf16"):
        load_model(llama_folder)


DAMAGED = {
    "quantization_config": ["fp8"],
    "config_groups": {**compressed_fp8("tensor"), "config_groups": ["group_0"]},
    "config_groups: group_0": {**compressed_fp8("tensor"), "config_groups": {"group_0": 3}},
    "weights": {**compressed_fp8("tensor"), "config_groups": {"group_0": {"weights": [8]}}},
    "sparsity_config": {**compressed_fp8("tensor"), "sparsity_config": "dense"},
}


@pytest.mark.parametrize("where", DAMAGED)
def test_a_damaged_description_is_named(where):
    config = SimpleNamespace(quantization_config=DAMAGED[where])
    with pytest.raises(OptionError, match=rf"{where}: expected named values"):
        recognise(take_quantization(config, None))


def test_stacked_matrices_do_not_share_a_tile():
    scheme = recognise({"quant_method": "fp8", "weight_block_size": [128, 128]})
    for rows in (256, 127):  # with 127, as many scales as tiles of all rows together
        codes, scales = e4m3_bytes(2, rows, 128), torch.rand(2, -(-rows // 128), 1)
        pieces = {"weight": codes.view(torch.float8_e4m3fn), "weight_scale": scales}
        if rows % 128:
            with pytest.raises(CheckpointError, match="inside a tile"):
                scheme.make("w", pieces, torch.float32)
            continue
        want = codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(128, 1)
        assert torch.equal(scheme.make("w", pieces, torch.float32).dequantize(), want)


@pytest.mark.parametrize("group_size", [32, 1 << 70])
def test_tensors_of_another_shape_than_their_format_has_are_named(group_size):
    scheme = recognise({"quant_method": "gptq", "bits": 4, "group_size": group_size})
    words = torch.zeros(8, 8, dtype=torch.int32)
    pieces = {"qweight": words, "qzeros": words[:, :1], "scales": torch.tensor(1.0)}
    with pytest.raises(CheckpointError, match="'w', stored as gptq"):
        scheme.make("w", pieces | {"g_idx": torch.arange(64).flip(0)}, torch.float32)


def damage_shape(stored):
    name = next(name for name in stored if name.endswith("qzeros"))
    return stored | {name: stored[name][:, :-1].contiguous()}


def damage_index(stored):
    name = next(name for name in stored if name.endswith("g_idx"))
    return stored | {name: stored[name] + 7}


def lose_weights(stored):
    return {name: tensor for name, tensor in stored.items() if not name.endswith("qweight")}


@pytest.mark.parametrize("damage", [damage_shape, damage_index, lose_weights])
def test_damaged_checkpoints_name_the_file(damage, tmp_path):
    write(tmp_path / "model", GPTQ, gptq)
    place = tmp_path / "model" / "model.safetensors"
    save_file(damage(load_file(place)), place, {"format": "pt"})
    with pytest.raises(CheckpointError, match="model"):
        load_model(tmp_path / "model")


def test_weights_before_whose_layer_activations_are_scaled_are_refused(tmp_path):
    quantization, pack, _ = CASES["modelopt nvfp4"]
    _, stored = write(tmp_path / "model", quantization, pack)
    name = in_blocks(plain_model())[0].removesuffix("weight") + "pre_quant_scale"
    save_file(stored | {name: torch.ones(64)}, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="pre_quant_scale"):
        load_model(tmp_path / "model")


def test_what_ram_cannot_hold_is_refused_before_it_is_read(tmp_path, monkeypatch):
    write(tmp_path / "model", GPTQ, gptq)
    little = memory.HostBudget(64 << 30, 1 << 10, None, "example")
    monkeypatch.setattr(memory, "host_budget", lambda *args: little)
    with pytest.raises(DoesNotFitError, match="disk_offload"):
        load_model(tmp_path / "model")


def test_packed_weights_live_in_files(tmp_path, ids):
    expected, _ = write(tmp_path / "model", GPTQ, gptq)
    (tmp_path / "files").mkdir()
    model = load_model(tmp_path / "model", dtype="fp32", disk_offload=tmp_path / "files")
    assert model.trainstream_receipt["file_bytes"] > 0
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)
