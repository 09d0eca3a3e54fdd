"""Reasoning and tool calls in every format: cuts do not matter, nothing is lost, histories match."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.kimi_tokenizers import write_directory
from tests.engine.template_shapes import ELEMENTS, REASONING
from tests.engine.tiny_tokenizer import KIMI_TEMPLATE, write_model_directory

from milepost.engine import output_parser
from milepost.engine.built_in_templates import TEMPLATE_DIRECTORY
from milepost.engine.chat import ChatRenderer
from milepost.engine.output_parser import OutputFormat, detected_parsers
from milepost.engine.parts import Content, ParsedAnswer, ToolCall
from milepost.engine.tokenizer import Tokenizer
from milepost.errors import ConfigError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "type": "object",
                "properties": {"q": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}},
            },
        },
    },
    {"type": "function", "function": {"name": "open page", "parameters": {"type": "object"}}},
]

K2 = {
    "all": "<|tool_calls_section_begin|>",
    "/all": "<|tool_calls_section_end|>",
    "one": "<|tool_call_begin|>",
    "args": "<|tool_call_argument_begin|>",
    "/one": "<|tool_call_end|>",
}
FORMATS = {
    "kimi_k2": ("none", "kimi_k2", "kimi_linear"),
    "kimi_k3": ("kimi_k3", "kimi_k3", "kimi_k3"),
    "hermes": ("qwen3", "hermes", "qwen"),
    "qwen3_coder": ("qwen3", "qwen3_coder", "qwen"),
}
PIECES = {
    "kimi_k2": [*K2.values(), "functions.find:0", "find:1", '{"q": 1}', "functions.", "\n"],
    "kimi_k3": [
        "<|open|>", "<|close|>", "<|sep|>", "think", "response", "message", "tools", "call",
        ' tool="find" index="1"', "argument", ' key="q" type="string"', ' type="number"', "json", "12",
        "<|close|>think<|sep|><|open|>response<|sep|>", "<|open|>tools<|sep|><|open|>call",
    ],
    "hermes": [
        "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "find", "arguments": {', '"q": "}"',
        "}", "}}", '{"arguments": {}, "name": "x"}', "\\", '"', "\n",
    ],
    "qwen3_coder": [
        "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=find>", "</function>",
        "<parameter=n>", "</parameter>", "<parameter=q>", "12", "\n", "<", "<func",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: Any) -> dict[str, Tokenizer]:
    found = {
        family: Tokenizer.from_directory(write_directory(tmp_path_factory.mktemp(family), family))
        for family in ("kimi_linear", "kimi_k3")
    }
    qwen = write_model_directory(tmp_path_factory.mktemp("qwen"), template=REASONING)
    return {**found, "qwen": Tokenizer.from_directory(qwen)}


@pytest.fixture(scope="module")
def formats(tokenizers: dict[str, Tokenizer]) -> dict[str, OutputFormat]:
    return {
        name: OutputFormat(tokenizers[family], reasoning, tools)
        for name, (reasoning, tools, family) in FORMATS.items()
    }


def marked(output_format: OutputFormat, tokenizer: Tokenizer, text: str) -> str:
    return output_format.marks.text_of(tokenizer.encode_with_control(text))


def parsed(
    output_format: OutputFormat,
    text: str,
    cuts: Sequence[int] = (),
    *,
    prompt: Sequence[int] = (),
    tools: Any = TOOLS,
) -> ParsedAnswer:
    """The answer whose marked text is `text`, fed in pieces that end at `cuts`."""
    numbers = count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_parser, "new_call_id", lambda: f"id{next(numbers)}")
        parser = output_format.parser(prompt, tools)
    answer = ParsedAnswer()
    begin = 0
    for end in [*sorted(cuts), len(text)]:
        answer.add(parser.feed(text[begin:end]))
        begin = end
    answer.add(parser.feed("", is_last=True))
    return answer


# ---------------------------------------------------------------- properties


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_cuts_do_not_matter(
    formats: dict[str, OutputFormat], tokenizers: dict[str, Tokenizer], name: str, data: st.DataObject
) -> None:
    words = st.sampled_from([*PIECES[name], "a", " b", "\u00e9"])
    text = "".join(data.draw(st.lists(words, max_size=14)))
    if data.draw(st.booleans()):
        text = marked(formats[name], tokenizers[FORMATS[name][2]], text)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=len(text)))
    whole = parsed(formats[name], text)
    assert parsed(formats[name], text, cuts) == whole
    assert parsed(formats[name], text, range(len(text))) == whole


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_text_without_tags_is_content(
    formats: dict[str, OutputFormat], name: str, data: st.DataObject
) -> None:
    text = data.draw(st.text(alphabet="ab<{}=/ \n\u00e9\U0001f600", max_size=30))
    assert parsed(formats[name], text).content == text


# Without signs of tags: hypothesis takes words from the modules it sees, and a tag token in the wrong place
# comes back as text.
texts = st.text(
    alphabet=st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Cn"), exclude_characters="<"),
    max_size=12,
).map(lambda text: text.strip())
raw_texts = st.text(alphabet='ab \n"\\{}[]<>&\u00e9:', max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts | raw_texts, lambda of: st.lists(of, max_size=2)
)
arguments = st.dictionaries(st.from_regex(r"[a-z]{1,6}", fullmatch=True), values, max_size=3)
calls = st.lists(st.tuples(st.sampled_from(["find", "open page", 'a"b&c']), arguments), max_size=2)


def written(name: str, reasoning: str, content: str, made: list[tuple[str, dict[str, Any]]]) -> str:
    """What a model of the family writes; thinking is open at the start of kimi_k3's."""
    if name == "kimi_k2":
        inner = "".join(
            f"{K2['one']}functions.{tool}:{number}{K2['args']}{json.dumps(given)}{K2['/one']}"
            for number, (tool, given) in enumerate(made)
        )
        return content + (f"{K2['all']}{inner}{K2['/all']}" if made else "")
    if name == "kimi_k3":
        inner = "".join(
            f'<|open|>call tool="{escape(tool)}" index="{number}"<|sep|>{_k3_arguments(given)}'
            "<|close|>call<|sep|>"
            for number, (tool, given) in enumerate(made, 1)
        )
        section = f"<|open|>tools<|sep|>{inner}<|close|>tools<|sep|>" if made else ""
        return (
            f"{reasoning}<|close|>think<|sep|><|open|>response<|sep|>{content}<|close|>response<|sep|>"
            f"{section}<|close|>message<|sep|>"
        )
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    if name == "hermes":
        inner = "\n".join(
            "<tool_call>\n"
            f'{{"name": {json.dumps(tool)}, "arguments": {json.dumps(given, ensure_ascii=False)}}}'
            "\n</tool_call>"
            for tool, given in made
        )
    else:
        inner = "\n".join(
            f"<tool_call>\n<function={tool}>\n{_coder_arguments(given)}</function>\n</tool_call>"
            for tool, given in made
        )
    return thought + content + ("\n" if content and made else "") + inner


