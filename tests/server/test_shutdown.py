"""Stopping the server while answers are being streamed."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path

import pytest
from tests.engine.tiny_tokenizer import KIMI_TEMPLATE, write_model_directory
from tests.server.serving import HTTP, serving_model

from milepost.server.app import Server, bind
from milepost.server.options import ServerOptions


@pytest.mark.parametrize("drain_seconds", [0.0, 0.3])
def test_a_stream_ends_with_an_error_and_done(
    tmp_path: Path, drain_seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    write_model_directory(tmp_path, template=KIMI_TEMPLATE)
    model, worker, scheduler = serving_model(tmp_path, cache_bytes=32 << 20)
    listening = threading.Event()
    address: list[str] = []

    def on_listening(url: str) -> None:
        address.append(url)
        listening.set()

    server = Server(lambda: model, bind(port=0), on_listening, ServerOptions(drain_seconds=drain_seconds))
    thread = threading.Thread(target=server.serve_until_stopped, daemon=True)
    thread.start()
    assert listening.wait(20)
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    events: list[str] = []
    with (
        caplog.at_level(logging.WARNING),
        HTTP.stream("POST", f"{address[0]}/v1/completions", json=body) as answer,
    ):
        for line in answer.iter_lines():
            if not line:
                continue
            events.append(line.removeprefix("data: "))
            if len(events) == 3:
                worker.gate.clear()  # no step ends any more until the server has begun to stop
                stopped_at = time.monotonic()
                server.should_exit = True
                threading.Timer(drain_seconds + 0.3, worker.gate.set).start()
    thread.join(20)
    assert not thread.is_alive()
    assert time.monotonic() - stopped_at < drain_seconds + 5
    assert events[-1] == "[DONE]"
    assert "shutting down" in json.loads(events[-2])["error"]["message"]
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert not scheduler.has_unfinished_requests and worker.closed
