"""Speculation with real models: answers and cached records do not depend on drafts, whoever makes them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.conversations import NUM_OUTPUT, Engine, KnownAnswers
from tests.support.families import FAMILIES, Shelf

from milepost.core.plan import SamplingParams
from milepost.core.request import Request
from milepost.errors import WorkerError
from milepost.kernels.index import MixerRecord
from milepost.kernels.tapes import MAX_TAPE_ROWS
from milepost.models.hybrid import HybridDecoder
from milepost.models.inputs import StepInputs
from milepost.models.loading import LoadedModel
from milepost.runner import worker as worker_module


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request: Any, shelf: Shelf) -> LoadedModel:
    return shelf.model(request.param)


@pytest.fixture(scope="module")
def without_drafts(model: LoadedModel) -> Engine:
    engine = Engine(model)
    engine.converse()
    assert any(len(tokens) < NUM_OUTPUT - 3 for tokens in engine.tokens.values()), "no stop token was met"
    return engine


CASES = [
    pytest.param(num_drafts, rate, ragged, preempts, 64 << 20, id=f"{num_drafts}-{rate}-{name}")
    for num_drafts, rate, ragged, preempts, name in [
        (1, 0.0, False, False, "perfect"),
        (2, 0.3, False, False, "mediocre"),
        (3, 1.0, False, False, "adversarial"),
        (4, 0.0, False, True, "perfect_preempted"),
        (5, 0.5, True, False, "ragged"),
        (6, 0.2, True, True, "ragged_preempted"),
        (7, 0.1, False, False, "good"),
        (8, 0.0, False, False, "perfect"),
        (8, 0.2, True, False, "ragged"),
    ]
] + [pytest.param(4, 0.2, True, False, 700 << 10, id="4-0.2-tight")]


@pytest.mark.parametrize(("num_drafts", "rate", "ragged", "preempts", "cache_bytes"), CASES)
def test_answers_and_records_do_not_depend_on_drafts(
    model: LoadedModel,
    without_drafts: Engine,
    num_drafts: int,
    rate: float,
    ragged: bool,
    preempts: bool,
    cache_bytes: int,
) -> None:
    drafter = KnownAnswers(without_drafts.tokens, model.vocab_size, rate, ragged)
    engine = Engine(model, cache_bytes=cache_bytes, drafter=drafter, num_drafts=num_drafts)
    engine.converse(preempt=random.Random(7) if preempts else None)
    assert engine.tokens == without_drafts.tokens
    counters = engine.scheduler.cache.counters
    assert counters.num_draft_tokens > 50
    share = counters.num_accepted_draft_tokens / counters.num_draft_tokens
    assert share > 0.97 if rate == 0.0 else share < 1.0
    if cache_bytes < 1 << 20:
        return
    if not preempts:
        assert engine.cached == without_drafts.cached
    mine, theirs = engine.records(), without_drafts.records()
    assert set(mine) == set(theirs)
    if model.kernels.implementation == "native":
        for key, (pages, states) in mine.items():
            assert pages == theirs[key][0]
            if states is not None and theirs[key][1] is not None:
                assert states == theirs[key][1]
    without = {key for key, (_, states) in theirs.items() if states is not None}
    assert without <= {key for key, (_, states) in mine.items() if states is not None}


def test_a_chunk_with_drafts_cannot_run_in_place(shelf: Shelf) -> None:
    engine = Engine(shelf.model("kimi_linear"))
    engine.scheduler.add(Request(1, range(10), SamplingParams(temperature=0.0), max_tokens=5))
    engine.scheduler.commit(engine.worker.execute(engine.scheduler.schedule(0.0)))
    plan = engine.scheduler.schedule(1.0)
    plan.chunks[0].draft_tokens = b"\1\0\0\0"
    with pytest.raises(WorkerError, match="cannot run in place in slot"):
        engine.worker.execute(plan)


@pytest.mark.parametrize("name", ["kimi_linear", "qwen3_5"])
def test_steps_with_drafts_are_tapes(shelf: Shelf, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shelf.model(name)
    if model.kernels.step_tapes() is None:
        pytest.skip("steps cannot be written down here")
    plain = Engine(model)
    plain.converse()
    steps: Counter[tuple[int, bool]] = Counter()
    forward = model.decoder.forward

    def counted(inputs: StepInputs, *rest: Any) -> Any:
        assert inputs.recurrent is not None
        steps[inputs.token_ids.shape[0], inputs.recurrent.record is not None] += 1
        return forward(inputs, *rest)

    monkeypatch.setattr(model.decoder, "forward", counted)
    engine = Engine(model, drafter=KnownAnswers(plain.tokens, model.vocab_size, 0.5), num_drafts=3)
    engine.converse()
    assert engine.tokens == plain.tokens
    small = {key: count for key, count in steps.items() if key[0] <= MAX_TAPE_ROWS}
    assert any(drafted for _, drafted in small)
    # A kind of step is called once where every row has a head, and once where not.
    assert max(small.values()) <= 2


@pytest.mark.parametrize("name", ["kimi_linear", "qwen3_next"])
def test_kernels_in_plain_torch(shelf: Shelf, name: str) -> None:
    """Rows of drafts go token by token there, also where a query of that length would not."""
    model = shelf.model(name, implementation="reference")
    plain = Engine(model)
    plain.converse()
    drafter = KnownAnswers(plain.tokens, model.vocab_size, 0.2)
    engine = Engine(model, drafter=drafter, num_drafts=7)
    engine.converse()
    assert engine.tokens == plain.tokens
    assert engine.cached == plain.cached
    assert 0 < engine.scheduler.cache.counters.num_accepted_draft_tokens


def no_replay(patch: pytest.MonkeyPatch) -> None:
    """The state keeps the rejected rows."""
    patch.setattr(HybridDecoder, "replay", lambda self, record, kept, index, cache: None)


def one_layer_left_out(patch: pytest.MonkeyPatch) -> None:
    """The state of one layer keeps the rejected rows."""
    replay = HybridDecoder.replay

    def replay_rest(self: HybridDecoder, *arguments: Any) -> None:
        layers, self._layers = self._layers, self._layers[1:]
        replay(self, *arguments)
        self._layers = layers

    patch.setattr(HybridDecoder, "replay", replay_rest)


def one_row_too_many(patch: pytest.MonkeyPatch) -> None:
    """The first rejected draft is folded in as well."""
    index = worker_module.replay_index

    def longer(plan: Any, layout: Any, geometry: Any, num_valid: dict[int, int]) -> Any:
        return index(plan, layout, geometry, {number: count + 1 for number, count in num_valid.items()})

    patch.setattr(worker_module, "replay_index", longer)


def recorded_in_shared_buffers(patch: pytest.MonkeyPatch) -> None:
    """What is kept of every layer is what the last one read."""
    patch.setattr(MixerRecord, "buffers", lambda self, layer, *names: [None] * len(names))


def positions_of_noise_shifted(patch: pytest.MonkeyPatch) -> None:
    """Every row is sampled with the noise of the first."""
    rows = worker_module.sampling_rows

    def shifted(chunk: Any, *rest: Any) -> Any:
        made = rows(chunk, *rest)
        for row in made:
            row.output_position = chunk.output_position
        return made

    patch.setattr(worker_module, "sampling_rows", shifted)


def penalties_without_drafts(patch: pytest.MonkeyPatch) -> None:
    """Penalties behind a draft do not see it."""
    patch.setattr("milepost.runner.verify.history_at", lambda history, drafts: history)


@pytest.mark.parametrize(
    "plant",
    [
        no_replay,
        one_layer_left_out,
        one_row_too_many,
        recorded_in_shared_buffers,
        positions_of_noise_shifted,
        penalties_without_drafts,
    ],
)
def test_planted_bugs_change_answers_or_records(
    shelf: Shelf, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shelf.model("kimi_linear")
    plain = Engine(model)
    plain.converse()
    plant(monkeypatch)
    drafter = KnownAnswers(plain.tokens, model.vocab_size, 0.2)
    engine = Engine(model, drafter=drafter, num_drafts=4)
    engine.converse()
    mine, theirs = engine.records(), plain.records()
    assert engine.tokens != plain.tokens or any(
        mine[key][1] != theirs[key][1] for key in set(mine) & set(theirs) if mine[key][1] and theirs[key][1]
    )
