"""Builds a decoder from file headers alone: every name, shape and dtype is checked, no value is read.

Works on checkpoints larger than memory: shards are mapped, only their headers are touched, and the
tensors handed to the layers have a shape but no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from milepost.kernels.api import REFERENCE, select_kernels
from milepost.models.description import (
    ModelDescription,
    describe_spec,
    model_directory,
    read_spec,
    resolve_dtype,
    used_modules,
)
from milepost.models.hybrid import HybridDecoder
from milepost.models.loading import TORCH_DTYPES
from milepost.models.mtp import MtpModules
from milepost.models.weights import BYTE_DTYPES, FLOAT_DTYPES, WeightReader


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """What a dry run found.

    Attributes:
        num_tensors: tensors the decoder uses.
        num_values: weights in them; packed 4-bit values count one by one, scales do not count.
        num_bytes: of all tensors in the files, used or not.
        unused_tensors: names the decoder has no use for.
    """

    description: ModelDescription
    num_tensors: int
    num_values: int
    num_bytes: int
    unused_tensors: list[str]


class _HeaderReader(WeightReader):
    """Hands out tensors without memory."""

    _reads_values = False
    num_tensors = 0
    num_values = 0

    def take(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, *, also: Sequence[Sequence[int]] = ()
    ) -> torch.Tensor:
        self._checked(name, (shape, *also), FLOAT_DTYPES)
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self._used(name, tensor.numel())
        return tensor

    def take_bytes(self, name: str, shape: Sequence[int], *, nan: int | None = None) -> torch.Tensor:
        self._checked(name, (shape,), BYTE_DTYPES)
        tensor = torch.empty(tuple(shape), dtype=torch.uint8, device="meta")
        self._used(name, 2 * tensor.numel() if name.endswith("weight_packed") else 0)
        return tensor

    def _used(self, name: str, num_values: int) -> None:
        if name not in self._taken:
            self.num_tensors += 1
            self.num_values += num_values
        self._count(name)


def check_checkpoint(
    path: str | Path, *, dtype: str | None = None, num_draft_tokens: int = 0
) -> CheckpointReport:
    """Checks `path/config.json` against the headers of `path/*.safetensors`.

    Args:
        dtype, num_draft_tokens: as in `load_model`.

    Raises:
        ConfigError: the config cannot work; `field` is the key.
        CheckpointFileError: files missing, truncated, foreign or of another shape; names the tensor.
    """
    path = model_directory(path)
    spec = read_spec(path)
    dtype_name = resolve_dtype(spec, dtype)
    reader = _HeaderReader(path)
    # The reference keeps tensors as they are; packed layouts would need their values.
    kernels, torch_dtype = select_kernels(REFERENCE), TORCH_DTYPES[dtype_name]
    decoder = HybridDecoder(spec, reader, kernels, torch_dtype)
    num_modules = used_modules(spec, num_draft_tokens)
    if num_modules:
        MtpModules(spec, reader, kernels, torch_dtype, decoder, num_modules)
    return CheckpointReport(
        describe_spec(spec, dtype_name, num_modules),
        reader.num_tensors,
        reader.num_values,
        reader.num_bytes,
        reader.unused_names(),
    )
