"""From logits to tokens, with keyed noise.

Order: penalties and bias, stop ids while too few tokens, ids that a grammar excludes, temperature,
min-p, top-k, top-p, then argmax(logits + Gumbel noise). The noise of an entry depends on (seed, choice
index, output position, token id) and on nothing else, so a sampled token depends neither on the batch
nor on how the step was cut.

From temperature on, and for log-probabilities, rows go through the native library where there is one.
The torch here says what is right, and serves elsewhere. Both name the same tokens unless the two best
noisy scores, or what two sides of a filter weigh, are equal but for roundings of fp64.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from milepost.core.plan import SampledToken, SamplingParams, ScoredToken
from milepost.kernels.native_sampling import NativeSampling, SampleRule

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_NOISE_LANES = 64
_LARGEST_UNIFORM = 1.0 - 2.0**-53
_WEIGHT_ONE = 2.0**40
"""Weight of the best token in top-p: weights are integers, so that no sum depends on its order."""


@dataclass(slots=True)
class TokenHistory:
    """Tokens of a request that penalties look at."""

    prompt: set[int] = field(default_factory=set)
    output: Counter[int] = field(default_factory=Counter)


@dataclass(slots=True)
class SamplingRow:
    """One token to sample.

    Attributes:
        output_position: index among the request's outputs = number of tokens generated so far.
        history: needed if the parameters hold a penalty.
        allowed: bool [vocabulary], True where an id may be sampled; None = everywhere.
    """

    params: SamplingParams
    output_position: int
    history: TokenHistory | None = None
    allowed: torch.Tensor | None = None


def sample(
    logits: torch.Tensor, rows: Sequence[SamplingRow], native: NativeSampling | None = None
) -> list[SampledToken]:
    """One token per row of `logits` (fp32 [rows, vocabulary], not changed).

    Equal maxima: the lowest id. Log-probabilities are those of the raw logits.
    """
    return sample_checked(logits, rows, native)[0]


def sample_checked(
    logits: torch.Tensor, rows: Sequence[SamplingRow | None], native: NativeSampling | None = None
) -> tuple[list[SampledToken], list[bool]]:
    """Tokens as from `sample`, and per row of `logits` whether it holds neither NaN nor infinity.

    Args:
        rows: one per row of `logits`; None = nothing is sampled there, and there is no token for it.
    """
    token_ids, finite = _tokens(logits, rows, native)
    tokens = []
    for number, row in enumerate(rows):
        if row is None:
            continue
        # Most steps look at no row by itself: taking one apart is an operation of torch.
        if row.params.num_logprobs is None:
            tokens.append(SampledToken(token_ids[number]))
        else:
            tokens.append(with_logprobs(logits[number], token_ids[number], row.params, native))
    return tokens, finite


def token_of(logits: torch.Tensor, row: SamplingRow, native: NativeSampling | None = None) -> int:
    """The token id of one row, fp32 [vocabulary]."""
    return _tokens(logits.unsqueeze(0), [row], native)[0][0]


def _tokens(
    logits: torch.Tensor, rows: Sequence[SamplingRow | None], native: NativeSampling | None
) -> tuple[list[int], list[bool]]:
    """Per row a token id, which means something where `rows` is not None, and whether it is finite."""
    if native is not None:
        return _native_tokens(logits, rows, native)
    keys = [_key_of(row) for row in rows if row is not None and row.params.temperature > 0.0]
    noise = iter(gumbel_noise(keys, logits.shape[1]))
    token_ids = []
    for values, row in zip(logits.unbind(0), rows, strict=True):
        if row is None:
            token_ids.append(0)
        elif row.params.temperature > 0.0:
            token_ids.append(int((log_weights(values, row) + next(noise)).argmax()))
        else:
            token_ids.append(int(_processed(values, row).argmax()))
    return token_ids, _finite_rows(logits)


def _native_tokens(
    logits: torch.Tensor, rows: Sequence[SamplingRow | None], native: NativeSampling
) -> tuple[list[int], list[bool]]:
    """As `_tokens`. Rows that Python changes first take a call of their own."""
    rules: list[SampleRule | None] = [None] * len(rows)
    changed: dict[int, torch.Tensor] = {}
    for number, row in enumerate(rows):
        if row is not None:
            rules[number] = _rule_of(row, logits.shape[1])
            if _changes(row):
                changed[number] = _processed(logits[number], row)
    token_ids, finite = native.sample(
        logits, [None if number in changed else rule for number, rule in enumerate(rules)]
    )
    if changed:
        replaced, _ = native.sample(torch.stack(list(changed.values())), [rules[n] for n in changed])
        for number, token_id in zip(changed, replaced, strict=True):
            token_ids[number] = token_id
    return token_ids, finite


def _rule_of(row: SamplingRow, vocab_size: int) -> SampleRule | None:
    params = row.params
    if params.temperature <= 0.0:
        return None
    log_min_p = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    return SampleRule(params.temperature, log_min_p, params.top_p, top_k, _key_of(row))


def _key_of(row: SamplingRow) -> int:
    return noise_key(row.params.seed, row.params.choice_index, row.output_position)


def _finite_rows(logits: torch.Tensor) -> list[bool]:
    """A finite sum settles it; only huge values need a closer look."""
    if bool(torch.isfinite(logits.sum(-1)).all()):
        return [True] * logits.shape[0]
    finite: list[bool] = torch.isfinite(logits).all(-1).tolist()
    return finite


def log_weights(logits: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    """Logarithms, but for a constant, of what a row with a temperature is sampled from; fp64 [vocabulary].

    -inf = cannot be sampled.
    """
    return _filtered(_processed(logits, row), row.params)


def _changes(row: SamplingRow) -> bool:
    """Whether `_processed` has anything to do."""
    params = row.params
    is_penalised = row.history is not None and params.needs_history
    is_short = row.output_position < params.min_tokens
    return is_penalised or is_short or bool(params.logit_bias) or row.allowed is not None


def _processed(logits: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    """Penalties, bias and the minimum length; a copy only if something changes.

    Ids outside of the vocabulary have no effect.
    """
    params = row.params
    vocab_size = logits.shape[0]
    changed = logits
    if row.history is not None and params.needs_history:
        changed = _penalised(logits.clone(), params, row.history)
    bias = {token_id: value for token_id, value in params.logit_bias.items() if 0 <= token_id < vocab_size}
    if bias:
        changed = changed.clone() if changed is logits else changed
        ids = torch.tensor(list(bias), dtype=torch.int64)
        changed[ids] += torch.tensor(list(bias.values()), dtype=changed.dtype)
    if row.output_position < params.min_tokens:
        changed = changed.clone() if changed is logits else changed
        stops = [token_id for token_id in params.stop_token_ids if 0 <= token_id < vocab_size]
        changed[torch.tensor(stops, dtype=torch.int64)] = -math.inf
    if row.allowed is not None:
        masked = changed.masked_fill(~row.allowed, -math.inf)
        # A grammar that only allows the end wins over a minimum length.
        changed = masked if masked.max() > -math.inf else logits.masked_fill(~row.allowed, -math.inf)
    return changed


def unpacked_row(packed: bytes, vocab_size: int) -> torch.Tensor:
    """Bool [vocabulary] of `ChunkPlan.allowed_tokens`, one row of it.

    Raises:
        ValueError: it is made for another vocabulary, or allows nothing.
    """
    if len(packed) != -(-vocab_size // 32) * 4:
        raise ValueError(f"allowed_tokens has {len(packed)} bytes, which is no row of {vocab_size} ids")
    data = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    bits = (data.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1
    row = bits.reshape(-1)[:vocab_size].bool()
    if not bool(row.any()):
        raise ValueError("allowed_tokens allows no id")
    return row


def _penalised(logits: torch.Tensor, params: SamplingParams, history: TokenHistory) -> torch.Tensor:
    """Repetition: prompt and output; presence and frequency: output only. In place."""
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(history.prompt | set(history.output)), dtype=torch.int64)
        values = logits[seen]
        logits[seen] = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    if history.output:
        ids = torch.tensor(list(history.output), dtype=torch.int64)
        counts = torch.tensor(list(history.output.values()), dtype=logits.dtype)
        logits[ids] -= params.frequency_penalty * counts + params.presence_penalty
    return logits


def _filtered(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Temperature, then -inf for what the filters exclude; fp64, the best is 0 and always stays."""
    scaled = (logits.double() - logits.max().double()) / params.temperature
    if params.min_p > 0.0:
        scaled = scaled.masked_fill(scaled < math.log(params.min_p), -math.inf)
    top_k = params.top_k if 0 < params.top_k < scaled.shape[0] else 0
    if not top_k and params.top_p >= 1.0:
        return scaled
    # Stable, so that equal logits are kept by lowest id.
    order = torch.sort(logits, descending=True, stable=True).indices
    ordered = scaled[order]
    kept = top_k or scaled.shape[0]
    if params.top_p < 1.0:
        reached = (ordered[:kept].exp() * _WEIGHT_ONE).round_().long().cumsum(-1)
        total = int(reached[-1])
        wanted = min(max(math.ceil(params.top_p * total), 1), total)
        kept = 1 + int((reached[:-1] < wanted).sum())
    result = torch.full_like(scaled, -math.inf)
    result[order[:kept]] = ordered[:kept]
    return result


