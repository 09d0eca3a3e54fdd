"""Tool arguments that keep the text they were read from.

Clients send the arguments of an earlier call back as JSON text, templates expect values. A value made
of the text writes it back unchanged: `1e3` does not become `1000.0`, `{"a":1}` gets no space.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

_MAX_DIGITS = 4000
"""Python refuses to read longer whole numbers; as text they pass."""
_SPACE = re.compile(r"[ \t\n\r]*")


class Written:
    """A JSON value with its own text. The name is private because templates read keys as attributes."""

    _text: str


class WrittenObject(Written, dict[str, Any]):
    """A JSON object; `_members` has all its members in order, of equal keys as well."""

    _members: list[tuple[str, Any]]


class WrittenArray(Written, list[Any]):
    """A JSON array."""


class WrittenInteger(Written, int):
    """A whole number."""

    def __str__(self) -> str:
        return self._text


class WrittenNumber(Written, float):
    """Any other number."""

    def __str__(self) -> str:
        return self._text


def read_arguments(text: str, shielded: Callable[[Any], Any]) -> Any:
    """The object that `text` holds, with values that know their text; `text` itself if it holds none.

    Args:
        shielded: applied to keys, values and texts before a template gets them.
    """
    try:
        _DECODER.decode(text)
        members = [(shielded(key), _written(value, own, shielded)) for key, value, own in _members(text)]
    except (ValueError, RecursionError):
        return shielded(text)
    result = WrittenObject(members)
    result._members = members
    result._text = shielded(text)
    return result


def members(value: Any) -> list[tuple[str, Any]]:
    """(key, value) pairs of an object, in order; equal keys are kept where the text is known."""
    return list(value._members if isinstance(value, WrittenObject) else value.items())


def dump(value: Any, **options: Any) -> str:
    """JSON text of a value, in which parts that know their text stand as written.

    Args:
        options: of `json.dumps`. With a layout asked for (indent, separators, sorted keys, ASCII) there
            is no text to keep.
    """
    if any(option is not None and option is not False for option in options.values()):
        return json.dumps(value, **{"ensure_ascii": False, **options})
    texts: dict[str, str] = {}
    shown = json.dumps(_hidden(value, texts), ensure_ascii=False)
    return _PLACEHOLDER.sub(lambda match: texts[match[0]], shown) if texts else shown


def as_written(value: Any) -> str:
    """Text of a value: a string itself, what was read, or the shortest JSON."""
    if isinstance(value, str):
        return value
    return value._text if isinstance(value, Written) else dump(value, separators=(",", ":"))


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MAX_DIGITS else float(digits)


_DECODER = json.JSONDecoder(parse_int=_integer)
_NAME = secrets.token_hex(16)
_PLACEHOLDER = re.compile(f'"{_NAME}-[0-9]+"')


def _members(text: str) -> list[tuple[str, Any, str]]:
    """(key, value, text of the value) of the object in `text`, which is valid JSON.

    Raises:
        ValueError: it is another kind of value.
    """
    position = _after_space(text, 0)
    if text[position] != "{":
        raise ValueError("not an object")
    found: list[tuple[str, Any, str]] = []
    position = _after_space(text, position + 1)
    while text[position] != "}":
        key, position = _DECODER.raw_decode(text, position)
        start = _after_space(text, _after_space(text, position) + 1)
        value, end = _DECODER.raw_decode(text, start)
        found.append((key, value, text[start:end]))
        position = _after_space(text, end)
        if text[position] == ",":
            position = _after_space(text, position + 1)
    return found


def _after_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _written(value: Any, text: str, shielded: Callable[[Any], Any]) -> Any:
    made: Written
    if isinstance(value, dict):
        made = WrittenObject(shielded(value))
        made._members = list(made.items())
    elif isinstance(value, list):
        made = WrittenArray(shielded(value))
    elif isinstance(value, bool) or value is None or isinstance(value, str):
        return shielded(value)
    else:
        made = WrittenInteger(value) if isinstance(value, int) else WrittenNumber(value)
    made._text = shielded(text)
    return made


def _hidden(value: Any, texts: dict[str, str]) -> Any:
    """`value` with strings nobody can guess in the places of `texts`."""
    if isinstance(value, Written):
        name = f"{_NAME}-{len(texts)}"
        texts[f'"{name}"'] = value._text
        return name
    if isinstance(value, Mapping):
        return {key: _hidden(item, texts) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(item, texts) for item in value]
    return value
