"""Drafts for answers that follow a grammar: each row is masked as if the drafts before it stood, and the
grammar's state is what the committed tokens make it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.engines import Bench, running_engine
from tests.engine.tiny_tokenizer import SETTINGS, spec

pytest.importorskip("llguidance")

from milepost.core.drafts import DraftPlanner
from milepost.core.plan import ChunkDrafts, SamplingParams, StepDrafts, StepPlan
from milepost.core.request import DraftRecord
from milepost.core.speculation import FixedLength
from milepost.engine.constraints import is_allowed, packed_bits
from milepost.engine.messages import EngineError, GenerationRequest
from milepost.engine.structured import (
    GrammarCompiler,
    GuidedAnswer,
    choice_grammar,
    json_grammar,
    regex_grammar,
)
from milepost.engine.tokenizer import Tokenizer

TOKENIZER = Tokenizer(spec(), SETTINGS)
VOCAB_SIZE = TOKENIZER.vocab_size
COMPILER = GrammarCompiler(TOKENIZER, VOCAB_SIZE)
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
        "words": {"type": "array", "items": {"enum": ["fox", "dog"]}, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["n", "words", "ok"],
    "additionalProperties": False,
}
TEXT = '{"n": 12, "words": ["fox", "dog"], "ok": true}'


def masks_along(answer: GuidedAnswer, ids: Sequence[int]) -> list[bytes]:
    """What a copy of a fresh answer allows before each of these tokens, one at a time."""
    alone = answer.fresh()
    masks = []
    for position, token_id in enumerate(ids):
        masks.append(alone.allowed_tokens(position))
        alone.accept([token_id])
    return masks


@settings(max_examples=40)
@given(st.integers(0, 60), st.integers(0, 9), st.integers(0, 9), st.integers(0, 10_000))
def test_rows_behind_drafts_are_those_of_an_answer_that_has_them(
    num_known: int, num_drafts: int, wrong_at: int, seed: int
) -> None:
    ids = TOKENIZER.encode(TEXT)
    answer = COMPILER.compile(json_grammar(SCHEMA, "p"))
    expected = masks_along(answer, ids)
    num_known = min(num_known, len(ids) - 1)
    answer.accept(ids[:num_known])
    drafts = ids[num_known : num_known + num_drafts]
    is_wrong = wrong_at < len(drafts)
    if is_wrong:
        row = expected[num_known + wrong_at]
        excluded = [token for token in range(VOCAB_SIZE) if not is_allowed(row, token)]
        drafts[wrong_at] = Random(seed).choice(excluded)
    rows, ends_at_unfit = answer.allowed_rows(num_known, drafts)
    num_right = wrong_at if is_wrong else len(drafts)
    # The last token completes the answer: it is sampled, never verified.
    num_stay = min(num_right, len(ids) - 1 - num_known)
    assert rows == expected[num_known : num_known + num_stay + 1]
    assert ends_at_unfit == (is_wrong and num_stay == num_right)
    assert not answer.is_complete and answer.failure is None
    assert answer.allowed_rows(num_known, ()) == ([expected[num_known]], False)
    answer.accept(ids[num_known:])
    assert answer.is_complete


def test_drafts_may_end_a_thought() -> None:
    think_end = next(t.token_id for t in TOKENIZER.control_tokens if t.content == "</think>")
    answer = COMPILER.compile(choice_grammar(["fox", "dog"], "p"), after=(think_end,))
    thought = TOKENIZER.encode("hm")
    rows, unfit = answer.allowed_rows(0, [*thought, think_end, *TOKENIZER.encode("d")])
    free = packed_bits(VOCAB_SIZE, TOKENIZER.eos_token_ids)
    assert rows[: len(thought) + 1] == [free] * (len(thought) + 1)
    assert rows[len(thought) + 1] != free and len(rows) == len(thought) + 3 and not unfit
    rows, unfit = answer.allowed_rows(0, [think_end, *TOKENIZER.encode("cat")])
    assert len(rows) == 2 and unfit
    assert answer.allowed_rows(0, ()) == ([free], False)


class Brittle:
    """A matcher that cannot go on behind a token, and does not recover from that."""

    def __init__(self, poison: int) -> None:
        self.poison = poison
        self.read: list[int] = []

    def deep_copy(self) -> Brittle:
        assert not self.read
        return Brittle(self.poison)

    def is_error(self) -> bool:
        return self.poison in self.read

    def get_error(self) -> str:
        return "too complex" if self.is_error() else ""

    def compute_bitmask(self) -> bytes:
        return b"\xff\xff\xff\xff"

    def consume_token(self, token_id: int) -> bool:
        self.read.append(token_id)
        return True

    def is_stopped(self) -> bool:
        return False

    def rollback(self, num_tokens: int) -> None:
        assert not self.is_error(), "it does not recover"
        del self.read[len(self.read) - num_tokens :]


def test_a_failure_where_drafts_lead_is_none_of_the_answer() -> None:
    answer = GuidedAnswer(Brittle(9), (), packed_bits(32))
    answer.accept([1, 2])
    rows, unfit = answer.allowed_rows(2, [3, 9, 4])
    assert len(rows) == 2 and not unfit
    assert answer.failure is None
    assert answer.allowed_rows(2, [3])[0] == rows[:2]
    answer.accept([9])
    assert answer.allowed_rows(3, [4])[0] == [b""]
    assert answer.failure == "too complex"


# -- in the loop -----------------------------------------------------------------------------------


class Known:
    """Drafts what an answer is known to be, with other tokens here and there; for one request at a time."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int], error_rate: float) -> None:
        self._num_prompt_tokens = len(prompt)
        self._answer = list(answer)
        self._error_rate = error_rate
        self._rng = Random(3)

    def __call__(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        done = len(tokens) - self._num_prompt_tokens
        return [
            self._rng.randrange(VOCAB_SIZE) if self._rng.random() < self._error_rate else token
            for token in self._answer[done : done + max_drafts]
        ]

    def propose(self, request_id: int, tokens: Sequence[int], max_drafts: int) -> list[int]:
        return self(tokens, max_drafts)

    def forget(self, request_id: int) -> None:
        pass


def guided(bench: Bench, seed: int, grammar: Any = None) -> GenerationRequest:
    compiler = GrammarCompiler(bench.tokenizer, bench.worker.vocab_size)
    sampling = SamplingParams(temperature=1.0, seed=seed, frequency_penalty=0.2)
    sampling.stop_token_ids = list(bench.tokenizer.eos_token_ids)
    prompt = array("I", bench.tokenizer.encode(f"question {seed}"))
    constraint = compiler.compile(grammar or json_grammar(SCHEMA, "p"))
    return GenerationRequest(prompt, sampling, 200, constraint=constraint)


@contextmanager
def drafting(known: Known, *, own: bool, num_drafts: int = 4) -> Iterator[Bench]:
    with running_engine() as bench:
        bench.scheduler.drafts = DraftPlanner(None if own else known, num_drafts)
        bench.worker.drafter = known
        yield bench


def answered(bench: Bench, request: GenerationRequest) -> tuple[str, list[int], str | None]:
    text, deltas = bench.run(request)
    return text, [token for delta in deltas for token in delta.token_ids], deltas[-1].finish_reason


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("error_rate", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_answers_do_not_depend_on_drafts(seed: int, error_rate: float, own: bool) -> None:
    with running_engine() as bench:
        request = guided(bench, seed)
        expected = answered(bench, request)
        cached = bench.run(GenerationRequest(request.prompt_token_ids + array("I", expected[1]),
                                             SamplingParams(temperature=0.0), 1))[1][0].reuse  # fmt: skip
    with drafting(Known(request.prompt_token_ids, expected[1], error_rate), own=own) as bench:
        assert answered(bench, guided(bench, seed)) == expected
        counters = bench.engine.fresh_stats().result(10).counters
        log = bench.worker.draft_log
        assert counters.num_draft_tokens == sum(len(drafts) for drafts, _ in log)
        assert counters.num_accepted_draft_tokens == sum(count for _, count in log)
        if error_rate == 0.0:
            assert counters.num_accepted_draft_tokens == counters.num_draft_tokens > len(expected[1]) // 2
        assert (bench.worker.num_drafted_first > 0) == own
        again = bench.run(GenerationRequest(request.prompt_token_ids + array("I", expected[1]),
                                            SamplingParams(temperature=0.0), 1))[1][0].reuse  # fmt: skip
        assert cached is not None and again is not None
        assert again.num_cached_tokens == cached.num_cached_tokens


@pytest.mark.parametrize("own", [False, True])
def test_a_draft_that_the_grammar_excludes_is_not_verified_and_counts_as_wrong(own: bool) -> None:
    learned: list[tuple[int, int]] = []

    class Watched(FixedLength):
        def learn(self, record: DraftRecord, num_drafts: int, num_accepted: int) -> None:
            learned.append((num_drafts, num_accepted))

    def only_digits(known: Known, letter: int) -> Callable[[Sequence[int], int], list[int]]:
        return lambda tokens, most: [letter] * most

    letter = TOKENIZER.encode("q")[0]
    known = Known([], [], 0.0)
    known.propose = lambda request_id, tokens, most: [letter] * most  # type: ignore[method-assign]
    with drafting(known, own=own) as bench:
        bench.worker.drafter = only_digits(known, letter)
        bench.scheduler.drafts = DraftPlanner(None if own else known, 4, Watched())
        text, _, _ = answered(bench, guided(bench, 1, regex_grammar("[0-9]{12}", "p")))
        assert len(text) == 12 and text.isdigit()
        assert bench.worker.draft_log == []
        assert learned and set(learned) == {(1, 0)}
        assert bench.engine.fresh_stats().result(10).counters.num_draft_tokens == 0


def test_others_in_the_step_keep_their_own_drafts() -> None:
    with running_engine() as bench:
        free = bench.request("{{bytes:the quick brown fox}}", max_tokens=40)
        plain = answered(bench, free)
    with drafting(Known(free.prompt_token_ids, plain[1], 0.0), own=True) as bench:
        bench.worker.gate.clear()
        queues = [bench.submit(request)[1] for request in (guided(bench, 1), free)]
        bench.worker.gate.set()
        from tests.engine.engines import collect

        texts = [collect(events, timeout=60)[0] for events in queues]
        assert texts[1] == plain[0]
        assert any(count == 4 for _, count in bench.worker.draft_log)


def test_a_worker_that_drafts_too_much_fails_the_step_alone() -> None:
    with drafting(Known([], [], 0.0), own=True) as bench:

        def too_many(plan: StepPlan) -> StepDrafts:
            chunks = [ChunkDrafts(c.request_id, array("I", [1] * 5).tobytes()) for c in plan.chunks]
            return StepDrafts(plan.step_id, chunks, 0.0)

        honest, bench.worker.draft = bench.worker.draft, too_many  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="drafted 20 bytes of tokens, asked for were at most 4 tokens"):
            bench.run(guided(bench, 1))
        bench.worker.draft = honest  # type: ignore[method-assign]
        assert bench.run(guided(bench, 1, choice_grammar(["fox"], "p")))[0] == "fox"
