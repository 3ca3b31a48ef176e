import pytest
import torch

from ts_fused import _C, _checked_lora, checked

ISAS = ("portable", "avx2", "avx512")


def usable_isas():
    best = _C.isa()
    return ISAS[: ISAS.index(best) + 1]


@pytest.fixture
def variants():
    """Runs a function under every instruction set and several thread counts, and restores both."""
    best, threads = _C.isa(), torch.get_num_threads()

    def run(function):
        results = []
        for isa in usable_isas():
            _C.set_isa(isa)
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                results.append(function())
        return results

    yield run
    _C.set_isa(best)
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _small_sizes_too(monkeypatch):
    """Patched modules run fused paths at every size; on a CPU small ones would run their own code."""
    monkeypatch.setattr(_checked_lora, "WORTH_IT", 0)
    monkeypatch.setattr(checked, "WORTH_IT", {})
