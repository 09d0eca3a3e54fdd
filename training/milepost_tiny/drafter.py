"""The training-side draft module of milepost-tiny: one DeepSeek-style MTP module, in hub tensor names.

Entry j reads token j and the target's hidden state at j - 1 (before the final norm), and its output predicts
token j + 1 through the target's own head. The first entry is at position 1, and its embedding is zero. To
guess several tokens a module is run again on its own output: step s at position p reads, in the place of a
hidden state nobody has computed, its output of step s - 1 at p - 1. Independent of the serving code.

Shapes: B rows, T tokens, D hidden width, M = T - 1 entries of step 1, E = width of what a token leaves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from model import LatentAttention, RMSNorm, SparseMoe, TinyConfig, TinyModel, linear, projection
from torch import Tensor, nn


def attend_known_and_own(q: Tensor, k: Tensor, v: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Query i, scaled already, over known entries [0, i] and entry i of each of `own`; [B, H, N, width]."""
    count = q.shape[2]
    hidden = torch.ones(count, count, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-1, -2)).masked_fill(hidden, float("-inf"))
    single = [(q * own_k).sum(-1, keepdim=True) for own_k, _ in own]
    shares = torch.cat([scores, *single], -1).softmax(-1)
    out = shares[..., :count] @ v
    for column, (_, own_v) in enumerate(own):
        out = out + shares[..., count + column : count + column + 1] * own_v
    return out


class DraftAttention(LatentAttention):
    """Latent attention whose queries may stand behind the entries of step 1."""

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, N, D] -> queries, keys [B, H, N, K] and values [B, H, N, V]."""
        rows, tokens, _ = x.shape
        q = linear(x, self.q_proj.weight).view(rows, tokens, self.heads, -1).transpose(1, 2)
        latent, k_pe = linear(x, self.kv_a_proj_with_mqa.weight).split([self.rank, self.rope], -1)
        expanded = linear(self.kv_a_layernorm(latent), self.kv_b_proj.weight)
        k_nope, v = (
            expanded.view(rows, tokens, self.heads, -1).transpose(1, 2).split([self.nope, self.v_dim], -1)
        )
        k = torch.cat([k_nope, k_pe[:, None].expand(-1, self.heads, -1, -1)], -1)
        return q, k, v

    def attend(self, q: Tensor, known: tuple[Tensor, Tensor], own: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Query i sees known entries [0, i] and entry i of each of `own`: guesses, and itself."""
        count = q.shape[2]
        k, v = (part[:, :, :count] for part in known)
        if not own:
            v = F.pad(v, (0, k.shape[-1] - v.shape[-1]))  # equal widths select the fused kernel
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., : self.v_dim]
        else:
            out = attend_known_and_own(q * q.shape[-1] ** -0.5, k, v, own)
        return linear(out.transpose(1, 2).flatten(2), self.o_proj.weight)


class SharedHead(nn.Module):
    """Holder of the norm in front of the head; the head itself is the target's."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class MtpModule(nn.Module):
    """``state_dict()`` holds the tensors of `model.layers.{num_layers}.*`, without the prefix."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.eh_proj = projection(2 * hidden, hidden)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.self_attn = DraftAttention(config)
        self.block_sparse_moe = SparseMoe(config)
        self.shared_head = SharedHead(config)

    @torch.no_grad()
    def start_from(self, target: TinyModel) -> None:
        """Layer and output norm of the target's last layer; token and hidden state are added."""
        last = target.model.layers[-1]
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn", "block_sparse_moe"):
            getattr(self, name).load_state_dict(getattr(last, name).state_dict())
        self.shared_head.norm.load_state_dict(target.model.norm.state_dict())
        eye = torch.eye(self.eh_proj.weight.shape[0])
        self.eh_proj.weight.copy_(torch.cat([eye, eye], 1))

    def steps(self, embedded: Tensor, hidden: Tensor, num_steps: int) -> list[Tensor]:
        """Outputs before the head's norm.

        Args:
            embedded: [B, T, D] of tokens [0, T).
            hidden: [B, T, D], the target's hidden states.

        Returns:
            Step s: [B, T - s, D] at positions [s, T); row i predicts token s + i + 1.
        """
        embedded = embedded.clone()
        embedded[:, 1] = 0.0
        known: tuple[Tensor, Tensor] | None = None
        guesses: list[tuple[Tensor, Tensor]] = []
        outputs: list[Tensor] = []
        for step in range(1, num_steps + 1):
            joined = torch.cat([self.enorm(embedded[:, step:]), self.hnorm(hidden[:, :-1])], -1)
            x = linear(joined, self.eh_proj.weight)
            q, k, v = self.self_attn.project(self.input_layernorm(x))
            if known is None:
                known = (k, v)
            else:
                guesses = [(old_k[:, :, :-1], old_v[:, :, :-1]) for old_k, old_v in guesses] + [(k, v)]
            x = x + self.self_attn.attend(q, known, guesses)
            hidden = x + self.block_sparse_moe(self.post_attention_layernorm(x))
            outputs.append(hidden)
        return outputs


@dataclass(frozen=True)
class StepLoss:
    """Of one step over a batch.

    Attributes:
        loss: weighted mean of the cross-entropy against the target's distribution.
        agreed: weighted share of rows in which both prefer the same token.
    """

    loss: Tensor
    agreed: float


def distillation(
    module: MtpModule, target: TinyModel, ids: Tensor, weights: Tensor, num_steps: int
) -> list[StepLoss]:
    """Cross-entropy of each step against the target's own distribution at the same position.

    A row of a later step counts as much as the target would have written the tokens that were put in the
    place of guesses: where it would not, nobody drafts from there.

    Args:
        ids: int64 [B, T].
        weights: [B, T], of position t: how much the prediction of token t + 1 matters.
    """
    with torch.no_grad():
        hidden, embedded = target_states(target, ids)
        teacher = linear(target.model.norm(hidden), target.lm_head.weight)
    outputs = module.steps(embedded, hidden, num_steps)
    guessed = (linear(module.shared_head.norm(output), target.lm_head.weight) for output in outputs)
    return chained_losses(guessed, teacher, ids, weights)


def chained_losses(
    guessed: Iterable[Tensor], teacher: Tensor, ids: Tensor, weights: Tensor
) -> list[StepLoss]:
    """Losses of `distillation`, from logits.

    Args:
        guessed: per step s, from 1 on, [B, T - s, vocabulary] at positions [s, T).
        teacher: [B, T, vocabulary], the target's.
    """
    with torch.no_grad():
        shares = teacher.softmax(-1)
        best = teacher.argmax(-1)
        follows = shares[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)  # of token t + 1, at t
    losses = []
    chance = torch.ones_like(weights)
    for step, logits in enumerate(guessed, 1):
        entropy = -(shares[:, step:] * logits.log_softmax(-1)).sum(-1)
        if step > 1:
            chance = chance.clone()
            chance[:, step:] = chance[:, step - 1 : -1] * follows[:, step - 1 :]
        counted = (weights * chance)[:, step:]
        total = counted.sum().clamp_min(1e-9)
        same = (logits.detach().argmax(-1) == best[:, step:]).float()
        losses.append(StepLoss((entropy * counted).sum() / total, float((same * counted).sum() / total)))
    return losses


@torch.no_grad()
def target_states(target: TinyModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states before the final norm and embeddings of ids [B, T], [B, T, D] each."""
    embedded = target.model.embed_tokens(ids)
    x = embedded
    for layer in target.model.layers:
        x, _ = layer(x)
    return x, embedded
