"""Swarm runs whose segments leave and come back: under pressure, late, in part, after a restart."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import pytest

from milepost.core.transfers import Restore, Transfers
from milepost.core.tree import PrefixTree
from milepost.sim.contents import ContentsCheck
from milepost.sim.fingerprint import POISON, FingerprintError
from milepost.sim.records import FingerprintRecords
from milepost.sim.swarm import Swarm, draw_config
from milepost.sim.taps import tapped_groups
from milepost.sim.world import SimulationError

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


def test_taps_of_another_position_from_a_store_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What drafts behind a loaded segment would go on from the token before its end."""
    write_records = FingerprintRecords.write_records

    def write_early(self: FingerprintRecords, pool: int, record_ids: Any, payload: Any) -> None:
        write_records(self, pool, record_ids, payload)
        worker = self._worker
        if pool in tapped_groups(worker.geometry):
            for record in record_ids:
                page = worker.pages[pool][record]
                page[-1] = page[-3] if worker.match_unit > 1 else POISON

    monkeypatch.setattr(FingerprintRecords, "write_records", write_early)
    with pytest.raises(SimulationError, match="does not hold its unit"):
        for seed in range(100):
            run_pair(seed, 80)
    monkeypatch.setattr(ContentsCheck, "problems", lambda self: [])
    with pytest.raises(FingerprintError, match="^tap: ") as found:
        for seed in range(100):
            run_pair(seed, 80)
    assert found.value.check == "tap"
