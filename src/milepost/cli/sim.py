"""`milepost sim`: replays, comparisons and swarm runs with progress and a table on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from milepost.errors import ConfigError
from milepost.sim import compare as comparing
from milepost.sim.cost import CostModel
from milepost.sim.generate import WORKLOADS, generate
from milepost.sim.geometries import ModelShape, named_shape
from milepost.sim.plot import svg
from milepost.sim.policies.align import AlignPolicy
from milepost.sim.policies.replays import (
    align_config,
    align_num_blocks,
    replay_align,
    replay_blocks,
    replay_clairvoyant,
)
from milepost.sim.replay import ReplayOptions, ReplayRequest, ReplayResult, from_trace, replay
from milepost.sim.report import GIB, Report, as_json, table
from milepost.sim.swarm import Swarm
from milepost.sim.trace import TRACE_BLOCK_TOKENS, read_trace

POLICIES = ("milepost", "milepost-lru", "lru", "optimal", "clairvoyant", "align")
WORKLOAD_MATCH_UNIT = 32
SWARM_ACTIONS = 400
TRACE_NOTE = (
    f"blocks of {TRACE_BLOCK_TOKENS} tokens are all a trace knows; what lies inside them, and every answer, "
    "is made up"
)
STATELESS_NOTE = (
    "lru and optimal keep KV blocks only: states cost them nothing, which no engine can have. They reuse "
    "and count prompts alone; milepost also counts the answers it computes, and the next turn reuses them"
)
ALIGN_NOTE = "align: upstream's rules as modelled in milepost.sim.policies; a state costs it one block"
CLAIRVOYANT_NOTE = (
    "clairvoyant: knows the future, pays for its states, is made for the second half only; "
    "no policy reuses more there than"
)
INSTANT_NOTE = (
    "requests are served one after the other in no time; set --tokens-per-second for queues and TTFT"
)


@dataclass(frozen=True, slots=True)
class SimOptions:
    """What the command was asked for; see its help."""

    trace: Path | None
    workload: str
    seed: int
    scale: int
    geometry: str
    budgets: tuple[int, ...]
    policies: tuple[str, ...]
    match_unit: int | None
    limit: int | None
    max_output_tokens: int | None
    step_tokens: int
    tokens_per_second: float | None
    json_path: Path | None
    plot_path: Path | None


def run_replays(options: SimOptions, console: Console, status: Console) -> None:
    """Replay every policy at every budget; table on `console`, progress on `status`.

    Raises:
        ConfigError: an unknown name, a bad trace, or a budget that holds no request.
    """
    unknown = [name for name in options.policies if name not in POLICIES]
    if unknown:
        raise ConfigError("policies", f"unknown policy {unknown[0]!r}; known are {', '.join(POLICIES)}")
    for field, path in (("json", options.json_path), ("plot", options.plot_path)):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(field, f"cannot write {path}: {path.parent} is no directory")
    shape = named_shape(options.geometry)
    is_trace = options.trace is not None
    unit = options.match_unit or (TRACE_BLOCK_TOKENS if is_trace else WORKLOAD_MATCH_UNIT)
    requests = _requests(options)
    results: list[ReplayResult] = []
    limits: list[str] = []
    with _progress(status) as begin:
        for cache_bytes in options.budgets:
            for policy in options.policies:
                on_progress = begin(f"{policy}, {cache_bytes / GIB:g} GiB", len(requests))
                if policy == "clairvoyant":
                    result, limit = replay_clairvoyant(
                        requests, shape, unit, cache_bytes, _scaled(on_progress, len(requests))
                    )
                    limits.append(f"{100 * limit:.1f} % at {cache_bytes / GIB:g} GiB")
                else:
                    result = _replay(policy, requests, shape, unit, cache_bytes, options, on_progress)
                results.append(result)
    source = options.trace.name if options.trace is not None else f"{options.workload}, seed {options.seed}"
    notes = [TRACE_NOTE] if is_trace else []
    notes += [STATELESS_NOTE] if {"lru", "optimal"} & set(options.policies) else []
    notes += [ALIGN_NOTE] if "align" in options.policies else []
    notes += [f"{CLAIRVOYANT_NOTE} {', '.join(limits)}"] if limits else []
    notes += [INSTANT_NOTE] if options.tokens_per_second is None else []
    title = f"{source}: {len(requests)} requests, {options.geometry}, match unit {unit}"
    report = Report(title, tuple(notes), tuple(results))
    console.print(table(report).rstrip(), highlight=False, markup=False, soft_wrap=True)
    if options.json_path is not None:
        options.json_path.write_text(as_json(report), encoding="utf-8")
    if options.plot_path is not None:
        options.plot_path.write_text(svg(report), encoding="utf-8")


def run_comparison(options: SimOptions, console: Console, status: Console) -> None:
    """Milepost beside `align` on all generated workloads, as a markdown table with every loss listed."""
    shape = named_shape(options.geometry)
    found: list[comparing.Comparison] = []
    with _progress(status) as begin:
        for name in ("multiturn", "fork", "agents", "completions"):
            requests = generate(name, options.seed, options.scale)
            on_progress = begin(name, len(comparing.SHARES))
            unit = options.match_unit or WORKLOAD_MATCH_UNIT
            found += comparing.compare(
                name, requests, shape, unit, options.step_tokens, on_progress=on_progress
            )
    console.print(comparing.table(found), highlight=False, markup=False, soft_wrap=True)
    for entry in found:
        for label, ours, theirs, cause in entry.below:
            console.print(
                f"below: {entry.workload} at {100 * entry.share:.0f} %: {label}: "
                f"Milepost {ours}, align {theirs} tokens; {cause or 'no eviction'}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )


def run_swarm(seed: int, num_actions: int, console: Console, status: Console) -> None:
    """Random worlds with every check on until `num_actions` actions are done; a finding raises."""
    done = 0
    with _progress(status) as begin:
        on_progress = begin("swarm", num_actions)
        first = seed
        while done < num_actions:
            swarm = Swarm(Random(seed))
            try:
                swarm.run(SWARM_ACTIONS)
            except Exception as error:
                error.add_note(
                    f"swarm run with seed {seed}; repeat with: milepost sim --swarm 1 --seed {seed}"
                )
                raise
            done += swarm.world.num_actions
            seed += 1
            on_progress(min(done, num_actions), num_actions)
    console.print(f"{done} actions in {seed - first} worlds (seeds {first} to {seed - 1}), no finding")


def _scaled(on_progress: Callable[[int, int], None], total: int) -> Callable[[int, int], None]:
    """Progress in rounds, shown on a bar made for `total` requests."""
    return lambda done, of: on_progress(total * done // of, total)


def _requests(options: SimOptions) -> list[ReplayRequest]:
    if options.trace is not None:
        return from_trace(read_trace(options.trace, options.limit))
    return generate(options.workload, options.seed, options.scale)[: options.limit]


def _replay(
    policy: str,
    requests: Sequence[ReplayRequest],
    shape: ModelShape,
    unit: int,
    cache_bytes: int,
    options: SimOptions,
    on_progress: Callable[[int, int], None],
) -> ReplayResult:
    outputs = options.max_output_tokens
    if outputs is None:
        outputs = 1 if options.trace is not None else 1 << 30
    if policy in ("lru", "optimal"):
        result = replay_blocks(policy, requests, shape, unit, cache_bytes)
        on_progress(len(requests), len(requests))
        return result
    if policy == "align":
        blocks = align_num_blocks(shape, unit, cache_bytes)
        align = AlignPolicy(align_config(shape, unit, options.step_tokens, blocks))
        return replay_align(requests, align, cache_bytes, max_output_tokens=outputs, on_progress=on_progress)
    cost = None
    if options.tokens_per_second is not None:
        cost = CostModel(seconds_per_token=1.0 / options.tokens_per_second)
    replay_options = ReplayOptions(
        max_output_tokens=outputs,
        step_tokens=options.step_tokens,
        cost=cost,
        lru_retention=policy == "milepost-lru",
    )
    return replay(requests, shape.geometry(unit), cache_bytes, replay_options, on_progress)


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, int], Callable[[int, int], None]]]:
    """A bar per run on a terminal; elsewhere one line when a run is over."""
    if not console.is_terminal:

        def begin_quietly(name: str, total: int) -> Callable[[int, int], None]:
            def on_progress(done: int, of: int) -> None:
                if done >= of:
                    console.print(f"done: {name}", highlight=False, markup=False)

            return on_progress

        yield begin_quietly
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:

        def begin(name: str, total: int) -> Callable[[int, int], None]:
            task = progress.add_task(name, total=total)
            return lambda done, of: progress.update(task, completed=done)

        yield begin


KNOWN_WORKLOADS = ", ".join(sorted(WORKLOADS))
