"""Drafts take what nobody needs: with them no request is preempted that would not be without."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from tests.engine.byte_worker import ByteWorker, small_geometry
from tests.engine.tiny_tokenizer import SETTINGS, spec

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.drafts import DraftPlanner
from milepost.core.plan import SamplingParams
from milepost.core.request import Request
from milepost.core.scheduler import Scheduler
from milepost.engine.tokenizer import Tokenizer

UNIT = 16


class Useless:
    """Always guesses something, and is never right."""

    def propose(self, request_id: int, tokens: Sequence[int], max_drafts: int) -> Sequence[int]:
        return [1] * max_drafts

    def forget(self, request_id: int) -> None:
        pass


def preemptions(seed: int, cache_bytes: int, num_requests: int, num_drafts: int) -> int:
    rng, geometry = Random(seed), small_geometry(UNIT)
    planner = DraftPlanner(Useless(), num_drafts) if num_drafts else None
    cache = CacheConfig(cache_bytes, UNIT, decode_interval=0)
    scheduler = Scheduler(geometry, cache, SchedulerConfig(64, 16, 512), planner)
    worker = ByteWorker(geometry, Tokenizer(spec(), SETTINGS))
    for number in range(num_requests):
        prompt = [rng.randrange(256) for _ in range(rng.randrange(4, 30))]
        scheduler.add(Request(number, prompt, SamplingParams(temperature=0.0), max_tokens=24))
    for step in range(200):
        if not scheduler.has_unfinished_requests:
            break
        scheduler.commit(worker.execute(scheduler.schedule(float(step))))
        assert scheduler.audit() == []
    assert not scheduler.has_unfinished_requests
    return scheduler.cache.counters.num_preemptions


@pytest.mark.parametrize(
    ("seed", "cache_bytes", "num_requests"), [(27 * 7, 43 << 10, 5), (41 * 7, 50 << 10, 4)]
)
def test_drafts_preempt_nobody(seed: int, cache_bytes: int, num_requests: int) -> None:
    without = preemptions(seed, cache_bytes, num_requests, 0)
    assert without == 0, "the case is about drafts"
    assert preemptions(seed, cache_bytes, num_requests, 4) == 0
