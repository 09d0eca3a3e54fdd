"""The training-side EAGLE-3 drafter of milepost-tiny, in hub tensor names. Independent of the serving code.

Outputs of a few layers of the target are joined by `fc`, one state per token. A row reads token t + 1 and the
state at t, and predicts token t + 2 through the target's own head. To guess several tokens the layer is run
again on its own output: step s at position p reads, in the place of a state nobody has computed, its output
of step s - 1 at p - 1.

Shapes: B rows, T tokens, D hidden width, M = T - 1 rows of step 1.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from block_drafter import BlockMlp, target_taps
from drafter import StepLoss, attend_known_and_own, chained_losses
from model import RMSNorm, TinyModel, linear, projection
from torch import Tensor, nn


@dataclass(frozen=True)
class Eagle3Config:
    """Sizes of the drafter; `hub_config` gives them their published names. `target_layers`: 0-based."""

    hidden_size: int = 192
    vocab_size: int = 2048
    intermediate_size: int = 256
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 32768
    rope_theta: float = 10000.0
    target_layers: tuple[int, ...] = (1, 2, 3)

    def hub_config(self) -> dict[str, Any]:
        values = asdict(self)
        layers = values.pop("target_layers")
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "num_hidden_layers": 1,
            **values,
            # Published ids count from one.
            "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
        }


class Eagle3Attention(nn.Module):
    """Grouped-query attention over rows twice as wide; queries may stand behind the entries of step 1."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.dim = config.num_attention_heads, config.num_key_value_heads, dim
        self.q_proj = projection(2 * hidden, self.heads * dim)
        self.k_proj = projection(2 * hidden, self.kv_heads * dim)
        self.v_proj = projection(2 * hidden, self.kv_heads * dim)
        self.o_proj = projection(self.heads * dim, hidden)
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        self.register_buffer("frequencies", config.rope_theta**-exponents, persistent=False)

    def project(self, x: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, N, 2 * D] at positions [first, first + N) -> queries, keys, values [B, H, N, dim]."""
        batch, count, _ = x.shape
        query = linear(x, self.q_proj.weight).view(batch, count, self.heads, self.dim).transpose(1, 2)
        key, value = (
            linear(x, part.weight).view(batch, count, self.kv_heads, self.dim).transpose(1, 2)
            for part in (self.k_proj, self.v_proj)
        )
        share = self.heads // self.kv_heads
        key, value = (part.repeat_interleave(share, 1) for part in (self._rotated(key, first), value))
        return self._rotated(query, first) * self.dim**-0.5, key, value

    def attend(self, q: Tensor, known: tuple[Tensor, Tensor], own: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Query i sees known entries [0, i] and entry i of each of `own`: guesses, and itself."""
        count = q.shape[2]
        k, v = (part[:, :, :count] for part in known)
        out = attend_known_and_own(q, k, v, own)
        return linear(out.transpose(1, 2).flatten(2), self.o_proj.weight)

    def _rotated(self, x: Tensor, first: int) -> Tensor:
        angles = torch.arange(first, first + x.shape[2]).float()[:, None] * self.frequencies
        one, other = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


class Eagle3Layer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.hidden_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.self_attn, self.mlp = Eagle3Attention(config), BlockMlp(config)


class Eagle3Drafter(nn.Module):
    """``state_dict()`` is the checkpoint."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.fc = projection(len(config.target_layers) * hidden, hidden)
        self.midlayer, self.norm = Eagle3Layer(config), RMSNorm(hidden, config.rms_norm_eps)

    @torch.no_grad()
    def start_from(self, target: TinyModel) -> None:
        """The state is the output of the last tap, and the layer adds little to it."""
        hidden = self.config.hidden_size
        self.fc.weight.zero_()[:, -hidden:] = torch.eye(hidden)
        self.midlayer.self_attn.o_proj.weight.mul_(0.3)
        self.midlayer.mlp.down_proj.weight.mul_(0.3)
        self.norm.load_state_dict(target.model.norm.state_dict())

    def steps(self, embedded: Tensor, taps: Tensor, num_steps: int) -> list[Tensor]:
        """Outputs before the head's norm.

        Args:
            embedded: [B, T, D] of tokens [0, T).
            taps: [B, T, taps * D].

        Returns:
            Step s: [B, T - s, D] at positions [s, T); row i predicts token s + i + 1.
        """
        layer, hidden = self.midlayer, linear(taps, self.fc.weight)
        known: tuple[Tensor, Tensor] | None = None
        guesses: list[tuple[Tensor, Tensor]] = []
        outputs: list[Tensor] = []
        for step in range(1, num_steps + 1):
            before = hidden[:, :-1]
            joined = torch.cat([layer.input_layernorm(embedded[:, step:]), layer.hidden_norm(before)], -1)
            q, k, v = layer.self_attn.project(joined, step - 1)
            if known is None:
                known = (k, v)
            else:
                guesses = [(old_k[:, :, :-1], old_v[:, :, :-1]) for old_k, old_v in guesses] + [(k, v)]
            x = before + layer.self_attn.attend(q, known, guesses)
            hidden = x + layer.mlp(layer.post_attention_layernorm(x))
            outputs.append(hidden)
        return outputs


def distillation(
    drafter: Eagle3Drafter, target: TinyModel, ids: Tensor, weights: Tensor, num_steps: int
) -> list[StepLoss]:
    """See `drafter.chained_losses`; ids int64 [B, T], weights [B, T]."""
    with torch.no_grad():
        taps, hidden, embedding = target_taps(target, ids, drafter.config.target_layers)
        teacher = linear(target.model.norm(hidden), target.lm_head.weight)
        embedded = embedding(ids)
    outputs = drafter.steps(embedded, taps, num_steps)
    guessed = (linear(drafter.norm(output), target.lm_head.weight) for output in outputs)
    return chained_losses(guessed, teacher, ids, weights)
