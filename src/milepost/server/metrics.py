"""Prometheus metrics: the names dashboards for vLLM read, and `milepost:` for what others lack.

Counters about reuse grow by the numbers in `usage` and in the request log, at the same moment.
Gauges and the core's counters come from the engine's last snapshot.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from milepost.engine.messages import FinishedRequest, ReuseExplanation
from milepost.engine.serving import ServingModel
from milepost.server.collectors import LABELS, EngineCollector, HttpCollector, ReuseCollector
from milepost.server.state import ServerState
from milepost.server.tier_metrics import TierCollector

TTFT_BUCKETS = tuple(0.001 * 2**power for power in range(17))
INTER_TOKEN_BUCKETS = tuple(0.001 * factor * 10**power for power in range(4) for factor in (1, 2.5, 5))
SECONDS_BUCKETS = tuple(0.05 * factor * 10**power for power in range(4) for factor in (1, 2, 4, 6))
TOKENS_BUCKETS = tuple(factor * 10**power for power in range(6) for factor in (1, 2, 5))
FINISH_REASONS = ("stop", "length", "abort", "error")


class ServerMetrics:
    """Observer of an engine and renderer of `/metrics`, with a registry of its own.

    Attributes:
        labels: of this server.
    """

    def __init__(self, model: ServingModel, state: ServerState) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.labels = (model.name, "0")
        self._generated = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._success = self._labelled(
            "vllm:request_success", "Requests that ended, by reason.", "finished_reason"
        )
        for reason in FINISH_REASONS:
            self._success.labels(*self.labels, reason)
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Submission to first token.", TTFT_BUCKETS
        )
        self._inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Time between output tokens.", INTER_TOKEN_BUCKETS
        )
        self._queue = self._histogram(
            "vllm:request_queue_time_seconds", "Submission to admission.", TTFT_BUCKETS
        )
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "Admission to first token.", TTFT_BUCKETS
        )
        self._decode = self._histogram(
            "vllm:request_decode_time_seconds", "First token to end.", SECONDS_BUCKETS
        )
        self._seconds = self._histogram(
            "vllm:e2e_request_latency_seconds", "Submission to end.", SECONDS_BUCKETS
        )
        self._prompt_size = self._histogram(
            "vllm:request_prompt_tokens", "Tokens of a prompt.", TOKENS_BUCKETS
        )
        self._answer_size = self._histogram(
            "vllm:request_generation_tokens", "Tokens of an answer.", TOKENS_BUCKETS
        )
        self._computed = self._histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens that were computed.", TOKENS_BUCKETS
        )
        self._describe_cache(model)
        self._reuse = ReuseCollector(self.labels)
        self.registry.register(self._reuse)
        self.registry.register(EngineCollector(model, self.labels))
        self.registry.register(HttpCollector(state, self.labels))
        if model.engine.tiering is not None:
            self.registry.register(TierCollector(model.engine.tiering, self.labels))

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)

    # ------------------------------------------------------------------ Observer

    def admitted(self, reuse: ReuseExplanation) -> None:
        self._reuse.admitted(reuse)
        self._prompt_size.observe(reuse.num_prompt_tokens)
        self._computed.observe(reuse.num_computed_tokens)

    def tokens(
        self, num_tokens: int, seconds_since_submission: float | None, seconds_since_last: float | None
    ) -> None:
        self._generated.inc(num_tokens)
        if seconds_since_submission is not None:
            self._first_token.observe(seconds_since_submission)
        if seconds_since_last is not None:
            self._inter_token.observe(seconds_since_last / num_tokens)

    def finished(self, record: FinishedRequest) -> None:
        self._success.labels(*self.labels, record.finish_reason).inc()
        self._seconds.observe(record.seconds)
        queued, first = record.queue_seconds, record.time_to_first_token
        if queued is not None:
            self._queue.observe(queued)
            if first is not None:
                self._prefill.observe(first - queued)
                self._decode.observe(record.seconds - first)
        self._answer_size.observe(record.num_generated_tokens)

    # ------------------------------------------------------------------ construction

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, LABELS, registry=self.registry).labels(*self.labels)

    def _labelled(self, name: str, text: str, label: str) -> Counter:
        return Counter(name, text, (*LABELS, label), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, LABELS, buckets=buckets, registry=self.registry).labels(*self.labels)

    def _describe_cache(self, model: ServingModel) -> None:
        cache = model.cache
        labels = {
            "block_size": str(cache.match_unit),
            "enable_prefix_caching": str(cache.enable_prefix_caching),
            "mamba_cache_mode": "internal" if cache.enable_prefix_caching else "none",
            "cache_bytes": str(cache.cache_bytes),
            "prefix_match_unit": str(cache.match_unit),
            "decode_interval": str(cache.decode_interval),
            "max_model_len": str(model.max_model_len),
        }
        info = Gauge(
            "vllm:cache_config_info", "Settings of the cache.", (*LABELS, *labels), registry=self.registry
        )
        info.labels(*self.labels, *labels.values()).set(1)
