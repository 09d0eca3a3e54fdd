"""The facade as a library, without the scheduler: five verbs, transactions, failure at every acquire."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from tests.core.harness import RECORD_BYTES, make_cache, make_chain, make_geometry, numbered
from tests.core.snapshot import snapshot

from milepost.core import reasons
from milepost.core.hashing import CacheDomain, KeyChain, MediaSpan
from milepost.core.lease import Lease
from milepost.core.plan import ZERO_STATE
from milepost.core.prefix_cache import PrefixCache

UNIT = 4
TWO_GROUPS = make_geometry(UNIT, num_attention=2, num_recurrent=2)


def open_lease(cache: PrefixCache, chain: KeyChain, now: float = 0.0) -> tuple[Lease, int]:
    """Look up, pin; returns the lease and the position it starts from."""
    match = cache.match(chain, len(chain.tokens))
    lease = cache.open(match, chain, now)
    assert lease.num_hit_units == match.units
    return lease, match.position


def compute(
    cache: PrefixCache,
    lease: Lease,
    end: int,
    exports: tuple[tuple[int, str], ...] = (),
    end_reason: str | None = None,
    now: float = 0.0,
) -> None:
    """One chunk, acknowledged in full."""
    reservation = cache.reserve(lease, end, exports, now)
    assert reservation is not None
    cache.confirm(lease, reservation)
    cache.publish(lease, end, [position for position, _ in exports], end_reason, now)


def store(cache: PrefixCache, tokens: list[int], *positions: int, now: float = 0.0) -> None:
    """Compute `tokens` in one chunk, keep checkpoints at `positions` and end the lease."""
    chain = make_chain(tokens, cache.match_unit)
    lease, _ = open_lease(cache, chain, now)
    inside = tuple((p, reasons.MESSAGE) for p in positions if p < len(tokens))
    compute(cache, lease, len(tokens), inside, reasons.END if len(tokens) in positions else None, now)
    cache.release(lease, None, now)
    assert cache.audit([]) == []


def used(cache: PrefixCache) -> list[int]:
    return [cache.memory.num_used(pool) for pool in range(len(cache.geometry.pool_record_bytes))]


# ------------------------------------------------------------------ the verbs
def test_a_life_of_a_prefix() -> None:
    cache = make_cache(geometry=TWO_GROUPS)
    chain = make_chain(range(11))
    lease, position = open_lease(cache, chain)
    assert position == 0
    assert cache.initial_slots(lease) == [ZERO_STATE, ZERO_STATE]
    reservation = cache.reserve(lease, 10, [(8, reasons.TAIL), (4, reasons.MESSAGE)], 0.0)
    assert reservation is not None
    assert [len(pages) for pages in reservation.new_pages] == [3, 3]
    assert (reservation.refused, reservation.initial) == ([], [ZERO_STATE, ZERO_STATE])
    assert used(cache) == [3, 3, 3, 3]  # three pages; a running state and two exports
    assert lease.page_tables == [[], []] and lease.running is None, "nothing is the lease's yet"
    cache.confirm(lease, reservation)
    assert lease.page_tables == reservation.new_pages and lease.running == reservation.running
    assert cache.match(chain, 11).position == 0, "reserved is not published"
    assert cache.audit([lease]) == []
    cache.publish(lease, 10, [4, 8], None, 1.0)
    assert lease.exports == {} and lease.tip.depth == 2
    assert cache.audit([lease]) == []
    assert [cache.match(chain, n).position for n in (12, 9, 8, 5, 4)] == [8, 8, 4, 4, 0]
    assert cache.counters.checkpoints_by_reason == {reasons.TAIL: 1, reasons.MESSAGE: 1}
    cache.release(lease, 10, 2.0)
    assert cache.audit([]) == []
    assert used(cache) == [2, 2, 2, 2], "the third page was never published; the running state is gone"
    assert lease.page_tables == [[], []]


def test_a_second_request_shares_pages_and_writes_its_own() -> None:
    cache = make_cache(geometry=TWO_GROUPS)
    store(cache, numbered(8), 8)
    first = cache.tree.walk(cache.tree.roots[make_chain([]).root], make_chain(numbered(8)).extend(2), 2)
    chain = make_chain([*numbered(8), 1, 2, 3, 4, 5])
    lease, position = open_lease(cache, chain, 5.0)
    assert position == 8
    assert lease.page_tables == [[node.pages[g] for node in first] for g in range(2)]
    assert cache.initial_slots(lease) == first[1].states
    reservation = cache.reserve(lease, 13, [(12, reasons.TAIL)], 5.0)
    assert reservation is not None and reservation.initial == first[1].states
    assert reservation.running is not None
    assert set(reservation.running).isdisjoint(()) and reservation.running != first[1].states
    cache.confirm(lease, reservation)
    cache.publish(lease, 13, [12], None, 5.0)
    assert [node.pins for node in first] == [0, 0], "the pin moved on with the tip"
    assert cache.audit([lease]) == []
    cache.release(lease, 13, 6.0)
    assert cache.match(chain, 13).position == 12


def test_the_last_token_is_always_computed() -> None:
    cache = make_cache()
    store(cache, numbered(16), 4, 8, 12, 16)
    for num_tokens in range(1, 17):
        match = cache.match(make_chain(numbered(num_tokens)), num_tokens)
        assert match.position == (num_tokens - 1) // UNIT * UNIT
        assert match.limit_units == match.units


def test_only_a_state_at_the_boundary_makes_it_resumable() -> None:
    cache = make_cache()
    store(cache, numbered(16), 8)
    match = cache.match(make_chain(numbered(40)), 40)
    assert (match.position, match.units, match.hit.attention_units) == (8, 2, 4)
    assert match.hit.units_by_group == {"attention 0": 4, "recurrent 0": 2}
    assert match.hit.limiting_group == "recurrent 0"
    assert [node.depth for node in match.path] == [1, 2, 3, 4]


def test_match_changes_nothing() -> None:
    cache = make_cache()
    store(cache, numbered(16), 8)
    before = snapshot(cache)
    cache.match(make_chain(numbered(16)), 16)
    cache.match(make_chain(numbered(16, 5), domain=CacheDomain(b"other")), 16)
    assert snapshot(cache) == before


def test_unacknowledged_exports_are_freed_and_counted() -> None:
    cache = make_cache(geometry=TWO_GROUPS)
    chain = make_chain(numbered(14))
    lease, _ = open_lease(cache, chain)
    reservation = cache.reserve(lease, 14, [(4, reasons.MESSAGE), (8, reasons.HISTORY), (12, "tail")], 0.0)
    assert reservation is not None
    cache.confirm(lease, reservation)
    cache.publish(lease, 14, [8, 13, 99], None, 0.0)
    assert [n.depth for n in cache.tree.state_nodes.values()] == [2]
    assert cache.counters.refusals == {("not_written", "message"): 1, ("not_written", "tail"): 1}
    assert used(cache) == [4, 4, 2, 2]
    assert cache.audit([lease]) == []


def test_an_export_behind_the_acknowledged_end_is_not_published() -> None:
    cache = make_cache()
    chain = make_chain(numbered(14))
    lease, _ = open_lease(cache, chain)
    reservation = cache.reserve(lease, 14, [(4, "message"), (12, "tail")], 0.0)
    assert reservation is not None
    cache.confirm(lease, reservation)
    cache.publish(lease, 9, [4, 12], None, 0.0)
    assert [n.depth for n in cache.tree.index.values()] == [1, 2]
    assert [n.depth for n in cache.tree.state_nodes.values()] == [1]
    assert cache.counters.refusals == {("not_written", "tail"): 1}
    assert cache.audit([lease]) == []


def test_an_end_between_boundaries_keeps_no_state() -> None:
    cache = make_cache()
    lease, _ = open_lease(cache, make_chain(numbered(10)))
    compute(cache, lease, 10, (), reasons.END)
    assert lease.running is not None and not cache.tree.state_nodes
    cache.release(lease, 10, 0.0)
    assert not cache.tree.state_nodes


def test_the_running_state_becomes_the_checkpoint_where_it_stands() -> None:
    cache = make_cache(geometry=TWO_GROUPS)
    chain = make_chain(numbered(12))
    lease, _ = open_lease(cache, chain)
    compute(cache, lease, 8)
    running = lease.running
    assert running is not None
    assert cache.keep_running(lease, reasons.DECODE, 3.0)
    assert lease.tip.states == running and lease.running is None
    assert cache.initial_slots(lease) == running
    assert lease.decode_nodes == [lease.tip]
    assert not cache.keep_running(lease, reasons.DECODE, 3.0), "there is one already"
    reservation = cache.reserve(lease, 12, (), 3.0)
    assert reservation is not None and reservation.initial == running
    assert set(reservation.running or ()) != set(running)
    cache.confirm(lease, reservation)
    cache.publish(lease, 12, (), None, 3.0)
    cache.release(lease, 12, 4.0)
    assert [n.reason for n in cache.tree.state_nodes.values()] == [reasons.DECODE, reasons.FINISH]
    assert used(cache) == [3, 3, 2, 2]


@pytest.mark.parametrize(("processed", "kept"), [(8, [2]), (None, []), (7, []), (9, [])])
def test_release_keeps_a_sound_state_on_its_boundary_only(processed: int | None, kept: list[int]) -> None:
    cache = make_cache()
    lease, _ = open_lease(cache, make_chain(numbered(9)))
    compute(cache, lease, 8)
    cache.release(lease, processed, 0.0)
    assert [n.depth for n in cache.tree.state_nodes.values()] == kept
    assert cache.audit([]) == []


def test_release_between_reserve_and_publish_leaves_nothing() -> None:
    cache = make_cache(geometry=TWO_GROUPS)
    lease, _ = open_lease(cache, make_chain(numbered(14)))
    reservation = cache.reserve(lease, 14, [(12, reasons.TAIL)], 0.0)
    assert reservation is not None
    cache.confirm(lease, reservation)
    cache.release(lease, None, 0.0)
    assert used(cache) == [0, 0, 0, 0]
    assert cache.tree.roots == {} and cache.audit([]) == []


def test_two_requests_that_computed_the_same_units_end_with_one_copy() -> None:
    cache = make_cache(geometry=TWO_GROUPS)
    chains = [make_chain([*numbered(8), last, last]) for last in (1, 2)]
    leases = [open_lease(cache, chain)[0] for chain in chains]
    for lease in leases:
        reservation = cache.reserve(lease, 10, [(4, reasons.MESSAGE)], 0.0)
        assert reservation is not None
        cache.confirm(lease, reservation)
    own = [list(leases[1].page_tables[g]) for g in range(2)]
    for lease in leases:
        cache.publish(lease, 10, [4], None, 0.0)
        assert cache.audit(leases) == []
    winner, loser = leases
    assert loser.replaced == [(g, unit, winner.page_tables[g][unit]) for unit in range(2) for g in range(2)]
    assert [table[:2] for table in loser.page_tables] == [table[:2] for table in winner.page_tables]
    assert [loser.page_tables[g][2] for g in range(2)] == [own[g][2] for g in range(2)]
    assert used(cache) == [4, 4, 3, 3], "2 shared + 2 own pages, 1 checkpoint + 2 running states"
    for lease in leases:
        cache.release(lease, 10, 0.0)
    assert used(cache) == [2, 2, 1, 1]


def test_a_domain_is_forgotten_with_its_last_user_and_never_shared() -> None:
    cache = make_cache()
    store(cache, numbered(8), 8)
    other = make_chain(numbered(12), domain=CacheDomain(b"tenant"))
    assert cache.match(other, 12).position == 0
    lease, _ = open_lease(cache, other)
    assert len(cache.tree.roots) == 2
    cache.release(lease, None, 0.0)
    assert len(cache.tree.roots) == 1
    assert cache.reset() and cache.tree.roots == {}


def test_reset_leaves_what_is_in_use() -> None:
    cache = make_cache()
    store(cache, numbered(8), 4, 8)
    store(cache, numbered(8, 1), 8)
    lease, position = open_lease(cache, make_chain(numbered(9)))
    assert position == 8
    assert not cache.reset()
    assert sorted(n.depth for n in cache.tree.index.values()) == [1, 2]
    assert [n.depth for n in cache.tree.state_nodes.values()] == [2], "4 is not needed to go on from 8"
    assert cache.audit([lease]) == []
    cache.release(lease, None, 0.0)
    assert cache.reset()
    assert used(cache) == [0, 0]


def test_caching_can_be_switched_off() -> None:
    cache = make_cache(enable_prefix_caching=False)
    chain = make_chain(numbered(9))
    for _ in range(2):
        lease, position = open_lease(cache, chain)
        assert position == 0
        compute(cache, lease, 8, (), reasons.END)
        compute(cache, lease, 9)
        assert not cache.keep_running(lease, reasons.END, 0.0)
        assert len(cache.tree) == 0 and cache.audit([lease]) == []
        cache.release(lease, 8, 0.0)
        assert used(cache) == [0, 0]


def test_one_request_can_bypass_the_cache() -> None:
    cache = make_cache()
    store(cache, numbered(8), 8)
    before = snapshot(cache)
    chain = make_chain(numbered(9))
    lease = cache.open(cache.no_match(), chain, 0.0, uses_cache=False)
    compute(cache, lease, 8, (), reasons.END)
    cache.release(lease, 8, 0.0)
    assert snapshot(cache) == before


@pytest.mark.parametrize(("num_attention", "num_recurrent"), [(0, 1), (1, 0), (0, 2), (3, 2)])
def test_models_of_other_shapes(num_attention: int, num_recurrent: int) -> None:
    cache = make_cache(geometry=make_geometry(UNIT, num_attention, num_recurrent))
    chain = make_chain(numbered(11))
    lease, _ = open_lease(cache, chain)
    compute(cache, lease, 11, ((8, reasons.TAIL),))
    assert cache.audit([lease]) == []
    cache.release(lease, 11, 0.0)
    assert cache.match(chain, 11).position == 8
    lease, position = open_lease(cache, chain)
    compute(cache, lease, 11)
    cache.release(lease, 11, 0.0)
    assert cache.audit([]) == [] and cache.reset()


def test_no_boundary_splits_a_media_item() -> None:
    """A lookup moves below the item it would split, and says so."""
    for start, end in itertools.combinations(range(0, 17), 2):
        cache = make_cache()
        media = [MediaSpan(start, end, b"digest")]
        chain = make_chain(numbered(17), media=media)
        lease, _ = open_lease(cache, chain)
        compute(cache, lease, 16, tuple((p, "message") for p in (4, 8, 12)), reasons.END)
        cache.release(lease, None, 0.0)
        for num_tokens in range(5, 18):
            match = cache.match(make_chain(numbered(num_tokens), media=media), num_tokens)
            fits = [p for p in range(0, num_tokens, UNIT) if not start < p < end]
            deepest = (num_tokens - 1) // UNIT * UNIT
            assert match.position == max(fits)
            assert match.is_media_bound == (max(fits) < deepest)


# ------------------------------------------------------------------ budget
def test_pages_and_the_running_state_are_all_or_nothing() -> None:
    for num_records in range(0, 5):
        cache = make_cache(max(1, num_records))
        if num_records == 0:
            cache.memory.budget_bytes = RECORD_BYTES - 1
        lease, _ = open_lease(cache, make_chain(numbered(13)))
        before = snapshot(cache, [lease])
        assert cache.reserve(lease, 13, [(12, "tail")], 0.0) is None
        assert snapshot(cache, [lease]) == before
        assert cache.audit([lease]) == []


def test_exports_are_served_in_order_of_importance() -> None:
    wanted = [(4, "message"), (8, "interval"), (12, "history"), (16, "tail"), (20, "marker"), (24, "message")]
    order = [16, 12, 24, 4, 20, 8]
    for num_free in range(len(wanted) + 1):
        cache = make_cache(7 + 1 + num_free)
        lease, _ = open_lease(cache, make_chain(numbered(26)))
        reservation = cache.reserve(lease, 26, wanted, 0.0)
        assert reservation is not None
        assert sorted(reservation.exports) == sorted(order[:num_free])
        assert [position for position, _ in reservation.refused] == order[num_free:]
        cache.confirm(lease, reservation)
        refused = {("no_memory", reason): 0 for _, reason in reservation.refused}
        for _, reason in reservation.refused:
            refused["no_memory", reason] += 1
        assert cache.counters.refusals == refused
        assert cache.audit([lease]) == []


def test_interval_checkpoints_never_evict() -> None:
    cache = make_cache(2 + 1 + 2 + 1)
    store(cache, numbered(8), 8)  # two pages and a state
    lease, _ = open_lease(cache, make_chain(numbered(5, 1)))
    reservation = cache.reserve(lease, 5, [(4, reasons.INTERVAL)], 0.0)
    assert reservation is not None and reservation.refused == [(4, reasons.INTERVAL)]
    assert cache.match(make_chain(numbered(9)), 9).position == 8


def test_a_lone_request_goes_on_in_place_when_nothing_can_make_room() -> None:
    cache = make_cache(4)
    store(cache, numbered(4), 4)
    chain = make_chain(numbered(8))
    lease, position = open_lease(cache, chain, 1.0)
    assert position == 4
    slot = lease.tip.states
    taken = cache.memory.acquire(1)
    assert taken is not None
    before = snapshot(cache, [lease])
    reservation = cache.reserve(lease, 8, (), 1.0)
    assert reservation is not None
    assert reservation.initial == reservation.running == slot
    cache.rollback(lease, reservation)
    assert snapshot(cache, [lease]) == before
    assert cache.counters.evictions == {}, "what was undone was never done"
    reservation = cache.reserve(lease, 8, (), 1.0)
    assert reservation is not None
    cache.confirm(lease, reservation)
    assert lease.tip.states is None and lease.running == slot
    assert cache.match(make_chain(numbered(8)), 8).position == 0, "it is being overwritten"
    assert cache.counters.evictions == {("reclaim", "end"): 1}
    cache.publish(lease, 8, (), reasons.END, 2.0)
    cache.release(lease, None, 2.0)
    cache.memory.release(1, taken)
    assert cache.audit([]) == []


def test_a_conversation_that_goes_on_in_place_is_still_that_conversation() -> None:
    """Its checkpoints inherit the turns so far although the one it came from is gone."""
    cache = make_cache(3)
    store(cache, numbered(4), 4)
    chain = make_chain(numbered(8))
    match = cache.match(chain, 8)
    lease = cache.open(match, chain, 1.0)
    lease.lineage = cache.turns_before(lease, match)
    assert lease.lineage == 1
    reservation = cache.reserve(lease, 8, (), 1.0)
    assert reservation is not None and reservation.reclaimed_reason == reasons.END
    cache.confirm(lease, reservation)
    cache.record_hit(lease, match, 1.0)
    cache.publish(lease, 8, (), reasons.END, 1.0)
    assert lease.tip.num_hits == 1


def test_a_checkpoint_somebody_else_reads_is_never_reclaimed() -> None:
    cache = make_cache(4)
    store(cache, numbered(4), 4)
    first, _ = open_lease(cache, make_chain([*numbered(4), 1, 2]))
    second, _ = open_lease(cache, make_chain([*numbered(4), 3, 4]))
    taken = [cache.memory.acquire(1)]
    before = snapshot(cache, [first, second])
    assert cache.reserve(first, 6, (), 1.0) is None
    assert snapshot(cache, [first, second]) == before
    cache.release(second, None, 1.0)
    assert cache.reserve(first, 6, (), 1.0) is not None
    assert taken != [None]


# ------------------------------------------------------------------ failure at every acquire
@contextmanager
def failing(cache: PrefixCache, fails: Callable[[int], bool]) -> Iterator[list[int]]:
    """`memory.acquire` answers None on the chosen calls; yields [calls, failures]."""
    memory_type = type(cache.memory)
    acquire = memory_type.acquire
    counts = [0, 0]

    def wrapped(memory: object, pool: int) -> int | None:
        counts[0] += 1
        if fails(counts[0]):
            counts[1] += 1
            return None
        return acquire(cache.memory, pool)

    memory_type.acquire = wrapped  # type: ignore[assignment, method-assign]
    try:
        yield counts
    finally:
        memory_type.acquire = acquire  # type: ignore[method-assign]


def prepared() -> tuple[PrefixCache, Lease, tuple[tuple[int, str], ...]]:
    """A cache with nothing to evict but the lease's own tip, and a lease about to take a long chunk."""
    cache = make_cache(geometry=TWO_GROUPS)
    store(cache, numbered(8), 8)
    lease, position = open_lease(cache, make_chain(numbered(30)), 1.0)
    assert position == 8
    lease.lineage = 1  # else what fails once is tried again, where it costs live conversations as well
    return cache, lease, ((12, "history"), (20, "message"), (28, "tail"))


