"""The search over plans: never over a budget, the best under its own model, monotone, and no known trap."""

import dataclasses
import itertools
import math
import random

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from ts_core.cost import tables
from ts_core.errors import ArgumentError, DoesNotFitError, OptionError
from ts_core.job import Choice, Job, Packing, Room, Setting, assumed_profile
from ts_core.search import search
from ts_core.spec import BlockSpec, ModelSpec, TensorSpec, block_of
from ts_core.step import measure, predict

NF4 = Packing("nf4", 0.5625)
INT8 = Packing("int8", 1.0625)
MIB = 1 << 20


def block(name, hidden, inner, window=0):
    """A block with an attention projection and a gated MLP."""
    weights = [
        TensorSpec("self_attn.q_proj.weight", (hidden, hidden), use="matmul"),
        TensorSpec("mlp.gate_proj.weight", (inner, hidden), use="matmul"),
        TensorSpec("mlp.up_proj.weight", (inner, hidden), use="matmul"),
        TensorSpec("mlp.down_proj.weight", (hidden, inner), use="matmul"),
        TensorSpec("norm.weight", (hidden,)),
    ]
    return block_of(name, weights, hidden, query=hidden, window=window)


def model(counts=(6,), hidden=64, inner=(160, 512), vocabulary=1000, edges=True, tied=False):
    blocks = []
    for kind, count in enumerate(counts):
        start = len(blocks)
        blocks += [block(f"layers.{start + i}", hidden, inner[kind]) for i in range(count)]
    wide = TensorSpec("weight", (vocabulary, hidden), use="gather")
    if edges:
        blocks.insert(0, BlockSpec("embed", "embedding", (wide,), hidden))
        blocks.append(BlockSpec("norm", "norm", (TensorSpec("weight", (hidden,)),), hidden))
        if not tied:
            blocks.append(BlockSpec("head", "head", (dataclasses.replace(wide, use="matmul"),), hidden))
    return ModelSpec(tuple(blocks), tied)


def profile(**scale):
    """A machine on which every resource matters for a model of a few megabytes."""
    figures = {
        "h2d_bytes_per_s": 2e8,
        "d2h_bytes_per_s": 2e8,
        "both_bytes_per_s": 3e8,
        "device_copy_bytes_per_s": 1e10,
        "disk_read_bytes_per_s": 5e7,
        "disk_write_bytes_per_s": 3e7,
        "launch_s": 1e-6,
    }
    return dataclasses.replace(
        assumed_profile(**{name: value * scale.get(name, 1.0) for name, value in figures.items()}),
        rates={
            "matmul_flops_per_s": {"bfloat16/64": 1e10, "bfloat16/512": 4e10},
            "decode_weights_per_s": {"int8": 1e9, "nf4": 8e8},
            "adamw_params_per_s": {"float32": 2e7, "bfloat16": 3e7, "int8": 4e7},
        },
    )


HARDWARE = profile()


