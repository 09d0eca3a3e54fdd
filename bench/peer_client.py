"""One streamed completion of token ids, from any of the engines that `bench/peers.py` compares."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_SECONDS = 900.0

Body = dict[str, Any]


@dataclass
class Answer:
    """What came back, and when.

    Attributes:
        sent_at: `time.perf_counter()` before the request went out.
        arrivals: the clock and how many tokens came, for every event with tokens.
        num_cached: prompt tokens that the server says it did not compute.
    """

    num_prompt: int
    sent_at: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_cached: int = 0

    @property
    def ttft_s(self) -> float:
        """From sending to the first token."""
        return self.arrivals[0][0] - self.sent_at

    @property
    def ended_at(self) -> float:
        return self.arrivals[-1][0]

    def tokens_between(self, start: float, end: float) -> int:
        """Tokens that came after `start` and not after `end`."""
        return sum(count for at, count in self.arrivals if start < at <= end)


@dataclass(frozen=True)
class Event:
    """One server-sent event: its tokens, and the cached prompt tokens if it says so."""

    token_ids: list[int]
    num_cached: int | None = None


def openai_body(model: str, prompt: Sequence[int], max_tokens: int, extra: Body) -> Body:
    """`POST /v1/completions`, greedy, of exactly `max_tokens` tokens."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **extra,
    }


def openai_event(data: Body) -> Event:
    """
    Raises:
        RuntimeError: the server sent an error.
    """
    if "error" in data:
        raise RuntimeError(f"the server answered: {data['error']}")
    tokens = [token for choice in data.get("choices", ()) for token in choice.get("token_ids") or ()]
    details = (data.get("usage") or {}).get("prompt_tokens_details") or {}
    return Event(tokens, details.get("cached_tokens"))


def llama_body(_model: str, prompt: Sequence[int], max_tokens: int, extra: Body) -> Body:
    """`POST /completion` of llama.cpp's server."""
    return {
        "prompt": list(prompt),
        "n_predict": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "return_tokens": True,
        "cache_prompt": True,
        **extra,
    }


def llama_event(data: Body) -> Event:
    """
    Raises:
        RuntimeError: the server sent an error.
    """
    if "error" in data:
        raise RuntimeError(f"the server answered: {data['error']}")
    return Event(data.get("tokens") or [], (data.get("timings") or {}).get("cache_n"))


@dataclass(frozen=True)
class Protocol:
    path: str
    body: Callable[[str, Sequence[int], int, Body], Body]
    event: Callable[[Body], Event]


OPENAI = Protocol("/v1/completions", openai_body, openai_event)
LLAMA = Protocol("/completion", llama_body, llama_event)


def events(lines: Iterator[bytes]) -> Iterator[Body]:
    """JSON objects of a server-sent event stream, until it ends or says [DONE]."""
    for line in lines:
        text = line.strip()
        if text.startswith(b"error:"):
            raise RuntimeError(text.decode(errors="replace"))
        if not text.startswith(b"data:"):
            continue
        payload = text[len(b"data:") :].strip()
        if payload == b"[DONE]":
            return
        yield json.loads(payload)


def complete(
    url: str,
    protocol: Protocol,
    model: str,
    prompt: Sequence[int],
    max_tokens: int,
    extra: Body | None = None,
    on_first: Callable[[], None] | None = None,
) -> Answer:
    """Sends a prompt and reads the answer to its end.

    Args:
        extra: more fields of the request.
        on_first: called when the first token has come.

    Raises:
        RuntimeError: the server refused, or answered with another number of tokens.
    """
    body = json.dumps(protocol.body(model, prompt, max_tokens, extra or {}))
    answer = Answer(len(prompt))
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_SECONDS)
    try:
        answer.sent_at = time.perf_counter()
        connection.request("POST", protocol.path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{url}: status {response.status}: {response.read()[:500]!r}")
        for data in events(iter(response.readline, b"")):
            event = protocol.event(data)
            if event.token_ids:
                if on_first is not None and not answer.arrivals:
                    on_first()
                answer.arrivals.append((time.perf_counter(), len(event.token_ids)))
                answer.token_ids += event.token_ids
            if event.num_cached is not None:
                answer.num_cached = event.num_cached
    finally:
        connection.close()
    if len(answer.token_ids) != max_tokens:
        raise RuntimeError(f"{url}: {len(answer.token_ids)} tokens came, {max_tokens} were asked for")
    return answer
