"""Loads from and saves to a store, as far as the cache is concerned."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.harness import Harness, make_geometry, numbered

from milepost.core.admission import fits
from milepost.core.request import Request
from milepost.core.transfers import (
    Outlook,
    Restore,
    SegmentRecords,
    StoredCheckpoint,
    TransferCost,
    choose_segments,
)
from milepost.sim.model import FingerprintModel
from milepost.sim.records import FingerprintRecords

FREE_LOADS = TransferCost(seconds_per_token=1.0, seconds_per_byte=0.0, seconds_per_load=0.0)


def stored(start: int, position: int, num_bytes: int = 100) -> StoredCheckpoint:
    return StoredCheckpoint(start, position, num_bytes, "end")


# ------------------------------------------------------------------ which segments
def test_the_chain_back_to_local_pages_is_chosen() -> None:
    found = [stored(16, 32), stored(0, 16), stored(32, 48)]
    assert choose_segments(found, Outlook(0, 0, []), FREE_LOADS) == [
        stored(0, 16),
        stored(16, 32),
        stored(32, 48),
    ]


def test_a_broken_chain_is_not_used() -> None:
    assert choose_segments([stored(16, 32), stored(32, 48)], Outlook(0, 0, []), FREE_LOADS) == []
    found = [stored(0, 16), stored(32, 48)]
    assert choose_segments(found, Outlook(0, 0, []), FREE_LOADS) == [stored(0, 16)]


def test_pages_that_are_here_shorten_the_chain() -> None:
    found = [stored(0, 16), stored(16, 32), stored(32, 48)]
    assert choose_segments(found, Outlook(0, 40, []), FREE_LOADS) == [stored(32, 48)]
    assert choose_segments(found, Outlook(16, 20, []), FREE_LOADS) == [stored(16, 32), stored(32, 48)]


def test_only_the_state_is_missing() -> None:
    found = [stored(0, 16), stored(16, 32)]
    assert choose_segments(found, Outlook(0, 64, []), FREE_LOADS) == [stored(16, 32)]


def test_nothing_is_loaded_that_is_sooner_computed() -> None:
    cost = TransferCost(seconds_per_token=1.0, seconds_per_byte=0.1, seconds_per_load=3.0)
    assert choose_segments([stored(0, 16, 129)], Outlook(0, 0, []), cost) == [stored(0, 16, 129)]
    assert choose_segments([stored(0, 16, 130)], Outlook(0, 0, []), cost) == []


def test_a_dear_last_segment_is_left_out() -> None:
    cost = TransferCost(seconds_per_token=1.0, seconds_per_byte=1.0, seconds_per_load=0.0)
    found = [stored(0, 16, 1), stored(16, 32, 50)]
    assert choose_segments(found, Outlook(0, 0, []), cost) == [stored(0, 16, 1)]


def test_the_cheaper_of_two_segments_that_end_alike() -> None:
    found = [stored(0, 16, 5), stored(16, 32, 5), stored(0, 32, 11), stored(0, 32, 9)]
    cost = TransferCost(1.0, 0.01, 0.0)
    assert choose_segments(found, Outlook(0, 0, []), cost) == [stored(0, 32, 9)]


@st.composite
def offers(draw: st.DrawFn) -> tuple[list[StoredCheckpoint], Outlook, TransferCost]:
    edges = draw(
        st.lists(
            st.tuples(st.integers(0, 7), st.integers(1, 8), st.integers(0, 40)).filter(lambda e: e[0] < e[1]),
            max_size=7,
        )
    )
    hit = draw(st.integers(0, 4))
    pages = draw(st.integers(hit, 8))
    cost = TransferCost(1.0, draw(st.sampled_from([0.0, 0.05, 0.3])), draw(st.sampled_from([0.0, 2.0])))
    return [stored(q, p, b) for q, p, b in edges], Outlook(hit, pages, []), cost


@given(offers())
def test_no_other_subset_gains_more(offer: tuple[list[StoredCheckpoint], Outlook, TransferCost]) -> None:
    found, outlook, cost = offer
    chosen = choose_segments(found, outlook, cost)

    def gain(subset: list[StoredCheckpoint]) -> float | None:
        """Time saved by a subset in order; None if it is no usable chain."""
        reached = outlook.pages_position
        for segment in subset:
            if segment.start > reached:
                return None
            reached = segment.position if segment is not subset[0] else max(0, segment.position)
        num_tokens = subset[-1].position - outlook.hit_position
        return cost.computing_seconds(num_tokens) - cost.loading_seconds(sum(s.num_bytes for s in subset))

    best = 0.0
    for size in range(1, len(found) + 1):
        for subset in itertools.permutations(found, size):
            if [s.position for s in subset] != sorted({s.position for s in subset}):
                continue
            if any(
                b.start != a.position and b.start > outlook.pages_position
                for a, b in itertools.pairwise(subset)
            ):
                continue
            found_gain = gain(list(subset))
            if found_gain is not None:
                best = max(best, found_gain)
    got = gain(chosen) if chosen else 0.0
    assert got is not None
    assert got == pytest.approx(best)


# ------------------------------------------------------------------ through the cache
class Shelf:
    """A store in a dictionary: what a save read, to be written by a load."""

    def __init__(self) -> None:
        self.segments: dict[bytes, tuple[StoredCheckpoint, list[bytes]]] = {}

    def save_all(self, harness: Harness) -> None:
        transfers = harness.scheduler.transfers
        for node in sorted(harness.cache.tree.state_nodes.values(), key=lambda n: n.depth):
            records = transfers.begin_save(node, self.segments.__contains__)
            assert records is not None
            harness.check()
            self.segments[records.key] = self._read(harness, records)
            transfers.end_save(records)
            harness.check()

    @staticmethod
    def _read(harness: Harness, records: SegmentRecords) -> tuple[StoredCheckpoint, list[bytes]]:
        access = FingerprintRecords(harness.worker)
        pools = [*records.pages, *([slot] for slot in records.slots)]
        payload = [b"".join(access.read_records(pool, ids)) for pool, ids in enumerate(pools)]
        size = sum(len(part) for part in payload)
        return StoredCheckpoint(records.start, records.position, size, records.node.reason), payload

    def begin(self, harness: Harness, request_id: int) -> Restore | None:
        request = harness.requests[request_id]
        outlook = harness.scheduler.transfers.outlook(request)
        if outlook is None:
            return None
        found = [self.segments[key][0] for key in outlook.keys if key in self.segments]
        chosen = choose_segments(found, outlook, FREE_LOADS)
        restore = harness.scheduler.transfers.begin(request, chosen, harness.now)
        harness.check()
        return restore

    def fill(self, harness: Harness, restore: Restore) -> None:
        access = FingerprintRecords(harness.worker)
        keys = restore.lease.chain.keys
        for segment in restore.segments:
            payload = self.segments[keys[segment.stored.position // harness.unit - 1]][1]
            for pool, pages in enumerate(segment.pages):
                size = harness.geometry.pool_record_bytes[pool]
                access.write_records(pool, pages, payload[pool][segment.num_skipped_units * size :])
            for index, slot in enumerate(segment.slots):
                pool = len(segment.pages) + index
                access.write_records(pool, [slot], payload[pool])


def two_replicas(num_attention: int, num_recurrent: int, **options: int) -> tuple[Harness, Harness, Shelf]:
    geometry = make_geometry(num_attention=num_attention, num_recurrent=num_recurrent)
    model = FingerprintModel()
    first = Harness(geometry=geometry, model=model)
    first.serve(numbered(40), wanted=[(8, "message"), (20, "message")])
    shelf = Shelf()
    shelf.save_all(first)
    return first, Harness(geometry=geometry, model=model, **options), shelf


GROUPS = [(1, 1), (2, 1), (1, 2), (0, 1)]


@pytest.mark.parametrize(("num_attention", "num_recurrent"), GROUPS)
def test_another_replica_starts_where_the_first_had_saved(num_attention: int, num_recurrent: int) -> None:
    _, second, shelf = two_replicas(num_attention, num_recurrent)
    request_id = second.add(numbered(40) + [7, 8])
    second.scheduler.transfers.hold(request_id)
    restore = shelf.begin(second, request_id)
    assert restore is not None
    assert second.schedule().chunks == []
    second.execute()
    shelf.fill(second, restore)
    assert second.scheduler.transfers.finish(restore, len(restore.segments), second.now) == 40
    second.scheduler.transfers.lift(request_id)
    second.run()
    assert second.computed[request_id] == 2
    assert second.reuse[request_id].num_cached_tokens == 40
    assert second.cache.counters.num_restored_checkpoints == len(shelf.segments)


def test_a_restored_checkpoint_starts_internal_ones_and_forks() -> None:
    _, second, shelf = two_replicas(1, 1)
    request_id = second.add(numbered(40) + list(range(30)), wanted=[(52, "message")])
    restore = shelf.begin(second, request_id)
    assert restore is not None
    shelf.fill(second, restore)
    second.scheduler.transfers.finish(restore, len(restore.segments), second.now)
    second.run()
    assert second.computed[request_id] == 30
    fork = second.serve(numbered(20) + [5] * 9)
    assert second.computed[fork] == 9
    behind = second.serve(numbered(40) + list(range(12)) + [9, 9])
    assert second.computed[behind] == 2


def test_nothing_is_visible_before_it_is_finished_and_a_cancelled_load_leaves_nothing() -> None:
    _, second, shelf = two_replicas(2, 2)
    request_id = second.add(numbered(40) + [7])
    restore = shelf.begin(second, request_id)
    assert restore is not None
    second.run()
    assert second.computed[request_id] == 41
    used = second.cache.memory.used_bytes
    second.scheduler.transfers.cancel(restore, second.now)
    second.check()
    assert second.cache.memory.used_bytes < used
    assert second.cache.counters.num_restored_checkpoints == 0


@pytest.mark.parametrize("num_arrived", range(4))
def test_what_arrived_before_a_failure_is_kept(num_arrived: int) -> None:
    _, second, shelf = two_replicas(1, 1)
    request_id = second.add(numbered(40) + [7])
    restore = shelf.begin(second, request_id)
    assert restore is not None
    assert [s.stored.position for s in restore.segments] == [8, 20, 36, 40]
    shelf.fill(second, replace(restore, segments=restore.segments[:num_arrived]))
    assert second.scheduler.transfers.finish(restore, num_arrived, second.now) == [0, 8, 20, 36][num_arrived]
    second.check()
    second.run()
    assert second.computed[request_id] == 41 - [0, 8, 20, 36][num_arrived]


def test_a_load_that_was_overtaken_by_computing_is_shared() -> None:
    _, second, shelf = two_replicas(1, 1)
    request_id = second.add(numbered(40) + [7])
    restore = shelf.begin(second, request_id)
    assert restore is not None
    second.run()  # nobody held the request back
    shelf.fill(second, restore)
    assert second.scheduler.transfers.finish(restore, len(restore.segments), second.now) == 40
    second.check()
    again = second.serve(numbered(20) + [3, 3])
    assert second.computed[again] == 2


def test_only_the_missing_state_comes_from_the_store() -> None:
    """Pages deeper than any state: the segment's pages are skipped, its state is taken."""
    first, _, shelf = two_replicas(1, 1)
    node = next(n for n in first.cache.tree.state_nodes.values() if n.depth == 5)
    first.cache.evictor.give_up_state(node)
    pages = first.cache.memory.num_used(0)
    request_id = first.add(numbered(20) + [7])
    restore = shelf.begin(first, request_id)
    assert restore is not None
    assert [(s.num_skipped_units, s.pages) for s in restore.segments] == [(3, [[]])]
    shelf.fill(first, restore)
    assert first.scheduler.transfers.finish(restore, 1, first.now) == 20
    assert first.cache.memory.num_used(0) == pages
    first.run()
    assert first.computed[request_id] == 1


