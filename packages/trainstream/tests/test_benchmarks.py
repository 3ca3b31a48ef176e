"""Pure parts of the benchmark scripts: options of the command line, bounds, and least bytes."""

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

FOLDER = str(Path(__file__).parents[1] / "benchmarks")


def _load(name):
    """Scripts import each other by name, as they do when one of them is run."""
    sys.path.insert(0, FOLDER)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(FOLDER)


compare, engines, stream_bound, measure = map(_load, ("compare", "engines", "stream_bound", "measure"))
quality, scenarios, verdicts = map(_load, ("quality", "scenarios", "verdicts"))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("max_grad_norm=1.0", 1.0),
        ("threads=4", 4),
        ("vram_budget=16GiB", "16GiB"),
        ("recompute=[0, 2]", [0, 2]),
        ("param_offload=true", True),
        ("device=None", None),
        ("moment_dtype=int8", "int8"),
    ],
)
def test_options_are_read_as_python_would(text, value):
    key, found = compare.option(text)
    assert (key, found) == (text.partition("=")[0], value)
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["threads", "=4", "not a name=4"])
def test_what_is_no_option_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        compare.option(text)


def test_every_engine_asks_wrap_for_what_its_name_says():
    def options(engine, kind="lora", **more):
        return engines.Setting(engine, "tiny", kind, 1, "cpu", **more).options

    assert options("stock", clip=1.0) == {}
    assert options("trainstream-nf4") == {"quantize": "nf4"}
    assert options("trainstream-stream") == {"param_offload": True, "recompute": True, "quantize": "none"}
    assert options("trainstream-stream-keep-nf4")["recompute"] is False
    budget = options("trainstream-stream", vram_budget="1GiB")
    assert budget == {"vram_budget": "1GiB", "quantize": "none", "device": "cpu"}
    full = options("trainstream-full-bf16", "full", clip=0.5, wrap={"moment_dtype": "int8"})
    assert full == {"max_grad_norm": 0.5, "moment_dtype": "int8"}
    assert [engines.Setting(e, "tiny", "full", 1, "cpu").weight_dtype for e in ("stock", "deepspeed")] == [
        "fp32",
        "bf16",
    ]


def test_a_bound_needs_both_measurements():
    parts = {"t_fwd_s": 0.1, "t_bwd_s": 0.2, "t_adamw_s": 0.3}
    found = verdicts.with_bound({"step_s": 0.6}, parts)
    assert (found["bound_s"], found["bound_frac"]) == (0.5, 1.2)
    assert "bound_s" not in verdicts.with_bound({"step_s": 0.6}, {"error": "no"})
    assert "bound_s" not in verdicts.with_bound({"error": "no"}, parts)


def _runs(**seconds):
    return [{"engine": name, "step_s": each} for name, times in seconds.items() for each in times]


def test_engines_within_ten_percent_run_three_times_and_win_beyond_their_spread():
    near = _runs(trainstream=[0.95], stock=[1.0], bnb=[2.0])
    assert verdicts.close(near) == ["trainstream", "stock"]
    (beside_stock, beside_bnb) = verdicts.pairs(near)["pairs"]
    assert (beside_stock["ratio"], beside_stock["faster"]) == (0.95, None)  # too near for one run each
    assert (beside_bnb["ratio"], beside_bnb["faster"]) == (0.475, True)
    again = _runs(trainstream=[0.9375, 1.0, 0.875], stock=[1.0, 1.0625, 1.0])
    assert verdicts.close(again) == []
    (row,) = verdicts.pairs(again)["pairs"]
    assert (row["spread_s"], row["faster"]) == (0.125, False)  # 0.0625 ahead
    (row,) = verdicts.pairs(_runs(trainstream=[0.95, 0.96, 0.94], stock=[1.0, 1.02, 1.01]))["pairs"]
    assert row["faster"] is True
    assert verdicts.pairs([{"engine": "stock", "error": "no"}, *_runs(trainstream=[1.0])])["pairs"] == []


