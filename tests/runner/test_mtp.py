"""Drafting with modules of the model, or with an EAGLE-3 or block drafter from a checkpoint of its own:
answers and records are those without, and what is drafted depends on the tokens alone, not on what was
cached, cut, preempted or guessed before."""

from __future__ import annotations

import dataclasses
import random
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import block_checkpoints
from tests.support.checkpoints import write_checkpoint
from tests.support.conversations import UNIT, Engine, Proposal
from tests.support.draft_checkpoints import DRAFT_FAMILIES, with_drafts
from tests.support.driver import Driver, random_tokens
from tests.support.eagle3_checkpoints import write_pair
from tests.support.families import Shelf
from tests.support.recorded_rows import forget_accepted, record_as

from milepost.core.plan import SamplingParams
from milepost.core.request import Request
from milepost.errors import WorkerError
from milepost.kernels.api import select_kernels
from milepost.kernels.index import AttentionIndex, RowSpan
from milepost.models.inputs import StepInputs
from milepost.models.loading import LoadedModel, load_model
from milepost.runner.drafting import ChainRunner
from milepost.runner.process_worker import ProcessWorker, WorkerSpec

GREEDY = SamplingParams(temperature=0.0)


class Models:
    """Checkpoints with what drafts for them, loaded with and without it.

    A name is that of a family, whose draft modules are in its checkpoint, or LAYOUT:FAMILY for a drafter in a
    checkpoint of its own: a block drafter, or EAGLE-3.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._models: dict[str, LoadedModel] = {}

    def path(self, name: str, num_modules: int = 1, context: float | None = 0.05) -> Path:
        """Directory of the decoder's checkpoint."""
        path = self._root / f"{name.replace(':', '-')}-{num_modules}-{context}"
        if not path.exists():
            layout, _, family = name.rpartition(":")
            if layout in block_checkpoints.LAYOUTS:
                block_checkpoints.write_pair(path, family, layout, context=context)
            elif layout:
                write_pair(path, family, layout, context=context)
            else:
                config, tensors = with_drafts(name, num_modules, context=context)
                write_checkpoint(path, config, tensors=tensors)
        return path / "decoder" if ":" in name else path

    def options(self, name: str, num_drafts: int, path: Path) -> dict[str, Any]:
        """Of `load_model`, for the checkpoint at `path`."""
        if ":" not in name or not num_drafts:
            return {"num_draft_tokens": num_drafts}
        drafter, layout = str(path.parent / "drafter"), name.partition(":")[0]
        is_block = layout in block_checkpoints.LAYOUTS
        method = block_checkpoints.method_of(layout) if is_block else "eagle3"
        return {"num_draft_tokens": num_drafts, "draft_method": method, "draft_model": drafter}

    def get(
        self, name: str, num_modules: int = 1, num_drafts: int = 4, context: float | None = 0.05
    ) -> LoadedModel:
        """`num_drafts` 0: the same checkpoint, loaded without what drafts."""
        path = self.path(name, num_modules, context)
        key = f"{path}-{num_drafts}"
        if key not in self._models:
            self._models[key] = load_model(path, **self.options(name, num_drafts, path))
        return self._models[key]


@pytest.fixture(scope="module")
def models(tmp_path_factory: Any) -> Models:
    return Models(tmp_path_factory.mktemp("drafting"))


# -- answers and records ---------------------------------------------------------------------------


