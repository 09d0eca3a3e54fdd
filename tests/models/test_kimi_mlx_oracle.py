"""kimi_k3 and kimi_linear against mlx-lm on the CPU, on random small checkpoints in hub layout.

fp32 must agree to 1e-4. Packed 4-bit experts are compared with mlx's own decoding of the same bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm")
torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402
from tests.support import kimi_k3_checkpoints as k3  # noqa: E402
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint  # noqa: E402
from tests.support.driver import Driver, random_tokens  # noqa: E402
from tests.support.mlx_oracle import dequantized, mlx_logits  # noqa: E402
from tests.support.pieces import PIECES, RESUME_POSITIONS, run_in_pieces, run_resumed  # noqa: E402

from milepost.kernels.reference_coded import Mxfp4Weight  # noqa: E402
from milepost.models import load_model  # noqa: E402

pytestmark = pytest.mark.oracle

FP32_BOUND = 1e-4
BF16_FACTOR = 1.5
TOKENS = tuple(random_tokens(100, 131, seed=1))

CONFIGS: dict[str, dict[str, Any]] = {
    # The oracle asks for head_dim and rope_theta, which the published config has and nobody uses.
    "linear": tiny_config(head_dim=72, rope_theta=10000.0),
    "linear_no_renormalise": tiny_config(
        head_dim=72, rope_theta=10000.0, num_experts_per_token=4, num_shared_experts=2, moe_renormalize=False
    ),
    "k3": k3.k3_config(),
    "k3_without_latent_and_residuals": k3.k3_config(
        routed_expert_hidden_size=None,
        attn_res_block_size=None,
        activation_situ_linear_beta=None,
        q_lora_rank=None,
    ),
    "k3_one_residual_block_no_latent_norm": k3.k3_config(
        attn_res_block_size=12, latent_moe_use_norm=False, num_experts_per_token=2
    ),
}


def tensors_of(config: dict[str, Any]) -> dict[str, Any]:
    return k3.random_tensors(config, 3) if "text_config" in config else random_tensors(config, 3)


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def checkpoint(request: Any, tmp_path_factory: Any) -> Path:
    config = CONFIGS[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    return write_checkpoint(directory, config, tensors=tensors_of(config), num_shards=2)


@pytest.fixture(scope="module")
def driver(checkpoint: Path) -> Driver:
    return Driver(load_model(checkpoint), match_unit=16, cache_bytes=32 << 20)


def _assert_close(ours: Any, theirs: Any) -> None:
    difference = float((ours - theirs).abs().max())
    assert float(theirs.abs().max()) > 0.5, "logits too small for the bound to mean something"
    assert difference <= FP32_BOUND, f"logits differ by {difference:.2e}"


@pytest.mark.parametrize("sizes", PIECES.values(), ids=PIECES.keys())
def test_pieces_agree_with_oracle(driver: Driver, checkpoint: Path, sizes: list[int]) -> None:
    _assert_close(run_in_pieces(driver, TOKENS, sizes), mlx_logits(checkpoint, TOKENS))


def test_the_oracle_in_pieces_agrees_too(driver: Driver, checkpoint: Path) -> None:
    theirs = mlx_logits(checkpoint, TOKENS, (30, 1, 1, 68))
    _assert_close(run_in_pieces(driver, TOKENS, [100]), theirs)


@pytest.mark.parametrize("position", RESUME_POSITIONS)
def test_resumed_from_exported_checkpoint(driver: Driver, checkpoint: Path, position: int) -> None:
    theirs = mlx_logits(checkpoint, TOKENS)
    _assert_close(run_resumed(driver, TOKENS, position), theirs[position:])


@pytest.fixture(scope="module")
def packed(tmp_path_factory: Any) -> Path:
    config = k3.k3_config(quantization_config=k3.PACKED)
    return write_checkpoint(tmp_path_factory.mktemp("packed"), config, tensors=k3.random_tensors(config, 3))


def _unpacked(directory: Path, target: Path) -> Path:
    """The same model with experts decoded by mlx."""
    stored = load_file(directory / "model.safetensors")
    tensors = {}
    for name, tensor in stored.items():
        if name.endswith("weight_packed"):
            base = name.removesuffix("_packed")
            tensors[base] = dequantized(tensor, stored[base + "_scale"], torch.float32)
        elif not name.endswith("weight_scale"):
            tensors[name] = tensor
    return write_checkpoint(target, k3.k3_config(), tensors=tensors)


@pytest.mark.parametrize("sizes", [[100], [37, 1, 62]], ids=["whole", "chunked"])
def test_packed_experts_agree_with_oracle(packed: Path, tmp_path: Path, sizes: list[int]) -> None:
    driver = Driver(load_model(packed), match_unit=16, cache_bytes=32 << 20)
    theirs = mlx_logits(_unpacked(packed, tmp_path / "plain"), TOKENS)
    _assert_close(run_in_pieces(driver, TOKENS, sizes), theirs)
    _assert_close(run_resumed(driver, TOKENS, 48), theirs[48:])


def test_weights_stored_in_bf16_and_run_in_fp32(tmp_path: Path) -> None:
    """How a published checkpoint is compared: its bf16 values, computed in fp32 on both sides."""
    tensors = {
        name: tensor.bfloat16().float() for name, tensor in k3.random_tensors(k3.k3_config(), 3).items()
    }
    theirs = mlx_logits(write_checkpoint(tmp_path / "wide", k3.k3_config(), tensors=tensors), TOKENS)
    stored = write_checkpoint(tmp_path / "stored", k3.k3_config(dtype="bfloat16"), tensors=tensors)
    driver = Driver(load_model(stored, dtype="float32"), match_unit=16, cache_bytes=32 << 20)
    _assert_close(run_in_pieces(driver, TOKENS, [37, 1, 62]), theirs)


def test_a_checkpoint_may_pack_only_some_experts(packed: Path, tmp_path: Path) -> None:
    stored = load_file(packed / "model.safetensors")
    base = "language_model.model.layers.2.block_sparse_moe.experts.5."
    for name in ("w1", "w2", "w3"):
        bytes_of, scales = (stored.pop(f"{base}{name}.weight_{kind}") for kind in ("packed", "scale"))
        stored[f"{base}{name}.weight"] = dequantized(bytes_of, scales, torch.float32)
    config = k3.k3_config(quantization_config=k3.PACKED)
    driver = Driver(load_model(write_checkpoint(tmp_path / "mixed", config, tensors=stored)), match_unit=16)
    theirs = mlx_logits(_unpacked(packed, tmp_path / "plain"), TOKENS)
    _assert_close(run_in_pieces(driver, TOKENS, [100]), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_of_every_byte_is_that_of_mlx(dtype: Any) -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(1, 2)
    scales = torch.randint(90, 160, (16, 2), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    ours = Mxfp4Weight(packed, scales, dtype).decode()
    assert torch.equal(ours, dequantized(packed, scales, dtype))
    assert float(ours.max()) == -float(ours.min()) > 0.0


def test_bf16_is_as_close_as_the_oracle_in_bf16(tmp_path: Path, record_property: Any) -> None:
    # Without experts: mlx gathers expert weights on the CPU in fp32 only.
    config = k3.k3_config(dtype="bfloat16", num_experts=0)
    tensors = {name: tensor.bfloat16().float() for name, tensor in k3.random_tensors(config, 3).items()}
    exact = mlx_logits(
        write_checkpoint(tmp_path / "fp32", k3.k3_config(num_experts=0), tensors=tensors), TOKENS
    )
    directory = write_checkpoint(tmp_path / "bf16", config, tensors=tensors)
    theirs = mlx_logits(directory, TOKENS)
    driver = Driver(load_model(directory), match_unit=16)
    assert driver.model.dtype == "bfloat16"
    ours = run_in_pieces(driver, TOKENS, [100])
    errors = {
        name: float((x - exact).square().mean().sqrt()) for name, x in (("ours", ours), ("theirs", theirs))
    }
    for name, value in errors.items():
        record_property(f"bf16_rms_error_{name}", value)
    assert errors["ours"] <= BF16_FACTOR * errors["theirs"], errors
