"""Who waits and in which order: priority first (lower is sooner), then the owner's turn, then arrival.

Among requests of one owner and priority the order is that of arrival. Deterministic.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from milepost.core.request import BACKGROUND_PRIORITY, Request, RequestStatus, is_background

__all__ = ["BACKGROUND_PRIORITY", "FairShare", "RequestQueue", "is_background", "last_behind", "order_key"]

WAITS = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def order_key(request: Request) -> tuple[int, int, int]:
    """Sort key of waiting and running requests."""
    return (request.priority, request.turn, request.arrival)


def last_behind(request: Request, running: Sequence[Request]) -> Request | None:
    """Of those that run, in `order_key` order, the last one, if it comes after `request`."""
    last = running[-1] if running else None
    return None if last is None or last is request or order_key(last) <= order_key(request) else last


@dataclass(slots=True, eq=False)
class _Entry:
    """One request of an owner, or several that are over and came one after the other.

    Attributes:
        request: None once it is over.
        floor: earliest start: the clock of its level when it arrived, or was no longer held back.
        cost: tokens, once it is over.
    """

    request: Request | None
    floor: int
    cost: int = 0

    def expected_cost(self) -> int:
        """Tokens, as far as is known. Cached ones cost nothing, generated ones as much as others."""
        request = self.request
        if request is None:
            return self.cost
        if request.reuse is None:
            return request.num_prompt_tokens
        return request.num_tokens - request.reuse.num_cached_tokens

    def join(self, later: _Entry) -> None:
        """Both are over: from now on one entry stands for them."""
        self.floor = max(self.floor, later.floor - self.cost)
        self.cost += later.cost


@dataclass(slots=True, eq=False)
class _Share:
    """The requests of one owner and priority.

    Attributes:
        entries: by number of arrival.
        end: where the last one ends.
    """

    end: int = 0
    entries: dict[int, _Entry] = field(default_factory=dict)

    def tokens_waiting_before(self, request: Request) -> int:
        """What those cost that came before `request` and still wait. O(requests before it)."""
        num_tokens = 0
        for entry in self.entries.values():
            if entry.request is request:
                break
            if entry.request is not None and entry.request.status in WAITS:
                num_tokens += entry.expected_cost()
        return num_tokens


@dataclass(slots=True, eq=False)
class _Level:
    """The requests of one priority; it is forgotten when none is left.

    Attributes:
        clock: the turn served last.
    """

    clock: int = 0
    num_open: int = 0
    shares: dict[str, _Share] = field(default_factory=dict)


class FairShare:
    """Turns that give every owner (an API key) the same share of the tokens computed while they compete.

    Self-clocked fair queueing, in its start-time form (Goyal, Vin and Cheng, 1996), once per priority: a
    request's turn is the later of the clock and the end of its owner's previous request; the clock is the
    turn served last. A request's length is its prompt until it is admitted, from then on what it really
    costs; when more is known, those of its owner that still wait are laid behind each other anew, none of
    them before the clock. So they never change their order.

    Some requests are held back, for a sibling or a store. One that is served before others of its owner
    takes the place of the first of them. And nobody saves up for later what he could not use: who was held
    back goes on from the clock.
    """

    __slots__ = ("_changed", "_levels")

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._changed: set[tuple[int, str]] = set()

    def arrive(self, request: Request) -> None:
        """Give a new request its turn. O(1)."""
        level = self._levels.setdefault(request.priority, _Level())
        share = level.shares.setdefault(request.owner, _Share())
        level.num_open += 1
        request.turn = max(level.clock, share.end)
        share.entries[request.arrival] = _Entry(request, level.clock)
        share.end = request.turn + request.num_prompt_tokens

    def release(self, request: Request) -> None:
        """It was held back and is not any more. O(1)."""
        level = self._levels[request.priority]
        if request.turn < level.clock and request.status is RequestStatus.WAITING:
            level.shares[request.owner].entries[request.arrival].floor = level.clock
            self._changed.add((request.priority, request.owner))

    def serve(self, request: Request) -> None:
        """Its first chunk is planned, and what it reuses is known."""
        level = self._levels[request.priority]
        share = level.shares[request.owner]
        level.clock = max(level.clock, request.turn - share.tokens_waiting_before(request))
        if request.reuse is not None and request.reuse.num_cached_tokens:
            self._changed.add((request.priority, request.owner))

    def end(self, request: Request) -> None:
        """It is over. O(1)."""
        level = self._levels[request.priority]
        level.num_open -= 1
        if not level.num_open:
            del self._levels[request.priority]
            return
        entry = level.shares[request.owner].entries[request.arrival]
        entry.cost = entry.expected_cost() if request.reuse is not None else 0
        entry.floor = max(entry.floor, min(request.turn, level.clock))
        entry.request = None
        self._changed.add((request.priority, request.owner))

    def lay_out(self) -> bool:
        """Put the requests of owners of whom more is known behind each other anew; whether turns of those
        that wait changed. O(requests of those owners that are not over)."""
        changed = False
        for priority, owner in sorted(self._changed):
            level = self._levels.get(priority)
            share = level.shares.get(owner) if level is not None else None
            if level is not None and share is not None:
                changed |= self._lay_out(level, share)
        self._changed.clear()
        return changed

    @staticmethod
    def _lay_out(level: _Level, share: _Share) -> bool:
        """At what they cost as far as is known."""
        end = 0
        changed = False
        over: _Entry | None = None
        joined: list[int] = []
        for arrival, entry in share.entries.items():
            request = entry.request
            start = max(entry.floor, end)
            if request is not None:
                over = None
                if request.status is RequestStatus.WAITING:
                    start = max(start, min(request.turn, level.clock))
                    changed |= request.turn != start
                    request.turn = start
                else:
                    start = max(start, request.turn)
            elif over is not None:
                over.join(entry)
                joined.append(arrival)
            else:
                over = entry
            end = start + entry.expected_cost()
        for arrival in joined:
            del share.entries[arrival]
        share.end = end
        return changed


class RequestQueue:
    """Requests that wait, in `order_key` order. A preempted request keeps its turn and so its place."""

    __slots__ = ("_held", "_num_arrived", "_requests", "_shares")

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._held: dict[int, Request] = {}
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

    def hold(self, request: Request) -> bool:
        """It may not run yet; `release` asks again. False if it was held back before."""
        is_new = request.request_id not in self._held
        self._held[request.request_id] = request
        return is_new

    def release(self, held_by: Callable[[Request], str]) -> None:
        """Give those that nothing holds back any more their place among the others, and all of them the turns
        that follow from what is known by now. To be called before requests are admitted."""
        released = [request for request in self._held.values() if not held_by(request)]
        for request in released:
            del self._held[request.request_id]
            self._shares.release(request)
        if self._shares.lay_out():
            self._requests.sort(key=order_key)

    def admit(self, request: Request) -> None:
        """It leaves the queue because it runs."""
        self.remove(request)
        self._shares.serve(request)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)
        self._held.pop(request.request_id, None)

    def settle(self, request: Request) -> None:
        """It has ended, wherever it was."""
        self._shares.end(request)
