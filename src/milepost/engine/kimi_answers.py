"""Answers in the Kimi formats that come back as they were generated, taken apart.

A server that does not parse answers hands them out as text, marks included, and gets them back as the
`content` of an assistant message. Text cannot tell a mark that was a token from one that was spelled
out, so marks count only where the format has them: an answer is taken apart from the outside, and
marks inside its pieces are text. Whatever an answer says, it stays one message of its author.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Shielded = Callable[[str], str]
"""What makes a piece of text safe to be rendered."""

_THINK_END = "<|close|>think<|sep|><|open|>response<|sep|>"
_RESPONSE_END = "<|close|>response<|sep|>"
_TOOLS_BEGIN, _TOOLS_END = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
_CALL_END = "<|close|>call<|sep|>"
_MESSAGE_END = "<|close|>message<|sep|>"
# Atomic groups: what a client repeats a million times is looked at once.
_CALL = re.compile(r"<\|open\|>call((?: .*?)?)<\|sep\|>", re.DOTALL)
_ARGUMENT = re.compile(
    r"<\|open\|>(argument|json)(?>((?: .*?)?)<\|sep\|>)(.*?)<\|close\|>\1<\|sep\|>", re.DOTALL
)
_TOOL_NAME = re.compile(r' tool="(.*?)"', re.DOTALL)

STRUCTURE_TOKENS = frozenset(
    {
        *("<|open|>", "<|close|>", "<|sep|>"),
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    }
)
"""Control tokens that are not special and that no text has once an answer is taken apart."""

_SECTION_BEGIN, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_LINEAR_CALL = re.compile(
    r"<\|tool_call_begin\|>(?>(.+?)<\|tool_call_argument_begin\|>)(.*?)<\|tool_call_end\|>", re.DOTALL
)


class GeneratedCall(dict[str, Any]):
    """A K3 tool call as the model wrote it: `attributes`, and `arguments` with `tag`, `attributes`, `text`.

    `function.name` is the called tool's, for the results that follow.
    """


def split_k3_answer(content: str, shielded: Shielded) -> dict[str, Any] | None:
    """Thinking, text and calls of a generated K3 answer; None if `content` is just text.

    It is a generated answer if it ends like one, or if thinking ends in it (one that was cut off later).
    """
    thinking, found, rest = content.partition(_THINK_END)
    if not found:
        thinking, rest = "", content
    calls: list[GeneratedCall] | None = []
    if rest.endswith(_RESPONSE_END + _MESSAGE_END):
        text = rest.removesuffix(_RESPONSE_END + _MESSAGE_END)
    elif rest.endswith(_TOOLS_END + _MESSAGE_END):
        text, begun, section = rest.partition(_RESPONSE_END + _TOOLS_BEGIN)
        calls = _k3_calls(section.removesuffix(_TOOLS_END + _MESSAGE_END), shielded) if begun else None
    elif found:
        text = rest
    else:
        return None
    if calls is None:
        return None
    return {"reasoning_content": shielded(thinking), "content": shielded(text), "tool_calls": calls}


def split_linear_answer(content: str, shielded: Shielded) -> dict[str, Any] | None:
    """Text and calls of a generated Kimi-Linear answer; None if `content` is just text."""
    text, begun, section = content.partition(_SECTION_BEGIN)
    if not begun or not section.endswith(_SECTION_END):
        return None
    section = section.removesuffix(_SECTION_END)
    calls: list[dict[str, Any]] = []
    position = 0
    while position < len(section):
        match = _LINEAR_CALL.match(section, position)
        if match is None:
            return None
        function = {"name": "", "arguments": shielded(match[2])}
        calls.append({"id": shielded(match[1]), "function": function})
        position = match.end()
    return {"content": shielded(text), "tool_calls": calls} if calls else None


def _k3_calls(section: str, shielded: Shielded) -> list[GeneratedCall] | None:
    """The calls of a tools section; None if anything else stands in it."""
    calls: list[GeneratedCall] = []
    position = 0
    while position < len(section):
        head = _CALL.match(section, position)
        if head is None:
            return None
        position = head.end()
        arguments: list[dict[str, str]] = []
        while match := _ARGUMENT.match(section, position):
            position = match.end()
            attributes, text = shielded(match[2]), shielded(match[3])
            arguments.append({"tag": match[1], "attributes": attributes, "text": text})
        if not section.startswith(_CALL_END, position):
            return None
        position += len(_CALL_END)
        name = _TOOL_NAME.search(head[1])
        spelled = name[1].replace("&quot;", '"').replace("&amp;", "&") if name else ""
        call = GeneratedCall(attributes=shielded(head[1]), arguments=arguments)
        call["function"] = {"name": shielded(spelled)}
        calls.append(call)
    return calls or None