def _k3_arguments(given: dict[str, Any]) -> str:
    kinds = {bool: "boolean", int: "number", str: "string", list: "array", type(None): "null"}
    return "".join(
        f'<|open|>argument key="{key}" type="{kinds[type(value)]}"<|sep|>'
        f"{value if isinstance(value, str) else json.dumps(value)}<|close|>argument<|sep|>"
        for key, value in given.items()
    )


def _coder_arguments(given: dict[str, Any]) -> str:
    return "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in given.items()
    )


def _any_of(given: dict[str, Any]) -> dict[str, Any]:
    kinds = {bool: "boolean", int: "integer", str: "string", list: "array", type(None): "null"}
    return {"properties": {key: {"type": kinds[type(value)]} for key, value in given.items()}}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("are_tokens", [True, False])
@settings(max_examples=40)
@given(reasoning=texts, content=texts, made=calls, data=st.data())
def test_well_formed_answers_are_taken_apart(
    formats: dict[str, OutputFormat],
    tokenizers: dict[str, Tokenizer],
    name: str,
    are_tokens: bool,
    reasoning: str,
    content: str,
    made: list[tuple[str, dict[str, Any]]],
    data: st.DataObject,
) -> None:
    """Whatever the cuts; also where the tokenizer has no tokens for the tags. Of an answer that is cut
    off, the parts begin those of the whole one."""
    made = [(f"{tool}{number}", given) for number, (tool, given) in enumerate(made)]
    tools = [{"function": {"name": tool, "parameters": _any_of(given)}} for tool, given in made] or TOOLS
    output_format, tokenizer = formats[name], tokenizers[FORMATS[name][2]]
    if not are_tokens:
        tokenizer = tokenizers["kimi_linear" if FORMATS[name][2] != "kimi_linear" else "kimi_k3"]
        output_format = OutputFormat(tokenizer, *FORMATS[name][:2])
    prompt = [*range(4), *tokenizer.encode_with_control("<|open|>think<|sep|>" if name == "kimi_k3" else "")]
    text = written(name, reasoning, content, made)
    text = marked(output_format, tokenizer, text) if are_tokens else text
    answer = parsed(output_format, text, prompt=prompt, tools=tools)
    assert answer.reasoning == ("" if name == "kimi_k2" else reasoning)
    assert answer.content == content
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == made
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert parsed(output_format, text, cuts, prompt=prompt, tools=tools) == answer
    assert parsed(output_format, text, range(len(text)), prompt=prompt, tools=tools) == answer
    begun = parsed(output_format, text[: data.draw(st.integers(0, len(text)))], prompt=prompt, tools=tools)
    for call, whole in zip(begun.calls, answer.calls, strict=False):
        assert whole.name == call.name and whole.arguments.startswith(call.arguments)
    if begun.calls:
        assert begun.reasoning == answer.reasoning and begun.content.startswith(content)


