"""Owners that compete get equal shares, and one that asks for more waits for itself."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.harness import Harness, numbered

from milepost.core.plan import SamplingParams
from milepost.core.queues import BACKGROUND_PRIORITY, RequestQueue, order_key
from milepost.core.request import Request, RequestStatus, ReuseReport


def first_steps(harness: Harness) -> dict[int, int]:
    """Request id -> number of the step in which it was first computed."""
    first: dict[int, int] = {}
    for number, plan in enumerate(harness.plans):
        for chunk in plan.chunks:
            first.setdefault(chunk.request_id, number)
    return first


def test_one_owner_is_served_in_order_of_arrival() -> None:
    harness = Harness(budget=16)
    rng = random.Random(3)
    ids = [harness.add(numbered(rng.randrange(5, 60), seed), owner="a") for seed in range(12)]
    harness.run()
    first = first_steps(harness)
    assert sorted(ids, key=lambda i: (first[i], i)) == ids


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seats=st.integers(1, 4), owners=st.sampled_from(["a", "ab"]))
def test_hits_let_nobody_pass_who_came_later(data: st.DataObject, seats: int, owners: str) -> None:
    """What was expected of a prompt was its length, what it costs is less when it hits: requests that come
    then have earlier turns than they would have had, but not than their owner's that wait."""
    harness = Harness(budget=24, max_num_seqs=seats)
    for seed in range(3):
        harness.serve(numbered(60, seed))
    arrivals: list[int] = []
    for _ in range(data.draw(st.integers(5, 30))):
        if data.draw(st.booleans()):
            prompt = numbered(60, data.draw(st.integers(0, 5)))[: data.draw(st.integers(5, 60))]
            owner = data.draw(st.sampled_from(owners))
            arrivals.append(harness.add(prompt, data.draw(st.integers(1, 12)), owner=owner))
            if data.draw(st.integers(0, 9)) == 0:
                harness.scheduler.abort(data.draw(st.sampled_from(arrivals)))
        else:
            harness.step()
    harness.run()
    first = first_steps(harness)
    for owner in owners:
        served = [i for i in arrivals if harness.requests[i].owner == owner and i in first]
        assert sorted(served, key=lambda i: (first[i], i)) == served


def test_a_burst_of_one_owner_does_not_hold_up_another() -> None:
    harness = Harness(budget=16)
    burst = [harness.add(numbered(64, seed), owner="greedy") for seed in range(20)]
    for _ in range(3):
        harness.step()
    late = harness.add(numbered(64, 99), owner="modest")
    harness.run()
    first = first_steps(harness)
    ahead = [i for i in burst if first[i] < first[late]]
    assert len(ahead) <= 2, "it waits for what was begun, not for the whole burst"


def test_generated_tokens_are_charged() -> None:
    harness = Harness(budget=64, max_num_seqs=1)
    talks = harness.add(numbered(8, 1), 200, owner="talks")
    harness.step()
    asked = [harness.add(numbered(8, 10 + n), owner="asks") for n in range(6)]
    more = [harness.add(numbered(8, 20 + n), owner="talks") for n in range(2)]
    harness.run()
    first = first_steps(harness)
    assert first[talks] == 0
    assert first[asked[5]] < first[more[0]], "who was answered at length comes after what that had cost"


def test_nothing_is_held_against_anybody_once_all_is_done() -> None:
    harness = Harness(budget=64, max_num_seqs=1)
    harness.serve(numbered(8, 1), 200, owner="talks")
    first, second = (
        harness.add(numbered(8, 10 + n), owner=owner) for n, owner in enumerate(("talks", "asks"))
    )
    harness.run()
    assert first_steps(harness)[first] < first_steps(harness)[second]


def test_cached_tokens_are_free() -> None:
    harness = Harness(budget=64)
    prompt = numbered(60)
    harness.serve(prompt, owner="cheap")
    harness.add(numbered(4, 9), 300, owner="others")
    cheap = [harness.add([*prompt, *numbered(3, 20 + n)], owner="cheap") for n in range(8)]
    dear = [harness.add(numbered(63, 40 + n), owner="dear") for n in range(8)]
    harness.run()
    first = first_steps(harness)
    assert all(harness.cached(i) >= 56 for i in cheap)
    assert first[cheap[7]] <= first[dear[4]], "eight that hit cost as much as one that does not"


