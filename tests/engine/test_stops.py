"""Stop strings do not see token borders, and nothing of them is sent."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from milepost.engine.stops import StopChecker


def expected(text: str, stop: Sequence[str], include: bool) -> tuple[str, str | None]:
    """Character by character: the definition."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stop if text[:end].endswith(s)]
        if hits:
            longest = max(hits, key=len)
            return (text[:end] if include else text[: end - len(longest)]), longest
    return text, None


def run(chunks: Sequence[str], stop: Sequence[str], include: bool) -> tuple[str, str | None]:
    checker = StopChecker(stop, include_stop=include)
    sent = ""
    final, _ = expected("".join(chunks), stop, include)
    for chunk in chunks:
        sent += checker.feed(chunk)
        assert final.startswith(sent), "something was sent that is not part of the answer"
        if checker.found is not None:
            return sent, checker.found
    return sent + checker.finish(), None


words = st.text(alphabet="ab\u00e9", min_size=1, max_size=4)


@given(
    st.lists(st.text(alphabet="ab\u00e9", max_size=5), max_size=8), st.lists(words, max_size=3), st.booleans()
)
def test_any_cut_gives_the_same_answer(chunks: list[str], stop: list[str], include: bool) -> None:
    assert run(chunks, stop, include) == expected("".join(chunks), stop, include)


def test_across_a_border_and_at_the_first_token() -> None:
    assert run(["Hello", " wo", "rld and more"], ["world"], False) == ("Hello ", "world")
    assert run(["world", "x"], ["world"], False) == ("", "world")
    assert run(["world", "x"], ["world"], True) == ("world", "world")


def test_a_stop_that_does_not_complete_is_sent_at_the_end() -> None:
    assert run(["see you at wor"], ["world"], False) == ("see you at wor", None)


def test_text_before_min_tokens_takes_no_part() -> None:
    checker = StopChecker(["ab"])
    assert checker.feed("a") == ""
    assert checker.feed("ba", may_stop=False) == "aba"
    assert checker.feed("b") == "b"
    assert checker.found is None
    assert checker.feed("ab") == ""
    assert checker.found == "ab"
    assert checker.feed("late") == ""
