"""Parts every decoder shares: loading context, norm, linear, dense MLP."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from milepost.kernels.api import Kernels
from milepost.kernels.reference_coded import Matrix, quantized, read
from milepost.kernels.reference_experts import SWIGLU, GluActivation
from milepost.kernels.stored import StoredMatrix, StoredPart
from milepost.models.quantization import Quantization, Role
from milepost.models.specs import SituSpec
from milepost.models.weights import WeightReader


@dataclass(frozen=True, slots=True)
class Loader:
    """Where a module takes its tensors from.

    Attributes:
        prefix: put in front of every name, ends with a dot.
        dtype: of weights that multiply activations; norms and gates stay fp32.
        quantization: what becomes of weights when they are packed; None = they stay as they are.
    """

    weights: WeightReader
    kernels: Kernels
    dtype: torch.dtype
    prefix: str = ""
    quantization: Quantization | None = None

    def under(self, name: str) -> Loader:
        """The same, with `name.` added to the prefix."""
        return dataclasses.replace(self, prefix=f"{self.prefix}{name}.")

    def pack_linear(
        self,
        weight: Matrix,
        *,
        name: str = "",
        parts: Sequence[int] = (),
        role: Role = "projection",
    ) -> Any:
        """`Kernels.pack_linear` of the weight, quantised if weights of its role are."""
        return self.kernels.pack_linear(self.coded(weight, role), name=name, parts=parts)

    def pack_swiglu(self, gate_up: Matrix, *, name: str = "", activation: GluActivation = SWIGLU) -> Any:
        """`Kernels.pack_swiglu`, likewise."""
        coded = self.coded(gate_up, "projection")
        return self.kernels.pack_swiglu(coded, name=name, activation=activation)

    def coded(self, weight: Matrix, role: Role) -> Matrix:
        """The weight, quantised if weights of its role are. What a file holds coded stays as it is."""
        scheme = None if self.quantization is None else self.quantization.scheme(role)
        if scheme is None:
            return weight
        known = read(weight)
        # Tensors of a dry run have no values.
        if not isinstance(known, torch.Tensor) or known.is_meta:
            return known
        return quantized(known, scheme)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        return self.weights.take(self.prefix + name, shape, self.dtype)

    def tensor_fp32(self, name: str, *shape: int, also: tuple[tuple[int, ...], ...] = ()) -> torch.Tensor:
        """`also`: other shapes with the same number of values that are accepted."""
        return self.weights.take(self.prefix + name, shape, torch.float32, also=also)

    def has(self, name: str) -> bool:
        return self.prefix + name in self.weights

    def bytes(self, name: str, *shape: int, nan: int | None = None) -> torch.Tensor:
        """uint8, as stored; `nan`: the byte that stands for NaN."""
        return self.weights.take_bytes(self.prefix + name, shape, nan=nan)

    def linear(self, name: str, in_features: int, out_features: int) -> torch.Tensor:
        """`name.weight` [out, in], looked at."""
        return self.tensor(f"{name}.weight", out_features, in_features)

    def unread(self, name: str, *shape: int) -> StoredPart:
        """What is packed as it is: kernels look at the values while they pack them."""
        return self.weights.take_unread(self.prefix + name, shape, self.dtype)

    def matrix(self, name: str, in_features: int, out_features: int) -> StoredMatrix:
        """`name.weight` [out, in], to be packed."""
        return self.stacked((name,), in_features, (out_features,))

    def stacked(
        self, names: tuple[str, ...], in_features: int, out_features: tuple[int, ...]
    ) -> StoredMatrix:
        """Weights of several linears over the same input, stacked along the outputs, to be packed."""
        sizes = zip(names, out_features, strict=True)
        return StoredMatrix(tuple(self.unread(f"{name}.weight", out, in_features) for name, out in sizes))


def place_of_sum(residual: torch.Tensor | None, keeps_residual: bool) -> str | None:
    """Where `Kernels.linear` puts residual + product: into the residual, or, if it is to be kept or there is
    none, into a new tensor."""
    return "" if keeps_residual or residual is None else None


class RmsNorm:
    """Root mean square norm with a weight, stored less `offset`."""

    def __init__(self, loader: Loader, name: str, width: int, eps: float, offset: float = 0.0) -> None:
        self._kernels = loader.kernels
        self._weight = loader.tensor_fp32(f"{name}.weight", width)
        if offset:
            self._weight = self._weight + offset
        self._eps = eps

    def __call__(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [N, D] -> [N, D], in `out` or in a buffer that the next norm may use again."""
        return self._kernels.rms_norm(x, self._weight, self._eps, out=out)

    def new(self, x: torch.Tensor) -> torch.Tensor:
        """The same in a tensor of its own."""
        return self(x, out=torch.empty_like(x))


class DenseMlp:
    """down(activation(gate(x), up(x))); hub names gate_proj, up_proj, down_proj."""

    def __init__(
        self,
        loader: Loader,
        hidden_size: int,
        inner_size: int,
        name: str = "mlp",
        *,
        situ: SituSpec | None = None,
    ) -> None:
        """
        Args:
            name: layers with the same name and shapes may share result buffers.
            situ: None = SwiGLU.
        """
        self._kernels = loader.kernels
        gate_up = loader.stacked(("gate_proj", "up_proj"), hidden_size, (inner_size, inner_size))
        activation = SWIGLU if situ is None else GluActivation(situ.beta, situ.linear_beta)
        self._gate_up = loader.pack_swiglu(gate_up, name=f"{name}.inner", activation=activation)
        down = loader.matrix("down_proj", inner_size, hidden_size)
        self._down = loader.pack_linear(down, name=f"{name}.out")

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [N, D] -> [N, D], plus `residual` if given (which may be overwritten)."""
        inner = self._kernels.linear_swiglu(x, self._gate_up)
        return self._kernels.linear(inner, self._down, residual=residual)
