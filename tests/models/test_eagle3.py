"""EAGLE-3 drafters against implementations that are not ours, and what is refused at start."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402
from tests.support import speculators_oracle  # noqa: E402
from tests.support.checkpoints import write_checkpoint  # noqa: E402
from tests.support.draft_checkpoints import decoder_prefix, text_of  # noqa: E402
from tests.support.driver import Driver  # noqa: E402
from tests.support.eagle3_checkpoints import LAYOUTS, TAP_IDS, layer_of, write_pair  # noqa: E402
from tests.support.eagle3_oracle import Eagle3Oracle  # noqa: E402

from milepost.errors import CheckpointFileError, ConfigError  # noqa: E402
from milepost.kernels.index import AttentionIndex, RowSpan  # noqa: E402
from milepost.models.description import describe  # noqa: E402
from milepost.models.drafters import METHODS, method_of  # noqa: E402
from milepost.models.dry_run import check_checkpoint  # noqa: E402
from milepost.models.identity import fingerprint  # noqa: E402
from milepost.models.inputs import CacheFields, StepInputs  # noqa: E402
from milepost.models.loading import LoadedModel, load_model  # noqa: E402
from milepost.runner.drafters import RUNNERS  # noqa: E402

FP32_BOUND = 1e-4
NUM_ROWS = 60
NUM_GUESSED = 4
UNIT = 16
FAMILY = {"llama": "kimi_linear", "speculators": "qwen3_5", "mla": "qwen3_next", "k3": "kimi_k3"}
"""A decoder for every layout of drafters."""


def load_pair(decoder: Path, drafter: Path, num_drafts: int = 3, **options: Any) -> LoadedModel:
    return load_model(
        decoder, num_draft_tokens=num_drafts, draft_method="eagle3", draft_model=drafter, **options
    )


def index_of(position: int, count: int) -> AttentionIndex:
    """Rows at [position, position + count) of one sequence whose pages are 0, 1, 2 ..."""
    places = torch.arange(position, position + count)
    pages = torch.arange(-(-(position + count) // UNIT))
    return AttentionIndex((RowSpan(0, count, position),), (pages,), places // UNIT, places % UNIT)


def decoder_outputs(bare: LoadedModel, tokens: Sequence[int], layers: Sequence[int]) -> Any:
    """Of some layers of a model without a drafter, side by side."""
    return Driver(bare, match_unit=UNIT, cache_bytes=8 << 20).decoder_states(tokens, layers)


class Case:
    """A decoder and a drafter, and what the drafter should compute behind some tokens of a text.

    The first rows are processed tokens, with outputs of decoder layers; the last ones guesses, each made
    from what the row before handed on.
    """

    def __init__(self, layout: str, root: Path) -> None:
        self.layout = layout
        self.decoder, self.drafter = write_pair(root, FAMILY[layout], layout)
        self.model = load_pair(self.decoder, self.drafter)
        self.bare = load_model(self.decoder)
        self.config = json.loads((self.drafter / "config.json").read_text())
        self.tensors = load_file(self.drafter / "model.safetensors")
        decoder_tensors = load_file(self.decoder / "model.safetensors")
        self.embedding = decoder_tensors[decoder_prefix(decoder_tensors) + "embed_tokens.weight"]
        (self.head,) = (t for name, t in decoder_tensors.items() if name.endswith("lm_head.weight"))
        generator = torch.Generator().manual_seed(9)
        vocab = self.embedding.shape[0]
        self.tokens = torch.randint(vocab, (NUM_ROWS + NUM_GUESSED + 1,), generator=generator)
        self.oracle = Eagle3Oracle(self.config, self.tensors, self.embedding, self.head)
        self.layers = self.model.drafts.tap_layers
        self.expected = self.expected_logits(self.oracle)

    def taps(self) -> Any:
        """Of the processed tokens, from our decoder, [N, taps * D]."""
        return decoder_outputs(self.bare, self.tokens[:NUM_ROWS].tolist(), self.layers)

    def expected_logits(self, oracle: Any) -> Any:
        taps = self.taps().view(NUM_ROWS, len(TAP_IDS), -1)
        hidden, tokens = oracle.hidden(taps), self.tokens[1:]
        for step in range(NUM_GUESSED + 1):
            logits, handed_on = oracle.rows(tokens[: NUM_ROWS + step], hidden, step)
            hidden = torch.cat([hidden, handed_on[-1:]])
        return logits

    def logits(self, sizes: tuple[int, ...] = (NUM_ROWS,)) -> Any:
        """The same from ours, processed rows in pieces and guesses one by one."""
        drafts, first, parts = self.model.drafts, 0, []
        cache, rows = fields(self.model), [*sizes, *[1] * NUM_GUESSED]
        with torch.inference_mode():
            hidden = drafts.taps(self.taps())
            for size in rows:
                inputs = StepInputs(self.tokens[first + 1 : first + size + 1], index_of(first, size), None)
                result = drafts.run(0, inputs, hidden[first : first + size], cache)
                parts.append(drafts.logits(0, result.normed).clone())
                first += size
                if first >= NUM_ROWS:
                    hidden = torch.cat([hidden, result.handed_on[-1:]])
        return torch.cat(parts)

    def difference(self, sizes: tuple[int, ...] = (NUM_ROWS,)) -> float:
        ours, theirs = (logits.clamp_min(-1e9) for logits in (self.logits(sizes), self.expected))
        return float((ours - theirs).abs().max())


def fields(model: LoadedModel) -> CacheFields:
    """Pages for the entries, full of NaN."""
    count = -(-(NUM_ROWS + NUM_GUESSED + 1) // UNIT)
    return {
        (field.layer, field.name): torch.full((count, UNIT, field.width), torch.nan)
        for field in model.layout.attention[-1].token_fields
    }


@pytest.fixture(scope="module", params=LAYOUTS)
def case(request: Any, tmp_path_factory: Any) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


# -- what is computed ------------------------------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.parametrize("sizes", [(NUM_ROWS,), (1, 2, 30, 27), (33, *[1] * 27)], ids=str)
def test_logits_are_those_of_another_implementation(case: Case, sizes: tuple[int, ...]) -> None:
    assert float(case.expected[case.expected.isfinite()].abs().max()) > 0.5
    assert case.difference(sizes) <= FP32_BOUND
    num_known = case.config.get("draft_vocab_size", case.embedding.shape[0])
    assert (case.expected.isfinite().sum(-1) == num_known).all()


@pytest.mark.oracle
@pytest.mark.parametrize("before_residual", [True, False])
def test_rows_are_those_of_the_speculators_library(before_residual: bool, tmp_path: Path) -> None:
    if not speculators_oracle.is_installed():
        pytest.skip("needs the speculators library")
    changes = {"norm_before_residual": before_residual, "norm_output": False}
    decoder, drafter = write_pair(tmp_path, "qwen3_5", "speculators", **changes)
    model, tensors = load_pair(decoder, drafter), load_file(drafter / "model.safetensors")
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(131, (NUM_ROWS,), generator=generator)
    hidden = torch.randn(NUM_ROWS, HIDDEN, generator=generator)
    with torch.inference_mode():
        inputs = StepInputs(tokens, index_of(0, NUM_ROWS), None)
        ours = model.drafts.run(0, inputs, hidden, fields(model)).handed_on
        embedded = model.decoder.embed(tokens)
    config = json.loads((drafter / "config.json").read_text())
    theirs = speculators_oracle.eagle3_rows(config, tensors, embedded.clone(), hidden)
    assert float((ours - theirs).abs().max()) <= FP32_BOUND


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["kimi_linear", "qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_taps_are_the_residual_stream_behind_a_layer(family: str, tmp_path: Path) -> None:
    """Published ids count from one: id i of `hidden_states` is what layer i reads and layer i - 1 wrote."""
    from transformers import AutoModelForCausalLM

    decoder, drafter = write_pair(tmp_path, family, "llama")
    model = load_pair(decoder, drafter)
    tokens = torch.randint(131, (NUM_ROWS,), generator=torch.Generator().manual_seed(2))
    ours = decoder_outputs(load_model(decoder), tokens.tolist(), model.drafts.tap_layers)
    oracle = AutoModelForCausalLM.from_pretrained(
        decoder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        states = oracle(tokens.unsqueeze(0), output_hidden_states=True).hidden_states
    theirs = torch.cat([states[number][0] for number in TAP_IDS], -1)
    assert float((ours - theirs).abs().max()) <= FP32_BOUND


@pytest.mark.oracle
def test_taps_of_residuals_over_depth_are_the_running_sum(tmp_path: Path) -> None:
    """Kimi K3 in mlx-lm: what the layers of a block have added so far, without the blocks before."""
    pytest.importorskip("mlx_lm")
    from tests.support.mlx_oracle import mlx_layer_outputs

    decoder, drafter = write_pair(tmp_path, "kimi_k3", "k3")
    model = load_pair(decoder, drafter)
    block_layers = model.config.attn_res_block_layers
    assert block_layers is not None and block_layers <= TAP_IDS[1]
    tokens = tuple(range(7, 47))
    ours = decoder_outputs(load_model(decoder), tokens, model.drafts.tap_layers)
    sums = mlx_layer_outputs(decoder, tokens)
    theirs = torch.cat([sums[layer] for layer in model.drafts.tap_layers], -1)
    assert float((ours - theirs).abs().max()) <= FP32_BOUND


def tap_one_layer_off(case: Case, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(case, "layers", (case.layers[0], case.layers[1] - 1, case.layers[2]))


def taps_one_position_off(case: Case, patch: pytest.MonkeyPatch) -> None:
    taps = case.taps().roll(1, dims=0)
    patch.setattr(case, "taps", lambda: taps)


def guesses_one_position_late(case: Case, patch: pytest.MonkeyPatch) -> None:
    """Rotary position + 1: one entry that does not exist lies between the text and the guesses."""
    run = type(case.model.drafts).run

    def late(self: Any, module: int, inputs: Any, hidden: Any, cache: Any) -> Any:
        span = inputs.attention.spans[0]
        if span.position >= NUM_ROWS:
            for pages in cache.values():
                pages.flatten(0, 1)[NUM_ROWS].nan_to_num_(nan=0.0)
            inputs = StepInputs(inputs.token_ids, index_of(span.position + 1, 1), None)
        return run(self, module, inputs, hidden, cache)

    patch.setattr(type(case.model.drafts), "run", late)


def hidden_norm_left_out(case: Case, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(case.model.drafts, "_hidden_norm", lambda x, out: out.copy_(x))


def token_table_left_out(case: Case, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(case.model.drafts, "_token_ids", torch.arange(case.config["draft_vocab_size"]))


def other_residual(case: Case, patch: pytest.MonkeyPatch) -> None:
    spec = case.model.drafts._drafter
    changed = dataclasses.replace(spec, adds_to_normed=not spec.adds_to_normed)
    patch.setattr(case.model.drafts, "_drafter", changed)


def other_state_handed_on(case: Case, patch: pytest.MonkeyPatch) -> None:
    spec = case.model.drafts._drafter
    changed = dataclasses.replace(spec, hands_on_normed=not spec.hands_on_normed)
    patch.setattr(case.model.drafts, "_drafter", changed)


def halves_swapped(case: Case, patch: pytest.MonkeyPatch) -> None:
    one, other = case.model.drafts._embedding_norm, case.model.drafts._hidden_norm
    patch.setattr(case.model.drafts, "_embedding_norm", other)
    patch.setattr(case.model.drafts, "_hidden_norm", one)


FAULTS = [
    tap_one_layer_off,
    taps_one_position_off,
    guesses_one_position_late,
    hidden_norm_left_out,
    token_table_left_out,
    other_residual,
    other_state_handed_on,
    halves_swapped,
]


@pytest.mark.oracle
@pytest.mark.parametrize("plant", FAULTS)
def test_planted_faults_are_seen(
    case: Case, plant: Callable[[Case, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if plant is token_table_left_out and "draft_vocab_size" not in case.config:
        assert case.model.drafts._token_ids is None, "it knows all tokens"
        return
    plant(case, monkeypatch)
    assert case.difference() > 10 * FP32_BOUND


@pytest.mark.oracle
def test_the_oracle_sees_positions(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guessed rows one rotary position later, and nothing else."""
    monkeypatch.setattr(case.oracle, "position_shift", 1)
    shifted = case.expected_logits(case.oracle)
    if case.oracle.rotary is None:
        assert torch.equal(shifted, case.expected), "this drafter has no positions"
        return
    difference = (shifted - case.expected)[shifted.isfinite()].abs().max()
    assert float(difference) > 10 * FP32_BOUND
    assert torch.equal(shifted[:NUM_ROWS], case.expected[:NUM_ROWS])


