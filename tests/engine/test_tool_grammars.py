"""Demanded tool calls: the grammar accepts what models write, and what it produces is parsed."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from tests.engine.kimi_tokenizers import write_directory
from tests.engine.template_shapes import REASONING
from tests.engine.test_output_parser import FORMATS, parsed, written
from tests.engine.tiny_tokenizer import write_model_directory

from milepost.engine.output_parser import OutputFormat
from milepost.engine.structured import Grammar, GrammarCompiler, choice_grammar, json_grammar
from milepost.engine.tokenizer import Tokenizer
from milepost.engine.tool_grammars import in_chat_format, tool_call_grammar
from milepost.errors import RequestError

SCHEMA = {
    "type": "object",
    "properties": {
        "q": {"type": "string"},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["fox", "dog"]},
        "list": {"type": "array", "items": {"$ref": "#/$defs/flag"}, "maxItems": 2},
    },
    "required": ["kind"],
    "additionalProperties": False,
    "$defs": {"flag": {"type": "boolean"}},
}
BOUNDED = {**SCHEMA, "properties": {key: SCHEMA["properties"][key] for key in ("n", "kind", "list")}}
PARAMS = ["tools[0]", "tools[1]"]


def tools(schema: Any) -> list[dict[str, Any]]:
    second = {"type": "function", "function": {"name": "open page"}}
    return [{"type": "function", "function": {"name": "find", "parameters": schema}}, second]


@pytest.fixture(scope="module")
def models(tmp_path_factory: Any) -> dict[str, tuple[Tokenizer, OutputFormat, GrammarCompiler]]:
    found = {}
    for name, (reasoning, tool_parser, family) in FORMATS.items():
        directory = tmp_path_factory.mktemp(name)
        if family == "qwen":
            write_model_directory(directory, template=REASONING)
        else:
            write_directory(directory, family)
        tokenizer = Tokenizer.from_directory(directory)
        output_format = OutputFormat(tokenizer, reasoning, tool_parser)
        found[name] = (tokenizer, output_format, GrammarCompiler(tokenizer, tokenizer.vocab_size))
    return found


def follows(compiler: GrammarCompiler, grammar: Grammar, ids: list[int], after: tuple[int, ...] = ()) -> bool:
    """Whether the tokens are an answer by the grammar, which may end there."""
    answer = compiler.compile(grammar, after=after)
    for position, token_id in enumerate(ids):
        mask = int.from_bytes(answer.allowed_tokens(position), "little")
        if not mask >> token_id & 1:
            return False
        answer.accept([token_id])
    ends = sum(1 << token_id for token_id in compiler._tokenizer.eos_token_ids)
    return answer.is_complete or bool(int.from_bytes(answer.allowed_tokens(len(ids)), "little") & ends)


def wrapped(model: Any, grammar: Grammar, prompt: str) -> tuple[Grammar, tuple[int, ...]]:
    tokenizer, output_format, _ = model
    kind = "calls" if grammar.name == "@calls" else "content"
    ids = tokenizer.encode_with_control(prompt)
    return in_chat_format(output_format, tokenizer, ids, **{kind: grammar})


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "made",
    [
        [("find", {"kind": "fox"})],
        [("find", {"q": 'the sun\nshines <b> & {"', "n": 3, "kind": "dog", "list": [True]})],
        [("open page", {}), ("find", {"n": 0, "kind": "fox"})],
    ],
)
def test_well_formed_calls_follow_the_grammar(models: Any, name: str, made: list[Any]) -> None:
    tokenizer, output_format, compiler = models[name]
    grammar = tool_call_grammar(output_format, tools(SCHEMA), PARAMS, one_only=False)
    prompt = "<|open|>response<|sep|>" if name == "kimi_k3" else "x"
    whole, after = wrapped(models[name], grammar, prompt)
    assert after == ()
    text = written(name, "", "", made).removeprefix("<|close|>think<|sep|><|open|>response<|sep|>")
    assert follows(compiler, whole, tokenizer.encode_with_control(text))
    only_one = tool_call_grammar(output_format, tools(SCHEMA), PARAMS, one_only=True)
    whole, _ = wrapped(models[name], only_one, prompt)
    assert follows(compiler, whole, tokenizer.encode_with_control(text)) == (len(made) == 1)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("seed", range(6))
def test_any_answer_by_the_grammar_is_parsed_as_calls(models: Any, name: str, seed: int) -> None:
    tokenizer, output_format, compiler = models[name]
    grammar = tool_call_grammar(output_format, tools(BOUNDED)[:1], PARAMS[:1], one_only=True)
    prompt = "<|open|>response<|sep|>" if name == "kimi_k3" else "x"
    whole, _ = wrapped(models[name], grammar, prompt)
    answer = compiler.compile(whole)
    pick = random.Random(seed)
    ids: list[int] = []
    while not answer.is_complete and len(ids) < 2000:
        mask = int.from_bytes(answer.allowed_tokens(len(ids)), "little")
        options = [i for i in range(tokenizer.vocab_size) if mask >> i & 1]
        if set(options) & set(tokenizer.eos_token_ids):
            break
        # Mostly the longest: white space between JSON tokens would take most of the steps.
        solid = [i for i in options if tokenizer.token_text(i).strip()]
        token_id = pick.choice(solid or options)
        answer.accept([token_id])
        ids.append(token_id)
    found = parsed(
        output_format,
        output_format.marks.text_of(ids),
        prompt=tokenizer.encode_with_control(prompt),
        tools=tools(BOUNDED),
    )
    assert found.content == "" and found.reasoning == ""
    (call,) = found.calls
    arguments = json.loads(call.arguments)
    assert call.name == "find" and arguments["kind"] in ("fox", "dog")
    assert set(arguments) <= {"n", "kind", "list"}
    assert 0 <= arguments.get("n", 0) <= 99


@pytest.mark.parametrize("name", ["kimi_k3", "hermes"])
def test_content_is_constrained_behind_the_thought(models: Any, name: str) -> None:
    tokenizer, _, compiler = models[name]
    prompt = "<|open|>think<|sep|>" if name == "kimi_k3" else "x<think>\n"
    whole, after = wrapped(models[name], json_grammar({"type": "integer"}, "p"), prompt)
    assert after
    text = written(name, "the quick fox", "12", []).removeprefix("<think>\n")
    assert follows(compiler, whole, tokenizer.encode_with_control(text), after)
    wrong = written(name, "the quick fox", "a", []).removeprefix("<think>\n")
    assert not follows(compiler, whole, tokenizer.encode_with_control(wrong), after)


@pytest.mark.parametrize(
    ("name", "prompt"), [("hermes", "x"), ("hermes", "x<think>\n\n</think>\n\n"), ("kimi_k2", "")]
)
def test_without_an_open_thought_the_grammar_begins_at_once(models: Any, name: str, prompt: str) -> None:
    tokenizer, _, compiler = models[name]
    whole, after = wrapped(models[name], choice_grammar(["fox"], "p"), prompt)
    assert after == ()
    assert follows(compiler, whole, tokenizer.encode("fox"))
    assert not follows(compiler, whole, tokenizer.encode("dog"))


def test_k3_content_without_thinking(models: Any) -> None:
    tokenizer, _, compiler = models["kimi_k3"]
    whole, after = wrapped(models["kimi_k3"], choice_grammar(["fox"], "p"), "<|open|>response<|sep|>")
    text = "fox<|close|>response<|sep|><|close|>message<|sep|>"
    assert after == () and follows(compiler, whole, tokenizer.encode_with_control(text))


@pytest.mark.parametrize("name", FORMATS)
def test_a_bad_schema_of_a_tool_is_named(models: Any, name: str) -> None:
    _, output_format, compiler = models[name]
    bad = {"type": "object", "properties": {"a": {"type": "integr"}}}
    grammar = tool_call_grammar(output_format, tools(bad), PARAMS, one_only=False)
    with pytest.raises(RequestError, match=re.escape("tools[0].function.parameters.properties.a")):
        compiler.compile(grammar)


def test_a_format_without_calls(models: Any) -> None:
    tokenizer, _, _ = models["hermes"]
    with pytest.raises(RequestError, match="writes no tool calls"):
        tool_call_grammar(OutputFormat(tokenizer), tools(SCHEMA), PARAMS, one_only=False)


@pytest.mark.parametrize(
    ("name", "is_thinking"), [(name, thinks) for name in FORMATS for thinks in (False, name != "kimi_k2")]
)
def test_content_with_a_form_or_a_call_instead(models: Any, name: str, is_thinking: bool) -> None:
    tokenizer, output_format, compiler = models[name]
    prompts = {
        "kimi_k3": ("<|open|>response<|sep|>", "<|open|>think<|sep|>"),
        "hermes": ("x", "x<think>\n"),
        "qwen3_coder": ("x", "x<think>\n"),
        "kimi_k2": ("x", "x"),
    }
    whole, after = in_chat_format(
        output_format,
        tokenizer,
        tokenizer.encode_with_control(prompts[name][is_thinking]),
        content=json_grammar({"type": "integer"}, "p"),
        calls=tool_call_grammar(output_format, tools(SCHEMA), PARAMS, one_only=True),
    )
    thought = "the fox" if is_thinking else ""
    for content, made in (("12", []), ("", [("find", {"kind": "fox"})])):
        text = written(name, thought, content, made)
        begin = "<think>\n" if is_thinking else "<|close|>think<|sep|><|open|>response<|sep|>"
        ids = tokenizer.encode_with_control(text.removeprefix(begin))
        assert follows(compiler, whole, ids, after), (name, content)
    ids = tokenizer.encode_with_control(written(name, thought, "a", []).removeprefix(begin))
    assert not follows(compiler, whole, ids, after)
