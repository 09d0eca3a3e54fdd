"""`history` for every shape of template: the deepest boundary that the next turn shares is kept."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.engines import Bench, running_engine
from tests.engine.template_shapes import SHAPES
from tests.engine.tiny_tokenizer import SETTINGS, merging_spec, spec

from milepost.core.chunking import prefill_wanted
from milepost.engine.chat import ChatRenderer, RenderedPrompt, common_prefix
from milepost.engine.template import ChatTemplates
from milepost.engine.tokenizer import Tokenizer

TOKENIZERS = {"words": Tokenizer(spec(), SETTINGS), "spaces": Tokenizer(merging_spec(), SETTINGS)}
RENDERERS = {
    (name, kind): ChatRenderer(tokenizer, ChatTemplates({"default": source}, tokenizer.named_tokens))
    for name, source in SHAPES.items()
    for kind, tokenizer in TOKENIZERS.items()
}
WITH_TOOLS = ("kimi", "raw_chatml", "headers", "thinking", "reasoning", "tools_last")
WITH_SYSTEM = tuple(name for name in SHAPES if name != "strict")
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"the {name}", "parameters": {}}}
    for name in ("weather", "clock")
]

Message = dict[str, Any]

texts = st.one_of(
    st.text(alphabet="ab \n\t.,0é", max_size=10),
    st.sampled_from(
        [
            "the quick brown fox",
            "\nhello",
            "\n\n",
            " ",
            "",
            "7 of them",
            "Alpha",
            "  - list\n  - more\n",
            "日本",
        ]
    ),
)


def thought(draw: Any, text: str) -> str:
    return f"<think>{draw(texts)}</think>{text}" if draw(st.booleans()) else text


@st.composite
def conversations(draw: Any, name: str, *, tools: bool) -> list[Message]:
    """Ends with a user message or, with tools, with a result."""
    messages: list[Message] = []
    if name in WITH_SYSTEM and draw(st.booleans()):
        messages.append({"role": "system", "content": draw(texts)})
    for _ in range(draw(st.integers(0, 3))):
        messages.append({"role": "user", "content": draw(texts)})
        if tools and draw(st.booleans()):
            messages += tool_turn(draw)
        messages.append({"role": "assistant", "content": thought(draw, draw(texts))})
    messages.append({"role": "user", "content": draw(texts)})
    if tools and draw(st.booleans()):
        messages += tool_turn(draw)
    return messages


def tool_turn(draw: Any) -> list[Message]:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    said = draw(st.sampled_from(["", "I look it up.", "\nwait"]))
    return [
        {"role": "assistant", "content": thought(draw, said), "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": draw(texts)},
    ]


@st.composite
def next_turns(draw: Any, name: str, messages: list[Message], *, tools: bool) -> list[Message]:
    """The conversation one turn on: an answer and a question, or a call and its result."""
    if tools and draw(st.booleans()):
        return [*messages, *tool_turn(draw)]
    answer = {"role": "assistant", "content": thought(draw, draw(texts))}
    return [*messages, answer, {"role": "user", "content": draw(texts)}]


def kept(prompt: RenderedPrompt, match_unit: int) -> set[int]:
    """Where the core keeps states of this prompt."""
    return {position for position, _ in prefill_wanted(len(prompt.token_ids), match_unit, prompt.wanted)}


def shared_by(chat: ChatRenderer, prompt: RenderedPrompt, messages: list[Message], tools: Any = None) -> int:
    return common_prefix(prompt.token_ids, chat.render(messages, tools, find_boundaries=False).token_ids)


CASES = [
    (name, has_tools) for name in SHAPES for has_tools in (False, True) if not has_tools or name in WITH_TOOLS
]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(("name", "has_tools"), [c for c in CASES if c[0] != "reversed"])
@settings(max_examples=30)
@given(st.data())
def test_the_deepest_boundary_of_the_next_turn_is_kept(
    name: str, has_tools: bool, kind: str, data: Any
) -> None:
    """For match units of 1, 4 and 16 tokens, whatever was said and answered."""
    tools = TOOLS if has_tools else None
    chat = RENDERERS[name, kind]
    messages = data.draw(conversations(name, tools=has_tools))
    following = data.draw(next_turns(name, messages, tools=has_tools))
    prompt = chat.render(messages, tools)
    shared = shared_by(chat, prompt, following, tools)
    for match_unit in (1, 4, 16):
        boundary = shared // match_unit * match_unit
        assert boundary == 0 or boundary in kept(prompt, match_unit), (
            f"{shared} of {len(prompt.token_ids)} tokens are shared, unit {match_unit}: {prompt.wanted}"
        )


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(("name", "has_tools"), [c for c in CASES if c[0] not in ("opened", "dated_end")])
@settings(max_examples=15)
@given(st.data())
def test_the_next_turn_shares_the_lowest_history_position(
    name: str, has_tools: bool, kind: str, data: Any
) -> None:
    """Nothing is promised that a next turn does not have, however the answer begins."""
    chat = RENDERERS[name, kind]
    tools = TOOLS if has_tools else None
    messages = data.draw(conversations(name, tools=has_tools))
    prompt = chat.render(messages, tools)
    positions = [position for position, reason in prompt.wanted if reason == "history"]
    following = data.draw(next_turns(name, messages, tools=has_tools))
    assert not positions or min(positions) <= shared_by(chat, prompt, following, tools)


def test_answers_that_merge_with_the_header_have_a_place_of_their_own() -> None:
    """`assistant\\n` and an answer that starts with a line break: one token fewer is shared."""
    chat = RENDERERS["opened", "spaces"]
    messages = [user("a question")]
    prompt = chat.render(messages)
    usual, merged = (
        shared_by(chat, prompt, [*messages, {"role": "assistant", "content": text}, user("next")])
        for text in ("plain", "\n\nbroken")
    )
    assert usual == merged + 1 < len(prompt.token_ids)
    assert [position for position, reason in prompt.wanted if reason == "history"] == [merged, usual]


def test_a_conversation_that_ends_with_an_answer() -> None:
    """Nobody answers an answer: the next turn is the user's. A strict template would refuse anything else."""
    for name in ("strict", "folded", "kimi", "chatml"):
        chat = RENDERERS[name, "words"]
        messages = [user("a question"), {"role": "assistant", "content": "an answer"}]
        prompt = chat.render(messages, add_generation_prompt=False)
        (position,) = {position for position, reason in prompt.wanted if reason == "history"}
        assert position == shared_by(chat, prompt, [*messages, user("next")]) == len(prompt.token_ids)


