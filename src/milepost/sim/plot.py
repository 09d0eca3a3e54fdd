"""A line chart of hit rate over budget as SVG, written by hand: nothing to install, text to diff."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from milepost.sim.report import GIB, Report

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 160, 48, 52
COLOURS = ("#0b7285", "#e8590c", "#5f3dc4", "#2b8a3e", "#c2255c", "#495057")


def svg(report: Report) -> str:
    """Reused share of prompt tokens (second half of the requests) over the budget, one line a policy.

    Raises:
        ValueError: the report holds no result.
    """
    if not report.results:
        raise ValueError("nothing to plot: the report has no results")
    budgets = sorted({result.cache_bytes for result in report.results})
    policies = list(dict.fromkeys(result.policy for result in report.results))
    top = max(0.05, *(result.second_half_hit_rate for result in report.results)) * 1.1
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 24, report.title, size=14),
    ]
    parts += _grid(budgets, top)
    for number, policy in enumerate(policies):
        colour = COLOURS[number % len(COLOURS)]
        points = sorted(
            (_x(result.cache_bytes, budgets), _y(result.second_half_hit_rate, top))
            for result in report.results
            if result.policy == policy
        )
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in points]
        row = TOP + 18 * number
        parts.append(f'<rect x="{WIDTH - RIGHT + 20}" y="{row}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(WIDTH - RIGHT + 38, row + 11, policy))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _grid(budgets: Sequence[int], top: float) -> list[str]:
    parts = []
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for step in range(6):
        value = top * step / 5
        y = _y(value, top)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#dee2e6"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{100 * value:.0f} %", anchor="end"))
    for budget in budgets:
        x = _x(budget, budgets)
        parts.append(f'<line x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 5}" stroke="#495057"/>')
        parts.append(_text(x, bottom + 20, f"{budget / GIB:g}", anchor="middle"))
    parts.append(_text((LEFT + right) / 2, HEIGHT - 12, "budget, GiB (log scale)", anchor="middle"))
    return parts


def _x(budget: int, budgets: Sequence[int]) -> float:
    low, high = math.log(budgets[0]), math.log(budgets[-1])
    share = (math.log(budget) - low) / (high - low) if high > low else 0.5
    return LEFT + share * (WIDTH - RIGHT - LEFT)


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - value / top * (HEIGHT - BOTTOM - TOP)


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'
