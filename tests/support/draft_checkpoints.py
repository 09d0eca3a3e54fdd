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
    name: str,
    num_modules: int = 1,
    *,
    seed: int = 5,
    own_heads: bool = True,
    context: float | None = None,
    **changes: Any,
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config and tensors of a family with `num_modules` draft modules; `changes` go into the config.

    Args:
        own_heads: DeepSeek's layout: modules bring a head.
        context: None = random weights, which accept next to nothing. Else decoder and modules mostly look at
            the last token, and what comes before it counts so much: small = most drafts are accepted.
    """
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
    if context is not None:
        _agree(name, text, tensors, context)
    return config, tensors


_OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "w2.weight", "experts.down_proj")


def _agree(name: str, text: dict[str, Any], tensors: dict[str, torch.Tensor], context: float) -> None:
    """Makes decoder and modules nearly the same function of the last token."""
    prefix, hidden = decoder_prefix(tensors), text["hidden_size"]
    head = tensors["language_model.lm_head.weight" if name == "kimi_k3" else "lm_head.weight"]
    for at, tensor in tensors.items():
        if at.endswith("routed_expert_up_proj.weight") or (
            at.endswith(_OUTPUTS) and "routed_expert" not in at and not (name == "kimi_k3" and ".w2." in at)
        ):
            tensor *= context
        elif at.endswith(("enorm.weight", "pre_fc_norm_embedding.weight")):
            tensor.fill_(0.0 if is_qwen(name) else 1.0)
        elif at.endswith(("eh_proj.weight", "mtp.fc.weight")):
            tensor[:, hidden:] *= context
            tensor[:, :hidden] = torch.eye(hidden)
        elif at.endswith(("shared_head.norm.weight", "mtp.norm.weight")):
            tensor.copy_(tensors[prefix + "norm.weight"])
        elif at.endswith("shared_head.head.weight"):
            tensor.copy_(head)


def load_with_drafts(directory: Path, name: str, num_draft_tokens: int, **options: Any) -> LoadedModel:
    """Writes a checkpoint of `with_drafts(name, **options)` and loads it with its modules."""
    config, tensors = with_drafts(name, **options)
    return load_model(write_checkpoint(directory, config, tensors=tensors), num_draft_tokens=num_draft_tokens)
