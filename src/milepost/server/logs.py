"""Logs as lines of text, or as one JSON object per line. Neither holds text of a prompt or an answer."""

from __future__ import annotations

import datetime
import io
import json
import logging
from contextvars import ContextVar
from typing import Any

from milepost.errors import ConfigError

FORMATS = ("text", "json")
QUIET = ("httpx", "uvicorn.error", "asyncio")

current_request_id: ContextVar[str | None] = ContextVar("current_request_id", default=None)
"""Of the HTTP request that is being handled; set by the middleware."""


class JsonFormatter(logging.Formatter):
    """`{"ts", "level", "logger", "message", ...}`; the fields of a request log line stand beside it."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        entry: dict[str, Any] = {
            "ts": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        if fields is None:
            entry["message"] = record.getMessage()
        else:
            entry |= fields
        request_id = current_request_id.get()
        if request_id is not None:
            entry["request_id"] = request_id
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def configure_logging(log_format: str) -> None:
    """Everything from INFO on to stderr, in one of `FORMATS`.

    Raises:
        ConfigError: another format.
    """
    if log_format not in FORMATS:
        raise ConfigError("log_format", f"must be one of {', '.join(FORMATS)}, not {log_format!r}")
    handler = logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else plain)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


class LineLog(io.TextIOBase):
    """A text file whose lines become log records: what start-up says to people, for machines."""

    def __init__(self, logger: str) -> None:
        self._log = logging.getLogger(logger)
        self._pending = ""

    def write(self, text: str) -> int:
        *lines, self._pending = (self._pending + text).split("\n")
        for line in lines:
            if line.strip():
                self._log.info("%s", line.strip())
        return len(text)
