"""A step whose tape runs gives the bits of the step itself, and a tape that misses something is not used."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from milepost.models.inputs import LayerTaps, StepRows

if not native_library().has_tapes:
    pytest.skip("the native library is older than tapes", allow_module_level=True)

NATIVE_FAMILIES = tuple(sorted(LAYOUTS)) if native_library().has_mixtures else ("kimi_linear", "qwen3_5")
"""Every operation of a step of every family is one of the kernels'."""
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
        driver.model.decoder, "forward", lambda *arguments: calls.append(1) or forward(*arguments)
    )
    for count in (1, 1, 2, 1, 2, MAX_TAPE_ROWS - 20, 1):
        driver.run(driver.plan((request, count), sample=False))
    assert len(calls) == 3, "once for every number of rows"
    driver.worker.close()


@dataclass(frozen=True)
class Outputs:
    """What a step of a test gives."""

    all: tuple[torch.Tensor, ...]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.all


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

    def run(self, *ids: int, kind: str = "") -> torch.Tensor:
        """A copy: what a tape gives is valid until the next step."""
        tensor = torch.tensor(ids)
        [result] = self.tapes.run(lambda: Outputs((self.step(tensor),)), kind, tensor, None, None).all
        return result.clone()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_and_number_of_rows_has_a_tape(dtype: torch.dtype) -> None:
    steps = Steps(dtype, lambda x: x)
    ids = [(3, 4), (5, 6), (7,), (8, 9), (1,), (2, 3)]
    kinds = ["a", "a", "a", "b", "a", "b"]
    results = [steps.run(*some, kind=kind) for some, kind in zip(ids, kinds, strict=True)]
    assert steps.calls == 3
    for some, result in zip(ids, results, strict=True):
        assert same_bits(result, Steps(dtype, lambda x: x).step(torch.tensor(some)))


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


@pytest.mark.parametrize("place", [0, 1, 2])
def test_every_output_must_be_written_by_a_call(place: int) -> None:
    """A tape would give the copy of an earlier step."""
    steps = Steps(torch.float32, lambda x: x)

    def run(ids: torch.Tensor) -> Outputs:
        x = steps.step(ids)
        outputs = [x, steps.ops.linear(x, steps.weight), steps.ops.linear(x, steps.weight)]
        outputs[place] = outputs[place].clone()
        return Outputs(tuple(outputs))

    calls: list[int] = []
    for number in range(3):
        ids = torch.tensor([number, 9 - number])
        expected = [tensor.clone() for tensor in run(ids).all]
        found = steps.tapes.run(lambda ids=ids: calls.append(1) or run(ids), "", ids, None, None)
        assert all(same_bits(left, right) for left, right in zip(found.all, expected, strict=True))
    assert len(calls) == 3


# -- taps ------------------------------------------------------------------------------------------


def rows_of_steps(
    driver: Driver, layers: tuple[int, ...], counts: Sequence[int], *, sample: bool = True
) -> list[torch.Tensor]:
    """Hidden states, taps and, if sampled, logits of steps of one request, as many rows as `counts` say."""
    tokens = random_tokens(sum(counts) + 1, driver.model.vocab_size, 5)
    request = driver.sequence(tokens, 0)
    found = []
    for count in counts:
        with driver.watched(layers) as seen:
            driver.run(driver.plan((request, count), sample=sample))
        found += [tensor.clone() for rows in seen for tensor in rows.tensors()]
    return found


