"""Drafts that are drawn: the tokens that come out have the distribution of the model, and faults show.

Chi-square tests at level 1e-6 with fixed seeds, 1,500 answers each. A deviation of effect size w (root of the
sum of (p' - p)**2 / p) of 0.3 has a non-centrality of 135 and is found with a chance above 0.99 in the 52
degrees of freedom of the largest case; the planted faults are at 0.45 and above.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from milepost.core.plan import COUPLED, GREEDY, PROBABILISTIC, ChunkPlan, SamplingParams
from milepost.runner import draft_sampling, verify
from milepost.runner.draft_sampling import DraftSampler, history_at, pick_drafts, residual, verify_drawn
from milepost.runner.sampler import SamplingRow, TokenHistory, noise_key, sample, uniform_noise
from milepost.runner.verify import sampling_rows

VOCAB = 4
NUM_TOKENS = 3
NUM_DRAFTS = 2
NUM_SEEDS = 1500
LEVEL = 1e-6
NON_CENTRALITY = 300.0


def table(seed: int, scale: float) -> torch.Tensor:
    """Logits behind each token; the last row is that behind the prompt."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCAB + 1, VOCAB, generator=generator) * scale


TARGET, DRAFTER = table(3, 1.2), table(8, 1.2)


@dataclass(frozen=True)
class Case:
    """Sampling parameters with a chain of tokens that is worked out by hand."""

    params: SamplingParams

    def distribution(self) -> dict[tuple[int, ...], float]:
        """Probability of every answer, in plain Python."""
        result: dict[tuple[int, ...], float] = {}
        for answer in itertools.product(range(VOCAB), repeat=NUM_TOKENS):
            chance = 1.0
            for place, token in enumerate(answer):
                chance *= self._probabilities(answer[:place])[token]
                if token in self.params.stop_token_ids:
                    answer = answer[: place + 1]
                    break
            if chance > 0.0:
                result[answer] = chance
        return result

    def _probabilities(self, before: tuple[int, ...]) -> list[float]:
        params = self.params
        values = [float(value) for value in TARGET[before[-1] if before else VOCAB]]
        for token in range(VOCAB):
            count = before.count(token)
            if count:
                values[token] -= params.frequency_penalty * count + params.presence_penalty
            values[token] = (values[token] + params.logit_bias.get(token, 0.0)) / params.temperature
        if params.top_k:
            kept = sorted(range(VOCAB), key=lambda token: -values[token])[: params.top_k]
            values = [value if token in kept else -math.inf for token, value in enumerate(values)]
        weights = [math.exp(value) for value in values]
        return [weight / sum(weights) for weight in weights]


CASES = {
    "plain": Case(SamplingParams()),
    "penalties": Case(SamplingParams(frequency_penalty=1.5, presence_penalty=0.7)),
    "bias and temperature": Case(SamplingParams(temperature=0.6, logit_bias={1: 1.0})),
    "top-k": Case(SamplingParams(top_k=3, temperature=1.3)),
    "stop ids": Case(SamplingParams(stop_token_ids=[0, 9], logit_bias={0: 1.0})),
}


def logits_behind(tokens: Sequence[int], of: torch.Tensor) -> torch.Tensor:
    return of[tokens[-1] if tokens else VOCAB]


def generate(params: SamplingParams, method: str, num_drafts: int) -> tuple[tuple[int, ...], int, int]:
    """One answer as worker and drafter make it, step by step; drafts that were made, and accepted."""
    answer: list[int] = []
    made = right = 0
    while len(answer) < NUM_TOKENS and not set(answer) & set(params.stop_token_ids):
        history = TokenHistory(set(), Counter(answer)) if params.needs_history else None
        sampler = DraftSampler.of(params, len(answer), history, method)
        drafts: list[int] = []
        for _ in range(min(num_drafts, NUM_TOKENS - len(answer) - 1)):
            logits = logits_behind(answer + drafts, DRAFTER)
            (draft,) = pick_drafts(logits.unsqueeze(0), [sampler])
            if draft in params.stop_token_ids:  # as every drafter does
                break
            drafts.append(draft)
        chunk = ChunkPlan(1, 0, 1, b"", [], [], [], [], [], 1, len(answer))
        chunk.draft_tokens = b"".join(draft.to_bytes(4, "little") for draft in drafts)
        rows = sampling_rows(chunk, params, history, VOCAB)
        stacked = torch.stack([logits_behind(answer + drafts[:n], TARGET) for n in range(len(drafts) + 1)])
        if sampler is not None and sampler.probabilities:
            sampled = verify_drawn(stacked, rows, drafts, sampler.probabilities)
            count = len(sampled) - 1
        else:
            sampled = sample(stacked, rows)
            count = verify.num_accepted(chunk, sampled)
        made, right = made + len(drafts), right + count
        answer += [token.token_id for token in sampled[: count + 1]]
    return tuple(answer[:NUM_TOKENS]), made, right


