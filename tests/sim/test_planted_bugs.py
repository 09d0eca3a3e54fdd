"""The harness bites: bugs of known kinds, patched into the real code paths, are found by random runs.

Each bug must be found within 3,000 actions for ten of ten seeds, while the code as it is stays clean on
the same seeds. Bugs that end in wrong answers must be found twice: with every check, and with the
fingerprint worker alone, which sees no more of the core than a real worker does.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.eviction import Evictor
from milepost.core.geometry import CacheGeometry
from milepost.core.hashing import KeyChain
from milepost.core.lease import Lease
from milepost.core.plan import ChunkPlan
from milepost.core.prefix_cache import Match, PrefixCache
from milepost.core.request import Request
from milepost.core.scheduler import Scheduler
from milepost.core.tree import Node, PrefixTree
from milepost.sim.drafting import DraftingConfig
from milepost.sim.fingerprint import FingerprintError, FingerprintWorker
from milepost.sim.swarm import ACTIONS, PROMPTS, Swarm, SwarmConfig, draw_geometry
from milepost.sim.world import Checks, SimulationError

NUM_STEPS = 3_000
SEEDS = range(10)
ACTION_WEIGHTS = {
    "step": 6.0, "add": 3.0, "reset": 0.02, "tick": 0.1, "abort": 0.8, "save": 0.1, "load": 0.1,
}  # fmt: skip
TAP_BYTES = 8
"""Of the last attention group, the drafter's, per page."""
EVERYTHING = Checks()
WORKER_ALONE = Checks(audit=False, contents=False, bound=False, losses=False)
FINDINGS = (FingerprintError, SimulationError, ValueError)
FINDING = r"^step \d+|^[a-z ]+: |is released but not in use|is not complete"
"""What counts as found; a ValueError only if it is the core's own guard against a double free."""


def can_export_anywhere(geometry: CacheGeometry) -> bool:
    alignment = geometry.checkpoint_alignment
    return alignment is not None and geometry.match_unit % alignment == 0


def draw_run(rng: Random) -> SwarmConfig:
    """A drawn geometry with everything a bug may need: every action, faults, siblings, scarce memory."""
    geometry = draw_geometry(rng)
    while not (geometry.attention and geometry.recurrent and can_export_anywhere(geometry)):
        geometry = draw_geometry(rng)
    *others, last = geometry.attention
    geometry = replace(geometry, attention=(*others, replace(last, bytes_per_page=TAP_BYTES)))
    unit = geometry.match_unit
    max_len = 18 * unit
    return SwarmConfig(
        geometry,
        CacheConfig(
            round(geometry.request_bytes(max_len) * rng.choice((1.5, 3.0))),
            match_unit=unit,
            checkpoint_interval=rng.choice((0, 2 * unit)),
            decode_interval=2 * unit,
        ),
        SchedulerConfig(rng.choice((2 * unit + 1, 6 * unit)), 4, max_len),
        actions={**dict.fromkeys(ACTIONS, 0.3), **ACTION_WEIGHTS},
        prompts=dict.fromkeys(PROMPTS, 1.0),
        fault_rates={"before": 0.02, "torn": 0.02, "unacknowledged": 0.02, "dropped": 0.02},
        drafting=DraftingConfig(rng.randrange(1, 5), error_rate=0.4, seed=7, is_own=True),
    )


@dataclass(frozen=True)
class Bug:
    """A bug as patches.

    Attributes:
        plant: applies it.
        answers_change: whether the fingerprint worker alone must find it; so must it what makes a drafter
            guess from another text, though no answer changes then.
    """

    name: str
    plant: Callable[[pytest.MonkeyPatch], None]
    answers_change: bool


def publish_at_schedule_time(patch: pytest.MonkeyPatch) -> None:
    """Units and exports become visible when the step is planned, not when it has run."""
    append = Scheduler._append_chunk

    def append_and_publish(self: Scheduler, plan: Any, request: Request, end: int, *rest: Any) -> int:
        num_rows = append(self, plan, request, end, *rest)
        lease = request.lease
        assert lease is not None
        exports = list(lease.exports)
        self.cache.publish(lease, end, exports, None, self._now)
        return num_rows

    patch.setattr(Scheduler, "_append_chunk", append_and_publish)


