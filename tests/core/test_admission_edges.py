"""Admission to the record: who starts beside whom, with exactly what is needed and with one record less."""

from __future__ import annotations

import pytest
from tests.core.harness import Harness, numbered

UNIT = 4


def records(num_tokens: int) -> int:
    """Pages of a prompt and its next token, and a running state."""
    return -(-(num_tokens + 1) // UNIT) + 1


@pytest.mark.parametrize("first", [4, 9, 15, 16])
@pytest.mark.parametrize("second", [3, 8, 17])
@pytest.mark.parametrize("third", [0, 6])
@pytest.mark.parametrize("missing", [0, 1])
def test_all_start_at_once_if_their_prompts_and_next_tokens_fit(
    first: int, second: int, third: int, missing: int
) -> None:
    """With one record less the last one waits until somebody ends, and nobody is preempted."""
    lengths = [length for length in (first, second, third) if length]
    num_records = sum(records(length) for length in lengths) - missing
    harness = Harness(num_records=num_records, enable_prefix_caching=False)
    for seed, length in enumerate(lengths):
        harness.add(numbered(length, seed))
    harness.schedule()
    assert harness.scheduler.num_running == len(lengths) - missing
    harness.execute()
    harness.run()
    assert harness.scheduler.stats().counters.num_preemptions == 0


@pytest.mark.parametrize("missing", [0, 1])
def test_what_others_hold_is_counted_when_cached_prefixes_must_make_room(missing: int) -> None:
    """Everything free is in checkpoints that can go; what running requests stand on cannot."""
    prompts = [numbered(9, 1), numbered(13, 2)]
    num_records = sum(records(len(prompt)) for prompt in prompts) + 1
    harness = Harness(num_records=num_records - missing)
    while harness.cache.memory.free_bytes:
        before = harness.cache.memory.free_bytes
        harness.serve(numbered(5, 10 + harness.scheduler.stats().counters.num_steps))
        if harness.cache.memory.free_bytes >= before:
            break
    for prompt in prompts:
        harness.add(prompt)
    harness.schedule()
    # The first one exports its tail, which cannot go before the step is over.
    assert harness.scheduler.num_running == 2 - missing
    harness.execute()
    harness.run()
