"""Tensors that are not loaded: drafts and vision are named in one line, others warned about."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from tests.support.checkpoints import write_checkpoint
from tests.support.qwen_checkpoints import dense_config, random_tensors

from milepost.models import load_model


def test_draft_and_vision_weights_are_listed_not_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = dense_config()
    extra = {"mtp.fc.weight": torch.zeros(4, 8), "mtp.norm.weight": torch.zeros(4)}
    extra["model.visual.patch_embed.proj.weight"] = torch.zeros(2, 2)
    directory = write_checkpoint(tmp_path, config, tensors={**random_tensors(config), **extra})
    with caplog.at_level(logging.INFO, logger="milepost"):
        loaded = load_model(directory)
    assert loaded.unused_tensors == sorted(extra)
    assert [record.getMessage() for record in caplog.records] == [
        "not loaded: model.visual.* (1 tensors), mtp.* (2 tensors)"
    ]


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
