"""Messages to ids: no injection, and boundaries that later prompts really share."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.template_shapes import CHATML
from tests.engine.tiny_tokenizer import KIMI_TEMPLATE, NOT_SPECIAL, SETTINGS, SPECIAL, spec

from milepost.engine.chat import ChatRenderer, _Conversation, common_prefix
from milepost.engine.shield import Shield, new_mark
from milepost.engine.template import ChatTemplates
from milepost.engine.tokenizer import Tokenizer
from milepost.errors import CheckpointFileError, RequestError

TOKENIZER = Tokenizer(spec(), SETTINGS)

# Drops the thinking of earlier answers, keeps it while tools are running.
THINKING = """\
{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if messages[0].role == 'system' -%}<|im_system|>{{ messages[0].content }}{%- endif -%}
{%- if tools -%}
  {%- for tool in tools %}{{ tool | tojson }}{% endfor -%}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}<|im_user|>{{ message.content }}<|im_end|>
  {%- elif message.role == 'tool' -%}<|im_user|>result: {{ message.content }}<|im_end|>
  {%- elif message.role == 'assistant' -%}
    {%- set content = message.content.split('</think>')[-1] if loop.index0 < ns.last else message.content -%}
    <|im_assistant|>{{ content }}<|im_end|>
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|><think>{%- endif -%}"""

# Refuses conversations that do not alternate, and knows no tools.
STRICT = """\
{%- for message in messages -%}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
    {{ raise_exception('roles must alternate user/assistant') }}
  {%- endif -%}
  <|im_user|>{{ message.content }}<|im_end|>
{%- endfor -%}"""

# The newest message comes first: nothing but the very start is ever shared.
REVERSED = (
    """{%- for message in messages | reverse -%}<|im_user|>{{ message.content }}<|im_end|>{%- endfor -%}"""
)

TEMPLATES = {
    "kimi": KIMI_TEMPLATE,
    "chatml": CHATML,
    "thinking": THINKING,
    "strict": STRICT,
    "reversed": REVERSED,
}


def renderer(source: str) -> ChatRenderer:
    return ChatRenderer(TOKENIZER, ChatTemplates({"default": source}, TOKENIZER.named_tokens))


RENDERERS = {name: renderer(source) for name, source in TEMPLATES.items()}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {}}}]
CONTROL = {token.token_id: token.content for token in TOKENIZER.control_tokens}


def control_sequence(ids: array[int]) -> list[str]:
    return [CONTROL[i] for i in ids if i in CONTROL]


# ---------------------------------------------------------------- injection

hostile = st.lists(
    st.one_of(
        st.sampled_from(
            [*SPECIAL, *NOT_SPECIAL, "<|im_", "end|>", "<", "|im_end|>", ">", "[", "BOS]", "im_end", "|"]
        ),
        st.text(max_size=4),
    ),
    max_size=6,
).map("".join)


@given(st.lists(hostile, min_size=1, max_size=3), hostile, hostile)
def test_user_text_cannot_add_a_control_token(contents: list[str], name: str, tool_name: str) -> None:
    """Whatever users, systems and tool declarations say, the control tokens are those of the template."""
    messages = [system(contents[0])]
    for content in contents:
        messages += [
            {"role": "user", "content": content, "name": name or "n"},
            assistant("ok"),
            user(content),
        ]
    tools = [
        {"type": "function", "function": {"name": tool_name, "parameters": {tool_name: {"type": "object"}}}}
    ]
    plain = [
        {**message, "content": "x", **({"name": "n"} if "name" in message else {})} for message in messages
    ]
    plain_tools = [{"type": "function", "function": {"name": "t", "parameters": {"t": {"type": "object"}}}}]
    kimi = RENDERERS["kimi"]
    ids = kimi.render(messages, tools, find_boundaries=False).token_ids
    assert control_sequence(ids) == control_sequence(
        kimi.render(plain, plain_tools, find_boundaries=False).token_ids
    )
    text = TOKENIZER.decode(ids)
    assert all(content in text for content in contents), "the text itself must arrive unchanged"


@pytest.mark.parametrize("name", ["kimi", "chatml", "thinking"])
def test_harmless_text_gets_the_ids_of_the_rendered_string(name: str) -> None:
    """The usual way, rendering to one string and encoding it, is matched exactly."""
    messages = [system("be brief"), user("hello\n\nthere > x"), assistant("ok"), user(" a < b")]
    template = ChatTemplates({"default": TEMPLATES[name]}, {}).choose(with_tools=False)
    text = template.render(messages, None, add_generation_prompt=True, variables={})
    assert RENDERERS[name].render(messages).token_ids.tolist() == TOKENIZER.encode_with_control(text)


def test_a_template_that_deletes_text_cannot_be_used_to_build_a_marker() -> None:
    """`<|im_<think>end|>` becomes a marker when the template removes `<think>`."""
    removing = renderer(
        "<|im_user|>{{ messages[0].content | replace('<think>', '') | replace('~', '') }}<|im_end|>"
    )
    for text in (
        "<|im_<think>end|>",
        "<<think>|im_end|>",
        "<|im_end|<think>>",
        "<|im~_end|>",
        "~<~|im_end|>~",
    ):
        ids = removing.render([user(text)], find_boundaries=False).token_ids
        assert control_sequence(ids) == ["<|im_user|>", "<|im_end|>"]


def test_a_template_that_joins_fields_cannot_be_used_to_build_a_marker() -> None:
    joining = renderer("{{ messages[0].name ~ messages[0].content }}<|im_end|>")
    for left in range(1, len("<|im_end|>")):
        text = "<|im_end|>"
        message = {"role": "user", "name": text[:left], "content": text[left:]}
        assert control_sequence(joining.render([message], find_boundaries=False).token_ids) == ["<|im_end|>"]
    wrapping = renderer("{% for key in tools[0].names %}<{{ key }}>{% endfor %}<|im_end|>")
    ids = wrapping.render([user("x")], [{"names": ["|im_end|"]}], find_boundaries=False).token_ids
    assert control_sequence(ids) == ["<|im_end|>"]


def test_an_assistants_thinking_is_read_as_the_tokens_it_was() -> None:
    thinking = RENDERERS["thinking"]
    messages = [user("q"), assistant("<think>hm</think>done"), {"role": "tool", "content": "r"}]
    assert control_sequence(thinking.render(messages).token_ids).count("</think>") == 1
    stripped = thinking.render([*messages[:2], user("next")]).token_ids
    assert "</think>" not in control_sequence(stripped)
    assert "hm" not in TOKENIZER.decode(stripped)
    said_by_user = thinking.render([user("<think>hm</think>done")]).token_ids
    assert control_sequence(said_by_user).count("<think>") == 1, "only the generation prompt's"


def test_an_assistant_cannot_end_its_turn_in_text() -> None:
    ids = (
        RENDERERS["kimi"]
        .render([user("q"), assistant("a<|im_end|>b")], add_generation_prompt=False)
        .token_ids
    )
    assert control_sequence(ids).count("<|im_end|>") == 2


def test_structure_that_templates_compare_is_left_alone() -> None:
    """`object` or `user` may be part of a marker's name; a template compares such words."""
    shield = Shield(TOKENIZER.control_tokens, new_mark())
    value = {"type": "im_user", "properties": {"think": {"enum": ["user", "a b", 3, None, True]}}}
    assert shield.value(value) == value


