"""`qwen3_next`, `qwen3_5`, `qwen3_5_moe`: published configs into a `DecoderSpec`. No torch.

The text part only: images are not read. Draft (MTP) modules are loaded when somebody drafts with them.
"""

from __future__ import annotations

from milepost.errors import ConfigError
from milepost.models.config_reader import ConfigReader
from milepost.models.family_config import (
    common_fields,
    read_heads,
    refuse_quantization,
    refuse_scaled_positions,
    refuse_text_section,
    same_where_both,
    text_section,
)
from milepost.models.specs import (
    DecoderSpec,
    ExpertNames,
    GdnSpec,
    GqaSpec,
    LayerSpec,
    Mixer,
    Mlp,
    MoeSpec,
    MtpSpec,
)

NEXT_MODEL_TYPE = "qwen3_next"
DENSE_MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
MOE_MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
EXPERT_NAMES = ExpertNames(
    module="mlp", gate="gate_proj", up="up_proj", down="down_proj", shared="shared_expert"
)
SKIPPED = ("model.visual.", "visual.", "mtp.")
_NORM_EPS = 1e-6
_LAYER_KINDS: dict[str, Mixer] = {"linear_attention": "gdn", "full_attention": "gqa"}


def parse_next(config: ConfigReader) -> DecoderSpec:
    """Qwen3-Next: interleaved projections, experts in every layer that `decoder_sparse_step` names.

    Raises:
        ConfigError: a key is missing, has the wrong type or asks for something that is not
            implemented; names the key.
    """
    refuse_text_section(config, NEXT_MODEL_TYPE)
    moe = _moe(config, renormalize=config.boolean("norm_topk_prob", True))
    mlps = _next_mlps(config, moe)
    intermediate_size = config.integer("intermediate_size") if "dense" in mlps else 0
    return _decoder(config, NEXT_MODEL_TYPE, mlps, moe, intermediate_size, interleaved=True)


def parse_dense(config: ConfigReader) -> DecoderSpec:
    """Qwen3.5 without experts; see `parse_next` for errors."""
    text = text_section(config, DENSE_MODEL_TYPES)
    text.must_equal("num_experts", 0, "experts belong to model_type qwen3_5_moe")
    mlps: list[Mlp] = ["dense"] * text.num_layers("num_hidden_layers")
    return _decoder(
        text, DENSE_MODEL_TYPES[0], mlps, None, text.integer("intermediate_size"), interleaved=False
    )


def parse_moe(config: ConfigReader) -> DecoderSpec:
    """Qwen3.5 with experts in every layer; see `parse_next` for errors."""
    text = text_section(config, MOE_MODEL_TYPES)
    text.must_equal("mlp_only_layers", [], "every layer of this family has experts")
    text.must_equal("decoder_sparse_step", 1, "every layer of this family has experts")
    text.must_equal("norm_topk_prob", True, "the weights of the chosen experts add up to one")
    text.integer("num_experts")
    mlps: list[Mlp] = ["moe"] * text.num_layers("num_hidden_layers")
    return _decoder(text, MOE_MODEL_TYPES[0], mlps, _moe(text, renormalize=True), 0, interleaved=False)


def _decoder(
    config: ConfigReader,
    model_type: str,
    mlps: list[Mlp],
    moe: MoeSpec | None,
    intermediate_size: int,
    *,
    interleaved: bool,
) -> DecoderSpec:
    config.must_equal("hidden_act", "silu", "other activations are not implemented")
    config.must_equal("attention_bias", False, "the published projections have no bias")
    config.must_equal("attn_output_gate", True, "attention without output gate belongs to other families")
    config.must_equal("use_sliding_window", False, "sliding windows are not implemented")
    config.must_equal("mamba_ssm_dtype", "float32", "recurrent states are kept in fp32")
    refuse_quantization(config, model_type)
    mixers = _layer_mixers(config)
    layers = tuple(LayerSpec(mixer, mlp) for mixer, mlp in zip(mixers, mlps, strict=True))
    return DecoderSpec(
        model_type=model_type,
        intermediate_size=intermediate_size,
        layers=layers,
        kda=None,
        mla=None,
        moe=moe if "moe" in mlps else None,
        gdn=_gdn(config, interleaved) if "gdn" in mixers else None,
        gqa=_gqa(config) if "gqa" in mixers else None,
        norm_offset=1.0,
        skipped=SKIPPED,
        mtp=_mtp(config) if "gqa" in mixers else None,
        **common_fields(config, norm_eps=_NORM_EPS),
    )


