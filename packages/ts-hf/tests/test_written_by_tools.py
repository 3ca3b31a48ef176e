"""Checkpoints that ModelOpt and compressed-tensors wrote themselves: kept, exact, trainable.

Each runs where its package is installed.
"""

import contextlib
import copy
import io

import peft
import pytest
import torch
from conftest import tiny_model
from safetensors.torch import load_file

from ts_hf import load_model
from ts_quant import QuantizedTensor

pytestmark = pytest.mark.filterwarnings("ignore")  # what the tools say about each other
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 128}


def plain():
    model = tiny_model(**SIZES).to(torch.bfloat16)
    model.config.architectures = [type(model).__name__]
    return model


def tokens(seed=0):
    return torch.randint(0, 97, (2, 11), generator=torch.Generator().manual_seed(seed))


def raw(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def packed_of(model):
    return {n: p for n, p in model.named_parameters() if isinstance(p, QuantizedTensor)}


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def as_published(name, stored):
    """The values of a weight by the definition of its format, from the tensors in the file."""
    stem = name.removesuffix("weight")
    if f"{stem}weight_packed" in stored:  # compressed-tensors: the tensor's scale divides
        codes, whole = stored[f"{stem}weight_packed"], 1.0 / stored[f"{stem}weight_global_scale"].float()
    elif f"{stem}weight_scale_2" in stored:  # ModelOpt: it multiplies
        codes, whole = stored[name], stored[f"{stem}weight_scale_2"].float()
    else:
        return stored[name].float() * stored[f"{stem}weight_scale"].float()
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()
    values = E2M1[nibbles & 7] * torch.where(nibbles >= 8, -1.0, 1.0)
    scales = stored[f"{stem}weight_scale"].float() * whole
    return (values.unflatten(1, (-1, 16)) * scales[..., None]).flatten(1)


def kept_and_trained(folder, codec, original, within):
    """Load what a tool wrote, compare with the format's definition, and train adapters on it."""
    model = load_model(folder)
    packed = packed_of(model)
    assert {weight.codec for weight in packed.values()} == {codec}
    assert len(packed) == 14, sorted(packed)
    stored = {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}
    in_file = {raw(tensor) for tensor in stored.values()}
    for name, weight in packed.items():
        assert all(raw(part) in in_file for part in weight.packed.values()), name
        assert torch.equal(weight.dequantize(), as_published(name, stored).to(torch.bfloat16)), name
        error = (weight.dequantize().float() - original[name]).norm() / original[name].norm()
        assert float(error) <= within, (name, float(error))
    adapters_train_on(model)


def adapters_train_on(model):
    packed = packed_of(model)
    before = {(n, k): raw(part) for n, w in packed.items() for k, part in w.packed.items()}
    torch.manual_seed(2)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    )
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(8):
        loss = adapted(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.02, losses
    after = {
        (n.removeprefix("base_model.model.").replace(".base_layer", ""), k): raw(part)
        for n, w in adapted.named_parameters()
        if isinstance(w, QuantizedTensor)
        for k, part in w.packed.items()
    }
    assert after == before


def weights_of(model):
    return {name: p.detach().float().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("config", "codec", "within"),
    [("NVFP4_DEFAULT_CFG", "nvfp4_export", 0.13), ("FP8_DEFAULT_CFG", "fp8_export", 0.04)],
)
def test_modelopt(tmp_path, config, codec, within):
    mtq = pytest.importorskip("modelopt.torch.quantization")
    export = pytest.importorskip("modelopt.torch.export")
    model = plain()
    original = weights_of(model)
    with contextlib.redirect_stdout(io.StringIO()):
        how = copy.deepcopy(getattr(mtq, config))
        weights_only(how)  # its rounding of activations in 4 bits needs a GPU
        export.export_hf_checkpoint(mtq.quantize(model, how), export_dir=str(tmp_path))
    kept_and_trained(tmp_path, codec, original, within)


def weights_only(how):
    """Take the quantizers of activations out of a ModelOpt config, which is a mapping or a list of rules."""
    rules = how["quant_cfg"]
    if isinstance(rules, dict):
        rules["*input_quantizer"] = {"enable": False}
    else:
        rules.append({"quantizer_name": "*input_quantizer", "enable": False})


@pytest.mark.parametrize(
    ("scheme", "codec", "within"),
    [
        ("FP8", "fp8_export", 0.04),
        ("FP8_DYNAMIC", "fp8_export", 0.04),
        ("NVFP4A16", "nvfp4_export", 0.13),
    ],
)
def test_compressed_tensors(tmp_path, scheme, codec, within):
    pytest.importorskip("compressed_tensors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import ModelCompressor

    model = plain()
    original = weights_of(model)
    config = quantization.QuantizationConfig(
        config_groups={scheme: ["Linear"]}, ignore=["lm_head"], quantization_status="frozen"
    )
    quantization.apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            set_scales(module, module.quantization_scheme.weights)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(str(tmp_path))
    kept_and_trained(tmp_path, codec, original, within)


def set_scales(module, args):
    """Scales by the largest magnitude, as a calibration makes them."""
    weight = module.weight.detach().float()
    if args.strategy == "tensor_group":
        whole = 448.0 * 6.0 / weight.abs().max()
        module.weight_global_scale.data.fill_(whole)
        groups = weight.unflatten(1, (-1, args.group_size)).abs().amax(-1) / 6.0
        module.weight_scale.data.copy_((groups * whole).to(module.weight_scale.dtype))
    elif args.strategy == "channel":
        module.weight_scale.data.copy_(weight.abs().amax(1, keepdim=True) / 448.0)
    else:
        module.weight_scale.data.fill_(float(weight.abs().max()) / 448.0)
    if getattr(module, "input_scale", None) is not None:
        module.input_scale.data.fill_(1.0)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_gguf(tmp_path, kind, tokenizer, monkeypatch):
    package = pytest.importorskip("gguf")
    written = pytest.importorskip("test_gguf_packed")

    def rows_of(kind, shape):
        form = package.GGMLQuantizationType[kind]
        rows = package.quants.quantize((torch.randn(shape) * 0.05).numpy(), form)
        values = package.quants.dequantize(rows, form).reshape(shape)
        return torch.from_numpy(rows.copy()), torch.from_numpy(values.copy())

    monkeypatch.setattr(written, "random_rows", rows_of)
    expected, rows = written.write(tmp_path / "m.gguf", tokenizer, kind)
    model = load_model(tmp_path / "m.gguf", dtype="fp32")
    packed = packed_of(model)
    assert len(packed) == 14
    for name, weight in packed.items():
        assert weight.codec == f"gguf_{kind.lower()}"
        assert torch.equal(weight.packed["blocks"], rows[name].flatten())
        assert torch.equal(weight.dequantize(), expected.get_parameter(name))
    adapters_train_on(model)
