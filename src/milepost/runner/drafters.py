"""The port between the worker and whatever drafts from hidden states, and who serves it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from milepost.models.block_config import RUNNER
from milepost.models.inputs import CacheFields
from milepost.models.layout import AttentionGroupLayout
from milepost.models.loading import LoadedModel
from milepost.runner.batch import PageTable
from milepost.runner.block_drafting import BlockRunner
from milepost.runner.drafting import ChainRunner, DraftLane, ProcessedRows


class DraftRunner(Protocol):
    """Drafts for requests of a worker, and remembers their processed tokens in pages of a group of its own.

    What lies in a page depends on the tokens up to its end only, so pages are published, hit and evicted with
    those of the decoder, and a request that starts from a hit drafts at once. Nothing that was not accepted
    is ever written to a page.
    """

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Decoder layers whose outputs `record` reads; () = the hidden states behind the last one."""

    def propose(self, lanes: Sequence[DraftLane]) -> list[array[int]]:
        """Guesses for the tokens behind the newest one of every lane: at most as many as it asks for, maybe
        none, picked with `draft_sampling.pick_drafts`. Those of a lane do not depend on the others."""

    def record(self, parts: Sequence[ProcessedRows], read: torch.Tensor) -> None:
        """Brings pages up to what was processed. Every token of a request passes here once, in order; where a
        request starts from reused pages, these were written by such calls.

        Args:
            read: rows of the whole step, [N, D] hidden states or [N, layers * D] outputs of the tap layers.
        """


RunnerFactory = Callable[[Any, AttentionGroupLayout, CacheFields, int], DraftRunner]
"""(drafter with weights, its group, fields of the worker's pools, match unit) -> runner."""

RUNNERS: Mapping[str, RunnerFactory] = {"chain": ChainRunner, RUNNER: BlockRunner}
"""`drafters.DrafterSpec.runner` -> who works with such a drafter."""


def draft_runner(model: LoadedModel, fields: CacheFields, match_unit: int) -> DraftRunner | None:
    """Who drafts for a model; None if it was loaded without a drafter.

    Args:
        fields: of the worker's pools.
    """
    group = model.layout.draft_group
    if model.drafter is None or group is None:
        return None
    return RUNNERS[model.drafter.runner](model.drafts, group, fields, match_unit)


__all__ = ["RUNNERS", "DraftLane", "DraftRunner", "PageTable", "ProcessedRows", "draft_runner"]
