"""The native KDA mixer: the reference's numbers, and bits that no cut, export or neighbour changes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from tests.kernels.helpers import assert_close, recurrent_index
from tests.kernels.native_support import DTYPES, FUSED, ISAS, NAN, library, randn, same_bits, strided, using

from milepost.kernels import reference_layers
from milepost.kernels.arguments import KdaInputs, KdaParams
from milepost.kernels.index import RecurrentIndex

NUM_SLOTS = 12


@dataclass
class Layer:
    """Inputs for `rows` rows and pools full of NaN."""

    inputs: KdaInputs
    params: KdaParams
    tails: torch.Tensor
    states: torch.Tensor

    def copy(self) -> Layer:
        return replace(self, tails=self.tails.clone(), states=self.states.clone())

    def between(self, first: int, end: int) -> KdaInputs:
        return KdaInputs(*(x[first:end] for x in self.inputs))


def make(
    rows: int,
    dtype: torch.dtype = torch.float32,
    *,
    heads: int = 2,
    dim: int = 16,
    taps: int = 4,
    lower_bound: float | None = None,
    gate_scale: float = 2.0,
) -> Layer:
    width = heads * dim
    inputs = KdaInputs(
        strided(randn(rows, 3 * width, seed=1, dtype=dtype)),
        randn(rows, width, seed=2, dtype=dtype) * gate_scale,
        strided(randn(rows, heads, seed=3, dtype=dtype)),
        randn(rows, width, seed=4, dtype=dtype),
    )
    params = KdaParams(
        heads,
        dim,
        randn(taps, 3 * width, seed=5) * 0.5,
        randn(heads, seed=6),
        randn(width, seed=7) - 2.0,
        1.0 + 0.1 * randn(dim, seed=8),
        1e-5,
        lower_bound,
    )
    tails = torch.full((NUM_SLOTS, taps - 1, 3 * width), NAN, dtype=dtype)
    return Layer(inputs, params, tails, torch.full((NUM_SLOTS, heads, dim, dim), NAN))


def native(layer: Layer, index: RecurrentIndex, inputs: KdaInputs | None = None) -> torch.Tensor:
    from milepost.kernels.native import NativeOperations

    operations = NativeOperations(library)
    rows = inputs or layer.inputs
    return operations.kda_mixer(rows, layer.params, layer.tails, layer.states, index)


def reference(layer: Layer, index: RecurrentIndex) -> torch.Tensor:
    return reference_layers.kda_mixer(layer.inputs, layer.params, layer.tails, layer.states, index)


def assert_same(left: Layer, right: Layer, slots: list[int]) -> None:
    for slot in slots:
        assert same_bits(left.states[slot], right.states[slot]), slot
        assert same_bits(left.tails[slot], right.tails[slot]), slot


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [5, 16, 20, 48, 64, 80, 128])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_close_to_the_reference(isa: str, dtype: torch.dtype, dim: int, lower_bound: float | None) -> None:
    """Ragged sequences of 1, 2, 65 and 70 tokens, from zeros and from slots, with exports everywhere."""
    lengths = [1, 70, 2, 65]
    layer = make(sum(lengths), dtype, dim=dim, lower_bound=lower_bound)
    for slot in (0, 1):
        layer.tails[slot] = randn(*layer.tails.shape[1:], seed=slot + 20, dtype=dtype)
        layer.states[slot] = 0.3 * randn(*layer.states.shape[1:], seed=slot + 30)
    exports = [(0, 1, 6), (1, 1, 7), (1, 64, 8), (1, 69, 9), (3, 65, 10)]
    index = recurrent_index(lengths, [9, 0, 40, 0], [0, -1, 1, -1], [0, 3, 4, 5], exports)
    expected = layer.copy()
    out = reference(expected, index)
    with using(isa):
        assert_close(native(layer, index), out, 2e-5 if dtype == torch.float32 else 2**-7)
    for slot in (0, 3, 4, 5, 6, 7, 8, 9, 10):
        assert same_bits(layer.tails[slot], expected.tails[slot]), slot
        assert_close(layer.states[slot], expected.states[slot], 2e-5)
    assert torch.isnan(layer.states[2]).all() and torch.isnan(layer.states[11]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [20, 64])
@pytest.mark.parametrize("taps", [2, 4])
def test_no_cut_changes_a_bit(isa: str, dtype: torch.dtype, dim: int, taps: int) -> None:
    rows = 150
    layer = make(rows, dtype, dim=dim, taps=taps)
    whole = layer.copy()
    positions = [1, 2, 3, 63, 64, 65, 128, 150]
    exports = [(0, position, number + 1) for number, position in enumerate(positions)]
    with using(isa):
        index = recurrent_index([rows], [0], [-1], [0], exports, tail_rows=taps - 1)
        expected = native(whole, index).clone()
        # Stopping at an exported position leaves the exported state behind.
        for number, position in enumerate(positions):
            stopped = layer.copy()
            index = recurrent_index([position], [0], [-1], [0], tail_rows=taps - 1)
            native(stopped, index, layer.between(0, position))
            assert same_bits(stopped.states[0], whole.states[number + 1])
            assert same_bits(stopped.tails[0], whole.tails[number + 1])
        # Going on from any of them, in pieces of any size, gives the rest.
        for number, position in enumerate(positions[:-1]):
            for piece in (1, 37, rows):
                resumed = whole.copy()
                source, parts = number + 1, []
                for first in range(position, rows, piece):
                    end = min(first + piece, rows)
                    index = recurrent_index([end - first], [first], [source], [0], tail_rows=taps - 1)
                    parts.append(native(resumed, index, layer.between(first, end)).clone())
                    source = 0
                    if piece == 1 and first > position + 8:
                        break
                done = position + sum(part.shape[0] for part in parts)
                assert same_bits(torch.cat(parts), expected[position:done])
                if done == rows:
                    assert_same(resumed, whole, [0])


@pytest.mark.parametrize("isa", ISAS)
def test_neighbours_and_threads_change_no_bit(isa: str) -> None:
    lengths = [3, 40, 1, 70, 1]
    layer = make(sum(lengths), torch.bfloat16, dim=32)
    layer.tails[:5] = randn(5, *layer.tails.shape[1:], seed=9, dtype=torch.bfloat16)
    layer.states[:5] = randn(5, *layer.states.shape[1:], seed=10)
    first = 0
    with using(isa):
        packed = layer.copy()
        index = recurrent_index(lengths, [4] * 5, [0, 1, 2, 3, 4], [5, 6, 2, 3, 7])
        together = native(packed, index).clone()
        for number, length in enumerate(lengths):
            alone = layer.copy()
            index = recurrent_index([length], [4], [number], [[5, 6, 2, 3, 7][number]])
            out = native(alone, index, layer.between(first, first + length))
            assert same_bits(out, together[first : first + length])
            assert_same(alone, packed, [[5, 6, 2, 3, 7][number]])
            first += length
    with using(isa, threads=2):
        again = layer.copy()
        index = recurrent_index(lengths, [4] * 5, [0, 1, 2, 3, 4], [5, 6, 2, 3, 7])
        assert same_bits(native(again, index), together)
        assert_same(again, packed, [2, 3, 5, 6, 7])


@pytest.mark.parametrize("lengths", [(2, 30), (1, 1)])
def test_initial_records_are_read_before_any_is_written(lengths: tuple[int, int]) -> None:
    """Two sequences swap slots, and each exports into what it or the other started from."""
    layer = make(sum(lengths), dim=16)
    layer.tails[:2] = randn(2, *layer.tails.shape[1:], seed=9)
    layer.states[:2] = randn(2, *layer.states.shape[1:], seed=10)
    for running, exports in (
        ([1, 0], []),
        ([2, 3], [(0, 1, 0), (1, 1, 1)]),
        ([2, 3], [(0, 1, 1), (1, 1, 0)]),
    ):
        index = recurrent_index(lengths, [5, 9], [0, 1], running, exports)
        expected, ours = layer.copy(), layer.copy()
        assert_close(native(ours, index), reference(expected, index), 2e-5)
        for slot in (0, 1, *running):
            assert_close(ours.states[slot], expected.states[slot], 2e-5)
            assert same_bits(ours.tails[slot], expected.tails[slot])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("extreme", [-1e4, -90.0, 90.0, 1e4])
def test_gates_at_their_extremes(isa: str, lower_bound: float | None, extreme: float) -> None:
    """Decays of exactly 0 and exactly 1: finite, and equal to the reference."""
    layer = make(40, dim=16, lower_bound=lower_bound)
    layer = replace(layer, inputs=layer.inputs._replace(decay=torch.full((40, 32), extreme)))
    expected = layer.copy()
    index = recurrent_index([40], [0], [-1], [0])
    with using(isa):
        out = native(layer, index)
        assert torch.isfinite(out).all() and torch.isfinite(layer.states[0]).all()
        assert_close(out, reference(expected, index), 1e-4)
        assert_close(layer.states[0], expected.states[0], 1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_instruction_sets_agree(dtype: torch.dtype) -> None:
    results = []
    for isa in FUSED:
        layer = make(70, dtype, dim=80)
        with using(isa):
            results.append((native(layer, recurrent_index([70], [0], [-1], [0])).clone(), layer))
    for out, layer in results:
        assert same_bits(out, results[0][0])
        assert_same(layer, results[0][1], [0])


def test_plan_errors() -> None:
    spans = [(0, 3, 0), (3, 4, 9)]
    for arguments, match in [
        (([(0, 3, 0), (4, 5, 0)], [-1, -1], [0, 1], []), "spans: must follow each other"),
        (([(0, 0, 0)], [-1], [0], []), "spans: must follow each other"),
        ((spans, [-1], [0, 1], []), "initial_slots: must be one per span"),
        ((spans, [-1, -1], [0], []), "running_slots: must be one per span"),
        ((spans, [-1, -1], [0, 0], []), "slot 0 is written twice"),
        ((spans, [-1, -1], [0, 1], [(0, 1, 1)]), "slot 1 is written twice"),
        ((spans, [-1, -1], [0, -2], []), "a written slot is negative"),
        ((spans, [-1, -1], [0, 1], [(0, 4, 2)]), "exports: offsets must ascend"),
        ((spans, [-1, -1], [0, 1], [(0, 2, 2), (0, 2, 3)]), "exports: offsets must ascend"),
        ((spans, [-1, -1], [0, 1], [(1, 1, 2), (0, 2, 3)]), "exports: must ascend by sequence"),
    ]:
        with pytest.raises(ValueError, match=match):
            library.RecurrentPlan(*arguments)
    layer = make(4, dim=16)
    with pytest.raises(ValueError, match="plan: slot 12 is outside of 12 slots"):
        native(layer, recurrent_index([4], [0], [-1], [12]))
    with pytest.raises(ValueError, match=r"raw: must have shape \[4, 96\], not \[3, 96\]"):
        native(layer, recurrent_index([4], [0], [-1], [0]), layer.between(0, 3))
