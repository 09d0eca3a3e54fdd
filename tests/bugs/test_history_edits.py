"""The next prompt differs somewhere: what lies before is reused, what lies behind never leaks into it.

Positions named `history`, `message` and `marker` are what the renderer of a chat would give.
"""

from __future__ import annotations

from array import array

import pytest
from tests.bugs.scene import LONG_STEP_SHAPES, SHAPES, Scene, Shape, outputs

from milepost.core.hashing import CacheDomain
from milepost.sim.spec import Outcome
from milepost.sim.workload import greedy, seeded

shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
half_of_the_shapes = pytest.mark.parametrize("shape", SHAPES[::2], ids=str)
some_shapes = pytest.mark.parametrize("shape", SHAPES[1::3], ids=str)
long_step_shapes = pytest.mark.parametrize("shape", LONG_STEP_SHAPES, ids=str)


def cached(outcome: Outcome) -> int:
    assert outcome.num_cached_tokens is not None
    return outcome.num_cached_tokens


def changed(tokens: array, position: int) -> array:
    """`tokens` with another token at `position`."""
    edited = tokens[:]
    edited[position] ^= 1
    return edited


# --- B32: regenerate and trim ------------------------------------------------------------------


@half_of_the_shapes
@pytest.mark.parametrize(("num_prompt", "num_generated"), [(100, 50), (64, 65), (17, 130)])
def test_regenerate_answers_as_if_nothing_had_been_generated(
    shape: Shape, num_prompt: int, num_generated: int
) -> None:
    """Greedy again, then with other seeds: the state comes from the prompt, never from the answer."""
    with Scene(shape) as scene:
        prompt = scene.tokens(num_prompt)
        first = scene.send(prompt, max_tokens=num_generated)
        again = scene.send(prompt, max_tokens=num_generated)
        assert outputs(again) == outputs(first)
        assert cached(again) == shape.floor(num_prompt - 1)
        other = [scene.submit(prompt, max_tokens=7, sampling=seeded(scene.rng)) for _ in range(3)]
        scene.run_until(*other)
        assert {cached(outcome) for outcome in other} == {shape.floor(num_prompt - 1)}


@half_of_the_shapes
@pytest.mark.parametrize("kept", [0, 1, 33, 49])
def test_an_answer_that_is_cut_and_continued_otherwise(shape: Shape, kept: int) -> None:
    """Trim to prompt + `kept` tokens of the answer, then go on with other tokens, or let the model go on."""
    with Scene(shape) as scene:
        prompt = scene.tokens(100)
        first = scene.send(prompt, max_tokens=50)
        trimmed = prompt + first.output_tokens[:kept]
        for continued in (trimmed, trimmed + scene.tokens(20)):
            outcome = scene.send(continued, max_tokens=10)
            assert shape.floor(99) <= cached(outcome) <= len(trimmed)
        same = scene.send(trimmed, max_tokens=50 - kept)
        assert outputs(same) == outputs(first)[kept:]


@some_shapes
def test_a_conversation_is_rewound_turn_by_turn(shape: Shape) -> None:
    """Six turns, then each prefix of them again, the newest first, and each once more with another end."""
    with Scene(shape) as scene:
        history = scene.tokens(40)
        ends = []
        for _ in range(6):
            history = history + scene.tokens(37)
            ends.append(len(history))
            history = history + scene.send(history, max_tokens=21).output_tokens
        for end in reversed(ends):
            assert cached(scene.send(history[:end], max_tokens=21)) >= shape.floor(end - 1)
            assert cached(scene.send(history[:end] + scene.tokens(4))) >= shape.floor(end - 1)


# --- B50: the answer is echoed -----------------------------------------------------------------


@half_of_the_shapes
@pytest.mark.parametrize("num_prompt", [96, 101])
def test_the_echoed_answer_is_reused_to_its_end(shape: Shape, num_prompt: int) -> None:
    """Only the last token of an answer was never processed."""
    unit = shape.unit
    with Scene(shape) as scene:
        for num_generated in (1, 2, unit - 1, unit, unit + 1, 3 * unit + 5):
            prompt = scene.tokens(num_prompt)
            first = scene.send(prompt, max_tokens=num_generated)
            echoed = prompt + first.output_tokens
            processed = len(echoed) - 1
            assert cached(scene.send(echoed + scene.tokens(30))) == shape.floor(processed)


