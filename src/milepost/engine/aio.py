"""The asyncio front: submit a request, read its deltas, stop reading to cancel it.

One engine thread feeds any number of readers. It appends to a queue and wakes the loop once per
step, so a slow reader costs memory (at most its own answer), never time of the engine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType

from milepost.core.metrics import CoreStats
from milepost.engine.engine import Engine
from milepost.engine.messages import Accepted, EngineEvent, Failed, GenerationRequest, OutputDelta


class AnswerStream:
    """Deltas of one answer: `async for delta in stream`. Leaving before the end aborts the request.

    Use as an async context manager, or call `aclose`.
    """

    def __init__(self, front: AsyncEngine) -> None:
        self._front = front
        self._events: deque[EngineEvent] = deque()
        self._arrived = asyncio.Event()
        self._request_id: int | None = None
        self._ended = False

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
            self._ended = True
        return event

    async def aclose(self) -> None:
        """Abort the request unless it has ended. Safe to call twice."""
        self.cancel()

    def cancel(self) -> None:
        """As `aclose`, without waiting."""
        if not self._ended:
            self._ended = True
            if self._request_id is not None:
                self._front.engine.abort(self._request_id)

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
            self._ended = True
        return event

    def _push(self, event: EngineEvent) -> None:
        self._events.append(event)
        self._arrived.set()


class AsyncEngine:
    """Wraps a started engine for the running event loop. Create it inside the loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._loop = asyncio.get_running_loop()
        self._outbox: deque[tuple[AnswerStream, EngineEvent]] = deque()
        engine.add_flush(self._flush)

    def submit(self, request: GenerationRequest) -> AnswerStream:
        """Hand in a request and return its stream at once."""
        stream = AnswerStream(self)
        stream._request_id = self.engine.submit(request, lambda event: self._outbox.append((stream, event)))
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
