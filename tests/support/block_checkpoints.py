"""Random small checkpoints of block drafters (DFlash, DSpark), in every published layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.support.checkpoints import write_checkpoint
from tests.support.draft_checkpoints import decoder_prefix, is_qwen, text_of, with_drafts
from tests.support.drafter_tensors import RandomTensors

from milepost.models.loading import LoadedModel, load_model

BLOCK_ROWS = 5
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
GQA_SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
MLA_SIZES = {
    "num_attention_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
TAPS = [3, 0, 2]
"""Neither in order nor all; layers of a decoder of five."""


def _common(text: dict[str, Any], **sizes: Any) -> dict[str, Any]:
    return {
        "vocab_size": text["vocab_size"],
        "hidden_size": text["hidden_size"],
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "dtype": "float32",
        **sizes,
    }


def _heads(**changes: Any) -> dict[str, Any]:
    return {
        "markov_rank": 12,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        **changes,
    }


def drafter_config(layout: str, text: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Config of a drafter for a decoder with the (text) config `text`; `changes` go to its top.

    Args:
        layout: "dflash", "dspark" (grouped queries), "dspark_mla", or the same in the library's format,
            "dflash_speculators" and "dspark_speculators".
    """
    mask = text["vocab_size"] - 1
    own = {"mask_token_id": mask, "target_layer_ids": TAPS}
    if layout == "dflash":
        config = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **_common(text, **GQA_SIZES, rope_parameters=PLAIN),
            "block_size": BLOCK_ROWS,
            "num_target_layers": text["num_hidden_layers"],
            "dflash_config": own,
        }
    elif layout == "dspark":
        config = {
            "architectures": ["DSparkDraftModel"],
            "model_type": "qwen3",
            **_common(text, **GQA_SIZES, rope_parameters=YARN),
            **_heads(),
            "block_size": BLOCK_ROWS,
            "dflash_config": own,
        }
    elif layout == "dspark_mla":
        rope = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
        config = {
            "architectures": ["K3DSparkModel"],
            "model_type": "k3_dspark",
            **_common(text, **MLA_SIZES, rope_parameters=rope),
            "markov_rank": 12,
            "num_target_layers": len(TAPS),
            **own,
        }
    else:
        method = layout.removesuffix("_speculators")
        layers = _common(text, **GQA_SIZES, rope_parameters=PLAIN)
        layers |= {"model_type": "qwen3", "sliding_window": 24}
        layers["layer_types"] = ["sliding_attention", "full_attention"]
        config = {
            "architectures": ["DSparkSpeculator"],
            "speculators_model_type": method,
            "transformer_layer_config": layers,
            "aux_hidden_state_layer_ids": [layer + 1 for layer in TAPS],
            "block_size": BLOCK_ROWS,
            "mask_token_id": mask,
            "draft_vocab_size": text["vocab_size"],
            "sliding_window_non_causal": False,
            "dtype": "float32",
        }
        if method == "dspark":
            config |= _heads(markov_head_type="gated", sample_from_anchor=True)
    return {**config, **changes}


LAYOUTS = ("dflash", "dspark", "dspark_mla", "dflash_speculators", "dspark_speculators")


def method_of(layout: str) -> str:
    return "dflash" if layout.startswith("dflash") else "dspark"


