"""Methods mtp, eagle3, dspark of `--speculative-config`, served: answers, sizes, stores, the command line."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rich.console import Console  # noqa: E402
from tests.engine.kimi_tokenizers import TOKENS, write_directory  # noqa: E402
from tests.engine.replicas import UNIT, file_store, replica  # noqa: E402
from tests.engine.tiny_tokenizer import write_model_directory  # noqa: E402
from tests.support import block_checkpoints  # noqa: E402
from tests.support.checkpoints import write_checkpoint  # noqa: E402
from tests.support.draft_checkpoints import with_drafts  # noqa: E402
from tests.support.driver import random_tokens  # noqa: E402
from tests.support.eagle3_checkpoints import write_pair  # noqa: E402

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


@dataclass(frozen=True)
class Checkpoint:
    """Directories of a decoder and, if it does not bring what drafts, of its drafter."""

    path: Path
    drafter: Path | None = None
    method: str = "eagle3"

    def speculative(self, num_drafts: int = 3) -> SpeculativeConfig:
        if self.drafter is None:
            return SpeculativeConfig("mtp", num_drafts)
        return SpeculativeConfig(self.method, num_drafts, model=str(self.drafter))

    def options(self, num_drafts: int) -> dict[str, Any]:
        """Of `describe` and `load_model`."""
        return ServingOptions(speculative=self.speculative(num_drafts)).draft_options if num_drafts else {}


CHANGES = {"vocab_size": VOCAB_SIZE, "eos_token_id": None}


@pytest.fixture(scope="module", params=["kimi_linear", "qwen3_next", "eagle3", "dspark"])
def checkpoint(request: Any, tmp_path_factory: Any) -> Checkpoint:
    """A decoder with two modules that are mostly right, or with such a drafter, and a tokenizer."""
    root: Path = tmp_path_factory.mktemp("model")
    path = root / "decoder"
    path.mkdir()
    family = "kimi_linear" if request.param in ("eagle3", "dspark") else request.param
    if family in TOKENS:
        write_directory(path, family)
    else:
        write_model_directory(path)
    if request.param == "eagle3":
        return Checkpoint(*write_pair(root, family, "llama", context=0.02, target=CHANGES))
    if request.param == "dspark":
        pair = block_checkpoints.write_pair(root, family, "dspark", context=0.02, target=CHANGES)
        return Checkpoint(*pair, "dspark")
    config, tensors = with_drafts(family, 2, context=0.02, **CHANGES)
    return Checkpoint(write_checkpoint(path, config, tensors=tensors))


@pytest.fixture(scope="module")
def directory(checkpoint: Checkpoint) -> Path:
    return checkpoint.path


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


def test_answers_are_those_without_drafts(checkpoint: Checkpoint) -> None:
    plain, drafting = started(checkpoint.path, None), started(checkpoint.path, checkpoint.speculative())
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


def test_sizes_are_said_and_planned(checkpoint: Checkpoint) -> None:
    directory, num_modules = checkpoint.path, 2 if checkpoint.drafter is None else 1
    without, options = (
        ServingOptions(cache_bytes=32 << 20),
        ServingOptions(cache_bytes=32 << 20, speculative=checkpoint.speculative()),
    )
    about = describe(directory, **checkpoint.options(3))
    plain = describe(directory)
    assert about.num_draft_modules == num_modules
    assert (
        planned_memory(directory, about, options).weights > planned_memory(directory, plain, without).weights
    )
    out = io.StringIO()
    model = load_and_say(directory, options, Console(file=out, width=300))
    try:
        group = model.geometry.attention[-1]
        has_taps = checkpoint.method != "dspark"
        assert group.bytes_per_page == has_taps * num_modules * 4 * about.hidden_size
        name = "2 modules" if checkpoint.drafter is None else f"{checkpoint.method} from drafter"
        expected = f"drafter: {name}; {group.bytes_per_token:,} bytes per token"
        expected += f", {group.bytes_per_page:,} per page for taps" if has_taps else "\n"
        assert expected in out.getvalue()
        assert f"{about.num_parameters:,} parameters" in out.getvalue()
    finally:
        model.close()


def test_the_command_line_says_what_a_drafter_takes(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    keys: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 1}
    if checkpoint.drafter is not None:  # the method is found out
        keys = {"model": str(checkpoint.drafter), "num_speculative_tokens": 1}
    flags = ["--cache-bytes", "32MiB", "--check-weights", "--speculative-config", json.dumps(keys)]
    monkeypatch.setattr(sys, "argv", ["milepost", "info", str(checkpoint.path), *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    out = capsys.readouterr().out
    assert not ended.value.code
    name = "1 module;" if checkpoint.drafter is None else f"{checkpoint.method} from drafter;"
    assert "drafter" in out and name in out and "tensors as expected" in out


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


def test_drafters_are_named_by_their_directory(tmp_path: Path) -> None:
    _, drafter = write_pair(tmp_path, "kimi_linear", "llama")
    for method in ("", "eagle3"):
        text = json.dumps({"method": method, "model": str(drafter), "num_speculative_tokens": 3})
        config = SpeculativeConfig.parse(text)
        assert config == SpeculativeConfig("eagle3", 3, model=str(drafter))
        assert config.num_model_tokens == 3 and config.planner().drafter is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"method": "eagle3"}, "needs a checkpoint of its own; name its directory or hub id as 'model'"),
        ({"method": "mtp", "model": "x"}, "method 'mtp' has no checkpoint of its own"),
        ({"method": "ngram", "model": "x"}, "method 'ngram' has no checkpoint of its own"),
        ({"method": "eagle"}, "method 'eagle' is not supported; use one of: ngram, mtp, eagle3"),
        ({}, "method is missing; use one of: ngram"),
        ({"model": str(EMBEDDED_MODEL)}, "names no drafter that is known; say its method"),
    ],
)
def test_methods_and_models_that_do_not_go_together(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        SpeculativeConfig.parse(json.dumps({"num_speculative_tokens": 2, **keys}))
    assert raised.value.field == "speculative_config"


def test_another_models_drafter_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    _, drafter = write_pair(tmp_path, "kimi_linear", "llama")
    speculative = SpeculativeConfig("eagle3", 3, model=str(drafter))
    with pytest.raises(ConfigError, match="use the drafter that was made for this model") as raised:
        load_serving_model(EMBEDDED_MODEL, ServingOptions(cache_bytes=32 << 20, speculative=speculative))
    assert raised.value.field == "draft_model.vocab_size"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"method": "ngram"}, "belongs to method 'dspark'"),
        ({"method": "mtp"}, "belongs to method 'dspark'"),
        ({"method": "dflash", "model": "x"}, "belongs to method 'dspark'"),
        ({"method": "dspark", "model": "x", "confidence_threshold": 1.0}, "at least 0 and below 1, not 1.0"),
        ({"method": "dspark", "model": "x", "confidence_threshold": -0.1}, "at least 0 and below 1"),
    ],
)
def test_thresholds_that_cannot_work(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        text = json.dumps({"num_speculative_tokens": 2, "confidence_threshold": 0.5, **keys})
        SpeculativeConfig.parse(text)
    assert raised.value.field == "speculative_config"


def test_a_threshold_reaches_the_drafter(tmp_path: Path) -> None:
    decoder, drafter = block_checkpoints.write_pair(tmp_path, "kimi_linear", "dspark")
    keys = {"model": str(drafter), "num_speculative_tokens": 3, "confidence_threshold": 0.25}
    speculative = SpeculativeConfig.parse(json.dumps(keys))
    assert speculative.method == "dspark", "found out"
    model = load_model(decoder, **ServingOptions(speculative=speculative).draft_options)
    assert model.drafts.spec.confidence_threshold == 0.25


# -- stores ----------------------------------------------------------------------------------------


def accepted(served: Any) -> Counter[int]:
    counters = served.engine.fresh_stats().result().counters
    assert counters.num_draft_tokens > 0
    return Counter(counters.accepted_drafts_by_position)


@pytest.mark.parametrize("num_tokens", [UNIT + 1, 200])
def test_a_restored_request_drafts_as_if_it_had_never_left(
    checkpoint: Checkpoint, tmp_path: Path, num_tokens: int
) -> None:
    """Segments carry entries and taps: acceptance per position is that of a cold run."""
    model = load_model(checkpoint.path, **checkpoint.options(4))
    tokenizer = Tokenizer.from_directory(EMBEDDED_MODEL)
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


def test_what_was_stored_without_a_drafter_belongs_to_somebody_else(checkpoint: Checkpoint) -> None:
    """A segment has the pages of all groups or is foreign: it is never half there."""
    directory, prints = checkpoint.path, set()
    for num_drafts in (0, 1, 2, 3):
        about = describe(directory, **checkpoint.options(num_drafts))
        drafter = None if about.drafter is None else about.drafter.directory
        rest = {"dtype": "float32", "numerics": "n", "exactness": "exact", "drafter": drafter}
        prints.add(fingerprint(directory, about.layout, **rest))
    # None, one module, two modules; or none, a drafter, however many tokens it guesses.
    assert len(prints) == (3 if checkpoint.drafter is None else 2)


def test_other_methods_leave_the_identity_alone(directory: Path) -> None:
    plain = ServingOptions(speculative=None)
    ngram = ServingOptions(speculative=SpeculativeConfig("ngram", 3, 1, 2))
    layouts = [
        describe(directory, num_draft_tokens=options.num_model_drafts).layout for options in (plain, ngram)
    ]
    assert layouts[0] == layouts[1]
