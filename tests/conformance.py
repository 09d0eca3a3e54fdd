"""Rows of `tests/data/conformance.json`: the prefill-checkpoint contract of vLLM 0.33, as cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

_CASES = json.loads((Path(__file__).parent / "data" / "conformance.json").read_text(encoding="utf-8"))

GROUPS: tuple[str, ...] = tuple(name for name in _CASES if name != "about")


def rows(group: str) -> list[dict[str, Any]]:
    """All rows of one group, as stored."""
    return list(_CASES[group])


def params(group: str) -> list[Any]:
    """Rows of one group as pytest parameters, named by their stable id."""
    return [pytest.param(row, id=row["id"]) for row in rows(group)]
