"""A worker in another process gives the same results, and both sides notice when the other ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.driver import Driver, random_tokens
from tests.support.families import FAMILIES, Shelf

from milepost.core.plan import SamplingParams, StepPlan
from milepost.errors import WorkerError
from milepost.models import load_model
from milepost.runner.process_worker import ProcessWorker, WorkerSpec

UNIT = 16
CACHE_BYTES = 4 << 20


# A process takes seconds to start: one of each kind of layer runs always.
ALWAYS = ("kimi_k3", "qwen3_5_moe")
PARAMS = [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in sorted(FAMILIES)]


@pytest.fixture(scope="module", params=PARAMS)
def directory(request: Any, shelf: Shelf) -> Path:
    return shelf.directory(request.param)


@pytest.fixture(scope="module")
def remote(directory: Path) -> Iterator[ProcessWorker]:
    worker = ProcessWorker(WorkerSpec(str(directory), "float32", UNIT, CACHE_BYTES, num_threads=1))
    yield worker
    worker.close()


def test_same_results_as_in_this_process(remote: ProcessWorker, directory: Path) -> None:
    """Prefill in chunks with an export, a packed hit, then sampled decoding with log-probabilities."""
    driver = Driver(load_model(directory), match_unit=UNIT, cache_bytes=CACHE_BYTES)
    assert remote.num_records == [pool.num_records for pool in driver.worker.pools.pools]
    sampling = SamplingParams(temperature=1.0, top_p=0.95, seed=4, num_logprobs=2, repetition_penalty=1.1)
    tokens = random_tokens(60, driver.model.vocab_size, seed=1)
    first = driver.sequence(tokens, 0, sampling=sampling)
    results = []

    def step(plan: StepPlan) -> None:
        ours, theirs = driver.run(plan), remote.execute(plan)
        results.append((ours, theirs))

    step(driver.plan((first, 40), exports={first.request_id: [(32, 5)]}, sample=False))
    hit = driver.sequence(tokens, 1, start_slot=5, pages=first.pages[:2], num_processed=32, sampling=sampling)
    step(driver.plan((first, 20), (hit, 28)))
    for _ in range(6):
        ours, _ = results[-1]
        for request, chunk in zip((first, hit), ours.chunk_results, strict=True):
            request.tokens.append(chunk.sampled[0].token_id)
        step(driver.plan((first, 1), (hit, 1)))
    for ours, theirs in results:
        assert ours == theirs
    last = results[-1][0].chunk_results
    assert last[0].sampled[0].token_id == last[1].sampled[0].token_id


def test_a_refused_plan_is_an_error_here_and_the_worker_goes_on(
    remote: ProcessWorker, directory: Path
) -> None:
    driver = Driver(load_model(directory), match_unit=UNIT, cache_bytes=CACHE_BYTES)
    request = driver.sequence(random_tokens(8, driver.model.vocab_size, seed=2), 2)
    request.request_id, request.started = 500, True
    with pytest.raises(WorkerError, match="request 500 was never started"):
        remote.execute(driver.plan((request, 8)))
    assert remote.execute(StepPlan(9, [])).step_id == 9


def test_loading_errors_reach_the_parent(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="config.json does not exist"):
        ProcessWorker(WorkerSpec(str(tmp_path), None, UNIT, CACHE_BYTES))


def is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def test_close_ends_the_process_and_a_killed_one_is_noticed(shelf: Shelf) -> None:
    worker = ProcessWorker(
        WorkerSpec(str(shelf.directory("kimi_linear")), None, UNIT, CACHE_BYTES, num_threads=1)
    )
    process_id = worker.process_id
    assert process_id is not None and is_alive(process_id)
    os.kill(process_id, signal.SIGKILL)
    with pytest.raises(WorkerError, match="gone"):
        for number in range(100):
            worker.execute(StepPlan(number, []))
            time.sleep(0.02)
    worker.close()
    worker.close()
    assert not is_alive(process_id)
