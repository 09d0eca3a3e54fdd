"""Which promise holds here: runs the loaded model cut in several ways and compares bits.

Whether a row's bits depend on the rows beside it is decided by kernels, shapes, dtype and the CPU, so it
is measured on the loaded weights and not looked up. The test costs a prefill of a few hundred tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from milepost.config import NOT_EXACT
from milepost.core.geometry import CacheGeometry
from milepost.core.plan import ZERO_STATE, ChunkPlan, SamplingParams, StateExport, StepPlan, WorkerRequest
from milepost.models.inputs import StepRows
from milepost.models.loading import LoadedModel
from milepost.runner.batch import Batch
from milepost.runner.worker import TorchWorker

_MATCH_UNIT = 16
_NUM_TOKENS = 130
_CHECKPOINT = 64
_NEIGHBOUR_TOKENS = 21
_CUTS = (1, 2, 1, 2, 15, 16, 17, 32, 33)
"""Chunk lengths around the row counts at which libraries change their algorithm; small ones twice, since
kernels may run a step that they have seen in another way. The rest follows."""
_NUM_SLOTS = 8
_HEAD_ROWS = 33


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Attributes:
    exact: a hit gives bitwise what a cold run gives.
    largest_difference: between hidden states or logits that should be equal, relative to the
        largest of them.
    text: one line for a person.
    """

    exact: bool
    largest_difference: float
    text: str


