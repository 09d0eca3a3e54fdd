"""Tool calls read from the stream, in the formats of the supported families.

A parser takes content as marked text (see `marks`) and returns content, calls and pieces of their
arguments. A call is announced when its header is complete: from then on its arguments go out as the
model writes them, valid JSON or not, as clients of this API expect. Text whose header is none stays
content, word for word, so nothing a model writes is lost or becomes an error.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

from milepost.engine.parts import CallArguments, CallBegun, Content, Part, ToolSchemas
from milepost.engine.stops import undecided_suffix

NewId = Callable[[], str]
"""Ids of calls in formats that have none of their own."""


class ToolParser(ABC):
    """One answer. Subclasses read `_buffer` in `_step`, which returns whether it got any further."""

    TAGS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, needles: Mapping[str, str], schemas: ToolSchemas, new_id: NewId) -> None:
        """
        Args:
            needles: how the tags appear in the text.
            schemas: the declared tools.
        """
        self._schemas = schemas
        self._new_id = new_id
        self._buffer = ""
        self._parts: list[Part] = []
        self._num_calls = 0
        self._state: Callable[[bool], bool] = self._content
        self._line_break = ""

    def feed(self, text: str) -> list[Part]:
        """What is decided now."""
        self._buffer += text
        return self._run(is_last=False)

    def finish(self) -> list[Part]:
        """What was kept back; the answer has ended."""
        return self._run(is_last=True)

    def _run(self, *, is_last: bool) -> list[Part]:
        while self._state(is_last):
            pass
        parts, self._parts = self._parts, []
        return parts

    @abstractmethod
    def _content(self, is_last: bool) -> bool:
        """The state outside of calls."""

    def _verbatim(self, is_last: bool) -> bool:
        """The state behind something that is no call: all that follows is content."""
        self._say(self._take(len(self._buffer)))
        return False

    # ------------------------------------------------------------------ for subclasses

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def _say(self, text: str) -> None:
        if text:
            self._parts.append(Content(text))

    def _say_until(self, needle: str, is_last: bool, *, keeps_line_break: bool = True) -> bool:
        """Content up to `needle`, which is not consumed; True if it is there now.

        Args:
            keeps_line_break: False = one line break before the needle belongs to it.
        """
        position = self._buffer.find(needle)
        if position >= 0:
            said = self._take(position)
            self._line_break = ""
            if not keeps_line_break and said.endswith("\n"):
                said, self._line_break = said[:-1], "\n"
            self._say(said)
            return True
        limit = len(self._buffer)
        if not is_last:
            limit -= undecided_suffix(self._buffer, (needle,))
            if not keeps_line_break and self._buffer[:limit].endswith("\n"):
                limit -= 1
        self._say(self._take(limit))
        return False

    def _begin(self, name: str, call_id: str | None = None) -> None:
        self._parts.append(CallBegun(self._num_calls, call_id or self._new_id(), name))
        self._num_calls += 1

    def _argue(self, text: str) -> None:
        if text:
            self._parts.append(CallArguments(self._num_calls - 1, text))

    def _starts_with(self, needle: str, is_last: bool) -> bool | None:
        """Whether the buffer begins with `needle`; None = not known yet."""
        if self._buffer.startswith(needle):
            return True
        return None if needle.startswith(self._buffer) and not is_last else False

    def _after_call(self, is_last: bool) -> bool:
        """White space behind a call is nobody's."""
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._state = self._content
        return bool(self._buffer)

    def _give_up(self, read: str = "") -> bool:
        """The rest of the answer, and `read` before it, is content."""
        self._buffer = read + self._buffer
        self._state = self._verbatim
        return True


class NoTools(ToolParser):
    """Everything is content."""

    def _content(self, is_last: bool) -> bool:
        return self._verbatim(is_last)


