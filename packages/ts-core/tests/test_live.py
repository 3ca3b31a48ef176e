"""The search over a live model: exact bytes, and what options have fixed."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_search import HARDWARE, attempt, model, problems

from ts_core.advice import assign
from ts_core.constants import Constants, constants, using
from ts_core.cost import group_sizes
from ts_core.errors import DoesNotFitError
from ts_core.job import Job, Packing, Room, Setting
from ts_core.live import Live, classes_of, compute_bytes
from ts_core.planner import GroupSpec
from ts_core.search import choose, search
from ts_core.step import predict


def live_of(spec, job, **known):
    """What a live model says that is just as the spec does."""
    packings = {packing.name: packing for packing in (*job.packings, Packing())}

    def sizes(codec, moments):
        return group_sizes(spec, job, Setting(packings[codec], moments))

    trained = frozenset(i for i, g in enumerate(sizes("none", "float32")) if g.updated and g.pageable)
    count = len(spec.blocks)
    given = {"paged": (None,) * count, "policies": (None,) * count, "settling": trained, **known}
    return Live(sizes, **given)


@given(problems(most=3))
@settings(max_examples=10, deadline=None)
def test_a_live_model_of_which_nothing_else_is_known_has_the_same_plan(problem):
    spec, job, hardware, room = problem
    found, live = attempt(spec, job, hardware, room), live_of(spec, job)
    if found is None:
        with pytest.raises(DoesNotFitError):
            search(spec, job, hardware, room, live=live)
        return
    again = search(spec, job, hardware, room, live=live)
    assert again.prediction == found.prediction
    assert assign(spec, again, live) == assign(spec, found)


@given(problems(most=3, classes=1), st.data())
@settings(max_examples=10, deadline=None)
def test_what_is_fixed_stays_fixed(problem, data):
    spec, job, hardware, room = problem
    room = dataclasses.replace(room, device=8 * room.device)
    stack = [i for i, block in enumerate(spec.blocks) if block.kind == "block"]
    draw = data.draw
    paged = tuple(
        draw(st.sampled_from([None, True, False])) if i in stack else None for i in range(len(spec.blocks))
    )
    policies = tuple(draw(st.sampled_from([None, "keep", "offload", "recompute"])) for _ in spec.blocks)
    live = live_of(spec, job, paged=paged, policies=policies)
    try:
        found = search(spec, job, hardware, room, live=live)
    except DoesNotFitError:
        return
    places, chosen = assign(spec, found, live)
    for index in stack:
        assert paged[index] is None or (places[index] in ("host", "disk")) == paged[index]
        assert policies[index] in (None, chosen[index])
    assert found.prediction.fits(room)
    assert predict(spec, job, hardware, found.choice, live=live) == found.prediction


def test_state_that_is_not_there_yet_starts_on_the_host():
    spec = model((4,))
    job = Job(seq_len=4, moments=("float32", "bfloat16", "int8"), slots=(2,))
    roomy = Room(40 * spec.bytes, int(5.5 * spec.bytes), 0)
    # On the device there is room for exact moments, but a run cannot start from there.
    assert search(spec, job, HARDWARE, roomy).choice.setting.moments == "float32"
    found = choose(spec, job, HARDWARE, roomy)
    assert found.choice.setting.moments == "int8"
    assert found.rank == (0, 0, 2)
    assert all(place[1:] == (0, 0, 0) for place in found.choice.places)
    waiting = live_of(spec, job, returns=False)
    stays = choose(spec, job, HARDWARE, roomy, waiting)
    assert any(place[1] for place in stays.choice.places)
    assert (
        choose(spec, job, HARDWARE, dataclasses.replace(roomy, host=None)).choice.setting.moments == "float32"
    )


def test_blocks_that_take_different_bytes_are_of_different_classes():
    spec, job = model((4,)), Job(seq_len=4)
    plain = live_of(spec, job)

    def sizes(codec, moments):
        found = list(plain.sizes(codec, moments))
        found[2] = dataclasses.replace(found[2], paged=found[2].paged + 64)
        return found

    live = dataclasses.replace(plain, sizes=sizes)
    assert len(classes_of(spec, Setting(), live)) == len(spec.classes()) + 1
    assert classes_of(spec, Setting(), None) == spec.classes()


def test_what_cannot_leave_has_one_place():
    group = GroupSpec("a", pageable=False)
    live = Live(lambda *_: [group], (None,), (None,))
    assert live.allowed(0, ("device", "settled", "host")) == ("device", "settled")
    trains = Live(lambda *_: [GroupSpec("a")], (True,), (None,), frozenset({0}), returns=False)
    assert trains.allowed(0, ("device", "settled", "host", "disk")) == ("host", "disk")


def test_values_compute_in_the_dtype_of_the_matrices():
    assert compute_bytes(model((1,))) == 2
    wide = [dataclasses.replace(t, dtype="float32") for t in model((1,), edges=False).blocks[0].tensors]
    block = dataclasses.replace(model((1,), edges=False).blocks[0], tensors=tuple(wide))
    assert compute_bytes(dataclasses.replace(model((1,), edges=False), blocks=(block,))) == 4


def test_constants_are_others_for_a_while():
    spec, job, room = model((4,)), Job(seq_len=64), Room(1 << 30, 1 << 30)
    choice = search(spec, job, HARDWARE, room).choice
    now = predict(spec, job, HARDWARE, choice)
    with using(Constants(saved=2.0, gpu_traffic=64.0)):
        other = predict(spec, job, HARDWARE, choice)
    assert other.activation_bytes > now.activation_bytes
    assert other.busy_s["gpu"] > now.busy_s["gpu"]
    assert constants() == Constants()
    assert predict(spec, job, HARDWARE, choice) == now