# ---------------------------------------------------------------- malformed calls are text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kimi_k2", f"a{K2['all']}"),
        ("kimi_k2", f"a{K2['all']}{K2['/all']}b"),
        ("kimi_k2", f"a{K2['all']}so {K2['one']}"),
        ("kimi_k2", f"a{K2['all']}{K2['one']}nothing{K2['args']}{{}}{K2['/one']}{K2['/all']}"),
        ("kimi_k2", f"a{K2['all']}{K2['one']}functions.f:0"),
        ("kimi_k2", f"a{K2['all']}{K2['one']}functions.f:0{K2['/one']}"),
        ("hermes", "a\n<tool_call>\nfind it\n</tool_call>"),
        ("hermes", 'a<tool_call>{"name": 7, "arguments": {}}</tool_call> b'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", 'a<tool_call>{"name": "find"'),
        ("qwen3_coder", "a\n<tool_call>\nfind it</tool_call>"),
        ("qwen3_coder", "a\n<tool_call>\n<function=fi"),
        ("qwen3_coder", "a\n<tool_call>\n<function=>"),
    ],
)
def test_text_that_is_no_call_stays_as_it_is(
    formats: dict[str, OutputFormat], tokenizers: dict[str, Tokenizer], name: str, text: str
) -> None:
    answer = parsed(formats[name], marked(formats[name], tokenizers[FORMATS[name][2]], text))
    assert answer == ParsedAnswer(content=text)


