"""Requests of OpenAI's Responses API -> the chat API's form. Errors name the fields as they were sent.

The server keeps no responses: every request brings its whole conversation.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from milepost.engine.markers import MarkerList
from milepost.errors import RequestError
from milepost.server.chat_run import Conversation
from milepost.server.conversation import checked_messages, checked_tools
from milepost.server.schema import ChatBody, check_unknown_fields

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "context_management": (),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Fields that would change the answer and are not implemented -> values that ask for nothing."""
HARMLESS = frozenset(
    {
        "include", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier",
        "store", "stream_options", "user",
    }
)  # fmt: skip
TEXT_KINDS = ("text", "input_text", "output_text")


class ResponsesBody(BaseModel):
    """`POST /v1/responses`."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    input: Any = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: Any = None
    reasoning: Any = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    seed: int | None = None
    cache_salt: str | None = None
    cache_prompt: bool | None = None
    cache_priority: int | None = None
    priority: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check_extras(self) -> None:
        """Refuse what would change the answer and is not implemented.

        Raises:
            RequestError: names the field.
        """
        check_unknown_fields(self.model_extra, HARMLESS, UNSUPPORTED, _hint)


def _hint(name: str) -> str:
    return ", which keeps no responses: send the whole conversation in `input`" if "response" in name else ""


def chat_body(body: ResponsesBody) -> ChatBody:
    """Everything but the conversation.

    Raises:
        RequestError: names the field.
    """
    reasoning = body.reasoning if body.reasoning is not None else {}
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
    if not isinstance(reasoning, dict) or not isinstance(effort, str | None):
        raise RequestError("reasoning", "must be an object with a text as `effort`")
    options: dict[str, Any] = {
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tool_choice": _tool_choice(body.tool_choice),
        "response_format": _response_format(body.text),
        "chat_template_kwargs": body.chat_template_kwargs,
        "reasoning_effort": effort,
        "prompt_cache_key": body.prompt_cache_key,
        "seed": body.seed,
        "cache_salt": body.cache_salt,
        "cache_prompt": body.cache_prompt,
        "cache_priority": body.cache_priority,
        "priority": body.priority,
        "parallel_tool_calls": body.parallel_tool_calls,
    }
    made = ChatBody(**options)
    made.check_extras()
    return made


def conversation(body: ResponsesBody) -> Conversation:
    """Messages and tools in the chat API's form.

    Raises:
        RequestError: names the field.
    """
    found = MarkerList()
    tools = [_tool(f"tools[{index}]", tool) for index, tool in enumerate(body.tools or ())]
    writer = _Writer()
    if body.instructions:
        writer.messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        writer.messages.append({"role": "user", "content": body.input})
    elif isinstance(body.input, list) and body.input:
        for index, item in enumerate(body.input):
            writer.item(f"input[{index}]", item)
    else:
        raise RequestError("input", "must be a text, or a list with at least one item")
    shown = checked_tools(tools, found) if body.tool_choice != "none" else None
    return Conversation(checked_messages(writer.messages, found), shown, found)


class _Writer:
    """Messages as they are being written. Items of one answer become one assistant message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def item(self, where: str, item: Any) -> None:
        if not isinstance(item, dict):
            raise RequestError(where, "must be an object")
        kind = item.get("type", "message")
        if kind == "message":
            self._message(where, item)
        elif kind == "reasoning":
            self._answer(begins=True)["reasoning_content"] = _reasoning(where, item)
        elif kind == "function_call":
            function = {key: _text(f"{where}.{key}", item.get(key)) for key in ("name", "arguments")}
            call = {"id": _text(f"{where}.call_id", item.get("call_id")), "type": "function"}
            self._answer().setdefault("tool_calls", []).append({**call, "function": function})
        elif kind == "function_call_output":
            call_id = _text(f"{where}.call_id", item.get("call_id"))
            output = _content(f"{where}.output", item.get("output"))
            self.messages.append({"role": "tool", "content": output, "tool_call_id": call_id})
        else:
            raise RequestError(
                f"{where}.type", f"{kind!r:.80} items are not supported", code="unsupported_field"
            )

    def _message(self, where: str, item: dict[str, Any]) -> None:
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise RequestError(
                f"{where}.role", f"must be user, assistant, system or developer, not {role!r:.80}"
            )
        text = _content(f"{where}.content", item.get("content"))
        if role != "assistant":
            self.messages.append({"role": role, "content": text})
            return
        open_answer = self._open()
        is_full = open_answer is not None and (open_answer["content"] or open_answer.get("tool_calls"))
        self._answer(begins=bool(is_full))["content"] = text

    def _open(self) -> dict[str, Any] | None:
        """The answer that the next item may belong to."""
        last = self.messages[-1] if self.messages else None
        return last if last is not None and last["role"] == "assistant" else None

    def _answer(self, *, begins: bool = False) -> dict[str, Any]:
        answer = None if begins else self._open()
        if answer is None:
            answer = {"role": "assistant", "content": ""}
            self.messages.append(answer)
        return answer


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(where, "must be a text or a list of parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal":
            texts.append(_text(f"{where}[{index}].refusal", part.get("refusal")))
            continue
        if kind not in TEXT_KINDS:
            raise RequestError(
                f"{where}[{index}].type",
                f"{kind!r:.80} parts are not supported; this model reads text only",
                code="unsupported_field",
            )
        texts.append(_text(f"{where}[{index}].text", part.get("text")))
    return "".join(texts)


def _reasoning(where: str, item: dict[str, Any]) -> str:
    """The thoughts themselves; a summary where there is nothing else."""
    for key in ("content", "summary"):
        parts = item.get(key)
        if parts:
            if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
                raise RequestError(f"{where}.{key}", "must be a list of parts with `text`")
            return "".join(
                _text(f"{where}.{key}[{n}].text", part.get("text")) for n, part in enumerate(parts)
            )
    return ""


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RequestError(where, "must be a string")
    return value


def _tool(where: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise RequestError(where, "must be an object")
    if tool.get("type") != "function":
        raise RequestError(
            f"{where}.type",
            f"{tool.get('type')!r:.80} tools are not supported, only functions",
            code="unsupported_field",
        )
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise RequestError(f"{where}.name", "must be a non-empty string")
    function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _tool_choice(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") == "function":
        return {"type": "function", "function": {"name": value.get("name")}}
    if isinstance(value, dict):
        raise RequestError(
            "tool_choice.type", f"{value.get('type')!r:.80} is not supported", code="unsupported_field"
        )
    return value


def _response_format(text: Any) -> Any:
    if text is None:
        return None
    if not isinstance(text, dict):
        raise RequestError("text", "must be an object")
    form = text.get("format")
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise RequestError("text.format.type", f"must be text, json_object or json_schema, not {kind!r:.80}")
    if kind == "json_schema":
        if not isinstance(form.get("schema"), dict):
            raise RequestError("text.format.schema", "must be a JSON schema, which is an object")
        return {"type": kind, "json_schema": {"schema": form["schema"]}}
    return {"type": kind}
