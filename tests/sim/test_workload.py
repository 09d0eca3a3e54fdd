"""Workload generators: determinism, shapes, and that a swarm really varies."""

from __future__ import annotations

from array import array
from random import Random

from milepost.sim.spec import Conversation, Outcome, RequestSpec
from milepost.sim.swarm import ACTIONS, ALWAYS, Swarm, draw_config
from milepost.sim.workload import (
    AgentHabits,
    TurnSizes,
    agent,
    boundary_fuzz,
    boundary_lengths,
    fork,
    growing,
    multiturn,
    random_tokens,
)


def play(conversation: Conversation, answer: int = 5) -> list[list[RequestSpec]]:
    """Answer every request with `answer` tokens; returns the turns."""
    turns: list[list[RequestSpec]] = []
    specs = list(next(conversation))
    while True:
        turns.append(specs)
        outcomes = [
            Outcome(0, spec, 0.0, output_tokens=array("I", [900 + n for n in range(answer)]))
            for spec in specs
        ]
        try:
            specs = list(conversation.send(outcomes))
        except StopIteration:
            return turns


def test_chat_contains_its_answers() -> None:
    system = random_tokens(Random(0), 30)
    turns = play(multiturn(Random(1), system, 3, TurnSizes(10, 5, 2)))
    prompts = [turn[0].prompt for turn in turns]
    assert [len(p) for p in prompts] == [42, 59, 76]
    for earlier, later in zip(prompts, prompts[1:], strict=False):
        assert later[: len(earlier) + 5] == earlier + array("I", [900, 901, 902, 903, 904])
    assert turns[1][0].wanted == ((30, "message"), (57, "history"))


def test_forks_share_their_anchor() -> None:
    anchors = [random_tokens(Random(n), 50) for n in range(2)]
    for (spec,) in play(fork(Random(3), anchors, 20, 10, 1)):
        assert spec.prompt[:50] in anchors and len(spec.prompt) > 50


def test_agents_do_everything_they_are_said_to_do() -> None:
    habits = AgentHabits(side=0.5, edit=0.5, abort=0.5, strip=0.5)
    turns = play(agent(Random(2), random_tokens(Random(0), 20), 30, TurnSizes(8, 5), habits), answer=8)
    labels = [spec.label for turn in turns for spec in turn]
    assert any("/side" in label for label in labels) and any("/retry" in label for label in labels)
    aborted = [turn for turn in turns if turn[0].abort_after_steps is not None]
    retried = [turn for turn in turns if "/retry" in turn[0].label]
    assert aborted and len(aborted) == len(retried)
    assert all(a[0].prompt == r[0].prompt for a, r in zip(aborted, retried, strict=True))
    prompts = [turn[0].prompt for turn in turns]
    is_prefix = [b[: len(a)] == a for a, b in zip(prompts, prompts[1:], strict=False)]
    assert not all(is_prefix) and any(is_prefix)


def test_growing_streams_keep_step() -> None:
    turns = play(growing(Random(0), 3, 20, 40, 10))
    assert [[len(spec.prompt) for spec in turn] for turn in turns] == [[20] * 3, [30] * 3, [40] * 3]


def test_boundary_lengths_and_fuzz() -> None:
    assert list(boundary_lengths(4, 2)) == [1, 3, 4, 5, 7, 8, 9]
    assert list(boundary_lengths(1, 2)) == [1, 1, 2, 1, 2, 3]
    specs = [turn[0] for turn in play(boundary_fuzz(Random(1), 8, 5, 200))]
    offsets = {len(spec.prompt) % 8 for spec in specs}
    assert {0, 1, 7} <= offsets
    assert all(0 <= p <= len(spec.prompt) for spec in specs for p, _ in spec.wanted)


def test_swarm_configurations_differ_and_repeat() -> None:
    configs = [draw_config(Random(seed)) for seed in range(60)]
    assert configs == [draw_config(Random(seed)) for seed in range(60)]
    for name in ACTIONS:
        present = sum(name in config.actions for config in configs)
        assert present == 60 if name in ALWAYS else 15 < present < 55
    assert len({config.geometry.match_unit for config in configs}) > 4
    assert {len(config.geometry.attention) for config in configs} == {0, 1, 2}
    assert any(config.fault_rates for config in configs)
    assert not any(draw_config(Random(seed), with_faults=False).fault_rates for seed in range(60))


def test_a_swarm_run_repeats_from_its_seed() -> None:
    def play_run() -> tuple[int, int, list[str]]:
        swarm = Swarm(Random(11))
        actions = [swarm.act() for _ in range(150)]
        return swarm.world.num_steps, swarm.world.worker.counters.num_computed_tokens, actions

    assert play_run() == play_run()
