"""Writes a random checkpoint in the published Kimi-Linear or Qwen3.5 layout, for benchmarks.

    python bench/make_model.py /tmp/model-140m
    python bench/make_model.py /tmp/qwen-140m --family qwen3_5
    python bench/make_model.py /tmp/model-moe --layers 8 --hidden 512 --experts 16

Weights are random and drawn so that activations keep their size; the tokenizer is the embedded model's
(ids beyond its vocabulary are never produced by text). Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import qwen_layout
import torch
from safetensors.torch import save_file

EMBEDDED = Path(str(resources.files("milepost"))) / "assets" / "milepost-tiny"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
ATTENTION_EVERY = 4
HEAD_DIM = 128
SHARD_BYTES = 1 << 30
SIZES = {
    "100m": ["--vocabulary", "8192"],
    "5m": [
        *("--layers", "4", "--hidden", "256", "--intermediate", "512"),
        *("--attention-heads", "2", "--vocabulary", "2048"),
    ],
    "qwen-142m": ["--family", "qwen3_5"],
    "qwen-1gb": [
        *("--family", "qwen3_5", "--layers", "20", "--hidden", "1280", "--intermediate", "3584"),
        *("--linear-key-heads", "8", "--linear-value-heads", "16", "--attention-heads", "8"),
    ],
    "qwen-7m": [
        *("--family", "qwen3_5", "--layers", "4", "--hidden", "256", "--intermediate", "512"),
        *("--attention-heads", "2", "--kv-heads", "1", "--vocabulary", "4096"),
        *("--linear-key-heads", "1", "--linear-value-heads", "2"),
    ],
}
"""Options of the sizes that other benchmarks ask for by name."""


def config(options: argparse.Namespace) -> dict[str, Any]:
    """config.json: three KDA layers, then one MLA layer, and so on."""
    numbers = list(range(1, options.layers + 1))
    heads = options.hidden // HEAD_DIM
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": options.dtype,
        "vocab_size": options.vocabulary,
        "hidden_size": options.hidden,
        "num_hidden_layers": options.layers,
        "intermediate_size": options.intermediate,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "linear_attn_config": {
            "kda_layers": [n for n in numbers if n % ATTENTION_EVERY],
            "full_attn_layers": [n for n in numbers if n % ATTENTION_EVERY == 0],
            "num_heads": heads,
            "head_dim": HEAD_DIM,
            "short_conv_kernel_size": 4,
        },
        "num_attention_heads": options.attention_heads,
        "num_key_value_heads": options.attention_heads,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "first_k_dense_replace": 1 if options.experts else options.layers,
        "moe_layer_freq": 1,
        "num_experts": options.experts,
        "num_experts_per_token": min(8, max(1, options.experts // 2)),
        "num_shared_experts": 1,
        "moe_intermediate_size": options.expert_intermediate,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 2.446,
        "num_expert_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
        "model_max_length": 1 << 20,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 7,
    }


class Tensors:
    """Collects tensors and writes a shard whenever one is full."""

    def __init__(self, directory: Path, dtype: torch.dtype, seed: int) -> None:
        self._directory = directory
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(seed)
        self._shard: dict[str, torch.Tensor] = {}
        self._shard_bytes = 0
        self._files: dict[str, str] = {}
        self._num_shards = 0
        self.num_parameters = 0

    def add(self, name: str, *shape: int, scale: float | None = None, mean: float = 0.0) -> None:
        """Normal values; `scale` None = 1 / sqrt(inputs)."""
        spread = shape[-1] ** -0.5 if scale is None else scale
        tensor = (torch.randn(shape, generator=self._generator) * spread + mean).to(self._dtype)
        self._shard[name] = tensor
        self._shard_bytes += tensor.nbytes
        self.num_parameters += tensor.numel()
        if self._shard_bytes >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        if not self._shard:
            return
        self._num_shards += 1
        file_name = f"model-{self._num_shards:05d}.safetensors"
        save_file(self._shard, self._directory / file_name)
        self._files |= dict.fromkeys(self._shard, file_name)
        self._shard, self._shard_bytes = {}, 0

    def write_index(self) -> None:
        self.flush()
        index = {"metadata": {}, "weight_map": self._files}
        (self._directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def add_mixer(tensors: Tensors, prefix: str, values: dict[str, Any], number: int) -> None:
    hidden, linear = values["hidden_size"], values["linear_attn_config"]
    add = tensors.add
    if number in linear["kda_layers"]:
        heads, width = linear["num_heads"], linear["num_heads"] * HEAD_DIM
        for name in "qkv":
            add(f"{prefix}{name}_proj.weight", width, hidden)
            add(f"{prefix}{name}_conv1d.weight", width, 1, 4, scale=0.4)
        for name in "fg":
            add(f"{prefix}{name}_a_proj.weight", HEAD_DIM, hidden)
            add(f"{prefix}{name}_b_proj.weight", width, HEAD_DIM)
        add(f"{prefix}b_proj.weight", heads, hidden)
        add(f"{prefix}A_log", 1, 1, heads, 1, scale=0.8)
        add(f"{prefix}dt_bias", width, scale=1.5, mean=-2.0)
        add(f"{prefix}o_norm.weight", HEAD_DIM, scale=0.1, mean=1.0)
        add(f"{prefix}o_proj.weight", hidden, width)
        return
    heads, latent = values["num_attention_heads"], values["kv_lora_rank"]
    nope, rope, value = (values[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    add(f"{prefix}q_proj.weight", heads * (nope + rope), hidden)
    add(f"{prefix}kv_a_proj_with_mqa.weight", latent + rope, hidden)
    add(f"{prefix}kv_a_layernorm.weight", latent, scale=0.1, mean=1.0)
    add(f"{prefix}kv_b_proj.weight", heads * (nope + value), latent)
    add(f"{prefix}o_proj.weight", hidden, heads * value)


def add_mlp(tensors: Tensors, prefix: str, values: dict[str, Any], number: int) -> None:
    hidden, add = values["hidden_size"], tensors.add

    def gated(prefix: str, names: tuple[str, str, str], inner: int) -> None:
        gate, up, down = names
        add(f"{prefix}{gate}.weight", inner, hidden)
        add(f"{prefix}{up}.weight", inner, hidden)
        add(f"{prefix}{down}.weight", hidden, inner)

    plain = ("gate_proj", "up_proj", "down_proj")
    if not values.get("num_experts") or number <= values["first_k_dense_replace"]:
        gated(f"{prefix}mlp.", plain, values["intermediate_size"])
        return
    block, inner = f"{prefix}block_sparse_moe.", values["moe_intermediate_size"]
    add(f"{block}gate.weight", values["num_experts"], hidden)
    add(f"{block}gate.e_score_correction_bias", values["num_experts"], scale=0.05)
    for expert in range(values["num_experts"]):
        gated(f"{block}experts.{expert}.", ("w1", "w3", "w2"), inner)
    gated(f"{block}shared_experts.", plain, inner * values["num_shared_experts"])


def make(directory: Path, options: argparse.Namespace) -> int:
    """Writes the checkpoint; returns its number of parameters."""
    directory.mkdir(parents=True, exist_ok=True)
    is_qwen = options.family == "qwen3_5"
    values = qwen_layout.config(options) if is_qwen else config(options)
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    if is_qwen:
        qwen_layout.write_tokenizer(directory, EMBEDDED, options.vocabulary)
    else:
        for name in TOKENIZER_FILES:
            shutil.copyfile(EMBEDDED / name, directory / name)
    # Norms of this family are stored as their distance from one.
    norm_mean = 0.0 if is_qwen else 1.0
    tensors = Tensors(directory, getattr(torch, options.dtype), options.seed)
    tensors.add("model.embed_tokens.weight", options.vocabulary, options.hidden, scale=1.0)
    for number in range(1, options.layers + 1):
        prefix = f"model.layers.{number - 1}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors.add(f"{prefix}{norm}.weight", options.hidden, scale=0.1, mean=norm_mean)
        if is_qwen:
            qwen_layout.add_mixer(tensors.add, prefix, values, number)
        else:
            add_mixer(tensors, f"{prefix}self_attn.", values, number)
        add_mlp(tensors, prefix, values, number)
    tensors.add("model.norm.weight", options.hidden, scale=0.1, mean=norm_mean)
    tensors.add("lm_head.weight", options.vocabulary, options.hidden)
    tensors.write_index()
    return tensors.num_parameters


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--family", choices=("kimi_linear", "qwen3_5"), default="kimi_linear")
    parser.add_argument(
        "--layers", type=int, default=12, help="every fourth has attention, the others a state: KDA or GDN"
    )
    parser.add_argument("--hidden", type=int, default=768, help=f"a multiple of {HEAD_DIM}")
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--attention-heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2, help="Qwen3.5")
    parser.add_argument("--linear-key-heads", type=int, default=4, help="Qwen3.5")
    parser.add_argument("--linear-value-heads", type=int, default=8, help="Qwen3.5")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--experts", type=int, default=0, help="Kimi-Linear; 0 = dense")
    parser.add_argument("--expert-intermediate", type=int, default=256)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def make_size(directory: Path, size: str) -> Path:
    """Writes a checkpoint of a named size; returns its directory."""
    make(directory, parser().parse_args([str(directory), *SIZES[size]]))
    return directory


def main() -> int:
    options = parser().parse_args()
    if options.hidden % HEAD_DIM:
        print(f"--hidden must be a multiple of {HEAD_DIM}", file=sys.stderr)
        return 2
    num_parameters = make(options.directory, options)
    print(f"{options.directory}: {num_parameters / 1e6:.1f} M parameters, {options.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
