"""kimi_linear against transformers' implementation, on random small checkpoints in hub layout.

fp32 must agree to 1e-4 (1e-5 is usual). bf16 rounds in other places than the oracle does, so both
are compared with the fp32 result of the same weights: ours may not be worse than BF16_FACTOR times
theirs.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from tests.support.checkpoints import tiny_config, write_checkpoint  # noqa: E402
from tests.support.driver import Driver, random_tokens  # noqa: E402

from milepost.models import load_model  # noqa: E402

pytestmark = pytest.mark.oracle

FP32_BOUND = 1e-4
BF16_FACTOR = 1.5
NUM_TOKENS = 150

CONFIGS: dict[str, dict[str, Any]] = {
    "moe": tiny_config(),
    "dense_q_lora": tiny_config(q_lora_rank=20, first_k_dense_replace=5),
    "many_experts_no_renormalise": tiny_config(
        num_experts=16,
        num_experts_per_token=4,
        num_shared_experts=2,
        moe_renormalize=False,
        routed_scaling_factor=1.3,
    ),
    "two_attention_layers_other_heads": tiny_config(
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=2,
        v_head_dim=20,
        qk_nope_head_dim=16,
        qk_rope_head_dim=4,
        linear_attn_config={
            "kda_layers": [1, 3, 4, 5],
            "full_attn_layers": [2, 6],
            "num_heads": 5,
            "head_dim": 8,
        },
    ),
}


@functools.cache
def _oracle_logits(directory: Path, dtype: Any, tokens: tuple[int, ...]) -> Any:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        return model.eval()(torch.tensor([tokens])).logits[0].float()


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def checkpoint(request: Any, tmp_path_factory: Any) -> Path:
    config = CONFIGS[request.param]
    return write_checkpoint(tmp_path_factory.mktemp(request.param), config, seed=3, num_shards=2)


@pytest.fixture(scope="module")
def driver(checkpoint: Path) -> Driver:
    return Driver(load_model(checkpoint, dtype="float32"), match_unit=16, cache_bytes=32 << 20)


def _tokens(driver: Driver) -> tuple[int, ...]:
    return tuple(random_tokens(NUM_TOKENS, driver.model.vocab_size, seed=11))


def _assert_close(ours: Any, theirs: Any) -> None:
    difference = float((ours - theirs).abs().max())
    assert float(theirs.abs().max()) > 0.5, "logits too small for the bound to mean something"
    assert difference <= FP32_BOUND, f"logits differ by {difference:.2e}"


def _run_in_pieces(driver: Driver, sizes: list[int]) -> Any:
    tokens = _tokens(driver)
    assert sum(sizes) == len(tokens)
    driver.poison()
    sequence = driver.sequence(tokens, running_slot=1)
    return torch.cat([driver.logits(driver.plan((sequence, size))) for size in sizes])


@pytest.mark.parametrize(
    "sizes",
    [[150], [1] * 150, [37, 63, 50], [16, 1, 15, 17, 100, 1], [3, 147]],
    ids=["whole", "stepwise", "chunked", "ragged", "short_first"],
)
def test_pieces_agree_with_oracle(driver: Driver, checkpoint: Path, sizes: list[int]) -> None:
    theirs = _oracle_logits(checkpoint, torch.float32, _tokens(driver))
    _assert_close(_run_in_pieces(driver, sizes), theirs)


@pytest.mark.parametrize("position", [1, 3, 15, 16, 17, 64, 100, 149])
def test_resumed_from_exported_checkpoint(driver: Driver, checkpoint: Path, position: int) -> None:
    tokens = _tokens(driver)
    theirs = _oracle_logits(checkpoint, torch.float32, tokens)
    driver.poison()
    first = driver.sequence(tokens, running_slot=1)
    driver.run(driver.plan((first, NUM_TOKENS), exports={first.request_id: [(position, 5)]}))
    # The other request reads the checkpoint and the full pages below it, and recomputes the rest.
    unit = driver.match_unit
    second = driver.sequence(
        tokens,
        running_slot=2,
        start_slot=5,
        pages=first.pages[: -(-position // unit)],
        num_processed=position,
    )
    _assert_close(driver.logits(driver.plan((second, NUM_TOKENS - position))), theirs[position:])


def test_bf16_is_as_close_as_the_oracle_in_bf16(tmp_path: Path, record_property: Any) -> None:
    config = tiny_config(dtype="bfloat16")
    directory = write_checkpoint(tmp_path / "bf16", config, seed=3)
    driver = Driver(load_model(directory), match_unit=16)
    assert driver.model.dtype == "bfloat16"
    tokens = _tokens(driver)
    exact = _oracle_logits(directory, torch.float32, tokens)
    theirs = _oracle_logits(directory, torch.bfloat16, tokens)
    ours = driver.logits(driver.plan((driver.sequence(tokens, running_slot=0), NUM_TOKENS)))
    errors = {
        name: float((x - exact).square().mean().sqrt()) for name, x in (("ours", ours), ("theirs", theirs))
    }
    for name, value in errors.items():
        record_property(f"bf16_rms_error_{name}", value)
    record_property("bf16_max_difference", float((ours - theirs).abs().max()))
    assert errors["ours"] <= BF16_FACTOR * errors["theirs"], errors