@pytest.mark.parametrize(
    "section",
    [
        "<|open|>tools<|sep|>",
        "<|open|>tools<|sep|><|close|>tools<|sep|>",
        "<|open|>tools<|sep|>find it<|close|>tools<|sep|>",
        '<|open|>tools<|sep|><|open|>call index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
        '<|open|>tools<|sep|><|open|>call tool="find"',
        "<|open|>tools<|sep|><|open|>call tool=find<|sep|>",
    ],
)
def test_a_k3_section_that_is_none(
    formats: dict[str, OutputFormat], tokenizers: dict[str, Tokenizer], section: str
) -> None:
    text = f"<|open|>response<|sep|>a<|close|>response<|sep|>{section}"
    answer = parsed(formats["kimi_k3"], marked(formats["kimi_k3"], tokenizers["kimi_k3"], text))
    assert answer == ParsedAnswer(content=f"a{section}")


def test_a_good_call_before_a_bad_one_counts(
    formats: dict[str, OutputFormat], tokenizers: dict[str, Tokenizer]
) -> None:
    good = f"{K2['one']}functions.find:0{K2['args']}{{}}{K2['/one']}"
    text = f"a{K2['all']}{good}{K2['one']}oh{K2['/all']}"
    answer = parsed(formats["kimi_k2"], marked(formats["kimi_k2"], tokenizers["kimi_linear"], text))
    assert answer.calls == [ToolCall("functions.find:0", "find", "{}")]
    assert answer.content == f"a{K2['one']}oh{K2['/all']}"


def test_an_answer_that_is_cut_off_keeps_what_it_has(
    formats: dict[str, OutputFormat], tokenizers: dict[str, Tokenizer]
) -> None:
    for name, text, expected in (
        ("kimi_k2", f'{K2["all"]}{K2["one"]}functions.find:0{K2["args"]}{{"q": "b', '{"q": "b'),
        ("hermes", '<tool_call>\n{"name": "find", "arguments": {"q": {"b": 1}', '{"q": {"b": 1}'),
        ("hermes", '<tool_call>\n{"name": "find", "arguments": {"q": {"b": 1}}', '{"q": {"b": 1}}'),
        ("qwen3_coder", "<tool_call>\n<function=find>\n<parameter=q>\na\n</parameter>\n<par", '{"q": "a"'),
    ):
        answer = parsed(formats[name], marked(formats[name], tokenizers[FORMATS[name][2]], text))
        assert [call.arguments for call in answer.calls] == [expected]
        assert answer.content == ""


def test_tags_spelled_with_ordinary_characters_are_text(formats: dict[str, OutputFormat]) -> None:
    """Where the tokenizer has the token, only the token counts."""
    text = f"{K2['all']}{K2['one']}functions.find:0{K2['args']}{{}}{K2['/one']}{K2['/all']}"
    assert parsed(formats["kimi_k2"], text) == ParsedAnswer(content=text)
    assert parsed(formats["hermes"], "<think>a</think>b").content == "<think>a</think>b"


def test_without_tools_calls_stay_text(
    formats: dict[str, OutputFormat], tokenizers: dict[str, Tokenizer]
) -> None:
    text = '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'
    answer = parsed(formats["hermes"], marked(formats["hermes"], tokenizers["qwen"], text), tools=None)
    assert answer == ParsedAnswer(content=text)


def test_arguments_go_out_as_they_come(
    formats: dict[str, OutputFormat], tokenizers: dict[str, Tokenizer]
) -> None:
    """Not when the call is over."""
    parser = formats["hermes"].parser((), TOOLS)
    text = '<tool_call>\n{"name": "find", "arguments": {"q": "some text'
    answer = ParsedAnswer()
    answer.add(parser.feed(marked(formats["hermes"], tokenizers["qwen"], text)))
    assert answer.calls[0].name == "find" and answer.calls[0].arguments == '{"q": "some text'


def test_a_thought_that_a_call_ends(formats: dict[str, OutputFormat], tokenizers: Any) -> None:
    text = '<think>\nhm\n<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'
    answer = parsed(formats["hermes"], marked(formats["hermes"], tokenizers["qwen"], text))
    assert answer.reasoning == "hm" and [call.name for call in answer.calls] == ["find"]


