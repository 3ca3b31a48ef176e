"""Where the optimizer of trained weights works: on the host, on the GPU, or some here and some there."""

import copy
import dataclasses
import gc

import pytest
import torch
from conftest import tiny_llama
from hypothesis import given
from hypothesis import strategies as st
from test_budgets import MIB, gradients_of, model_of, run
from torch import nn

import trainstream
from trainstream._budget import Limits
from trainstream._decide import Decided, decide, moment_formats
from trainstream._inventory import Inventory, reserve_for
from trainstream._options import WrapOptions
from trainstream._paging import Tiers, asked
from trainstream._tuner import Tuner
from ts_core.blocks import block_map, find_blocks
from ts_core.errors import OptionError
from ts_core.guard import GuardedParameter, guard_of
from ts_core.planner import Budgets, Layout, least
from ts_core.usage import CONTEXT_BYTES
from ts_optim import OffloadAdamW
from ts_paging.pager import WeightPager
from ts_paging.stand_in import StandIn

CUDA = torch.device("cuda")
LOTS = 1 << 50
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def decided_for(model, optimizer, budgets, cap=None, **options):
    """What `wrap()` would decide beside a GPU with these budgets; no GPU is asked."""
    checked = WrapOptions.from_kwargs(**options)
    blocks = find_blocks(model)
    want = asked(checked, len(blocks), cpu=False)
    inventory = Inventory(model, block_map(model), blocks)
    bounds = Limits(budgets, cap, lambda: 0, budgets.device)
    formats = moment_formats(optimizer, checked)
    if optimizer is None:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = OffloadAdamW(trained, moment_dtype=formats[0])
    return decide(model, inventory, blocks, CUDA, optimizer, want, bounds, checked, formats), inventory


def weights_of(model):
    return sum(p.numel() * 4 for p in model.parameters())


def test_with_room_trained_weights_settle_and_their_state_may_follow():
    model = model_of()
    decided, inventory = decided_for(model, None, Budgets(LOTS, LOTS, LOTS), capture=False)
    everything = frozenset(range(len(inventory.units)))
    assert decided.layout.paged == decided.settling == everything
    assert set(decided.layout.settled) == everything
    assert set(decided.layout.tiers) == {"host"}
    assert decided.layout.slots == 0
    assert decided.adapts
    assert not decided.governed
    assert decided.moments == "float32"
    # Weights in slots, and gradients on their way; moments, weights and gradients on the host.
    weights = weights_of(model)
    held = decided.layout.device_bytes - decided.reserve
    assert weights <= held < 1.35 * weights
    assert decided.layout.host_bytes == 4 * weights
    # Wholly resident they would take all of that on the device.
    assert sum(spec.device for spec in decided.specs) == 4 * weights
    assert sum(spec.host for spec in decided.specs) == 0


def test_offload_true_never_switches():
    decided, _ = decided_for(model_of(), None, Budgets(LOTS, LOTS, LOTS), offload=True)
    assert decided.layout.settled
    assert not decided.adapts


@pytest.mark.parametrize("kind", ["mode", "place", "frozen", "foreign"])
def test_what_does_not_work_on_the_host_stays_as_it_was(kind, monkeypatch):
    model = model_of()
    optimizer = None
    if kind == "mode":
        monkeypatch.setattr(OffloadAdamW, "mode", "gpu")
    elif kind == "place":
        optimizer = OffloadAdamW(model.parameters(), place=lambda p: "device")
    elif kind == "frozen":
        model.requires_grad_(False)
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    else:
        optimizer = torch.optim.SGD(model.parameters())
    decided, _ = decided_for(model, optimizer, Budgets(LOTS, LOTS, LOTS))
    assert decided.settling == frozenset()
    assert decided.layout.paged == frozenset()
    assert not decided.adapts


def test_short_of_room_weights_stream_first_and_settle_later():
    model = model_of()
    tight = least(decided_for(model, None, Budgets(LOTS, LOTS, LOTS))[0].specs)
    decided, inventory = decided_for(model, None, Budgets(2 * tight, LOTS, LOTS))
    assert decided.layout.paged == frozenset(range(len(inventory.units)))
    assert decided.layout.settled == ()
    assert decided.layout.slots == 2
    assert decided.adapts
    assert decided.governed


