"""Scheduler and worker over turns of some conversations, with any drafter; answers and records to compare."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.support.driver import random_tokens

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.drafts import DraftPlanner
from milepost.core.plan import SamplingParams, StepPlan, StepResult
from milepost.core.request import Request
from milepost.core.scheduler import Scheduler
from milepost.models.loading import LoadedModel
from milepost.runner.worker import TorchWorker

UNIT = 16
NUM_OUTPUT = 40
NUM_CONVERSATIONS = 4


@dataclass(frozen=True)
class Proposal:
    """Drafts that the worker made.

    Attributes:
        tokens: all tokens of the request at that time.
        num_asked: most drafts it should make.
    """

    tokens: tuple[int, ...]
    drafts: tuple[int, ...]
    num_accepted: int
    num_asked: int


@dataclass
class KnownAnswers:
    """Drafts the known continuation, wrong at a rate; between none and as many as allowed if ragged."""

    answers: dict[int, list[int]]
    vocab_size: int
    error_rate: float
    is_ragged: bool = False
    prompts: dict[int, int] = field(default_factory=dict)
    rng: random.Random = field(default_factory=lambda: random.Random(5))

    def propose(self, request_id: int, tokens: Sequence[int], max_drafts: int) -> Sequence[int]:
        done = len(tokens) - self.prompts[request_id]
        count = self.rng.randrange(max_drafts + 1) if self.is_ragged else max_drafts
        drafts = self.answers[request_id][done : done + count]
        return [
            self.rng.randrange(self.vocab_size) if self.rng.random() < self.error_rate else token
            for token in drafts
        ]

    def forget(self, request_id: int) -> None:
        self.prompts.pop(request_id, None)


class Engine:
    """schedule, execute, commit over three turns of some conversations."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        cache_bytes: int = 64 << 20,
        step_tokens: int = 96,
        max_model_len: int = 2048,
        drafter: KnownAnswers | None = None,
        num_drafts: int = 0,
        is_caching: bool = True,
    ) -> None:
        """
        Args:
            drafter: who drafts; None = the worker, if the model was loaded with draft modules.
        """
        geometry = model.geometry(UNIT)
        cache = CacheConfig(
            cache_bytes,
            UNIT,
            enable_prefix_caching=is_caching,
            checkpoint_interval=64,
            decode_interval=16,
        )
        planner = DraftPlanner(drafter, num_drafts) if num_drafts else None
        self.model = model
        self.drafter = drafter
        self.scheduler = Scheduler(geometry, cache, SchedulerConfig(step_tokens, 8, max_model_len), planner)
        self.worker = TorchWorker(model, geometry, cache_bytes)
        self.cache_bytes = cache_bytes
        self.tokens: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self.proposed: list[Proposal] = []

    def run(self, requests: list[Request], preempt: random.Random | None) -> None:
        for request in requests:
            self.tokens[request.request_id] = []
            if self.drafter is not None:
                self.drafter.prompts[request.request_id] = request.num_prompt_tokens
            self.scheduler.add(request)
        for step in range(3000):
            if not self.scheduler.has_unfinished_requests:
                return
            if preempt is not None and preempt.random() < 0.1 and self.scheduler.running:
                self.scheduler.preempt(preempt.choice(self.scheduler.running).request_id)
            plan = self.scheduler.schedule(float(step))
            result = self.worker.execute(plan)
            assert result.error is None
            self._note_proposals(plan, result)
            for update in self.scheduler.commit(result):
                assert update.error is None
                self.tokens[update.request_id] += [token.token_id for token in update.tokens]
                if update.reuse is not None:
                    self.cached[update.request_id] = update.reuse.num_cached_tokens
            assert self.scheduler.audit() == []
            assert self.worker.mapped_bytes() <= self.scheduler.cache.memory.committed_bytes
        raise AssertionError("no progress")

    def _note_proposals(self, plan: StepPlan, result: StepResult) -> None:
        for chunk, done in zip(plan.chunks, result.chunk_results, strict=True):
            if chunk.num_own_drafts:
                tokens = tuple(self.scheduler.requests[chunk.request_id].tokens)
                drafts = tuple(array("I", done.draft_tokens))
                self.proposed.append(Proposal(tokens, drafts, done.end - chunk.end, chunk.num_own_drafts))

    def converse(self, *, preempt: random.Random | None = None) -> None:
        vocab_size = self.model.vocab_size
        histories = {c: random_tokens(41, vocab_size, seed=1) for c in range(NUM_CONVERSATIONS)}
        for turn in range(3):
            requests = []
            for c, history in histories.items():
                # Prompts end at, before and behind boundaries.
                history += random_tokens(22 + (c + turn) % 3, vocab_size, seed=100 * turn + c)
                sampling = SamplingParams(
                    temperature=float(c % 2),
                    seed=c,
                    repetition_penalty=1.2 if c == 3 else 1.0,
                    frequency_penalty=0.3 if c == 2 else 0.0,
                    min_tokens=9 * (c == 1),
                    stop_token_ids=list(range(0, vocab_size, 40)) if c == 1 else [],
                )
                requests.append(Request(10 * turn + c, history, sampling, max_tokens=NUM_OUTPUT - c))
            self.run(requests, preempt)
            for c, history in histories.items():
                history += self.tokens[10 * turn + c]

    def records(self) -> dict[bytes, tuple[list[bytes], list[bytes] | None]]:
        """Chain key -> contents of every published page and state."""
        pools = self.worker.pools
        num_attention = len(self.scheduler.cache.attention)

        def content(pool: int, record: int) -> bytes:
            return b"".join(bytes(part) for part in pools.read_records(pool, [record]))

        return {
            key: (
                [content(pool, page) for pool, page in enumerate(node.pages)],
                None
                if node.states is None
                else [content(num_attention + pool, slot) for pool, slot in enumerate(node.states)],
            )
            for key, node in self.scheduler.cache.tree.index.items()
        }
