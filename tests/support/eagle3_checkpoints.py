"""Random small checkpoints of EAGLE-3 drafters, in every published layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.support.checkpoints import write_checkpoint
from tests.support.draft_checkpoints import decoder_prefix, is_qwen, text_of, with_drafts
from tests.support.drafter_tensors import RandomTensors

TAP_IDS = [1, 3, 4]
"""As published, counted from one: outputs of layers 0, 2 and 3 of a decoder of five."""
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
MLA_SIZES = {
    "num_attention_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
NUM_MISSING = 40
"""Tokens that a drafter with a reduced vocabulary does not know."""


def drafter_config(layout: str, text: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Config of a drafter for a decoder with the (text) config `text`; `changes` go to its top.

    Args:
        layout: one of `LAYOUTS`. "llama": all tensors of its own and a reduced vocabulary. "speculators": the
            library's format with a Qwen3 layer and all norms there are. "mla": latent attention with
            stretched rotary positions. "k3": latent attention without positions, a gate and SiTU.
    """
    vocab = text["vocab_size"]
    common = {
        "vocab_size": vocab,
        "hidden_size": text["hidden_size"],
        "intermediate_size": 80,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "dtype": "float32",
    }
    if layout == "llama":
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **common,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_theta": 10000.0,
            "draft_vocab_size": vocab - NUM_MISSING,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": TAP_IDS, "use_aux_hidden_state": True},
        }
    elif layout == "speculators":
        layer = {**common, "model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2}
        layer |= {"head_dim": 16, "rope_parameters": PLAIN, "attention_bias": False}
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
            "draft_vocab_size": vocab - NUM_MISSING,
            "eagle_aux_hidden_state_layer_ids": TAP_IDS,
            "norm_before_residual": True,
            "norm_before_fc": False,
            "fc_norm": True,
            "norm_output": True,
            "speculators_config": {"algorithm": "eagle3"},
        }
    else:
        config = {
            "architectures": ["Eagle3DeepseekV2ForCausalLM"],
            "model_type": "kimi_k2",
            **common,
            **MLA_SIZES,
            "eagle_aux_hidden_state_layer_ids": TAP_IDS,
        }
        if layout == "mla":
            config |= {"fc_norm": True, "norm_output": True, "rope_scaling": YARN, "rope_theta": 5000.0}
        else:
            config |= {"mla_use_nope": True, "mla_use_output_gate": True, "hidden_act": "situ"}
            config |= {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "q_lora_rank": None}
    return {**config, **changes}


LAYOUTS = ("llama", "speculators", "mla", "k3")


