"""`--state-dtype bf16` from the scheduler to the stores, in every family of models."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.replicas import Answered, file_store, replica
from tests.support.conversations import Engine, KnownAnswers
from tests.support.driver import Driver, random_tokens
from tests.support.families import FAMILIES, LAYOUTS, Shelf
from tests.support.kept_states import kept_in

from milepost.config import BF16, FP32
from milepost.engine.audit import ROUNDED_STATE_LOGIT_BOUND, AuditConfig, logit_bound
from milepost.engine.serving import EMBEDDED_MODEL, ServingOptions, load_serving_model
from milepost.engine.tokenizer import Tokenizer
from milepost.errors import ConfigError
from milepost.kernels.native_library import native_library
from milepost.models import describe
from milepost.models.identity import fingerprint
from milepost.models.loading import LoadedModel
from milepost.runner.selftest import self_test

needs_native = pytest.mark.skipif(native_library().module is None, reason="no native kernels")
TOKENIZER = Tokenizer.from_directory(EMBEDDED_MODEL)
CASES = [
    (family, dtype, without_experts)
    for family in sorted(FAMILIES)
    for dtype in ("float32", "bfloat16")
    for without_experts in ((False,) if family == "qwen3_5_moe" else (False, True))
]
LARGEST = {"float32": 0.05, "bfloat16": 0.4}
"""Bound of the difference of two logits, which go up to 4, without experts; with them, a row whose token
goes to another expert is far off."""
TYPICAL = {"float32": 0.02, "bfloat16": 0.15}
"""The same for half of the rows, experts or not."""
RESUMPTIONS = 12
UNIT = 16


def resumed(driver: Driver, tokens: list[int], slot_behind: int = 0) -> torch.Tensor:
    """Logits of all rows: hit, go on for a unit, leave a checkpoint, hit that one.

    Args:
        slot_behind: start from the checkpoint so many units before instead.
    """
    rows, pages = [], []
    for number in range(len(tokens) // UNIT):
        start, slot = number * UNIT, 5 + number - min(slot_behind, number - 1)
        begun = {"start_slot": slot, "pages": pages, "num_processed": start} if start else {}
        request = driver.sequence(tokens, number % 2, **begun)  # type: ignore[arg-type]
        exports = {request.request_id: [(start + UNIT, 6 + number)]}
        rows.append(driver.logits(driver.plan((request, UNIT), exports=exports, sample=False)))
        pages = request.pages
    return torch.cat(rows)


@pytest.mark.parametrize(("family", "dtype", "without_experts"), CASES)
def test_resuming_again_and_again_stays_within_the_bound(
    family: str, dtype: str, without_experts: bool, shelf: Shelf
) -> None:
    model = shelf.model(family, dtype=dtype, **({"num_experts": 0} if without_experts else {}))
    tokens = random_tokens((RESUMPTIONS + 1) * UNIT, model.vocab_size, 3)
    drivers = [Driver(each, match_unit=UNIT) for each in (model, kept_in(model, BF16))]
    cold, small = drivers
    expected = cold.logits(cold.plan((cold.sequence(tokens, 0), len(tokens)), sample=False))
    small.poison()
    difference = (resumed(small, tokens) - expected).abs().amax(-1)
    wrong = (resumed(small, tokens, slot_behind=1) - expected).abs().amax(-1)
    for driver in drivers:
        driver.worker.close()
    begun, later = difference[:UNIT], difference[UNIT:]
    assert float(later.median()) <= TYPICAL[dtype]
    if without_experts:
        assert float(later.max()) <= LARGEST[dtype]
    assert float(later.median()) > 0.0, "something was rounded"
    if model.kernels.implementation == "native":
        assert float(begun.max()) == 0.0, "nothing was, before the first one"
    assert float(wrong[2 * UNIT :].median()) > 2 * TYPICAL[dtype], "a wrong state is farther off"


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request: Any, shelf: Shelf) -> LoadedModel:
    return kept_in(shelf.model(request.param, dtype="bfloat16"), BF16)


@needs_native
def test_without_hits_answers_are_those_of_exact_states(model: LoadedModel) -> None:
    """However steps are cut and whoever shares them: only what is kept is rounded."""
    prompt, other = (random_tokens(150, model.vocab_size, seed) for seed in (1, 2))
    answers = []
    for each, step in ((kept_in(model, FP32), 256), (model, 256), (model, 37)):
        with replica(each, TOKENIZER, max_num_batched_tokens=step) as engine:
            waiting = engine.start(other, 40)
            answers.append(engine.ask(prompt, 70))
            del waiting
    assert answers[0].same_as(answers[1]) and answers[0].same_as(answers[2])
    assert answers[1].reuse.num_cached_tokens == 0


def test_stored_states_lead_to_the_answers_of_those_that_never_left(
    model: LoadedModel, tmp_path: Path
) -> None:
    prompt = random_tokens(300, model.vocab_size, 3)
    with replica(model, TOKENIZER) as alone:
        begun = alone.ask(prompt, 12)
        following = prompt + begun.tokens + random_tokens(9, model.vocab_size, 4)
        expected = alone.ask(following)
        assert expected.reuse.num_cached_tokens >= 288
    with replica(model, TOKENIZER, file_store(tmp_path)) as first:
        assert first.ask(prompt, 12).same_as(begun)
        first.settle()
    with replica(model, TOKENIZER, file_store(tmp_path)) as second:
        answer = second.ask(following)
        assert answer.load.outcome == "loaded"
        assert answer.reuse.num_cached_tokens == expected.reuse.num_cached_tokens
        assert answer.same_as(expected)
    stored = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert stored > model.geometry(32).checkpoint_bytes


def test_stores_never_mix_dtypes(shelf: Shelf) -> None:
    directory = shelf.directory("kimi_linear")
    prints = {
        (state_dtype, exactness): fingerprint(
            directory,
            describe(directory, state_dtype=state_dtype).layout,
            dtype="float32",
            numerics="n",
            exactness=exactness,
        )
        for state_dtype in (FP32, BF16)
        for exactness in ("exact", "numeric")
    }
    assert len(set(prints.values())) == 4


# ------------------------------------------------------------------ memory, speculation
@pytest.mark.parametrize("preempts", [False, True])
def test_the_budget_holds(model: LoadedModel, preempts: bool) -> None:
    """What is mapped is never more than what is counted, nor that more than the budget; the engine checks
    the first after every step."""
    geometry = model.geometry(UNIT)
    budget = geometry.request_bytes(200) + geometry.request_bytes(100) + 2 * geometry.checkpoint_bytes
    engine = Engine(model, cache_bytes=budget, max_model_len=200)
    engine.converse(preempt=random.Random(3) if preempts else None)
    memory = engine.scheduler.cache.memory
    assert memory.peak_committed_bytes <= budget
    assert sum(engine.scheduler.cache.counters.evictions.values()) > 0
    assert all(engine.tokens.values())
    engine.worker.close()


@needs_native
@pytest.mark.parametrize(("num_drafts", "rate", "ragged"), [(2, 0.3, False), (7, 0.1, True)])
def test_drafts_change_neither_answers_nor_what_is_kept(
    model: LoadedModel, num_drafts: int, rate: float, ragged: bool
) -> None:
    plain = Engine(model)
    plain.converse()
    drafter = KnownAnswers(plain.tokens, model.vocab_size, rate, ragged)
    drafted = Engine(model, drafter=drafter, num_drafts=num_drafts)
    drafted.converse()
    assert drafted.tokens == plain.tokens and drafted.cached == plain.cached
    counters = drafted.scheduler.cache.counters
    assert 0 < counters.num_accepted_draft_tokens < counters.num_draft_tokens
    assert drafted.records() == plain.records()
    for engine in (plain, drafted):
        engine.worker.close()


# ------------------------------------------------------------------ promises
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_the_promise_is_withdrawn(layout: str, shelf: Shelf) -> None:
    model = kept_in(shelf.model(layout, dtype="bfloat16"), BF16)
    result = self_test(model)
    assert not result.exact
    assert result.text.startswith("exactness: numeric; a hit may change logits")
    assert "(bfloat16, states kept in bf16, " in result.text
    assert result.largest_difference > 0.0 or model.kernels.implementation != "native"


def test_audits_allow_for_the_rounding() -> None:
    assert logit_bound(True, "float32") == 0.0
    assert logit_bound(False, "float32", FP32) == 1e-3
    assert logit_bound(False, "float32", BF16) == ROUNDED_STATE_LOGIT_BOUND
    assert logit_bound(False, "bfloat16", BF16) >= logit_bound(False, "bfloat16", FP32)


def test_serving_says_numeric_and_audits_within_the_bound() -> None:
    options = ServingOptions(cache_bytes=64 << 20, state_dtype=BF16, audit_hits=1.0)
    serving = load_serving_model(None, options)
    assert serving.exactness.startswith("exactness: numeric;")
    assert serving.audit == AuditConfig(1.0, ROUNDED_STATE_LOGIT_BOUND, serving.audit.share)
    assert serving.geometry.keeps_states_apart
    serving.close()
    exact = load_serving_model(None, ServingOptions(cache_bytes=64 << 20))
    assert not exact.geometry.keeps_states_apart
    assert exact.geometry.checkpoint_bytes > serving.geometry.checkpoint_bytes
    exact.close()


def test_audited_hits_are_within_the_bound(shelf: Shelf) -> None:
    model = kept_in(shelf.model("qwen3_5", dtype="bfloat16"), BF16)
    audit = AuditConfig(1.0, logit_bound(False, "bfloat16", BF16))
    prompt = random_tokens(200, model.vocab_size, 6)
    with replica(model, TOKENIZER, audit=audit) as engine:
        answers: list[Answered] = [engine.ask(prompt[:length]) for length in (100, 150, 200)]
        assert all(answer.reuse.num_cached_tokens for answer in answers[1:])
        counts = _settled(engine.engine)
        assert counts.num_mismatch == 0 and counts.num_within_bound == 2, counts
        assert 0.0 < counts.max_difference <= ROUNDED_STATE_LOGIT_BOUND


def _settled(engine: Any) -> Any:
    import time

    deadline = time.monotonic() + 30
    while sum((counts := engine.audits()).by_result().values()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return counts


def test_unknown_names_are_refused(shelf: Shelf) -> None:
    message = "must be one of fp32, bf16, not 'fp8'"
    with pytest.raises(ConfigError, match=message):
        load_serving_model(None, ServingOptions(state_dtype="fp8"))
    with pytest.raises(ConfigError, match=message):
        describe(shelf.directory("qwen3_5"), state_dtype="fp8")
