"""What eviction may and may not do, on random forests with leases, whatever the order it chooses."""

from __future__ import annotations

import itertools
import random

import pytest
from tests.core.harness import RECORD_BYTES, Harness, make_cache, make_chain, make_geometry, numbered
from tests.core.snapshot import snapshot

from milepost.core import reasons
from milepost.core.lease import Lease
from milepost.core.metrics import TimeCounts
from milepost.core.prefix_cache import PrefixCache
from milepost.core.tree import Node

UNIT = 4


def grow(cache: PrefixCache, tokens: list[int], positions: list[int], now: float = 0.0) -> None:
    """Publish `tokens` (whole units) with checkpoints at `positions`; nothing is held afterwards."""
    lease = cache.open(cache.match(make_chain(tokens), len(tokens) + 1), make_chain(tokens), now)
    start = lease.num_hit_units * UNIT
    inside = [(p, reasons.MESSAGE) for p in positions if start < p < len(tokens)]
    if start < len(tokens):
        reservation = cache.reserve(lease, len(tokens), inside, now)
        assert reservation is not None
        cache.confirm(lease, reservation)
        end_reason = reasons.END if len(tokens) in positions else None
        cache.publish(lease, len(tokens), [p for p, _ in inside], end_reason, now)
    cache.release(lease, None, now)


def random_forest(rng: random.Random, num_groups: int) -> tuple[PrefixCache, list[Lease]]:
    """Paths that branch anywhere, checkpoints anywhere, leases on some of the boundaries."""
    cache = make_cache(geometry=make_geometry(UNIT, num_groups, num_groups))
    for _ in range(rng.randrange(1, 7)):
        num_units = rng.randrange(1, 8)
        tokens = [rng.randrange(2) for _ in range(num_units) for _ in range(UNIT)]
        tokens = [rng.choice([0, 0, 1])] * (UNIT * rng.randrange(0, num_units + 1)) + tokens
        positions = [p for p in range(UNIT, len(tokens) + 1, UNIT) if rng.random() < 0.4]
        grow(cache, tokens, positions, now=float(rng.randrange(50)))
    leases = []
    for state_node in list(cache.tree.state_nodes.values()):
        if rng.random() < 0.3:
            path = [state_node, *cache.tree.ancestors(state_node)][-2::-1]
            tokens = [t for n in path for t in memoryview(n.tokens).cast("I")]
            chain = make_chain([*tokens, 9])
            leases.append(cache.open(cache.match(chain, len(tokens) + 1), chain, 60.0))
    assert cache.audit(leases) == []
    return cache, leases


def needed(leases: list[Lease]) -> tuple[set[int], set[int]]:
    """Nodes whose pages, and nodes whose states, somebody stands on."""
    pages: set[int] = set()
    states = set()
    for lease in leases:
        node: Node | None = lease.tip
        states.add(id(lease.tip))
        while node is not None:
            pages.add(id(node))
            node = node.parent
    return pages, states


def check_one_eviction(cache: PrefixCache, leases: list[Lease], now: float) -> bool:
    """Evict once; everything the docstring promises, from before and after."""
    nodes = dict(cache.tree.index)
    states = {key: node.states for key, node in nodes.items()}
    used = cache.memory.used_bytes
    stranded = [n for n in cache.tree.stranded.values() if not n.pins]
    counters = cache.counters
    evicted_bytes = counters.evicted_bytes
    promised = {
        key: cache.evictor._record(node, now).freed_bytes for key, node in cache.tree.state_nodes.items()
    }
    if not cache.evictor.evict_one(now):
        pages, held = needed(leases)
        assert all(id(node) in pages for node in nodes.values()), "False only if all is in use"
        assert all(id(node) in held for node in nodes.values() if node.states is not None)
        assert cache.memory.used_bytes == used
        return False
    assert cache.memory.used_bytes < used, "at least one record was freed"
    assert counters.evicted_bytes - evicted_bytes == used - cache.memory.used_bytes
    gone = {key: node for key, node in nodes.items() if key not in cache.tree.index}
    lost = [key for key, slots in states.items() if slots is not None and nodes[key].states is None]
    pages, held = needed(leases)
    assert not any(id(node) in pages for node in gone.values()), "a lease needs it"
    assert not any(id(nodes[key]) in held for key in lost)
    if stranded:
        assert not lost, "what nothing can resume from goes first"
        assert gone
    elif gone:
        [key] = lost
        assert promised[key] == used - cache.memory.used_bytes, "it was ranked by what it really frees"
        assert key in gone, "a leaf segment goes whole"
        check_whole_segment(gone, nodes[key])
    else:
        [key] = lost
        assert promised[key] == used - cache.memory.used_bytes
        assert nodes[key].children, "an interior one is merged: its pages stay"
    assert cache.audit(leases) == []
    return True