def observed(case: Case, method: str, num_drafts: int = NUM_DRAFTS) -> Counter[tuple[int, ...]]:
    return Counter(
        generate(dataclasses.replace(case.params, seed=seed), method, num_drafts)[0]
        for seed in range(NUM_SEEDS)
    )


def chi_square(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """Statistic and degrees of freedom; answers that are rarer than 5 in the sample are one cell."""
    total = sum(counts.values())
    cells: list[tuple[float, int]] = []
    rest, rest_count = 0.0, 0
    for answer, chance in expected.items():
        if chance * total < 5.0:
            rest, rest_count = rest + chance * total, rest_count + counts[answer]
        else:
            cells.append((chance * total, counts[answer]))
    if rest >= 5.0:
        cells.append((rest, rest_count))
    impossible = total - rest_count - sum(count for mean, count in cells if mean != rest)
    statistic = sum((count - mean) ** 2 / mean for mean, count in cells)
    return (math.inf if impossible else statistic), len(cells) - 1


def upper_tail(statistic: float, degrees: int) -> float:
    """Chance of a larger chi-square: the regularised upper incomplete gamma function."""
    if math.isinf(statistic):
        return 0.0
    return float(torch.special.gammaincc(torch.tensor(degrees / 2.0).double(), torch.tensor(statistic / 2.0)))


@pytest.mark.parametrize("name", CASES)
def test_answers_have_the_distribution_of_the_model(name: str) -> None:
    counts = observed(CASES[name], PROBABILISTIC)
    statistic, degrees = chi_square(counts, CASES[name].distribution())
    assert upper_tail(statistic, degrees) > LEVEL, (statistic, degrees)


def test_the_test_knows_what_it_tests() -> None:
    """Without drafts the same noise gives the same distribution; with those of another case it does not."""
    counts = observed(CASES["plain"], GREEDY, 0)
    assert upper_tail(*chi_square(counts, CASES["plain"].distribution())) > LEVEL
    assert upper_tail(*chi_square(counts, CASES["bias and temperature"].distribution())) < LEVEL
    assert upper_tail(20.0, 10) == pytest.approx(0.0292527, rel=1e-5)  # from a table


# -- planted faults --------------------------------------------------------------------------------


def not_renormalised(patch: pytest.MonkeyPatch) -> None:
    """What is left of the residual's weight goes to the last token, as reading off a sum would have it."""

    def plain(target: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        left = (target - drawn).clamp_min(0.0)
        left[-1] += 1.0 - left.sum()
        return left

    patch.setattr(draft_sampling, "residual", plain)


def replaced_from_the_target(patch: pytest.MonkeyPatch) -> None:
    """A rejected draft is replaced by a plain sample."""
    patch.setattr(draft_sampling, "residual", lambda target, drawn: target)


def penalties_not_updated(patch: pytest.MonkeyPatch) -> None:
    """Rows behind drafts are penalised for the tokens before the step only."""
    patch.setattr(verify, "history_at", lambda history, drafts: history)


def wrong_chances(patch: pytest.MonkeyPatch) -> None:
    """What the draft is said to have been drawn from lacks the temperature."""
    draw = DraftSampler.draw

    def forgetful(self: DraftSampler, logits: torch.Tensor) -> int:
        draft = draw(self, logits)
        if self.probabilities:
            self.probabilities[-1] = torch.softmax(logits.double(), -1)
        return draft

    patch.setattr(DraftSampler, "draw", forgetful)


def accepted_too_easily(patch: pytest.MonkeyPatch) -> None:
    """A draft is accepted if it is at least as likely for the model, and otherwise half of the time more."""
    patch.setattr(draft_sampling, "uniform_noise", lambda key: 0.5 * uniform_noise(key))


def stops_drawn_and_left_out(patch: pytest.MonkeyPatch) -> None:
    """A draft that would end the answer is drawn, and not verified."""
    patch.setattr(draft_sampling, "_without", lambda logits, token_ids: logits)


FAULTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "residual not renormalised": ("plain", not_renormalised),
    "replaced from the target": ("plain", replaced_from_the_target),
    "penalty not updated": ("penalties", penalties_not_updated),
    "wrong q": ("bias and temperature", wrong_chances),
    "accepted too easily": ("plain", accepted_too_easily),
    "stops drawn and left out": ("stop ids", stops_drawn_and_left_out),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_show(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant = FAULTS[fault]
    plant(monkeypatch)
    statistic, degrees = chi_square(observed(CASES[name], PROBABILISTIC), CASES[name].distribution())
    assert upper_tail(statistic, degrees) < LEVEL
    assert statistic - degrees > NON_CENTRALITY, "too small a fault to be sure of it"


# -- rules -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_coupled_drafts_change_no_token(name: str) -> None:
    made = right = 0
    for seed in range(200):
        params = dataclasses.replace(CASES[name].params, seed=seed)
        answer, _, _ = generate(params, GREEDY, 0)
        for num_drafts in (1, 2):
            coupled, some, accepted = generate(params, COUPLED, num_drafts)
            assert coupled == answer
            assert generate(params, GREEDY, num_drafts)[0] == answer
            made, right = made + some, right + accepted
    assert 0 < right < made


def test_drawn_drafts_are_accepted_more_often_than_the_most_likely_ones() -> None:
    """Where the drafter is good: rejection accepts the overlap of both, one noise for both not much less."""
    rates = {}
    close = TARGET + 0.15 * DRAFTER
    keep = DRAFTER.clone()
    try:
        DRAFTER.copy_(close)
        for method in (GREEDY, COUPLED, PROBABILISTIC):
            made = right = 0
            for seed in range(300):
                _, some, accepted = generate(SamplingParams(seed=seed), method, NUM_DRAFTS)
                made, right = made + some, right + accepted
            rates[method] = right / made
    finally:
        DRAFTER.copy_(keep)
    assert rates[PROBABILISTIC] > 0.85
    assert rates[COUPLED] > 0.8
    assert rates[GREEDY] < 0.7


@pytest.mark.parametrize("method", [GREEDY, COUPLED, PROBABILISTIC])
def test_greedy_requests_get_the_most_likely_drafts(method: str) -> None:
    assert DraftSampler.of(SamplingParams(temperature=0.0), 0, None, method) is None
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, 0.0]])
    assert pick_drafts(logits, [None, None]) == [1, 0]


