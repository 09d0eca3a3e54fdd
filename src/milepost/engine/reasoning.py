"""Thinking and answer told apart while the text streams in.

A splitter takes marked text (see `marks`) and returns pieces of reasoning and of content; content
still holds tool calls. It keeps back only what may yet become one of its tags.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from milepost.engine.parts import Content, Reasoning
from milepost.engine.stops import undecided_suffix

Pieces = list[Content | Reasoning]


class ReasoningSplitter(Protocol):
    """One answer; fed in any cuts, the joined pieces are the same."""

    def feed(self, text: str) -> Pieces:
        """What is decided now."""
        ...

    def finish(self) -> Pieces:
        """What was kept back; the answer has ended."""
        ...


class PlainAnswers:
    """No reasoning: everything is content."""

    def feed(self, text: str) -> Pieces:
        return [Content(text)] if text else []

    def finish(self) -> Pieces:
        return []


class ThinkTags:
    """`<think>` reasoning `</think>` answer, as Qwen3 and DeepSeek R1 write it.

    The line breaks that templates write around thoughts belong to the tags: one behind `<think>`, one
    before `</think>`, up to two behind it. An answer that does not begin with `<think>` (white space
    may precede it) is all content, unless the prompt has opened the thought.
    """

    TAGS = ("<think>", "</think>")

    def __init__(
        self, needles: Mapping[str, str], prompt_end: str = "", ends_thought: tuple[str, ...] = ()
    ) -> None:
        """
        Args:
            needles: how the tags appear in the text.
            prompt_end: marked text of the end of the prompt.
            ends_thought: other needles that end a thought and are content themselves (`<tool_call>`).
        """
        self._open, self._close = (needles[tag] for tag in self.TAGS)
        self._ends = (self._close, *ends_thought)
        self._buffer = ""
        opened = prompt_end.rfind(self._open)
        is_open = opened >= 0 and not prompt_end[opened + len(self._open) :].strip()
        self._state = "thought" if is_open else "start"
        self._line_breaks = int(is_open and not prompt_end.endswith("\n"))

    def feed(self, text: str) -> Pieces:
        self._buffer += text
        return self._pieces(is_last=False)

    def finish(self) -> Pieces:
        return self._pieces(is_last=True)

    def _pieces(self, *, is_last: bool) -> Pieces:
        pieces: Pieces = []
        if self._state == "start":
            rest = self._buffer.lstrip()
            if rest.startswith(self._open):
                self._buffer, self._state, self._line_breaks = rest[len(self._open) :], "thought", 1
            elif self._open.startswith(rest) and not is_last:
                return []
            else:
                self._state = "content"
        if self._state == "thought":
            self._drop_line_breaks()
            self._think(pieces, is_last)
        if self._state == "content":
            self._drop_line_breaks()
            if self._buffer:
                pieces.append(Content(self._buffer))
                self._buffer, self._line_breaks = "", 0
        return pieces

    def _drop_line_breaks(self) -> None:
        while self._line_breaks and self._buffer.startswith("\n"):
            self._buffer = self._buffer[1:]
            self._line_breaks -= 1

    def _think(self, pieces: Pieces, is_last: bool) -> None:
        if not self._buffer:
            return
        found = [(self._buffer.find(end), end) for end in self._ends if end in self._buffer]
        if found:
            position, end = min(found)
            thought = self._buffer[:position].removesuffix("\n")
            self._buffer = self._buffer[position + (len(end) if end == self._close else 0) :]
            self._state, self._line_breaks = "content", 2 if end == self._close else 0
        else:
            kept = 0 if is_last else undecided_suffix(self._buffer, self._ends)
            limit = len(self._buffer) - kept
            if not is_last and self._buffer[:limit].endswith("\n"):
                limit -= 1
            thought, self._buffer = self._buffer[:limit], self._buffer[limit:]
        if thought:
            pieces.append(Reasoning(thought))
            if self._state == "thought":
                self._line_breaks = 0


class TaggedMessage:
    """Kimi K3 (XTML): `think` and `response` elements of an assistant message.

    What stands in other elements (`tools`) passes as it is; the end of the message is dropped.
    """

    TAGS = ("<|open|>", "<|close|>", "<|sep|>")

    def __init__(self, needles: Mapping[str, str], prompt_end: str = "") -> None:
        opening, closing, sep = (needles[tag] for tag in self.TAGS)
        self._kinds = {"think": Reasoning, "response": Content}
        self._opened = {name: f"{opening}{name}{sep}" for name in self._kinds}
        self._closed = {name: f"{closing}{name}{sep}" for name in self._kinds}
        self._end = f"{closing}message{sep}"
        self._buffer = ""
        self._inside: str | None = None
        for name, tag in self._opened.items():
            if prompt_end.endswith(tag):
                self._inside = name

    def feed(self, text: str) -> Pieces:
        self._buffer += text
        return self._pieces(is_last=False)

    def finish(self) -> Pieces:
        return self._pieces(is_last=True)

    def _pieces(self, *, is_last: bool) -> Pieces:
        pieces: Pieces = []
        while True:
            name = self._inside
            tags = [*self._opened.values(), self._end] if name is None else [self._closed[name]]
            found = [(self._buffer.find(tag), tag) for tag in tags if tag in self._buffer]
            if not found:
                break
            position, tag = min(found)
            self._put(pieces, self._buffer[:position])
            self._buffer = self._buffer[position + len(tag) :]
            opened = [name for name, opening in self._opened.items() if opening == tag]
            self._inside = opened[0] if opened else None
        kept = 0 if is_last else undecided_suffix(self._buffer, tags)
        limit = len(self._buffer) - kept
        self._put(pieces, self._buffer[:limit])
        self._buffer = self._buffer[limit:]
        return pieces

    def _put(self, pieces: Pieces, text: str) -> None:
        if text:
            pieces.append(Reasoning(text) if self._inside == "think" else Content(text))
