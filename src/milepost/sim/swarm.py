"""Swarm testing: every run draws its own world, leaves some actions out and weights the rest wildly.

A run is a function of one seed. `Swarm.act` does one random action; the world checks everything
after it. Prompts are cut from and grown on earlier ones, so that prefixes meet all the time.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from random import Random

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.geometry import AttentionGroupSpec, CacheGeometry, RecurrentGroupSpec
from milepost.core.plan import SamplingParams
from milepost.core.request import CacheDomain, MediaSpan
from milepost.errors import RequestError
from milepost.sim.drafting import DraftingConfig, draw_drafting
from milepost.sim.fakes import WorkerFaults
from milepost.sim.model import FingerprintModel
from milepost.sim.shelf import Shelf, ShelfTraffic
from milepost.sim.spec import Outcome, RequestSpec
from milepost.sim.workload import hot_or_cold_tokens
from milepost.sim.world import Checks, World

MAX_PATHS = 24
"""Earlier prompts and answers kept to cut new prompts from."""
MAX_REQUESTS = 12
"""Unfinished requests at a time; more would only queue."""

TAP_BYTES = {1: 3, 700: 0, 3000: 6000}
"""Bytes per token of a group -> of its tap in each page, if the group is a drafter's."""

ACTIONS = (
    "add", "schedule", "execute", "step", "abort", "finish", "preempt", "evict", "reset", "tick",
    "save", "load", "end_transfer",
)  # fmt: skip
BETWEEN_STEPS = frozenset({"save", "load", "end_transfer"})
ALWAYS = frozenset({"add", "step"})
PROMPTS = ("fresh", "cut", "resend", "extend", "edit", "sibling")


@dataclass(frozen=True, slots=True)
class SwarmConfig:
    """What one run is made of.

    Attributes:
        actions, prompts: name -> weight; a name that is absent never happens.
        fault_rates: probability per step ("before", "torn"), per export ("unacknowledged") and per
            chunk ("dropped").
    """

    geometry: CacheGeometry
    cache: CacheConfig
    scheduler: SchedulerConfig
    actions: dict[str, float]
    prompts: dict[str, float]
    fault_rates: dict[str, float] = field(default_factory=dict)
    max_prompt_units: int = 8
    vocab_size: int = 4
    has_domains: bool = False
    has_media: bool = False
    drafting: DraftingConfig = field(default_factory=DraftingConfig)


def wild_weights(rng: Random, names: tuple[str, ...], always: frozenset[str]) -> dict[str, float]:
    """A random subset of `names` with weights spread over three orders of magnitude."""
    return {name: 10.0 ** rng.uniform(-1.5, 1.5) for name in names if name in always or rng.random() < 0.6}


def draw_geometry(rng: Random) -> CacheGeometry:
    """One to two groups of each kind; record sizes that differ wildly; every kind of export grid; in three
    of ten checkpoints may be kept apart from running states, smaller or larger than those. In two of three
    the last attention group is a drafter's, whose pages hold taps."""
    match_unit = rng.choice((1, 2, 3, 4, 4, 5, 8, 16))
    num_attention = rng.choice((0, 1, 1, 1, 2))
    num_recurrent = rng.choice((0, 1, 1, 1, 2)) if num_attention else rng.choice((1, 2))
    alignments = (1, 1, 2, 4, match_unit, 3 * match_unit, None)
    kept_bytes = (None, 1, 3000, 20_000) if rng.random() < 0.3 else (None,)
    sizes = [rng.choice((1, 700, 3000)) for _ in range(num_attention)]
    return CacheGeometry(
        match_unit=match_unit,
        attention=tuple(
            AttentionGroupSpec(
                f"attention {index}", size, TAP_BYTES[size] if index == num_attention - 1 else 0
            )
            for index, size in enumerate(sizes)
        ),
        recurrent=tuple(
            RecurrentGroupSpec(
                f"recurrent {index}",
                rng.choice((1, 4096, 30_000)),
                rng.choice(alignments),
                rng.choice(kept_bytes),
            )
            for index in range(num_recurrent)
        ),
    )


