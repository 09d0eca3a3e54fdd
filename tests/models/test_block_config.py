"""Configs of block drafters as they are published, and what is refused of them. No torch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from milepost.errors import ConfigError
from milepost.models import block_config
from milepost.models.block_config import BlockDrafterSpec, BlockGqaSpec, BlockLayerSpec, MarkovSpec
from milepost.models.config_reader import ConfigReader
from milepost.models.registry import parse_config
from milepost.models.specs import DecoderSpec

K3_SIZES = {"hidden_size": 7168, "vocab_size": 163840, "num_hidden_layers": 93}

# Published values (RadixArk/Kimi-K3-DSpark).
K3_GQA: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"],
    "model_type": "qwen3",
    "block_size": 7,
    "hidden_size": 7168,
    "intermediate_size": 14336,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "num_target_layers": 93,
    "vocab_size": 163840,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1048576,
    "attention_bias": False,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "tie_word_embeddings": False,
    "layer_types": ["full_attention"] * 5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "dflash_config": {"mask_token_id": 163824, "target_layer_ids": [7, 23, 51, 67, 83]},
}

# Published values (Inferact/Kimi-K3-DSpark); head sizes are those of Kimi K3.
K3_MLA: dict[str, Any] = {
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "hidden_size": 7168,
    "intermediate_size": 14336,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "vocab_size": 163840,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "markov_rank": 256,
    "mask_token_id": 163837,
    "num_target_layers": 5,
    "target_hidden_size": 7168,
    "target_layer_ids": [2, 23, 47, 71, 89],
    "rms_norm_eps": 1e-5,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 32768,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}

# z-lab's layout, with the values of Qwen3-4B-DFlash.
DFLASH: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 16,
    "hidden_size": 7168,
    "intermediate_size": 9728,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_target_layers": 93,
    "vocab_size": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "sliding_window": None,
    "hidden_act": "silu",
    "layer_types": ["full_attention"] * 3,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}

LIBRARY: dict[str, Any] = {
    "architectures": ["DSparkSpeculator"],
    "speculators_model_type": "dspark",
    "aux_hidden_state_layer_ids": [8, 24, 93],
    "block_size": 8,
    "mask_token_id": 163824,
    "draft_vocab_size": 163840,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "markov_rank": 64,
    "markov_head_type": "gated",
    "enable_confidence_head": True,
    "target_hidden_size": None,
    "transformer_layer_config": {
        "model_type": "qwen3",
        "hidden_size": 7168,
        "intermediate_size": 14336,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 163840,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 2048,
        "rope_parameters": {"rope_theta": 10000, "rope_type": "default"},
    },
}


@pytest.fixture(scope="module")
def decoder() -> DecoderSpec:
    from tests.support.kimi_k3_checkpoints import k3_config

    layers = {"kda_layers": list(range(1, 93)), "full_attn_layers": [93]}
    return parse_config(k3_config(**K3_SIZES, linear_attn_config=layers))


def read(decoder: DecoderSpec, config: dict[str, Any], method: str, num_tokens: int = 7) -> BlockDrafterSpec:
    reader = ConfigReader(config, "draft_model.")
    return block_config.read(method, decoder, reader, Path("drafter"), num_tokens)


def changed(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with another value at a dotted path; a value of `...` removes the key."""
    result = copy.deepcopy(config)
    *sections, key = path.split(".")
    at = result
    for section in sections:
        at = at[section]
    if value is ...:
        at.pop(key)
    else:
        at[key] = value
    return result


# -- published layouts -----------------------------------------------------------------------------


def test_grouped_queries(decoder: DecoderSpec) -> None:
    spec = read(decoder, K3_GQA, "dspark")
    assert spec.gqa == BlockGqaSpec(64, 16, 64) and spec.mla is None
    assert spec.tap_layers == spec.target_layers == (7, 23, 51, 67, 83)
    assert (spec.block_rows, spec.num_guesses, spec.samples_from_anchor) == (7, 7, True)
    assert spec.mask_token_id == 163824 and spec.markov == MarkovSpec(256, "vanilla")
    assert spec.layers == (BlockLayerSpec(None, False),) * 5
    assert (spec.rope.width, spec.rope.theta, spec.rope.yarn) == (64, 10000.0, None)
    # 5 layers x 2 x 16 x 64 x 2 bytes; 2,249,289,601 weights are published.
    assert spec.group("bfloat16").bytes_per_token == 20480
    assert spec.count_by_role().total() == 2_249_289_601
    assert spec.first_layer == 93 and spec.group("float32").token_fields[0].layer == 93


