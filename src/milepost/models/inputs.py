"""What a decoder needs for one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from milepost.kernels.index import AttentionIndex, RecurrentIndex

CacheFields = Mapping[tuple[int, str], torch.Tensor]
"""(layer, field name) -> view of the pool: [records, *field shape]. Written in place."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Rows of all sequences of a step, packed.

    Attributes:
        token_ids: int64 [N].
        attention: index of the attention group, None if the model has none.
        recurrent: index of the recurrent group, None if the model has none.
    """

    token_ids: torch.Tensor
    attention: AttentionIndex | None
    recurrent: RecurrentIndex | None