NUM_ACQUIRES = 6 * 2 + 2 + 3 * 2
"""Six pages in two groups, a running state and three exports in two groups."""


@pytest.mark.parametrize("persistent", [False, True])
def test_every_acquire_may_fail(persistent: bool) -> None:
    num_runs = 0
    for failing_call in itertools.count(1):
        cache, lease, exports = prepared()
        before = snapshot(cache, [lease])
        with failing(cache, lambda n, at=failing_call: n == at or (persistent and n > at)) as counts:
            reservation = cache.reserve(lease, 30, exports, 2.0)
        if not counts[1]:
            assert reservation is not None and not reservation.refused
            break
        num_runs += 1
        if failing_call <= 12:
            assert reservation is None, "a page is missing"
        else:
            assert reservation is not None
        if reservation is not None:
            is_export = failing_call > 14
            assert bool(reservation.refused) == (is_export or persistent)
            cache.rollback(lease, reservation)
        assert snapshot(cache, [lease]) == before
        assert cache.audit([lease]) == []
        again = cache.reserve(lease, 30, exports, 3.0)
        assert again is not None and not again.refused, "nothing was lost"
        cache.confirm(lease, again)
        cache.publish(lease, 30, [p for p, _ in exports], None, 3.0)
        cache.release(lease, 30, 3.0)
        assert cache.audit([]) == []
        assert [n.depth * UNIT for n in cache.tree.state_nodes.values()] == [8, 12, 20, 28]
    assert num_runs == NUM_ACQUIRES


