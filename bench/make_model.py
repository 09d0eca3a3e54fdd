"""Write a random checkpoint in hub layout, for measurements that need a size and not a meaning.

    python bench/make_model.py DIRECTORY [--size 100m] [--dtype bfloat16] [--seed 0]

It has no tokenizer: benchmarks hand token ids to the scheduler.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.checkpoints import tiny_config, write_checkpoint  # noqa: E402

SIZES: dict[str, dict[str, Any]] = {
    # 12 layers, three KDA to one MLA, all dense: 103 M parameters.
    "100m": {
        "vocab_size": 8192,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 2048,
        "num_experts": 0,
        "first_k_dense_replace": 12,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "model_max_length": 1 << 20,
        "linear_attn_config": {
            "kda_layers": [n for n in range(1, 13) if n % 4],
            "full_attn_layers": [4, 8, 12],
            "num_heads": 6,
            "head_dim": 128,
        },
    },
    # 4 layers, 7 M parameters: quick runs of the same programs.
    "7m": {
        "vocab_size": 2048,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 768,
        "num_experts": 0,
        "first_k_dense_replace": 4,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "model_max_length": 1 << 20,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "num_heads": 4,
            "head_dim": 64,
        },
    },
}


def make_model(directory: Path, size: str = "100m", dtype: str = "bfloat16", seed: int = 0) -> Path:
    """Write the checkpoint unless the directory already holds one; returns the directory."""
    if not (directory / "config.json").exists():
        config = tiny_config(dtype=dtype, **SIZES[size])
        write_checkpoint(directory, config, seed=seed, num_shards=2)
    return directory


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", choices=sorted(SIZES), default="100m")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(make_model(given.directory, given.size, given.dtype, given.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
