"""The training-side DSpark drafter of milepost-tiny, in hub tensor names. Independent of the serving code.

Outputs of a few layers of the target are joined, projected and normed; every draft layer makes keys and
values of them at their positions. A block is a token of the text, the anchor, and mask tokens behind it,
embedded by the target; its rows see the text before the anchor and each other, and row j predicts the token
behind its position. A low-rank head adds what follows from the token before.

Shapes: B batch rows, T tokens, D hidden width, A anchors per batch row, R rows of a block.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from model import RMSNorm, TinyModel, linear, projection
from torch import Tensor, nn


@dataclass(frozen=True)
class BlockConfig:
    """Sizes of the drafter; `hub_config` gives them their published names."""

    hidden_size: int = 192
    vocab_size: int = 2048
    intermediate_size: int = 256
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 32768
    markov_rank: int = 48
    draft_block_size: int = 4
    rope_theta: float = 10000.0
    mask_token_id: int = 0
    target_layer_ids: tuple[int, ...] = (1, 2, 3)

    def hub_config(self) -> dict[str, Any]:
        values = asdict(self)
        own = {
            "mask_token_id": values.pop("mask_token_id"),
            "target_layer_ids": list(values.pop("target_layer_ids")),
        }
        size = values.pop("draft_block_size")
        rope = {"rope_type": "default", "rope_theta": values.pop("rope_theta")}
        return {
            "architectures": ["DSparkDraftModel"],
            "model_type": "qwen3",
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            **values,
            "block_size": size,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "rope_parameters": rope,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "dflash_config": own,
        }


class BlockAttention(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.dim = config.num_attention_heads, config.num_key_value_heads, dim
        self.q_proj = projection(hidden, self.heads * dim)
        self.k_proj = projection(hidden, self.kv_heads * dim)
        self.v_proj = projection(hidden, self.kv_heads * dim)
        self.o_proj = projection(self.heads * dim, hidden)
        self.q_norm, self.k_norm = RMSNorm(dim, config.rms_norm_eps), RMSNorm(dim, config.rms_norm_eps)
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        self.register_buffer("frequencies", config.rope_theta**-exponents, persistent=False)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, N, H, dim], positions [B, N]."""
        angles = positions.float()[..., None, None] * self.frequencies
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def entries(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, N, heads, dim] of x [B, N, D]; a pair of heads shares one."""
        shape = (*x.shape[:2], self.kv_heads, self.dim)
        key = self.rotate(self.k_norm(linear(x, self.k_proj.weight).view(shape)), positions)
        value = linear(x, self.v_proj.weight).view(shape)
        share = self.heads // self.kv_heads
        return key.repeat_interleave(share, 2), value.repeat_interleave(share, 2)

    def forward(
        self, x: Tensor, positions: Tensor, known: tuple[Tensor, Tensor], hidden: Tensor, block_rows: int
    ) -> Tensor:
        """x [B, A * R, D] of blocks; known entries [B, T, heads, dim]; hidden bool [B, A * R, T]."""
        batch, count, _ = x.shape
        query = self.q_norm(linear(x, self.q_proj.weight).view(batch, count, self.heads, self.dim))
        query = self.rotate(query, positions) * self.dim**-0.5
        key, value = self.entries(x, positions)
        scores = torch.einsum("bnhd,bthd->bhnt", query, known[0])
        scores = scores.masked_fill(hidden[:, None], float("-inf"))
        in_blocks = (batch, count // block_rows, block_rows, self.heads, self.dim)
        own = torch.einsum("barhd,bashd->bhars", query.view(in_blocks), key.view(in_blocks))
        own = own.reshape(batch, self.heads, count, block_rows)
        shares = torch.cat([scores, own], -1).softmax(-1)
        out = torch.einsum("bhnt,bthd->bnhd", shares[..., :-block_rows], known[1])
        own_shares = shares[..., -block_rows:].reshape(batch, self.heads, -1, block_rows, block_rows)
        own_out = torch.einsum("bhars,bashd->barhd", own_shares, value.view(in_blocks))
        out = out + own_out.reshape(batch, count, self.heads, self.dim)
        return linear(out.flatten(2), self.o_proj.weight)


class BlockMlp(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = projection(hidden, inner), projection(hidden, inner)
        self.down_proj = projection(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        inner = nn.functional.silu(linear(x, self.gate_proj.weight)) * linear(x, self.up_proj.weight)
        return linear(inner, self.down_proj.weight)


class BlockLayer(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.self_attn, self.mlp = BlockAttention(config), BlockMlp(config)


class MarkovHead(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = projection(config.markov_rank, config.vocab_size)


class ConfidenceHead(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.markov_rank, 1)


class BlockDrafter(nn.Module):
    """``state_dict()`` is the checkpoint."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = projection(len(config.target_layer_ids) * hidden, hidden)
        self.hidden_norm, self.norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_hidden_layers))
        self.markov_head, self.confidence_head = MarkovHead(config), ConfidenceHead(config)

    @torch.no_grad()
    def start_from(self, target: TinyModel) -> None:
        """Layers that add little at first, the target's output norm, and a Markov head that is silent."""
        for layer in self.layers:
            layer.self_attn.o_proj.weight.mul_(0.3)
            layer.mlp.down_proj.weight.mul_(0.3)
        self.norm.load_state_dict(target.model.norm.state_dict())
        self.markov_head.markov_w1.weight.normal_(std=0.5)
        self.markov_head.markov_w2.weight.zero_()

    def rows(self, taps: Tensor, anchors: Tensor, embedded: Tensor) -> Tensor:
        """What the head reads of all rows of blocks, [B, A, R, D].

        Args:
            taps: [B, T, taps * D].
            anchors: int64 [B, A], positions of the blocks' first rows; at least 1.
            embedded: [B, A, R, D], of the tokens there and the mask token.
        """
        batch, tokens, _ = taps.shape
        num_rows = embedded.shape[2]
        context = self.hidden_norm(linear(taps, self.fc.weight))
        places = torch.arange(tokens).expand(batch, -1)
        positions = (anchors[..., None] + torch.arange(num_rows)).flatten(1)
        hidden = places[:, None] >= anchors.repeat_interleave(num_rows, 1)[..., None]
        x = embedded.flatten(1, 2)
        for layer in self.layers:
            known = layer.self_attn.entries(context, places)
            x = x + layer.self_attn(layer.input_layernorm(x), positions, known, hidden, num_rows)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x).view(embedded.shape)


