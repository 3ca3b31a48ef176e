"""What stays from step to step is not looked at one by one; what was changed is seen all the same."""

import copy
import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.guard import guard
from ts_core.testing import assert_bit_equal, seeded
from ts_optim import OffloadAdamW
from ts_optim.roster import Positions, Prompt, Roster

SHAPES = ((4, 4), (3,), (2, 2, 3), (4, 4))


def build(dtype, guarded, device="cpu", **options):
    """Make parameters of one dtype, or of two in turn, and their optimizer."""
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    with seeded(1):
        params = [
            nn.Parameter(torch.randn(shape).to(device, dtypes[i % len(dtypes)]))
            for i, shape in enumerate(SHAPES)
        ]
    for i, p in enumerate(params if guarded else ()):
        guard(p, lambda p, g: None).rank = i % 2
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.3}]
    return params, OffloadAdamW(groups, lr=0.1, accumulation_steps=None, **options)


def fill(params, seed):
    with seeded(seed):
        for p in params:
            p.grad = torch.randn(p.shape).to(p.device, p.dtype)


@torch.no_grad()
def write(p, o):
    p.mul_(0.5)


def write_past(p, o):
    p.data.mul_(0.5)


def exchange_memory(p, o):
    p.data = p.data.clone() + 1


def transpose(p, o):
    """Same address, dtype and shape for a square; other elements."""
    if p.dim() == 2:
        p.data = p.data.t()


def reshape(p, o):
    p.data = p.data.reshape(-1)
    for name, t in o.state[p].items():
        if name not in ("step", "note") and not name.endswith("_scale"):
            t.data = t.data.reshape(-1)
    p.grad = p.grad.reshape(-1)


def leave_gaps(p, o):
    p.data = torch.stack([p.data, p.data], -1)[..., 0]


def exchange_tensor(p, o):
    if "step" in o.state[p]:
        o.state[p]["exp_avg"] = o.state[p]["exp_avg"].clone().fill_(1)


def exchange_counter(p, o):
    if "step" in o.state[p]:
        o.state[p]["step"] = torch.tensor(7.0)


def exchange_entry(p, o):
    if "step" in o.state[p]:
        o.state[p] = {name: t * 2 if name == "exp_avg_sq" else t for name, t in o.state[p].items()}


def write_state(p, o):
    if "step" in o.state[p]:
        o.state[p]["exp_avg_sq"].mul_(4)


def drop_entry(p, o):
    o.state.pop(p, None)


def drop_moment(p, o):
    if "step" in o.state[p]:
        o.state[p].pop("master", None)


def reorder_entry(p, o):
    if "step" in o.state[p]:
        o.state[p]["step"] = o.state[p].pop("step")


def foreign_name(p, o):
    o.state[p].setdefault("note", "mine")


def assign_state(p, o):
    o.state = copy.copy(o.state)


def no_gradient(p, o):
    p.grad = None


def wide_gradient(p, o):
    p.grad_dtype = None
    p.grad = p.grad.float() * 1.0001


def widest_gradient(p, o):
    p.grad_dtype = None
    p.grad = p.grad.double()


def transposed_gradient(p, o):
    if p.dim() == 2:
        p.grad = p.grad.t().contiguous().t()


def gradient_with_gaps(p, o):
    p.grad = torch.stack([p.grad, p.grad], -1)[..., 0]


def gradient_with_history(p, o):
    p.grad = (p.grad.clone().requires_grad_() * 2).detach().requires_grad_()


def subclass_gradient(p, o):
    p.grad = p.grad.as_subclass(nn.Parameter)


def narrow(p, o):
    p.data = p.data.to(torch.float16)
    p.grad = None
    p.grad = torch.ones_like(p.data)


def other_group(p, o):
    group = next(g for g in o.param_groups if any(q is p for q in g["params"]))
    at = next(i for i, q in enumerate(group["params"]) if q is p)
    del group["params"][at]
    o.param_groups[0]["params"].insert(0, p)


