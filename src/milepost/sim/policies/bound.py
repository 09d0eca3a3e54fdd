"""How much any policy could reuse when states have to be paid for: an upper bound by prices.

A request that reuses depth d needs the pages of its first d units and the state at d. Each of these
records must have been kept since the path was last used there, and each such interval ends with
exactly one request, so the cost of a reuse belongs to that request alone. With a price per byte and
step, the best each request could do is a small maximum; the sum of these, plus what the whole budget
costs at those prices, bounds every policy from above, clairvoyant ones included (Lagrangian duality).
Any prices give a valid bound; a subgradient search lowers it.

Left out, which only raises the bound: the memory requests need while they run, and that a state
inside a reused part cannot be made again when the path is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from milepost.core.units import floor_div


@dataclass(frozen=True, slots=True)
class ReuseOption:
    """Depths of one request that an earlier request has reached.

    Attributes:
        last_used: for unit u < len(last_used), index of the last request before that used it. Falls
            with u, since whoever used a unit used all units before it.
    """

    request: int
    last_used: tuple[int, ...]


def reuse_options(requests: Sequence[tuple[int, Sequence[int]]], block_tokens: int) -> list[ReuseOption]:
    """What each request could reuse if nothing was ever given up.

    Args:
        requests: (prompt tokens, block ids) in order of arrival. The last token is never reused.
    """
    seen: dict[int, int] = {}
    options = []
    for index, (num_tokens, blocks) in enumerate(requests):
        usable = blocks[: floor_div(num_tokens - 1, block_tokens)]
        last: list[int] = []
        for block in usable:
            previous = seen.get(block)
            if previous is None:
                break
            last.append(previous)
        if last:
            options.append(ReuseOption(index, tuple(last)))
        for block in usable:
            seen[block] = index
    return options


@dataclass(frozen=True, slots=True)
class ReuseBound:
    """Tokens that can be reused, from both sides.

    Attributes:
        upper: no policy reuses more.
        per_request: what a schedule reuses that knows the future and keeps to the budget at every step.
    """

    upper: float
    per_request: list[int]

    @property
    def reached(self) -> int:
        """Tokens the schedule reuses in all."""
        return sum(self.per_request)


def reuse_bound(
    requests: Sequence[tuple[int, Sequence[int]]],
    block_tokens: int,
    *,
    page_bytes: int,
    state_bytes: int,
    cache_bytes: int,
    measured_from: int = 0,
    num_rounds: int = 150,
    on_progress: Callable[[int, int], None] | None = None,
) -> ReuseBound:
    """Bounds of the tokens that requests from `measured_from` on can reuse.

    Args:
        num_rounds: rounds of the price search; more make the bound tighter, never wrong.
    """
    options = [o for o in reuse_options(requests, block_tokens) if o.request >= measured_from]
    steps = len(requests)
    search = _Prices(options, steps, block_tokens, page_bytes, state_bytes, cache_bytes)
    best = search.best_uniform()
    prices = best_prices = [search.price] * steps
    for number in range(num_rounds):
        bound, slack = search.evaluate(prices)
        if bound < best:
            best, best_prices = bound, prices
        norm = sum(value * value for value in slack)
        if norm == 0.0:
            break
        # Polyak's step towards a target a little below the best bound known.
        step = max(bound - best * (1.0 - 0.1 / (1.0 + 0.05 * number)), 0.0) / norm
        prices = [max(0.0, price - step * value) for price, value in zip(prices, slack, strict=True)]
        if on_progress is not None:
            on_progress(number + 1, num_rounds)
    return ReuseBound(best, search.schedule(best_prices))


class _Prices:
    """Evaluates the dual for given prices; bytes are counted in budgets, so that prices are tokens."""

    def __init__(
        self,
        options: Sequence[ReuseOption],
        steps: int,
        block_tokens: int,
        page_bytes: int,
        state_bytes: int,
        cache_bytes: int,
    ) -> None:
        self.options = options
        self.steps = steps
        self.block_tokens = block_tokens
        self.page = page_bytes / cache_bytes
        self.state = state_bytes / cache_bytes
        self.price = 0.0

    def best_uniform(self) -> float:
        """The lowest bound with one price for all steps (the bound is convex in it)."""
        high = float(self.block_tokens)
        while self.evaluate([2 * high] * self.steps)[0] < self.evaluate([high] * self.steps)[0]:
            high *= 2
        low, high = 0.0, 2 * high
        best = float("inf")
        for _ in range(40):
            third = (high - low) / 3
            left, right = low + third, high - third
            at_left = self.evaluate([left] * self.steps)[0]
            at_right = self.evaluate([right] * self.steps)[0]
            if min(at_left, at_right) < best:
                best, self.price = min((at_left, left), (at_right, right))
            if at_left < at_right:
                high = right
            else:
                low = left
        return best

    def evaluate(self, prices: Sequence[float]) -> tuple[float, list[float]]:
        """(bound, free share of the budget at every step under each request's best choice)."""
        total = _running_sums(prices)
        change = [0.0] * (self.steps + 1)
        bound = total[-1]
        page, state, tokens = self.page, self.state, self.block_tokens
        for option in self.options:
            now = total[option.request]
            best, depth, paid = 0.0, 0, 0.0
            for units, since in enumerate(option.last_used, start=1):
                held = now - total[since + 1]
                paid += page * held
                gain = units * tokens - paid - state * held
                if gain > best:
                    best, depth = gain, units
            if depth:
                bound += best
                for since in option.last_used[:depth]:
                    change[since + 1] += page
                    change[option.request] -= page
                since = option.last_used[depth - 1]
                change[since + 1] += state
                change[option.request] -= state
        slack, used = [], 0.0
        for index in range(self.steps):
            used += change[index]
            slack.append(1.0 - used)
        return bound, slack

    def schedule(self, prices: Sequence[float]) -> list[int]:
        """Keep what pays best at these prices as long as it fits at every step; tokens per request."""
        total = _running_sums(prices)
        ranked: list[tuple[float, int, int]] = []
        for number, option in enumerate(self.options):
            now, paid = total[option.request], 0.0
            for units, since in enumerate(option.last_used, start=1):
                held = now - total[since + 1]
                paid += self.page * held
                gain = units * self.block_tokens
                ranked.append(((paid + self.state * held) / gain, number, units))
        ranked.sort()
        used = [0.0] * self.steps
        chosen: dict[int, int] = {}
        for _, number, units in ranked:
            option = self.options[number]
            before = chosen.get(number, 0)
            if units <= before:
                continue
            self._occupy(used, option, before, -1.0)
            if self._fits(used, option, units):
                chosen[number] = units
                self._occupy(used, option, units, 1.0)
            else:
                self._occupy(used, option, before, 1.0)
        reused = [0] * self.steps
        for number, units in chosen.items():
            reused[self.options[number].request] = units * self.block_tokens
        return reused

    def _spans(self, option: ReuseOption, units: int) -> list[tuple[int, int, float]]:
        """(first step, end step, share of the budget) of what reusing `units` holds, disjoint spans."""
        spans: list[tuple[int, int, float]] = []
        end = option.request
        share = self.page * units + self.state
        for since in option.last_used[:units]:
            start = min(since + 1, end)
            if start < end:
                spans.append((start, end, share))
                end = start
            share -= self.page
        return spans

    def _fits(self, used: Sequence[float], option: ReuseOption, units: int) -> bool:
        return all(
            max(used[start:end]) + share <= 1.0 + 1e-12 for start, end, share in self._spans(option, units)
        )

    def _occupy(self, used: list[float], option: ReuseOption, units: int, sign: float) -> None:
        for start, end, share in self._spans(option, units) if units else ():
            used[start:end] = [value + sign * share for value in used[start:end]]


def _running_sums(prices: Sequence[float]) -> list[float]:
    total = [0.0]
    for price in prices:
        total.append(total[-1] + price)
    return total
