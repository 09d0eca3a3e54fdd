"""Block drafters that are mostly right: passes that accept whole blocks, at every offset from a boundary,
behind hits and after preemptions, leave the answers and records of a run without guesses."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.block_checkpoints import load_pair, method_of, write_pair
from tests.support.conversations import UNIT, Engine
from tests.support.driver import random_tokens
from tests.support.recorded_rows import forget_accepted

from milepost.core.drafts import DraftPlanner
from milepost.core.plan import COUPLED, SamplingParams
from milepost.core.request import Request
from milepost.models.dflash import BlockLane
from milepost.models.dspark import BlockDrafter
from milepost.models.loading import LoadedModel
from milepost.runner.block_drafting import BlockRunner

NUM_DRAFTS = 4
"""As many as a DFlash block of five rows has."""
NUM_PROMPTS = UNIT + 1
NUM_OUTPUT = 40
FOLLOW_UP = 1000
"""First request id of those that go on from an answer."""
CONTEXT = 0.01
FLOOR = 0.75
CERTAIN = 1e4
"""Added to a logit, leaves nothing to chance or to noise."""


def request(number: int, tokens: Sequence[int], max_tokens: int) -> Request:
    """Every second one is sampled, with its own seed."""
    sampling = SamplingParams(temperature=float(number % 2), seed=number)
    return Request(number, list(tokens), sampling, max_tokens=max_tokens)


class Often(random.Random):
    """Preempts in eight of ten steps; an `Engine` does in one of ten."""

    def random(self) -> float:
        return super().random() / 8


@dataclass
class Texts:
    """What requests read and wrote, by id."""

    texts: dict[int, list[int]] = field(default_factory=dict)

    def following(self, lane: BlockLane, count: int) -> list[int]:
        """Tokens behind the newest one in a text that has it at its place; empty if there is none."""
        for text in self.texts.values():
            if lane.position < len(text) and text[lane.position] == lane.token:
                return text[lane.position + 1 :][:count]
        return []


@contextmanager
def copying(known: Texts) -> Iterator[None]:
    """Block drafters whose head is certain of a known text. All else of them is computed as always."""
    run, base_logits = BlockDrafter.run, BlockDrafter.base_logits
    lanes: list[BlockLane] = []

    def noted(self: BlockDrafter, blocks: Sequence[BlockLane], cache: Any) -> torch.Tensor:
        lanes[:] = blocks
        return run(self, blocks, cache)

    def certain(self: BlockDrafter, rows: torch.Tensor) -> torch.Tensor:
        logits = base_logits(self, rows).clone()
        for number, lane in enumerate(lanes):
            for place, token in enumerate(known.following(lane, logits.shape[1])):
                logits[number, place, token] += CERTAIN
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockDrafter, "run", noted)
        patch.setattr(BlockDrafter, "base_logits", certain)
        yield


def play(engine: Engine, *, preempt: random.Random | None = None) -> Texts:
    """Prompts of all lengths from a boundary to the next; then their answers, cut at another offset each,
    are gone on with, on hits."""
    vocab_size = engine.model.vocab_size
    prompts = [random_tokens(UNIT + n, vocab_size, seed=n) for n in range(NUM_PROMPTS)]
    engine.run([request(n, prompt, NUM_OUTPUT) for n, prompt in enumerate(prompts)], preempt)
    done = Texts({n: prompt + engine.tokens[n] for n, prompt in enumerate(prompts)})
    cuts = [text[: 2 * UNIT + n] for n, text in done.texts.items()]
    engine.run([request(FOLLOW_UP + n, cut, NUM_OUTPUT // 2) for n, cut in enumerate(cuts)], preempt)
    for n, cut in enumerate(cuts):
        done.texts[FOLLOW_UP + n] = cut + engine.tokens[FOLLOW_UP + n]
    return done


def rows_around_boundaries(engine: Engine) -> set[tuple[int, int]]:
    """Of passes whose guesses were all right: rows up to a boundary they reached, and rows behind it."""
    seen = set()
    for made in engine.proposed:
        if made.num_accepted == NUM_DRAFTS:
            start = len(made.tokens) - 1  # of the newest token, which the pass processes
            end = start + 1 + NUM_DRAFTS
            seen |= {(at - start, end - at) for at in range(start + 1, end + 1) if at % UNIT == 0}
    return seen


@dataclass
class Case:
    """A decoder with a block drafter, what it answers without guesses, and who is certain of what."""

    model: LoadedModel
    plain: Engine
    texts: Texts
    copies: bool


CASES = [
    ("kimi_linear", "dspark", False),
    ("qwen3_5", "dflash", True),
    ("kimi_k3", "dspark_mla", True),
    pytest.param(("qwen3_5", "dspark", False), marks=pytest.mark.slow),
    pytest.param(("qwen3_next", "dflash_speculators", True), marks=pytest.mark.slow),
    pytest.param(("kimi_linear", "dspark_speculators", True), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case[:2]))
def case(request: Any, tmp_path_factory: Any) -> Case:
    """Drafters with random weights are certain of a known text; the others know what follows on a token,
    and little else counts for their decoders."""
    family, layout, copies = request.param
    root: Path = tmp_path_factory.mktemp("pair")
    paths = write_pair(root, family, layout, context=None if copies else CONTEXT)
    model = load_pair(*paths, layout, NUM_DRAFTS)
    assert isinstance(model.drafts, BlockDrafter) and model.layout.draft_group is not None
    assert model.layout.draft_group.name == method_of(layout)
    plain = Engine(model)
    return Case(model, plain, play(plain), copies)


def drafted(case: Case, preempt: random.Random | None = None, **options: Any) -> Engine:
    engine = Engine(case.model, num_drafts=NUM_DRAFTS, **options)
    engine.scheduler.drafts = DraftPlanner(None, NUM_DRAFTS, draft_sampling=COUPLED)
    with copying(case.texts if case.copies else Texts()):
        play(engine, preempt=preempt)
    return engine


def accepted_share(engine: Engine) -> float:
    counters = engine.scheduler.cache.counters
    return counters.num_accepted_draft_tokens / counters.num_draft_tokens


def assert_same(engine: Engine, plain: Engine) -> None:
    """Answers, and what every published page and state holds."""
    assert engine.tokens == plain.tokens
    mine, theirs = engine.records(), plain.records()
    assert set(mine) == set(theirs)
    if engine.model.kernels.implementation == "native":
        for key, (pages, states) in mine.items():
            assert pages == theirs[key][0]
            assert states is None or theirs[key][1] is None or states == theirs[key][1]


def test_whole_blocks_accepted_at_every_offset_change_nothing(case: Case) -> None:
    engine = drafted(case)
    assert accepted_share(engine) > FLOOR
    around = {(before, 1 + NUM_DRAFTS - before) for before in range(1, NUM_DRAFTS + 2)}
    assert rows_around_boundaries(engine) == around
    assert_same(engine, case.plain)
    assert engine.cached == case.plain.cached
    # A cut of 2 * UNIT + n tokens hits at the last boundary before its last token.
    hits = [engine.cached[FOLLOW_UP + n] for n in range(NUM_PROMPTS)]
    assert hits == [UNIT, *[2 * UNIT] * (NUM_PROMPTS - 1)]


def test_nor_do_preemptions_between_them(case: Case) -> None:
    engine = drafted(case, Often(3))
    assert engine.scheduler.cache.counters.num_preemptions > 15
    assert accepted_share(engine) > FLOOR
    assert_same(engine, case.plain)


def test_nor_a_cache_that_is_off(case: Case) -> None:
    engine = drafted(case, is_caching=False)
    assert not any(engine.cached.values())
    assert accepted_share(engine) > FLOOR
    assert engine.tokens == case.plain.tokens


def test_accepted_rows_that_the_drafter_forgets_are_seen(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what its pages hold, and in no answer."""
    forget_accepted(BlockRunner, monkeypatch)
    engine = drafted(case)
    assert engine.tokens == case.plain.tokens
    mine, theirs = engine.records(), case.plain.records()
    assert any(mine[key][0][-1] != pages[-1] for key, (pages, _) in theirs.items() if key in mine)


def test_the_answers_hang_on_what_is_reused(case: Case) -> None:
    """Else states that were folded wrongly would go unseen: texts do not repeat themselves."""
    answers = {tuple(case.plain.tokens[n]) for n in range(NUM_PROMPTS)}
    assert len(answers) == NUM_PROMPTS
    assert max(len(set(answer)) for answer in answers) > NUM_OUTPUT // 4
