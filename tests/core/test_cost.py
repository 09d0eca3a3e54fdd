"""How work grows, counted in executed lines of the core instead of seconds: exact and repeatable."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from tests.core.harness import Harness, make_cache, make_chain, make_geometry, numbered

from milepost.core import reasons
from milepost.core.admission import in_use_bytes
from milepost.core.hashing import MediaSpan
from milepost.core.prefix_cache import PrefixCache


def lines(work: Callable[[], object]) -> int:
    """Lines of `milepost.core` executed by `work`."""
    count = 0

    def in_core(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return in_core

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        return in_core if str(frame.f_globals.get("__name__", "")).startswith("milepost.core") else None

    previous = sys.gettrace()
    sys.settrace(on_call)
    try:
        work()
    finally:
        sys.settrace(previous)
    return count


def growth(make: Callable[[int], Callable[[], object]], size: int, factor: int = 4) -> float:
    """Lines at `factor` times the size over lines at the size; the set-up in `make` is not counted."""
    return lines(make(factor * size)) / lines(make(size))


def quiet(harness: Harness) -> Harness:
    harness.check = lambda: None  # type: ignore[method-assign]
    return harness


# ------------------------------------------------------------------ prompts
def compute(
    cache: PrefixCache, tokens: list[int], now: float = 0.0, media: list[MediaSpan] | None = None
) -> None:
    chain = make_chain(tokens, media=media or ())
    lease = cache.open(cache.match(chain, len(tokens)), chain, now)
    exports = [(p, reasons.MESSAGE) for p in range(64, len(tokens), 64)]
    reservation = cache.reserve(lease, len(tokens), exports, now)
    assert reservation is not None
    cache.confirm(lease, reservation)
    cache.publish(lease, len(tokens), [p for p, _ in exports], reasons.END, now)
    cache.release(lease, len(tokens), now)


def test_a_cold_prompt_is_linear() -> None:
    def make(num_units: int) -> Callable[[], object]:
        cache = make_cache(100_000)
        return lambda: compute(cache, numbered(4 * num_units))

    assert growth(make, 100) < 4.3


def test_a_hit_is_linear() -> None:
    def make(num_units: int) -> Callable[[], object]:
        cache = make_cache(100_000)
        compute(cache, numbered(4 * num_units))
        return lambda: compute(cache, numbered(4 * num_units + 1))

    assert growth(make, 100) < 4.3


def test_a_prompt_that_pushes_others_out_is_linear() -> None:
    def make(num_units: int) -> Callable[[], object]:
        cache = make_cache(6 * (num_units + num_units // 16 + 2))
        for seed in range(8):
            compute(cache, numbered(4 * num_units, seed), float(seed))
        return lambda: [compute(cache, numbered(4 * num_units, 100 + s), 10.0 + s) for s in range(4)]

    assert growth(make, 64) < 5.0


@pytest.mark.parametrize("length", [3, 8, 30])
def test_a_prompt_full_of_media_is_linear(length: int) -> None:
    def make(num_units: int) -> Callable[[], object]:
        num_tokens = 4 * num_units
        media = [MediaSpan(s, s + length - 1, b"x") for s in range(0, num_tokens - length, length)]
        cache = make_cache(100_000)
        compute(cache, numbered(num_tokens), media=media)
        return lambda: compute(cache, numbered(num_tokens + 1), media=media)

    assert growth(make, 100) < 4.3


def test_a_long_prefill_in_chunks_is_linear() -> None:
    def make(num_units: int) -> Callable[[], object]:
        harness = quiet(Harness(num_records=100_000, budget=64, checkpoint_interval=64))
        prompt = numbered(4 * num_units)
        harness.add(prompt, wanted=[(p, "message") for p in range(50, len(prompt), 50)])

        def run() -> None:
            while harness.scheduler.has_unfinished_requests:
                harness.step()

        return run

    assert growth(make, 100, 3) < 3.6


def test_a_bound_on_states_does_not_walk_the_path_at_every_checkpoint() -> None:
    def make(num_units: int) -> Callable[[], object]:
        cache = make_cache(100_000, max_states_per_path=4)
        tokens = numbered(4 * num_units)
        lease = cache.open(cache.no_match(), make_chain(tokens), 0.0)
        exports = [(p, "message") for p in range(4, len(tokens), 4)]
        reservation = cache.reserve(lease, len(tokens), exports, 0.0)
        assert reservation is not None
        cache.confirm(lease, reservation)
        return lambda: cache.publish(lease, len(tokens), [p for p, _ in exports], None, 0.0)

    assert growth(make, 300) < 4.3


# ------------------------------------------------------------------ steps
def decoding(num_requests: int, num_tokens: int, **options: Any) -> Harness:
    harness = quiet(Harness(num_records=200_000, budget=8192, max_num_seqs=num_requests, **options))
    for seed in range(num_requests):
        harness.add(numbered(num_tokens, seed), 1000)
    for _ in range(6):
        harness.step()
    assert len(harness.plans[-1].chunks) == num_requests
    return harness


def eight_steps(harness: Harness) -> Callable[[], object]:
    return lambda: [harness.step() for _ in range(8)]


def test_a_decode_step_does_not_depend_on_the_context() -> None:
    assert growth(lambda size: eight_steps(decoding(8, size)), 100) < 1.05


def test_a_decode_step_is_linear_in_requests() -> None:
    assert growth(lambda size: eight_steps(decoding(size, 10)), 8) < 4.3


def test_a_full_server_does_not_walk_contexts_for_every_arrival() -> None:
    """The head of the queue cannot start; each step brings another request behind it."""

    def make(num_tokens: int) -> Callable[[], object]:
        geometry = make_geometry()
        need = 8 * geometry.request_bytes(num_tokens + 24) // 4096
        harness = quiet(Harness(num_records=need, budget=8192, max_model_len=100_000))
        for seed in range(8):
            harness.add(numbered(num_tokens, seed), 20)
        for _ in range(3):
            harness.step()
        harness.add(numbered(num_tokens, 50), 20)
        harness.step()
        assert harness.scheduler.num_waiting == 1

        def run() -> None:
            for seed in range(6):
                harness.add(numbered(5, 100 + seed))
                harness.step()

        return run

    assert growth(make, 400) < 1.4, "evictions look at their segments; nothing else may grow"


def test_a_finished_request_lets_the_head_look_without_walking_the_others() -> None:
    def make(num_tokens: int) -> Callable[[], object]:
        harness = decoding(8, num_tokens)
        leases = [r.lease for r in harness.requests.values() if r.lease is not None]
        return lambda: in_use_bytes(harness.cache, leases)

    assert growth(make, 100) == 1.0


# ------------------------------------------------------------------ siblings
def test_waiting_siblings_are_linear_per_step() -> None:
    """Identical prompts behind one leader, and its handover to the next."""

    def make(count: int) -> Callable[[], object]:
        harness = quiet(Harness(num_records=100_000, budget=16, max_num_seqs=4))
        for _ in range(count):
            harness.add(numbered(64))
        return lambda: [harness.step() for _ in range(6)]

    assert growth(make, 50) < 4.3


def test_a_chain_of_followers_is_linear_per_step() -> None:
    def make(count: int) -> Callable[[], object]:
        harness = quiet(Harness(geometry=make_geometry(1), num_records=100_000, budget=1, max_num_seqs=4))
        trunk = numbered(count + 2)
        for length in range(2, count + 2):
            harness.add(trunk[:length] + [9_000_000 + length])
        return lambda: [harness.step() for _ in range(4)]

    assert growth(make, 40) < 4.3


def test_aborting_a_leader_is_linear_in_its_followers() -> None:
    def make(count: int) -> Callable[[], object]:
        harness = quiet(Harness(num_records=100_000, budget=16))
        for seed in range(count):
            harness.add(numbered(64) + numbered(5, seed + 1))
        harness.step()
        return lambda: harness.scheduler.abort(0)

    assert growth(make, 50) < 4.3
