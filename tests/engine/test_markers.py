"""Positions of client markers: what another prompt with the same beginning really shares."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.test_chat import RENDERERS, TOOLS, assistant, renderer, system, user

from milepost.engine.chat import common_prefix
from milepost.engine.markers import MAX_MARKERS, Marker, MarkerList, checked_breakpoints
from milepost.errors import RequestError

WEATHER, CLOCK = (
    {"type": "function", "function": {"name": name, "description": f"tells the {name}", "parameters": {}}}
    for name in ("weather", "clock")
)
CONVERSATION = [
    system("You are a helpful assistant. A long document follows here."),
    user("the first question"),
    assistant("the first answer"),
    user("the second question"),
]


def marked(name: str, messages: list[dict[str, Any]], markers: list[Marker], tools: Any = None) -> list[int]:
    prompt = RENDERERS[name].render(messages, tools, markers=markers)
    return [position for position, reason in prompt.wanted if reason == "marker"]


def shared(
    name: str, messages: list[dict[str, Any]], other: list[dict[str, Any]], tools=None, others=None
) -> int:
    chat = RENDERERS[name]
    return common_prefix(
        chat.render(messages, tools, find_boundaries=False).token_ids,
        chat.render(other, others, find_boundaries=False).token_ids,
    )


@pytest.mark.parametrize("name", ["kimi", "chatml", "thinking"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_end_of_a_message(name: str, index: int) -> None:
    """Shared by every prompt that has the messages up to there; the header behind it included."""
    (position,) = marked(name, CONVERSATION, [Marker("message", index)])
    following = CONVERSATION[index + 1]
    other = [*CONVERSATION[: index + 1], {**following, "content": "Zebra"}]
    assert position == shared(name, CONVERSATION, other)


@pytest.mark.parametrize("name", ["kimi", "chatml", "thinking", "strict"])
def test_the_end_of_the_last_message_is_where_the_next_turn_goes_on(name: str) -> None:
    messages = CONVERSATION[1:]
    prompt = RENDERERS[name].render(messages, markers=[Marker("message", 2)])
    positions = {reason: position for position, reason in prompt.wanted}
    assert positions["marker"] == positions["history"], "one position may have both"
    assert prompt.wanted.count((positions["marker"], "history")) == 1


@pytest.mark.parametrize("name", ["kimi", "chatml", "thinking"])
@pytest.mark.parametrize(("index", "num_chars"), [(0, 29), (1, 9), (2, 10), (3, 19)])
def test_the_end_of_a_part(name: str, index: int, num_chars: int) -> None:
    (position,) = marked(name, CONVERSATION, [Marker("message", index, num_chars)])
    text = CONVERSATION[index]["content"]
    for tail in ("Zebra", " 99", "\nmore of it"):
        changed = {**CONVERSATION[index], "content": text[:num_chars] + tail}
        other = [*CONVERSATION[:index], changed, *CONVERSATION[index + 1 :]]
        assert position <= shared(name, CONVERSATION, other)
    longest = max(
        shared(
            name,
            CONVERSATION,
            [*CONVERSATION[:index], {**CONVERSATION[index], "content": text[:num_chars] + t}],
        )
        for t in ("Zebra", " 99")
    )
    assert position >= longest - 1, "no deeper place is shared by both"


@pytest.mark.parametrize("name", ["kimi", "thinking"])
def test_the_end_of_a_tool(name: str) -> None:
    tools = [WEATHER, CLOCK]
    first, last = marked(name, CONVERSATION, [Marker("tool", 0), Marker("tool", 1)], tools)
    assert first == shared(name, CONVERSATION, CONVERSATION, tools, [WEATHER])
    assert first < last <= shared(name, CONVERSATION, CONVERSATION, tools, [*tools, TOOLS[0]])
    other_turns = [CONVERSATION[0], user("something else")]
    assert last <= shared(name, CONVERSATION, other_turns, tools, tools)


def test_a_template_that_shows_no_tools_marks_what_it_shows() -> None:
    """No other declaration changes anything, so the whole conversation is shared."""
    (position,) = marked("chatml", CONVERSATION, [Marker("tool", 0)], [WEATHER])
    whole = RENDERERS["chatml"].render(CONVERSATION, add_generation_prompt=False, find_boundaries=False)
    assert position == len(whole.token_ids)


def test_markers_that_name_nothing_are_left_out() -> None:
    assert (
        marked("kimi", CONVERSATION, [Marker("message", 9), Marker("tool", 0), Marker("message", -1)]) == []
    )
    assert marked("reversed", CONVERSATION, [Marker("message", 1)]) == [1], "only the first header is shared"


def test_without_a_cache_nothing_is_looked_up() -> None:
    markers = [Marker("message", 0)]
    assert RENDERERS["kimi"].render(CONVERSATION, find_boundaries=False, markers=markers).wanted == []


def test_a_part_whose_text_spells_control_tokens() -> None:
    """Shielding makes strings longer; the marker counts characters of the caller's text."""
    text = "<|im_end|><|im_user|>user<think>" * 3
    messages = [user(text + "the rest of it")]
    (position,) = marked("kimi", messages, [Marker("message", 0, len(text))])
    assert position <= shared("kimi", messages, [user(text + "Zebra")])
    assert position >= shared("kimi", messages, [user(text + "99")]) - 1


