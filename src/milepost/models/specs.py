"""What a decoder is made of, as plain numbers. No torch: `describe` works from the config alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mixer = Literal["kda", "mla"]
Mlp = Literal["dense", "moe"]

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "uint8": 1}
"""Bytes of one element of a dtype, by its name."""

COMPUTE_DTYPES = ("float32", "bfloat16")
"""Dtypes in which a decoder can run (weights, activations, KV cache, convolution tail)."""


@dataclass(frozen=True, slots=True)
class KdaSpec:
    """Kimi Delta Attention.

    Attributes:
        head_dim: width of keys and of values, per head.
        conv_kernel: taps of the short convolution; conv_kernel - 1 raw rows are state.
        gate_lower_bound: None = softplus gate (unbounded below), else the bound of the sigmoid gate.
        norm_eps: of the gated output norm.
    """

    num_heads: int
    head_dim: int
    conv_kernel: int
    norm_eps: float
    gate_lower_bound: float | None = None

    @property
    def width(self) -> int:
        """Channels of each of q, k and v."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Multi-head latent attention without positions (NoPE).

    Attributes:
        q_lora_rank: None = one `q_proj`, else q_a / norm / q_b.
        latent_norm_eps: of the q_a and kv_a norms. The published code uses 1e-6 here, whatever
            `rms_norm_eps` says.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    latent_norm_eps: float = 1e-6

    @property
    def latent_width(self) -> int:
        """Values cached per token and layer: normed latent, then the shared key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Routed experts with a sigmoid router, plus shared experts that always run."""

    num_experts: int
    experts_per_token: int
    expert_intermediate_size: int
    num_shared_experts: int
    renormalize: bool
    routed_scaling_factor: float


@dataclass(frozen=True, slots=True)
class LayerSpec:
    mixer: Mixer
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """One decoder: a pattern of layers and the sizes they share.

    Attributes:
        max_model_len: positions the model declares, prompt and output together.
        dtype: dtype the checkpoint asks for, a name of `COMPUTE_DTYPES`.
        eos_token_ids: ids that end an answer by default.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    norm_eps: float
    tie_word_embeddings: bool
    layers: tuple[LayerSpec, ...]
    kda: KdaSpec | None
    mla: MlaSpec | None
    moe: MoeSpec | None
    max_model_len: int
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None

    def layer_indices(self, mixer: Mixer) -> tuple[int, ...]:
        """0-based indices of the layers with this mixer, ascending."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.mixer == mixer)