@half_of_the_shapes
@pytest.mark.parametrize("end", ["stop token", "stop string", "abort"])
def test_the_echo_of_an_answer_that_ended_early(shape: Shape, end: str) -> None:
    """Ended by the model, by the engine, or by the client who then goes on with what was shown."""
    place = shape.unit + 3
    with Scene(shape, vocab_size=64) as scene:
        answer = outputs(scene.send(scene.tokens(3 * shape.unit + 2), max_tokens=2 * shape.unit))
    stops = [answer[place]] if end == "stop token" else []
    with Scene(shape, vocab_size=64) as scene:
        prompt = scene.tokens(3 * shape.unit + 2)
        first = scene.submit(prompt, max_tokens=2 * shape.unit, sampling=greedy(stops))
        while first.finish_reason is None and len(first.output_tokens) < place:
            scene.world.step()
        if end == "stop string":
            scene.world.finish(first.request_id)
        elif end == "abort":
            scene.world.abort(first.request_id)
        scene.run_until(first)
        assert first.finish_reason == ("abort" if end == "abort" else "stop")
        assert outputs(first) == answer[: len(first.output_tokens)]
        echoed = prompt + first.output_tokens
        assert cached(scene.send(echoed + scene.tokens(9))) == shape.floor(len(echoed) - 1)


# --- B57, B69: an insertion or an edit in the middle -------------------------------------------


@long_step_shapes
@pytest.mark.parametrize("place", ["message", "interval", "second sighting"])
def test_what_lies_before_an_insertion_is_reused(shape: Shape, place: str) -> None:
    """B57: AAAABBBB, then AAAACBBBB, with parts of 512 tokens."""
    kept = 4 * 512
    with Scene(shape, interval=8 * shape.export_grid if place == "interval" else 0) as scene:
        head, tail = scene.tokens(kept), scene.tokens(kept)
        wanted = ((kept, "message"),) if place == "message" else ()
        scene.send(head + tail, wanted=wanted)
        inserted = [head + scene.tokens(512) + tail for _ in range(2)]
        first, second = (scene.send(prompt, wanted=wanted) for prompt in inserted)
        if place == "message":
            assert cached(first) >= shape.optional_floor(kept)
        if place == "interval":
            assert cached(first) >= kept - 8 * shape.export_grid
        assert cached(second) >= shape.optional_floor(kept)
        assert cached(second) <= kept


@pytest.mark.parametrize("edited_at", [3769, 1, 1023, 1024, 4608, 5265])
@pytest.mark.parametrize(("unit", "grid"), [(32, 1), (64, 64), (16, None)])
def test_an_early_edit_costs_at_most_one_interval(edited_at: int, unit: int, grid: int | None) -> None:
    """B69: 5,266 tokens with a checkpoint every 1,024; one token in the middle changes."""
    shape = Shape(unit=unit, grid=grid, step_tokens=700)
    with Scene(shape, interval=1024) as scene:
        prompt = scene.tokens(5266)
        scene.send(prompt)
        outcome = scene.send(changed(prompt, edited_at))
        assert outcome.num_computed_tokens <= 1024 + len(prompt) - edited_at
        assert cached(outcome) <= edited_at


# --- B66: thinking is stripped from history ----------------------------------------------------


@long_step_shapes
@pytest.mark.parametrize(("num_thought", "num_answer"), [(500, 50), (33, 1)])
def test_stripped_thoughts_cost_nothing_before_them(shape: Shape, num_thought: int, num_answer: int) -> None:
    """Turn 1: 2,000 tokens, then thoughts and an answer. Turn 2 leaves the thoughts out."""
    with Scene(shape) as scene:
        prompt = scene.tokens(2000)
        wanted = ((len(prompt), "history"),)
        first = scene.send(prompt, max_tokens=num_thought + num_answer, wanted=wanted, conversation="one")
        answer = first.output_tokens[num_thought:]
        second_prompt = prompt + answer + scene.tokens(60)
        second = scene.send(
            second_prompt, max_tokens=9, wanted=((len(second_prompt), "history"),), conversation="one"
        )
        assert cached(second) >= shape.floor(2000)
        assert cached(second) <= 2000 + num_answer


