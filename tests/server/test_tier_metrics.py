"""What /metrics says about the stores agrees with what requests were told."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.engine.replicas import UNIT, Replica, file_store, replica, words

from milepost.core.hashing import CacheDomain
from milepost.engine.load_outcomes import LOOKUP_OUTCOMES
from milepost.engine.named import NamedConversations
from milepost.engine.named_messages import Meant
from milepost.engine.serving import EMBEDDED_MODEL
from milepost.engine.tokenizer import Tokenizer
from milepost.models.loading import LoadedModel, load_model
from milepost.server.tier_metrics import TierCollector


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(EMBEDDED_MODEL)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(EMBEDDED_MODEL)


def samples(served: Replica) -> dict[tuple[str, ...], float]:
    """(name, label values in order of label names, model and engine left out) -> value."""
    tiering = served.engine.tiering
    assert tiering is not None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(TierCollector(tiering, ("tiny", "0")))
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = [v for k, v in sample.labels.items() if k not in ("model_name", "engine")]
            found[sample.name, *labels] = sample.value
    return found


def test_stores_are_counted_as_requests_are_told(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with replica(model, tokenizer, file_store(tmp_path)) as first:
        first.ask(words(1, 100), 1)
        first.settle()
        seen = samples(first)
        assert seen["milepost:store_lookups_total", "not_found"] == 1
        assert seen["vllm:external_prefix_cache_queries_total",] == 96
        assert seen["vllm:external_prefix_cache_hits_total",] == 0
        assert seen["milepost:store_segments_total", "save", "saved", "file"] >= 1
        assert seen["milepost:store_bytes_total", "save", "file"] > 0
        assert seen["milepost:pending_saves",] == 0
        assert seen["milepost:persist_lag_seconds",] == 0
        assert seen["milepost:unsaved_checkpoints_total",] == 0
    with replica(model, tokenizer, file_store(tmp_path)) as second:
        told = second.ask(words(1, 100), 1)
        seen = samples(second)
    assert seen["vllm:external_prefix_cache_hits_total",] == told.load.num_tokens == 96
    assert seen["milepost:store_lookups_total", "loaded"] == 1
    assert seen["milepost:store_bytes_total", "load", "file"] > 0
    assert seen["milepost:store_breaker_open", "file"] == 0
    assert 0 < seen["milepost:store_used_bytes", "file"] <= seen["milepost:store_budget_bytes", "file"]
    for name in ("milepost:store_lookups_total", "milepost:store_prefetches_total"):
        assert {key[1] for key in seen if key[0] == name} == set(LOOKUP_OUTCOMES)


def test_a_prefetch_is_no_lookup_and_no_hit(model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with replica(model, tokenizer, file_store(tmp_path)) as first:
        first.ask(words(1, 100), 1)
    with replica(model, tokenizer, file_store(tmp_path)) as second:
        named = NamedConversations(second.engine, model.geometry(UNIT), 4096)
        asyncio.run(named.load(Meant(CacheDomain(), tokens=array("I", words(1, 100)))))
        seen = samples(second)
    assert seen["milepost:store_prefetches_total", "loaded"] == 1
    assert seen["milepost:prefetched_tokens_total",] == 96
    assert seen["milepost:store_lookups_total", "loaded"] == 0
    assert seen["vllm:external_prefix_cache_queries_total",] == 0
    assert seen["vllm:external_prefix_cache_hits_total",] == 0