def leave_groups(p, o):
    for group in o.param_groups:
        group["params"] = [q for q in group["params"] if q is not p]


def twice(p, o):
    o.param_groups[1]["params"].append(p)


def hyperparameters(p, o):
    o.param_groups[1].update(lr=0.01, weight_decay=0.5)


def freeze(p, o):
    p.requires_grad_(False)


def become_guarded(p, o):
    guard(p, lambda p, g: None)


def load(p, o):
    o.load_state_dict(o.state_dict())


def move(p, o):
    o.set_memory(lambda p: None)
    o.rehouse([p])


EDITS = [
    write, write_past, exchange_memory, transpose, reshape, leave_gaps, exchange_tensor, exchange_counter,
    exchange_entry, write_state, drop_entry, drop_moment, reorder_entry, foreign_name, assign_state,
    no_gradient, wide_gradient, widest_gradient, transposed_gradient, gradient_with_gaps,
    gradient_with_history, subclass_gradient, narrow, other_group, leave_groups, twice, hyperparameters,
    freeze, become_guarded, load, move,
]  # fmt: skip


def run(history, dtype, guarded, one_by_one, **options):
    """Return what a run ends with, or how it failed."""
    params, optimizer = build(dtype, guarded, **options)
    try:
        for seed, edits in enumerate(history):
            fill(params, seed)
            for edit, at in edits:
                edit(params[at], optimizer)
            if one_by_one:
                optimizer._roster = None
            optimizer.step()
        optimizer.synchronize()
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error), [], []
    return "", params, [optimizer.state[p] for p in params]


