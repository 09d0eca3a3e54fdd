"""Prefixes that were read must be found again: no floor, no dead spacing, no dependence on load."""

from __future__ import annotations

import pytest
from tests.bugs.scene import LONG_STEP_SHAPES, SHAPES, Scene, Shape

from milepost.sim.spec import Outcome

shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
half_of_the_shapes = pytest.mark.parametrize("shape", SHAPES[1::2], ids=str)
some_shapes = pytest.mark.parametrize("shape", SHAPES[::3], ids=str)
long_step_shapes = pytest.mark.parametrize("shape", LONG_STEP_SHAPES, ids=str)


def cached(outcome: Outcome) -> int:
    assert outcome.num_cached_tokens is not None
    return outcome.num_cached_tokens


# --- B37, B45: a shared beginning inside two prompts -------------------------------------------


@some_shapes
@pytest.mark.parametrize("num_shared", [480, 552, 979, 560])
def test_a_marked_prefix_hits_at_the_second_request(shape: Shape, num_shared: int) -> None:
    with Scene(shape) as scene:
        shared = scene.tokens(num_shared)
        wanted = ((num_shared, "message"),)
        first = scene.send(shared + scene.tokens(shape.unit + 7), wanted=wanted)
        second = scene.send(shared + scene.tokens(31), wanted=wanted)
        assert cached(first) == 0
        assert shape.optional_floor(num_shared) <= cached(second) <= num_shared
        if shape.export_grid == shape.unit:
            assert cached(second) == shape.floor(num_shared)


@half_of_the_shapes
@pytest.mark.parametrize(("num_shared", "num_first"), [(480, 30), (560, 1386), (131, 131), (64, 1)])
def test_an_unmarked_prefix_hits_at_the_third_request(shape: Shape, num_shared: int, num_first: int) -> None:
    """The second request leaves a state where the two paths part; pages alone are reported as such."""
    with Scene(shape) as scene:
        shared = scene.tokens(num_shared)
        scene.send(shared + scene.tokens(num_first))
        second = scene.submit(shared + scene.tokens(45))
        scene.world.schedule()
        report = scene.request(second).reuse
        assert report.num_cached_tokens + report.num_tokens_lost_to_missing_state == shape.floor(num_shared)
        scene.run_until(second)
        third = cached(scene.send(shared + scene.tokens(77)))
        assert shape.optional_floor(num_shared) <= third <= num_shared
        if shape.export_grid == shape.unit:
            assert shape.floor(num_shared) in scene.state_positions(shared)
            assert third == shape.floor(num_shared)


# --- B38: the shortest prefix that can hit ----------------------------------------------------


@shapes
def test_the_floor_that_is_told_is_the_floor_that_hits(shape: Shape) -> None:
    with Scene(shape) as scene:
        floor = scene.scheduler.stats().smallest_hit_prompt
        assert floor == shape.unit + 1
        for length in (1, 2, shape.unit - 1, shape.unit, floor, floor + 1, 2 * shape.unit):
            prompt = scene.tokens(length)
            first = scene.send(prompt)
            again = scene.send(prompt)
            assert cached(first) == 0
            assert (cached(again) > 0) == (length >= floor)
            assert again.reuse_reason == ("hit" if length >= floor else "too_short")


# --- B39: the only checkpoint lands in the request's own tokens --------------------------------


@long_step_shapes
@pytest.mark.parametrize("is_marked", [True, False])
@pytest.mark.parametrize("at_once", [True, False])
def test_groups_of_prompts_share_their_prefix(shape: Shape, is_marked: bool, at_once: bool) -> None:
    """Groups of prompts, 1,500 tokens shared and 700 of their own, all in one long step."""
    num_groups, num_members = (8, 8) if at_once and shape.unit == 64 else (2, 4)
    num_shared, num_own = 1500, 700
    wide = shape.varied(step_tokens=2400)
    with Scene(wide) as scene:
        groups = [scene.tokens(num_shared) for _ in range(num_groups)]
        wanted = ((num_shared, "message"),) if is_marked else ()
        members: list[list[Outcome]] = [[] for _ in groups]
        for _ in range(num_members):
            for index, shared in enumerate(groups):
                members[index].append(scene.submit(shared + scene.tokens(num_own), wanted=wanted))
                if not at_once:
                    scene.run_until(members[index][-1])
        scene.run_until(*[outcome for group in members for outcome in group])
        for group in members:
            first_to_hit = 1 if is_marked or at_once else 2
            for outcome in group[first_to_hit:]:
                assert cached(outcome) >= wide.optional_floor(num_shared)