@pytest.mark.parametrize("num_records", range(3, 20))
def test_a_load_never_exceeds_the_budget_and_the_request_runs(num_records: int) -> None:
    _, second, shelf = two_replicas(1, 1, num_records=num_records, max_model_len=44)
    if second.scheduler.max_model_len < 42:
        return
    second.serve([3] * 20)
    request_id = second.add(numbered(40) + [7])
    second.scheduler.transfers.hold(request_id)
    restore = shelf.begin(second, request_id)
    if restore is not None:
        shelf.fill(second, restore)
        second.scheduler.transfers.finish(restore, len(restore.segments), second.now)
    second.scheduler.transfers.lift(request_id)
    second.run()
    assert second.computed[request_id] == (1 if restore is not None else 41)


def test_a_checkpoint_that_is_read_is_not_evicted_thinned_or_overwritten() -> None:
    harness = Harness(num_records=14)
    harness.serve(numbered(20))
    node = max(harness.cache.tree.state_nodes.values(), key=lambda n: n.depth)
    records = harness.scheduler.transfers.begin_save(node, lambda key: False)
    assert records is not None
    before = FingerprintRecords(harness.worker).read_records(1, records.slots)
    for seed in range(1, 6):
        harness.serve(numbered(24, seed))
    harness.serve(numbered(20) + [1] * 8)
    assert FingerprintRecords(harness.worker).read_records(1, records.slots) == before
    assert harness.cache.tree.index[node.key] is node
    harness.scheduler.transfers.end_save(records)
    harness.check()
    harness.scheduler.reset_prefix_cache()
    assert node.key not in harness.cache.tree.index