@pytest.mark.parametrize(
    ("prompt", "answer", "reasoning", "content"),
    [
        ("x<think>\n", "hm\n</think>\n\nyes", "hm", "yes"),
        ("x<think>", "\nhm\n</think>\n\nyes", "hm", "yes"),
        ("x<think>\n", "\nhm\n</think>\n\nyes", "\nhm", "yes"),
        ("x<think>\n", "hm", "hm", ""),
        ("x<think>\n\n</think>\n\n", "yes", "", "yes"),
        ("x", "yes", "", "yes"),
        ("x", "\n<think>\nhm\n\n</think>\n\n\nyes", "hm\n", "\nyes"),
        ("<think> of it", "yes", "", "yes"),
    ],
)
def test_thoughts_begin_in_the_prompt_or_in_the_answer(
    formats: dict[str, OutputFormat],
    tokenizers: dict[str, Tokenizer],
    prompt: str,
    answer: str,
    reasoning: str,
    content: str,
) -> None:
    tokenizer = tokenizers["qwen"]
    ids = tokenizer.encode_with_control(prompt)
    found = parsed(formats["hermes"], marked(formats["hermes"], tokenizer, answer), prompt=ids)
    assert (found.reasoning, found.content) == (reasoning, content)


def test_types_of_arguments_without_quotes(
    formats: dict[str, OutputFormat], tokenizers: dict[str, Tokenizer]
) -> None:
    body = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n"
        for key, value in (("q", "12"), ("n", "1"), ("o", '{"a": [1.50]}'), ("other", "x"))
    )
    text = f"<tool_call>\n<function=find>\n{body}</function>\n</tool_call>"
    answer = parsed(formats["qwen3_coder"], marked(formats["qwen3_coder"], tokenizers["qwen"], text))
    assert answer.calls[0].arguments == '{"q": "12", "n": 1, "o": {"a": [1.50]}, "other": "x"}'
    spaced = text.replace("\n12\n", "\n\n  a \n\n")
    answer = parsed(formats["qwen3_coder"], marked(formats["qwen3_coder"], tokenizers["qwen"], spaced))
    assert json.loads(answer.calls[0].arguments)["q"] == "\n  a \n"
    text = text.replace("\n1\n", "\nmany\n")
    answer = parsed(formats["qwen3_coder"], marked(formats["qwen3_coder"], tokenizers["qwen"], text))
    assert json.loads(answer.calls[0].arguments)["n"] == "many"


# ---------------------------------------------------------------- choosing a format


def test_the_template_decides() -> None:
    sources = {path.stem: path.read_text() for path in TEMPLATE_DIRECTORY.glob("*.jinja")}
    assert detected_parsers(sources["kimi_linear"]) == ("none", "kimi_k2")
    assert detected_parsers(sources["kimi_k3"]) == ("kimi_k3", "kimi_k3")
    assert detected_parsers(REASONING) == ("qwen3", "hermes")
    assert detected_parsers(REASONING + "<function=") == ("qwen3", "qwen3_coder")
    assert detected_parsers(KIMI_TEMPLATE) == ("none", "hermes")
    assert detected_parsers("{{ messages }}") == ("none", "none")


def test_names_win_over_the_template(tokenizers: dict[str, Tokenizer]) -> None:
    chosen = OutputFormat.choose(tokenizers["qwen"], REASONING, "none", "qwen3_xml")
    assert (chosen.reasoning, chosen.tools, chosen.parses) == ("none", "qwen3_xml", True)
    assert not OutputFormat.choose(tokenizers["qwen"], REASONING, "none", "none").parses
    with pytest.raises(ConfigError, match="tool_call_parser.*hermes"):
        OutputFormat.choose(tokenizers["qwen"], REASONING, "auto", "heremes")
    parser = OutputFormat(tokenizers["qwen"]).parser((), TOOLS)
    assert parser.feed("<think>", is_last=True) == [Content("<think>")]


# ---------------------------------------------------------------- histories


