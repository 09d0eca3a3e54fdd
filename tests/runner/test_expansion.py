"""Exactness modes: which rows are expanded, what the self-test promises, and that prompts stay exact."""

from __future__ import annotations

import dataclasses
from array import array
from pathlib import Path

import pytest
import torch
from tests.kernels.helpers import attention_index
from tests.support.driver import Driver, random_tokens
from tests.support.families import Shelf

from milepost.core.plan import SamplingParams
from milepost.engine.blocking import answer
from milepost.engine.messages import GenerationRequest
from milepost.engine.serving import ServingModel, ServingOptions, load_serving_model
from milepost.errors import ConfigError
from milepost.kernels.api import REFERENCE, select_kernels
from milepost.kernels.native_library import native_library
from milepost.models.inputs import StepInputs
from milepost.models.loading import LoadedModel, load_model
from milepost.runner.batch import Batch
from milepost.runner.expansion import BREAK_EVEN_ROWS, with_expansion
from milepost.runner.selftest import self_test

needs_native = pytest.mark.skipif(
    not native_library().expands_latents, reason="no native kernels that expand"
)
NUM_TOKENS = 290


def marked(lengths: list[int], positions: list[int], prompt_ends: list[int], mode: str) -> list[tuple]:  # type: ignore[type-arg]
    """(first row, end row, position, page table, expanded) of every span."""
    tables = [[number] * 100 for number in range(len(lengths))]
    index = attention_index(lengths, positions, tables, 16)
    batch = Batch(StepInputs(torch.zeros(sum(lengths)), index, None), (), torch.zeros(0), index.spans)
    found = with_expansion(batch, prompt_ends, mode).inputs.attention
    assert found is not None and found.write_pages is index.write_pages
    return [
        (span.first_row, span.end_row, span.position, int(table[0]), number in found.expanded)
        for number, (span, table) in enumerate(zip(found.spans, found.page_tables, strict=True))
    ]


def test_prompt_rows_are_expanded_wherever_a_step_cuts() -> None:
    assert marked([5, 1, 7, 1], [0, 9, 8, 40], [5, 9, 10, 41], "prompt") == [
        (0, 5, 0, 0, True),
        (5, 6, 9, 1, False),
        (6, 8, 8, 2, True),
        (8, 13, 10, 2, False),
        (13, 14, 40, 3, True),
    ]


def test_off_expands_where_it_is_cheaper() -> None:
    rows = BREAK_EVEN_ROWS
    assert marked([rows, rows - 1, 1], [0, 7, 0], [1, 1, 1], "off") == [
        (0, rows, 0, 0, True),
        (rows, 2 * rows - 1, 7, 1, False),
        (2 * rows - 1, 2 * rows, 0, 2, False),
    ]


def model_of(shelf: Shelf, name: str, mode: str, dtype: str = "float32", **options: str) -> LoadedModel:
    kernels = select_kernels(exactness=mode, **options)
    return load_model(shelf.directory(name, dtype=dtype), kernels=kernels)


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["kimi_linear", "kimi_k3"])
def test_prompts_are_exact_and_the_self_test_says_so(shelf: Shelf, name: str, dtype: str) -> None:
    result = self_test(model_of(shelf, name, "prompt", dtype))
    assert result.exact and result.text.startswith("exactness: prompt; ")


@needs_native
def test_the_mode_changes_nothing_without_latents(shelf: Shelf) -> None:
    model = model_of(shelf, "qwen3_5", "prompt")
    assert not model.expands_latents
    assert self_test(model).text.startswith("exactness: exact; ")


@needs_native
def test_off_promises_nothing(shelf: Shelf) -> None:
    result = self_test(model_of(shelf, "kimi_linear", "off"))
    assert not result.exact and result.text.startswith("exactness: off, as asked for; ")


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cuts_of_a_prompt_change_no_bit_and_modes_are_close(shelf: Shelf, dtype: str) -> None:
    tokens = random_tokens(NUM_TOKENS, 131, seed=1)

    def logits(model: LoadedModel, cuts: list[int]) -> torch.Tensor:
        driver = Driver(model, cache_bytes=8 << 20)
        driver.poison()
        request = driver.sequence(tokens, 1)
        rows = torch.cat([driver.logits(driver.plan((request, count), sample=False)) for count in cuts])
        driver.worker.close()
        return rows

    prompt = model_of(shelf, "kimi_linear", "prompt", dtype)
    whole = logits(prompt, [NUM_TOKENS])
    assert torch.equal(logits(prompt, [1, 2, 30, 200, 56, 1]), whole)
    exact = logits(model_of(shelf, "kimi_linear", "exact", dtype), [NUM_TOKENS])
    assert not torch.equal(exact, whole), "the mode made no difference"
    # On average: in bf16 a rounding may send a token to another expert.
    assert float((exact - whole).abs().mean()) < (1e-5 if dtype == "float32" else 0.05)
    if dtype == "float32":
        reference = logits(model_of(shelf, "kimi_linear", "prompt", implementation=REFERENCE), [NUM_TOKENS])
        assert float((reference - whole).abs().max()) < 1e-4


def ask(model: ServingModel, prompt: list[int], max_tokens: int, **options: bool) -> tuple[list[int], int]:
    """Generated ids, and prompt tokens that were reused."""
    request = GenerationRequest(
        array("I", prompt), SamplingParams(temperature=0.0), max_tokens=max_tokens, **options
    )
    deltas = list(answer(model.engine, request))
    reuse = next(delta.reuse for delta in deltas if delta.reuse is not None)
    return [token_id for delta in deltas for token_id in delta.token_ids], reuse.num_cached_tokens


@needs_native
@pytest.mark.parametrize("mode", ["exact", "prompt", "off"])
def test_what_an_answer_left_is_reused_unless_only_prompts_are_exact(mode: str, tmp_path: Path) -> None:
    model = load_serving_model(None, ServingOptions(cache_bytes=32 << 20, match_unit=32, exactness=mode))
    assert model.exactness.startswith(f"exactness: {mode}")
    model.engine.start()
    try:
        prompt = random_tokens(100, model.vocab_size, seed=3)
        generated, _ = ask(model, prompt, 60)
        following = prompt + generated + random_tokens(10, model.vocab_size, seed=4)
        answered, num_cached = ask(model, following, 8)
        assert num_cached == (96 if mode == "prompt" else (100 + len(generated) - 1) // 32 * 32)
        again, num_cached = ask(model, following, 8)
        assert num_cached == (len(following) - 1) // 32 * 32
        if mode != "off":
            assert ask(model, following, 8, uses_cache=False)[0] == again == answered
    finally:
        model.close()


def test_an_unknown_mode_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="exactness: must be one of exact, prompt, off, not 'fast'"):
        load_serving_model(None, dataclasses.replace(ServingOptions(), exactness="fast"))
