"""Attention of a block against a softmax written out row by row."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from milepost.kernels.block_attention import BlockContext, attend_block  # noqa: E402

UNIT = 8
GROUPS, SHARE, KEY, VALUE = 2, 3, 12, 10


def split(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = stored.view(-1, GROUPS, KEY + VALUE).float()
    return rows[..., :KEY], rows[..., KEY:]


class Case:
    """One block behind `length` entries in shuffled pages."""

    def __init__(self, length: int, num_rows: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(length + num_rows)
        num_pages = -(-length // UNIT)
        self.length = length
        self.table = torch.randperm(num_pages + 3, generator=generator)[:num_pages]
        self.pages = torch.full((num_pages + 3, UNIT, GROUPS * (KEY + VALUE)), torch.nan, dtype=dtype)
        stored = torch.randn(length, self.pages.shape[2], generator=generator).to(dtype)
        places = torch.arange(length)
        self.pages[self.table[places // UNIT], places % UNIT] = stored
        self.keys, self.values = split(stored)
        self.query = torch.randn(num_rows, GROUPS * SHARE, KEY, generator=generator)
        self.own_keys = torch.randn(num_rows, GROUPS, KEY, generator=generator)
        self.own_values = torch.randn(num_rows, GROUPS, VALUE, generator=generator)

    def computed(self, first_seen: list[int], is_causal: bool) -> torch.Tensor:
        return attend_block(
            self.query,
            self.own_keys,
            self.own_values,
            BlockContext(self.pages, self.table, self.length, first_seen),
            split,
            is_causal=is_causal,
            scale=0.3,
        )

    def expected(self, first_seen: list[int], is_causal: bool) -> torch.Tensor:
        rows = []
        for row, first in enumerate(first_seen):
            begin, end = max(0, first), row + 1 if is_causal else len(first_seen)
            keys = torch.cat([self.keys[begin:], self.own_keys[:end]])
            values = torch.cat([self.values[begin:], self.own_values[:end]])
            heads = []
            for head in range(GROUPS * SHARE):
                group = head // SHARE
                shares = torch.softmax(0.3 * keys[:, group] @ self.query[row, head], dim=0)
                heads.append(shares @ values[:, group])
            rows.append(torch.stack(heads))
        return torch.stack(rows)


WINDOWS: dict[str, Callable[[int, int], list[int]]] = {
    "all": lambda length, rows: [0] * rows,
    "from the anchor": lambda length, rows: [length - 11] * rows,
    "from the row": lambda length, rows: [length - 11 + 1 + row for row in range(rows)],
    "shorter than the block": lambda length, rows: [length - 2 + 1 + row for row in range(rows)],
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("tile", [1, 16, 1024])
def test_against_a_plain_softmax(
    monkeypatch: pytest.MonkeyPatch, is_causal: bool, window: str, tile: int
) -> None:
    monkeypatch.setattr("milepost.kernels.block_attention.CONTEXT_TILE_TOKENS", tile)
    for length, num_rows in ((1, 1), (7, 4), (8, 4), (9, 3), (61, 5)):
        case = Case(length, num_rows)
        first_seen = WINDOWS[window](length, num_rows)
        result = case.computed(first_seen, is_causal)
        assert torch.allclose(result, case.expected(first_seen, is_causal), atol=1e-5)


def test_stored_entries_may_be_narrow() -> None:
    case = Case(40, 4, torch.bfloat16)
    result = case.computed([0] * 4, False)
    assert result.dtype == torch.float32
    assert torch.allclose(result, case.expected([0] * 4, False), atol=1e-5)


def test_only_pages_in_the_window_are_read() -> None:
    case = Case(61, 4)
    first_seen = [61 - 11] * 4
    expected = case.computed(first_seen, False)
    case.table = case.table.clone()
    case.table[:6] = 10_000  # outside of the pool
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("milepost.kernels.block_attention.CONTEXT_TILE_TOKENS", 16)
        assert torch.allclose(case.computed(first_seen, False), expected, atol=1e-6)
