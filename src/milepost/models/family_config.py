"""Keys that the configs of all families share. No torch."""

from __future__ import annotations

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


def text_section(config: ConfigReader) -> ConfigReader:
    """The part that describes the text decoder: `text_config` of a multimodal config, or all of it."""
    if not config.has("text_config"):
        return config
    return config.section("text_config", inherited=WRAPPER_KEYS)


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