@st.composite
def problems(draw, most=4, classes=2, cpu=False):
    counts = [draw(st.integers(1, most))]
    if classes > 1 and draw(st.booleans()):
        counts.append(draw(st.integers(1, max(most // 2, 1))))
    spec = model(counts, vocabulary=draw(st.sampled_from([64, 1000, 4000])), tied=draw(st.booleans()))
    lora = draw(st.sampled_from([0, 4]))
    job = Job(
        seq_len=draw(st.sampled_from([4, 32, 128])),
        batch=draw(st.sampled_from([1, 2])),
        lora_rank=lora,
        schedules=draw(st.sampled_from([("microbatch",), ("microbatch", "block")])),
        packings=(Packing(), INT8, NF4) if lora and draw(st.booleans()) else (Packing(),),
        moments=draw(st.sampled_from([("float32",), ("float32", "bfloat16", "int8")])),
        slots=draw(st.sampled_from([(1,), (2,), (2, 3)])),
        prefer=draw(st.sampled_from(["exact", "speed"])),
    )
    hardware = profile(
        h2d_bytes_per_s=draw(st.sampled_from([0.1, 1.0, 10.0])),
        disk_read_bytes_per_s=draw(st.sampled_from([0.3, 3.0])),
    )
    share = st.floats(0.02, 3.0)
    full = spec.bytes * (1 if lora else 8) + 2 * MIB
    host = int(full * draw(share))
    room = Room(
        device=int(full * draw(share)),
        host=None if cpu else host,
        disk=draw(st.sampled_from([0, int(full * 0.5), 4 * full])),
        page_lock=None if cpu or draw(st.booleans()) else int(host * draw(st.floats(0.1, 1.0))),
    )
    return spec, job, hardware, room


def attempt(spec, job, hardware, room):
    try:
        return search(spec, job, hardware, room)
    except DoesNotFitError:
        return None


def settings_of(job):
    for packing, moments, micro, schedule, slots in itertools.product(
        job.packings, job.moments, job.rows(), job.schedules, job.slots
    ):
        if schedule == "microbatch" or micro < job.batch:
            yield Setting(packing, moments, micro, schedule, slots)


def divided(count, ways):
    """All ways to write a count as a sum of so many."""
    if ways == 1:
        return [(count,)]
    return [(n, *rest) for n in range(count + 1) for rest in divided(count - n, ways - 1)]


def every_plan(tab):
    """Places and policies of every plan there is."""
    names = ("device", "settled", "host", "disk")
    places, policies = [], []
    for count, stack, allowed in zip(tab.counts, tab.block, tab.allowed, strict=True):
        rows = divided(count, 4)
        places.append([r for r in rows if all(n == 0 or names[i] in allowed for i, n in enumerate(r))])
        policies.append(divided(count, 3) if stack else [(0, 0, 0)])
    return list(itertools.product(*places)), list(itertools.product(*policies))


def fastest_of_all(spec, job, hardware, room, setting):
    cpu = room.host is None
    tab = tables(spec, job, hardware, setting, cpu=cpu)
    places, policies = every_plan(tab)
    policy = torch.tensor(policies, dtype=torch.float64)
    best = math.inf
    for place in places:
        rows = torch.tensor([place], dtype=torch.float64).expand(len(policy), -1, -1)
        found = measure(tab, rows, policy, cpu=cpu)
        fits = found.seconds[found.fits(room)]
        best = min(best, float(fits.min()) if len(fits) else math.inf)
    return best


def random_plans(tab, generator, count):
    """Plans without any sense in them."""
    names = ("device", "settled", "host", "disk")
    place = torch.zeros(count, len(tab.counts), 4, dtype=torch.float64)
    policy = torch.zeros(count, len(tab.counts), 3, dtype=torch.float64)
    for c, (n, stack, allowed) in enumerate(zip(tab.counts, tab.block, tab.allowed, strict=True)):
        for tensor, ways in ((place, [names.index(a) for a in allowed]), (policy, [0, 1, 2])):
            if tensor is policy and not stack:
                continue
            # Not the same share for all: a random plan may well have all blocks in one place.
            weights = torch.rand(count, len(ways), generator=generator) ** 4 + 1e-9
            drawn = torch.multinomial(weights, n, replacement=True, generator=generator)
            for i, way in enumerate(ways):
                tensor[:, c, way] = (drawn == i).sum(dim=1).double()
    return place, policy


@given(problems())
def test_a_plan_is_within_every_budget(problem):
    spec, job, hardware, room = problem
    found = attempt(*problem)
    assume(found is not None)
    taken = found.prediction
    assert taken.device_bytes <= room.device
    assert taken.host_bytes <= room.host
    assert taken.disk_bytes <= room.disk
    assert taken.page_locked_bytes <= (room.host if room.page_lock is None else room.page_lock)
    assert taken.fits(room)
    # What was searched with is what one plan is predicted with.
    assert predict(spec, job, hardware, found.choice) == taken


@given(problems(most=2, classes=1))
def test_it_is_the_best_of_all_plans(problem):
    spec, job, hardware, room = problem
    job = dataclasses.replace(job, prefer="exact", packings=job.packings[-1:], moments=job.moments[:1])
    job = dataclasses.replace(job, spare_files=False, slots=job.slots[:1], batch=min(job.batch, 2))
    found = attempt(spec, job, hardware, room)
    best = min(fastest_of_all(spec, job, hardware, room, s) for s in settings_of(job))
    if found is None:
        assert best == math.inf
    else:
        assert found.prediction.step_s == pytest.approx(best, rel=2e-6)


@pytest.mark.parametrize("counts", [(2, 2), (1, 3)])
@pytest.mark.parametrize("share", [0.2, 0.5, 1.2])
def test_it_is_the_best_of_all_plans_of_two_classes(counts, share):
    spec = model(counts, edges=False)
    job = Job(seq_len=64, batch=2, lora_rank=4, slots=(2,), spare_files=False)
    full = spec.bytes + 2 * MIB
    for host in (0.15, 0.5, 4):
        room = Room(int(full * share), int(full * host), 4 * full)
        found = attempt(spec, job, HARDWARE, room)
        best = min(fastest_of_all(spec, job, HARDWARE, room, s) for s in settings_of(job))
        assert (math.inf if found is None else found.prediction.step_s) == pytest.approx(best, rel=2e-6)


@given(problems(most=2, classes=1, cpu=True))
def test_it_is_the_best_of_all_plans_on_a_machine_without_gpu(problem):
    spec, job, hardware, room = problem
    job = dataclasses.replace(job, prefer="exact", packings=job.packings[:1], moments=job.moments[:1])
    found = attempt(spec, job, hardware, room)
    best = min(fastest_of_all(spec, job, hardware, room, s) for s in settings_of(job))
    assert (math.inf if found is None else found.prediction.step_s) == pytest.approx(best, rel=2e-6)


@given(problems(most=16), st.integers(0, 2**31))
def test_no_random_plan_is_better(problem, seed):
    spec, job, hardware, room = problem
    generator = torch.Generator().manual_seed(seed)
    job = dataclasses.replace(job, prefer="exact", packings=job.packings[:1], moments=job.moments[:1])
    job = dataclasses.replace(job, slots=job.slots[-1:])
    found = attempt(spec, job, hardware, dataclasses.replace(room, disk=0) if job.spare_files else room)
    found = found or attempt(*problem[:1], job, *problem[2:])
    room = room if found is None or found.rank[0] else dataclasses.replace(room, disk=0)
    settings = list(settings_of(job))
    for setting in settings:
        tab = tables(spec, job, hardware, setting)
        plans = measure(tab, *random_plans(tab, generator, 10_000 // len(settings) + 1))
        fits = plans.seconds[plans.fits(room)]
        if len(fits):
            assert found is not None
            assert found.prediction.step_s <= float(fits.min()) * (1 + 2e-6)


@pytest.mark.parametrize("classes", [(9, 5, 4), (3, 3, 3, 3), (6, 5, 4, 3)])
def test_no_random_plan_is_better_with_many_classes(classes):
    spec = model(classes, inner=(160, 320, 96, 512), edges=False)
    job = Job(seq_len=64, batch=2, lora_rank=4, slots=(2,))
    generator = torch.Generator().manual_seed(1)
    for share in (0.3, 0.7, 1.5):
        room = Room(int(spec.bytes * share) + 2 * MIB, 3 * spec.bytes, 0)
        found = attempt(spec, job, HARDWARE, room)
        for setting in settings_of(job):
            tab = tables(spec, job, HARDWARE, setting)
            plans = measure(tab, *random_plans(tab, generator, 5_000))
            fits = plans.seconds[plans.fits(room)]
            if len(fits):
                assert found.prediction.step_s <= float(fits.min()) * (1 + 2e-6)


@given(problems(), st.sampled_from(["device", "host", "disk", "page_lock"]), st.floats(1.01, 4.0))
def test_more_of_a_budget_is_never_worse(problem, name, factor):
    spec, job, hardware, room = problem
    old = getattr(room, name)
    assume(old is not None)
    before = attempt(spec, job, hardware, room)
    assume(before is not None)
    after = attempt(spec, job, hardware, dataclasses.replace(room, **{name: int(old * factor) + MIB}))
    assert after is not None
    # Preferred formats and less use of files come first, then time.
    rank = (lambda f: (f.rank[0], f.rank[2])) if job.prefer == "speed" else (lambda f: f.rank)
    assert rank(after) <= rank(before)
    if rank(after) == rank(before):
        assert after.prediction.step_s <= before.prediction.step_s * (1 + 2e-6)


def test_fewer_blocks_resident_and_a_larger_micro_batch():
    """Keeping as many blocks as fit is a trap: every micro-batch then brings the others again."""
    spec = model((16,), hidden=64, inner=(512,), edges=False)
    job = Job(seq_len=32, batch=8, lora_rank=4, policies=("recompute",), slots=(2,))
    hardware = profile(h2d_bytes_per_s=0.03)
    weights = spec.stack[0].bytes
    room = Room(17 * weights, 64 * weights, 0)
    greedy = []
    for micro in job.rows():
        one = attempt(spec, dataclasses.replace(job, micro_batches=(micro,)), hardware, room)
        if one is not None:
            greedy.append((micro, one.choice.places[0][0], one.prediction.step_s))
    most_resident = max(greedy, key=lambda entry: entry[1])
    found = search(spec, job, hardware, room)
    assert found.choice.setting.micro > most_resident[0]
    assert found.choice.places[0][0] < most_resident[1]
    assert found.prediction.step_s < 0.8 * most_resident[2]


def test_preferred_formats_first():
    spec = model((8,), vocabulary=64)
    job = Job(seq_len=16, lora_rank=4, packings=(Packing(), INT8, NF4), slots=(2,))
    roomy = search(spec, job, HARDWARE, Room(64 * MIB, 64 * MIB))
    assert roomy.choice.setting.packing.name == "none"
    # bf16 streams rather than being packed; packing is for what fits in no other way.
    least = attempt(spec, job, HARDWARE, Room(64 * MIB, 0))
    assert least.choice.setting.packing.name == "none"
    for packing in (INT8, NF4):
        tight = Room(_least_device(spec, dataclasses.replace(job, packings=(packing,))), 0)
        assert search(spec, job, HARDWARE, tight).choice.setting.packing == packing


def _least_device(spec, job):
    low, high = 0, 64 * MIB
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if attempt(spec, job, HARDWARE, Room(middle, 0)) else (middle, high)
    return high


def test_speed_may_pack_where_that_ends_streaming():
    spec = model((8,), vocabulary=64)
    job = Job(seq_len=4, lora_rank=1, packings=(Packing(), INT8, NF4), slots=(2,), policies=("keep",))
    room = Room(int(spec.bytes * 1.1), 64 * MIB)
    slow = profile(h2d_bytes_per_s=0.05)
    exact = search(spec, job, slow, room)
    fast = search(spec, dataclasses.replace(job, prefer="speed"), slow, room)
    assert exact.choice.setting.packing.name == "none"
    assert exact.prediction.limiter == "h2d"
    assert fast.choice.setting.packing.name != "none"
    assert fast.prediction.step_s < exact.prediction.step_s


def test_smaller_moments_before_files():
    spec = model((8,))
    job = Job(seq_len=4, moments=("float32", "bfloat16", "int8"), slots=(2,))
    weights = spec.bytes
    short = Room(weights, 6 * weights, 40 * weights)  # beside bf16 moments the bf16 weights themselves
    assert search(spec, job, HARDWARE, short).choice.setting.moments != "float32"
    named = dataclasses.replace(job, spare_files=False)
    assert search(spec, named, HARDWARE, short).choice.setting.moments == "float32"
    assert search(spec, job, HARDWARE, Room(weights, 2 * weights, 40 * weights)).rank[0] == 1


def test_block_order_brings_weights_once():
    spec = model((8,), edges=False)
    hardware = profile(h2d_bytes_per_s=0.05)
    job = Job(seq_len=32, batch=4, lora_rank=1, micro_batches=(1,), slots=(2,))
    room = Room(int(spec.bytes * 0.8) + MIB // 4, 64 * MIB)
    one = search(spec, job, hardware, room)
    two = search(spec, dataclasses.replace(job, schedules=("microbatch", "block")), hardware, room)
    assert two.choice.setting.schedule == "block"
    assert two.prediction.busy_s["h2d"] < 0.5 * one.prediction.busy_s["h2d"]


def test_nothing_fits():
    with pytest.raises(DoesNotFitError, match="no plan fits"):
        search(model(), Job(), HARDWARE, Room(1000, 1000, 0))
    with pytest.raises(DoesNotFitError, match="no plan fits"):
        search(model(), Job(), HARDWARE, Room(-5, None, 0))


def test_any_plan_fits_too():
    room = Room(3 * MIB, 64 * MIB)
    found = search(model(), Job(seq_len=8), HARDWARE, room, any_plan=True)
    assert found.prediction.fits(room)


@pytest.mark.parametrize(
    ("layers", "hidden", "inner", "lora", "batch"),
    [(126, 16384, 53248, 16, 8), (126, 16384, 53248, 0, 8), (48, 5120, 13824, 16, 64)],
)
def test_large_models_of_real_shapes_have_plans(layers, hidden, inner, lora, batch):
    spec = model((layers,), hidden=hidden, inner=(inner,), vocabulary=128256)
    job = Job(seq_len=2048, batch=batch, lora_rank=lora, packings=(Packing(),))
    room = Room(72 << 30, 16 << 40, 0)
    found = search(spec, job, assumed_profile(), room)
    assert found.prediction.fits(room)
    assert sum(map(sum, found.choice.places)) == len(spec.classes()) + layers - 1


def test_more_seconds_for_more_work():
    spec = model()
    plan = Choice(
        Setting(),
        ((1, 0, 0, 0), (6, 0, 0, 0), (1, 0, 0, 0), (1, 0, 0, 0)),
        ((0, 0, 0), (6, 0, 0)) + ((0, 0, 0),) * 2,
    )
    one = predict(spec, Job(seq_len=64, lora_rank=4), HARDWARE, plan)
    longer = predict(spec, Job(seq_len=128, lora_rank=4), HARDWARE, plan)
    again = dataclasses.replace(plan, policies=((0, 0, 0), (0, 0, 6), (0, 0, 0), (0, 0, 0)))
    recomputed = predict(spec, Job(seq_len=64, lora_rank=4), HARDWARE, again)
    assert longer.step_s > one.step_s
    assert longer.device_bytes > one.device_bytes
    assert recomputed.step_s > one.step_s
    assert recomputed.device_bytes < one.device_bytes
    assert one.tokens_per_s == pytest.approx(64 / one.step_s)
    assert one.limiter in one.busy_s


def test_what_limits_a_step():
    spec, job = model((8,)), Job(seq_len=8, lora_rank=4)
    streams = Choice(
        Setting(),
        ((1, 0, 0, 0), (0, 0, 8, 0), (1, 0, 0, 0), (1, 0, 0, 0)),
        ((0, 0, 0), (8, 0, 0)) + ((0, 0, 0),) * 2,
    )
    from_files = dataclasses.replace(streams, places=((1, 0, 0, 0), (0, 0, 0, 8), (1, 0, 0, 0), (1, 0, 0, 0)))
    assert predict(spec, job, profile(h2d_bytes_per_s=0.01), streams).limiter == "h2d"
    assert predict(spec, job, profile(disk_read_bytes_per_s=0.01), from_files).limiter == "disk"
    assert predict(spec, job, profile(launch_s=1e5), streams).limiter == "launch"
    trains = Job(seq_len=8)
    slow = dataclasses.replace(HARDWARE, rates={**HARDWARE.rates, "adamw_params_per_s": {"float32": 1e4}})
    assert predict(spec, trains, slow, streams).limiter == "dram"


def test_wrong_counts_are_refused():
    with pytest.raises(ArgumentError, match="places"):
        predict(model(), Job(), HARDWARE, Choice(Setting(), ((1, 0, 0, 0),), ((0, 0, 0),)))
    with pytest.raises(ArgumentError, match="spec"):
        search(ModelSpec(()), Job(), HARDWARE, Room(1, 1, 1))
    with pytest.raises(ArgumentError, match="figures"):
        assumed_profile(speed=1.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seq_len", 0),
        ("batch", 0),
        ("lora_rank", -1),
        ("prefer", "cheap"),
        ("schedules", ("row",)),
        ("schedules", ()),
        ("moments", ("fp8",)),
        ("policies", ("drop",)),
        ("packings", ()),
        ("slots", (0,)),
        ("micro_batches", (3,)),
    ],
)
def test_jobs_are_checked(name, value):
    with pytest.raises(OptionError, match=name):
        Job(**{"batch": 4, name: value})


def test_a_list_of_plans_is_as_one_by_one():
    spec, job = model((5, 3)), Job(seq_len=16, batch=2)
    setting = Setting(micro=1, slots=1)
    tab = tables(spec, job, HARDWARE, setting)
    places, policies = random_plans(tab, torch.Generator().manual_seed(random.Random(0).randrange(99)), 20)
    every = measure(tab, places, policies)
    for index in range(20):
        choice = Choice(
            setting,
            tuple(tuple(int(n) for n in row) for row in places[index].tolist()),
            tuple(tuple(int(n) for n in row) for row in policies[index].tolist()),
        )
        assert predict(spec, job, HARDWARE, choice).step_s == pytest.approx(float(every.seconds[index]))
