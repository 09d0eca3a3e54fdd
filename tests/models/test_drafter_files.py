"""Files of a drafter that do not fit its config: told from those of the decoder, with the fix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support import block_checkpoints, eagle3_checkpoints

from milepost.errors import CheckpointFileError
from milepost.models.loading import load_model

Tensors = dict[str, torch.Tensor]


def first(tensors: Tensors, end: str) -> str:
    return next(name for name in tensors if name.endswith(end))


def without_a_norm(tensors: Tensors) -> str:
    name = first(tensors, "post_attention_layernorm.weight")
    del tensors[name]
    return name


def of_another_shape(tensors: Tensors) -> str:
    name = first(tensors, "mlp.gate_proj.weight")
    tensors[name] = tensors[name][:-1].contiguous()
    return name


def not_finite(tensors: Tensors) -> str:
    name = first(tensors, "o_proj.weight")
    tensors[name] = tensors[name].clone()
    tensors[name][0, 0] = float("nan")
    return name


@pytest.mark.parametrize("spoil", [without_a_norm, of_another_shape, not_finite])
@pytest.mark.parametrize("layout", ["llama", "k3", "dflash", "dspark", "dspark_mla"])
def test_what_is_wrong_with_a_drafters_file_names_the_option_the_tensor_and_the_fix(
    layout: str, spoil: Callable[[Tensors], str], tmp_path: Path
) -> None:
    is_block = layout in block_checkpoints.LAYOUTS
    module: Any = block_checkpoints if is_block else eagle3_checkpoints
    decoder, drafter = module.write_pair(tmp_path, "kimi_linear", layout)
    method = block_checkpoints.method_of(layout) if is_block else "eagle3"
    tensors = load_file(drafter / "model.safetensors")
    name = spoil(tensors)
    save_file(tensors, drafter / "model.safetensors")
    with pytest.raises(CheckpointFileError, match="^speculative_config: the drafter") as raised:
        load_model(decoder, num_draft_tokens=2, draft_method=method, draft_model=drafter)
    message = str(raised.value)
    assert name in message and str(drafter) in message
    assert message.endswith(f"from the same checkpoint, one of method '{method}'")
