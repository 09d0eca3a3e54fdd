"""Deltas joined are the whole text, however the tokens arrive."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.engine.tiny_tokenizer import SETTINGS, spec

from milepost.engine.detokenizer import IncrementalDetokenizer
from milepost.engine.tokenizer import Tokenizer

TOKENIZER = Tokenizer(spec(), SETTINGS)
# Single bytes are over-represented so that broken and incomplete code points are common.
BYTE_IDS = [i for i in range(TOKENIZER.vocab_size) if len(TOKENIZER.token_bytes(i)) == 1]
any_ids = st.lists(
    st.one_of(st.sampled_from(BYTE_IDS), st.integers(0, TOKENIZER.vocab_size + 3)), max_size=30
)


@given(any_ids, st.booleans(), st.data())
def test_deltas_equal_the_full_text(ids: list[int], skip: bool, data: st.DataObject) -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER, skip_special_tokens=skip)
    text, position = "", 0
    while position < len(ids):
        step = data.draw(st.integers(1, 4))
        delta = detokenizer.feed(ids[position : position + step])
        text, position = text + delta, position + step
        # What was sent is final: the full text of the bytes so far begins with it.
        assert TOKENIZER.decode(ids[:position], skip_special_tokens=skip).startswith(text)
    text += detokenizer.finish()
    assert text == TOKENIZER.decode(ids, skip_special_tokens=skip)
    assert detokenizer.finish() == ""


@given(st.text(max_size=20))
def test_valid_text_never_shows_a_replacement_character(text: str) -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    ids = [
        BYTE_IDS[[TOKENIZER.token_bytes(i) for i in BYTE_IDS].index(bytes([byte]))] for byte in text.encode()
    ]
    deltas = [detokenizer.feed([token_id]) for token_id in ids]
    assert "".join(deltas) == text
    assert detokenizer.finish() == ""


def test_an_incomplete_code_point_is_held_back_and_flushed_once() -> None:
    by_byte = {TOKENIZER.token_bytes(i): i for i in BYTE_IDS}
    smile = "\U0001f600".encode()
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    assert [detokenizer.feed([by_byte[smile[i : i + 1]]]) for i in range(3)] == ["", "", ""]
    assert detokenizer.finish() == "\ufffd"