def with_logprobs(
    logits: torch.Tensor, token_id: int, params: SamplingParams, native: NativeSampling | None = None
) -> SampledToken:
    """A sampled token with what was asked for besides.

    Args:
        logits: fp32 [vocabulary], as the model made them.
    """
    if params.num_logprobs is None:
        return SampledToken(token_id)
    count = min(params.num_logprobs, logits.shape[0])
    if native is not None:
        values, best = native.log_probabilities(logits.unsqueeze(0), [token_id], count)
        return SampledToken(token_id, values[0][0], list(zip(best[0], values[0][1:], strict=True)))
    logprobs = torch.log_softmax(logits, dim=-1)
    top: list[tuple[int, float]] = []
    if count > 0:
        ids = torch.sort(logits, descending=True, stable=True).indices[:count]
        top = list(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
    return SampledToken(token_id, float(logprobs[token_id]), top)


def score(logits: torch.Tensor, token_ids: Sequence[int], num_logprobs: int) -> list[ScoredToken]:
    """Log-probabilities of given tokens, one per row of `logits` (fp32 [rows, vocabulary])."""
    chosen = torch.tensor(token_ids, dtype=torch.int64).unsqueeze(1)
    logprobs = torch.log_softmax(logits, dim=-1)
    values = logprobs.gather(1, chosen)
    ranks = (logits > logits.gather(1, chosen)).sum(-1) + 1
    tops: list[list[tuple[int, float]]] = [[] for _ in token_ids]
    if num_logprobs > 0:
        ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :num_logprobs]
        best = logprobs.gather(1, ids)
        for top, row_ids, row_best in zip(tops, ids.tolist(), best.tolist(), strict=True):
            top.extend(zip(row_ids, row_best, strict=True))
    return [
        ScoredToken(token_id, value, rank, top)
        for token_id, value, rank, top in zip(
            token_ids, values.squeeze(1).tolist(), ranks.tolist(), tops, strict=True
        )
    ]


