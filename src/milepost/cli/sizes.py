"""Byte counts as people write them."""

from __future__ import annotations

import re

from milepost.errors import ConfigError

_UNITS = {
    "": 1, "b": 1,
    "k": 1 << 10, "kb": 10**3, "kib": 1 << 10,
    "m": 1 << 20, "mb": 10**6, "mib": 1 << 20,
    "g": 1 << 30, "gb": 10**9, "gib": 1 << 30,
    "t": 1 << 40, "tb": 10**12, "tib": 1 << 40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_size(text: str, field: str = "cache_bytes") -> int:
    """`1GiB`, `512 MiB`, `1.5g`, `2GB` or a plain number of bytes.

    Raises:
        ConfigError: anything else.
    """
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(field, f"{text!r} is not a size; write it like 1GiB, 512MiB or 1073741824")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def format_size(num_bytes: float) -> str:
    """With the largest binary unit that leaves at least one."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(num_bytes) < 1024 or unit == "TiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
