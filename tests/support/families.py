"""One random small checkpoint per model family, in hub layout. New families are added here, once."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.support import checkpoints, qwen_checkpoints
from tests.support import kimi_k3_checkpoints as k3


@dataclass(frozen=True)
class Family:
    """`config(**changes)` and `tensors(config, seed)` of one family."""

    config: Callable[..., dict[str, Any]]
    tensors: Callable[..., dict[str, torch.Tensor]]


def _packed_k3_config(**changes: Any) -> dict[str, Any]:
    return k3.k3_config(quantization_config=k3.PACKED, **changes)


FAMILIES: dict[str, Family] = {
    "kimi_linear": Family(checkpoints.tiny_config, checkpoints.random_tensors),
    "kimi_k3": Family(k3.k3_config, k3.random_tensors),
    "qwen3_next": Family(qwen_checkpoints.next_config, qwen_checkpoints.random_tensors),
    "qwen3_5": Family(qwen_checkpoints.dense_config, qwen_checkpoints.random_tensors),
    "qwen3_5_moe": Family(qwen_checkpoints.moe_config, qwen_checkpoints.random_tensors),
}
"""One entry per `model_type`."""
LAYOUTS: dict[str, Family] = {**FAMILIES, "kimi_k3_packed": Family(_packed_k3_config, k3.random_tensors)}
"""The same and other ways to store one."""


def write_family(directory: Path, name: str, *, seed: int = 0, num_shards: int = 1, **changes: Any) -> Path:
    """Writes a checkpoint of family `name`; `changes` go into the (text) config."""
    family = LAYOUTS[name]
    config = family.config(**changes)
    tensors = family.tensors(config, seed)
    return checkpoints.write_checkpoint(directory, config, tensors=tensors, num_shards=num_shards)


def kinds_of_tensors(names: list[str]) -> list[str]:
    """One name of each kind, layers and experts not told apart; those of the last layer and expert."""
    kinds = {re.sub(r"\.\d+\.", ".N.", name): name for name in names}
    return sorted(kinds.values())