def check_whole_segment(gone: dict[bytes, Node], leaf: Node) -> None:
    """All its own units down to a checkpoint, a branch, a lease or the root, and no more."""
    node: Node = leaf
    while node.parent is not None and not node.parent.is_root and node.parent.key in gone:
        node = node.parent
        assert node.states is None
    below = node.parent
    assert below is not None
    assert below.is_root or below.states is not None or below.children or below.pins
    assert len(gone) == leaf.depth - below.depth


@pytest.mark.parametrize("num_groups", [1, 2])
def test_every_eviction_of_random_forests(num_groups: int) -> None:
    for seed in range(120):
        rng = random.Random(seed)
        cache, leases = random_forest(rng, num_groups)
        now = 60.0
        while check_one_eviction(cache, leases, now):
            now += rng.choice([0.0, 1.0, 1000.0])
            if rng.random() < 0.2 and leases:
                cache.release(leases.pop(), None, now)
        for lease in leases:
            cache.release(lease, None, now)
        assert cache.reset(), "with nobody left everything can go"
        assert cache.memory.used_bytes == 0 and cache.tree.roots == {}
        assert cache.audit([]) == []


def test_eviction_is_deterministic() -> None:
    def order(seed: int) -> list[bytes]:
        cache, _ = random_forest(random.Random(seed), 1)
        removed = []
        while cache.evictor.evict_one(100.0):
            removed.append(b"".join(sorted(cache.tree.index)))
        return removed

    assert [order(seed) for seed in range(20)] == [order(seed) for seed in range(20)]


def test_what_is_left_stays_resumable() -> None:
    """A state never outlives its pages: after any number of evictions every checkpoint can be hit."""
    for seed in range(40):
        cache, _ = random_forest(random.Random(seed), 1)
        while cache.evictor.evict_one(100.0):
            for node in cache.tree.state_nodes.values():
                path = [node, *cache.tree.ancestors(node)][-2::-1]
                tokens = [t for n in path for t in memoryview(n.tokens).cast("I")]
                assert cache.match(make_chain(tokens), len(tokens) + 1).position == node.depth * UNIT


# ------------------------------------------------------------------ order
def two_paths(first: float, second: float, **sizes: int) -> PrefixCache:
    cache = make_cache()
    grow(cache, numbered(sizes.get("first_tokens", 16)), [sizes.get("first_tokens", 16)], first)
    grow(cache, numbered(sizes.get("second_tokens", 16), 1), [sizes.get("second_tokens", 16)], second)
    return cache


def survivor(cache: PrefixCache, now: float) -> int:
    """Which of two paths still has its checkpoint after one eviction."""
    assert cache.evictor.evict_one(now)
    [node] = cache.tree.state_nodes.values()
    root_child = next(iter(cache.tree.roots.values())).children
    assert len(root_child) == 1
    return memoryview(node.tokens).cast("I")[0] // 1000 - 1


def test_the_least_recently_used_goes_first() -> None:
    for first, second in ((0.0, 500.0), (500.0, 0.0)):
        assert survivor(two_paths(first, second), 1000.0) == (1 if first < second else 0)


def test_of_equals_the_oldest_goes_first() -> None:
    assert survivor(two_paths(5.0, 5.0), 10.0) == 1


def test_what_saves_more_per_byte_stays() -> None:
    """A state costs a record like a page, so longer segments save more tokens per record."""
    assert survivor(two_paths(5.0, 5.0, first_tokens=32, second_tokens=8), 10.0) == 0
    assert survivor(two_paths(5.0, 5.0, first_tokens=8, second_tokens=32), 10.0) == 1


def test_a_hit_makes_a_path_live() -> None:
    """Equal age of use, but one continues a conversation."""
    cache = two_paths(5.0, 5.0)
    chain = make_chain([*numbered(16), 1])
    match = cache.match(chain, 17)
    lease = cache.open(match, chain, 5.0)
    cache.record_hit(lease, match, 5.0)
    cache.release(lease, None, 5.0)
    assert survivor(cache, 6.0) == 0


