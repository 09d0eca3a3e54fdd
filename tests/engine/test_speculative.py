"""The ngram drafter, its option, and answers of the embedded model with and without it."""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.engine.messages import DraftCounts, GenerationRequest, OutputDelta
from milepost.engine.ngram import NgramDrafter
from milepost.engine.speculative import SpeculativeConfig
from milepost.errors import CheckpointFileError, ConfigError

pytest.importorskip("torch")

from milepost.core.plan import SamplingParams  # noqa: E402
from milepost.engine.blocking import answer  # noqa: E402
from milepost.engine.serving import ServingModel, ServingOptions, load_serving_model  # noqa: E402

# -- drafter ---------------------------------------------------------------------------------------


def propose(tokens: list[int], k: int = 4, *, low: int = 2, high: int = 5) -> list[int]:
    return list(NgramDrafter(low, high).propose(1, array("I", tokens), k))


def test_what_followed_before_is_drafted() -> None:
    assert propose([1, 2, 3, 4, 5, 6, 9, 1, 2]) == [3, 4, 5, 6]
    assert propose([1, 2, 3, 4, 5, 6, 9, 1, 2], 2) == [3, 4]


def test_nothing_is_drafted_without_a_match() -> None:
    assert propose([1, 2, 3, 4]) == []
    assert propose([7]) == []
    assert propose([1, 2]) == []


def test_the_longest_match_wins_then_the_latest() -> None:
    assert propose([8, 1, 2, 70, 0, 9, 1, 2, 80, 0, 8, 1, 2], 1) == [70]
    assert propose([1, 2, 70, 0, 1, 2, 80, 0, 1, 2], 1) == [80]
    assert propose([5, 8, 1, 2, 70, 0, 8, 1, 2, 80, 0, 5, 8, 1, 2], 1, high=3) == [80]


def test_a_period_goes_on() -> None:
    assert propose([1, 2, 3, 1, 2, 3, 1, 2], 7) == [3, 1, 2, 3, 1, 2, 3]
    assert propose([4, 4, 4], 3) == [4, 4, 4]


def test_bytes_of_ids_are_not_mistaken_for_ids() -> None:
    # 0x00010000 0x00010000: the bytes of one id over two neighbours.
    assert propose([0x100, 0x10000, 0x1000000, 0x100], low=1, high=1) == [0x10000, 0x1000000, 0x100, 0x10000]
    assert propose([0x00000001, 0x01000000, 0x00000100], low=1, high=1) == []


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 8), st.integers(1, 3), st.integers(0, 3))
def test_a_draft_continues_an_earlier_match(tokens: list[int], k: int, low: int, more: int) -> None:
    drafts = propose(tokens, k, low=low, high=low + more)
    end = tokens[len(tokens) - low :]
    places = [at for at in range(low, len(tokens)) if tokens[at - low : at] == end and len(tokens) >= low]
    assert bool(drafts) == bool(places)
    if drafts:
        assert len(drafts) == k
        whole = tokens + drafts
        assert any(all(whole[at + i] == drafts[i] for i in range(k)) for at in places)


# -- option ----------------------------------------------------------------------------------------


def config_text(**fields: Any) -> str:
    return json.dumps({"method": "ngram", "num_speculative_tokens": 4, **fields})


def test_the_option_of_vllm_is_read() -> None:
    text = config_text(prompt_lookup_max=5, prompt_lookup_min=2)
    assert SpeculativeConfig.parse(text) == SpeculativeConfig("ngram", 4, 2, 5)
    assert SpeculativeConfig.parse(config_text()) == SpeculativeConfig("ngram", 4, 5, 5)
    assert SpeculativeConfig.parse(config_text(prompt_lookup_min=3)) == SpeculativeConfig("ngram", 4, 3, 3)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "Write it like"),
        ('{"method": "ngram"}', "num_speculative_tokens"),
        (config_text(method="medusa"), "'medusa' is not supported; use one of: ngram, mtp"),
        (config_text(method=""), "method is missing"),
        (config_text(num_speculative_tokens=0), "num_speculative_tokens must be 1 to 32, not 0"),
        (config_text(num_speculative_tokens=33), "not 33"),
        (config_text(prompt_lookup_min=0), "1 <= prompt_lookup_min"),
        (config_text(prompt_lookup_min=4, prompt_lookup_max=3), "not 4 and 3"),
        (config_text(model="x"), "model"),
        (config_text(num_speculative_tokens="4"), "num_speculative_tokens"),
        (config_text(num_speculative_tokens=True), "num_speculative_tokens"),
        ('{"num_speculative_tokens": 4}', "method is missing; use one of: ngram, mtp"),
        ('{"method": "mtp", "num_speculative_tokens": 4, "method": "ngram"}', "it names 'method' twice"),
        (config_text(method="eagle3", model=""), "model is empty"),
        (config_text(method="", model=" "), "model is empty"),
        (config_text(prompt_lookup_max=10**20), "prompt_lookup_max <= 65536"),
        (config_text(tokens=3), "`tokens`. Write it like"),
        (config_text(tokens=3), "there are num_speculative_tokens, method, model, confidence_threshold"),
    ],
)
def test_what_cannot_work_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match="speculative_config") as caught:
        SpeculativeConfig.parse(text)
    assert named in str(caught.value)