def test_latents(decoder: DecoderSpec) -> None:
    spec = read(decoder, K3_MLA, "dspark")
    assert spec.gqa is None and spec.mla is not None and spec.mla.latent_norm_eps == 1e-5
    assert (spec.block_rows, spec.num_guesses) == (7, 7), (
        "as many as are asked for: the config leaves it open"
    )
    assert spec.rope.is_interleaved and spec.rope.amplitude == 1.0
    assert spec.rope.score_factor == pytest.approx((0.1 * 3.4657359 + 1.0) ** 2)
    assert spec.has_confidence is None, "its files tell"
    # 1,152 bytes per token and layer are published, and 3.56 billion weights with a copy of the embedding.
    assert round((spec.count_by_role().total() + 163840 * 7168) / 1e9, 2) == 3.56
    assert spec.group("bfloat16").bytes_per_token == 5 * 1152


def test_dflash(decoder: DecoderSpec) -> None:
    spec = read(decoder, DFLASH, "dflash")
    assert (spec.block_rows, spec.num_guesses, spec.samples_from_anchor) == (16, 15, False)
    assert spec.markov is None and spec.has_confidence is False
    assert spec.rope.theta == 1000000.0


def test_the_librarys_layout(decoder: DecoderSpec) -> None:
    spec = read(decoder, LIBRARY, "dspark")
    assert spec.target_layers == (7, 23, 92), "there a number means what enters a layer"
    assert (spec.block_rows, spec.num_guesses) == (8, 7)
    assert spec.layers == (BlockLayerSpec(2048, True), BlockLayerSpec(None, False))
    assert spec.window_from_anchor and spec.markov == MarkovSpec(64, "gated")
    open_spec = read(decoder, changed(LIBRARY, "sliding_window_non_causal", True), "dspark")
    assert open_spec.layers == (BlockLayerSpec(2048, False), BlockLayerSpec(None, False))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 9}, [(9, True)] * 3),
        ({"dflash_config.causal": True}, [(None, True)] * 3),
        ({"is_causal": True}, [(None, True)] * 3),
        ({"is_causal": False, "dflash_config.causal": True}, [(None, False)] * 3),
        ({"dflash_config.use_swa": True, "dflash_config.swa_window_size": 5}, [(5, True)] * 3),
        ({"layer_types": None}, [(None, False)] * 3),
    ],
)
def test_what_rows_see(
    decoder: DecoderSpec, changes: dict[str, Any], expected: list[tuple[Any, bool]]
) -> None:
    config = DFLASH
    for path, value in changes.items():
        config = changed(config, path, value)
    layers = read(decoder, config, "dflash").layers
    assert [(layer.window, layer.is_causal) for layer in layers] == expected


def test_who_is_recognised() -> None:
    def kinds(config: dict[str, Any]) -> tuple[bool, bool]:
        reader = ConfigReader(config)
        return block_config.recognises_dflash(reader), block_config.recognises_dspark(reader)

    assert kinds(DFLASH) == (True, False)
    assert [kinds(config) for config in (K3_GQA, K3_MLA, LIBRARY)] == [(False, True)] * 3
    others: list[Any] = ["LlamaForCausalLMEagle3", "DFlash2DraftModel", "DSV4DSparkModel", 5, None]
    assert all(kinds({"architectures": [name]}) == (False, False) for name in others)
    assert kinds({}) == kinds({"architectures": "text"}) == (False, False)


# -- refusals --------------------------------------------------------------------------------------


