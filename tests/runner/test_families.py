"""What must hold for every model family on the real worker, in both dtypes; nothing here names a layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.driver import Driver, random_tokens
from tests.support.families import DTYPES, FAMILIES, LAYOUTS, Shelf, without_experts_in_bf16

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.plan import SamplingParams
from milepost.core.request import Request
from milepost.core.scheduler import Scheduler
from milepost.models import describe
from milepost.models.loading import LoadedModel
from milepost.runner.worker import TorchWorker

UNIT = 16
BOUND = {"float32": 1e-4, "bfloat16": 0.3}
"""Largest logit difference between two ways to compute the same rows."""
STATE_BOUND = {"float32": 1e-4, "bfloat16": 0.1}
"""The same for states and pages, relative to their largest value."""
NUM_TOKENS = 70


PACKED = [(layout, "float32") for layout in sorted(LAYOUTS.keys() - FAMILIES.keys())]


@pytest.fixture(scope="module", params=DTYPES + PACKED, ids=lambda value: "-".join(value))
def model(request: Any, shelf: Shelf) -> LoadedModel:
    family, dtype = request.param
    return shelf.model(family, **without_experts_in_bf16(family, dtype))


@pytest.fixture
def driver(model: LoadedModel) -> Driver:
    driver = Driver(model, match_unit=UNIT)
    driver.poison()
    return driver


def close(driver: Driver, ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert float(expected.abs().max()) > 0.5
    difference = float((ours - expected).abs().max())
    assert difference <= BOUND[driver.model.dtype], f"logits differ by {difference:.2e}"


def cold(driver: Driver, tokens: list[int], slot: int, exports: Any = ()) -> tuple[Any, torch.Tensor]:
    request = driver.sequence(tokens, running_slot=slot)
    plan = driver.plan((request, len(tokens)), exports={request.request_id: list(exports)})
    return request, driver.logits(plan)


@pytest.mark.parametrize("position", [UNIT, 2 * UNIT, 4 * UNIT, NUM_TOKENS - 1])
def test_hit_is_cold_and_leaves_the_checkpoint_alone(driver: Driver, position: int) -> None:
    tokens = random_tokens(NUM_TOKENS, driver.model.vocab_size, seed=position)
    first, expected = cold(driver, tokens, 0, [(position, 1)])
    checkpoint = driver.state(1)
    pages = first.pages[: -(-position // UNIT)]
    for slot in (2, 3):
        hit = driver.sequence(tokens, slot, start_slot=1, pages=pages, num_processed=position)
        close(driver, driver.logits(driver.plan((hit, NUM_TOKENS - position))), expected[position:])
    for name, tensor in driver.state(1).items():
        assert torch.equal(tensor, checkpoint[name])


def test_exports_and_pages_are_those_of_runs_that_stop_there(driver: Driver) -> None:
    tokens = random_tokens(NUM_TOKENS, driver.model.vocab_size, seed=3)
    positions = [1, 2, 15, 16, 17, 45, 70]
    first, _ = cold(driver, tokens, 0, [(p, 10 + n) for n, p in enumerate(positions)])
    bound = STATE_BOUND[driver.model.dtype]
    for number, position in enumerate(positions):
        stopped, _ = cold(driver, tokens[:position], 1)
        pairs = [(driver.state(10 + number), driver.state(1))]
        pairs.append((driver.page_rows(first, position), driver.page_rows(stopped, position)))
        for ours, expected in pairs:
            assert ours.keys() == expected.keys() and ours
            for name, tensor in expected.items():
                scale = max(float(tensor.float().abs().max()), 1e-3)
                worst = float((ours[name].float() - tensor.float()).abs().max())
                assert worst <= scale * bound, (name, position)


def test_packed_is_alone(driver: Driver) -> None:
    """Prefills of different lengths, a decode and a hit in one step, at different positions."""
    vocab = driver.model.vocab_size
    prompts = [random_tokens(count, vocab, seed=20 + count) for count in (40, 7, 33, 60)]
    alone = [cold(driver, prompt, 0)[1] for prompt in prompts]
    base, _ = cold(driver, prompts[3], 0, [(48, 9)])
    decoding = driver.sequence(prompts[2], 1)
    driver.run(driver.plan((decoding, 32)))
    hit = driver.sequence(prompts[3], 2, start_slot=9, pages=base.pages[:3], num_processed=48)
    long, short = driver.sequence(prompts[0], 3), driver.sequence(prompts[1], 4)
    rows = driver.logits(driver.plan((decoding, 1), (long, 40), (hit, 12), (short, 7)))
    close(driver, rows[0:1], alone[2][32:])
    close(driver, rows[1:41], alone[0])
    close(driver, rows[41:53], alone[3][48:])
    close(driver, rows[53:], alone[1])


@pytest.mark.parametrize("position", [UNIT, 4 * UNIT])
def test_records_move_to_another_worker(driver: Driver, position: int) -> None:
    """What a store keeps is bytes of pages and of one state: elsewhere, in other places, they are a hit."""
    tokens = random_tokens(NUM_TOKENS, driver.model.vocab_size, seed=40 + position)
    first, expected = cold(driver, tokens, 0, [(position, 1)])
    other = Driver(driver.model, match_unit=UNIT, shuffle_seed=9)
    other.poison()
    pages = first.pages[: position // UNIT]
    theirs = [other._free_pages.pop() for _ in pages]
    source, target = driver.worker.pools, other.worker.pools
    for pool, ours, places in ((0, pages, theirs), (1, [1], [6])):
        payload = b"".join(bytes(piece) for piece in source.read_records(pool, ours))
        target.write_records(pool, places, payload)
    hit = other.sequence(tokens, 2, start_slot=6, pages=theirs, num_processed=position)
    close(driver, other.logits(other.plan((hit, NUM_TOKENS - position))), expected[position:])


@pytest.mark.parametrize(("processed", "extra"), [(48, 1), (48, 9), (50, 3), (33, 30)])
def test_recomputed_tokens_stay_within_the_bound(model: LoadedModel, processed: int, extra: int) -> None:
    """P1: at most (U - 1) + max(1, N - P) tokens are computed again."""
    geometry = model.geometry(UNIT)
    scheduler = Scheduler(
        geometry, CacheConfig(4 << 20, UNIT, checkpoint_interval=0), SchedulerConfig(19, 4, 1024)
    )
    worker = TorchWorker(model, geometry, 4 << 20)
    tokens = random_tokens(processed + extra, model.vocab_size, seed=processed)
    cached = []
    for number, prompt in enumerate((tokens[:processed], tokens)):
        scheduler.add(Request(number, prompt, SamplingParams(temperature=0.0), max_tokens=1))
        while scheduler.has_unfinished_requests:
            result = worker.execute(scheduler.schedule(0.0))
            assert result.error is None
            cached += [update.reuse.num_cached_tokens for update in scheduler.commit(result) if update.reuse]
    assert cached[0] == 0
    assert len(tokens) - cached[1] <= UNIT - 1 + max(1, extra)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_geometry_is_what_the_layers_store(family: str, shelf: Shelf) -> None:
    loaded = shelf.model(family)
    about = describe(shelf.directory(family))
    geometry = loaded.geometry(UNIT)
    assert (geometry.num_attention_groups, geometry.num_recurrent_groups) == (1, 1)
    assert geometry.bytes_per_token == about.bytes_per_token
    assert geometry.state_bytes == about.state_bytes
    driver = Driver(loaded, match_unit=UNIT)
    driver.poison()
    tokens = random_tokens(UNIT, loaded.vocab_size, seed=1)
    request, _ = cold(driver, tokens, 1)
    # Every byte the geometry counts is written by one unit of tokens: nothing is reserved for nobody.
    written = list(driver.page_rows(request, UNIT).values()) + list(driver.state(1).values())
    assert all(bool(torch.isfinite(tensor).all()) for tensor in written)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in written)
    padding = geometry.bytes_per_token * UNIT + geometry.state_bytes - num_bytes
    assert 0 <= padding < 64 * len(written)