def compare(history, dtype, guarded, **options):
    a, b = (run(history, dtype, guarded, slow, **options) for slow in (False, True))
    assert a[0] == b[0]
    for p, q in zip(a[1], b[1], strict=True):
        assert_bit_equal(p.detach().as_subclass(torch.Tensor), q.detach().as_subclass(torch.Tensor))
    for ours, theirs in zip(a[2], b[2], strict=True):
        assert ours.keys() == theirs.keys()
        for name, t in ours.items():
            if isinstance(t, torch.Tensor):
                assert_bit_equal(t.detach(), theirs[name].detach())


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("edit", EDITS)
def test_one_edit_after_steps_without_any(edit, dtype, guarded):
    for at in (0, 3):
        compare([[], [], [], [(edit, at)], [], []], dtype, guarded)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("dtype", [torch.float32, (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("edit", EDITS)
def test_one_edit_of_parameters_on_a_gpu(edit, dtype, place):
    compare([[], [], [], [(edit, 1)], [], []], dtype, False, device="cuda", place=lambda p: place)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_takes_the_gradients_themselves(dtype):
    params, optimizer = build(dtype, False, device="cuda")
    for seed in range(3):
        fill(params, seed)
        optimizer.step()
    fill(params, 4)
    works = optimizer._found()
    assert isinstance(works, Prompt)
    assert all(work.grad is p.grad for work, p in zip(works, params, strict=True))


@pytest.mark.parametrize("guarded", [False, True])
@given(
    history=st.lists(
        st.lists(st.tuples(st.sampled_from(EDITS), st.integers(0, 3)), max_size=2), min_size=2, max_size=6
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    clip=st.sampled_from([None, 0.5]),
    moments=st.sampled_from(["float32", "int8"]),
)
def test_any_history_gives_the_bits_of_looking_one_by_one(guarded, history, dtype, clip, moments):
    compare(history, dtype, guarded, max_grad_norm=clip, moment_dtype=moments)


@pytest.mark.parametrize("edit", [no_gradient, transposed_gradient, exchange_memory, hyperparameters, narrow])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_grad_norm": 0.5},
        {"moment_dtype": "int8", "ema": 0.9, "seed": 3},
        {"moment_dtype": "bfloat16", "measure_updates": True, "skip_nonfinite": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_parameters_of_two_dtypes_keep_their_calls(options, edit):
    dtypes = (torch.float32, torch.bfloat16)
    compare([[], [], [], [(edit, 1)], [], [], []], dtypes, False, **options)


@pytest.mark.parametrize("dtype", [torch.float32, (torch.bfloat16, torch.float32)])
def test_steps_without_changes_are_prompt_and_keep_no_gradient(dtype):
    params, optimizer = build(dtype, False)
    for seed in range(3):
        fill(params, seed)
        optimizer.step()
    fill(params, 4)
    works = optimizer._found()
    assert isinstance(works, Prompt)
    assert len(works) == len(params)
    assert [id(work.slot.param) for work in works] == [id(p) for p in params]
    assert works[1].grad is params[1].grad
    del works
    optimizer.step()
    gone = [weakref.ref(p.grad) for p in params]
    optimizer.zero_grad()
    gc.collect()
    assert all(each() is None for each in gone)


def test_a_parameter_guarded_between_steps_waits_from_then_on():
    params, optimizer = build(torch.float32, False)
    for seed in range(3):
        fill(params, seed)
        optimizer.step()
    guard(params[2], lambda p, g: None)
    fill(params, 4)
    assert [work.waits for work in optimizer._found()] == [p is params[2] for p in params]


@pytest.mark.parametrize("guarded", [False, True])
def test_an_edit_between_steps_is_not_lost(guarded):
    """Against values computed here: the same outcome twice could be wrong twice."""
    for edit in (exchange_memory, transpose):
        params, optimizer = build(torch.float32, guarded, weight_decay=0.0)
        for seed in range(3):
            fill(params, seed)
            optimizer.step()
        edit(params[0], optimizer)
        expected = params[0].detach().clone()
        fill(params, 9)
        for p in params:
            p.grad.zero_()
        moment = optimizer.state[params[0]]["exp_avg"].clone() * 0.9
        square = optimizer.state[params[0]]["exp_avg_sq"].clone() * 0.999
        optimizer.step()
        step = 0.1 / (1 - 0.9**4) * moment / ((square / (1 - 0.999**4)).sqrt() + 1e-8)
        torch.testing.assert_close(params[0].detach().as_subclass(torch.Tensor), expected - step)


def test_a_sparse_gradient_is_refused_after_steps_with_dense_ones():
    params, optimizer = build(torch.float32, False)
    for seed in range(2):
        fill(params, seed)
        optimizer.step()
    before = [p.detach().clone() for p in params]
    fill(params, 3)
    params[0].grad = params[0].grad.to_sparse()
    with pytest.raises(TypeError, match="dense gradient"):
        optimizer.step()
    for p, old in zip(params, before, strict=True):
        assert_bit_equal(p.detach(), old)


@given(
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    picks=st.lists(st.booleans(), min_size=9, max_size=9),
)
def test_a_roster_lists_those_that_have_a_gradient(sizes, picks):
    params = [[nn.Parameter(torch.ones(2)) for _ in range(size)] for size in sizes]
    groups = [{"params": each} for each in params]
    if not any(sizes):
        return
    optimizer = OffloadAdamW([dict(group) for group in groups])
    positions = Positions(optimizer.param_groups)
    assert [(i, id(p)) for i, _, p in positions.all] == list(
        enumerate(id(p) for each in params for p in each)
    )
    flat = [p for each in params for p in each]
    fill(flat, 0)
    optimizer.step()
    roster = Roster(positions, optimizer._slots, optimizer._state)
    assert positions.current(optimizer.param_groups)
    assert roster.current(optimizer._slots, optimizer._state)
    for p, pick in zip(flat, picks, strict=False):
        p.grad = torch.ones(2) if pick else None
    works = roster.works(sums=True)
    assert [id(work.slot.param) for work in works] == [
        id(p) for p, pick in zip(flat, picks, strict=False) if pick
    ]
    assert all(work.grad.data_ptr() == work.slot.param.grad.data_ptr() for work in works)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert not positions.current(optimizer.param_groups)