@pytest.mark.parametrize("name", ["kimi_k2", "kimi_k3", "hermes"])
@given(reasoning=texts, content=texts, made=calls)
def test_what_was_parsed_is_written_back_as_the_same_tokens(
    tmp_path_factory: Any, name: str, reasoning: str, content: str, made: list[tuple[str, dict[str, Any]]]
) -> None:
    renderer, tokenizer, output_format = _model(tmp_path_factory, name)
    reasoning = "" if name == "kimi_k2" else reasoning
    messages = [{"role": "user", "content": "hello"}]
    prompt = renderer.render(messages, TOOLS).token_ids.tolist()
    answer_ids = _answer_ids(tokenizer, written(name, reasoning, content, made))
    answer = parsed(output_format, output_format.marks.text_of(answer_ids), prompt=prompt)
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.calls
        ]
    result = {"role": "tool", "content": "x", "name": "find"}
    if answer.calls:
        result["tool_call_id"] = answer.calls[0].call_id
    following = result if answer.calls else {"role": "user", "content": "next"}
    is_dropped = name == "hermes" and not answer.calls
    if is_dropped:
        return  # this template keeps thoughts only while tools are being used
    again = renderer.render([*messages, message, following], TOOLS).token_ids.tolist()
    assert again[: len(prompt) + len(answer_ids)] == [*prompt, *answer_ids]


def _answer_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_with_control(text)


_models: dict[str, tuple[ChatRenderer, Tokenizer, OutputFormat]] = {}


def _model(tmp_path_factory: Any, name: str) -> tuple[ChatRenderer, Tokenizer, OutputFormat]:
    if name not in _models:
        reasoning, tools, family = FORMATS[name]
        if family == "qwen":
            directory = write_model_directory(tmp_path_factory.mktemp("m"), template=REASONING)
        else:
            directory = write_directory(tmp_path_factory.mktemp("m"), family)
        tokenizer = Tokenizer.from_directory(directory)
        renderer = ChatRenderer.from_directory(directory, tokenizer)
        _models[name] = (renderer, tokenizer, OutputFormat(tokenizer, reasoning, tools))
    return _models[name]


@given(reasoning=texts, content=texts, made=calls)
def test_elements_are_written_back_as_the_same_tokens(
    tmp_path_factory: Any, reasoning: str, content: str, made: list[tuple[str, dict[str, Any]]]
) -> None:
    """As above, for a template that opens thoughts in the prompt and writes one element per argument."""
    if "elements" not in _models:
        directory = write_model_directory(tmp_path_factory.mktemp("m"), template=ELEMENTS)
        tokenizer = Tokenizer.from_directory(directory)
        renderer = ChatRenderer.from_directory(directory, tokenizer)
        _models["elements"] = (renderer, tokenizer, OutputFormat.choose(tokenizer, renderer.template_source))
    renderer, tokenizer, output_format = _models["elements"]
    assert (output_format.reasoning, output_format.tools) == ("qwen3", "qwen3_coder")
    made = [(f"{tool}{number}", given) for number, (tool, given) in enumerate(made)]
    tools = [
        {"type": "function", "function": {"name": tool, "parameters": _any_of(given)}} for tool, given in made
    ] or TOOLS
    messages = [{"role": "user", "content": "hello"}]
    prompt = renderer.render(messages, tools).token_ids.tolist()
    calls_text = written("qwen3_coder", "", "", made)
    gap = "\n\n" if content and made else ""
    answer_ids = _answer_ids(tokenizer, f"{reasoning}\n</think>\n\n{content}{gap}{calls_text}<|im_end|>\n")
    answer = parsed(output_format, output_format.marks.text_of(answer_ids[:-2]), prompt=prompt, tools=tools)
    assert (answer.reasoning, len(answer.calls)) == (reasoning, len(made))
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.calls
        ]
    following = {"role": "tool", "content": "x"} if made else {"role": "user", "content": "next"}
    again = renderer.render([*messages, message, following], tools).token_ids.tolist()
    assert again[: len(prompt) + len(answer_ids)] == [*prompt, *answer_ids]
