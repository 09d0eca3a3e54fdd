"""Spans of requests: numbers of the response, the caller's trace, nothing of any text."""

from __future__ import annotations

import http.server
import threading
import time
from pathlib import Path

import pytest
from tests.server.serving import HTTP, running_server
from tests.server.test_life import LONG, wait_for

from milepost.server.options import ServerOptions
from milepost.server.tracing import sound_trace_parent

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


class Collector:
    """Takes OTLP over HTTP, as a collector would."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    import gzip

                    data = gzip.decompress(data)
                outer.bodies.append(data)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def spans(self) -> list[object]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        found = []
        for body in self.bodies:
            request = ExportTraceServiceRequest()
            request.ParseFromString(body)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    found.extend(scope.spans)
        return found


@pytest.fixture
def collector():
    running = Collector()
    yield running
    running.close()


def attributes(span) -> dict[str, object]:
    def value(any_value):
        kind = any_value.WhichOneof("value")
        if kind == "array_value":
            return [value(item) for item in any_value.array_value.values]
        return getattr(any_value, kind)

    return {item.key: value(item.value) for item in span.attributes}


def test_a_span_per_request_under_the_callers_trace(tmp_path: Path, collector: Collector) -> None:
    options = ServerOptions(otlp_traces_endpoint=collector.url)
    begun = time.time_ns()
    with running_server(tmp_path, server_options=options) as server:
        body = {"prompt": LONG + "secret", "max_tokens": 3}
        answers = [
            HTTP.post(f"{server.url}/v1/completions", json=body, headers={"traceparent": parent}).json()
            for parent in (PARENT, "nonsense")
        ]
        server.worker.fail_next = 1
        assert server.post("/v1/completions", {"prompt": "x"}).status_code == 500
        server.wait_idle()
    ended = time.time_ns()
    wait_for(lambda: len(collector.spans()) >= 3, "no spans came")
    spans = {attributes(span)["gen_ai.response.id"]: span for span in collector.spans()}
    assert len(spans) == 3, "the warm-up is none"
    for answer in answers:
        span, usage = spans[answer["id"]], answer["usage"]
        found = attributes(span)
        assert span.name == "llm_request"
        assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert found["gen_ai.usage.output_tokens"] == 3
        assert (
            found["gen_ai.usage.cache_read.input_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
        )
        assert found["milepost.reuse.reason"] == answer["milepost"]["reuse"]["reason"]
        assert found["gen_ai.response.finish_reasons"] == ["length"]
        assert (
            begun
            < span.start_time_unix_nano
            <= span.events[0].time_unix_nano
            <= span.end_time_unix_nano
            < ended
        )
    assert spans[answers[0]["id"]].trace_id.hex() == TRACE_ID
    assert spans[answers[0]["id"]].parent_span_id.hex() == SPAN_ID
    assert spans[answers[1]["id"]].parent_span_id == b""
    failed = [
        span for span in spans.values() if attributes(span)["gen_ai.response.finish_reasons"] == ["error"]
    ]
    assert len(failed) == 1 and failed[0].status.code == 2
    assert not any(b"secret" in body or b"quick brown" in body for body in collector.bodies)


def test_a_collector_that_is_not_there_costs_nobody_anything(tmp_path: Path) -> None:
    options = ServerOptions(otlp_traces_endpoint="http://127.0.0.1:1/v1/traces", drain_seconds=0)
    with running_server(tmp_path, server_options=options) as server:
        answer = server.post("/v1/completions", {"prompt": "{{fine}}", "temperature": 0})
        assert answer.json()["choices"][0]["text"] == "fine"


@pytest.mark.parametrize(
    ("header", "kept"),
    [
        (PARENT, True),
        (None, False),
        ("", False),
        (PARENT.upper(), False),
        (PARENT + "-x", False),
        ("00-1-2-3", False),
    ],
)
def test_only_sound_headers_are_taken_over(header: str | None, kept: bool) -> None:
    assert sound_trace_parent(header) == (header if kept else "")