def guard_cleared_at_each_step(patch: pytest.MonkeyPatch) -> None:
    """The usual remedy for the above: what was published in this step cannot be hit in this step."""
    publish_at_schedule_time(patch)
    fresh: set[bytes] = set()
    add, match, schedule = PrefixTree.add, PrefixCache.match, Scheduler.schedule

    def add_fresh(self: PrefixTree, parent: Node, key: bytes, *rest: Any) -> Node:
        fresh.add(key)
        return add(self, parent, key, *rest)

    def match_guarded(self: PrefixCache, chain: KeyChain, num_tokens: int) -> Match:
        hidden = {key: node for key, node in self.tree.index.items() if key in fresh}
        for node in hidden.values():
            assert node.parent is not None
            node.parent.children.pop(node.key, None)
        found = match(self, chain, num_tokens)
        for node in hidden.values():
            assert node.parent is not None
            node.parent.children[node.key] = node
        return found

    def schedule_cleared(self: Scheduler, now: float) -> Any:
        fresh.clear()
        return schedule(self, now)

    patch.setattr(PrefixTree, "add", add_fresh)
    patch.setattr(PrefixCache, "match", match_guarded)
    patch.setattr(Scheduler, "schedule", schedule_cleared)


def state_one_unit_too_far(patch: pytest.MonkeyPatch) -> None:
    """An export is attached to the unit behind the one it belongs to."""
    publish = PrefixCache.publish

    def publish_shifted(self: PrefixCache, lease: Lease, end: int, exported: Any, *rest: Any) -> None:
        unit = self.match_unit
        lease.exports = {position + unit: entry for position, entry in lease.exports.items()}
        publish(self, lease, end, [position + unit for position in exported], *rest)

    patch.setattr(PrefixCache, "publish", publish_shifted)


def slot_leaked_on_abort(patch: pytest.MonkeyPatch) -> None:
    """An aborted request forgets its running state without giving it back."""
    end = Scheduler._end

    def end_leaky(self: Scheduler, request: Request, reason: str, *, is_sound: bool) -> None:
        if reason == "abort" and request.lease is not None:
            request.lease.running = None
        end(self, request, reason, is_sound=is_sound)

    patch.setattr(Scheduler, "_end", end_leaky)


def evicted_page_still_listed(patch: pytest.MonkeyPatch) -> None:
    """Pages are given back but their unit stays where a lookup finds it."""
    remove = PrefixTree.remove_leaf

    def remove_but_list(self: PrefixTree, node: Node) -> list[int]:
        parent = node.parent
        pages = remove(self, node)
        assert parent is not None
        parent.children[node.key] = node
        self.stranded.pop(parent.key, None)
        if parent.is_root:
            self.roots[parent.key] = parent
        return pages

    patch.setattr(PrefixTree, "remove_leaf", remove_but_list)


def evicted_state_still_listed(patch: pytest.MonkeyPatch) -> None:
    """The slots of a merged checkpoint are given back but the checkpoint stays."""
    free = Evictor._free_state

    def free_but_list(self: Evictor, node: Node, move: str) -> None:
        states, reason = node.states, node.reason
        free(self, node, move)
        assert states is not None
        if node.children:
            self.tree.attach_state(node, states, reason)

    patch.setattr(Evictor, "_free_state", free_but_list)


def unacknowledged_export_published(patch: pytest.MonkeyPatch) -> None:
    """Every export counts as written, whatever the worker says."""
    publish = PrefixCache.publish

    def publish_all(self: PrefixCache, lease: Lease, end: int, exported: Any, *rest: Any) -> None:
        publish(self, lease, end, list(lease.exports), *rest)

    patch.setattr(PrefixCache, "publish", publish_all)


def hit_mutates_its_checkpoint(patch: pytest.MonkeyPatch) -> None:
    """A request runs in the very slot it was restored from."""

    def run_in_place(self: PrefixCache, lease: Lease, taken: Any, now: float) -> bool:
        slots = (
            lease.tip.states
            if lease.tip.states is not None
            else self._acquire_slots(self._running_pools, taken, now, may_evict=True)
        )
        taken.running = slots
        return slots is not None

    patch.setattr(PrefixCache, "_reserve_running", run_in_place)


