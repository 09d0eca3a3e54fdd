"""OpenTelemetry: one span per request, exported in the background (`--otlp-traces-endpoint`, extra `otel`).

Attributes follow the semantic conventions for generative AI where they have a name. No text, no key.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

from milepost.engine.messages import FinishedRequest, ReuseExplanation

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

SPAN_NAME = "llm_request"
TRACE_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
NANOSECONDS = 1_000_000_000
EXPORT_SECONDS = 2.0
"""For one batch with all its tries: a collector that is away holds up the end of the server for so long."""


def sound_trace_parent(header: str | None) -> str:
    """The W3C `traceparent` of a request, or "" if it has none that can be read."""
    return header if header is not None and TRACE_PARENT.fullmatch(header) else ""


class RequestTracer:
    """Observer of an engine that turns finished requests into spans.

    Args:
        exporter: where spans go; a batch at a time, from a thread of the library.
    """

    def __init__(self, model_name: str, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": "milepost"})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("milepost")
        self._model_name = model_name

    def admitted(self, reuse: ReuseExplanation) -> None:
        pass

    def tokens(self, num_tokens: int, since_submission: float | None, since_last: float | None) -> None:
        pass

    def finished(self, record: FinishedRequest) -> None:
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        ended = time.time_ns()
        begun = ended - int(record.seconds * NANOSECONDS)
        parent = TraceContextTextMapPropagator().extract({"traceparent": record.trace_parent})
        span = self._tracer.start_span(
            SPAN_NAME,
            parent,
            SpanKind.SERVER,
            attributes=span_attributes(record, self._model_name),
            start_time=begun,
        )
        if record.time_to_first_token is not None:
            span.add_event("first token", timestamp=begun + int(record.time_to_first_token * NANOSECONDS))
        if record.finish_reason == "error":
            span.set_status(StatusCode.ERROR)
        span.end(ended)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Exporter over HTTP; `endpoint` is the full address, like http://localhost:4318/v1/traces."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS)


def span_attributes(record: FinishedRequest, model_name: str) -> dict[str, Any]:
    """Counts and reasons of a request."""
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat" if record.label.startswith("chatcmpl") else "text_completion",
        "gen_ai.response.model": model_name,
        "gen_ai.response.id": record.label,
        "gen_ai.response.finish_reasons": [record.finish_reason],
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_generated_tokens,
        "milepost.e2e_seconds": record.seconds,
    }
    if record.time_to_first_token is not None:
        attributes["milepost.time_to_first_token_seconds"] = record.time_to_first_token
    if record.reuse is not None:
        attributes["gen_ai.usage.cache_read.input_tokens"] = record.reuse.num_cached_tokens
        attributes["milepost.reuse.reason"] = record.reuse.reason
        attributes["milepost.reuse.tokens_lost_to_missing_state"] = (
            record.reuse.num_tokens_lost_to_missing_state
        )
    return attributes
