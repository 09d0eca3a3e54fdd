"""Draft modules against implementations that are not ours, and what is refused at start.

A module is one decoder layer over projected inputs. The projection is recomputed here, from the published
formula; the layer, its output norm and its head run in transformers or mlx-lm, as a decoder of one layer
whose embeddings are the projected inputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from tests.support.checkpoints import write_checkpoint  # noqa: E402
from tests.support.draft_checkpoints import (  # noqa: E402
    DRAFT_FAMILIES,
    decoder_prefix,
    is_qwen,
    one_layer_config,
    text_of,
    with_drafts,
)
from tests.support.families import write_family  # noqa: E402

from milepost.errors import CheckpointFileError, ConfigError  # noqa: E402
from milepost.kernels.index import AttentionIndex, RowSpan  # noqa: E402
from milepost.models.description import describe  # noqa: E402
from milepost.models.dry_run import check_checkpoint  # noqa: E402
from milepost.models.inputs import CacheFields, StepInputs  # noqa: E402
from milepost.models.layout import KEY_VALUE_FIELD, LATENT_FIELD  # noqa: E402
from milepost.models.loading import LoadedModel, load_model  # noqa: E402
from milepost.models.mtp import MtpModules  # noqa: E402

FP32_BOUND = 1e-4
NUM_ROWS = 60
UNIT = 16


def fields(model: LoadedModel, num_pages: int) -> CacheFields:
    """Pages for the entries of all modules, full of NaN."""
    group = model.layout.attention[-1]
    return {
        (field.layer, field.name): torch.full((num_pages, UNIT, field.width), torch.nan)
        for field in group.token_fields
    }


def index_of(position: int, count: int) -> AttentionIndex:
    """Rows at [position, position + count) of one sequence whose pages are 0, 1, 2 ..."""
    places = torch.arange(position, position + count)
    pages = torch.arange(-(-(position + count) // UNIT))
    return AttentionIndex((RowSpan(0, count, position),), (pages,), places // UNIT, places % UNIT)


def run_pieces(
    model: LoadedModel, module: int, tokens: Any, hidden: Any, sizes: tuple[int, ...]
) -> tuple[Any, Any, CacheFields]:
    """Logits and handed-on states of all rows, computed in pieces; and the pages."""
    assert model.drafts is not None
    cache = fields(model, -(-NUM_ROWS // UNIT))
    logits, handed = [], []
    first = 0
    with torch.inference_mode():
        for size in sizes:
            rows = slice(first, first + size)
            inputs = StepInputs(tokens[rows], index_of(first, size), None)
            result = model.drafts.run(module, inputs, hidden[rows], cache)
            logits.append(model.drafts.logits(module, result.normed).clone())
            handed.append(result.handed_on.clone())
            first += size
    return torch.cat(logits), torch.cat(handed), cache


def norm(x: Any, weight: Any, eps: float, offset: float) -> Any:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + offset)


def stem(
    name: str, config: dict[str, Any], tensors: dict[str, Any], module: int, tokens: Any, hidden: Any
) -> Any:
    """The module's projected inputs [N, D], in plain torch from the published formulas."""
    text, prefix = text_of(config), decoder_prefix(tensors)
    embedded = tensors[prefix + "embed_tokens.weight"][tokens]
    if is_qwen(name):
        parts = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc")
        offset = 1.0
    else:
        at = f"{prefix}layers.{text['num_hidden_layers'] + module}."
        parts = (at + "enorm", at + "hnorm", at + "eh_proj")
        offset = 0.0
        embedded = torch.cat([torch.zeros_like(embedded[:1]), embedded[1:]])
    first, second, projection = (tensors[f"{part}.weight"] for part in parts)
    eps = text["rms_norm_eps"]
    joined = torch.cat([norm(embedded, first, eps, offset), norm(hidden, second, eps, offset)], dim=-1)
    return joined @ projection.T


def oracle_logits(
    directory: Path, name: str, config: dict[str, Any], tensors: dict[str, Any], module: int, inputs: Any
) -> Any:
    """A decoder of one layer with the module's weights, over `inputs`; in mlx-lm for Kimi K3, else in
    transformers."""
    text, prefix = text_of(config), decoder_prefix(tensors)
    one = one_layer_config(name)
    vocab, hidden = text["vocab_size"], text["hidden_size"]
    table = torch.zeros(vocab, hidden)
    table[:NUM_ROWS] = inputs
    if is_qwen(name):
        at, norm_name, head_name = f"mtp.layers.{module}.", "mtp.norm.weight", "lm_head.weight"
    else:
        at = f"{prefix}layers.{text['num_hidden_layers'] + module}."
        norm_name, head_name = at + "shared_head.norm.weight", at + "shared_head.head.weight"
    head_prefix = "language_model." if name == "kimi_k3" else ""
    layer = {
        n.replace(at, f"{prefix}layers.0."): t
        for n, t in tensors.items()
        if n.startswith(at) and not any(part in n for part in ("enorm", "hnorm", "eh_proj", "shared_head"))
    }
    others = {
        prefix + "embed_tokens.weight": table,
        prefix + "norm.weight": tensors[norm_name].clone(),
        head_prefix + "lm_head.weight": tensors[head_name].clone(),
    }
    write_checkpoint(directory, one, tensors={**layer, **others})
    ids = tuple(range(NUM_ROWS))
    if name == "kimi_k3":
        pytest.importorskip("mlx_lm")
        from tests.support.mlx_oracle import mlx_logits

        return mlx_logits(directory, ids)
    from transformers import AutoModelForCausalLM

    oracle, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        return oracle.eval()(torch.tensor([ids])).logits[0].float()


