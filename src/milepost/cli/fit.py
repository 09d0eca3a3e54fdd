"""What a budget holds: plain arithmetic on the cache's sizes."""

from __future__ import annotations

from dataclasses import dataclass

from milepost.cli.sizes import format_size
from milepost.config import CacheConfig
from milepost.core.geometry import CacheGeometry


@dataclass(frozen=True, slots=True)
class Fit:
    """Attributes:
    longest_request: tokens, prompt and output.
    num_longest_requests: that many of them run at the same time.
    checkpoint_interval: effective tokens between `interval` checkpoints; 0 = off.
    cached_tokens: tokens of prefixes the budget keeps, with a checkpoint every interval.
    num_checkpoints: checkpoints among them.
    smallest_hit_prompt: tokens; None if prefix caching is off.
    """

    longest_request: int
    num_longest_requests: int
    checkpoint_interval: int
    cached_tokens: int
    num_checkpoints: int
    smallest_hit_prompt: int | None


def fit_of(geometry: CacheGeometry, cache: CacheConfig, max_model_len: int) -> Fit:
    """See `Fit`; `max_model_len` already fits the budget."""
    interval = cache.checkpoint_interval
    if interval is None:
        interval = geometry.default_checkpoint_interval()
    spacing = interval or max_model_len
    segment_bytes = spacing // geometry.match_unit * geometry.unit_bytes + geometry.checkpoint_bytes
    num_segments = cache.cache_bytes // max(1, segment_bytes)
    return Fit(
        longest_request=max_model_len,
        num_longest_requests=cache.cache_bytes // geometry.request_bytes(max_model_len),
        checkpoint_interval=interval,
        cached_tokens=num_segments * spacing,
        num_checkpoints=num_segments,
        smallest_hit_prompt=geometry.match_unit + 1 if cache.enable_prefix_caching else None,
    )


def fit_line(fit: Fit, cache: CacheConfig) -> str:
    """The start-up line."""
    parts = [
        f"cache {format_size(cache.cache_bytes)}",
        f"requests up to {fit.longest_request:,} tokens, {fit.num_longest_requests:,} of that length at once",
    ]
    if fit.smallest_hit_prompt is None:
        parts.append("prefix caching is off")
    else:
        parts.append(f"about {fit.cached_tokens:,} tokens of prefixes")
        parts.append(f"smallest prompt that can hit: {fit.smallest_hit_prompt} tokens")
    return "; ".join(parts)
