"""What a small cache recomputes beyond promise P1 is what its counters of evictions and refusals explain.

Two references, both independent of the counters: a second world with the same requests and memory for
everything, and the book of `sim/losses.py`, which never forgets what could once be resumed from.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core import explain, losses
from milepost.core.eviction import Evictor
from milepost.core.geometry import AttentionGroupSpec, CacheGeometry, RecurrentGroupSpec
from milepost.core.hashing import KeyChain
from milepost.core.losses import Loss, LostCheckpoints
from milepost.core.metrics import CacheCounters
from milepost.core.prefix_cache import PrefixCache
from milepost.core.request import ReuseReport
from milepost.core.tree import Node
from milepost.sim.promises import BoundError
from milepost.sim.spec import Conversation, Outcome
from milepost.sim.swarm import Swarm, draw_config
from milepost.sim.workload import (
    AgentHabits,
    TurnSizes,
    agent,
    child_rng,
    multiturn,
    random_tokens,
)
from milepost.sim.world import Checks, SimulationError, World

AMPLE = 1 << 40
MAX_TOKENS = 600
ROOM = (1.05, 1.5, 3.0, 6.0)
"""Budgets, in requests of MAX_TOKENS."""


# ------------------------------------------------------------------ beside a cache that is large enough
def make_world(shape: CacheGeometry, cache_bytes: int, max_states_per_path: int | None = None) -> World:
    """Checkpoints where the requests ask for them, and only there: load decides nothing."""
    config = CacheConfig(
        cache_bytes,
        match_unit=shape.match_unit,
        decode_interval=0,
        checkpoint_interval=0,
        max_states_per_path=max_states_per_path,
    )
    return World(
        shape, config, SchedulerConfig(4096, 4, MAX_TOKENS), checks=Checks(audit=False, contents=False)
    )


def chats(rng: Random, match_unit: int) -> list[Conversation]:
    system = random_tokens(rng, rng.randrange(1, 60))
    sizes = TurnSizes(rng.randrange(1, 40), rng.randrange(1, 20), rng.randrange(0, 6))
    return [multiturn(child_rng(rng), system, 5, sizes, name=f"chat {i}", vary=0.9) for i in range(8)]


def agents(rng: Random, match_unit: int) -> list[Conversation]:
    """Side requests, and thinking stripped from the history; nothing is aborted half-way or edited."""
    system = random_tokens(rng, rng.randrange(1, 60))
    habits = AgentHabits(edit=0.0, abort=0.0)
    return [agent(child_rng(rng), system, 5, TurnSizes(15, 8), habits, name=f"agent {i}") for i in range(6)]


WORKLOADS: dict[str, Callable[[Random, int], list[Conversation]]] = {
    "chats": chats, "agents": agents,
}  # fmt: skip


@dataclass
class Pair:
    """One request in both worlds; tokens.

    Attributes:
        num_lost: what the small world's request says an eviction or refusal cost.
        num_processed: P, tokens of the prompt that an earlier request of the conversation processed.
    """

    small: Outcome
    ample: Outcome
    num_lost: int
    num_processed: int

    def beyond_bound(self, outcome: Outcome, match_unit: int) -> int:
        """Tokens recomputed beyond P1; negative if fewer are."""
        num_tokens = outcome.num_prompt_tokens
        return outcome.num_recomputed_tokens - (match_unit - 1 + max(1, num_tokens - self.num_processed))


def run_in_both(small: World, ample: World, conversations: list[Conversation], rng: Random) -> Iterator[Pair]:
    """The same requests, one after the other, conversations in a random order."""
    counters = small.scheduler.cache.counters
    turns = [(conversation, next(conversation, ())) for conversation in conversations]
    seen: dict[int, list[int]] = {}
    while turns:
        conversation, specs = turns.pop(rng.randrange(len(turns)))
        outcomes = []
        for spec in specs:
            before = counters.tokens_lost_to_eviction.total()
            pair = []
            for one in (small, ample):
                request_id = one.add(spec)
                one.drain()
                one.now += 1.0
                pair.append(one.outcomes[request_id])
            outcomes.append(pair[0])
            if pair[0].num_cached_tokens is not None and pair[1].num_cached_tokens is not None:
                processed = common_prefix(seen.get(id(conversation), []), spec.prompt)
                num_lost = counters.tokens_lost_to_eviction.total() - before
                yield Pair(pair[0], pair[1], num_lost, processed)
            if pair[0].finish_reason in ("stop", "length"):
                seen[id(conversation)] = [*spec.prompt, *pair[0].output_tokens[:-1]]
        try:
            turns.append((conversation, conversation.send(outcomes)))
        except StopIteration:
            pass


def common_prefix(first: Iterable[int], second: Iterable[int]) -> int:
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count


def check_beside_ample(workload: str, seed: int, room: float, max_states: int | None = None) -> Counter[str]:
    """Both worlds are asked for the same checkpoints. (Where prompts fork at places nobody announced, or are
    aborted half-way, either world may make one that the other never makes; the book covers those.)"""
    rng = Random(seed)
    unit = rng.choice((1, 4, 16))
    shape = CacheGeometry(
        unit, (AttentionGroupSpec("full", 64),), (RecurrentGroupSpec("kda", 4096, rng.choice((1, None))),)
    )
    small = make_world(shape, round(shape.request_bytes(MAX_TOKENS) * room), max_states)
    ample = make_world(shape, AMPLE)
    found: Counter[str] = Counter()
    for pair in run_in_both(small, ample, WORKLOADS[workload](rng, unit), rng):
        missing = (pair.ample.num_cached_tokens or 0) - (pair.small.num_cached_tokens or 0)
        assert missing == pair.num_lost, (pair.small.spec.label, missing, pair.num_lost)
        if workload == "chats":
            slack = -pair.beyond_bound(pair.ample, unit)
            assert slack >= 0, "P1, with memory for everything"
            found["shortfall"] += max(0, pair.beyond_bound(pair.small, unit))
            found["explained"] += max(0, pair.num_lost - slack)
        found["requests"] += 1
        found["short"] += pair.num_lost > 0
        found["lost"] += pair.num_lost
    assert found["shortfall"] == found["explained"]
    assert small.scheduler.cache.counters.tokens_lost_to_eviction.total() == found["lost"]
    assert not ample.scheduler.cache.counters.tokens_lost_to_eviction
    return found


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("room", ROOM)
def test_a_small_cache_loses_what_its_counters_say(workload: str, room: float) -> None:
    """For each request: what a cache that is large enough reuses more = tokens lost to evictions; and the
    shortfall against P1 follows from it."""
    found: Counter[str] = Counter()
    for seed in range(2):
        found += check_beside_ample(workload, seed, room)
    assert found["requests"] > 60
    assert room > 2 or found["short"] > 0
    assert room > 2 or workload != "chats" or found["shortfall"] > 0


def test_bounded_paths_lose_what_the_counters_say() -> None:
    """With memory for everything, so that the bound per path is the only reason."""
    found: Counter[str] = Counter()
    for seed in range(2):
        found += check_beside_ample("chats", seed, 1000.0, max_states=1)
    assert found["short"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_conversations_in_small_caches() -> None:
    """Eight conversations a world; MILEPOST_LOSS_WORLDS=1250 makes ten thousand."""
    num_worlds = int(os.environ.get("MILEPOST_LOSS_WORLDS") or 120)
    found: Counter[str] = Counter()
    rng = Random(99)
    for seed in range(num_worlds):
        found += check_beside_ample("chats", 1000 + seed, rng.choice(ROOM))
    print(f"\n{dict(found)}")
    assert found["short"] > 3 * num_worlds and found["shortfall"] > 0


# ------------------------------------------------------------------ in any world
def test_costs_in_random_worlds() -> None:
    """The book agrees in worlds with concurrency, faults, preemptions, media and several groups (it is asked
    after every action); there the usual ways to lose a checkpoint all cost somebody tokens."""
    found: Counter[str] = Counter()
    for seed in range(50):
        swarm = Swarm(Random(seed))
        swarm.run(150)
        assert swarm.world.losses is not None
        for (cause, _), num_tokens in swarm.world.losses.reported.items():
            found[cause] += num_tokens
    assert found.keys() >= {"drop", "merge", "stranded", "states_per_path"}, found


# ------------------------------------------------------------------ counters that are wrong
Plant = Callable[[pytest.MonkeyPatch], None]


def eviction_not_counted(patch: pytest.MonkeyPatch) -> None:
    free = Evictor._free_state

    def free_silently(self: Evictor, node: Node, move: str) -> None:
        reason = node.reason
        free(self, node, move)
        if move == "merge":
            self.counters.evictions[move, reason] -= 1

    patch.setattr(Evictor, "_free_state", free_silently)


def eviction_counted_twice(patch: pytest.MonkeyPatch) -> None:
    free = Evictor._free_state

    def free_loudly(self: Evictor, node: Node, move: str) -> None:
        if move == "drop":
            self.counters.evictions[move, node.reason] += 1
        free(self, node, move)

    patch.setattr(Evictor, "_free_state", free_loudly)


def evicted_bytes_counted_twice(patch: pytest.MonkeyPatch) -> None:
    free = Evictor._free_state

    def free_heavily(self: Evictor, node: Node, move: str) -> None:
        self.counters.evicted_bytes += 1
        free(self, node, move)

    patch.setattr(Evictor, "_free_state", free_heavily)


def evicted_tokens_forgotten(patch: pytest.MonkeyPatch) -> None:
    drop = Evictor._drop_tail

    def drop_silently(self: Evictor, node: Node, move: str, reason: str) -> None:
        before = self.counters.num_evicted_tokens
        drop(self, node, move, reason)
        self.counters.num_evicted_tokens = before

    patch.setattr(Evictor, "_drop_tail", drop_silently)


def forgets(cause: str) -> Plant:
    """The cost of one kind of loss is not remembered."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        remember = LostCheckpoints.remember

        def remember_some(self: LostCheckpoints, key: bytes, why: str, reason: str) -> None:
            if why != cause:
                remember(self, key, why, reason)

        patch.setattr(LostCheckpoints, "remember", remember_some)

    return plant


