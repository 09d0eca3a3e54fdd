"""Method mtp of `--speculative-config`, served: answers, sizes, stores, the command line."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rich.console import Console  # noqa: E402
from tests.engine.kimi_tokenizers import TOKENS, write_directory  # noqa: E402
from tests.engine.replicas import UNIT, file_store, replica  # noqa: E402
from tests.engine.tiny_tokenizer import write_model_directory  # noqa: E402
from tests.support.checkpoints import write_checkpoint  # noqa: E402
from tests.support.draft_checkpoints import with_drafts  # noqa: E402
from tests.support.driver import random_tokens  # noqa: E402

from milepost.cli import main  # noqa: E402
from milepost.cli.loading import load as load_and_say  # noqa: E402
from milepost.core.drafts import DraftPlanner  # noqa: E402
from milepost.core.plan import SamplingParams  # noqa: E402
from milepost.engine.blocking import answer  # noqa: E402
from milepost.engine.messages import GenerationRequest  # noqa: E402
from milepost.engine.serving import (  # noqa: E402
    EMBEDDED_MODEL,
    ServingModel,
    ServingOptions,
    load_serving_model,
    planned_memory,
)
from milepost.engine.speculative import SpeculativeConfig  # noqa: E402
from milepost.engine.tokenizer import Tokenizer  # noqa: E402
from milepost.errors import ConfigError  # noqa: E402
from milepost.models.description import describe  # noqa: E402
from milepost.models.identity import fingerprint  # noqa: E402
from milepost.models.loading import load_model  # noqa: E402

VOCAB_SIZE = 768
MTP = SpeculativeConfig("mtp", 3)


@pytest.fixture(scope="module", params=["kimi_linear", "qwen3_next"])
def directory(request: Any, tmp_path_factory: Any) -> Path:
    """A checkpoint with two modules that are mostly right, and a tokenizer."""
    path: Path = tmp_path_factory.mktemp("model")
    if request.param in TOKENS:
        write_directory(path, request.param)
    else:
        write_model_directory(path)
    config, tensors = with_drafts(request.param, 2, context=0.02, vocab_size=VOCAB_SIZE, eos_token_id=None)
    return write_checkpoint(path, config, tensors=tensors)


def started(directory: Path, speculative: SpeculativeConfig | None) -> ServingModel:
    options = ServingOptions(cache_bytes=32 << 20, match_unit=16, speculative=speculative)
    model = load_serving_model(directory, options)
    model.engine.start()
    return model


SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 7},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
    "bias": {"temperature": 0.7, "seed": 3, "logit_bias": {70: 2.0}},
}


def test_answers_are_those_without_drafts(directory: Path) -> None:
    plain, drafting = started(directory, None), started(directory, MTP)
    try:
        for name in (*SAMPLINGS, *SAMPLINGS):  # the second time on a hit
            answers = []
            for model in (plain, drafting):
                prompt = model.encode_prompt("the quick brown fox jumps over the lazy dog " * 4)
                request = GenerationRequest(prompt, SamplingParams(**SAMPLINGS[name]), 50)
                parts = list(answer(model.engine, request))
                (reuse,) = [part.reuse for part in parts if part.reuse is not None]
                answers.append(([t for part in parts for t in part.token_ids], reuse.num_cached_tokens))
            assert answers[0] == answers[1]
        for _ in range(40):  # whether drafts pay is measured, and a busy machine may say no for a while
            counters = drafting.engine.fresh_stats().result().counters
            if counters.num_accepted_draft_tokens:
                break
            prompt = drafting.encode_prompt("numbers 0 1 2 3")
            list(answer(drafting.engine, GenerationRequest(prompt, SamplingParams(temperature=0.0), 60)))
        assert counters.num_draft_tokens >= counters.num_accepted_draft_tokens > 0
        assert sum(counters.accepted_drafts_by_position.values()) == counters.num_accepted_draft_tokens
    finally:
        plain.close()
        drafting.close()


def test_sizes_are_said_and_planned(directory: Path) -> None:
    without, options = (
        ServingOptions(cache_bytes=32 << 20),
        ServingOptions(cache_bytes=32 << 20, speculative=MTP),
    )
    about = describe(directory, num_draft_tokens=options.num_model_drafts)
    plain = describe(directory)
    assert about.num_draft_modules == 2
    assert (
        planned_memory(directory, about, options).weights > planned_memory(directory, plain, without).weights
    )
    out = io.StringIO()
    model = load_and_say(directory, options, Console(file=out, width=300))
    try:
        group = model.geometry.attention[-1]
        assert group.bytes_per_page == 2 * 4 * about.hidden_size
        expected = (
            f"drafter: 2 modules; {group.bytes_per_token:,} bytes per token, {group.bytes_per_page:,} per"
        )
        assert expected in out.getvalue()
        assert f"{about.num_parameters:,} parameters" in out.getvalue()
    finally:
        model.close()


def test_the_command_line_says_what_a_drafter_takes(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    config = '{"method": "mtp", "num_speculative_tokens": 1}'
    flags = ["--cache-bytes", "32MiB", "--check-weights", "--speculative-config", config]
    monkeypatch.setattr(sys, "argv", ["milepost", "info", str(directory), *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    out = capsys.readouterr().out
    assert not ended.value.code
    assert "drafter" in out and "1 module;" in out and "tensors as expected" in out


# -- refusals --------------------------------------------------------------------------------------


def test_a_model_without_modules_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ConfigError, match="num_nextn_predict_layers is 0 or missing") as raised:
        load_serving_model(tmp_path, ServingOptions(cache_bytes=32 << 20, speculative=MTP))
    assert raised.value.field == "speculative_config" and "method 'ngram'" in str(raised.value)


@pytest.mark.parametrize("key", ["prompt_lookup_max", "prompt_lookup_min"])
def test_keys_of_other_methods_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="belong to method 'ngram'"):
        SpeculativeConfig.parse(f'{{"method": "mtp", "num_speculative_tokens": 2, "{key}": 3}}')


def test_the_option_is_read() -> None:
    config = SpeculativeConfig.parse('{"method": "mtp", "num_speculative_tokens": 3}')
    assert config == MTP and config.num_model_tokens == 3 and config.planner().drafter is None
    assert SpeculativeConfig("ngram", 3, 1, 2).num_model_tokens == 0


# -- stores ----------------------------------------------------------------------------------------


def accepted(served: Any) -> Counter[int]:
    counters = served.engine.fresh_stats().result().counters
    assert counters.num_draft_tokens > 0
    return Counter(counters.accepted_drafts_by_position)


@pytest.mark.parametrize("num_tokens", [UNIT + 1, 200])
def test_a_restored_request_drafts_as_if_it_had_never_left(
    directory: Path, tmp_path: Path, num_tokens: int
) -> None:
    """Segments carry entries and taps: acceptance per position is that of a cold run."""
    model, tokenizer = load_model(directory, num_draft_tokens=4), Tokenizer.from_directory(EMBEDDED_MODEL)
    prompt = random_tokens(num_tokens, VOCAB_SIZE, seed=num_tokens)
    with replica(model, tokenizer, file_store(tmp_path)) as first:
        first.scheduler.drafts = DraftPlanner(None, 4)
        said = first.ask(prompt, 12)
    following = prompt + said.tokens + random_tokens(9, VOCAB_SIZE, seed=5)
    with replica(model, tokenizer) as cold:
        cold.scheduler.drafts = DraftPlanner(None, 4)
        expected = cold.ask(following, 30)
        by_position = accepted(cold)
    with replica(model, tokenizer, file_store(tmp_path)) as second:
        second.scheduler.drafts = DraftPlanner(None, 4)
        resumed = second.ask(following, 30)
        assert resumed.same_as(expected)
        assert resumed.load.outcome == "loaded" and resumed.reuse.num_cached_tokens > 0
        assert accepted(second) == by_position
    assert by_position[0] > 3


def test_what_was_stored_without_a_drafter_belongs_to_somebody_else(directory: Path) -> None:
    """A segment has the pages of all groups or is foreign: it is never half there."""
    prints = {
        fingerprint(
            directory,
            describe(directory, num_draft_tokens=num_drafts).layout,
            dtype="float32",
            numerics="n",
            exactness="exact",
        )
        for num_drafts in (0, 1, 2, 3)
    }
    assert len(prints) == 3  # none, one module, two modules


def test_other_methods_leave_the_identity_alone(directory: Path) -> None:
    plain = ServingOptions(speculative=None)
    ngram = ServingOptions(speculative=SpeculativeConfig("ngram", 3, 1, 2))
    layouts = [
        describe(directory, num_draft_tokens=options.num_model_drafts).layout for options in (plain, ngram)
    ]
    assert layouts[0] == layouts[1]
