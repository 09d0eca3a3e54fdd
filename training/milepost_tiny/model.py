"""The training-side network of milepost-tiny: KDA layers, one NoPE MLA layer, one MoE block.

Parameter names and shapes are those of the published Kimi-Linear checkpoints, so ``state_dict()`` *is* the
exported checkpoint. This file is written for training speed on one CPU core and is independent of the serving
code; the two are compared by tests through the exported files.

Shapes: B rows, T tokens, H KDA heads of width K (= V), C tokens per chunk, N = T / C chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK_TOKENS = 16
CONV_WIDTH = 4
MAX_EXPONENT = 80.0  # exp(80) is still a finite float32


@dataclass(frozen=True)
class TinyConfig:
    """Sizes of the network; ``hub_config`` gives them their published names."""

    vocab_size: int = 2048
    hidden_size: int = 192
    num_layers: int = 4
    full_attn_layers: tuple[int, ...] = (4,)  # 1-based, as in the published files
    intermediate_size: int = 512
    kda_heads: int = 3
    kda_head_dim: int = 64
    mla_heads: int = 4
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    first_k_dense_replace: int = 3  # layers before this index (0-based) have a dense MLP
    num_experts: int = 4
    num_experts_per_token: int = 2
    num_shared_experts: int = 2
    moe_intermediate_size: int = 64
    routed_scaling_factor: float = 1.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 32768
    special_ids: dict[str, int] = field(default_factory=dict)  # bos, eos, pad

    def is_full_attention(self, layer_index: int) -> bool:
        return layer_index + 1 in self.full_attn_layers

    def hub_config(self) -> dict[str, Any]:
        """The ``config.json`` of the exported model."""
        kda_layers = [i + 1 for i in range(self.num_layers) if not self.is_full_attention(i)]
        return {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "use_cache": True,
            "linear_attn_config": {
                "full_attn_layers": list(self.full_attn_layers),
                "kda_layers": kda_layers,
                "num_heads": self.kda_heads,
                "head_dim": self.kda_head_dim,
                "short_conv_kernel_size": CONV_WIDTH,
            },
            "num_attention_heads": self.mla_heads,
            "num_key_value_heads": self.mla_heads,
            "head_dim": self.qk_nope_head_dim + self.qk_rope_head_dim,
            "q_lora_rank": None,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_nope_head_dim": self.qk_nope_head_dim,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "v_head_dim": self.v_head_dim,
            "mla_use_nope": True,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "first_k_dense_replace": self.first_k_dense_replace,
            "moe_layer_freq": 1,
            "num_experts": self.num_experts,
            "num_experts_per_token": self.num_experts_per_token,
            "num_shared_experts": self.num_shared_experts,
            "moe_intermediate_size": self.moe_intermediate_size,
            "moe_router_activation_func": "sigmoid",
            "moe_renormalize": True,
            "routed_scaling_factor": self.routed_scaling_factor,
            "num_expert_group": 1,
            "topk_group": 1,
            "use_grouped_topk": True,
            "num_nextn_predict_layers": 0,
            "model_max_length": self.max_position_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "bos_token_id": self.special_ids.get("bos"),
            "eos_token_id": self.special_ids.get("eos"),
            "pad_token_id": self.special_ids.get("pad"),
        }


# ------------------------------------------------------------------------------------------------ KDA core


def inverse_unit_lower(strict_lower: Tensor) -> Tensor:
    """(I + A)^-1 for a strictly lower triangular A [..., C, C], C a power of two, by doubling.

    With N = -A nilpotent: (I - N)^-1 = (I + N)(I + N^2)(I + N^4)...
    """
    size = strict_lower.shape[-1]
    power = -strict_lower
    inverse = torch.eye(size, dtype=power.dtype) + power
    for _ in range(int(math.log2(size)) - 1):
        power = power @ power
        inverse = inverse + inverse @ power
    return inverse


class ChunkScan(torch.autograd.Function):
    """The sequential part of chunkwise KDA, with its gradient written out.

    Inputs, X = B * H: w [N,X,C,K], u [N,X,C,V], k_end [N,X,C,K] (keys decayed to the end of the chunk),
    decay [N,X,K,1] (over the whole chunk), start [X,K,V]. Per chunk:
    ``v_new = u - w S`` and ``S <- decay * S + k_end^T v_new``.
    Returns the state before each chunk [N,X,K,V] and the final state [X,K,V].
    """

    @staticmethod
    def forward(
        ctx: Any, w: Tensor, u: Tensor, k_end: Tensor, decay: Tensor, start: Tensor
    ) -> tuple[Tensor, Tensor]:
        states = u.new_empty((w.shape[0], *start.shape))
        v_new = torch.empty_like(u)
        state = start
        for n in range(w.shape[0]):
            states[n] = state
            v_new[n] = torch.baddbmm(u[n], w[n], state, alpha=-1)
            state = torch.baddbmm(state * decay[n], k_end[n].transpose(-1, -2), v_new[n])
        ctx.save_for_backward(w, v_new, k_end, decay, states)
        return states, state

    @staticmethod
    def backward(ctx: Any, d_states: Tensor, d_final: Tensor) -> tuple[Tensor, ...]:
        w, v_new, k_end, decay, states = ctx.saved_tensors
        d_after = torch.empty_like(states)  # gradient of the state after each chunk
        d_v = torch.empty_like(v_new)
        d_state = d_final
        for n in range(w.shape[0] - 1, -1, -1):
            d_after[n] = d_state
            d_v[n] = k_end[n] @ d_state
            direct = torch.addcmul(d_states[n], d_state, decay[n])
            d_state = torch.baddbmm(direct, w[n].transpose(-1, -2), d_v[n], alpha=-1)
        d_w = -(d_v @ states.transpose(-1, -2))
        d_k_end = v_new @ d_after.transpose(-1, -2)
        d_decay = (d_after * states).sum(-1, keepdim=True)
        return d_w, d_v, d_k_end, d_decay, d_state


@torch.compiler.disable
def chunk_scan(w: Tensor, u: Tensor, k_end: Tensor, decay: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    states, final = ChunkScan.apply(w, u, k_end, decay, start)
    return states, final


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, start: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gated delta rule in chunks (Kimi Delta Attention). T must be a multiple of CHUNK_TOKENS.

    q, k, v [B,T,H,K] (q, k normalised, q scaled), g [B,T,H,K] log decay <= 0, beta [B,T,H], start [B,H,K,V].
    Returns outputs [B,T,H,V] and the final state [B,H,K,V].

    Products of exp(G_i) and exp(-G_j) are taken relative to the middle of the chunk, so that neither factor
    overflows although the gate has no lower bound.
    """
    num_rows, num_tokens, num_heads, dim = q.shape
    chunks, size = num_tokens // CHUNK_TOKENS, CHUNK_TOKENS

    def split(x: Tensor) -> Tensor:
        x = x.reshape(num_rows, chunks, size, num_heads, -1).permute(1, 0, 3, 2, 4)
        return x.reshape(chunks, num_rows * num_heads, size, -1)

    q, k, v, g, beta = split(q), split(k), split(v), split(g), split(beta.unsqueeze(-1))
    lower = torch.ones(size, size, dtype=torch.bool).tril()
    total = lower.to(g.dtype) @ g
    middle = total[:, :, size // 2 - 1 : size // 2, :]
    relative = (total - middle).clamp(-MAX_EXPONENT, MAX_EXPONENT)
    grow, shrink = relative.exp(), (-relative).exp()
    k_in = k * shrink
    coupling = ((k * beta * grow) @ k_in.transpose(-1, -2)).masked_fill(~lower.tril(-1), 0.0)
    scores = ((q * grow) @ k_in.transpose(-1, -2)).masked_fill(~lower, 0.0)
    solve = inverse_unit_lower(coupling)
    decay_in = total.exp()
    w = solve @ (k * beta * decay_in)
    u = solve @ (beta * v)
    last = total[:, :, -1:, :]
    k_end = k * (last - total).exp()
    decay = last.transpose(-1, -2).exp()
    if start is None:
        start = q.new_zeros(num_rows * num_heads, dim, v.shape[-1])
    states, final = chunk_scan(w, u, k_end, decay.contiguous(), start.reshape(num_rows * num_heads, dim, -1))
    out = torch.baddbmm(
        (scores @ u).flatten(0, 1), (q * decay_in - scores @ w).flatten(0, 1), states.flatten(0, 1)
    )
    out = out.view(chunks, num_rows, num_heads, size, -1).permute(1, 0, 3, 2, 4)
    return out.reshape(num_rows, num_tokens, num_heads, -1), final.view(num_rows, num_heads, dim, -1)


# ------------------------------------------------------------------------------------------------- layers

bf16_matmuls = False


def set_bf16_matmuls(enabled: bool) -> None:
    """Round the inputs of the linear layers to bf16 (training speed); everything inside KDA stays fp32."""
    global bf16_matmuls
    bf16_matmuls = enabled


def linear(x: Tensor, *weights: Tensor) -> Tensor:
    """x times the concatenation of several weights (one product instead of many)."""
    weight = weights[0] if len(weights) == 1 else torch.cat(weights, 0)
    if bf16_matmuls:
        return F.linear(x.bfloat16(), weight.bfloat16()).float()
    return F.linear(x, weight)


def projection(in_size: int, out_size: int) -> nn.Linear:
    return nn.Linear(in_size, out_size, bias=False)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class ConvWeight(nn.Module):
    """Holder of a depthwise convolution weight [channels, 1, width]; the last tap reads the current token."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, 1, CONV_WIDTH) * 0.1)


def l2_normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


KdaState = tuple[Tensor, Tensor]  # conv tail [B, 3, 3HK] (raw q|k|v), recurrent state [B, H, K, V]


class KimiDeltaAttention(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        hidden, heads, dim = config.hidden_size, config.kda_heads, config.kda_head_dim
        self.heads, self.dim, width = heads, dim, heads * dim
        self.q_proj, self.k_proj, self.v_proj = (projection(hidden, width) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ConvWeight(width) for _ in range(3))
        self.f_a_proj, self.f_b_proj = projection(hidden, dim), projection(dim, width)
        self.g_a_proj, self.g_b_proj = projection(hidden, dim), projection(dim, width)
        self.b_proj = projection(hidden, heads)
        self.A_log = nn.Parameter(torch.zeros(1, 1, heads, 1))
        self.dt_bias = nn.Parameter(torch.zeros(width))
        self.o_norm = RMSNorm(dim, config.rms_norm_eps)
        self.o_proj = projection(width, hidden)

    def forward(self, x: Tensor, state: KdaState | None = None) -> tuple[Tensor, KdaState]:
        rows, tokens, _ = x.shape
        shape = (rows, tokens, self.heads, self.dim)
        raw = linear(x, self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)
        tail = raw.new_zeros(rows, CONV_WIDTH - 1, raw.shape[-1]) if state is None else state[0]
        extended = torch.cat([tail, raw], 1)
        taps = torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight], 0)[:, 0]
        mixed = extended[:, :tokens] * taps[:, 0]
        for j in range(1, CONV_WIDTH):
            mixed = mixed + extended[:, j : j + tokens] * taps[:, j]
        q, k, v = (part.view(shape) for part in F.silu(mixed).chunk(3, -1))
        q, k = l2_normalise(q) * self.dim**-0.5, l2_normalise(k)
        low_f, low_g = linear(x, self.f_a_proj.weight, self.g_a_proj.weight).chunk(2, -1)
        decay_input = (linear(low_f, self.f_b_proj.weight) + self.dt_bias).view(shape)
        g = -self.A_log.exp() * F.softplus(decay_input)
        beta = torch.sigmoid(linear(x, self.b_proj.weight))
        padding = -tokens % CHUNK_TOKENS
        if padding:  # a padded token has beta 0 and decay 1: it changes nothing
            q, k, v, g = (F.pad(part, (0, 0, 0, 0, 0, padding)) for part in (q, k, v, g))
            beta = F.pad(beta, (0, 0, 0, padding))
        out, recurrent = chunk_kda(q, k, v, g, beta, None if state is None else state[1])
        gate = torch.sigmoid(linear(low_g, self.g_b_proj.weight).view(shape))
        out = self.o_norm(out[:, :tokens]) * gate
        new_tail = extended[:, -(CONV_WIDTH - 1) :]
        return linear(out.reshape(rows, tokens, -1), self.o_proj.weight), (new_tail, recurrent)


class LatentAttention(nn.Module):
    """Multi-head latent attention without positions; the cache is [latent | k_pe] per token."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.heads, self.rank, self.rope = config.mla_heads, config.kv_lora_rank, config.qk_rope_head_dim
        self.nope, self.v_dim = config.qk_nope_head_dim, config.v_head_dim
        hidden = config.hidden_size
        self.q_proj = projection(hidden, self.heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = projection(hidden, self.rank + self.rope)
        self.kv_a_layernorm = RMSNorm(self.rank, 1e-6)
        self.kv_b_proj = projection(self.rank, self.heads * (self.nope + self.v_dim))
        self.o_proj = projection(self.heads * self.v_dim, hidden)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        rows, tokens, _ = x.shape
        q = linear(x, self.q_proj.weight).view(rows, tokens, self.heads, -1).transpose(1, 2)
        latent, k_pe = linear(x, self.kv_a_proj_with_mqa.weight).split([self.rank, self.rope], -1)
        cache = torch.cat([self.kv_a_layernorm(latent), k_pe], -1)
        if state is not None:
            cache = torch.cat([state, cache], 1)
        total = cache.shape[1]
        latent, k_pe = cache.split([self.rank, self.rope], -1)
        expanded = linear(latent, self.kv_b_proj.weight).view(rows, total, self.heads, -1).transpose(1, 2)
        k_nope, v = expanded.split([self.nope, self.v_dim], -1)
        k = torch.cat([k_nope, k_pe[:, None].expand(-1, self.heads, -1, -1)], -1)
        if state is None:
            # Equal head widths select the fused kernel, which keeps no [T, T] matrix.
            v = F.pad(v, (0, self.nope + self.rope - self.v_dim))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., : self.v_dim]
        else:
            query_positions = torch.arange(tokens)[:, None] + total - tokens
            visible = torch.arange(total)[None] <= query_positions
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return linear(out.transpose(1, 2).reshape(rows, tokens, -1), self.o_proj.weight), cache


class GatedMLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = projection(hidden, intermediate), projection(hidden, intermediate)
        self.down_proj = projection(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = linear(x, self.gate_proj.weight, self.up_proj.weight).chunk(2, -1)
        return linear(F.silu(gate) * up, self.down_proj.weight)


class Expert(nn.Module):
    """Holder of one expert's weights: w1 gate, w3 up, w2 down."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.w1, self.w3 = projection(hidden, intermediate), projection(hidden, intermediate)
        self.w2 = projection(intermediate, hidden)


class Router(nn.Module):
    def __init__(self, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_experts, hidden))
        self.register_buffer("e_score_correction_bias", torch.zeros(num_experts))
        self.register_buffer("load", torch.zeros(num_experts), persistent=False)


class SparseMoe(nn.Module):
    """Sigmoid router with renormalised top-k. All experts are computed and masked: there are only a few."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.top_k, self.width = config.num_experts_per_token, config.moe_intermediate_size
        self.scaling = config.routed_scaling_factor
        self.gate = Router(config.hidden_size, config.num_experts)
        self.experts = nn.ModuleList(
            Expert(config.hidden_size, self.width) for _ in range(config.num_experts)
        )
        self.shared_experts = GatedMLP(config.hidden_size, self.width * config.num_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.sigmoid(F.linear(x, self.gate.weight))
        chosen = (scores + self.gate.e_score_correction_bias).topk(self.top_k, -1).indices
        picked = scores.gather(-1, chosen)
        picked = picked / (picked.sum(-1, keepdim=True) + 1e-20) * self.scaling
        mixing = torch.zeros_like(scores).scatter(-1, chosen, picked)
        if self.training:
            self.gate.load += (mixing > 0).float().detach().flatten(0, -2).mean(0)
        gate = linear(x, *(expert.w1.weight for expert in self.experts))
        up = linear(x, *(expert.w3.weight for expert in self.experts))
        inner = F.silu(gate) * up * mixing.repeat_interleave(self.width, -1)
        down = torch.cat([expert.w2.weight for expert in self.experts], 1)
        return linear(inner, down) + self.shared_experts(x)

    @torch.no_grad()
    def rebalance(self, rate: float) -> None:
        """Nudge the selection bias towards the less used experts (no auxiliary loss)."""
        load = self.gate.load
        self.gate.e_score_correction_bias += rate * torch.sign(load.mean() - load)
        load.zero_()


LayerState = KdaState | Tensor


class DecoderLayer(nn.Module):
    def __init__(self, config: TinyConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        full = config.is_full_attention(index)
        self.self_attn = LatentAttention(config) if full else KimiDeltaAttention(config)
        if index < config.first_k_dense_replace:
            self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        else:
            self.block_sparse_moe = SparseMoe(config)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        mixed, new_state = self.self_attn(self.input_layernorm(x), state)
        x = x + mixed
        feed_forward = self.mlp if hasattr(self, "mlp") else self.block_sparse_moe
        return x + feed_forward(self.post_attention_layernorm(x)), new_state


class Backbone(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, ids: Tensor, states: list[Any] | None = None) -> tuple[Tensor, list[Any]]:
        x = self.embed_tokens(ids)
        new_states = []
        for index, layer in enumerate(self.layers):
            x, state = layer(x, None if states is None else states[index])
            new_states.append(state)
        return self.norm(x), new_states


class TinyModel(nn.Module):
    """``forward(ids, states)`` returns logits [B,T,V] and one state per layer, to continue from."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = projection(config.hidden_size, config.vocab_size)

    def forward(self, ids: Tensor, states: list[Any] | None = None) -> tuple[Tensor, list[Any]]:
        hidden, new_states = self.model(ids, states)
        return linear(hidden, self.lm_head.weight), new_states

    def kda_layers(self) -> list[KimiDeltaAttention]:
        attention = [layer.self_attn for layer in self.model.layers]
        return [module for module in attention if isinstance(module, KimiDeltaAttention)]

    def moe_blocks(self) -> list[SparseMoe]:
        return [module for module in self.modules() if isinstance(module, SparseMoe)]