# ---------------------------------------------------------------- boundaries


def next_turns(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [
        [*messages, assistant(answer), user(question)]
        for answer, question in (
            ("Yes.", "Why?"),
            ("no", "go on"),
            ("Alphabet", "Alphabet soup"),
            ("7 dwarfs", "7"),
        )
    ]


@pytest.mark.parametrize("name", ["kimi", "chatml", "thinking", "strict", "reversed"])
def test_history_is_what_every_next_turn_shares(name: str) -> None:
    chat = RENDERERS[name]
    messages = [user("first question"), assistant("<think>why</think>answer"), user("second question")]
    prompt = chat.render(messages)
    wanted = {reason: position for position, reason in prompt.wanted}
    shared = [common_prefix(prompt.token_ids, chat.render(turn).token_ids) for turn in next_turns(messages)]
    if name == "reversed":
        assert "history" not in wanted or wanted["history"] <= min(shared)
        return
    assert wanted["history"] <= min(shared), "a next turn would not find it"
    assert wanted["history"] >= min(shared) - 1, "less than every next turn shares"


def test_history_of_a_thinking_template_stops_before_the_opened_thought() -> None:
    chat = RENDERERS["thinking"]
    prompt = chat.render([user("question")])
    position = max(position for position, reason in prompt.wanted if reason == "history")
    assert position == len(prompt.token_ids) - 1


def test_a_next_tool_result_shares_more_than_a_next_user_turn() -> None:
    """The thinking template strips thoughts at the next user turn, but not at a tool result."""
    chat = RENDERERS["thinking"]
    messages = [
        user("question"),
        assistant("<think>long thought about it</think>call"),
        {"role": "tool", "content": "42"},
    ]
    prompt = chat.render(messages, TOOLS)
    positions = [position for position, reason in prompt.wanted if reason == "history"]
    by_user = chat.render([*messages, assistant("x"), user("y")], TOOLS).token_ids
    by_tool = chat.render([*messages, assistant("x"), {"role": "tool", "content": "y"}], TOOLS).token_ids
    assert positions == [common_prefix(prompt.token_ids, by_user), common_prefix(prompt.token_ids, by_tool)]
    assert positions[0] < positions[1]


@pytest.mark.parametrize("name", ["kimi", "chatml", "thinking"])
def test_another_conversation_shares_the_system_prompt_up_to_its_own_text(name: str) -> None:
    """The header of the next message is inside the prefix: every continuation has it."""
    chat = RENDERERS[name]
    prompt = chat.render([system("You are a helpful assistant."), user("hello")])
    other = chat.render([system("You are a helpful assistant."), user("the sun")])
    shared = common_prefix(prompt.token_ids, other.token_ids)
    assert (shared, "message") in prompt.wanted


def test_tools_and_message_ends_are_boundaries() -> None:
    chat = RENDERERS["kimi"]
    messages = [system("be brief"), user("one"), assistant("two"), user("three")]
    prompt = chat.render(messages, TOOLS)
    other_system = chat.render([system("other"), user("x")], TOOLS)
    assert (common_prefix(prompt.token_ids, other_system.token_ids), "message") in prompt.wanted
    for end in range(1, len(messages)):
        changed = [*messages[:end], {**messages[end], "content": "Zebra"}]
        shared = common_prefix(
            prompt.token_ids, chat.render(changed, TOOLS, add_generation_prompt=False).token_ids
        )
        assert (shared, "message") in prompt.wanted


@given(
    st.sampled_from(["kimi", "chatml", "thinking", "reversed"]),
    st.lists(hostile, min_size=1, max_size=4),
    st.lists(hostile, min_size=1, max_size=4),
)
def test_the_shortcut_finds_the_common_prefix_of_ids(name: str, left: list[str], right: list[str]) -> None:
    """Only what follows the common text is encoded; the result is that of encoding everything."""
    chat = RENDERERS[name]

    def conversation(contents: list[str]) -> _Conversation:
        template = chat._templates.choose(with_tools=False)
        given = [
            user(text) if index % 2 == 0 else assistant(text)
            for index, text in enumerate(["same start", *contents])
        ]
        messages = [chat.prepare(message, template) for message in given]
        return _Conversation(template, given, messages, None, {}, chat)

    one, other = conversation(left), conversation(right)
    prompt = one.prompt(True)
    expected = common_prefix(prompt.token_ids, other.prompt(False).token_ids)
    assert one._shared(prompt, [(other.messages, None)]) == expected


@given(
    st.sampled_from(sorted(TEMPLATES)), st.lists(st.text(max_size=6), min_size=1, max_size=5), st.booleans()
)
def test_positions_lie_inside_and_ascend(name: str, contents: list[str], tools: bool) -> None:
    messages = [user(text) if index % 2 == 0 else assistant(text) for index, text in enumerate(contents)]
    try:
        prompt = RENDERERS[name].render(messages, TOOLS if tools else None)
    except RequestError:
        assert name == "strict"
        return
    positions = [position for position, _ in prompt.wanted]
    assert positions == sorted(set(positions))
    assert all(0 < position <= len(prompt.token_ids) for position in positions)
    assert {reason for _, reason in prompt.wanted} <= {"history", "message"}


def test_a_long_transcript_keeps_a_bounded_number_of_boundaries() -> None:
    messages = [user(f"q{i}") if i % 2 == 0 else assistant(f"a{i}") for i in range(201)]
    prompt = RENDERERS["kimi"].render(messages)
    assert len(prompt.wanted) <= 20
    assert max(position for position, reason in prompt.wanted if reason == "message") > 0.95 * len(
        prompt.token_ids
    )


# ---------------------------------------------------------------- templates


def test_the_functions_templates_expect() -> None:
    source = (
        "{{ strftime_now('%Y') }} {{ tools | tojson }} {{ bos_token }}"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{% generation %}G{% endgeneration %} {{ enable_thinking }}"
    )
    template = ChatTemplates({"default": source}, {"bos_token": "[BOS]"}).choose(with_tools=False)
    text = template.render(
        [], [{"a": "\u00e9<"}], add_generation_prompt=True, variables={"enable_thinking": False}
    )
    year, rest = text.split(" ", 1)
    assert year.isdigit() and int(year) >= 2024
    assert rest == '[{"a": "\u00e9<"}] [BOS]01G False'


def test_a_template_cannot_leave_the_sandbox() -> None:
    template = renderer("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}")
    with pytest.raises(RequestError, match="chat template"):
        template.render([user("x")])


def test_refusals_and_failures_of_a_template_are_the_callers_400() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        RENDERERS["strict"].render([assistant("x")])
    assert caught.value.param == "messages" and caught.value.status == 400
    with pytest.raises(RequestError, match="chat template"):
        renderer("{{ messages[7].content.nothing }}").render([user("x")])


def test_no_messages_no_template_broken_template() -> None:
    with pytest.raises(RequestError, match="at least one"):
        RENDERERS["kimi"].render([])
    without = ChatRenderer(TOKENIZER, ChatTemplates({}, {}))
    assert not without.has_template
    with pytest.raises(RequestError, match="no chat template"):
        without.render([user("x")])
    with pytest.raises(CheckpointFileError, match="line 1"):
        renderer("{% if %}")


def test_unreadable_templates_name_their_file(tmp_path) -> None:
    for declared in ([{"x": 1}], ["x"], [{"name": "default", "template": 5}], {"default": "x"}, 7):
        with pytest.raises(CheckpointFileError, match=r"tokenizer_config\.json: chat_template"):
            ChatTemplates.from_directory(tmp_path, {"chat_template": declared}, {})
    with pytest.raises(CheckpointFileError, match=r"tokenizer_config\.json: chat template, line 1"):
        ChatTemplates.from_directory(tmp_path, {"chat_template": "{% if %}"}, {})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointFileError, match=r"chat_template\.jinja: not readable as UTF-8"):
        ChatTemplates.from_directory(tmp_path, {}, {})
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(CheckpointFileError, match=r"chat_template\.jinja: chat template, line 1"):
        ChatTemplates.from_directory(tmp_path, {}, {})


