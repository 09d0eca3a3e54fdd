"""Background requests: computed only while nobody else is there, and gone at once when room is short."""

from __future__ import annotations

import random

import pytest
from tests.core.harness import Harness, numbered

from milepost.config import SchedulerConfig
from milepost.core.queues import BACKGROUND_PRIORITY
from milepost.core.request import RequestStatus
from milepost.errors import ConfigError

BACKGROUND = {"priority": BACKGROUND_PRIORITY, "uses_cache": False, "is_counted": False}


def planned(harness: Harness) -> list[int]:
    """Requests of the next step, which is executed."""
    plan = harness.schedule()
    ids = [chunk.request_id for chunk in plan.chunks]
    harness.execute()
    harness.check()
    return ids


def test_alone_it_runs_like_any_other() -> None:
    harness = Harness(budget=8)
    request_id = harness.add(numbered(20), 1, **BACKGROUND)
    assert [planned(harness) for _ in range(3)] == [[request_id]] * 3
    assert harness.ended[request_id].finish_reason == "length"


def test_it_pauses_while_others_run_and_keeps_its_place() -> None:
    harness = Harness(budget=8)
    audit = harness.add(numbered(20), 1, **BACKGROUND)
    assert planned(harness) == [audit]
    user = harness.add(numbered(12, 1), 3)
    steps = []
    while user not in harness.ended:
        steps.append(planned(harness))
    assert steps == [[user]] * 4, "a step of a user holds nothing else, decoding included"
    assert planned(harness) == [audit]
    harness.run()
    assert harness.computed[audit] == 20, "what it had done was not done again"
    assert harness.requests[audit].num_preemptions == 0


def test_it_is_not_admitted_beside_others_nor_while_they_wait() -> None:
    harness = Harness(budget=64, max_num_seqs=1)
    first, second = harness.add(numbered(8), 2), harness.add(numbered(8, 1), 2)
    audit = harness.add(numbered(8, 2), 1, **BACKGROUND)
    order = [planned(harness) for _ in range(5)]
    assert order == [[first], [first], [second], [second], [audit]]


def test_it_leaves_its_seat() -> None:
    harness = Harness(budget=8, max_num_seqs=1)
    audit = harness.add(numbered(20), 1, **BACKGROUND)
    harness.step()
    user = harness.add(numbered(8, 1), 1)
    assert planned(harness) == [user], "admitted in the very next step"
    harness.run()
    assert audit in harness.ended and harness.requests[audit].num_preemptions == 1
    assert harness.scheduler.stats().counters.num_preemptions == 0, "no user was preempted"


def test_it_leaves_its_memory() -> None:
    """Six pages and a state of ten records: the user's eight do not fit beside them."""
    harness = Harness(budget=24, num_records=10)
    audit = harness.add(numbered(28), 1, **BACKGROUND)
    harness.step()
    user = harness.add(numbered(22, 1), 1)
    assert planned(harness) == [user]
    assert harness.requests[audit].status is RequestStatus.PREEMPTED
    harness.run()
    assert harness.requests[user].num_preemptions == 0
    assert audit in harness.ended


def test_a_growing_answer_takes_its_memory() -> None:
    harness = Harness(budget=24, num_records=12)
    user = harness.add(numbered(8), 24)
    harness.step()
    harness.scheduler.preempt(user)
    audit = harness.add(numbered(20, 1), 1, **BACKGROUND)
    while user not in harness.ended:
        assert audit not in planned(harness)
    harness.run()
    assert harness.requests[user].num_preemptions == 1, "only the forced one"


def test_it_shows_in_no_gauge_and_no_hit_rate() -> None:
    harness = Harness(budget=8)
    audit = harness.add(numbered(20), 1, **BACKGROUND)
    assert (harness.scheduler.stats().num_running, harness.scheduler.stats().num_waiting) == (0, 0)
    harness.step()
    assert (harness.scheduler.stats().num_running, harness.scheduler.stats().num_waiting) == (0, 0)
    harness.run()
    counters = harness.scheduler.stats().counters
    assert audit in harness.ended
    assert counters.num_queried_tokens == sum(counters.misses_by_reason.values()) == 0
    assert sum(counters.missed_tokens_by_reason.values()) == counters.num_lost_tokens == 0


def test_a_share_of_what_others_compute() -> None:
    """One user decodes without end: a quarter of a token a step is earned, and spent a unit at a time."""
    harness = Harness(budget=8, background_share=0.25)
    user = harness.add(numbered(8), 400)
    audit = harness.add(numbered(20, 1), 1, **BACKGROUND)
    pieces = []
    num_of_user = 0
    while audit not in harness.ended:
        plan = harness.schedule()
        by_id = {chunk.request_id: chunk.end - chunk.start for chunk in plan.chunks}
        assert by_id[user] >= 1 and plan.chunks[0].request_id == user
        pieces.append(by_id.get(audit, 0))
        num_of_user += by_id[user]
        assert sum(pieces) <= 0.25 * num_of_user
        harness.execute()
        harness.check()
    assert user not in harness.ended
    assert [size for size in pieces if size] == [4] * 5
    assert harness.requests[audit].num_preemptions == 0


def test_a_share_that_was_not_used_is_gone() -> None:
    harness = Harness(budget=8, background_share=0.25)
    user = harness.add(numbered(8), 400)
    for _ in range(200):
        harness.step()
    audit = harness.add(numbered(40, 1), 1, **BACKGROUND)
    num_steps = 0
    while audit not in harness.ended:
        harness.step()
        num_steps += 1
    assert user not in harness.ended
    assert num_steps >= (40 - 4 - 2) / 0.25 - 1, "fifty tokens of credit would have been enough at once"


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_shares_that_cannot_be(share: float) -> None:
    with pytest.raises(ConfigError, match="background_share"):
        SchedulerConfig(background_share=share)


def served(
    seed: int, num_records: int, *, with_audits: bool, share: float = 0.0
) -> list[list[tuple[int, int, int]]]:
    """Per step, (number of the user's request, start, end) of each chunk of random work."""
    rng, other = random.Random(seed), random.Random(seed + 1000)
    harness = Harness(
        num_records=num_records,
        budget=rng.choice([5, 16]),
        max_num_seqs=rng.choice([1, 3]),
        decode_interval=8,
        background_share=share,
    )
    users: dict[int, int] = {}
    steps = []
    for _ in range(60):
        if rng.random() < 0.12:
            prompt = numbered(rng.randrange(1, 24), rng.randrange(3))
            users[harness.add(prompt, rng.randrange(1, 6))] = len(users)
        if with_audits and other.random() < 0.3:
            harness.add(numbered(other.randrange(1, 24), 9), 1, **BACKGROUND)
        plan = harness.schedule()
        chunks = [(users[c.request_id], c.start, c.end) for c in plan.chunks if c.request_id in users]
        assert share or not chunks or len(chunks) == len(plan.chunks), "an audit ran beside a user"
        harness.execute()
        steps.append(chunks)
    harness.run()
    assert all(harness.ended[user].finish_reason == "length" for user in users)
    assert len(harness.ended) == len(harness.requests)
    return steps


@pytest.mark.parametrize("share", [0.0, 0.05, 1.0])
def test_users_are_served_as_if_it_were_not_there(share: float) -> None:
    """The same work with and without audits in between: every user has the same chunks in the same steps."""
    for seed in range(20):
        assert served(seed, 400, with_audits=True, share=share) == served(seed, 400, with_audits=False)


def test_short_memory_ends_no_user_and_nothing_waits_for_ever() -> None:
    for seed in range(20):
        served(seed, 12, with_audits=True, share=seed % 3 / 4)