@pytest.mark.parametrize("name", ["thinking", "opened", "reasoning"])
def test_what_is_stripped_later_ends_the_history_of_a_next_user_turn(name: str) -> None:
    """In a run of tool calls thoughts are kept; the next user turn drops them, from the first one on."""
    chat = RENDERERS[name, "words"]
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        user("question"),
        {"role": "assistant", "content": "<think>long thought about it</think>", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "name": "weather", "content": "sun"},
    ]
    prompt = chat.render(messages, TOOLS)
    positions = [position for position, reason in prompt.wanted if reason == "history"]
    by_user = shared_by(chat, prompt, [*messages, {"role": "assistant", "content": "x"}, user("y")], TOOLS)
    assert by_user in positions
    if name != "opened":  # it drops them at once
        result = {"role": "tool", "tool_call_id": "c", "name": "weather", "content": "rain"}
        again = [*messages, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
        assert shared_by(chat, prompt, again, TOOLS) in positions
        assert max(positions) > by_user, "a next result shares more than a next user turn"


def test_a_date_in_the_system_block_costs_nothing_within_a_day() -> None:
    chat = RENDERERS["headers", "words"]
    messages = [user("a question")]
    prompt = chat.render(messages, variables={"date_string": "26 Jul 2024"})
    next_day = chat.render(messages, variables={"date_string": "27 Jul 2024"})
    diverged = common_prefix(prompt.token_ids, next_day.token_ids)
    assert 0 < diverged < len(prompt.token_ids)
    turn = [*messages, {"role": "assistant", "content": "x"}, user("y")]
    other = chat.render(turn, variables={"date_string": "26 Jul 2024"})
    shared = common_prefix(prompt.token_ids, other.token_ids)
    assert (shared, "history") in prompt.wanted and shared > diverged


# ---------------------------------------------------------------- through the engine


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def ask(
    bench: Bench, chat: ChatRenderer, messages: list[Message], max_tokens: int = 3, **options: Any
) -> Any:
    """Prompt, generated ids and reuse of one request."""
    prompt = chat.render(messages, options.pop("tools", None), variables=options.pop("variables", None))
    request = bench.request(prompt.token_ids.tolist(), max_tokens=max_tokens, wanted=prompt.wanted)
    _, deltas = bench.run(request)
    reuse = next(delta.reuse for delta in deltas if delta.reuse is not None)
    return prompt, [token_id for delta in deltas for token_id in delta.token_ids], reuse


QUESTION = "the quick brown fox jumps over the lazy dog and the dog sleeps in the sun " * 2


@pytest.mark.parametrize("name", ["thinking", "opened"])
@pytest.mark.parametrize("padding", range(16))
def test_b66_a_thought_that_is_stripped_costs_the_answer_only(name: str, padding: int) -> None:
    """2,000 + 500 thought + 50 answer of the report, scaled: the hit is where the thought began."""
    chat = RENDERERS[name, "words"]
    thought = "numbers 0 1 2 3 4 5 6 7 8 9 and text "
    with running_engine() as bench:
        messages = [user(QUESTION + "x" * padding + " {{" + thought + "</think>The sun.}}")]
        prompt, generated, _ = ask(bench, chat, messages, 60)
        assert thought in TOKENIZERS["words"].decode(generated)
        following = [*messages, {"role": "assistant", "content": "The sun."}, user("and then? {{x}}")]
        shared = common_prefix(prompt.token_ids, chat.render(following).token_ids)
        assert len(prompt.token_ids) - 3 <= shared < len(prompt.token_ids)
        _, _, reuse = ask(bench, chat, following)
        assert reuse.num_cached_tokens == shared // 16 * 16
        assert reuse.first_divergence == shared or shared % 16 == 0


def test_b66_a_thought_that_comes_back_costs_nothing() -> None:
    """The same client, sending the thought along in a run of tool calls, where this template keeps it."""
    chat = RENDERERS["thinking", "words"]
    with running_engine() as bench:
        messages = [user(QUESTION + "{{numbers 0 1 2</think>The sun.}}")]
        prompt, generated, _ = ask(bench, chat, messages, 60)
        said = "<think>" + TOKENIZERS["words"].decode(generated[:-1])
        following = [*messages, {"role": "assistant", "content": said}, {"role": "tool", "content": "{{x}}"}]
        shared = common_prefix(
            array("I", [*prompt.token_ids, *generated[:-1]]), chat.render(following).token_ids
        )
        assert shared > len(prompt.token_ids)
        _, _, reuse = ask(bench, chat, following)
        assert reuse.num_cached_tokens == shared // 16 * 16


FLAGGED = """\
{{- '<|im_system|>Reasoning effort: ' + (effort or 'low') + '<|im_end|>' -}}
{%- for message in messages -%}{{- '<|im_user|>' + message.content + '<|im_end|>' -}}{%- endfor -%}"""


@pytest.mark.parametrize("match_unit", [4, 16, 64])
def test_b67_a_flag_near_the_start_is_named(match_unit: int) -> None:
    """Everything is computed again, and the user sees why: the first token that differs."""
    tokenizer = TOKENIZERS["words"]
    chat = ChatRenderer(tokenizer, ChatTemplates({"default": FLAGGED}, tokenizer.named_tokens))
    messages = [user(QUESTION * 3)]
    with running_engine(match_unit=match_unit) as bench:
        low, _, _ = ask(bench, chat, messages, variables={"effort": "low"})
        high, _, reuse = ask(bench, chat, messages, variables={"effort": "high"})
        flag = common_prefix(low.token_ids, high.token_ids)
        assert 0 < flag < 20
        assert reuse.first_divergence == flag
        assert reuse.num_cached_tokens <= flag
        assert (reuse.reason == "cold") == (flag < match_unit)
        assert reuse.reason in ("cold", "no_state", "diverged")
        _, _, again = ask(bench, chat, messages, variables={"effort": "low"})
        assert again.reason == "hit"


def call_turn(arguments: Any) -> list[Message]:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        user(QUESTION),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "sun"},
    ]


