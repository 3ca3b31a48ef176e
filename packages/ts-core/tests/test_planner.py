"""The planner against a search over every set of groups."""

import dataclasses
import itertools
import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ts_core.errors import ArgumentError, DoesNotFitError
from ts_core.memory import format_bytes
from ts_core.planner import Budgets, GroupSpec, least, place

LOTS = 1 << 50
sizes = st.integers(0, 40)
specs = st.builds(
    GroupSpec,
    name=st.just("g"),
    kind=st.sampled_from(["block", "block", "block", "embedding", "head", "norm", "other"]),
    fixed=st.integers(0, 9),
    device=sizes,
    host=st.integers(0, 9),
    paged=sizes,
    slot=sizes,
    scratch=sizes,
    staged=st.sampled_from([0, 0, 3, 30]),
    updated=st.sampled_from([0, 0, 5, 50]),
    pageable=st.sampled_from([True, True, True, False]),
)
few = st.lists(specs, max_size=7)
budgets = st.builds(
    Budgets,
    device=st.integers(0, 200),
    host=st.none() | st.integers(0, 100),
    disk=st.just(LOTS) | st.integers(0, 150),
)


def forcing(groups):
    return st.tuples(
        *[
            st.sampled_from([None, None, None, False, True] if g.pageable else [None, False, False])
            for g in groups
        ]
    )


cases = few.flatmap(lambda groups: st.tuples(st.just(groups), forcing(groups)))


def model(count, **edges):
    """An embedding, a stack of alike blocks and a head, as a Llama has them."""
    blocks = [GroupSpec(f"layers.{i}", device=100, paged=90, slot=40, scratch=30) for i in range(count)]
    embedding = GroupSpec("embed", "embedding", device=300, paged=300, slot=0)
    head = GroupSpec("head", "head", device=300, paged=300, slot=300, scratch=20)
    return [embedding, *blocks, head]


