"""The core under the sizes of every model family: bound, contents, budgets and answers.

A state is worth 400 to 16,000 tokens of attention KV, depending on the family, which decides what is
given up first. Nothing else about a family reaches the core: no name, and no branch.
"""

from __future__ import annotations

import dataclasses
import io
import re
import tokenize
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.support.family_geometries import FAMILIES, family_geometry, tokens_per_state

import milepost
from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.geometry import CacheGeometry
from milepost.models.registry import PARSERS
from milepost.sim.clients import ClientDriver
from milepost.sim.spec import Outcome
from milepost.sim.workload import TurnSizes, child_rng, fork, multiturn, random_tokens
from milepost.sim.world import World

UNITS = (16, 32, 64)
GRIDS: dict[str, int | None] = {"anywhere": 1, "grid of 64": 64, "no exports": None}
SIZES = TurnSizes(70, 21, 5)


def test_the_families_differ_in_what_a_state_is_worth() -> None:
    worth = {family: tokens_per_state(family) for family in FAMILIES}
    assert max(worth.values()) > 10 * min(worth.values()), worth
    assert int(worth["kimi_k3"]) == 16_253 and int(worth["kimi_linear"]) == 5_384


def run(
    geometry: CacheGeometry, *, seed: int, num_states: float | None = None, **options: Any
) -> list[Outcome]:
    """Chats that share a system prompt, and questions about shared documents, with every check of the
    world. `num_states`: the budget, beyond what one request needs; None = plenty."""
    rng = Random(seed)
    unit, max_len = geometry.match_unit, 1024
    budget = 1 << 50
    if num_states is not None:
        budget = geometry.request_bytes(max_len) + int(num_states * geometry.checkpoint_bytes)
    world = World(
        geometry,
        CacheConfig(budget, match_unit=unit, **options),
        SchedulerConfig(96, 4, max_len),
    )
    system = random_tokens(rng, 90)
    chats = [
        multiturn(child_rng(rng), system, 4, SIZES, name=f"chat {number}", vary=0.5) for number in range(3)
    ]
    documents = [random_tokens(rng, 200) for _ in range(2)]
    outcomes = ClientDriver(world).run([*chats, fork(child_rng(rng), documents, 5, 30, 9)])
    assert len(outcomes) == 3 * 4 + 5
    assert world.scheduler.cache.memory.peak_committed_bytes <= budget
    return outcomes


def shown(outcomes: list[Outcome]) -> list[tuple[str, list[int], int]]:
    return sorted((o.spec.label, list(o.output_tokens), o.num_cached_tokens) for o in outcomes)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_bound_and_contents(family: str, unit: int, grid: str) -> None:
    """Every budget: the world checks the audit, all contents, the bound and reported losses."""
    geometry = family_geometry(family, unit, GRIDS[grid])
    ample = run(geometry, seed=1)
    # A second turn finds all of the first one, whatever a state costs.
    for outcome in ample:
        if outcome.spec.label.endswith(("turn 1", "turn 2", "turn 3")):
            assert outcome.num_cached_tokens > 90, outcome.spec.label
    for num_states in (0.0, 2.5):
        tight = run(geometry, seed=1, num_states=num_states)
        assert [item[:2] for item in shown(tight)] == [item[:2] for item in shown(ample)]
    without = run(geometry, seed=1, enable_prefix_caching=False)
    assert [item[:2] for item in shown(without)] == [item[:2] for item in shown(ample)]
    assert not any(outcome.num_cached_tokens for outcome in without)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 8))
@pytest.mark.parametrize("family", FAMILIES)
def test_more_worlds(family: str, seed: int) -> None:
    rng = Random(seed)
    geometry = family_geometry(family, rng.choice((8, 16, 32, 128)), rng.choice((1, 32, 96, None)))
    ample = shown(run(geometry, seed=seed))
    for num_states in (0.0, 1.0, 3.0, 9.0):
        tight = run(
            geometry, seed=seed, num_states=num_states, checkpoint_interval=rng.choice((None, 0, 128))
        )
        assert [item[:2] for item in shown(tight)] == [item[:2] for item in ample]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_states", [None, 2.5])
def test_the_names_of_groups_decide_nothing(family: str, num_states: float | None) -> None:
    geometry = family_geometry(family, 16)
    renamed = dataclasses.replace(
        geometry,
        attention=tuple(dataclasses.replace(spec, name=f"x{n}") for n, spec in enumerate(geometry.attention)),
        recurrent=tuple(dataclasses.replace(spec, name=f"a{n}") for n, spec in enumerate(geometry.recurrent)),
    )
    results = [run(g, seed=3, num_states=num_states) for g in (geometry, renamed)]
    assert shown(results[0]) == shown(results[1])


# ---------------------------------------------------------------- no family in the core

PACKAGE = Path(milepost.__file__).parent
MIXERS = ("kda", "mla", "gdn", "gqa", "deltanet")
NAMES = sorted({*PARSERS, *MIXERS, "kimi", "qwen", "moe", "expert", "model_type"})
FAMILY = re.compile("|".join(rf"(?<![a-z]){re.escape(name)}(?![a-z])" for name in NAMES), re.IGNORECASE)
FREE = ("core", "stores", "runner", "config.py")
"""What decides about requests, states and memory, and what executes it."""


def code_of(path: Path) -> str:
    """Names and values of a module, without comments and docstrings."""
    kept = []
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        starts_line = before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.NL)
        if token.type != tokenize.COMMENT and not (token.type == tokenize.STRING and starts_line):
            kept.append(token.string)
        if token.type not in (tokenize.COMMENT, tokenize.NL) or starts_line:
            before = token.type
    return " ".join(kept)


def modules() -> list[Path]:
    found = [path for name in FREE for path in sorted((PACKAGE / name).rglob("*.py"))]
    return [*found, PACKAGE / "config.py"]


def test_no_family_is_named_below_the_models() -> None:
    assert len(modules()) > 30
    for path in modules():
        named = FAMILY.search(code_of(path))
        assert named is None, f"{path.relative_to(PACKAGE)} names {named[0] if named else ''!r}"


def test_a_branch_would_be_noticed(tmp_path: Path) -> None:
    for line in (
        'if group.name == "kda": pass',
        "if spec.model_type in KNOWN: pass",
        "from milepost.models.qwen import SKIPPED",
        'IS_KIMI = name.startswith("kimi_")',
    ):
        file = tmp_path / "module.py"
        file.write_text(f'"""About kimi_k3."""\n\nX = 1\n# qwen3_next\n{line}\n')
        assert FAMILY.search(code_of(file)), line
    file.write_text('"""About kimi_k3."""\n\n\ndef f():\n    """Of KDA."""\n    # qwen3_next\n    return 1\n')
    assert FAMILY.search(code_of(file)) is None


def test_the_core_takes_sizes_and_nothing_else() -> None:
    """Fields of the geometry, and of the options that reach the scheduler: no flag for a family."""
    for kind in (CacheConfig, SchedulerConfig, CacheGeometry):
        assert not [field.name for field in dataclasses.fields(kind) if FAMILY.search(field.name)]
