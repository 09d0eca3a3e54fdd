"""Scenarios of speculation over recurrent states. Every answer is compared with a cold run by the world.

A draft that is not accepted must leave no trace: not in a state, not in a page, not in what a lookup finds.
"""

from __future__ import annotations

from array import array

import pytest
from tests.bugs.scene import SHAPES, Scene, Shape

from milepost.errors import ConfigError
from milepost.sim.drafting import DraftingConfig
from milepost.sim.workload import greedy, seeded

RATES = {"all accepted": 0.0, "half accepted": 0.5, "none accepted": 1.0}
MANY_ROWS = [shape.varied(step_tokens=max(64, shape.step_tokens)) for shape in SHAPES[::4]]
"""Drafts get half of the rows of a step; with a handful of rows there would be none."""


def drafts(rate: str, num_draft_tokens: int = 3, *, is_ragged: bool = False) -> DraftingConfig:
    return DraftingConfig(num_draft_tokens, RATES[rate], is_ragged=is_ragged)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("shape", MANY_ROWS, ids=str)
def test_pages_and_states_are_found_at_one_position(shape: Shape, rate: str) -> None:
    """A prompt of whole units and its answer, then the prompt with another continuation."""
    unit = shape.unit
    with Scene(shape, drafting=drafts(rate)) as scene:
        prompt = scene.tokens(4 * unit)
        scene.send(prompt, 20)
        follower = scene.send(prompt + scene.tokens(40), 20)
        assert follower.num_cached_tokens == 4 * unit
        assert scene.counters.num_draft_tokens > 0


def test_hits_of_a_long_prefix_do_not_depend_on_the_number_of_drafts() -> None:
    shape = Shape(step_tokens=512)
    prefix_tokens, cached = 5018, []
    for num_draft_tokens in range(9):
        with Scene(shape, drafting=drafts("half accepted", num_draft_tokens)) as scene:
            prompt = scene.tokens(prefix_tokens)
            sent = [scene.send(prompt, 12).num_cached_tokens for _ in range(3)]
            cached.append(sent)
    assert cached == [[0, 5008, 5008]] * 9


@pytest.mark.parametrize("rate", RATES)
def test_clients_that_share_a_long_prefix_get_the_answers_of_a_cold_run(rate: str) -> None:
    with Scene(Shape(step_tokens=512), drafting=drafts(rate), interval=None) as scene:
        shared = scene.tokens(4410)
        first, second = shared + scene.tokens(30), shared + scene.tokens(1600)
        for _ in range(2):
            for prompt in (first, second, first):
                scene.send(prompt, 40, sampling=greedy())


@pytest.mark.parametrize("rate", RATES)
def test_nothing_stays_wrong_after_a_chain_of_turns(rate: str) -> None:
    """Ten turns, three times, then probes: they are answered as in a fresh process."""
    with Scene(Shape(step_tokens=128), drafting=drafts(rate, is_ragged=True)) as scene:
        for _ in range(3):
            history = scene.tokens(50)
            for _ in range(10):
                turn = scene.send(history, 21)
                history = history + turn.output_tokens + scene.tokens(9)
        for length in (1, 15, 16, 17, 63, 64, 65):
            probe = scene.tokens(length)
            scene.send(probe, 20)
            scene.send(probe, 20, sampling=seeded(scene.rng))


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("num_recurrent", [1, 2])
def test_one_row_beside_a_row_with_drafts(rate: str, num_recurrent: int) -> None:
    """One request verifies drafts while another resumes with a single token left: no padding reaches it."""
    shape = Shape(num_recurrent=num_recurrent, step_tokens=64)
    with Scene(shape, drafting=drafts(rate)) as scene:
        known = scene.tokens(32)
        scene.send(known, 1)
        decoding = scene.submit(scene.tokens(20), 60)
        while len(decoding.output_tokens) < 8:
            scene.world.step()
        resumed = scene.submit(known + scene.tokens(1), 5)
        scene.run_until(resumed)
        assert resumed.num_cached_tokens == 32


@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("rate", RATES)
def test_drafts_cross_boundaries(rate: str, offset: int, num_draft_tokens: int) -> None:
    """Prompts that end at, before and behind a boundary; passes that end on, before and behind the next."""
    shape = Shape(unit=16, num_recurrent=2, step_tokens=64)
    with Scene(shape, drafting=drafts(rate, num_draft_tokens)) as scene:
        prompt = scene.tokens(48 + offset)
        sent = scene.send(prompt, 40)
        total = 48 + offset + 40
        echo = scene.send(prompt + sent.output_tokens + scene.tokens(1), 3)
        assert echo.num_cached_tokens == shape.floor(total - 1)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("room", [0, 1, 2, 3])
def test_accepted_drafts_fit_what_was_reserved(rate: str, room: int) -> None:
    """A budget of little more than the request: drafts are shortened, never written where nothing is."""
    shape = Shape(unit=16, step_tokens=64)
    budget = shape.bytes_of(num_units=5, num_states=1 + room)
    with Scene(shape, drafting=drafts(rate, 4), cache_bytes=budget, max_model_len=80) as scene:
        sent = scene.send(scene.tokens(15), 60)
        assert len(sent.output_tokens) == 60
        assert scene.counters.num_preemptions == 0


@pytest.mark.parametrize("num_draft_tokens", [1, 4, 8])
def test_a_checkpoint_holds_accepted_tokens_only(num_draft_tokens: int) -> None:
    """Every answer is cut at each of its tokens, where drafts were accepted and rejected in turn."""
    shape = Shape(unit=16, num_recurrent=2, step_tokens=64)
    with Scene(shape, drafting=drafts("half accepted", num_draft_tokens), decode_interval=16) as scene:
        prompt = scene.tokens(19)
        whole = prompt + scene.send(prompt, 50).output_tokens
        assert scene.counters.checkpoints_by_reason["decode"] >= 3
        for cut in range(20, len(whole) + 1):
            follower = scene.send(whole[:cut], 4)
            assert follower.num_cached_tokens == shape.floor(cut - 1)


@pytest.mark.parametrize("num_draft_tokens", range(9))
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("grid", [1, 16, None])
def test_every_configuration_starts_or_says_why_not(
    num_draft_tokens: int, caching: bool, grid: int | None
) -> None:
    shape = Shape(grid=grid, step_tokens=32)
    smallest = shape.bytes_of(num_units=1, num_states=1)
    drafting = drafts("half accepted", num_draft_tokens)
    with pytest.raises(ConfigError, match="cache_bytes"):
        Scene(shape, cache_bytes=smallest - 1, drafting=drafting, enable_prefix_caching=caching)
    with Scene(shape, cache_bytes=smallest, drafting=drafting, enable_prefix_caching=caching) as scene:
        assert len(scene.send(array("I", [1, 2, 3]), 13).output_tokens) == 13