@some_shapes
def test_the_unreachable_tail_goes_before_what_is_reached(shape: Shape) -> None:
    """Under pressure the thoughts nobody can ask for again are given up before the conversation."""
    sizes = {"prompt": 12 * shape.unit, "thoughts": 10 * shape.unit}
    brisk = shape.varied(step_tokens=max(shape.step_tokens, shape.unit))
    total_units = 2 * (sizes["prompt"] + sizes["thoughts"]) // shape.unit
    budget = shape.bytes_of(num_units=total_units, num_states=8)
    with Scene(brisk, cache_bytes=budget, decode_interval=0) as scene:
        prompt = scene.tokens(sizes["prompt"])
        first = scene.send(prompt, max_tokens=sizes["thoughts"], wanted=((len(prompt), "history"),))
        path = prompt + first.output_tokens
        for _ in range(3):
            answered = prompt + scene.tokens(5)
            assert cached(scene.send(answered)) == len(prompt)
        while scene.hit(path) > len(prompt):
            assert scene.world.evict(1)
        assert scene.hit(prompt + scene.tokens(5)) == len(prompt)


# --- B67, B68: one token near the start, keys in another order ---------------------------------


@long_step_shapes
@pytest.mark.parametrize("position", [8, 0, 31, 64, 1000])
def test_the_index_of_first_divergence_is_told(shape: Shape, position: int) -> None:
    """B67: a template setting at about token 8 of a long prompt changes everything behind it."""
    with Scene(shape) as scene:
        prompt = scene.tokens(1200)
        scene.send(prompt, wanted=((len(prompt), "history"),))
        scene.send(scene.tokens(90))
        outcome = scene.submit(changed(prompt, position))
        scene.world.schedule()
        report = scene.request(outcome).reuse
        scene.run_until(outcome)
        assert report.divergence_position == position
        assert cached(outcome) <= position
        if position < shape.unit:
            assert report.reason in ("diverged", "cold")
            assert report.num_cached_tokens == 0
        else:
            assert report.num_tokens_lost_to_missing_state == shape.floor(position) - cached(outcome)


@shapes
@pytest.mark.parametrize("num_before", [150, 64, 5])
def test_two_renderings_of_one_tool_call(shape: Shape, num_before: int) -> None:
    """B68: keys in another order: the divergence is named, the text before it reused, the answer is
    that of the new rendering."""
    with Scene(shape) as scene:
        before, after = scene.tokens(num_before), scene.tokens(70)
        keys = [scene.tokens(6) for _ in range(3)]
        wanted = ((num_before, "history"),)
        renderings = [
            before + keys[a] + keys[b] + keys[c] + after for a, b, c in ((0, 1, 2), (0, 2, 1), (2, 1, 0))
        ]
        scene.send(renderings[0], wanted=wanted, max_tokens=3)
        expected = [num_before + 6, num_before]
        for rendering, divergence in zip(renderings[1:], expected, strict=True):
            outcome = scene.submit(rendering, wanted=wanted, max_tokens=3)
            scene.world.schedule()
            report = scene.request(outcome).reuse
            scene.run_until(outcome)
            assert report.divergence_position == divergence
            assert shape.floor(num_before) <= cached(outcome) <= divergence


def test_a_divergence_in_another_tenants_path_is_not_told() -> None:
    with Scene() as scene:
        prompt = scene.tokens(200)
        scene.send(prompt, domain=CacheDomain(b"alice"))
        outcome = scene.submit(changed(prompt, 100), domain=CacheDomain(b"bob"))
        scene.world.schedule()
        report = scene.request(outcome).reuse
        assert report.divergence_position is None
        assert report.reason == "cold"
        assert report.num_matched_tokens == {"attention 0": 0, "recurrent 0": 0}
