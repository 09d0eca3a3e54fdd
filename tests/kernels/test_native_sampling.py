"""Native sampling times every property, in every instruction set: its twin in torch, company, tails, odd
addresses, denormals, extremes, rows that are not finite."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.native_support import ISAS, NAN, library, randn, same_bits, shifted, strided, using

from milepost.core.plan import SamplingParams
from milepost.kernels import reference_layers
from milepost.kernels.api import select_kernels
from milepost.kernels.native import NativeOperations
from milepost.kernels.native_library import native_library
from milepost.kernels.native_sampling import NativeSampling, SampleRule
from milepost.runner.sampler import (
    SamplingRow,
    TokenHistory,
    gumbel_noise,
    log_weights,
    noise_key,
    sample_checked,
    token_of,
    with_logprobs,
)

if not native_library().samples:
    pytest.skip("the native library is older than sampling", allow_module_level=True)

INFINITY = float("inf")
LARGE_VOCAB = 163_840
native = NativeSampling(library)  # type: ignore[arg-type]

every_isa = pytest.mark.parametrize("isa", ISAS)

KINDS = ("spread", "spiky", "flat", "tied", "masked", "one", "huge", "zeros")


def logits_of(kind: str, vocab_size: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    """One row, fp32 [vocabulary]."""
    values = randn(vocab_size, seed=seed) * scale
    somewhere = random.Random(seed).randrange(vocab_size)
    match kind:
        case "spiky":
            values[somewhere] += 20.0
        case "flat":
            values.fill_(0.25)
        case "tied":
            values.round_()
        case "masked":
            values[::2] = -INFINITY
            values[somewhere] = 1.0
        case "one":
            values.fill_(-INFINITY)
            values[somewhere] = -2.0
        case "huge":
            values = (values * 1e38).clamp(-3e38, 3e38)
        case "zeros":
            # Both zeros are equal.
            values = values.sign() * 0.0
    return values


def params_of(seed: int, temperature: float, top_p: float, top_k: int, min_p: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)


def assert_twins(values: torch.Tensor, row: SamplingRow, token_id: int) -> None:
    """The twin's token, unless its two best noisy scores are equal but for roundings."""
    expected = token_of(values, row)
    if token_id == expected:
        return
    key = noise_key(row.params.seed, row.params.choice_index, row.output_position)
    scores = log_weights(values, row) + gumbel_noise([key], values.shape[0])[0]
    assert float(scores[expected] - scores[token_id]) <= 1e-9


# ------------------------------------------------------------------ the twin


@every_isa
@given(data=st.data())
def test_tokens_are_the_twins(isa: str, data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from([1, 2, 3, 17, 63, 64, 65, 128, 500, 2111]))
    seed = data.draw(st.integers(0, 2**70))
    kind = data.draw(st.sampled_from(KINDS))
    values = logits_of(kind, vocab_size, seed % 2**31, data.draw(st.sampled_from([0.01, 1.0, 8.0])))
    params = params_of(
        seed,
        data.draw(st.sampled_from([0.0, 1e-3, 0.6, 1.0, 100.0])),
        data.draw(st.sampled_from([1.0, 1.0, 1e-9, 0.2, 0.5, 0.95, 0.999, 1.0 - 1e-15])),
        data.draw(st.sampled_from([0, 0, 1, 2, 20, vocab_size, vocab_size + 5, 10**9])),
        data.draw(st.sampled_from([0.0, 0.0, 1e-6, 0.05, 0.5, 1.0])),
    )
    row = SamplingRow(params, data.draw(st.integers(0, 3)))
    with using(isa):
        assert_twins(values, row, token_of(values, row, native))


EDGES: list[tuple[list[float], dict[str, Any], set[int]]] = [
    ([0.0, 0.0], {"top_p": 0.5}, {0}),
    ([0.0, 0.0], {"top_p": 0.5 + 2.0**-43}, {0, 1}),
    ([0.0] * 4, {"top_p": 0.75}, {0, 1, 2}),
    ([0.0] * 4, {"top_p": 0.75 + 2.0**-43}, {0, 1, 2, 3}),
    ([-1.0, 0.0, 0.0, 0.0], {"top_p": 1e-9}, {1}),
    ([-2.0, -1.0, 0.0], {"log_min_p": -1.0}, {1, 2}),
    ([-2.0, -1.0, 0.0], {"log_min_p": math.nextafter(-1.0, 0.0)}, {2}),
    ([0.0] * 5, {"top_k": 3}, {0, 1, 2}),
    ([-1.0, 0.0, -1.0, -1.0], {"top_k": 2}, {0, 1}),
    # Top-p shares out what top-k and min-p leave.
    ([0.0] * 4, {"top_k": 2, "top_p": 0.5}, {0}),
    ([-1.0, 0.0, -1.0, 0.0], {"log_min_p": -0.5, "top_p": 0.5}, {1}),
]


