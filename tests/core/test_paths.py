"""What belongs to a prompt alone is forgotten, all of it, and nothing else."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.harness import Harness, make_cache, make_chain, numbered
from tests.core.test_eviction import UNIT, grow, random_forest

from milepost.core import paths
from milepost.core.hashing import CacheDomain, tokens_from_bytes
from milepost.core.prefix_cache import PrefixCache
from milepost.core.transfers import ANY_COST, StoredCheckpoint, Transfers, choose_segments
from milepost.core.tree import Node

Tokens = tuple[int, ...]


def tokens_to(node: Node) -> Tokens:
    path: list[int] = []
    current: Node | None = node
    while current is not None and current.parent is not None:
        path = [*tokens_from_bytes(current.tokens), *path]
        current = current.parent
    return tuple(path)


def all_paths(cache: PrefixCache) -> set[Tokens]:
    return {tokens_to(node) for node in cache.tree.index.values()}


def equal_units(left: Tokens, right: Tokens) -> int:
    count = 0
    while (count + 1) * UNIT <= min(len(left), len(right)) and (
        left[count * UNIT : (count + 1) * UNIT] == right[count * UNIT : (count + 1) * UNIT]
    ):
        count += 1
    return count


def expected_rest(
    before: set[Tokens], prompt: Tokens, tips: list[Tokens], num_kept: int, num_public: int
) -> set[Tokens]:
    """By definition: a path is the prompt's own if it begins the prompt or goes on from it."""
    num_units = len(prompt) // UNIT

    def is_own(path: Tokens) -> bool:
        length = min(len(path), len(prompt))
        return path[:length] == prompt[:length]

    kept = min(num_kept, num_units)
    for path in before:
        if not is_own(path) and equal_units(path, prompt) <= num_public:
            kept = max(kept, equal_units(path, prompt))
    for tip in tips:
        kept = max(kept, equal_units(tip, prompt))
    if min(num_kept, num_units) == num_units:
        return before
    gone = set()
    for path in before:
        if equal_units(path, prompt) < min(kept, num_units) or len(path) // UNIT <= kept:
            continue
        if kept < num_units:
            if equal_units(path, prompt) > kept:
                gone.add(path)
        elif is_own(path) or num_public < num_units:
            child = path[: (num_units + 1) * UNIT]
            if not any(tip[: len(child)] == child for tip in tips):
                gone.add(path)
    return before - gone


