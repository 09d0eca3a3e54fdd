"""Swarm runs: worlds drawn at random, every check on. Seeds are printed; a finding repeats from its seed."""

from __future__ import annotations

import os
import time
from random import Random

import pytest

from milepost.sim.swarm import Swarm

ACTIONS_PER_WORLD = 150


def run_worlds(first_seed: int, num_actions: int) -> None:
    """Worlds from `first_seed` on until `num_actions` actions are done."""
    seed, done, num_checked = first_seed, 0, 0
    while done < num_actions:
        swarm = Swarm(Random(seed))
        try:
            swarm.run(ACTIONS_PER_WORLD)
        except Exception as error:
            error.add_note(f"repeat with: milepost sim --swarm 1 --seed {seed}")
            raise
        done += swarm.world.num_actions
        num_checked += swarm.world.promises.num_reached
        seed += 1
    print(f"\nswarm: {done} actions, seeds {first_seed} to {seed - 1}, {num_checked} promises kept")
    assert num_checked > num_actions // 1000


def test_worlds_of_fixed_seeds() -> None:
    run_worlds(0, 10_000)


@pytest.mark.slow
def test_worlds_of_new_seeds() -> None:
    """Other worlds every time; MILEPOST_SEED repeats a run."""
    run_worlds(int(os.environ.get("MILEPOST_SEED") or time.time()), 50_000)
