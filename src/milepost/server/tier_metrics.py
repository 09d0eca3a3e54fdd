"""Metrics of the stores: what they were asked, what they gave, how fast, and how far saves lag behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from milepost.engine.load_outcomes import LOOKUP_OUTCOMES
from milepost.engine.tiering import Tiering
from milepost.server.collectors import Families


class TierCollector(Collector):
    """Reads counters that the engine's and the tiers' threads write."""

    def __init__(self, tiering: Tiering, labels: tuple[str, str]) -> None:
        self._tiering = tiering
        self._families = Families(labels)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._tiers()

    def _requests(self) -> Iterator[Metric]:
        make, tiering = self._families, self._tiering
        yield make.counter(
            "vllm:external_prefix_cache_queries",
            "Prompt tokens the cache lacked and the stores were asked for.",
            tiering.num_queried_tokens,
        )
        yield make.counter(
            "vllm:external_prefix_cache_hits",
            "Prompt tokens that were loaded from a store instead of computed.",
            tiering.num_loaded_tokens,
        )
        yield make.counters(
            "milepost:store_lookups",
            "Requests the stores were asked for, by what became of it.",
            "outcome",
            dict(tiering.outcomes),
            LOOKUP_OUTCOMES,
        )
        yield make.counters(
            "milepost:store_prefetches",
            "Loads that callers asked for ahead of a request, by what became of it.",
            "outcome",
            dict(tiering.prefetch_outcomes),
            LOOKUP_OUTCOMES,
        )
        yield make.counter(
            "milepost:prefetched_tokens",
            "Prompt tokens that such loads brought.",
            tiering.num_prefetched_tokens,
        )
        yield make.counter(
            "milepost:unsaved_checkpoints",
            "Checkpoints that were evicted or refused before they were saved.",
            tiering.saves.num_unsaved,
        )
        yield make.counter(
            "milepost:store_losses",
            "Segments that a store took although it had lost what they build on.",
            tiering.saves.num_lost,
        )
        yield make.gauge(
            "milepost:pending_saves", "Checkpoints that wait to be saved.", tiering.num_pending_saves
        )
        yield make.gauge(
            "milepost:persist_lag_seconds",
            "Age of the oldest checkpoint that is not saved yet.",
            tiering.save_lag_seconds,
        )

    def _tiers(self) -> Iterator[Metric]:
        make = self._families
        keys: Counter[tuple[str, ...]] = Counter()
        num_bytes: dict[tuple[str, str], float] = {}
        calls: dict[tuple[str, str], float] = {}
        seconds: dict[tuple[str, str], float] = {}
        pending: dict[str, float] = {}
        is_open: dict[str, float] = {}
        used: dict[str, float] = {}
        bounds: dict[str, float] = {}
        for tier in self._tiering.tier_counters():
            for (operation, outcome), count in tier.outcomes.items():
                keys[tier.name, operation, outcome] = count
            for operation, total in tier.calls.items():
                calls[tier.name, operation] = total.num_calls
                seconds[tier.name, operation] = total.seconds
                num_bytes[tier.name, operation] = total.num_bytes
            pending[tier.name] = tier.pending_save_bytes
            is_open[tier.name] = tier.breaker_is_open
            if tier.usage is not None:
                used[tier.name], bounds[tier.name] = tier.usage
        both = ("tier", "operation")
        yield make.triples(
            "milepost:store_segments",
            "Segments by what came of a call: answers (hit, miss, saved …) and, besides, faults.",
            (*both, "outcome"),
            keys,
        )
        yield make.pairs("milepost:store_calls", "Calls that came back or timed out.", both, calls)
        yield make.pairs("milepost:store_seconds", "Time of these calls.", both, seconds)
        yield make.pairs("milepost:store_bytes", "Payload bytes moved.", both, num_bytes)
        yield make.gauges("milepost:store_pending_bytes", "Payloads that wait for a tier.", "tier", pending)
        yield make.gauges("milepost:store_used_bytes", "What a local tier takes.", "tier", used)
        yield make.gauges("milepost:store_budget_bytes", "What it may take.", "tier", bounds)
        yield make.gauges(
            "milepost:store_breaker_open", "1 while a tier is left alone after failures.", "tier", is_open
        )
