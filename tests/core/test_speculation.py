"""How many drafts are worth their time: the arithmetic, and where it leads if costs and luck are learned."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.core.request import DraftRecord
from milepost.core.speculation import (
    MAX_PROBE_STEPS,
    MIN_GAIN,
    DraftLengths,
    FixedLength,
    best_lengths,
    chances,
    expected_tokens,
)
from milepost.core.step_cost import StepCost, StepShape

CHEAP = StepCost(step=8.0, request=1.0, draft=0.1, replay=0.1)
ROWS = StepCost(step=8.0, request=1.0, draft=1.0, replay=0.5)


def geometric(acceptance: float, count: int) -> list[float]:
    return chances(acceptance, [1.0], count)


def rate_of(
    chances_of: Sequence[Sequence[float]],
    lengths: Sequence[int],
    num_requests: int,
    cost: StepCost,
    own: bool,
) -> float:
    """Expected tokens per second, written down a second time."""
    tokens, seconds = float(num_requests), cost.step + cost.request * num_requests
    for some, length in zip(chances_of, lengths, strict=True):
        tokens += sum(some[:length])
        seconds += cost.draft * length + (cost.replay * (1.0 - some[length - 1]) if length else 0.0)
    if own and any(lengths):
        seconds += cost.start + cost.depth * max(lengths) + cost.drafted * sum(lengths)
    return tokens / seconds


def brute_force(
    chances_of: Sequence[Sequence[float]], num_requests: int, cost: StepCost, own: bool
) -> tuple[float, tuple[int, ...]]:
    every = itertools.product(*(range(len(some) + 1) for some in chances_of))
    return max((rate_of(chances_of, lengths, num_requests, cost, own), lengths) for lengths in every)


# -- arithmetic ------------------------------------------------------------------------------------


def test_expected_tokens_is_the_geometric_sum() -> None:
    assert expected_tokens(geometric(0.5, 3)) == 1.875
    assert expected_tokens(geometric(1.0, 4)) == 5.0
    assert expected_tokens(geometric(0.0, 8)) == 1.0


def test_positions_have_chances_of_their_own() -> None:
    assert chances(0.8, [1.0, 0.5], 3) == pytest.approx([0.8, 0.32, 0.128])
    assert chances(0.8, [1.0, 2.0], 2) == pytest.approx([0.8, 0.8])


def test_expected_tokens_is_what_happens() -> None:
    rng = Random(3)
    total = 0
    for _ in range(20_000):
        total += 1
        for _ in range(4):
            if rng.random() > 0.7:
                break
            total += 1
    assert total / 20_000 == pytest.approx(expected_tokens(geometric(0.7, 4)), rel=0.02)


def without_drafting(cost: StepCost) -> StepCost:
    """What the meter says where the worker does not draft."""
    return replace(cost, start=0.0, depth=0.0, drafted=0.0)


def lone(
    acceptance: float, cost: StepCost, *, own: bool = False, num_requests: int = 1, most: int = 8
) -> int:
    """Length for one of equal requests."""
    some = [geometric(acceptance, most)] * num_requests
    lengths = best_lengths(some, num_requests, cost if own else without_drafting(cost))
    assert len(set(lengths)) == 1
    return lengths[0]


def test_a_lone_request_drafts_much_and_a_full_batch_nothing() -> None:
    assert lone(0.9, ROWS) >= 5
    assert lone(0.9, ROWS, num_requests=8) < lone(0.9, ROWS)
    assert lone(0.9, ROWS, num_requests=64) == 0
    assert lone(1.0, replace(ROWS, step=0.0), num_requests=100) == 0


def test_useless_drafts_are_left_out_and_perfect_ones_taken() -> None:
    assert lone(0.0, CHEAP) == 0
    assert lone(1.0, CHEAP) == 8
    assert best_lengths([[]], 1, CHEAP) == [0]
    assert best_lengths([], 3, CHEAP) == []


COSTS = st.builds(
    StepCost,
    step=st.floats(0.0, 20.0),
    request=st.floats(0.1, 3.0),
    draft=st.floats(0.0, 3.0),
    replay=st.floats(0.0, 2.0),
    start=st.floats(0.0, 8.0),
    depth=st.floats(0.0, 8.0),
    drafted=st.floats(0.0, 2.0),
)
ACCEPTANCES = st.floats(0.0, 1.0)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[float]], int]:
    """Chances of up to three requests, and how many decode."""
    some = []
    for _ in range(draw(st.integers(1, 3))):
        scales = [1.0, *draw(st.lists(st.floats(0.1, 1.5), min_size=3, max_size=3))]
        some.append(chances(draw(ACCEPTANCES), scales, draw(st.integers(0, 4))))
    return some, len(some) + draw(st.integers(0, 3))


@given(batches(), COSTS, st.booleans())
def test_no_other_lengths_promise_more(
    batch: tuple[list[list[float]], int], cost: StepCost, own: bool
) -> None:
    some, num_requests = batch
    lengths = best_lengths(some, num_requests, cost if own else without_drafting(cost))
    best, _ = brute_force(some, num_requests, cost, own)
    plain = rate_of(some, [0] * len(some), num_requests, cost, own)
    reached = rate_of(some, lengths, num_requests, cost, own)
    if any(lengths):
        assert reached == pytest.approx(best)
        assert reached >= MIN_GAIN * plain * (1 - 1e-9)
    else:
        assert best <= MIN_GAIN * plain * (1 + 1e-9)
    assert all(length <= len(chance) for length, chance in zip(lengths, some, strict=True))


@given(ACCEPTANCES, COSTS, st.sampled_from(["draft", "depth", "drafted"]), st.floats(0.0, 5.0))
def test_a_dearer_draft_is_never_made_more_often(
    acceptance: float, cost: StepCost, what: str, more: float
) -> None:
    dearer = replace(cost, **{what: getattr(cost, what) + more})
    some = [geometric(acceptance, 8)]
    before = best_lengths(some, 1, cost)
    after = best_lengths(some, 1, dearer)
    if after[0] > before[0]:  # only where both lengths are worth the same
        assert rate_of(some, after, 1, dearer, True) == pytest.approx(rate_of(some, before, 1, dearer, True))


@given(ACCEPTANCES, COSTS, st.floats(0.0, 5.0))
def test_a_drafter_that_is_dearer_to_start_is_not_started_for_it(
    acceptance: float, cost: StepCost, more: float
) -> None:
    """It may make more drafts at a time, to pay for the start, but none where it made none."""
    some = [geometric(acceptance, 8)]
    if best_lengths(some, 1, cost) == [0]:
        assert best_lengths(some, 1, replace(cost, start=cost.start + more)) == [0]


@given(st.floats(0.0, 0.95), st.floats(0.0, 0.05), COSTS)
def test_better_drafts_are_never_made_less_often(acceptance: float, more: float, cost: StepCost) -> None:
    cost = replace(cost, replay=0.0)
    few = lone(acceptance, cost, own=True)
    many = lone(acceptance + more, cost, own=True)
    if many < few:
        some = [geometric(acceptance + more, 8)]
        assert rate_of(some, [many], 1, cost, True) == pytest.approx(rate_of(some, [few], 1, cost, True))


@given(COSTS)
def test_what_is_never_accepted_is_never_made(cost: StepCost) -> None:
    assert lone(0.0, cost, own=True) == 0


@given(st.integers(1, 16), st.floats(0.5, 20.0))
def test_what_is_always_accepted_and_costs_little_is_made_as_often_as_may_be(most: int, step: float) -> None:
    cost = StepCost(step=step, request=1.0, draft=0.01, replay=1.0, start=0.02, depth=0.01, drafted=0.001)
    assert lone(1.0, cost, own=True, most=most) == most


def test_a_slow_drafter_is_turned_off_though_its_drafts_are_right() -> None:
    """A module that takes half as long as the model: each draft costs more than the tokens it saves."""
    assert lone(0.85, StepCost(1.8, 0.2, 0.2, 0.2), own=True) > 0
    assert lone(0.85, StepCost(1.8, 0.2, 0.2, 0.2, start=0.4, depth=1.4), own=True) == 0


def test_in_one_step_the_better_drafts_are_made() -> None:
    some = [geometric(acceptance, 6) for acceptance in (0.95, 0.5, 0.02)]
    lengths = best_lengths(some, 3, ROWS)
    assert lengths[0] > lengths[1] >= lengths[2] == 0


# -- what is learned -------------------------------------------------------------------------------


def test_drafts_behind_a_rejected_one_say_nothing() -> None:
    one, many = DraftRecord(acceptance=0.6), DraftRecord(acceptance=0.6)
    FixedLength().learn(one, 2, 1)
    FixedLength().learn(many, 8, 1)
    assert one == many
    assert one.num_tested_tokens == 2


def test_a_first_draft_costs_one_row() -> None:
    """Nobody knows whether the drafter is any good."""
    lengths = DraftLengths()
    record = lengths.start()
    lengths.begin_step([(record, 8)], 1)
    assert lengths.choose(record, 8) == 1


def test_a_new_request_is_trusted_as_the_others_were() -> None:
    lengths = DraftLengths()
    for acceptance in (1, 0):
        for _ in range(200):
            record = lengths.start()
            lengths.learn(record, 1, acceptance)
        assert lengths.start().acceptance == pytest.approx(float(acceptance), abs=0.2)


def test_a_limit_of_the_caller_holds() -> None:
    lengths = DraftLengths()
    record = lengths.start()
    for _ in range(30):
        lengths.begin_step([(record, 8)], 1)
        lengths.learn(record, 4, 4)
        record.num_accepted_tokens += 4
    assert lengths.choose(record, 8) == 8
    assert lengths.choose(record, 3) == 3
    assert FixedLength().choose(record, 3) == 3


# -- a world with a clock --------------------------------------------------------------------------


@dataclass
class Mind:
    """A request of a simulated drafter.

    Attributes:
        conditional: chance that draft j is accepted if those before it were; the last one goes on.
    """

    conditional: Sequence[float]
    record: DraftRecord | None = None

    def chances(self, count: int) -> list[float]:
        result, chance = [], 1.0
        for place in range(count):
            chance *= self.conditional[min(place, len(self.conditional) - 1)]
            result.append(chance)
        return result

    def accepted(self, count: int, rng: Random) -> int:
        place = 0
        while place < count and rng.random() < self.conditional[min(place, len(self.conditional) - 1)]:
            place += 1
        return place


class Clockwork:
    """Decodes with simulated requests, on a clock that follows a `StepCost`."""

    def __init__(self, *, own: bool, most: int, seed: int, noise: float = 0.1) -> None:
        self.lengths = DraftLengths(is_own=own)
        self._own = own
        self._most = most
        self._rng = Random(seed)
        self._noise = noise

    def run(self, minds: Sequence[Mind], cost: StepCost, num_steps: int) -> float:
        """Tokens per second."""
        tokens, seconds, rng = 0, 0.0, self._rng
        for mind in minds:
            mind.record = mind.record or self.lengths.start()
        for _ in range(num_steps):
            records = [mind.record for mind in minds if mind.record is not None]
            self.lengths.begin_step([(record, self._most) for record in records], len(minds))
            counts, accepted = [], []
            for mind, record in zip(minds, records, strict=True):
                counts.append(self.lengths.choose(record, self._most))
                accepted.append(mind.accepted(counts[-1], rng))
            total = sum(counts)
            replays = sum(right < count for right, count in zip(accepted, counts, strict=True))
            own = total if self._own else 0
            shape = StepShape(len(minds), total, replays, own, max(counts) if own else 0)
            factor = 1.0 + self._noise * (2.0 * rng.random() - 1.0)
            if rng.random() < 0.02:
                factor *= 10.0  # the machine did something else
            drafting = cost.seconds(shape) - cost.seconds(replace(shape, num_own_drafts=0, depth=0))
            self.lengths.note_step(shape, factor * cost.seconds(shape), factor * drafting)
            for record, count, right in zip(records, counts, accepted, strict=True):
                if count:
                    record.num_accepted_tokens += right
                    self.lengths.learn(record, count, right)
            tokens += len(minds) + sum(accepted)
            seconds += cost.seconds(shape)
        return tokens / seconds

    def best(self, minds: Sequence[Mind], cost: StepCost) -> float:
        """Tokens per second of the best fixed lengths, found by trying all of them."""
        some = [mind.chances(self._most) for mind in minds]
        return brute_force(some, len(minds), cost, self._own)[0]

    def plain(self, minds: Sequence[Mind], cost: StepCost) -> float:
        return rate_of([[] for _ in minds], [0] * len(minds), len(minds), cost, self._own)


FREE = StepCost(step=8.0, request=1.0, draft=0.25, replay=0.5)
ROW_EACH = StepCost(step=2.0, request=1.0, draft=1.0, replay=0.5)
CHAINED = StepCost(step=8.0, request=1.0, draft=0.25, replay=0.5, start=0.3, depth=0.7, drafted=0.1)
BLOCK = StepCost(step=8.0, request=1.0, draft=0.25, replay=0.5, start=3.0, depth=0.05, drafted=0.05)
DEAR = StepCost(step=1.6, request=0.4, draft=0.3, replay=0.3, start=0.4, depth=1.2, drafted=0.1)
PRICES = {"free": FREE, "a row each": ROW_EACH, "chained": CHAINED, "block": BLOCK, "dear": DEAR}
MINDS: dict[str, list[list[float]]] = {
    "perfect": [[1.0]],
    "good": [[0.85]],
    "good at first": [[0.85, 0.4, 0.1]],
    "better and better": [[0.4, 0.9, 0.95]],
    "poor": [[0.25]],
    "useless": [[0.0]],
    "mixed": [[0.95], [0.6, 0.3], [0.03]],
    "alike": [[0.7], [0.7], [0.7]],
}


@pytest.mark.parametrize("mind", MINDS)
@pytest.mark.parametrize("price", PRICES)
def test_lengths_converge_to_the_best_ones(price: str, mind: str) -> None:
    cost = PRICES[price]
    for seed in range(1, 3):
        clockwork = Clockwork(own=price not in ("free", "a row each"), most=4, seed=seed)
        minds = [Mind(conditional) for conditional in MINDS[mind]]
        first = clockwork.run(minds, cost, 150)
        later = clockwork.run(minds, cost, 800)
        assert later >= 0.93 * clockwork.best(minds, cost), seed
        assert later >= 0.96 * clockwork.plain(minds, cost), seed
        assert first >= 0.9 * clockwork.plain(minds, cost), seed


CHANGES: dict[str, list[tuple[list[list[float]], StepCost]]] = {
    "drafts become right": [([[0.05]], CHAINED), ([[0.9]], CHAINED), ([[0.05]], CHAINED)],
    "the drafter becomes slow": [([[0.9]], CHAINED), ([[0.9]], DEAR), ([[0.9]], CHAINED)],
    "the batch grows": [([[0.8]], ROW_EACH), ([[0.8]] * 3, replace(ROW_EACH, step=0.2)), ([[0.8]], ROW_EACH)],
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_followed(change: str) -> None:
    for seed in range(2):
        clockwork = Clockwork(own=change != "the batch grows", most=4, seed=seed)
        records: list[DraftRecord | None] = [None] * 3
        for conditionals, cost in CHANGES[change]:
            minds = [Mind(c, record) for c, record in zip(conditionals, records, strict=False)]
            clockwork.run(minds, cost, 700)
            assert clockwork.run(minds, cost, 600) >= 0.94 * clockwork.best(minds, cost), (seed, cost)
            records = [mind.record for mind in minds] + [None] * 3


def test_a_useless_drafter_is_given_up_soon_and_tried_ever_more_rarely() -> None:
    clockwork = Clockwork(own=False, most=4, seed=1)
    mind = Mind([0.0])
    chosen: list[int] = []
    remember: Callable[..., int] = clockwork.lengths.choose

    def choose(record: DraftRecord, most: int) -> int:
        chosen.append(remember(record, most))
        return chosen[-1]

    clockwork.lengths.choose = choose  # type: ignore[method-assign]
    clockwork.run([mind], FREE, 3000)
    assert sum(chosen[:100]) <= 40
    assert set(chosen[100:]) <= {0, 1}
    assert sum(chosen[-1000:]) <= 80
    tries = [at for at, length in enumerate(chosen) if length]
    assert max(b - a for a, b in itertools.pairwise(tries)) <= MAX_PROBE_STEPS + 2
