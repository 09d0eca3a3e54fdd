"""Which rows of latent attention work on expanded keys and values. Decided here and nowhere else.

Expanding the latents of a context costs as much however many rows then read them; a row over absorbed
queries costs more than one over expanded keys, but nothing beside it. The results are equal up to rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from milepost.config import EXACT_PROMPTS
from milepost.kernels.index import AttentionIndex, RowSpan
from milepost.runner.batch import Batch

BREAK_EVEN_ROWS = 192
"""Rows of a sequence in a step from which expanding is cheaper, whatever the context and the heads: per head
2 * latent * (nope + value) products expand an entry, and a row saves 2 * latent - (nope + value). For
Kimi's sizes that is 512 * 256 / (1088 - 320) = 171; measured 170-215."""


def with_expansion(batch: Batch, prompt_ends: Sequence[int], exactness: str) -> Batch:
    """The batch with the spans marked whose latents are expanded.

    Args:
        prompt_ends: per sequence, tokens of its prompt.
        exactness: "prompt": rows of a prompt are, those behind it are not, wherever a step cuts; so a row
            alone decides. "off": sequences with enough rows in this step.
    """
    index = batch.inputs.attention
    if index is None:
        return batch
    marked = _marked(index, prompt_ends, by_phase=exactness == EXACT_PROMPTS)
    return dataclasses.replace(batch, inputs=dataclasses.replace(batch.inputs, attention=marked))


def _marked(index: AttentionIndex, prompt_ends: Sequence[int], *, by_phase: bool) -> AttentionIndex:
    spans: list[RowSpan] = []
    tables: list[torch.Tensor] = []
    expanded: set[int] = set()
    for span, table, prompt_end in zip(index.spans, index.page_tables, prompt_ends, strict=True):
        if by_phase:
            num_expanded = min(span.length, max(0, prompt_end - span.position))
        else:
            num_expanded = span.length if span.length >= BREAK_EVEN_ROWS else 0
        middle = span.first_row + num_expanded
        if num_expanded:
            expanded.add(len(spans))
            spans.append(RowSpan(span.first_row, middle, span.position))
            tables.append(table)
        if num_expanded < span.length:
            spans.append(RowSpan(middle, span.end_row, span.position + num_expanded))
            tables.append(table)
    return dataclasses.replace(
        index, spans=tuple(spans), page_tables=tuple(tables), expanded=frozenset(expanded)
    )
