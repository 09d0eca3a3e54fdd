"""Answers that arrive in parts and are due at a certain time."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from milepost.stores.objects import Clock

T = TypeVar("T")


class Answer(Generic[T]):
    """A list whose items arrive one by one; given to `future` when all are there, or when it is due.

    Any thread may put; the future is resolved once, without locks held.

    Args:
        late: stands for items that did not arrive.
    """

    def __init__(self, future: Future[list[T]], num_items: int, late: T) -> None:
        # From here on nobody can cancel it under the thread that resolves it.
        future.set_running_or_notify_cancel()
        self._future: Future[list[T]] | None = future
        self._lock = threading.Lock()
        self._items = [late] * num_items
        self._num_open = num_items
        if not num_items:
            self.finish()

    def put(self, index: int, item: T) -> None:
        with self._lock:
            if self._future is None:
                return
            self._items[index] = item
            self._num_open -= 1
            if self._num_open:
                return
        self.finish()

    def finish(self) -> None:
        """What is there now is the answer."""
        with self._lock:
            future, self._future = self._future, None
            items, self._items = self._items, []
        if future is not None:
            future.set_result(items)


class Timer:
    """Runs small functions at their time, on one thread that starts with the first of them."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._clock = clock
        self._condition = threading.Condition()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def after(self, seconds: float, function: Callable[[], None]) -> None:
        """Run `function` in so many seconds, or at once if the timer is closed."""
        with self._condition:
            if not self._closed:
                heapq.heappush(self._due, (self._clock() + seconds, next(self._numbers), function))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                    self._thread.start()
                self._condition.notify()
                return
        function()

    def close(self) -> None:
        """What is not due yet is run now: nobody waits for an answer that will not come."""
        with self._condition:
            self._closed = True
            due, self._due = self._due, []
            self._condition.notify()
        for _, _, function in due:
            function()

    def _work(self) -> None:
        while True:
            with self._condition:
                if self._closed:
                    return
                if not self._due:
                    self._condition.wait()
                    continue
                wait_seconds = self._due[0][0] - self._clock()
                if wait_seconds > 0:
                    self._condition.wait(wait_seconds)
                    continue
                _, _, function = heapq.heappop(self._due)
            function()
            del function
