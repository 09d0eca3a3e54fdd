"""What the tests of native kernels share: the library, its instruction sets, odd tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from milepost.kernels.native import NativeOperations
from milepost.kernels.native_library import native_library

Product = Callable[[torch.Tensor], torch.Tensor]
"""Rows [N, in] times a weight -> [N, out]."""

DTYPES = [torch.float32, torch.bfloat16]
NAN = float("nan")

library = native_library().module
if library is None:
    pytest.skip(f"no native kernels: {native_library().reason}", allow_module_level=True)

ISAS: list[str] = library.available_isas()
FUSED = [isa for isa in ISAS if isa in ("avx2", "avx512")]
"""Instruction sets with one numerics contract."""


@contextmanager
def using(isa: str, threads: int = 1) -> Iterator[NativeOperations]:
    """Operations of one instruction set; the previous settings come back afterwards."""
    before = library.isa(), library.num_threads()
    library.set_isa(isa)
    library.set_num_threads(threads)
    try:
        yield NativeOperations(library)
    finally:
        library.set_isa(before[0])
        library.set_num_threads(before[1])


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def shifted(x: torch.Tensor, by: int = 1) -> torch.Tensor:
    """The same values in memory that starts `by` elements behind an aligned address."""
    buffer = torch.full((x.numel() + by + 32,), NAN, dtype=x.dtype)
    buffer[by : by + x.numel()] = x.flatten()
    return buffer[by : by + x.numel()].view(x.shape)


def strided(x: torch.Tensor, extra: int = 5) -> torch.Tensor:
    """The same rows in memory with NaN between them."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + extra), NAN, dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bitwise, so that -0 is not +0 and a NaN equals itself."""
    integer = torch.int32 if left.dtype == torch.float32 else torch.int16
    return left.dtype == right.dtype and torch.equal(
        left.contiguous().view(integer), right.contiguous().view(integer)
    )


def assert_rows_stand_alone(isa: str, x: torch.Tensor, make: Callable[[], Product]) -> None:
    """Every row of x [97, in] has the same bits in any company: cuts, order, strides, odd addresses,
    neighbours that are not finite, threads.

    Args:
        make: the product, packed under the instruction set.
    """
    with using(isa):
        product = make()
        alone = torch.cat([product(x[row : row + 1].clone()) for row in range(97)])
        for first, end in ((0, 97), (0, 2), (1, 13), (5, 18), (40, 97), (3, 6)):
            assert same_bits(product(x[first:end].clone()), alone[first:end])
        assert same_bits(product(x.flip(0)).flip(0), alone)
        assert same_bits(product(strided(x)), alone)
        assert same_bits(product(shifted(x)), alone)
        broken = x.clone()
        broken[::2] = NAN
        result = product(broken)
        assert same_bits(result[1::2], alone[1::2])
        assert torch.isnan(result[::2].float()).all()
    with using(isa, threads=2):
        assert same_bits(product(x), alone)
