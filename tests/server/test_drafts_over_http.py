"""The embedded model served with its own draft module: the OpenAI client gets the same answers, and is told
what became of the guesses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from tests.server.serving import HTTP
from tests.server.test_ten_turns import served

from milepost.core.drafts import DraftPlanner
from milepost.engine.serving import ServingOptions, load_serving_model
from milepost.engine.speculative import SpeculativeConfig

FLAG = '{"method": "mtp", "num_speculative_tokens": 2}'
FACT = [
    {"role": "user", "content": "The code of Mira is 4821."},
    {"role": "assistant", "content": "I will remember that."},
    {"role": "user", "content": "What is the code of Mira?"},
]
COUNTS = {"draft_tokens", "accepted_draft_tokens"}


@contextmanager
def server(flag: str | None) -> Iterator[str]:
    speculative = SpeculativeConfig.parse(flag) if flag else None
    options = ServingOptions(cache_bytes=64 << 20, seed=1, speculative=speculative)
    model = load_serving_model(None, options)
    with served(model) as url:
        if flag:
            planner = DraftPlanner(None, 2)  # whether guesses pay is measured; here they are always made
            model.engine.act(lambda scheduler, now: setattr(scheduler, "drafts", planner)).result(10)
        yield url


@pytest.fixture(scope="module")
def plain() -> Iterator[str]:
    with server(None) as url:
        yield url


@pytest.fixture(scope="module")
def drafting() -> Iterator[str]:
    with server(FLAG) as url:
        yield url


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def chat(url: str, **options: Any) -> Any:
    fields: dict[str, Any] = {"model": "milepost-tiny", "messages": FACT, "max_tokens": 24, "seed": 3}
    return client(url).chat.completions.create(**fields | options)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_chat_is_answered_alike_and_says_what_was_guessed(
    plain: str, drafting: str, temperature: float
) -> None:
    for _ in range(2):  # the second time on a hit
        expected, got = (chat(url, temperature=temperature) for url in (plain, drafting))
        assert got.choices[0].message.content == expected.choices[0].message.content
        assert got.usage == expected.usage
        about = got.model_extra["milepost"]
        assert "speculation" not in expected.model_extra["milepost"]
        assert set(about["speculation"]) == COUNTS
        num_right = about["speculation"]["accepted_draft_tokens"]
        assert 0 < num_right <= about["speculation"]["draft_tokens"]
        assert num_right < got.usage.completion_tokens
    if temperature == 0.0:
        assert "4821" in (got.choices[0].message.content or "")


def test_counts_are_those_of_all_choices_and_of_the_metrics(drafting: str) -> None:
    def totals() -> tuple[int, int]:
        time.sleep(0.3)  # the engine's numbers are taken ten times a second
        names = ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")
        lines = HTTP.get(f"{drafting}/metrics").text.splitlines()
        values = [float(line.split()[-1]) for name in names for line in lines if line.startswith(name + "{")]
        return int(values[0]), int(values[1])

    before = totals()
    many = chat(drafting, n=3, temperature=0.7)
    counts = many.model_extra["milepost"]["speculation"]
    after = totals()
    assert counts["draft_tokens"] == after[0] - before[0] > 0
    assert counts["accepted_draft_tokens"] == after[1] - before[1]


def test_streams_say_it_in_the_last_chunk(drafting: str) -> None:
    chunks = list(chat(drafting, stream=True, temperature=0.0))
    said = [(chunk.model_extra or {}).get("milepost") for chunk in chunks]
    assert not any(said[:-1])
    assert said[-1]["speculation"]["accepted_draft_tokens"] > 0
