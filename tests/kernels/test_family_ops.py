"""Operations of the Qwen hybrids and of Kimi K3 against formulas written out in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.kernels.helpers import assert_close, attention_index, recurrent_index

from milepost.kernels.api import Kernels, select_kernels
from milepost.kernels.native_library import native_library
from milepost.kernels.reference_experts import GluActivation, expert_sum, softmax_route
from milepost.kernels.reference_gdn import GdnInputs, GdnParams
from milepost.kernels.reference_gqa import GqaInputs, GqaParams, inverse_frequencies
from milepost.kernels.reference_residuals import mix_sources
from milepost.kernels.rowwise import on_full_vectors

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAPS = 2, 4, 16, 12, 4
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
HEADS, KV_HEADS, HEAD_DIM, ROTARY_DIM, UNIT = 6, 2, 16, 4, 8


@pytest.fixture(params=["reference", "native"])
def kernels(request: Any) -> Kernels:
    if request.param == "native" and native_library().module is None:
        pytest.skip("no native kernels")
    return select_kernels(request.param)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------ Gated DeltaNet


def gdn_case(num_rows: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[GdnInputs, GdnParams]:
    inputs = GdnInputs(
        raw=randn(num_rows, CHANNELS, seed=seed).to(dtype),
        gate=randn(num_rows, VALUE_HEADS * VALUE_DIM, seed=seed + 1).to(dtype),
        beta=randn(num_rows, VALUE_HEADS, seed=seed + 2).to(dtype),
        decay=randn(num_rows, VALUE_HEADS, seed=seed + 3).to(dtype),
    )
    params = GdnParams(
        num_key_heads=KEY_HEADS,
        num_value_heads=VALUE_HEADS,
        key_dim=KEY_DIM,
        value_dim=VALUE_DIM,
        conv_taps=randn(TAPS, CHANNELS, seed=90) * 0.5,
        decay_log=randn(VALUE_HEADS, seed=91) * 0.5,
        dt_bias=randn(VALUE_HEADS, seed=92),
        norm_weight=randn(VALUE_DIM, seed=93) * 0.1 + 1.0,
        norm_eps=1e-6,
    )
    return inputs, params


def gdn_by_hand(
    inputs: GdnInputs, params: GdnParams, tail: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence, token by token and head by head."""
    state = state.double().clone()
    rows = torch.cat([tail, inputs.raw]).double()
    out = []
    for t in range(inputs.raw.shape[0]):
        y = (rows[t : t + TAPS] * params.conv_taps.double()).sum(0)
        y = y * torch.sigmoid(y)
        heads = []
        for head in range(VALUE_HEADS):
            key_head = head * KEY_HEADS // VALUE_HEADS
            q = y[key_head * KEY_DIM : (key_head + 1) * KEY_DIM]
            k = y[KEY_HEADS * KEY_DIM :][key_head * KEY_DIM : (key_head + 1) * KEY_DIM]
            v = y[2 * KEY_HEADS * KEY_DIM :][head * VALUE_DIM : (head + 1) * VALUE_DIM]
            q = q / (q.square().sum() + 1e-6).sqrt() / math.sqrt(KEY_DIM)
            k = k / (k.square().sum() + 1e-6).sqrt()
            pre = float(inputs.decay[t, head].double() + params.dt_bias[head])
            g = -math.exp(float(params.decay_log[head])) * math.log1p(math.exp(pre))
            beta = 1.0 / (1.0 + math.exp(-float(inputs.beta[t, head])))
            s = state[head] * math.exp(g)
            s = s + beta * torch.outer(k, v - s.t() @ k)
            state[head] = s
            o = s.t() @ q
            o = o / (o.square().mean() + params.norm_eps).sqrt() * params.norm_weight.double()
            z = inputs.gate[t, head * VALUE_DIM : (head + 1) * VALUE_DIM].double()
            heads.append(o * z * torch.sigmoid(z))
        out.append(torch.cat(heads))
    return torch.stack(out), state