@pytest.mark.parametrize("norm", ["norm_before_fc", "both"])
def test_taps_may_be_normed_together(norm: str, tmp_path: Path) -> None:
    changes = {"norm_before_fc": True, "fc_norm": norm == "both"}
    decoder, drafter = write_pair(tmp_path, "kimi_linear", "llama", **changes)
    model = load_pair(decoder, drafter)
    tensors = load_file(drafter / "model.safetensors")
    oracle = Eagle3Oracle(
        json.loads((drafter / "config.json").read_text()), tensors, *[torch.zeros(131, 48)] * 2
    )
    taps = torch.randn(7, 3 * 48, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        assert float((model.drafts.taps(taps) - oracle.hidden(taps.view(7, 3, 48))).abs().max()) <= FP32_BOUND


def test_storing_alone_stores_what_a_whole_pass_stores(case: Case) -> None:
    drafts, stored = case.model.drafts, []
    with torch.inference_mode():
        hidden = drafts.taps(case.taps())
        for method, sizes in (
            (drafts.run, (NUM_ROWS,)),
            (drafts.store, (NUM_ROWS,)),
            (drafts.store, (1, 2, 30, 27)),
        ):
            cache, first = fields(case.model), 0
            for size in sizes:
                rows = slice(first, first + size)
                inputs = StepInputs(case.tokens[1:][rows], index_of(first, size), None)
                method(0, inputs, hidden[rows], cache)
                first += size
            (pages,) = cache.values()
            stored.append(pages.flatten(0, 1)[:NUM_ROWS])
    assert torch.allclose(stored[0], stored[1], atol=1e-5)
    if case.model.kernels.implementation == "native":
        assert torch.equal(stored[1], stored[2])


def test_a_row_does_not_depend_on_how_many_there_are(case: Case) -> None:
    if case.model.kernels.implementation == "native":
        whole = case.logits()
        assert torch.equal(whole, case.logits((1, 2, 30, 27)))


# -- sizes and identity ----------------------------------------------------------------------------


def options_of(case: Case) -> dict[str, Any]:
    return {"num_draft_tokens": 3, "draft_method": "eagle3", "draft_model": case.drafter}


def test_sizes_are_counted(case: Case) -> None:
    without, about = describe(case.decoder), describe(case.decoder, **options_of(case))
    assert about.layout == case.model.layout
    (entry,) = about.layout.attention[-1].token_fields
    assert about.bytes_per_token - without.bytes_per_token == 4 * entry.width
    assert about.layout.attention[-1].bytes_per_page == 4 * layer_of(case.config)["hidden_size"]
    assert about.draft_parameters == about.num_parameters - without.num_parameters
    used = {n: t for n, t in case.tensors.items() if n not in ("d2t", "t2d")}
    assert about.draft_parameters == sum(t.numel() for t in used.values())
    report, plain = check_checkpoint(case.decoder, **options_of(case)), check_checkpoint(case.decoder)
    assert report.num_values - plain.num_values == about.draft_parameters
    assert report.unused_tensors == plain.unused_tensors
    assert report.num_bytes > plain.num_bytes


def test_what_is_stored_belongs_to_one_drafter(case: Case, tmp_path: Path) -> None:
    other = {n: t + 1 if n == "norm.weight" else t for n, t in case.tensors.items()}
    directories = [None, case.drafter, write_checkpoint(tmp_path, case.config, tensors=other)]
    prints = {
        fingerprint(
            case.decoder,
            case.model.layout,
            dtype="float32",
            numerics="n",
            exactness="exact",
            drafter=directory,
        )
        for directory in directories
    }
    assert len(prints) == 3


def test_the_method_is_found_in_the_config(case: Case) -> None:
    assert method_of(case.drafter) == "eagle3"
    with pytest.raises(ConfigError, match="names no drafter that is known; say its method"):
        method_of(case.decoder)


def test_every_method_has_a_runner(case: Case) -> None:
    assert case.model.drafter is not None and case.model.drafter.runner in RUNNERS
    assert set(METHODS) >= {"mtp", "eagle3"}


# -- refusals --------------------------------------------------------------------------------------

HIDDEN, VOCAB, NUM_LAYERS = 48, 131, 5

WRONG_CONFIGS: list[tuple[dict[str, Any], str, str]] = [
    (
        {"vocab_size": 200},
        "draft_model.vocab_size",
        "is 200, but the model's is 131; use the drafter that was",
    ),
    ({"hidden_size": 64}, "draft_model.hidden_size", "is 64, but the model's is 48"),
    (
        {"target_hidden_size": 64},
        "draft_model.target_hidden_size",
        "is 64, but the model's hidden_size is 48",
    ),
    (
        {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]},
        "draft_model.eagle_aux_hidden_state_layer_ids",
        "layer 6",
    ),
    ({"eagle_aux_hidden_state_layer_ids": [0, 3]}, "draft_model.eagle_aux_hidden_state_layer_ids", "layer 0"),
    (
        {"eagle_aux_hidden_state_layer_ids": [3, 1]},
        "draft_model.eagle_aux_hidden_state_layer_ids",
        "must ascend",
    ),
    (
        {"eagle_aux_hidden_state_layer_ids": []},
        "draft_model.eagle_aux_hidden_state_layer_ids",
        "names no layer",
    ),
    ({"num_aux_hidden_states": 4}, "draft_model.num_aux_hidden_states", "is 4, but 3 layers are named"),
    ({"num_hidden_layers": 2}, "draft_model.num_hidden_layers", "only 1 is supported"),
    ({"attention_bias": True}, "draft_model.attention_bias", "without biases"),
    ({"hidden_act": "gelu"}, "draft_model.hidden_act", "'gelu' is not supported"),
    ({"draft_vocab_size": 132}, "draft_model.draft_vocab_size", "must be at most 131"),
    ({"num_attention_heads": 3}, "draft_model.num_key_value_heads", "must divide"),
    ({"speculators_model_type": "peagle"}, "draft_model.speculators_model_type", "is 'peagle'"),
    ({"layer_types": ["sliding_attention"]}, "draft_model.layer_types", "sliding windows are not supported"),
    ({"quantization_config": {}}, "draft_model.quantization_config", "use a drafter in bf16 or fp32"),
    ({"intermediate_size": None}, "draft_model.intermediate_size", "is missing"),
    ({"fc_norm": "yes"}, "draft_model.fc_norm", "must be true or false"),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: Any) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Directory of a decoder; config and tensors of a drafter for it."""
    decoder, drafter = write_pair(tmp_path_factory.mktemp("pair"), "kimi_linear", "llama")
    config = json.loads((drafter / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = config.pop("eagle_config")[
        "eagle_aux_hidden_state_layer_ids"
    ]
    return decoder, config, load_file(drafter / "model.safetensors")


@pytest.mark.parametrize(("changes", "field", "message"), WRONG_CONFIGS, ids=lambda value: str(value)[:40])
def test_configs_that_cannot_work_are_refused_by_key(
    pair: tuple[Path, dict[str, Any], dict[str, Any]],
    changes: dict[str, Any],
    field: str,
    message: str,
    tmp_path: Path,
) -> None:
    decoder, config, tensors = pair
    drafter = write_checkpoint(tmp_path, {**config, **changes}, tensors=tensors)
    with pytest.raises(ConfigError) as raised:
        describe(decoder, num_draft_tokens=2, draft_method="eagle3", draft_model=drafter)
    assert raised.value.field == field and message in str(raised.value)


def test_layers_that_are_not_named(pair: tuple[Path, dict[str, Any], dict[str, Any]], tmp_path: Path) -> None:
    """The usual ones, where the decoder has enough layers for them."""
    decoder, config, tensors = pair
    config = {key: value for key, value in config.items() if key != "eagle_aux_hidden_state_layer_ids"}
    drafter = write_checkpoint(tmp_path / "drafter", config, tensors=tensors)
    with pytest.raises(ConfigError, match=r"is missing, and the usual layers would be \[2, 2, 2\]; name"):
        describe(decoder, num_draft_tokens=2, draft_method="eagle3", draft_model=drafter)
    text = json.loads((decoder / "config.json").read_text())
    lists = {"kda_layers": list(range(1, 12)), "full_attn_layers": [12]}
    text |= {"num_hidden_layers": 12, "linear_attn_config": text["linear_attn_config"] | lists}
    (tmp_path / "config.json").write_text(json.dumps(text))
    about = describe(tmp_path, num_draft_tokens=2, draft_method="eagle3", draft_model=drafter)
    assert about.drafter is not None and about.drafter.tap_layers == (1, 5, 8)


REQUIRED = ["fc", "norm", "midlayer.hidden_norm", "midlayer.self_attn.o_proj", "midlayer.mlp.up_proj"]


@pytest.mark.parametrize("name", REQUIRED)
def test_missing_tensors_are_named(
    pair: tuple[Path, dict[str, Any], dict[str, Any]], name: str, tmp_path: Path
) -> None:
    decoder, config, tensors = pair
    kept = {n: t for n, t in tensors.items() if n != f"{name}.weight"}
    drafter = write_checkpoint(tmp_path, config, tensors=kept)
    with pytest.raises(CheckpointFileError, match=f"lacks tensor {name}.weight") as raised:
        load_pair(decoder, drafter)
    assert "take config.json and tensors from the same checkpoint" in str(raised.value)


def test_shapes_of_other_drafters_are_named(
    pair: tuple[Path, dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    decoder, config, tensors = pair
    changed = {**tensors, "fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)}
    drafter = write_checkpoint(tmp_path, config, tensors=changed)
    with pytest.raises(CheckpointFileError, match=r"fc\.weight has shape \[48, 96\], expected \[48, 144\]"):
        load_pair(decoder, drafter)
    with pytest.raises(CheckpointFileError, match=r"fc\.weight has shape \[48, 96\]"):
        check_checkpoint(decoder, num_draft_tokens=2, draft_method="eagle3", draft_model=drafter)


@pytest.mark.parametrize(
    ("row", "offset", "message"),
    [
        (7, 200, "makes token 207 of row 7"),
        (3, -4, "makes token -1 of row 3"),
        (5, -1, "same token of several rows"),
    ],
)
def test_tables_of_tokens_that_lead_nowhere(
    pair: tuple[Path, dict[str, Any], dict[str, Any]], row: int, offset: int, message: str, tmp_path: Path
) -> None:
    decoder, config, tensors = pair
    table = torch.zeros_like(tensors["d2t"])
    table[row] = offset
    drafter = write_checkpoint(tmp_path, config, tensors={**tensors, "d2t": table})
    with pytest.raises(ConfigError, match=message) as raised:
        load_pair(decoder, drafter)
    assert raised.value.field == "speculative_config"


def test_a_reduced_vocabulary_needs_its_table_and_its_head(
    pair: tuple[Path, dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    decoder, config, tensors = pair
    without = {n: t for n, t in tensors.items() if n != "d2t"}
    drafter = write_checkpoint(tmp_path / "table", config, tensors=without)
    with pytest.raises(CheckpointFileError, match="lacks tensor d2t"):
        load_pair(decoder, drafter)
    without = {n: t for n, t in tensors.items() if n != "lm_head.weight"}
    drafter = write_checkpoint(tmp_path / "head", config, tensors=without)
    with pytest.raises(ConfigError, match=r"its files lack lm_head\.weight") as raised:
        load_pair(decoder, drafter)
    assert raised.value.field == "draft_model.draft_vocab_size"


def test_a_drafter_of_another_width_reads_states_of_the_decoders(tmp_path: Path) -> None:
    changes = {"hidden_size": 32, "target_hidden_size": HIDDEN}
    decoder, drafter = write_pair(tmp_path, "kimi_linear", "llama", **changes)
    model = load_pair(decoder, drafter)
    assert model.drafts.taps(torch.randn(2, 3 * HIDDEN)).shape == (2, 32)
    tensors = load_file(drafter / "model.safetensors")
    del tensors["embed_tokens.weight"]
    config = json.loads((drafter / "config.json").read_text())
    with pytest.raises(ConfigError, match="needs an embedding and a head of its own"):
        load_pair(decoder, write_checkpoint(tmp_path / "bare", config, tensors=tensors))


def test_directories_and_methods_go_together(
    pair: tuple[Path, dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    decoder, config, _ = pair
    with pytest.raises(
        ConfigError, match="method 'eagle3' needs a checkpoint of its own; name its directory"
    ):
        describe(decoder, num_draft_tokens=2, draft_method="eagle3")
    with pytest.raises(ConfigError, match="method 'mtp' has no checkpoint of its own; leave 'model' out"):
        describe(decoder, num_draft_tokens=2, draft_model=tmp_path)
    with pytest.raises(CheckpointFileError, match="is not a directory"):
        describe(decoder, num_draft_tokens=2, draft_method="eagle3", draft_model=tmp_path / "none")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointFileError, match="has neither model.safetensors nor"):
        describe(decoder, num_draft_tokens=2, draft_method="eagle3", draft_model=tmp_path)


def test_nothing_reads_the_drafter_of_who_does_not_draft(tmp_path: Path) -> None:
    decoder, drafter = write_pair(tmp_path, "kimi_linear", "llama")
    assert load_pair(decoder, drafter, num_drafts=0).drafter is None
    assert text_of(json.loads((decoder / "config.json").read_text()))["hidden_size"] == HIDDEN