def draw_config(rng: Random, *, with_faults: bool = True) -> SwarmConfig:
    """Draw a run. Three in ten lose nothing (ample memory, no eviction, no faults), so that the bound
    is checked for every request. `with_faults=False` leaves worker faults out, not the other actions.
    """
    is_lossless = rng.random() < 0.3
    geometry = draw_geometry(rng)
    unit = geometry.match_unit
    max_prompt_units = rng.choice((2, 4, 8, 12))
    smallest = geometry.request_bytes(2 * (max_prompt_units + 1) * unit)
    cache = CacheConfig(
        cache_bytes=round(smallest * (1e6 if is_lossless else rng.choice((1.0, 1.2, 2.0, 4.0, 100.0)))),
        match_unit=unit,
        enable_prefix_caching=rng.random() < 0.95,
        checkpoint_interval=rng.choice((0, unit, 4 * unit, None)),
        decode_interval=rng.choice((0, unit, 4 * unit)),
        max_states_per_path=None if is_lossless else rng.choice((None, None, None, 1, 3)),
    )
    scheduler = SchedulerConfig(
        max_num_batched_tokens=rng.choice((1, 3, unit, 2 * unit + 1, 64)),
        max_num_seqs=rng.choice((1, 2, 4, 8)),
        max_model_len=2 * (max_prompt_units + 1) * unit,
    )
    traffic = BETWEEN_STEPS if rng.random() < 0.6 else frozenset()
    names = tuple(name for name in ACTIONS if name in traffic or name not in BETWEEN_STEPS)
    actions = wild_weights(rng, names, ALWAYS | traffic)
    if is_lossless:
        actions.pop("evict", None)
    rates = {}
    if with_faults and not is_lossless and rng.random() < 0.5:
        rates = {
            name: 10.0 ** rng.uniform(-3.0, -0.7)
            for name in ("before", "torn", "unacknowledged", "dropped")
            if rng.random() < 0.5
        }
    return SwarmConfig(
        geometry,
        cache,
        scheduler,
        actions=actions,
        prompts=wild_weights(rng, PROMPTS, frozenset({"fresh"})),
        fault_rates=rates,
        max_prompt_units=max_prompt_units,
        vocab_size=rng.choice((2, 4, 50)),
        has_domains=rng.random() < 0.2,
        has_media=rng.random() < 0.2,
        drafting=draw_drafting(rng),
    )


def random_faults(rng: Random, rates: dict[str, float]) -> WorkerFaults:
    """Faults that strike with the given rates."""

    def strikes(name: str) -> bool:
        rate = rates.get(name, 0.0)
        return rate > 0.0 and rng.random() < rate

    return WorkerFaults(
        fails_before=lambda: strikes("before"),
        fails_torn=lambda: strikes("torn"),
        acknowledges=lambda chunk, export: not strikes("unacknowledged"),
        drops=lambda chunk: strikes("dropped"),
    )


