"""Who waits and in which order: priority first (lower is sooner), then the owner's turn, then arrival.

Among requests of one owner and priority the order is that of arrival. Deterministic.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator

from milepost.core.request import Request

BACKGROUND_PRIORITY = 1 << 31
"""From this priority on a request gets what all others leave, see `BackgroundShare`."""


def is_background(request: Request) -> bool:
    """Whether a request gives way to every other one."""
    return request.priority >= BACKGROUND_PRIORITY


def order_key(request: Request) -> tuple[int, int, int]:
    """Sort key of waiting and running requests."""
    return (request.priority, request.turn, request.arrival)


class FairShare:
    """Turns that give every owner (an API key) the same share of the tokens computed while they compete.

    Self-clocked fair queueing, in its start-time form (Goyal, Vin and Cheng, 1996): a request's turn is
    the later of the clock and the end of its owner's previous request; the clock is the turn served
    last. Its length is its prompt when it arrives, and what it really cost when it ends: then those of its
    owner that came after it and still wait move by the difference, so that nobody who comes later passes
    them. The bound of that method, the largest requests, needs requests of one priority that are served by
    turn and charged as they run; those held back for a sibling or a store, and long answers, are not.
    """

    __slots__ = ("_clock", "_ends")

    def __init__(self) -> None:
        self._clock = 0
        self._ends: dict[str, int] = {}

    def arrive(self, request: Request) -> None:
        """Give a new request its turn."""
        request.turn = max(self._clock, self._ends.get(request.owner, 0))
        if not is_background(request):
            self._ends[request.owner] = request.turn + request.num_prompt_tokens

    def serve(self, request: Request) -> None:
        """Its first chunk is planned."""
        if not is_background(request):
            self._clock = max(self._clock, request.turn)

    def end(self, request: Request, waiting: Iterable[Request]) -> bool:
        """Charge what it cost: cached tokens cost nothing, generated ones as much as others.

        Returns whether turns of `waiting` changed. O(waiting).
        """
        if is_background(request):
            return False
        cost = 0
        if request.reuse is not None:
            cost = request.num_tokens - request.reuse.num_cached_tokens
        more = cost - request.num_prompt_tokens
        self._charge(request, more)
        behind = [r for r in waiting if r.owner == request.owner and r.arrival > request.arrival]
        for other in behind:
            other.turn = max(min(other.turn, self._clock), other.turn + more)
        return bool(behind)

    def _charge(self, request: Request, more: int) -> None:
        end = self._ends.get(request.owner, 0) + more
        if end > self._clock:
            self._ends[request.owner] = end
        else:
            self._ends.pop(request.owner, None)


class RequestQueue:
    """Requests that wait, in `order_key` order. A preempted request keeps its turn and so its place."""

    __slots__ = ("_num_arrived", "_requests", "_shares")

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._shares = FairShare()
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._requests))

    def arrive(self, request: Request) -> None:
        """Once per request, before it is pushed: its place among all others."""
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self._shares.arrive(request)

    def push(self, request: Request) -> None:
        insort(self._requests, request, key=order_key)

    def admit(self, request: Request) -> None:
        """It leaves the queue because it runs."""
        self.remove(request)
        self._shares.serve(request)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def settle(self, request: Request) -> None:
        """It has ended, wherever it was."""
        if self._shares.end(request, self._requests):
            self._requests.sort(key=order_key)
