"""Generated workloads as lists of requests, so that every policy sees the same ones.

The next prompt of a conversation contains the earlier answer. Answers are a pure function of the
prompt here, so one run with an unbounded cache fixes all requests; replays then repeat them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from random import Random

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.geometry import CacheGeometry, RecurrentGroupSpec
from milepost.errors import ConfigError
from milepost.sim.clients import ClientDriver
from milepost.sim.cost import CostModel
from milepost.sim.model import FingerprintModel
from milepost.sim.replay import ReplayRequest
from milepost.sim.spec import Conversation, Outcome
from milepost.sim.workload import (
    AgentHabits,
    TurnSizes,
    agent,
    child_rng,
    fork,
    growing,
    multiturn,
    random_tokens,
)
from milepost.sim.world import Checks, World

NO_CHECKS = Checks(audit=False, contents=False, bound=False, losses=False)
VOCAB_SIZE = 50_000
RECORDING_STEP_TOKENS = 2048


def _multiturn(rng: Random, scale: int) -> list[Conversation]:
    """Chats of ten turns over three system prompts."""
    systems = [random_tokens(rng, 2000) for _ in range(3)]
    sizes = TurnSizes(user_tokens=200, output_tokens=64, think_seconds=30.0)
    return [
        multiturn(child_rng(rng), rng.choice(systems), 10, sizes, name=f"chat {number}", vary=0.8)
        for number in range(8 * scale)
    ]


def _fork(rng: Random, scale: int, *, is_message: bool = True) -> list[Conversation]:
    """Clients that hang many tails on four anchors of 1,000 to 8,000 tokens."""
    anchors = [random_tokens(rng, 1000 * (1 << number)) for number in range(4)]
    return [fork(child_rng(rng), anchors, 12, 300, 16, is_message=is_message) for _ in range(6 * scale)]


def _completions(rng: Random, scale: int) -> list[Conversation]:
    """The same without anything that says where the shared part ends."""
    return _fork(rng, scale, is_message=False)


def _agents(rng: Random, scale: int) -> list[Conversation]:
    """Agents with side requests, edits, aborted and retried prompts, thinking left out."""
    systems = [random_tokens(rng, 3000) for _ in range(2)]
    sizes = TurnSizes(user_tokens=400, output_tokens=96, think_seconds=10.0)
    return [
        agent(child_rng(rng), rng.choice(systems), 8, sizes, AgentHabits(), name=f"agent {number}")
        for number in range(6 * scale)
    ]


def _growing(rng: Random, scale: int) -> list[Conversation]:
    """Eight streams that grow by 50 tokens a round from 3,000 to 4,100."""
    return [growing(child_rng(rng), 8, 3000, 4100, 50) for _ in range(scale)]


WORKLOADS: dict[str, Callable[[Random, int], list[Conversation]]] = {
    "multiturn": _multiturn,
    "fork": _fork,
    "completions": _completions,
    "agents": _agents,
    "growing": _growing,
}


def generate(name: str, seed: int, scale: int = 1) -> list[ReplayRequest]:
    """Requests of a named workload, in order of arrival.

    Args:
        scale: multiplies the number of conversations.

    Raises:
        ConfigError: unknown name; lists the known ones.
    """
    make = WORKLOADS.get(name)
    if make is None:
        raise ConfigError("workload", f"unknown workload {name!r}; known are {', '.join(sorted(WORKLOADS))}")
    return record(make(Random(seed), scale))


def record(conversations: Sequence[Conversation]) -> list[ReplayRequest]:
    """Run conversations once with an unbounded cache and keep what they asked and were answered."""
    world = World(
        CacheGeometry(32, (), (RecurrentGroupSpec("recurrent", 1),)),
        CacheConfig(1 << 50),
        SchedulerConfig(RECORDING_STEP_TOKENS, 64, 1 << 30),
        cost=CostModel(seconds_per_step=0.01),
        checks=NO_CHECKS,
        model=FingerprintModel(VOCAB_SIZE),
    )
    outcomes = ClientDriver(world).run(conversations)
    return [_request(outcome) for outcome in outcomes]


def _request(outcome: Outcome) -> ReplayRequest:
    spec = outcome.spec
    prompt: array[int] = spec.prompt
    return ReplayRequest(
        outcome.arrival,
        len(prompt),
        max(1, len(outcome.output_tokens)),
        tokens=prompt.__copy__,
        outputs=outcome.output_tokens,
        wanted=spec.wanted,
        conversation=spec.conversation,
        abort_after_steps=spec.abort_after_steps,
        label=spec.label,
    )
