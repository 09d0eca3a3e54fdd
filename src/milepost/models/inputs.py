"""What a decoder needs for one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    """Outputs of some decoder layers, kept while a step runs, for drafters that read them. Nothing is copied:
    who goes on from such an output must not overwrite it.

    The output of a layer is the residual stream behind it: neither normed nor, with residuals over depth,
    mixed with what earlier blocks have closed.

    Attributes:
        layers: 0-based, ascending.
        kept: their outputs so far.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self.kept: list[torch.Tensor] = []

    def keep(self, layer: int, x: torch.Tensor) -> bool:
        """Keeps the output [N, D] of a layer if it is one of those; says whether. Layers come in order."""
        if layer not in self.layers:
            return False
        self.kept.append(x)
        return True


@dataclass(frozen=True, slots=True)
class StepRows:
    """What a decoder computes of the rows of a step. Valid until the next step.

    Attributes:
        hidden: [N, D] behind the last layer, before the final norm.
        logits: fp32 [N, vocabulary]; None = they were not asked for.
        taps: per layer that was to be tapped its output, [N, D].
        mixer_inputs: per recurrent layer what a record of the step keeps.
    """

    hidden: torch.Tensor
    logits: torch.Tensor | None
    taps: tuple[torch.Tensor, ...]
    mixer_inputs: dict[int, tuple[torch.Tensor, ...]]

    def tensors(self) -> Iterator[torch.Tensor]:
        """All of them."""
        yield self.hidden
        if self.logits is not None:
            yield self.logits
        yield from self.taps
        for inputs in self.mixer_inputs.values():
            yield from inputs

    @property
    def joined_taps(self) -> torch.Tensor:
        """[N, layers * D]: the outputs of the tapped layers side by side."""
        return torch.cat(self.taps, dim=-1)
