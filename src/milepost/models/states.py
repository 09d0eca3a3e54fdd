"""How a linear layer reaches its states in the cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from milepost.kernels.index import RecurrentIndex
from milepost.models.inputs import CacheFields
from milepost.models.layout import CONV_TAIL_FIELD, STATE_MATRIX_FIELD

Mixer = Callable[[torch.Tensor, torch.Tensor, RecurrentIndex], torch.Tensor]
"""(convolution tails [slots, taps - 1, C], state matrices [slots, H, K, V], index) -> rows [N, width]."""


def run_mixer(mixer: Mixer, cache: CacheFields, layer: int, index: RecurrentIndex) -> torch.Tensor:
    """Runs `mixer` over the states of one layer: in their slots, or in scratch records if it exports to
    slots of another layout."""
    tails, matrices = cache[layer, CONV_TAIL_FIELD], cache[layer, STATE_MATRIX_FIELD]
    staged = index.staged
    if staged is None:
        return mixer(tails, matrices, index)
    staged_tails = staged.take(tails, index.initial_slots)
    staged_matrices = staged.take(matrices, index.initial_slots)
    result = mixer(staged_tails, staged_matrices, staged.index)
    staged.put(layer, CONV_TAIL_FIELD, staged_tails, tails, index.write_slots)
    staged.put(layer, STATE_MATRIX_FIELD, staged_matrices, matrices, index.write_slots)
    return result
