"""milepost-tiny on the real worker: a wrongly restored state or page is a visible error.

Restores are made by hand, as plans: a first request processes a conversation and exports states at the
match-unit boundary behind the asked fact, one unit earlier and one token earlier; a second request starts
there with the first one's pages and a state of the test's choice.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")

import torch  # noqa: E402
from tests.support.driver import Driver, TrackedRequest  # noqa: E402
from tests.support.recall import RecallCase, RecallCases  # noqa: E402

from milepost.models import load_model  # noqa: E402
from milepost.models.layout import CONV_TAIL_FIELD, LATENT_FIELD, STATE_MATRIX_FIELD  # noqa: E402

FOLDER = Path(str(resources.files("milepost"))) / "assets" / "milepost-tiny"
FILLER = Path(__file__).parents[1] / "data" / "the_tempest.txt"
UNIT = 32
CACHE_BYTES = 64 << 20
RIGHT_RESTORE_BOUND = 1e-4
"""Largest log-probability shift of a right restore; every wrong one must exceed it."""
DISTANCE = 100
NUM_CASES = 20
NUM_PROMPTS = 9
WORD_KINDS = ("colour", "home", "owner")

RUNNING, SECOND, EXACT, UNIT_EARLY, TOKEN_EARLY, FOREIGN, DAMAGED = range(7)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def cases(tokenizer: Any) -> RecallCases:
    return RecallCases(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False),
        FILLER.read_text(encoding="utf-8"),
    )


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(FOLDER, dtype="float32")


@dataclass
class Scene:
    """A processed conversation, its exported states, another conversation's state at the same position."""

    driver: Driver
    tokens: tuple[int, ...]
    point: int
    first: TrackedRequest
    foreign: TrackedRequest

    def restored(self, slot: int, pages: Sequence[int] | None = None) -> TrackedRequest:
        """A request that starts at the restore point."""
        shared = list(self.first.pages[: self.point // UNIT]) if pages is None else list(pages)
        return self.driver.sequence(
            self.tokens, SECOND, start_slot=slot, pages=shared, num_processed=self.point
        )

    def rest(self, slot: int, pages: Sequence[int] | None = None) -> torch.Tensor:
        """Log-probabilities of every token behind the restore point [rows, vocabulary]."""
        sequence = self.restored(slot, pages)
        plan = self.driver.plan((sequence, len(self.tokens) - self.point))
        return self.driver.logits(plan).log_softmax(-1)

    def mix(self, *, tail_slot: int | None, matrix_slot: int | None) -> int:
        """A damaged slot: conv tail and state matrix from these slots, None = zeros."""
        sources = {CONV_TAIL_FIELD: tail_slot, STATE_MATRIX_FIELD: matrix_slot}
        for (_, name), view in self.driver.worker.pools.fields.items():
            if name in sources:
                source = sources[name]
                view[DAMAGED] = 0 if source is None else view[source]
        return DAMAGED


def make_scene(model: Any, tokens: Sequence[int], foreign_tokens: Sequence[int], point: int) -> Scene:
    driver = Driver(model, match_unit=UNIT, cache_bytes=CACHE_BYTES)
    first = driver.sequence(tokens, RUNNING)
    exports = [(point - UNIT, UNIT_EARLY), (point - 1, TOKEN_EARLY), (point, EXACT)]
    driver.run(driver.plan((first, len(tokens)), exports={first.request_id: exports}))
    foreign = driver.sequence(foreign_tokens, FOREIGN)
    driver.run(driver.plan((foreign, point)))
    return Scene(driver, tuple(tokens), point, first, foreign)


def recall_scene(model: Any, cases: RecallCases, seed: int) -> tuple[Scene, RecallCase]:
    """The asked fact lies in the last unit before the restore point."""
    case = cases.make(seed, DISTANCE, match_unit=UNIT)
    other = cases.make(seed + 1000, 2 * DISTANCE)
    point = -(-case.fact_end // UNIT) * UNIT
    tokens = case.prompt_ids + case.answer_ids
    return make_scene(model, tokens, other.prompt_ids[:point], point), case


def text_scene(model: Any, cases: RecallCases, seed: int, num_tokens: int = 6 * UNIT) -> Scene:
    """Plays; one unit of text behind the restore point."""
    source = random.Random(f"text/{seed}")
    start = cases.encode("[BOS]")
    tokens = start + tuple(cases.filler(source, num_tokens + UNIT))
    foreign = start + tuple(cases.filler(source, num_tokens))
    return make_scene(model, tokens, foreign, num_tokens)


def value_is_right(case: RecallCase, log_probs: torch.Tensor) -> bool:
    rows = log_probs[-len(case.value_ids) - 1 : -1]
    return rows.argmax(-1).tolist() == list(case.value_ids)


# -------------------------------------------------------------------------------------------------- recall


def greedy_answer(model: Any, case: RecallCase) -> list[int]:
    driver = Driver(model, match_unit=UNIT, cache_bytes=CACHE_BYTES)
    sequence = driver.sequence(case.prompt_ids, RUNNING)
    answer: list[int] = []
    pending = len(case.prompt_ids)
    for _ in case.answer_ids:
        logits = driver.logits(driver.plan((sequence, pending)))
        answer.append(int(logits[-1].argmax()))
        sequence.tokens.append(answer[-1])
        pending = 1
    return answer


def count_right(model: Any, cases: RecallCases, distance: int, num_cases: int) -> int:
    made = [cases.make(seed, distance) for seed in range(num_cases)]
    return sum(greedy_answer(model, case) == list(case.answer_ids) for case in made)


def test_recall_at_500_tokens(model: Any, cases: RecallCases) -> None:
    assert count_right(model, cases, 500, 12) >= 11


@pytest.mark.slow
@pytest.mark.parametrize("distance", [1000, 2000, 4000])
def test_recall_at_long_distance(model: Any, cases: RecallCases, distance: int) -> None:
    assert count_right(model, cases, distance, 20) >= 18


# ------------------------------------------------------------------------------- recurrent state, by recall


def test_recall_falls_with_a_wrong_state(model: Any, cases: RecallCases) -> None:
    right: dict[str, int] = {}
    for seed in range(NUM_CASES):
        scene, case = recall_scene(model, cases, seed)
        slots: dict[str, Callable[[], int]] = {
            "exact": lambda: EXACT,
            "zero": lambda scene=scene: scene.mix(tail_slot=None, matrix_slot=None),
            "foreign": lambda: FOREIGN,
            "unit early": lambda: UNIT_EARLY,
        }
        for name, slot in slots.items():
            right[name] = right.get(name, 0) + value_is_right(case, scene.rest(slot()))
    assert right["exact"] >= 0.9 * NUM_CASES
    for name in ("zero", "foreign", "unit early"):
        assert right["exact"] - right[name] >= 0.5 * NUM_CASES, right


# ----------------------------------------------------------------- recurrent state, by greedy continuation


def greedy_rest(scene: Scene, slot: int, num_tokens: int) -> list[int]:
    """Greedy continuation behind the restore point; its first token is given."""
    shared = list(scene.first.pages[: scene.point // UNIT])
    sequence = scene.driver.sequence(
        scene.tokens[: scene.point + 1], SECOND, start_slot=slot, pages=shared, num_processed=scene.point
    )
    for _ in range(num_tokens):
        logits = scene.driver.logits(scene.driver.plan((sequence, 1)))
        sequence.tokens.append(int(logits[-1].argmax()))
    return sequence.tokens[scene.point + 1 :]


def answer_scene(model: Any, cases: RecallCases, seed: int) -> tuple[Scene, RecallCase]:
    """Restored in mid-answer: the boundary lies one token before the value's first token.

    The look-up of the value goes by the tokens in the convolution window, so the tail decides it. (No codes:
    they begin with a blank, which needs no look-up.)
    """
    kind = WORD_KINDS[seed % len(WORD_KINDS)]
    case = cases.make_for_answer_restore(seed, DISTANCE, match_unit=UNIT, kind=kind)
    point = len(case.prompt_ids) + len(case.stem_ids) - 1
    other = cases.make(seed + 1000, 2 * case.distance_tokens)
    return make_scene(model, case.prompt_ids + case.answer_ids, other.prompt_ids[:point], point), case


def test_greedy_continuations_differ_with_state_or_tail_one_token_off(model: Any, cases: RecallCases) -> None:
    changed = {"state and tail": 0, "tail": 0}
    num_right = 0
    for seed in range(NUM_PROMPTS):
        scene, case = answer_scene(model, cases, seed)
        exact = greedy_rest(scene, EXACT, len(case.value_ids))
        num_right += exact == list(case.value_ids)
        changed["state and tail"] += greedy_rest(scene, TOKEN_EARLY, len(exact)) != exact
        tail = scene.mix(tail_slot=TOKEN_EARLY, matrix_slot=EXACT)
        changed["tail"] += greedy_rest(scene, tail, len(exact)) != exact
    assert num_right >= NUM_PROMPTS - 1
    assert min(changed.values()) >= 2 * NUM_PROMPTS // 3, changed


@pytest.mark.parametrize(("tail", "matrix"), [(TOKEN_EARLY, EXACT), (EXACT, TOKEN_EARLY), (None, EXACT)])
def test_every_wrong_part_of_a_state_shifts_log_probabilities(
    model: Any, cases: RecallCases, tail: int | None, matrix: int
) -> None:
    for seed in range(3):
        scene = text_scene(model, cases, seed)
        exact = scene.rest(EXACT)
        wrong = scene.rest(scene.mix(tail_slot=tail, matrix_slot=matrix))
        assert float((wrong - exact).abs().max()) > 100 * RIGHT_RESTORE_BOUND


# ----------------------------------------------------------------------- attention pages, by log-probability


def test_a_wrong_page_shifts_log_probabilities_more_than_a_right_restore(
    model: Any, cases: RecallCases
) -> None:
    for seed in range(NUM_PROMPTS):
        scene = text_scene(model, cases, seed)
        num_pages = scene.point // UNIT
        pages, page = scene.first.pages[:num_pages], 1 + seed % (num_pages - 1)
        exact = scene.rest(EXACT)

        cold = scene.driver.sequence(scene.tokens, SECOND)
        whole = scene.driver.logits(scene.driver.plan((cold, len(scene.tokens)))).log_softmax(-1)
        right_shift = float((exact - whole[scene.point :]).abs().max())
        assert right_shift <= RIGHT_RESTORE_BOUND

        empty = scene.driver._free_pages.pop()
        for (_, name), view in scene.driver.worker.pools.fields.items():
            if name == LATENT_FIELD:
                view[empty] = 0
        replacements = {
            "foreign": scene.foreign.pages[page],
            "lost": empty,
            "written twice": pages[page - 1],
        }
        for name, replacement in replacements.items():
            wrong = [*pages[:page], replacement, *pages[page + 1 :]]
            shift = float((scene.rest(EXACT, wrong) - exact).abs().max())
            assert shift > RIGHT_RESTORE_BOUND, (name, seed, shift, right_shift)


def test_page_order_shows_in_the_contents_only(model: Any, cases: RecallCases) -> None:
    """Attention without positions sums over visible tokens: swapped pages change no output."""
    scene = text_scene(model, cases, seed=0)
    pages = scene.first.pages[: scene.point // UNIT]
    swapped = [pages[1], pages[0], *pages[2:]]
    exact = scene.rest(EXACT)
    assert float((scene.rest(EXACT, swapped) - exact).abs().max()) <= RIGHT_RESTORE_BOUND

    cold = scene.driver.sequence(scene.tokens, SECOND)
    scene.driver.run(scene.driver.plan((cold, scene.point)))
    for key, rows in scene.driver.page_rows(cold, scene.point).items():
        right = scene.driver.page_rows(scene.restored(EXACT), scene.point)[key]
        wrong = scene.driver.page_rows(scene.restored(EXACT, swapped), scene.point)[key]
        assert float((rows - right).abs().max()) <= RIGHT_RESTORE_BOUND
        assert float((rows - wrong).abs().max()) > 0.1
