"""How many operations a block with adapters takes, plain and with all fused paths."""

import importlib.util
from pathlib import Path

import pytest
import torch

from ts_core.testing import devices

pytest.importorskip("peft", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")
SCRIPT = Path(__file__).parent.parent / "benchmarks" / "count_launches.py"


@pytest.fixture(scope="module")
def counting():
    spec = importlib.util.spec_from_file_location("count_launches", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Forward: 7 products of bases, 4 of inputs with A, 7 with B; two norms (one with a sum), rotary, gate,
# attention, the last sum. Two joins of several A, or four conversions of all factors of an input.
# Backward: 7 and 7 (x), 7 and 7 (B), 7 (A) products; norms, rotary, gate, attention; the norm's input is the
# residual too, and x has a gradient already.
COUNTS = {torch.bfloat16: (26, 41), torch.float32: (28, 44)}


@pytest.mark.parametrize("adapters", COUNTS)
def test_operations_of_a_block(counting, adapters):
    found = []
    for kinds in ((), counting.VARIANTS["all"]):
        block, call = counting.build(kinds, adapters, "cpu")
        runs = counting.phases(call).values()
        found.append([counting.measure(run, block, "cpu", 1, 1) for run in runs])
    plain, ours = found
    counts = tuple(each["operations"] for each in ours)
    assert all(a <= b for a, b in zip(counts, COUNTS[adapters], strict=True)), [e["list"] for e in ours]
    assert sum(counts) <= 0.45 * sum(each["operations"] for each in plain)


@pytest.mark.parametrize("device", devices()[1:])
@pytest.mark.parametrize("adapters", COUNTS)
def test_launches_of_a_block(counting, adapters, device):
    found = []
    for kinds in ((), counting.VARIANTS["all"]):
        block, call = counting.build(kinds, adapters, "cuda")
        runs = counting.phases(call).values()
        found.append(sum(counting.measure(run, block, "cuda", 1, 1)["launches"] for run in runs))
    plain, ours = found
    if plain == 0:
        pytest.skip("the profiler sees no kernels on this machine")
    assert 0 < ours <= 0.6 * plain