def bytes_of(groups, paged, limits, slots, reserve=0, settled=frozenset()):
    """The rule, written down a second time: device, host and disk bytes of a set."""
    device = reserve + sum(g.fixed for g in groups)
    device += sum(g.device for i, g in enumerate(groups) if i not in paged)
    device += sum(groups[i].slot for i in paged if i in settled)
    for of_stack, most in ((True, slots), (False, 1)):
        slot = [groups[i].slot for i in paged if (groups[i].kind == "block") == of_stack and i not in settled]
        device += min(most, len(slot)) * max(slot, default=0)
    device += max([groups[i].scratch for i in paged], default=0)
    sharing = [i for i in paged if i not in settled]
    used = min(slots, sum(groups[i].kind == "block" for i in sharing))
    device += max(used - 1, 1) * max([groups[i].staged for i in sharing], default=0)
    host = sum(g.host for i, g in enumerate(groups) if i not in paged)
    below = sorted(paged)
    kept = filled(groups, below, None if limits.host is None else limits.host - host)
    if limits.host is not None and len(kept) < len(below):
        room = limits.host - host - around_files(groups, below, cpu=False)
        kept = filled(groups, below, room)
    files = [i for i in below if i not in kept]
    host += sum(groups[i].paged for i in kept)
    more = around_files(groups, files, cpu=limits.host is None)
    if limits.host is None:
        more = min(more, limits.device // 8)
    disk = sum(groups[i].paged for i in files)
    return (device + more, host, disk) if limits.host is None else (device, host + more, disk)


def filled(groups, order, room):
    kept = []
    for i in order:
        if room is not None and groups[i].paged <= room:
            room -= groups[i].paged
            kept.append(i)
    return kept


def around_files(groups, files, cpu):
    """Pieces that are on their way, and copies of what is updated."""
    ring = max([max(groups[i].slot, groups[i].staged) for i in files], default=0)
    copies = max([groups[i].updated for i in files], default=0)
    return (0 if cpu else min(ring, 32 << 20)) + min(copies, 12 << 20)


def fits(taken, limits):
    device, host, disk = taken
    fine = device <= limits.device and disk <= limits.disk
    return fine and (limits.host is None or host <= limits.host)


def subsets(groups, forced):
    free = [i for i, g in enumerate(groups) if g.pageable and forced[i] is None]
    always = {i for i, force in enumerate(forced) if force}
    for count in range(len(free) + 1):
        for chosen in itertools.combinations(free, count):
            yield always | set(chosen)


def paged_bytes(groups, paged):
    return sum(groups[i].device for i in paged)


@given(cases, budgets, st.integers(0, 30), st.integers(1, 3), st.frozensets(st.integers(0, 6)))
def test_the_cheapest_set_that_fits_is_found_if_there_is_one(case, limits, reserve, slots, settled):
    groups, forced = case
    found = {
        count: [
            paged_bytes(groups, s)
            for s in subsets(groups, forced)
            if fits(bytes_of(groups, s, limits, count, reserve, settled), limits)
        ]
        for count in range(slots, 0, -1)
    }
    first = next((costs for costs in found.values() if costs), None)
    if first is None:
        with pytest.raises(DoesNotFitError):
            place(groups, limits, reserve=reserve, forced=forced, slots=slots, settled=settled)
        return
    layout = place(groups, limits, reserve=reserve, forced=forced, slots=slots, settled=settled)
    assert paged_bytes(groups, layout.paged) == min(first)


@given(cases, budgets, st.integers(0, 30), st.integers(1, 3), st.frozensets(st.integers(0, 6)))
def test_a_layout_is_what_the_rule_says_and_fits(case, limits, reserve, slots, settled):
    groups, forced = case
    try:
        layout = place(groups, limits, reserve=reserve, forced=forced, slots=slots, settled=settled)
    except DoesNotFitError:
        assume(False)
    assert set(layout.settled) == settled & layout.paged
    in_stack = sum(groups[i].kind == "block" for i in layout.paged - settled)
    assert layout.slots <= min(slots, in_stack)
    assert (layout.slots > 0) == (in_stack > 0)
    taken = bytes_of(groups, layout.paged, limits, layout.slots, reserve, settled)
    assert taken == (layout.device_bytes, layout.host_bytes, layout.disk_bytes)
    assert fits(taken, limits)
    assert layout.fits(limits)
    assert len(layout.tiers) == len(groups)
    assert set(layout.tiers) <= ({"device", "disk"} if limits.host is None else {"device", "host", "disk"})
    on_disk = sum(g.paged for g, tier in zip(groups, layout.tiers, strict=True) if tier == "disk")
    assert on_disk == layout.disk_bytes


@given(cases, budgets)
def test_what_is_forced_is_done_and_what_cannot_be_paged_stays(case, limits):
    groups, forced = case
    try:
        layout = place(groups, limits, forced=forced)
    except DoesNotFitError:
        assume(False)
    for index, (group, force) in enumerate(zip(groups, forced, strict=True)):
        if force is not None:
            assert (index in layout.paged) == force
        assert group.pageable or index not in layout.paged


@given(cases, budgets, st.integers(0, 60), st.integers(0, 60), st.integers(0, 60))
def test_more_bytes_never_page_more_bytes(case, limits, device, host, disk):
    groups, forced = case
    more = Budgets(
        limits.device + device, None if limits.host is None else limits.host + host, limits.disk + disk
    )
    try:
        tight = place(groups, limits, forced=forced, slots=1)
    except DoesNotFitError:
        assume(False)
    wide = place(groups, more, forced=forced, slots=1)
    assert paged_bytes(groups, wide.paged) <= paged_bytes(groups, tight.paged)


@given(st.integers(1, 12), st.integers(0, 3000), st.integers(0, 500))
def test_a_stack_of_whole_weights_is_monotone_with_two_slots_too(count, device, more):
    groups = model(count)
    try:
        tight = place(groups, Budgets(device, None, LOTS))
    except DoesNotFitError:
        assert device < least(groups)
        return
    wide = place(groups, Budgets(device + more, None, LOTS))
    assert paged_bytes(groups, wide.paged) <= paged_bytes(groups, tight.paged)


@given(cases)
def test_least_is_the_least(case):
    groups, forced = case
    limits = Budgets(LOTS, None, LOTS)
    need = least(groups, forced=forced)
    assert need == min(bytes_of(groups, s, limits, 1)[0] for s in subsets(groups, forced))
    assert place(groups, Budgets(need, None, LOTS), forced=forced).device_bytes <= need
    with pytest.raises(DoesNotFitError):
        place(groups, Budgets(need - 1, None, LOTS), forced=forced)


@given(cases, budgets, st.integers(0, 30))
def test_the_same_question_has_the_same_answer_and_changes_nothing(case, limits, reserve):
    groups, forced = case
    before = [dataclasses.astuple(g) for g in groups]

    def ask():
        try:
            return json.dumps(dataclasses.asdict(place(groups, limits, reserve=reserve, forced=forced)))
        except DoesNotFitError as error:
            return str(error)

    assert ask() == ask()
    assert before == [dataclasses.astuple(g) for g in groups]


@given(cases, budgets, st.integers(0, 30))
def test_a_refusal_says_what_is_needed_and_what_may_be_used(case, limits, reserve):
    groups, forced = case
    try:
        place(groups, limits, reserve=reserve, forced=forced)
    except DoesNotFitError as error:
        text = str(error)
    else:
        assume(False)
    names = {"device": "RAM" if limits.host is None else "the device", "host": "RAM", "disk": "disk"}
    left = {tier: getattr(limits, tier) or 0 for tier in names}
    assert any(f"of {names[t]} where {format_bytes(n) if n else 'none'} may" in text for t, n in left.items())
    assert ("for activations and temporaries" in text) == (reserve > 0)
    assert isinstance(error_of(groups, limits, reserve, forced), MemoryError)


def error_of(groups, limits, reserve, forced):
    with pytest.raises(DoesNotFitError) as caught:
        place(groups, limits, reserve=reserve, forced=forced)
    return caught.value


def test_the_numbers_of_a_refusal():
    groups = model(4)
    with pytest.raises(DoesNotFitError) as caught:
        place(groups, Budgets(300, None, 100), reserve=7, forced=[True] * 6)
    # The head's slot, one block's slot, the largest scratch; every byte that is paged is on the disk.
    assert "377 B of RAM where 300 B may be used" in str(caught.value)
    assert "960 B of disk where 100 B may be used" in str(caught.value)
    assert "7 B of them for activations and temporaries" in str(caught.value)
    with pytest.raises(DoesNotFitError, match="of the device where the limit is 5 B below what is taken"):
        place(groups, Budgets(-5, 10_000, LOTS))
    with pytest.raises(DoesNotFitError, match="takes is 5 B of RAM where none may be used"):
        place([GroupSpec("a", device=9, host=5, paged=9)], Budgets(9, 0, 0))


def test_with_room_for_everything_nothing_is_paged():
    groups = model(6)
    total = sum(g.device for g in groups)
    assert not place(groups, Budgets(total, None, 0)).paged
    assert place(groups, Budgets(total, None, 0)).slots == 0
    assert place([], Budgets(0, None, 0)).tiers == ()
    assert least([]) == 0


def test_paged_blocks_are_spread_over_the_stack():
    groups = [GroupSpec(f"layers.{i}", device=100, paged=100, slot=10) for i in range(8)]
    layout = place(groups, Budgets(420, None, LOTS))
    assert [tier == "disk" for tier in layout.tiers] == [True, False] * 4


def test_one_slot_where_two_do_not_fit():
    groups = [GroupSpec(f"layers.{i}", device=100, paged=100, slot=100) for i in range(4)]
    assert place(groups, Budgets(200, None, LOTS)).slots == 2
    assert place(groups, Budgets(199, None, LOTS)).slots == 1


def test_the_host_is_filled_in_order_and_then_the_disk():
    groups = [GroupSpec(f"layers.{i}", device=100, paged=100, slot=10) for i in range(4)]
    layout = place(groups, Budgets(20, 250, LOTS))
    assert layout.tiers == ("host", "host", "disk", "disk")
    # Pieces of what comes from files, 10 bytes of a block, are in host memory on their way.
    assert (layout.host_bytes, layout.disk_bytes) == (210, 200)


def test_a_block_that_is_larger_than_its_slot_saves_need_not_be_paged():
    # Packed: paging two of them would take more for the slots than it frees.
    groups = [GroupSpec(f"layers.{i}", device=25, paged=25, slot=100) for i in range(4)]
    assert place(groups, Budgets(100, None, LOTS)).tiers == ("device",) * 4
    assert least(groups) == 100


def test_one_block_that_is_much_larger_than_the_rest():
    # Its slot would be larger than all the others together: it stays, and they go.
    groups = [GroupSpec("big", device=50, paged=50, slot=200)]
    groups += [GroupSpec(f"small.{i}", device=50, paged=50, slot=10) for i in range(5)]
    layout = place(groups, Budgets(60, None, LOTS))
    assert layout.tiers == ("device", *["disk"] * 5)


@given(st.lists(specs, min_size=13, max_size=20, unique_by=lambda g: (g.device, g.slot)))
def test_stacks_of_many_sorts_are_searched_in_part(groups):
    need = least(groups)
    layout = place(groups, Budgets(need, None, LOTS))
    assert layout.device_bytes <= need <= sum(g.fixed + g.device for g in groups)


@pytest.mark.parametrize(
    ("forced", "slots"), [([None], 2), ([True, None], 2), ([None, None, False], 2), ([None, None], 0)]
)
def test_wrong_arguments(forced, slots):
    groups = [GroupSpec("a", pageable=False, device=5), GroupSpec("b", device=5)]
    with pytest.raises(ArgumentError, match=r"forced|slots"):
        place(groups, Budgets(LOTS, None, LOTS), forced=forced, slots=slots)
