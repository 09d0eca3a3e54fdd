"""The recall cases mean what they say: a test built on a wrong case would prove nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support.recall import KINDS, RecallCase, RecallCases

TEXT = (Path(__file__).parents[1] / "data" / "the_tempest.txt").read_text(encoding="utf-8")
PIECES = re.compile(r"<\|\w+\|>|\[\w+\]|\w+|\s|.", re.DOTALL)


class WordEncoder:
    """One id per word, mark or blank: enough to count with, without a tokenizer package."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self.ids.setdefault(piece, len(self.ids)) for piece in PIECES.findall(text)]

    def decode(self, ids: Sequence[int]) -> str:
        pieces = list(self.ids)
        return "".join(pieces[i] for i in ids)


@pytest.fixture(scope="module")
def encoder() -> WordEncoder:
    return WordEncoder()


@pytest.fixture(scope="module")
def cases(encoder: WordEncoder) -> RecallCases:
    return RecallCases(encoder.encode, encoder.decode, TEXT)


def statement(encoder: WordEncoder, case: RecallCase) -> str:
    return encoder.decode(case.prefix_ids[case.fact_start : case.fact_end])


@pytest.mark.parametrize("distance", [80, 500, 4000])
def test_the_asked_fact_stands_once_at_the_stated_distance(
    encoder: WordEncoder, cases: RecallCases, distance: int
) -> None:
    for seed in range(20):
        case = cases.make(seed, distance)
        assert case.distance_tokens == distance
        assert statement(encoder, case) == f"\n{case.fact.stem}{case.fact.value}"
        prompt = encoder.decode(case.prompt_ids)
        assert prompt.count(case.fact.stem) == 1
        assert case.fact.question in prompt[-120:]
        assert encoder.decode(case.answer_ids) + "." == case.fact.answer


def test_the_statement_lies_inside_one_unit(cases: RecallCases) -> None:
    for match_unit in (32, 64):
        for seed in range(40):
            case = cases.make(seed, 200, match_unit=match_unit)
            assert case.fact_start % match_unit > 0
            assert case.fact_start // match_unit == (case.fact_end - 1) // match_unit


def test_same_arguments_same_case_other_seed_other_case(cases: RecallCases) -> None:
    assert cases.make(3, 300) == cases.make(3, 300)
    assert cases.make(3, 300).prompt_ids != cases.make(4, 300).prompt_ids


@pytest.mark.parametrize("kind", KINDS)
def test_kind_is_the_kind_of_the_asked_fact(cases: RecallCases, kind: str) -> None:
    assert {cases.make(seed, 300, kind=kind).fact.kind for seed in range(10)} == {kind}


def test_messages_hold_the_same_conversation(encoder: WordEncoder, cases: RecallCases) -> None:
    case = cases.make(5, 300)
    roles = [message["role"] for message in case.messages]
    assert roles == ["system", "user", "assistant", "user"]
    prompt = encoder.decode(case.prompt_ids)
    position = 0
    for message in case.messages:
        position = prompt.index(message["content"], position) + len(message["content"])


def test_a_restore_in_mid_answer_falls_on_a_boundary(cases: RecallCases) -> None:
    for seed in range(10):
        case = cases.make_for_answer_restore(seed, 100, match_unit=32, kind="home")
        assert (len(case.prompt_ids) + len(case.stem_ids)) % 32 == 1
        assert case.distance_tokens >= 100 and case.fact.kind == "home"


def test_impossible_cases_are_refused(cases: RecallCases) -> None:
    with pytest.raises(ValueError, match="distance_tokens is 5; it must be at least"):
        cases.make(0, 5)
    with pytest.raises(ValueError, match="does not fit a match_unit of 8"):
        cases.make(0, 300, match_unit=8)
    with pytest.raises(ValueError, match="filler_text has no lines"):
        RecallCases(lambda text: [0], lambda ids: "", "")
