"""Seeded workloads. Everything random comes from the `random.Random` that is passed in.

A conversation is a generator (see `spec.Conversation`): it yields the requests of a turn and
receives their outcomes, because the next prompt contains the earlier answers.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from milepost.core.plan import SamplingParams
from milepost.core.units import floor_to
from milepost.sim.spec import Conversation, RequestSpec

FIRST_FREE_TOKEN = 1 << 16
"""Generators that need tokens nobody else uses start here; the model samples far below."""


def random_tokens(rng: Random, count: int, vocab: int = 50_000) -> array[int]:
    """`count` token ids, uniform in [0, vocab)."""
    return array("I", [rng.randrange(vocab) for _ in range(count)])


def hot_or_cold_tokens(rng: Random, count: int, num_hot: int = 2, num_cold: int = 1000) -> array[int]:
    """Tokens that are nearly all from a tiny hot set, so that prompts share prefixes by accident."""
    hot = rng.random() < 0.8
    limit = num_hot if hot else num_cold
    return array("I", [rng.randrange(limit) for _ in range(count)])


def child_rng(rng: Random) -> Random:
    """A generator of its own per client: interleaving then does not change what a client sends."""
    return Random(rng.getrandbits(64))


def greedy(stop: Sequence[int] = ()) -> SamplingParams:
    """Temperature 0."""
    return SamplingParams(temperature=0.0, stop_token_ids=list(stop))


def seeded(rng: Random, stop: Sequence[int] = ()) -> SamplingParams:
    """Temperature 1 with a seed."""
    return SamplingParams(temperature=1.0, seed=rng.getrandbits(31), stop_token_ids=list(stop))


@dataclass(frozen=True, slots=True)
class TurnSizes:
    """Tokens per turn: the user's message, the answer, and what the template puts between them."""

    user_tokens: int = 200
    output_tokens: int = 64
    template_tokens: int = 4
    think_seconds: float = 0.0


def multiturn(
    rng: Random,
    system: array[int],
    num_turns: int,
    sizes: TurnSizes,
    *,
    name: str = "chat",
    vary: float = 0.0,
) -> Conversation:
    """A chat: every turn sends all that was said so far plus a new message.

    Args:
        vary: user messages vary by up to this factor around `sizes.user_tokens`.
    """
    history = array("I", system)
    header = random_tokens(rng, sizes.template_tokens)
    for turn in range(num_turns):
        spread = 1.0 + vary * (2.0 * rng.random() - 1.0)
        history.extend(random_tokens(rng, max(1, round(sizes.user_tokens * spread))))
        shared = len(history)
        history.extend(header)
        spec = RequestSpec(
            prompt=history[:],
            max_tokens=sizes.output_tokens,
            sampling=greedy(),
            wanted=((len(system), "message"), (shared, "history")),
            conversation=name,
            delay=sizes.think_seconds * rng.random() * 2.0 if turn else 0.0,
            label=f"{name}/turn {turn}",
        )
        outcomes = yield [spec]
        history.extend(outcomes[0].output_tokens)


def fork(
    rng: Random,
    anchors: Sequence[array[int]],
    num_tails: int,
    tail_tokens: int,
    output_tokens: int,
    *,
    is_message: bool = True,
) -> Conversation:
    """Many tails on few anchors: one request after the other, each on a random anchor.

    Args:
        is_message: the anchor is a message (a system prompt, a document), whose end the caller knows;
            False: a plain completion, where nothing says that others will share it.
    """
    for number in range(num_tails):
        index = rng.randrange(len(anchors))
        prompt = array("I", anchors[index])
        prompt.extend(random_tokens(rng, 1 + rng.randrange(2 * tail_tokens)))
        yield [
            RequestSpec(
                prompt=prompt,
                max_tokens=output_tokens,
                sampling=greedy(),
                wanted=((len(anchors[index]), "message"),) if is_message else (),
                conversation=f"fork {index}",
                label=f"fork {index}/tail {number}",
            )
        ]


@dataclass(frozen=True, slots=True)
class AgentHabits:
    """Probabilities per turn of what agents do to a cache.

    Attributes:
        side: a side request (title, summary) with the same history and another instruction.
        edit: a message in the middle is rewritten.
        abort: the prompt is aborted during its prefill or its answer and then sent again.
        strip: the thinking part of the last answer is left out of the history.
    """

    side: float = 0.3
    edit: float = 0.1
    abort: float = 0.15
    strip: float = 0.5


