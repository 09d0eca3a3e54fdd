"""`kimi_k3`, text part: reads the published config of Kimi K3 into a `DecoderSpec`. No torch.

Differences to Kimi-Linear: sigmoid decay gate with a lower bound, full-rank output gates in both
mixers, SiTU activation, experts in a latent space, residuals over depth, packed 4-bit experts.
"""

from __future__ import annotations

import dataclasses

from milepost.errors import ConfigError
from milepost.models.config_reader import ConfigReader
from milepost.models.family_config import common_fields, text_section
from milepost.models.kimi_linear import (
    draft_prefixes,
    layer_mixers,
    layer_specs,
    read_kda,
    read_mla,
    read_moe,
    read_mtp,
    refuse_unknown_routing,
)
from milepost.models.specs import MXFP4_GROUP, DecoderSpec, LatentSpec, MoeSpec, SituSpec

MODEL_TYPE = "kimi_k3"
TEXT_MODEL_TYPES = ("kimi_linear", "kimi_k3")
"""Published configs name the text part after the older family."""
VISION_PREFIXES = ("vision_tower.", "mm_projector.", "vision_model.", "multi_modal_projector.")
MXFP4_FORMAT = "mxfp4-pack-quantized"
_NORM_EPS = 1e-5


def parse_config(config: ConfigReader) -> DecoderSpec:
    """The text decoder that `config.json` describes, under `text_config` or at the top.

    Raises:
        ConfigError: a key is missing, has the wrong type or asks for something that is not
            implemented; names the key.
    """
    text = text_section(config, TEXT_MODEL_TYPES)
    refuse_unknown_routing(text)
    mixers = layer_mixers(text)
    moe = _moe(text)
    kda = read_kda(text) if "kda" in mixers else None
    return DecoderSpec(
        model_type=MODEL_TYPE,
        intermediate_size=text.integer("intermediate_size"),
        layers=layer_specs(text, mixers, moe),
        kda=None if kda is None else dataclasses.replace(kda, padded_decay_log=True),
        mla=read_mla(text) if "mla" in mixers else None,
        moe=moe,
        situ=read_situ(text),
        attn_res_block_layers=text.optional_integer("attn_res_block_size"),
        skipped=(*VISION_PREFIXES, *draft_prefixes(text, len(mixers))),
        mtp=read_mtp(text) if "mla" in mixers else None,
        **common_fields(text, norm_eps=_NORM_EPS),
    )


def read_situ(config: ConfigReader) -> SituSpec | None:
    """Activation of the MLPs; None = SwiGLU."""
    name = config.text("hidden_act")
    if name == "silu":
        return None
    if name != "situ":
        raise ConfigError(config.field("hidden_act"), f"{name!r} is not supported; use 'situ' or 'silu'")
    linear_key = "activation_situ_linear_beta"
    return SituSpec(
        beta=config.positive_number("activation_situ_beta", 1.0),
        linear_beta=config.positive_number(linear_key) if config.has(linear_key) else None,
    )


def _moe(config: ConfigReader) -> MoeSpec | None:
    moe = read_moe(config)
    if moe is None:
        return None
    latent = None
    if config.has("routed_expert_hidden_size"):
        with_norm = config.boolean("latent_moe_use_norm", False)
        norm_eps = config.positive_number("rms_norm_eps", _NORM_EPS) if with_norm else None
        latent = LatentSpec(config.integer("routed_expert_hidden_size"), norm_eps)
    packed = _is_packed(config)
    if packed:
        width = config.integer("hidden_size") if latent is None else latent.width
        for size in (width, moe.expert_intermediate_size):
            if size % MXFP4_GROUP:
                raise ConfigError(
                    config.field("quantization_config"),
                    f"packs groups of {MXFP4_GROUP} values, but experts have {size} inputs",
                )
    return dataclasses.replace(moe, latent=latent, packed_mxfp4=packed)


def _is_packed(config: ConfigReader) -> bool:
    """Whether the routed experts may be stored as 4-bit floats."""
    if config.has("compression_config"):
        raise ConfigError(config.field("compression_config"), "is not read; name it quantization_config")
    if not config.has("quantization_config"):
        return False
    section = config.section("quantization_config")
    section.must_equal("quant_method", "compressed-tensors", "other layouts of packed weights are not read")
    _check_format(section, required=True)
    for key in ("kv_cache_scheme", "sparsity_config"):
        if section.has(key) and (not section.is_object(key) or section.section(key).keys()):
            raise ConfigError(section.field(key), "is not supported; only weights of experts may be packed")
    if section.has("config_groups"):
        groups = section.section("config_groups")
        for name in groups.keys():
            _check_group(groups.section(name))
    return True


def _check_format(section: ConfigReader, *, required: bool) -> None:
    if required or section.has("format"):
        name = section.text("format")
        if name != MXFP4_FORMAT:
            raise ConfigError(section.field("format"), f"{name!r} is not supported; only {MXFP4_FORMAT!r} is")


def _check_group(group: ConfigReader) -> None:
    """One entry of `config_groups`: 4-bit float weights, activations as they are."""
    _check_format(group, required=False)
    for key in ("input_activations", "output_activations"):
        if group.has(key):
            raise ConfigError(group.field(key), "is not supported; activations are not quantised here")
    if group.has("weights"):
        weights = group.section("weights")
        why = f"packed weights are 4-bit floats in groups of {MXFP4_GROUP}"
        weights.must_equal("num_bits", 4, why)
        weights.must_equal("type", "float", why)
        weights.must_equal("group_size", MXFP4_GROUP, why)
