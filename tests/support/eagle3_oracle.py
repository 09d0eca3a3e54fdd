"""EAGLE-3 drafters in transformers: its attention, MLP, norms and rotary positions (Llama's, Qwen3's or
DeepSeek-V3's), with projections that read twice the width. How they are joined is written out from the
published description, one row after the other. What no attention there can do (a gate, no positions) is
written out as well."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tests.support.eagle3_checkpoints import layer_of


class Eagle3Oracle:
    """One drafter.

    Attributes:
        position_shift: added to the rotary positions of guessed rows, to see whether somebody would notice.
    """

    position_shift = 0

    def __init__(
        self,
        config: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        embedding: torch.Tensor,
        head: torch.Tensor,
    ) -> None:
        """
        Args:
            embedding, head: of the decoder, fp32 [vocabulary, D]; used if the drafter has none.
        """
        self.config, self.tensors, self.layer = config, tensors, layer_of(config)
        self.embedding = tensors.get("embed_tokens.weight", embedding)
        self.head = tensors.get("lm_head.weight", head)
        self.vocab_size = embedding.shape[0]
        self.eps = self.layer["rms_norm_eps"]
        self.at = "layers.0." if "layers.0.hidden_norm.weight" in tensors else "midlayer."
        self.attention = self.rotary = None
        if not self.layer.get("mla_use_nope"):
            self._build()

    def _build(self) -> None:
        layer = self.layer
        keys = ("hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps", "vocab_size")
        sizes = {key: layer[key] for key in keys}
        rope = layer.get("rope_parameters") or layer.get("rope_scaling") or {"rope_type": "default"}
        sizes["rope_parameters"] = {"rope_theta": layer.get("rope_theta"), **rope}
        if "kv_lora_rank" in layer:
            from transformers.models.deepseek_v3 import modeling_deepseek_v3 as made
            from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

            keys = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            sizes |= {key: layer[key] for key in keys}
            config: Any = DeepseekV3Config(**sizes, num_key_value_heads=sizes["num_attention_heads"])
            attention, rotary = made.DeepseekV3Attention, made.DeepseekV3RotaryEmbedding
        elif layer["model_type"] == "qwen3":
            from transformers.models.qwen3 import modeling_qwen3 as made
            from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

            keys = ("num_key_value_heads", "head_dim")
            config = Qwen3Config(**sizes, **{key: layer[key] for key in keys})
            attention, rotary = made.Qwen3Attention, made.Qwen3RotaryEmbedding
        else:
            from transformers.models.llama import modeling_llama as made
            from transformers.models.llama.configuration_llama import LlamaConfig

            keys = ("num_key_value_heads", "head_dim")
            config = LlamaConfig(**sizes, **{key: layer[key] for key in keys})
            attention, rotary = made.LlamaAttention, made.LlamaRotaryEmbedding
        config._attn_implementation = "eager"
        self.rotary, self.attention = rotary(config), attention(config, 0).eval()
        for name in ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"):
            old = getattr(self.attention, name, None)
            wide = isinstance(old, torch.nn.Linear) and old.in_features == layer["hidden_size"]
            if wide and old is not None:
                setattr(
                    self.attention, name, torch.nn.Linear(2 * old.in_features, old.out_features, bias=False)
                )
        own = f"{self.at}self_attn."
        self.attention.load_state_dict(
            {name.removeprefix(own): t for name, t in self.tensors.items() if name.startswith(own)}
        )

    def hidden(self, taps: torch.Tensor) -> torch.Tensor:
        """[N, D] of outputs of decoder layers [N, taps, D]."""
        if self.config.get("norm_before_fc"):
            taps = self._norm(taps.flatten(1), "input_norm").view(taps.shape)
        if self.config.get("fc_norm"):
            parts = [self._norm(taps[:, number], f"fc_norm.{number}") for number in range(taps.shape[1])]
            taps = torch.stack(parts, 1)
        return taps.flatten(1) @ self.tensors["fc.weight"].T

    def rows(
        self, tokens: torch.Tensor, hidden: torch.Tensor, num_guessed: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [N, vocabulary] and what is handed on [N, D], from one pass over all rows.

        Args:
            hidden: per row the hidden state at the position before its token.
            num_guessed: rows at the end that nobody has processed.
        """
        embedded = self._norm(F.embedding(tokens, self.embedding), f"{self.at}input_layernorm")
        normed = self._norm(hidden, f"{self.at}hidden_norm")
        residual = normed if self._flag("norm_before_residual") else hidden
        x = residual + self._attend(torch.cat([embedded, normed], -1), num_guessed)
        x = x + self._mlp(self._norm(x, f"{self.at}post_attention_layernorm"))
        out = self._norm(x, "norm")
        logits = out @ self.head.T
        if "d2t" in self.tensors:
            wide = torch.full((logits.shape[0], self.vocab_size), -torch.inf)
            for row, offset in enumerate(self.tensors["d2t"].tolist()):
                wide[:, row + offset] = logits[:, row]
            logits = wide
        return logits, out if self._flag("norm_output") else x

    def _flag(self, key: str) -> bool:
        return bool(self.config.get(key, False))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], self.eps)

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self.tensors[f"{self.at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        if self.layer["hidden_act"] == "silu":
            return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
        beta, linear = self.layer["activation_situ_beta"], self.layer["activation_situ_linear_beta"]
        raw = x @ gate.T
        inner = beta * torch.tanh(raw / beta) * torch.sigmoid(raw) * linear * torch.tanh(x @ up.T / linear)
        return inner @ down.T

    def _attend(self, x: torch.Tensor, num_guessed: int) -> torch.Tensor:
        count = x.shape[0]
        mask = torch.full((count, count), -torch.inf).triu(1)
        if self.attention is None or self.rotary is None:
            return self._attend_without_positions(x, mask)
        positions = torch.arange(count)
        positions[count - num_guessed :] += self.position_shift
        with torch.no_grad():
            rotary = self.rotary(x.unsqueeze(0), positions.unsqueeze(0))
            return self.attention(x.unsqueeze(0), rotary, mask.view(1, 1, count, count))[0][0]

    def _attend_without_positions(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Latent attention with all keys and values expanded, and an output gate."""
        layer, count = self.layer, x.shape[0]
        heads, latent, nope = layer["num_attention_heads"], layer["kv_lora_rank"], layer["qk_nope_head_dim"]
        own = {
            n: self.tensors[f"{self.at}self_attn.{n}.weight"]
            for n in ("q_proj", "kv_b_proj", "g_proj", "o_proj")
        }
        query = (x @ own["q_proj"].T).view(count, heads, -1)
        joined = x @ self.tensors[f"{self.at}self_attn.kv_a_proj_with_mqa.weight"].T
        normed = self._norm(joined[:, :latent], f"{self.at}self_attn.kv_a_layernorm")
        expanded = (normed @ own["kv_b_proj"].T).view(count, heads, -1)
        shared = joined[:, None, latent:].expand(-1, heads, -1)
        keys, values = torch.cat([expanded[..., :nope], shared], -1), expanded[..., nope:]
        scores = torch.einsum("qhd,khd->hqk", query, keys) * query.shape[-1] ** -0.5 + mask
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1)
        return (mixed * torch.sigmoid(x @ own["g_proj"].T)) @ own["o_proj"].T
