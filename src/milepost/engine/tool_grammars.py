"""Grammars for tool calls that a request demands, and for answers inside a chat format.

Each writes what the family's tool parser reads. Control tokens stand in a grammar by their id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from milepost.engine.marks import MarkTable
from milepost.engine.output_parser import NONE, PROMPT_END_TOKENS, OutputFormat
from milepost.engine.parts import tool_schemas
from milepost.engine.reasoning import TaggedMessage, ThinkTags
from milepost.engine.structured import Grammar, json_part, lark_text, wrapped
from milepost.engine.tagged_tools import argument_kinds
from milepost.engine.tokenizer import Tokenizer
from milepost.errors import RequestError

CALLS = "calls"
"""Name of the grammar of tool calls."""


@dataclass(slots=True)
class _Rules:
    """A grammar that is being written."""

    marks: MarkTable
    lark: list[str]
    parts: list[dict[str, Any]]
    params: dict[str, str]

    def tag(self, content: str) -> str:
        """A tag of the format in Lark's notation."""
        token_id = self.marks.token_id(content)
        return lark_text(content) if token_id is None else f"<[{token_id}]>"

    def json(self, schema: Any, param: str) -> str:
        """A reference to JSON by a schema."""
        name = f"json{len(self.parts)}"
        self.parts.append(json_part(name, schema))
        self.params[name] = param
        return f"@{name}"


def tool_call_grammar(
    output_format: OutputFormat, tools: Sequence[Mapping[str, Any]], params: Sequence[str], *, one_only: bool
) -> Grammar:
    """At least one call of one of `tools`, and nothing else.

    Args:
        params: request field of each tool, for errors.
        one_only: not more than one call.

    Raises:
        RequestError: the model's format has no tool calls.
    """
    writer = _WRITERS.get(output_format.tools)
    if writer is None:
        raise RequestError(
            "tool_choice",
            "this model's chat template writes no tool calls, so none can be demanded",
            code="unsupported_field",
        )
    rules = _Rules(output_format.marks, [], [], {})
    names = []
    for number, (tool, param) in enumerate(zip(tools, params, strict=True)):
        ((name, schema),) = tool_schemas([dict(tool)]).items()
        rules.lark.append(f"call{number}: {writer.call(rules, name, schema, f'{param}.function.parameters')}")
        names.append(f"call{number}")
    more = "" if one_only else f"({writer.between(rules)} call)*"
    rules.lark.insert(0, f"start: {writer.around(rules, f'call {more}')}\ncall: {' | '.join(names)}")
    start = {"name": CALLS, "lark_grammar": "\n".join(rules.lark)}
    return Grammar((start, *rules.parts), "tools", rules.params)


def in_chat_format(
    output_format: OutputFormat,
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    *,
    content: Grammar | None = None,
    calls: Grammar | None = None,
) -> tuple[Grammar, tuple[int, ...]]:
    """A whole answer of the model's format, made of content or of calls (either one, if both are given),
    and the tokens behind which it begins: the end of a thought that the prompt has opened. Without such
    a thought it begins at once."""
    inner = [grammar for grammar in (content, calls) if grammar is not None]
    prompt_end = output_format.marks.text_of(prompt_token_ids[-PROMPT_END_TOKENS:])
    if "kimi_k3" in (output_format.reasoning, output_format.tools):
        return _in_k3_format(output_format.marks, tokenizer, prompt_end, content, calls)
    choice = " | ".join(grammar.name for grammar in inner)
    after = _open_thought(output_format, prompt_end)
    if not after:
        return inner[0] if len(inner) == 1 else wrapped(f"start: {choice}", *inner), ()
    return wrapped(f"start: /\\n{{0,2}}/ ({choice})", *inner), after


def _open_thought(output_format: OutputFormat, prompt_end: str) -> tuple[int, ...]:
    """The id of `</think>`, if the prompt ends in a thought; else nothing."""
    marks = output_format.marks
    opening = marks.needle(ThinkTags.TAGS[0])
    opened = prompt_end.rfind(opening)
    end_id = marks.token_id(ThinkTags.TAGS[1])
    is_open = opened >= 0 and not prompt_end[opened + len(opening) :].strip()
    return (end_id,) if is_open and end_id is not None and output_format.reasoning != NONE else ()


def _in_k3_format(
    marks: MarkTable, tokenizer: Tokenizer, prompt_end: str, content: Grammar | None, calls: Grammar | None
) -> tuple[Grammar, tuple[int, ...]]:
    rules = _Rules(marks, [], [], {})
    opening, closing, sep = (rules.tag(tag) for tag in TaggedMessage.TAGS)
    end = f'{closing} "response" {sep}'
    bodies = [] if content is None else [f"{content.name} {end}"]
    bodies += [] if calls is None else [f"{end} {calls.name}"]
    is_thinking = prompt_end.endswith(f"{marks.needle('<|open|>')}think{marks.needle('<|sep|>')}")
    begin = f'{opening} "response" {sep}' if is_thinking else ""
    lark = f'start: {begin} ({" | ".join(bodies)}) {closing} "message" {sep}'
    close_id, sep_id = marks.token_id("<|close|>"), marks.token_id("<|sep|>")
    after: tuple[int, ...] = ()
    if is_thinking and close_id is not None and sep_id is not None:
        after = (close_id, *tokenizer.encode("think"), sep_id)
    return wrapped(lark, *(grammar for grammar in (content, calls) if grammar is not None)), after


class _Hermes:
    """See `HermesTools`."""

    def around(self, rules: _Rules, calls: str) -> str:
        return calls

    def between(self, rules: _Rules) -> str:
        return '"\\n"'

    def call(self, rules: _Rules, name: str, schema: Any, param: str) -> str:
        head = lark_text(f'\n{{"name": {lark_text(name)}, "arguments": ')
        arguments = rules.json(_object(schema), param)
        return f'{rules.tag("<tool_call>")} {head} {arguments} "}}\\n" {rules.tag("</tool_call>")}'


