"""Small steps as one native call: written down once for every number of rows, then run again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, TypeVar

import torch

from milepost.kernels.index import AttentionIndex, RecurrentIndex

MAX_TAPE_ROWS = 32
"""Larger steps compute so long that nobody sees what calling costs."""


class PlanSource(Protocol):
    """Who makes the native forms of indices."""

    def attention_plan(self, index: AttentionIndex) -> Any: ...

    def recurrent_plan(self, index: RecurrentIndex) -> Any: ...


class StepOutputs(Protocol):
    """What a step gives."""

    def tensors(self) -> Iterable[torch.Tensor]:
        """All that the step computes and its caller reads, each [N, width]."""


Outputs = TypeVar("Outputs", bound=StepOutputs)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Attributes:
    outputs: what the step gave; the tape writes all of it anew.
    """

    tape: Any
    outputs: Any


class StepTapes:
    """Runs the steps of one decoder over one cache.

    A step is a function of token ids and indices; for the same number of rows its native calls are the same
    but for these, so that they can be written down (a tape) and run again in one call. A step in which torch
    computes something leaves no complete tape, and is called every time.

    Tapes belong to the thread that made them: their results lie in its buffers. What a tape gives is valid
    until the next step.
    """

    def __init__(self, library: ModuleType, plans: PlanSource) -> None:
        self._library = library
        self._plans = plans
        self._thread = 0
        self._tapes: dict[tuple[int, Hashable], _Recorded | None] = {}

    def run(
        self,
        step: Callable[[], Outputs],
        kind: Hashable,
        token_ids: torch.Tensor,
        attention: AttentionIndex | None,
        recurrent: RecurrentIndex | None,
    ) -> Outputs:
        """What `step` computes: the same bits, whether it is called or its tape runs.

        Args:
            step: one pass over these token ids, int64 [N], and these indices; always of the same decoder and
                cache.
            kind: steps of one kind and number of rows make the same calls and give the same outputs.
        """
        num_rows = token_ids.shape[0]
        is_native = recurrent is None or recurrent.is_native_calls
        if num_rows > MAX_TAPE_ROWS or not is_native:
            return step()
        if self._thread != threading.get_ident():
            self._thread = threading.get_ident()
            self._tapes.clear()
        key = num_rows, kind
        if key not in self._tapes:
            return self._record(step, key)
        recorded = self._tapes[key]
        if recorded is None:
            return step()
        recorded.tape.run(
            token_ids,
            None if attention is None else self._plans.attention_plan(attention),
            None if recurrent is None else self._plans.recurrent_plan(recurrent),
        )
        outputs: Outputs = recorded.outputs
        return outputs

    def _record(self, step: Callable[[], Outputs], key: tuple[int, Hashable]) -> Outputs:
        tape = self._library.Tape()
        outputs = None
        tape.start()
        try:
            outputs = step()
        finally:
            # Each must have been written by one of the calls, or another step would leave it as it is.
            for tensor in (None,) if outputs is None else outputs.tensors():
                tape.stop(tensor)
        self._tapes[key] = _Recorded(tape, outputs) if tape.is_complete else None
        return outputs
