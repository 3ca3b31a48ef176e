import pytest
import torch

from ts_quant import _C


def _sets():
    best = _C.isa()
    names = []
    for name in ("portable", "avx2", "avx512"):
        try:
            _C.set_isa(name)
        except ValueError:
            continue
        names.append(name)
    _C.set_isa(best)
    return names


ISA_SETS = _sets()


@pytest.fixture(params=ISA_SETS)
def isa(request):
    """Run the CPU kernels with one instruction set after the other."""
    best = _C.isa()
    _C.set_isa(request.param)
    yield request.param
    _C.set_isa(best)


@pytest.fixture
def saved_types():
    """Collect the types of the tensors that autograd keeps for backward."""
    kept = []

    def pack(tensor):
        kept.append(type(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept
