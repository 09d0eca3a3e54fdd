"""Drafting with block drafters: answers and records are those without, and what is drafted depends on the
tokens alone, not on what was cached, cut, preempted or asked for."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.block_checkpoints import BLOCK_ROWS, LAYOUTS, TAPS, load_pair, method_of, write_pair
from tests.support.conversations import UNIT, Engine, Proposal
from tests.support.driver import Driver, random_tokens
from tests.support.recorded_rows import forget_accepted, record_as

from milepost.core.plan import SamplingParams
from milepost.core.request import Request
from milepost.errors import ConfigError
from milepost.kernels.index import AttentionIndex, RowSpan
from milepost.models.dflash import BlockLane
from milepost.models.dspark import BlockDrafter
from milepost.models.inputs import LayerTaps
from milepost.models.loading import LoadedModel
from milepost.runner import block_drafting
from milepost.runner.block_drafting import BlockRunner
from milepost.runner.process_worker import ProcessWorker, WorkerSpec

GREEDY = SamplingParams(temperature=0.0)


class Pairs:
    """Decoders and drafters for them, written and loaded once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._paths: dict[str, tuple[Path, Path]] = {}
        self._models: dict[str, LoadedModel] = {}

    def paths(
        self, family: str, layout: str, context: float | None = None, **changes: Any
    ) -> tuple[Path, Path]:
        key = repr((family, layout, context, sorted(changes.items())))
        if key not in self._paths:
            root = self._root / str(len(self._paths))
            self._paths[key] = write_pair(root, family, layout, context=context, **changes)
        return self._paths[key]

    def get(
        self,
        family: str,
        layout: str,
        num_drafts: int = 4,
        context: float | None = None,
        options: dict[str, Any] | None = None,
        **changes: Any,
    ) -> LoadedModel:
        """`num_drafts` 0: the decoder alone."""
        paths = self.paths(family, layout, context, **changes)
        options = options or {}
        key = repr((paths, num_drafts, sorted(options.items())))
        if key not in self._models:
            drafter = paths[1] if num_drafts else None
            self._models[key] = load_pair(paths[0], drafter, layout, num_drafts, **options)
        return self._models[key]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: Any) -> Pairs:
    return Pairs(tmp_path_factory.mktemp("pairs"))


def compared(some: Sequence[Proposal], others: Sequence[Proposal]) -> tuple[int, int]:
    """Proposals behind the same tokens, and how many of these differ as far as both go."""
    known = {made.tokens: made.drafts for made in others}
    num_compared = num_different = 0
    for made in some:
        other = known.get(made.tokens)
        if other is not None:
            num = min(len(made.drafts), len(other))
            num_compared += 1
            num_different += made.drafts[:num] != other[:num]
    return num_compared, num_different


def assert_same_proposals(some: Sequence[Proposal], others: Sequence[Proposal], at_least: int) -> None:
    num_compared, num_different = compared(some, others)
    assert num_compared >= at_least and not num_different


# -- what is drafted -------------------------------------------------------------------------------


def taps_of(bare: LoadedModel, layers: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Outputs of decoder layers at all positions, side by side; `bare` was loaded without a drafter."""
    taps, forward = LayerTaps(layers), bare.decoder.forward
    bare.decoder.forward = lambda inputs, cache, *_: forward(inputs, cache, taps)  # type: ignore[method-assign]
    try:
        Driver(bare, match_unit=UNIT, cache_bytes=8 << 20).decoder_states(tokens)
    finally:
        del bare.decoder.forward
    return torch.cat(taps.kept, dim=-1)


def expected_drafts(model: LoadedModel, tokens: Sequence[int], taps: torch.Tensor) -> list[int]:
    """All guesses of a block behind `tokens`, from entries stored at once.

    Args:
        taps: at least of all tokens but the last one.
    """
    drafter, group = model.drafts, model.layout.draft_group
    assert isinstance(drafter, BlockDrafter) and group is not None
    length = len(tokens) - 1
    num_pages = -(-length // UNIT)
    cache = {
        (field.layer, field.name): torch.zeros(num_pages, UNIT, field.width, dtype=taps.dtype)
        for field in group.token_fields
    }
    places = torch.arange(length)
    index = AttentionIndex(
        (RowSpan(0, length, 0),), (torch.arange(num_pages),), places // UNIT, places % UNIT
    )
    drafter.store(taps[:length], index, cache)
    rows = drafter.run([BlockLane(tokens[-1], length, torch.arange(num_pages))], cache)
    base, state, previous = drafter.base_logits(rows), drafter.first_state(1), tokens[-1]
    guesses: list[int] = []
    for place in range(rows.shape[1]):
        read = drafter.read(rows[:, place], base[:, place], torch.tensor([previous]), state)
        state, previous = read.state, int(read.logits[0].argmax())
        guesses.append(previous)
    return guesses


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("kimi_linear", "dspark"),
        ("kimi_k3", "dspark_mla"),
        ("qwen3_5", "dflash"),
        pytest.param("qwen3_next", "dspark_speculators", marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", "dflash_speculators", marks=pytest.mark.slow),
    ],
)
def test_drafts_are_those_of_one_pass_over_the_text(pairs: Pairs, family: str, layout: str) -> None:
    model, bare = (pairs.get(family, layout, num) for num in (BLOCK_ROWS, 0))
    assert isinstance(model.drafts, BlockDrafter)
    layers = model.drafts.spec.tap_layers
    engine = Engine(model, num_drafts=BLOCK_ROWS, step_tokens=40)
    prompts = [random_tokens(length, 131, seed=length) for length in (1, 2, 61)]
    engine.run([Request(n, prompt, GREEDY, max_tokens=20) for n, prompt in enumerate(prompts)], None)
    engine.run([Request(9, prompts[2] + engine.tokens[2], GREEDY, max_tokens=12)], None)
    assert engine.cached[9] > 0
    texts: dict[tuple[int, ...], torch.Tensor] = {}
    num_checked = 0
    with torch.inference_mode():
        for made in engine.proposed[::-1]:
            text = next((t for t in texts if t[: len(made.tokens)] == made.tokens), made.tokens)
            if text not in texts:
                texts[text] = taps_of(bare, layers, text)
            expected = expected_drafts(model, made.tokens, texts[text])
            assert list(made.drafts) == expected[: len(made.drafts)]
            assert len(made.drafts) == min(made.num_asked, len(expected))
            num_checked += len(made.drafts)
    assert num_checked > 100


SLOW = [("kimi_k3", "dspark_mla"), ("qwen3_5_moe", "dspark_speculators"), ("qwen3_next", "dflash")]


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("kimi_linear", "dspark_mla"),
        ("qwen3_5", "dspark"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_a_resumed_request_drafts_what_it_would_have_drafted(pairs: Pairs, family: str, layout: str) -> None:
    """Cold, without a cache, against hits, other cuts of the prompts, and preemptions. The weights are
    random, so that drafts depend on all entries."""
    model = pairs.get(family, layout, 3)
    cold = Engine(model, num_drafts=3, is_caching=False, step_tokens=2048)
    cold.converse()
    assert not any(cold.cached.values())
    warm = Engine(model, num_drafts=3, step_tokens=50)
    warm.converse()
    assert warm.tokens == cold.tokens and any(warm.cached.values())
    assert_same_proposals(warm.proposed, cold.proposed, 250)
    preempted = Engine(model, num_drafts=3, step_tokens=50)
    preempted.converse(preempt=random.Random(3))
    assert_same_proposals(preempted.proposed, cold.proposed, 250)


def test_what_is_drafted_does_not_depend_on_how_many_are_asked_for(pairs: Pairs) -> None:
    for layout in ("dspark", "dflash_speculators"):
        made = {}
        for num_drafts in (1, 3, 8):
            engine = Engine(pairs.get("kimi_linear", layout, num_drafts), num_drafts=num_drafts)
            engine.run([Request(1, random_tokens(50, 131, seed=4), GREEDY, max_tokens=30)], None)
            made[num_drafts] = engine.proposed
        assert_same_proposals(made[1], made[8], 20)
        assert_same_proposals(made[3], made[8], 20)
        guesses = BLOCK_ROWS - (method_of(layout) == "dflash")
        assert max(len(some.drafts) for some in made[8]) == guesses, "a block has no more"


def test_a_hit_accepts_what_a_cold_run_accepts(pairs: Pairs) -> None:
    model = pairs.get("kimi_linear", "dspark", 4, context=0.05)
    prompt = random_tokens(100, 131, seed=8)
    warm, cold = Engine(model, num_drafts=4), Engine(model, num_drafts=4, is_caching=False)
    depths = set()
    for number, length in enumerate([18, *range(30, 100, 3)]):
        for engine in (warm, cold):
            engine.run([Request(number, prompt[:length], GREEDY, max_tokens=9)], None)
        assert warm.tokens[number] == cold.tokens[number]
        depths.add(warm.cached[number])
    assert depths >= {UNIT * n for n in range(1, 6)}
    by_position = [engine.scheduler.cache.counters.accepted_drafts_by_position for engine in (warm, cold)]
    assert by_position[0] == by_position[1]
    assert by_position[0][0] > by_position[0][3] > 0


@pytest.mark.parametrize("copied_bytes", [1, 6000])
def test_requests_are_drafted_for_in_groups(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch, copied_bytes: int
) -> None:
    model = pairs.get("kimi_linear", "dspark", 3, context=0.05)
    together = Engine(model, num_drafts=3)
    together.converse()
    monkeypatch.setattr(block_drafting, "DRAFT_COPY_BYTES", copied_bytes)
    sizes: list[int] = []
    run = BlockDrafter.run

    def spy(self: BlockDrafter, lanes: Any, cache: Any) -> torch.Tensor:
        sizes.append(len(lanes))
        return run(self, lanes, cache)

    monkeypatch.setattr(BlockDrafter, "run", spy)
    apart = Engine(model, num_drafts=3)
    apart.converse()
    assert apart.tokens == together.tokens and apart.records() == together.records()
    if model.kernels.implementation == "native":
        assert apart.proposed == together.proposed
    assert set(sizes) == {1}


# -- trusting guesses ------------------------------------------------------------------------------


def test_guesses_end_where_the_drafter_does_not_trust_them(pairs: Pairs) -> None:
    family, layout = "kimi_linear", "dspark"
    prompt = random_tokens(50, 131, seed=4)
    made: dict[float, Engine] = {}
    for threshold in (0.0, 0.2, 1.0):
        model = pairs.get(family, layout, BLOCK_ROWS, options={"draft_confidence": threshold})
        engine = made[threshold] = Engine(model, num_drafts=BLOCK_ROWS)
        engine.run([Request(1, prompt, GREEDY, max_tokens=30)], None)
    assert made[0.0].tokens == made[0.2].tokens == made[1.0].tokens
    assert all(not some.drafts for some in made[1.0].proposed)
    lengths = {len(some.drafts) for some in made[0.2].proposed if some.num_asked == BLOCK_ROWS}
    assert len(lengths) > 1 and min(lengths) < BLOCK_ROWS
    assert_same_proposals(made[0.2].proposed, made[0.0].proposed, 20)
    assert (
        made[0.0].scheduler.cache.counters.num_draft_tokens
        > made[0.2].scheduler.cache.counters.num_draft_tokens
    )


def test_a_threshold_needs_a_drafter_that_estimates(pairs: Pairs) -> None:
    decoder, drafter = pairs.paths("kimi_linear", "dspark", enable_confidence_head=False)
    with pytest.raises(ConfigError, match="has no confidence_head; leave confidence_threshold out") as raised:
        load_pair(decoder, drafter, draft_confidence=0.5)
    assert raised.value.field == "speculative_config"


# -- planted faults --------------------------------------------------------------------------------


def rows_of_the_token_before(patch: pytest.MonkeyPatch) -> None:
    record_as(BlockRunner, patch, shift=1)


def accepted_rows_forgotten(patch: pytest.MonkeyPatch) -> None:
    forget_accepted(BlockRunner, patch)


def entries_in_the_next_place(patch: pytest.MonkeyPatch) -> None:
    index = BlockRunner._index

    def next_place(self: BlockRunner, parts: Any) -> Any:
        made = index(self, parts)
        return dataclasses.replace(made, write_offsets=(made.write_offsets + 1) % UNIT)

    patch.setattr(BlockRunner, "_index", next_place)


def blocks_see_an_entry_too_few(patch: pytest.MonkeyPatch) -> None:
    run = BlockDrafter.run

    def shorter(self: BlockDrafter, lanes: Sequence[BlockLane], cache: Any) -> torch.Tensor:
        return run(self, [dataclasses.replace(lane, position=lane.position - 1) for lane in lanes], cache)

    patch.setattr(BlockDrafter, "run", shorter)


def taps_of_the_layer_behind(patch: pytest.MonkeyPatch) -> None:
    keep = LayerTaps.keep

    def late(self: LayerTaps, layer: int, x: torch.Tensor) -> bool:
        return keep(self, layer - 1, x)

    patch.setattr(LayerTaps, "keep", late)


FAULTS = [
    rows_of_the_token_before,
    accepted_rows_forgotten,
    entries_in_the_next_place,
    blocks_see_an_entry_too_few,
    taps_of_the_layer_behind,
]


@pytest.fixture(scope="module")
def healthy(pairs: Pairs) -> tuple[Engine, Engine]:
    """Without a cache, and with one. Most guesses are right, and hang on the entries as well."""
    model = pairs.get("qwen3_5", "dspark", 3, context=0.3)
    cold = Engine(model, num_drafts=3, is_caching=False, step_tokens=2048)
    cold.converse()
    warm = Engine(model, num_drafts=3, step_tokens=50)
    warm.converse()
    assert_same_proposals(warm.proposed, cold.proposed, 200)
    counters = warm.scheduler.cache.counters
    assert 0 < counters.num_accepted_draft_tokens < counters.num_draft_tokens
    return cold, warm


@pytest.mark.parametrize("plant", FAULTS)
def test_planted_faults_are_seen_and_change_no_answer(
    healthy: tuple[Engine, Engine],
    plant: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cold, warm = healthy
    plant(monkeypatch)
    engine = Engine(cold.model, num_drafts=3, step_tokens=50)
    engine.converse()
    assert engine.tokens == cold.tokens == warm.tokens
    mine, sound = engine.records(), warm.records()
    pages_differ = any(mine[key][0][-1] != sound[key][0][-1] for key in set(mine) & set(sound))
    assert pages_differ or compared(engine.proposed, cold.proposed)[1]


# -- against an implementation that is not ours ----------------------------------------------------


@pytest.mark.oracle
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_picked_from_is_what_another_implementation_computes(
    pairs: Pairs, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoder's layers in transformers, the drafter's in transformers, and between them what is
    published; against a request that starts from a hit."""
    pytest.importorskip("transformers")
    from safetensors.torch import load_file
    from tests.support.block_oracle import BlockOracle
    from transformers import AutoModelForCausalLM

    decoder, drafter = pairs.paths("qwen3_5", layout)
    model = pairs.get("qwen3_5", layout, BLOCK_ROWS)
    picked: list[torch.Tensor] = []
    pick = block_drafting.pick_drafts

    def spy(logits: torch.Tensor, samplers: Any) -> list[int]:
        picked.append(logits[0].clone())
        return pick(logits, samplers)

    engine = Engine(model, num_drafts=BLOCK_ROWS, step_tokens=40)
    prompt = random_tokens(70, 131, seed=2)
    engine.run([Request(1, prompt[:50], GREEDY, max_tokens=2)], None)
    engine.proposed.clear()
    monkeypatch.setattr(block_drafting, "pick_drafts", spy)
    engine.run([Request(2, prompt, GREEDY, max_tokens=12)], None)
    assert engine.cached[2] > 0

    tensors = load_file(decoder / "model.safetensors")
    config = json.loads((drafter / "config.json").read_text())
    prefix = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    oracle = BlockOracle(
        config,
        load_file(drafter / "model.safetensors"),
        TAPS,
        tensors[prefix],
        tensors["lm_head.weight"],
        config.get("block_size", BLOCK_ROWS),
    )
    target = AutoModelForCausalLM.from_pretrained(
        decoder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    logits, num_compared = iter(picked), 0
    for made in engine.proposed:
        ids = torch.tensor([made.tokens[:-1]])
        with torch.no_grad():
            states = target(ids, output_hidden_states=True).hidden_states
        taps = {layer: states[layer + 1][0] for layer in TAPS}
        # What lies behind the last guess was never picked from; any token stands for it.
        following = [*made.drafts, *[0] * BLOCK_ROWS]
        expected, _ = oracle.guess_logits(taps, made.tokens[-1], following)
        for place in range(min(made.num_asked, expected.shape[0])):
            known = torch.isfinite(expected[place])
            assert float((next(logits) - expected[place])[known].abs().max()) <= 1e-4
            num_compared += 1
            if place == len(made.drafts):
                break
    assert next(logits, None) is None and num_compared > 15


@pytest.mark.slow
def test_a_worker_in_another_process_drafts_alike(pairs: Pairs) -> None:
    decoder, drafter = pairs.paths("qwen3_5", "dspark", 0.05)
    model = pairs.get("qwen3_5", "dspark", 3, context=0.05)
    here, there = Engine(model, num_drafts=3), Engine(model, num_drafts=3)
    there.worker.close()
    spec = WorkerSpec(
        str(decoder),
        None,
        UNIT,
        there.cache_bytes,
        1,
        num_draft_tokens=3,
        draft_method="dspark",
        draft_model=str(drafter),
    )
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
