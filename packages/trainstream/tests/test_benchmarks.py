"""Pure parts of the benchmark scripts: options of the command line, bounds, and least bytes."""

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest
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
quality = _load("quality")


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
    found = compare.with_bound({"step_s": 0.6}, parts)
    assert (found["bound_s"], found["bound_frac"]) == (0.5, 1.2)
    assert "bound_s" not in compare.with_bound({"step_s": 0.6}, {"error": "no"})
    assert "bound_s" not in compare.with_bound({"error": "no"}, parts)


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
    lines = (Path(FOLDER) / "results" / "quality_cpu.jsonl").read_text().splitlines()
    docs = Path(__file__).parents[3] / "docs" / "formats.md"
    assert quality.table([json.loads(line) for line in lines]) in docs.read_text()


def test_lines_that_were_not_measured_alike_make_no_table():
    path = Path(FOLDER) / "results" / "quality_cpu.jsonl"
    none, other = [json.loads(line) for line in path.read_text().splitlines()[:2]]
    with pytest.raises(SystemExit, match="not measured alike: windows"):
        quality.table([none, {**other, "windows": 3}])
    assert quality.table([none, {**other, "error": "no"}]).count("| int8 |") == 0


def test_the_error_of_a_difference_is_that_of_its_windows():
    cell = quality.above({"losses": [1.1, 2.1, 3.1]}, {"losses": [1.0, 2.0, 3.0]}, "losses")
    assert cell == "8.166 (+10.52 +- 0.00 %)"
    assert quality.above({"losses": None}, {"losses": [1.0]}, "losses") == "-"
