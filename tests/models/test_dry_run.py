"""A checkpoint is checked from its headers alone, whatever its size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.support import kimi_k3_checkpoints as k3
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.support.sparse_checkpoint import kimi_linear_shapes, write_sparse

from milepost.errors import CheckpointFileError
from milepost.models.description import describe
from milepost.models.dry_run import check_checkpoint

CONFIGS = Path(__file__).resolve().parent.parent / "data" / "configs"
RSS_BOUND = 2 << 30


def test_counts_are_those_of_the_files(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config())
    extra = {"vision_tower.x": torch.zeros(3)}
    report = check_checkpoint(write_checkpoint(tmp_path, tensors={**tensors, **extra}, num_shards=3))
    assert report.num_tensors == len(tensors)
    assert report.num_values == sum(tensor.numel() for tensor in tensors.values())
    assert report.num_values == report.description.num_parameters
    assert report.num_bytes == 4 * report.num_values + 12
    assert report.unused_tensors == ["vision_tower.x"]


def test_packed_values_count_one_by_one(tmp_path: Path) -> None:
    config = k3.k3_config(quantization_config=k3.PACKED)
    report = check_checkpoint(write_checkpoint(tmp_path, config, tensors=k3.random_tensors(config)))
    # The files hold more decay rates than there are heads.
    padding = 3 * (8 - 3)
    assert report.num_values - padding == report.description.num_parameters


def test_wrong_shape_is_found(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config())
    tensors["model.layers.3.self_attn.o_proj.weight"] = torch.zeros(48, 63)
    with pytest.raises(CheckpointFileError, match=r"layers\.3\.self_attn\.o_proj.*\[48, 63\].*\[48, 64\]"):
        check_checkpoint(write_checkpoint(tmp_path, tensors=tensors))


_SCRIPT = """
import sys
from pathlib import Path
from milepost.models.dry_run import check_checkpoint
report = check_checkpoint(sys.argv[1])
print(report.num_tensors, report.num_values, report.num_bytes, len(report.unused_tensors))
# Not ru_maxrss: that begins with what the process that started this one had taken.
print(next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines()
           if line.startswith("VmHWM")) * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc/self/status")
def test_the_full_48b_shapes_within_two_gib(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "kimi-linear-48b-a3b" / "config.json").read_text())
    shapes = kimi_linear_shapes(config)
    total = write_sparse(tmp_path, config, shapes)
    assert total > 90e9 and len(list(tmp_path.glob("*.safetensors"))) >= 18
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir()) < 64 << 20, "files are not sparse"
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path)], capture_output=True, text=True, check=True
    )
    counts, peak = done.stdout.splitlines()
    num_tensors, num_values, num_bytes, num_unused = (int(value) for value in counts.split())
    assert (num_tensors, num_bytes, num_unused) == (len(shapes), total, 0)
    assert num_values == describe(tmp_path).num_parameters
    assert int(peak) < RSS_BOUND