def layer_of(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of the layer."""
    return config.get("transformer_layer_config", config)


def tap_ids(config: dict[str, Any]) -> list[int]:
    return config.get("eagle_config", config)["eagle_aux_hidden_state_layer_ids"]


def drafter_tensors(layout: str, config: dict[str, Any], seed: int = 3) -> dict[str, torch.Tensor]:
    """Random tensors for a config of `drafter_config`."""
    layer = layer_of(config)
    hidden, vocab, tap_width = layer["hidden_size"], layer["vocab_size"], config.get("target_hidden_size")
    width, num_taps = tap_width or hidden, len(tap_ids(config))
    made = RandomTensors(seed, 0.3)
    made.linear("fc", hidden, num_taps * width)
    for number in range(num_taps if config.get("fc_norm") else 0):
        made.norm(f"fc_norm.{number}", width)
    if config.get("norm_before_fc"):
        made.norm("input_norm", num_taps * width)
    at = "layers.0." if layout == "speculators" else "midlayer."
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        made.norm(at + name, hidden)
    for part in ("gate_proj", "up_proj"):
        made.linear(f"{at}mlp.{part}", layer["intermediate_size"], hidden)
    made.linear(f"{at}mlp.down_proj", hidden, layer["intermediate_size"])
    made.attention(at + "self_attn.", layer, 2 * hidden, 2.0, has_norms=layer["model_type"] == "qwen3")
    if layer.get("mla_use_output_gate"):
        made.linear(at + "self_attn.g_proj", layer["num_attention_heads"] * layer["v_head_dim"], 2 * hidden)
    made.norm("norm", hidden)
    draft_vocab = config.get("draft_vocab_size", vocab)
    if layout == "llama":
        made.linear("embed_tokens", vocab, hidden, hidden**0.5)
    if layout != "k3":
        made.linear("lm_head", draft_vocab, hidden)
    if draft_vocab < vocab:
        kept = (
            torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:draft_vocab].sort().values
        )
        made.made["d2t"] = kept - torch.arange(draft_vocab)
        made.made["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, kept, True)
    return made.made


def write_pair(
    root: Path,
    family: str,
    layout: str,
    *,
    context: float | None = None,
    target: dict[str, Any] | None = None,
    **changes: Any,
) -> tuple[Path, Path]:
    """Directories of a decoder and of a drafter for it.

    Args:
        context: None = random weights, which accept next to nothing. Else decoder and drafter mostly look at
            the last token, and what comes before it counts so much: small = most drafts are accepted.
        target: changes to the decoder's config; `changes` go into the drafter's.
    """
    config, tensors = with_drafts(family, 0, context=context, **(target or {}))
    text = text_of(config)
    if context is not None:
        changes = {**_agreeing_sizes(layout, text["hidden_size"]), **changes}
    drafter = drafter_config(layout, text, **changes)
    draft_tensors = drafter_tensors(layout, drafter)
    if context is not None:
        _agree(family, tensors, drafter, draft_tensors, context)
    return (
        write_checkpoint(root / "decoder", config, tensors=tensors),
        write_checkpoint(root / "drafter", drafter, tensors=draft_tensors),
    )


def _agreeing_sizes(layout: str, hidden: int) -> dict[str, Any]:
    """Sizes in which a whole hidden state fits through the attention."""
    if layout == "llama":
        return {"num_key_value_heads": 4, "head_dim": hidden // 4 + hidden // 4 % 2}
    if layout in ("mla", "k3"):
        part = -(-hidden // 4)
        return {"kv_lora_rank": hidden, "v_head_dim": part, "qk_nope_head_dim": part, "q_lora_rank": None}
    raise ValueError(f"no agreeing drafter is made for {layout}")


_FOCUS = 3.0


def _agree(
    family: str,
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any],
    draft: dict[str, torch.Tensor],
    context: float,
) -> None:
    """Every row attends to the entries of its own token, takes its embedding from there and adds little to
    it; the head is the decoder's."""
    hidden, heads, at = config["hidden_size"], config["num_attention_heads"], "midlayer."
    prefix = decoder_prefix(tensors)
    final = tensors[prefix + "norm.weight"] + (1.0 if is_qwen(family) else 0.0)
    head = tensors["language_model.lm_head.weight" if family == "kimi_k3" else "lm_head.weight"]
    for name, tensor in draft.items():
        if name.endswith(("fc.weight", "down_proj.weight")):
            tensor *= context
        elif name.endswith("norm.weight"):
            tensor.fill_(1.0)
    draft["norm.weight"].copy_(final)
    if "embed_tokens.weight" in draft:
        draft["embed_tokens.weight"].copy_(tensors[prefix + "embed_tokens.weight"])
    if "lm_head.weight" in draft:
        kept = torch.arange(head.shape[0])
        if "d2t" in draft:
            kept = draft["d2t"] + torch.arange(draft["d2t"].shape[0])
        draft["lm_head.weight"].copy_(head[kept])
    if "kv_lora_rank" in config:
        _focus_latent(config, draft, at + "self_attn.")
        return
    width = heads * config["head_dim"]
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = draft[f"{at}self_attn.{name}.weight"].zero_()
        weight[:hidden, :hidden] = torch.eye(hidden) * (1.0 if name == "v_proj" else _FOCUS)
    draft[f"{at}self_attn.o_proj.weight"].copy_(torch.eye(hidden, width))


def _focus_latent(config: dict[str, Any], draft: dict[str, torch.Tensor], at: str) -> None:
    hidden, heads, nope = config["hidden_size"], config["num_attention_heads"], config["qk_nope_head_dim"]
    rope, value = config["qk_rope_head_dim"], config["v_head_dim"]
    query = draft[at + "q_proj.weight"].zero_().view(heads, nope + rope, 2 * hidden)
    expand = draft[at + "kv_b_proj.weight"].zero_().view(heads, nope + value, hidden)
    draft[at + "kv_a_proj_with_mqa.weight"].zero_()[:hidden, :hidden] = torch.eye(hidden)
    for head in range(heads):
        for row in range(min(nope, hidden - head * nope)):
            query[head, row, head * nope + row] = _FOCUS
            expand[head, row, head * nope + row] = _FOCUS
            expand[head, nope + row, head * nope + row] = 1.0
    draft[at + "o_proj.weight"].zero_()[:, :hidden] = torch.eye(hidden)
    if at + "g_proj.weight" in draft:
        draft[at + "g_proj.weight"].zero_()
        draft[at + "o_proj.weight"].mul_(2.0)
