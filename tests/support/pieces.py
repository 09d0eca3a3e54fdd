"""One prompt run in different ways: whole, in pieces, resumed from an exported state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tests.support.driver import Driver

PIECES = {
    "whole": [100],
    "stepwise": [1] * 100,
    "chunked": [37, 33, 30],
    "ragged": [16, 1, 15, 17, 50, 1],
    "short_first": [3, 97],
}
"""Name -> tokens per step; each sums up to 100."""
RESUME_POSITIONS = (1, 3, 15, 16, 17, 64, 99)


def run_in_pieces(driver: Driver, tokens: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Logits of all rows; unwritten memory holds NaN."""
    assert sum(sizes) == len(tokens)
    driver.poison()
    sequence = driver.sequence(tokens, running_slot=1)
    return torch.cat([driver.logits(driver.plan((sequence, size))) for size in sizes])


def run_resumed(driver: Driver, tokens: Sequence[int], position: int) -> torch.Tensor:
    """Logits of rows [position, end): one request exports the state, another reads it and the pages."""
    driver.poison()
    first = driver.sequence(tokens, running_slot=1)
    driver.run(driver.plan((first, len(tokens)), exports={first.request_id: [(position, 5)]}))
    second = driver.sequence(
        tokens,
        running_slot=2,
        start_slot=5,
        pages=first.pages[: -(-position // driver.match_unit)],
        num_processed=position,
    )
    return driver.logits(driver.plan((second, len(tokens) - position)))
