"""Tool calls whose arguments are written one by one, in elements of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from html import unescape
from typing import Any

from milepost.engine.parts import ToolSchemas
from milepost.engine.tool_parsers import CallsBetweenTags, NewId, ToolParser


def typed_argument(text: str, schema: Mapping[str, Any] | None) -> str:
    """JSON text of an argument that was written without quotes, by what its schema allows.

    A text stays a text where the schema allows one, or says nothing; what is no value of the declared
    type stays a text too.
    """
    kinds = argument_kinds(schema or {})
    if not kinds or "string" in kinds:
        if "null" in kinds and text == "null":
            return text
        return json.dumps(text, ensure_ascii=False)
    # Templates written in Jinja spell Python's words.
    word = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip())
    try:
        json.loads(word)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return word


def argument_kinds(schema: Mapping[str, Any]) -> set[str]:
    declared = schema.get("type")
    kinds = {declared} if isinstance(declared, str) else set(declared or ())
    for name in ("anyOf", "oneOf"):
        for option in schema.get(name) or ():
            if isinstance(option, Mapping):
                kinds |= argument_kinds(option)
    if not kinds and any(isinstance(value, str) for value in schema.get("enum") or ()):
        kinds = {"string"}
    return {str(kind) for kind in kinds}


class ArgumentList(ToolParser):
    """Calls whose arguments are written one by one: each goes out when it is complete."""

    def _begin_list(self, name: str) -> None:
        self._begin(name)
        self._properties = (self._schemas.get(name) or {}).get("properties") or {}
        self._num_arguments = 0

    def _add_argument(self, key: str, value: str) -> None:
        lead = ", " if self._num_arguments else "{"
        self._argue(f"{lead}{json.dumps(key, ensure_ascii=False)}: {value}")
        self._num_arguments += 1

    def _end_list(self) -> None:
        self._argue("}" if self._num_arguments else "{}")


class Qwen3CoderTools(CallsBetweenTags, ArgumentList):
    """`<tool_call>`, `<function=NAME>`, `<parameter=KEY>` value `</parameter>` ..., `</function>`,
    `</tool_call>`, each on a line of its own; one line break on each side of a value is not part of it."""

    _FUNCTION = re.compile(r"<function=([^>\n]+)>")
    _PARAMETER = re.compile(r"<parameter=([^>\n]+)>")
    _END_PARAMETER = "</parameter>"
    _END_FUNCTION = "</function>"

    def _header(self, is_last: bool) -> bool:
        start = self._buffer.lstrip()
        found = self._FUNCTION.match(start)
        if found is not None:
            self._take(len(self._buffer) - len(start) + found.end())
            self._begin_list(found[1].strip())
            self._state = self._next_parameter
            return True
        if not is_last and _may_become("<function=", start):
            return False
        return self._give_up(self._read)

    def _next_parameter(self, is_last: bool) -> bool:
        self._take(len(self._buffer) - len(self._buffer.lstrip()))
        found = self._PARAMETER.match(self._buffer)
        if found is not None:
            end = self._buffer.find(self._END_PARAMETER, found.end())
            if end < 0:
                return False
            value = self._buffer[found.end() : end].removeprefix("\n").removesuffix("\n")
            key = found[1].strip()
            self._take(end + len(self._END_PARAMETER))
            self._add_argument(key, typed_argument(value, self._properties.get(key)))
            return True
        if self._starts_with(self._END_FUNCTION, is_last):
            self._take(len(self._END_FUNCTION))
            self._end_list()
            self._state = self._tail
            return True
        # Cut off in mid-tag: the arguments stay as far as they are.
        if self._END_FUNCTION.startswith(self._buffer) or _may_become("<parameter=", self._buffer):
            return False
        self._end_list()
        return self._give_up()

    def _tail(self, is_last: bool) -> bool:
        self._take(len(self._buffer) - len(self._buffer.lstrip()))
        known = self._starts_with(self._close, is_last)
        if known is None:
            return False
        if known:
            self._take(len(self._close))
        self._state = self._after_call
        return bool(self._buffer)


def _may_become(opening: str, text: str) -> bool:
    """Whether `text` may still grow into a tag that begins with `opening` and ends with `>`."""
    if opening.startswith(text):
        return True
    return text.startswith(opening) and "\n" not in text and ">" not in text


@dataclass(frozen=True, slots=True)
class _Tag:
    """An opening tag; `length` counts its characters in the buffer."""

    name: str
    attributes: dict[str, str]
    length: int


_NO_TAG = _Tag("", {}, 0)
_NOT_YET = _Tag("", {}, 0)


class KimiK3Tools(ArgumentList):
    """XTML: `tools` holds `call` elements with `tool` and `index`; each holds `argument` elements with
    `key` and `type`, or one `json` element."""

    TAGS = ("<|open|>", "<|close|>", "<|sep|>")
    _NAME = re.compile(r"[a-z_]+")
    _ATTRIBUTE = re.compile(r'\s+([A-Za-z_]+)="([^"]*)"')

    def __init__(self, needles: Mapping[str, str], schemas: ToolSchemas, new_id: NewId) -> None:
        super().__init__(needles, schemas, new_id)
        self._open, self._close, self._sep = (needles[tag] for tag in self.TAGS)
        self._begin_all = f"{self._open}tools{self._sep}"

    def _content(self, is_last: bool) -> bool:
        if not self._say_until(self._begin_all, is_last):
            return False
        self._read = self._take(len(self._begin_all))
        self._state = self._between
        return True

    def _between(self, is_last: bool) -> bool:
        """In `tools`, outside of a call. `_read` is what a failure gives back: empty behind a call."""
        closing = f"{self._close}tools{self._sep}"
        is_closed = False if self._read else self._starts_with(closing, is_last)
        if is_closed:
            self._take(len(closing))
            self._state = self._after_call
            return True
        tag = self._tag(is_last)
        if tag is _NOT_YET or is_closed is None or (is_last and not self._read and not self._buffer):
            return False
        if tag.name != "call" or not tag.attributes.get("tool"):
            return self._give_up(self._read)
        self._take(tag.length)
        self._begin_list(tag.attributes["tool"])
        self._is_json = False
        self._state = self._in_call
        return True

    def _in_call(self, is_last: bool) -> bool:
        closing = f"{self._close}call{self._sep}"
        is_closed = self._starts_with(closing, False)
        if is_closed:
            self._take(len(closing))
            self._end_call()
            self._read = ""
            self._state = self._between
            return True
        tag = self._tag(False)
        if tag is _NOT_YET or is_closed is None:
            return False  # of an answer that is cut off here, the arguments stay as far as they are
        is_argument = tag.name == "argument" and "key" in tag.attributes and not self._is_json
        if is_argument or (tag.name == "json" and not self._is_json and not self._num_arguments):
            return self._value(tag)
        self._end_call()
        return self._give_up()

    def _end_call(self) -> None:
        if not self._is_json:
            self._end_list()

    def _value(self, tag: _Tag) -> bool:
        closing = f"{self._close}{tag.name}{self._sep}"
        end = self._buffer.find(closing, tag.length)
        if end < 0:
            return False
        value = self._buffer[tag.length : end]
        self._take(end + len(closing))
        if tag.name == "json":
            self._is_json = True
            self._argue(value)
        else:
            kind = tag.attributes.get("type", "string")
            self._add_argument(tag.attributes["key"], typed_argument(value, {"type": kind}))
        return True

    def _tag(self, is_last: bool) -> _Tag:
        """The opening tag at the start of the buffer, `_NO_TAG`, or `_NOT_YET`."""
        opened = self._starts_with(self._open, is_last)
        if not opened:
            return _NO_TAG if opened is False else _NOT_YET
        end = self._buffer.find(self._sep)
        inner = self._buffer[len(self._open) : len(self._buffer) if end < 0 else end]
        if self._open in inner or self._close in inner:
            return _NO_TAG
        if end < 0:
            return _NO_TAG if is_last else _NOT_YET
        name = self._NAME.match(inner)
        position = name.end() if name else 0
        attributes = {}
        while found := self._ATTRIBUTE.match(inner, position):
            attributes[found[1]] = unescape(found[2])
            position = found.end()
        if name is None or position != len(inner):
            return _NO_TAG
        return _Tag(name[0], attributes, end + len(self._sep))
