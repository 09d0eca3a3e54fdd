"""Write a trained snapshot as a checkpoint in the published Kimi-Linear layout.

    python export.py --run-dir RUN --out ../../src/milepost/assets/milepost-tiny

Writes config.json, generation_config.json, tokenizer.json, tokenizer_config.json, two safetensors shards and
their index. Matrices and convolutions are bf16, A_log, dt_bias and the router's correction bias fp32, as in
the published files. The training rounds the matrices to bf16 in every product, so this loses almost nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import dialogues
import torch
from init import initialise
from model import TinyConfig, TinyModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

FP32_SUFFIXES = ("A_log", "dt_bias", "e_score_correction_bias")
NUM_SHARDS = 2
DRAFTER_FILE = "mtp.safetensors"
"""Written by train_drafter.py, and removed with the weights that it was trained for."""

CHAT_TEMPLATE = """\
{%- macro body(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content is not none -%}
{%- for part in content -%}
{%- if part is string -%}{{ part }}{%- else -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{{- '[BOS]' -}}
{%- if tools is defined and tools -%}
{{- '<|im_system|>tool_declare<|im_middle|>' ~ (tools | tojson) ~ '<|im_end|>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}{{- '<|im_user|>' -}}
{%- elif message['role'] == 'assistant' -%}{{- '<|im_assistant|>' -}}
{%- else -%}{{- '<|im_system|>' -}}
{%- endif -%}
{{- (message.get('name') or message['role']) ~ '<|im_middle|>' ~ body(message['content']) -}}
{%- if message.get('tool_calls') -%}{{- message['tool_calls'] | tojson -}}{%- endif -%}
{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt is defined and add_generation_prompt -%}
{{- '<|im_assistant|>assistant<|im_middle|>' -}}
{%- endif -%}
"""


def hub_tensors(model: TinyModel) -> dict[str, Tensor]:
    """Tensor name -> tensor in its stored dtype."""
    return {
        name: tensor.detach()
        .to(torch.float32 if name.endswith(FP32_SUFFIXES) else torch.bfloat16)
        .contiguous()
        for name, tensor in model.state_dict().items()
    }


def write_weights(tensors: dict[str, Tensor], out: Path) -> None:
    """Split at the layer boundary nearest to equal sizes and write shards plus index."""
    for old in [*out.glob("model*.safetensors*"), *out.glob(DRAFTER_FILE)]:
        old.unlink()
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    total = sum(sizes.values())
    shards: list[dict[str, Tensor]] = [{} for _ in range(NUM_SHARDS)]
    written = 0
    for name, tensor in tensors.items():
        shards[min(NUM_SHARDS - 1, written * NUM_SHARDS // total)][name] = tensor
        written += sizes[name]
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards):
        file_name = f"model-{index + 1:05d}-of-{NUM_SHARDS:05d}.safetensors"
        save_file(shard, out / file_name, metadata={"format": "pt"})
        (out / file_name).chmod(0o644)  # safetensors creates private files
        weight_map.update(dict.fromkeys(shard, file_name))
    index_json = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(out / "model.safetensors.index.json", index_json)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def tokenizer_config(tokenizer: Tokenizer, max_length: int) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": dialogues.BOS,
        "eos_token": dialogues.IM_END,
        "pad_token": dialogues.PAD,
        "additional_special_tokens": [
            token
            for token in dialogues.SPECIAL_TOKENS
            if token not in (dialogues.BOS, dialogues.IM_END, dialogues.PAD)
        ],
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {"content": token, **flags}
            for token in dialogues.SPECIAL_TOKENS
        },
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }


def export(model: TinyModel, tokenizer_path: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    config = model.config
    write_json(out / "config.json", config.hub_config())
    end_ids = [tokenizer.token_to_id(token) for token in (dialogues.IM_END, dialogues.EOS)]
    generation = {
        "bos_token_id": config.special_ids["bos"],
        "eos_token_id": end_ids,
        "pad_token_id": config.special_ids["pad"],
    }
    write_json(out / "generation_config.json", generation)
    shutil.copyfile(tokenizer_path, out / "tokenizer.json")
    write_json(out / "tokenizer_config.json", tokenizer_config(tokenizer, config.max_position_embeddings))
    write_weights(hub_tensors(model), out)


def load_snapshot(run_dir: Path) -> TinyModel:
    state = torch.load(
        run_dir / "snapshot.pt", weights_only=False
    )  # our own file, holds plain Python objects too
    values = dict(state["config"])
    values["full_attn_layers"] = tuple(values["full_attn_layers"])
    model = TinyModel(TinyConfig(**values))
    model.load_state_dict(state["model"])
    return model.eval()


def load_exported(folder: Path) -> TinyModel:
    """The exported checkpoint back in the training-side network, in fp32, without a draft module."""
    hub = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    attention = hub["linear_attn_config"]
    same = (
        "vocab_size hidden_size intermediate_size kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim "
        "first_k_dense_replace num_experts num_experts_per_token num_shared_experts moe_intermediate_size "
        "routed_scaling_factor rms_norm_eps max_position_embeddings"
    ).split()
    config = TinyConfig(
        **{name: hub[name] for name in same},
        num_layers=hub["num_hidden_layers"],
        full_attn_layers=tuple(attention["full_attn_layers"]),
        kda_heads=attention["num_heads"],
        kda_head_dim=attention["head_dim"],
        mla_heads=hub["num_attention_heads"],
    )
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    tensors: dict[str, Tensor] = {}
    for file_name in sorted({*index["weight_map"].values()} - {DRAFTER_FILE}):
        tensors.update(load_file(folder / file_name))
    model = TinyModel(config)
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--untrained", action="store_true", help="initial weights: same files without training"
    )
    arguments = parser.parse_args()
    if arguments.untrained:
        tokenizer = Tokenizer.from_file(str(arguments.run_dir / "tokenizer.json"))
        special = {"bos": dialogues.BOS, "eos": dialogues.IM_END, "pad": dialogues.PAD}
        ids = {key: tokenizer.token_to_id(token) for key, token in special.items()}
        model = TinyModel(replace(TinyConfig(), special_ids=ids))
        initialise(model, seed=0)
    else:
        model = load_snapshot(arguments.run_dir)
    export(model, arguments.run_dir / "tokenizer.json", arguments.out)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
