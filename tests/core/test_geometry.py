"""Sizes: bytes per page and state, the export grid, what a request needs and what a budget holds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.core.geometry import (
    ALLOCATION_QUANTUM_BYTES,
    INTERVAL_MAX_TOKENS,
    INTERVAL_MIN_TOKENS,
    AttentionGroupSpec,
    CacheGeometry,
    RecurrentGroupSpec,
)
from milepost.errors import ConfigError

QUANTUM = ALLOCATION_QUANTUM_BYTES
UNIT = 32
MODEL = CacheGeometry(
    UNIT,
    (AttentionGroupSpec("mla", 1152), AttentionGroupSpec("full", 64)),
    (RecurrentGroupSpec("kda", 300_000, 16), RecurrentGroupSpec("gdn", 4096, 24)),
)


def test_records_are_rounded_to_whole_operating_system_pages() -> None:
    assert MODEL.page_record_bytes == (9 * QUANTUM, QUANTUM)  # 36,864 and 2,048 bytes
    assert MODEL.state_record_bytes == (74 * QUANTUM, QUANTUM)  # 300,000 and 4,096 bytes
    assert MODEL.pool_record_bytes == MODEL.page_record_bytes + MODEL.state_record_bytes
    assert MODEL.unit_bytes == 10 * QUANTUM
    assert MODEL.checkpoint_bytes == 75 * QUANTUM
    assert MODEL.bytes_per_token == 1216
    assert MODEL.state_bytes == 304_096
    assert (MODEL.num_attention_groups, MODEL.num_recurrent_groups) == (2, 2)


@pytest.mark.parametrize(
    ("alignments", "expected"),
    [((16, 24), 48), ((1, 64), 64), ((None, 16), None), ((16, None), None), ((7,), 7), ((), 1)],
)
def test_groups_export_where_all_of_them_can(
    alignments: tuple[int | None, ...], expected: int | None
) -> None:
    recurrent = tuple(RecurrentGroupSpec(f"r{i}", 8, a) for i, a in enumerate(alignments))
    geometry = CacheGeometry(UNIT, (AttentionGroupSpec("a", 1),), recurrent)
    assert geometry.checkpoint_alignment == expected


@pytest.mark.parametrize(
    ("state_bytes", "bytes_per_token", "expected"),
    [
        (1, 1, INTERVAL_MIN_TOKENS),
        (1000 * 100, 100, 992),  # 1,000 tokens, rounded down to the unit
        (1 << 40, 1, INTERVAL_MAX_TOKENS),
        (1152 * 513, 1152, 512),
    ],
)
def test_default_spacing_makes_a_state_cost_what_the_pages_between_cost(
    state_bytes: int, bytes_per_token: int, expected: int
) -> None:
    geometry = CacheGeometry(
        UNIT, (AttentionGroupSpec("a", bytes_per_token),), (RecurrentGroupSpec("r", state_bytes),)
    )
    assert geometry.default_checkpoint_interval() == expected


def test_default_spacing_without_attention_and_with_a_huge_unit() -> None:
    only_states = CacheGeometry(UNIT, (), (RecurrentGroupSpec("r", 1 << 30),))
    assert only_states.default_checkpoint_interval() == INTERVAL_MAX_TOKENS
    coarse = CacheGeometry(1000, (AttentionGroupSpec("a", 1),), (RecurrentGroupSpec("r", 1),))
    assert coarse.default_checkpoint_interval() == 1000


def test_bytes_of_a_request_count_started_pages_and_one_state() -> None:
    for num_tokens in range(0, 200):
        pages = math.ceil(num_tokens / UNIT)
        assert MODEL.request_bytes(num_tokens) == pages * 10 * QUANTUM + 75 * QUANTUM


@given(st.integers(0, 200 * QUANTUM))
def test_the_longest_request_of_a_budget_fits_and_one_more_token_does_not(budget: int) -> None:
    longest = MODEL.max_tokens_for(budget)
    if longest:
        assert MODEL.request_bytes(longest) <= budget
    assert MODEL.request_bytes(longest + 1) > budget


def test_a_model_without_attention_is_not_bound_by_pages() -> None:
    geometry = CacheGeometry(UNIT, (), (RecurrentGroupSpec("r", 4096),))
    assert geometry.max_tokens_for(QUANTUM - 1) == 0
    assert geometry.max_tokens_for(QUANTUM) > 10**9
    assert geometry.checkpoint_alignment == 1


def test_bad_models_are_refused_by_field() -> None:
    attention, recurrent = AttentionGroupSpec("a", 1), RecurrentGroupSpec("r", 1)
    bad = [
        ("prefix_match_unit", lambda: CacheGeometry(0, (attention,), (recurrent,))),
        ("model", lambda: CacheGeometry(4, (), ())),
        ("attention group a", lambda: CacheGeometry(4, (AttentionGroupSpec("a", 0),), ())),
        ("recurrent group r", lambda: CacheGeometry(4, (), (RecurrentGroupSpec("r", 0),))),
        ("recurrent group r", lambda: CacheGeometry(4, (), (RecurrentGroupSpec("r", 1, 0),))),
        ("model", lambda: CacheGeometry(4, (attention,), (RecurrentGroupSpec("a", 1),))),
        ("rank", lambda: CacheGeometry(4, (attention,), (recurrent,), 2, 2)),
        ("rank", lambda: CacheGeometry(4, (attention,), (recurrent,), -1, 2)),
    ]
    for field, build in bad:
        with pytest.raises(ConfigError) as caught:
            build()
        assert caught.value.field == field
    assert CacheGeometry(4, (attention,), (recurrent,), 1, 2).world_size == 2
