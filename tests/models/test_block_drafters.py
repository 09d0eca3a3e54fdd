"""Block drafters (DFlash, DSpark) against an implementation that is not ours, and planted faults."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402
from tests.support import speculators_oracle  # noqa: E402
from tests.support.block_checkpoints import (  # noqa: E402
    BLOCK_ROWS,
    LAYOUTS,
    TAPS,
    load_pair,
    method_of,
    write_pair,
)
from tests.support.block_oracle import BlockOracle  # noqa: E402

from milepost.errors import CheckpointFileError, ConfigError  # noqa: E402
from milepost.kernels.index import AttentionIndex, RowSpan  # noqa: E402
from milepost.models import dflash  # noqa: E402
from milepost.models.description import describe  # noqa: E402
from milepost.models.dflash import BlockBackbone, BlockLane, Rotary  # noqa: E402
from milepost.models.dry_run import check_checkpoint  # noqa: E402
from milepost.models.dspark import BlockDrafter, MarkovHead  # noqa: E402
from milepost.models.loading import LoadedModel  # noqa: E402

FP32_BOUND = 1e-4
UNIT = 16
LENGTH = 45
SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 20}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{layout: (layout, {}) for layout in LAYOUTS},
    "a sliding layer": ("dflash", SLIDING),
    "sliding, whole block": ("dspark", {**SLIDING, "is_causal": False, "markov_head_type": "rnn"}),
    "causal": ("dspark", {"is_causal": True, "enable_confidence_head": False}),
    "windows for all": ("dflash", {"dflash_config": {"use_swa": True, "swa_window_size": 7}}),
    "fill in": ("dspark", {"sample_from_anchor": False, "confidence_head_with_markov": False}),
    "latents, whole queries": ("dspark_mla", {"q_lora_rank": None, "block_size": 3}),
    "latents in halves": ("dspark_mla", {"rope_interleave": False}),
    "taps normed": ("dspark_mla", {"fc_norm": True}),
    "library, whole block": ("dspark_speculators", {"sliding_window_non_causal": True}),
    "fewer ids": ("dspark_speculators", {"draft_vocab_size": 60, "markov_head_type": "rnn"}),
    "fewer ids, no heads": ("dflash_speculators", {"draft_vocab_size": 60}),
    "no token before": ("dspark_speculators", {"markov_rank": 0, "confidence_head_with_markov": False}),
}


def index_of(position: int, count: int) -> AttentionIndex:
    """Rows at [position, position + count) of one sequence whose pages are 0, 1, 2 ..."""
    places = torch.arange(position, position + count)
    pages = torch.arange(-(-(position + count) // UNIT))
    return AttentionIndex((RowSpan(0, count, position),), (pages,), places // UNIT, places % UNIT)


def empty_pages(model: LoadedModel, num_pages: int) -> dict[tuple[int, str], Any]:
    group = model.layout.draft_group
    assert group is not None
    return {
        (field.layer, field.name): torch.full((num_pages, UNIT, field.width), torch.nan)
        for field in group.token_fields
    }


class Case:
    """One drafter, tapped rows, and what it should make of them."""

    def __init__(self, root: Path, layout: str, changes: dict[str, Any], family: str = "kimi_linear") -> None:
        self.layout = layout
        own = changes.get("dflash_config")
        if own is not None:
            changes = {**changes, "dflash_config": {"mask_token_id": 130, "target_layer_ids": TAPS, **own}}
        self.decoder, self.drafter = write_pair(root, family, layout, **changes)
        self.num_drafts = BLOCK_ROWS if method_of(layout) == "dspark" else BLOCK_ROWS - 1
        self.model = load_pair(self.decoder, self.drafter, layout, self.num_drafts)
        assert isinstance(self.model.drafts, BlockDrafter)
        self.drafts: BlockDrafter = self.model.drafts
        tensors = load_file(self.decoder / "model.safetensors")
        self.oracle = BlockOracle(
            json.loads((self.drafter / "config.json").read_text()),
            load_file(self.drafter / "model.safetensors"),
            TAPS,
            tensors["model.embed_tokens.weight"],
            tensors["lm_head.weight"],
            changes.get("block_size", BLOCK_ROWS),
        )
        generator = torch.Generator().manual_seed(9)
        hidden = self.model.config.hidden_size
        self.taps = {layer: torch.randn(LENGTH, hidden, generator=generator) for layer in TAPS}
        self.token = 17
        self.following = [3, 100, 64, 8, 9][: self.drafts.spec.num_guesses]
        self.expected, self.confidences = self.oracle.guess_logits(self.taps, self.token, self.following)

    def loaded_from(self, folder: Path) -> Case:
        """The same, with a drafter from other files."""
        other = copy.copy(self)
        other.model = load_pair(self.decoder, folder, self.layout, self.num_drafts)
        other.drafts = other.model.drafts
        return other

    def read(self) -> Any:
        """The taps as the decoder hands them over."""
        return torch.cat([self.taps[layer] for layer in sorted(TAPS)], dim=-1)

    def computed(self, sizes: Sequence[int] = (LENGTH,)) -> tuple[Any, Any, dict[tuple[int, str], Any]]:
        """Logits and confidences of all guesses, with entries stored in pieces; and the pages."""
        cache = empty_pages(self.model, -(-LENGTH // UNIT))
        read, first = self.read(), 0
        with torch.inference_mode():
            for size in sizes:
                self.drafts.store(read[first : first + size], index_of(first, size), cache)
                first += size
            lane = BlockLane(self.token, LENGTH, torch.arange(-(-LENGTH // UNIT)))
            rows = self.drafts.run([lane], cache)
            base, state = self.drafts.base_logits(rows), self.drafts.first_state(1)
            logits, confidences = [], []
            previous = [self.token, *self.following]
            for place in range(rows.shape[1]):
                made = self.drafts.read(
                    rows[:, place], base[:, place], torch.tensor([previous[place]]), state
                )
                state = made.state
                logits.append(made.logits[0].clone())
                if made.confidence is not None:
                    confidences.append(made.confidence[0])
        return torch.stack(logits), torch.stack(confidences) if confidences else None, cache

    def difference(self, sizes: Sequence[int] = (LENGTH,)) -> float:
        logits, confidences, _ = self.computed(sizes)
        known = torch.isfinite(self.expected)
        assert logits.shape == self.expected.shape and torch.equal(torch.isfinite(logits), known)
        worst = float((logits - self.expected)[known].abs().max())
        if self.confidences is not None:
            worst = max(worst, float((confidences - self.confidences).abs().max()))
        return worst


class Shelf:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._cases: dict[str, Case] = {}

    def get(self, name: str) -> Case:
        if name not in self._cases:
            self._cases[name] = Case(self._root / name, *CASES[name])
        return self._cases[name]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: Any) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("blocks"))


@pytest.mark.parametrize("name", CASES)
def test_guesses_are_those_of_another_implementation(shelf: Shelf, name: str) -> None:
    case = shelf.get(name)
    known = torch.isfinite(case.expected)
    assert float(case.expected[known].abs().max()) > 0.5
    assert case.expected.shape[0] == case.drafts.spec.num_guesses > 1
    assert (case.confidences is None) == (case.drafts.confidence is None)
    assert case.difference() <= FP32_BOUND


LIBRARY_CASES = {
    "dflash": ("dflash_speculators", {}),
    "gated": ("dspark_speculators", {}),
    "vanilla, fill in": ("dspark_speculators", {"markov_head_type": "vanilla", "sample_from_anchor": False}),
    "rnn, whole block": (
        "dspark_speculators",
        {"markov_head_type": "rnn", "sliding_window_non_causal": True},
    ),
}


@pytest.mark.oracle
@pytest.mark.parametrize("name", LIBRARY_CASES)
def test_guesses_are_those_of_the_speculators_library(name: str, tmp_path: Path) -> None:
    """Its layers, masks and heads; blocks in the middle of a text whose end it must not see."""
    if not speculators_oracle.is_installed():
        pytest.skip("needs the speculators library")
    case = Case(tmp_path, *LIBRARY_CASES[name])
    config = json.loads((case.drafter / "config.json").read_text())
    decoder = load_file(case.decoder / "model.safetensors")
    first = 0 if config.get("sample_from_anchor", False) else 1
    behind = torch.randn(9, len(TAPS) * case.model.config.hidden_size)
    logits, confidences = speculators_oracle.guess_logits(
        config,
        load_file(case.drafter / "model.safetensors"),
        torch.cat([torch.cat([case.taps[layer] for layer in TAPS], dim=-1), behind]),
        [0] * LENGTH + [case.token, *case.following, 0],
        LENGTH,
        decoder["model.embed_tokens.weight"],
        decoder["lm_head.weight"],
    )
    computed, mine, _ = case.computed()
    assert float(logits.abs().max()) > 0.5
    assert float((computed - logits[first:]).abs().max()) <= FP32_BOUND
    if confidences is not None:
        assert mine is not None and float((mine - confidences[first:]).abs().max()) <= FP32_BOUND
    # And the implementation that the other tests compare with is the same.
    assert float((case.expected - logits[first:]).abs().max()) <= FP32_BOUND


@pytest.mark.parametrize("name", LAYOUTS)
def test_entries_do_not_depend_on_how_a_text_is_cut(shelf: Shelf, name: str) -> None:
    case = shelf.get(name)
    whole, _, pages = case.computed()
    for sizes in ((1, 2, 30, 12), (33, *[1] * 12)):
        cut, _, cut_pages = case.computed(sizes)
        assert case.difference(sizes) <= FP32_BOUND
        if case.model.kernels.implementation == "native":
            assert torch.equal(whole, cut)
            for field, stored in pages.items():
                rows = (some.flatten(0, 1)[:LENGTH] for some in (stored, cut_pages[field]))
                assert torch.equal(*rows)


def test_what_lies_behind_the_text_is_not_read(shelf: Shelf) -> None:
    """Pages are full of NaN behind it; a guess would be none."""
    for name in LAYOUTS:
        logits, _, pages = shelf.get(name).computed()
        assert torch.isfinite(logits).all()
        assert all(torch.isnan(stored.flatten(0, 1)[LENGTH:]).all() for stored in pages.values())


def test_lanes_do_not_see_each_other(shelf: Shelf) -> None:
    case = shelf.get("dspark")
    cache = empty_pages(case.model, 8)
    table = torch.arange(-(-LENGTH // UNIT))
    with torch.inference_mode():
        case.drafts.store(case.read(), index_of(0, LENGTH), cache)
        lanes = [BlockLane(5, 20, table), BlockLane(case.token, LENGTH, table), BlockLane(9, 1, table)]
        together = case.drafts.run(lanes, cache).clone()
        for number, lane in enumerate(lanes):
            alone = case.drafts.run([lane], cache)[0]
            assert torch.allclose(together[number], alone, atol=1e-5)
            if case.model.kernels.implementation == "native":
                assert torch.equal(together[number], alone)


def test_long_contexts_are_read_in_tiles(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    for tokens in (1, UNIT, 40):
        monkeypatch.setattr("milepost.kernels.block_attention.CONTEXT_TILE_TOKENS", tokens)
        for name in ("dspark", "dspark_mla", "a sliding layer", "dspark_speculators"):
            assert shelf.get(name).difference() <= FP32_BOUND


def test_pairs_may_be_neighbours(shelf: Shelf, tmp_path: Path) -> None:
    """Weights whose heads are reordered from halves to pairs compute the same."""
    case = shelf.get("dspark")

    def reordered(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        config["is_neox_style"] = False
        dim = config["head_dim"]
        order = torch.arange(dim).view(2, dim // 2).t().flatten()
        for name, tensor in tensors.items():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                tensors[name] = tensor.view(-1, dim, tensor.shape[1])[:, order].flatten(0, 1).contiguous()
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                tensors[name] = tensor[order].contiguous()

    assert case.loaded_from(rewritten(case, tmp_path, reordered)).difference() <= FP32_BOUND


# -- planted faults --------------------------------------------------------------------------------


def taps_of_the_layer_behind(case: Case, patch: pytest.MonkeyPatch) -> None:
    """Two of three, in another order."""
    case_taps = dict(zip(TAPS, [case.taps[layer] for layer in (*TAPS[1:], TAPS[0])], strict=True))
    patch.setattr(case, "taps", case_taps)


def taps_of_the_position_before(case: Case, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(case, "taps", {layer: tap.roll(1, dims=0) for layer, tap in case.taps.items()})


def blocks_one_position_on(case: Case, patch: pytest.MonkeyPatch) -> None:
    positions = dflash.block_positions
    patch.setattr(dflash, "block_positions", lambda spec, lanes: positions(spec, lanes) + 1)


def entries_not_rotated(case: Case, patch: pytest.MonkeyPatch) -> None:
    turns, store = Rotary.turns, dflash.GqaBlockAttention.store

    def only_blocks(self: Rotary, positions: Any) -> Any:
        return turns(self, positions if int(positions[0]) == LENGTH else torch.zeros_like(positions))

    def unrotated(self: dflash.GqaBlockAttention, *arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            if self._stored is not None:
                frequencies = torch.zeros_like(self._stored.inverse_frequencies)
                stored = dataclasses.replace(self._stored, inverse_frequencies=frequencies)
                inner.setattr(self, "_stored", stored)
            store(self, *arguments)

    patch.setattr(Rotary, "turns", only_blocks)
    patch.setattr(dflash.GqaBlockAttention, "store", unrotated)


def context_not_normed(case: Case, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(case.drafts.backbone, "_context_norm", SimpleNamespace(new=lambda x: x))


def rows_not_normed(case: Case, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(case.drafts.backbone, "_norm", SimpleNamespace(new=lambda x: x))


def another_mask_token(case: Case, patch: pytest.MonkeyPatch) -> None:
    spec = case.drafts.spec
    patch.setattr(
        case.drafts.backbone, "spec", dataclasses.replace(spec, mask_token_id=spec.mask_token_id - 1)
    )


def blocks_read_the_last_entry_not(case: Case, patch: pytest.MonkeyPatch) -> None:
    run = BlockBackbone.run

    def shorter(self: BlockBackbone, lanes: Any, cache: Any) -> Any:
        for field in cache.values():
            field.flatten(0, 1)[LENGTH - 1] = field.flatten(0, 1)[LENGTH - 2]
        return run(self, lanes, cache)

    patch.setattr(BlockBackbone, "run", shorter)


FAULTS = [
    taps_of_the_layer_behind,
    taps_of_the_position_before,
    blocks_one_position_on,
    entries_not_rotated,
    context_not_normed,
    rows_not_normed,
    another_mask_token,
    blocks_read_the_last_entry_not,
]


@pytest.mark.parametrize("plant", FAULTS)
@pytest.mark.parametrize("name", ["dflash", "dspark", "dspark_mla", "dspark_speculators"])
def test_planted_faults_are_seen(
    shelf: Shelf,
    name: str,
    plant: Callable[[Case, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = shelf.get(name)
    plant(case, monkeypatch)
    assert case.difference() > 10 * FP32_BOUND


def always_the_newest_token(self: MarkovHead, tokens: Any) -> Any:
    return self._kernels.embedding(torch.full_like(tokens, 17), self._table)


def no_gate(self: MarkovHead, *parts: Any) -> Any:
    return torch.full((parts[0].shape[0], self.rank), 100.0)


def no_state(self: MarkovHead, state: Any, *parts: Any) -> Any:
    return MARKOV_JOINT(self, torch.zeros_like(state), *parts)


MARKOV_JOINT = MarkovHead._joint


@pytest.mark.parametrize(
    ("name", "method", "fault"),
    [
        ("dspark", "embed", always_the_newest_token),
        ("dspark_mla", "embed", always_the_newest_token),
        ("dspark_speculators", "_joint", no_gate),
        ("fewer ids", "_joint", no_state),
    ],
)
def test_faults_in_what_the_token_before_adds_are_seen(
    shelf: Shelf, name: str, method: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MarkovHead, method, fault)
    assert shelf.get(name).difference() > 10 * FP32_BOUND


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*LAYOUTS, "fewer ids", "taps normed", "latents, whole queries"])
def test_sizes_are_counted(shelf: Shelf, name: str) -> None:
    case = shelf.get(name)
    options: dict[str, Any] = {
        "num_draft_tokens": case.num_drafts,
        "draft_method": method_of(case.layout),
        "draft_model": case.drafter,
    }
    without, about = describe(case.decoder), describe(case.decoder, **options)
    assert about.layout == case.model.layout and about.num_draft_modules == 1
    spec = case.drafts.spec
    width = spec.mla.latent_width if spec.mla else 2 * spec.gqa.kv_width if spec.gqa else 0
    assert about.bytes_per_token - without.bytes_per_token == 4 * width * len(spec.layers)
    assert about.layout.attention[-1].bytes_per_page == 0, "an entry depends on its own token's taps"
    report, plain = check_checkpoint(case.decoder, **options), check_checkpoint(case.decoder)
    assert report.num_values - plain.num_values == about.num_parameters - without.num_parameters
    assert report.unused_tensors == plain.unused_tensors


def rewritten(case: Case, folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """The drafter's files, with changes to its config and tensors."""
    from safetensors.torch import save_file

    config = json.loads((case.drafter / "config.json").read_text())
    tensors = load_file(case.drafter / "model.safetensors")
    change(config, tensors)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_copies_of_the_decoders_tensors_are_left_alone(
    shelf: Shelf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = shelf.get("dspark_mla")

    def copies(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["embed_tokens.weight"] = torch.full((131, 48), torch.nan)
        tensors["lm_head.weight"] = torch.full((131, 48), torch.nan)

    assert case.loaded_from(rewritten(case, tmp_path, copies)).difference() <= FP32_BOUND
    assert "without a use" not in caplog.text


def test_names_may_have_a_prefix(shelf: Shelf, tmp_path: Path) -> None:
    case = shelf.get("dspark")

    def prefixed(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    assert case.loaded_from(rewritten(case, tmp_path, prefixed)).difference() <= FP32_BOUND


DAMAGED: list[tuple[str, str, Any, str]] = [
    ("dspark", "fc.weight", ..., "lacks tensor fc.weight"),
    ("dspark", "hidden_norm.weight", ..., "lacks tensor hidden_norm.weight"),
    ("dspark", "confidence_head.proj.weight", ..., "lacks tensor confidence_head.proj.weight"),
    ("dspark", "markov_head.markov_w2.weight", (131, 13), r"has shape \[131, 13\], expected \[131, 12\]"),
    ("dspark", "layers.1.self_attn.k_norm.weight", ..., "lacks tensor layers.1.self_attn.k_norm.weight"),
    ("dspark_mla", "layers.0.self_attn.kv_b_proj.weight", (5, 5), "kv_b_proj.weight has shape"),
    ("dspark_mla", "context_norm.weight", ..., "lacks tensor context_norm.weight"),
    ("fewer ids", "lm_head.weight", ..., "lacks tensor lm_head.weight"),
    ("fewer ids", "d2t", ..., "lacks tensor d2t"),
]


@pytest.mark.parametrize(("name", "tensor", "shape", "message"), DAMAGED)
def test_damaged_files_are_refused_by_name(
    shelf: Shelf, tmp_path: Path, name: str, tensor: str, shape: Any, message: str
) -> None:
    case = shelf.get(name)

    def damage(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        if shape is ...:
            del tensors[tensor]
        else:
            tensors[tensor] = torch.zeros(shape)

    folder = rewritten(case, tmp_path / "drafter", damage)
    with pytest.raises(CheckpointFileError, match=message):
        load_pair(case.decoder, folder, case.layout, case.num_drafts)


def test_a_table_that_leads_nowhere_is_refused(shelf: Shelf, tmp_path: Path) -> None:
    case = shelf.get("fewer ids")

    def damage(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["d2t"][3] = 500

    folder = rewritten(case, tmp_path / "drafter", damage)
    with pytest.raises(ConfigError, match="outside of the vocabulary of 131") as raised:
        load_pair(case.decoder, folder, case.layout, case.num_drafts)
    assert raised.value.field == "draft_model.draft_vocab_size"
