"""qwen3_next and qwen3_5 against transformers' implementation, on random small checkpoints in hub layout.

fp32 must agree to 1e-4. In bf16 both are compared with the fp32 result of the same weights: ours may
not be worse than BF16_FACTOR times theirs.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from tests.support.checkpoints import write_checkpoint  # noqa: E402
from tests.support.driver import Driver, random_tokens  # noqa: E402
from tests.support.pieces import PIECES, RESUME_POSITIONS, run_in_pieces, run_resumed  # noqa: E402
from tests.support.qwen_checkpoints import (  # noqa: E402
    dense_config,
    moe_config,
    next_config,
    random_tensors,
    wrapped,
)

from milepost.kernels.reference_gqa import inverse_frequencies, rotate  # noqa: E402
from milepost.models import load_model  # noqa: E402

pytestmark = pytest.mark.oracle

FP32_BOUND = 1e-4
BF16_FACTOR = 1.5
NUM_TOKENS = 100

CONFIGS: dict[str, dict[str, Any]] = {
    "next": next_config(),
    "next_some_dense_no_renormalise": next_config(
        mlp_only_layers=[1], decoder_sparse_step=2, norm_topk_prob=False, linear_num_value_heads=6
    ),
    "dense": dense_config(),
    "dense_wrapped_tied": wrapped(
        dense_config(tie_word_embeddings=True, num_key_value_heads=4, linear_num_key_heads=4),
        "qwen3_5",
        "Qwen3_5ForConditionalGeneration",
    ),
    "moe_wrapped": moe_config(),
}


@functools.cache
def _oracle_logits(directory: Path, dtype: Any) -> Any:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        return model.eval()(torch.tensor([TOKENS])).logits[0].float()


TOKENS = tuple(random_tokens(NUM_TOKENS, 131, seed=11))


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def checkpoint(request: Any, tmp_path_factory: Any) -> Path:
    config = CONFIGS[request.param]
    tensors = random_tensors(config, seed=3)
    directory = tmp_path_factory.mktemp(request.param)
    return write_checkpoint(directory, config, tensors=tensors, num_shards=2)


@pytest.fixture(scope="module")
def driver(checkpoint: Path) -> Driver:
    return Driver(load_model(checkpoint), match_unit=16, cache_bytes=32 << 20)


def _assert_close(ours: Any, theirs: Any) -> None:
    difference = float((ours - theirs).abs().max())
    assert float(theirs.abs().max()) > 0.5, "logits too small for the bound to mean something"
    assert difference <= FP32_BOUND, f"logits differ by {difference:.2e}"


@pytest.mark.parametrize("sizes", PIECES.values(), ids=PIECES.keys())
def test_pieces_agree_with_oracle(driver: Driver, checkpoint: Path, sizes: list[int]) -> None:
    _assert_close(run_in_pieces(driver, TOKENS, sizes), _oracle_logits(checkpoint, torch.float32))


@pytest.mark.parametrize("position", RESUME_POSITIONS)
def test_resumed_from_exported_checkpoint(driver: Driver, checkpoint: Path, position: int) -> None:
    theirs = _oracle_logits(checkpoint, torch.float32)
    _assert_close(run_resumed(driver, TOKENS, position), theirs[position:])


def test_positions_far_out_are_those_of_the_oracle() -> None:
    """fp32 angles: at a million tokens the rounding of position times frequency shows."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding

    config = Qwen3NextConfig(**next_config(head_dim=256, rope_theta=1e7))
    positions = [0, 1, 4095, 131_071, 262_144, 1_000_003]
    cos, sin = Qwen3NextRotaryEmbedding(config)(torch.zeros(1), torch.tensor([positions]))
    frequencies = inverse_frequencies(64, 1e7)
    ours = rotate(
        torch.ones(len(positions), 1, 256), torch.tensor(positions).float().unsqueeze(1) * frequencies
    )[:, 0]
    cos, sin = cos[0, :, :32], sin[0, :, :32]
    torch.testing.assert_close(ours[:, :64], torch.cat([cos - sin, cos + sin], dim=-1), rtol=0, atol=1e-5)
    assert torch.equal(ours[:, 64:], torch.ones(len(positions), 192))


@pytest.mark.parametrize("config", [dense_config, next_config, moe_config], ids=["dense", "next", "moe"])
def test_bf16_is_as_close_as_the_oracle_in_bf16(config: Any, tmp_path: Path, record_property: Any) -> None:
    values = config(dtype="bfloat16")
    directory = write_checkpoint(tmp_path / "bf16", values, tensors=random_tensors(values, seed=3))
    driver = Driver(load_model(directory), match_unit=16)
    assert driver.model.dtype == "bfloat16"
    exact = _oracle_logits(directory, torch.float32)
    theirs = _oracle_logits(directory, torch.bfloat16)
    ours = run_in_pieces(driver, TOKENS, [NUM_TOKENS])
    errors = {
        name: float((x - exact).square().mean().sqrt()) for name, x in (("ours", ours), ("theirs", theirs))
    }
    for name, value in errors.items():
        record_property(f"bf16_rms_error_{name}", value)
    assert errors["ours"] <= BF16_FACTOR * errors["theirs"], errors
