"""Metrics that are read from one consistent snapshot at each scrape."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from milepost.core.metrics import TIME_BOUNDS, CoreStats, TimeCounts
from milepost.core.reasons import CHECKPOINT_REASONS, HIT, MISS_REASONS
from milepost.engine.audit import RESULTS, AuditCounts
from milepost.engine.messages import ReuseExplanation
from milepost.engine.serving import ServingModel
from milepost.server.state import ServerState

LABELS = ("model_name", "engine")
REUSE_REASONS = (HIT, *MISS_REASONS, "retokenized")


@dataclass(frozen=True, slots=True)
class ReuseTotals:
    """Sums over the reports of admitted requests; never changed, so that a scrape sees all or nothing
    of a request: prompt tokens = hits + misses, whenever it looks."""

    num_hit_tokens: int = 0
    num_lost_tokens: int = 0
    requests_by_reason: Mapping[str, int] = field(default_factory=dict)
    missed_tokens_by_reason: Mapping[str, int] = field(default_factory=dict)
    matched_tokens_by_group: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_hit_tokens + sum(self.missed_tokens_by_reason.values())

    def plus(self, reuse: ReuseExplanation) -> ReuseTotals:
        """The totals with one more request."""
        reason = reuse.reason_code
        return ReuseTotals(
            self.num_hit_tokens + reuse.num_cached_tokens,
            self.num_lost_tokens + reuse.num_tokens_lost_to_missing_state,
            _grown(self.requests_by_reason, {reason: 1}),
            _grown(self.missed_tokens_by_reason, {reason: reuse.num_computed_tokens}),
            _grown(self.matched_tokens_by_group, reuse.matched_tokens),
        )


def _grown(values: Mapping[str, int], more: Mapping[str, int]) -> Mapping[str, int]:
    result = Counter(values)
    result.update(more)
    return result


class Families:
    """Makes metric families with the labels of this server."""

    def __init__(self, labels: tuple[str, str]) -> None:
        self._labels = labels

    def gauge(self, name: str, text: str, value: float) -> Metric:
        return self._of(GaugeMetricFamily, name, text, (), [((), value)])

    def counter(self, name: str, text: str, value: float) -> Metric:
        return self._of(CounterMetricFamily, name, text, (), [((), value)])

    def gauges(
        self, name: str, text: str, label: str, values: Mapping[str, float], known: Iterable[str] = ()
    ) -> Metric:
        return self._of(GaugeMetricFamily, name, text, (label,), _with_zeros(values, known))

    def counters(
        self, name: str, text: str, label: str, values: Mapping[str, float], known: Iterable[str] = ()
    ) -> Metric:
        return self._of(CounterMetricFamily, name, text, (label,), _with_zeros(values, known))

    def pairs(
        self, name: str, text: str, labels: tuple[str, str], values: Mapping[tuple[str, str], float]
    ) -> Metric:
        return self._of(CounterMetricFamily, name, text, labels, values.items())

    def triples(
        self, name: str, text: str, labels: tuple[str, str, str], values: Mapping[tuple[str, ...], float]
    ) -> Metric:
        return self._of(CounterMetricFamily, name, text, labels, values.items())

    def times(self, name: str, text: str, times: TimeCounts) -> Metric:
        family = HistogramMetricFamily(name, text, labels=LABELS)
        ends = [*map(str, TIME_BOUNDS), "+Inf"]
        family.add_metric(
            self._labels,
            list(zip(ends, itertools.accumulate(times.counts), strict=True)),
            times.sum_seconds,
        )
        return family

    def _of(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        labels: tuple[str, ...],
        values: Iterable[tuple[tuple[str, ...], float]],
    ) -> Metric:
        family = kind(name, text, labels=(*LABELS, *labels))
        for key, value in sorted(values):
            family.add_metric((*self._labels, *key), value)
        return family


def _with_zeros(values: Mapping[str, float], known: Iterable[str]) -> list[tuple[tuple[str, ...], float]]:
    """A rate can only be taken of a series that was there before the first event."""
    return [((key,), value) for key, value in {**dict.fromkeys(known, 0), **values}.items()]


class ReuseCollector(Collector):
    """What admitted requests reused. `admitted` is called by one thread, scrapes by others."""

    def __init__(self, labels: tuple[str, str]) -> None:
        self._families = Families(labels)
        self.totals = ReuseTotals()

    def admitted(self, reuse: ReuseExplanation) -> None:
        self.totals = self.totals.plus(reuse)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        make, totals = self._families, self.totals
        prompt, hits = totals.num_prompt_tokens, totals.num_hit_tokens
        yield make.counter("vllm:prefix_cache_queries", "Prompt tokens of admitted requests.", prompt)
        yield make.counter("vllm:prefix_cache_hits", "Prompt tokens that were not computed.", hits)
        yield make.counter("vllm:prompt_tokens", "Prompt tokens of admitted requests.", prompt)
        yield make.counter("vllm:prompt_tokens_cached", "Prompt tokens taken from the prefix cache.", hits)
        yield make.counters(
            "milepost:prefix_cache_misses",
            "Prompt tokens computed, by reason.",
            "reason",
            totals.missed_tokens_by_reason,
            REUSE_REASONS,
        )
        yield make.counters(
            "milepost:request_reuse",
            "Admitted requests by the reason of their reuse report.",
            "reason",
            totals.requests_by_reason,
            REUSE_REASONS,
        )
        yield make.counters(
            "milepost:matched_tokens",
            "Prompt tokens each cache group could have served alone.",
            "group",
            totals.matched_tokens_by_group,
        )
        yield make.counter(
            "milepost:tokens_lost_to_missing_state",
            "Tokens with pages but no state.",
            totals.num_lost_tokens,
        )


class HttpCollector(Collector):
    """What left the server: also what was refused before an engine saw it."""

    STATUSES = ("200", "400", "401", "413", "429", "500", "503", "504")

    def __init__(self, state: ServerState, labels: tuple[str, str]) -> None:
        self._state = state
        self._families = Families(labels)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        make, state = self._families, self._state
        by_status = {str(status): number for status, number in state.num_responses.copy().items()}
        yield make.counters(
            "milepost:http_responses", "HTTP responses, by status.", "status", by_status, self.STATUSES
        )
        yield make.gauge(
            "milepost:http_requests_open", "HTTP requests being answered, scrapes included.", state.num_open
        )


class EngineCollector(Collector):
    """Reads the engine's snapshot."""

    def __init__(self, model: ServingModel, labels: tuple[str, str]) -> None:
        self._model = model
        self._families = Families(labels)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._model.engine.stats()
        yield from self._sizes(stats)
        yield from self._work(stats)
        yield from self._checkpoints(stats)
        yield from self._audits(self._model.engine.audits())

    def _sizes(self, stats: CoreStats) -> Iterator[Metric]:
        gauge = self._families.gauge
        smallest = stats.smallest_hit_prompt if self._model.cache.enable_prefix_caching else float("inf")
        used = stats.used_bytes / stats.budget_bytes
        yield gauge("vllm:num_requests_running", "Requests that run.", stats.num_running)
        yield gauge("vllm:num_requests_waiting", "Requests that wait.", stats.num_waiting)
        yield gauge("vllm:kv_cache_usage_perc", "Share of the cache budget in use, 0 to 1.", used)
        yield gauge(
            "milepost:running_state_bytes", "Bytes of states of running requests.", stats.running_state_bytes
        )
        yield gauge("milepost:page_bytes", "Bytes of pages in use.", stats.page_bytes)
        yield gauge("milepost:committed_bytes", "Resident bytes of all pools.", stats.committed_bytes)
        yield gauge("milepost:budget_bytes", "Byte budget of pages and states.", stats.budget_bytes)
        yield gauge("milepost:cached_units", "Match units with pages in the cache.", stats.num_units)
        yield gauge(
            "milepost:smallest_hit_prompt_tokens", "Shortest prompt whose repetition can hit.", smallest
        )
        healthy = int(self._model.engine.is_healthy)
        yield gauge("milepost:engine_healthy", "1 while the engine runs.", healthy)

    def _work(self, stats: CoreStats) -> Iterator[Metric]:
        counter, core = self._families.counter, stats.counters
        yield counter(
            "vllm:num_preemptions", "Requests that gave up their memory and wait again.", core.num_preemptions
        )
        yield counter(
            "milepost:prefill_tokens_computed",
            "Prompt tokens computed, audits included.",
            core.num_prefill_tokens,
        )
        yield counter("milepost:decode_tokens_computed", "Output tokens computed.", core.num_decode_tokens)
        yield counter(
            "vllm:spec_decode_num_drafts", "Decode steps of a request that verified drafts.", core.num_drafts
        )
        yield counter("vllm:spec_decode_num_draft_tokens", "Drafts verified.", core.num_draft_tokens)
        yield counter(
            "vllm:spec_decode_num_accepted_tokens", "Drafts accepted.", core.num_accepted_draft_tokens
        )
        yield self._families.counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted, by place in the draft.",
            "position",
            {str(place): number for place, number in core.accepted_drafts_by_position.items()},
        )
        yield counter("milepost:steps", "Steps of the engine.", core.num_steps)
        yield counter(
            "milepost:sibling_waits", "Times a request waited for a shared prefix.", core.num_sibling_waits
        )

    def _checkpoints(self, stats: CoreStats) -> Iterator[Metric]:
        make, core = self._families, stats.counters
        state_bytes = self._model.geometry.checkpoint_bytes
        yield make.gauges(
            "milepost:states", "Checkpoints that exist.", "reason", stats.states_by_reason, CHECKPOINT_REASONS
        )
        yield make.gauges(
            "milepost:state_bytes",
            "Bytes of checkpoints.",
            "reason",
            {reason: number * state_bytes for reason, number in stats.states_by_reason.items()},
            CHECKPOINT_REASONS,
        )
        yield make.counters(
            "milepost:checkpoints",
            "Checkpoints published.",
            "reason",
            core.checkpoints_by_reason,
            CHECKPOINT_REASONS,
        )
        yield make.pairs("milepost:evictions", "Evictions.", ("move", "reason"), core.evictions)
        yield make.pairs(
            "milepost:refusals", "Checkpoints wanted and not kept.", ("why", "reason"), core.refusals
        )
        yield make.pairs(
            "milepost:tokens_lost_to_eviction",
            "Prompt tokens computed because a checkpoint had been evicted or refused.",
            ("move", "reason"),
            core.tokens_lost_to_eviction,
        )
        yield make.times(
            "milepost:checkpoint_lifetime_seconds",
            "Age of checkpoints that made room for others (guesses aside).",
            core.lifetimes,
        )
        yield make.times(
            "milepost:checkpoint_idle_before_eviction_seconds",
            "Last use to eviction of the same.",
            core.idle_times,
        )
        yield make.times(
            "milepost:prefix_reuse_gap_seconds", "Between two uses of a cached prefix.", core.reuse_gaps
        )
        yield make.counter("milepost:evicted_bytes", "Bytes freed by evictions.", core.evicted_bytes)
        yield make.counter(
            "milepost:evicted_tokens", "Tokens whose pages were evicted.", core.num_evicted_tokens
        )

    def _audits(self, counts: AuditCounts) -> Iterator[Metric]:
        make = self._families
        yield make.counters(
            "milepost:audits",
            "Hits that were recomputed cold, by result.",
            "result",
            counts.by_result(),
            RESULTS,
        )
        yield make.counter(
            "milepost:audit_condemned_checkpoints",
            "Checkpoints dropped because an audit failed.",
            counts.num_condemned_checkpoints,
        )
        yield make.gauge(
            "milepost:audit_max_difference",
            "Largest difference of two logits any audit saw.",
            counts.max_difference,
        )
        yield make.gauge("milepost:audit_backlog", "Hits that wait for their audit.", counts.num_waiting)
