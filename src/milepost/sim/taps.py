"""Taps in simulation: what a drafter's pages hold once, besides their entries.

A drafter's next entry reads the decoder's hidden state of the position before. That state, the tap, lies in
the page of that position: behind the last token of a full page, behind the newest token of another. In the
fingerprint model it is the prefix up to there, kept behind the entries of the page. A group has taps iff its
`bytes_per_page` says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from milepost.core.geometry import CacheGeometry
from milepost.core.units import ceil_to, floor_div
from milepost.sim.step_rules import FingerprintError


def tapped_groups(geometry: CacheGeometry) -> frozenset[int]:
    """Attention groups whose pages hold taps."""
    return frozenset(group for group, spec in enumerate(geometry.attention) if spec.bytes_per_page)


def page_values(geometry: CacheGeometry, group: int) -> int:
    """Values of a page: one per token, and a tap."""
    return geometry.match_unit + (group in tapped_groups(geometry))


def taps_of_rows(path: Sequence[int], start: int, end: int, unit: int) -> dict[int, int]:
    """Unit -> tap that rows [start, end) leave in its page; rows of rejected drafts are none of them.

    Args:
        path: of the request, `path[p]` is the prefix of p tokens.
    """
    ends = [*range(ceil_to(start + 1, unit), end, unit), end]
    return {floor_div(at - 1, unit): path[at] for at in ends}


def check_tap(request_id: int, group: int, page: int, found: int, wanted: int, start: int) -> None:
    """The next entry of a request that goes on at `start` reads the state behind its first `start` tokens.

    Raises:
        FingerprintError: it would read another one.
    """
    if found != wanted:
        raise FingerprintError(
            "tap",
            f"request {request_id}, group {group}, page {page}: what drafts at {start} is of another prefix "
            f"(node {found}, wanted node {wanted})",
        )