def wrong_reason_blamed(patch: pytest.MonkeyPatch) -> None:
    remember = LostCheckpoints.remember
    patch.setattr(
        LostCheckpoints, "remember", lambda self, key, why, reason: remember(self, key, why, "marker")
    )


def loss_without_an_eviction(patch: pytest.MonkeyPatch) -> None:
    """Something is called lost that never was there."""
    beyond = LostCheckpoints.beyond

    def imagine(self: LostCheckpoints, chain: KeyChain, units: int, limit: int) -> Loss | None:
        loss = beyond(self, chain, units, limit)
        return loss if loss is not None or limit <= units + 1 else Loss(units + 1, "drop", "tail")

    patch.setattr(LostCheckpoints, "beyond", imagine)


def nearest_loss_taken(patch: pytest.MonkeyPatch) -> None:
    """The loss next to the hit is reported, not the deepest one."""

    def nearest(self: LostCheckpoints, chain: KeyChain, units: int, limit: int) -> Loss | None:
        for deeper in range(units + 1, limit + 1):
            if chain.keys[deeper - 1] in self and chain.unsplit_units(deeper) == deeper:
                return Loss(deeper, *self._why[chain.keys[deeper - 1]])
        return None

    patch.setattr(LostCheckpoints, "beyond", nearest)


