"""Which `model_type` is which family. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from milepost.errors import ConfigError
from milepost.models import kimi_k3, kimi_linear, qwen
from milepost.models.config_reader import ConfigReader
from milepost.models.specs import DecoderSpec

PARSERS: Mapping[str, Callable[[ConfigReader], DecoderSpec]] = {
    kimi_linear.MODEL_TYPE: kimi_linear.parse_config,
    kimi_k3.MODEL_TYPE: kimi_k3.parse_config,
    qwen.NEXT_MODEL_TYPE: qwen.parse_next,
    **dict.fromkeys(qwen.DENSE_MODEL_TYPES, qwen.parse_dense),
    **dict.fromkeys(qwen.MOE_MODEL_TYPES, qwen.parse_moe),
}
"""model_type -> parser of its config."""


def parse_config(values: Mapping[str, Any]) -> DecoderSpec:
    """The decoder described by the content of a `config.json`.

    Raises:
        ConfigError: unknown `model_type` (the message lists the supported ones) or a bad key.
    """
    config = ConfigReader(values)
    model_type = config.text("model_type")
    parser = PARSERS.get(model_type)
    if parser is None:
        raise ConfigError(
            "model_type", f"{model_type!r} is not supported; supported: {', '.join(sorted(PARSERS))}"
        )
    return parser(config)
