"""Log lines for machines: one JSON object each, with the id of the request."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest
from rich.console import Console
from tests.server.serving import HTTP, Running
from tests.server.test_life import LONG, wait_for

from milepost.errors import ConfigError
from milepost.server import schema
from milepost.server.logs import JsonFormatter, LineLog, configure_logging, current_request_id


def parsed(record: logging.LogRecord) -> dict:
    line = JsonFormatter().format(record)
    assert "\n" not in line
    return json.loads(line)


def record_of(message: str, *args: object, **fields: object) -> logging.LogRecord:
    record = logging.LogRecord("milepost.x", logging.WARNING, "f", 1, message, args, None)
    record.__dict__.update(fields)
    return record


def test_a_line_is_one_object() -> None:
    entry = parsed(record_of("lost %d\nof %s", 3, 'ten "€"'))
    assert entry.pop("ts").endswith("Z")
    assert entry == {"level": "WARNING", "logger": "milepost.x", "message": 'lost 3\nof ten "€"'}


def test_an_exception_stays_on_its_line() -> None:
    try:
        raise ValueError("planted")
    except ValueError:
        record = record_of("failed")
        record.exc_info = sys.exc_info()
    assert "ValueError: planted" in parsed(record)["exception"]


def test_a_request_is_logged_with_numbers(server: Running, caplog) -> None:
    caplog.set_level(logging.INFO, logger="milepost.request")
    headers = {"X-Request-Id": "from-a-client"}
    answers = [
        HTTP.post(f"{server.url}/v1/completions", json={"prompt": LONG, "max_tokens": 2}, headers=headers)
        for _ in range(2)
    ]
    wait_for(lambda: len(caplog.records) >= 2, "no log line")
    for answer, record in zip(answers, caplog.records, strict=True):
        entry, usage = parsed(record), answer.json()["usage"]
        assert entry["request"] == "cmpl-from-a-client" and entry["level"] == "INFO"
        assert entry["prompt_tokens"] == usage["prompt_tokens"]
        assert entry["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert entry["generated_tokens"] == 2 and entry["finish"] == "length"
        assert entry["e2e_ms"] >= entry["ttft_ms"] > 0 and entry["ttft_ms"] >= entry["queue_ms"] >= 0
        assert entry["matched_tokens"] == answer.json()["milepost"]["reuse"]["matched_tokens"]
        # Text and JSON say the same.
        assert f"cached_tokens={entry['cached_tokens']} " in record.getMessage()


def test_lines_of_a_handler_carry_its_request(server: Running, monkeypatch) -> None:
    monkeypatch.setattr(schema, "_warned", set())
    seen: list[str | None] = []

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(parsed(record).get("request_id"))

    watch = Watch()
    logger = logging.getLogger("milepost.server.schema")
    logger.addHandler(watch)
    try:
        body = {"prompt": "a", "max_tokens": 1, "nobody-knows-this": 1}
        HTTP.post(f"{server.url}/v1/completions", json=body, headers={"X-Request-Id": "id-7"})
    finally:
        logger.removeHandler(watch)
    assert seen == ["id-7"]
    assert current_request_id.get() is None


def test_start_up_lines_become_records(caplog) -> None:
    caplog.set_level(logging.INFO)
    console = Console(file=LineLog("milepost.serve"), width=10_000)
    console.print("[bold]tiny[/bold]: kimi_linear", highlight=False)
    console.print("in force: " + "prefix caching on, " * 50, highlight=False, soft_wrap=True)
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == "tiny: kimi_linear" and len(messages) == 2
    assert messages[1].count("prefix caching on") == 50


def test_configuring() -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        configure_logging("json")
        stream = io.StringIO()
        (handler,) = root.handlers
        handler.setStream(stream)
        logging.getLogger("milepost.x").info("hello")
        logging.getLogger("httpx").info("quiet")
        assert json.loads(stream.getvalue())["message"] == "hello"
        configure_logging("text")
        (handler,) = root.handlers
        assert not isinstance(handler.formatter, JsonFormatter)
        with pytest.raises(ConfigError, match="log_format"):
            configure_logging("xml")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
