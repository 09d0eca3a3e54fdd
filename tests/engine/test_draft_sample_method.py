"""`draft_sample_method`: what is refused, and answers of the embedded model with its own drafts."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from milepost.core.plan import COUPLED, GREEDY, PROBABILISTIC, SamplingParams
from milepost.engine.messages import GenerationRequest
from milepost.engine.speculative import SpeculativeConfig
from milepost.errors import ConfigError

pytest.importorskip("torch")

from milepost.core.drafts import DraftPlanner  # noqa: E402
from milepost.engine.blocking import answer  # noqa: E402
from milepost.engine.serving import ServingModel, ServingOptions, load_serving_model  # noqa: E402

NUM_DRAFTS = 2


def config_text(**fields: Any) -> str:
    return json.dumps({"method": "mtp", "num_speculative_tokens": NUM_DRAFTS, **fields})


def test_the_option_is_read() -> None:
    assert SpeculativeConfig.parse(config_text()).draft_sample_method == COUPLED
    for method in (COUPLED, GREEDY, PROBABILISTIC):
        parsed = SpeculativeConfig.parse(config_text(draft_sample_method=method))
        assert parsed.draft_sample_method == method
        assert parsed.planner().draft_sampling == method
        assert parsed.keeps_seeds == (method != PROBABILISTIC)
    SpeculativeConfig.parse(config_text(rejection_sample_method="standard"))
    SpeculativeConfig.parse(config_text(method="ngram", draft_sample_method="greedy"))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"draft_sample_method": "random"}, "use one of: coupled, greedy, probabilistic"),
        ({"rejection_sample_method": "block"}, "rejection_sample_method 'block' is not supported"),
        ({"method": "ngram", "draft_sample_method": "probabilistic"}, "needs a drafter with a distribution"),
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SpeculativeConfig.parse(config_text(**fields))


@pytest.fixture(scope="module")
def model() -> Iterator[ServingModel]:
    options = ServingOptions(
        cache_bytes=64 << 20,
        match_unit=16,
        seed=1,
        speculative=SpeculativeConfig.parse(config_text(draft_sample_method="probabilistic")),
    )
    loaded: ServingModel = load_serving_model(None, options)
    loaded.engine.start()
    yield loaded
    loaded.close()


def answers(model: ServingModel, method: str | None, temperature: float) -> tuple[list[list[int]], float]:
    """With drafts in every step, or none; and the share of drafts that was accepted."""
    planner = None if method is None else DraftPlanner(None, NUM_DRAFTS, draft_sampling=method)
    model.engine.act(lambda scheduler, now: setattr(scheduler, "drafts", planner)).result()
    before = model.engine.fresh_stats().result().counters
    made, right = before.num_draft_tokens, before.num_accepted_draft_tokens
    prompt = model.encode_prompt("Enter the king and his court. What news, my lord?")
    texts = []
    for seed in range(6):
        sampling = SamplingParams(temperature=temperature, seed=seed, frequency_penalty=0.1)
        deltas = answer(model.engine, GenerationRequest(prompt, sampling, 40))
        texts.append([token for delta in deltas for token in delta.token_ids])
    after = model.engine.fresh_stats().result().counters
    made = after.num_draft_tokens - made
    return texts, (after.num_accepted_draft_tokens - right) / max(1, made)


def test_only_rejection_sampling_changes_what_a_seed_gives(model: ServingModel) -> None:
    assert "draft_sample_method probabilistic" in model.exactness
    plain, _ = answers(model, None, 1.0)
    rates = {}
    for method in (GREEDY, COUPLED, PROBABILISTIC):
        texts, rates[method] = answers(model, method, 1.0)
        assert (texts == plain) == (method != PROBABILISTIC)
        assert answers(model, method, 0.0)[0] == answers(model, None, 0.0)[0]
    assert rates[COUPLED] > rates[GREEDY]
    assert rates[PROBABILISTIC] > rates[GREEDY]


def test_grammars_leave_no_drawn_draft_out(model: ServingModel) -> None:
    """Drafts that a grammar excludes, or that complete the answer, are not verified: to draw one and leave it
    out would shift what is sampled instead. So these requests keep what their seed gives."""
    pytest.importorskip("llguidance")
    from milepost.engine.structured import regex_grammar

    prompt = model.encode_prompt("Enter the king and his court. What news, my lord?")
    texts: dict[str | None, list[list[int]]] = {}
    for method in (None, PROBABILISTIC):
        planner = None if method is None else DraftPlanner(None, NUM_DRAFTS, draft_sampling=method)
        model.engine.act(lambda scheduler, now, p=planner: setattr(scheduler, "drafts", p)).result()
        before = model.engine.fresh_stats().result().counters.num_accepted_draft_tokens
        texts[method] = []
        for seed in range(8):
            constraint = model.grammars.compile(regex_grammar("[a-z ]{3,24}[.]", "p"))
            sampling = SamplingParams(temperature=1.0, seed=seed)
            deltas = answer(model.engine, GenerationRequest(prompt, sampling, 40, constraint=constraint))
            texts[method].append([token for delta in deltas for token in delta.token_ids])
    assert model.engine.fresh_stats().result().counters.num_accepted_draft_tokens > before
    assert texts[PROBABILISTIC] == texts[None]


def test_what_was_rejected_is_not_cached(model: ServingModel) -> None:
    """An answer that was drawn hits as far as it reaches, and goes on as a cold run does."""
    (drawn, *_), _ = answers(model, PROBABILISTIC, 1.0)
    question = model.encode_prompt("Enter the king and his court. What news, my lord?")
    prompt = array("I", [*question, *drawn])
    model.engine.act(lambda scheduler, now: setattr(scheduler, "drafts", None)).result()
    runs = []
    for _ in range(2):
        request = GenerationRequest(prompt, SamplingParams(temperature=0.0, num_logprobs=1), 8)
        deltas = list(answer(model.engine, request))
        tokens = [(token.token_id, token.logprob) for delta in deltas for token in delta.tokens]
        reuse = next(delta.reuse for delta in deltas if delta.reuse is not None)
        runs.append((tokens, reuse.num_cached_tokens))
        model.engine.reset_prefix_cache().result()
    assert runs[0][1] > 0 and runs[1][1] == 0
    assert runs[0][0] == runs[1][0]
