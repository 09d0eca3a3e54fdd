"""A step whose tape runs gives the bits of the step itself, and a tape that misses something is not used."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.kernels.helpers import attention_index
from tests.kernels.native_support import DTYPES, library, randn, same_bits
from tests.support.driver import Driver, TrackedRequest, random_tokens
from tests.support.families import LAYOUTS, Shelf

from milepost.kernels import tapes
from milepost.kernels.native import NativeOperations
from milepost.kernels.native_library import native_library
from milepost.kernels.tapes import MAX_TAPE_ROWS, StepTapes
from milepost.models import LoadedModel

if not native_library().has_tapes:
    pytest.skip("the native library is older than tapes", allow_module_level=True)

NATIVE_FAMILIES = ("kimi_linear", "qwen3_5")
"""Every operation of a step is one of the kernels'."""
UNIT = 16
PROMPTS = (5, 33, 70)


def decoded(driver: Driver, steps: int) -> list[torch.Tensor]:
    """Logits of decode steps: of three requests together, then in changing company."""
    vocab = driver.model.vocab_size
    requests: list[TrackedRequest] = []
    for slot, length in enumerate(PROMPTS):
        requests.append(driver.sequence(random_tokens(length + 3 * steps, vocab, seed=slot), slot))
        driver.run(driver.plan((requests[-1], length), sample=False))
    rows = []
    for number in range(steps):
        for company in (requests, requests[number % 3 :], [requests[-1]]):
            wanted = {company[-1].request_id: [(company[-1].num_processed + 1, 6)]} if number == 1 else {}
            plan = driver.plan(*((request, 1) for request in company), exports=wanted, sample=False)
            rows.append(driver.logits(plan))
    rows += list(driver.state(6).values())
    return rows


