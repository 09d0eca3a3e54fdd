"""What an answer is made of, as parsers find it in the stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call whose name is known. `index` counts the calls of an answer from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Part = Content | Reasoning | CallBegun | CallArguments


@dataclass(slots=True)
class ToolCall:
    """A call with the arguments so far, as JSON text exactly as it was streamed."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedAnswer:
    """The sum of all parts of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if isinstance(part, Content):
                self.content += part.text
            elif isinstance(part, Reasoning):
                self.reasoning += part.text
            elif isinstance(part, CallBegun):
                self.calls.append(ToolCall(part.call_id, part.name))
            else:
                self.calls[part.index].arguments += part.text


ToolSchemas = dict[str, dict[str, Any]]
"""Tool name -> JSON schema of its arguments."""


def tool_schemas(tools: Iterable[dict[str, Any]] | None) -> ToolSchemas:
    """Of declarations in the form of the chat API."""
    schemas = {}
    for tool in tools or ():
        function = tool["function"]
        parameters = function.get("parameters")
        schemas[function["name"]] = parameters if isinstance(parameters, dict) else {}
    return schemas
