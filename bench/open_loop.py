"""Clients of a server: conversations that grow turn by turn, asked in a closed or an open loop.

An open loop sends on a schedule drawn beforehand, whatever the server does: a server that slows down
cannot slow its own load. Times count from the moment a request was due, not from when it was sent.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

TIMEOUT_SECONDS = 300.0
KEEP_ALIVE_SECONDS = 2.0
WORDS = (
    "harbour ledger copper signal winter orchard violet engine paper lantern river marble distant "
    "kettle garden thunder velvet compass island window shadow market silver bridge candle forest"
).split()
SYSTEM_WORDS = 120
NUM_SYSTEMS = 4


@dataclass
class Conversation:
    """Messages so far; the next turn appends one of the user's and, when served, the answer."""

    messages: list[dict[str, str]]
    num_turns: int = 0


class Conversations:
    """Conversations that wait for their next turn; one that has had all its turns makes room for a new one.

    Args:
        num_idle: conversations kept; if all are in flight one more is started.
        num_turns: turns of each.
        user_words: most words of a turn; at least half of them.
    """

    def __init__(self, num_idle: int, num_turns: int, user_words: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._num_turns = num_turns
        self._user_words = user_words
        self._systems = [self._text(SYSTEM_WORDS) for _ in range(NUM_SYSTEMS)]
        self._idle = [self._new() for _ in range(num_idle)]
        self._max_idle = num_idle

    def _text(self, num_words: int) -> str:
        return " ".join(self._rng.choice(WORDS) for _ in range(num_words))

    def _new(self) -> Conversation:
        return Conversation([{"role": "system", "content": self._rng.choice(self._systems)}])

    def take(self) -> Conversation:
        """One that nobody is talking to, with a new message of its user."""
        if self._idle:
            position = self._rng.randrange(len(self._idle))
            self._idle[position], self._idle[-1] = self._idle[-1], self._idle[position]
            conversation = self._idle.pop()
        else:
            conversation = self._new()
        text = self._text(self._rng.randint((self._user_words + 1) // 2, self._user_words))
        conversation.messages.append({"role": "user", "content": text})
        return conversation

    def give_back(self, conversation: Conversation, answer: str | None) -> None:
        """After an answer, or as before the turn if there was none."""
        if answer is None:
            conversation.messages.pop()
        else:
            conversation.messages.append({"role": "assistant", "content": answer})
            conversation.num_turns += 1
            if conversation.num_turns >= self._num_turns:
                conversation = self._new()
        if len(self._idle) < self._max_idle:
            self._idle.append(conversation)


@dataclass(frozen=True)
class Outcome:
    """One request.

    Attributes:
        status: 200, 429, another HTTP status, or 0 if the connection failed.
        error: what went wrong; None for a whole answer and for a proper 429.
        due_at, sent_at, admitted_at, first_at, ended_at: when it should be sent, when it was, and when the
            status (None if none came), the first token (likewise) and the last byte were here;
            `time.perf_counter` seconds.
    """

    status: int
    error: str | None
    due_at: float
    sent_at: float
    admitted_at: float | None
    first_at: float | None
    ended_at: float
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def is_served(self) -> bool:
        return self.status == 200 and self.error is None

    @property
    def is_refused(self) -> bool:
        return self.status == 429 and self.error is None

    @property
    def ttft_ms(self) -> float:
        """From the time it was due to its first token; NaN if none came."""
        return float("nan") if self.first_at is None else (self.first_at - self.due_at) * 1e3

    @property
    def sent_ttft_ms(self) -> float:
        """From the time it was sent to its first token; NaN if none came."""
        return float("nan") if self.first_at is None else (self.first_at - self.sent_at) * 1e3

    @property
    def admitted_ttft_ms(self) -> float:
        """From the server's word that it is admitted to its first token; NaN if none came."""
        if self.first_at is None or self.admitted_at is None:
            return float("nan")
        return (self.first_at - self.admitted_at) * 1e3


@dataclass
class _Answer:
    """What the events of a stream add up to."""

    first_at: float | None = None
    text: str = ""
    is_done: bool = False
    error: str | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    def feed(self, line: bytes) -> None:
        if not line.startswith(b"data: "):
            return
        if line.strip() == b"data: [DONE]":
            self.is_done = True
            return
        event = json.loads(line[6:])
        if "error" in event:
            self.error = f"error event: {event['error'].get('message')}"
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            if choice.get("token_ids") and self.first_at is None:
                self.first_at = time.perf_counter()
            self.text += choice["delta"].get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def problem(self, num_tokens: int) -> str | None:
        """Why this is not the whole answer, if it is not."""
        if self.error is not None:
            return self.error
        if not self.is_done or self.finish_reason != "length":
            return f"the stream ended early, with finish_reason {self.finish_reason}"
        if self.usage.get("completion_tokens") != num_tokens:
            return f"{self.usage.get('completion_tokens')} tokens instead of {num_tokens}"
        return None


class Clients:
    """Asks one server, every request over a connection of a pool without bound."""

    def __init__(self, url: str, conversations: Conversations, num_answer_tokens: int) -> None:
        # A connection that the server may be about to close is not used again.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        self._http = aiohttp.ClientSession(url, connector=connector, timeout=timeout)
        self._conversations = conversations
        self._num_answer_tokens = num_answer_tokens

    async def close(self) -> None:
        await self._http.close()

    async def turn(self, due: float) -> Outcome:
        """One turn of some conversation, due at `due` (`time.perf_counter` seconds)."""
        conversation = self._conversations.take()
        body = {
            "messages": conversation.messages,
            "max_tokens": self._num_answer_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        sent_at = time.perf_counter()
        answer, status, error, admitted_at = _Answer(), 0, None, None
        try:
            async with self._http.post("/v1/chat/completions", json=body) as response:
                status, admitted_at = response.status, time.perf_counter()
                if status == 200:
                    async for line in response.content:
                        answer.feed(line)
                    error = answer.problem(self._num_answer_tokens)
                else:
                    text = await response.text(errors="replace")
                    if status != 429:
                        error = f"status {status}: {text[:200]}"
                    elif not response.headers.get("retry-after", "").isdigit():
                        error = "429 without Retry-After"
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        outcome = Outcome(
            status,
            error,
            due,
            sent_at,
            admitted_at,
            answer.first_at,
            time.perf_counter(),
            answer.usage.get("prompt_tokens", 0),
            (answer.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        )
        self._conversations.give_back(conversation, answer.text if outcome.is_served else None)
        return outcome

    async def closed_loop(
        self, num_clients: int, seconds: float, on_outcome: Callable[[Outcome], None]
    ) -> list[Outcome]:
        """Every client asks again as soon as it has its answer, until the time is over."""
        outcomes: list[Outcome] = []
        ends_at = time.perf_counter() + seconds

        async def run() -> None:
            while (now := time.perf_counter()) < ends_at:
                outcome = await self.turn(now)
                outcomes.append(outcome)
                on_outcome(outcome)
                if not outcome.is_served:
                    await asyncio.sleep(0.05)

        await asyncio.gather(*(run() for _ in range(num_clients)))
        return outcomes

    async def open_loop(self, due_times: list[float], on_outcome: Callable[[Outcome], None]) -> list[Outcome]:
        """A request at every time, in seconds from now; all outcomes, in the order of the times."""
        begun = time.perf_counter()

        async def ask(due: float) -> Outcome:
            outcome = await self.turn(due)
            on_outcome(outcome)
            return outcome

        tasks = []
        for due in due_times:
            await asyncio.sleep(max(0.0, begun + due - time.perf_counter()))
            tasks.append(asyncio.create_task(ask(begun + due)))
        return list(await asyncio.gather(*tasks))


def poisson_times(rate: float, seconds: float, seed: int) -> list[float]:
    """Arrivals of a Poisson process of `rate` per second, in seconds from the start, below `seconds`."""
    rng = random.Random(seed)
    times = []
    at = rng.expovariate(rate)
    while at < seconds:
        times.append(at)
        at += rng.expovariate(rate)
    return times