def test_where_only_stops_are_left_a_draft_does_no_harm() -> None:
    """Nothing can be drawn; what stands there instead is never accepted."""
    logits = torch.tensor([-math.inf, 1.0, 2.0])
    for seed in range(50):
        params = SamplingParams(seed=seed, stop_token_ids=[1, 2])
        sampler = DraftSampler.of(params, 0, None, PROBABILISTIC)
        assert sampler is not None
        drafts = pick_drafts(logits.unsqueeze(0), [sampler])
        rows = [SamplingRow(params, 0), SamplingRow(params, 1)]
        sampled = verify_drawn(torch.zeros(2, 3), rows, drafts, sampler.probabilities)
        assert [t.token_id for t in sampled] == [t.token_id for t in sample(torch.zeros(1, 3), rows[:1])]


def test_a_drafter_that_does_not_know_a_token_never_draws_it() -> None:
    for method in (COUPLED, PROBABILISTIC):
        for seed in range(100):
            sampler = DraftSampler.of(SamplingParams(seed=seed), 0, None, method)
            assert pick_drafts(torch.tensor([[0.0, -math.inf, 0.5]]), [sampler])[0] != 1


def test_the_residual_is_a_distribution() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.6, 0.2]).double()
    assert residual(p, q).tolist() == pytest.approx([1.0, 0.0, 0.0])
    assert torch.equal(residual(p, p), p)


def test_a_history_is_not_changed_by_what_may_follow() -> None:
    history = TokenHistory({1}, Counter([2]))
    assert history_at(history, [2, 3]) == TokenHistory({1}, Counter([2, 2, 3]))
    assert history == TokenHistory({1}, Counter([2]))
    assert history_at(history, []) is history and history_at(None, [1]) is None


def test_streams_of_noise_are_apart() -> None:
    keys = {
        noise_key(seed, 0, place, stream) for seed in range(9) for place in range(9) for stream in range(3)
    }
    assert len(keys) == 9 * 9 * 3
    some = [uniform_noise(noise_key(seed, 0, 0, 2)) for seed in range(4000)]
    assert 0.0 < min(some) and max(some) < 1.0
    assert sum(some) / len(some) == pytest.approx(0.5, abs=0.02)
    ordinary = [uniform_noise(noise_key(seed, 0, 0)) for seed in range(4000)]
    mean = sum((a - 0.5) * (b - 0.5) for a, b in zip(some, ordinary, strict=True)) / len(some)
    assert abs(mean * 12.0) < 0.06