@given(st.integers(0, 1000), st.integers(1, 3), st.integers(65, 300))
def test_documents_fill_their_rows(seed, batch, tokens):
    scenario = scenarios.Scenario("tiny", "lora", batch, tokens, accumulate=2, documents=True)
    assert scenario.tokens_per_step == 2 * batch * tokens
    rows = scenarios.draw(scenario, 50, torch.Generator().manual_seed(seed))
    again = scenarios.draw(scenario, 50, torch.Generator().manual_seed(seed))
    assert rows.ids.shape == rows.positions.shape == (batch, tokens)
    assert all(torch.equal(a, b) for a, b in ((rows.ids, again.ids), (rows.positions, again.positions)))
    for positions, ids, labels in zip(rows.positions, rows.ids, rows.labels, strict=True):
        starts = (positions == 0).nonzero().flatten().tolist()
        lengths = [b - a for a, b in zip(starts, [*starts[1:], tokens], strict=True)]
        assert starts[0] == 0
        assert all(length >= 64 for length in lengths[:-1])
        assert torch.equal(positions, torch.cat([torch.arange(length) for length in lengths]))
        assert labels[starts].eq(-100).all()
        assert torch.equal(labels[positions > 0], ids[positions > 0])


@given(st.integers(2, 40), st.integers(1, 3), st.floats(0.1, 10))
def test_least_bytes_of_a_wholly_paged_stack(blocks, slots, each):
    """Counted by a walk over the blocks, forward and back, that keeps the last ones in their slots."""
    slots = min(slots, blocks)
    held: dict[int, int] = {}
    fills = 0
    for step in range(3):
        fills = 0
        for block in [*range(blocks), *reversed(range(blocks))]:
            if held.get(block % slots) != block:
                held[block % slots] = block
                fills += 1
        assert step == 0 or fills == 2 * (blocks - slots)
    line = {
        "paged_blocks": blocks,
        "plan": {"slots": slots},
        "weights_gb": each * blocks + 1,
        "paged_gb": each * blocks,
        "peak_allocated_gb": 0.0,
    }
    assert stream_bound.least_gb("tiny", line, None) == pytest.approx(fills * each, abs=1e-9)


def test_block_bytes_are_those_of_the_model():
    import torch

    model = engines.build("tiny", torch.bfloat16, "cpu")
    block = sum(p.numel() * 2 for p in model.model.layers[0].parameters())
    assert stream_bound.block_bytes("tiny") == block


def test_the_read_probe_reads(tmp_path):
    rates = measure.read_rate(tmp_path, mib=8, threads=(1, 2), repeat=1)
    assert set(rates) == {"1", "2"}
    assert all(rate > 0 for rate in rates.values())
    assert not list(tmp_path.iterdir())


def test_the_table_of_losses_in_the_docs_is_that_of_the_results():
    lines = (Path(FOLDER) / "results" / "quality_h200.jsonl").read_text().splitlines()
    docs = Path(__file__).parents[3] / "docs" / "formats.md"
    assert quality.table([json.loads(line) for line in lines]) in docs.read_text()


def test_lines_that_were_not_measured_alike_make_no_table():
    path = Path(FOLDER) / "results" / "quality_h200.jsonl"
    none, other = [json.loads(line) for line in path.read_text().splitlines()[:2]]
    with pytest.raises(SystemExit, match="not measured alike: windows"):
        quality.table([none, {**other, "windows": 3}])
    assert quality.table([none, {**other, "error": "no"}]).count("| int8 |") == 0


def test_the_error_of_a_difference_is_that_of_its_windows():
    cell = quality.above({"losses": [1.1, 2.1, 3.1]}, {"losses": [1.0, 2.0, 3.0]}, "losses")
    assert cell == "8.166 (+10.52 +- 0.00 %)"
    assert quality.above({"losses": None}, {"losses": [1.0]}, "losses") == "-"
