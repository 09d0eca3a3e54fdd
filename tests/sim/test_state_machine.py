"""The real core under actions in any order: hypothesis chooses, the world checks after each of them.

A rule may run while a plan is in flight. After every rule the core is audited, everything a lookup
could find is compared with what the worker holds, and finished answers equal a cold run.
"""

from __future__ import annotations

from array import array
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.geometry import AttentionGroupSpec, CacheGeometry, RecurrentGroupSpec
from milepost.core.plan import SamplingParams
from milepost.core.request import CacheDomain
from milepost.errors import RequestError
from milepost.sim.drafting import SAMPLINGS as DRAFT_SAMPLINGS
from milepost.sim.drafting import DraftingConfig
from milepost.sim.fakes import WorkerFaults
from milepost.sim.model import FingerprintModel
from milepost.sim.spec import Outcome, RequestSpec
from milepost.sim.world import World

NUM_EXAMPLES = 560
NUM_RULES = 50
MIN_EXECUTED = 20_000
MAX_UNITS = 6

executed: Counter[str] = Counter()
"""Rules that ran, by name, over all examples; the test prints and checks the sum."""

GEOMETRIES = st.builds(
    lambda unit, pages, states, alignment, tap: CacheGeometry(
        match_unit=unit,
        attention=tuple(
            AttentionGroupSpec(f"attention {i}", size, tap * (i == len(pages) - 1))
            for i, size in enumerate(pages)
        ),
        recurrent=tuple(
            RecurrentGroupSpec(f"recurrent {i}", size, alignment) for i, size in enumerate(states)
        ),
    ),
    st.sampled_from((1, 2, 3, 4)),
    st.lists(st.sampled_from((1, 1500, 5000)), min_size=1, max_size=2),
    st.lists(st.sampled_from((1, 20_000)), min_size=0, max_size=2),
    st.sampled_from((1, 2, None)),
    st.sampled_from((0, 40)),
)
TOKENS = st.integers(0, 2)
SAMPLINGS = st.one_of(
    st.just(SamplingParams(temperature=0.0)),
    st.builds(
        lambda seed, stops, penalty: SamplingParams(
            seed=seed, stop_token_ids=stops, presence_penalty=penalty
        ),
        st.integers(0, 2),
        st.lists(TOKENS, max_size=1),
        st.sampled_from((0.0, 1.0)),
    ),
)


