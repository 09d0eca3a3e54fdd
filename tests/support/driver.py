"""Builds step plans by hand: pages and slots are chosen by the test, no scheduler is involved."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from milepost.core.plan import (
    ZERO_STATE,
    ChunkPlan,
    SamplingParams,
    StateExport,
    StepPlan,
    StepResult,
    WorkerRequest,
)
from milepost.models.inputs import StepRows
from milepost.models.loading import LoadedModel
from milepost.runner.batch import Batch
from milepost.runner.worker import TorchWorker

GREEDY = SamplingParams(temperature=0.0)


def token_bytes(tokens: Sequence[int]) -> bytes:
    return array("I", tokens).tobytes()


def random_tokens(count: int, vocab_size: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(vocab_size) for _ in range(count)]


@dataclass
class TrackedRequest:
    """One request under test: its tokens, its pages and where its running state lies."""

    request_id: int
    tokens: list[int]
    running_slot: int
    pages: list[int] = field(default_factory=list)
    start_slot: int = ZERO_STATE
    num_processed: int = 0
    sampling: SamplingParams = field(default_factory=lambda: GREEDY)
    started: bool = False
    starts_from_checkpoint: bool = False


class Driver:
    """Makes plans for a `TorchWorker` and keeps count of pages, in shuffled order.

    Slots are given by the caller. Every free page and slot can be poisoned with NaN.
    """

    def __init__(
        self, model: LoadedModel, *, match_unit: int = 16, cache_bytes: int = 4 << 20, shuffle_seed: int = 0
    ) -> None:
        self.model = model
        self.geometry = model.geometry(match_unit)
        self.worker = TorchWorker(model, self.geometry, cache_bytes)
        self.match_unit = match_unit
        self._next_step = 0
        self._next_request = 0
        self._shuffle_seed = shuffle_seed
        self._free_pages: list[int] = []
        self._free_all_pages()

    def _free_all_pages(self) -> None:
        if self.geometry.num_attention_groups:
            self._free_pages = list(range(self.worker.pools.attention_pool(0).num_records))
            random.Random(self._shuffle_seed + self._next_step).shuffle(self._free_pages)

    def poison(self) -> None:
        """Fills every record of every pool with NaN."""
        for views in (self.worker.pools.fields, self.worker.pools.checkpoints):
            for view in views.values():
                view.fill_(float("nan"))

    def recycle(self) -> None:
        """Ends all requests; all pages are free again, and every record is NaN."""
        ended = list(range(1, self._next_request + 1))
        self.worker.execute(StepPlan(self._next_step, [], finished=ended))
        self._free_all_pages()
        self.poison()

    def sequence(
        self,
        tokens: Sequence[int],
        running_slot: int,
        *,
        start_slot: int = ZERO_STATE,
        pages: Sequence[int] = (),
        num_processed: int = 0,
        sampling: SamplingParams = GREEDY,
    ) -> TrackedRequest:
        """A new request; `pages`, `num_processed` and `start_slot` describe a cache hit."""
        self._next_request += 1
        return TrackedRequest(
            self._next_request,
            list(tokens),
            running_slot,
            list(pages),
            start_slot,
            num_processed,
            sampling,
            starts_from_checkpoint=start_slot != ZERO_STATE,
        )

    def plan(
        self,
        *parts: tuple[TrackedRequest, int],
        exports: dict[int, list[tuple[int, int]]] | None = None,
        sample: bool = True,
    ) -> StepPlan:
        """One step that processes `count` tokens of each (sequence, count).

        Args:
            exports: request id -> (absolute position, slot) pairs, ascending.
        """
        self._next_step += 1
        step = StepPlan(self._next_step, [])
        for sequence, count in parts:
            start, end = sequence.num_processed, sequence.num_processed + count
            new_pages: list[list[int]] = []
            reused = [list(sequence.pages)] if self.geometry.num_attention_groups else []
            if self.geometry.num_attention_groups:
                needed = -(-end // self.match_unit) - len(sequence.pages)
                fresh = [self._free_pages.pop() for _ in range(max(0, needed))]
                sequence.pages += fresh
                new_pages = [fresh]
            if not sequence.started:
                sequence.started = True
                step.started.append(
                    WorkerRequest(
                        sequence.request_id,
                        sequence.sampling,
                        len(sequence.tokens),
                        token_bytes(sequence.tokens) if sequence.sampling.needs_history else b"",
                        reused,
                    )
                )
            recurrent = self.geometry.num_recurrent_groups > 0
            wanted = (exports or {}).get(sequence.request_id, [])
            step.chunks.append(
                ChunkPlan(
                    request_id=sequence.request_id,
                    start=start,
                    end=end,
                    tokens=token_bytes(sequence.tokens[start:end]),
                    new_pages=new_pages,
                    replaced_pages=[],
                    initial_slots=[sequence.start_slot] if recurrent else [],
                    running_slots=[sequence.running_slot] if recurrent else [],
                    exports=[
                        StateExport(position - start, [slot] if recurrent else [], position, "tail")
                        for position, slot in wanted
                    ],
                    num_samples=int(sample),
                    output_position=max(0, end - len(sequence.tokens)),
                    starts_from_checkpoint=sequence.starts_from_checkpoint,
                )
            )
            sequence.starts_from_checkpoint = False
            sequence.num_processed = end
            sequence.start_slot = sequence.running_slot
        return step

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Executes a plan and returns the logits of all its rows, fp32 [rows, vocabulary]."""
        with self.watched() as seen:
            self.worker.execute(plan)
        with torch.inference_mode():
            return self.model.decoder.logits(seen[0].hidden).clone()

    @contextmanager
    def watched(self, layers: Sequence[int] = ()) -> Iterator[list[StepRows]]:
        """What the decoder computes of the rows of every step; `layers`, if given, are tapped instead of what
        a drafter reads."""
        seen: list[StepRows] = []
        original = self.worker.hidden_states

        def spy(plan: StepPlan, tap_layers: tuple[int, ...] = ()) -> tuple[Batch, StepRows]:
            batch, rows = original(plan, tuple(layers) or tap_layers)
            seen.append(rows)
            return batch, rows

        self.worker.hidden_states = spy  # type: ignore[method-assign]
        try:
            yield seen
        finally:
            self.worker.hidden_states = original  # type: ignore[method-assign]

    def run(self, plan: StepPlan) -> StepResult:
        return self.worker.execute(plan)

    def decoder_states(self, tokens: Sequence[int], layers: Sequence[int] = ()) -> torch.Tensor:
        """Hidden states of all positions, from one pass of a new request; or, if layers are named, their
        outputs side by side."""
        with self.watched(layers) as seen:
            self.run(self.plan((self.sequence(tokens, 0), len(tokens)), sample=False))
        return seen[0].joined_taps if layers else seen[0].hidden.clone()

    def state(self, slot: int) -> dict[tuple[int, str], torch.Tensor]:
        """Copies of all fields of one slot of a running state."""
        names = [(f.layer, f.name) for group in self.model.layout.recurrent for f in group.fields]
        return {name: self.worker.pools.fields[name][slot].clone() for name in names}

    def checkpoint(self, slot: int) -> dict[tuple[int, str], torch.Tensor]:
        """The same of one checkpoint."""
        pools = self.worker.pools
        return {name: (pools.checkpoints or pools.fields)[name][slot].clone() for name in self.state(slot)}

    def page_rows(self, sequence: TrackedRequest, end: int) -> dict[tuple[int, str], torch.Tensor]:
        """Copies of what the pages of a sequence hold for positions [0, end)."""
        result = {}
        for group in self.model.layout.attention:
            for token_field in group.token_fields:
                view = self.worker.pools.fields[token_field.layer, token_field.name]
                rows = view[sequence.pages].reshape(-1, token_field.width)[:end]
                result[token_field.layer, token_field.name] = rows.clone()
        return result
