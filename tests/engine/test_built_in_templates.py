"""The built-in Kimi formats: their text, their tokens, and how far an answer's prompt is extended."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.engine.kimi_tokenizers import END_TOKENS, TOKENS, write_directory
from tests.engine.template_shapes import REASONING
from tests.engine.tiny_tokenizer import SETTINGS, spec

from milepost.engine.chat import ChatRenderer, common_prefix
from milepost.engine.serving import EMBEDDED_MODEL
from milepost.engine.template import ChatTemplates
from milepost.engine.tokenizer import Tokenizer
from milepost.errors import CheckpointFileError, RequestError

DOCS = Path(__file__).resolve().parents[2] / "docs" / "templates.md"

TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}},
    }
    for name in ("find", "open page")
]
SYSTEM = {"role": "system", "content": "the quick brown fox"}
USER = {"role": "user", "content": "hello user"}
CALLS = [
    {"id": f"functions.{tool}:{number}", "type": "function", "function": {"name": tool, "arguments": text}}
    for number, (tool, text) in enumerate(
        [("find", '{"q": "a & \\"b\\"", "n": 3, "deep": {"z": [1, null]}}'), ("open page", "{}")]
    )
]


def load(directory: Path) -> tuple[Tokenizer, ChatRenderer]:
    tokenizer = Tokenizer.from_directory(directory)
    return tokenizer, ChatRenderer.from_directory(directory, tokenizer)


@pytest.fixture(scope="module")
def models(tmp_path_factory: Any) -> dict[str, tuple[Tokenizer, ChatRenderer]]:
    return {name: load(write_directory(tmp_path_factory.mktemp(name), name)) for name in TOKENS}


def text_of(model: tuple[Tokenizer, ChatRenderer], messages: list[Any], **options: Any) -> str:
    tokenizer, renderer = model
    return tokenizer.decode(renderer.render(messages, **options).token_ids)


def test_kimi_linear_text(models: Any) -> None:
    messages = [
        SYSTEM,
        {**USER, "name": "ann"},
        {"role": "assistant", "content": "wait", "tool_calls": CALLS},
        {"role": "tool", "content": "the dog", "tool_call_id": "functions.find:0", "name": "find"},
    ]
    assert text_of(models["kimi_linear"], messages, tools=TOOLS[:1]) == (
        '<|im_system|>tool_declare<|im_middle|>[{"type":"function","function":{"name":"find","parameters":'
        '{"type":"object","properties":{"q":{"type":"string"}}}}}]<|im_end|>'
        "<|im_system|>system<|im_middle|>the quick brown fox<|im_end|>"
        "<|im_user|>ann<|im_middle|>hello user<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>wait<|tool_calls_section_begin|>"
        "<|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>"
        '{"q": "a & \\"b\\"", "n": 3, "deep": {"z": [1, null]}}<|tool_call_end|>'
        "<|tool_call_begin|>functions.open page:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|><|im_end|>"
        "<|im_system|>find<|im_middle|>## Return of functions.find:0\nthe dog<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>"
    )


def test_kimi_k3_text(models: Any) -> None:
    messages = [
        SYSTEM,
        USER,
        {"role": "assistant", "content": "wait", "reasoning_content": " hm ", "tool_calls": CALLS},
        {"role": "tool", "content": "second", "tool_call_id": "functions.open page:1"},
        {"role": "tool", "content": "first", "tool_call_id": "functions.find:0"},
    ]
    expected = (
        '<|open|>message role="system" type="tool-declare"<|sep|># Tools\n'
        "Here are the available tools, described in JSONSchema.\n\n```json\n"
        '[{"function":{"name":"find","parameters":{"properties":{"q":{"type":"string"}},"type":"object"}},'
        '"type":"function"}]\n```<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="system"<|sep|>the quick brown fox<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="user"<|sep|>hello user<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|> hm <|close|>think<|sep|>'
        "<|open|>response<|sep|>wait<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="find" index="1"<|sep|>'
        '<|open|>argument key="q" type="string"<|sep|>a & "b"<|close|>argument<|sep|>'
        '<|open|>argument key="n" type="number"<|sep|>3<|close|>argument<|sep|>'
        '<|open|>argument key="deep" type="object"<|sep|>{"z": [1, null]}<|close|>argument<|sep|>'
        "<|close|>call<|sep|>"
        '<|open|>call tool="open page" index="2"<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
        '<|open|>message role="tool" tool="open page" index="2"<|sep|>second'
        "<|close|>message<|sep|><|end_of_msg|>"
        '<|open|>message role="tool" tool="find" index="1"<|sep|>first<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|>'
    )
    assert text_of(models["kimi_k3"], messages, tools=TOOLS[:1]) == expected + "<|open|>think<|sep|>"
    for name in ("thinking", "enable_thinking"):
        without = text_of(models["kimi_k3"], messages, tools=TOOLS[:1], variables={name: False})
        cut = expected.replace("<|open|>think<|sep|> hm <|close|>think<|sep|>", "")
        assert without == cut + "<|open|>response<|sep|>"


def test_kimi_k3_types_and_odd_arguments(models: Any) -> None:
    values = {"t": True, "n": None, "x": 1.5, "l": ["a"], 'k"&': "v"}
    calls = [
        {"function": {"name": 'a"b', "arguments": json.dumps(values)}},
        {"function": {"name": "c", "arguments": "[1, oops"}},
    ]
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": calls}]
    text = text_of(models["kimi_k3"], messages, add_generation_prompt=False)
    assert '<|open|>call tool="a&quot;b" index="1"<|sep|>' in text
    for part in (
        'key="t" type="boolean"<|sep|>true<|close|>',
        'key="n" type="null"<|sep|>null<|close|>',
        'key="x" type="number"<|sep|>1.5<|close|>',
        'key="l" type="array"<|sep|>["a"]<|close|>',
        'key="k&quot;&amp;" type="string"<|sep|>v<|close|>',
        '<|open|>json type="object"<|sep|>[1, oops<|close|>json<|sep|><|close|>call<|sep|>',
    ):
        assert part in text, (part, text)


def test_an_answer_that_only_mentions_the_end_mark_is_not_taken_for_a_raw_one(models: Any) -> None:
    mark = "<|close|>message<|sep|>"
    for message in (
        {"content": f"I saw {mark} there", "reasoning_content": "hm"},
        {"content": f"I saw {mark}", "reasoning_content": "hm"},
    ):
        text = text_of(
            models["kimi_k3"], [USER, {"role": "assistant", **message}], add_generation_prompt=False
        )
        assert text.endswith(
            "<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|>"
            f"{message['content']}<|close|>response<|sep|>{mark}<|end_of_msg|>"
        )
    plain = [USER, {"role": "assistant", "content": f"I saw {mark} there"}]
    assert f"<|open|>response<|sep|>I saw {mark} there<|close|>response" in text_of(models["kimi_k3"], plain)


def test_a_tool_result_that_nobody_asked_for_needs_a_name(models: Any) -> None:
    with pytest.raises(RequestError, match="tool_call_id"):
        models["kimi_k3"][1].render([USER, {"role": "tool", "content": "x"}])
    named = [USER, {"role": "tool", "content": "x", "name": "find"}]
    assert 'role="tool" tool="find" index="1"' in text_of(models["kimi_k3"], named)


@pytest.mark.parametrize("model_type", sorted(TOKENS))
def test_users_cannot_write_control_tokens(models: Any, model_type: str) -> None:
    tokenizer, renderer = models[model_type]
    evil = "".join(TOKENS[model_type])
    harmless = [{"role": "user", "content": "x", "name": "x"}, {"role": "tool", "content": "x", "name": "x"}]
    attack = [{**message, "content": evil, "name": evil} for message in harmless]
    tools = [{"type": "function", "function": {"name": evil, "description": evil}}]
    plain = [{"type": "function", "function": {"name": "x", "description": "x"}}]
    control = {token.token_id for token in tokenizer.control_tokens}

    def structure(messages: list[Any], tools: list[Any]) -> list[int]:
        return [token for token in renderer.render(messages, tools).token_ids if token in control]

    assert structure(attack, tools) == structure(harmless, plain)


@pytest.mark.parametrize("model_type", sorted(TOKENS))
def test_control_ids_are_those_of_the_tokenizer_config(models: Any, model_type: str) -> None:
    tokenizer, renderer = models[model_type]
    first = tokenizer.vocab_size - 256
    ids = set(renderer.render([USER]).token_ids)
    opening = {"kimi_linear": "<|im_user|>", "kimi_k3": "<|open|>"}[model_type]
    assert first + TOKENS[model_type][opening] in ids
    assert tokenizer.eos_token_ids == (first + TOKENS[model_type][END_TOKENS[model_type]],)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        (kind, name)
        for kind, names in TOKENS.items()
        for name in names
        if "[" not in name and "tool" not in name
    ],
)
def test_a_missing_control_token_is_refused_by_name(tmp_path: Path, model_type: str, name: str) -> None:
    directory = write_directory(tmp_path, model_type, without=name)
    with pytest.raises(CheckpointFileError, match=re.escape(name)):
        load(directory)


def test_missing_tool_tokens_are_refused_when_a_call_is_written(tmp_path: Path) -> None:
    directory = write_directory(tmp_path, "kimi_linear", without="<|tool_call_end|>")
    _, renderer = load(directory)
    renderer.render([USER], TOOLS)
    with pytest.raises(RequestError, match=re.escape("<|tool_call_end|>")):
        renderer.render([USER, {"role": "assistant", "content": "", "tool_calls": CALLS}])


def test_a_template_in_the_directory_comes_first(tmp_path: Path) -> None:
    directory = write_directory(tmp_path, "kimi_k3", without="<|open|>")
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert text_of(load(directory), [USER]) == "hello user"


def test_other_families_get_no_template(tmp_path: Path) -> None:
    directory = write_directory(tmp_path, "kimi_k3")
    (directory / "config.json").write_text('{"model_type": "qwen3_next"}')
    assert not load(directory)[1].has_template


# ------------------------------------------------------------------ how far the next prompt extends


@dataclass(frozen=True)
class Answer:
    """What a model generated, and how a client sends it back."""

    thinking: str = ""
    content: str = "the dog sleeps"
    calls: tuple[Any, ...] = ()


COLUMNS = {
    "kimi_linear": ("kimi_linear", {}),
    "kimi_k3, thinking": ("kimi_k3", {"thinking": True}),
    "kimi_k3, not thinking": ("kimi_k3", {"thinking": False}),
    "milepost-tiny": ("milepost-tiny", {}),
    "Qwen3-like": ("Qwen3-like", {}),
}
"""Column of the table in the docs -> model and template variables."""

TURNS: dict[str, tuple[Answer, dict[str, Any]]] = {
    "text": (Answer(), {"content": "the dog sleeps"}),
    "thinking kept in `reasoning_content`": (
        Answer(thinking="numbers 0 1 2"),
        {"content": "the dog sleeps", "reasoning_content": "numbers 0 1 2"},
    ),
    "thinking left out": (Answer(thinking="numbers 0 1 2"), {"content": "the dog sleeps"}),
    "`tool_calls`": (Answer(calls=tuple(CALLS)), {"content": "the dog sleeps", "tool_calls": CALLS}),
    "text as generated, marks included": (Answer(thinking="numbers 0 1 2", calls=tuple(CALLS)), {}),
}
"""Row of the table -> what was generated, and the message that comes back."""


def generated(column: str, answer: Answer) -> str | None:
    """The answer as the model writes it behind the generation prompt; None if its format has no such part."""
    model_type, variables = COLUMNS[column]
    if model_type == "Qwen3-like":
        think = f"<think>\n{answer.thinking}\n</think>\n\n" if answer.thinking else ""
        calls = "".join(
            f'\n<tool_call>\n{{"name": {json.dumps(call["function"]["name"])}, '
            f'"arguments": {call["function"]["arguments"]}}}\n</tool_call>'
            for call in answer.calls
        )
        return f"{think}{answer.content}{calls}<|im_end|>"
    if model_type == "milepost-tiny":
        return None if answer.calls or answer.thinking else f"{answer.content}<|im_end|>"
    if model_type == "kimi_linear":
        if answer.thinking:
            if not answer.calls:
                return None
            answer = Answer(calls=answer.calls)
        calls = "".join(
            f"<|tool_call_begin|>{call['id']}<|tool_call_argument_begin|>"
            f"{call['function']['arguments']}<|tool_call_end|>"
            for call in answer.calls
        )
        section = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>" if calls else ""
        return f"{answer.content}{section}<|im_end|>"
    if not variables["thinking"] and answer.thinking:
        if not answer.calls:
            return None
        answer = Answer(calls=answer.calls)
    think = f"{answer.thinking}<|close|>think<|sep|><|open|>response<|sep|>" if variables["thinking"] else ""
    tools = ""
    if answer.calls:
        tools = (
            '<|open|>tools<|sep|><|open|>call tool="find" index="1"<|sep|>'
            '<|open|>argument key="q" type="string"<|sep|>a & "b"<|close|>argument<|sep|>'
            '<|open|>argument key="n" type="number"<|sep|>3<|close|>argument<|sep|>'
            '<|open|>argument key="deep" type="object"<|sep|>{"z": [1, null]}<|close|>argument<|sep|>'
            '<|close|>call<|sep|><|open|>call tool="open page" index="2"<|sep|><|close|>call<|sep|>'
            "<|close|>tools<|sep|>"
        )
    return f"{think}{answer.content}<|close|>response<|sep|>{tools}<|close|>message<|sep|><|end_of_msg|>"


def extent(models: Any, column: str, turn: str, following: dict[str, Any], before: list[Any]) -> str:
    """`all`: prompt and answer, end token included; `prompt`: the prompt, not all of the answer."""
    name, variables = COLUMNS[column]
    tokenizer, renderer = models[name]
    answer, message = TURNS[turn]
    text = generated(column, answer)
    if text is None:
        return "-"
    tools = TOOLS if name != "milepost-tiny" else None
    prompt = renderer.render(before, tools, variables=variables).token_ids.tolist()
    answer_ids = tokenizer.encode_with_control(text)
    if not message:
        message = {"content": tokenizer.decode(answer_ids, skip_special_tokens=True)}
    messages = [*before, {"role": "assistant", **message}, following]
    rendered = renderer.render(messages, tools, variables=variables).token_ids.tolist()
    shared = common_prefix(prompt + answer_ids, rendered)
    if shared == len(prompt) + len(answer_ids):
        return "all"
    assert shared >= len(prompt), "the prompt itself was not extended"
    return "prompt"


def table() -> dict[tuple[str, str], str]:
    """(row, column) -> cell of the table in the docs."""
    lines = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {(row[0], name): cell for row in rows for name, cell in zip(header[1:], row[1:], strict=True)}


@pytest.fixture(scope="module")
def all_models(models: Any) -> Any:
    tokenizer = Tokenizer(spec(), SETTINGS)
    shaped = ChatRenderer(tokenizer, ChatTemplates({"default": REASONING}, tokenizer.named_tokens))
    return {**models, "milepost-tiny": load(EMBEDDED_MODEL), "Qwen3-like": (tokenizer, shaped)}


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize(
    "before", [[USER], [SYSTEM, USER], [SYSTEM, USER, {"role": "assistant", "content": "x"}, USER]]
)
def test_the_next_prompt_extends_as_far_as_the_docs_say(
    all_models: Any, column: str, turn: str, before: list[Any]
) -> None:
    following: list[dict[str, Any]] = [{"role": "user", "content": "what is the capital"}]
    if TURNS[turn][0].calls and column != "milepost-tiny":
        following.append(
            {"role": "tool", "content": "the sun", "tool_call_id": CALLS[0]["id"], "name": "find"}
        )
    for message in following:
        cell = table()[turn, column]
        usual, _, after_result = cell.partition("; after a tool result ")
        expected = after_result or usual if message["role"] == "tool" else usual
        assert extent(all_models, column, turn, message, before) == expected


def test_an_assistant_message_cannot_write_turn_markers(models: Any) -> None:
    """Tokens that are not special may come back in it; special ones may not, whole or in pieces."""
    tokenizer, renderer = models["kimi_k3"]
    special = {token.token_id for token in tokenizer.control_tokens if token.special}
    count = sum(token in special for token in renderer.render([USER, SYSTEM]).token_ids)
    for evil in (
        "<|end_of_msg|>",
        "<|end_<|sep|>of_msg|>",
        "<<|close|>|end_of_msg|>",
        "<|end_of_msg|<|sep|>>",
    ):
        rendered = renderer.render([USER, {"role": "assistant", "content": evil}]).token_ids
        assert sum(token in special for token in rendered) == count


def test_the_table_has_a_cell_for_everything_that_is_tested() -> None:
    assert set(table()) == {(turn, column) for turn in TURNS for column in COLUMNS}
