"""What drafts for the embedded model, its own module and drafters beside it: the same answers, and guesses
that are right as often as the docs say, cold and behind a hit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.engine.replicas import Answered, Replica, replica  # noqa: E402
from tests.support.recall import RecallCase, RecallCases  # noqa: E402

from milepost.core.drafts import DraftPlanner  # noqa: E402
from milepost.engine.serving import EMBEDDED_MODEL  # noqa: E402
from milepost.engine.tokenizer import Tokenizer  # noqa: E402
from milepost.models.dspark import BlockDrafter  # noqa: E402
from milepost.models.loading import LoadedModel, load_model  # noqa: E402

NUM_DRAFTS = 2
NUM_CASES = 8
DISTANCE = 120
FLOOR = 0.6
"""Share of guesses that must be right; see the model card for what was measured."""
FILLER = Path(__file__).parents[1] / "data" / "the_tempest.txt"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(EMBEDDED_MODEL)


@pytest.fixture(scope="module")
def cases(tokenizer: Tokenizer) -> list[RecallCase]:
    made = RecallCases(
        tokenizer.encode_with_control,
        lambda ids: tokenizer.decode(list(ids)),
        FILLER.read_text(encoding="utf-8"),
    )
    return [made.make(seed, DISTANCE) for seed in range(NUM_CASES)]


DRAFTERS: dict[str, dict[str, Any]] = {
    "mtp": {},
    "eagle3": {"draft_method": "eagle3", "draft_model": "milepost-tiny/eagle3"},
    "dspark": {"draft_method": "dspark", "draft_model": "milepost-tiny/dspark"},
}


@pytest.fixture(scope="module", params=DRAFTERS)
def model(request: Any) -> LoadedModel:
    return load_model(EMBEDDED_MODEL, num_draft_tokens=NUM_DRAFTS, **DRAFTERS[request.param])


@pytest.fixture
def drafting(model: LoadedModel, tokenizer: Tokenizer) -> Iterator[Replica]:
    with replica(model, tokenizer, cache_bytes=64 << 20) as engine:
        engine.scheduler.drafts = DraftPlanner(None, NUM_DRAFTS)
        yield engine


@pytest.fixture(scope="module")
def plain(tokenizer: Tokenizer, cases: list[RecallCase]) -> list[list[Answered]]:
    """Answers of the same files without the module: cold ones, then on hits."""
    with replica(load_model(EMBEDDED_MODEL), tokenizer, cache_bytes=64 << 20) as engine:
        return [ask_all(engine, cases) for _ in range(2)]


def ask_all(engine: Replica, cases: list[RecallCase]) -> list[Answered]:
    return [engine.ask(list(case.prompt_ids), len(case.answer_ids)) for case in cases]


def accepted(engine: Replica) -> tuple[int, int, dict[int, int]]:
    """Guesses verified, those that were right, and the latter by position."""
    counters = engine.engine.fresh_stats().result().counters
    return (
        counters.num_draft_tokens,
        counters.num_accepted_draft_tokens,
        dict(counters.accepted_drafts_by_position),
    )


def test_answers_are_those_without_it_and_most_guesses_are_right(
    drafting: Replica, plain: list[list[Answered]], cases: list[RecallCase]
) -> None:
    cold = ask_all(drafting, cases)
    num_drafts, num_right, by_position = accepted(drafting)
    assert [answer.tokens for answer in cold] == [answer.tokens for answer in plain[0]]
    assert sum(a.tokens == list(c.answer_ids) for a, c in zip(cold, cases, strict=True)) >= NUM_CASES - 1
    assert num_right / num_drafts > FLOOR
    assert by_position[1] > 0, "nothing that was guessed from a guess was right"

    again = ask_all(drafting, cases)
    assert all(answer.reuse.num_cached_tokens > 0 for answer in again)
    assert [(a.tokens, a.reuse.num_cached_tokens) for a in again] == [
        (a.tokens, a.reuse.num_cached_tokens) for a in plain[1]
    ]
    _, _, in_all = accepted(drafting)
    assert in_all == {at: 2 * count for at, count in by_position.items()}, "a hit drafts as a cold run does"


def ignores_hidden_states(hidden: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(hidden)


def reads_the_position_before(hidden: torch.Tensor) -> torch.Tensor:
    return torch.cat([hidden[:1], hidden[:-1]])


@pytest.mark.parametrize("fault", [ignores_hidden_states, reads_the_position_before])
def test_a_broken_drafter_does_not_reach_the_floor(
    model: LoadedModel,
    drafting: Replica,
    plain: list[list[Answered]],
    cases: list[RecallCase],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    kind: Any = type(model.drafts)
    if kind is BlockDrafter:  # it keeps what it is given at once
        store = kind.store
        monkeypatch.setattr(kind, "store", lambda self, read, *where: store(self, fault(read), *where))
    else:
        taps = kind.taps
        monkeypatch.setattr(kind, "taps", lambda self, read: fault(taps(self, read)))
    answers = ask_all(drafting, cases)
    num_drafts, num_right, _ = accepted(drafting)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain[0]]
    assert num_drafts > 0 and num_right / num_drafts < FLOOR
