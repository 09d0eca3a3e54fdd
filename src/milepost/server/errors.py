"""Every error leaves the server as `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from milepost.engine.messages import EngineError, EngineStopped
from milepost.errors import MilepostError, RequestError

log = logging.getLogger(__name__)


def error_object(error: BaseException) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of an error."""
    if isinstance(error, RequestError):
        kind = "not_found_error" if error.status == 404 else "invalid_request_error"
        return error.status, _body(str(error), kind, error.param, error.code)
    if isinstance(error, EngineError):
        status = 503 if isinstance(error, EngineStopped) else 500
        return status, _body(str(error), "server_error", None, "engine_error")
    return 500, _body(
        "internal error; the server's log has the details", "server_error", None, "internal_error"
    )


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def install_error_handlers(app: FastAPI) -> None:
    """Make every way to fail answer in the same form."""

    @app.exception_handler(MilepostError)
    async def on_milepost_error(request: Request, error: MilepostError) -> JSONResponse:
        status, body = error_object(error)
        return JSONResponse(body, status)

    @app.exception_handler(HTTPException)
    async def on_http_exception(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        return JSONResponse(_body(message, kind, None, None), error.status_code, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        param = str(first["loc"][-1]) if first.get("loc") else None
        return JSONResponse(_body(str(first["msg"]), "invalid_request_error", param, "invalid_request"), 400)

    @app.exception_handler(Exception)
    async def on_other_error(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        status, body = error_object(error)
        return JSONResponse(body, status)