class Swarm:
    """One run.

    Args:
        rng: the only source of randomness.
        config: drawn from `rng` if not given.
        before: an earlier run with the same configuration, whose shelf and model this one shares: the
            replica was restarted.
    """

    def __init__(
        self,
        rng: Random,
        config: SwarmConfig | None = None,
        checks: Checks | None = None,
        before: Swarm | None = None,
    ) -> None:
        self.rng = rng
        self.config = config if config is not None else draw_config(rng)
        self.world: World = World(
            self.config.geometry,
            self.config.cache,
            self.config.scheduler,
            faults=random_faults(rng, self.config.fault_rates),
            checks=checks,
            model=before.world.worker.model if before else FingerprintModel(self.config.vocab_size),
            drafting=self.config.drafting,
        )
        self.traffic: ShelfTraffic = ShelfTraffic(
            self.world, before.traffic.shelf if before else Shelf(), rng
        )
        self.world.on_end = self._remember
        self.paths: list[array[int]] = before.paths if before else []
        self._names = list(self.config.actions)
        self._weights = list(self.config.actions.values())

    def run(self, num_actions: int) -> None:
        """Do `num_actions` random actions, then let everything end."""
        for _ in range(num_actions):
            self.act()
        self.end()

    def end(self) -> None:
        """Let everything end."""
        if self.world.plan is not None:
            self.world.execute()
        self.traffic.end_all()
        self.world.drain()

    def act(self) -> str:
        """Do one random action that is possible now; returns its name."""
        name = self.rng.choices(self._names, self._weights)[0]
        world = self.world
        if name in ("abort", "finish", "preempt") and not world.running:
            name = "add"
        if name in BETWEEN_STEPS and world.plan is not None:
            name = "step"
        if name == "schedule" and world.plan is not None or name == "execute" and world.plan is None:
            name = "step"
        if name == "add" and len(world.running) >= MAX_REQUESTS:
            name = "step"
        if name == "add":
            self.add(self.draw_spec())
        elif name in ("abort", "finish", "preempt"):
            getattr(world, name)(self.rng.choice(list(world.running)))
        elif name == "evict":
            world.evict(self.rng.choice((1, 1, 3, 100)))
        elif name in BETWEEN_STEPS:
            {"save": self.traffic.save, "load": self.traffic.load, "end_transfer": self.traffic.end_one}[
                name
            ]()
        elif name == "tick":
            world.now += 10.0 ** self.rng.uniform(-2.0, 4.0)
        else:
            getattr(world, name)()
        return name

    def add(self, spec: RequestSpec) -> int | None:
        """Send a request; None if it was refused for its length."""
        try:
            return self.world.add(spec)
        except RequestError:
            if len(spec.prompt) < self.world.scheduler.max_model_len:
                raise
            return None

    def draw_spec(self) -> RequestSpec:
        """A request whose prompt is related to earlier ones."""
        rng, unit = self.rng, self.config.geometry.match_unit
        prompt = self.draw_prompt()
        wanted = tuple(
            (rng.randrange(len(prompt) + 1), rng.choice(("history", "message", "marker")))
            for _ in range(rng.choice((0, 0, 1, 3)))
        )
        return RequestSpec(
            prompt,
            max_tokens=rng.choice((1, 1, 2, unit, 3 * unit)),
            sampling=self.draw_sampling(),
            wanted=wanted,
            priority=rng.choice((0, 0, 0, 1, -1)),
            domain=self.draw_domain(),
            media=self.draw_media(len(prompt)),
            conversation=rng.choice((None, "a", "b")),
        )

    def draw_prompt(self) -> array[int]:
        rng = self.rng
        limit = self.config.max_prompt_units * self.config.geometry.match_unit + 2
        names = list(self.config.prompts) if self.paths or self.world.running else ["fresh"]
        kind = rng.choices(names, [self.config.prompts[name] for name in names])[0]
        if kind == "sibling" and self.world.running:
            base = self.world.outcomes[rng.choice(list(self.world.running))].spec.prompt
        elif kind != "fresh" and self.paths:
            base = rng.choice(self.paths)
        else:
            return self._fresh(1 + rng.randrange(limit))
        if kind == "resend":
            return base[:]
        if kind == "edit":
            edited = base[:]
            edited[rng.randrange(len(edited))] = rng.randrange(1000)
            return edited
        prompt = base if kind == "extend" else base[: self._cut(len(base))]
        return prompt + self._fresh(rng.randrange(1 + limit // 2)) or self._fresh(1)

    def _cut(self, length: int) -> int:
        """A position to cut at, mostly at or beside a boundary."""
        unit = self.config.geometry.match_unit
        cut = self.rng.randrange(length + 1)
        if self.rng.random() < 0.7:
            cut = cut - cut % unit + self.rng.choice((-1, 0, 1))
        return max(0, min(length, cut))

    def _fresh(self, length: int) -> array[int]:
        return hot_or_cold_tokens(self.rng, length)

    def draw_sampling(self) -> SamplingParams:
        rng = self.rng
        stops = [rng.randrange(self.config.vocab_size)] if rng.random() < 0.3 else []
        if rng.random() < 0.4:
            return SamplingParams(temperature=0.0, stop_token_ids=stops, min_tokens=rng.choice((0, 0, 2)))
        penalty = rng.choice((0.0, 0.0, 0.5))
        return SamplingParams(
            seed=rng.randrange(3),
            choice_index=rng.randrange(2),
            stop_token_ids=stops,
            presence_penalty=penalty,
        )

    def draw_domain(self) -> CacheDomain:
        if not self.config.has_domains:
            return CacheDomain()
        return self.rng.choice(
            (CacheDomain(), CacheDomain(b"x"), CacheDomain(b"", "x"), CacheDomain(b"x", "x"))
        )

    def draw_media(self, length: int) -> tuple[MediaSpan, ...]:
        if not self.config.has_media or self.rng.random() < 0.5:
            return ()
        start = self.rng.randrange(length)
        end = min(length, start + 1 + self.rng.randrange(2 * self.config.geometry.match_unit))
        return (MediaSpan(start, end, self.rng.choice((b"cat", b"dog"))),)

    def _remember(self, outcome: Outcome) -> None:
        path = outcome.spec.prompt + outcome.output_tokens
        if len(self.paths) < MAX_PATHS:
            self.paths.append(path)
        else:
            self.paths[self.rng.randrange(MAX_PATHS)] = path