REFUSED: list[tuple[dict[str, Any], str, Any, str, str]] = [
    (K3_GQA, "hidden_size", 4096, "draft_model.hidden_size", "the model's is 7168"),
    (K3_GQA, "vocab_size", 163841, "draft_model.vocab_size", "the model's is 163840"),
    (K3_GQA, "num_target_layers", 61, "draft_model.num_target_layers", "the model has 93 layers"),
    (
        K3_GQA,
        "dflash_config.target_layer_ids",
        [1, 93],
        "draft_model.dflash_config.target_layer_ids",
        "taps layer 93",
    ),
    (
        K3_GQA,
        "dflash_config.target_layer_ids",
        [1, 1],
        "draft_model.dflash_config.target_layer_ids",
        "none twice",
    ),
    (K3_GQA, "dflash_config.target_layer_ids", ..., "draft_model.target_layer_ids", "is missing"),
    (K3_GQA, "dflash_config.mask_token_id", ..., "draft_model.mask_token_id", "is missing"),
    (
        K3_GQA,
        "dflash_config.mask_token_id",
        163840,
        "draft_model.dflash_config.mask_token_id",
        "embeddings end at 163839",
    ),
    (K3_GQA, "markov_rank", ..., "draft_model.markov_rank", "is missing"),
    (K3_GQA, "markov_head_type", "lstm", "draft_model.markov_head_type", "'vanilla', 'gated' or 'rnn'"),
    (K3_GQA, "num_key_value_heads", 5, "draft_model.num_key_value_heads", "must divide"),
    (K3_GQA, "head_dim", 63, "draft_model.head_dim", "63 is odd"),
    (K3_GQA, "layer_types", ["full_attention"], "draft_model.layer_types", "must name 5 layers"),
    (K3_GQA, "layer_types", ["sliding_attention"] * 5, "draft_model.sliding_window", "is missing"),
    (K3_GQA, "block_size", 0, "draft_model.block_size", "at least 1"),
    (K3_GQA, "block_size", 5000, "draft_model.block_size", "at most 256"),
    (K3_GQA, "attention_bias", True, "draft_model.attention_bias", "without biases"),
    (K3_GQA, "hidden_act", "gelu", "draft_model.hidden_act", "SwiGLU"),
    (K3_GQA, "rope_parameters", ..., "draft_model.rope_theta", "is missing"),
    (
        K3_GQA,
        "rope_parameters.rope_type",
        "longrope",
        "draft_model.rope_parameters.rope_type",
        "'default' and 'yarn'",
    ),
    (K3_GQA, "quantization_config", {"bits": 4}, "draft_model.quantization_config", "bf16 or fp32"),
    (K3_GQA, "draft_vocab_size", 163841, "draft_model.draft_vocab_size", "at most 163840"),
    (K3_GQA, "aux_hidden_stream", "attn_res", "draft_model.aux_hidden_stream", "residual stream"),
    (K3_MLA, "mla_use_output_gate", True, "draft_model.mla_use_output_gate", "without it"),
    (K3_MLA, "target_hidden_size", 4096, "draft_model.target_hidden_size", "the model's hidden_size is 7168"),
    (K3_MLA, "kv_lora_rank", 0, "draft_model.kv_lora_rank", "at least 1"),
    (K3_MLA, "rope_parameters.factor", ..., "draft_model.rope_parameters.factor", "is missing"),
    (K3_MLA, "rope_parameters.rope_theta", 1.0, "draft_model.rope_parameters.rope_theta", "greater than 1"),
    (LIBRARY, "aux_hidden_state_layer_ids", [0, 4], "draft_model.aux_hidden_state_layer_ids", "none below 1"),
    (
        LIBRARY,
        "transformer_layer_config.hidden_size",
        64,
        "draft_model.transformer_layer_config.hidden_size",
        "the model's is 7168",
    ),
    (LIBRARY, "transformer_layer_config", ..., "draft_model.transformer_layer_config", "is missing"),
]


@pytest.mark.parametrize(("config", "path", "value", "field", "message"), REFUSED)
def test_what_cannot_work_is_refused_by_name(
    decoder: DecoderSpec, config: dict[str, Any], path: str, value: Any, field: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        read(decoder, changed(config, path, value), "dspark")
    assert raised.value.field == field


def test_a_drafter_of_another_method_is_refused(decoder: DecoderSpec) -> None:
    with pytest.raises(ConfigError, match="method 'dspark', ask for that") as raised:
        read(decoder, K3_GQA, "dflash")
    assert raised.value.field == "draft_model.architectures"
    with pytest.raises(ConfigError, match="no drafter of method 'dspark'"):
        read(decoder, changed(K3_GQA, "architectures", ["Qwen3ForCausalLM"]), "dspark")
    with pytest.raises(ConfigError, match="is missing"):
        read(decoder, changed(K3_GQA, "architectures", ...), "dspark")
