"""Hand-made indices and one tolerance for kernel tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from milepost.kernels.index import AttentionIndex, RecurrentIndex, RowSpan, StateExportIndex


def assert_close(actual: torch.Tensor, expected: torch.Tensor, relative: float) -> None:
    """Largest difference, relative to the largest expected value (at least 1e-3); NaN never passes."""
    assert actual.shape == expected.shape
    scale = max(float(expected.abs().max()) if expected.numel() else 0.0, 1e-3)
    worst = float((actual.double() - expected.double()).abs().max()) if expected.numel() else 0.0
    assert worst <= relative * scale, f"difference {worst:.2e} at scale {scale:.2e}"


def spans_of(lengths: Sequence[int], positions: Sequence[int]) -> tuple[RowSpan, ...]:
    spans = []
    row = 0
    for length, position in zip(lengths, positions, strict=True):
        spans.append(RowSpan(row, row + length, position))
        row += length
    return tuple(spans)


def recurrent_index(
    lengths: Sequence[int],
    positions: Sequence[int],
    initial_slots: Sequence[int],
    running_slots: Sequence[int],
    exports: Sequence[tuple[int, int, int]] = (),
    tail_rows: int = 3,
) -> RecurrentIndex:
    """`exports`: (sequence, offset, slot). ZERO_STATE as an initial slot means zeros."""
    spans = spans_of(lengths, positions)
    return RecurrentIndex(
        spans=spans,
        initial=tuple(initial_slots),
        running=tuple(running_slots),
        exports=tuple(StateExportIndex(*export) for export in exports),
        tail_rows=tail_rows,
    )


def attention_index(
    lengths: Sequence[int], positions: Sequence[int], page_tables: Sequence[Sequence[int]], match_unit: int
) -> AttentionIndex:
    pages: list[int] = []
    offsets: list[int] = []
    for length, position, table in zip(lengths, positions, page_tables, strict=True):
        for at in range(position, position + length):
            pages.append(table[at // match_unit])
            offsets.append(at % match_unit)
    return AttentionIndex(
        spans_of(lengths, positions),
        tuple(torch.tensor(table, dtype=torch.int64) for table in page_tables),
        torch.tensor(pages, dtype=torch.int64),
        torch.tensor(offsets, dtype=torch.int64),
    )
