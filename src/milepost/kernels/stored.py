"""Weights as they lie in files, for kernels that join, check and pack them in one pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch

CHECKED_AT_ONCE = 1 << 20
"""Values."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Rows of a matrix, or a stack of matrices, that nobody has looked at yet.

    Attributes:
        tensor: [rows, in], or [matrices, rows, in].
        refuse: raises an error that names the tensor, for one that holds NaN or infinity; None = it may.
    """

    tensor: torch.Tensor
    refuse: Callable[[], NoReturn] | None = None

    def checked(self) -> torch.Tensor:
        """The tensor, looked at.

        Raises:
            CheckpointFileError: it holds NaN or infinity, and must not.
        """
        if self.refuse is not None and not self.tensor.is_meta and not is_finite(self.tensor):
            self.refuse()
        return self.tensor

    def __getitem__(self, rows: int | slice) -> StoredPart:
        return StoredPart(self.tensor[rows], self.refuse)


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix [out, in]: parts one below the other, of one dtype."""

    parts: tuple[StoredPart, ...]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((sum(part.tensor.shape[0] for part in self.parts), self.parts[0].tensor.shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].tensor.dtype

    def joined(self) -> torch.Tensor:
        """As one tensor, looked at; the part itself if there is only one.

        Raises:
            CheckpointFileError: as `StoredPart.checked`.
        """
        tensors = [part.checked() for part in self.parts]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a floating-point tensor holds neither NaN nor infinity.

    Piece by piece: sums of narrow types make a wide copy. A sum settles nearly every piece; only huge
    values need a closer look.
    """
    for piece in tensor.reshape(-1).split(CHECKED_AT_ONCE):
        total = piece.sum(dtype=torch.float32 if piece.itemsize < 4 else None)
        if not bool(torch.isfinite(total)) and not bool(torch.isfinite(piece).all()):
            return False
    return True