@dataclass(frozen=True)
class BlockLoss:
    """Of a batch.

    Attributes:
        guesses: mean cross-entropy of guesses against the target's distributions.
        confidence: mean cross-entropy of the estimate against the chance that a guess is accepted.
        agreed: per row of a block, the weighted share in which drafter and target prefer the same token.
    """

    guesses: Tensor
    confidence: Tensor
    agreed: list[float]


def distillation(
    drafter: BlockDrafter, target: TinyModel, ids: Tensor, weights: Tensor, num_anchors: int, decay: float
) -> BlockLoss:
    """Blocks behind random anchors of a text, against what the target says there.

    A row counts as much as the target would have written the tokens before it in the block, and `decay` to
    the power of its place.

    Args:
        ids: int64 [B, T].
        weights: [B, T], of position t: how much the prediction of token t + 1 matters.
    """
    config = drafter.config
    num_rows, batch, tokens = config.draft_block_size, *ids.shape
    with torch.no_grad():
        taps, hidden, embedding = target_taps(target, ids, config.target_layer_ids)
        chances = weights[:, 1 : tokens - num_rows + 1] + 1e-3
        anchors = torch.multinomial(chances, num_anchors, replacement=False) + 1
        places = anchors[..., None] + torch.arange(num_rows)  # of rows
        flat = places.flatten(1)
        states = hidden.gather(1, flat[..., None].expand(-1, -1, hidden.shape[-1]))
        teacher = linear(target.model.norm(states), target.lm_head.weight).softmax(-1)
        teacher = teacher.view(batch, num_anchors, num_rows, -1)
        written = ids.gather(1, flat).view(places.shape)  # the token at each row
        follows = teacher[:, :, :-1].gather(-1, written[:, :, 1:, None]).squeeze(-1)
        reached = torch.cat([torch.ones_like(follows[..., :1]), follows.cumprod(-1)], -1)
        counted = weights.gather(1, flat).view(places.shape) * reached
        counted = counted * decay ** torch.arange(num_rows)
        block_ids = torch.full_like(written, config.mask_token_id)
        block_ids[..., 0] = written[..., 0]
        embedded = embedding(block_ids)
    rows = drafter.rows(taps, anchors, embedded)
    before = drafter.markov_head.markov_w1(written)
    logits = linear(rows, target.lm_head.weight) + linear(before, drafter.markov_head.markov_w2.weight)
    guesses = logits.log_softmax(-1)
    total = counted.sum().clamp_min(1e-9)
    loss = (-(teacher * guesses).sum(-1) * counted).sum() / total
    with torch.no_grad():
        # A greedy guess is accepted with the chance that the target gives it.
        best = guesses.argmax(-1)
        accepted = teacher.gather(-1, best[..., None]).squeeze(-1)
        same = (best == teacher.argmax(-1)).float()
        per_row = (same * counted).sum((0, 1)) / counted.sum((0, 1)).clamp_min(1e-9)
    read = torch.cat([rows, before], -1).detach()
    estimate = drafter.confidence_head.proj(read).squeeze(-1)
    entropy = nn.functional.binary_cross_entropy_with_logits(estimate, accepted, reduction="none")
    return BlockLoss(loss, (entropy * counted).sum() / total, per_row.tolist())


@torch.no_grad()
def target_taps(
    target: TinyModel, ids: Tensor, layers: tuple[int, ...]
) -> tuple[Tensor, Tensor, nn.Embedding]:
    """Outputs of layers side by side [B, T, taps * D], hidden states before the final norm, and the
    embedding."""
    x = target.model.embed_tokens(ids)
    kept = []
    for number, layer in enumerate(target.model.layers):
        x, _ = layer(x)
        if number in layers:
            kept.append(x)
    return torch.cat(kept, -1), x, target.model.embed_tokens