def test_a_rolled_back_reservation_can_be_confirmed_by_nobody() -> None:
    cache, lease, exports = prepared()
    reservation = cache.reserve(lease, 30, exports, 2.0)
    assert reservation is not None
    cache.rollback(lease, reservation)
    assert reservation.records == []
    cache.rollback(lease, reservation)  # a second time does nothing
    assert cache.audit([lease]) == []


# ------------------------------------------------------------------ decode checkpoints
def decode(cache: PrefixCache, lease: Lease, num_tokens: int, first: int) -> None:
    for position in range(first, first + num_tokens):
        lease.chain.tokens.append(position)
        reservation = cache.reserve(lease, position + 1, (), float(position))
        assert reservation is not None
        cache.confirm(lease, reservation)
        if (position + 1) % UNIT == 0:
            cache.publish(lease, position + 1, (), reasons.DECODE, float(position))
            cache.thin_decode(lease)


@pytest.mark.parametrize(
    ("num_records", "interval", "expected"),
    [
        (400, 0, list(range(4, 41, 4))),  # roomy: nothing is thinned
        (40, 0, [36, 40]),
        (40, 16, [16, 32, 36, 40]),
        (40, 8, [8, 16, 24, 32, 36, 40]),
    ],
)
def test_decode_keeps_the_last_two_boundaries_and_one_per_interval(
    num_records: int, interval: int, expected: list[int]
) -> None:
    cache = make_cache(num_records, decode_interval=interval)
    blocker = [cache.memory.acquire(0) for _ in range(num_records // 2)] if num_records < 100 else []
    lease = cache.open(cache.no_match(), make_chain([]), 0.0)
    decode(cache, lease, 40, 0)
    assert [n.depth * UNIT for n in cache.tree.state_nodes.values()] == expected
    assert all(n.reason == reasons.DECODE for n in cache.tree.state_nodes.values())
    assert cache.audit([lease]) == [] or blocker


def test_a_decode_checkpoint_somebody_hit_or_stands_on_is_not_thinned() -> None:
    cache = make_cache(24)
    blocker = [cache.memory.acquire(0) for _ in range(12)]
    lease = cache.open(cache.no_match(), KeyChain(array("I"), CacheDomain(), UNIT), 0.0)
    decode(cache, lease, 8, 0)
    reader, position = open_lease(cache, make_chain(range(6)))
    assert position == 4
    hit = cache.match(make_chain(range(10)), 10)
    other = cache.open(hit, make_chain(range(10)), 0.0)
    cache.record_hit(other, hit, 1.0)
    cache.release(other, None, 1.0)
    decode(cache, lease, 12, 8)
    assert [n.depth * UNIT for n in cache.tree.state_nodes.values()] == [4, 8, 16, 20]
    assert reader.tip.states is not None and blocker
