"""Turns replays into a table, JSON and a plot. Pure functions over results."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from milepost.sim.replay import ReplayResult

GIB = 1 << 30
MAX_WIDTH = 80
COLUMNS = (
    "policy",
    "budget GiB",
    "reused %",
    "second half %",
    "computed tokens",
    "passes",
    "TTFT p50 s",
    "TTFT p95 s",
    "states",
    "evictions",
)


@dataclass(frozen=True, slots=True)
class Report:
    """What was replayed, and what came of it.

    Attributes:
        title: trace or workload, geometry, match unit.
        notes: what a reader must know to use the numbers.
    """

    title: str
    notes: tuple[str, ...]
    results: tuple[ReplayResult, ...]


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed; 0.0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]


def rows(report: Report) -> list[list[str]]:
    """Cells of the table, one row per result, in the order of `COLUMNS`."""
    return [
        [
            result.policy,
            f"{result.cache_bytes / GIB:g}",
            f"{100 * result.hit_rate():.1f}",
            f"{100 * result.second_half_hit_rate:.1f}",
            str(result.num_computed_tokens),
            str(result.num_passes) if result.num_passes else "-",
            _seconds(result, 0.5),
            _seconds(result, 0.95),
            str(result.num_checkpoints) if result.num_passes else "-",
            str(sum(result.evictions.values())) if result.num_passes else "-",
        ]
        for result in report.results
    ]


def _seconds(result: ReplayResult, share: float) -> str:
    times = result.seconds_to_first_token
    return f"{quantile(times, share):.3f}" if any(times) else "-"


def table(report: Report) -> str:
    """The table as plain text, at most `MAX_WIDTH` wide where the numbers allow it: names of columns stand in
    two lines, and columns without a value are left out."""
    columns = [
        column
        for column in zip(COLUMNS, *rows(report), strict=True)
        if column[0] == COLUMNS[0] or set(column[1:]) != {"-"}
    ]
    heads = [_two_lines(name) for name, *_ in columns]
    widths = [max(map(len, [*head, *cells])) for head, (_, *cells) in zip(heads, columns, strict=True)]
    gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= MAX_WIDTH else " "
    body = [list(row) for row in zip(*(column[1:] for column in columns), strict=True)]
    rule = ["-" * width for width in widths]
    lines = [report.title, ""]
    for row in ([head[0] for head in heads], [head[1] for head in heads], rule, *body):
        padded = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(gap.join(padded).rstrip())
    lines += ["", *(f"note: {note}" for note in report.notes)]
    return "\n".join(lines) + "\n"


def _two_lines(name: str) -> tuple[str, str]:
    first, _, second = name.partition(" ")
    return (first, second) if second else ("", first)


def as_json(report: Report, *, per_request: bool = False) -> str:
    """The report as JSON; `per_request` adds the list of reused tokens of every result."""
    entries: list[dict[str, Any]] = []
    for result in report.results:
        entry: dict[str, Any] = {
            "policy": result.policy,
            "cache_bytes": result.cache_bytes,
            "num_requests": len(result.num_prompt_tokens),
            "num_prompt_tokens": sum(result.num_prompt_tokens),
            "num_cached_tokens": sum(result.num_cached_tokens),
            "hit_rate": result.hit_rate(),
            "second_half_hit_rate": result.second_half_hit_rate,
            "num_computed_tokens": result.num_computed_tokens,
            "num_passes": result.num_passes,
            "num_preemptions": result.num_preemptions,
            "num_refused": result.num_refused,
            "peak_committed_bytes": result.peak_committed_bytes,
            "num_checkpoints": result.num_checkpoints,
            "seconds_to_first_token": {
                "p50": quantile(result.seconds_to_first_token, 0.5),
                "p95": quantile(result.seconds_to_first_token, 0.95),
            },
            "evictions": {f"{move}/{reason}": n for (move, reason), n in sorted(result.evictions.items())},
            "states_by_reason": dict(sorted(result.states_by_reason.items())),
        }
        if per_request:
            entry["num_cached_tokens_per_request"] = result.num_cached_tokens
        entries.append(entry)
    document = {"title": report.title, "notes": list(report.notes), "results": entries}
    return json.dumps(document, indent=2) + "\n"