class _KimiK2:
    """See `KimiK2Tools`."""

    def around(self, rules: _Rules, calls: str) -> str:
        begin, end = (rules.tag(f"<|tool_calls_section_{edge}|>") for edge in ("begin", "end"))
        return f"{begin} {calls} {end}"

    def between(self, rules: _Rules) -> str:
        return ""

    def call(self, rules: _Rules, name: str, schema: Any, param: str) -> str:
        begin, arguments, end = (
            rules.tag(f"<|tool_call_{edge}|>") for edge in ("begin", "argument_begin", "end")
        )
        head = lark_text(f"functions.{name}:")
        return f"{begin} {head} /[0-9]{{1,3}}/ {arguments} {rules.json(_object(schema), param)} {end}"


class _Qwen3Coder:
    """See `Qwen3CoderTools`."""

    def around(self, rules: _Rules, calls: str) -> str:
        return calls

    def between(self, rules: _Rules) -> str:
        return '"\\n"'

    def call(self, rules: _Rules, name: str, schema: Any, param: str) -> str:
        arguments = _each_argument(schema, param, lambda *found: self._argument(rules, *found))
        head = lark_text(f"\n<function={name}>\n")
        end = f'"</function>\\n" {rules.tag("</tool_call>")}'
        return f"{rules.tag('<tool_call>')} {head} {arguments} {end}"

    def _argument(self, rules: _Rules, key: str, schema: Any, param: str) -> str:
        head = lark_text(f"<parameter={key}>\n")
        kinds = argument_kinds(schema)
        if kinds and "string" not in kinds:
            return f'{head} {rules.json(schema, param)} "\\n</parameter>\\n"'
        # Lazy: the value ends with the first end tag on a line of its own.
        name = f"value{len(rules.lark)}"
        values = _texts_of(schema)
        if values:
            options = " | ".join(lark_text(f"{value}\n</parameter>\n") for value in values)
            rules.lark.append(f"{name}: {options}")
        else:
            rules.lark.append(f"{name}[lazy]: /(?s:.*)\\n<\\/parameter>\\n/")
        return f"{head} {name}"


class _KimiK3:
    """See `KimiK3Tools`."""

    def around(self, rules: _Rules, calls: str) -> str:
        opening, closing, sep = (rules.tag(tag) for tag in TaggedMessage.TAGS)
        return f'{opening} "tools" {sep} {calls} {closing} "tools" {sep}'

    def between(self, rules: _Rules) -> str:
        return ""

    def call(self, rules: _Rules, name: str, schema: Any, param: str) -> str:
        opening, closing, sep = (rules.tag(tag) for tag in TaggedMessage.TAGS)
        tag = lark_text("call" + _attribute("tool", name) + " index=")
        head = f'{opening} {tag} /"[0-9]{{1,3}}"/ {sep}'
        if (schema or {}).get("properties"):
            inner = _each_argument(schema, param, lambda *found: self._argument(rules, *found))
        else:
            body = rules.json(_object(schema), param)
            json_head = lark_text('json type="object"')
            inner = f'({opening} {json_head} {sep} {body} {closing} "json" {sep})?'
        return f'{head} {inner} {closing} "call" {sep}'

    def _argument(self, rules: _Rules, key: str, schema: Any, param: str) -> str:
        opening, closing, sep = (rules.tag(tag) for tag in TaggedMessage.TAGS)
        options = []
        for kind in sorted(argument_kinds(schema)) or ["string"]:
            shown = "number" if kind == "integer" else kind
            tag = lark_text(f"argument{_attribute('key', key)}{_attribute('type', shown)}")
            if kind == "string":
                values = _texts_of(schema)
                value = "(" + " | ".join(map(lark_text, values)) + ")" if values else "/(?s:.+)/?"
            else:
                value = rules.json({**schema, "type": kind}, param)
            options.append(f"{opening} {tag} {sep} {value}")
        return f'({" | ".join(options)}) {closing} "argument" {sep}'


_WRITERS: Mapping[str, _Hermes | _KimiK2 | _KimiK3 | _Qwen3Coder] = {
    "hermes": _Hermes(),
    "kimi_k2": _KimiK2(),
    "kimi_k3": _KimiK3(),
    "qwen3_coder": _Qwen3Coder(),
    "qwen3_xml": _Qwen3Coder(),
}


def _object(schema: Any) -> Any:
    """Arguments are an object, also where a tool does not say so."""
    return schema if schema else {"type": "object"}


def _each_argument(schema: Any, param: str, write: Callable[[str, Any, str], str]) -> str:
    """Arguments in the order of the schema; those that are not required may be left out."""
    required = set((schema or {}).get("required") or ())
    properties = (schema or {}).get("properties") or {}
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in (schema or {})}
    rules = []
    for key, inner in properties.items():
        inner = {**definitions, **inner} if isinstance(inner, dict) else definitions
        rule = write(key, inner, f"{param}.properties.{key}")
        rules.append(f"({rule})" + ("" if key in required else "?"))
    return " ".join(rules)


def _texts_of(schema: Mapping[str, Any]) -> list[str]:
    """The texts an argument is restricted to; empty = not restricted."""
    if isinstance(schema.get("const"), str):
        return [schema["const"]]
    values = schema.get("enum") or ()
    return [value for value in values if isinstance(value, str)]


def _attribute(name: str, value: str) -> str:
    return f' {name}="' + value.replace("&", "&amp;").replace('"', "&quot;") + '"'