def pages_longer_than_states(patch: pytest.MonkeyPatch) -> None:
    """The attention hit is kept although the state is missing (the state of a shorter prefix is used)."""
    match = PrefixCache.match

    def match_pages(self: PrefixCache, chain: KeyChain, num_tokens: int) -> Match:
        found = match(self, chain, num_tokens)
        if found.hit.units and found.hit.attention_units > found.hit.units:
            wrong = found.path[found.hit.units - 1].states
            found.hit.units = found.hit.attention_units
            found.position = found.hit.units * self.match_unit
            tip = found.path[found.hit.units - 1]
            patch.setattr(
                PrefixCache,
                "initial_slots",
                lambda cache, lease: (
                    wrong if lease.tip is tip and lease.running is None else real(cache, lease)
                ),
            )
        return found

    real = PrefixCache.initial_slots
    patch.setattr(PrefixCache, "match", match_pages)


def tap_behind_the_last_row(patch: pytest.MonkeyPatch) -> None:
    """What drafts goes on from the last row of a pass, rejected or not."""
    write = FingerprintWorker._write

    def write_rows(self: FingerprintWorker, chunk: ChunkPlan, starts: dict[int, int]) -> Any:
        result = write(self, chunk, starts)
        if result is not None and result.end < chunk.last_row_end:
            path = self.truth(chunk.request_id).path[chunk.end : chunk.end + 1]
            self.tree.extend(path, array("I", chunk.draft_tokens))
            unit = (chunk.last_row_end - 1) // self.match_unit
            self._write_taps(self.live[chunk.request_id], {unit: path[-1]})
        return result

    patch.setattr(FingerprintWorker, "_write", write_rows)


def tap_of_the_position_before(patch: pytest.MonkeyPatch) -> None:
    """A full page keeps the state that its last entry was made from, not what that left."""
    write_taps = FingerprintWorker._write_taps

    def write_early(self: FingerprintWorker, live: Any, taps: dict[int, int]) -> None:
        parents, full = self.tree._parents, self.match_unit
        early = {u: parents[t] if self.tree.depth(t) == (u + 1) * full else t for u, t in taps.items()}
        write_taps(self, live, early)

    patch.setattr(FingerprintWorker, "_write_taps", write_early)


def taps_of_the_newest_token_only(patch: pytest.MonkeyPatch) -> None:
    """Boundaries inside a pass get no tap; a hit there finds what the page held before."""
    write_taps = FingerprintWorker._write_taps

    def write_last(self: FingerprintWorker, live: Any, taps: dict[int, int]) -> None:
        write_taps(self, live, {max(taps): taps[max(taps)]})

    patch.setattr(FingerprintWorker, "_write_taps", write_last)


BUGS = [
    Bug("publish at schedule time", publish_at_schedule_time, True),
    Bug("same-step guard cleared at each step", guard_cleared_at_each_step, True),
    Bug("state published one unit too far", state_one_unit_too_far, True),
    Bug("slot leaked on abort", slot_leaked_on_abort, False),
    Bug("evicted page still listed", evicted_page_still_listed, True),
    Bug("evicted state still listed", evicted_state_still_listed, True),
    Bug("unacknowledged export published", unacknowledged_export_published, False),
    Bug("a hit mutates its checkpoint", hit_mutates_its_checkpoint, True),
    Bug("pages longer than states", pages_longer_than_states, True),
    Bug("tap behind the last row, rejected or not", tap_behind_the_last_row, True),
    Bug("tap of the position before a boundary", tap_of_the_position_before, True),
    Bug("tap of the newest token only", taps_of_the_newest_token_only, True),
]


def run(seed: int, checks: Checks) -> Swarm:
    rng = Random(seed)
    swarm = Swarm(rng, draw_run(rng), checks)
    swarm.run(NUM_STEPS)
    return swarm


@pytest.mark.parametrize("seed", SEEDS)
def test_the_code_as_it_is_is_clean(seed: int) -> None:
    swarm = run(seed, EVERYTHING)
    assert swarm.world.num_actions >= NUM_STEPS
    assert swarm.world.worker.counters.num_restored > 20
    assert swarm.world.num_failed_steps > 0


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
@pytest.mark.parametrize("seed", SEEDS)
def test_found_with_every_check(bug: Bug, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    with pytest.raises(FINDINGS, match=FINDING):
        run(seed, EVERYTHING)


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.answers_change], ids=lambda bug: bug.name)
@pytest.mark.parametrize("seed", SEEDS)
def test_found_by_the_fingerprint_worker_alone(bug: Bug, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    with pytest.raises(FINDINGS, match=FINDING):
        run(seed, WORKER_ALONE)
