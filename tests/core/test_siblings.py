"""Who leads, who follows, who waits: a model that owns every key once, and races on the scheduler."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.core.harness import Harness, make_chain, make_geometry, numbered

from milepost.core.plan import SamplingParams
from milepost.core.request import Request, RequestStatus
from milepost.core.siblings import Siblings

UNIT = 2


def make_request(request_id: int, tokens: list[int]) -> Request:
    request = Request(request_id, tokens, SamplingParams(), max_tokens=1)
    request.chain = make_chain(tokens, UNIT)
    return request


class SiblingsMachine(RuleBasedStateMachine):
    """Requests over a two-letter alphabet register, run, advance, are preempted and leave."""

    @initialize()
    def start(self) -> None:
        self.siblings = Siblings(UNIT)
        self.present: dict[int, Request] = {}
        self.next_id = 0

    def pick(self, data: st.DataObject) -> Request:
        return self.present[data.draw(st.sampled_from(sorted(self.present)))]

    def leader_of(self, request: Request) -> Request | None:
        following = self.siblings._following.get(request.request_id)
        return following.leader if following is not None else None

    @rule(tokens=st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=14))
    def register(self, tokens: list[int]) -> None:
        request = make_request(self.next_id, tokens)
        self.next_id += 1
        shared = self.num_shared(request)
        self.present[request.request_id] = request
        following = self.siblings.register(request)
        if shared:
            assert following is not None
            assert (following.follower, following.boundary) == (request, shared * UNIT)
        else:
            assert following is None

    def keys_of(self, request: Request) -> list[bytes]:
        assert request.chain is not None
        return request.chain.extend((request.num_tokens - 1) // UNIT)

    def num_shared(self, request: Request) -> int:
        """Units shared with the one that shares most."""
        own = self.keys_of(request)
        longest = 0
        for other in self.present.values():
            common = [a == b for a, b in zip(own, self.keys_of(other), strict=False)]
            longest = max(longest, (common + [False]).index(False))
        return longest

    @precondition(lambda self: self.present)
    @rule(data=st.data())
    def run(self, data: st.DataObject) -> None:
        """As the scheduler does: a request that need not wait overtakes leaders that wait, then runs."""
        request = self.pick(data)
        if request.status is RequestStatus.RUNNING or self.siblings.awaited_boundary(request):
            return
        for relation in self.siblings.overtake(request):
            assert self.leader_of(relation.follower) is relation.leader
        leader = self.leader_of(request)
        assert leader is None or leader.status is RequestStatus.RUNNING
        request.status = RequestStatus.RUNNING

    @precondition(lambda self: self.present)
    @rule(data=st.data(), num_tokens=st.integers(1, 6))
    def advance(self, data: st.DataObject, num_tokens: int) -> None:
        request = self.pick(data)
        if request.status is RequestStatus.RUNNING:
            request.num_processed = min(request.num_tokens, request.num_processed + num_tokens)

    @precondition(lambda self: self.present)
    @rule(data=st.data(), comes_back=st.booleans())
    def leave(self, data: st.DataObject, comes_back: bool) -> None:
        request = self.pick(data)
        del self.present[request.request_id]
        for relation in self.siblings.leave(request):
            assert relation.leader is not request and relation.follower is not request
            assert self.leader_of(relation.follower) is relation.leader
        assert self.siblings.leave(request) == []
        if comes_back:
            request.status = RequestStatus.PREEMPTED
            request.num_processed = 0
            self.present[request.request_id] = request
            self.siblings.register(request)

    @invariant()
    def every_key_has_one_owner(self) -> None:
        if not hasattr(self, "siblings"):
            return
        siblings = self.siblings
        assert siblings.audit() == []
        assert len(siblings) == len(self.present)
        for request in self.present.values():
            keys = self.keys_of(request)
            owners = [siblings._owner[key] for key in keys]
            assert all(owner.request_id in self.present for owner in owners)
            num_foreign = sum(owner is not request for owner in owners)
            assert all(owner is not request for owner in owners[:num_foreign]), "its own keys come last"
            following = siblings._following.get(request.request_id)
            if num_foreign:
                assert following is not None
                assert following.boundary == num_foreign * UNIT
                assert following.leader is owners[num_foreign - 1]
            else:
                assert following is None

    @invariant()
    def somebody_can_always_run(self) -> None:
        """Following is acyclic, and whoever waits waits for somebody who runs and is not there yet."""
        if not hasattr(self, "siblings"):
            return
        known: set[int] = set()
        for request in self.present.values():
            current: Request | None = request
            leaders: list[Request] = []
            while current is not None:
                assert current not in leaders
                leaders.append(current)
                current = self.leader_of(current)
            boundary = self.siblings.awaited_boundary(request)
            assert self.siblings.awaited_boundary(request, known) == boundary
            waits = False
            for follower, leader in zip(leaders, leaders[1:], strict=False):
                following = self.siblings._following[follower.request_id]
                if leader.num_processed >= following.boundary:
                    break
                if leader.status is RequestStatus.RUNNING:
                    waits = True
                    break
            assert bool(boundary) == waits
            if waits:
                assert boundary == self.siblings._following[request.request_id].boundary


SiblingsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestSiblingsMachine = SiblingsMachine.TestCase


def test_a_request_without_a_chain_is_refused() -> None:
    with pytest.raises(ValueError, match="has no key chain"):
        Siblings(UNIT).register(Request(0, [1, 2, 3], SamplingParams(), max_tokens=1))


def test_the_heir_leads_and_those_that_share_more_follow_the_next_one() -> None:
    siblings = Siblings(UNIT)
    leader = make_request(0, [1] * 13)
    short = make_request(1, [1] * 4 + [2] * 3)
    middle = make_request(2, [1] * 8 + [3] * 3)
    long = make_request(3, [1] * 12 + [4] * 3)
    for request in (leader, short, middle, long):
        siblings.register(request)
    relations = {
        (r.follower.request_id, r.leader.request_id, r.boundary) for r in siblings.leave(leader, middle)
    }
    assert relations == {(1, 2, 4), (3, 2, 8)}
    assert {(r.follower, r.leader, r.boundary) for r in siblings.leave(middle)} == {(short, long, 4)}


def test_a_running_follower_leads_before_one_that_shares_more() -> None:
    siblings = Siblings(UNIT)
    leader, short, long = (make_request(i, [1] * n + [2 + i]) for i, n in enumerate((10, 4, 8)))
    for request in (leader, short, long):
        siblings.register(request)
    short.status = RequestStatus.RUNNING
    assert [(r.follower, r.leader, r.boundary) for r in siblings.leave(leader)] == [(long, short, 4)]


# ------------------------------------------------------------------ on the scheduler
def shared_prompts(count: int, num_shared: int = 40, num_own: int = 9) -> list[list[int]]:
    return [numbered(num_shared) + numbered(num_own, seed + 1) for seed in range(count)]


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 64, 512])
@pytest.mark.parametrize("count", [2, 5])
def test_simultaneous_siblings_compute_the_shared_part_once(budget: int, count: int) -> None:
    harness = Harness(budget=budget)
    for prompt in shared_prompts(count):
        harness.add(prompt)
    harness.run()
    assert sum(harness.computed.values()) == 40 + 9 * count
    assert [harness.cached(i) for i in range(count)] == [0] + [40] * (count - 1)


@pytest.mark.parametrize("num_shared", range(37, 45))
def test_the_shared_part_need_not_be_a_multiple_of_the_unit(num_shared: int) -> None:
    harness = Harness(budget=16)
    for prompt in shared_prompts(3, num_shared):
        harness.add(prompt)
    harness.run()
    boundary = num_shared - num_shared % 4
    assert sum(harness.computed.values()) == 3 * (num_shared + 9) - 2 * boundary


@pytest.mark.parametrize("num_tokens", [39, 40, 41])
@pytest.mark.parametrize("budget", [7, 512])
def test_identical_prompts_are_prefilled_once(num_tokens: int, budget: int) -> None:
    harness = Harness(budget=budget)
    for _ in range(8):
        harness.add(numbered(num_tokens))
    harness.run()
    reused = (num_tokens - 1) // 4 * 4
    assert sum(harness.computed.values()) == num_tokens + 7 * (num_tokens - reused)


@pytest.mark.parametrize("alignment", [None, 1, 8])
def test_siblings_that_branch_at_different_points(alignment: int | None) -> None:
    """A tree of prompts: every edge is computed once (alignment 8 keeps junctions at multiples of 8)."""
    harness = Harness(geometry=make_geometry(alignment=alignment), budget=24)
    trunk = numbered(64)
    prompts = [trunk[:cut] + numbered(8, cut) for cut in (16, 32, 48, 64)] + [trunk + numbered(5, 99)]
    for prompt in prompts:
        harness.add(prompt)
    harness.run()
    assert sum(harness.computed.values()) == 64 + 4 * 8 + 5


@pytest.mark.parametrize("priorities", [(1, 0), (0, 1), (2, 1, 0), (0, 2, 1)])
def test_priorities_do_not_make_anybody_compute_it_twice(priorities: tuple[int, ...]) -> None:
    harness = Harness()
    for priority, prompt in zip(priorities, shared_prompts(len(priorities)), strict=True):
        harness.add(prompt, priority=priority)
    harness.run()
    assert sum(harness.computed.values()) == 40 + 9 * len(priorities)


def test_unrelated_requests_start_at_once_where_the_budget_allows() -> None:
    harness = Harness(budget=60)
    prompts = shared_prompts(4)
    for prompt in prompts:
        harness.add(prompt)
    unrelated = harness.add(numbered(5, 77))
    harness.step()
    assert unrelated in harness.ended
    assert harness.scheduler.stats().counters.num_sibling_waits == 3


@pytest.mark.parametrize("event", ["abort", "preempt", "finish"])
@pytest.mark.parametrize("num_steps", range(0, 8))
def test_a_follower_takes_over_when_the_leader_goes(event: str, num_steps: int) -> None:
    harness = Harness(budget=8)
    prompts = shared_prompts(3)
    for prompt in prompts:
        harness.add(prompt)
    for _ in range(num_steps):
        harness.step()
    before = harness.computed[0]
    getattr(harness.scheduler, event)(0)
    harness.check()
    harness.run()
    assert harness.ended[1].finish_reason == "length"
    assert harness.ended[2].finish_reason == "length"
    expected = 49 if event == "preempt" else max(40, before)
    assert sum(harness.computed.values()) == expected + 18


def test_a_follower_added_while_the_leader_is_in_flight() -> None:
    """The junction may come too late for the pass in flight; nobody hangs, and the rest is shared."""
    for budget in (4, 8, 16, 64):
        for num_steps in range(0, 6):
            harness = Harness(budget=budget)
            first, second = shared_prompts(2)
            harness.add(first)
            for _ in range(num_steps):
                harness.step()
            harness.schedule()
            harness.add(second)
            harness.run()
            assert harness.ended[1].finish_reason == "length"


def test_a_leader_that_fails_is_followed_by_the_next() -> None:
    from milepost.sim.fakes import WorkerFaults

    failing = {0}
    faults = WorkerFaults(drops=lambda chunk: chunk.request_id in failing)
    harness = Harness(budget=8, faults=faults)
    for prompt in shared_prompts(3):
        harness.add(prompt)
    harness.run()
    assert harness.ended[0].finish_reason == "error"
    assert [harness.ended[i].finish_reason for i in (1, 2)] == ["length", "length"]
    assert harness.computed[1] + harness.computed[2] == 40 + 18


def test_a_thousand_growing_prompts_do_not_overflow_the_stack() -> None:
    """Each extends the one before: the chain of leaders is as long as the queue."""
    harness = Harness(geometry=make_geometry(1), budget=4, max_num_seqs=4)
    harness.check = lambda: None  # type: ignore[method-assign]
    trunk = numbered(1200)
    for length in range(1, 1200):
        harness.add(trunk[:length] + [9_000_000 + length])
    for _ in range(3):
        harness.step()
    assert sum(harness.computed.values()) > 0
    assert harness.scheduler.siblings.audit() == []


def test_races_end_and_stay_sound() -> None:
    """Random siblings, aborts and preemptions: everybody ends, and the audit holds all along."""
    for seed in range(25):
        rng = random.Random(seed)
        harness = Harness(
            geometry=make_geometry(4, alignment=rng.choice([1, 8, None])), budget=rng.choice([3, 8, 30])
        )
        trunk = numbered(60)
        live: list[int] = []
        for _ in range(60):
            action = rng.random()
            if action < 0.35:
                prompt = trunk[: rng.randrange(1, 60)] + numbered(rng.randrange(1, 9), rng.randrange(1, 5))
                live.append(harness.add(prompt, rng.randrange(1, 4), priority=rng.randrange(2)))
            elif action < 0.45 and live:
                harness.scheduler.abort(rng.choice(live))
            elif action < 0.55 and live:
                harness.scheduler.preempt(rng.choice(live))
            else:
                harness.step()
        harness.run()
        assert set(harness.ended) == set(live)