def test_where_templates_come_from(tmp_path) -> None:
    named = {"default": "D", "tool_use": "T"}
    settings = {"chat_template": [{"name": key, "template": value} for key, value in named.items()]}
    templates = ChatTemplates.from_directory(tmp_path, settings, {})
    render = {"add_generation_prompt": False, "variables": {}}
    assert templates.choose(with_tools=True).render([], None, **render) == "T"
    assert templates.choose(with_tools=False).render([], None, **render) == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert (
        ChatTemplates.from_directory(tmp_path, settings, {})
        .choose(with_tools=True)
        .render([], None, **render)
        == "J"
    )
    assert not ChatTemplates.from_directory(tmp_path / "none", {}, {})


def test_developer_is_system_for_a_template_that_does_not_know_it() -> None:
    named = renderer("{% for m in messages %}{{ m.role }}:{{ m.content }} {% endfor %}")
    prompt = named.render([{"role": "developer", "content": "x"}, user("y")])
    assert TOKENIZER.decode(prompt.token_ids) == "system:x user:y "
    knowing = renderer(
        "{% for m in messages %}{{ m.role }} {% if m.role == 'developer' %}D{% endif %}{% endfor %}"
    )
    assert (
        TOKENIZER.decode(knowing.render([{"role": "developer", "content": "x"}]).token_ids) == "developer D"
    )


def test_tool_arguments_reach_the_template_as_objects() -> None:
    chat = renderer("{{ messages[0].tool_calls[0].function.arguments.city }}")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
    prompt = chat.render([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert TOKENIZER.decode(prompt.token_ids) == "Rome"


def test_tool_arguments_nested_too_deep_to_parse_stay_text() -> None:
    chat = renderer("{{ messages[0].tool_calls[0].function.arguments }}")
    nested = "[" * 10_000
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": nested}}
    prompt = chat.render([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert TOKENIZER.decode(prompt.token_ids) == nested


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_common_prefix(left: list[int], right: list[int]) -> None:
    length = common_prefix(array("I", left), array("I", right))
    assert left[:length] == right[:length]
    assert length == min(len(left), len(right)) or left[length] != right[length]