def agent(
    rng: Random,
    system: array[int],
    num_turns: int,
    sizes: TurnSizes,
    habits: AgentHabits,
    *,
    name: str = "agent",
) -> Conversation:
    """An agent at work on one task. A prompt is the messages and the header that asks for an answer."""
    messages: list[array[int]] = [array("I", system)]
    header = random_tokens(rng, max(1, sizes.template_tokens))
    title_prompt = random_tokens(rng, 24)
    for turn in range(num_turns):
        messages.append(random_tokens(rng, 1 + rng.randrange(2 * sizes.user_tokens)))
        if len(messages) > 3 and rng.random() < habits.edit:
            edited = rng.randrange(1, len(messages) - 1)
            messages[edited] = random_tokens(rng, 1 + rng.randrange(2 * sizes.user_tokens))
        prompt = _joined([*messages, header])
        specs = [_agent_spec(rng, prompt, messages, sizes, name, f"{name}/turn {turn}")]
        if rng.random() < habits.side:
            side = _joined([*messages, title_prompt, header])
            specs.append(
                RequestSpec(
                    prompt=side,
                    max_tokens=8,
                    sampling=greedy(),
                    wanted=tuple((end, "message") for end in _message_ends(messages)),
                    priority=1,
                    label=f"{name}/side {turn}",
                )
            )
        if rng.random() < habits.abort:
            specs[0].abort_after_steps = rng.randrange(1, 6)
            yield specs
            specs = [_agent_spec(rng, prompt, messages, sizes, name, f"{name}/retry {turn}")]
        outcomes = yield specs
        answer = outcomes[0].output_tokens
        if rng.random() < habits.strip:
            answer = answer[len(answer) - len(answer) // 4 :]
        if answer:
            messages.append(header + answer)


def _joined(messages: Sequence[array[int]]) -> array[int]:
    joined = array("I")
    for message in messages:
        joined.extend(message)
    return joined


def _message_ends(messages: Sequence[array[int]]) -> list[int]:
    """Token position behind each message, as a chat template knows them."""
    return list(accumulate(len(message) for message in messages))


def _agent_spec(
    rng: Random, prompt: array[int], messages: Sequence[array[int]], sizes: TurnSizes, name: str, label: str
) -> RequestSpec:
    ends = _message_ends(messages)
    wanted = [*((end, "message") for end in ends[:-1]), (ends[-1], "history")]
    return RequestSpec(
        prompt=prompt[:],
        max_tokens=sizes.output_tokens,
        sampling=greedy(),
        wanted=tuple(wanted),
        conversation=name,
        delay=sizes.think_seconds * rng.random() * 2.0,
        label=label,
    )


def growing(
    rng: Random,
    num_streams: int,
    first_tokens: int,
    last_tokens: int,
    grow_tokens: int,
    output_tokens: int = 1,
) -> Conversation:
    """Streams that grow by `grow_tokens` a round, with a barrier after each round."""
    streams = [random_tokens(rng, first_tokens) for _ in range(num_streams)]
    round_number = 0
    while len(streams[0]) <= last_tokens:
        yield [
            RequestSpec(
                prompt=stream[:],
                max_tokens=output_tokens,
                sampling=greedy(),
                conversation=f"stream {index}",
                label=f"stream {index}/round {round_number}",
            )
            for index, stream in enumerate(streams)
        ]
        for stream in streams:
            stream.extend(random_tokens(rng, grow_tokens))
        round_number += 1


def boundary_lengths(match_unit: int, max_units: int) -> Iterator[int]:
    """Prompt lengths around every unit boundary: mU - 1, mU, mU + 1."""
    for units in range(max_units + 1):
        for length in (units * match_unit - 1, units * match_unit, units * match_unit + 1):
            if length >= 1:
                yield length


def boundary_fuzz(rng: Random, match_unit: int, max_units: int, num_requests: int) -> Conversation:
    """Prompts cut from a few paths at and around unit boundaries, some with a new end."""
    lengths = list(boundary_lengths(match_unit, max_units))
    paths = [hot_or_cold_tokens(rng, max_units * match_unit + 1) for _ in range(3)]
    for number in range(num_requests):
        path = rng.choice(paths)
        prompt = path[: rng.choice(lengths)]
        if rng.random() < 0.3:
            prompt.extend(hot_or_cold_tokens(rng, rng.choice(lengths)))
        history = floor_to(rng.randrange(len(prompt) + 1), max(1, match_unit // 2))
        yield [
            RequestSpec(
                prompt=prompt,
                max_tokens=rng.choice((1, 2, match_unit, match_unit + 1, 3 * match_unit)),
                sampling=seeded(rng, stop=(0,)) if rng.random() < 0.5 else greedy((0,)),
                wanted=((history, rng.choice(("history", "message", "marker"))),),
                label=f"fuzz {number}",
            )
        ]
