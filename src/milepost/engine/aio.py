"""The asyncio front: submit a request, read its deltas, stop reading to cancel it.

One engine thread feeds any number of readers. It appends to a queue and wakes the loop once per
step, so a slow reader never costs time of the engine; one that falls too far behind is cancelled, so
that its memory is bounded, too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from milepost.core.metrics import CoreStats
from milepost.engine.engine import Engine
from milepost.engine.messages import (
    Accepted,
    EngineError,
    EngineEvent,
    Failed,
    GenerationRequest,
    OutputDelta,
    ReaderTooSlow,
    RequestTimedOut,
)

MAX_UNREAD_DELTAS = 4096
"""Beyond what the sockets on the way hold, which is some hundred kilobytes."""


class AnswerStream:
    """Deltas of one answer: `async for delta in stream`. Leaving before the end aborts the request.

    Use as an async context manager, or call `aclose`.
    """

    def __init__(self, front: AsyncEngine) -> None:
        self._front = front
        self._timer: asyncio.TimerHandle | None = None
        self._events: deque[EngineEvent] = deque()
        self._arrived = asyncio.Event()
        self._request_id: int | None = None
        self._ended = False
        self._is_cut = False

    async def accepted(self) -> None:
        """Wait until the scheduler has taken the request.

        Raises:
            RequestError: it refused it. EngineError: the engine is gone.
        """
        event = await self._next()
        if isinstance(event, Failed):
            raise event.error

    def __aiter__(self) -> AnswerStream:
        return self

    async def __anext__(self) -> OutputDelta:
        if self._ended:
            raise StopAsyncIteration
        event = await self._next()
        while isinstance(event, Accepted):
            event = await self._next()
        if isinstance(event, Failed):
            raise event.error
        if event.finish_reason is not None:
            self._end()
        return event

    async def aclose(self) -> None:
        """Abort the request unless it has ended. Safe to call twice."""
        self.cancel()

    def cancel(self) -> None:
        """As `aclose`, without waiting."""
        if not self._ended:
            self._end()
            if self._request_id is not None:
                self._front.engine.abort(self._request_id)

    def fail(self, error: EngineError) -> None:
        """Abort the request; its reader gets `error` instead of what it has not read."""
        if not self._ended:
            if self._request_id is not None:
                self._front.engine.abort(self._request_id)
            self._is_cut = True
            self._events.clear()
            self._events.append(Failed(error))
            self._arrived.set()

    async def __aenter__(self) -> AnswerStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    async def _next(self) -> EngineEvent:
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        if isinstance(event, Failed):
            self._end()
        return event

    def _end(self) -> None:
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()

    def _push(self, event: EngineEvent) -> None:
        if self._is_cut or self._ended:
            return
        if len(self._events) >= self._front.max_unread_deltas:
            self.fail(
                ReaderTooSlow("the client reads this answer slower than it is generated; it was cancelled")
            )
            return
        self._events.append(event)
        self._arrived.set()


class AsyncEngine:
    """Wraps a started engine for the running event loop. Create it inside the loop.

    Args:
        max_unread_deltas: an answer with so many that nobody reads is cancelled.
        request_timeout: seconds from submission to the last token; None = no limit.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_unread_deltas: int = MAX_UNREAD_DELTAS,
        request_timeout: float | None = None,
    ) -> None:
        self.engine = engine
        self.max_unread_deltas = max_unread_deltas
        self._request_timeout = request_timeout
        self._loop = asyncio.get_running_loop()
        self._outbox: deque[tuple[AnswerStream, EngineEvent]] = deque()
        self._num_preparing = 0
        engine.add_flush(self._flush)

    def check_room(self) -> None:
        """
        Raises:
            EngineOverloaded: too many requests wait already.
        """
        self.engine.check_room(self._num_preparing)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """While a prompt is rendered, tokenized and submitted, which costs time: what would be refused is
        refused before, and those that are being prepared count as waiting.

        Raises:
            EngineOverloaded: too many requests wait already.
        """
        self.check_room()
        self._num_preparing += 1
        try:
            yield
        finally:
            self._num_preparing -= 1

    def submit(self, request: GenerationRequest) -> AnswerStream:
        """Hand in a request and return its stream at once."""
        stream = AnswerStream(self)
        stream._request_id = self.engine.submit(request, lambda event: self._outbox.append((stream, event)))
        limit = self._request_timeout
        if limit is not None:
            error = RequestTimedOut(f"the request took longer than the {limit:g} s this server allows")
            stream._timer = self._loop.call_later(limit, stream.fail, error)
        return stream

    async def reset_prefix_cache(self) -> bool:
        """See `Engine.reset_prefix_cache`."""
        return await asyncio.wrap_future(self.engine.reset_prefix_cache())

    async def fresh_stats(self) -> CoreStats:
        """See `Engine.fresh_stats`."""
        return await asyncio.wrap_future(self.engine.fresh_stats())

    def close(self) -> None:
        """Stop listening to the engine; its streams get no further event."""
        self.engine.remove_flush(self._flush)

    def _flush(self) -> None:
        """Engine thread: one wake-up of the loop for all events of a step."""
        if self._outbox:
            try:
                self._loop.call_soon_threadsafe(self._dispatch)
            except RuntimeError:  # the loop is closed: nobody is left to read
                self._outbox.clear()

    def _dispatch(self) -> None:
        while self._outbox:
            stream, event = self._outbox.popleft()
            stream._push(event)
