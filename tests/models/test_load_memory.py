"""Loading holds the packed weights and one layer of the file, not the model twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.support.families import FAMILIES, write_family

from milepost.kernels.stored import CHECKED_AT_ONCE, is_finite
from milepost.models import load_model
from milepost.models.weights import WeightReader

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


def resident_bytes(path: Path) -> int:
    """Of the maps of a file in this process."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


needs_smaps = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc/self/smaps")


@needs_smaps
def test_what_was_read_is_given_back_and_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    values = torch.arange(8 * MIB, dtype=torch.int32).view(torch.float32).reshape(8, MIB)
    save_file({"a": values, "b": values[:1].clone()}, path)
    reader = WeightReader(tmp_path)
    view = reader.take("a", values.shape, torch.float32)
    assert view.sum() == view.sum() and resident_bytes(path) > 30 * MIB
    reader.release()
    assert resident_bytes(path) < MIB
    assert torch.equal(view, values)
    assert resident_bytes(path) > 30 * MIB, "the view reads the file again"
    reader.finish()
    assert resident_bytes(path) > 30 * MIB, "only what was taken since the last time is given back"


@needs_smaps
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_loaded_model_keeps_no_copy_in_the_maps_of_its_files(family: str, tmp_path: Path) -> None:
    changes = {"intermediate_size": 2048, "moe_intermediate_size": 512, "vocab_size": 2000}
    directory = write_family(tmp_path, family, **changes)
    path = directory / "model.safetensors"
    model = load_model(directory)
    assert path.stat().st_size > 4 * MIB
    # The header stays, and the pages around what was read last.
    assert resident_bytes(path) <= MIB
    assert model.unused_tensors == []


def test_checks_for_nan_look_at_every_piece() -> None:
    for position in (0, CHECKED_AT_ONCE - 1, CHECKED_AT_ONCE, 2 * CHECKED_AT_ONCE + 6):
        for dtype in (torch.bfloat16, torch.float32):
            tensor = torch.zeros(2 * CHECKED_AT_ONCE + 7, dtype=dtype)
            assert is_finite(tensor)
            tensor[position] = torch.finfo(dtype).max
            tensor[0] = torch.finfo(dtype).max
            assert is_finite(tensor.reshape(-1, 1))
            for value in ("nan", "inf", "-inf"):
                tensor[position] = float(value)
                assert not is_finite(tensor)
    assert is_finite(torch.empty(0, 4))
    assert not is_finite(torch.tensor(float("nan")))


_SCRIPT = """
import json, sys
from milepost.kernels.api import select_kernels
from milepost.models import load_model
def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))
kernels = select_kernels()
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak starts here
load_model(sys.argv[1], check_finite=sys.argv[2] == "check", kernels=kernels)
print(json.dumps([status("VmHWM") - before, status("VmRSS") - before]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("check", ["check", "no check"])
def test_the_peak_is_the_weights_and_one_layer(tmp_path: Path, check: str) -> None:
    """100 M parameters in bf16, the embeddings the largest tensor."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs /proc/self/clear_refs")
    make = [sys.executable, str(ROOT / "bench" / "make_model.py"), str(tmp_path), "--vocabulary", "8192"]
    subprocess.run(make, check=True, capture_output=True)
    num_bytes = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    num_layers = json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"]
    assert num_bytes > 180 * MIB
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path), check], capture_output=True, text=True, check=True
    )
    peak, after = json.loads(done.stdout)
    # A layer in the file, its stacked copy, and what the allocator keeps for the next one.
    assert peak < num_bytes + 3 * num_bytes / num_layers + 16 * MIB, (peak, num_bytes)
    assert after < num_bytes + 24 * MIB, (after, num_bytes)