@pytest.mark.parametrize("method", [{}, {"method": "eagle3"}])
@pytest.mark.parametrize("has_directory", [False, True])
def test_a_drafter_that_is_not_there_is_told_from_the_model(
    method: dict[str, str], has_directory: bool, tmp_path: Path
) -> None:
    drafter = tmp_path / "drafter"
    if has_directory:
        drafter.mkdir()
    text = json.dumps({"model": str(drafter), "num_speculative_tokens": 2, **method})
    with pytest.raises(CheckpointFileError, match="^speculative_config: model .*drafter") as caught:
        load_serving_model(None, ServingOptions(speculative=SpeculativeConfig.parse(text)))
    assert ("give a local directory" in str(caught.value)) == (not has_directory)


# -- serving ---------------------------------------------------------------------------------------


def load(speculative: SpeculativeConfig | None) -> ServingModel:
    options = ServingOptions(cache_bytes=64 << 20, match_unit=16, seed=1, speculative=speculative)
    loaded: ServingModel = load_serving_model(None, options)
    loaded.engine.start()
    return loaded


@pytest.fixture(scope="module")
def plain() -> Iterator[ServingModel]:
    model = load(None)
    yield model
    model.close()


@pytest.fixture(scope="module")
def drafting() -> Iterator[ServingModel]:
    model = load(SpeculativeConfig("ngram", 4, 1, 4))
    yield model
    model.close()


def deltas(model: ServingModel, sampling: SamplingParams, **options: Any) -> list[OutputDelta]:
    prompt = model.encode_prompt("a rose is a rose is a rose is a rose is a rose is a")
    return list(answer(model.engine, GenerationRequest(prompt, sampling, 60, **options)))


def text_of(parts: list[OutputDelta]) -> str:
    return "".join(part.text for part in parts)


SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 7},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
    "bias": {"temperature": 0.7, "seed": 3, "logit_bias": {70: 2.0}},
    "logprobs": {"temperature": 0.0, "num_logprobs": 2},
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_answers_do_not_depend_on_drafts(plain: ServingModel, drafting: ServingModel, name: str) -> None:
    for _ in range(2):  # cold, and on a hit
        expected = deltas(plain, SamplingParams(**SAMPLINGS[name]))
        got = deltas(drafting, SamplingParams(**SAMPLINGS[name]))
        assert text_of(got) == text_of(expected)
        assert [t.token_id for d in got for t in d.tokens] == [t.token_id for d in expected for t in d.tokens]
        if name == "logprobs":
            pairs = zip(
                [t for d in got for t in d.tokens], [t for d in expected for t in d.tokens], strict=True
            )
            assert all(mine.logprob == pytest.approx(theirs.logprob, abs=1e-4) for mine, theirs in pairs)


def test_a_stop_string_inside_accepted_drafts_ends_the_answer(
    plain: ServingModel, drafting: ServingModel
) -> None:
    whole = text_of(deltas(plain, SamplingParams(temperature=0.0)))
    stop = (whole[len(whole) // 2 :][:3],)
    expected = deltas(plain, SamplingParams(temperature=0.0), stop=stop)
    got = deltas(drafting, SamplingParams(temperature=0.0), stop=stop)
    assert text_of(got) == text_of(expected)
    assert got[-1].finish_reason == expected[-1].finish_reason == "stop"
    assert got[-1].stop_reason == stop[0]


def test_acceptance_is_counted_and_explained(caplog: pytest.LogCaptureFixture) -> None:
    model = load(SpeculativeConfig("ngram", 4, 1, 4))
    try:
        for _ in range(50):  # whether a draft pays is measured, and a busy machine may say no for a while
            caplog.clear()
            before = model.engine.fresh_stats().result().counters
            with caplog.at_level(logging.INFO, "milepost.request"):
                parts = deltas(model, SamplingParams(temperature=0.0))
            after = model.engine.fresh_stats().result().counters
            num_drafts = after.num_draft_tokens - before.num_draft_tokens
            num_accepted = after.num_accepted_draft_tokens - before.num_accepted_draft_tokens
            if num_accepted:
                break
    finally:
        model.close()
    assert num_drafts >= num_accepted > 0
    assert sum(after.accepted_drafts_by_position.values()) == after.num_accepted_draft_tokens
    line = caplog.records[-1].getMessage()
    assert f"draft_tokens={num_drafts} accepted_draft_tokens={num_accepted}" in line
    assert parts[-1].drafting == DraftCounts(num_drafts, num_accepted)
    assert all(part.drafting is None for part in parts[:-1])
    num_tokens = sum(len(part.tokens) for part in parts)
    assert after.num_decode_tokens - before.num_decode_tokens == num_tokens - 1
