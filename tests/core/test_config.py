"""Options are validated once, at the edge; a message names the option and the fix."""

from __future__ import annotations

from typing import Any

import pytest

from milepost.config import DEFAULT_DECODE_INTERVAL, DEFAULT_MATCH_UNIT, CacheConfig, SchedulerConfig
from milepost.errors import ConfigError, RequestError


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"cache_bytes": 0}, "cache_bytes"),
        ({"cache_bytes": -5}, "cache_bytes"),
        ({"match_unit": 0}, "prefix_match_unit"),
        ({"checkpoint_interval": -32}, "prefix_cache_retention_interval"),
        ({"checkpoint_interval": 33}, "prefix_cache_retention_interval"),
        (
            {"checkpoint_interval": 64, "match_unit": 48, "decode_interval": 48},
            "prefix_cache_retention_interval",
        ),
        ({"decode_interval": -1}, "decode_interval"),
        ({"decode_interval": 100}, "decode_interval"),
        ({"max_states_per_path": 0}, "max_states_per_path"),
    ],
)
def test_bad_cache_options_are_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CacheConfig(**{"cache_bytes": 1 << 20, **options})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


def test_good_cache_options() -> None:
    config = CacheConfig(1)
    assert (config.match_unit, config.decode_interval) == (DEFAULT_MATCH_UNIT, DEFAULT_DECODE_INTERVAL)
    assert config.enable_prefix_caching and config.checkpoint_interval is None
    edge = CacheConfig(1, match_unit=16, checkpoint_interval=0, decode_interval=0, max_states_per_path=1)
    assert (edge.checkpoint_interval, edge.decode_interval, edge.max_states_per_path) == (0, 0, 1)
    assert CacheConfig(1, match_unit=16, checkpoint_interval=48, decode_interval=16).checkpoint_interval == 48


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "max_num_seqs", "max_model_len"])
def test_scheduler_limits_start_at_one(name: str) -> None:
    for value in (0, -1):
        with pytest.raises(ConfigError) as caught:
            SchedulerConfig(**{name: value})
        assert caught.value.field == name
    assert getattr(SchedulerConfig(**{name: 1}), name) == 1


def test_a_request_error_carries_what_an_http_answer_needs() -> None:
    error = RequestError("prompt", "too long", code="context_length_exceeded", status=413)
    assert (error.param, error.code, error.status, str(error)) == (
        "prompt", "context_length_exceeded", 413, "too long",
    )  # fmt: skip
    assert RequestError(None, "x").status == 400