def test_a_preempted_request_keeps_its_turn() -> None:
    harness = Harness(budget=32)
    first = harness.add(numbered(100, 1), owner="a")
    harness.step()
    turn = harness.requests[first].turn
    second = harness.add(numbered(100, 2), owner="a")
    harness.scheduler.preempt(first)
    assert harness.requests[first].turn == turn < harness.requests[second].turn
    harness.run()
    assert first_steps(harness)[first] < first_steps(harness)[second]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 60), st.integers(1, 6)), min_size=1, max_size=25
    ),
    budget=st.integers(4, 40),
    seats=st.integers(1, 5),
)
def test_everybody_is_served_and_nothing_is_kept(
    sizes: list[tuple[str, int, int]], budget: int, seats: int
) -> None:
    harness = Harness(budget=budget, max_num_seqs=seats)
    ids = [
        harness.add(numbered(size, seed), outputs, owner=owner)
        for seed, (owner, size, outputs) in enumerate(sizes)
    ]
    harness.run()
    assert set(harness.ended) == set(ids)
    assert not harness.scheduler.waiting._shares._levels


@pytest.mark.parametrize("seats", [1, 4, 64])
@pytest.mark.parametrize("sizes", [(40, 40), (20, 160), (160, 20)])
def test_backlogged_owners_get_the_same_work(sizes: tuple[int, int], seats: int) -> None:
    """While both have requests waiting, what was computed for them differs by what they may have running."""
    harness = Harness(budget=32, max_num_seqs=seats)
    total = 1600
    owner_of: dict[int, str] = {}
    for seed in range(max(total // size for size in sizes)):
        for owner, size in zip("ab", sizes, strict=True):
            if seed < total // size:
                owner_of[harness.add(numbered(size, 2 * seed + (owner == "b")), owner=owner)] = owner
    work = {"a": 0, "b": 0}
    while all(any(o == owner for r in harness.scheduler.waiting for o in [r.owner]) for owner in "ab"):
        harness.step()
        work = {owner: sum(n for i, n in harness.computed.items() if owner_of[i] == owner) for owner in "ab"}
        assert abs(work["a"] - work["b"]) <= 2 * max(sizes) + 32, work
    assert min(work.values()) > total // 2


# ------------------------------------------------------------------ requests that are held back


def started_before(harness: Harness, ids: list[int], other: int) -> int:
    first = first_steps(harness)
    return sum(first[i] < first[other] for i in ids)


@pytest.mark.parametrize("tail", [False, True], ids=["alone", "with one that runs at once"])
@pytest.mark.parametrize(("budget", "seats"), [(64, 4), (512, 64)])
def test_siblings_that_wait_are_not_passed_by_the_clock(tail: bool, budget: int, seats: int) -> None:
    """The last of a burst shares nothing and runs while the others wait for their prefix. Who comes then
    queues behind the first of them, not behind all."""
    harness = Harness(budget=budget, max_num_seqs=seats)
    shared = numbered(600, 1)
    burst = [harness.add(shared + numbered(200, 100 + n), owner="greedy") for n in range(40)]
    if tail:
        harness.add(numbered(4, 99), owner="greedy")
    for _ in range(2):
        harness.step()
    late = harness.add(numbered(64, 999), owner="modest")
    harness.run()
    assert started_before(harness, burst, late) <= 2


@pytest.mark.parametrize("tail", [False, True])
def test_loads_that_take_long_are_not_passed_by_the_clock(tail: bool) -> None:
    harness = Harness(budget=64, max_num_seqs=4)
    burst = [harness.add(numbered(200, 100 + n), owner="greedy") for n in range(40)]
    for request_id in burst:
        harness.scheduler.transfers.hold(request_id)
    if tail:
        harness.add(numbered(4, 99), owner="greedy")
    harness.step()
    for request_id in burst:
        harness.scheduler.transfers.lift(request_id)
    late = harness.add(numbered(64, 999), owner="modest")
    harness.run()
    assert started_before(harness, burst, late) <= 2


def test_who_was_held_back_has_saved_nothing_up() -> None:
    """While one owner's requests are read from a store another one is served; when they are there, both
    go on side by side."""
    harness = Harness(budget=64, max_num_seqs=2)
    held = [harness.add(numbered(64, n), owner="held") for n in range(10)]
    for request_id in held:
        harness.scheduler.transfers.hold(request_id)
    served = [harness.add(numbered(64, 100 + n), owner="served") for n in range(30)]
    while sum(i in harness.ended for i in served) < 15:
        harness.step()
    for request_id in held:
        harness.scheduler.transfers.lift(request_id)
    harness.run()
    first = first_steps(harness)
    between = [i for i in served if first[held[0]] < first[i] < first[held[-1]]]
    assert 7 <= len(between) <= 11, "one each, in turn"


# ------------------------------------------------------------------ priorities


def test_work_of_one_priority_is_not_charged_to_another() -> None:
    harness = Harness(budget=16, max_num_seqs=2)
    burst = [harness.add(numbered(64, n), owner="greedy", priority=0) for n in range(20)]
    for n in range(20):
        harness.add(numbered(64, 100 + n), owner="modest", priority=1)
    late = harness.add(numbered(64, 999), owner="modest", priority=0)
    harness.run()
    assert started_before(harness, burst, late) <= 2


def test_a_sooner_request_does_not_move_the_clock_of_later_ones() -> None:
    harness = Harness(budget=16, max_num_seqs=2)
    burst = [harness.add(numbered(64, n), owner="greedy", priority=1) for n in range(20)]
    harness.step()
    harness.add(numbered(4, 98), owner="greedy", priority=0)
    for _ in range(5):
        harness.step()
    late = harness.add(numbered(64, 999), owner="modest", priority=1)
    harness.run()
    assert started_before(harness, burst, late) <= 3


# ------------------------------------------------------------------ the queue alone, against its promises


def queued(number: int, owner: str, num_tokens: int, priority: int) -> Request:
    return Request(
        number, [1] * num_tokens, SamplingParams(), max_tokens=1 << 20, priority=priority, owner=owner
    )


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_nobody_passes_his_own_whatever_is_held_hits_or_talks(data: st.DataObject) -> None:
    """Requests arrive, are held and released, hit, answer at any length and end in any order. At every
    moment those of one owner and priority that wait and have not run stand in the order of their arrival, and
    what is kept is bounded by what is open."""
    queue = RequestQueue()
    running: list[Request] = []
    held: set[int] = set()
    waiting: list[Request] = []
    num_added = 0
    for _ in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from("aaasssehplx"))
        if action == "a":
            request = queued(
                num_added, data.draw(st.sampled_from("ab")), data.draw(st.integers(1, 400)),
                data.draw(st.sampled_from([0, 0, 3])),
            )  # fmt: skip
            num_added += 1
            queue.arrive(request)
            queue.push(request)
            waiting.append(request)
        elif action == "h" and waiting:
            request = data.draw(st.sampled_from(waiting))
            held.add(request.request_id)
            queue.hold(request)
        elif action == "l" and held:
            held.discard(data.draw(st.sampled_from(sorted(held))))
            queue.release(lambda request: "load" if request.request_id in held else "")
        elif action == "s":
            free = [request for request in queue if request.request_id not in held]
            if free:
                request = free[0]
                cached = data.draw(st.integers(0, request.num_prompt_tokens - 1))
                request.reuse = request.reuse or ReuseReport(
                    request.num_prompt_tokens, cached, {}, 0, None, "hit", None
                )
                request.move_to(RequestStatus.RUNNING)
                queue.admit(request)
                waiting.remove(request)
                running.append(request)
        elif action in "ep" and running:
            request = data.draw(st.sampled_from(running))
            request.tokens.extend([1] * data.draw(st.sampled_from([0, 1, 30, 900])))
            running.remove(request)
            if action == "e":
                queue.settle(request)
                request.move_to(RequestStatus.FINISHED)
            else:
                request.move_to(RequestStatus.PREEMPTED)
                queue.push(request)
                waiting.append(request)
        elif action == "x" and waiting:
            request = data.draw(st.sampled_from(waiting))
            waiting.remove(request)
            held.discard(request.request_id)
            queue.remove(request)
            queue.settle(request)
            request.move_to(RequestStatus.FINISHED)
        queue.release(lambda request: "load" if request.request_id in held else "")  # as every step does
        order = list(queue)
        assert order == sorted(order, key=order_key) and len(order) == len(waiting)
        for owner in "ab":
            for priority in (0, 3):
                own = [
                    r.arrival for r in order
                    if r.owner == owner and r.priority == priority and r.status is RequestStatus.WAITING
                ]  # fmt: skip
                assert own == sorted(own)
        num_entries = sum(
            len(share.entries) for level in queue._shares._levels.values() for share in level.shares.values()
        )
        assert num_entries <= 2 * (len(running) + len(waiting)) + 4
    for request in [*running, *waiting]:
        if request in waiting:
            queue.remove(request)
        queue.settle(request)
    assert not queue._shares._levels and not len(queue)


def test_the_clock_goes_on_while_the_first_request_of_a_key_is_held() -> None:
    """It serves others of its key meanwhile; who comes then competes from now on, not from when it began."""
    harness = Harness(budget=64, max_num_seqs=2)
    stuck = harness.add(numbered(64, 1), owner="a")
    harness.scheduler.transfers.hold(stuck)
    for seed in range(30):
        harness.add(numbered(64, 100 + seed), owner="a")
    while len(harness.ended) < 25:
        harness.step()
    ids = {
        o: [harness.add(numbered(64, n + k), owner=o) for n in range(12)] for o, k in (("a", 200), ("c", 300))
    }
    while not all(i in harness.ended for i in ids["c"]):
        harness.step()
    assert sum(i in harness.ended for i in ids["a"]) >= 5, "side by side, behind the few that were left"
    harness.scheduler.transfers.lift(stuck)
    harness.run()


def lined_up(sizes: dict[str, list[int]]) -> tuple[RequestQueue, dict[str, list[Request]]]:
    """A queue, and per owner its requests of so many tokens."""
    queue = RequestQueue()
    number = itertools.count()
    requests = {owner: [queued(next(number), owner, n, 0) for n in own] for owner, own in sizes.items()}
    for request in itertools.chain.from_iterable(requests.values()):
        queue.arrive(request)
        queue.push(request)
    return queue, requests


def admit(queue: RequestQueue, request: Request, num_cached_tokens: int = 0) -> None:
    request.reuse = ReuseReport(request.num_prompt_tokens, num_cached_tokens, {}, 0, None, "hit", None)
    request.move_to(RequestStatus.RUNNING)
    queue.admit(request)


def test_who_is_served_before_his_own_takes_their_place() -> None:
    queue, requests = lined_up({"a": [100] * 5})
    for request in requests["a"][:4]:
        queue.hold(request)
    admit(queue, requests["a"][4])
    late = queued(99, "b", 10, 0)
    queue.arrive(late)
    assert late.turn == 0


def test_who_was_held_goes_on_from_the_clock() -> None:
    queue, requests = lined_up({"a": [100, 100], "b": [100] * 4})
    queue.hold(requests["a"][0])
    for request in requests["b"][:3]:
        admit(queue, request)
    queue.release(lambda request: "load")
    assert [request.turn for request in requests["a"]] == [0, 100]
    queue.release(lambda request: "")
    assert [request.turn for request in requests["a"]] == [200, 300]


def test_a_preempted_request_is_not_overtaken_by_later_ones_of_its_key() -> None:
    queue, requests = lined_up({"a": [500, 1000, 100, 100]})
    held, cheap, preempted, last = requests["a"]
    queue.hold(held)
    admit(queue, cheap, num_cached_tokens=990)
    admit(queue, preempted)
    preempted.move_to(RequestStatus.PREEMPTED)
    queue.push(preempted)
    queue.settle(cheap)
    queue.release(lambda request: "load")
    assert list(queue) == [held, preempted, last]


def test_nobody_waits_for_a_background_request_that_computes_his_prefix() -> None:
    for share in (0.0, 0.05):
        harness = Harness(budget=16, background_share=share)
        harness.add(numbered(200, 1), priority=BACKGROUND_PRIORITY)
        harness.step()
        user = harness.add([*numbered(200, 1), 7], 2)
        while user not in harness.ended:
            harness.step()
        harness.run()
