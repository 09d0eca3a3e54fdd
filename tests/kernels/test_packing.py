"""Packed weights hold the bits they should, however they come: one tensor or several, one thread or two."""

from __future__ import annotations

import gc
from typing import NoReturn

import pytest
import torch
from tests.kernels.native_support import DTYPES, ISAS, NAN, library, randn, same_bits, shifted, strided, using

from milepost.kernels import reference_layers
from milepost.kernels.native import NativeOperations
from milepost.kernels.native_library import native_library, packing_threads
from milepost.kernels.reference_coded import Matrix, stacked
from milepost.kernels.stored import StoredMatrix, StoredPart, is_finite

if not native_library().packs_parts:
    pytest.skip("the native library is older than packing of stored parts", allow_module_level=True)

PANEL, HALF = 32, 16
SHAPES = [(1, 1), (32, 32), (64, 16), (66, 70), (130, 131), (96, 129), (258, 48)]
"""(out, in): single, whole and short panels, odd and even inputs, with and without whole blocks of 16."""


def packed_bytes(weight: torch.Tensor, paired: bool = False) -> bytes:
    """What `native/src/common/types.h` says about panels, spelled out."""
    rows, width = weight.shape
    if paired:
        gate, up = weight[: rows // 2], weight[rows // 2 :]
        missing = -gate.shape[0] % HALF
        gate, up = (torch.cat([part, part.new_zeros(missing, width)]) for part in (gate, up))
        columns = torch.stack([gate.view(-1, HALF, width), up.view(-1, HALF, width)], dim=1).reshape(
            -1, width
        )
    else:
        columns = torch.cat([weight, weight.new_zeros(-rows % PANEL, width)])
    columns = torch.cat([columns, columns.new_zeros(columns.shape[0], width % 2)], dim=1)
    panels = columns.view(-1, PANEL, columns.shape[1]).transpose(1, 2)
    if weight.dtype == torch.bfloat16:
        panels = panels.reshape(panels.shape[0], -1, 2, PANEL).transpose(2, 3)
    return panels.contiguous().view(torch.uint8).numpy().tobytes()


def cut(weight: torch.Tensor, *sizes: int) -> list[torch.Tensor]:
    return list(weight.split([*sizes, weight.shape[0] - sum(sizes)]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("paired", [False, True])
def test_packed_bits(isa: str, dtype: torch.dtype, paired: bool) -> None:
    with using(isa):
        for out, width in SHAPES:
            weight = randn(2 * out if paired else out, width, seed=out, dtype=dtype)
            expected = packed_bytes(weight, paired)
            for form in (weight, strided(weight), shifted(weight), weight.t().contiguous().t()):
                assert library.pack(form, paired=paired).tobytes() == expected
            for parts in ([weight], cut(weight, 1), cut(strided(weight), weight.shape[0] // 2)):
                for threads in (1, 2, 5):
                    packed = library.pack_parts([part for part in parts if len(part)], paired, threads)
                    assert packed.tobytes() == expected and packed.first_not_finite == -1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_a_large_weight(dtype: torch.dtype, threads: int) -> None:
    weight = randn(4500, 1024, dtype=dtype)
    packed = library.pack_parts(cut(weight, 7, 2000, 1000), False, threads)
    assert packed.tobytes() == packed_bytes(weight)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("paired", [False, True])
def test_the_first_part_that_is_not_finite_is_named(isa: str, dtype: torch.dtype, paired: bool) -> None:
    """Wherever the value stands, in whole panels and in short ones; huge values are finite."""
    sizes = (40, 1, 33, 26)
    with using(isa):
        for width in (48, 49):
            weight = randn(sum(sizes), width, dtype=dtype)
            weight[5, 3], weight[97, 0] = torch.finfo(dtype).max, -torch.finfo(dtype).max
            parts = cut(weight, *sizes[:-1])
            assert library.pack_parts(parts, paired).first_not_finite == -1
            row = 0
            for number, part in enumerate(parts):
                for value in (NAN, -NAN, float("inf"), -float("inf")):
                    for place in ((0, 0), (len(part) - 1, width - 1), (len(part) // 2, width // 2)):
                        kept = part[place].clone()
                        part[place] = value
                        parts[-1][25, 2] = NAN
                        assert library.pack_parts(parts, paired, 2).first_not_finite == number
                        part[place] = kept
                        parts[-1][25, 2] = 0.0
                row += len(part)


def test_errors_name_the_argument() -> None:
    weight = randn(8, 4)
    for arguments, error, match in [
        (([],), ValueError, "parts: must not be empty"),
        (([weight, randn(8, 5)],), ValueError, r"parts: must have shape \[any, 4\]"),
        (([weight, weight.bfloat16()],), TypeError, "parts: dtype must be float32"),
        (([weight.long()],), TypeError, "parts: dtype must be"),
        (([weight.t().contiguous().t()],), ValueError, "parts: must be contiguous"),
        (([weight[:0]],), ValueError, "weight: must not be empty"),
        (([weight[:3]], True), ValueError, "same number of rows"),
        (([weight], False, 0), ValueError, "threads: must lie in"),
    ]:
        with pytest.raises(error, match=match):
            library.pack_parts(*arguments)


def test_weights_keep_their_memory_while_others_come_and_go() -> None:
    """They lie one behind the other in memory that is used again once all of them are gone."""
    kept = []
    for number in range(60):
        size = (1 << (number % 10)) + 1
        weight = randn(size, 300, seed=number, dtype=torch.bfloat16)
        packed = library.pack_parts([weight])
        if number % 3 == 0:
            kept.append((packed, packed_bytes(weight)))
    del packed
    gc.collect()
    large = library.pack_parts([torch.zeros(40_000, 1024)])
    assert all(packed.tobytes() == expected for packed, expected in kept)
    kept.clear()
    weight = randn(300, 200)
    assert library.pack_parts([weight]).tobytes() == packed_bytes(weight)
    assert not any(large.tobytes())


class Refused(Exception):
    pass


def refuse() -> NoReturn:
    raise Refused


def stored(*parts: torch.Tensor, checks: bool = True) -> StoredMatrix:
    return StoredMatrix(tuple(StoredPart(part, refuse if checks else None) for part in parts))


@pytest.mark.parametrize("kind", ["native", "an older native library", "reference"])
def test_operations_look_at_stored_weights_while_they_pack(kind: str) -> None:
    class Old:
        """What a library had before it packed parts."""

        API_REVISION = 2
        pack, linear, PackedWeight = library.pack, library.linear, library.PackedWeight
        Experts = library.Experts

    ops = {
        "native": NativeOperations(library),
        "an older native library": NativeOperations(Old),  # type: ignore[arg-type]
        "reference": reference_layers,
    }[kind]
    parts = cut(randn(12, 6, seed=1), 4, 5)
    x, joined = randn(3, 6, seed=2), torch.cat(parts)
    native = NativeOperations(library)

    def product(weight: Matrix) -> torch.Tensor:
        return ops.linear(x, ops.pack_linear(weight, parts=(9, 3)))

    def inner(weight: Matrix) -> torch.Tensor:
        return ops.linear_swiglu(x, ops.pack_swiglu(weight))

    assert same_bits(product(stored(*parts)), product(joined))
    assert same_bits(inner(stored(*parts)), inner(joined))
    assert native._threads == packing_threads() >= 1
    one = stored(randn(4, 6))
    ops.pack_experts([(one, one, stored(randn(6, 4)))])
    parts[2][1, 1] = NAN
    for pack in (product, inner, lambda w: ops.pack_experts([(one, one, w)])):
        with pytest.raises(Refused):
            pack(stored(*parts))
    assert product(stored(*parts, checks=False)).isnan().any()


def test_stored_matrices() -> None:
    parts = cut(randn(7, 5, dtype=torch.bfloat16), 2)
    matrix = stored(*parts)
    assert matrix.shape == (7, 5) and matrix.dtype == torch.bfloat16
    assert stored(parts[0]).joined().data_ptr() == parts[0].data_ptr(), "nothing is copied"
    both = stacked([matrix, stored(parts[0])])
    assert isinstance(both, StoredMatrix) and both.shape == (9, 5)
    assert same_bits(both.joined(), torch.cat([*parts, parts[0]]))
    part = StoredPart(torch.full((2, 3, 4), NAN), refuse)
    with pytest.raises(Refused):
        part[1][:2].checked()
    assert StoredPart(torch.full((2, 3), NAN)).checked().isnan().all()
    assert not is_finite(part.tensor) and is_finite(parts[0])
