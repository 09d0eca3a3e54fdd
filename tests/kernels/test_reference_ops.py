"""Every other operation against a naive loop written here."""

from __future__ import annotations

import math

import pytest
import torch
from tests.kernels.helpers import assert_close, attention_index, recurrent_index

from milepost.errors import ConfigError
from milepost.kernels import reference as ops
from milepost.kernels.api import OPERATIONS, REFERENCE, select_kernels

DTYPES = [torch.float32, torch.bfloat16]
NAN = float("nan")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tolerance(dtype: torch.dtype) -> float:
    return 1e-6 if dtype == torch.float32 else 2**-8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_rms_norm(dtype: torch.dtype, rows: int) -> None:
    x, weight = randn(rows, 24).to(dtype), randn(24, seed=1)
    expected = torch.stack(
        [row.double() / math.sqrt(sum(v * v for v in row.double().tolist()) / 24 + 1e-5) for row in x]
    ) * weight if rows else torch.zeros(0, 24)  # fmt: skip
    result = ops.rms_norm(x, weight, 1e-5)
    assert result.dtype == dtype
    assert_close(result, expected, tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_rms_norm_norms_then_weighs_then_gates(dtype: torch.dtype) -> None:
    x, gate, weight = randn(4, 3, 8) * 5, randn(4, 3, 8, seed=1).to(dtype), randn(8, seed=2)
    expected = torch.empty(4, 3, 8)
    for t in range(4):
        for head in range(3):
            mean_square = sum(float(v) ** 2 for v in x[t, head]) / 8
            for c in range(8):
                normed = float(x[t, head, c]) / math.sqrt(mean_square + 1e-5) * float(weight[c])
                expected[t, head, c] = normed / (1 + math.exp(-float(gate[t, head, c])))
    result = ops.gated_rms_norm(x, gate, weight, 1e-5)
    assert result.dtype == dtype
    assert_close(result, expected, tolerance(dtype))


def test_l2_norm_has_eps_inside_of_the_root() -> None:
    x = randn(3, 2, 5)
    x[0, 0] = 0.0
    x[1, 1] = 1e-4
    expected = torch.stack(
        [
            torch.stack([head / math.sqrt(float((head.double() ** 2).sum()) + 1e-6) for head in row])
            for row in x
        ]
    )
    assert_close(ops.l2_norm(x), expected, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype: torch.dtype) -> None:
    x = (randn(3, 14) * 3).to(dtype)
    expected = torch.empty(3, 7)
    for t in range(3):
        for c in range(7):
            gate, up = float(x[t, c]), float(x[t, 7 + c])
            expected[t, c] = gate / (1 + math.exp(-gate)) * up
    assert_close(ops.swiglu(x), expected, tolerance(dtype))


@pytest.mark.parametrize("lower_bound", [None, -5.0, -2.0])
def test_kda_gate(lower_bound: float | None) -> None:
    raw, decay_log, dt_bias = randn(4, 2, 3) * 4, randn(2, seed=1), randn(2, 3, seed=2)
    raw[0, 0] = torch.tensor([90.0, -90.0, 25.0])
    result = ops.kda_gate(raw, decay_log, dt_bias, lower_bound)
    for t in range(4):
        for head in range(2):
            for c in range(3):
                z = float(raw[t, head, c]) + float(dt_bias[head, c])
                rate = math.exp(float(decay_log[head]))
                if lower_bound is None:
                    expected = -rate * (math.log1p(math.exp(-abs(z))) + max(z, 0.0))
                else:
                    expected = lower_bound / (1 + math.exp(-rate * z))
                assert float(result[t, head, c]) == pytest.approx(expected, rel=2e-6, abs=1e-30)
    assert bool((result <= 0).all())
    if lower_bound is not None:
        assert bool((result >= lower_bound).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [2, 4])
def test_short_conv_carries_its_tail(dtype: torch.dtype, taps: int) -> None:
    """Ragged sequences, shorter and longer than the tail; exports; in place, out of place and zeros."""
    channels, lengths = 5, [1, 2, 9, 3]
    weight = randn(channels, taps, seed=1)
    tails = torch.full((10, taps - 1, channels), NAN, dtype=dtype)
    tails[2], tails[3] = (
        randn(taps - 1, channels, seed=2).to(dtype),
        randn(taps - 1, channels, seed=3).to(dtype),
    )
    before = [
        tails[2].clone(),
        tails[3].clone(),
        torch.zeros(taps - 1, channels, dtype=dtype),
        tails[2].clone(),
    ]
    raw = randn(sum(lengths), channels, seed=4).to(dtype)
    index = recurrent_index(
        lengths, [7, 0, 0, 40], [2, 3, -1, 2], [4, 3, 5, 6],
        exports=[(0, 1, 7), (2, 1, 8), (2, 6, 9)], tail_rows=taps - 1,
    )  # fmt: skip
    result = ops.short_conv(raw, weight, tails, index)
    assert result.dtype == torch.float32
    expected_exports = {(0, 1): 7, (2, 1): 8, (2, 6): 9}
    for number, span in enumerate(index.spans):
        history = torch.cat([before[number], raw[span.first_row : span.end_row]])
        for t in range(span.length):
            window = history[t : t + taps].double()
            for c in range(channels):
                total = sum(float(weight[c, j]) * float(window[j, c]) for j in range(taps))
                expected = total / (1 + math.exp(-total))
                assert float(result[span.first_row + t, c]) == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert torch.equal(tails[[4, 3, 5, 6][number]], history[span.length :][: taps - 1])
        for (sequence, offset), slot in expected_exports.items():
            if sequence == number:
                assert torch.equal(tails[slot], history[offset : offset + taps - 1])
    assert torch.isnan(tails[[0, 1]].float()).all()


def expanded_attention(query, keys, values, key_up, value_up, position, scale):  # type: ignore[no-untyped-def]
    """Keys and values expanded per head, causal, in float64: the textbook form of MLA for one row."""
    heads = query.shape[0]
    out = torch.empty(heads, value_up.shape[2], dtype=torch.float64)
    latents = values[: position + 1].double()
    for head in range(heads):
        scores = latents @ key_up[head].double().T @ query[head, : key_up.shape[1]].double()
        scores += keys[: position + 1].double() @ query[head, key_up.shape[1] :].double()
        weights = torch.softmax(scores * scale, dim=0)
        out[head] = weights @ (latents @ value_up[head].double())
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("max_scores", [1, 200, 1 << 22])
def test_absorbed_attention_equals_expanded(dtype, max_scores: int, monkeypatch) -> None:
    """Shuffled pages, NaN everywhere else, ragged lengths, any blocking of the queries."""
    monkeypatch.setattr(ops, "MAX_SCORES", max_scores)
    heads, nope, rope, latent, value, unit = 3, 6, 4, 10, 7, 16
    lengths, positions = [1, 17, 5], [20, 0, 31]
    tables = [[4, 1], [0, 6], [2, 5, 7]]
    pages = torch.full((9, unit, latent + rope), NAN, dtype=dtype)
    contents = []
    for length, position, table in zip(lengths, positions, tables, strict=True):
        rows = randn(length + position, latent + rope, seed=position).to(dtype)
        contents.append(rows)
        for at in range(position):
            pages[table[at // unit], at % unit] = rows[at]
    index = attention_index(lengths, positions, tables, unit)
    new_rows = torch.cat([rows[position:] for rows, position in zip(contents, positions, strict=True)])
    ops.store_rows(pages, new_rows, index)
    query = randn(sum(lengths), heads, nope + rope, seed=9)
    key_up, value_up = randn(heads, nope, latent, seed=10), randn(heads, latent, value, seed=11)
    scale = (nope + rope) ** -0.5
    absorbed = torch.cat([ops.per_head_linear(query[..., :nope], key_up), query[..., nope:]], dim=-1)
    mixed = ops.latent_attention(absorbed, pages, index, value_width=latent, scale=scale)
    result = ops.per_head_linear(mixed, value_up)
    for span, rows in zip(index.spans, contents, strict=True):
        for row in range(span.first_row, span.end_row):
            position = span.position + row - span.first_row
            expected = expanded_attention(
                query[row], rows[:, latent:], rows[:, :latent], key_up, value_up, position, scale
            )
            assert_close(result[row], expected, 2e-6)


def test_stored_rows_are_rounded_once() -> None:
    pages = torch.zeros(2, 16, 4, dtype=torch.bfloat16)
    rows = randn(1, 4)
    ops.store_rows(pages, rows, attention_index([1], [17], [[1, 0]], 16))
    assert torch.equal(pages[0, 1], rows[0].bfloat16())
    assert float(pages.float().abs().sum()) == float(pages[0, 1].float().abs().sum())


@pytest.mark.parametrize("renormalize", [True, False])
def test_route(renormalize: bool) -> None:
    """The bias changes who is chosen, never the weights; ids come in ascending order."""
    logits, bias = randn(6, 8), randn(8, seed=1)
    ids, weights = ops.route(logits, bias, 3, renormalize=renormalize, scaling_factor=2.5)
    for t in range(6):
        scores = [1 / (1 + math.exp(-float(x))) for x in logits[t]]
        chosen = sorted(sorted(range(8), key=lambda e: -(scores[e] + float(bias[e])))[:3])
        assert ids[t].tolist() == chosen
        total = sum(scores[e] for e in chosen) if renormalize else 1.0
        for place, expert in enumerate(chosen):
            assert float(weights[t, place]) == pytest.approx(scores[expert] / total * 2.5, rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_routed_experts(dtype: torch.dtype) -> None:
    """Some experts get no row, one gets all; each token's sum is its own."""
    hidden, inner, count = 6, 5, 7
    experts = [
        (randn(inner, hidden, seed=3 * e).to(dtype), randn(inner, hidden, seed=3 * e + 1).to(dtype),
         randn(hidden, inner, seed=3 * e + 2).to(dtype))
        for e in range(5)
    ]  # fmt: skip
    x = randn(count, hidden, seed=50).to(dtype)
    ids = torch.tensor([[0, 2], [0, 4], [0, 2], [0, 1], [0, 2], [0, 4], [0, 2]])
    weights = torch.rand(count, 2, generator=torch.Generator().manual_seed(5))
    result = ops.routed_experts(x, ids, weights, experts)
    assert result.dtype == torch.float32
    for t in range(count):
        expected = torch.zeros(hidden, dtype=torch.float64)
        for place in range(2):
            gate, up, down = (w.double() for w in experts[int(ids[t, place])])
            row = x[t].double()
            expected += float(weights[t, place]) * (
                down @ (torch.nn.functional.silu(gate @ row) * (up @ row))
            )
        assert_close(result[t], expected, 1e-5 if dtype == torch.float32 else 2e-2)
        alone = ops.routed_experts(x[t : t + 1], ids[t : t + 1], weights[t : t + 1], experts)
        assert_close(alone[0], result[t], 1e-6 if dtype == torch.float32 else 2e-2)


def test_a_nan_row_stays_in_its_row() -> None:
    experts = [(randn(4, 6, seed=e), randn(4, 6, seed=e + 9), randn(6, 4, seed=e + 20)) for e in range(3)]
    x = randn(5, 6)
    ids, weights = torch.tensor([[0, 1]] * 5), torch.full((5, 2), 0.5)
    clean = ops.routed_experts(x, ids, weights, experts)
    x[2] = NAN
    broken = ops.routed_experts(x, ids, weights, experts)
    others = [0, 1, 3, 4]
    assert torch.equal(broken[others], clean[others])
    assert torch.isnan(broken[2]).all()


def test_api_says_what_serves_each_operation_and_why() -> None:
    for kernels in (select_kernels(), select_kernels(REFERENCE)):
        assert [choice.operation for choice in kernels.choices] == list(OPERATIONS)
        for choice in kernels.choices:
            assert callable(getattr(kernels, choice.operation))
            assert choice.reason
        assert kernels.numerics.startswith("torch-" if kernels.implementation == REFERENCE else "milepost-")
    assert {choice.implementation for choice in select_kernels(REFERENCE).choices} == {REFERENCE}
    with pytest.raises(ConfigError, match="kernels"):
        select_kernels("nonsense")
