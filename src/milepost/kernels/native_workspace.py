"""Packed weights of the native library, and the buffers its results lie in."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from milepost.kernels.reference_coded import Mxfp4Weight
from milepost.kernels.tapes import MAX_TAPE_ROWS

_MAX_CACHED_VIEWS = 4096


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """A packed weight and where its products go.

    Attributes:
        bounds: column ranges of the parts.
        betas: of the activation of gate and up, () for SwiGLU.
    """

    packed: Any
    name: str
    out_features: int
    dtype: torch.dtype
    bounds: tuple[tuple[int, int], ...] = ()
    betas: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True)
class NativeExperts:
    """Attributes:
    packed: what the library packed.
    betas: of the activation, () for SwiGLU.
    """

    packed: Any
    betas: tuple[float | None, ...]


class DecodedOnUse:
    """A weight of 4-bit floats for a library that lacks them: decoded and packed anew by every product.

    Attributes: as those of `NativeLinear`.
    """

    def __init__(
        self, library: ModuleType, weight: Mxfp4Weight, name: str, bounds: tuple[tuple[int, int], ...]
    ) -> None:
        self._library = library
        self._weight = weight
        self.name = name
        self.out_features = weight.shape[0]
        self.dtype = weight.dtype
        self.bounds = bounds

    @property
    def packed(self) -> Any:
        return self._library.pack(self._weight.decode())


AnyLinear = NativeLinear | DecodedOnUse


class Workspace:
    """Result buffers of one thread. Each grows to the largest number of rows asked for, from as many as a
    tape may have: tapes keep the buffers they were recorded with, and so share one."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int, torch.dtype], torch.Tensor] = {}
        self._views: dict[tuple[str, int, int, torch.dtype], torch.Tensor] = {}
        self._parts: dict[tuple[str, int, int, torch.dtype], tuple[torch.Tensor, ...]] = {}

    def rows(self, name: str, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """[num_rows, width], contents undefined; a new tensor if the name is empty."""
        if not name:
            return torch.empty(num_rows, width, dtype=dtype)
        key = (name, num_rows, width, dtype)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self._buffer(name, num_rows, width, dtype)[:num_rows]
        return view

    def parts(
        self, weight: AnyLinear, name: str, num_rows: int
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """A buffer for results of a weight, see `rows`, and the weight's parts of it."""
        key = (name, num_rows, weight.out_features, weight.dtype)
        whole = self.rows(*key)
        parts = self._parts.get(key) if name else None
        if parts is None:
            parts = tuple(whole[:, first:end] for first, end in weight.bounds)
            if name:
                self._parts[key] = parts
        return whole, parts

    def _buffer(self, name: str, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        key = (name, width, dtype)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape[0] < num_rows:
            buffer = self._buffers[key] = torch.empty(max(num_rows, MAX_TAPE_ROWS), width, dtype=dtype)
            self._views.clear()
            self._parts.clear()
        if len(self._views) > _MAX_CACHED_VIEWS:
            self._views.clear()
            self._parts.clear()
        return buffer