class Case:
    """Two modules of a family, and what they should compute."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.root = name, root
        self.config, self.tensors = with_drafts(name, 2)
        write_checkpoint(root / "model", self.config, tensors=self.tensors)
        self.model = load_model(root / "model", num_draft_tokens=2)
        generator = torch.Generator().manual_seed(9)
        text = text_of(self.config)
        self.tokens = torch.randint(text["vocab_size"], (NUM_ROWS,), generator=generator)
        self.hidden = torch.randn(NUM_ROWS, text["hidden_size"], generator=generator)
        self.expected = [self._expected(module) for module in range(2)]

    def _expected(self, module: int) -> Any:
        inputs = stem(self.name, self.config, self.tensors, module, self.tokens, self.hidden)
        directory = self.root / f"one-{module}"
        return oracle_logits(directory, self.name, self.config, self.tensors, module, inputs)

    def difference(self, module: int, sizes: tuple[int, ...] = (NUM_ROWS,)) -> float:
        logits, _, _ = run_pieces(self.model, module, self.tokens, self.hidden, sizes)
        return float((logits - self.expected[module]).abs().max())


@pytest.fixture(scope="module", params=DRAFT_FAMILIES)
def case(request: Any, tmp_path_factory: Any) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.oracle
@pytest.mark.parametrize("sizes", [(NUM_ROWS,), (1, 2, 30, 27), (33, *[1] * 27)], ids=str)
def test_logits_of_modules_are_those_of_another_implementation(case: Case, sizes: tuple[int, ...]) -> None:
    for module in range(2):
        assert float(case.expected[module].abs().max()) > 0.5
        assert case.difference(module, sizes) <= FP32_BOUND


def hidden_one_position_off(case: Case, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(case, "hidden", case.hidden.roll(1, dims=0))


def halves_swapped(case: Case, patch: pytest.MonkeyPatch) -> None:
    for parts in case.model.drafts._modules:  # type: ignore[union-attr]
        one, other = parts.embedding_norm, parts.hidden_norm
        first, second = one._weight.clone(), other._weight.clone()
        patch.setattr(one, "_weight", second)
        patch.setattr(other, "_weight", first)
        break


def position_one_off(case: Case, patch: pytest.MonkeyPatch) -> None:
    """One entry that does not exist is seen by all others."""
    run = MtpModules.run

    def shifted(self: MtpModules, module: int, inputs: Any, hidden: Any, cache: Any) -> Any:
        for pages in cache.values():
            pages[0, 0] = 0.0
        index = index_of(inputs.attention.spans[0].position + 1, hidden.shape[0])
        return run(self, module, StepInputs(inputs.token_ids, index, None), hidden, cache)

    patch.setattr(MtpModules, "run", shifted)


def norm_left_out(case: Case, patch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(case.hidden.shape[1])
    patch.setattr(case.model.drafts._modules[0].hidden_norm, "_weight", weight)  # type: ignore[union-attr]


@pytest.mark.oracle
@pytest.mark.parametrize("plant", [hidden_one_position_off, halves_swapped, position_one_off, norm_left_out])
def test_planted_faults_are_seen(
    case: Case, plant: Callable[[Case, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(case, monkeypatch)
    assert case.difference(0) > 10 * FP32_BOUND


def test_what_is_handed_on(case: Case) -> None:
    """Qwen hands on what its head reads, DeepSeek's layout what comes before the norm; both the taps and
    the outputs."""
    assert case.model.drafts is not None
    _, handed, _ = run_pieces(case.model, 0, case.tokens, case.hidden, (NUM_ROWS,))
    with torch.inference_mode():
        parts = case.model.drafts._modules[0]
        logits, _, _ = run_pieces(case.model, 0, case.tokens, case.hidden, (NUM_ROWS,))
        read = handed if is_qwen(case.name) else parts.norm(handed)
        assert torch.allclose(case.model.drafts.logits(0, read), logits, atol=1e-5)
        taps = case.model.drafts.taps(case.hidden)
        expected = case.model.decoder.normed(case.hidden) if is_qwen(case.name) else case.hidden
        assert torch.equal(taps, expected)


def test_storing_alone_stores_what_a_whole_pass_stores(case: Case) -> None:
    assert case.model.drafts is not None
    _, _, expected = run_pieces(case.model, 0, case.tokens, case.hidden, (NUM_ROWS,))
    stored = []
    for sizes in ((NUM_ROWS,), (1, 2, 30, 27)):
        cache = fields(case.model, -(-NUM_ROWS // UNIT))
        first = 0
        with torch.inference_mode():
            for size in sizes:
                rows = slice(first, first + size)
                inputs = StepInputs(case.tokens[rows], index_of(first, size), None)
                case.model.drafts.store(0, inputs, case.hidden[rows], cache)
                first += size
        stored.append(cache)
    field = (case.model.drafts.layer(0), KEY_VALUE_FIELD if is_qwen(case.name) else LATENT_FIELD)
    whole, cut = (cache[field].flatten(0, 1)[:NUM_ROWS] for cache in stored)
    assert torch.allclose(whole, expected[field].flatten(0, 1)[:NUM_ROWS], atol=1e-5)
    if case.model.kernels.implementation == "native":
        assert torch.equal(whole, cut)


def test_sizes_of_drafts_are_counted(case: Case) -> None:
    directory = case.root / "model"
    without, one, two, more = (describe(directory, num_draft_tokens=n) for n in (0, 1, 2, 8))
    assert (without.num_draft_modules, one.num_draft_modules, more.num_draft_modules) == (0, 1, 2)
    assert one.bytes_per_token - without.bytes_per_token == two.bytes_per_token - one.bytes_per_token > 0
    assert two.layout == more.layout == case.model.layout
    assert two.layout.attention[-1].bytes_per_page == 2 * 4 * case.hidden.shape[1]
    assert two.layout.geometry(UNIT).unit_bytes > without.layout.geometry(UNIT).unit_bytes
    report = check_checkpoint(directory, num_draft_tokens=2)
    plain = check_checkpoint(directory)
    assert report.num_values - plain.num_values == two.num_parameters - without.num_parameters
    assert not report.unused_tensors and plain.unused_tensors


def test_modules_stay_in_their_files_unless_somebody_drafts(case: Case) -> None:
    model = load_model(case.root / "model")
    assert model.drafts is None
    prefixes = model.config.skipped
    assert model.unused_tensors and all(name.startswith(prefixes) for name in model.unused_tensors)


@pytest.mark.parametrize("name", DRAFT_FAMILIES)
def test_checkpoints_without_modules_are_refused_by_name(name: str, tmp_path: Path) -> None:
    write_family(tmp_path, name)
    with pytest.raises(ConfigError, match="use .*method 'ngram'") as raised:
        load_model(tmp_path, num_draft_tokens=3)
    assert raised.value.field == "speculative_config"
    if is_qwen(name):
        assert "the files lack mtp.fc.weight" in str(raised.value)
        config = json.loads((tmp_path / "config.json").read_text())
        text_of(config)["mtp_num_hidden_layers"] = 0
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError, match="mtp_num_hidden_layers is 0 or missing"):
            describe(tmp_path, num_draft_tokens=1)
    else:
        assert "num_nextn_predict_layers is 0 or missing" in str(raised.value)


def test_declared_modules_that_are_not_in_the_files(tmp_path: Path) -> None:
    config, tensors = with_drafts("kimi_linear", 1)
    missing = {n: t for n, t in tensors.items() if not n.startswith("model.layers.5.")}
    write_checkpoint(tmp_path / "none", config, tensors=missing)
    with pytest.raises(ConfigError, match=r"lack model\.layers\.5\.eh_proj\.weight"):
        load_model(tmp_path / "none", num_draft_tokens=1)
    del tensors["model.layers.5.hnorm.weight"]
    write_checkpoint(tmp_path / "one", config, tensors=tensors)
    with pytest.raises(CheckpointFileError, match=r"lacks tensor model\.layers\.5\.hnorm\.weight"):
        load_model(tmp_path / "one", num_draft_tokens=1)


def test_the_decoders_head_serves_modules_that_have_none(tmp_path: Path) -> None:
    config, tensors = with_drafts("kimi_linear", 1, own_heads=False)
    model = load_model(write_checkpoint(tmp_path, config, tensors=tensors), num_draft_tokens=1)
    assert model.drafts is not None
    assert model.drafts._modules[0].head is model.decoder.head
