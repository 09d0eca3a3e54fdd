"""Keys that the configs of all families share. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from milepost.errors import ConfigError
from milepost.models.config_reader import ConfigReader
from milepost.models.specs import COMPUTE_DTYPES

WRAPPER_KEYS = (
    "dtype",
    "torch_dtype",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "quantization_config",
    "model_max_length",
)
"""Keys that multimodal configs may give beside `text_config` instead of inside."""
_TOKEN_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")

_ROPE_SECTIONS = ("rope_parameters", "rope_scaling")
_PLAIN_ROPE_TYPES = ("default", "mrope")
_PLAIN_ROPE_KEYS = (
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
)
"""What unscaled rotary positions may be described with. For text the sections for images
(`mrope_section`) do not matter: all three position ids are the same."""


class CommonFields(TypedDict):
    """The fields of `DecoderSpec` that every family reads alike."""

    vocab_size: int
    hidden_size: int
    norm_eps: float
    tie_word_embeddings: bool
    max_model_len: int
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None


def text_section(config: ConfigReader, model_types: Sequence[str]) -> ConfigReader:
    """The part that describes the text decoder: `text_config` of a multimodal config, or all of it.

    Args:
        model_types: what `text_config.model_type` may be, if it is given.

    Raises:
        ConfigError: the section belongs to another family, or contradicts what stands beside it.
    """
    if not config.has("text_config"):
        return config
    text = config.section("text_config", inherited=WRAPPER_KEYS)
    model_type = text.text("model_type", model_types[0])
    if model_type not in model_types:
        raise ConfigError(
            text.field("model_type"),
            f"is {model_type!r}, which contradicts model_type {config.text('model_type')!r}; "
            f"expected {' or '.join(map(repr, model_types))}",
        )
    if config.has("quantization_config"):
        outer = config.section("quantization_config")
        text.must_equal(
            "quantization_config", outer.as_dict(), "it contradicts quantization_config beside it"
        )
    for key in _TOKEN_ID_KEYS:
        config.token_ids(key, text.integer("vocab_size"))
    return text


def refuse_text_section(config: ConfigReader, model_type: str) -> None:
    """For families without a multimodal form."""
    if config.has("text_config"):
        raise ConfigError(
            config.field("text_config"),
            f"is not read for model_type {model_type}, whose values stand at the top of config.json; "
            "move them there, or name the multimodal family in model_type",
        )


def refuse_quantization(config: ConfigReader, model_type: str) -> None:
    """For families whose quantised checkpoints are not read."""
    for key in ("quantization_config", "compression_config"):
        if config.has(key):
            raise ConfigError(
                config.field(key),
                f"is not supported for model_type {model_type}; use a checkpoint in bf16 or fp32",
            )


def refuse_scaled_positions(config: ConfigReader) -> None:
    """Rotary positions may be unscaled and the same in all layers, nothing else."""
    for key in _ROPE_SECTIONS:
        if not config.has(key):
            continue
        section = config.section(key)
        for name in section.keys():
            if section.is_object(name):
                raise ConfigError(
                    section.field(name),
                    f"holds parameters of one kind of layer, which is not supported; put those of the "
                    f"attention layers directly into {key}",
                )
        for name in ("rope_type", "type"):
            if section.has(name) and section.text(name) not in _PLAIN_ROPE_TYPES:
                raise ConfigError(
                    section.field(name),
                    f"{section.text(name)!r} is not supported; only 'default' is, without scaling",
                )
        extra = [name for name in section.keys() if name not in _PLAIN_ROPE_KEYS]
        if extra:
            raise ConfigError(
                section.field(extra[0]),
                "asks for scaled positions, which are not supported"
                + ("" if section.has("rope_type") or section.has("type") else f"; {key} names no rope_type")
                + f"; remove it, or {key} as a whole",
            )


def same_where_both(outer: ConfigReader, inner: ConfigReader, key: str) -> None:
    """Refuses a number that is given twice and differently."""
    if outer.has(key) and inner.has(key) and outer.number(key) != inner.number(key):
        raise ConfigError(
            inner.field(key), f"is {inner.number(key)}, but {outer.field(key)} is {outer.number(key)}"
        )


def common_fields(config: ConfigReader, *, norm_eps: float) -> CommonFields:
    """
    Args:
        norm_eps: the family's default of `rms_norm_eps`.
    """
    vocab_size = config.integer("vocab_size")
    bos = config.token_ids("bos_token_id", vocab_size)
    pad = config.token_ids("pad_token_id", vocab_size)
    length_key = "model_max_length" if config.has("model_max_length") else "max_position_embeddings"
    return CommonFields(
        vocab_size=vocab_size,
        hidden_size=config.integer("hidden_size"),
        norm_eps=config.positive_number("rms_norm_eps", norm_eps),
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        max_model_len=config.integer(length_key),
        dtype=_dtype(config),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=config.token_ids("eos_token_id", vocab_size),
        pad_token_id=pad[0] if pad else None,
    )


def _dtype(config: ConfigReader) -> str:
    key = "dtype" if config.has("dtype") else "torch_dtype"
    name = config.text(key, "bfloat16").removeprefix("torch.")
    if name not in COMPUTE_DTYPES:
        raise ConfigError(config.field(key), f"{name!r} is not supported; use one of {list(COMPUTE_DTYPES)}")
    return name


def read_heads(config: ConfigReader) -> tuple[int, int]:
    """Heads of queries, and of keys and values, of grouped attention.

    Raises:
        ConfigError: the groups are not of one size.
    """
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            config.field("num_key_value_heads"),
            f"must divide num_attention_heads {num_heads}, not {num_kv_heads}",
        )
    return num_heads, num_kv_heads
