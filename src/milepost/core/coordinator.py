"""The joint hit: the deepest boundary that every group can serve, and who limited it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from milepost.core.groups.attention import AttentionGroup
from milepost.core.groups.recurrent import RecurrentGroup
from milepost.core.lease import Lease
from milepost.core.losses import Loss
from milepost.core.tree import Node


@dataclass(slots=True)
class JointHit:
    """Result of a lookup over one path.

    Attributes:
        units: length of the joint hit.
        attention_units: what all attention groups could serve without any state. A lookup lowers it to
            a boundary that splits no media item.
        units_by_group: what each group could serve alone.
        limiting_group: the group with the shortest reach, if the others reach further.
    """

    units: int
    attention_units: int
    units_by_group: dict[str, int]
    limiting_group: str | None


@dataclass(slots=True)
class Match:
    """What a lookup found.

    Attributes:
        position: tokens that can be reused.
        path: nodes of the units that exist for these tokens, from the first one.
        hit: per-group reach, in units.
        limit_units: units a hit could cover at most (the last token is always computed).
        is_media_bound: a deeper boundary was given up because it splits a media item.
        loss: the deepest boundary behind the hit that was evicted or refused, if any.
    """

    position: int
    path: list[Node]
    hit: JointHit
    limit_units: int
    is_media_bound: bool = False
    loss: Loss | None = None

    @property
    def units(self) -> int:
        return self.hit.units

    def is_repeat(self, lease: Lease) -> bool:
        """Whether the same prompt made or hit the tip of `lease` before: no further turn."""
        return self.units == self.limit_units and lease.num_prompt_tokens <= lease.tip.num_prompt_tokens


def joint_hit(
    attention: Sequence[AttentionGroup], recurrent: Sequence[RecurrentGroup], path: Sequence[Node], limit: int
) -> JointHit:
    """Deepest k <= limit with pages [0, k) in every attention group and a state at exactly k in
    every recurrent group. Each group's own reach does not depend on the others."""
    reach: dict[str, int] = {}
    attention_units = min(limit, len(path))
    for group in attention:
        reach[group.name] = group.longest(path, limit)
        attention_units = min(attention_units, reach[group.name])
    for state_group in recurrent:
        reach[state_group.name] = state_group.deepest(path, limit)
    units = attention_units
    settled = not recurrent
    while units and not settled:
        settled = True
        for state_group in recurrent:
            deepest = state_group.deepest(path, units)
            if deepest < units:
                units = deepest
                settled = False
    limiting = None
    if reach:
        shortest = min(reach, key=lambda name: reach[name])
        if reach[shortest] < max(reach.values()):
            limiting = shortest
    return JointHit(units, attention_units, reach, limiting)
