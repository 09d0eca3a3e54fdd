"""What a decoder is made of, as plain numbers. No torch: `describe` works from the config alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from milepost.models.rope import RopeSpec

Mixer = Literal["kda", "mla", "gdn", "gqa"]
Mlp = Literal["dense", "moe"]
Router = Literal["sigmoid", "softmax"]

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "uint8": 1}
"""Bytes of one element of a dtype, by its name."""

MXFP4_GROUP = 32
"""4-bit floats that share a scale."""

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
        full_rank_gate: one `g_proj` for the output gate instead of `g_a_proj`, `g_b_proj`.
        padded_decay_log: `A_log` may have more entries than heads; the first ones count.
    """

    num_heads: int
    head_dim: int
    conv_kernel: int
    norm_eps: float
    gate_lower_bound: float | None = None
    full_rank_gate: bool = False
    padded_decay_log: bool = False

    @property
    def width(self) -> int:
        """Channels of each of q, k and v."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Multi-head latent attention.

    Attributes:
        q_lora_rank: None = one `q_proj`, else q_a / norm / q_b.
        latent_norm_eps: of the q_a and kv_a norms. The published code uses 1e-6 here, whatever
            `rms_norm_eps` says.
        output_gate: the heads' outputs are multiplied by sigmoid(g_proj(x)).
        rope: of the shared key part and its part of the queries; None = no positions (NoPE), as in all
            decoders here.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    latent_norm_eps: float = 1e-6
    output_gate: bool = False
    rope: RopeSpec | None = None

    @property
    def latent_width(self) -> int:
        """Values cached per token and layer: normed latent, then the shared key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class GdnSpec:
    """Gated DeltaNet: one decay per value head; each key head serves a run of value heads.

    Attributes:
        conv_kernel: taps of the short convolution; conv_kernel - 1 raw rows are state.
        norm_eps: of the gated output norm.
        interleaved: q, k, v and z are one projection, ordered by key head (Qwen3-Next), else separate.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    norm_eps: float
    interleaved: bool

    @property
    def key_width(self) -> int:
        """Channels of each of q and k."""
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.key_width + self.value_width


@dataclass(frozen=True, slots=True)
class GqaSpec:
    """Grouped-query attention with per-head norms, partial rotary positions and an output gate.

    Attributes:
        rotary_dim: leading entries of a head that are rotated; even.
        norm_eps: of the query and key norms.
        rope: how they are rotated if not plainly; None = by powers of `rope_theta`.
        output_gate: the heads' outputs are multiplied by a sigmoid that `q_proj` brings as well.
        head_norms: queries and keys are normed; None = if the checkpoint has these norms.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    norm_eps: float
    rope: RopeSpec | None = None
    output_gate: bool = True
    head_norms: bool | None = True

    @property
    def kv_width(self) -> int:
        """Values cached per token and layer for keys, and again for values."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Routed experts that work in a smaller space: down, experts, sum, norm, up.

    Attributes:
        width: of that space.
        norm_eps: of the norm on the summed output; None = no norm.
    """

    width: int
    norm_eps: float | None


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How a family calls the parts of its expert layers in checkpoints.

    Attributes:
        module: below the layer.
        gate, up, down: parts of one expert.
        shared: the MLP that always runs.
    """

    module: str
    gate: str
    up: str
    down: str
    shared: str


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Routed experts, plus a shared MLP that always runs.

    Attributes:
        shared_intermediate_size: 0 = no shared MLP.
        shared_gate: the shared MLP's output is multiplied by sigmoid(shared_expert_gate(x)).
        router: sigmoid scores with a correction bias, or softmax over all experts.
        packed_mxfp4: expert weights may be stored as 4-bit floats with a scale per 32 values.
    """

    num_experts: int
    experts_per_token: int
    expert_intermediate_size: int
    shared_intermediate_size: int
    renormalize: bool
    routed_scaling_factor: float
    names: ExpertNames
    router: Router = "sigmoid"
    shared_gate: bool = False
    latent: LatentSpec | None = None
    packed_mxfp4: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    mixer: Mixer
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class SituSpec:
    """SiTU-GLU betas: beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta).

    Attributes:
        linear_beta: None = the up part stays as it is.
    """

    beta: float
    linear_beta: float | None


@dataclass(frozen=True, slots=True)
class MtpSpec:
    """Draft modules that a checkpoint ships for its own decoder (multi-token prediction).

    A module reads the embedding of a token and the hidden state before it, and predicts the token behind.

    Attributes:
        num_modules: as the config declares; drafting further than that uses them again.
        family: "qwen": `mtp.*`, the modules share norms and projection, hidden states are handed over
            behind the final norm. "deepseek": layers numbered behind the decoder's, all parts of their own,
            hidden states are handed over before the final norm.
    """

    num_modules: int
    family: Literal["qwen", "deepseek"]


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """One decoder: a pattern of layers and the sizes they share.

    Attributes:
        kda, mla, gdn, gqa: sizes of the layers with that mixer, None if there are none.
        max_model_len: positions the model declares, prompt and output together.
        dtype: dtype the checkpoint asks for, a name of `COMPUTE_DTYPES`.
        eos_token_ids: ids that end an answer by default.
        situ: activation of all MLPs; None = SwiGLU.
        norm_offset: added to the stored weights of the block, final, query and key norms (1 where a
            family stores them zero-centred).
        attn_res_block_layers: layers per block of the attention residuals; None = a plain residual stream.
        skipped: name prefixes of tensors that belong to parts that are not loaded (vision, drafts).
        mtp: the checkpoint's own draft modules, None if it declares none.
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
    gdn: GdnSpec | None = None
    gqa: GqaSpec | None = None
    situ: SituSpec | None = None
    norm_offset: float = 0.0
    attn_res_block_layers: int | None = None
    skipped: tuple[str, ...] = ()
    mtp: MtpSpec | None = None

    def layer_indices(self, mixer: Mixer) -> tuple[int, ...]:
        """0-based indices of the layers with this mixer, ascending."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.mixer == mixer)

    @property
    def draft_layer(self) -> LayerSpec:
        """What a draft module is made of: the family's attention, and experts if the decoder has any."""
        mixer: Mixer = "mla" if self.mla is not None else "gqa"
        return LayerSpec(mixer, "dense" if self.moe is None else "moe")
