"""An answer taken apart: reasoning, content and tool calls, whatever the cuts of the stream.

Formats are chosen by what the model's chat template writes, or by the names other servers use.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from milepost.engine.marks import MarkTable
from milepost.engine.parts import CallArguments, CallBegun, Content, Part, Reasoning, tool_schemas
from milepost.engine.reasoning import PlainAnswers, ReasoningSplitter, TaggedMessage, ThinkTags
from milepost.engine.tagged_tools import KimiK3Tools, Qwen3CoderTools
from milepost.engine.tokenizer import Tokenizer
from milepost.engine.tool_parsers import HermesTools, KimiK2Tools, NoTools, ToolParser
from milepost.errors import ConfigError

AUTO = "auto"
NONE = "none"
TOOL_PARSERS: Mapping[str, type[ToolParser]] = {
    "hermes": HermesTools,
    "kimi_k2": KimiK2Tools,
    "kimi_k3": KimiK3Tools,
    "qwen3_coder": Qwen3CoderTools,
    "qwen3_xml": Qwen3CoderTools,
    NONE: NoTools,
}
REASONING_PARSERS: Mapping[str, tuple[str, ...]] = {
    "deepseek_r1": ThinkTags.TAGS,
    "kimi_k3": TaggedMessage.TAGS,
    "qwen3": ThinkTags.TAGS,
    NONE: (),
}
"""Name -> tags."""
PROMPT_END_TOKENS = 32
"""Enough for what a template writes between the turn's header and the answer."""


def detected_parsers(template_source: str) -> tuple[str, str]:
    """(reasoning parser, tool parser) of the format a chat template writes."""
    if all(tag in template_source for tag in KimiK3Tools.TAGS):
        return "kimi_k3", "kimi_k3"
    reasoning = "qwen3" if ThinkTags.TAGS[1] in template_source else NONE
    if KimiK2Tools.TAGS[0] in template_source:
        return reasoning, "kimi_k2"
    if "<function=" in template_source:
        return reasoning, "qwen3_coder"
    return reasoning, "hermes" if HermesTools.TAGS[0] in template_source else NONE


class OutputFormat:
    """How a model writes reasoning and tool calls.

    Attributes:
        reasoning, tools: names of the parsers, `none` for none.
        marks: control tokens that the parsers look for.
    """

    def __init__(self, tokenizer: Tokenizer, reasoning: str = NONE, tools: str = NONE) -> None:
        """
        Raises:
            ConfigError: a name nobody knows.
        """
        _check("reasoning_parser", reasoning, REASONING_PARSERS)
        _check("tool_call_parser", tools, TOOL_PARSERS)
        self.reasoning = reasoning
        self.tools = tools
        self._tags = (*REASONING_PARSERS[reasoning], *TOOL_PARSERS[tools].TAGS)
        self.marks = MarkTable(tokenizer, self._tags)

    @classmethod
    def choose(
        cls, tokenizer: Tokenizer, template_source: str, reasoning: str = AUTO, tools: str = AUTO
    ) -> OutputFormat:
        """The format by name, or by the template for `auto`."""
        detected = detected_parsers(template_source)
        return cls(
            tokenizer,
            detected[0] if reasoning == AUTO else reasoning,
            detected[1] if tools == AUTO else tools,
        )

    @property
    def can_call(self) -> bool:
        """Whether the format has tool calls."""
        return self.tools != NONE

    @property
    def parses(self) -> bool:
        """Whether answers are taken apart at all."""
        return bool(self._tags)

    def parser(self, prompt_token_ids: Sequence[int], tools: Sequence[dict[str, Any]] | None) -> OutputParser:
        """For one answer.

        Args:
            tools: the declared ones; without any, calls stay text.
        """
        needles = self.marks.needles(self._tags)
        kind = TOOL_PARSERS[self.tools] if tools else NoTools
        prompt_end = self.marks.text_of(prompt_token_ids[-PROMPT_END_TOKENS:])
        splitter: ReasoningSplitter = PlainAnswers()
        if self.reasoning == "kimi_k3":
            splitter = TaggedMessage(needles, prompt_end)
        elif self.reasoning != NONE:
            ends_thought = (needles[kind.TAGS[0]],) if kind in (HermesTools, Qwen3CoderTools) else ()
            splitter = ThinkTags(needles, prompt_end, ends_thought)
        return OutputParser(self.marks, splitter, kind(needles, tool_schemas(tools), new_call_id))


class OutputParser:
    """One answer: marked text in, parts out, in the order of the text."""

    def __init__(self, marks: MarkTable, splitter: ReasoningSplitter, tools: ToolParser) -> None:
        self._marks = marks
        self._splitter = splitter
        self._tools = tools

    def feed(self, text: str, *, is_last: bool = False) -> list[Part]:
        """Parts that are decided; with `is_last` everything that is left."""
        pieces = self._splitter.feed(text)
        if is_last:
            pieces += self._splitter.finish()
        parts: list[Part] = []
        for piece in pieces:
            parts += [piece] if isinstance(piece, Reasoning) else self._tools.feed(piece.text)
        if is_last:
            parts += self._tools.finish()
        return [self._plain(part) for part in parts]

    def _plain(self, part: Part) -> Part:
        restore = self._marks.restore
        if isinstance(part, Content):
            return Content(restore(part.text))
        if isinstance(part, Reasoning):
            return Reasoning(restore(part.text))
        if isinstance(part, CallArguments):
            return CallArguments(part.index, restore(part.text))
        return CallBegun(part.index, restore(part.call_id), restore(part.name))


def new_call_id() -> str:
    """An id for a call whose format has none."""
    return f"call_{uuid.uuid4().hex[:24]}"


def _check(param: str, name: str, known: Mapping[str, Any]) -> None:
    if name not in known:
        raise ConfigError(param, f"{name!r} is unknown; known are {AUTO}, {', '.join(sorted(known))}")
