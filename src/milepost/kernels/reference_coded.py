"""Weights of few bits in plain torch: how integers are chosen, and what coded weights multiply to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from milepost.kernels.schemes import IntegerScheme
from milepost.kernels.stored import StoredMatrix

_MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_BIAS = 127
_VALUES_AT_ONCE = 1 << 22
"""Weights widened at a time while integers are chosen; bounds what loading takes beside a layer."""


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """A matrix as integers: value = code * scale of its row and group.

    Attributes:
        codes: int8 [out, in].
        scales: bf16 [out, groups]; the last group may be short.
        dtype: of products.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    scheme: IntegerScheme
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def decode(self) -> torch.Tensor:
        """fp32 [out, in], exact: a product of two numbers with eight significant bits."""
        wide = self.scales.float().repeat_interleave(self.scheme.group, dim=1)
        return self.codes.float() * wide[:, : self.shape[1]]


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """A matrix of 4-bit floats: value = table[nibble] * 2^(scale - 127).

    Attributes:
        packed: uint8 [out, in / 2]; the low nibble is the even column.
        scales: uint8 [out, in / 32], E8M0.
        dtype: of products.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.packed.shape[0], 2 * self.packed.shape[1]))

    def decode(self) -> torch.Tensor:
        """[out, in] in the dtype of products; exact in fp32 and bf16: a value has two significant bits."""
        table = torch.tensor(_MXFP4_VALUES + tuple(-value for value in _MXFP4_VALUES))
        nibbles = torch.stack([self.packed & 0xF, self.packed >> 4], dim=-1).flatten(1)
        values = table[nibbles.int()].view(*self.scales.shape, -1)
        exponents = self.scales.int().unsqueeze(-1) - _E8M0_BIAS
        return torch.ldexp(values, exponents).flatten(1).to(self.dtype)


Matrix = torch.Tensor | StoredMatrix | IntegerWeight | Mxfp4Weight
"""A weight [out, in], coded or not."""
ReadMatrix = torch.Tensor | IntegerWeight | Mxfp4Weight
"""One whose values were looked at."""


def read(weight: Matrix) -> ReadMatrix:
    """The weight as kernels without a pass of their own over stored parts take it.

    Raises:
        CheckpointFileError: it is stored and holds NaN or infinity, and must not.
    """
    return weight.joined() if isinstance(weight, StoredMatrix) else weight


def stacked(parts: Sequence[Matrix]) -> Matrix:
    """One below the other; all coded alike."""
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise TypeError("parts of one weight must be coded alike")

    def joined(name: str) -> torch.Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    if isinstance(first, StoredMatrix):
        stored = [part for matrix in parts if isinstance(matrix, StoredMatrix) for part in matrix.parts]
        return StoredMatrix(tuple(stored))
    if isinstance(first, IntegerWeight):
        return IntegerWeight(joined("codes"), joined("scales"), first.scheme, first.dtype)
    if isinstance(first, Mxfp4Weight):
        return Mxfp4Weight(joined("packed"), joined("scales"), first.dtype)
    return torch.cat([part for part in parts if isinstance(part, torch.Tensor)])


def quantized(weight: torch.Tensor, scheme: IntegerScheme) -> IntegerWeight:
    """Codes and scales of a weight [out, in].

    The value farthest from zero in a group gets the lowest code, -2^(bits - 1), and so decides the sign
    of the scale; of two equally far the negative one. The scale is rounded to bf16 first, then the codes
    to the nearest, ties to even: every machine finds the same ones. A group of zeros has the scale 0.
    """
    rows = max(1, _VALUES_AT_ONCE // max(1, weight.shape[1]))
    parts = [_quantized_rows(part, scheme) for part in weight.split(rows)]
    codes, scales = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return IntegerWeight(codes, scales, scheme, weight.dtype)


def _quantized_rows(weight: torch.Tensor, scheme: IntegerScheme) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, width = weight.shape
    padded = F.pad(weight.float(), (0, -width % scheme.group))
    groups = padded.view(num_rows, -1, scheme.group)
    highest, lowest = groups.amax(-1), groups.amin(-1)
    farthest = torch.where(highest > -lowest, highest, lowest)
    limit = 1 << (scheme.bits - 1)
    scales = (farthest / -limit).to(torch.bfloat16)
    # 0 / 0 is no number; the code does not matter there.
    codes = (groups / scales.float().unsqueeze(-1)).nan_to_num(0.0).round_().clamp_(-limit, limit - 1)
    return codes.to(torch.int8).view(num_rows, -1)[:, :width].contiguous(), scales


def coded_linear(x: torch.Tensor, weight: IntegerWeight | Mxfp4Weight) -> torch.Tensor:
    """x [N, in] times the decoded weight -> [N, out] in the weight's dtype.

    Integers: x as it is times the exact values, summed in fp32 and rounded once. Native kernels sum the
    products of x and codes of each group, times the group's scale. 4-bit floats: as plain weights of
    the same values.
    """
    if isinstance(weight, Mxfp4Weight):
        return F.linear(x.to(weight.dtype).contiguous(), weight.decode())
    return F.linear(x.float().contiguous(), weight.decode()).to(weight.dtype)