@pytest.mark.parametrize(("priority", "expected"), [(1, 0), (4, 0), (100, 0), (-1, 1), (-100, 1)])
def test_a_client_may_raise_or_lower_the_value(priority: int, expected: int) -> None:
    cache = make_cache()
    for seed, own_priority in ((0, priority), (1, 0)):
        chain = make_chain(numbered(16, seed))
        lease = cache.open(cache.no_match(), chain, 5.0)
        lease.retention_priority = own_priority
        reservation = cache.reserve(lease, 16, (), 5.0)
        assert reservation is not None
        cache.confirm(lease, reservation)
        cache.publish(lease, 16, (), reasons.END, 5.0)
        cache.release(lease, None, 5.0)
    assert survivor(cache, 5.0) == expected


@pytest.mark.parametrize(("now", "expected"), [(29.0, 0), (31.0, 1)])
def test_a_pinned_marker_goes_last_until_the_pin_ends(now: float, expected: int) -> None:
    cache = make_cache()
    chain = make_chain(numbered(4))
    lease = cache.open(cache.no_match(), chain, 0.0)
    lease.pin_seconds = 30.0
    reservation = cache.reserve(lease, 4, (), 0.0)
    assert reservation is not None
    cache.confirm(lease, reservation)
    cache.publish(lease, 4, (), reasons.MARKER, 0.0)
    cache.release(lease, None, 0.0)
    for seed in (1, 2, 3):
        grow(cache, numbered(40, seed), [40], 20.0)
    kept = []
    while len(cache.tree.state_nodes) > (1 if expected == 0 else 3):
        assert cache.evictor.evict_one(now)
        kept = [memoryview(n.tokens).cast("I")[0] // 1000 - 1 for n in cache.tree.state_nodes.values()]
    assert (0 in kept) == (expected == 0)


def test_stranded_pages_go_before_anything_that_can_be_resumed() -> None:
    cache = make_cache()
    grow(cache, numbered(16), [16], 0.0)
    grow(cache, numbered(16, 1), [], 900.0)
    assert cache.evictor.evict_one(1000.0)
    assert [n.depth for n in cache.tree.index.values()] == [1, 2, 3, 4]
    assert cache.counters.evictions == {("stranded", "interval"): 1}
    assert cache.counters.evicted_bytes == 4 * RECORD_BYTES
    assert cache.counters.num_evicted_tokens == 16


@pytest.mark.parametrize("moves_on", [False, True])
def test_a_checkpoint_is_ranked_again_as_soon_as_nobody_stands_on_it(moves_on: bool) -> None:
    """Forty paths are ranked at once, while a lease stands on the least valuable one."""
    cache = make_cache()
    for seed in range(40):
        grow(cache, numbered(8, seed), [8], 900.0 + seed if seed else 0.0)
    tokens = [*numbered(8), 1, 2, 3, 4, 5]
    chain = make_chain(tokens)
    lease = cache.open(cache.match(chain, 13), chain, 0.0)
    assert cache.evictor.evict_one(1000.0)
    assert cache.match(make_chain(numbered(9, 1)), 9).position == 0, "the next one went instead"
    if moves_on:
        reservation = cache.reserve(lease, 12, (), 0.0)
        assert reservation is not None
        cache.confirm(lease, reservation)
        cache.publish(lease, 12, (), None, 0.0)
    else:
        cache.release(lease, None, 0.0)
    assert cache.evictor.evict_one(1000.0)
    assert cache.match(make_chain(numbered(9)), 9).position == 0
    assert cache.match(make_chain(numbered(9, 2)), 9).position == 8


def test_a_fork_keeps_its_trunk_for_the_other_branch() -> None:
    cache = make_cache()
    grow(cache, numbered(8) + [1] * 4, [12], 0.0)
    grow(cache, numbered(8) + [2] * 4, [12], 900.0)
    assert cache.evictor.evict_one(1000.0)
    assert sorted(n.depth for n in cache.tree.index.values()) == [1, 2, 3]
    assert cache.counters.evictions == {("drop", "end"): 1}


# ------------------------------------------------------------------ the other moves
def test_states_per_path_are_bounded_but_forks_and_the_newest_are_spared() -> None:
    for limit in (1, 2, 3):
        cache = make_cache(max_states_per_path=limit)
        tokens = numbered(32)
        for end in range(4, 33, 4):
            grow(cache, tokens[:end], [end], now=float(end))
            depths = [n.depth * UNIT for n in cache.tree.state_nodes.values()]
            assert len(depths) <= limit and end in depths
            assert cache.audit([]) == []
        refused = sum(n for (why, _), n in cache.counters.refusals.items() if why == "states_per_path")
        assert refused == 8 - limit


def test_a_fork_is_spared_by_the_bound() -> None:
    cache = make_cache(max_states_per_path=1)
    trunk = numbered(8)
    grow(cache, trunk, [8])
    grow(cache, trunk + [1] * 4, [12])
    assert [n.depth for n in cache.tree.state_nodes.values()] == [3]
    cache = make_cache(max_states_per_path=1)
    grow(cache, trunk + [1] * 4, [])
    grow(cache, trunk + [2] * 4, [8])
    assert [n.depth for n in cache.tree.state_nodes.values()] == [2]
    grow(cache, trunk + [2] * 8, [16])
    assert [n.depth for n in cache.tree.state_nodes.values()] == [2, 4], "8 serves the other branch"


def test_a_pinned_state_is_spared_by_the_bound() -> None:
    cache = make_cache(max_states_per_path=1)
    grow(cache, numbered(8), [8])
    chain = make_chain(numbered(9))
    lease = cache.open(cache.match(chain, 9), chain, 0.0)
    grow(cache, numbered(16), [16])
    assert [n.depth for n in cache.tree.state_nodes.values()] == [2, 4]
    assert cache.audit([lease]) == []


def test_thin_spares_what_is_used_hit_or_kept_for_another_reason() -> None:
    def prepared() -> tuple[PrefixCache, Node]:
        cache = make_cache()
        grow(cache, numbered(8), [4, 8])
        return cache, next(n for n in cache.tree.state_nodes.values() if n.depth == 1)

    for spare in ("pins", "num_hits", "reason", "nothing"):
        cache, node = prepared()
        if spare in ("pins", "num_hits"):
            setattr(node, spare, 1)
        before = snapshot(cache)
        cache.evictor.thin(node, reasons.TAIL if spare == "reason" else reasons.MESSAGE, 0)
        assert (snapshot(cache) == before) == (spare != "nothing")
        if spare == "nothing":
            assert node.states is None and len(cache.tree) == 2
            assert cache.counters.evictions == {("thin", "message"): 1}


def test_thin_drops_a_leaf_with_its_pages() -> None:
    cache = make_cache()
    grow(cache, numbered(12), [4, 12])
    leaf = next(n for n in cache.tree.state_nodes.values() if n.depth == 3)
    cache.evictor.thin(leaf, reasons.END, 0)
    assert [n.depth for n in cache.tree.index.values()] == [1]
    assert cache.audit([]) == []


def test_drop_subtree_takes_everything_behind_a_node_and_nothing_else() -> None:
    cache = make_cache()
    trunk = numbered(8)
    grow(cache, trunk + [1] * 8, [4, 8, 12, 16])
    grow(cache, trunk + [2] * 8, [12])
    grow(cache, numbered(8, 5), [8])
    fork = cache.node_at(make_chain(trunk), 8)
    assert fork is not None
    used = cache.memory.used_bytes
    assert cache.evictor.drop_subtree(fork) == 4
    assert cache.counters.evicted_bytes == used - cache.memory.used_bytes
    assert cache.counters.num_evicted_tokens == 5 * UNIT
    assert {move for move, _ in cache.counters.evictions} == {"condemned"}
    assert sorted(n.depth for n in cache.tree.index.values()) == [1, 1, 2]
    assert cache.audit([]) == []
    chain = make_chain(numbered(9, 5))
    lease = cache.open(cache.match(chain, 9), chain, 0.0)
    with pytest.raises(ValueError, match="cannot be removed"):
        cache.evictor.drop_subtree(lease.tip)


# ------------------------------------------------------------------ scenarios
@pytest.mark.parametrize(("side_tokens", "side_outputs"), [(7, 2), (11, 2), (18, 3)])
@pytest.mark.parametrize("num_sides", [1, 2, 5])
def test_side_requests_do_not_push_out_a_live_conversation(
    side_tokens: int, side_outputs: int, num_sides: int
) -> None:
    """B64: room for the conversation and one side request with a state each; titles and summaries pass
    through between its turns."""
    tokens = numbered(41)
    need = make_geometry().request_bytes(41 + 2 * 12) + make_geometry().request_bytes(
        side_tokens + side_outputs
    )
    harness = Harness(num_records=need // RECORD_BYTES + 2)
    for turn in range(4):
        request_id = harness.serve(tokens, 2)
        if turn:
            assert harness.cached(request_id) >= 40, "what the first turn read is still there"
        tokens = harness.tokens_of(request_id) + numbered(4, 50 + turn)
        harness.now += 10.0
        for side in range(num_sides if turn else 0):
            harness.serve(numbered(side_tokens, 100 + 10 * turn + side), side_outputs)
            harness.now += 5.0


def test_the_newest_checkpoint_survives_any_spacing() -> None:
    """B54: turns shorter than the spacing of interval checkpoints."""
    for interval, alignment in itertools.product((0, 512), (1, 8, None)):
        harness = Harness(geometry=make_geometry(alignment=alignment), checkpoint_interval=interval)
        tokens = numbered(30)
        for turn in range(5):
            request_id = harness.serve(tokens, 2)
            if turn:
                assert harness.cached(request_id) > 0
            tokens = harness.tokens_of(request_id) + numbered(9, turn + 1)


def test_what_is_left_of_a_conversation_is_no_passed_turn() -> None:
    """The end behind it was given up: the conversation resumes here, and its class says so."""
    harness = Harness(geometry=make_geometry())
    first = harness.serve(numbered(20), 9)
    cache = harness.cache
    nodes = sorted(cache.tree.state_nodes.values(), key=lambda node: node.depth)
    end = nodes[-1]
    below = cache.tree.ancestor_with_state(end)
    assert below is not None and below.is_passed and not end.is_passed, first
    cache.evictor._evict(end)
    assert not below.children and not below.is_passed
    assert harness.scheduler.audit() == []


def test_a_merged_checkpoint_hands_its_uses_to_the_one_below() -> None:
    harness = Harness(geometry=make_geometry())
    harness.serve(numbered(20), wanted=[(8, "message")])
    for number in range(3):
        harness.serve(numbered(16) + [9000 + number] * 6)
    cache = harness.cache
    used = max(cache.tree.state_nodes.values(), key=lambda node: node.num_hits)
    below = cache.tree.ancestor_with_state(used)
    assert below is not None and used.children and used.num_hits > below.num_hits
    num_hits, last_used = used.num_hits, used.last_used
    cache.evictor._evict(used)
    assert (below.num_hits, below.last_used) == (num_hits, last_used)
    assert harness.scheduler.audit() == []


def test_times_of_checkpoints() -> None:
    """Made at 0, used at 10 and 70, gone at 100 and not before; a reset counts for nothing."""
    harness = Harness(num_records=12)
    first = numbered(12)
    for now in (0.0, 10.0, 70.0):
        harness.now = now
        harness.add([*first, 1], 1)
        harness.run()
    counters = harness.cache.counters
    assert counters.reuse_gaps.counts[1:5] == [0, 1, 1, 0] and sum(counters.reuse_gaps.counts) == 2
    assert counters.reuse_gaps.sum_seconds == pytest.approx(70.0, abs=1.0)
    assert not sum(counters.lifetimes.counts)
    harness.now = 100.0
    harness.add(numbered(30, 1), 1)
    harness.run()
    assert counters.lifetimes.sum_seconds == pytest.approx(100.0 * sum(counters.lifetimes.counts), abs=2.0)
    assert counters.idle_times.sum_seconds < counters.lifetimes.sum_seconds
    assert sum(counters.idle_times.counts) == sum(counters.lifetimes.counts) > 0
    before = list(counters.lifetimes.counts)
    assert harness.scheduler.reset_prefix_cache()
    assert counters.lifetimes.counts == before


def test_classes_of_times() -> None:
    times = TimeCounts()
    for seconds in (0.0, 1.0, 1.5, 86400.0, 1e9):
        times.add(seconds)
    assert times.counts == [2, 1, 0, 0, 0, 0, 0, 0, 1, 1]
