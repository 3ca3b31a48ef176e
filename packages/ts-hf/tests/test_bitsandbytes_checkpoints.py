"""Checkpoints that transformers writes with bitsandbytes: kept as they are stored, and computing the same."""

import warnings

import pytest
import torch
from conftest import tiny_model
from safetensors.torch import load_file

from ts_hf import load_model
from ts_quant import QuantizedTensor

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
FOUR = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16}
FORMS = {
    "nf4": ({**FOUR, "bnb_4bit_quant_type": "nf4"}, "nf4"),
    "nf4 nested": ({**FOUR, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, "nf4"),
    "fp4": ({**FOUR, "bnb_4bit_quant_type": "fp4"}, "bnb_fp4"),
    "fp4 nested": ({**FOUR, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True}, "bnb_fp4"),
    "int8": ({"load_in_8bit": True}, "bnb_int8"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
def test_what_transformers_saved(form, tmp_path, ids):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("bitsandbytes")
        bnb = pytest.importorskip("bitsandbytes.functional")
    options, codec = FORMS[form]
    # Rows of whole blocks: bitsandbytes' CPU decode is wrong for others.
    tiny_model(hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(tmp_path / "plain")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain",
        quantization_config=transformers.BitsAndBytesConfig(**options),
        dtype=torch.bfloat16,
        device_map="cpu",
    )
    theirs.save_pretrained(tmp_path / "packed")
    stored = load_file(tmp_path / "packed" / "model.safetensors")
    model = load_model(tmp_path / "packed")
    packed = {n: p for n, p in model.named_parameters() if isinstance(p, QuantizedTensor)}
    assert {p.codec for p in packed.values()} == {codec}
    for name, weight in packed.items():
        assert weight.meta.get("double_quant", False) == ("nested" in form)
        assert torch.equal(weight.packed["codes"], stored[name].flatten())
        scales = f"{name.removesuffix('weight')}SCB" if codec == "bnb_int8" else f"{name}.absmax"
        assert torch.equal(weight.packed["row_absmax" if codec == "bnb_int8" else "absmax"], stored[scales])
        theirs_now = theirs.get_parameter(name)
        if codec != "bnb_int8":
            assert torch.equal(
                weight.dequantize(), bnb.dequantize_4bit(theirs_now.data, theirs_now.quant_state)
            )
    got, want = model(input_ids=ids).logits, theirs(input_ids=ids).logits
    # Its layers multiply in an order of their own, in 8 bits with activations rounded as well.
    assert float((got - want).norm() / want.norm()) < (0.05 if codec == "bnb_int8" else 0.01)
