"""Small steps as one native call: written down once for every number of rows, then run again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch

from milepost.kernels.index import AttentionIndex, RecurrentIndex

MAX_TAPE_ROWS = 32
"""Larger steps compute so long that nobody sees what calling costs."""


class PlanSource(Protocol):
    """Who makes the native forms of indices."""

    def attention_plan(self, index: AttentionIndex) -> Any: ...

    def recurrent_plan(self, index: RecurrentIndex) -> Any: ...


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Attributes:
    result: what the step gave; the tape writes it anew.
    """

    tape: Any
    result: torch.Tensor


class StepTapes:
    """Runs the steps of one decoder over one cache.

    A step is a function of token ids and indices; for the same number of rows its native calls are the same
    but for these, so that they can be written down (a tape) and run again in one call. A step in which torch
    computes something leaves no complete tape, and is called every time.

    Tapes belong to the thread that made them: their results lie in its buffers.
    """

    def __init__(self, library: ModuleType, plans: PlanSource) -> None:
        self._library = library
        self._plans = plans
        self._thread = 0
        self._tapes: dict[int, _Recorded | None] = {}

    def run(
        self,
        step: Callable[[], torch.Tensor],
        token_ids: torch.Tensor,
        attention: AttentionIndex | None,
        recurrent: RecurrentIndex | None,
    ) -> torch.Tensor:
        """What `step` computes, [N, D]: the same bits, whether it is called or its tape runs.

        Args:
            step: one pass over these token ids, int64 [N], and these indices; always of the same decoder and
                cache.
        """
        num_rows = token_ids.shape[0]
        is_native = recurrent is None or recurrent.is_native_calls
        if num_rows > MAX_TAPE_ROWS or not is_native:
            return step()
        if self._thread != threading.get_ident():
            self._thread = threading.get_ident()
            self._tapes.clear()
        if num_rows not in self._tapes:
            return self._record(step, num_rows)
        recorded = self._tapes[num_rows]
        if recorded is None:
            return step()
        recorded.tape.run(
            token_ids,
            None if attention is None else self._plans.attention_plan(attention),
            None if recurrent is None else self._plans.recurrent_plan(recurrent),
        )
        return recorded.result.clone()

    def _record(self, step: Callable[[], torch.Tensor], num_rows: int) -> torch.Tensor:
        tape = self._library.Tape()
        result = None
        tape.start()
        try:
            result = step()
        finally:
            tape.stop(result)
        if not tape.is_complete:
            self._tapes[num_rows] = None
            return result
        self._tapes[num_rows] = _Recorded(tape, result)
        return result.clone()