class KimiK2Tools(ToolParser):
    """A section of calls between control tokens. The id carries the name: `functions.NAME:INDEX`."""

    TAGS = (
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    )  # fmt: skip
    _ID = re.compile(r"(?:functions\.)?(.+?):\d+", re.DOTALL)

    def __init__(self, needles: Mapping[str, str], schemas: ToolSchemas, new_id: NewId) -> None:
        super().__init__(needles, schemas, new_id)
        self._begin_all, self._end_all, self._begin_one, self._begin_arguments, self._end_one = (
            needles[tag] for tag in self.TAGS
        )

    def _content(self, is_last: bool) -> bool:
        if not self._say_until(self._begin_all, is_last):
            return False
        self._read = self._take(len(self._begin_all))
        self._calls_in_section = 0
        self._state = self._between
        return True

    def _between(self, is_last: bool) -> bool:
        """In a section, outside of a call. `_read` is what a failure gives back."""
        gap = len(self._buffer) - len(self._buffer.lstrip())
        self._read += self._take(gap)
        if self._starts_with(self._begin_one, is_last):
            self._read += self._take(len(self._begin_one))
            self._state = self._header
            return True
        if self._calls_in_section and self._starts_with(self._end_all, is_last):
            self._take(len(self._end_all))
            self._state = self._after_call
            return True
        if is_last and not self._buffer and self._calls_in_section:
            return False
        possible = (self._begin_one, self._end_all) if self._calls_in_section else (self._begin_one,)
        if not is_last and any(needle.startswith(self._buffer) for needle in possible):
            return False
        return self._give_up(self._read)

    def _header(self, is_last: bool) -> bool:
        position = self._buffer.find(self._begin_arguments)
        others = [self._begin_one, self._end_one, self._begin_all, self._end_all]
        stops = [self._buffer.find(needle) for needle in others if needle in self._buffer]
        limit = len(self._buffer) if position < 0 else position
        if (stops and min(stops) < limit) or (position < 0 and is_last):
            return self._give_up(self._read)
        if position < 0:
            return False
        call_id = self._buffer[:position].strip()
        found = self._ID.fullmatch(call_id)
        if found is None:
            return self._give_up(self._read)
        self._take(position + len(self._begin_arguments))
        self._begin(found[1], call_id)
        self._state = self._arguments
        return True

    def _arguments(self, is_last: bool) -> bool:
        position = self._buffer.find(self._end_one)
        if position < 0:
            # Of an answer that is cut off in the tag, the tag is dropped.
            kept = undecided_suffix(self._buffer, (self._end_one,))
            self._argue(self._take(len(self._buffer) - kept))
            return False
        self._argue(self._take(position))
        self._take(len(self._end_one))
        self._read = ""
        self._calls_in_section += 1
        self._state = self._between
        return True


class CallsBetweenTags(ToolParser):
    """Each call stands between two tags; a line break before the first of them belongs to it."""

    TAGS = ("<tool_call>", "</tool_call>")

    def __init__(self, needles: Mapping[str, str], schemas: ToolSchemas, new_id: NewId) -> None:
        super().__init__(needles, schemas, new_id)
        self._open, self._close = (needles[tag] for tag in self.TAGS)

    def _content(self, is_last: bool) -> bool:
        if not self._say_until(self._open, is_last, keeps_line_break=False):
            return False
        self._read = self._line_break + self._take(len(self._open))
        self._state = self._header
        return True

    @abstractmethod
    def _header(self, is_last: bool) -> bool:
        """What follows an opening tag."""


class HermesTools(CallsBetweenTags):
    """`<tool_call>`, an object with `name` and `arguments`, `</tool_call>`. A line break before the
    first tag, and around the object, belongs to the tags."""

    _HEADER = re.compile(
        r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)', re.DOTALL
    )

    def _header(self, is_last: bool) -> bool:
        end = self._buffer.find(self._close)
        found = self._HEADER.match(self._buffer, 0, len(self._buffer) if end < 0 else end)
        if found is not None:
            name = _text_of_json(found[1])
            if name is None:
                return self._give_up(self._read)
            self._take(found.end())
            self._begin(name)
            self._depth, self._in_string, self._escaped = 0, False, False
            self._state = self._arguments
            return True
        if end < 0:
            return self._give_up(self._read) if is_last else False
        call = _call_in_any_order(self._buffer[:end])
        if call is None:
            return self._give_up(self._read)
        self._take(end)
        self._begin(call[0])
        self._argue(call[1])
        self._state = self._tail
        return True

    def _arguments(self, is_last: bool) -> bool:
        """Up to the brace that closes the object, or the end of the call."""
        end = self._buffer.find(self._close)
        limit = end
        if end < 0:
            limit = len(self._buffer) - undecided_suffix(self._buffer, (self._close,))
        for number in range(limit):
            if self._closes(self._buffer[number]):
                self._argue(self._take(number + 1))
                self._state = self._tail
                return True
        self._argue(self._take(limit))
        if end < 0:
            return False
        self._state = self._tail
        return True

    def _closes(self, char: str) -> bool:
        """Follow one character of JSON; True if the outermost object ends with it."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth == 0
        return False

    def _tail(self, is_last: bool) -> bool:
        """The rest of a call's object is dropped, with the closing tag."""
        end = self._buffer.find(self._close)
        if end < 0:
            self._take(len(self._buffer) - undecided_suffix(self._buffer, (self._close,)))
            return False
        self._take(end + len(self._close))
        self._state = self._after_call
        return True


def _text_of_json(literal: str) -> str | None:
    """The text of a JSON string literal, if it is one and not empty."""
    try:
        text = json.loads(literal)
    except ValueError:
        return None
    return text if isinstance(text, str) and text else None


def _call_in_any_order(body: str) -> tuple[str, str] | None:
    """Name and arguments of a call whose object begins with something else than the name."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        return call["name"], arguments
    return call["name"], json.dumps(arguments, ensure_ascii=False)