def test_a_stripped_thought_is_no_place() -> None:
    """A marker inside an answer whose thinking the template drops ends where the rendering differs."""
    messages = [user("q"), assistant("<think>a long thought</think>done"), user("next")]
    (position,) = marked("thinking", messages, [Marker("message", 1, len("<think>a long"))])
    assert position <= len(RENDERERS["thinking"].render(messages).token_ids)
    (end,) = marked("thinking", messages, [Marker("message", 1)])
    assert end <= shared("thinking", messages, [*messages[:2], user("Zebra")])


@given(
    st.sampled_from(["kimi", "chatml", "thinking", "strict", "reversed"]),
    st.lists(st.text(alphabet="ab <>|_im\n{}é", max_size=12), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(0, 12))), max_size=4),
)
def test_any_marker_of_any_conversation_lies_inside(
    name: str, contents: list[str], places: list[tuple[int, int | None]]
) -> None:
    messages = [user(text) if i % 2 == 0 else assistant(text) for i, text in enumerate(contents)]
    markers = [Marker("message", index, num_chars) for index, num_chars in places]
    plain = RENDERERS[name].render(messages)
    prompt = RENDERERS[name].render(messages, markers=markers)
    assert prompt.token_ids == plain.token_ids, "markers change no prompt"
    assert [w for w in prompt.wanted if w[1] != "marker"] == plain.wanted
    assert all(0 < position <= len(prompt.token_ids) for position, _ in prompt.wanted)
    assert prompt.wanted == sorted(set(prompt.wanted))


def test_a_template_that_refuses_the_variant_gives_no_place() -> None:
    fussy = renderer(
        "{%- for m in messages -%}{%- if 'Alpha' in m.content -%}{{ raise_exception('no') }}{%- endif -%}"
        "<|im_user|>{{ m.content }}<|im_end|>{%- endfor -%}"
    )
    prompt = fussy.render(CONVERSATION, markers=[Marker("message", 1), Marker("message", 1, 4)])
    assert [w for w in prompt.wanted if w[1] == "marker"] in (
        [],
        [(w[0], "marker") for w in prompt.wanted][:1],
    )


# ---------------------------------------------------------------- checks


def test_times_to_live() -> None:
    found = MarkerList()
    found.add("f", None, Marker("message", 0))
    assert (found.markers, found.pin_seconds) == ([], 0.0)
    found.add("f", {"type": "ephemeral"}, Marker("message", 0))
    assert found.pin_seconds == 300.0
    found.add("f", {"type": "ephemeral", "ttl": "1h"}, Marker("message", 1))
    found.add("f", {"type": "ephemeral", "ttl": "5m"}, Marker("message", 2))
    assert found.pin_seconds == 3600.0, "the longest one"
    assert [marker.index for marker in found.markers] == [0, 1, 2]


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("ephemeral", "f"), (True, "f"), ([], "f"), ({}, "f.type"), ({"type": "persistent"}, "f.type"),
        ({"type": "ephemeral", "ttl": "2h"}, "f.ttl"), ({"type": "ephemeral", "ttl": 300}, "f.ttl"),
        ({"type": "ephemeral", "ttl": ["5m"]}, "f.ttl"), ({"type": ["ephemeral"]}, "f.type"),
    ],
)  # fmt: skip
def test_malformed_markers_name_the_field(value: object, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        MarkerList().add("f", value, Marker("message", 0))
    assert caught.value.param == param and caught.value.status == 400


def test_there_may_be_so_many() -> None:
    found = MarkerList()
    for index in range(MAX_MARKERS):
        found.add("f", {"type": "ephemeral"}, Marker("message", index))
    with pytest.raises(RequestError, match=f"at most {MAX_MARKERS}") as caught:
        found.add("messages[3].cache_control", {"type": "ephemeral"}, Marker("message", 3))
    assert caught.value.param == "messages[3].cache_control"


def test_breakpoints() -> None:
    assert checked_breakpoints(None, [5]) == checked_breakpoints([], [5, 5]) == []
    assert checked_breakpoints([5, 1, 5], [5]) == [(1, "marker"), (5, "marker")]
    for positions, lengths, text in (
        ([0], [5], "between 1 and 5"),
        ([3, 6], [5], "between 1 and 5"),
        ([-1], [5], "between 1 and 5"),
        ([1], [5, 5], "single prompt"),
        (list(range(1, MAX_MARKERS + 2)), [99], f"at most {MAX_MARKERS}"),
    ):
        with pytest.raises(RequestError, match=text) as caught:
            checked_breakpoints(positions, lengths)
        assert str(caught.value.param).startswith("prompt_cache_breakpoints")
