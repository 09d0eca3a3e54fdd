"""Random small checkpoints with draft modules of their own (MTP), in published hub layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.support.checkpoints import write_checkpoint
from tests.support.families import FAMILIES

from milepost.models.loading import LoadedModel, load_model

DRAFT_FAMILIES = sorted(FAMILIES)


def is_qwen(name: str) -> bool:
    return name.startswith("qwen")


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("text_config", config)


def one_layer_config(name: str) -> dict[str, Any]:
    """A decoder of one layer like that of a draft module: full attention, experts if there are any, and a
    plain residual stream."""
    if is_qwen(name):
        changes: dict[str, Any] = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    else:
        lists = {"kda_layers": [], "full_attn_layers": [1]}
        changes = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "linear_attn_config": lists}
    if name == "kimi_k3":
        changes["attn_res_block_size"] = None
    return FAMILIES[name].config(**changes)


def decoder_prefix(tensors: dict[str, torch.Tensor]) -> str:
    """In front of the names of the decoder's tensors."""
    return next(n for n in tensors if n.endswith("embed_tokens.weight")).removesuffix("embed_tokens.weight")


def layer_tensors(name: str, seed: int) -> dict[str, torch.Tensor]:
    """Of one layer, names without prefix."""
    tensors = FAMILIES[name].tensors(one_layer_config(name), seed)
    prefix = decoder_prefix(tensors) + "layers.0."
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def with_drafts(
    name: str, num_modules: int = 1, *, seed: int = 5, own_heads: bool = True, **changes: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config and tensors of a family with `num_modules` draft modules; `changes` go into the config."""
    count = {"mtp_num_hidden_layers" if is_qwen(name) else "num_nextn_predict_layers": num_modules}
    config = FAMILIES[name].config(**count, **changes)
    tensors = FAMILIES[name].tensors(config, seed)
    text, generator = text_of(config), torch.Generator().manual_seed(seed + 77)
    hidden, mean = text["hidden_size"], 0.0 if is_qwen(name) else 1.0

    def norm(at: str) -> None:
        tensors[f"{at}.weight"] = torch.randn(hidden, generator=generator) * 0.1 + mean

    def linear(at: str, out_features: int, in_features: int) -> None:
        weight = torch.randn(out_features, in_features, generator=generator)
        tensors[f"{at}.weight"] = weight * in_features**-0.5

    prefix = decoder_prefix(tensors)
    if is_qwen(name):
        for part in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            norm(f"mtp.{part}")
        linear("mtp.fc", hidden, 2 * hidden)
    for number in range(num_modules):
        at = (
            f"mtp.layers.{number}."
            if is_qwen(name)
            else f"{prefix}layers.{text['num_hidden_layers'] + number}."
        )
        tensors.update({at + n: t for n, t in layer_tensors(name, seed + 1000 + number).items()})
        if not is_qwen(name):
            for part in ("enorm", "hnorm", "shared_head.norm"):
                norm(at + part)
            linear(at + "eh_proj", hidden, 2 * hidden)
            if own_heads:
                linear(at + "shared_head.head", text["vocab_size"], hidden)
    return config, tensors


def load_with_drafts(directory: Path, name: str, num_draft_tokens: int, **options: Any) -> LoadedModel:
    """Writes a checkpoint of `with_drafts(name, **options)` and loads it with its modules."""
    config, tensors = with_drafts(name, **options)
    return load_model(write_checkpoint(directory, config, tensors=tensors), num_draft_tokens=num_draft_tokens)
