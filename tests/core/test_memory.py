"""The byte budget: a model that knows only sets, compared after every operation."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from milepost.core.memory import Memory
from milepost.core.plan import PoolDiscard


class MemoryMachine(RuleBasedStateMachine):
    """`memory` against plain sets of (pool, id): used, and resident as the worker would see it."""

    @initialize(
        sizes=st.lists(st.sampled_from([1, 2, 3, 7, 10]), min_size=1, max_size=3), budget=st.integers(0, 30)
    )
    def start(self, sizes: list[int], budget: int) -> None:
        self.sizes = tuple(sizes)
        self.budget = budget
        self.memory = Memory(self.sizes, budget)
        self.used: set[tuple[int, int]] = set()
        self.resident: set[tuple[int, int]] = set()
        self.undelivered: set[tuple[int, int]] = set()
        self.last_step: list[PoolDiscard] = []

    def bytes_of(self, records: set[tuple[int, int]]) -> int:
        return sum(self.sizes[pool] for pool, _ in records)

    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        pool = data.draw(st.integers(0, len(self.sizes) - 1))
        fits = self.bytes_of(self.used) + self.sizes[pool] <= self.budget
        free = {record for record in self.resident - self.used if record[0] == pool}
        before = self.memory.committed_bytes
        record_id = self.memory.acquire(pool)
        assert (record_id is not None) == fits
        if record_id is None:
            assert self.memory.committed_bytes == before
            return
        record = (pool, record_id)
        assert record not in self.used
        if free:
            assert record_id == min(record_id for _, record_id in free)
        self.used.add(record)
        self.sync(record)

    def sync(self, taken: tuple[int, int]) -> None:
        """Learn which records stopped being resident: free ones, and not more than had to."""
        resident = {
            (pool, record_id)
            for pool, entry in enumerate(self.memory._pools)
            for record_id in (*entry.used, *entry.free)
        }
        over = self.bytes_of(self.resident | {taken}) - self.budget
        gone = self.resident - resident
        assert resident <= self.resident | {taken}
        assert not gone & self.used
        assert (self.bytes_of(gone) >= over) if over > 0 else not gone
        assert not gone or self.bytes_of(gone) - max(self.sizes) < over
        self.resident = resident
        self.undelivered |= gone

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        record = data.draw(st.sampled_from(sorted(self.used)))
        self.memory.release(*record)
        self.used.remove(record)

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def double_free(self, data: st.DataObject) -> None:
        free = sorted(self.resident - self.used)
        if not free:
            return
        pool, record_id = data.draw(st.sampled_from(free))
        with pytest.raises(ValueError, match="is released but not in use"):
            self.memory.release(pool, record_id)

    @rule()
    def take(self) -> None:
        discards = self.memory.take_discards()
        listed = [(d.pool, record_id) for d in discards for record_id in d.record_ids]
        assert len(listed) == len(set(listed))
        assert [d.pool for d in discards] == sorted({d.pool for d in discards})
        assert set(listed) == self.undelivered
        self.undelivered = set()
        self.last_step = discards

    @precondition(lambda self: self.last_step)
    @rule()
    def step_did_not_happen(self) -> None:
        self.memory.repeat_discards(self.last_step)
        self.undelivered |= {(d.pool, i) for d in self.last_step for i in d.record_ids}
        self.last_step = []

    @invariant()
    def sums_agree(self) -> None:
        if not hasattr(self, "memory"):
            return
        memory = self.memory
        assert memory.audit() == []
        assert memory.used_bytes == self.bytes_of(self.used)
        assert memory.free_bytes == self.budget - memory.used_bytes
        assert memory.committed_bytes == self.bytes_of(self.resident)
        assert memory.committed_bytes <= memory.peak_committed_bytes <= self.budget
        for pool in range(len(self.sizes)):
            ids = {record_id for p, record_id in self.used if p == pool}
            assert memory.used_ids(pool) == ids
            assert memory.num_used(pool) == len(ids)


MemoryMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50)
TestMemoryMachine = MemoryMachine.TestCase


def test_lowest_free_id_first() -> None:
    memory = Memory((1,), 5)
    assert [memory.acquire(0) for _ in range(6)] == [0, 1, 2, 3, 4, None]
    for record_id in (3, 0, 4):
        memory.release(0, record_id)
    assert [memory.acquire(0) for _ in range(3)] == [0, 3, 4]


def test_free_records_of_another_pool_make_room_and_are_told_to_the_worker() -> None:
    memory = Memory((2, 3), 6)
    pages = [memory.acquire(0) for _ in range(3)]
    assert memory.acquire(1) is None
    assert memory.take_discards() == []
    for page in pages[:2]:
        memory.release(0, page)
    assert memory.committed_bytes == 6
    assert memory.acquire(1) == 0
    assert memory.committed_bytes == 5
    assert memory.take_discards() == [PoolDiscard(0, [0, 1])]
    assert memory.take_discards() == []
    memory.release(1, 0)
    assert memory.acquire(0) == 0, "a discarded id is used again before a fresh one"


def test_all_or_nothing_when_other_pools_cannot_give_enough() -> None:
    memory = Memory((1, 4), 4)
    pages = [memory.acquire(0) for _ in range(4)]
    memory.release(0, pages[0])
    assert memory.acquire(1) is None
    assert memory.take_discards() == [], "nothing was discarded in vain"
    assert memory.committed_bytes == 4


def test_a_record_taken_again_after_its_discard_is_discarded_once() -> None:
    memory = Memory((1, 1), 2)
    first, second = memory.acquire(0), memory.acquire(0)
    assert first is not None and second is not None
    for _ in range(2):
        memory.release(0, first)
        state = memory.acquire(1)
        assert state == 0
        memory.release(1, state)
        assert memory.acquire(0) == first
    assert memory.take_discards() == [PoolDiscard(0, [0]), PoolDiscard(1, [0])]


def test_one_record_larger_than_the_budget_is_refused() -> None:
    memory = Memory((10, 1), 9)
    assert memory.acquire(0) is None
    assert memory.acquire(1) == 0
    assert (memory.committed_bytes, memory.peak_committed_bytes) == (1, 1)


def test_the_peak_stays() -> None:
    memory = Memory((3, 1), 6)
    first = memory.acquire(0)
    second = memory.acquire(0)
    assert first is not None and second is not None
    memory.release(0, first)
    memory.release(0, second)
    assert memory.acquire(1) == 0
    assert memory.committed_bytes == 4
    assert memory.peak_committed_bytes == 6
