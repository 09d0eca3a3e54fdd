"""The queue's bound and the rate behind Retry-After."""

from __future__ import annotations

import pytest

from milepost.engine.load import (
    MAX_RETRY_AFTER_SECONDS,
    RATE_WINDOW_SECONDS,
    RETRY_AFTER_UNKNOWN_SECONDS,
    QueueLimit,
)
from milepost.engine.messages import EngineOverloaded


def is_full(limit: QueueLimit, num_open: int, num_before: int = 0) -> bool:
    limit._num_open = num_open
    try:
        limit.check(0.0, num_before)
    except EngineOverloaded:
        return True
    return False


def test_free_seats_do_not_count_as_queue() -> None:
    limit = QueueLimit(2, num_seats=3)
    assert [is_full(limit, num_open) for num_open in range(8)] == [False] * 5 + [True] * 3


def test_what_comes_before_counts() -> None:
    limit = QueueLimit(2, num_seats=3)
    assert not is_full(limit, 3, num_before=1)
    assert is_full(limit, 3, num_before=2)
    with pytest.raises(EngineOverloaded, match="2 requests wait already") as raised:
        limit.check(0.0, 2)
    assert raised.value.retry_after_seconds == RETRY_AFTER_UNKNOWN_SECONDS


def test_what_was_submitted_is_on_its_way_until_it_is_judged() -> None:
    limit = QueueLimit(2, num_seats=1)
    limit.submitted()
    limit.submitted()
    assert limit.num_submitted == 2
    limit.judged()
    assert limit.num_submitted == 1


def test_no_bound_and_no_queue() -> None:
    assert not is_full(QueueLimit(None, 1), 10**6)
    assert is_full(QueueLimit(0, 1), 1)
    assert not is_full(QueueLimit(0, 1), 0)


def test_retry_after_is_the_time_the_queue_takes() -> None:
    limit = QueueLimit(100, 1)
    assert limit.retry_after_seconds(10, 0.0) == RETRY_AFTER_UNKNOWN_SECONDS
    for number in range(20):  # one request at a time, two seconds each
        limit.began(2.0 * number)
        limit.ended(2.0 * number + 2.0)
    assert limit.rate(40.0) == pytest.approx(0.5)
    assert limit.retry_after_seconds(10, 40.0) == 20
    assert limit.retry_after_seconds(0, 40.0) == 1
    assert limit.retry_after_seconds(10**6, 40.0) == MAX_RETRY_AFTER_SECONDS


def test_idle_time_does_not_slow_the_rate_down() -> None:
    limit = QueueLimit(100, 1)
    for number in range(10):
        limit.began(number)
        limit.ended(number + 1.0)
    limit.began(10_000.0)
    assert limit.rate(10_000.0) == pytest.approx(1.0)
    assert limit.rate(10_010.0) == pytest.approx(0.5), "busy without an end"


def test_old_ends_are_forgotten() -> None:
    limit = QueueLimit(100, 1)
    for number in range(1000):
        limit.began(number)
        limit.ended(number + 1.0)
    assert len(limit._ends) <= RATE_WINDOW_SECONDS + 1
    limit.began(1000.0)
    limit.ended(1000.0 + 10 * RATE_WINDOW_SECONDS)
    assert len(limit._ends) == 1