def fresh(model: LoadedModel) -> Driver:
    driver = Driver(model, match_unit=UNIT, cache_bytes=4 << 20)
    driver.poison()
    return driver


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_tapes_change_no_bit(layout: str, dtype: str, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shelf.model(layout, dtype=dtype)
    taped = fresh(model)
    with_tapes = decoded(taped, 4)
    monkeypatch.setattr(tapes, "MAX_TAPE_ROWS", 0)
    called = fresh(model)
    without = decoded(called, 4)
    assert len(with_tapes) == len(without)
    assert all(same_bits(left, right) for left, right in zip(with_tapes, without, strict=True))
    for driver in (taped, called):
        driver.worker.close()


@pytest.mark.parametrize("layout", NATIVE_FAMILIES)
def test_a_known_number_of_rows_needs_no_operation(
    layout: str, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = fresh(shelf.model(layout))
    request = driver.sequence(random_tokens(30, driver.model.vocab_size, 1), 0)
    forward = driver.model.decoder.forward
    calls: list[int] = []
    monkeypatch.setattr(
        driver.model.decoder, "forward", lambda inputs, cache: calls.append(1) or forward(inputs, cache)
    )
    for count in (1, 1, 2, 1, 2, MAX_TAPE_ROWS - 20, 1):
        driver.run(driver.plan((request, count), sample=False))
    assert len(calls) == 3, "once for every number of rows"
    driver.worker.close()


class Steps:
    """A step of two norms and a residual product, with whatever a test puts in between."""

    def __init__(self, dtype: torch.dtype, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.ops = NativeOperations(library)
        self.table = randn(20, 8, dtype=dtype)
        self.weight = self.ops.pack_linear(randn(8, 8, seed=1, dtype=dtype))
        self.norm = torch.ones(8)
        self.between = between
        self.calls = 0
        self.tapes = StepTapes(library, self.ops)

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.ops.embedding(ids, self.table)
        y = self.between(self.ops.rms_norm(x, self.norm, 1e-6))
        return self.ops.linear(y, self.weight, residual=x)

    def run(self, *ids: int) -> torch.Tensor:
        tensor = torch.tensor(ids)
        return self.tapes.run(lambda: self.step(tensor), tensor, None, None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_the_callers_own(dtype: torch.dtype) -> None:
    steps = Steps(dtype, lambda x: x)
    first, second = steps.run(3, 4), steps.run(5, 6)
    kept = second.clone()
    third = steps.run(7, 8)
    assert steps.calls == 1
    assert same_bits(second, kept)
    for ids, result in (((3, 4), first), ((5, 6), second), ((7, 8), third)):
        assert same_bits(result, Steps(dtype, lambda x: x).step(torch.tensor(ids)))


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x * 2,
        lambda x: x.clone(),
        lambda x: torch.relu(x),
        lambda x: x.t().contiguous().t().contiguous(),
    ],
)
def test_what_torch_computes_in_between_leaves_no_tape(between: Any) -> None:
    """A tape would repeat the product over values of an earlier step."""
    steps = Steps(torch.float32, between)
    results = [steps.run(number, number + 1) for number in range(4)]
    assert steps.calls == 4
    fresh_steps = Steps(torch.float32, between)
    for number, result in enumerate(results):
        assert same_bits(result, fresh_steps.step(torch.tensor([number, number + 1])))


def test_a_result_that_torch_made_leaves_no_tape() -> None:
    steps = Steps(torch.float32, lambda x: x)
    run = steps.step
    steps.step = lambda ids: run(ids) + 1.0  # type: ignore[method-assign]
    assert not same_bits(steps.run(1, 2), steps.run(3, 4)) and steps.calls == 2


def test_a_step_that_failed_is_tried_again() -> None:
    steps = Steps(torch.float32, lambda x: x)
    with pytest.raises(ValueError, match="ids: id 99 is outside of 20 rows"):
        steps.run(99, 1)
    assert same_bits(steps.run(2, 1), steps.run(2, 1))
    with pytest.raises(ValueError, match="ids: id 99 is outside of 20 rows"):
        steps.run(99, 1)
    assert same_bits(steps.run(2, 1), Steps(torch.float32, lambda x: x).step(torch.tensor([2, 1])))
    assert steps.calls == 2


def test_another_thread_makes_tapes_of_its_own() -> None:
    steps = Steps(torch.float32, lambda x: x)
    expected = steps.run(1, 2), steps.run(1, 2)
    found: list[torch.Tensor] = []
    other = threading.Thread(target=lambda: found.extend(steps.run(1, 2) for _ in range(2)))
    other.start()
    other.join()
    assert steps.calls == 2
    assert all(same_bits(result, expected[0]) for result in (*found, expected[1]))


def recorded(call: Callable[[], torch.Tensor]) -> Any:
    tape = library.Tape()
    tape.start()
    result = None
    try:
        result = call()
    finally:
        tape.stop(result)
    return tape


def test_plans_must_have_the_rows_of_the_tape() -> None:
    ops = NativeOperations(library)
    table, norm = randn(9, 6), torch.ones(6)
    pages = torch.full((4, UNIT, 6), float("nan"))
    index = attention_index([2, 1], [3, 0], [[0], [1]], UNIT)

    def call() -> torch.Tensor:
        x = ops.embedding(torch.tensor([1, 2, 3]), table)
        ops.store_latents(x, norm, 1e-6, pages, index)
        return ops.rms_norm(x, norm, 1e-6)

    tape = recorded(call)
    assert tape.is_complete and tape.num_calls == 3
    plan = ops.attention_plan(attention_index([3], [5], [[2]], UNIT))
    tape.run(torch.tensor([4, 5, 6]), plan, None)
    assert same_bits(pages[2, 5:8], reference_rows(table[4:7]))
    short = ops.attention_plan(attention_index([2], [5], [[2]], UNIT))
    for arguments, match in [
        ((torch.tensor([1, 2]), plan, None), r"ids: must have shape \[3\]"),
        ((torch.tensor([1, 2, 3]), None, None), "attention: must be a plan of 3 rows"),
        ((torch.tensor([1, 2, 3]), short, None), "attention: must be a plan of 3 rows"),
    ]:
        with pytest.raises(ValueError, match=match):
            tape.run(*arguments)
    far = ops.attention_plan(attention_index([3], [5], [[9]], UNIT))
    with pytest.raises(ValueError, match="plan: a page id is outside of 4 pages"):
        tape.run(torch.tensor([1, 2, 3]), far, None)


def reference_rows(x: torch.Tensor) -> torch.Tensor:
    return NativeOperations(library).rms_norm(x.contiguous(), torch.ones(x.shape[1]), 1e-6)


def test_one_step_reads_one_index() -> None:
    """A tape knows one place for each kind of plan."""
    ops = NativeOperations(library)
    table, norm = randn(9, 6), torch.ones(6)
    pages = torch.full((4, UNIT, 6), float("nan"))

    def call() -> torch.Tensor:
        x = ops.embedding(torch.tensor([1, 2]), table)
        for page in (0, 1):
            ops.store_latents(x, norm, 1e-6, pages, attention_index([2], [3], [[page]], UNIT))
        return ops.rms_norm(x, norm, 1e-6)

    tape = recorded(call)
    assert not tape.is_complete
    with pytest.raises(ValueError, match="tape: does not hold all of a step"):
        tape.run(torch.tensor([1, 2]), None, None)


def test_a_tape_is_recorded_once_and_one_at_a_time() -> None:
    tape, other = library.Tape(), library.Tape()
    tape.start()
    try:
        with pytest.raises(ValueError, match="tape: this thread records already"):
            other.start()
    finally:
        tape.stop(None)
    assert not tape.is_complete
    x = randn(2, 6)
    assert not recorded(lambda: NativeOperations(library).rms_norm(x, torch.ones(6), 1e-6)).is_complete
