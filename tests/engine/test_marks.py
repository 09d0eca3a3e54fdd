"""Marks survive any cut, and stop strings see the plain text."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st
from tests.engine.tiny_tokenizer import SETTINGS, spec

from milepost.core.plan import SampledToken, SamplingParams
from milepost.core.request import RequestUpdate
from milepost.engine.answer import Answer
from milepost.engine.marks import MarkTable
from milepost.engine.messages import GenerationRequest
from milepost.engine.tokenizer import Tokenizer

TOKENIZER = Tokenizer(spec(), SETTINGS)
TABLE = MarkTable(TOKENIZER, ("<think>", "</think>", "[PAD]", "<nothing>"))
CONTROL = [token.token_id for token in TOKENIZER.control_tokens]
tokens = st.lists(st.one_of(st.sampled_from(CONTROL), st.integers(0, TOKENIZER.vocab_size - 1)), max_size=20)


def run(ids: list[int], steps: list[int], stops: list[str], skip: bool) -> tuple[str, str]:
    """Plain and marked text of an answer."""
    request = GenerationRequest(
        array("I", [1]), SamplingParams(), 99, stops, skip_special_tokens=skip, marks=TABLE.char_by_id
    )
    answer = Answer(1, request, lambda event: None, TOKENIZER, 0.0)
    plain = marked = ""
    position = 0
    for step in [*steps, len(ids)]:
        part = [SampledToken(token_id) for token_id in ids[position : position + step]]
        position += len(part)
        delta = answer.advance(RequestUpdate(1, part, "length" if position == len(ids) else None))
        plain, marked = plain + delta.text, marked + delta.marked
        if delta.finish_reason is not None:
            return plain, marked
    raise AssertionError("unreachable")


@given(tokens, st.lists(st.integers(1, 3), max_size=20), st.booleans())
def test_marks_stand_where_the_tokens_were(ids: list[int], steps: list[int], skip: bool) -> None:
    plain, marked = run(ids, steps, [], skip)
    assert plain == TOKENIZER.decode(ids, skip_special_tokens=skip)
    chars = [TABLE.char_by_id[token_id] for token_id in ids if token_id in TABLE.char_by_id]
    assert [char for char in marked if char in TABLE.char_by_id.values()] == chars
    shown = TABLE.restore(marked)
    assert shown == plain or "[PAD]" in shown  # special: a mark, but no text
    if not any(TOKENIZER.is_special(token_id) for token_id in ids):
        assert marked == TABLE.text_of(ids)


@given(
    tokens,
    st.lists(st.integers(1, 3), max_size=20),
    st.lists(st.sampled_from(["think", "<think>", "k>a", ">", "a<", "e", "</think"]), max_size=2),
)
def test_stop_strings_see_plain_text(ids: list[int], steps: list[int], stops: list[str]) -> None:
    plain, marked = run(ids, steps, stops, skip=False)
    assert TABLE.restore(marked) == plain
    text = TOKENIZER.decode(ids)
    if not any(stop in text for stop in stops):
        assert plain == text
        chars = [TABLE.char_by_id[token_id] for token_id in ids if token_id in TABLE.char_by_id]
        assert [char for char in marked if char in TABLE.char_by_id.values()] == chars
    else:
        assert not any(stop in plain for stop in stops)
        assert text.startswith(plain)


def test_a_mark_that_is_held_in_the_middle_is_still_one() -> None:
    """The stop string may begin inside of it."""
    ids = [*TOKENIZER.encode_with_control("a<think>b"), *TOKENIZER.encode("c")]
    for step in (1, 2, 99):
        plain, marked = run(ids, [step] * 9, ["k>x", "k>bd"], skip=False)
        assert (plain, marked) == ("a<think>bc", f"a{TABLE.needle('<think>')}bc")
    plain, marked = run(ids, [1] * 9, ["k>b"], skip=False)
    assert (plain, marked) == ("a<thin", "a<thin")


def test_what_is_no_control_token_is_looked_for_as_text() -> None:
    assert TABLE.needle("<nothing>") == "<nothing>"
    assert TABLE.token_id("<nothing>") is None
    assert len(TABLE.needle("<think>")) == 1
    assert TABLE.restore(TABLE.needle("<think>")) == "<think>"
