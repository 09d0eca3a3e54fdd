"""Sampling: order of the filters, keyed noise, ties, log-probabilities."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from milepost.core.plan import SampledToken, SamplingParams
from milepost.engine.constraints import packed_bits
from milepost.kernels.api import select_kernels
from milepost.kernels.native_sampling import NativeSampling
from milepost.runner import sampler
from milepost.runner.sampler import SamplingRow, TokenHistory, gumbel_noise, noise_key, unpacked_row

VOCAB = 37

served_by: NativeSampling | None = None
"""What samples in the tests of this file; they all run once with torch and once with the native library."""


@pytest.fixture(scope="module", params=["torch", "native"], autouse=True)
def both_implementations(request: pytest.FixtureRequest) -> Iterator[None]:
    global served_by
    served_by = select_kernels().sampling if request.param == "native" else None
    if request.param == "native" and served_by is None:
        pytest.skip("no native library that samples")
    yield
    served_by = None


def sample(values: torch.Tensor, rows: list[SamplingRow]) -> list[SampledToken]:
    return sampler.sample(values, rows, served_by)


def logits(*rows: int) -> torch.Tensor:
    return torch.stack([torch.randn(VOCAB, generator=torch.Generator().manual_seed(row)) * 2 for row in rows])


def one(
    values: torch.Tensor, history: TokenHistory | None = None, position: int = 0, **params: Any
) -> SampledToken:
    return sample(values.unsqueeze(0), [SamplingRow(SamplingParams(**params), position, history)])[0]


def drawn(values: torch.Tensor, count: int = 400, **params: Any) -> Counter[int]:
    """Tokens drawn with `count` different seeds."""
    rows = [SamplingRow(SamplingParams(**{"seed": seed, **params}), 0) for seed in range(count)]
    return Counter(token.token_id for token in sample(values.expand(count, -1), rows))


def reference_noise(key: int, token_id: int) -> float:
    """The definition in Python integers: splitmix64 at counter token_id + 1, top 53 bits, Gumbel."""
    mask = (1 << 64) - 1
    value = (key + 0x9E3779B97F4A7C15 * (token_id + 1)) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    value ^= value >> 31
    return -math.log(-math.log(((value >> 11) + 0.5) / 2**53))


@given(st.integers(0, 2**64 - 1), st.integers(1, 300))
def test_noise_is_its_definition(key: int, vocab_size: int) -> None:
    noise = gumbel_noise([key], vocab_size)
    assert noise.shape == (1, vocab_size)
    for token_id in {0, vocab_size // 2, vocab_size - 1}:
        assert float(noise[0, token_id]) == pytest.approx(
            reference_noise(key, token_id), rel=1e-12, abs=1e-12
        )


def test_noise_depends_on_key_and_token_only() -> None:
    keys = [
        noise_key(seed, choice, position)
        for seed in (0, 1, -1, 2**70)
        for choice in (0, 1)
        for position in (0, 1)
    ]
    assert len(set(keys)) == len(keys)
    together = gumbel_noise(keys, 101)
    for number, key in enumerate(keys):
        assert torch.equal(gumbel_noise([key], 101)[0], together[number])
        assert torch.equal(gumbel_noise([key], 64)[0], together[number, :64])


def test_noise_is_gumbel() -> None:
    noise = gumbel_noise([noise_key(seed, 0, 0) for seed in range(50)], 4000)
    assert bool(torch.isfinite(noise).all())
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)
    # Neighbours, in token and in position, are independent.
    for shifted in (noise[:, 1:], gumbel_noise([noise_key(seed, 0, 1) for seed in range(50)], 4000)[:, 1:]):
        pair = torch.stack([noise[:, : shifted.shape[1]].flatten(), shifted.flatten()])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.01


def test_sampled_frequencies_are_the_softmax() -> None:
    values = torch.tensor([1.0, 0.0, 2.0, -1.0])
    count = 6000
    for temperature in (1.0, 0.5):
        counts = drawn(values, count, temperature=temperature)
        expected = torch.softmax(values / temperature, dim=-1)
        for token_id in range(4):
            deviation = 4 * math.sqrt(float(expected[token_id] * (1 - expected[token_id])) / count)
            assert counts[token_id] / count == pytest.approx(float(expected[token_id]), abs=deviation)


@given(st.permutations(range(6)), st.integers(0, 5))
def test_a_token_does_not_depend_on_its_batch(order: list[int], keep: int) -> None:
    values = logits(*range(6))
    rows = [
        SamplingRow(SamplingParams(temperature=t, top_p=p, top_k=k, min_p=m, seed=n, choice_index=n % 2), n)
        for n, (t, p, k, m) in enumerate(
            [
                (1.0, 1.0, 0, 0.0),
                (0.0, 1.0, 0, 0.0),
                (0.7, 0.9, 0, 0.0),
                (1.3, 1.0, 5, 0.0),
                (1.0, 1.0, 0, 0.1),
                (2.0, 0.8, 10, 0.05),
            ]
        )
    ]
    alone = [sample(values[n : n + 1], [rows[n]])[0].token_id for n in range(6)]
    chosen = order[: keep + 1]
    together = sample(values[chosen], [rows[n] for n in chosen])
    assert [token.token_id for token in together] == [alone[n] for n in chosen]


def test_position_choice_and_seed_change_the_draw() -> None:
    values = torch.zeros(1000)
    base = one(values, temperature=1.0, seed=3).token_id
    assert one(values, temperature=1.0, seed=3).token_id == base
    others = {
        one(values, temperature=1.0, seed=4).token_id,
        one(values, temperature=1.0, seed=3, choice_index=1).token_id,
        one(values, temperature=1.0, seed=3, position=1).token_id,
    }
    assert base not in others and len(others) == 3


def test_greedy_takes_the_lowest_id_of_equal_maxima() -> None:
    values = torch.zeros(VOCAB)
    values[[5, 20, 30]] = 4.0
    assert one(values, temperature=0.0).token_id == 5
    values[5] = 3.9999
    assert one(values, temperature=0.0).token_id == 20


def test_top_k_keeps_k_and_breaks_ties_by_lowest_id() -> None:
    values = torch.zeros(VOCAB)
    values[[4, 9, 12]] = 1.0
    assert set(drawn(values, top_k=2)) == {4, 9}
    assert set(drawn(values, top_k=4)) == {0, 4, 9, 12}
    assert set(drawn(values, top_k=1)) == {4}
    assert len(drawn(values, 4000, top_k=VOCAB + 5)) == VOCAB


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    values = torch.log(torch.tensor([0.15, 0.5, 0.05, 0.3]))
    assert set(drawn(values, top_p=0.49)) == {1}
    assert set(drawn(values, top_p=0.51)) == {1, 3}
    assert set(drawn(values, top_p=0.81)) == {0, 1, 3}
    assert set(drawn(values, 2000, top_p=0.999)) == {0, 1, 2, 3}
    assert set(drawn(values, top_p=1e-9)) == {1}
    # After top-k = 2 the two left weigh 0.625 and 0.375.
    assert set(drawn(values, top_k=2, top_p=0.62)) == {1}
    # At temperature 2 the best weighs less than half.
    assert set(drawn(values, top_p=0.49, temperature=2.0)) == {1, 3}


def test_min_p_is_relative_to_the_best() -> None:
    values = torch.log(torch.tensor([0.15, 0.5, 0.05, 0.3]))
    assert set(drawn(values, min_p=0.61)) == {1}
    assert set(drawn(values, min_p=0.59)) == {1, 3}
    assert set(drawn(values, min_p=1.0)) == {1}
    assert set(drawn(values, 2000, min_p=0.05)) == {0, 1, 2, 3}


def test_bias_and_minimum_length() -> None:
    values = logits(0)[0]
    best = int(values.argmax())
    assert one(values, temperature=0.0, logit_bias={3: 100.0}).token_id == 3
    assert one(values, temperature=0.0, logit_bias={best: -100.0}).token_id != best
    stopped = {"temperature": 0.0, "stop_token_ids": [best], "min_tokens": 2}
    assert one(values, position=0, **stopped).token_id != best
    assert one(values, position=1, **stopped).token_id != best
    assert one(values, position=2, **stopped).token_id == best


def test_ids_outside_of_the_vocabulary_have_no_effect() -> None:
    values = logits(0)[0]
    best = int(values.argmax())
    odd = {"logit_bias": {VOCAB: 100.0, -1: 100.0}, "stop_token_ids": [VOCAB + 5, -2], "min_tokens": 3}
    assert one(values, temperature=0.0, **odd).token_id == best


def test_tiny_temperature_is_greedy() -> None:
    values = logits(3)[0] + 5.0
    assert set(drawn(values, 50, temperature=1e-300)) == {int(values.argmax())}


def test_penalties() -> None:
    values = torch.tensor([2.0, 1.5, -1.0, 0.5])
    history = TokenHistory({1, 2}, Counter({0: 3}))
    # Presence and frequency count outputs only.
    assert one(values, history, temperature=0.0, presence_penalty=0.6).token_id == 1
    assert one(values, history, temperature=0.0, presence_penalty=0.4).token_id == 0
    assert one(values, history, temperature=0.0, frequency_penalty=0.2).token_id == 1
    assert one(values, history, temperature=0.0, frequency_penalty=0.1).token_id == 0
    # Repetition counts the prompt too: positive logits are divided, negative ones multiplied.
    assert one(values, history, temperature=0.0, repetition_penalty=5.0).token_id == 3
    negative = torch.tensor([-1.0, -1.1, -3.0, -1.3])
    assert (
        one(negative, TokenHistory(set(), Counter({0: 1})), temperature=0.0, repetition_penalty=1.2).token_id
        == 1
    )


def test_logprobs_are_those_of_the_raw_logits() -> None:
    values = logits(1)[0]
    expected = torch.log_softmax(values.double(), dim=-1)
    token = one(values, temperature=0.3, top_k=2, seed=5, logit_bias={0: 50.0}, num_logprobs=3)
    assert token.token_id == 0
    assert token.logprob == pytest.approx(float(expected[0]), abs=1e-5)
    best = sorted(range(VOCAB), key=lambda n: -float(expected[n]))[:3]
    assert [token_id for token_id, _ in token.top_logprobs] == best
    for token_id, value in token.top_logprobs:
        assert value == pytest.approx(float(expected[token_id]), abs=1e-5)
    assert one(values, temperature=0.0).logprob is None
    only = one(values, temperature=0.0, num_logprobs=0)
    assert only.logprob is not None and only.top_logprobs == []
    assert len(one(values, temperature=0.0, num_logprobs=100).top_logprobs) == VOCAB


@pytest.mark.parametrize(
    "params", [{}, {"top_p": 0.9}, {"logit_bias": {2: 1.0}}, {"min_tokens": 1, "stop_token_ids": [0]}]
)
def test_logits_are_not_changed(params: dict[str, Any]) -> None:
    values = logits(2)
    before = values.clone()
    history = TokenHistory({1}, Counter({2: 1}))
    sample(values, [SamplingRow(SamplingParams(repetition_penalty=2.0, **params), 0, history)])
    assert torch.equal(values, before)


# ---------------------------------------------------------------- grammars


@given(st.integers(1, 100), st.data())
def test_packed_rows_are_read_as_they_were_written(vocab_size: int, data: st.DataObject) -> None:
    missing = data.draw(st.sets(st.integers(0, vocab_size - 1), max_size=vocab_size - 1))
    row = unpacked_row(packed_bits(vocab_size, sorted(missing)), vocab_size)
    assert row.dtype == torch.bool and row.shape == (vocab_size,)
    assert {token_id for token_id, ok in enumerate(row.tolist()) if not ok} == missing


@pytest.mark.parametrize("packed", [b"", b"\xff" * 3, b"\xff" * 8, b"\0" * 4, b"\0\0\0\xff"])
def test_rows_of_another_vocabulary_or_without_an_id(packed: bytes) -> None:
    with pytest.raises(ValueError, match="allowed_tokens"):
        unpacked_row(packed, 20)


@given(st.integers(0, 50), st.sampled_from([0.0, 0.7, 5.0]), st.data())
def test_only_allowed_ids_are_sampled(position: int, temperature: float, data: st.DataObject) -> None:
    values = logits(0)
    vocab_size = values.shape[1]
    allowed = torch.zeros(vocab_size, dtype=torch.bool)
    allowed[list(data.draw(st.sets(st.integers(0, vocab_size - 1), min_size=1, max_size=3)))] = True
    params = SamplingParams(temperature=temperature, top_p=0.9, top_k=5, min_p=0.01, seed=3, num_logprobs=0)
    before = values.clone()
    (token,) = sample(values, [SamplingRow(params, position, allowed=allowed)])
    assert allowed[token.token_id]
    assert torch.equal(values, before)
    assert token.logprob == pytest.approx(float(torch.log_softmax(values[0], -1)[token.token_id]))


def test_a_grammar_that_only_allows_the_end_wins_over_a_minimum_length() -> None:
    values = logits(0)
    allowed = torch.zeros(values.shape[1], dtype=torch.bool)
    allowed[4] = True
    params = SamplingParams(temperature=0.0, min_tokens=10, stop_token_ids=[4])
    (token,) = sample(values, [SamplingRow(params, 0, allowed=allowed)])
    assert token.token_id == 4
    allowed[7] = True
    (token,) = sample(values, [SamplingRow(params, 0, allowed=allowed)])
    assert token.token_id == 7
