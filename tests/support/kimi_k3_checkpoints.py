"""Random small Kimi K3 checkpoints in published hub layout."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tests.support import checkpoints

_TEXT: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "vocab_size": 131,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "routed_expert_hidden_size": 32,
    "latent_moe_use_norm": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
    "linear_attn_config": {
        "kda_layers": [1, 2, 4],
        "full_attn_layers": [3, 5, 6],
        "num_heads": 3,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    },
}
PACKED = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
_PADDED_HEADS = 8
_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def k3_config(**changes: Any) -> dict[str, Any]:
    """Every feature of K3, small. Changes go into `text_config`; those of `linear_attn_config` are merged."""
    text = copy.deepcopy(_TEXT)
    text["linear_attn_config"].update(changes.pop("linear_attn_config", {}))
    text.update(changes)
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "media_placeholder_token_id": 5,
        "text_config": text,
        "vision_config": {"model_type": "moonvit"},
    }


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors with the published names and shapes; experts packed if the config says so."""
    text = config["text_config"]
    base = checkpoints.random_tensors(text, seed)
    generator = torch.Generator().manual_seed(seed + 1000)
    tensors: dict[str, torch.Tensor] = {}

    def add(name: str, *shape: int, scale: float | None = None, mean: float = 0.0) -> None:
        spread = scale if scale is not None else shape[-1] ** -0.5
        tensors[name] = torch.randn(shape, generator=generator) * spread + mean

    hidden, width = text["hidden_size"], text["routed_expert_hidden_size"]
    linear = text["linear_attn_config"]
    for name, tensor in base.items():
        if ".g_a_proj." in name or ".g_b_proj." in name:
            continue
        if ".experts." in name and width is not None:
            inner = text["moe_intermediate_size"]
            add(name, *((width, inner) if name.endswith("w2.weight") else (inner, width)))
        elif name.endswith("A_log"):
            # Small rates: the gates then cover their whole range instead of saturating.
            add(name, _PADDED_HEADS, scale=0.4, mean=-0.5)
            tensors[name][linear["num_heads"] :] = 7.0
        else:
            tensors[name] = tensor
    for number in range(1, text["num_hidden_layers"] + 1):
        prefix = f"model.layers.{number - 1}."
        if number in linear["kda_layers"]:
            add(prefix + "self_attn.g_proj.weight", linear["num_heads"] * linear["head_dim"], hidden)
        else:
            add(prefix + "self_attn.g_proj.weight", text["num_attention_heads"] * text["v_head_dim"], hidden)
        if prefix + "block_sparse_moe.gate.weight" in base and width is not None:
            moe = prefix + "block_sparse_moe.routed_expert_"
            add(moe + "down_proj.weight", width, hidden)
            add(moe + "up_proj.weight", hidden, width)
            if text["latent_moe_use_norm"]:
                add(moe + "norm.weight", width, scale=0.1, mean=1.0)
        if text["attn_res_block_size"] is not None:
            for name in ("self_attention_res", "mlp_res"):
                add(f"{prefix}{name}_norm.weight", hidden, scale=0.1, mean=1.0)
                add(f"{prefix}{name}_proj.weight", 1, hidden)
    if text["attn_res_block_size"] is not None:
        add("model.output_attn_res_norm.weight", hidden, scale=0.1, mean=1.0)
        add("model.output_attn_res_proj.weight", 1, hidden)
    if text.get("quantization_config"):
        tensors = _packed(tensors)
    return {f"language_model.{name}": tensor for name, tensor in tensors.items()}


def _packed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            result[name] = tensor
            continue
        packed, scales = pack_mxfp4(tensor)
        result[name.removesuffix("weight") + "weight_packed"] = packed
        result[name.removesuffix("weight") + "weight_scale"] = scales
    return result


def pack_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest 4-bit floats: packed [out, in / 2] (low nibble = even column), scales [out, in / 32]; uint8."""
    groups = weight.float().unflatten(-1, (-1, 32))
    exponents = torch.ceil(torch.log2(groups.abs().amax(-1) / 6.0))
    scaled = groups / torch.exp2(exponents).unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - _VALUES).abs().argmin(-1) + 8 * (scaled < 0)
    pairs = codes.flatten(1).unflatten(-1, (-1, 2)).to(torch.uint8)
    return pairs[..., 0] | pairs[..., 1] << 4, (exponents + 127).to(torch.uint8)
