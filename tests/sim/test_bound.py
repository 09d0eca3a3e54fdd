"""Promise P1 over random conversations: what must be recomputed is bounded, and reported as it is."""

from __future__ import annotations

from random import Random

import pytest

from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.geometry import AttentionGroupSpec, CacheGeometry, RecurrentGroupSpec
from milepost.sim.clients import ClientDriver
from milepost.sim.model import FingerprintModel
from milepost.sim.promises import BoundError, PromiseBook
from milepost.sim.spec import Outcome, RequestSpec
from milepost.sim.workload import (
    AgentHabits,
    TurnSizes,
    agent,
    boundary_fuzz,
    boundary_lengths,
    child_rng,
    greedy,
    multiturn,
    random_tokens,
)
from milepost.sim.world import Checks, World

AMPLE = 1 << 40


def geometry(match_unit: int, alignment: int | None = 1, num_recurrent: int = 1) -> CacheGeometry:
    return CacheGeometry(
        match_unit=match_unit,
        attention=(AttentionGroupSpec("full", 64),),
        recurrent=tuple(
            RecurrentGroupSpec(f"kda {index}", 4096, alignment) for index in range(num_recurrent)
        ),
    )


def world(
    match_unit: int = 4, step_tokens: int = 64, *, alignment: int | None = 1, num_seqs: int = 8
) -> World:
    return World(
        geometry(match_unit, alignment),
        CacheConfig(AMPLE, match_unit=match_unit, decode_interval=0, checkpoint_interval=0),
        SchedulerConfig(step_tokens, num_seqs, 1 << 20),
        checks=Checks(audit=False, contents=False),
    )


def common_prefix(first: list[int], second: list[int]) -> int:
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count


def assert_bound(earlier: Outcome, later: Outcome, match_unit: int) -> None:
    """P1 as written: P over (earlier prompt + generated ids) without the last sampled token."""
    seen = [*earlier.spec.prompt, *earlier.output_tokens[:-1]]
    processed = common_prefix(seen, list(later.spec.prompt))
    allowed = match_unit - 1 + max(1, later.num_prompt_tokens - processed)
    assert later.num_recomputed_tokens <= allowed, (earlier.spec.label, later.spec.label)


@pytest.mark.parametrize("seed", range(12))
def test_chats(seed: int) -> None:
    """Every turn of a chat against the turn before it, under concurrency and any step budget."""
    rng = Random(seed)
    unit = rng.choice((1, 3, 4, 16, 32))
    one = world(unit, rng.choice((1, 3, unit, 61, 512)), alignment=rng.choice((1, 2, 16, None)))
    system = random_tokens(rng, rng.randrange(1, 200))
    sizes = TurnSizes(rng.randrange(1, 60), rng.randrange(1, 40), rng.randrange(0, 6))
    chats = [multiturn(child_rng(rng), system, 6, sizes, name=f"chat {i}", vary=0.9) for i in range(5)]
    outcomes = ClientDriver(one).run(chats)
    by_name: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_name.setdefault(str(outcome.spec.conversation), []).append(outcome)
    for turns in by_name.values():
        for earlier, later in zip(turns, turns[1:], strict=False):
            assert_bound(earlier, later, unit)
    assert one.promises.num_reached >= 25


@pytest.mark.parametrize("seed", range(12))
def test_agents_and_boundary_fuzz(seed: int) -> None:
    """Edits, side requests, aborts and prompts at mU - 1, mU, mU + 1, against the book of promises."""
    rng = Random(1000 + seed)
    unit = rng.choice((2, 4, 16))
    one = world(unit, rng.choice((1, 7, 64, 300)), alignment=rng.choice((1, 2)))
    system = random_tokens(rng, 50)
    clients = [
        agent(child_rng(rng), system, 6, TurnSizes(20, 12), AgentHabits(), name=f"agent {i}")
        for i in range(4)
    ]
    clients += [boundary_fuzz(child_rng(rng), unit, 6, 30) for _ in range(2)]
    ClientDriver(one).run(clients)
    assert one.promises.num_reached > 30


@pytest.mark.parametrize("unit", [1, 2, 4, 16])
@pytest.mark.parametrize("step_tokens", [1, 3, 1000])
def test_resend_and_extension_at_every_length(unit: int, step_tokens: int) -> None:
    """For each N around a boundary: the same prompt again, and the answer echoed with one token more."""
    for length in boundary_lengths(unit, 4):
        for num_outputs in (1, unit, unit + 1):
            one = world(unit, step_tokens)
            prompt = random_tokens(Random(length), length)
            first = one.add(RequestSpec(prompt, num_outputs, greedy()))
            one.drain()
            again = one.add(RequestSpec(prompt[:], 1, greedy()))
            one.drain()
            echoed = prompt + one.outcomes[first].output_tokens + random_tokens(Random(1), 1)
            later = one.add(RequestSpec(echoed, 1, greedy()))
            one.drain()
            assert_bound(one.outcomes[first], one.outcomes[again], unit)
            assert_bound(one.outcomes[first], one.outcomes[later], unit)