# --- B42: hits depend on load -----------------------------------------------------------------


def boundaries_under_load(shape: Shape, num_decoding: int) -> tuple[set[int], list[int]]:
    """Checkpoints of one prompt, and hits of prompts that share parts of it, beside busy decoders."""
    with Scene(shape, seed=7, interval=4 * shape.export_grid, decode_interval=0) as scene:
        prompt = scene.tokens(16 * shape.unit + 11)
        cuts = sorted(scene.rng.randrange(1, len(prompt)) for _ in range(3))
        probes = [prompt[:cut] + scene.tokens(5) for cut in cuts]
        busy = [scene.submit(scene.tokens(3 + index), max_tokens=1000) for index in range(num_decoding)]
        while busy and not all(outcome.output_tokens for outcome in busy):
            scene.world.step()
        wanted = ((cuts[0] // 2, "history"), *((cut, "message") for cut in cuts))
        scene.send(prompt, wanted=wanted)
        positions = scene.state_positions(prompt)
        hits = [scene.hit(probe) for probe in probes]
        for outcome in busy:
            scene.world.abort(outcome.request_id)
        return set(positions), hits


@pytest.mark.parametrize("grid", [1, 16, 64, 48, None])
@pytest.mark.parametrize("unit", [16, 32])
def test_checkpoints_and_hits_do_not_depend_on_load(unit: int, grid: int | None) -> None:
    """Whatever is left of a step for the prompt: what an idle engine keeps is kept, what hits there hits.

    Where less than a unit is left, an engine keeps more on its way, so that an abort loses nothing.
    """
    shape = Shape(unit=unit, grid=grid, step_tokens=60 * unit)
    positions, hits = boundaries_under_load(shape, 0)
    assert any(hits)
    for step_tokens, num_decoding in ((8 + 200, 8), (8 + unit, 8), (6, 3), (3 * unit + 1, 1)):
        busy = boundaries_under_load(shape.varied(step_tokens=step_tokens), num_decoding)
        assert positions <= busy[0], (step_tokens, num_decoding)
        assert all(now >= idle for now, idle in zip(busy[1], hits, strict=True)), (step_tokens, num_decoding)
        if step_tokens - num_decoding >= 2 * unit:
            assert busy == (positions, hits)


# --- B44: a byte-identical resend --------------------------------------------------------------


FLAGS = [
    {},
    {"interval": 512},
    {"interval": None},
    {"decode_interval": 0},
    {"max_states_per_path": 1},
    {"max_states_per_path": 2, "interval": 64},
    {"interval": 0, "decode_interval": 64},
]


@pytest.mark.parametrize("num_tokens", [561, 1700])
@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("grid", [1, 16, 64, None])
def test_a_resend_recomputes_less_than_a_unit(num_tokens: int, flags: dict, grid: int | None) -> None:
    for unit, step_tokens in ((16, 512), (32, 90), (64, 4096)):
        shape = Shape(unit=unit, grid=grid, step_tokens=step_tokens)
        with Scene(shape, **flags) as scene:
            prompt = scene.tokens(num_tokens)
            scene.send(prompt, max_tokens=3)
            for _ in range(2):
                assert cached(scene.send(prompt, max_tokens=3)) == shape.floor(num_tokens - 1)


# --- B27: the smallest remainder ---------------------------------------------------------------


@shapes
@pytest.mark.parametrize("num_units", [1, 5])
def test_a_full_hit_recomputes_a_single_row(shape: Shape, num_units: int) -> None:
    with Scene(shape) as scene:
        prompt = scene.tokens(num_units * shape.unit + 1)
        first = scene.send(prompt, max_tokens=4)
        again = scene.send(prompt, max_tokens=4)
        assert cached(again) == len(prompt) - 1
        assert again.num_computed_tokens == 1 + 3
        assert again.output_tokens == first.output_tokens


# --- B52, B53, B54, B55: appends ---------------------------------------------------------------


@long_step_shapes
def test_a_long_prompt_and_a_short_append(shape: Shape) -> None:
    """B52: 12,146 tokens, then 31 more: at most these and a unit are computed."""
    with Scene(shape) as scene:
        prompt = scene.tokens(12_146)
        scene.send(prompt)
        later = scene.send(prompt + scene.tokens(31))
        assert later.num_computed_tokens <= 31 + shape.unit


@shapes
@pytest.mark.parametrize("appended", [1, 31])
def test_no_length_is_too_short_for_an_append(shape: Shape, appended: int) -> None:
    """B53: from one token to three units, every length is continued from its last boundary."""
    with Scene(shape) as scene:
        unit = shape.unit
        for length in (1, 2, unit - 1, unit, unit + 1, 40, 2 * unit - 1, 2 * unit, 3 * unit + 1):
            prompt = scene.tokens(length)
            scene.send(prompt)
            assert cached(scene.send(prompt + scene.tokens(appended))) == shape.floor(length)


@long_step_shapes
@pytest.mark.parametrize("interval", [192, 8256])
def test_a_spacing_rule_never_erases_the_newest_checkpoint(shape: Shape, interval: int) -> None:
    """B54: turns of 300 to 6,241 tokens against a spacing they never reach, or reach often."""
    with Scene(shape, interval=interval - interval % shape.unit) as scene:
        prompt = scene.tokens(0)
        for grown in (300, 47, 1, 900, 6241, 16):
            reached = len(prompt)
            prompt = prompt + scene.tokens(grown)
            outcome = scene.send(prompt)
            assert cached(outcome) >= shape.floor(reached)
            assert shape.floor(len(prompt) - 1) in scene.state_positions(prompt)


@some_shapes
@pytest.mark.parametrize("num_spare_states", [2, 40])
@pytest.mark.parametrize("growth", ["doubled", "steady", "mixed"])
def test_reuse_never_decreases_in_an_append_only_chat(
    shape: Shape, num_spare_states: int, growth: str
) -> None:
    """B55: twenty turns, with room for everything or for the pages of the last turn and two states."""
    sizes = {
        "doubled": [min(40 * 2**turn, 1200) for turn in range(10)],
        "steady": [137] * 20,
        "mixed": [3 + 97 * turn % 211 for turn in range(20)],
    }[growth]
    total = sum(sizes) + 2 * len(sizes)
    budget = shape.bytes_of(num_units=total // shape.unit + 2, num_states=1 + num_spare_states)
    brisk = shape.varied(step_tokens=max(150, shape.step_tokens))
    with Scene(brisk, cache_bytes=budget) as scene:
        prompt = scene.tokens(0)
        reused = 0
        for turn, size in enumerate(sizes):
            processed = len(prompt) - 1 if turn else 0
            prompt = prompt + scene.tokens(size)
            outcome = scene.send(prompt, max_tokens=2, conversation="chat")
            assert cached(outcome) >= reused
            assert cached(outcome) >= shape.floor(processed), turn
            reused = cached(outcome)
            prompt = prompt + outcome.output_tokens


# --- B61: checkpoints at the interval ----------------------------------------------------------


@long_step_shapes
@pytest.mark.parametrize("parts", [2.4, 7.1, 1.0, 0.9])
@pytest.mark.parametrize("multiple", [1, 3])
def test_every_multiple_of_the_interval_is_stored(shape: Shape, parts: float, multiple: int) -> None:
    """B61: a prompt of 2.4 intervals keeps a state at 1 and at 2."""
    interval = multiple * shape.export_grid
    with Scene(shape, interval=interval) as scene:
        prompt = scene.tokens(round(parts * interval))
        scene.send(prompt)
        positions = scene.state_positions(prompt)
        assert set(range(interval, len(prompt), interval)) <= set(positions)
        assert shape.floor(len(prompt) - 1) in [*positions, 0]
        for position in positions[::3]:
            assert cached(scene.send(prompt[:position] + scene.tokens(3))) == position


@pytest.mark.parametrize("num_tokens", [9890, 4096 * 7 + 5])
def test_the_reported_sizes_at_an_interval_of_4096(num_tokens: int) -> None:
    with Scene(Shape(unit=64, step_tokens=2048), interval=4096) as scene:
        prompt = scene.tokens(num_tokens)
        scene.send(prompt)
        positions = set(scene.state_positions(prompt))
        assert set(range(4096, num_tokens, 4096)) <= positions


# --- B63: a state belongs to a session ---------------------------------------------------------


@long_step_shapes
@pytest.mark.parametrize("sessions", [("one", "two"), ("one", None), (None, "two")])
def test_states_are_addressed_by_content(shape: Shape, sessions: tuple[str | None, str | None]) -> None:
    with Scene(shape) as scene:
        prompt = scene.tokens(5000)
        first = scene.send(prompt, conversation=sessions[0], max_tokens=2)
        second = scene.send(prompt, conversation=sessions[1], max_tokens=2)
        assert cached(first) == 0
        assert cached(second) == shape.floor(4999)