def test_a_save_of_what_is_gone_is_refused() -> None:
    harness = Harness(num_records=14)
    harness.serve(numbered(20))
    node = max(harness.cache.tree.state_nodes.values(), key=lambda n: n.depth)
    harness.scheduler.reset_prefix_cache()
    assert harness.scheduler.transfers.begin_save(node, lambda key: False) is None


def test_a_record_that_was_discarded_and_is_loaded_is_not_discarded_again() -> None:
    """The worker hears of discards with the next plan, after the bytes were written."""
    _, second, shelf = two_replicas(1, 1, num_records=12)
    second.serve(numbered(30, 3))  # pages everywhere
    second.scheduler.reset_prefix_cache()
    for _ in range(3):
        request_id = second.add(numbered(20) + [7])
        restore = shelf.begin(second, request_id)
        assert restore is not None
        shelf.fill(second, restore)
        second.scheduler.transfers.finish(restore, len(restore.segments), second.now)
        second.run()
        assert second.computed[request_id] == 1
        second.scheduler.reset_prefix_cache()
        second.serve(numbered(24, 5))
        second.scheduler.reset_prefix_cache()


def test_a_held_request_blocks_nobody_and_its_siblings_wait_with_it() -> None:
    harness = Harness()
    held = harness.add(numbered(40) + [1])
    harness.scheduler.transfers.hold(held)
    sibling = harness.add(numbered(40) + [2])
    other = harness.add(numbered(12, 7))
    plan = harness.schedule()
    assert [chunk.request_id for chunk in plan.chunks] == [other]
    harness.execute()
    harness.scheduler.transfers.lift(held)
    harness.run()
    assert harness.computed[held] == 41
    assert harness.computed[sibling] == 1


