"""One plan through the worker: drafts that a grammar must see first, masks, then the step itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from milepost.core.plan import (
    COUPLED,
    PROBABILISTIC,
    TOKEN_BYTES,
    ChunkPlan,
    StepDrafts,
    StepPlan,
    StepResult,
)
from milepost.core.ports import Worker
from milepost.engine.answer import Answer, constrain
from milepost.errors import WorkerError

log = logging.getLogger(__name__)


class PlanRunner:
    """Has plans executed. Whatever the worker raises becomes the result of a step that failed.

    Attributes:
        num_failed: steps that failed, since the last one that did not.
        seconds: of the last plan in the worker, without drafts that were made before; None if there was
            nothing to do, or it failed.
    """

    def __init__(self, worker: Worker, clock: Callable[[], float]) -> None:
        self._worker = worker
        self._clock = clock
        self.num_failed = 0
        self.seconds: float | None = None

    def execute(self, plan: StepPlan, answers: Mapping[int, Answer]) -> StepResult:
        """Let the worker run `plan`, sampling what the grammars of `answers` allow."""
        self.seconds = None
        if not (plan.chunks or plan.started or plan.finished or plan.copies or plan.discards):
            return StepResult(plan.step_id, [])
        try:
            draft_seconds = self._drafted(plan, answers).seconds if _must_see_drafts(plan, answers) else 0.0
        except Exception as error:
            return self._failed(plan, error)
        constrain(plan, answers)
        begun = self._clock()
        try:
            result = self._worker.execute(plan)
        except Exception as error:
            return self._failed(plan, error)
        self.seconds = self._clock() - begun
        result.draft_seconds += draft_seconds
        if plan.chunks:
            self.num_failed = 0
        return result

    def _failed(self, plan: StepPlan, error: Exception) -> StepResult:
        self.num_failed += 1
        message = "step %d failed in the worker; its requests end with an error"
        log.error(message, plan.step_id, exc_info=error)
        return StepResult(plan.step_id, [], f"{type(error).__name__}: {error}")

    def _drafted(self, plan: StepPlan, answers: Mapping[int, Answer]) -> StepDrafts:
        """Has the drafts made that the plan asks for, and puts them into it.

        Grammars leave drafts out. Where drafts are verified by rejection sampling that would shift the
        distribution, so that these requests get drafts of which any may be left out.
        """
        for chunk in plan.chunks:
            if chunk.draft_sampling == PROBABILISTIC and _is_guided(chunk, answers):
                chunk.draft_sampling = COUPLED
        drafts = self._worker.draft(plan)
        made = {chunk.request_id: chunk.draft_tokens for chunk in drafts.chunks}
        for chunk in plan.chunks:
            if not chunk.num_own_drafts:
                continue
            tokens = made.get(chunk.request_id, b"")
            if len(tokens) % TOKEN_BYTES or len(tokens) > TOKEN_BYTES * chunk.num_own_drafts:
                raise WorkerError(
                    f"request {chunk.request_id}: the worker drafted {len(tokens)} bytes of tokens, asked "
                    f"for were at most {chunk.num_own_drafts} tokens"
                )
            chunk.set_drafts(tokens)
        return drafts


def _must_see_drafts(plan: StepPlan, answers: Mapping[int, Answer]) -> bool:
    """Whether a chunk asks the worker for drafts that a grammar restricts."""
    return any(chunk.num_own_drafts and _is_guided(chunk, answers) for chunk in plan.chunks)


def _is_guided(chunk: ChunkPlan, answers: Mapping[int, Answer]) -> bool:
    return chunk.request_id in answers and answers[chunk.request_id].is_guided