def drafter_tensors(config: dict[str, Any], seed: int = 3) -> dict[str, torch.Tensor]:
    """Random tensors for a config of `drafter_config`."""
    layers = config.get("transformer_layer_config", config)
    hidden, vocab = layers["hidden_size"], layers["vocab_size"]
    is_latent = "kv_lora_rank" in layers
    made = RandomTensors(seed, 0.2)
    names = ("context_proj", "context_norm", "final_norm") if is_latent else ("fc", "hidden_norm", "norm")
    made.linear(names[0], hidden, len(TAPS) * hidden)
    made.norm(names[1], hidden)
    made.norm(names[2], hidden)
    if config.get("fc_norm"):
        for number in range(len(TAPS)):
            made.norm(f"fc_norm.{number}", hidden)
    for number in range(layers["num_hidden_layers"]):
        at = f"layers.{number}."
        made.norm(at + "input_layernorm", hidden)
        made.norm(at + "post_attention_layernorm", hidden)
        for part in ("gate_proj", "up_proj"):
            made.linear(f"{at}mlp.{part}", layers["intermediate_size"], hidden)
        made.linear(f"{at}mlp.down_proj", hidden, layers["intermediate_size"])
        made.attention(at + "self_attn.", layers, hidden, has_norms=True)
    rank = config.get("markov_rank", 0)
    draft_vocab = config.get("draft_vocab_size", vocab)
    if rank:
        made.linear("markov_head.markov_w1", vocab, rank)
        made.made["markov_head.markov_w1.weight"] *= 3.0
        made.linear("markov_head.markov_w2", draft_vocab, rank)
        kind = config.get("markov_head_type")
        if kind == "gated":
            made.linear("markov_head.gate_proj", rank, hidden + rank, has_bias=True)
        elif kind == "rnn":
            made.linear("markov_head.joint_proj", 3 * rank, 2 * rank + hidden, has_bias=True)
    if method_is_dspark(config) and config.get("enable_confidence_head", is_latent):
        reads_token = config.get("confidence_head_with_markov", True)
        made.linear("confidence_head.proj", 1, hidden + (rank if reads_token else 0), has_bias=True)
    if draft_vocab < vocab:
        made.linear("lm_head", draft_vocab, hidden)
        kept = (
            torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:draft_vocab].sort().values
        )
        made.made["d2t"] = kept - torch.arange(draft_vocab)
    return made.made


def method_is_dspark(config: dict[str, Any]) -> bool:
    return "markov_rank" in config


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
        context: None = random weights, which accept next to nothing. Else the decoder mostly looks at the
            last token, a DSpark drafter knows what follows on it, and the rest counts so much.
        target: changes to the decoder's config; `changes` go into the drafter's.
    """
    config, tensors = with_drafts(family, 1, context=context, **(target or {}))
    text = text_of(config)
    if context is not None and method_of(layout) == "dspark":
        changes = {"markov_rank": text["hidden_size"], "markov_head_type": "vanilla", **changes}
    draft_config = drafter_config(layout, text, **changes)
    draft_tensors = drafter_tensors(draft_config)
    if context is not None and method_of(layout) == "dspark":
        _agree(family, tensors, draft_tensors, context)
    return (
        write_checkpoint(root / "decoder", config, tensors=tensors),
        write_checkpoint(root / "drafter", draft_config, tensors=draft_tensors),
    )


def _agree(
    family: str, tensors: dict[str, torch.Tensor], draft: dict[str, torch.Tensor], context: float
) -> None:
    """What the token before adds to a guess is what the decoder makes of it alone; all else counts little."""
    prefix = decoder_prefix(tensors)
    embedding, weight = tensors[prefix + "embed_tokens.weight"], tensors[prefix + "norm.weight"]
    head = tensors["language_model.lm_head.weight" if family == "kimi_k3" else "lm_head.weight"]
    normed = embedding * torch.rsqrt(embedding.square().mean(-1, keepdim=True) + 1e-6)
    draft["markov_head.markov_w1.weight"] = normed * (weight + 1.0 if is_qwen(family) else weight)
    draft["markov_head.markov_w2.weight"] = head.clone()
    for name in ("norm.weight", "final_norm.weight"):
        if name in draft:
            draft[name] = draft[name] * context


def load_pair(
    decoder: Path, drafter: Path | None, layout: str = "dspark", num_draft_tokens: int = 4, **options: Any
) -> LoadedModel:
    """The decoder with its drafter, or without for None."""
    if drafter is None:
        return load_model(decoder, **options)
    return load_model(
        decoder,
        num_draft_tokens=num_draft_tokens,
        draft_method=method_of(layout),
        draft_model=drafter,
        **options,
    )