def test_prefill_that_ends_with_one_token_keeps_its_end() -> None:
    """Found by a swarm run: the last token of a prompt of U tokens came alone, and `end` was lost."""
    one = world(4, 1)
    first = one.add(RequestSpec(random_tokens(Random(0), 4), 1, greedy()))
    one.drain()
    prompt = one.outcomes[first].spec.prompt + random_tokens(Random(1), 2)
    later = one.add(RequestSpec(prompt, 1, greedy()))
    one.drain()
    assert one.outcomes[later].num_cached_tokens == 4


def test_the_book_fires() -> None:
    """A hit one unit short of a promise is an error, one that keeps the bound is not."""
    model = FingerprintModel()
    book = PromiseBook(4)
    one = world()
    truth = one.worker.expect(0, list(range(1, 11)), greedy())
    longer = one.worker.expect(1, list(range(1, 21)), greedy())
    book.opened(0, truth, [6, 10], 0)
    book.processed(0, 7)
    book.check(1, longer, 4)
    with pytest.raises(BoundError):
        book.check(1, longer, 0)
    book.ended(0, 10)
    book.check(1, longer, 8)
    with pytest.raises(BoundError):
        book.check(1, longer, 4)
    book.forget()
    book.check(1, longer, 0)
    assert len(model.tree) == 0


def test_a_wanted_position_serves_longer_prompts_only() -> None:
    book = PromiseBook(1)
    one = world(1)
    truth = one.worker.expect(0, [1, 2, 3, 4], greedy())
    book.opened(0, truth, [2], 0)
    book.processed(0, 2)
    book.check(1, one.worker.expect(1, [1, 2], greedy()), 0)
    with pytest.raises(BoundError):
        book.check(2, one.worker.expect(2, [1, 2, 9], greedy()), 1)


def random_chat(rng: Random) -> None:
    """One world with a few chats, checked turn by turn against P1 as written."""
    unit = rng.choice((1, 2, 4, 16, 32, 64))
    one = world(
        unit,
        rng.choice((7, unit, unit + 1, 100, 2048)),
        alignment=rng.choice((1, 1, 2, 16, 64, None)),
        num_seqs=rng.choice((1, 2, 8)),
    )
    system = random_tokens(rng, rng.randrange(1, 150))
    sizes = TurnSizes(rng.randrange(1, 60), rng.randrange(1, 20), rng.randrange(0, 8), rng.choice((0.0, 5.0)))
    chats = [multiturn(child_rng(rng), system, 3, sizes, name=f"chat {i}", vary=0.9) for i in range(10)]
    by_name: dict[str, list[Outcome]] = {}
    for outcome in ClientDriver(one).run(chats):
        by_name.setdefault(str(outcome.spec.conversation), []).append(outcome)
    for turns in by_name.values():
        for earlier, later in zip(turns, turns[1:], strict=False):
            assert_bound(earlier, later, unit)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_conversations() -> None:
    rng = Random(2024)
    for _ in range(1000):
        random_chat(rng)


def test_a_small_cache_loses_only_by_eviction() -> None:
    """While the counters report no loss the bound holds; once a request falls short, they report one."""
    num_short = 0
    for seed in range(30):
        rng = Random(seed)
        shape = geometry(4)
        one = World(
            shape,
            CacheConfig(
                round(shape.request_bytes(200) * rng.uniform(1.1, 6.0)), match_unit=4, decode_interval=0
            ),
            SchedulerConfig(64, 4, 200),
            checks=Checks(audit=False, contents=False, bound=True),
        )
        sizes = TurnSizes(10, 6, 2)
        system = random_tokens(rng, 20)
        chats = [multiturn(child_rng(rng), system, 5, sizes, name=f"chat {i}") for i in range(6)]
        by_name: dict[str, list[Outcome]] = {}
        for outcome in ClientDriver(one).run(chats):
            by_name.setdefault(str(outcome.spec.conversation), []).append(outcome)
        shortfall = 0
        for turns in by_name.values():
            for earlier, later in zip(turns, turns[1:], strict=False):
                seen = [*earlier.spec.prompt, *earlier.output_tokens[:-1]]
                allowed = 3 + max(1, later.num_prompt_tokens - common_prefix(seen, list(later.spec.prompt)))
                shortfall += max(0, later.num_recomputed_tokens - allowed)
        counters = one.scheduler.cache.counters
        num_lost = sum(n for (move, _), n in counters.evictions.items() if move != "thin")
        num_lost += sum(counters.refusals.values()) + counters.num_preemptions
        assert not shortfall or num_lost
        num_short += shortfall > 0
    assert 5 < num_short < 30
