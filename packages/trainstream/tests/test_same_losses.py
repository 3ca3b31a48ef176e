"""A plain loop, the Trainer, TRL and the command line: the same losses, to the last bit."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_benchmarks import _load

from trainstream.integrations._clipping import can_clip, clip_gradients_

same_losses = _load("same_losses")

pytestmark = pytest.mark.filterwarnings("ignore")  # what TRL, datasets and PEFT say about each other


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return same_losses.tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    "changes",
    [
        {"clip": 0.05, "dropout": 0.1},
        {"quantize": "none", "schedule": "linear", "accumulation": 1, "batch": 3, "dropout": 0.0},
        {"quantize": "int8", "dtype": "bf16", "clip": 100.0},
    ],
    ids=["nf4", "none", "int8-bf16"],
)
def test_every_route_gives_the_same_losses(tiny, tmp_path, changes):
    model, data = tiny
    recipe = same_losses.Recipe(model, tmp_path, data, **{"length": 24, "rate": 5e-3, **changes})
    found = {name: same_losses.run(name, recipe)["losses"] for name in same_losses.available()}
    assert {"loop", "trainer", "cli"} <= found.keys()
    first = found["loop"]
    assert len(first) == recipe.steps
    assert first[-1] < first[0]
    assert found == dict.fromkeys(found, first)


def parameters(values, dtype=torch.float32):
    made = []
    for shape, scale in values:
        p = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        p.grad = (torch.randn(shape) * scale).to(dtype)
        made.append(p)
    return made


@given(
    st.lists(
        st.tuples(st.sampled_from([(3,), (4, 5), (1, 7), (0,), (64, 33)]), st.floats(1e-3, 1e3)), min_size=1
    ),
    st.floats(1e-3, 1e3),
    st.integers(0, 9),
)
def test_clipping_is_torchs(values, limit, seed):
    torch.manual_seed(seed)
    ours = parameters(values)
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    for p, q in zip(ours, theirs, strict=True):
        q.grad = p.grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(theirs, limit)
    norm = clip_gradients_(torch.optim.SGD(ours, lr=0.1), limit)
    torch.testing.assert_close(norm, expected, rtol=2e-6, atol=0.0)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=4e-6, atol=1e-30)


def test_clipping_measures_leaves_small_ones_and_says_what_is_no_number():
    torch.manual_seed(0)
    made = parameters([((4, 5), 1.0), ((3,), 2.0)])
    made.append(torch.nn.Parameter(torch.zeros(2)))  # without a gradient
    before = [p.grad.clone() for p in made[:2]]
    optimizer = torch.optim.SGD(made, lr=0.1)
    exact = math.sqrt(sum(float(g.double().square().sum()) for g in before))
    for limit in (math.inf, 1e6):
        assert float(clip_gradients_(optimizer, limit)) == pytest.approx(exact, rel=1e-7)
        assert all(torch.equal(p.grad, g) for p, g in zip(made, before, strict=False))
    made[0].grad[0, 0] = math.nan
    assert math.isnan(float(clip_gradients_(optimizer, 1.0)))
    assert bool(made[1].grad.isnan().all())


def test_other_kinds_of_gradients_are_left_to_torch():
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    p.grad = torch.ones(3, dtype=torch.float64)
    assert not can_clip(torch.optim.SGD([p], lr=0.1))
    assert torch.equal(p.grad, torch.ones(3, dtype=torch.float64))
