"""HTTP around answers: several at once, server-sent events, and clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from milepost.engine.aio import AnswerStream
from milepost.engine.messages import OutputDelta
from milepost.errors import MilepostError
from milepost.server.errors import CLIENT_CLOSED_REQUEST, error_object
from milepost.server.options import HEARTBEAT_SECONDS

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EventFormat:
    """How the events of one API look on the wire.

    Attributes:
        encode: one event as bytes.
        error: the event that says how a stream failed.
        done: what ends every stream.
    """

    encode: Callable[[dict[str, Any]], bytes]
    error: Callable[[BaseException], dict[str, Any]]
    done: bytes


DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": waiting\n\n"
STALL_SECONDS = 60.0


async def all_accepted(streams: Sequence[AnswerStream]) -> None:
    """Wait until the scheduler took every answer of a request; cancel all if it refuses one."""
    try:
        for stream in streams:
            await stream.accepted()
    except BaseException:
        cancel_all(streams)
        raise


def cancel_all(streams: Sequence[AnswerStream]) -> None:
    """Abort what has not ended."""
    for stream in streams:
        stream.cancel()


class Reply(Protocol):
    """An answer in both of its forms; only one of them is asked for."""

    def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """As a stream of JSON objects."""
        ...

    async def whole(self) -> dict[str, Any]:
        """As one JSON object, when everything is there."""
        ...

    def last_event(self) -> dict[str, Any] | None:
        """What a stream that ended with an error still says: the usage, if it was asked for."""
        ...


async def respond(
    request: Request,
    streams: Sequence[AnswerStream],
    reply: Reply,
    *,
    is_stream: bool,
    event_format: EventFormat | None = None,
) -> Response:
    """The HTTP response to a request that was handed to the engine, once it is accepted."""
    left = await while_connected(request, all_accepted(streams))
    if left is not None:
        return left
    if is_stream:
        heartbeat = request.app.state.service.options.heartbeat_seconds
        return EventStream(
            reply.events(),
            lambda: cancel_all(streams),
            reply.last_event,
            heartbeat,
            event_format or OPENAI_EVENTS,
        )
    result = await while_connected(request, reply.whole())
    return result if isinstance(result, Response) else JSONResponse(result)


async def merged(streams: Sequence[AnswerStream]) -> AsyncGenerator[tuple[int, OutputDelta], None]:
    """Deltas of all answers as they come, each with the index of its answer. Leaving early, or a
    failure of one, aborts all."""
    if len(streams) == 1:
        async with streams[0] as stream:
            async for delta in stream:
                yield 0, delta
        return
    # Bounded: a reader that stops is noticed by the streams, which count what is not taken from them.
    arrived: asyncio.Queue[tuple[int, OutputDelta | BaseException | None]] = asyncio.Queue(len(streams))

    async def forward(index: int, stream: AnswerStream) -> None:
        try:
            async for delta in stream:
                await arrived.put((index, delta))
            await arrived.put((index, None))
        except MilepostError as error:
            await arrived.put((index, error))

    tasks = [asyncio.create_task(forward(index, stream)) for index, stream in enumerate(streams)]
    try:
        num_open = len(streams)
        while num_open:
            index, item = await arrived.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        cancel_all(streams)


async def while_connected(request: Request, work: Awaitable[T]) -> T | Response:
    """The result of `work`, or an empty response if the client leaves first (`work` is cancelled)."""
    working = asyncio.ensure_future(work)
    watching = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        for task in (working, watching):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, MilepostError):
                await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events from an async iterator of JSON objects.

    While there is nothing to say (the request waits, or its prompt is read) a comment goes out every
    `heartbeat_seconds`, so that proxies keep the connection. A failure after the first byte is sent as an
    event with an `error` object. When the client goes, or takes nothing for `STALL_SECONDS`, the iterator
    is closed at once, also while nothing is being sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[dict[str, Any], None],
        on_close: Callable[[], None],
        last_event: Callable[[], dict[str, Any] | None] = lambda: None,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        event_format: EventFormat | None = None,
    ) -> None:
        """
        Args:
            on_close: called once whatever happens, also if `events` was never begun.
            last_event: what follows the error of a stream that failed.
        """
        self.status_code = 200
        self.background = None
        self._events = events
        self._on_close = on_close
        self._last_event = last_event
        self._heartbeat_seconds = heartbeat_seconds
        self._format = event_format or OPENAI_EVENTS
        self._sending = asyncio.Lock()
        self._last_sent = 0.0
        self._is_over = False
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    def init_headers(self, headers: Any = None) -> None:
        """No content length: it is not known."""
        content_type = f"{self.media_type}; charset=utf-8".encode()
        self.raw_headers = [(b"content-type", content_type)]
        self.raw_headers += [(key.encode(), value.encode()) for key, value in (headers or {}).items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_all(send))
        watching = asyncio.create_task(_disconnected(receive))
        beating = asyncio.create_task(self._beat(send))
        try:
            await asyncio.wait({sending, watching, beating}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._on_close()
            for task in (sending, watching, beating):
                task.cancel()
            for task in (sending, watching, beating):
                with contextlib.suppress(asyncio.CancelledError, OSError):
                    await task

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

        async def send_part(body: bytes) -> None:
            async with self._sending:
                self._last_sent = asyncio.get_running_loop().time()
                await send({"type": "http.response.body", "body": body, "more_body": True})

        try:
            async for event in self._events:
                await send_part(self._format.encode(event))
        except Exception as error:
            if not isinstance(error, MilepostError):
                log.exception("a stream failed")
            await send_part(self._format.encode(self._format.error(error)))
            last = self._last_event()
            if last is not None:
                await send_part(self._format.encode(last))
        finally:
            await self._events.aclose()
        async with self._sending:
            self._is_over = True
            await send({"type": "http.response.body", "body": self._format.done, "more_body": False})

    async def _beat(self, send: Send) -> None:
        """Returns when the client has taken nothing for too long. Whoever sends holds the lock."""
        loop = asyncio.get_running_loop()
        self._last_sent = loop.time()
        while True:
            await asyncio.sleep(self._last_sent + self._heartbeat_seconds - loop.time())
            try:
                # Not wait_for: in Python 3.11 it loses a cancellation that comes together with the lock.
                async with asyncio.timeout(STALL_SECONDS):
                    await self._sending.acquire()
            except TimeoutError:
                return
            try:
                if self._is_over:
                    return
                if loop.time() >= self._last_sent + self._heartbeat_seconds:
                    self._last_sent = loop.time()
                    await send({"type": "http.response.body", "body": HEARTBEAT, "more_body": True})
            finally:
                self._sending.release()


def encode_event(event: dict[str, Any]) -> bytes:
    """One `data:` line."""
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def encode_named_event(event: dict[str, Any]) -> bytes:
    """The same behind a line with the event's `type`."""
    return f"event: {event['type']}\n".encode() + encode_event(event)


OPENAI_EVENTS = EventFormat(encode_event, lambda error: error_object(error)[1], DONE)
"""Of completions and chat."""
