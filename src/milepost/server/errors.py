"""Every error leaves the server as `{"error": {message, type, param, code}}`; below `/v1/messages` as
`{"type": "error", "error": {...}}`."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from milepost.engine.manifests import StoresUnavailable
from milepost.engine.messages import (
    EngineError,
    EngineOverloaded,
    EngineStopped,
    ReaderTooSlow,
    RequestTimedOut,
)
from milepost.errors import MilepostError, RequestError, naming
from milepost.server.access import challenge
from milepost.server.state import Unavailable

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""Nobody reads it; the number shows in tests and proxies."""
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
ENGINE_ERRORS: tuple[tuple[type[EngineError], int, str, str], ...] = (
    (EngineOverloaded, 429, "rate_limit_error", "queue_full"),
    (RequestTimedOut, 504, "timeout_error", "request_timeout"),
    (ReaderTooSlow, 408, "timeout_error", "reader_too_slow"),
    (EngineStopped, 503, "server_error", "engine_error"),
    (StoresUnavailable, 503, "server_error", "store_unavailable"),
    (EngineError, 500, "server_error", "engine_error"),
)
"""Kind of error -> status, `type`, `code`; the first that fits."""


def error_object(error: BaseException) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of an error."""
    if isinstance(error, RequestError):
        kind = KINDS.get(error.status, "invalid_request_error")
        return error.status, _body(str(error), kind, error.param, error.code)
    if isinstance(error, Unavailable):
        return 503, _body(str(error), "server_error", None, "unavailable")
    for known, status, kind, code in ENGINE_ERRORS:
        if isinstance(error, known):
            return status, _body(str(error), kind, None, code)
    return 500, _body(
        "internal error; the server's log has the details", "server_error", None, "internal_error"
    )


def error_response(error: BaseException, path: str = "") -> JSONResponse:
    """The response to a request for `path` that failed before its first byte."""
    status, body = error_object(error)
    body = shaped_for(path, status, body)
    headers = challenge(status)
    if isinstance(error, EngineOverloaded | Unavailable):
        headers["retry-after"] = str(error.retry_after_seconds)
    return JSONResponse(body, status, headers)


ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error",
    504: "timeout_error",
}  # fmt: skip


def shaped_for(path: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """An error in the form of the API that `path` belongs to."""
    if path != ANTHROPIC_PATH and not path.startswith(f"{ANTHROPIC_PATH}/"):
        return body
    kind = ANTHROPIC_KINDS.get(status, "invalid_request_error")
    return {"type": "error", "error": {**body["error"], "type": kind}}


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": naming(param, message), "type": kind, "param": param, "code": code}}


MAX_PATH_SEGMENTS = 16


def near_path(app: FastAPI, method: str, path: str) -> str | None:
    """The path below which the end of `path` is a route: what a client with a wrong base URL meant."""
    segments = [segment for segment in path.split("/") if segment]
    if len(segments) > MAX_PATH_SEGMENTS:
        return None
    for first in range(len(segments)):
        tail = "/" + "/".join(segments[first:])
        for candidate in (f"/v1{tail}", tail):
            scope = {"type": "http", "path": candidate, "method": method, "root_path": "", "headers": []}
            if candidate != path and any(route.matches(scope)[0] is Match.FULL for route in app.routes):
                return candidate
    return None


def _path_hint(path: str, near: str | None) -> str:
    if near is None:
        root = "; the API is below /v1, /docs lists its routes, and /ui shows the cache"
        return root if path == "/" else "; /docs lists the routes of this server"
    hint = f"; did you mean {near}?"
    if near.startswith(ANTHROPIC_PATH):
        return f"{hint} The base URL of Anthropic's clients is http://HOST:PORT, without /v1"
    if near.startswith("/v1/"):
        return f"{hint} The base URL of OpenAI's clients is http://HOST:PORT/v1"
    return hint


def install_error_handlers(app: FastAPI) -> None:
    """Make every way to fail answer in the same form."""

    @app.exception_handler(MilepostError)
    async def on_milepost_error(request: Request, error: MilepostError) -> JSONResponse:
        return error_response(error, request.url.path)

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(HTTPException)
    async def on_http_exception(request: Request, error: HTTPException) -> JSONResponse:
        path, message = request.url.path, f"{request.method} {request.url.path}: {error.detail}"
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        if error.status_code == 404:
            near = near_path(app, request.method, path)
            message += _path_hint(path, near)
            path = near or path
        body = shaped_for(path, error.status_code, _body(message, kind, None, None))
        return JSONResponse(body, error.status_code, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        param = str(first["loc"][-1]) if first.get("loc") else None
        return JSONResponse(_body(str(first["msg"]), "invalid_request_error", param, "invalid_request"), 400)

    @app.exception_handler(Exception)
    async def on_other_error(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(error, request.url.path)
