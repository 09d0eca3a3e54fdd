"""`kimi_linear`: reads the published config of Kimi-Linear into a `DecoderSpec`. No torch.

`kimi_k3` has the same fields and more; the readers of the common ones are here.
"""

from __future__ import annotations

from milepost.errors import ConfigError
from milepost.models.config_reader import ConfigReader
from milepost.models.family_config import (
    common_fields,
    refuse_quantization,
    refuse_scaled_positions,
    refuse_text_section,
)
from milepost.models.specs import (
    DecoderSpec,
    ExpertNames,
    KdaSpec,
    LayerSpec,
    Mixer,
    MlaSpec,
    Mlp,
    MoeSpec,
    MtpSpec,
)

MODEL_TYPE = "kimi_linear"
EXPERT_NAMES = ExpertNames(module="block_sparse_moe", gate="w1", up="w3", down="w2", shared="shared_experts")


def parse_config(config: ConfigReader) -> DecoderSpec:
    """The decoder that `config.json` describes.

    Raises:
        ConfigError: a key is missing, has the wrong type or asks for something that is not
            implemented; names the key.
    """
    refuse_text_section(config, MODEL_TYPE)
    refuse_quantization(config, MODEL_TYPE)
    config.must_equal("hidden_act", "silu", "other activations belong to other families")
    config.must_equal("mla_use_output_gate", False, "gated attention output belongs to kimi_k3")
    for key in ("attn_res_block_size", "routed_expert_hidden_size"):
        if config.has(key):
            raise ConfigError(config.field(key), "is not supported for model_type kimi_linear")
    refuse_unknown_routing(config)
    mixers = layer_mixers(config)
    moe = read_moe(config)
    kda = read_kda(config) if "kda" in mixers else None
    if kda is not None and kda.full_rank_gate:
        raise ConfigError(
            config.field("linear_attn_config.use_full_rank_gate"),
            "is true, but the full-rank output gate belongs to kimi_k3",
        )
    return DecoderSpec(
        model_type=MODEL_TYPE,
        intermediate_size=config.integer("intermediate_size"),
        layers=layer_specs(config, mixers, moe),
        kda=kda,
        mla=read_mla(config) if "mla" in mixers else None,
        moe=moe,
        skipped=draft_prefixes(config, len(mixers)),
        mtp=read_mtp(config) if "mla" in mixers else None,
        **common_fields(config, norm_eps=1e-5),
    )


def read_mtp(config: ConfigReader) -> MtpSpec | None:
    """Draft modules in the layers behind the decoder's."""
    num_modules = config.num_layers("num_nextn_predict_layers", 0, minimum=0)
    return MtpSpec(num_modules, "deepseek") if num_modules else None


