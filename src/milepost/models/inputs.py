"""What a decoder needs for one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


class LayerTaps:
    """Outputs of some decoder layers, kept while a step runs, for drafters that read them.

    The output of a layer is the residual stream behind it: neither normed nor, with residuals over depth,
    mixed with what earlier blocks have closed.

    Attributes:
        layers: 0-based, ascending.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._kept: list[torch.Tensor] = []

    def keep(self, layer: int, x: torch.Tensor) -> None:
        """Copies the output [N, D] of a layer if it is one of those; layers come in order."""
        if layer in self.layers:
            self._kept.append(x.clone())

    @property
    def rows(self) -> torch.Tensor:
        """[N, layers * D]: the kept outputs side by side."""
        assert len(self._kept) == len(self.layers)
        return torch.cat(self._kept, dim=-1)