def self_test(model: LoadedModel) -> SelfTest:
    """Compares one pass with chunks, with a hit between neighbours, and single rows of logits."""
    geometry = model.geometry(_MATCH_UNIT)
    units = 3 * (-(-_NUM_TOKENS // _MATCH_UNIT)) + 2 * (-(-_NEIGHBOUR_TOKENS // _MATCH_UNIT))
    sizes = [units * size for size in geometry.page_record_bytes]
    sizes += [_NUM_SLOTS * size for size in geometry.state_record_bytes]
    worker = _RecordingWorker(model, geometry, max(sizes))
    try:
        with torch.inference_mode():
            difference = _Runs(model, geometry, worker).largest_difference()
    finally:
        worker.close()
    # Not a number is different from everything.
    exact = difference == 0.0 and model.kernels.exactness != NOT_EXACT and not model.layout.rounds_checkpoints
    return SelfTest(exact, difference, _text(model, exact, difference))


def _text(model: LoadedModel, exact: bool, difference: float) -> str:
    precision = (
        model.dtype if model.quantization is None else f"{model.dtype}, {model.quantization.name} weights"
    )
    if model.layout.rounds_checkpoints:
        precision += f", states kept in {model.state_dtype}"
    where = f"{precision}, {model.kernels.implementation} kernels: {model.kernels.choices[0].reason}"
    if model.kernels.exactness == NOT_EXACT:
        return f"exactness: off, as asked for; a hit may change logits, as may how steps are cut ({where})"
    if exact and model.expands_latents:
        return (
            "exactness: prompt; cuts, hits and neighbours leave every bit behind a prompt; what an answer "
            f"left is not reused ({where})"
        )
    if exact:
        return f"exactness: exact; cuts, hits and neighbours leave every bit of the answers ({where})"
    return (
        f"exactness: numeric; a hit may change logits, by up to {difference:.1e} of the largest here, "
        f"so cold and cached answers may differ ({where})"
    )


class _RecordingWorker(TorchWorker):
    """Keeps the hidden states of the last step."""

    hidden: torch.Tensor

    def hidden_states(self, plan: StepPlan, tap_layers: tuple[int, ...] = ()) -> tuple[Batch, StepRows]:
        batch, rows = super().hidden_states(plan, tap_layers)
        self.hidden = rows.hidden.clone()
        return batch, rows


@dataclass(slots=True)
class _Sequence:
    request_id: int
    tokens: list[int]
    slot: int
    pages: list[int] = field(default_factory=list)
    start_slot: int = ZERO_STATE
    position: int = 0
    starts_from_checkpoint: bool = False
    started: bool = False


class _Runs:
    """Plans and executes the passes that are compared."""

    def __init__(self, model: LoadedModel, geometry: CacheGeometry, worker: _RecordingWorker) -> None:
        self._model = model
        self._geometry = geometry
        self._worker = worker
        self._next_page = 0
        self._next_step = 0

    def largest_difference(self) -> float:
        tokens = [(7919 * number + 13) % self._model.vocab_size for number in range(_NUM_TOKENS)]
        whole = _Sequence(1, tokens, slot=0)
        expected = self._run([(whole, _NUM_TOKENS)], checkpoint_slot=1)
        differences = [self._heads(expected)]

        cut = _Sequence(2, tokens, slot=2)
        parts = [self._run([(cut, count)]) for count in _cuts(_NUM_TOKENS)]
        differences.append(_difference(torch.cat(parts), expected))

        hit = _Sequence(3, tokens, 3, whole.pages[: _CHECKPOINT // _MATCH_UNIT], 1, _CHECKPOINT, True)
        before = _Sequence(4, tokens[::-1][:_NEIGHBOUR_TOKENS], slot=4)
        behind = _Sequence(5, tokens[3 : 3 + _NEIGHBOUR_TOKENS], slot=5)
        parts = []
        for count, others in ((1, 7), (2, 1), (_NUM_TOKENS - _CHECKPOINT - 3, _NEIGHBOUR_TOKENS - 8)):
            rows = self._run([(before, others), (hit, count), (behind, others)])
            parts.append(rows[others : others + count])
        differences.append(_difference(torch.cat(parts), expected[_CHECKPOINT:]))
        return max(differences, key=lambda value: (value != value, value))

    def _heads(self, hidden: torch.Tensor) -> float:
        """Logits of several rows against those of one and of three rows."""
        together = self._model.decoder.logits(hidden[:_HEAD_ROWS]).clone()
        single = self._model.decoder.logits(hidden[1:2]).clone()
        several = self._model.decoder.logits(hidden[20:23])
        return max(_difference(single, together[1:2]), _difference(several, together[20:23]))

    def _run(
        self, parts: Sequence[tuple[_Sequence, int]], checkpoint_slot: int | None = None
    ) -> torch.Tensor:
        """One step over `count` tokens of each sequence; hidden states of all rows."""
        self._next_step += 1
        plan = StepPlan(self._next_step, [])
        for sequence, count in parts:
            if not sequence.started:
                reused = [list(sequence.pages)] * self._geometry.num_attention_groups
                plan.started.append(
                    WorkerRequest(sequence.request_id, SamplingParams(), len(sequence.tokens), b"", reused)
                )
                sequence.started = True
            plan.chunks.append(self._chunk(sequence, count, checkpoint_slot))
        self._worker.execute(plan)
        return self._worker.hidden

    def _chunk(self, sequence: _Sequence, count: int, checkpoint_slot: int | None) -> ChunkPlan:
        start, end = sequence.position, sequence.position + count
        needed = -(-end // _MATCH_UNIT) - len(sequence.pages)
        new_pages = list(range(self._next_page, self._next_page + needed))
        self._next_page += needed
        sequence.pages += new_pages
        groups = self._geometry.num_recurrent_groups
        exports = []
        if checkpoint_slot is not None:
            exports = [StateExport(_CHECKPOINT - start, [checkpoint_slot] * groups, _CHECKPOINT, "tail")]
        chunk = ChunkPlan(
            request_id=sequence.request_id,
            start=start,
            end=end,
            tokens=array("I", sequence.tokens[start:end]).tobytes(),
            new_pages=[new_pages] * self._geometry.num_attention_groups,
            replaced_pages=[],
            initial_slots=[sequence.start_slot] * groups,
            running_slots=[sequence.slot] * groups,
            exports=exports,
            num_samples=0,
            output_position=0,
            starts_from_checkpoint=sequence.starts_from_checkpoint,
        )
        sequence.position, sequence.start_slot = end, sequence.slot
        sequence.starts_from_checkpoint = False
        return chunk


def _cuts(num_tokens: int) -> list[int]:
    counts = list(_CUTS)
    return [*counts, num_tokens - sum(counts)]


def _difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """Largest difference relative to the largest value; 0.0 only if all are equal."""
    if torch.equal(left, right):
        return 0.0
    largest = float(right.float().abs().max())
    # At least the smallest step: unequal values must not look equal.
    return max(float((left.float() - right.float()).abs().max()) / max(largest, 1e-30), 1e-30)
