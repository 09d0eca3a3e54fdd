"""The embedded model served with its own draft module and with the drafters beside it: the OpenAI client gets
the same answers, and is told what became of the guesses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import openai
import pytest
from tests.server.serving import HTTP
from tests.server.test_ten_turns import served

from milepost.core.drafts import DraftPlanner
from milepost.engine.serving import ServingOptions, load_serving_model
from milepost.engine.speculative import SpeculativeConfig

FLAGS = {
    "mtp": '{"method": "mtp", "num_speculative_tokens": 2}',
    "eagle3": '{"method": "eagle3", "model": "milepost-tiny/eagle3", "num_speculative_tokens": 3}',
    # The method is read from the drafter's config.
    "dspark": '{"model": "milepost-tiny/dspark", "num_speculative_tokens": 4}',
}
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
        if speculative is not None:
            # Whether guesses pay is measured; here they are always made.
            planner = DraftPlanner(
                None, speculative.num_speculative_tokens, draft_sampling=speculative.draft_sample_method
            )
            model.engine.act(lambda scheduler, now: setattr(scheduler, "drafts", planner)).result(10)
        yield url


@pytest.fixture(scope="module")
def plain() -> Iterator[str]:
    with server(None) as url:
        yield url


@pytest.fixture(scope="module", params=FLAGS)
def drafting(request: Any) -> Iterator[str]:
    with server(FLAGS[request.param]) as url:
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
    salt = {"cache_salt": f"{drafting} {temperature}"}  # a cold start on both
    for repeated in (False, True):
        expected, got = (
            chat(url, temperature=temperature, extra_body=salt, max_tokens=40) for url in (plain, drafting)
        )
        assert (got.usage.prompt_tokens_details.cached_tokens > 0) == repeated
        assert got.choices[0].message.content == expected.choices[0].message.content
        assert got.usage == expected.usage
        about = got.model_extra["milepost"]
        without = expected.model_extra["milepost"]
        assert set(about) - set(without) == {"speculation"}
        # The drafter's pages are a group of their own, which is reused as far as the model's.
        matched, others = about["reuse"].pop("matched_tokens"), without["reuse"].pop("matched_tokens")
        (group,) = set(matched) - set(others)
        assert group in FLAGS and matched.pop(group) == matched["mla"]
        assert (matched, about["reuse"]) == (others, without["reuse"])
        assert set(about["speculation"]) == COUNTS
        num_right = about["speculation"]["accepted_draft_tokens"]
        assert 0 < num_right <= about["speculation"]["draft_tokens"]
        assert num_right < got.usage.completion_tokens
    if temperature == 0.0:
        assert "4821" in (got.choices[0].message.content or "")


PREFIX = "vllm:spec_decode_num_"


def totals(url: str) -> dict[str, list[int]]:
    """Counters of speculation, by what follows `vllm:spec_decode_num_`; a value per position, where there are
    several."""
    time.sleep(0.3)  # the engine's numbers are taken ten times a second
    found: dict[str, list[int]] = {}
    for line in HTTP.get(f"{url}/metrics").text.splitlines():
        if line.startswith(PREFIX):
            name = line.removeprefix(PREFIX).partition("{")[0].removesuffix("_total")
            found.setdefault(name, []).append(int(float(line.split()[-1])))
    return found


def test_counts_are_those_of_all_choices_and_of_the_metrics(drafting: str) -> None:
    before = totals(drafting)
    many = chat(drafting, n=3, temperature=0.7)
    counts = many.model_extra["milepost"]["speculation"]
    after = totals(drafting)

    def grown(name: str) -> list[int]:
        known = before.get(name, [])
        return [now - past for now, past in zip_longest(after[name], known, fillvalue=0)]

    assert grown("draft_tokens") == [counts["draft_tokens"]] and counts["draft_tokens"] > 0
    assert grown("accepted_tokens") == [counts["accepted_draft_tokens"]]
    by_position, (num_drafts,) = grown("accepted_tokens_per_pos"), grown("drafts")
    assert sum(by_position) == counts["accepted_draft_tokens"]
    assert num_drafts >= by_position[0] > 0 and by_position == sorted(by_position, reverse=True)


def test_most_guesses_at_a_known_fact_are_right(plain: str, drafting: str) -> None:
    """Of every drafter, also of guesses that were made from guesses."""
    before = totals(drafting)
    for _ in range(2):
        expected, got = (chat(url, temperature=0.0) for url in (plain, drafting))
        assert got.choices[0].message.content == expected.choices[0].message.content
        counts = got.model_extra["milepost"]["speculation"]
        assert counts["accepted_draft_tokens"] > 0.5 * counts["draft_tokens"]
    after = totals(drafting)
    past = before.get("accepted_tokens_per_pos", [])
    assert len(after["accepted_tokens_per_pos"]) > 1
    assert after["accepted_tokens_per_pos"][1] > (past[1] if len(past) > 1 else 0)


def test_streams_say_it_in_the_last_chunk(drafting: str) -> None:
    chunks = list(chat(drafting, stream=True, temperature=0.0))
    said = [(chunk.model_extra or {}).get("milepost") for chunk in chunks]
    assert not any(said[:-1])
    assert said[-1]["speculation"]["accepted_draft_tokens"] > 0
