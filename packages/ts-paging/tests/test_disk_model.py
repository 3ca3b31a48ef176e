"""Random lives of tensors in files against plain ones: bit-equal at every step, never over the budget."""

import gc
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from paging_reference import random_bits

from ts_core.errors import StateError, StorageError
from ts_core.testing import assert_bit_equal
from ts_paging.files import FileTensors, locate

PAGE = 4096
BUDGET = 60 * PAGE
SIZES = st.sampled_from([0, 1, 1000, PAGE, PAGE + 4, 3 * PAGE, 10 * PAGE - 8, 25 * PAGE])
picks = st.integers(0, 10**6)


def rounded(nbytes):
    return -(-nbytes // PAGE) * PAGE


class Lives(RuleBasedStateMachine):
    """The model is a list of (tensor of the tier, plain tensor); the plain one is the truth."""

    backend = "auto"

    @initialize(leases=st.sampled_from([PAGE, 8 * PAGE, 1 << 20]))
    def start(self, leases):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRAINSTREAM_IO", self.backend)
            self.files = FileTensors(budget=BUDGET, lease_bytes=leases)
        self.limit = leases
        self.held = []
        self.leases = []
        self.seed = 0
        self.user = self.files.store.folder / "user-file"
        self.content = random_bits((50_000,), torch.uint8, 99)
        self.content.numpy().tofile(self.user)

    def bits(self, nbytes):
        self.seed += 1
        return random_bits((nbytes,), torch.uint8, self.seed)

    def pick(self, number):
        return self.held[number % len(self.held)] if self.held else None

    def leased(self, entry):
        return any(entry is other for lease in self.leases for other in lease.entries)

    @rule(nbytes=SIZES)
    def place(self, nbytes):
        plain = self.bits(nbytes)
        used = self.files.used_bytes
        alive = sum(rounded(e.plain.numel()) for e in self.held if not e.adopted)
        if alive + rounded(nbytes) > BUDGET:
            with pytest.raises(StorageError, match="bytes wanted"):
                self.files.place(plain)
            assert self.files.used_bytes <= used
            return
        self.held.append(SimpleNamespace(tier=self.files.place(plain), plain=plain, adopted=False))

    @rule(offset=st.integers(0, 20_000), nbytes=SIZES)
    def adopt(self, offset, nbytes):
        nbytes = min(nbytes, 50_000 - offset)
        tier = self.files.adopt(self.user, offset, torch.uint8, (nbytes,))
        plain = self.content[offset : offset + nbytes].clone()
        self.held.append(SimpleNamespace(tier=tier, plain=plain, adopted=True))

    @rule(number=picks, place=picks)
    def write_through_the_mapping(self, number, place):
        entry = self.pick(number)
        if entry is None or not entry.plain.numel() or self.leased(entry):
            return
        at = place % entry.plain.numel()
        for tensor in (entry.tier, entry.plain):
            tensor[at : at + 5000] ^= 255

    @rule(number=picks)
    def write_past_the_mapping(self, number):
        entry = self.pick(number)
        if entry is None or not entry.plain.numel() or self.leased(entry):
            return
        value = self.bits(entry.plain.numel())
        self.files.write_async(entry.tier, value).wait()
        entry.plain.copy_(value)

    @rule(number=picks, arrive=st.booleans())
    def read_past_the_mapping(self, number, arrive):
        entry = self.pick(number)
        if entry is None or self.leased(entry):
            return
        place = locate(entry.tier)
        if place is None:
            assert entry.adopted or not entry.plain.numel()
            return
        out = torch.empty_like(entry.plain)
        if arrive:
            place[0].bring(place[1], out).wait_stream()
        else:
            place[0].read_async(place[1], out).wait()
        assert_bit_equal(out, entry.plain)

    @rule(numbers=st.lists(picks, min_size=1, max_size=4), part=st.booleans(), written=st.booleans())
    def lease(self, numbers, part, written):
        entries = []
        for number in numbers:
            entry = self.pick(number)
            if entry is not None and not self.leased(entry) and all(entry is not e for e in entries):
                entries.append(entry)
        ends = [min(PAGE, e.plain.numel()) if part else e.plain.numel() for e in entries]
        tensors = [entry.tier[:end] for entry, end in zip(entries, ends, strict=True)]
        lease = self.files.lease(tensors, [written] * len(entries), wait=False)
        if lease is None:
            assert self.files._leased.used
            return
        for copy, entry, end in zip(lease.tensors(), entries, ends, strict=True):
            assert_bit_equal(copy, entry.plain[:end])
        self.leases.append(SimpleNamespace(lease=lease, entries=entries, ends=ends, written=written))

    @rule(number=picks, good=st.booleans())
    def end_a_lease(self, number, good):
        if not self.leases:
            return
        found = self.leases.pop(number % len(self.leases))
        if good and found.written:
            for copy, entry, end in zip(found.lease.tensors(), found.entries, found.ends, strict=True):
                copy.bitwise_xor_(170)
                entry.plain[:end] ^= 170
            found.lease.write_back()
            found.lease.close()
        else:
            found.lease.release()

    @rule(number=picks)
    def own(self, number):
        entry = self.pick(number)
        if entry is None or not entry.adopted or not entry.plain.numel() or self.leased(entry):
            return
        alive = sum(rounded(e.plain.numel()) for e in self.held if not e.adopted)
        if alive + rounded(entry.plain.numel()) <= BUDGET:
            entry.tier, entry.adopted = self.files.own(entry.tier), False
            assert self.files.own(entry.tier) is entry.tier

    @rule(number=picks, quietly=st.booleans())
    def drop(self, number, quietly):
        entry = self.pick(number)
        if entry is None or self.leased(entry):
            return
        if not quietly:
            self.files.drop(entry.tier)
            assert_bit_equal(entry.tier, entry.plain)  # what still maps it stays readable
        self.held = [other for other in self.held if other is not entry]

    @invariant()
    def every_tensor_is_its_plain_one(self):
        leased = {id(e) for lease in self.leases for e in lease.entries}
        for entry in self.held:
            if id(entry) not in leased:
                assert_bit_equal(entry.tier, entry.plain)

    @invariant()
    def budgets_hold(self):
        gc.collect(0)
        on_disk = sum(path.stat().st_size for path in self.files.store.folder.glob("*.bin"))
        assert on_disk == self.files.used_bytes <= BUDGET
        memory = self.files._leased
        assert memory.used == sum(lease.lease.taken for lease in self.leases)
        assert memory.used <= max(self.limit, max((x.lease.taken for x in self.leases), default=0))
        spare = sum(buffer.numel() for buffer in memory._spare)
        assert memory.used + spare <= max(self.limit, memory.peak)
        assert bytes(self.user.read_bytes()[:8]) == bytes(self.content[:8].tolist())

    def teardown(self):
        if not hasattr(self, "files"):
            return
        for lease in self.leases:
            lease.lease.release()
        folder = self.files.store.folder
        assert torch.equal(
            torch.frombuffer(bytearray(self.user.read_bytes()), dtype=torch.uint8), self.content
        )
        self.files.close()
        assert not folder.exists()
        with pytest.raises(StateError):
            self.files.empty(1)
        for entry in self.held:
            assert_bit_equal(entry.tier, entry.plain)


class LivesOnThreads(Lives):
    backend = "threads"


TestLives = Lives.TestCase
TestLivesOnThreads = LivesOnThreads.TestCase
TestLives.settings = TestLivesOnThreads.settings = settings(stateful_step_count=30, deadline=None)
