"""How long the queue may get, and when a client that was turned away should come back."""

from __future__ import annotations

import math
import threading
from collections import deque

from milepost.engine.messages import EngineOverloaded

RATE_WINDOW_SECONDS = 60.0
MAX_RETRY_AFTER_SECONDS = 600
RETRY_AFTER_UNKNOWN_SECONDS = 5
"""Before anything has ended there is no rate."""


class QueueLimit:
    """Bound of waiting requests, and the rate at which requests end.

    Args:
        max_queued_requests: requests that may wait beyond those that free seats will take at once;
            None = no bound.
        num_seats: requests that run at the same time.
    """

    def __init__(self, max_queued_requests: int | None, num_seats: int) -> None:
        self.max_queued_requests = max_queued_requests
        self._num_seats = num_seats
        self._num_open = 0
        self._lock = threading.Lock()
        self._num_submitted = 0
        self._num_judged = 0
        self._busy_seconds = 0.0
        self._busy_since = 0.0
        self._ends: deque[float] = deque()

    def check(self, now: float, num_before: int = 0) -> None:
        """Whether there is a place for one more request. May be called from any thread.

        Args:
            num_before: requests before this one that the engine has not taken yet.

        Raises:
            EngineOverloaded: it would wait beyond the bound.
        """
        if self.max_queued_requests is None:
            return
        num_waiting = max(0, self._num_open + num_before - self._num_seats)
        if self._num_open + num_before >= self._num_seats + self.max_queued_requests:
            retry_after = self.retry_after_seconds(num_waiting, now)
            raise EngineOverloaded(
                f"{num_waiting} requests wait already; try again in {retry_after} s", retry_after
            )

    @property
    def num_submitted(self) -> int:
        """Requests on their way to the engine thread, which may be in the middle of a long step."""
        return self._num_submitted - self._num_judged

    def submitted(self) -> None:
        """A request is on its way; from any thread."""
        with self._lock:
            self._num_submitted += 1

    def judged(self) -> None:
        """The engine thread is about to take or refuse one of them."""
        self._num_judged += 1

    def began(self, now: float) -> None:
        """A request came."""
        if not self._num_open:
            self._busy_since = now
        self._num_open += 1

    def ended(self, now: float) -> None:
        """A request ended, whatever the reason."""
        busy = self._busy(now)
        self._ends.append(busy)
        while self._ends[0] < busy - RATE_WINDOW_SECONDS:
            self._ends.popleft()
        self._num_open -= 1
        if not self._num_open:
            self._busy_seconds = busy

    def rate(self, now: float) -> float:
        """Requests that ended per second, over the last minute with requests; 0 = not known."""
        busy = self._busy(now)
        # A copy is made in one piece, whatever the engine thread does meanwhile.
        num_ended = sum(1 for end in self._ends.copy() if end >= busy - RATE_WINDOW_SECONDS)
        return num_ended / max(1e-3, min(busy, RATE_WINDOW_SECONDS))

    def retry_after_seconds(self, num_waiting: int, now: float) -> int:
        """Whole seconds until those that wait now will have got their turn, at the measured rate."""
        rate = self.rate(now)
        if rate <= 0.0:
            return RETRY_AFTER_UNKNOWN_SECONDS
        return max(1, min(MAX_RETRY_AFTER_SECONDS, math.ceil(num_waiting / rate)))

    def _busy(self, now: float) -> float:
        """Seconds with requests so far: an idle hour says nothing about the rate."""
        return self._busy_seconds + (now - self._busy_since if self._num_open else 0.0)
