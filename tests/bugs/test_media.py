"""Images: what a token stands for is part of its key, and no boundary splits one."""

from __future__ import annotations

from array import array

import pytest
from tests.bugs.scene import SHAPES, Scene, Shape, outputs

from milepost.core.hashing import MediaSpan
from milepost.sim.spec import Outcome

shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
some_shapes = pytest.mark.parametrize("shape", SHAPES[::4], ids=str)
PLACEHOLDER = 77
"""The token id every image token has in the prompt."""


def cached(outcome: Outcome) -> int:
    assert outcome.num_cached_tokens is not None
    return outcome.num_cached_tokens


def with_image(
    before: array, num_image: int, after: array, digest: bytes = b"red"
) -> tuple[array, tuple[MediaSpan, ...]]:
    """A prompt with one image of `num_image` tokens, and its span."""
    prompt = before + array("I", [PLACEHOLDER] * num_image) + after
    return prompt, (MediaSpan(len(before), len(before) + num_image, digest),)


def last_boundary(shape: Shape, prompt: array, media: tuple[MediaSpan, ...] = ()) -> int:
    """The deepest boundary before the last token that splits no image."""
    return max(
        position
        for position in range(0, len(prompt), shape.unit)
        if not any(span.start < position < span.end for span in media)
    )


# --- B33: an image is ignored after a text-only hit --------------------------------------------


@shapes
@pytest.mark.parametrize("num_before", [160, 131, 0])
def test_text_and_an_image_with_the_same_ids_share_only_what_lies_before(
    shape: Shape, num_before: int
) -> None:
    with Scene(shape) as scene:
        before, after = scene.tokens(num_before), scene.tokens(40)
        prompt, media = with_image(before, 100, after)
        wanted = ((num_before, "message"),)
        text = scene.send(prompt, max_tokens=5, wanted=wanted)
        image = scene.send(prompt, max_tokens=5, wanted=wanted, media=media)
        again = scene.send(prompt, max_tokens=5, wanted=wanted, media=media)
        text_again = scene.send(prompt, max_tokens=5)
        assert cached(image) <= num_before
        assert cached(image) >= shape.optional_floor(num_before)
        assert outputs(image) == outputs(again) != outputs(text) == outputs(text_again)
        assert cached(again) == last_boundary(shape, prompt, media)
        assert cached(text_again) == last_boundary(shape, prompt)


@shapes
@pytest.mark.parametrize("num_before", [100, 128])
def test_images_are_told_apart_by_content_and_by_place(shape: Shape, num_before: int) -> None:
    """Another image with the same ids, the same image one token later, and one that is longer."""
    with Scene(shape) as scene:
        before, after = scene.tokens(num_before), scene.tokens(90)
        prompt, red = with_image(before, 60, after)
        first = scene.send(prompt, media=red, max_tokens=4)
        blue = (MediaSpan(red[0].start, red[0].end, b"blue"),)
        later = (MediaSpan(red[0].start + 1, red[0].end + 1, b"red"),)
        longer = (MediaSpan(red[0].start, red[0].end + 1, b"red"),)
        answers = [outputs(first)]
        for media in (blue, later, longer):
            outcome = scene.send(prompt, media=media, max_tokens=4)
            assert cached(outcome) <= red[0].start
            answers.append(outputs(outcome))
        assert answers[0] != answers[1]
        assert cached(scene.send(prompt, media=red)) == last_boundary(shape, prompt, red)


@shapes
@pytest.mark.parametrize("cut", [1, 30, 59])
def test_no_boundary_splits_an_image(shape: Shape, cut: int) -> None:
    """A prompt that ends inside of the image of another one, and images longer than many units: a hit
    never lands inside, and the text before an image is reused all the same."""
    with Scene(shape, interval=shape.export_grid) as scene:
        before = scene.tokens(2 * shape.export_grid + 3)
        for num_image in (60, 5 * shape.unit):
            prompt, media = with_image(before, num_image, scene.tokens(20))
            for _ in range(2):
                outcome = scene.send(prompt, media=media)
                assert not media[0].start < cached(outcome) < media[0].end
            end = media[0].start + cut
            shorter = prompt[:end]
            inside = (MediaSpan(media[0].start, end, b"red"),)
            outcome = scene.send(shorter, media=inside)
            assert shape.optional_floor(len(before)) <= cached(outcome) <= len(before)


@shapes
@pytest.mark.parametrize("gap", [0, 1, 40])
def test_a_prompt_that_ends_with_images_reuses_the_text_before(shape: Shape, gap: int) -> None:
    """The tail lies inside of an image: the state goes below it, not nowhere."""
    with Scene(shape) as scene:
        before = scene.tokens(5 * shape.unit + 1)
        first, media = with_image(before, 70, scene.tokens(gap))
        prompt, more = with_image(first, 2 * shape.unit, scene.tokens(1), b"blue")
        media += more
        scene.send(prompt, media=media)
        again = scene.send(prompt, media=media)
        assert cached(again) == last_boundary(shape, prompt, media)
        assert cached(again) >= shape.floor(len(before))


# --- B43: text hits beside images --------------------------------------------------------------


@some_shapes
@pytest.mark.parametrize("num_tokens", [700, 3001])
def test_text_hits_are_the_same_on_a_server_that_sees_images(shape: Shape, num_tokens: int) -> None:
    """A text-only chat sent three times and continued, with and without images in other requests."""
    hits = []
    for has_images in (False, True):
        with Scene(shape.varied(step_tokens=max(shape.step_tokens, 200))) as scene:
            rows = []
            prompt = scene.tokens(num_tokens)
            others = [scene.tokens(150) for _ in range(4)]
            for round_number in range(3):
                if has_images:
                    picture, media = with_image(others[round_number][:70], 80, others[round_number][70:])
                    scene.submit(picture, media=media, max_tokens=3)
                    shared, media = with_image(prompt[:200], 90, others[round_number])
                    scene.submit(shared, media=media)
                outcome = scene.send(prompt, max_tokens=2)
                rows.append((cached(outcome), outputs(outcome)))
            outcome = scene.send(prompt + others[3])
            rows.append((cached(outcome), outputs(outcome)))
            hits.append(rows)
    assert hits[0][0] == (0, hits[1][0][1])
    assert hits[0][1:] == hits[1][1:]
    assert [count for count, _ in hits[0][1:3]] == [shape.floor(num_tokens - 1)] * 2


def test_the_reported_conversation_of_51600_tokens() -> None:
    with Scene(Shape(unit=64, step_tokens=4096)) as scene:
        prompt = scene.tokens(51_600)
        picture, media = with_image(scene.tokens(100), 1000, scene.tokens(50))
        scene.send(picture, media=media)
        for expected in (0, 51_584, 51_584):
            assert cached(scene.send(prompt)) == expected
