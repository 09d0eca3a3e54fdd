"""Models that keep their states in another dtype, without loading them again."""

from __future__ import annotations

import copy

from milepost.models.loading import LoadedModel


def kept_in(model: LoadedModel, state_dtype: str) -> LoadedModel:
    """`model`, weights shared, with its states kept in `state_dtype`."""
    other = copy.copy(model)
    other.state_dtype = state_dtype
    other.layout = model.layout.kept_in(state_dtype)
    return other
