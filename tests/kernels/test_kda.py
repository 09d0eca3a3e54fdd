"""The KDA recurrence in all its forms against a loop in float64 written here."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.helpers import assert_close, recurrent_index

from milepost.kernels.reference_kda import (
    MAX_RECURRENT_TOKENS,
    TILE,
    KdaRows,
    kda,
    kda_chunk,
    kda_recurrent,
    kda_sequence,
)

HEADS, KEY_DIM, VALUE_DIM = 2, 12, 20
FP32 = 3e-6


def random_rows(count: int, seed: int = 0, gate_scale: float = 1.0) -> KdaRows:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    k = draw(count, HEADS, KEY_DIM)
    q = draw(count, HEADS, KEY_DIM)
    return KdaRows(
        q=q / q.norm(dim=-1, keepdim=True) * KEY_DIM**-0.5,
        k=k / k.norm(dim=-1, keepdim=True),
        v=draw(count, HEADS, VALUE_DIM),
        g=-torch.nn.functional.softplus(draw(count, HEADS, KEY_DIM)) * gate_scale,
        beta=torch.sigmoid(draw(count, HEADS)),
    )


def random_state(seed: int = 1) -> torch.Tensor:
    return torch.randn(HEADS, KEY_DIM, VALUE_DIM, generator=torch.Generator().manual_seed(seed)) * 0.3


def loop(rows: KdaRows, initial: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs, and the state after each number of rows, straight from the definition, in float64."""
    q, k, v, g, beta = (x.double() for x in rows)
    state = initial.double().clone()
    outputs, states = [], [state.clone()]
    for t in range(q.shape[0]):
        for head in range(HEADS):
            decayed = torch.exp(g[t, head])[:, None] * state[head]
            error = v[t, head] - decayed.T @ k[t, head]
            state[head] = decayed + beta[t, head] * torch.outer(k[t, head], error)
        outputs.append(torch.stack([state[head].T @ q[t, head] for head in range(HEADS)]))
        states.append(state.clone())
    return torch.stack(outputs), states


