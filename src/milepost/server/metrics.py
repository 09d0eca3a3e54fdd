"""Prometheus metrics: the names dashboards for vLLM read, and `milepost:` for what others lack.

Counters about reuse grow by the numbers in `usage` and in the request log, at the same moment.
Gauges and the core's counters come from the engine's last snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from milepost.core.metrics import CoreStats
from milepost.engine.messages import FinishedRequest, ReuseExplanation
from milepost.engine.serving import ServingModel

TTFT_BUCKETS = tuple(0.001 * 2**power for power in range(17))
INTER_TOKEN_BUCKETS = tuple(0.001 * factor * 10**power for power in range(4) for factor in (1, 2.5, 5))
SECONDS_BUCKETS = tuple(0.05 * factor * 10**power for power in range(4) for factor in (1, 2, 4, 6))
TOKENS_BUCKETS = tuple(factor * 10**power for power in range(6) for factor in (1, 2, 5))
FINISH_REASONS = ("stop", "length", "abort", "error")
LABELS = ("model_name", "engine")


class ServerMetrics:
    """Observer of an engine and renderer of `/metrics`, with a registry of its own."""

    def __init__(self, model: ServingModel) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._labels = (model.name, "0")
        self._queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens of admitted requests.")
        self._hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens that were not computed.")
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens of admitted requests.")
        self._cached = self._counter(
            "vllm:prompt_tokens_cached", "Prompt tokens taken from the prefix cache."
        )
        self._generated = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._lost = self._counter(
            "milepost:tokens_lost_to_missing_state", "Prompt tokens whose pages were cached but no state was."
        )
        self._success = self._labelled(
            "vllm:request_success", "Requests that ended, by reason.", "finished_reason"
        )
        for reason in FINISH_REASONS:
            self._success.labels(*self._labels, reason)
        self._reuse = self._labelled(
            "milepost:request_reuse", "Admitted requests by the reason of their reuse report.", "reason"
        )
        self._matched = self._labelled(
            "milepost:matched_tokens", "Prompt tokens each cache group could have served alone.", "group"
        )
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Submission to first token.", TTFT_BUCKETS
        )
        self._inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Time between output tokens.", INTER_TOKEN_BUCKETS
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
        self.registry.register(_EngineCollector(model, self._labels))

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)

    # ------------------------------------------------------------------ Observer

    def admitted(self, reuse: ReuseExplanation) -> None:
        self._queries.inc(reuse.num_prompt_tokens)
        self._hits.inc(reuse.num_cached_tokens)
        self._prompt.inc(reuse.num_prompt_tokens)
        self._cached.inc(reuse.num_cached_tokens)
        self._lost.inc(reuse.num_tokens_lost_to_missing_state)
        self._reuse.labels(*self._labels, reuse.reason_code).inc()
        for group, num_tokens in reuse.matched_tokens.items():
            self._matched.labels(*self._labels, group).inc(num_tokens)
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
        self._success.labels(*self._labels, record.finish_reason).inc()
        self._seconds.observe(record.seconds)
        self._answer_size.observe(record.num_generated_tokens)

    # ------------------------------------------------------------------ construction

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, LABELS, registry=self.registry).labels(*self._labels)

    def _labelled(self, name: str, text: str, label: str) -> Counter:
        return Counter(name, text, (*LABELS, label), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, LABELS, buckets=buckets, registry=self.registry).labels(*self._labels)

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
        info.labels(*self._labels, *labels.values()).set(1)


class _EngineCollector(Collector):
    """Reads the engine's snapshot at each scrape."""

    def __init__(self, model: ServingModel, labels: tuple[str, str]) -> None:
        self._model = model
        self._labels = labels

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._model.engine.stats()
        yield from self._gauges(stats)
        yield from self._counters(stats)
        yield self._by("milepost:states", "Checkpoints that exist.", "reason", stats.states_by_reason)

    def _gauges(self, stats: CoreStats) -> Iterator[Metric]:
        gauges = {
            "vllm:num_requests_running": ("Requests that run.", stats.num_running),
            "vllm:num_requests_waiting": ("Requests that wait.", stats.num_waiting),
            "vllm:kv_cache_usage_perc": (
                "Share of the cache budget in use, pages and states, 0 to 1.",
                stats.used_bytes / stats.budget_bytes,
            ),
            "milepost:state_bytes": ("Bytes of checkpoints.", stats.state_bytes),
            "milepost:running_state_bytes": (
                "Bytes of states of running requests.",
                stats.running_state_bytes,
            ),
            "milepost:page_bytes": ("Bytes of pages in use.", stats.page_bytes),
            "milepost:committed_bytes": ("Resident bytes of all pools.", stats.committed_bytes),
            "milepost:budget_bytes": ("Byte budget of pages and states.", stats.budget_bytes),
            "milepost:cached_units": ("Match units with pages in the cache.", stats.num_units),
            "milepost:smallest_hit_prompt_tokens": (
                "Shortest prompt whose repetition can hit.",
                stats.smallest_hit_prompt if self._model.cache.enable_prefix_caching else float("inf"),
            ),
            "milepost:engine_healthy": ("1 while the engine runs.", int(self._model.engine.is_healthy)),
        }
        for name, (text, value) in gauges.items():
            family = GaugeMetricFamily(name, text, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family

    def _counters(self, stats: CoreStats) -> Iterator[Metric]:
        core = stats.counters
        counters = {
            "vllm:num_preemptions": (
                "Requests that gave up their memory and wait again.",
                core.num_preemptions,
            ),
            "milepost:evicted_bytes": ("Bytes freed by evictions.", core.evicted_bytes),
            "milepost:evicted_tokens": ("Tokens whose pages were evicted.", core.num_evicted_tokens),
            "milepost:prefill_tokens_computed": ("Prompt tokens computed.", core.num_prefill_tokens),
            "milepost:decode_tokens_computed": ("Output tokens computed.", core.num_decode_tokens),
            "milepost:steps": ("Steps of the engine.", core.num_steps),
            "milepost:sibling_waits": ("Times a request waited for a shared prefix.", core.num_sibling_waits),
        }
        for name, (text, value) in counters.items():
            family = CounterMetricFamily(name, text, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family
        for name, text, labels, values in (
            ("milepost:evictions", "Evictions.", ("move", "reason"), core.evictions),
            ("milepost:refusals", "Checkpoints wanted and not kept.", ("why", "reason"), core.refusals),
            ("milepost:checkpoints", "Checkpoints published.", ("reason",), core.checkpoints_by_reason),
            (
                "milepost:lost_tokens",
                "Tokens of whole units no hit covered.",
                ("reason",),
                core.lost_tokens_by_reason,
            ),
            (
                "milepost:misses",
                "Admitted requests by the core's reason.",
                ("reason",),
                core.misses_by_reason,
            ),
        ):
            family = CounterMetricFamily(name, text, labels=(*LABELS, *labels))
            for key, value in sorted(values.items()):
                family.add_metric((*self._labels, *(key if isinstance(key, tuple) else (key,))), value)
            yield family

    def _by(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=(*LABELS, label))
        for key, value in sorted(values.items()):
            family.add_metric((*self._labels, key), value)
        return family