@every_isa
@pytest.mark.parametrize(("values", "rule", "expected"), EDGES)
def test_edges_of_the_filters(
    isa: str, values: list[float], rule: dict[str, Any], expected: set[int]
) -> None:
    """All that is kept, and nothing else, is drawn under some key; in the twin as well."""
    rules: list[SampleRule | None] = [
        SampleRule(1.0, -INFINITY, 1.0, 0, noise_key(seed, 0, 0))._replace(**rule) for seed in range(200)
    ]
    # The same behind a row of blocks that hold nothing.
    for before in (0, 200):
        row = torch.tensor([-INFINITY] * before + values)
        with using(isa):
            drawn = native.sample(row.expand(200, -1), rules)[0]
        assert {token_id - before for token_id in drawn} == expected
        if "log_min_p" not in rule:
            params = SamplingParams(**rule)
            kept = log_weights(row, SamplingRow(params, 0)).isfinite().nonzero().flatten()
            assert {token_id - before for token_id in kept.tolist()} == expected


FILTERS = [
    {},
    {"temperature": 0.6},
    {"top_p": 0.95},
    {"top_p": 0.95, "top_k": 20},
    {"top_k": 100_000},
    {"min_p": 0.02},
    {"temperature": 100.0, "top_p": 0.5, "min_p": 1e-3},
    {"temperature": 1e-3},
    {"temperature": 0.0},
]


@every_isa
@pytest.mark.parametrize("filters", FILTERS)
def test_a_large_vocabulary(isa: str, filters: dict[str, Any]) -> None:
    """One that ends inside of a block, with the ids of its best in disorder."""
    size = LARGE_VOCAB + 13
    ranks = torch.randperm(size, generator=torch.Generator().manual_seed(1))
    for values in (randn(size, seed=2), -1.1 * (1.0 + ranks).log()):
        row = SamplingRow(SamplingParams(seed=5, **filters), 2)
        with using(isa):
            assert_twins(values, row, token_of(values, row, native))


@every_isa
@given(st.integers(0, 2**64 - 1))
def test_noise_is_its_definition(isa: str, key: int) -> None:
    with using(isa):
        noise = torch.tensor(library.gumbel_noise(key, 200), dtype=torch.float64)  # type: ignore[union-attr]
    expected = gumbel_noise([key], 200)[0]
    assert float((noise - expected).abs().max()) <= 1e-14
    mask = (1 << 64) - 1
    for token_id in (0, 1, 199):
        value = (key + 0x9E3779B97F4A7C15 * (token_id + 1)) & mask
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        uniform = (((value ^ (value >> 31)) >> 11) + 0.5) / 2**53
        assert float(noise[token_id]) == pytest.approx(-math.log(-math.log(uniform)), abs=1e-14, rel=1e-14)


