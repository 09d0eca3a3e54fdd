"""Where a chunk ends and which positions inside it are exported. Decided here, once.

The outcome travels in the plan; nobody downstream derives a position again. The two upstream rules
are called from here only (and from the upstream policy model of the simulator).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from milepost.core import reasons
from milepost.core.checkpoints import (
    get_mamba_prefill_checkpoint_position,
    is_mamba_prefill_checkpoint_valid,
)
from milepost.core.geometry import CacheGeometry
from milepost.core.units import ceil_to, floor_div, floor_to, is_multiple

FINEST_INTERVAL_TOKENS = 64
"""Default spacing of `interval` checkpoints where kernels can export: so many tokens of prefill take 3 %
longer with one export (`bench/checkpoints.py`)."""


@dataclass(frozen=True, slots=True)
class ChunkDecision:
    """One chunk of a prefill.

    Attributes:
        end: the chunk covers [start, end).
        exports: (position, reason), start < position < end, ascending.
        end_reason: keep the running state at `end` as a checkpoint for this reason.
        num_moved: optional positions that moved to a lower legal boundary.
        dropped: reasons of the optional positions that had none.
    """

    end: int
    exports: tuple[tuple[int, str], ...]
    end_reason: str | None
    num_moved: int = 0
    dropped: tuple[str, ...] = ()


def settled_position(
    position: int, match_unit: int, grid: int, media_spans: Sequence[tuple[int, int]] = ()
) -> int:
    """Nearest position at or below `position` on `grid` that splits no media span [start, end), or, if
    there is none on the grid, on the match unit; 0 if there is none at all. It depends on the request
    alone, so that the load decides nothing about where states are."""
    for unit in (grid, match_unit):
        settled = floor_to(position, unit)
        while split := [start for start, end in media_spans if start < settled < end]:
            settled = floor_to(min(split), unit)
        if settled:
            return settled
    return 0


def prefill_wanted(
    num_tokens: int,
    match_unit: int,
    asked: Sequence[tuple[int, str]] = (),
    media_spans: Sequence[tuple[int, int]] = (),
    grid: int | None = None,
) -> list[tuple[int, str]]:
    """Positions worth a checkpoint in a prefill of `num_tokens`, ascending, one reason each.

    `tail` is the upstream rule; `end` exists when the prefill ends on a boundary; `asked` positions
    are rounded down to the match unit, optional ones to `grid`, where kernels can export. A position
    strictly inside a media span [start, end) moves below it. If two reasons want one position, the
    more important one names it, but `history` before all others: it says that the next turn goes on there
    whatever is computed behind it.
    """
    wanted: dict[int, str] = {}

    def names_before(reason: str, other: str) -> bool:
        if reasons.HISTORY in (reason, other):
            return reason == reasons.HISTORY
        return reasons.IMPORTANCE[reason] < reasons.IMPORTANCE[other]

    def want(position: int, reason: str) -> None:
        own_grid = match_unit if grid is None or reason in reasons.REQUIRED else grid
        position = settled_position(position, match_unit, own_grid, media_spans)
        known = wanted.get(position)
        if position and (known is None or names_before(reason, known)):
            wanted[position] = reason

    want(get_mamba_prefill_checkpoint_position(num_tokens, match_unit, False), reasons.TAIL)
    if is_multiple(num_tokens, match_unit):
        want(num_tokens, reasons.END)
    for position, reason in asked:
        want(min(position, num_tokens), reason)
    return sorted(wanted.items())


def marked_units(
    asked: Sequence[tuple[int, str]], match_unit: int, grid: int, media_spans: Sequence[tuple[int, int]] = ()
) -> frozenset[int]:
    """Depths (units) of the `marker` checkpoints among `asked`, whatever reason they get in the end."""
    positions = {
        settled_position(position, match_unit, grid, media_spans)
        for position, reason in asked
        if reason == reasons.MARKER
    }
    return frozenset(floor_div(position, match_unit) for position in positions if position)


def interval_positions(start: int, end: int, spacing: int) -> list[int]:
    """Multiples of `spacing` with start < position < end; none for spacing 0."""
    if spacing <= 0:
        return []
    first = floor_to(start, spacing) + spacing
    return list(range(first, end, spacing))


def is_legal_export(start: int, end: int, position: int, match_unit: int, alignment: int | None) -> bool:
    """Whether the kernel can export `position` inside the pass [start, end).

    Our kernels anchor their grid at absolute positions, so the query counts from the grid point
    at or below its start, wherever a chunk begins.
    """
    if position <= start or not is_multiple(position, match_unit):
        return False
    anchor = floor_to(start, alignment) if alignment else start
    return is_mamba_prefill_checkpoint_valid(anchor, end, position, match_unit, None, alignment)


def plan_chunk(
    start: int,
    prefill_end: int,
    num_budget_tokens: int,
    wanted: Sequence[tuple[int, str]],
    match_unit: int,
    alignment: int | None,
    spacing: int = 0,
) -> ChunkDecision:
    """Choose the end of the chunk that begins at `start`, and its exports.

    Args:
        prefill_end: tokens known at admission; the prefill is over there.
        num_budget_tokens: tokens this step may still process, at least 1.
        wanted: ascending (position, reason) of the whole prefill.
        alignment: export grid of the kernels; None = they cannot export, so every wanted position
            becomes a chunk end.
        spacing: tokens between optional `interval` checkpoints; 0 = none.
    """
    end = min(start + num_budget_tokens, prefill_end)
    if end < prefill_end:
        rounded = floor_to(end, match_unit)
        if rounded > start:
            end = rounded
    positions = _positions_inside(start, end, wanted, spacing)
    for position, reason in positions:
        is_required = alignment is None or reason in reasons.REQUIRED
        if (
            is_required
            and position < end
            and not is_legal_export(start, end, position, match_unit, alignment)
        ):
            end = position
            break
    exports: dict[int, str] = {}
    num_moved = 0
    dropped: list[str] = []
    end_reason = None
    for position, reason in positions:
        if position > end:
            break
        if position == end:
            end_reason = reason
        elif is_legal_export(start, end, position, match_unit, alignment):
            _keep_more_important(exports, position, reason)
        else:
            lower = floor_to(position, math.lcm(match_unit, alignment or 1))
            if alignment is not None and is_legal_export(start, end, lower, match_unit, alignment):
                num_moved += 1
                _keep_more_important(exports, lower, reason)
            else:
                dropped.append(reason)
    return ChunkDecision(end, tuple(sorted(exports.items())), end_reason, num_moved, tuple(dropped))


def _positions_inside(
    start: int, end: int, wanted: Sequence[tuple[int, str]], spacing: int
) -> list[tuple[int, str]]:
    """Wanted positions in (start, end], ascending, interval ones included where nothing else is."""
    inside = {position: reason for position, reason in wanted if start < position <= end}
    for position in interval_positions(start, end + 1, spacing):
        inside.setdefault(position, reasons.INTERVAL)
    return sorted(inside.items())


def _keep_more_important(exports: dict[int, str], position: int, reason: str) -> None:
    known = exports.get(position)
    if known is None or reasons.IMPORTANCE[reason] < reasons.IMPORTANCE[known]:
        exports[position] = reason


def effective_spacing(asked: int | None, geometry: CacheGeometry) -> int:
    """Spacing of `interval` checkpoints, a multiple of the boundaries where kernels can export; 0 = none.

    Where an export is nearly free, retention alone decides how many stay: `reserve` keeps those that are
    worth more than what they would push out. Where every checkpoint ends a pass, or costs no bytes that
    retention could weigh, they are as far apart as `CacheGeometry.default_checkpoint_interval` says.

    Args:
        asked: what the operator set; None = the default.
    """
    alignment = geometry.checkpoint_alignment
    grid = math.lcm(geometry.match_unit, alignment or 1)
    if asked is None and alignment is not None and geometry.recurrent:
        return ceil_to(FINEST_INTERVAL_TOKENS, grid)
    spacing = geometry.default_checkpoint_interval() if asked is None else asked
    return max(grid, floor_to(spacing, grid)) if spacing > 0 else 0
