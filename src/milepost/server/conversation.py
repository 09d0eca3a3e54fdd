"""Checks of `messages` and `tools` before a template sees them; `cache_control` is taken out of them."""

from __future__ import annotations

from typing import Any

from milepost.engine.markers import Marker, MarkerList
from milepost.errors import RequestError

MAX_MESSAGES = 4096
MAX_TOOLS = 512
ROLES = ("system", "developer", "user", "assistant", "tool")


def checked_messages(messages: list[Any] | None, found: MarkerList) -> list[dict[str, Any]]:
    """Messages as templates expect them: a known role, text content as one string.

    Args:
        found: gets the markers.

    Raises:
        RequestError: names the message and the field.
    """
    if not messages:
        raise RequestError("messages", "must hold at least one message")
    check_count("messages", messages, MAX_MESSAGES)
    return [_checked_message(index, message, found) for index, message in enumerate(messages)]


def check_count(param: str, items: list[Any] | None, limit: int) -> None:
    """
    Raises:
        RequestError: there are more than `limit`.
    """
    if items is not None and len(items) > limit:
        raise RequestError(param, f"holds {len(items)} {param}; at most {limit} are allowed")


def _checked_message(index: int, message: Any, found: MarkerList) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise RequestError(where, "must be an object with `role` and `content`")
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role", f"must be one of {', '.join(ROLES)}, not {role!r:.80}")
    for key in ("audio", "function_call"):
        if message.get(key) is not None:
            raise RequestError(f"{where}.{key}", "is not supported by this server", code="unsupported_field")
    checked = {key: value for key, value in message.items() if value is not None}
    if isinstance(checked.get("reasoning"), str):
        # The newer name of the same field; templates know the older one.
        checked.setdefault("reasoning_content", checked["reasoning"])
    tool_calls = checked.get("tool_calls")
    if tool_calls is not None:
        _check_tool_calls(where, tool_calls)
    if "name" in checked and not isinstance(checked["name"], str):
        raise RequestError(f"{where}.name", "must be a string")
    content = message.get("content")
    if content is None and not (role == "assistant"):
        raise RequestError(f"{where}.content", "is missing")
    checked["content"] = _text_of(f"{where}.content", content, index, found)
    found.add(f"{where}.cache_control", checked.pop("cache_control", None), Marker("message", index))
    return checked


def _text_of(where: str, content: Any, message_index: int, found: MarkerList) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(where, "must be a string or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text"):
            raise RequestError(
                f"{where}[{index}].type",
                f"{kind!r:.80} parts are not supported; this model reads text only",
                code="unsupported_field",
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}[{index}].text", "must be a string")
        texts.append(part["text"])
        found.add(
            f"{where}[{index}].cache_control",
            part.get("cache_control"),
            Marker("message", message_index, sum(map(len, texts))),
        )
    return "".join(texts)


def _check_tool_calls(where: str, tool_calls: Any) -> None:
    if not isinstance(tool_calls, list) or not all(isinstance(call, dict) for call in tool_calls):
        raise RequestError(f"{where}.tool_calls", "must be a list of objects")
    for index, call in enumerate(tool_calls):
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}.tool_calls[{index}].function.name", "must be a string")


def checked_tools(tools: list[dict[str, Any]] | None, found: MarkerList) -> list[dict[str, Any]] | None:
    """Tool declarations, passed to the template as they are; None if there are none.

    Args:
        found: gets the markers.

    Raises:
        RequestError: not a function with a name.
    """
    checked = []
    check_count("tools", tools, MAX_TOOLS)
    for index, tool in enumerate(tools or ()):
        function = tool.get("function")
        if tool.get("type") != "function":
            raise RequestError(f"tools[{index}].type", "only tools of type `function` are supported")
        if not isinstance(function, dict):
            what = "is missing" if function is None else "must be an object"
            raise RequestError(f"tools[{index}].function", what)
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestError(f"tools[{index}].function.name", "must be a non-empty string")
        shown = {key: value for key, value in tool.items() if key != "cache_control"}
        found.add(f"tools[{index}].cache_control", tool.get("cache_control"), Marker("tool", index))
        if "cache_control" in function:
            shown["function"] = {key: value for key, value in function.items() if key != "cache_control"}
            where = f"tools[{index}].function.cache_control"
            found.add(where, function["cache_control"], Marker("tool", index))
        checked.append(shown)
    return checked or None
