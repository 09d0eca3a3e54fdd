"""Named model geometries for replays. Sizes are of the whole model on one replica, bf16 KV, fp32 state."""

from __future__ import annotations

from dataclasses import dataclass

from milepost.core.geometry import AttentionGroupSpec, CacheGeometry, RecurrentGroupSpec
from milepost.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What caching needs to know of a model.

    Attributes:
        kv_bytes_per_token: attention KV of one token over all full-attention layers.
        state_bytes: one state (conv tail + recurrent matrix) over all linear layers.
        layer_kv_bytes_per_token, layer_state_bytes: the same of one layer.
        checkpoint_alignment: tokens, export grid of the kernels.
    """

    kv_bytes_per_token: int
    state_bytes: int
    layer_kv_bytes_per_token: int
    layer_state_bytes: int
    checkpoint_alignment: int | None = 1

    def geometry(self, match_unit: int) -> CacheGeometry:
        """Cache geometry with one attention and one recurrent group."""
        return CacheGeometry(
            match_unit=match_unit,
            attention=(AttentionGroupSpec("attention", self.kv_bytes_per_token),),
            recurrent=(RecurrentGroupSpec("recurrent", self.state_bytes, self.checkpoint_alignment),),
        )


def mla_bytes_per_token(kv_rank: int = 512, shared_key: int = 64) -> int:
    """Latent and shared key of one MLA layer in bf16."""
    return (kv_rank + shared_key) * 2


def kda_state_bytes(num_heads: int, head_dim: int = 128, conv_width: int = 4) -> int:
    """fp32 matrices [heads, dim, dim] and the bf16 tails of the three convolutions of one KDA layer."""
    matrix = num_heads * head_dim * head_dim * 4
    tails = 3 * (conv_width - 1) * num_heads * head_dim * 2
    return matrix + tails


def kimi_shape(num_mla_layers: int, num_kda_layers: int, num_heads: int) -> ModelShape:
    """A model of KDA and MLA layers."""
    kv, state = mla_bytes_per_token(), kda_state_bytes(num_heads)
    return ModelShape(num_mla_layers * kv, num_kda_layers * state, kv, state)


SHAPES = {
    "kimi-k3": kimi_shape(24, 69, 96),
    "kimi-linear-48b": kimi_shape(7, 20, 32),
}


def named_shape(name: str) -> ModelShape:
    """Look a shape up.

    Raises:
        ConfigError: unknown name; lists the known ones.
    """
    shape = SHAPES.get(name)
    if shape is None:
        raise ConfigError("geometry", f"unknown model {name!r}; known are {', '.join(sorted(SHAPES))}")
    return shape
