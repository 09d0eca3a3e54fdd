"""Swarm runs whose segments leave and come back: under pressure, late, in part, after a restart."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest

from milepost.core.transfers import Restore, Transfers
from milepost.core.tree import PrefixTree
from milepost.sim.swarm import Swarm, draw_config

BUSY = {
    "add": 10.0,
    "save": 8.0,
    "load": 8.0,
    "end_transfer": 8.0,
    "step": 8.0,
    "evict": 4.0,
    "schedule": 1.0,
}


def traffic_swarm(seed: int, before: Swarm | None = None) -> Swarm:
    rng = Random(seed)
    config = before.config if before is not None else draw_config(rng, with_faults=seed % 2 == 0)
    if before is None:
        actions = {**BUSY, **{k: v for k, v in config.actions.items() if k in ("abort", "preempt", "reset")}}
        prompts = {"fresh": 1.0, "cut": 3.0, "resend": 3.0, "extend": 5.0}
        cache = dataclasses.replace(config.cache, enable_prefix_caching=True)
        config = dataclasses.replace(config, actions=actions, prompts=prompts, cache=cache)
    return Swarm(rng, config, before=before)


def run_pair(seed: int, num_actions: int) -> tuple[int, int]:
    """A replica, then another one on the same shelf; returns the segments each loaded."""
    first = traffic_swarm(seed)
    first.run(num_actions)
    second = traffic_swarm(seed + 1_000_000, before=first)
    second.run(num_actions)
    return first.traffic.num_loaded_segments, second.traffic.num_loaded_segments


def test_replicas_that_share_a_shelf_answer_as_cold_ones() -> None:
    loaded = [run_pair(seed, 120) for seed in range(40)]
    assert sum(own for own, _ in loaded) > 10
    assert sum(others for _, others in loaded) > 60


def _one_too_many(transfers: Transfers, restore: Restore, num_segments: int, now: float) -> int:
    return _FINISH(transfers, restore, min(num_segments + 1, len(restore.segments)), now)


def _no_pin(tree: PrefixTree, node: object) -> None:
    del tree, node


_FINISH = Transfers.finish


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [(Transfers, "finish", _one_too_many), (PrefixTree, "pin", _no_pin)],
)
def test_planted_bugs_are_found(
    owner: type, name: str, fault: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment published before its bytes are there; lost pins."""
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(Exception):  # noqa: B017 - whichever check sees it first
        for seed in range(300):
            run_pair(seed, 80)
