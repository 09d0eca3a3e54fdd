"""Sampling of chunks, with or without drafts: which rows, with which history, and what is accepted.

A draft is accepted iff it is the token that is sampled at its position. Noise is keyed by the position,
so what is sampled does not depend on what was guessed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from milepost.core.plan import ChunkPlan, SampledToken, SamplingParams
from milepost.runner.draft_sampling import history_at
from milepost.runner.sampler import SamplingRow, TokenHistory, unpacked_row


def sampling_rows(
    chunk: ChunkPlan, params: SamplingParams, history: TokenHistory | None, vocab_size: int
) -> list[SamplingRow]:
    """One row for the last token of the chunk and one for each draft behind it.

    The row behind draft j is processed as if the drafts up to j had been accepted; if they were not, what
    is sampled there is thrown away.

    Raises:
        ValueError: `allowed_tokens` is given and has not one row per sample.
    """
    drafts = array("I", chunk.draft_tokens)
    num_rows = 1 + len(drafts)
    masks = _masks(chunk, num_rows, vocab_size)
    return [
        SamplingRow(params, chunk.output_position + place, history_at(history, drafts[:place]), masks[place])
        for place in range(num_rows)
    ]


def _masks(chunk: ChunkPlan, num_rows: int, vocab_size: int) -> Sequence[torch.Tensor | None]:
    if not chunk.allowed_tokens:
        return [None] * num_rows
    width = len(chunk.allowed_tokens) // num_rows
    if width * num_rows != len(chunk.allowed_tokens):
        raise ValueError(f"allowed_tokens of request {chunk.request_id} has not {num_rows} rows")
    rows = [chunk.allowed_tokens[place * width : (place + 1) * width] for place in range(num_rows)]
    return [unpacked_row(row, vocab_size) for row in rows]


def num_accepted(chunk: ChunkPlan, sampled: Sequence[SampledToken]) -> int:
    """Leading drafts that are what was sampled at their positions.

    Args:
        sampled: one per row; entry j was sampled where draft j stands.
    """
    count = 0
    for draft, token in zip(array("I", chunk.draft_tokens), sampled, strict=False):
        if draft != token.token_id:
            break
        count += 1
    return count
