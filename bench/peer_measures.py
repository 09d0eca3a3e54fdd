"""What `bench/peers.py` measures on a server: prefill, decode of one and of several, and a conversation."""

from __future__ import annotations

import statistics
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from multiturn import closed_form
from peer_client import Answer, Body
from peer_servers import Server

from milepost.engine.chat import common_prefix

SETTLE_SECONDS = 0.03
FIRST_ID = 100
"""Ids below may be special."""


@dataclass(frozen=True)
class Sample:
    """One measurement: processor time of the server's process tree, wall time, and what was done in it."""

    cpu_s: float
    wall_s: float
    num_tokens: int

    @property
    def cpu_tokens_per_s(self) -> float:
        return self.num_tokens / self.cpu_s

    @property
    def cpu_ms_per_token(self) -> float:
        return 1e3 * self.cpu_s / self.num_tokens

    @property
    def wall_ms_per_token(self) -> float:
        return 1e3 * self.wall_s / self.num_tokens


class Ids:
    """Token ids below `vocabulary` from a seed; nothing is ever handed out twice."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._random = Random(seed)
        self._vocabulary = vocabulary

    def take(self, count: int) -> list[int]:
        return [self._random.randrange(FIRST_ID, self._vocabulary) for _ in range(count)]


def prefill(server: Server, prompt: Sequence[int]) -> Sample:
    """A prompt that nobody has seen, to its first token."""
    before = server.cpu_seconds()
    answer = server.complete(prompt, 1)
    time.sleep(SETTLE_SECONDS)
    return Sample(server.cpu_seconds() - before, answer.ttft_s, len(prompt))


def decode(server: Server, prompt: Sequence[int], num_tokens: int) -> Sample:
    """From the first token to the last."""
    first: list[float] = []
    answer = server.complete(prompt, num_tokens, on_first=lambda: first.append(server.cpu_seconds()))
    after = server.cpu_seconds()
    start = answer.arrivals[0][0]
    return Sample(after - first[0], answer.ended_at - start, answer.tokens_between(start, answer.ended_at))


class Window:
    """The time in which all of several streams run: from the last first token to the first end."""

    def __init__(self, num_streams: int, clock: Callable[[], tuple[float, float]]) -> None:
        self._waiting = num_streams
        self._clock = clock
        self._lock = threading.Lock()
        self.start: tuple[float, float] | None = None
        self.end: tuple[float, float] | None = None

    def began(self) -> None:
        with self._lock:
            self._waiting -= 1
            if self._waiting == 0:
                self.start = self._clock()

    def ended(self) -> None:
        with self._lock:
            if self.end is None:
                self.end = self._clock()


def decode_batch(server: Server, prompts: Sequence[Sequence[int]], num_tokens: int) -> Sample:
    """Tokens of all streams while all of them run.

    Raises:
        RuntimeError: they never ran at the same time.
    """
    window = Window(len(prompts), lambda: (time.perf_counter(), server.cpu_seconds()))
    answers: list[Answer] = []

    def ask(prompt: Sequence[int]) -> None:
        answers.append(server.complete(prompt, num_tokens, on_first=window.began))
        window.ended()

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(answers) < len(prompts) or window.start is None or window.end is None:
        raise RuntimeError(f"{server.engine.name}: {len(answers)} of {len(prompts)} answers came")
    (start, start_cpu), (end, end_cpu) = window.start, window.end
    count = sum(answer.tokens_between(start, end) for answer in answers)
    if end <= start or not count:
        raise RuntimeError(f"{server.engine.name} did not serve {len(prompts)} requests at once")
    return Sample(end_cpu - start_cpu, end - start, count)


@dataclass(frozen=True)
class Workload:
    """The conversation of `bench/multiturn.py`; sizes in tokens."""

    num_conversations: int = 2
    num_turns: int = 10
    num_system_tokens: int = 2000
    num_user_tokens: int = 200
    num_answer_tokens: int = 64


@dataclass(frozen=True)
class Turn:
    """Attributes:
    num_processed: the longest beginning of the prompt that earlier requests of the same server processed.
    """

    conversation: int
    turn: int
    num_prompt: int
    num_processed: int
    num_cached: int
    ttft_s: float
    cpu_s: float

    @property
    def num_computed(self) -> int:
        return self.num_prompt - self.num_cached


def message(workload: Workload, vocabulary: int, conversation: int, turn: int) -> list[int]:
    """User tokens of a turn; conversation -1 is the system prompt. Differs from the first token on."""
    if conversation < 0:
        return Ids(vocabulary, 1).take(workload.num_system_tokens)
    number = turn * workload.num_conversations + conversation
    return [FIRST_ID + number, *Ids(vocabulary, 2 + number).take(workload.num_user_tokens - 1)]


@dataclass
class Chat:
    """The conversations of one server, which go on from its own answers.

    Attributes:
        extra: fields that a request of a conversation gets.
    """

    server: Server
    workload: Workload
    vocabulary: int
    extra: Callable[[int], Body]
    turns: list[Turn] = field(default_factory=list)
    _histories: list[list[int]] = field(default_factory=list)
    _processed: list[array[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        system = message(self.workload, self.vocabulary, -1, 0)
        self._histories = [list(system) for _ in range(self.workload.num_conversations)]

    def ask(self, conversation: int, turn: int) -> Turn:
        history = self._histories[conversation]
        history += message(self.workload, self.vocabulary, conversation, turn)
        prompt = array("I", history)
        num_processed = max((common_prefix(prompt, earlier) for earlier in self._processed), default=0)
        before = self.server.cpu_seconds()
        first: list[float] = []
        answer = self.server.complete(
            *(history, self.workload.num_answer_tokens, self.extra(conversation)),
            on_first=lambda: first.append(self.server.cpu_seconds()),
        )
        history += answer.token_ids
        # No forward pass has read the last sampled token.
        self._processed.append(array("I", history[:-1]))
        cpu_s = first[0] - before
        done = Turn(conversation, turn, len(prompt), num_processed, answer.num_cached, answer.ttft_s, cpu_s)
        self.turns.append(done)
        return done


@dataclass(frozen=True)
class ChatResult:
    """Attributes:
    later_ttft_ms, later_cpu_ms: medians over all turns but the first of each conversation.
    """

    num_prompt: int
    num_computed: int
    hit_rate: float
    later_ttft_ms: float
    later_cpu_ms: float


def summarize(turns: Sequence[Turn]) -> ChatResult:
    later = [turn for turn in turns if turn.turn > 0] or list(turns)
    num_prompt = sum(turn.num_prompt for turn in turns)
    return ChatResult(
        num_prompt=num_prompt,
        num_computed=sum(turn.num_computed for turn in turns),
        hit_rate=sum(turn.num_cached for turn in turns) / num_prompt,
        later_ttft_ms=1e3 * statistics.median(turn.ttft_s for turn in later),
        later_cpu_ms=1e3 * statistics.median(turn.cpu_s for turn in later),
    )


def expected_computed(turns: Sequence[Turn], match_unit: int) -> int:
    """Closed form over all turns: sum of N - U * floor(min(P, N - 1) / U)."""
    return sum(closed_form(turn.num_prompt, turn.num_processed, match_unit) for turn in turns)


def medians(samples: Sequence[Sample]) -> dict[str, Any]:
    """Median and smallest processor time per token, and the median of the wall time."""
    cpu = [sample.cpu_ms_per_token for sample in samples]
    return {
        "cpu_ms_per_token": statistics.median(cpu),
        "best_cpu_ms_per_token": min(cpu),
        "wall_ms_per_token": statistics.median(sample.wall_ms_per_token for sample in samples),
        "repetitions": len(samples),
    }


def median_ratio(ours: Sequence[Sample], theirs: Sequence[Sample]) -> float | None:
    """Median ratio of processor times per token, ours over theirs; the k-th of each ran side by side.

    None: nothing to compare. Processor time comes in ticks of 10 ms, and short runs may have none.
    """
    pairs = [(a.cpu_ms_per_token, b.cpu_ms_per_token) for a, b in zip(ours, theirs, strict=False)]
    ratios = [a / b for a, b in pairs if a > 0 and b > 0]
    return statistics.median(ratios) if ratios else None