class Plain:
    """Answers of a model that does not draft, by family and number of modules."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._engines: dict[tuple[str, int], Engine] = {}

    def get(self, name: str, num_modules: int, num_drafts: int) -> Engine:
        key = (name, num_modules)
        if key not in self._engines:
            self._engines[key] = Engine(self._models.get(name, num_modules, num_drafts))
            self._engines[key].converse()
        return self._engines[key]


@pytest.fixture(scope="module")
def plain(models: Models) -> Plain:
    return Plain(models)


CASES = [
    *((name, 1, 3, False, 64 << 20) for name in DRAFT_FAMILIES),
    ("qwen3_5", 2, 5, True, 64 << 20),
    ("qwen3_5", 2, 5, False, 900 << 10),
    ("llama:kimi_linear", 1, 8, False, 64 << 20),
    ("llama:kimi_linear", 1, 3, True, 64 << 20),
    ("llama:qwen3_5", 1, 5, False, 900 << 10),
    ("mla:qwen3_next", 1, 4, False, 64 << 20),
    ("k3:kimi_k3", 1, 3, True, 64 << 20),
    ("dspark:kimi_linear", 1, 8, False, 64 << 20),
    ("dspark:qwen3_5", 1, 5, False, 900 << 10),
    ("dspark_mla:kimi_k3", 1, 3, True, 64 << 20),
    ("dspark_speculators:qwen3_next", 1, 4, False, 64 << 20),
    *(
        pytest.param("dspark:kimi_linear", 1, num, num in (3, 5, 7), 64 << 20, marks=pytest.mark.slow)
        for num in (1, 2, 3, 4, 5, 6, 7)
    ),
    *(
        pytest.param("llama:kimi_linear", 1, num, False, 64 << 20, marks=pytest.mark.slow)
        for num in (1, 2, 4, 5, 6, 7)
    ),
    pytest.param("kimi_linear", 2, 5, True, 64 << 20, marks=pytest.mark.slow),
    pytest.param("kimi_k3", 3, 3, False, 64 << 20, marks=pytest.mark.slow),
    pytest.param("qwen3_next", 3, 8, False, 64 << 20, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "num_modules", "num_drafts", "preempts", "cache_bytes"), CASES)
def test_answers_and_records_do_not_depend_on_drafts(
    models: Models,
    plain: Plain,
    name: str,
    num_modules: int,
    num_drafts: int,
    preempts: bool,
    cache_bytes: int,
) -> None:
    without = plain.get(name, num_modules, num_drafts)
    engine = Engine(models.get(name, num_modules, num_drafts), cache_bytes=cache_bytes, num_drafts=num_drafts)
    engine.converse(preempt=random.Random(7) if preempts else None)
    assert engine.tokens == without.tokens
    counters = engine.scheduler.cache.counters
    assert 0 < counters.num_accepted_draft_tokens < counters.num_draft_tokens
    assert sum(len(made.drafts) for made in engine.proposed) == counters.num_draft_tokens
    if num_drafts > 1:  # a single guess per step is too few to count on one
        assert any(len(made.drafts) < made.num_asked for made in engine.proposed), "no guess was a stop token"
    if cache_bytes < 1 << 20:
        return
    if not preempts:
        assert engine.cached == without.cached
    mine, theirs = engine.records(), without.records()
    assert set(mine) == set(theirs)
    if engine.model.kernels.implementation == "native":
        for key, (pages, states) in mine.items():
            assert pages == theirs[key][0]
            if states is not None and theirs[key][1] is not None:
                assert states == theirs[key][1]


@pytest.mark.parametrize("name", ["kimi_linear", "qwen3_5_moe", "llama:kimi_linear", "dspark:kimi_linear"])
def test_a_model_without_its_modules_answers_and_hits_alike(models: Models, plain: Plain, name: str) -> None:
    bare = Engine(models.get(name, num_drafts=0))
    bare.converse()
    without = plain.get(name, 1, 3)
    assert bare.tokens == without.tokens
    assert bare.cached == without.cached


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("kimi_linear", {"dtype": "bfloat16"}),
    "plain torch": ("qwen3_5", {"implementation": "reference"}),
    "no recurrent layer": ("qwen3_5", {"layer_types": ["full_attention"] * 5}),
    "eagle3, bf16": ("llama:kimi_linear", {"dtype": "bfloat16"}),
    "eagle3, bf16, latent": ("mla:qwen3_next", {"dtype": "bfloat16"}),
    "eagle3, plain torch": ("llama:qwen3_5", {"implementation": "reference"}),
    "eagle3, int8": ("llama:kimi_linear", {"quantization": "int8"}),
}


ALWAYS = "no recurrent layer"


@pytest.mark.parametrize(
    "variant", [ALWAYS, *(pytest.param(v, marks=pytest.mark.slow) for v in VARIANTS if v != ALWAYS)]
)
def test_other_dtypes_kernels_and_patterns(variant: str, tmp_path: Path) -> None:
    name, changes = VARIANTS[variant]
    changes = dict(changes)
    kernels = select_kernels(changes.pop("implementation", "auto"))
    options: dict[str, Any] = {"num_draft_tokens": 3, "quantization": changes.pop("quantization", None)}
    layout, _, family = name.rpartition(":")
    if layout:
        path, drafter = write_pair(tmp_path, family, layout, context=0.1, target=changes)
        options |= {"draft_method": "eagle3", "draft_model": drafter}
    else:
        config, tensors = with_drafts(name, 2, context=0.1, **changes)
        path = write_checkpoint(tmp_path, config, tensors=tensors)
    if options["quantization"] is None:
        options["kernels"] = kernels
    model = load_model(path, **options)
    without, engine = Engine(model), Engine(model, num_drafts=3, step_tokens=50)
    cold = Engine(model, num_drafts=3, is_caching=False, step_tokens=2048)
    for made in (without, engine, cold):
        made.converse()
        assert made.tokens == without.tokens
    assert engine.cached == without.cached
    assert engine.scheduler.cache.counters.num_accepted_draft_tokens > 50
    assert_same_proposals(engine.proposed, cold.proposed, 200)
    mine, theirs = engine.records(), without.records()
    assert set(mine) == set(theirs)
    if kernels.implementation == "native":
        assert all(pages == theirs[key][0] for key, (pages, _) in mine.items())


@pytest.mark.parametrize("copied_bytes", [1, 40_000])
def test_copies_are_bounded(models: Models, monkeypatch: pytest.MonkeyPatch, copied_bytes: int) -> None:
    """Requests are drafted for in groups; what is drafted does not depend on who is in one."""
    model = models.get("qwen3_5", 2, 3)
    together = Engine(model, num_drafts=3)
    together.converse()
    monkeypatch.setattr("milepost.runner.drafting.DRAFT_COPY_BYTES", copied_bytes)
    sizes: list[tuple[int, int]] = []
    copied = ChainRunner.copied

    def spy(self: ChainRunner, module: int, parts: Any) -> Any:
        entries = copied(self, module, parts)
        sizes.append((len(parts), entries.pages.numel() * entries.pages.itemsize))
        return entries

    monkeypatch.setattr(ChainRunner, "copied", spy)
    apart = Engine(model, num_drafts=3)
    apart.converse()
    assert apart.tokens == together.tokens
    assert apart.proposed == together.proposed
    assert apart.records() == together.records()
    assert all(num == 1 or size <= copied_bytes for num, size in sizes)
    assert any(num > 1 for num, _ in sizes) == (copied_bytes > 1)


def test_choices_of_one_prompt(models: Models) -> None:
    """They start from the same prefix at the same time and go different ways."""
    prompt = random_tokens(53, 131, seed=3)
    answers = []
    for num_drafts in (0, 4):
        engine = Engine(models.get("qwen3_5"), num_drafts=num_drafts)
        for turn in range(2):
            choices = [
                Request(10 * turn + c, prompt, SamplingParams(0.8, seed=4, choice_index=c), max_tokens=25)
                for c in range(4)
            ]
            engine.run(choices, None)
        answers.append(engine.tokens)
        if num_drafts:
            assert engine.scheduler.cache.counters.num_accepted_draft_tokens > 0
    assert answers[0] == answers[1]
    assert len({tuple(tokens) for tokens in answers[0].values()}) == 4


# -- what is drafted -------------------------------------------------------------------------------


def assert_same_proposals(some: Sequence[Proposal], others: Sequence[Proposal], at_least: int) -> None:
    """Behind the same tokens the same tokens were drafted, as far as both were asked to."""
    known = {made.tokens: made.drafts for made in others}
    num_compared = 0
    for made in some:
        other = known.get(made.tokens)
        if other is not None:
            num = min(len(made.drafts), len(other))
            assert made.drafts[:num] == other[:num]
            num_compared += 1
    assert num_compared >= at_least


def differs(some: Sequence[Proposal], others: Sequence[Proposal]) -> bool:
    try:
        assert_same_proposals(some, others, 1)
    except AssertionError:
        return True
    return False


SLOW_CASES = [
    ("kimi_k3", 2),
    ("qwen3_next", 1),
    ("qwen3_5_moe", 1),
    ("speculators:qwen3_5", 1),
    ("k3:kimi_k3", 1),
]


@pytest.mark.parametrize(
    ("name", "num_modules"),
    [
        ("kimi_linear", 1),
        ("qwen3_5", 2),
        ("llama:kimi_linear", 1),
        ("mla:qwen3_next", 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES),
    ],
)
def test_a_resumed_request_drafts_what_it_would_have_drafted(
    models: Models, name: str, num_modules: int
) -> None:
    """Cold, without a cache, against hits, other cuts of the prompts, and preemptions. The weights are
    random, so that drafts depend on everything the drafter remembers."""
    model = models.get(name, num_modules, 3, context=None)
    cold = Engine(model, num_drafts=3, is_caching=False, step_tokens=2048)
    cold.converse()
    assert not any(cold.cached.values())
    warm = Engine(model, num_drafts=3, step_tokens=50)
    warm.converse()
    assert warm.tokens == cold.tokens
    assert_same_proposals(warm.proposed, cold.proposed, 250)
    preempted = Engine(model, num_drafts=3, step_tokens=50)
    preempted.converse(preempt=random.Random(3))
    assert_same_proposals(preempted.proposed, cold.proposed, 250)


@pytest.mark.parametrize(
    "name",
    [
        "kimi_linear",
        "qwen3_5",
        "speculators:kimi_linear",
        "mla:qwen3_5",
        "dspark_mla:kimi_linear",
        "dflash_speculators:qwen3_5",
    ],
)
def test_the_first_draft_behind_a_hit_at_every_boundary(models: Models, name: str) -> None:
    model = models.get(name, 2, 4, context=None)
    prompt = random_tokens(100, 131, seed=8)
    warm = Engine(model, num_drafts=4)
    cold = Engine(model, num_drafts=4, is_caching=False)
    depths = set()
    # Ascending: each prompt ends a little behind the last one and hits at the last boundary before it.
    for number, length in enumerate([18, *range(30, 100, 3)]):
        for engine in (warm, cold):
            engine.run([Request(number, prompt[:length], GREEDY, max_tokens=4)], None)
        assert warm.tokens[number] == cold.tokens[number]
        depths.add(warm.cached[number])
        firsts = [
            next(
                made
                for made in engine.proposed
                if made.tokens[: length + 1][:-1] == tuple(prompt[:length]) and len(made.tokens) == length + 1
            )
            for engine in (warm, cold)
        ]
        assert firsts[0].drafts == firsts[1].drafts and firsts[0].num_asked == 2
    assert depths >= {UNIT * n for n in range(1, 6)}
    counters = [engine.scheduler.cache.counters for engine in (warm, cold)]
    assert counters[0].accepted_drafts_by_position == counters[1].accepted_drafts_by_position


# -- against the definition ------------------------------------------------------------------------


def decoder_states(model: LoadedModel, tokens: Sequence[int], layers: Sequence[int]) -> torch.Tensor:
    """Hidden states of all positions, or outputs of layers, from one pass of a model without a drafter."""
    return Driver(model, match_unit=UNIT, cache_bytes=8 << 20).decoder_states(tokens, layers)


def expected_drafts(
    model: LoadedModel, states: torch.Tensor, tokens: Sequence[int], num_drafts: int
) -> list[int]:
    """Drafts behind `tokens`, every one of them from whole passes over all positions.

    Args:
        states: what the drafter reads of the decoder at all positions but the last one.
    """
    drafts = model.drafts
    assert drafts is not None
    text = list(tokens)
    newest = len(tokens) - 1
    handed: list[dict[int, torch.Tensor]] = []  # per module, position -> output
    chain: dict[int, torch.Tensor] = {}
    taps = drafts.taps(states)
    for step in range(num_drafts):
        module = step % drafts.num_modules
        positions = range(module + 1, newest + step + 1)
        before = {p: taps[p] for p in range(newest)} if module == 0 else handed[module - 1]
        hidden = [
            before[p - 1] if p - 1 in before and p <= newest + module else chain[p - 1] for p in positions
        ]
        count = len(positions)
        pages = -(-count // UNIT)
        places = torch.arange(count)
        index = AttentionIndex((RowSpan(0, count, 0),), (torch.arange(pages),), places // UNIT, places % UNIT)
        field = model.layout.attention[-1].token_fields[module]
        cache = {(field.layer, field.name): torch.zeros(pages, UNIT, field.width)}
        ids = torch.tensor([text[p] for p in positions])
        rows = drafts.run(module, StepInputs(ids, index, None), torch.stack(hidden), cache)
        text.append(int(drafts.logits(module, rows.normed[-1:]).argmax(-1)))
        if module == len(handed):
            handed.append(dict(zip(positions, rows.handed_on.clone(), strict=True)))
        chain[newest + step] = rows.handed_on[-1].clone()
    return text[len(tokens) :]


@pytest.mark.parametrize(
    ("name", "num_modules", "num_drafts"),
    [
        ("kimi_linear", 1, 4),
        ("kimi_k3", 3, 3),
        ("qwen3_next", 2, 2),
        ("qwen3_5", 2, 5),
        ("qwen3_5_moe", 3, 7),
        ("llama:kimi_linear", 1, 8),
        ("speculators:qwen3_5", 1, 3),
        ("mla:qwen3_next", 1, 5),
        ("k3:kimi_k3", 1, 4),
    ],
)
def test_drafts_are_those_of_whole_passes(
    models: Models, name: str, num_modules: int, num_drafts: int
) -> None:
    model = models.get(name, num_modules, num_drafts, context=None)
    bare = models.get(name, num_modules, 0, context=None)
    engine = Engine(model, num_drafts=num_drafts, step_tokens=40)
    requests = [
        Request(1, random_tokens(1, 131, seed=1), GREEDY, max_tokens=24),
        Request(2, random_tokens(2, 131, seed=2), GREEDY, max_tokens=12),
        Request(3, random_tokens(61, 131, seed=3), GREEDY, max_tokens=24),
    ]
    engine.run(requests, None)
    answer = random_tokens(61, 131, seed=3) + engine.tokens[3]
    engine.run([Request(4, answer, GREEDY, max_tokens=12)], None)
    assert engine.cached[4] > 0
    states: dict[tuple[int, ...], torch.Tensor] = {}
    num_checked = 0
    with torch.inference_mode():
        for made in engine.proposed[-1:0:-3]:
            start = made.tokens[:1]
            if start not in states or states[start].shape[0] < len(made.tokens) - 1:
                states[start] = decoder_states(bare, made.tokens, model.drafts.tap_layers)
            expected = expected_drafts(model, states[start][: len(made.tokens) - 1], made.tokens, num_drafts)
            assert list(made.drafts) == expected[: len(made.drafts)]
            num_checked += len(made.drafts)
    assert num_checked > 15


# -- planted faults --------------------------------------------------------------------------------


def tap_of_the_page_before(patch: pytest.MonkeyPatch) -> None:
    tap = ChainRunner.tap

    def earlier(self: ChainRunner, module: int, table: Any, position: int) -> torch.Tensor:
        return tap(self, module, table, max(1, position - UNIT) if position % UNIT == 0 else position)

    patch.setattr(ChainRunner, "tap", earlier)


def taps_only_at_the_newest_token(patch: pytest.MonkeyPatch) -> None:
    """Boundaries inside of a pass have none."""
    write = ChainRunner._write_taps

    def newest(self: ChainRunner, module: int, parts: Any, streams: Any) -> None:
        shorter = [dataclasses.replace(part, start=part.end - 1) for part in parts]
        write(self, module, shorter, [stream[-1:] for stream in streams])

    patch.setattr(ChainRunner, "_write_taps", newest)


def hidden_states_of_the_row_before(patch: pytest.MonkeyPatch) -> None:
    record_as(ChainRunner, patch, shift=1)


def tokens_of_the_position_before(patch: pytest.MonkeyPatch) -> None:
    record_as(
        ChainRunner,
        patch,
        lambda part: dataclasses.replace(part, tokens=part.tokens[:1] + part.tokens[:-1]),
    )


def accepted_rows_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Only the first row of a chunk with drafts is followed."""
    forget_accepted(ChainRunner, patch)


