"""The embedded model's files: published layout, complete weights, tokenizer and chat template that agree."""

from __future__ import annotations

import json
import struct
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(str(resources.files("milepost"))) / "assets" / "milepost-tiny"
CONTROL_TOKENS = [
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "[PAD]",
]


def read_json(name: str) -> Any:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def shard_header(path: Path) -> dict[str, Any]:
    """Name -> {dtype, shape, data_offsets} of a safetensors file, read without any package."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


def test_index_and_shards_agree() -> None:
    index = read_json("model.safetensors.index.json")
    weight_map: dict[str, str] = index["weight_map"]
    total = 0
    for file_name in sorted(set(weight_map.values())):
        header = shard_header(FOLDER / file_name)
        assert set(header) == {name for name, shard in weight_map.items() if shard == file_name}
        ends = [entry["data_offsets"][1] for entry in header.values()]
        total += max(ends)
        assert (FOLDER / file_name).stat().st_size > max(ends)
    assert total == index["metadata"]["total_size"]
    shards = {shard for name, shard in weight_map.items() if not name.startswith("model.layers.4.")}
    assert len(shards) == 2, "the loader's sharded path is what this model exercises"
    assert set(weight_map.values()) - shards == {"mtp.safetensors"}


def test_shapes_and_dtypes_are_the_published_ones() -> None:
    config = read_json("config.json")
    linear = config["linear_attn_config"]
    width, hidden = linear["num_heads"] * linear["head_dim"], config["hidden_size"]
    tensors: dict[str, Any] = {}
    for path in FOLDER.glob("*.safetensors"):
        tensors.update(shard_header(path))
    kda = "model.layers.0.self_attn."
    assert tensors[kda + "q_conv1d.weight"]["shape"] == [width, 1, linear["short_conv_kernel_size"]]
    assert tensors[kda + "A_log"]["shape"] == [1, 1, linear["num_heads"], 1]
    assert tensors[kda + "f_b_proj.weight"]["shape"] == [width, linear["head_dim"]]
    latent = "model.layers.3.self_attn."
    assert tensors[latent + "kv_a_proj_with_mqa.weight"]["shape"] == [
        config["kv_lora_rank"] + config["qk_rope_head_dim"],
        hidden,
    ]
    assert tensors["lm_head.weight"]["shape"] == [config["vocab_size"], hidden]
    for name, entry in tensors.items():
        fp32 = name.endswith(("A_log", "dt_bias", "e_score_correction_bias"))
        assert entry["dtype"] == ("F32" if fp32 else "BF16"), name
    num_parameters = 0
    for entry in tensors.values():
        size = 1
        for extent in entry["shape"]:
            size *= extent
        num_parameters += size
    assert 2_000_000 < num_parameters < 5_000_000


def test_config_has_both_layer_kinds_and_a_long_context() -> None:
    config = read_json("config.json")
    linear = config["linear_attn_config"]
    assert config["architectures"] == ["KimiLinearForCausalLM"]
    assert sorted(linear["kda_layers"] + linear["full_attn_layers"]) == [1, 2, 3, 4]
    assert linear["full_attn_layers"] == [4]
    assert config["max_position_embeddings"] >= 32768
    assert read_json("tokenizer_config.json")["model_max_length"] == config["max_position_embeddings"]


def test_ids_of_control_tokens_agree_across_files() -> None:
    config, tokenizer = read_json("config.json"), read_json("tokenizer.json")
    settings = read_json("tokenizer_config.json")
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    assert sorted(ids, key=lambda token: ids[token]) == CONTROL_TOKENS
    assert {int(i): entry["content"] for i, entry in settings["added_tokens_decoder"].items()} == {
        i: token for token, i in ids.items()
    }
    for key in ("bos", "eos", "pad"):
        assert ids[settings[f"{key}_token"]] == config[f"{key}_token_id"]
    assert read_json("generation_config.json")["eos_token_id"] == [ids["<|im_end|>"], ids["[EOS]"]]


def test_tokenizer_keeps_any_text_and_isolates_digits() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == read_json("config.json")["vocab_size"]
    for text in ("The code of Mira is 4821.\n", "naïve – 漢字 🙂\r\n\t x", "  two  blanks", "a\x00b"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode(" 4821", add_special_tokens=False).tokens == ["Ġ", "4", "8", "2", "1"]


def render(messages: list[dict[str, Any]], **settings: Any) -> str:
    jinja2 = pytest.importorskip("jinja2")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(read_json("tokenizer_config.json")["chat_template"])
    return str(template.render(messages=messages, **settings))


def test_chat_template_writes_turns_as_in_training() -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    turns = (
        "[BOS]<|im_system|>system<|im_middle|>S<|im_end|><|im_user|>user<|im_middle|>Hello!<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>Hi.<|im_end|><|im_user|>user<|im_middle|>ab<|im_end|>"
    )
    assert render(messages) == turns
    assert render(messages, add_generation_prompt=True) == turns + "<|im_assistant|>assistant<|im_middle|>"


def test_chat_template_declares_tools_first() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "y"},
    ]
    assert render(messages, tools=tools) == (
        f"[BOS]<|im_system|>tool_declare<|im_middle|>{json.dumps(tools)}<|im_end|>"
        '<|im_user|>user<|im_middle|>x<|im_end|><|im_assistant|>assistant<|im_middle|>[{"id": "1"}]<|im_end|>'
        "<|im_system|>tool<|im_middle|>y<|im_end|>"
    )