TAPPED = {
    "kimi_linear": (0, 2),
    "kimi_k3": (0, 3),
    "kimi_k3_packed": (1, 3),
    "qwen3_5": (1, 3),
    "qwen3_5_moe": (0, 3),
    "qwen3_next": (2, 3),
}
"""The first, one in between, and the last layer, which is the result as well."""
COUNTS = (40, 1, 1, 2, 5, 1, 2, 31, 32, 33, 32, 31, 5, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", sorted(TAPPED))
def test_tapes_change_no_bit_of_taps(
    layout: str, dtype: str, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shelf.model(layout, dtype=dtype)
    layers = TAPPED[layout]
    driver = fresh(model)
    taped = rows_of_steps(driver, layers, COUNTS)
    other: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: other.extend(rows_of_steps(driver, layers, COUNTS)))
    thread.start()
    thread.join()
    again = rows_of_steps(driver, layers, COUNTS)
    without_taps = rows_of_steps(driver, (), COUNTS)
    driver.worker.close()
    monkeypatch.setattr(tapes, "MAX_TAPE_ROWS", 0)
    called_driver = fresh(model)
    called = rows_of_steps(called_driver, layers, COUNTS)
    assert len(called) == len(COUNTS) * 3 + COUNTS.count(1)
    for found in (taped, other, again):
        assert len(found) == len(called)
        assert all(same_bits(left, right) for left, right in zip(found, called, strict=True))
    no_taps = rows_of_steps(called_driver, (), COUNTS)
    assert all(same_bits(left, right) for left, right in zip(without_taps, no_taps, strict=True))
    # Taps are not each other, nor the result.
    assert all(not same_bits(a, b) for a, b in zip(called[0], called[1:3], strict=False))
    called_driver.worker.close()


@pytest.mark.parametrize("layout", NATIVE_FAMILIES)
def test_steps_with_taps_are_tapes(layout: str, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = fresh(shelf.model(layout))
    forward = driver.model.decoder.forward
    calls: list[int] = []
    monkeypatch.setattr(
        driver.model.decoder, "forward", lambda *arguments: calls.append(1) or forward(*arguments)
    )
    rows_of_steps(driver, TAPPED[layout], (1, 1, 2, 1, 2, 32, 1, 32))
    assert len(calls) == 3
    driver.worker.close()


def copies_taps(patch: pytest.MonkeyPatch) -> None:
    """Taps that torch copies, as if the tape did it: those of later steps are those of the first one."""
    keep = LayerTaps.keep
    patch.setattr(LayerTaps, "keep", lambda self, layer, x: keep(self, layer, x.clone()))


def forgets_to_check(patch: pytest.MonkeyPatch) -> None:
    copies_taps(patch)
    patch.setattr(StepRows, "tensors", lambda self: (self.hidden,))


@pytest.mark.parametrize("fault", [copies_taps, forgets_to_check])
def test_a_stale_tap_is_noticed(fault: Any, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are no calls of the kernels: they leave no tape. Where nobody looks, taps are those of an
    earlier step, which comparing shows."""
    model, counts = shelf.model("qwen3_5"), (1, 1, 2, 2)

    def taps(driver: Driver) -> list[torch.Tensor]:
        tokens = random_tokens(7, driver.model.vocab_size, 5)
        request, found = driver.sequence(tokens, 0), []
        for count in counts:
            with driver.watched((0, 2)) as seen:
                driver.run(driver.plan((request, count), sample=False))
            found.append(seen[0].joined_taps)
        return found

    expected = taps(fresh(model))
    with monkeypatch.context() as patch:
        fault(patch)
        found = taps(fresh(model))
    equal = [same_bits(left, right) for left, right in zip(found, expected, strict=True)]
    assert equal == ([True] * 4 if fault is copies_taps else [True, False, True, False])


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


def test_only_the_thread_that_records_stops_and_what_was_dropped_records_no_more() -> None:
    seen: list[str] = []

    def stop_elsewhere(tape: Any) -> None:
        with pytest.raises(ValueError, match="another thread records it") as raised:
            tape.stop(None)
        seen.append(str(raised.value))

    def record_and_drop() -> None:
        tape = library.Tape()
        tape.start()
        del tape
        gc.collect()
        others = [library.Tape() for _ in range(50)]
        NativeOperations(library).rms_norm(randn(2, 6), torch.ones(6), 1e-6)
        seen.append(f"{sum(other.num_calls for other in others)} calls elsewhere")

    tape = library.Tape()
    tape.start()
    try:
        for function, given in ((stop_elsewhere, (tape,)), (record_and_drop, ())):
            thread = threading.Thread(target=function, args=given)
            thread.start()
            thread.join()
    finally:
        tape.stop(None)
    assert seen == ["tape: another thread records it", "0 calls elsewhere"]


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