def entries_in_the_next_place(patch: pytest.MonkeyPatch) -> None:
    places = ChainRunner._places

    def next_place(self: ChainRunner, table: Any, positions: range) -> Any:
        pages, offsets = places(self, table, positions)
        return pages, [(offset + 1) % UNIT for offset in offsets]

    patch.setattr(ChainRunner, "_places", next_place)


FAULTS = [
    tap_of_the_page_before,
    taps_only_at_the_newest_token,
    hidden_states_of_the_row_before,
    tokens_of_the_position_before,
    accepted_rows_forgotten,
    entries_in_the_next_place,
]


@pytest.fixture(scope="module", params=[("qwen3_5", 2), ("llama:kimi_linear", 1)], ids=str)
def healthy(models: Models, request: Any) -> tuple[Engine, Engine]:
    """Without a cache, and with one."""
    model = models.get(*request.param, 3, context=0.2)
    cold = Engine(model, num_drafts=3, is_caching=False, step_tokens=2048)
    cold.converse()
    warm = Engine(model, num_drafts=3, step_tokens=50)
    warm.converse()
    assert not differs(warm.proposed, cold.proposed)
    return cold, warm


@pytest.mark.parametrize("plant", FAULTS)
def test_planted_faults_are_seen_and_change_no_answer(
    healthy: tuple[Engine, Engine],
    plant: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In what is drafted, or in what is cached for somebody who starts elsewhere."""
    cold, warm = healthy
    plant(monkeypatch)
    engine = Engine(cold.model, num_drafts=3, step_tokens=50)
    engine.converse()
    assert engine.tokens == cold.tokens == warm.tokens
    mine, sound = engine.records(), warm.records()
    pages_differ = any(mine[key][0][-1] != sound[key][0][-1] for key in set(mine) & set(sound))
    assert pages_differ or differs(engine.proposed, cold.proposed)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_modules"), [("qwen3_5", 2), ("llama:kimi_linear", 1)])
def test_a_worker_in_another_process_drafts_alike(models: Models, name: str, num_modules: int) -> None:
    """Plans that ask for drafts, and results that bring them, over the wire."""
    model = models.get(name, num_modules, 3)
    here = Engine(model, num_drafts=3)
    there = Engine(model, num_drafts=3)
    there.worker.close()
    path = models.path(name, num_modules)
    spec = WorkerSpec(str(path), None, UNIT, there.cache_bytes, 1, **models.options(name, 3, path))
    remote = ProcessWorker(spec)
    try:
        there.worker.execute = remote.execute  # type: ignore[method-assign]
        there.worker.mapped_bytes = lambda: 0  # type: ignore[method-assign]
        for engine in (here, there):
            engine.run([Request(1, random_tokens(40, 131, seed=1), GREEDY, max_tokens=20)], None)
        assert there.tokens == here.tokens
        assert there.proposed == here.proposed and any(made.num_accepted for made in here.proposed)
    finally:
        remote.close()


# -- refusals --------------------------------------------------------------------------------------


def decode_step(model: LoadedModel, num_drafts: int) -> tuple[Engine, Any]:
    engine = Engine(model, num_drafts=num_drafts)
    engine.scheduler.add(Request(1, range(20), GREEDY, max_tokens=9))
    engine.scheduler.commit(engine.worker.execute(engine.scheduler.schedule(0.0)))
    return engine, engine.scheduler.schedule(1.0)


def test_a_model_without_modules_cannot_be_asked_to_draft(shelf: Shelf) -> None:
    engine, plan = decode_step(shelf.model("kimi_linear"), 3)
    assert plan.chunks[0].num_own_drafts == 3
    with pytest.raises(WorkerError, match="loaded without a drafter"):
        engine.worker.execute(plan)


def test_drafts_start_where_their_entries_end(models: Models) -> None:
    engine, plan = decode_step(models.get("kimi_linear"), 3)
    chunk = plan.chunks[0]
    chunk.start, chunk.end = 18, 19
    with pytest.raises(WorkerError, match="draft entries reach up to 20, not 18"):
        engine.worker.execute(plan)
    chunk.start, chunk.end, chunk.tokens = 19, 21, bytes(8)
    with pytest.raises(WorkerError, match="drafts follow one token behind others"):
        engine.worker.execute(plan)


@pytest.mark.parametrize(
    ("drafts", "end", "message"),
    [
        ([1, 2, 3, 4], 0, "drafted 4 tokens, asked for were at most 3"),
        ([1], 2, "accepted a draft that is not the token it sampled"),
        ([], 1, "accepted a draft that is not the token it sampled"),
    ],
)
def test_a_worker_that_reports_nonsense_fails_the_request(
    models: Models, drafts: list[int], end: int, message: str
) -> None:
    engine, plan = decode_step(models.get("kimi_linear"), 3)
    result = engine.worker.execute(plan)
    done = result.chunk_results[0]
    done.end = plan.chunks[0].end + end
    done.sampled = [done.sampled[0]] * (end + 1)
    done.draft_tokens = array("I", drafts).tobytes()
    (update,) = engine.scheduler.commit(result)
    assert update.error is not None and message in update.error
    assert engine.scheduler.audit() == []