@pytest.mark.parametrize("form", [kda_chunk, kda_sequence, None], ids=["chunk", "chosen", "recurrent"])
@pytest.mark.parametrize("position", [0, 1, 15, 16, 37])
@pytest.mark.parametrize("count", [1, 2, 4, 5, 15, 16, 17, 33, 70])
def test_forms_match_the_definition(form, position: int, count: int) -> None:
    rows, initial = random_rows(count, seed=count), random_state()
    untouched = initial.clone()
    expected, states = loop(rows, initial)
    offsets = sorted({1, count // 2 or 1, count})
    if form is None:
        out, final, exported = kda_recurrent(rows, initial, export_offsets=offsets)
    else:
        out, final, exported = form(rows, initial, position=position, export_offsets=offsets)
    assert_close(out, expected, FP32)
    assert_close(final, states[count], FP32)
    for offset, state in zip(offsets, exported, strict=True):
        assert_close(state, states[offset], FP32)
    assert torch.equal(initial, untouched)


def test_more_than_one_segment() -> None:
    count = 16 * TILE + 40
    rows, initial = random_rows(count, gate_scale=0.05), random_state()
    expected, states = loop(rows, initial)
    offsets = [1, 16 * TILE - 3, 16 * TILE, 16 * TILE + 1, count - 1]
    out, final, exported = kda_chunk(rows, initial, position=3, export_offsets=offsets)
    assert_close(out, expected, FP32)
    assert_close(final, states[-1], FP32)
    for offset, state in zip(offsets, exported, strict=True):
        assert_close(state, states[offset], FP32)


@given(
    count=st.integers(MAX_RECURRENT_TOKENS + 1, 60),
    position=st.integers(0, 100),
    cut=st.integers(1, 59),
    gate=st.sampled_from([0.001, 0.1, 1.0, 40.0, 1000.0]),
    seed=st.integers(0, 10),
)
def test_export_is_the_state_of_a_run_that_stops_there(
    count: int, position: int, cut: int, gate: float, seed: int
) -> None:
    cut = min(cut, count)
    rows, initial = random_rows(count, seed, gate), random_state(seed)
    _, _, [exported] = kda_chunk(rows, initial, position=position, export_offsets=[cut])
    _, stopped, _ = kda_chunk(rows.between(0, cut), initial, position=position)
    assert_close(exported, stopped, 1e-6)
    out, _, _ = kda_chunk(rows, initial, position=position)
    head, _, _ = kda_chunk(rows.between(0, cut), initial, position=position)
    assert_close(head, out[:cut], 1e-6)  # later rows do not change earlier ones
    rest, final = out[cut:], exported
    if cut < count:
        rest, final, _ = kda_chunk(rows.between(cut, count), exported, position=position + cut)
    whole, states = loop(rows, initial)
    assert_close(rest, whole[cut:], 1e-5)
    assert_close(final, states[-1], 1e-5)


@pytest.mark.parametrize("position", [0, 5, 16, 43])
def test_tiles_lie_on_the_absolute_grid(position: int) -> None:
    """Cut at a multiple of 16 and resumed, the same tiles are computed: no bit changes."""
    count = 80
    rows, initial = random_rows(count, seed=position), random_state()
    whole, final, _ = kda_chunk(rows, initial, position=position)
    grid = (position // TILE + 2) * TILE - position
    head, state, _ = kda_chunk(rows.between(0, grid), initial, position=position)
    rest, end, _ = kda_chunk(rows.between(grid, count), state, position=position + grid)
    assert torch.equal(torch.cat([head, rest]), whole)
    assert torch.equal(end, final)


@pytest.mark.parametrize("gate", [40.0, 1e4, 1e30, float("inf")])
def test_strong_gates_are_exact_and_finite(gate: float) -> None:
    """Any sum of g underflows exp; none may overflow, and weak gates behind strong ones stay exact."""
    rows, initial = random_rows(40), random_state()
    g = rows.g * 0.01
    g[::5] = -gate
    g[7, :, ::2] = -gate
    rows = rows._replace(g=g)
    expected, states = loop(rows, initial)
    out, final, [exported] = kda_chunk(rows, initial, position=5, export_offsets=[23])
    assert_close(out, expected, 1e-5)
    assert_close(final, states[-1], 1e-5)
    assert_close(exported, states[23], 1e-5)


def test_no_decay_repeated_keys_and_full_beta() -> None:
    """A doubling inverse of (I + A) fails here; the triangular solve must not."""
    rows = random_rows(64)
    rows = rows._replace(k=rows.k[:1].expand(64, -1, -1).contiguous(), g=torch.zeros_like(rows.g))
    rows = rows._replace(beta=torch.ones_like(rows.beta))
    expected, states = loop(rows, random_state())
    out, final, _ = kda_chunk(rows, random_state(), position=0)
    assert_close(out, expected, 1e-5)
    assert_close(final, states[-1], 1e-5)


def test_packed_step_reads_before_it_writes_and_touches_nothing_else() -> None:
    lengths, positions = [1, 17, 1, 6], [9, 30, 0, 2]
    rows = random_rows(sum(lengths), seed=4)
    pool = torch.full((12, HEADS, KEY_DIM, VALUE_DIM), float("nan"))
    pool[3], pool[4] = random_state(3), random_state(4)
    # Sequence 0 reads slot 3 while sequence 1 writes it; sequence 2 starts at zero; 3 runs in place.
    index = recurrent_index(
        lengths,
        positions,
        initial_slots=[3, 4, -1, 4],
        running_slots=[7, 3, 8, 4],
        exports=[(0, 1, 9), (1, 5, 10), (1, 17, 11)],
    )
    initial = [random_state(3), random_state(4), torch.zeros_like(pool[0]), random_state(4)]
    out = kda(rows, pool, index)
    for number, span in enumerate(index.spans):
        expected, states = loop(rows.between(span.first_row, span.end_row), initial[number])
        assert_close(out[span.first_row : span.end_row], expected, FP32)
        assert_close(pool[[7, 3, 8, 4][number]], states[-1], FP32)
        if number == 0:
            assert_close(pool[9], states[1], FP32)
        if number == 1:
            assert_close(pool[10], states[5], FP32)
            assert torch.equal(pool[11], pool[3])
    for slot in (0, 1, 2, 5, 6):
        assert torch.isnan(pool[slot]).all()


def test_a_broken_sequence_does_not_reach_its_neighbours() -> None:
    lengths, positions = [1, 20, 1, 20], [4, 4, 4, 4]
    rows = random_rows(42, seed=5)
    pool = torch.stack([random_state(seed) for seed in range(8)])
    alone = pool.clone()
    index = recurrent_index(lengths, positions, [0, 1, 2, 3], [0, 1, 2, 3])
    clean = kda(rows, alone, index)
    broken_rows = KdaRows(*(x.clone() for x in rows))
    broken_rows.v[0] = float("nan")
    broken_rows.k[1:21] = float("nan")
    pool[0] = float("nan")
    out = kda(broken_rows, pool, index)
    assert torch.equal(out[21:], clean[21:])
    assert torch.equal(pool[2:4], alone[2:4])
