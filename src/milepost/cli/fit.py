"""What a budget holds: plain arithmetic on the cache's sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from milepost.cli.sizes import format_size
from milepost.config import CacheConfig
from milepost.core.chunking import effective_spacing
from milepost.core.geometry import CacheGeometry
from milepost.engine.roles import BOTH

if TYPE_CHECKING:
    from milepost.engine.memory import MemoryPlan
    from milepost.engine.serving import ServingModel, ServingOptions
    from milepost.models.drafters import DrafterSpec
    from milepost.server.options import ServerOptions


@dataclass(frozen=True, slots=True)
class Fit:
    """Attributes:
    longest_request: tokens, prompt and output.
    num_longest_requests: that many of them run at the same time.
    checkpoint_interval: effective tokens between `interval` checkpoints while there is room; 0 = off.
    thinned_interval: tokens between checkpoints in a full cache, by which the next two are counted.
    cached_tokens: tokens of prefixes the budget keeps.
    num_checkpoints: checkpoints among them.
    smallest_hit_prompt: tokens; None if prefix caching is off.
    """

    longest_request: int
    num_longest_requests: int
    checkpoint_interval: int
    thinned_interval: int
    cached_tokens: int
    num_checkpoints: int
    smallest_hit_prompt: int | None


def fit_of(geometry: CacheGeometry, cache: CacheConfig, max_model_len: int) -> Fit:
    """See `Fit`; `max_model_len` already fits the budget."""
    interval = effective_spacing(cache.checkpoint_interval, geometry)
    is_default = cache.checkpoint_interval is None
    spacing = geometry.default_checkpoint_interval() if is_default else interval or max_model_len
    segment_bytes = spacing // geometry.match_unit * geometry.unit_bytes + geometry.checkpoint_bytes
    num_segments = cache.cache_bytes // max(1, segment_bytes)
    return Fit(
        longest_request=max_model_len,
        num_longest_requests=cache.cache_bytes // geometry.request_bytes(max_model_len),
        checkpoint_interval=interval,
        thinned_interval=spacing,
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
        parts.append(
            f"about {fit.cached_tokens:,} tokens of prefixes with {fit.num_checkpoints:,} checkpoints"
        )
        parts.append(f"smallest prompt that can hit: {fit.smallest_hit_prompt} tokens")
    return "; ".join(parts)


def memory_line(plan: MemoryPlan) -> str:
    """What is going to be taken of the machine's memory, and what may be."""
    parts = [f"{name} {format_size(size)}" for name, size in plan.parts().items() if size]
    limit = f"{format_size(plan.limit.num_bytes)} ({plan.limit.source})"
    return f"memory: {', '.join(parts)}; {format_size(plan.total)} of {limit}"


def draft_text(drafter: DrafterSpec, geometry: CacheGeometry) -> str:
    """What drafts with weights, and what that adds to the cache: its last attention group."""
    group = geometry.attention[-1]
    name = f"{drafter.method} from {drafter.directory.name}" if drafter.directory is not None else "1 module"
    if drafter.num_modules > 1:
        name = f"{drafter.num_modules} modules"
    taps = f", {group.bytes_per_page:,} per page for taps" if group.bytes_per_page else ""
    return f"{name}; {group.bytes_per_token:,} bytes per token{taps}"


def interval_text(fit: Fit) -> str:
    """The spacing of `interval` checkpoints."""
    if not fit.checkpoint_interval:
        return "off"
    text = f"{fit.checkpoint_interval} tokens"
    if fit.thinned_interval != fit.checkpoint_interval:
        text += " (while there is room)"
    return text


def every(spacing: str) -> str:
    """`off` stays as it is."""
    return spacing if spacing == "off" else f"every {spacing}"


def answer_interval_text(cache: CacheConfig) -> str:
    """Which checkpoints inside an answer there are, see `Evictor.thin_decode`."""
    if not cache.shares_generated_tokens:
        return "off"
    kept = f"one per {cache.decode_interval} tokens and " if cache.decode_interval else ""
    return f"every {cache.match_unit} tokens (once half of the budget is used: {kept}the last two)"


def settings_line(model: ServingModel, options: ServingOptions, server: ServerOptions) -> str:
    """What is in force, defaults included."""
    cache, audit = model.cache, model.audit
    parts = [f"match unit {cache.match_unit}"]
    if cache.enable_prefix_caching:
        fit = fit_of(model.geometry, cache, model.max_model_len)
        limit = cache.max_states_per_path
        parts = [
            "prefix caching on",
            *parts,
            f"checkpoints along prompts {every(interval_text(fit))}",
            f"along answers {answer_interval_text(cache)}",
            f"states per path {'without bound' if limit is None else f'at most {limit}'}",
            f"audited hits {100 * audit.rate:g} %" + (f" ({audit.rule})" if audit.rate else ""),
        ]
    else:
        parts = ["prefix caching off", *parts]
    parts.append(f"{model.scheduler.max_num_batched_tokens} tokens per step")
    parts.append(f"{model.scheduler.max_num_seqs} requests at once")
    queue = options.max_queued_requests
    parts.append(f"{'any number of' if queue is None else queue} requests may wait")
    timeout = server.request_timeout
    parts.append("no request timeout" if timeout is None else f"request timeout {timeout:g} s")
    parts.append(f"bodies up to {format_size(server.max_body_bytes)}")
    parts.append(f"{server.drain_seconds:g} s to drain")
    if server.role != BOTH:
        parts.append(f"role {server.role}")
    defaults = model.defaults.described()
    parts.append(
        f"sampling defaults of the model: {defaults}" if defaults else "no sampling defaults of the model"
    )
    num_keys = len(server.api_keys) + len(server.admin_api_keys)
    caches = "one cache for all" if server.share_prefix_across_keys else "a cache for each"
    parts.append(f"{num_keys} API keys with {caches}" if num_keys else "no API key needed")
    return "in force: " + ", ".join(parts)
