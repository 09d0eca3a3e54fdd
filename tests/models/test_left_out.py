"""Tensors the decoder does not use: drafts and vision are named once, others warned about."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from tests.support.checkpoints import write_checkpoint
from tests.support.draft_checkpoints import with_drafts
from tests.support.qwen_checkpoints import dense_config, random_tensors

from milepost.errors import CheckpointFileError
from milepost.models import load_model


def test_draft_and_vision_weights_are_named_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = dense_config()
    drafts = {"mtp.fc.weight": torch.randn(4, 8), "mtp.norm.weight": torch.ones(4)}
    vision = {"model.visual.patch_embed.proj.weight": torch.zeros(2, 2)}
    directory = write_checkpoint(tmp_path, config, tensors={**random_tensors(config), **drafts, **vision})
    with caplog.at_level(logging.INFO, logger="milepost"):
        loaded = load_model(directory)
    assert loaded.unused_tensors == sorted({**drafts, **vision})
    (record,) = caplog.records
    assert record.getMessage() == "not needed and not loaded: model.visual.* (1 tensors), mtp.* (2 tensors)"


def test_a_draft_weight_that_is_not_finite_is_refused_by_name(tmp_path: Path) -> None:
    config, tensors = with_drafts("qwen3_5")
    tensors["mtp.fc.weight"][3, 3] = torch.nan
    directory = write_checkpoint(tmp_path, config, tensors=tensors)
    with pytest.raises(CheckpointFileError, match=r"mtp\.fc\.weight holds NaN"):
        load_model(directory, num_draft_tokens=1)


def test_a_tensor_that_nobody_expected_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = dense_config()
    tensors = random_tensors(config)
    tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(128)
    tensors.update({f"model.layers.{n}.mlp.up_proj.weight": torch.zeros(2) for n in range(5, 12)})
    directory = write_checkpoint(tmp_path, config, tensors=tensors)
    with caplog.at_level(logging.INFO, logger="milepost"):
        load_model(directory)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "model.layers.1.self_attn.q_proj.bias" in record.getMessage()
    assert record.getMessage().endswith("and 3 more")
