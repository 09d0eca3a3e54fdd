"""Where a caller asks for a checkpoint, and for how long it is to be kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from milepost.errors import RequestError

MAX_MARKERS = 16
"""Markers of one request. Each costs a rendering of the conversation and, while pinned, a state."""

SECONDS_BY_TTL = {"5m": 300.0, "1h": 3600.0}
DEFAULT_TTL = "5m"


@dataclass(frozen=True, slots=True)
class Marker:
    """The end of a tool declaration, of a message, or of the first characters of a message's text.

    Attributes:
        part_of: what `index` counts.
        num_chars: characters of the message's text before the marker; None = its end.
    """

    part_of: Literal["tool", "message"]
    index: int
    num_chars: int | None = None


@dataclass(slots=True)
class MarkerList:
    """Markers of one request.

    Attributes:
        pin_seconds: the longest of their times to live.
    """

    markers: list[Marker] = field(default_factory=list)
    pin_seconds: float = 0.0

    def add(self, where: str, cache_control: Any, marker: Marker) -> None:
        """Take in a `cache_control` value found at the field `where`; null asks for nothing.

        Raises:
            RequestError: it has another form, or is one too many; names the field.
        """
        if cache_control is None:
            return
        if not isinstance(cache_control, dict):
            raise RequestError(where, 'must be an object like {"type": "ephemeral", "ttl": "5m"}')
        kind = cache_control.get("type")
        if kind != "ephemeral":
            raise RequestError(f"{where}.type", f'must be "ephemeral", not {kind!r:.80}')
        ttl = cache_control.get("ttl")
        seconds = SECONDS_BY_TTL.get(DEFAULT_TTL if ttl is None else ttl) if _is_name(ttl) else None
        if seconds is None:
            raise RequestError(f"{where}.ttl", f'must be "5m" or "1h", not {ttl!r:.80}')
        if len(self.markers) == MAX_MARKERS:
            raise RequestError(where, f"at most {MAX_MARKERS} parts of a request may have `cache_control`")
        self.markers.append(marker)
        self.pin_seconds = max(self.pin_seconds, seconds)


def _is_name(value: Any) -> bool:
    return value is None or isinstance(value, str)


def checked_breakpoints(breakpoints: list[int] | None, num_prompt_tokens: list[int]) -> list[tuple[int, str]]:
    """`prompt_cache_breakpoints`: token positions of a prompt as wanted checkpoints.

    Args:
        num_prompt_tokens: of every prompt of the request.

    Raises:
        RequestError: several prompts, too many positions, or one outside of the prompt.
    """
    if not breakpoints:
        return []
    name = "prompt_cache_breakpoints"
    if len(num_prompt_tokens) != 1:
        raise RequestError(name, "needs a request with a single prompt")
    if len(breakpoints) > MAX_MARKERS:
        raise RequestError(name, f"holds {len(breakpoints)} positions; at most {MAX_MARKERS} are allowed")
    for index, position in enumerate(breakpoints):
        if not 1 <= position <= num_prompt_tokens[0]:
            raise RequestError(
                f"{name}[{index}]",
                f"must be a token position between 1 and {num_prompt_tokens[0]}, the length of the prompt, "
                f"not {position}",
            )
    return [(position, "marker") for position in sorted(set(breakpoints))]
