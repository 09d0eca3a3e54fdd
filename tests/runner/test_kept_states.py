"""States that are kept in another dtype: what is rounded, when, and that nothing else is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.driver import Driver, TrackedRequest, random_tokens
from tests.support.families import LAYOUTS, Shelf
from tests.support.kept_states import kept_in

from milepost.config import BF16
from milepost.errors import WorkerError
from milepost.models.layout import CONV_TAIL_FIELD, STATE_MATRIX_FIELD
from milepost.models.loading import LoadedModel

UNIT = 16
NUM_TOKENS = 150
EXPORTS = [(16, 20), (48, 21), (64, 22), (128, 23), (NUM_TOKENS, 24)]
"""Positions inside a pass and at its end, with their slots."""
CASES = [(layout, dtype, None) for layout in sorted(LAYOUTS) for dtype in ("float32", "bfloat16")]
CASES += [("kimi_linear", "float32", "reference"), ("qwen3_5", "bfloat16", "reference")]

State = dict[tuple[int, str], torch.Tensor]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def model(request: Any, shelf: Shelf) -> LoadedModel:
    layout, dtype, implementation = request.param
    return shelf.model(layout, dtype=dtype, implementation=implementation)


@pytest.fixture
def drivers(model: LoadedModel) -> Iterator[tuple[Driver, Driver]]:
    """States kept as they are, and rounded."""
    made = tuple(Driver(each, match_unit=UNIT) for each in (model, kept_in(model, BF16)))
    for driver in made:
        driver.poison()
    yield made
    for driver in made:
        driver.worker.close()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def same_bits(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(torch.equal(bits(left[k]), bits(right[k])) for k in left)


def rounded(state: State) -> State:
    return {key: each.bfloat16() if key[1] == STATE_MATRIX_FIELD else each for key, each in state.items()}


def prefilled(driver: Driver, tokens: list[int]) -> tuple[TrackedRequest, torch.Tensor]:
    """One pass with exports, between requests that export nothing; logits of its rows."""
    vocab = driver.model.vocab_size
    before = driver.sequence(random_tokens(9, vocab, 70), 10)
    behind = driver.sequence(random_tokens(20, vocab, 71), 11)
    driver.run(driver.plan((before, 8), (behind, 7)))
    request = driver.sequence(tokens, 0)
    plan = driver.plan(
        (before, 1), (request, len(tokens)), (behind, 13), exports={request.request_id: EXPORTS}
    )
    return request, driver.logits(plan)


def test_what_is_kept_is_the_rounded_state_and_what_runs_is_not_rounded(
    drivers: tuple[Driver, Driver],
) -> None:
    exact, small = drivers
    tokens = random_tokens(NUM_TOKENS, exact.model.vocab_size, 1)
    (_, expected), (_, found) = (prefilled(driver, tokens) for driver in drivers)
    assert torch.equal(found, expected)
    for slot in (0, 10, 11):
        assert same_bits(small.state(slot), exact.state(slot))
    for _, slot in EXPORTS:
        kept = small.checkpoint(slot)
        assert same_bits(kept, rounded(exact.checkpoint(slot)))
        assert {key[1]: each.dtype for key, each in kept.items()} == {
            CONV_TAIL_FIELD: exact.checkpoint(slot)[next(iter(kept))[0], CONV_TAIL_FIELD].dtype,
            STATE_MATRIX_FIELD: torch.bfloat16,
        }


@pytest.mark.parametrize(("position", "slot"), EXPORTS[:-1])
def test_a_hit_computes_what_the_rounded_state_leads_to(
    drivers: tuple[Driver, Driver], position: int, slot: int
) -> None:
    """Bitwise: the only difference to an exact hit are the roundings when the state was kept."""
    exact, small = drivers
    tokens = random_tokens(NUM_TOKENS, exact.model.vocab_size, 2)
    rows, states = [], []
    for driver in drivers:
        first, _ = prefilled(driver, tokens)
        if driver is exact:
            for key, each in rounded(exact.checkpoint(slot)).items():
                exact.worker.pools.fields[key][slot] = each.to(exact.worker.pools.fields[key].dtype)
        kept = driver.checkpoint(slot)
        pages = first.pages[: position // UNIT]
        hit = driver.sequence(tokens, 5, start_slot=slot, pages=pages, num_processed=position)
        parts = [driver.logits(driver.plan((hit, count))) for count in (1, NUM_TOKENS - position - 1)]
        assert same_bits(driver.checkpoint(slot), kept), "a hit changed what it started from"
        rows.append(torch.cat(parts))
        states.append(driver.state(5))
    assert torch.equal(rows[0], rows[1])
    assert same_bits(states[0], states[1])


def test_small_steps_export_as_well(drivers: tuple[Driver, Driver]) -> None:
    """Steps of few rows may run as they were written down, which an export in the middle must not."""
    exact, small = drivers
    tokens = random_tokens(6 * UNIT, exact.model.vocab_size, 3)
    logits = []
    for driver in drivers:
        request = driver.sequence(tokens, 0)
        for end in (32, 64, 96):
            exports = {request.request_id: [(end - 16, end), (end, end + 1)] if end > 32 else []}
            rows = driver.logits(driver.plan((request, 32), exports=exports))
        logits.append(rows)
    assert torch.equal(*logits)
    for slot in (64, 65, 96, 97):
        assert same_bits(small.checkpoint(slot), rounded(exact.checkpoint(slot)))


def test_conversions_round_to_nearest_even_and_keep_what_is_no_number(shelf: Shelf) -> None:
    driver = Driver(kept_in(shelf.model("qwen3_5"), BF16), match_unit=UNIT)
    pools = driver.worker.pools
    layer = next(key[0] for key in pools.checkpoints if key[1] == STATE_MATRIX_FIELD)
    ulp = 2.0**-7
    values = [
        (1.0 + ulp / 2, 1.0),  # a tie goes to the even neighbour, below
        (1.0 + 3 * ulp / 2, 1.0 + 2 * ulp),  # and above
        (1.0 + ulp / 2 + 2.0**-20, 1.0 + ulp),
        (-1.0 - ulp / 2, -1.0),
        (2.0**-140, 2.0**-133 * 0.0 + torch.tensor(2.0**-140).bfloat16().item()),
        (float("inf"), float("inf")),
        (-0.0, -0.0),
        (3.4028234e38, float("inf")),
    ]
    state = pools.fields[layer, STATE_MATRIX_FIELD]
    for key, view in pools.fields.items():
        if key in pools.checkpoints:
            view[3] = 0.0
    flat = state[3].view(-1)
    flat[: len(values)] = torch.tensor([value for value, _ in values])
    # A payload in the low half only: cut off it would read as infinity.
    flat[len(values)] = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)[0]
    slots = torch.tensor([3]), torch.tensor([6])
    pools.keep(0, *slots)
    kept = pools.checkpoints[layer, STATE_MATRIX_FIELD][6].view(-1).float()
    expected = torch.tensor([rounded_to for _, rounded_to in values])
    assert torch.equal(kept[: len(values)], expected)
    assert torch.equal(torch.signbit(kept[: len(values)]), torch.signbit(expected))
    assert bool(kept[len(values)].isnan())
    pools.start_from(0, slots[1], torch.tensor([4]))
    again = state[4].view(-1)
    assert torch.equal(again.nan_to_num(7.0), kept.nan_to_num(7.0)), "back is exact"
    driver.worker.close()


def test_a_chunk_with_drafts_cannot_start_from_what_has_to_be_converted(shelf: Shelf) -> None:
    driver = Driver(kept_in(shelf.model("qwen3_5"), BF16), match_unit=UNIT)
    tokens = random_tokens(40, driver.model.vocab_size, 4)
    first = driver.sequence(tokens, 0)
    driver.run(driver.plan((first, 40), exports={first.request_id: [(32, 1)]}))
    hit = driver.sequence(tokens, 2, start_slot=1, pages=first.pages[:2], num_processed=32)
    plan = driver.plan((hit, 1))
    plan.chunks[0] = replace(plan.chunks[0], draft_tokens=bytes(8))
    with pytest.raises(WorkerError, match="cannot run in place in slot 2"):
        driver.run(plan)
    driver.worker.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start_slot": 10**6}, "initial slot 1000000 is outside of"),
        ({"exports": [(16, 10**6)]}, "slot 1000000 is outside of"),
        ({"exports": [(16, 7), (20, 7)]}, "a slot is written twice in one step"),
    ],
)
def test_slots_that_cannot_be_are_refused(shelf: Shelf, change: dict[str, Any], message: str) -> None:
    driver = Driver(kept_in(shelf.model("qwen3_5"), BF16), match_unit=UNIT)
    tokens = random_tokens(40, driver.model.vocab_size, 4)
    begun = driver.sequence(tokens, 0)
    driver.run(driver.plan((begun, 16)))
    hit = driver.sequence(
        tokens, 7, start_slot=change.get("start_slot", -1), pages=begun.pages, num_processed=0
    )
    if "start_slot" in change:
        hit.num_processed = 16
    with pytest.raises(WorkerError, match=message):
        driver.run(driver.plan((hit, 24), exports={hit.request_id: change.get("exports", [])}))
    driver.worker.close()


def test_pools_are_as_large_as_what_they_hold(shelf: Shelf) -> None:
    model = shelf.model("kimi_linear")
    small = kept_in(model, BF16)
    geometry = small.geometry(UNIT)
    driver = Driver(small, match_unit=UNIT, cache_bytes=4 << 20)
    sizes = [pool.record_bytes for pool in driver.worker.pools.pools]
    assert tuple(sizes) == geometry.pool_record_bytes and len(sizes) == 3
    page, kept, running = sizes
    assert running == model.geometry(UNIT).checkpoint_bytes and kept < running
    assert geometry.kept_state_bytes < 0.7 * geometry.state_bytes
    slots_in_use = driver.sequence(random_tokens(UNIT, small.vocab_size, 1), 3)
    driver.run(driver.plan((slots_in_use, UNIT), exports={slots_in_use.request_id: [(8, 1), (UNIT, 2)]}))
    assert driver.worker.mapped_bytes() == page + 2 * kept + running
    driver.worker.close()
