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
from milepost.kernels.stored import StoredPart
from milepost.models.description import (
    ModelDescription,
    describe_spec,
    read_spec,
    resolve_dtype,
)
from milepost.models.draft_target import DraftTarget
from milepost.models.drafters import MTP, load_drafter, read_drafter
from milepost.models.hub import model_directory
from milepost.models.hybrid import HybridDecoder
from milepost.models.loading import TORCH_DTYPES
from milepost.models.weights import BYTE_DTYPES, FLOAT_DTYPES, INTEGER_DTYPES, WeightReader


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """What a dry run found.

    Attributes:
        num_tensors: tensors the decoder and its drafter use.
        num_values: weights in them; packed 4-bit values count one by one, scales do not count.
        num_bytes: of all tensors in the files, used or not.
        unused_tensors: names that nobody has a use for; those of a drafter's own files begin with
            `draft_model:`.
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

    def take_unread(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> StoredPart:
        return StoredPart(self.take(name, shape, dtype))

    def take_bytes(self, name: str, shape: Sequence[int], *, nan: int | None = None) -> torch.Tensor:
        self._checked(name, (shape,), BYTE_DTYPES)
        tensor = torch.empty(tuple(shape), dtype=torch.uint8, device="meta")
        self._used(name, 2 * tensor.numel() if name.endswith("weight_packed") else 0)
        return tensor

    def take_integers(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        self._checked(name, (shape,), INTEGER_DTYPES)
        self._used(name, 0)
        return torch.zeros(tuple(shape), dtype=torch.int64)

    def _used(self, name: str, num_values: int) -> None:
        if name not in self._taken:
            self.num_tensors += 1
            self.num_values += num_values
        self._count(name)


def check_checkpoint(
    path: str | Path,
    *,
    dtype: str | None = None,
    num_draft_tokens: int = 0,
    draft_method: str = MTP,
    draft_model: str | Path | None = None,
    draft_confidence: float = 0.0,
) -> CheckpointReport:
    """Checks `path/config.json` against the headers of `path/*.safetensors`, and those of a drafter.

    Args:
        dtype, num_draft_tokens, draft_method, draft_model, draft_confidence: as in `load_model`.

    Raises:
        ConfigError: the config cannot work; `field` is the key.
        CheckpointFileError: files missing, truncated, foreign or of another shape; names the tensor.
    """
    path = model_directory(path)
    spec = read_spec(path)
    dtype_name = resolve_dtype(spec, dtype)
    drafter = read_drafter(spec, num_draft_tokens, draft_method, draft_model, draft_confidence)
    readers = [_HeaderReader(path)]

    def open_files(directory: Path) -> WeightReader:
        readers.append(_HeaderReader(directory))
        return readers[-1]

    # The reference keeps tensors as they are; packed layouts would need their values.
    kernels, torch_dtype = select_kernels(REFERENCE), TORCH_DTYPES[dtype_name]
    decoder = HybridDecoder(spec, readers[0], kernels, torch_dtype)
    skipped: tuple[str, ...] = ()
    if drafter is not None:
        target = DraftTarget(spec, decoder, readers[0], kernels, torch_dtype, None, open_files)
        load_drafter(drafter, target)
        skipped = drafter.skipped
    unused = readers[0].unused_names()
    for reader in readers[1:]:
        unused += [f"draft_model:{name}" for name in reader.unused_names() if not name.startswith(skipped)]
    return CheckpointReport(
        describe_spec(spec, dtype_name, drafter),
        sum(reader.num_tensors for reader in readers),
        sum(reader.num_values for reader in readers),
        sum(reader.num_bytes for reader in readers),
        unused,
    )
