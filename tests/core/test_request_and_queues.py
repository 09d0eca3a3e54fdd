"""Requests: legal moves, bad input, arithmetic. Queue: priority, then arrival, however it is filled."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from milepost.core.hashing import CacheDomain, MediaSpan
from milepost.core.plan import SamplingParams
from milepost.core.queues import RequestQueue, order_key
from milepost.core.request import Request, RequestStatus
from milepost.errors import RequestError

W, R, P, F = (
    RequestStatus.WAITING,
    RequestStatus.RUNNING,
    RequestStatus.PREEMPTED,
    RequestStatus.FINISHED,
)
LEGAL = {(W, R), (W, F), (R, P), (R, F), (P, R), (P, F)}


def make(prompt: Any = (1, 2, 3), **options: Any) -> Request:
    options.setdefault("max_tokens", 4)
    sampling = options.pop("sampling", None) or SamplingParams()
    return Request(options.pop("request_id", 0), prompt, sampling, **options)


def test_exactly_the_legal_status_moves_are_allowed() -> None:
    for before, after in itertools.product(RequestStatus, repeat=2):
        request = make()
        request.status = before
        if (before, after) in LEGAL:
            request.move_to(after)
            assert request.status is after
        else:
            with pytest.raises(ValueError, match=f"{before.value} cannot become {after.value}"):
                request.move_to(after)
            assert request.status is before


@pytest.mark.parametrize(
    ("prompt", "options", "param"),
    [
        ([], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([2**32], {}, "prompt"),
        (["a"], {}, "prompt"),
        ([1.5], {}, "prompt"),
        ("text", {}, "prompt"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"max_tokens": -3}, "max_tokens"),
        ([1, 2], {"wanted": [(3, "history")]}, "wanted"),
        ([1, 2], {"wanted": [(-1, "history")]}, "wanted"),
        ([1, 2], {"wanted": [(1, "tail")]}, "wanted"),
        ([1, 2], {"wanted": [(1, "nonsense")]}, "wanted"),
        ([1, 2], {"media": [MediaSpan(0, 3, b"")]}, "media"),
        ([1, 2], {"media": [MediaSpan(1, 1, b"")]}, "media"),
        ([1, 2], {"media": [MediaSpan(-1, 1, b"")]}, "media"),
        ([1, 2], {"media": [MediaSpan(2, 1, b"")]}, "media"),
    ],
)
def test_bad_input_is_refused_by_field(prompt: Any, options: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        make(prompt, **options)
    assert caught.value.param == param
    assert caught.value.status == 400


def test_input_at_the_edge_is_accepted() -> None:
    request = make([0, 2**32 - 1], max_tokens=1, wanted=[(0, "marker"), (2, "message")])
    assert list(request.tokens) == [0, 2**32 - 1]
    assert request.wanted_by_caller == ((0, "marker"), (2, "message"))
    assert make([5], media=[MediaSpan(0, 1, b"x")]).media == (MediaSpan(0, 1, b"x"),)


def test_a_new_request() -> None:
    request = make([1, 2, 3], sampling=SamplingParams(stop_token_ids=[7, 7, 9]), conversation="c")
    assert request.status is W and request.lease is None and request.reuse is None
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (3, 3, 0)
    assert request.domain == CacheDomain() and request.conversation == "c"
    assert request.stop_ids == {7, 9}
    assert request.is_prefilling


def test_prompt_and_output() -> None:
    request = make([1, 2, 3])
    request.tokens.extend([4, 5])
    assert list(request.prompt_tokens) == [1, 2, 3]
    assert list(request.output_tokens) == [4, 5]
    assert (request.num_tokens, request.num_output_tokens) == (5, 2)
    request.num_processed = 3
    assert not request.is_prefilling
    request.num_processed = 2
    assert request.is_prefilling


def test_the_request_owns_its_tokens() -> None:
    prompt = [1, 2, 3]
    request = make(prompt)
    prompt.append(4)
    assert request.num_tokens == 3


def numbered_request(number: int, priority: int) -> Request:
    request = make(request_id=number, priority=priority)
    request.arrival = number
    return request


def test_the_queue_is_ordered_by_priority_then_arrival_however_it_was_filled() -> None:
    rng = random.Random(5)
    requests = [numbered_request(number, rng.randrange(-1, 3)) for number in range(40)]
    expected = sorted(requests, key=lambda r: (r.priority, r.arrival))
    assert [order_key(r) for r in expected] == [(r.priority, 0, r.arrival) for r in expected]
    for _ in range(5):
        rng.shuffle(requests)
        queue = RequestQueue()
        for request in requests:
            queue.push(request)
        assert list(queue) == expected and len(queue) == 40
        for request in requests[:20]:
            queue.remove(request)
        assert list(queue) == [r for r in expected if r in requests[20:]]


def test_the_queue_may_change_while_it_is_iterated() -> None:
    queue = RequestQueue()
    requests = [numbered_request(number, 0) for number in range(5)]
    for request in requests:
        queue.push(request)
    seen = []
    for request in queue:
        queue.remove(request)
        seen.append(request)
    assert seen == requests and len(queue) == 0


def test_removing_what_is_not_there_is_an_error() -> None:
    queue = RequestQueue()
    queue.push(numbered_request(0, 0))
    with pytest.raises(ValueError):
        queue.remove(numbered_request(0, 0))
