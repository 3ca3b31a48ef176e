"""From `trainstream finetune` to plain transformers and PEFT: the same held-out loss."""

import json

import pytest
import torch
from peft import PeftModel
from tiny_models import byte_tokenizer, json_events, save_tiny_model, write_texts
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from trainstream.cli import app
from trainstream.cli.data import load_data
from trainstream.cli.settings import merge
from ts_quant import dequantize, quantize

# PEFT uses a name that transformers has renamed.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]

SEQ = 16


def held_out_rows(data):
    return load_data(merge({"data": str(data), "seq_len": SEQ}), byte_tokenizer()).held_out.input_ids


def plain_loss(model, rows):
    """The loss as transformers computes it, over every predicted token."""
    total = 0.0
    with torch.no_grad():
        for row in rows:
            logits = model(input_ids=row[None]).logits[0, :-1].double()
            total += torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum").item()
    return total / (len(rows) * (SEQ - 1))


def finetune(place, *words, lr="1e-2"):
    command = ["finetune", "--json", "model=tiny", "data=texts", f"seq_len={SEQ}", "batch_size=4", "steps=12"]
    command += [f"lr={lr}", "threads=1", "device=cpu", "eval_batches=100", "output_dir=run", *words]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.stderr
    return json_events(result.stdout)[-1]


@pytest.fixture
def place(tmp_path, monkeypatch):
    save_tiny_model(tmp_path / "tiny", hidden_size=64, intermediate_size=96)
    write_texts(tmp_path / "texts")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# bf16: logits of size <= 4 rounded to 8 bits differ by up to 2**-7, the mean over tokens by far less.
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 5e-3)])
@pytest.mark.parametrize("codec", ["nf4", "int8", "none"])
def test_the_adapter_gives_the_same_loss_in_plain_peft(place, codec, dtype, tolerance):
    result = finetune(place, f"quantize={codec}", f"dtype={dtype}", "export_decoded_base=decoded")
    assert result["base"] == str(place / "decoded")
    config = json.loads((place / "run/adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(place / "decoded")
    base = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"], dtype="auto").eval()
    rows = held_out_rows(place / "texts")
    assert plain_loss(base, rows) == pytest.approx(result["loss_before"], abs=tolerance)
    model = PeftModel.from_pretrained(base, place / "run/adapter").eval()
    assert plain_loss(model, rows) == pytest.approx(result["loss_after"], abs=tolerance)
    assert result["loss_after"] < result["loss_before"] - 0.05
    assert AutoTokenizer.from_pretrained(place / "run/adapter").eos_token == "<|end|>"


def test_the_decoded_base_holds_exactly_the_decoded_weights(place):
    finetune(place, "quantize=nf4", "dtype=fp32", "export_decoded_base=decoded")
    original = AutoModelForCausalLM.from_pretrained(place / "tiny").state_dict()
    decoded = AutoModelForCausalLM.from_pretrained(place / "decoded").state_dict()
    assert decoded.keys() == original.keys()
    for name, tensor in original.items():
        in_block = ".layers." in name and tensor.dim() == 2
        expected = dequantize(quantize(tensor, "nf4")) if in_block else tensor
        assert torch.equal(decoded[name], expected), name


def test_without_export_the_adapter_names_the_original_base(place):
    result = finetune(place, "quantize=none", "dtype=fp32")
    assert result["base"] == str(place / "tiny")
    base = AutoModelForCausalLM.from_pretrained(result["base"]).eval()
    model = PeftModel.from_pretrained(base, place / "run/adapter").eval()
    assert plain_loss(model, held_out_rows(place / "texts")) == pytest.approx(result["loss_after"], abs=1e-5)


def test_a_full_fine_tune_gives_the_same_loss_in_plain_transformers(place):
    result = finetune(place, "method=full", "dtype=fp32", lr="1e-3")
    model = AutoModelForCausalLM.from_pretrained(place / "run/model").eval()
    assert plain_loss(model, held_out_rows(place / "texts")) == pytest.approx(result["loss_after"], abs=1e-5)