def test_no_streaming_means_slots_of_their_own_however_tight_it_is():
    model = model_of()
    weights = weights_of(model)
    decided, inventory = decided_for(
        model, None, Budgets(2 * weights, LOTS, LOTS), param_offload=False, vram_headroom=0.0
    )
    assert set(decided.layout.settled) == frozenset(range(len(inventory.units)))


def test_a_block_that_was_asked_to_stream_streams():
    decided, inventory = decided_for(model_of(), None, Budgets(LOTS, LOTS, LOTS), param_offload=[2, 5])
    names = [inventory.units[i].group.name for i in decided.layout.paged - set(decided.layout.settled)]
    assert sorted(names) == ["model.layers.2", "model.layers.5"]
    assert decided.layout.slots == 2


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_depth_of_prefetch_is_a_slot_each(depth):
    decided, _ = decided_for(
        model_of(), None, Budgets(LOTS, LOTS, LOTS), param_offload=True, prefetch_depth=depth
    )
    assert decided.layout.slots == depth + 1


# -- format of moments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "options", "expected"),
    [
        (LOTS, {}, "float32"),
        (16, {}, "float32"),
        (15.9, {}, "bfloat16"),
        (12, {}, "bfloat16"),
        (11.9, {}, "int8"),
        (10.1, {}, "int8"),
        (9, {}, "float32"),  # none fits: exact ones, in files
        (11.9, {"moment_dtype": "fp32"}, "float32"),
        (11.9, {"disk_offload": "/tmp"}, "float32"),
        (11.9, {"optimizer_mode": "gpu"}, "float32"),
        (LOTS, {"moment_dtype": "int8"}, "int8"),
    ],
)
def test_smaller_moments_where_ram_is_short(host, options, expected):
    """Bytes of RAM a trained fp32 weight: weight and gradient 8, moments 8, 4 or 2 and a bit."""
    model = model_of()
    ram = host if host == LOTS else int(host * weights_of(model) / 4)
    decided, _ = decided_for(model, None, Budgets(LOTS, ram, LOTS), **options)
    assert decided.moments == expected
    said = [line for line in decided.why if "moment_dtype=auto" in line]
    assert len(said) == ("moment_dtype" not in options)
    if expected != "float32":
        assert not said or "float32 moments would need" in said[0]
    assert ("disk" in decided.layout.tiers) == (host < 16 and expected == "float32")


def test_on_a_cpu_moments_stay_exact_and_go_to_files():
    model = model_of()
    optimizer = OffloadAdamW(model.parameters())
    assert moment_formats(None, WrapOptions()) == ["float32", "bfloat16", "int8"]
    assert moment_formats(optimizer, WrapOptions()) == ["float32"]
    checked, blocks = WrapOptions(), find_blocks(model)
    inventory = Inventory(model, block_map(model), blocks)
    budgets = Budgets(weights_of(model), None, LOTS)
    bounds = Limits(budgets, budgets.device, lambda: 0, budgets.device)
    formats = moment_formats(None, checked)
    cpu = torch.device("cpu")
    decided = decide(
        model, inventory, blocks, cpu, optimizer, asked(checked, len(blocks)), bounds, checked, formats
    )
    assert decided.moments == "float32"
    assert "disk" in decided.layout.tiers


def test_a_given_optimizer_keeps_what_it_was_made_with():
    model = tiny_llama()
    optimizer = OffloadAdamW(model.parameters(), moment_dtype="bf16")
    for option in ({"moment_dtype": "int8"}, {"optimizer_mode": "gpu"}):
        with pytest.raises(
            OptionError, match=f"option {next(iter(option))}: asked for.*make it with the one"
        ):
            trainstream.wrap(model, optimizer, **option)
    wrapped, same = trainstream.wrap(model, optimizer, moment_dtype="bf16")
    assert same is optimizer
    assert wrapped._trainstream_session.plan.numerics.moment_dtype == "bfloat16"


def test_the_option_of_wrap_is_named_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match="option optimizer_mode='gpu' needs a CUDA device"):
        trainstream.wrap(tiny_llama(), optimizer_mode="gpu")


# -- what returns, as a pure choice ----------------------------------------------------------------------


