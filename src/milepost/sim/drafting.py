"""Drafts in simulation: drafters with a known hit rate, and what verifying a draft leaves behind."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from random import Random

from milepost.core.drafts import DraftPlanner
from milepost.core.plan import COUPLED, GREEDY, PROBABILISTIC, ChunkPlan, StepPlan
from milepost.core.speculation import DraftLengths
from milepost.sim.model import PrefixTree, TrueSequence
from milepost.sim.step_rules import FingerprintError

SAMPLINGS = (COUPLED, GREEDY, PROBABILISTIC)


class ScriptedDrafter:
    """Knows how every request goes on and is wrong at a chosen rate. Implements `core.ports.Drafter`.

    Args:
        truth: request id -> its true sequence; KeyError = no drafts.
        rng: draws which drafts are wrong, and how many there are.
        error_rate: chance of each draft to be another token; 0 = perfect, 1 = adversarial.
        is_ragged: propose a random number of drafts, zero included, instead of as many as allowed.
        sampling: how plans must tell a worker to draft, see `ChunkPlan.draft_sampling`.
    """

    def __init__(
        self,
        truth: Callable[[int], TrueSequence],
        rng: Random,
        *,
        error_rate: float,
        vocab_size: int,
        is_ragged: bool = False,
        sampling: str = GREEDY,
    ) -> None:
        self.sampling = sampling
        self._truth = truth
        self._rng = rng
        self._error_rate = error_rate
        self._vocab_size = vocab_size
        self._is_ragged = is_ragged

    def propose(self, request_id: int, tokens: Sequence[int], max_drafts: int) -> Sequence[int]:
        rng = self._rng
        truth = self._truth(request_id)
        count = rng.randrange(max_drafts + 1) if self._is_ragged else max_drafts
        truth.ensure(len(tokens) + count)
        drafts = truth.tokens[len(tokens) : len(tokens) + count]
        for index, token in enumerate(drafts):
            if rng.random() < self._error_rate:
                drafts[index] = (token + 1 + rng.randrange(self._vocab_size - 1)) % self._vocab_size
        return drafts

    def forget(self, request_id: int) -> None:
        """Nothing is kept."""


def with_own_drafts(
    plan: StepPlan, drafter: ScriptedDrafter, stop_ids: Callable[[int], Container[int]]
) -> tuple[StepPlan, dict[int, bytes]]:
    """The plan as if the drafts that a worker is asked to make had been sent, and what was made for whom.

    Args:
        stop_ids: request id -> tokens that end it; no draft is one of them, and none lies behind one.

    Raises:
        FingerprintError: the plan asks for drafts of another kind than was configured.
    """
    made: dict[int, bytes] = {}
    chunks = list(plan.chunks)
    for number, chunk in enumerate(plan.chunks):
        if not chunk.num_own_drafts:
            continue
        if chunk.draft_sampling != drafter.sampling:
            raise FingerprintError(
                "drafts",
                f"request {chunk.request_id} is to be drafted for as {chunk.draft_sampling!r}, "
                f"configured is {drafter.sampling!r}",
            )
        stops = stop_ids(chunk.request_id)
        drafts = array("I", drafter.propose(chunk.request_id, range(chunk.end), chunk.num_own_drafts))
        drafts = drafts[: next((at for at, token in enumerate(drafts) if token in stops), len(drafts))]
        made[chunk.request_id] = drafts.tobytes()
        chunks[number] = replace(chunk)
        chunks[number].set_drafts(made[chunk.request_id])
    return replace(plan, chunks=chunks), made


def check_drafts(chunk: ChunkPlan, *, keeps_apart: bool = False) -> None:
    """Drafts follow a sampled token, and leave the state they start from alone: it is needed again."""
    if not chunk.num_drafts:
        return
    if not chunk.num_samples:
        raise FingerprintError("drafts", f"request {chunk.request_id} has drafts and samples nothing")
    shared = [a for a, b in zip(chunk.initial_slots, chunk.running_slots, strict=True) if a == b]
    if keeps_apart and chunk.starts_from_checkpoint:
        shared = chunk.running_slots  # the checkpoint is converted into them
    if shared:
        raise FingerprintError("drafts", f"request {chunk.request_id} verifies in place, slots {shared}")


def verify(tree: PrefixTree, truth: TrueSequence, chunk: ChunkPlan) -> tuple[int, list[int]]:
    """Number of accepted drafts, and the prefixes behind every row of the chunk, drafts included."""
    drafts = array("I", chunk.draft_tokens)
    truth.ensure(chunk.end + len(drafts) + 1)
    path = truth.path[chunk.start : chunk.end + 1]
    tree.extend(path, drafts)
    num_accepted = 0
    while num_accepted < len(drafts) and drafts[num_accepted] == truth.tokens[chunk.end + num_accepted]:
        num_accepted += 1
    return num_accepted, path[1:]


@dataclass(frozen=True, slots=True)
class DraftingConfig:
    """Speculation in a simulated world; see `ScriptedDrafter`.

    Attributes:
        num_draft_tokens: most drafts per request and step; 0 = no speculation.
        is_adaptive: fewer drafts where they do not pay (time stands still, so every row costs alike).
        is_own: the worker drafts, as with modules of a model, and not the scheduler's drafter.
        sampling: how it is told to, `coupled`, `greedy` or `probabilistic`. Plans carry it and nothing else
            in the core knows it, so that here it changes no draft: how often one is right is `error_rate`.
    """

    num_draft_tokens: int = 0
    error_rate: float = 0.0
    is_ragged: bool = False
    is_adaptive: bool = False
    seed: int = 0
    is_own: bool = False
    sampling: str = GREEDY

    def drafter(self, truth: Callable[[int], TrueSequence], vocab_size: int) -> ScriptedDrafter:
        """Who drafts in a world, wherever."""
        return ScriptedDrafter(
            truth,
            Random(self.seed),
            error_rate=self.error_rate,
            vocab_size=vocab_size,
            is_ragged=self.is_ragged,
            sampling=self.sampling,
        )

    def planner(self, drafter: ScriptedDrafter) -> DraftPlanner | None:
        """The planner of a world, or None."""
        if not self.num_draft_tokens:
            return None
        lengths = DraftLengths(is_own=self.is_own) if self.is_adaptive else None
        return DraftPlanner(None if self.is_own else drafter, self.num_draft_tokens, lengths, self.sampling)


def draw_drafting(rng: Random) -> DraftingConfig:
    """Perfect, useless and mediocre drafters of any length; none in four of ten worlds."""
    if rng.random() < 0.4:
        return DraftingConfig()
    drawn = DraftingConfig(
        num_draft_tokens=rng.randrange(1, 9),
        error_rate=rng.choice((0.0, 0.0, 0.1, 0.3, 0.6, 1.0)),
        is_ragged=rng.random() < 0.5,
        is_adaptive=rng.random() < 0.3,
        seed=rng.randrange(1 << 30),
    )
    return replace(drawn, is_own=drawn.seed % 5 < 2, sampling=SAMPLINGS[drawn.seed % 3])
