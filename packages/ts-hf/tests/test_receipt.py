"""What load_model prints."""

import pytest
import torch
from conftest import tiny_model

from ts_hf import load_model
from ts_hf.receipt import not_printed, receipt_text


@pytest.mark.parametrize("quantize", ["nf4", "none"])
def test_it_is_printed_once(tmp_path, capsys, monkeypatch, quantize):
    monkeypatch.delenv("RANK", raising=False)
    tiny_model().save_pretrained(tmp_path)
    capsys.readouterr()
    model = load_model(tmp_path, quantize=quantize, dtype="fp32", quant_block_size=32)
    receipt, shown = model.trainstream_receipt, capsys.readouterr().out
    assert shown == receipt_text(receipt) + "\n"
    packed = [p for p in model.parameters() if hasattr(p, "packed_bytes")]
    share = sum(p.numel() for p in packed) / sum(p.numel() for p in model.parameters())
    assert f"{100 * share:.1f} % of the parameters" in shown
    assert (f"({len(packed)} x nf4); asked for" in shown) == (quantize == "nf4")
    others = len(list(model.parameters())) - len(packed)
    assert (f"skipped   {others} parameters: " in shown) == (quantize == "nf4")
    assert "unused" not in shown


def test_what_has_no_place_is_named(tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    tiny_model().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), "odd.weight": torch.ones(2)}, path, {"format": "pt"})
    load_model(tmp_path, quantize=None)
    assert "  unused    1 tensors of the checkpoint" in (shown := capsys.readouterr().out)
    assert "first: odd.weight" in shown


def test_other_ranks_and_who_asks_for_it_print_nothing(tmp_path, capsys, monkeypatch):
    tiny_model().save_pretrained(tmp_path)
    capsys.readouterr()
    with not_printed():
        load_model(tmp_path)
    monkeypatch.setenv("RANK", "1")
    load_model(tmp_path)
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    load_model(tmp_path)
    assert capsys.readouterr().out.startswith(f"loaded {tmp_path}: ")