def tuner_of(model, budgets, **options):
    decided, inventory = decided_for(model, None, budgets, **options)
    checked = WrapOptions.from_kwargs(**options)
    want = asked(checked, len(inventory.blocks), cpu=False)
    bounds = Limits(budgets, None, lambda: 0, budgets.device)
    pager = WeightPager(torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainstream._tuner.link_rate", lambda device: 5e10)
        return Tuner(
            pager, inventory, decided, want, Tiers(CUDA, None, None), bounds, options=checked
        ), decided


@given(st.floats(0, 6), st.booleans(), st.booleans())
def test_what_returns_fits_and_weights_come_before_state(share, comfortable, forced):
    model = model_of()
    device = LOTS if comfortable else reserve_for(Inventory(model, block_map(model), find_blocks(model)))
    options = {"param_offload": [1, 2]} if forced else {}
    tuner, decided = tuner_of(model, Budgets(device, LOTS, LOTS), **options)
    room = int(share * weights_of(model))
    settling, returning = tuner._choose(room)
    specs = decided.specs
    before = set(decided.layout.settled)
    assert not set(settling) & set(returning)
    cost = sum(specs[i].slot for i in settling)
    cost += sum(specs[i].device - (specs[i].slot if i in before else 0) for i in returning)
    assert cost <= room
    streaming = decided.layout.paged - before - set(settling) - set(returning)
    if returning and not forced:  # nobody streams whose slot would have fitted beside what returned
        spare = room - cost + sum(specs[i].device - specs[i].slot for i in returning)
        assert all(specs[i].slot > spare for i in streaming)
    if forced:
        names = {model_name for model_name in ("model.layers.1", "model.layers.2")}
        kept = {decided.specs[i].name for i in (*settling, *returning)}
        assert not names & kept
    if share > 5 and not forced:
        assert set(returning) == decided.layout.paged


def test_what_is_needed_first_is_resident_first():
    model = model_of()
    tuner, decided = tuner_of(model, Budgets(LOTS, LOTS, LOTS))
    specs = {spec.name: (i, spec) for i, spec in enumerate(decided.specs)}
    around = sum(s.device - s.slot for s in decided.specs if s.kind != "block")
    block = specs["model.layers.0"][1]
    _, returning = tuner._choose(around + 2 * (block.device - block.slot))
    names = {decided.specs[i].name for i in returning if decided.specs[i].kind == "block"}
    assert names == {"model.layers.0", "model.layers.1"}


def test_units_with_a_common_weight_return_together_or_not_at_all():
    model = model_of()
    layers = model.model.layers
    layers[1].self_attn.q_proj = layers[0].self_attn.q_proj
    layers[2].self_attn.k_proj = layers[1].self_attn.k_proj
    layers[4].common = layers[3].common = nn.LSTM(2, 2)  # it stays on the device in any case
    tuner, decided = tuner_of(model, Budgets(LOTS, LOTS, LOTS))
    numbers = {spec.name: index for index, spec in enumerate(decided.specs)}
    chain = {numbers[f"model.layers.{i}"] for i in range(3)}
    assert chain < decided.layout.paged
    everything = sum(spec.device for spec in decided.specs)
    blocks = {index for name, index in numbers.items() if name.startswith("model.layers.")}
    whole, apart = 0, False
    for share in range(41):
        _, returning = tuner._choose(everything * share // 40)
        assert len(chain & set(returning)) in (0, 3)
        whole += chain < set(returning)
        apart |= len({3, 4} & {int(decided.specs[i].name[-1]) for i in returning if i in blocks}) == 1
    assert 0 < whole < 41
    assert apart


def test_looking_for_room_hands_out_no_memory_of_weights():
    model = model_of()
    inventory = Inventory(model, block_map(model), find_blocks(model))
    trainstream.wrap(model, None, param_offload=True, lr=1e-3)
    session = model._trainstream_session
    tuner, _ = tuner_of(model_of(), Budgets(LOTS, LOTS, LOTS))
    tuner._inventory, tuner._cpu = inventory, False
    tuner._tiers = session.tiers
    assert tuner._has_room(session, list(range(len(inventory.units))))
    paged = [p for unit in inventory.units for p in unit.pageable if guard_of(p) is not None]
    assert paged
    assert not any(guard_of(p).escaped for p in paged)
    trainstream.unwrap(model)


def test_a_chain_of_common_weights_returns_at_once():
    tuner, _ = tuner_of(model_of(), Budgets(LOTS, LOTS, LOTS))
    links = {0: {2}, 2: {0, 5}, 5: {2}}
    tuner._linked = [frozenset(links.get(index, ())) for index in range(8)]
    assert tuner._all_linked([0, 1, 2, 3, 5]) == [0, 2, 5]
    assert tuner._all_linked([1, 0, 2, 5]) == [1]
    assert tuner._all_linked([5, 2, 0]) == [5, 2, 0]


# -- on a GPU --------------------------------------------------------------------------------------------


def trained(options, steps=8, moments="float32", kind="full", watch=None):
    torch.manual_seed(0)
    settings = {"lr": 1e-2, "max_grad_norm": 0.05, "device": "cuda", "quantize": "none", **options}
    model, optimizer = trainstream.wrap(model_of(kind), None, moment_dtype=moments, **settings)
    losses = []
    for step in range(steps):
        losses += run_one(model, optimizer, step)
        if watch is not None:
            watch(step, model, optimizer)
    state = {
        name: {k: v.cpu().clone() for k, v in optimizer.state[p].items()}
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    weights = {n: p.detach().cpu().clone() for n, p in model.named_parameters()}
    return losses, weights, gradients_of(model), state, model, optimizer


def run_one(model, optimizer, step):
    ids = torch.randint(0, 512, (2, 32), generator=torch.Generator().manual_seed(step)).to("cuda")
    optimizer.zero_grad()
    torch.manual_seed(step)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return [loss.item()]


def assert_same(got, expected):
    assert got[0] == expected[0]
    for mine, theirs in zip(got[1:4], expected[1:4], strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            pairs = value.items() if isinstance(value, dict) else [("", value)]
            for key, tensor in pairs:
                other = theirs[name][key] if isinstance(value, dict) else theirs[name]
                assert torch.equal(tensor, other), (name, key)


@gpu
@needs_gpu
@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
def test_the_state_returns_and_nothing_changes(moments):
    seen = {}

    def watch(step, model, optimizer):
        session = model._trainstream_session
        kinds = {type(p) for p in model.parameters()}
        seen[step] = (
            session.adapting,
            kinds,
            len(session.plan.paged),
            {b.optimizer for b in session.plan.blocks},
        )

    host = trained({"offload": True}, moments=moments)
    mine = trained({}, moments=moments, watch=watch)
    assert_same(mine, host)
    assert seen[0][0]
    assert seen[0][1] == {GuardedParameter}
    assert seen[0][3] == {"host"}
    assert seen[7] == (False, {nn.Parameter}, 0, {"device"})
    model, optimizer = mine[4:]
    assert all(p.is_cuda and optimizer.state[p]["exp_avg"].is_cuda for p in model.parameters())
    assert not any(isinstance(m.__dict__.get("forward"), StandIn) for m in model.modules())
    held = host[4]
    assert all(type(p) is GuardedParameter for p in held.parameters())
    fills = {b.name: b.fills for b in held._trainstream_session.pager.blocks}
    assert set(fills.values()) == {8}  # once a step, not once a pass
    for each in (model, held):
        trainstream.unwrap(each)
        assert all(type(p) is nn.Parameter and p.is_cuda for p in each.parameters())
    assert run(model, optimizer, "cuda", 1) == run(held, host[5], "cuda", 1)


@gpu
@needs_gpu
@pytest.mark.parametrize("room", [40, 60, 90, 140])
def test_some_here_and_some_there_under_a_budget(room):
    steps = 32  # blocks are measured and recorded anew in each place, before what they take is known
    host = trained({"offload": True}, steps=steps)
    trainstream.unwrap(host[4])
    host = (*host[:4],)
    gc.collect()
    torch.cuda.empty_cache()
    budget = CONTEXT_BYTES + torch.cuda.memory_allocated() + room * MIB
    torch.cuda.reset_peak_memory_stats()
    mine = trained({"vram_budget": budget}, steps=steps)
    assert torch.cuda.max_memory_allocated() <= budget - CONTEXT_BYTES
    assert_same(mine, host)
    session = mine[4]._trainstream_session
    assert not session.adapting
    trainstream.unwrap(mine[4])


@gpu
@needs_gpu
def test_streaming_settled_and_resident_are_bit_equal():
    ways = [
        {"offload": True},
        {"offload": True, "param_offload": True},
        {"offload": True, "param_offload": 0.5, "recompute": True},
        {"param_offload": [0, 3], "prefetch_depth": 3},
        {"optimizer_mode": "gpu"},
        {"max_inflight_bytes": "1MiB", "activation_offload": True},
    ]
    first = None
    for options in ways:
        result = trained(options)
        trainstream.unwrap(result[4])
        first = first or result
        assert_same(result, first)


@gpu
@needs_gpu
def test_copies_and_state_dicts_while_the_state_moves():
    reference = trained({"offload": True}, steps=6)

    def watch(step, model, optimizer):
        twin = copy.deepcopy(model)
        assert all(type(p) is nn.Parameter for p in twin.parameters())
        assert model.state_dict().keys() == twin.state_dict().keys()
        saved = optimizer.state_dict()
        assert {v["exp_avg"].dtype for v in saved["state"].values()} == {torch.float32}
        optimizer.load_state_dict(saved)

    assert_same(trained({}, steps=6, watch=watch), reference)


def test_a_decision_is_plain_data():
    decided, _ = decided_for(model_of(), None, Budgets(LOTS, LOTS, LOTS))
    assert isinstance(decided, Decided)
    assert isinstance(decided.layout, Layout)
    assert dataclasses.replace(decided, adapts=False).layout == decided.layout


def test_options_reach_an_optimizer_that_was_given():
    model = tiny_llama()
    optimizer = OffloadAdamW(model.parameters(), accumulation_steps=1)
    model, same = trainstream.wrap(model, optimizer, max_grad_norm=1e-3, accumulation_steps=2)
    assert same is optimizer
    ids = torch.arange(8).view(1, 8)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert optimizer.last_grad_norm > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_micro_batches_add_up_in_fp32_paged_or_not(dtype):
    """g1 + g2 + g3 in the order of the passes, whatever the weight's own format."""
    grads = {}
    for options in ({}, {"param_offload": True}, {"param_offload": True, "recompute": True}):
        torch.manual_seed(0)
        model, _ = trainstream.wrap(tiny_llama().to(dtype), None, **options)
        parts = []
        for step in range(3):
            ids = torch.arange(8).view(1, 8) + step
            alone = copy.deepcopy(model)
            alone(input_ids=ids, labels=ids).loss.backward()
            parts.append({n: p.grad.float() for n, p in alone.named_parameters()})
            model(input_ids=ids, labels=ids).loss.backward()
        found = {n: p.grad for n, p in model.named_parameters()}
        for name, grad in found.items():
            assert grad.dtype is torch.float32, name
            assert torch.equal(grad, parts[0][name] + parts[1][name] + parts[2][name]), name
        grads = grads or found
        assert all(torch.equal(grads[name], grad) for name, grad in found.items())


def test_fp32_sums_are_told_respected_and_undone():
    model = tiny_llama().to(torch.bfloat16)
    given = OffloadAdamW(model.parameters(), accumulation_steps=None, accumulate_fp32=False)
    model, optimizer = trainstream.wrap(model, given)
    assert optimizer.accumulate_fp32 is False  # somebody has said so
    assert not any("fp32: from the second" in line for line in trainstream.memory_report(model)["events"])
    trainstream.unwrap(model)
    model, optimizer = trainstream.wrap(model, torch.optim.AdamW(model.parameters()))
    assert optimizer.accumulate_fp32
    assert any("fp32: from the second" in line for line in trainstream.memory_report(model)["events"])
    trainstream.unwrap(model)
    assert not optimizer.accumulate_fp32
    other = torch.optim.AdamW(model.parameters())
    ids = torch.arange(8).view(1, 8)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
    other.step()


def test_messages_name_parameters():
    model, optimizer = trainstream.wrap(tiny_llama(), None, max_grad_norm=1.0)
    ids = torch.arange(8).view(1, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    model.lm_head.weight.grad[0, 0] = float("nan")
    optimizer.step()
    assert optimizer.stats()["first_nonfinite"] == (1, "parameter 'lm_head.weight'")
