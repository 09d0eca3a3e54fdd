"""What happens to every request before a route sees it: its id, its caller, the phase, its size."""

from __future__ import annotations

import asyncio
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from milepost.errors import MilepostError, RequestError
from milepost.server.access import OPEN_PATHS, Access
from milepost.server.errors import error_response
from milepost.server.logs import current_request_id
from milepost.server.options import ServerOptions
from milepost.server.state import ServerState

REQUEST_ID_HEADER = "x-request-id"
REQUEST_ID = re.compile(r"[A-Za-z0-9._~:@/+=-]{1,128}")
ANSWER_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"})
"""What would wait in the queue is refused before its body is read when that is full."""
BODY_PAUSE_SECONDS = 30.0
"""A client that stops in the middle of its body for longer holds a connection for nothing."""


def request_id(request: Request) -> str:
    """The id the client sent in `X-Request-Id`, if it is a sound one, else a new one; echoed."""
    found: str = request.state.request_id
    return found


class Gate:
    """ASGI middleware around the whole application.

    A request that is refused here has cost a look at its headers: nothing of its body was read.
    """

    def __init__(self, app: ASGIApp, state: ServerState, access: Access, options: ServerOptions) -> None:
        self._app = app
        self._state = state
        self._access = access
        self._max_body_bytes = options.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope.setdefault("state", {})
        scope["state"]["request_id"] = number = _sound_id(headers.get(REQUEST_ID_HEADER))

        current_request_id.set(number)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._state.num_responses[message["status"]] += 1
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = number
            await send(message)

        is_probe = scope["path"] in OPEN_PATHS
        try:
            scope["state"]["caller"] = self._access.check(scope["path"], headers)
            if not is_probe:
                self._state.check_admits()
            if scope["path"] in ANSWER_PATHS and self._state.check_room is not None:
                self._state.check_room()
            self._check_announced_size(headers)
        except MilepostError as error:
            await error_response(error, scope["path"])(scope, receive, send_with_id)
            return
        self._state.num_open += not is_probe
        try:
            await self._app(scope, _Body(receive, self._max_body_bytes), send_with_id)
        finally:
            self._state.num_open -= not is_probe

    def _check_announced_size(self, headers: Headers) -> None:
        announced = headers.get("content-length", "0")
        if announced.isdecimal() and int(announced) > self._max_body_bytes:
            raise _too_large(self._max_body_bytes)


class _Body:
    """`receive` that ends a body which is too large, or stands still. What came is not kept here."""

    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._is_complete = False

    async def __call__(self) -> Message:
        if self._is_complete:
            return await self._receive()
        try:
            async with asyncio.timeout(BODY_PAUSE_SECONDS):
                message = await self._receive()
        except TimeoutError:
            raise RequestError(
                None,
                f"no part of the body came for {BODY_PAUSE_SECONDS:g} s",
                code="body_timeout",
                status=408,
            ) from None
        self._num_bytes += len(message.get("body", b""))
        self._is_complete = not message.get("more_body", False)
        if self._num_bytes > self._max_bytes:
            raise _too_large(self._max_bytes)
        return message


def _sound_id(sent: str | None) -> str:
    if sent is not None and REQUEST_ID.fullmatch(sent):
        return sent
    return uuid.uuid4().hex


def _too_large(max_bytes: int) -> RequestError:
    message = f"the body has more than the {max_bytes} bytes this server takes (--max-body-bytes)"
    return RequestError(None, message, code="request_too_large", status=413)