@pytest.mark.parametrize("lengths", [[1, 1], [3, 40, 1], [100]])
def test_gdn_is_the_formula(kernels: Kernels, lengths: list[int]) -> None:
    inputs, params = gdn_case(sum(lengths), seed=1)
    slots = len(lengths) + 3
    states, tails = (
        randn(slots, VALUE_HEADS, KEY_DIM, VALUE_DIM, seed=2),
        randn(slots, TAPS - 1, CHANNELS, seed=3),
    )
    before = states.clone(), tails.clone()
    initial = [-1, *range(1, len(lengths))]
    offsets = sorted({1, lengths[-1]})
    exports = [(len(lengths) - 1, offset, len(lengths) + n) for n, offset in enumerate(offsets)]
    index = recurrent_index(lengths, [5] * len(lengths), initial, list(range(len(lengths))), exports)
    ours = kernels.gdn_mixer(inputs, params, tails, states, index)
    first = 0
    for number, length in enumerate(lengths):
        part = GdnInputs(*(x[first : first + length] for x in inputs))
        state, tail = (pool[initial[number]] for pool in before)
        if initial[number] < 0:
            state, tail = torch.zeros_like(state), torch.zeros_like(tail)
        expected, final = gdn_by_hand(part, params, tail, state)
        assert_close(ours[first : first + length], expected, 1e-5)
        assert_close(states[number], final, 1e-5)
        assert torch.equal(tails[number], torch.cat([tail, part.raw])[-(TAPS - 1) :])
        if number == len(lengths) - 1:
            stopped = GdnInputs(*(x[:1] for x in part))
            assert_close(states[len(lengths)], gdn_by_hand(stopped, params, tail, state)[1], 1e-5)
            assert torch.equal(states[exports[-1][2]], states[number])
            assert torch.equal(tails[len(lengths)], torch.cat([tail, part.raw])[1:TAPS])
        first += length


# ------------------------------------------------------------------ grouped-query attention


def gqa_case(num_rows: int, seed: int) -> tuple[GqaInputs, GqaParams]:
    inputs = GqaInputs(
        randn(num_rows, HEADS * 2 * HEAD_DIM, seed=seed),
        randn(num_rows, KV_HEADS * HEAD_DIM, seed=seed + 1),
        randn(num_rows, KV_HEADS * HEAD_DIM, seed=seed + 2),
    )
    params = GqaParams(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        query_norm=randn(HEAD_DIM, seed=80) * 0.1 + 1.0,
        key_norm=randn(HEAD_DIM, seed=81) * 0.1 + 1.0,
        norm_eps=1e-6,
        inverse_frequencies=inverse_frequencies(ROTARY_DIM, 10000.0),
    )
    return inputs, params


def rotated(x: torch.Tensor, weight: torch.Tensor, position: int) -> torch.Tensor:
    """Norm and rotation of one head, written out."""
    x = x.double() / (x.double().square().mean() + 1e-6).sqrt() * weight.double()
    half = ROTARY_DIM // 2
    for i in range(half):
        angle = position * 10000.0 ** (-2 * i / ROTARY_DIM)
        a, b = float(x[i]), float(x[half + i])
        x[i] = a * math.cos(angle) - b * math.sin(angle)
        x[half + i] = b * math.cos(angle) + a * math.sin(angle)
    return x


def gqa_by_hand(inputs: GqaInputs, params: GqaParams, start: int = 0) -> torch.Tensor:
    """Rows [start, end) of one sequence that begins at position 0."""
    num_rows = inputs.key.shape[0]
    keys = inputs.key.view(num_rows, KV_HEADS, HEAD_DIM)
    values = inputs.value.view(num_rows, KV_HEADS, HEAD_DIM).double()
    query_gate = inputs.query_gate.view(num_rows, HEADS, 2, HEAD_DIM)
    cached = [[rotated(keys[t, h], params.key_norm, t) for h in range(KV_HEADS)] for t in range(num_rows)]
    out = torch.zeros(num_rows - start, HEADS, HEAD_DIM, dtype=torch.float64)
    for t in range(start, num_rows):
        for head in range(HEADS):
            kv = head * KV_HEADS // HEADS
            q = rotated(query_gate[t, head, 0], params.query_norm, t)
            scores = torch.stack([q @ cached[s][kv] for s in range(t + 1)]) / math.sqrt(HEAD_DIM)
            mixed = torch.softmax(scores, 0) @ values[: t + 1, kv]
            out[t - start, head] = mixed * torch.sigmoid(query_gate[t, head, 1].double())
    return out.flatten(1)


def part_of(inputs: GqaInputs, first: int, end: int) -> GqaInputs:
    return GqaInputs(*(x[first:end] for x in inputs))


