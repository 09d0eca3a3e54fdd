"""The two checkpoint rules: every recorded row, then every small case against a plain restatement."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conformance import GROUPS, params, rows

from milepost.core.checkpoints import (
    get_mamba_prefill_checkpoint_position as position_of,
)
from milepost.core.checkpoints import (
    is_mamba_prefill_checkpoint_valid as is_valid,
)

HERE = {"position", "position_pr53614", "validity", "worker_rows"}
ON_THE_POLICY = {"align_split", "replay_boundaries", "proof_margin", "mtp_reserve", "manager"}


def test_every_group_of_the_file_has_a_test() -> None:
    assert set(GROUPS) == HERE | ON_THE_POLICY
    assert all(rows(group) for group in GROUPS)
    ids = [(group, row["id"]) for group in GROUPS for row in rows(group)]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("row", params("position"))
def test_position_of_0_33(row: dict[str, Any]) -> None:
    assert row["expected"] == position_of(
        row["num_tokens"],
        row["hash_block_size"],
        row["drop_eagle_block"],
        num_hash_lookahead_tokens=row["lookahead"],
        proof_margin=True,
    )


@pytest.mark.parametrize("row", params("position_pr53614"))
def test_position_as_merged(row: dict[str, Any]) -> None:
    args = (row["num_tokens"], row["hash_block_size"], row["drop_eagle_block"])
    assert position_of(*args) == row["expected"]
    assert position_of(*args, proof_margin=True) == row["expected_0_33"]


@pytest.mark.parametrize("row", params("position"))
def test_both_rules_differ_only_for_a_drop_on_a_boundary(row: dict[str, Any]) -> None:
    num_tokens, unit, drop = row["num_tokens"], row["hash_block_size"], row["drop_eagle_block"]
    gap = position_of(num_tokens, unit, drop, 0, True) - position_of(num_tokens, unit, drop)
    on_boundary = drop and num_tokens % unit == 0 and num_tokens >= 2 * unit
    assert gap == (unit if on_boundary else 0)


@pytest.mark.parametrize("row", params("validity"))
def test_validity(row: dict[str, Any]) -> None:
    names = (
        "query_start",
        "query_end",
        "checkpoint_position",
        "hash_block_size",
        "mamba_block_size",
        "checkpoint_alignment",
    )
    assert is_valid(**{name: row[name] for name in names}) is row["expected"]
    if "expected_column" in row:
        assert -(-row["query_end"] // row["mamba_block_size"]) - 2 == row["expected_column"]


@pytest.mark.parametrize("row", params("worker_rows"))
def test_worker_rows(row: dict[str, Any]) -> None:
    offsets, columns = [], []
    for seq_len, query_len in zip(row["seq_lens"], row["query_lens"], strict=True):
        start = seq_len - query_len
        position = position_of(seq_len, row["position_unit"], row["drop_eagle_block"], 0, True)
        exported = is_valid(
            start,
            seq_len,
            position,
            row["hash_block_size"],
            row["mamba_block_size"],
            row["checkpoint_alignment"],
        )
        offsets.append(position - start if exported else 0)
        columns.append(-(-seq_len // row["mamba_block_size"]) - 2 if exported else -1)
    assert offsets == row["expected_offsets"]
    assert columns == row["expected_columns"]


# ------------------------------------------------------------------ the position, all small cases


def resumable_positions(num_tokens: int, unit: int, drop: bool, lookahead: int, margin: bool) -> list[int]:
    """Positions a repeat of the prompt can really resume from, worked out by hand and not by formula.

    A unit is known once its tokens and the `lookahead` tokens behind it exist, and a repeat may match
    at most its last token but one. A drop throws the last matched unit away; with the proof margin
    that unit, which is not resumed from, may reach the end of the prompt.
    """
    found = [0]
    for boundary in range(unit, num_tokens + 1, unit):
        hash_exists = boundary + lookahead <= num_tokens
        if drop and margin:
            found.append(boundary - unit)
        elif hash_exists and boundary <= num_tokens - 1:
            found.append(boundary - unit if drop else boundary)
    return found


SMALL = list(
    itertools.product(range(0, 40), (1, 2, 3, 4, 8, 16), (False, True), (0, 1, 2, 3, 7), (False, True))
)


def test_position_is_the_deepest_resumable_boundary_in_every_small_case() -> None:
    for num_tokens, unit, drop, lookahead, margin in SMALL:
        expected = max(resumable_positions(num_tokens, unit, drop, lookahead, margin))
        actual = position_of(num_tokens, unit, drop, lookahead, margin)
        assert actual == expected, (num_tokens, unit, drop, lookahead, margin)


def test_position_is_on_the_grid_inside_the_prompt_and_never_falls_as_the_prompt_grows() -> None:
    for num_tokens, unit, drop, lookahead, margin in SMALL:
        position = position_of(num_tokens, unit, drop, lookahead, margin)
        longer = position_of(num_tokens + 1, unit, drop, lookahead, margin)
        assert 0 <= position <= max(0, num_tokens - 1)
        assert position % unit == 0
        assert position <= longer <= position + unit
        assert position_of(num_tokens + unit, unit, drop, lookahead, margin) in (position, position + unit)


def test_one_lookahead_token_changes_nothing_and_more_never_raise_the_position() -> None:
    for num_tokens, unit, drop, lookahead, margin in SMALL:
        assert position_of(num_tokens, unit, drop, 1, margin) == position_of(
            num_tokens, unit, drop, 0, margin
        )
        more = position_of(num_tokens, unit, drop, lookahead + 1, margin)
        assert more <= position_of(num_tokens, unit, drop, lookahead, margin)


def test_the_two_rules_agree_without_a_drop_and_are_one_unit_apart_at_most() -> None:
    for num_tokens, unit, drop, _lookahead, _margin in SMALL:
        merged, later = (position_of(num_tokens, unit, drop, 0, margin) for margin in (False, True))
        assert later - merged in ((0, unit) if drop and num_tokens % unit == 0 else (0,))


@given(
    num_tokens=st.integers(0, 10**7),
    unit=st.integers(1, 20_000),
    drop=st.booleans(),
    lookahead=st.integers(0, 64),
    margin=st.booleans(),
)
def test_position_of_large_prompts(
    num_tokens: int, unit: int, drop: bool, lookahead: int, margin: bool
) -> None:
    position = position_of(num_tokens, unit, drop, lookahead, margin)
    usable = num_tokens if drop and margin else num_tokens - max(1, lookahead)
    reach = position + (unit if drop else 0)
    assert position % unit == 0
    assert reach <= usable or position == 0
    assert reach + unit > usable


@pytest.mark.parametrize(
    ("num_tokens", "unit", "drop", "lookahead", "margin", "expected"),
    [
        (0, 1, False, 0, False, 0),
        (0, 1, True, 0, True, 0),
        (1, 1, False, 0, False, 0),
        (1, 1, True, 0, True, 0),
        (2, 1, False, 0, False, 1),
        (2, 1, True, 0, False, 0),
        (2, 1, True, 0, True, 1),
        (15, 16, True, 0, True, 0),
        (16, 16, False, 0, False, 0),
        (17, 16, False, 0, False, 16),
        (17, 16, True, 0, False, 0),
        (32, 16, True, 0, False, 0),
        (32, 16, True, 0, True, 16),
        (32, 16, True, 4, True, 16),
        (36, 16, False, 4, True, 32),
        (35, 16, False, 4, True, 16),
        (36, 16, False, 4, False, 32),
        (36, 16, True, 4, False, 16),
        (3, 16, False, 7, True, 0),
    ],
)
def test_position_edges(
    num_tokens: int, unit: int, drop: bool, lookahead: int, margin: bool, expected: int
) -> None:
    assert position_of(num_tokens, unit, drop, lookahead, margin) == expected


def test_the_merged_rule_is_the_default() -> None:
    assert position_of(7680, 1536, True) == 4608
    assert position_of(7680, 1536, True, 0) == 4608
    assert position_of(7680, 1536, True, proof_margin=True) == 6144


# ------------------------------------------------------------------ the validity, all small cases


def column_table_accepts(start: int, end: int, position: int, unit: int, column: int, grid: int) -> bool:
    """The six clauses replayed on a table of state columns instead of by arithmetic.

    Column c holds tokens [c * column, (c + 1) * column).
    """
    touched = [c for c in range(end) if c * column < end]
    if not touched:
        return False
    export_column = touched[-1] - 1
    read_columns = [c for c in touched if c * column < start]
    if export_column <= (read_columns[-1] if read_columns else -1):
        return False
    exportable = list(range(start + grid, end, grid))
    resume_points = list(range(0, end, unit))
    return start in resume_points and position in exportable and position - start >= unit


def test_validity_against_a_replay_in_every_small_case() -> None:
    accepted = 0
    for unit, column, grid in itertools.product((1, 2, 4), (2, 4, 8), (1, 2, 3, 4)):
        for start, end, position in itertools.product(range(0, 15), range(0, 18), range(0, 19)):
            expected = start <= end and column_table_accepts(start, end, position, unit, column, grid)
            assert is_valid(start, end, position, unit, column, grid) is expected, (
                start,
                end,
                position,
                unit,
                column,
                grid,
            )
            accepted += expected
    assert accepted > 1000


def test_slot_addressing_binds_three_clauses_only() -> None:
    """No column and no hash boundary matters, however odd the unit."""
    for unit, grid in itertools.product((1, 7, 64), (1, 2, 3, 4, 16)):
        for start, end, position in itertools.product(range(0, 12), range(0, 20), range(0, 21)):
            expected = position in range(start + grid, end, grid)
            assert is_valid(start, end, position, unit, None, grid) is expected


def test_slot_addressing_accepts_what_columns_refuse() -> None:
    assert is_valid(1, 50, 49, 16, None, 16)  # start and position off the hash grid
    assert not is_valid(1, 50, 49, 16, 16, 16)
    assert is_valid(0, 1599, 1584, 16, None, 16)  # one column only
    assert not is_valid(0, 1599, 1584, 16, 1600, 16)
    assert is_valid(16, 34, 32, 64, None, 16)  # less than one hash block of progress
    assert not is_valid(16, 34, 32, 64, 8, 16)


@pytest.mark.parametrize("column", [None, 16])
@pytest.mark.parametrize("grid", [None, 0])
def test_a_backend_without_alignment_exports_nothing(column: int | None, grid: int | None) -> None:
    assert not is_valid(0, 100, 32, 16, column, grid)
    assert is_valid(0, 100, 32, 16, column, 16)


@pytest.mark.parametrize("column", [None, 4])
def test_position_zero_and_both_ends_are_never_inside(column: int | None) -> None:
    assert not is_valid(0, 16, 0, 4, column, 4)
    assert not is_valid(8, 16, 8, 4, column, 4)
    assert not is_valid(0, 16, 16, 4, column, 4)
    assert is_valid(0, 16, 12, 4, column, 4)


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ({"num_tokens": -1}, "num_tokens"),
        ({"hash_block_size": 0}, "hash_block_size"),
        ({"hash_block_size": -16}, "hash_block_size"),
        ({"num_hash_lookahead_tokens": -1}, "num_hash_lookahead_tokens"),
    ],
)
@pytest.mark.parametrize("margin", [False, True])
def test_position_names_the_bad_argument(override: dict[str, int], name: str, margin: bool) -> None:
    good = {"num_tokens": 100, "hash_block_size": 16, "num_hash_lookahead_tokens": 0}
    with pytest.raises(ValueError, match=rf"^{name} must be at least"):
        position_of(**{**good, **override}, drop_eagle_block=False, proof_margin=margin)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("query_start", -1),
        ("query_end", -1),
        ("checkpoint_position", -16),
        ("hash_block_size", 0),
        ("hash_block_size", -1),
        ("mamba_block_size", 0),
        ("mamba_block_size", -64),
        ("checkpoint_alignment", -16),
    ],
)
def test_validity_names_the_bad_argument(name: str, value: int) -> None:
    good: dict[str, int] = {
        "query_start": 0,
        "query_end": 100,
        "checkpoint_position": 96,
        "hash_block_size": 8,
        "mamba_block_size": 64,
        "checkpoint_alignment": 16,
    }
    assert is_valid(**good)
    with pytest.raises(ValueError, match=rf"^{name} must be at least"):
        is_valid(**{**good, name: value})
