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

from milepost.kernels.api import select_kernels
from milepost.models.loading import LoadedModel, load_model


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


DTYPES = [(family, "float32") for family in sorted(FAMILIES)]
DTYPES += [(family, "bfloat16") for family in ("kimi_linear", "kimi_k3", "qwen3_5")]
"""Family and dtype where logits are compared within a bound: a rounding difference may flip an expert."""


def without_experts_in_bf16(name: str, dtype: str) -> dict[str, Any]:
    """Changes for a comparison within a bound; see `DTYPES`."""
    dense = dtype == "bfloat16" and name.startswith("kimi")
    return {"dtype": dtype, **({"num_experts": 0} if dense else {})}


class Shelf:
    """Checkpoints and models that are made once per test session and used by all suites; read only."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._directories: dict[str, Path] = {}
        self._models: dict[str, LoadedModel] = {}

    def directory(self, name: str, **changes: Any) -> Path:
        """A checkpoint of family or layout `name`; `changes` go into the (text) config."""
        key = repr((name, sorted(changes.items())))
        if key not in self._directories:
            path = self._root / f"{len(self._directories)}-{name}"
            self._directories[key] = write_family(path, name, seed=5, **changes)
        return self._directories[key]

    def model(self, name: str, *, implementation: str | None = None, **changes: Any) -> LoadedModel:
        """The same, loaded. `implementation`: of the kernels, None = the best."""
        key = repr((name, implementation, sorted(changes.items())))
        if key not in self._models:
            kernels = None if implementation is None else select_kernels(implementation)
            self._models[key] = load_model(self.directory(name, **changes), kernels=kernels)
        return self._models[key]


def kinds_of_tensors(names: list[str]) -> list[str]:
    """One name of each kind, layers and experts not told apart; those of the last layer and expert."""
    kinds = {re.sub(r"\.\d+\.", ".N.", name): name for name in names}
    return sorted(kinds.values())