@pytest.mark.parametrize("name", ["kimi", "raw_chatml", "headers", "thinking", "reasoning", "tools_last"])
def test_b68_the_order_of_arguments_is_the_models(name: str) -> None:
    """Echoed as text or as an object, they stand as the model wrote them; another order is told apart."""
    chat = RENDERERS[name, "words"]
    as_written = {"unit": "C", "city": "Rome", "at": [2, 1], "b": {"y": 1, "x": 2}}
    texts = {
        chat.render(call_turn(form)).token_ids.tobytes() for form in (as_written, json.dumps(as_written))
    }
    assert len(texts) == 1
    rendered = TOKENIZERS["words"].decode(array("I", texts.pop()))
    assert [rendered.index(f'"{key}"') for key in ("unit", "city", "at", "y", "x")] == sorted(
        rendered.index(f'"{key}"') for key in as_written.keys() - {"b"} | {"x", "y"}
    )
    with running_engine(match_unit=4) as bench:
        first, _, _ = ask(bench, chat, call_turn(as_written))
        assert ask(bench, chat, call_turn(json.dumps(as_written)))[2].reason == "hit"
        other, _, reuse = ask(bench, chat, call_turn(dict(sorted(as_written.items()))))
        differs = common_prefix(first.token_ids, other.token_ids)
        assert reuse.first_divergence == differs
        assert reuse.num_cached_tokens <= differs < len(first.token_ids)


@pytest.mark.parametrize("name", ["kimi", "headers", "thinking", "reasoning"])
def test_b68_another_order_in_a_schema_is_reported(name: str) -> None:
    chat = RENDERERS[name, "words"]
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "at": {"type": "integer"}}}
    tools, reordered = (
        [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
        for parameters in (schema, {"properties": schema["properties"], "type": "object"})
    )
    with running_engine(match_unit=4) as bench:
        first, _, _ = ask(bench, chat, [user(QUESTION)], tools=tools)
        other, _, reuse = ask(bench, chat, [user(QUESTION)], tools=reordered)
        assert reuse.first_divergence == common_prefix(first.token_ids, other.token_ids) > 0
        assert reuse.num_cached_tokens < len(first.token_ids) - 20
