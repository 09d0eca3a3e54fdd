"""Fields that demand a form of the answer -> one grammar."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from milepost.engine.constraints import Constraint
from milepost.engine.serving import ServingModel
from milepost.engine.structured import (
    Grammar,
    choice_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
)
from milepost.engine.tool_grammars import in_chat_format, tool_call_grammar
from milepost.errors import RequestError
from milepost.server.schema import Body, ChatBody

NewConstraint = Callable[[], Constraint]
"""Makes the constraint of one answer."""

ANY_OBJECT = {"type": "object"}
KINDS = ("json", "json_object", "regex", "choice", "grammar")
"""Keys of `structured_outputs`; with `guided_` before them, fields of their own."""
IGNORED_KINDS = ("disable_any_whitespace", "disable_additional_properties", "disable_fallback", "backend")
"""Keys that tune other servers' backends."""


def constrained(model: ServingModel, grammar: Grammar | None) -> NewConstraint | None:
    """Compile a grammar for an answer that is all body. Takes a while: not for the event loop.

    Raises:
        RequestError: names the field, and the place in a schema.
    """
    if grammar is None:
        return None
    return model.grammars.compile(grammar).fresh


def constrained_chat(
    model: ServingModel,
    body: ChatBody,
    tools: Sequence[dict[str, Any]] | None,
    prompt_token_ids: Sequence[int],
) -> NewConstraint | None:
    """The same for a chat answer: the grammar of its content, or of the calls `tool_choice` demands, in
    the model's chat format, behind a thought that the prompt has opened."""
    calls = demanded_calls(model, body, tools)
    content = demanded_form(body) if calls is None else None
    if content is not None and tools and body.tool_choice in (None, "auto") and model.output_format.can_call:
        # The content has a form, and the model may still call instead.
        calls = _any_calls(model, body, tools)
    if calls is None and content is None:
        return None
    whole, after = in_chat_format(
        model.output_format, model.tokenizer, prompt_token_ids, content=content, calls=calls
    )
    return model.grammars.compile(whole, after=after).fresh


def demanded_calls(
    model: ServingModel, body: ChatBody, tools: Sequence[dict[str, Any]] | None
) -> Grammar | None:
    """The grammar for `tool_choice`; None if it leaves the choice to the model."""
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return None
    named = _named_function(choice)
    if choice != "required" and named is None:
        raise RequestError(
            "tool_choice",
            'must be `none`, `auto`, `required` or `{"type": "function", "function": {"name": ...}}`',
        )
    found = [
        (tool, f"tools[{index}]")
        for index, tool in enumerate(tools or ())
        if named is None or tool["function"]["name"] == named
    ]
    if not found:
        what = "needs `tools`" if named is None else f"names {named!r:.80}, which `tools` does not declare"
        raise RequestError("tool_choice", what)
    return tool_call_grammar(
        model.output_format,
        [tool for tool, _ in found],
        [param for _, param in found],
        one_only=named is not None or wants_one_call(body),
    )


def _any_calls(model: ServingModel, body: ChatBody, tools: Sequence[dict[str, Any]]) -> Grammar:
    params = [f"tools[{index}]" for index in range(len(tools))]
    return tool_call_grammar(model.output_format, tools, params, one_only=wants_one_call(body))


def wants_one_call(body: ChatBody) -> bool:
    """Whether an answer may hold one call at most."""
    return (body.model_extra or {}).get("parallel_tool_calls") is False


def _named_function(choice: Any) -> str | None:
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
    return name if isinstance(name, str) else None


def demanded_form(body: Body) -> Grammar | None:
    """The grammar of the content; None if any text will do.

    Raises:
        RequestError: a field that is wrong, or two that contradict each other.
    """
    found = [grammar for grammar in (_response_format(body.response_format), *_guided(body)) if grammar]
    if len(found) > 1:
        raise RequestError(
            found[1].param, f"cannot be combined with `{found[0].param}`: an answer has one form"
        )
    return found[0] if found else None


def _response_format(value: Any) -> Grammar | None:
    if value is None:
        return None
    param = "response_format"
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return json_grammar(ANY_OBJECT, param)
    if kind == "json_schema":
        inner = value.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        return json_grammar(_schema(schema, f"{param}.json_schema.schema"), f"{param}.json_schema.schema")
    raise RequestError(f"{param}.type", f"must be text, json_object or json_schema, not {kind!r:.80}")


def _guided(body: Body) -> list[Grammar]:
    values = {f"guided_{kind}": getattr(body, f"guided_{kind}") for kind in KINDS}
    options = body.structured_outputs
    if options is not None:
        if not isinstance(options, Mapping):
            raise RequestError("structured_outputs", f"must be an object with one of {', '.join(KINDS)}")
        for kind, value in options.items():
            if kind not in (*KINDS, *IGNORED_KINDS) and value is not None:
                raise RequestError(
                    f"structured_outputs.{kind:.80}",
                    f"is not supported by this server; use one of {', '.join(KINDS)}",
                    code="unsupported_field",
                )
            if kind in KINDS:
                values[f"structured_outputs.{kind}"] = value
    return [_by_kind(param, value) for param, value in values.items() if value not in (None, False)]


def _by_kind(param: str, value: Any) -> Grammar:
    kind = param.removeprefix("guided_").removeprefix("structured_outputs.")
    if kind == "json":
        return json_grammar(_schema(value, param), param)
    if kind == "json_object":
        return json_grammar(ANY_OBJECT, param)
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
            raise RequestError(param, "must be a list of texts, none of them empty")
        return choice_grammar(value, param)
    if not isinstance(value, str) or not value:
        raise RequestError(param, "must be a text, and not empty")
    return regex_grammar(value, param) if kind == "regex" else lark_grammar(value, param)


def _schema(value: Any, param: str) -> Mapping[str, Any]:
    if isinstance(value, str):  # other servers take a schema as text too
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, Mapping):
        raise RequestError(param, "must be a JSON schema, which is an object")
    return value