def draft_prefixes(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """Where the tensors of the draft modules are."""
    return tuple(
        f"{prefix}layers.{num_layers + number}."
        for prefix in ("language_model.model.", "model.")
        for number in range(config.num_layers("num_nextn_predict_layers", 0, minimum=0))
    )


def layer_specs(config: ConfigReader, mixers: list[Mixer], moe: MoeSpec | None) -> tuple[LayerSpec, ...]:
    """Mixer and MLP kind of each layer."""
    mlps = _layer_mlps(config, len(mixers), moe)
    return tuple(LayerSpec(mixer, mlp) for mixer, mlp in zip(mixers, mlps, strict=True))


def refuse_unknown_routing(config: ConfigReader) -> None:
    """What neither Kimi family is published with."""
    config.must_equal("mla_use_nope", True, "rotary positions are not implemented for this family")
    config.must_equal("moe_router_activation_func", "sigmoid", "the router scores are sigmoids")
    config.must_equal("num_expert_group", 1, "group-limited routing is not implemented")
    config.must_equal("topk_group", 1, "group-limited routing is not implemented")
    config.must_equal("topk_method", "noaux_tc", "experts are chosen by score plus correction bias")
    config.must_equal("attention_bias", False, "the published projections have no bias")
    refuse_scaled_positions(config)


def layer_mixers(config: ConfigReader) -> list[Mixer]:
    """Kind of each layer from the two published lists, which count layers from 1."""
    num_layers = config.num_layers("num_hidden_layers")
    section = config.section("linear_attn_config")
    lists: tuple[tuple[str, Mixer], ...] = (("kda_layers", "kda"), ("full_attn_layers", "mla"))
    mixers: dict[int, Mixer] = {}
    for key, mixer in lists:
        for number in section.integers(key):
            if not 1 <= number <= num_layers:
                raise ConfigError(
                    section.field(key), f"lists layer {number}, but layers are numbered 1 to {num_layers}"
                )
            if number in mixers:
                raise ConfigError(section.field(key), f"lists layer {number} a second time")
            mixers[number] = mixer
    missing = [number for number in range(1, num_layers + 1) if number not in mixers]
    if missing:
        raise ConfigError(
            section.field("kda_layers"),
            f"and full_attn_layers must cover layers 1 to {num_layers} (counted from 1); missing: {missing}",
        )
    _check_layer_types(config, [mixers[number] for number in range(1, num_layers + 1)])
    return [mixers[number] for number in range(1, num_layers + 1)]


def _check_layer_types(config: ConfigReader, mixers: list[Mixer]) -> None:
    """`layer_types`, if given as well, must say the same."""
    if not config.has("layer_types"):
        return
    names: dict[str, Mixer] = {"linear_attention": "kda", "full_attention": "mla"}
    kinds = config.values("layer_types")
    if len(kinds) != len(mixers):
        raise ConfigError(
            config.field("layer_types"), f"has {len(kinds)} entries, num_hidden_layers is {len(mixers)}"
        )
    for kind in kinds:
        if not isinstance(kind, str) or kind not in names:
            raise ConfigError(
                config.field("layer_types"), f"has the unknown layer kind {kind!r}; known: {sorted(names)}"
            )
    if [names[kind] for kind in kinds] != mixers:
        raise ConfigError(
            config.field("layer_types"), "disagrees with linear_attn_config.kda_layers / full_attn_layers"
        )


def _layer_mlps(config: ConfigReader, num_layers: int, moe: MoeSpec | None) -> list[Mlp]:
    if moe is None:
        return ["dense"] * num_layers
    first = config.integer("first_k_dense_replace", 0, minimum=0)
    every = config.integer("moe_layer_freq", 1)
    return ["moe" if index >= first and index % every == 0 else "dense" for index in range(num_layers)]


def read_kda(config: ConfigReader) -> KdaSpec:
    """Sizes and gates of the linear-attention layers."""
    section = config.section("linear_attn_config")
    section.must_equal("allow_neg_eigval", False, "the update rate is a sigmoid, not doubled")
    bound = section.number("gate_lower_bound") if section.has("gate_lower_bound") else None
    if bound is not None and not -5.0 <= bound < 0.0:
        raise ConfigError(section.field("gate_lower_bound"), f"must lie in [-5, 0), not {bound}")
    return KdaSpec(
        num_heads=section.integer("num_heads"),
        head_dim=section.integer("head_dim"),
        conv_kernel=section.integer("short_conv_kernel_size", minimum=2),
        norm_eps=config.positive_number("rms_norm_eps", 1e-5),
        gate_lower_bound=bound,
        full_rank_gate=section.boolean("use_full_rank_gate", False),
    )


def read_mla(config: ConfigReader) -> MlaSpec:
    """Sizes of the attention layers; the latent norms' epsilon may be given as `mla_latent_norm_eps`."""
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_kv_heads != num_heads:
        raise ConfigError(
            config.field("num_key_value_heads"),
            f"must equal num_attention_heads {num_heads}, not {num_kv_heads}",
        )
    return MlaSpec(
        num_heads=num_heads,
        q_lora_rank=config.optional_integer("q_lora_rank"),
        kv_lora_rank=config.integer("kv_lora_rank"),
        qk_nope_head_dim=config.integer("qk_nope_head_dim"),
        qk_rope_head_dim=config.integer("qk_rope_head_dim"),
        v_head_dim=config.integer("v_head_dim"),
        latent_norm_eps=config.positive_number("mla_latent_norm_eps", 1e-6),
        output_gate=config.boolean("mla_use_output_gate", False),
    )


def read_moe(config: ConfigReader) -> MoeSpec | None:
    """The expert layers with the parts both families have; None without experts."""
    num_experts = config.integer("num_experts", 0, minimum=0)
    if num_experts == 0:
        return None
    experts_per_token = config.integer("num_experts_per_token")
    if experts_per_token > num_experts:
        raise ConfigError(
            config.field("num_experts_per_token"),
            f"is {experts_per_token}, more than num_experts {num_experts}",
        )
    inner = config.integer("moe_intermediate_size")
    return MoeSpec(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        expert_intermediate_size=inner,
        shared_intermediate_size=inner * config.integer("num_shared_experts", 0, minimum=0),
        renormalize=config.boolean("moe_renormalize", True),
        routed_scaling_factor=config.positive_number("routed_scaling_factor", 1.0),
        names=EXPERT_NAMES,
    )