def _mix(value: int) -> int:
    """splitmix64's output function (Steele, Lea, Flood: Fast splittable pseudorandom number generators)."""
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK64
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK64
    return value ^ (value >> 31)


def noise_key(seed: int, choice_index: int, output_position: int, stream: int = 0) -> int:
    """64-bit key of one draw. Any Python integer is a seed.

    Args:
        stream: 0 = what tokens are sampled with; others are independent of it and of each other.
    """
    key = _mix((seed & _MASK64) ^ _mix(((seed >> 64) & _MASK64) + _GOLDEN))
    key = _mix((key + _GOLDEN * (choice_index + 1)) & _MASK64)
    key = _mix((key + _GOLDEN * (output_position + 1)) & _MASK64)
    return _mix((key + _GOLDEN * stream) & _MASK64) if stream else key


def uniform_noise(key: int) -> float:
    """One number, uniform in (0, 1)."""
    return min(((_mix((key + _GOLDEN) & _MASK64) >> 11) + 0.5) * 2.0**-53, _LARGEST_UNIFORM)


def gumbel_noise(keys: Sequence[int], vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise, fp64 [keys, vocabulary], finite; entry (key, id) depends on nothing else."""
    # Full vector lanes everywhere: scalar tails of log may round differently.
    width = -(-vocab_size // _NOISE_LANES) * _NOISE_LANES
    counters = torch.arange(1, width + 1, dtype=torch.int64) * _signed(_GOLDEN)
    bits = torch.tensor([_signed(key) for key in keys], dtype=torch.int64).unsqueeze(1) + counters
    bits = (bits ^ _shift_right(bits, 30)) * _signed(_MIX_1)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(_MIX_2)
    bits = bits ^ _shift_right(bits, 31)
    # The largest rounds to 1, whose noise would be infinite.
    uniform = ((_shift_right(bits, 11).double() + 0.5) * 2.0**-53).clamp_max_(_LARGEST_UNIFORM)
    return uniform.log_().neg_().log_().neg_()[:, :vocab_size]


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    return value - (1 << 64) if value >> 63 else value


def _shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift of int64 (torch's own keeps the sign)."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