class CoreMachine(RuleBasedStateMachine):
    """One world per example."""

    @initialize(
        geometry=GEOMETRIES,
        room=st.sampled_from((1.0, 1.3, 2.5, 50.0)),
        step_tokens=st.sampled_from((1, 2, 5, 64)),
        num_seqs=st.sampled_from((1, 2, 6)),
        interval_units=st.sampled_from((0, 1, 3)),
        decode_units=st.sampled_from((0, 2)),
        is_faulty=st.booleans(),
        drafting=st.builds(
            DraftingConfig,
            num_draft_tokens=st.sampled_from((0, 1, 3, 8)),
            error_rate=st.sampled_from((0.0, 0.3, 1.0)),
            is_ragged=st.booleans(),
            is_own=st.booleans(),
            sampling=st.sampled_from(DRAFT_SAMPLINGS),
        ),
    )
    def start(
        self,
        geometry: CacheGeometry,
        room: float,
        step_tokens: int,
        num_seqs: int,
        interval_units: int,
        decode_units: int,
        is_faulty: bool,
        drafting: DraftingConfig,
    ) -> None:
        unit = geometry.match_unit
        max_len = 2 * MAX_UNITS * unit
        self.is_faulty = is_faulty
        self.faults = {"before": 0, "torn": 0, "unacknowledged": 0, "dropped": 0}
        self.world = World(
            geometry,
            CacheConfig(
                round(room * geometry.request_bytes(max_len)),
                match_unit=unit,
                checkpoint_interval=interval_units * unit,
                decode_interval=decode_units * unit,
            ),
            SchedulerConfig(step_tokens, num_seqs, max_len),
            faults=WorkerFaults(
                fails_before=lambda: self._strikes("before"),
                fails_torn=lambda: self._strikes("torn"),
                acknowledges=lambda chunk, export: not self._strikes("unacknowledged"),
                drops=lambda chunk: self._strikes("dropped"),
            ),
            model=FingerprintModel(vocab_size=3),
            drafting=drafting,
        )
        self.world.on_end = self._remember
        self.paths: list[array[int]] = []

    def _strikes(self, name: str) -> bool:
        if self.faults[name]:
            self.faults[name] -= 1
            return True
        return False

    def _remember(self, outcome: Outcome) -> None:
        self.paths.append(outcome.spec.prompt + outcome.output_tokens)

    def _send(self, prompt: array[int], data: st.DataObject) -> None:
        unit = self.world.geometry.match_unit
        spec = RequestSpec(
            prompt,
            max_tokens=data.draw(st.sampled_from((1, 2, unit, 3 * unit)), "max_tokens"),
            sampling=data.draw(SAMPLINGS, "sampling"),
            wanted=tuple(
                (position, reason)
                for position, reason in data.draw(
                    st.lists(
                        st.tuples(
                            st.integers(0, len(prompt)), st.sampled_from(("history", "message", "marker"))
                        ),
                        max_size=2,
                    ),
                    "wanted",
                )
            ),
            priority=data.draw(st.sampled_from((0, 0, 1)), "priority"),
            domain=data.draw(st.sampled_from((CacheDomain(), CacheDomain(), CacheDomain(b"t"))), "domain"),
        )
        try:
            self.world.add(spec)
        except RequestError:
            assert len(prompt) >= self.world.scheduler.max_model_len

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        executed["add"] += 1
        limit = MAX_UNITS * self.world.geometry.match_unit
        self._send(array("I", data.draw(st.lists(TOKENS, min_size=1, max_size=limit), "prompt")), data)

    @rule(data=st.data())
    @precondition(lambda self: bool(self.paths))
    def add_related(self, data: st.DataObject) -> None:
        """Cut an earlier path anywhere and go on differently."""
        executed["add_related"] += 1
        path = data.draw(st.sampled_from(self.paths), "path")
        kept = data.draw(st.integers(1, len(path)), "kept")
        self._send(path[:kept] + array("I", data.draw(st.lists(TOKENS, max_size=6), "tail")), data)

    @rule(data=st.data())
    @precondition(lambda self: bool(self.world.running))
    def add_sibling(self, data: st.DataObject) -> None:
        """Share a prefix with a request that is still on its way."""
        executed["add_sibling"] += 1
        prompt = self.world.outcomes[self._pick(data)].spec.prompt
        kept = data.draw(st.integers(1, len(prompt)), "kept")
        self._send(prompt[:kept] + array("I", data.draw(st.lists(TOKENS, max_size=4), "tail")), data)

    @rule()
    @precondition(lambda self: self.world.plan is None)
    def schedule(self) -> None:
        executed["schedule"] += 1
        self.world.schedule()

    @rule()
    @precondition(lambda self: self.world.plan is not None)
    def execute(self) -> None:
        executed["execute"] += 1
        self.world.execute()

    @rule(count=st.integers(1, 4))
    def steps(self, count: int) -> None:
        executed["steps"] += 1
        for _ in range(count):
            self.world.step()

    @rule(data=st.data())
    @precondition(lambda self: bool(self.world.running))
    def abort(self, data: st.DataObject) -> None:
        executed["abort"] += 1
        self.world.abort(self._pick(data))

    @rule(data=st.data())
    @precondition(lambda self: bool(self.world.running))
    def finish(self, data: st.DataObject) -> None:
        executed["finish"] += 1
        self.world.finish(self._pick(data))

    @rule(data=st.data())
    @precondition(lambda self: bool(self.world.running))
    def preempt(self, data: st.DataObject) -> None:
        executed["preempt"] += 1
        self.world.preempt(self._pick(data))

    @rule(
        kind=st.sampled_from(("evict", "evict", "evict", "reset", "time")), count=st.sampled_from((1, 3, 100))
    )
    def pressure(self, kind: str, count: int) -> None:
        """What costs entries: memory is wanted elsewhere, a reset, or time that makes them old."""
        executed[kind] += 1
        if kind == "evict":
            self.world.evict(count)
        elif kind == "reset":
            self.world.reset()
        else:
            self.world.now += 500.0 * count

    @rule(name=st.sampled_from(("before", "torn", "unacknowledged", "dropped")))
    @precondition(lambda self: self.is_faulty)
    def arm_fault(self, name: str) -> None:
        executed["arm_fault"] += 1
        self.faults[name] += 1

    def _pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(list(self.world.running)), "request")

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


def run_machine(num_examples: int) -> int:
    """Run the machine; returns the number of rules it executed."""
    executed.clear()
    run_state_machine_as_test(
        CoreMachine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=NUM_RULES,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    total = executed.total()
    print(f"\nstate machine: {total} rules executed: {dict(executed.most_common())}")
    return total


def test_core_under_any_order() -> None:
    assert run_machine(NUM_EXAMPLES) >= MIN_EXECUTED


@pytest.mark.slow
def test_core_under_any_order_long() -> None:
    assert run_machine(3 * NUM_EXAMPLES) >= 50_000