@given(st.integers(0, 10**9), st.booleans(), st.booleans())
def test_exactly_what_nobody_else_needs_goes(seed: int, limits_public: bool, keeps_some: bool) -> None:
    rng = random.Random(seed)
    cache, leases = random_forest(rng, 1)
    prompt = rng.choice(sorted(all_paths(cache)))
    prompt = prompt[: rng.randrange(1, len(prompt) + 1)] + tuple(rng.choices([0, 1], k=rng.randrange(3)))
    num_public = rng.randrange(4) if limits_public else len(prompt)
    num_kept = rng.randrange(4) if keeps_some else 0
    before = all_paths(cache)
    states = {tokens_to(node) for node in cache.tree.state_nodes.values()}
    tips = [tokens_to(lease.tip) for lease in leases]
    rest = expected_rest(before, prompt, tips, num_kept, num_public)
    done = paths.forget(
        cache, Transfers(cache), make_chain(prompt, UNIT), leases,
        num_kept_units=num_kept, num_public_units=num_public,
    )  # fmt: skip
    assert done is not None
    assert all_paths(cache) == rest
    assert done.num_checkpoints == len(states - {tokens_to(n) for n in cache.tree.state_nodes.values()})
    assert cache.audit(leases) == []
    gone = {key for path in before - rest for key in make_chain(path, UNIT).extend(len(path) // UNIT)[-1:]}
    assert gone <= set(done.keys)
    assert not set(done.keys) & set(cache.tree.index)


def test_a_path_that_only_a_store_has_is_named_too() -> None:
    cache = make_cache()
    grow(cache, numbered(8), [8])
    chain = make_chain(numbered(22))
    done = paths.forget(cache, Transfers(cache), chain, [])
    assert done is not None and done.num_kept_units == 0
    assert done.keys == chain.keys and len(done.keys) == 22 // UNIT
    assert not cache.tree.index


def test_other_domains_and_short_prompts_stay_untouched() -> None:
    cache = make_cache()
    grow(cache, numbered(8), [4, 8])
    before = all_paths(cache)
    for chain in (make_chain(numbered(8), domain=CacheDomain(b"other")), make_chain(numbered(UNIT - 1))):
        done = paths.forget(cache, Transfers(cache), chain, [])
        assert done is not None and done.num_checkpoints == 0
    assert all_paths(cache) == before


def test_nothing_goes_while_a_save_reads_it_or_a_load_brings_it() -> None:
    h = Harness()
    h.serve(numbered(41), wanted=[(20, "message")])
    transfers = h.scheduler.transfers
    node = h.cache.node_at(make_chain(numbered(40)), 20)
    assert node is not None
    records = transfers.begin_save(node, lambda key: False)
    assert records is not None
    assert paths.forget(h.cache, transfers, make_chain(numbered(41)), []) is None
    transfers.end_save(records)
    assert paths.forget(h.cache, transfers, make_chain(numbered(41)), []) is not None
    assert not h.cache.tree.index
    h.check()

    request = h.requests[h.add(numbered(41))]
    outlook = transfers.outlook(request)
    assert outlook is not None
    offers = [StoredCheckpoint(0, 20, 100, "message"), StoredCheckpoint(20, 40, 100, "end")]
    restore = transfers.begin(request, choose_segments(offers, outlook, ANY_COST), h.now)
    assert restore is not None
    assert paths.forget(h.cache, transfers, make_chain(numbered(41)), []) is None
    assert paths.forget(h.cache, transfers, make_chain(numbered(20)), []) is None
    branch = make_chain(numbered(16) + [1, 2, 3, 4, 5])
    assert paths.forget(h.cache, transfers, branch, []) is None, "the load may turn out to share these units"
    assert paths.forget(h.cache, transfers, make_chain(numbered(21, 1)), []) is not None
    transfers.cancel(restore, h.now)
    h.check()
    h.run()


def test_a_request_in_progress_keeps_what_it_stands_on_and_goes_on() -> None:
    h = Harness()
    h.serve(numbered(24))
    following = h.add(numbered(24) + [7] * 9, max_tokens=6)
    h.step()
    leases = [request.lease for request in h.scheduler.running if request.lease is not None]
    chain = make_chain(numbered(24) + [7] * 9)
    done = paths.forget(h.cache, h.scheduler.transfers, chain, leases)
    assert done is not None and done.num_kept_units * UNIT >= 24
    h.check()
    h.run()
    assert len(h.outputs[following]) == 6
    assert paths.forget(h.cache, h.scheduler.transfers, make_chain(numbered(24)), []) is not None
    assert not h.cache.tree.index
    h.check()


def test_forgotten_checkpoints_are_not_reported_as_lost() -> None:
    h = Harness()
    h.serve(numbered(24))
    paths.forget(h.cache, h.scheduler.transfers, make_chain(numbered(24)), [])
    again = h.serve(numbered(24))
    assert h.reuse[again].num_tokens_lost_to_eviction == 0
    assert {move for move, _ in h.cache.counters.evictions} == {"forgotten"}


@pytest.mark.parametrize("pinned", [0, 1])
def test_a_pin_outlives_what_is_not_pinned(pinned: int) -> None:
    h = Harness(num_records=40)
    for seed in (0, 1):
        h.serve(numbered(30, seed))
    kept = paths.pin(h.cache, make_chain(numbered(30, pinned)), h.now + 1000)
    assert kept is not None and kept.depth * UNIT == h.checkpoints(numbered(30, pinned))[-1]
    for seed in range(2, 12):
        h.serve(numbered(30, seed))
    assert h.checkpoints(numbered(30, pinned))
    assert not h.checkpoints(numbered(30, 1 - pinned))
    assert h.cache.memory.peak_committed_bytes <= h.cache.memory.budget_bytes
    assert paths.unpin(h.cache, make_chain(numbered(30, pinned)), h.now) is kept
    assert paths.unpin(h.cache, make_chain(numbered(30, pinned)), h.now) is None
    for seed in range(12, 22):
        h.serve(numbered(30, seed))
    assert not h.checkpoints(numbered(30, pinned))


def test_pinning_what_is_not_there_says_so() -> None:
    h = Harness()
    assert paths.pin(h.cache, make_chain(numbered(30)), 10.0) is None
    assert paths.unpin(h.cache, make_chain(numbered(30)), 10.0) is None
