"""Byte counts as people write and read them."""

from __future__ import annotations

from milepost.config import parse_size

__all__ = ["format_size", "parse_size"]


def format_size(num_bytes: float) -> str:
    """With the largest binary unit that leaves at least one."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(num_bytes) < 1024 or unit == "TiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
