"""Configs that contradict themselves or ask for what is not computed: refused by name, in every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.checkpoints import write_checkpoint
from tests.support.families import FAMILIES, write_family
from tests.support.kimi_k3_checkpoints import PACKED

from milepost.errors import CheckpointFileError, ConfigError
from milepost.models import load_model
from milepost.models.description import describe_spec
from milepost.models.dry_run import check_checkpoint
from milepost.models.registry import parse_config

QWEN = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
KIMI = ("kimi_linear", "kimi_k3")
ALL = (*KIMI, *QWEN)
Case = tuple[tuple[str, ...], str, str, dict[str, Any]]


def rope(**values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, **values}}


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
CASES: dict[str, Case] = {
    "rope_type": (ALL, "rope_parameters.rope_type", "'yarn' is not supported", rope(rope_type="yarn")),
    "rope_type nobody knows": (ALL, "rope_parameters.rope_type", "'spiral'", rope(rope_type="spiral")),
    "rope_type that is none": (ALL, "rope_parameters.rope_type", "must be a string", rope(rope_type=1)),
    "rope per kind of layer": (
        ALL,
        "rope_parameters.full_attention",
        "directly into rope_parameters",
        {"rope_parameters": {"full_attention": YARN, "linear_attention": YARN}},
    ),
    "rope_scaling without a type": (
        ALL,
        "rope_scaling.factor",
        "rope_scaling names no rope_type; remove it",
        {"rope_scaling": {"factor": 2.0}},
    ),
    "scaling under a plain type": (ALL, "rope_parameters.factor", "scaled", rope(type="default", factor=2)),
    "rope_scaling type": (ALL, "rope_scaling.type", "'linear'", {"rope_scaling": {"type": "linear"}}),
    "rope_scaling that is none": (ALL, "rope_scaling", "must be an object", {"rope_scaling": 2.0}),
    "layer_types too short": (ALL, "layer_types", "has 2 entries, num_hidden_layers is", {
        "layer_types": ["linear_attention", "full_attention"]
    }),
    "layer_types too long": (ALL, "layer_types", "has 9 entries", {"layer_types": ["full_attention"] * 9}),
    "eos_token_id": (ALL, "eos_token_id", "below vocab_size 131", {"eos_token_id": 131}),
    "negative eos_token_id": (ALL, "eos_token_id", "below vocab_size 131", {"eos_token_id": [2, -1]}),
    "pad_token_id": (ALL, "pad_token_id", "below vocab_size 131", {"pad_token_id": 4000}),
    "attention heads": (ALL, "num_key_value_heads", "num_attention_heads 4", {"num_key_value_heads": 3}),
    "no heads": (ALL, "num_attention_heads", "at least 1", {"num_attention_heads": 0}),
    "value heads": (QWEN, "linear_num_value_heads", "multiple of", {"linear_num_value_heads": 3}),
    "tie_word_embeddings": (ALL, "tie_word_embeddings", "true or false", {"tie_word_embeddings": "yes"}),
    "fp8": (
        ("kimi_linear", *QWEN),
        "quantization_config",
        "use a checkpoint in bf16 or fp32",
        {"quantization_config": {"quant_method": "fp8"}},
    ),
    "compression_config": (ALL, "compression_config", "is not", {"compression_config": {"format": "x"}}),
    "mlp_only_layers": (("qwen3_next",), "mlp_only_layers", "layers are 0 to 4", {"mlp_only_layers": [0, 5]}),
    "negative mlp_only_layers": (("qwen3_next",), "mlp_only_layers", "layer -1;", {"mlp_only_layers": [-1]}),
    "mlp_only_layers of another family": (
        ("qwen3_5_moe",), "mlp_only_layers", "has experts", {"mlp_only_layers": [1]},
    ),
    "sparse step of another family": (
        ("qwen3_5_moe",), "decoder_sparse_step", "has experts", {"decoder_sparse_step": 2},
    ),
    "norm_topk_prob": (("qwen3_5_moe",), "norm_topk_prob", "add up", {"norm_topk_prob": False}),
    "no experts": (("qwen3_5_moe",), "num_experts", "at least 1", {"num_experts": 0}),
    "experts of another family": (("qwen3_5",), "num_experts", "qwen3_5_moe", {"num_experts": 8}),
    "bf16 states": (QWEN, "mamba_ssm_dtype", "fp32", {"mamba_ssm_dtype": "bfloat16"}),
}  # fmt: skip


def group(**values: Any) -> dict[str, Any]:
    return {"config_groups": {"a": values}}


PACKINGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "method": ("quant_method", "compressed-tensors", {"quant_method": "modelopt"}),
    "format": ("format", "'int4' is not supported", {"format": "int4"}),
    "cache": ("kv_cache_scheme", "only weights", {"kv_cache_scheme": {"num_bits": 8}}),
    "sparsity": ("sparsity_config", "only weights", {"sparsity_config": {"format": "dense"}}),
    "bits": ("config_groups.a.weights.num_bits", "4-bit floats", group(weights={"num_bits": 8})),
    "kind": ("config_groups.a.weights.type", "4-bit floats", group(weights={"type": "int"})),
    "size": ("config_groups.a.weights.group_size", "groups of 32", group(weights={"group_size": 16})),
    "activations": (
        "config_groups.a.input_activations", "activations", group(input_activations={"num_bits": 8}),
    ),
    "format of a group": ("config_groups.a.format", "'nvfp4'", group(format="nvfp4")),
}  # fmt: skip


def refused(config: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_config(config)
    prefix = "text_config." if "text_config" in config else ""
    assert caught.value.field == prefix + field


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for name, (families, *_) in CASES.items() for family in families]
)
def test_refused_with_the_name_of_the_field(family: str, name: str) -> None:
    _, field, message, changes = CASES[name]
    config = FAMILIES[family].config(**changes)
    if "num_experts" in changes and family == "qwen3_5_moe":
        config["text_config"]["num_experts"] = 0
    refused(config, field, message)


@pytest.mark.parametrize("name", PACKINGS)
def test_packings_of_k3(name: str) -> None:
    field, message, changes = PACKINGS[name]
    config = FAMILIES["kimi_k3"].config(quantization_config={**PACKED, **changes})
    refused(config, f"quantization_config.{field}", message)


def test_a_published_packing_is_accepted() -> None:
    weights = {"num_bits": 4, "type": "float", "group_size": 32, "symmetric": True, "strategy": "group"}
    group = {"weights": weights, "input_activations": None, "targets": ["Linear"], "format": PACKED["format"]}
    extra = {"config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None}
    config = FAMILIES["kimi_k3"].config(quantization_config={**PACKED, **extra, "sparsity_config": {}})
    moe = parse_config(config).moe
    assert moe is not None and moe.packed_mxfp4


@pytest.mark.parametrize("family", ALL)
def test_harmless_descriptions_of_positions_are_accepted(family: str) -> None:
    plain = parse_config(FAMILIES[family].config(**rope()))
    for changes in (
        rope(rope_type="default"),
        rope(rope_type="default", mrope_section=[2, 1, 1], mrope_interleaved=True),
        {**rope(), "rope_scaling": None},
        {**rope(), "rope_scaling": {}},
        {**rope(), "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
    ):
        assert parse_config(FAMILIES[family].config(**changes)) == plain


@pytest.mark.parametrize("family", QWEN)
@pytest.mark.parametrize("key", ["rope_theta", "partial_rotary_factor"])
def test_positions_given_twice_must_agree(family: str, key: str) -> None:
    config = FAMILIES[family].config(**rope(), **{key: 0.5})
    refused(config, f"rope_parameters.{key}", f"but (text_config.)?{key} is 0.5")
    same = FAMILIES[family].config(**rope(), **{key: rope()["rope_parameters"][key]})
    assert parse_config(same).gqa == parse_config(FAMILIES[family].config(**rope())).gqa


WRAPPED = {"kimi_k3": "kimi_k3", "qwen3_5": "qwen3_5", "qwen3_5_moe": "qwen3_5_moe"}
INNER = {
    "kimi_k3": ("kimi_linear", "kimi_k3"),
    "qwen3_5": ("qwen3_5_text", "qwen3_5"),
    "qwen3_5_moe": ("qwen3_5_moe_text", "qwen3_5_moe"),
}


def wrapped(family: str) -> dict[str, Any]:
    config = FAMILIES[family].config()
    return config if "text_config" in config else {"model_type": WRAPPED[family], "text_config": config}


@pytest.mark.parametrize("family", sorted(INNER))
def test_the_text_part_belongs_to_the_family(family: str) -> None:
    for inner in INNER[family]:
        config = wrapped(family)
        config["text_config"]["model_type"] = inner
        assert parse_config(config) == parse_config(wrapped(family))
    others = {name for names in INNER.values() for name in names} - set(INNER[family])
    for inner in (*sorted(others), "qwen3_next", "llama"):
        config = wrapped(family)
        config["text_config"]["model_type"] = inner
        refused(config, "model_type", f"is '{inner}', which contradicts model_type '{WRAPPED[family]}'")


@pytest.mark.parametrize("family", sorted(INNER))
def test_what_stands_beside_the_text_part_is_checked_too(family: str) -> None:
    config = {**wrapped(family), "eos_token_id": 131}
    with pytest.raises(ConfigError, match="below vocab_size 131") as caught:
        parse_config(config)
    assert caught.value.field == "eos_token_id"
    inside = {**wrapped(family), "quantization_config": {"quant_method": "fp8"}}
    refused(inside, "quantization_config" + (".quant_method" if family == "kimi_k3" else ""), "support")
    inside["text_config"] = {**inside["text_config"], "quantization_config": PACKED}
    refused(inside, "quantization_config", "contradicts quantization_config beside it")


@pytest.mark.parametrize("family", ["kimi_linear", "qwen3_next"])
def test_families_without_a_text_part(family: str) -> None:
    config = {**FAMILIES[family].config(), "text_config": {"vocab_size": 7}}
    with pytest.raises(ConfigError, match="move them there") as caught:
        parse_config(config)
    assert caught.value.field == "text_config"


@pytest.mark.parametrize("family", ALL)
def test_a_head_beside_tied_embeddings_must_be_a_copy(tmp_path: Path, family: str) -> None:
    untied = FAMILIES[family].config()
    tensors = FAMILIES[family].tensors(untied)
    head = next(name for name in tensors if name.endswith("lm_head.weight"))
    embedding = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    tied = FAMILIES[family].config(tie_word_embeddings=True)
    if "tie_word_embeddings" in tied:  # some stand beside the text part
        tied["tie_word_embeddings"] = True
    directory = write_checkpoint(tmp_path, tied, tensors=tensors)
    with pytest.raises(CheckpointFileError, match=rf"{head} is no copy of {embedding}.*set it to false"):
        load_model(directory)
    assert check_checkpoint(directory).unused_tensors == []  # values are not read
    write_checkpoint(tmp_path, tied, tensors={**tensors, head: tensors[embedding].clone()})
    assert load_model(directory).unused_tensors == []
    write_checkpoint(tmp_path, tied, tensors={**tensors, head: tensors[embedding].to(torch.bfloat16)})
    for load in (load_model, check_checkpoint):
        with pytest.raises(CheckpointFileError, match="is no copy of"):
            load(directory)


@pytest.mark.parametrize("family", ALL)
def test_a_name_given_twice_is_refused(tmp_path: Path, family: str) -> None:
    """JSON readers keep the last of two values; which one was meant nobody knows."""
    directory = write_family(tmp_path, family)
    path = directory / "config.json"
    path.write_text(path.read_text().replace('"hidden_size": ', '"hidden_size": 64,\n"hidden_size": ', 1))
    with pytest.raises(CheckpointFileError, match=r"config\.json .*names 'hidden_size' twice"):
        load_model(directory)


@pytest.mark.parametrize("family", ALL)
def test_an_index_that_names_a_tensor_twice_or_a_file_that_is_not_there(tmp_path: Path, family: str) -> None:
    directory = write_family(tmp_path, family, num_shards=3)
    path = directory / "model.safetensors.index.json"
    text = path.read_text()
    weight_map = json.loads(text)["weight_map"]
    name, file_name = sorted(weight_map.items())[-1]
    first = "model-00001-of-00003.safetensors"
    for load in (load_model, check_checkpoint):
        path.write_text(text.replace(f'"{name}": ', f'"{name}": "{first}", "{name}": ', 1))
        with pytest.raises(CheckpointFileError, match=rf"index\.json .*names '{name}' twice"):
            load(directory)
        path.write_text(text.replace(f'"{name}": "{file_name}"', f'"{name}": "model-00009.safetensors"'))
        with pytest.raises(CheckpointFileError, match=rf"model-00009.safetensors does not exist.*{name}"):
            load(directory)
        path.write_text(text)
    # The same tensor in two shards.
    other = directory / first
    write_family(tmp_path / "whole", family)
    other.write_bytes((tmp_path / "whole" / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointFileError, match=r"model-00001.* tensor \S+ a second time.*puts it into"):
        load_model(directory)


ODD_VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 3, 1.5, 10**9, 10**30, 10**400, float("nan"), float("inf"), "", "x"),
    *([[]] * 5, [[]] * 6, [None] * 5, [1.5] * 6, [[0]]),
    *([], {}, [[]], [None], [{}], [0], ["x"], [1, 1], {"x": 1}, {"type": []}, {"rope_type": {}}),
]


def sections(config: dict[str, Any]) -> list[dict[str, Any]]:
    """A config and the objects in it."""
    found = [config]
    for value in config.values():
        if isinstance(value, dict):
            found += sections(value)
    return found


@pytest.mark.parametrize("family", ALL)
def test_whatever_a_key_holds_the_refusal_names_a_field(family: str) -> None:
    """Every key of every section with every odd value: understood, or refused; nothing else."""
    num_refused = num_accepted = 0
    for number, section in enumerate(sections(FAMILIES[family].config())):
        for key in [*section, "rope_scaling", "quantization_config", "layer_types", "mlp_only_layers"]:
            for value in ODD_VALUES:
                config = FAMILIES[family].config()
                sections(config)[number][key] = value
                try:
                    about = describe_spec(parse_config(config), "bfloat16")
                except ConfigError as error:
                    assert error.field and str(error) != error.field, (key, value)
                    num_refused += 1
                else:
                    assert about.layout.geometry(16).state_bytes >= 0
                    num_accepted += 1
    assert num_refused > 500 and num_accepted > 100
