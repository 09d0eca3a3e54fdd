"""Typed reads from a model's `config.json`; every error names the key."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from milepost.errors import CheckpointFileError, ConfigError

_REQUIRED: Any = object()
LARGEST_SIZE = 1 << 40
MOST_LAYERS = 10_000
"""Far beyond any model; a larger number is a mistake, and would be waited for."""


def unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook`: of two values under one name none is chosen silently.

    Raises:
        ValueError: names the key that occurs twice.
    """
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"it names {key!r} twice")
        result[key] = value
    return result


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        CheckpointFileError: missing, unreadable, not JSON, not an object, or an object in it has a name
            twice; names the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unrepeated)
    except FileNotFoundError:
        raise CheckpointFileError(f"{path} does not exist; a model directory needs it") from None
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CheckpointFileError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointFileError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


class ConfigReader:
    """Reads keys of one (sub)section. `ConfigError.field` is the dotted key.

    A key that is null counts as absent, as in published configs.
    """

    def __init__(self, values: Mapping[str, Any], section: str = "") -> None:
        self._values = values
        self._section = section

    def field(self, key: str) -> str:
        return f"{self._section}{key}"

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def keys(self) -> list[str]:
        """Those that are not null."""
        return [key for key in self._values if self.has(key)]

    def as_dict(self) -> dict[str, Any]:
        """The content of the section."""
        return dict(self._values)

    def is_object(self, key: str) -> bool:
        return isinstance(self._values.get(key), dict)

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ConfigError(self.field(key), "is missing from config.json")
        return default

    def integer(
        self, key: str, default: int = _REQUIRED, *, minimum: int = 1, maximum: int = LARGEST_SIZE
    ) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(self.field(key), f"must be a whole number, not {value!r}")
        if value < minimum:
            raise ConfigError(self.field(key), f"must be at least {minimum}, not {value}")
        if value > maximum:
            raise ConfigError(self.field(key), f"must be at most {maximum}")
        return value

    def num_layers(self, key: str, default: int = _REQUIRED, *, minimum: int = 1) -> int:
        """A number of layers: things are made for each."""
        return self.integer(key, default, minimum=minimum, maximum=MOST_LAYERS)

    def optional_integer(self, key: str, *, minimum: int = 1) -> int | None:
        return self.integer(key, minimum=minimum) if self.has(key) else None

    def number(self, key: str, default: float = _REQUIRED) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(self.field(key), f"must be a number, not {value!r}")
        # JSON as Python reads it has NaN, infinity and whole numbers that no float can hold.
        if not abs(value) <= sys.float_info.max:
            raise ConfigError(self.field(key), "must be a finite number")
        return float(value)

    def positive_number(self, key: str, default: float = _REQUIRED) -> float:
        value = self.number(key, default)
        if not value > 0.0:
            raise ConfigError(self.field(key), f"must be positive, not {value}")
        return value

    def boolean(self, key: str, default: bool = _REQUIRED) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(self.field(key), f"must be true or false, not {value!r}")
        return value

    def text(self, key: str, default: str = _REQUIRED) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise ConfigError(self.field(key), f"must be a string, not {value!r}")
        return value

    def section(self, key: str, *, inherited: Sequence[str] = ()) -> ConfigReader:
        """The object under `key`; `inherited` keys that it lacks are read from here."""
        value = self._get(key, _REQUIRED)
        if not isinstance(value, dict):
            raise ConfigError(self.field(key), f"must be an object, not {value!r}")
        values = {name: self._values[name] for name in inherited if self.has(name)}
        values.update({name: entry for name, entry in value.items() if entry is not None})
        return ConfigReader(values, f"{self._section}{key}.")

    def values(self, key: str) -> list[Any]:
        value = self._get(key, _REQUIRED)
        if not isinstance(value, list):
            raise ConfigError(self.field(key), f"must be a list, not {value!r}")
        return list(value)

    def integers(self, key: str) -> list[int]:
        value = self._get(key, _REQUIRED)
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise ConfigError(self.field(key), f"must be a list of whole numbers, not {value!r}")
        return list(value)

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """One id or a list of ids, all below `vocab_size`; () if absent."""
        value = self._get(key, [])
        ids = value if isinstance(value, list) else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise ConfigError(
                    self.field(key), f"must be token ids below vocab_size {vocab_size}, not {value!r}"
                )
        return tuple(ids)

    def must_equal(self, key: str, expected: Any, why: str) -> None:
        """Refuses a value this implementation does not compute; absent is fine."""
        value = self._values.get(key)
        if value is not None and value != expected:
            raise ConfigError(self.field(key), f"is {value!r}, but only {expected!r} is supported: {why}")
