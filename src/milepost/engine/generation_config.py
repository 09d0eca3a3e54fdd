"""What a model's generation_config.json says about sampling: defaults of requests that say nothing."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milepost.engine.params import SamplingOptions
from milepost.engine.tokenizer import read_json
from milepost.errors import CheckpointFileError, ConfigError

FILE_NAME = "generation_config.json"
AUTO = "auto"
OFF = ("none", "vllm")
"""The second one is vLLM's word for its own defaults; here it means this server's."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Attributes: see `SamplingOptions`; None = not set.

    max_tokens: output tokens of a chat answer without a limit, if there is room.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    def applied(self, options: SamplingOptions) -> SamplingOptions:
        """`options` with defaults where the caller set nothing."""
        missing = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "max_tokens" and getattr(options, field.name) is None
        }
        return dataclasses.replace(options, **missing)

    def described(self) -> str:
        """The ones that are set, for people."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return ", ".join(f"{name} {value:g}" for name, value in values.items() if value is not None)


def generation_defaults(directory: Path, source: str = AUTO) -> GenerationDefaults:
    """Defaults of a model.

    Args:
        source: "auto" = the file in the model directory, if there is one; "none" = no defaults; else a
            file, or a directory with one.

    Raises:
        ConfigError: `source` is not there. CheckpointFileError: a value that cannot be, by file and name.
    """
    if source in OFF:
        return GenerationDefaults()
    path = directory / FILE_NAME
    if source != AUTO:
        path = Path(source) / FILE_NAME if Path(source).is_dir() else Path(source)
        if not path.is_file():
            raise ConfigError("generation_config", f"{path}: no such file; or give auto, or none")
    if not path.is_file():
        return GenerationDefaults()
    found = read_json(path)
    return GenerationDefaults(
        temperature=_number(path, found, "temperature", 0.0),
        top_p=_number(path, found, "top_p", 0.0, 1.0),
        top_k=_whole(path, found, "top_k", -1),
        min_p=_number(path, found, "min_p", 0.0, 1.0),
        repetition_penalty=_number(path, found, "repetition_penalty", 0.0),
        max_tokens=_whole(path, found, "max_new_tokens", 1),
    )


def _number(path: Path, found: dict[str, Any], name: str, low: float, high: float = math.inf) -> float | None:
    value = found.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or value == math.inf:
        raise CheckpointFileError(f"{path}: {name} cannot be {value!r}")
    if value == 0 and name in ("top_p", "repetition_penalty"):
        raise CheckpointFileError(f"{path}: {name} must be above 0; 1 is off")
    return float(value)


def _whole(path: Path, found: dict[str, Any], name: str, low: int) -> int | None:
    value = found.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise CheckpointFileError(f"{path}: {name} cannot be {value!r}")
    return value