def test_an_aborted_request_is_not_held_any_more() -> None:
    harness = Harness()
    held = harness.add(numbered(40))
    harness.scheduler.transfers.hold(held)
    harness.scheduler.abort(held)
    harness.check()
    assert harness.scheduler.transfers.num_held == 0


def test_admission_counts_what_a_load_in_progress_holds() -> None:
    """In some budgets a request fits beside those that run, but not beside a load as well."""
    differ = 0
    for num_records in range(24, 60):
        _, second, shelf = two_replicas(1, 1, num_records=num_records)
        second.add(numbered(30, 4), 4)
        second.step()
        loading = second.add(numbered(40) + [7])
        second.scheduler.transfers.hold(loading)
        restore = shelf.begin(second, loading)
        if restore is None:
            continue
        newcomer = second.requests[second.add(numbered(24, 5))]
        scheduler = second.scheduler

        def admits(harness: Harness = second, request: Request = newcomer) -> bool:
            chain = request.chain
            assert chain is not None
            match = harness.cache.match(chain, request.num_tokens)
            return fits(harness.cache, request, match, harness.scheduler.running, harness.scheduler.transfers)

        beside_the_load = admits()
        scheduler.transfers.cancel(restore, second.now)
        alone = admits()
        assert alone or not beside_the_load
        differ += alone and not beside_the_load
    assert differ > 3