def refusal_not_counted(patch: pytest.MonkeyPatch) -> None:
    confirm = PrefixCache.confirm

    def confirm_silently(self: PrefixCache, lease: Any, reservation: Any) -> None:
        reservation.refused = reservation.refused[1:]
        confirm(self, lease, reservation)

    patch.setattr(PrefixCache, "confirm", confirm_silently)


def refusal_counted_twice(patch: pytest.MonkeyPatch) -> None:
    confirm = PrefixCache.confirm

    def confirm_loudly(self: PrefixCache, lease: Any, reservation: Any) -> None:
        reservation.refused = reservation.refused * 2
        confirm(self, lease, reservation)

    patch.setattr(PrefixCache, "confirm", confirm_loudly)


def cost_counted_twice(patch: pytest.MonkeyPatch) -> None:
    count = explain.count_query

    def count_twice(counters: CacheCounters, report: ReuseReport) -> None:
        count(counters, report)
        if report.eviction is not None:
            counters.tokens_lost_to_eviction[report.eviction] += report.num_tokens_lost_to_eviction

    patch.setattr("milepost.core.explain.count_query", count_twice)


FAULTS: dict[str, Plant] = {
    "an eviction is not counted": eviction_not_counted,
    "an eviction is counted twice": eviction_counted_twice,
    "evicted bytes are counted twice": evicted_bytes_counted_twice,
    "evicted tokens are not counted": evicted_tokens_forgotten,
    "a refusal is not counted": refusal_not_counted,
    "a refusal is counted twice": refusal_counted_twice,
    "the cost of a drop is not remembered": forgets("drop"),
    "the cost of a merge is not remembered": forgets("merge"),
    "the cost of a reclaimed slot is not remembered": forgets("reclaim"),
    "the cost of stranded pages is not remembered": forgets("stranded"),
    "a cost is counted twice": cost_counted_twice,
    "the wrong checkpoint is blamed": wrong_reason_blamed,
    "a loss is made up": loss_without_an_eviction,
    "the nearest loss is reported": nearest_loss_taken,
}
LAWS = r"called lost|counted are|is called|were promised|no eviction and no refusal"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_counter_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the laws of `sim/losses.py`, within a few random worlds; no other check is on."""
    FAULTS[fault](monkeypatch)
    with pytest.raises((SimulationError, BoundError), match=LAWS):
        for seed in range(150):
            rng = Random(seed)
            config = replace(draw_config(rng), fault_rates={})
            Swarm(rng, config, Checks(audit=False, contents=False)).run(150)


@pytest.mark.parametrize("fault", ["the cost of a drop is not remembered", "a cost is counted twice"])
def test_a_wrong_counter_differs_from_the_cache_that_is_large_enough(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In either direction, also without the book."""
    FAULTS[fault](monkeypatch)
    monkeypatch.setattr("milepost.sim.losses.LossBook.problems", lambda self: [])
    monkeypatch.setattr("milepost.sim.losses.LossBook.totals_problems", lambda self: [])
    monkeypatch.setattr("milepost.sim.promises.PromiseBook.check", lambda *args: None)
    with pytest.raises(AssertionError):
        check_beside_ample("chats", 0, 1.5)


def test_the_list_of_losses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is forgotten costs nothing any more, and the book stops comparing."""
    monkeypatch.setattr(losses, "MAX_REMEMBERED", 4)
    found = Counter[str]()
    for seed in range(3):
        swarm = Swarm(Random(seed), replace(draw_config(Random(seed)), actions={"add": 1.0, "step": 2.0}))
        swarm.run(200)
        assert len(swarm.world.scheduler.cache.evictor.losses) <= 4
        found["worlds"] += 1
    assert found["worlds"] == 3