@pytest.mark.parametrize("cut", [1, 7, 8, 9, 26])
def test_gqa_is_the_formula_and_positions_are_absolute(kernels: Kernels, cut: int) -> None:
    """A second pass rotates by where its rows stand, and reads what the first one stored."""
    inputs, params = gqa_case(27, seed=4)
    pages = torch.full((6, UNIT, KV_HEADS * 2 * HEAD_DIM), float("nan"))
    table = [4, 1, 5, 0]
    expected = gqa_by_hand(inputs, params)
    for first, end in ((0, cut), (cut, 27)):
        index = attention_index([end - first], [first], [table[: -(-end // UNIT)]], UNIT)
        ours = kernels.gqa_mixer(part_of(inputs, first, end), params, pages, index)
        assert_close(ours, expected[first:end], 1e-5)
    # Whole pages are the same whoever wrote them.
    again = torch.full_like(pages, float("nan"))
    kernels.gqa_mixer(inputs, params, again, attention_index([27], [0], [table], UNIT))
    assert torch.equal(again.view(6, -1)[[4, 1, 5]], pages.view(6, -1)[[4, 1, 5]])


def test_gqa_sequences_in_one_step_do_not_see_each_other(kernels: Kernels) -> None:
    left, params = gqa_case(11, seed=5)
    right, _ = gqa_case(9, seed=6)
    both = GqaInputs(*(torch.cat(pair) for pair in zip(left, right, strict=True)))
    pages = torch.full((4, UNIT, KV_HEADS * 2 * HEAD_DIM), float("nan"))
    index = attention_index([11, 9], [0, 0], [[2, 0], [1, 3]], UNIT)
    ours = kernels.gqa_mixer(both, params, pages, index)
    assert_close(ours[:11], gqa_by_hand(left, params), 1e-5)
    assert_close(ours[11:], gqa_by_hand(right, params), 1e-5)


# ------------------------------------------------------------------ experts, residuals, element functions


def test_activations_are_their_formulas() -> None:
    gate, up = randn(7, 33, seed=7).double() * 5, randn(7, 33, seed=8).double() * 40
    silu = gate * torch.sigmoid(gate)
    bounded = 4.0 * torch.tanh(gate / 4.0) * torch.sigmoid(gate)
    for activation, expected in (
        (GluActivation(), silu * up),
        (GluActivation(4.0), bounded * up),
        (GluActivation(4.0, 25.0), bounded * 25.0 * torch.tanh(up / 25.0)),
    ):
        assert_close(activation(gate.float(), up.float()), expected, 1e-6)


@pytest.mark.parametrize("renormalize", [True, False])
def test_softmax_router(renormalize: bool) -> None:
    logits = randn(9, 8, seed=9)
    ids, weights = softmax_route(logits, 3, renormalize=renormalize)
    for row, chosen, share in zip(logits, ids, weights, strict=True):
        best = sorted(range(8), key=lambda e: -float(row[e]))[:3]
        assert chosen.tolist() == sorted(best)
        expected = torch.softmax(row.double(), 0)[chosen]
        assert_close(share, expected / expected.sum() if renormalize else expected, 1e-6)


def test_expert_sum_runs_each_expert_on_the_rows_that_chose_it() -> None:
    seen: dict[int, int] = {}

    def expert(number: int) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            seen[number] = x.shape[0]
            return x * (number + 1)

        return run

    x = randn(4, 6, seed=10)
    ids = torch.tensor([[0, 2], [2, 4], [0, 4], [2, 4]])
    weights = randn(4, 2, seed=11)
    ours = expert_sum(x, ids, weights, [expert(n) for n in range(5)])
    assert seen == {0: 2, 2: 3, 4: 3}
    factors = (weights * (ids + 1)).sum(-1, keepdim=True)
    assert_close(ours, x.double() * factors.double(), 1e-6)


def test_mix_is_a_softmax_over_normed_sources_of_the_raw_ones() -> None:
    sources = [randn(5, 24, seed=20 + n) * (n + 1) for n in range(4)]
    query = randn(24, seed=30)
    logits = torch.stack(
        [
            (s.double() / (s.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()) @ query.double()
            for s in sources
        ]
    )
    weights = torch.softmax(logits, 0)
    expected = sum(w.unsqueeze(-1) * s.double() for w, s in zip(weights, sources, strict=True))
    assert_close(mix_sources(sources, query, 1e-5), expected, 1e-5)
    assert mix_sources(sources[:1], query, 1e-5) is sources[0]


@pytest.mark.parametrize("function", [torch.sigmoid, torch.tanh, torch.cos, torch.nn.functional.silu])
@pytest.mark.parametrize("width", [1, 24, 64, 100])
def test_element_functions_do_not_depend_on_the_rows_beside(function: Any, width: int) -> None:
    x = randn(70, width, seed=40) * 6
    together = on_full_vectors(function, x)
    assert_close(together, function(x.double()), 1e-6)
    for count in (1, 2, 3, 17):
        for first in (0, 5, 70 - count):
            alone = on_full_vectors(function, x[first : first + count])
            assert torch.equal(alone, together[first : first + count])
