"""Block drafters in transformers: its attention, MLP, norms and rotary positions (Qwen3's, or DeepSeek-V3's
for latent attention). A layer of a drafter is one of these over the context rows and the block together,
where context rows are only looked at. Joining, masks and heads are written out from the published
descriptions, row by row."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


class BlockOracle:
    """One drafter."""

    def __init__(
        self,
        config: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        taps: list[int],
        embedding: torch.Tensor,
        head: torch.Tensor,
        block_rows: int,
    ) -> None:
        """
        Args:
            taps: decoder layers, 0-based, in the order in which they are joined.
            embedding, head: of the decoder, fp32 [vocabulary, D].
        """
        self.config, self.tensors, self.taps = config, tensors, taps
        self.layers = config.get("transformer_layer_config", config)
        self.own = config.get("dflash_config", {})
        self.embedding, self.head, self.block_rows = embedding, head, block_rows
        self.is_latent = "kv_lora_rank" in self.layers
        self.is_speculators = "speculators_model_type" in config
        self.guesses_next = config.get("sample_from_anchor", "markov_rank" in config)
        self._build()

    def _build(self) -> None:
        layers = self.layers
        sizes = {
            key: layers[key]
            for key in (
                "hidden_size",
                "intermediate_size",
                "num_attention_heads",
                "rms_norm_eps",
                "vocab_size",
            )
        }
        sizes["rope_parameters"] = dict(layers["rope_parameters"])
        if self.is_latent:
            from transformers.models.deepseek_v3 import modeling_deepseek_v3 as made
            from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

            keys = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            sizes |= {key: layers[key] for key in keys}
            sizes["num_key_value_heads"] = sizes["num_attention_heads"]
            config: Any = DeepseekV3Config(**sizes, rope_interleave=layers.get("rope_interleave", True))
            attention, mlp, norm = made.DeepseekV3Attention, made.DeepseekV3MLP, made.DeepseekV3RMSNorm
            self.rotary: Any = made.DeepseekV3RotaryEmbedding(config)
        else:
            from transformers.models.qwen3 import modeling_qwen3 as qwen3
            from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

            keys = ("num_key_value_heads", "head_dim")
            config = Qwen3Config(**sizes, **{key: layers[key] for key in keys})
            attention, mlp, norm = qwen3.Qwen3Attention, qwen3.Qwen3MLP, qwen3.Qwen3RMSNorm
            self.rotary = qwen3.Qwen3RotaryEmbedding(config)
        config._attn_implementation = "eager"
        eps, hidden = layers["rms_norm_eps"], layers["hidden_size"]

        def norm_of(name: str) -> Any:
            module = norm(hidden, eps=eps)
            module.load_state_dict({"weight": self.tensors[f"{name}.weight"]})
            return module

        names = ("context_norm", "final_norm") if self.is_latent else ("hidden_norm", "norm")
        self.context_norm, self.final_norm = (norm_of(name) for name in names)
        self.tap_norms = []
        if self.config.get("fc_norm"):
            self.tap_norms = [norm_of(f"fc_norm.{number}") for number in range(len(self.taps))]
        self.parts = []
        for number in range(layers["num_hidden_layers"]):
            at = f"layers.{number}."
            modules = attention(config, 0), mlp(config)
            for module, name in zip(modules, ("self_attn.", "mlp."), strict=True):
                prefix = at + name
                state = {n.removeprefix(prefix): t for n, t in self.tensors.items() if n.startswith(prefix)}
                module.load_state_dict(state)
            if self.is_latent:
                # These norms ignore the config's eps in DeepSeek's code, and follow it in drafters.
                for inner in ("q_a_layernorm", "kv_a_layernorm"):
                    if getattr(modules[0], inner, None) is not None:
                        getattr(modules[0], inner).variance_epsilon = eps
            norms = norm_of(at + "input_layernorm"), norm_of(at + "post_attention_layernorm")
            self.parts.append((*modules, *norms))

    def context(self, taps: dict[int, torch.Tensor]) -> torch.Tensor:
        """[T, D] from outputs of decoder layers, each [T, D]."""
        parts = [taps[layer] for layer in self.taps]
        if self.tap_norms:
            parts = [norm(part) for norm, part in zip(self.tap_norms, parts, strict=True)]
        name = "context_proj.weight" if self.is_latent else "fc.weight"
        return self.context_norm(F.linear(torch.cat(parts, dim=-1), self.tensors[name]))

    def sees(self, layer: int, length: int, row: int, position: int) -> bool:
        """Whether a row of a block behind `length` tokens sees a position."""
        kinds = self.layers.get("layer_types")
        is_sliding = (kinds is not None and kinds[layer] == "sliding_attention") or self.own.get(
            "use_swa", False
        )
        if position >= length:
            is_causal = is_sliding and not self.config.get("sliding_window_non_causal", False)
            is_causal = self.config.get("is_causal", self.own.get("causal", is_causal))
            return not is_causal or position - length <= row
        if not is_sliding:
            return True
        window = self.own.get("swa_window_size", self.layers.get("sliding_window"))
        if self.is_speculators:
            return position >= length - window
        return length + row - position < window

    def rows(self, taps: dict[int, torch.Tensor], token: int) -> torch.Tensor:
        """What the head reads of all rows of the block behind the tapped tokens, [block rows, D]."""
        context = self.context(taps)
        length, total = context.shape[0], context.shape[0] + self.block_rows
        mask_token = self.own.get("mask_token_id", self.config.get("mask_token_id"))
        x = self.embedding[[token] + [mask_token] * (self.block_rows - 1)]
        angles = self.rotary(x, torch.arange(total).unsqueeze(0))
        for layer, (attention, mlp, before, behind) in enumerate(self.parts):
            allowed = torch.eye(total, dtype=torch.bool)
            for row in range(self.block_rows):
                for position in range(total):
                    allowed[length + row, position] = self.sees(layer, length, row, position)
            mask = torch.where(allowed, 0.0, -torch.inf).view(1, 1, total, total)
            joined = torch.cat([context, before(x)]).unsqueeze(0)
            x = x + attention(joined, angles, mask)[0][0, length:]
            x = x + mlp(behind(x))
        return self.final_norm(x)

    def guess_logits(
        self, taps: dict[int, torch.Tensor], token: int, following: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits of all guesses, fp32 [guesses, vocabulary], and confidences [guesses].

        Args:
            following: what was guessed, which the guesses behind it read.
        """
        with torch.no_grad():
            rows = self.rows(taps, token)[0 if self.guesses_next else 1 :]
            logits, confidences = [], []
            state: torch.Tensor | None = None
            for place, row in enumerate(rows):
                previous = token if place == 0 else following[place - 1]
                added, confidence, state = self._heads(row, previous, state)
                head = self.tensors.get("lm_head.weight", self.head)
                logits.append(self._over_vocabulary(F.linear(row, head) + added))
                confidences.append(confidence)
            known = [value for value in confidences if value is not None]
            return torch.stack(logits), torch.stack(known) if known else None

    def _over_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        if "d2t" not in self.tensors:
            return logits
        wide = torch.full((self.layers["vocab_size"],), -torch.inf)
        for number, shift in enumerate(self.tensors["d2t"].tolist()):
            wide[number + shift] = logits[number]
        return wide

    def _heads(
        self, row: torch.Tensor, previous: int, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """What is added to the logits of a row, its confidence, and the state for the next row."""
        tensors = self.tensors
        embedded, added = row.new_zeros(0), torch.zeros(())
        if "markov_head.markov_w1.weight" in tensors:
            embedded = tensors["markov_head.markov_w1.weight"][previous]
            kind = self.config.get("markov_head_type", "vanilla")
            mixed = embedded
            if kind == "gated":
                at = "markov_head.gate_proj."
                joined = torch.cat([row, embedded])
                mixed = (
                    torch.sigmoid(F.linear(joined, tensors[at + "weight"], tensors[at + "bias"])) * embedded
                )
            elif kind == "rnn":
                at = "markov_head.joint_proj."
                state = torch.zeros_like(embedded) if state is None else state
                joined = torch.cat([state, embedded, row])
                parts = F.linear(joined, tensors[at + "weight"], tensors[at + "bias"]).chunk(3)
                gate = torch.sigmoid(parts[0])
                state = gate * state + (1 - gate) * torch.tanh(parts[1])
                mixed = torch.tanh(parts[2])
            added = F.linear(mixed, tensors["markov_head.markov_w2.weight"])
        confidence = None
        weight = tensors.get("confidence_head.proj.weight")
        if weight is not None:
            read = row if weight.shape[1] == row.shape[0] else torch.cat([row, embedded])
            confidence = torch.sigmoid(F.linear(read, weight, tensors["confidence_head.proj.bias"]))[0]
        return added, confidence, state
