"""Who waits and in which order: priority first (lower is sooner), then arrival. Deterministic."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from milepost.core.request import Request

BACKGROUND_PRIORITY = 1 << 31
"""From this priority on a request is computed only while no other request is there."""


def is_background(request: Request) -> bool:
    """Whether a request gives way to every other one."""
    return request.priority >= BACKGROUND_PRIORITY


def order_key(request: Request) -> tuple[int, int]:
    """Sort key of waiting and running requests."""
    return (request.priority, request.arrival)


class RequestQueue:
    """Requests in `order_key` order. A preempted request keeps its arrival and so its place."""

    __slots__ = ("_requests",)

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._requests))

    def push(self, request: Request) -> None:
        insort(self._requests, request, key=order_key)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)
