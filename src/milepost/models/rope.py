"""Rotary positions as configs describe them: plain, or stretched by YaRN. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from milepost.errors import ConfigError
from milepost.models.config_reader import ConfigReader
from milepost.models.family_config import same_where_both

_SECTIONS = ("rope_parameters", "rope_scaling")
_PLAIN_TYPES = ("default",)
_YARN_TYPES = ("yarn", "deepseek_yarn")
MOST_ROTATED = 1 << 16
"""Entries of a head; far beyond any model, and an angle is worked out for each pair."""
_LEAST_BETA, _MOST_BETA = 1e-6, 1e6
_MOST_MAGNITUDE = 1e6


@dataclass(frozen=True, slots=True)
class YarnSpec:
    """Slow rotations are stretched by `factor`, fast ones stay (https://arxiv.org/abs/2309.00071).

    Attributes:
        original_positions: positions the model was trained for before it was stretched.
        beta_fast, beta_slow: rotations over `original_positions` above which a frequency stays, and below
            which it is stretched whole; a ramp between.
        rounds_ends: whether the ends of the ramp are rounded outwards to whole frequencies.
    """

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    rounds_ends: bool


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Attributes:
    width: entries of a head that are rotated; even.
    is_interleaved: neighbours are rotated with each other, else the halves.
    amplitude: what rotated entries are multiplied by.
    score_factor: what attention scores are multiplied by besides.
    """

    width: int
    theta: float
    is_interleaved: bool = False
    amplitude: float = 1.0
    score_factor: float = 1.0
    yarn: YarnSpec | None = None


def read_rope(
    config: ConfigReader,
    width: int,
    *,
    is_interleaved: bool,
    scales_scores: bool,
    width_key: str = "head_dim",
) -> RopeSpec:
    """Rotary positions from `rope_parameters` or `rope_scaling`, and `rope_theta` in there or beside it.

    Args:
        width: entries of a head that are rotated.
        width_key: what says so.
        scales_scores: YaRN's `mscale_all_dim` multiplies attention scores (DeepSeek's latent attention).

    Raises:
        ConfigError: another kind of positions, or a missing or impossible number.
    """
    if width % 2:
        raise ConfigError(config.field(width_key), f"rotated entries come in pairs, {width} is odd")
    if width > MOST_ROTATED:
        raise ConfigError(config.field(width_key), f"must be at most {MOST_ROTATED}, not {width}")
    key = next((key for key in _SECTIONS if config.has(key)), None)
    section = ConfigReader({}) if key is None else config.section(key)
    same_where_both(config, section, "rope_theta")
    named = section if section.has("rope_theta") else config
    theta = named.positive_number("rope_theta")
    if theta <= 1.0:
        raise ConfigError(named.field("rope_theta"), f"must be greater than 1, not {theta}")
    if key is None:
        return RopeSpec(width, theta, is_interleaved)
    section.must_equal("partial_rotary_factor", 1.0, "all entries of a head are rotated")
    kind = section.text("rope_type" if section.has("rope_type") else "type", "default")
    if kind in _PLAIN_TYPES:
        return RopeSpec(width, theta, is_interleaved)
    if kind not in _YARN_TYPES:
        raise ConfigError(
            section.field("rope_type"), f"{kind!r} is not supported; only 'default' and 'yarn' are"
        )
    factor = section.number("factor")
    if factor < 1.0:
        raise ConfigError(
            section.field("factor"), f"stretches positions and must be at least 1, not {factor:g}"
        )
    yarn = YarnSpec(
        factor,
        section.integer("original_max_position_embeddings"),
        _beta(section, "beta_fast", 32.0),
        _beta(section, "beta_slow", 1.0),
        section.boolean("truncate", True),
    )
    amplitude = _magnitude(yarn.factor, 1.0)
    part, whole = _read_magnitude(section, "mscale", yarn), _read_magnitude(section, "mscale_all_dim", yarn)
    if section.has("attention_factor"):
        amplitude = section.positive_number("attention_factor")
    elif part is not None and whole is not None:
        amplitude = part / whole
    score_factor = whole**2 if scales_scores and whole is not None else 1.0
    return RopeSpec(width, theta, is_interleaved, amplitude, score_factor, yarn)


def _beta(section: ConfigReader, key: str, default: float) -> float:
    value = section.positive_number(key, default)
    if not _LEAST_BETA <= value <= _MOST_BETA:
        raise ConfigError(
            section.field(key), f"must be between {_LEAST_BETA:g} and {_MOST_BETA:g}, not {value:g}"
        )
    return value


def _read_magnitude(section: ConfigReader, key: str, yarn: YarnSpec) -> float | None:
    """What entries are multiplied by for the weight under `key`; None if it is 0 or not there."""
    weight = section.number(key, 0.0)
    if not weight:
        return None
    value = _magnitude(yarn.factor, weight)
    if not 0.0 < value <= _MOST_MAGNITUDE:
        raise ConfigError(
            section.field(key),
            f"{weight:g} with factor {yarn.factor:g} multiplies entries by {value:g}; that must be positive, "
            f"and at most {_MOST_MAGNITUDE:g}",
        )
    return value


def _magnitude(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def inverse_frequencies(rope: RopeSpec) -> list[float]:
    """Angle per position of every pair, [width / 2]."""
    plain = [rope.theta ** (-2.0 * pair / rope.width) for pair in range(rope.width // 2)]
    yarn = rope.yarn
    if yarn is None:
        return plain

    def pair_of(rotations: float) -> float:
        """The pair that turns so often over the original positions."""
        turns = yarn.original_positions / (rotations * 2.0 * math.pi)
        return rope.width * math.log(turns) / (2.0 * math.log(rope.theta))

    low, high = pair_of(yarn.beta_fast), pair_of(yarn.beta_slow)
    if yarn.rounds_ends:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.width - 1)
    length = high - low or 0.001
    stretched = [min(1.0, max(0.0, (pair - low) / length)) for pair in range(rope.width // 2)]
    return [
        value * (1.0 - share) + value / yarn.factor * share
        for value, share in zip(plain, stretched, strict=True)
    ]