def test_the_largest_noise_is_finite_everywhere() -> None:
    """A counter whose 53 bits are all ones: `uniform` would round to 1."""
    mask = (1 << 64) - 1

    def unshift(value: int, by: int) -> int:
        result = value
        for _ in range(64 // by + 1):
            result = value ^ (result >> by)
        return result

    value = unshift(mask, 31)
    value = unshift(value * pow(0x94D049BB133111EB, -1, 1 << 64) & mask, 27)
    value = unshift(value * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & mask, 30)
    key = (value - 4 * 0x9E3779B97F4A7C15) & mask
    expected = 53 * math.log(2)
    assert float(gumbel_noise([key], 8)[0, 3]) == pytest.approx(expected, rel=1e-12)
    rule = SampleRule(1.0, -INFINITY, 1.0, 0, key)
    values = torch.zeros(1, 200)
    for isa in ISAS:
        with using(isa):
            assert library.gumbel_noise(key, 8)[3] == pytest.approx(expected, rel=1e-12)  # type: ignore[union-attr]
            assert native.sample(values, [rule])[0] == [3]
            # Excluded, it cannot win.
            values[0, 3] = -INFINITY
            assert native.sample(values, [rule])[0] != [3]
            values[0, 3] = 0.0


# ------------------------------------------------------------------ company


def mixed_rows(vocab_size: int) -> tuple[torch.Tensor, list[SampleRule | None]]:
    rng = random.Random(4)
    rules: list[SampleRule | None] = []
    rows = []
    for number in range(40):
        rows.append(logits_of(KINDS[number % len(KINDS)], vocab_size, number))
        rules.append(
            rng.choice(
                [
                    None,
                    SampleRule(1.0, -INFINITY, 1.0, 0, number),
                    SampleRule(0.7, -INFINITY, 0.9, 0, number),
                    SampleRule(1.5, -2.0, 0.9, 30, number),
                    SampleRule(1.0, -INFINITY, 1.0, 5, number),
                ]
            )
        )
    return torch.stack(rows), rules


@every_isa
@pytest.mark.parametrize("vocab_size", [1, 67, 4000])
def test_rows_stand_alone(isa: str, vocab_size: int) -> None:
    values, rules = mixed_rows(vocab_size)
    with using(isa):
        alone = [native.sample(values[n : n + 1].clone(), rules[n : n + 1])[0][0] for n in range(40)]
        assert native.sample(values, rules)[0] == alone
        assert native.sample(values.flip(0), rules[::-1])[0] == alone[::-1]
        assert native.sample(values[3:9], rules[3:9])[0] == alone[3:9]
        assert native.sample(strided(values), rules)[0] == alone
        assert native.sample(shifted(values), rules)[0] == alone
        assert native.sample(values[:0], []) == ([], [])
        broken = values.clone()
        broken[::2] = NAN
        ids, finite = native.sample(broken, rules)
        assert ids[1::2] == alone[1::2] and not any(finite[::2]) and set(ids[::2]) == {0}
    with using(isa, threads=2):
        assert native.sample(values, rules)[0] == alone


@pytest.mark.parametrize("vocab_size", [67, 4000])
def test_instruction_sets_give_the_same_bits(vocab_size: int) -> None:
    values, rules = mixed_rows(vocab_size)
    found, logprobs = [], []
    for isa in ISAS:
        with using(isa):
            found.append(native.sample(values, rules))
            logprobs.append(str(native.log_probabilities(values, [vocab_size - 1] * 40, 7)))
    assert all(each == found[0] for each in found)
    assert all(each == logprobs[0] for each in logprobs)


# ------------------------------------------------------------------ values


@every_isa
@pytest.mark.parametrize("vocab_size", [1, 64, 130])
@pytest.mark.parametrize("bad", [NAN, -NAN, INFINITY, -INFINITY])
def test_a_row_that_is_not_finite_fails_alone(isa: str, vocab_size: int, bad: float) -> None:
    values = randn(vocab_size, vocab_size, seed=1)
    values[:, 0] = 3e38
    values[:, -1] = 3e38 if vocab_size > 1 else values[:, -1]
    with using(isa):
        assert native.sample(values, [None] * vocab_size)[1] == [True] * vocab_size
        for at in range(vocab_size):
            broken = values.clone()
            broken[at, at] = bad
            # The sign of a NaN is lost on the way through Python's arithmetic.
            if math.isnan(bad):
                broken.view(torch.int32)[at, at] = -1 if at % 2 else 0x7FC00000
            rules = [None, SampleRule(1.0, -INFINITY, 0.9, 7, 1)]
            finite = native.sample(broken, [rules[n % 2] for n in range(vocab_size)])[1]
            assert finite == [n != at for n in range(vocab_size)]


@every_isa
@pytest.mark.parametrize("bits", [0x7F800000, 0x7F800001, 0x7FC00000, -1, -(2**22), -(2**23) + 1])
def test_a_row_with_nan_or_infinity_gives_the_first_id(isa: str, bits: int) -> None:
    values = randn(1, 130, seed=1)
    values[0, 77] = 9.0
    rule = SampleRule(0.01, -INFINITY, 1.0, 0, 5)
    with using(isa):
        assert native.sample(values.expand(2, -1), [None, rule]) == ([77, 77], [True, True])
        values.view(torch.int32)[0, 5] = bits
        assert native.sample(values.expand(2, -1), [None, rule]) == ([0, 0], [False, False])
        assert math.isnan(native.log_probabilities(values, [77], 1)[0][0][0])


@every_isa
def test_a_row_of_minus_infinity_gives_the_first_id(isa: str) -> None:
    values = torch.full((2, 70), -INFINITY)
    with using(isa):
        ids, finite = native.sample(values, [None, SampleRule(1.0, -1.0, 0.5, 3, 9)])
    assert ids == [0, 0] and finite == [False, False]


@every_isa
def test_denormals_count(isa: str) -> None:
    values = torch.full((1, 100), 1e-40)
    values[0, 70] = 2e-40
    rule = SampleRule(1e-43, -INFINITY, 1.0, 0, 3)
    with using(isa):
        try:
            assert torch.set_flush_denormal(True)
            ids = native.sample(values.expand(2, -1), [None, rule])[0]
        finally:
            torch.set_flush_denormal(False)
    assert ids == [70, 70]


@every_isa
def test_a_temperature_of_any_size(isa: str) -> None:
    values = logits_of("spread", 300, 8)
    best = int(values.argmax())
    with using(isa):
        for temperature in (1e-300, 1e-9):
            rules = [
                SampleRule(temperature, -INFINITY, share, 0, key) for key in range(20) for share in (1.0, 0.9)
            ]
            assert set(native.sample(values.expand(40, -1), rules)[0]) == {best}
        rules = [SampleRule(1e300, -INFINITY, 1.0, 0, key) for key in range(200)]
        assert len(set(native.sample(values.expand(200, -1), rules)[0])) > 100


# ------------------------------------------------------------------ log-probabilities


@every_isa
@pytest.mark.parametrize("kind", ["spread", "spiky", "flat", "tied", "masked", "huge", "zeros"])
@pytest.mark.parametrize("vocab_size", [1, 65, 3001])
def test_log_probabilities(isa: str, kind: str, vocab_size: int) -> None:
    values = torch.stack([logits_of(kind, vocab_size, seed) for seed in range(3)])
    expected = torch.log_softmax(values.double(), -1)
    token_ids = [vocab_size - 1, 0, vocab_size // 2]
    for count in {0, 1, min(20, vocab_size), vocab_size}:
        with using(isa):
            logprobs, best = native.log_probabilities(values, token_ids, count)
            again = native.log_probabilities(shifted(strided(values)[1:].clone()), token_ids[1:], count)
        assert again == (logprobs[1:], best[1:])
        for row in range(3):
            order = torch.sort(values[row], descending=True, stable=True).indices[:count].tolist()
            assert best[row] == order
            chosen = expected[row, [token_ids[row], *order]]
            assert torch.allclose(torch.tensor(logprobs[row]), chosen.float(), rtol=1e-6, atol=1e-6)


def test_log_probabilities_are_the_twins() -> None:
    values = logits_of("spread", 500, 1)
    params = SamplingParams(num_logprobs=4)
    twin, token = (with_logprobs(values, 77, params, each) for each in (None, native))
    assert token.token_id == twin.token_id == 77
    assert token.logprob == pytest.approx(twin.logprob, abs=1e-5)
    assert [token_id for token_id, _ in token.top_logprobs] == [token_id for token_id, _ in twin.top_logprobs]
    assert with_logprobs(values, 3, SamplingParams(num_logprobs=9999), native).top_logprobs[499:]
    assert with_logprobs(values, 3, SamplingParams(), native).logprob is None


def test_rows_that_are_not_finite_have_no_log_probabilities() -> None:
    values = randn(2, 70, seed=1)
    values[0, 5] = NAN
    logprobs, best = native.log_probabilities(values, [1, 1], 2)
    assert all(math.isnan(value) for value in logprobs[0]) and best[0] == [0, 1]
    assert all(math.isfinite(value) for value in logprobs[1])


# ------------------------------------------------------------------ calls


class Counting(NativeSampling):
    """Counts native calls of `sample`."""

    num_calls = 0

    def sample(self, *arguments: Any) -> Any:
        self.num_calls += 1
        return super().sample(*arguments)


def test_one_call_per_step_and_one_more_for_rows_that_python_changes() -> None:
    values = randn(5, 90, seed=3)
    values[4, 2] = NAN
    params = [{"temperature": 0.0}, {"top_p": 0.8, "seed": 4}, {"min_p": 0.1, "num_logprobs": 1}]
    rows: list[SamplingRow | None] = [SamplingRow(SamplingParams(**each), 1) for each in params]
    rows += [None, SamplingRow(SamplingParams(), 0)]
    counting = Counting(library)  # type: ignore[arg-type]
    tokens, finite = sample_checked(values, rows, counting)
    assert counting.num_calls == 1 and finite == [True] * 4 + [False] and len(tokens) == 4
    expected, expected_finite = sample_checked(values, rows)
    assert finite == expected_finite
    assert [token.token_id for token in tokens[:3]] == [token.token_id for token in expected[:3]]
    penalised = SamplingParams(temperature=0.0, repetition_penalty=1e6)
    best = int(values[0].argmax())
    rows[0] = SamplingRow(penalised, 1, TokenHistory({best}))
    changed, finite = sample_checked(values, rows, counting)
    assert (
        counting.num_calls == 3 and changed[0].token_id == sample_checked(values, rows)[0][0].token_id != best
    )
    assert [token.token_id for token in changed[1:3]] == [token.token_id for token in tokens[1:3]]


def test_changed_rows_are_checked_as_they_were() -> None:
    """A mask hides what is not finite from the sample, not from the check."""
    values = randn(2, 40, seed=3)
    values[0, 7] = NAN
    allowed = torch.ones(40, dtype=torch.bool)
    allowed[7] = False
    rows = [SamplingRow(SamplingParams(seed=n), 0, allowed=allowed) for n in range(2)]
    for each in (native, None):
        assert sample_checked(values, rows, each)[1] == [False, True]


def test_bad_arguments_are_named() -> None:
    values = randn(2, 10)
    good = SampleRule(1.0, -INFINITY, 1.0, 0, 2**64 - 1)
    assert len(native.sample(values, [good, None])[0]) == 2
    for rules, message in (
        ([good], "one entry per row"),
        ([good, good._replace(temperature=0.0)], "temperature"),
        ([good, good._replace(temperature=NAN)], "temperature"),
        ([good, good._replace(log_min_p=0.5)], "log_min_p"),
        ([good, good._replace(log_min_p=NAN)], "log_min_p"),
        ([good, good._replace(top_p=NAN)], "top_p"),
        ([good, good._replace(top_k=-1)], "top_k"),
        ([good, (1.0, 0.0)], "noise_key"),
    ):
        with pytest.raises(ValueError, match=message):
            native.sample(values, rules)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="float32"):
        native.sample(values.double(), [good, good])
    with pytest.raises(ValueError, match="columns"):
        native.sample(values[:, :0], [good, good])
    with pytest.raises(ValueError, match="contiguous"):
        native.sample(randn(10, 2).T, [good, good])
    for token_id in (-1, 10):
        with pytest.raises(ValueError, match="outside of the vocabulary"):
            native.log_probabilities(values, [0, token_id], 2)
    with pytest.raises(ValueError, match="wider"):
        native.log_probabilities(values, [0, 1], 11)


def test_who_samples() -> None:
    class Old:
        API_REVISION = 3

    assert NativeOperations(Old).sampling() is None  # type: ignore[arg-type]
    assert reference_layers.sampling() is None and select_kernels("reference").sampling is None
    chosen = select_kernels("native")
    assert isinstance(chosen.sampling, NativeSampling)
    # Tokens are no stored state: who samples is no part of the numerics' name.
    assert chosen.numerics == library.numerics_id()  # type: ignore[union-attr]


def test_log_probabilities_have_bits_of_their_own_row() -> None:
    values, _ = mixed_rows(700)
    for threads in (1, 2):
        with using(ISAS[-1], threads):
            whole = torch.tensor(native.log_probabilities(values, [5] * 40, 3)[0])
            for row in (0, 17, 39):
                alone = torch.tensor(native.log_probabilities(values[row : row + 1], [5], 3)[0])
                assert same_bits(alone[0], whole[row])
