"""A stage for bug scenarios: the real scheduler, the fingerprint worker, and shapes to vary.

Every action is followed by the core's audit, by a comparison of all published records with what the
worker holds, by the bound P1 and, when a request ends, by a comparison with the answer of a cold
run (see `sim.world`). A scenario only adds what it is about.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm
from random import Random
from types import TracebackType
from typing import Any

from tests.support.family_geometries import FAMILIES, tokens_per_state
from tests.support.pairwise import pairwise

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.coordinator import Match
from milepost.core.geometry import AttentionGroupSpec, CacheGeometry, RecurrentGroupSpec
from milepost.core.hashing import CacheDomain, KeyChain, MediaSpan
from milepost.sim.drafting import DraftingConfig
from milepost.sim.fakes import WorkerFaults
from milepost.sim.model import FingerprintModel
from milepost.sim.spec import Outcome, RequestSpec
from milepost.sim.workload import greedy, random_tokens
from milepost.sim.world import Checks, World

PAGE_BYTES = 4096
"""Every page record of a shape takes this much."""
SMALL_STATE_BYTES = 16384
"""A state record of a shape that says nothing else."""
PLENTY = 1 << 32


@dataclass(frozen=True)
class Shape:
    """What no right outcome may depend on.

    Attributes:
        unit: match unit, tokens.
        grid: export alignment of every recurrent group; None = the kernels cannot export.
        step_tokens: tokens per step.
        state_tokens: tokens whose pages take as many bytes as a state, as in the model families; 0 = a
            state of few bytes, so that budgets of few records mean something.
    """

    unit: int = 16
    grid: int | None = 1
    num_attention: int = 1
    num_recurrent: int = 1
    step_tokens: int = 512
    max_num_seqs: int = 64
    state_tokens: int = 0

    def __str__(self) -> str:
        return (
            f"U{self.unit}-A{self.grid}-{self.num_attention}a{self.num_recurrent}r"
            f"-C{self.step_tokens}-S{self.max_num_seqs}-W{self.state_tokens}"
        )

    @property
    def geometry(self) -> CacheGeometry:
        return CacheGeometry(
            match_unit=self.unit,
            attention=tuple(
                AttentionGroupSpec(f"attention {index}", PAGE_BYTES // self.unit)
                for index in range(self.num_attention)
            ),
            recurrent=tuple(
                RecurrentGroupSpec(f"recurrent {index}", self.state_bytes, self.grid)
                for index in range(self.num_recurrent)
            ),
        )

    @property
    def state_bytes(self) -> int:
        """Of one group."""
        return self.state_tokens * PAGE_BYTES // self.unit or SMALL_STATE_BYTES

    def floor(self, position: int) -> int:
        """The boundary at or below a position, tokens."""
        return position - position % self.unit

    @property
    def export_grid(self) -> int:
        """Boundaries where the kernels can export inside a pass (any, if every wanted one ends a chunk)."""
        return lcm(self.unit, self.grid or 1)

    def optional_floor(self, position: int) -> int:
        """Where a state wanted at `position` for an optional reason is at the latest; 0 = perhaps nowhere."""
        return position - position % self.export_grid

    def bytes_of(self, *, num_units: int = 0, num_states: int = 0) -> int:
        """Bytes of so many match units and states over all groups."""
        geometry = self.geometry
        return num_units * geometry.unit_bytes + num_states * geometry.checkpoint_bytes

    def varied(self, **changes: Any) -> Shape:
        return replace(self, **changes)


def _shape(row: dict[str, Any]) -> Shape:
    unit = row["unit"]
    return Shape(
        unit=unit,
        grid={"one": 1, "unit": unit, "four units": 4 * unit, "none": None}[row["grid"]],
        num_attention=row["num_attention"],
        num_recurrent=row["num_recurrent"],
        step_tokens={"few": 7, "prime": 53, "unit": unit, "odd": 3 * unit + 5, "all": 4096}[row["step"]],
        max_num_seqs=row["max_num_seqs"],
        state_tokens=row["state_tokens"],
    )


_WORTH = sorted(int(tokens_per_state(family)) for family in FAMILIES)
_LEAST_AND_MOST = (_WORTH[0], _WORTH[-1])

SHAPES = [
    _shape(row)
    for row in pairwise(
        {
            "unit": (16, 32, 48, 64),
            "grid": ("one", "unit", "four units", "none"),
            "step": ("few", "prime", "unit", "odd", "all"),
            "num_recurrent": (1, 2, 3),
            "num_attention": (1, 2),
            "max_num_seqs": (64, 3),
            "state_tokens": (0, *_LEAST_AND_MOST),
        }
    )
]
"""All pairs of units, grids, step budgets, group counts, concurrency and what a state is worth."""
LONG_STEP_SHAPES = [shape.varied(step_tokens=max(256, shape.step_tokens)) for shape in SHAPES[::3]]
"""Fewer, with steps large enough for prompts of ten thousand tokens."""


class Scene:
    """One world. Use as a context manager: at the end everything must drain and nothing may leak.

    Args:
        geometry: instead of the shape's own.
        interval: spacing of `interval` checkpoints; 0 = none, so that a scenario names each of its own.
        drafting: speculation with a scripted drafter.
        options: further fields of `CacheConfig`.
    """

    def __init__(
        self,
        shape: Shape = Shape(),
        *,
        cache_bytes: int = PLENTY,
        interval: int | None = 0,
        max_model_len: int = 1 << 20,
        faults: WorkerFaults | None = None,
        checks: Checks | None = None,
        geometry: CacheGeometry | None = None,
        vocab_size: int = 16,
        seed: int = 1,
        drafting: DraftingConfig | None = None,
        **options: Any,
    ) -> None:
        self.shape = shape
        self.rng = Random(seed)
        options.setdefault("decode_interval", 4 * shape.unit)
        self.world = World(
            geometry or shape.geometry,
            CacheConfig(cache_bytes, match_unit=shape.unit, checkpoint_interval=interval, **options),
            SchedulerConfig(shape.step_tokens, shape.max_num_seqs, max_model_len),
            faults=faults,
            checks=checks,
            model=FingerprintModel(vocab_size),
            drafting=drafting,
        )

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()

    def close(self) -> None:
        """Let everything end, then drop the cache: no byte may stay in use."""
        self.world.drain()
        assert self.world.reset(), "something is still in use"
        memory = self.scheduler.cache.memory
        assert memory.used_bytes == 0
        assert memory.peak_committed_bytes <= memory.budget_bytes

    @property
    def scheduler(self):  # noqa: ANN201
        return self.world.scheduler

    @property
    def counters(self):  # noqa: ANN201
        return self.world.scheduler.cache.counters

    # --- clients ---------------------------------------------------------------------------

    def tokens(self, count: int) -> array[int]:
        """Random tokens nobody else uses."""
        return random_tokens(self.rng, count)

    def submit(self, prompt: Sequence[int], max_tokens: int = 1, **fields: Any) -> Outcome:
        """Send a request; it runs when the world steps."""
        fields.setdefault("sampling", greedy())
        request_id = self.world.add(RequestSpec(array("I", prompt), max_tokens=max_tokens, **fields))
        return self.world.outcomes[request_id]

    def send(self, prompt: Sequence[int], max_tokens: int = 1, **fields: Any) -> Outcome:
        """Send a request and run the world until it has ended."""
        outcome = self.submit(prompt, max_tokens, **fields)
        self.run_until(outcome)
        return outcome

    def run_until(self, *outcomes: Outcome, max_steps: int = 20_000) -> None:
        for _ in range(max_steps):
            if all(outcome.finish_reason is not None for outcome in outcomes):
                return
            self.world.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def request(self, outcome: Outcome):  # noqa: ANN201
        """The core's request, while it runs."""
        return self.world.running[outcome.request_id]

    # --- what is cached --------------------------------------------------------------------

    def lookup(
        self, prompt: Sequence[int], domain: CacheDomain | None = None, media: Sequence[MediaSpan] = ()
    ) -> Match:
        """What a prompt would find now; changes nothing."""
        tokens = array("I", prompt)
        chain = KeyChain(tokens, domain or CacheDomain(), self.shape.unit, media)
        return self.scheduler.cache.match(chain, len(tokens))

    def hit(self, prompt: Sequence[int], **where: Any) -> int:
        """Tokens of `prompt` that a request would reuse now."""
        return self.lookup(prompt, **where).position

    def state_positions(self, tokens: Sequence[int]) -> list[int]:
        """Positions on the path of `tokens` that have a checkpoint, its end included."""
        path = self.lookup(array("I", [*tokens, 0])).path
        return [node.depth * self.shape.unit for node in path if node.states is not None]

    def free_interior_states(self, tokens: Sequence[int]) -> int:
        """Merge every interior checkpoint of a path into the next one, as retention does under
        pressure: the states go, the pages stay. Returns how many were merged."""
        path = self.lookup(array("I", [*tokens, 0])).path
        interior = [node for node in path if node.states is not None and node.children and not node.pins]
        before = sum(count for (move, _), count in self.counters.evictions.items() if move == "merge")
        for node in interior:
            self.scheduler.cache.evictor._evict(node)
        merged = sum(count for (move, _), count in self.counters.evictions.items() if move == "merge")
        assert merged - before == len(interior)
        assert self.scheduler.audit() == []
        return len(interior)


def outputs(outcome: Outcome) -> list[int]:
    return list(outcome.output_tokens)