def _mtp(config: ConfigReader) -> MtpSpec | None:
    """Qwen3-Next's published config does not mention its module; Qwen3.5 counts them."""
    if config.boolean("mtp_use_dedicated_embeddings", False):
        return None
    key = "mtp_num_hidden_layers" if config.has("mtp_num_hidden_layers") else "num_nextn_predict_layers"
    num_modules = config.num_layers(key, 1, minimum=0)
    return MtpSpec(num_modules, "qwen") if num_modules else None


def _layer_mixers(config: ConfigReader) -> list[Mixer]:
    """From `layer_types`, or full attention in every `full_attention_interval`-th layer."""
    num_layers = config.num_layers("num_hidden_layers")
    if not config.has("layer_types"):
        interval = config.integer("full_attention_interval", 4)
        return ["gqa" if number % interval == 0 else "gdn" for number in range(1, num_layers + 1)]
    kinds = config.values("layer_types")
    if len(kinds) != num_layers:
        raise ConfigError(
            config.field("layer_types"), f"has {len(kinds)} entries, num_hidden_layers is {num_layers}"
        )
    for kind in kinds:
        if not isinstance(kind, str) or kind not in _LAYER_KINDS:
            raise ConfigError(
                config.field("layer_types"),
                f"has the unknown layer kind {kind!r}; known: {sorted(_LAYER_KINDS)}",
            )
    return [_LAYER_KINDS[kind] for kind in kinds]


def _next_mlps(config: ConfigReader, moe: MoeSpec | None) -> list[Mlp]:
    num_layers = config.num_layers("num_hidden_layers")
    dense = set(config.integers("mlp_only_layers")) if config.has("mlp_only_layers") else set()
    for index in sorted(dense):
        if not 0 <= index < num_layers:
            raise ConfigError(
                config.field("mlp_only_layers"), f"names layer {index}; layers are 0 to {num_layers - 1}"
            )
    every = config.integer("decoder_sparse_step", 1)
    routed = [moe is not None and i not in dense and (i + 1) % every == 0 for i in range(num_layers)]
    return ["moe" if is_routed else "dense" for is_routed in routed]


def _gdn(config: ConfigReader, interleaved: bool) -> GdnSpec:
    num_key_heads = config.integer("linear_num_key_heads")
    num_value_heads = config.integer("linear_num_value_heads")
    if num_value_heads % num_key_heads:
        raise ConfigError(
            config.field("linear_num_value_heads"),
            f"must be a multiple of linear_num_key_heads {num_key_heads}, not {num_value_heads}",
        )
    return GdnSpec(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=config.integer("linear_key_head_dim"),
        value_dim=config.integer("linear_value_head_dim"),
        conv_kernel=config.integer("linear_conv_kernel_dim", minimum=2),
        norm_eps=config.positive_number("rms_norm_eps", _NORM_EPS),
        interleaved=interleaved,
    )


def _gqa(config: ConfigReader) -> GqaSpec:
    num_heads, num_kv_heads = read_heads(config)
    head_dim = config.integer("head_dim")
    theta, factor, factor_field = _rope(config)
    rotary_dim = int(head_dim * factor)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ConfigError(
            factor_field, f"{factor} of head_dim {head_dim} must be an even number of rotated entries"
        )
    return GqaSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=theta,
        norm_eps=config.positive_number("rms_norm_eps", _NORM_EPS),
    )


def _rope(config: ConfigReader) -> tuple[float, float, str]:
    """Theta, rotated part of a head, and the field that gave the part.

    `rope_parameters` holds both in newer configs, the top level in older ones.
    """
    refuse_scaled_positions(config)
    rope = config.section("rope_parameters") if config.has("rope_parameters") else config
    for key in ("rope_theta", "partial_rotary_factor"):
        same_where_both(config, rope, key)
    theta_source = rope if rope.has("rope_theta") else config
    factor_source = rope if rope.has("partial_rotary_factor") else config
    theta = theta_source.positive_number("rope_theta")
    factor = factor_source.positive_number("partial_rotary_factor", 0.25)
    return theta, factor, factor_source.field("partial_rotary_factor")


def _moe(config: ConfigReader, *, renormalize: bool) -> MoeSpec | None:
    num_experts = config.integer("num_experts", 0, minimum=0)
    if num_experts == 0:
        return None
    experts_per_token = config.integer("num_experts_per_tok")
    if experts_per_token > num_experts:
        raise ConfigError(
            config.field("num_experts_per_tok"),
            f"is {experts_per_token}, more than num_experts {num_experts}",
        )
    return MoeSpec(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        expert_intermediate_size=config.integer("moe_intermediate_size"),
        shared_intermediate_size=config.integer("shared_expert_intermediate_size", 0, minimum=0),
        renormalize=renormalize,
        routed_scaling_factor=1.0,
        names=EXPERT_NAMES,
        router="softmax",
        shared_gate=True,
    )
