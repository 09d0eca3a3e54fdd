"""Requests of Anthropic's Messages API -> the chat API's form. Errors name the fields as they were sent."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict

from milepost.engine.markers import Marker, MarkerList
from milepost.errors import RequestError
from milepost.server.chat_run import Conversation
from milepost.server.conversation import MAX_MESSAGES, MAX_TOOLS, check_count
from milepost.server.schema import ChatBody, check_unknown_fields, thinking_variables

UNSUPPORTED: dict[str, tuple[Any, ...]] = {"mcp_servers": ([],), "container": ()}
"""Fields that would change the answer and are not implemented -> values that ask for nothing."""
HARMLESS = frozenset(
    {
        "betas", "context_management", "diagnostics", "inference_geo", "metadata", "service_tier", "speed",
        "user_profile_id", "workspace_id",
    }
)  # fmt: skip
"""Fields that may be ignored; without context management a prompt is longer, not another."""
Text = tuple[str, Any, str]
"""A text, the `cache_control` behind it, and the field of that."""


class MessagesBody(BaseModel):
    """`POST /v1/messages`, and with fewer fields `/v1/messages/count_tokens`."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    messages: list[Any] | None = None
    max_tokens: int | None = None
    system: Any = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    thinking: Any = None
    output_config: Any = None
    cache_control: Any = None
    seed: int | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    cache_prompt: bool | None = None
    cache_priority: int | None = None
    priority: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check_extras(self) -> None:
        """Refuse what would change the answer and is not implemented.

        Raises:
            RequestError: names the field.
        """
        check_unknown_fields(self.model_extra, HARMLESS, UNSUPPORTED)


def chat_body(body: MessagesBody) -> ChatBody:
    """Everything but the conversation.

    Raises:
        RequestError: names the field.
    """
    choice, one_only = _tool_choice(body.tool_choice)
    variables = dict(body.chat_template_kwargs or {})
    thinks = _thinks(body.thinking)
    if thinks is not None:
        variables = {**thinking_variables(thinks), **variables}
    options: dict[str, Any] = {
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences or None,
        "tool_choice": choice,
        "response_format": _response_format(body.output_config),
        "chat_template_kwargs": variables or None,
        "seed": body.seed,
        "cache_salt": body.cache_salt,
        "prompt_cache_key": body.prompt_cache_key,
        "cache_prompt": body.cache_prompt,
        "cache_priority": body.cache_priority,
        "priority": body.priority,
    }
    if one_only:
        options["parallel_tool_calls"] = False
    made = ChatBody(**options)
    made.check_extras()
    return made


def conversation(body: MessagesBody) -> Conversation:
    """Messages and tools in the chat API's form, with `cache_control` as markers.

    Raises:
        RequestError: names the field.
    """
    if not body.messages:
        raise RequestError("messages", "must hold at least one message")
    check_count("messages", body.messages, MAX_MESSAGES)
    check_count("tools", body.tools, MAX_TOOLS)
    writer = _Writer()
    tools = [writer.tool(f"tools[{index}]", tool) for index, tool in enumerate(body.tools or ())]
    is_hidden = isinstance(body.tool_choice, dict) and body.tool_choice.get("type") == "none"
    if body.system is not None and body.system != []:
        writer.message("system", [*writer.texts("system", body.system)])
    for index, message in enumerate(body.messages):
        writer.turn(f"messages[{index}]", message)
    if not writer.messages:
        raise RequestError("messages", "hold no text")
    if body.cache_control is not None:
        # "Automatic" caching: the end of the conversation.
        writer.found.add("cache_control", body.cache_control, Marker("message", len(writer.messages) - 1))
    return Conversation(writer.messages, None if is_hidden or not tools else tools, writer.found)


