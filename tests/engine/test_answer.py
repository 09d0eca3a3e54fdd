"""One answer from random tokens: what is sent does not depend on how the tokens arrive."""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from tests.engine.tiny_tokenizer import SETTINGS, spec

from milepost.core.plan import SampledToken, SamplingParams
from milepost.core.request import RequestUpdate
from milepost.engine.answer import Answer
from milepost.engine.messages import GenerationRequest, OutputDelta
from milepost.engine.tokenizer import Tokenizer

TOKENIZER = Tokenizer(spec(), SETTINGS)
BYTE_IDS = {TOKENIZER.token_bytes(i): i for i in range(256 + 8) if len(TOKENIZER.token_bytes(i)) == 1}
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
"""One picture of five code points."""


def byte_ids(text: str) -> list[int]:
    return [BYTE_IDS[bytes([byte])] for byte in text.encode()]


pieces = st.one_of(
    st.sampled_from(["a", "b", "ab", FAMILY, "\u00e9", "\U0001f600"]).map(byte_ids),
    st.integers(0, TOKENIZER.vocab_size + 3).map(lambda token_id: [token_id]),
    st.sampled_from([byte_ids("\U0001f600")[:3], byte_ids("\u00e9")[:1], byte_ids("\u00e9")[1:]]),
)
any_tokens = st.lists(pieces, max_size=12).map(lambda parts: [i for part in parts for i in part])
stop_strings = st.lists(st.sampled_from(["a", "ab", "ba", "\u200d", "\ufffd", "e", "\u00e9b"]), max_size=3)


def definition(
    tokens: Sequence[int], stops: Sequence[str], min_tokens: int, include: bool
) -> tuple[str, str | None]:
    """The text of all tokens, cut at the first stop string that is complete behind `min_tokens`."""
    text = TOKENIZER.decode(tokens, skip_special_tokens=True)
    begin = len(text) if len(tokens) <= min_tokens else len(complete(tokens[:min_tokens]))
    for end in range(begin + 1, len(text) + 1):
        hits = [stop for stop in stops if text[begin:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def complete(tokens: Sequence[int]) -> str:
    """Text of tokens without the code point that is not finished."""
    data = b"".join(TOKENIZER.token_bytes(i) for i in tokens if not TOKENIZER.is_special(i))
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(data)


def run(
    tokens: Sequence[int], steps: Sequence[int], stops: Sequence[str], min_tokens: int, include: bool
) -> list[OutputDelta]:
    sampling = SamplingParams(min_tokens=min_tokens)
    request = GenerationRequest(array("I", [1]), sampling, 999, stops, include_stop_str_in_output=include)
    answer = Answer(1, request, lambda event: None, TOKENIZER, 0.0)
    deltas: list[OutputDelta] = []
    position = 0
    for step in [*steps, len(tokens)]:
        part = [SampledToken(i) for i in tokens[position : position + step]]
        position += len(part)
        is_last = position == len(tokens)
        deltas.append(answer.advance(RequestUpdate(1, part, "length" if is_last else None)))
        if deltas[-1].finish_reason is not None:
            break
    return deltas


@given(any_tokens, st.lists(st.integers(1, 4), max_size=40), stop_strings, st.integers(0, 4), st.booleans())
def test_deltas_joined_are_the_answer(
    tokens: list[int], steps: list[int], stops: list[str], min_tokens: int, include: bool
) -> None:
    deltas = run(tokens, steps, stops, min_tokens, include)
    text, stop = definition(tokens, stops, min_tokens, include)
    assert "".join(delta.text for delta in deltas) == text
    assert deltas[-1].stop_reason == stop
    assert deltas[-1].finish_reason == ("length" if stop is None else "stop")


@given(any_tokens, st.lists(st.integers(1, 4), max_size=40), stop_strings)
def test_every_token_knows_where_its_text_begins(
    tokens: list[int], steps: list[int], stops: list[str]
) -> None:
    deltas = run(tokens, steps, stops, 0, False)
    kept = [token_id for delta in deltas for token_id in delta.token_ids]
    offsets = [offset for delta in deltas for offset in delta.text_offsets]
    assert kept == tokens[: len(kept)]
    assert offsets == [len(complete(tokens[:number])) for number in range(len(kept))]


def test_a_picture_of_several_code_points_arrives_code_point_by_code_point() -> None:
    deltas = run(byte_ids(FAMILY), [1] * 99, (), 0, False)
    assert "".join(delta.text for delta in deltas) == FAMILY
    assert [delta.text for delta in deltas if delta.text] == list(FAMILY)


def test_an_incomplete_code_point_before_a_turn_marker_is_flushed_once() -> None:
    tokens = [*byte_ids("a"), *byte_ids("\U0001f600")[:3]]
    (*_, last) = run(tokens, [1] * 9, (), 0, False)
    assert last.text == "\ufffd"
