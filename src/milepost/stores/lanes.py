"""Threads of a tier: calls that may hang are left behind, never waited for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Call(Generic[T]):
    """One call on a lane.

    Args:
        function: runs on a thread of the lane, or never.
        released: called exactly once, when `function` has ended or will never begin: from then on nothing
            touches what was handed to it.
    """

    def __init__(self, function: Callable[[], T], released: Callable[[], None]) -> None:
        self._function = function
        self._released = released
        self._lock = threading.Lock()
        self._begun = False
        self._cancelled = False
        self._ended = threading.Event()
        self._value: T | None = None
        self._error: Exception | None = None

    def run(self) -> None:
        with self._lock:
            if self._cancelled:
                return
            self._begun = True
        try:
            self._value = self._function()
        except Exception as error:
            self._error = error
        finally:
            self._ended.set()
            self._released()

    def wait(self, seconds: float) -> T:
        """The result.

        Raises:
            TimeoutError: not in time; the call is abandoned, and its late result is dropped.
            Exception: what the function raised.
        """
        if not self._ended.wait(seconds) and not self._abandon():
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def _abandon(self) -> bool:
        """Whether it ended after all."""
        with self._lock:
            if self._ended.is_set():
                return True
            if self._begun:
                return False
            self._cancelled = True
        self._released()
        return False


class Lane:
    """At most `max_threads` daemon threads that run calls in order; started when they are needed.

    A call that hangs keeps its thread. When all threads hang, later calls time out in the queue.
    """

    def __init__(self, name: str, max_threads: int) -> None:
        self._name = name
        self._max_threads = max_threads
        self._queue: queue.SimpleQueue[Call[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_busy = 0
        self._closed = False

    def start(self, function: Callable[[], T], released: Callable[[], None] = lambda: None) -> Call[T]:
        """Run `function` when a thread is free."""
        call = Call(function, released)
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed")
            self._num_busy += 1
            if self._num_busy > self._num_threads < self._max_threads:
                self._num_threads += 1
                name = f"{self._name}-{self._num_threads}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
        self._queue.put(call)
        return call

    @property
    def is_full(self) -> bool:
        """Every thread has a call; if none comes back, all hang."""
        with self._lock:
            return self._num_busy >= self._max_threads

    def close(self) -> None:
        """Threads end after the calls that were started; not waited for."""
        with self._lock:
            self._closed = True
            num_threads = self._num_threads
        for _ in range(num_threads):
            self._queue.put(None)

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            call.run()
            # What it returned may be large.
            del call
            with self._lock:
                self._num_busy -= 1