class _Writer:
    """Messages as they are being written."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.found = MarkerList()
        self._num_tools = 0

    def tool(self, where: str, tool: Any) -> dict[str, Any]:
        if not isinstance(tool, dict):
            raise RequestError(where, "must be an object")
        if tool.get("type") not in (None, "custom"):
            raise RequestError(
                f"{where}.type",
                f"{tool['type']!r:.80} is a tool of Anthropic's own servers; declare one with `input_schema`",
                code="unsupported_field",
            )
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise RequestError(f"{where}.name", "must be a non-empty string")
        if not isinstance(tool.get("input_schema"), dict):
            raise RequestError(f"{where}.input_schema", "must be a JSON schema")
        function: dict[str, Any] = {"name": tool["name"]}
        if isinstance(tool.get("description"), str):
            function["description"] = tool["description"]
        function["parameters"] = tool["input_schema"]
        self.found.add(f"{where}.cache_control", tool.get("cache_control"), Marker("tool", self._num_tools))
        self._num_tools += 1
        return {"type": "function", "function": function}

    def texts(self, where: str, content: Any) -> list[Text]:
        """Of content that is a text or a list of text blocks."""
        if isinstance(content, str):
            return [(content, None, where)]
        blocks = enumerate(self.blocks(where, content))
        return [text for index, block in blocks for text in self._one_text(f"{where}[{index}]", block)]

    def blocks(self, where: str, content: Any) -> list[dict[str, Any]]:
        if not isinstance(content, list):
            raise RequestError(where, "must be a string or a list of content blocks")
        for index, block in enumerate(content):
            if not isinstance(block, dict) or not isinstance(block.get("type"), str):
                raise RequestError(f"{where}[{index}].type", "must name the kind of the block")
        return content

    def text(self, place: str, block: dict[str, Any], key: str = "text") -> str:
        if not isinstance(block.get(key), str):
            raise RequestError(f"{place}.{key}", "must be a string")
        text: str = block[key]
        return text

    def message(self, role: str, parts: list[Text], **fields: Any) -> None:
        """Append a message made of texts; markers stand behind the parts that have them."""
        index, text = len(self.messages), ""
        for part, cache_control, place in parts:
            text += part
            self.found.add(place, cache_control, Marker("message", index, len(text)))
        self.messages.append({"role": role, "content": text, **fields})

    def turn(self, where: str, message: Any) -> None:
        if not isinstance(message, dict):
            raise RequestError(where, "must be an object with `role` and `content`")
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise RequestError(f"{where}.role", f"must be user or assistant, not {role!r:.80}")
        place = f"{where}.content"
        if role == "system" or isinstance(content, str):
            self.message(role, self.texts(place, content))
        elif role == "user":
            self._user(place, self.blocks(place, content))
        else:
            self._assistant(place, self.blocks(place, content))

    def _user(self, where: str, blocks: list[dict[str, Any]]) -> None:
        """Results of tools are messages of their own, in the order of the blocks."""
        texts: list[Text] = []
        for index, block in enumerate(blocks):
            place = f"{where}[{index}]"
            if block["type"] != "tool_result":
                texts += self._one_text(place, block)
                continue
            if texts:
                self.message("user", texts)
                texts = []
            call_id = self.text(place, block, "tool_use_id")
            given = block.get("content")
            parts = [] if given is None else self.texts(f"{place}.content", given)
            parts.append(("", block.get("cache_control"), f"{place}.cache_control"))
            self.message("tool", parts, tool_call_id=call_id)
        if texts:
            self.message("user", texts)

    def _one_text(self, place: str, block: dict[str, Any]) -> list[Text]:
        source = block.get("source")
        if block["type"] == "document" and isinstance(source, dict) and source.get("type") == "text":
            block = {**block, "type": "text", "text": self.text(f"{place}.source", source, "data")}
        if block["type"] != "text":
            raise RequestError(
                f"{place}.type",
                f"{block['type']!r:.80} blocks are not supported; this model reads text only",
                code="unsupported_field",
            )
        return [(self.text(place, block), block.get("cache_control"), f"{place}.cache_control")]

    def _assistant(self, where: str, blocks: list[dict[str, Any]]) -> None:
        texts: list[Text] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        last: Any = None
        for index, block in enumerate(blocks):
            place = f"{where}[{index}]"
            if block["type"] == "thinking":
                thoughts.append(self.text(place, block, "thinking"))
            elif block["type"] == "redacted_thinking":
                continue
            elif block["type"] == "tool_use":
                calls.append(self._call(place, block))
                last = (block.get("cache_control"), f"{place}.cache_control")
            else:
                texts += self._one_text(place, block)
        fields: dict[str, Any] = {}
        if thoughts:
            fields["reasoning_content"] = "".join(thoughts)
        if calls:
            fields["tool_calls"] = calls
        self.message("assistant", texts, **fields)
        if last is not None:
            self.found.add(last[1], last[0], Marker("message", len(self.messages) - 1))

    def _call(self, place: str, block: dict[str, Any]) -> dict[str, Any]:
        given = block.get("input")
        if given is not None and not isinstance(given, dict):
            raise RequestError(f"{place}.input", "must be an object")
        # Clients parse the arguments: the text is gone, and this is how models write JSON most often.
        arguments = json.dumps(given or {}, ensure_ascii=False)
        function = {"name": self.text(place, block, "name"), "arguments": arguments}
        return {"id": self.text(place, block, "id"), "type": "function", "function": function}


def _tool_choice(value: Any) -> tuple[Any, bool]:
    """The chat API's `tool_choice`, and whether one call at most is wanted."""
    if value is None:
        return None, False
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "tool":
        if not isinstance(value.get("name"), str):
            raise RequestError("tool_choice.name", "must name a tool")
        return {"type": "function", "function": {"name": value["name"]}}, True
    known = {"auto": "auto", "any": "required", "none": "none"}
    if not isinstance(kind, str) or kind not in known:
        raise RequestError("tool_choice.type", f"must be auto, any, tool or none, not {kind!r:.80}")
    return known[kind], value.get("disable_parallel_tool_use") is True


def _thinks(value: Any) -> bool | None:
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("enabled", "adaptive", "between_tools", "disabled"):
        raise RequestError("thinking.type", f"must be enabled, adaptive or disabled, not {kind!r:.80}")
    return bool(kind != "disabled")


def _response_format(config: Any) -> Any:
    if config is None:
        return None
    if not isinstance(config, dict):
        raise RequestError("output_config", "must be an object")
    form = config.get("format")
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise RequestError("output_config.format.type", "must be json_schema")
    if not isinstance(form.get("schema"), dict):
        raise RequestError("output_config.format.schema", "must be a JSON schema")
    return {"type": "json_schema", "json_schema": {"schema": form["schema"]}}
