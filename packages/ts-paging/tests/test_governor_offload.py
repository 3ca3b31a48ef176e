"""How many blocks offload where they have no room on the device: within bytes of RAM, evenly, bit for bit."""

import itertools

from hypothesis import given
from hypothesis import strategies as st
from test_governor import DEPTH, batch, build, govern, saved_bytes, step

from ts_core.testing import assert_bit_equal
from ts_paging.governor import ActivationGovernor


def governed(offers=(True,) * DEPTH, managed="recompute", **options):
    model = build()
    pager, old, used = govern(model, managed=managed, **options)
    fallback = [managed] * DEPTH if isinstance(managed, str) else managed
    made = ActivationGovernor(pager.blocks, fallback, used, old.limit, old.room, None, offers)
    made.offloads = 0
    pager.governor = made
    return model, pager, made, used


def test_nothing_offloads_before_it_was_measured_and_asked_for():
    model, pager, governor, _ = governed(room=100, managed="offload", offers=())
    step(model, batch())
    assert governor.policies == ["keep", *["recompute"] * (DEPTH - 1)]
    assert pager.activations.parked == 0
    governor.learn(0)
    step(model, batch())
    assert governor.policies == ["recompute"] * DEPTH
    assert governor.offerable == DEPTH
    assert governor.each_offloaded == saved_bytes(4)
    governor.offloads = 2
    governor.refresh()
    assert governor.policies == ["offload", "recompute", "offload", "recompute"]
    step(model, batch())
    assert governor.policies == ["offload", "recompute", "offload", "recompute"]
    assert pager.activations.parked > 0
    assert governor.passed == 3 * batch().nbytes


def test_what_has_room_on_the_device_stays_there():
    each = saved_bytes(4)
    model, _, governor, _ = governed(room=100 + 2 * each)
    step(model, batch())
    governor.learn(0)
    governor.offloads = DEPTH
    step(model, batch())
    assert governor.policies == ["offload", "offload", "keep", "keep"]
    governor.flight = each  # copies under way hold a block's bytes on the device
    step(model, batch())
    assert governor.policies == ["offload", "offload", "offload", "keep"]
    governor.learn(0)  # now it is part of what a step was seen to take
    assert governor.flight == 0


def test_larger_inputs_offload_fewer_blocks_within_the_same_ram():
    model, _, governor, _ = governed(room=100)
    step(model, batch(4))
    governor.learn(0)
    governor.offloads, governor.ram = DEPTH, 4 * saved_bytes(4)
    for rows, count in ((4, 4), (8, 2), (16, 1), (17, 0), (4, 4)):
        step(model, batch(rows))
        assert governor.policies.count("offload") == count
        assert governor.policies.count("recompute") == DEPTH - count


def test_what_is_too_small_to_offload_recomputes():
    model, pager, governor, _ = governed(room=100)
    pager.min_offload_bytes = 1 << 20
    step(model, batch())
    governor.learn(0)
    governor.offloads = DEPTH
    step(model, batch())
    assert governor.each_offloaded == 0
    assert governor.policies == ["recompute"] * DEPTH


def test_only_those_that_may():
    offers = [False, True, False, True]
    model, _, governor, _ = governed(offers, room=100, managed=["recompute", "offload", None, "offload"])
    step(model, batch())
    governor.learn(0)
    governor.offloads = DEPTH
    step(model, batch())
    assert governor.policies == ["recompute", "offload", "keep", "offload"]
    assert governor.offerable == 2


def test_after_an_overrun_it_goes_on_as_before():
    model, _, governor, _ = governed()
    step(model, batch())
    governor.learn(0)
    governor.offloads = 1
    step(model, batch())
    assert governor.policies == ["keep"] * DEPTH
    governor.overrun()
    assert governor.policies == ["offload", *["recompute"] * (DEPTH - 1)]


@given(
    st.lists(
        st.tuples(st.integers(0, 6000), st.integers(1, 5), st.integers(0, DEPTH)), min_size=1, max_size=5
    ),
    st.none() | st.integers(0, 20_000),
    st.integers(0, 4000),
)
def test_whatever_offloads_the_bits_are_the_same_and_bytes_are_bounded(passes, ram, flight):
    plain = build()
    model, _, governor, used = governed(limit=12_000, room=10_000)
    governor.ram = ram
    counts = itertools.count()
    for value, rows, offloads in passes:
        used.value, governor.offloads, governor.flight = value, offloads, flight
        seed = next(counts)
        expected_loss, expected = step(plain, batch(rows, seed), seed)
        loss, grads = step(model, batch(rows, seed), seed)
        assert loss == expected_loss
        for got, wanted in zip(grads, expected, strict=True):
            assert_bit_equal(got, wanted)
        count = governor.policies.count("offload")
        assert count <= offloads
        assert value + governor.kept <= max(governor.room, value)
        if governor.measured and ram is not None:
            assert count * saved_bytes(rows) <= ram + count
        governor.learn(0)


def test_what_may_still_come_in_the_background_is_planned_with():
    each, coming = saved_bytes(4), [0]
    model = build()
    pager, old, used = govern(model, room=100 + 3 * each, limit=100 + 3 * each)
    made = ActivationGovernor(
        pager.blocks, ["recompute"] * DEPTH, used, old.limit, old.room, unseen=lambda: coming[0]
    )
    pager.governor = made
    step(model, batch())
    made.learn(0)
    for bytes_, kept in ((0, 3), (each, 2), (3 * each, 0), (9 * each, 0)):  # and it is never an error
        coming[0] = bytes_
        step(model, batch())
        assert made.policies == ["recompute"] * (DEPTH - kept) + ["keep"] * kept
        assert made.base == 100 + bytes_
        assert made.need(1.0) == bytes_
        made.learn(0)
