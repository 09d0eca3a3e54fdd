"""`milepost info`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from milepost.cli.fit import draft_text, fit_of, interval_text
from milepost.cli.sizes import format_size

if TYPE_CHECKING:
    from milepost.core.geometry import CacheGeometry
    from milepost.engine.serving import ServingOptions
    from milepost.models.description import ModelDescription


def show_info(directory: Path | None, options: ServingOptions, *, check_weights: bool = False) -> None:
    """Print a table about a model and a budget, from config.json alone.

    Args:
        check_weights: also compare the headers of the weight files with the config.

    Raises:
        ConfigError, CheckpointFileError: the model cannot be served, or not with this budget.
    """
    from milepost.engine.memory import weight_bytes
    from milepost.engine.serving import EMBEDDED_MODEL, check_budget
    from milepost.models.description import describe
    from milepost.models.hub import model_directory

    path = model_directory(EMBEDDED_MODEL if directory is None else directory)
    about = describe(path, **options.model_options)
    cache = options.cache_config()
    geometry = about.layout.geometry(options.match_unit)
    max_model_len = check_budget(geometry, cache, about.max_model_len, options.max_model_len)
    fit = fit_of(geometry, cache, max_model_len)
    table = Table(title=str(path.resolve().name), show_header=False)
    table.add_column(style="bold")
    table.add_column()
    rows = {
        "model type": about.model_type,
        "parameters": f"{about.num_parameters:,}",
        "dtype": about.precision,
        "weights in memory": format_size(weight_bytes(path, about)),
        "layers": _layers(about.layer_kinds) + f"; {about.num_moe_layers} with experts",
        "vocabulary": f"{about.vocab_size:,}",
        "declared context": f"{about.max_model_len:,} tokens",
        "KV bytes per token": f"{geometry.bytes_per_token:,}",
        **_states(about, geometry),
        "one state costs as much as": _break_even(about.break_even_tokens),
        "match unit": f"{cache.match_unit} tokens; a page record takes {format_size(geometry.unit_bytes)}",
        "checkpoint interval": interval_text(fit)
        + ("; the default" if cache.checkpoint_interval is None else ""),
        "smallest prompt that can hit": f"{fit.smallest_hit_prompt} tokens",
        "budget": format_size(cache.cache_bytes),
        "longest request": f"{fit.longest_request:,} tokens",
        "of these at once": f"{fit.num_longest_requests:,}",
        "prefixes kept": f"about {fit.cached_tokens:,} tokens with {fit.num_checkpoints:,} checkpoints",
    }
    if about.drafter is not None:
        rows["drafter"] = draft_text(about.drafter, geometry)
    if check_weights:
        rows["weights"] = _checked_weights(path, options)
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)


def _states(about: ModelDescription, geometry: CacheGeometry) -> dict[str, str]:
    kept, running = geometry.kept_state_bytes, geometry.state_bytes
    rows = {"bytes per state": f"{kept:,} ({format_size(kept)})"}
    if geometry.keeps_states_apart:
        rows["while it runs"] = f"{running:,} ({format_size(running)})"
    rows["of one linear layer"] = f"{about.layer_state_bytes:,}"
    return rows


def _checked_weights(path: Path, options: ServingOptions) -> str:
    from milepost.models.dry_run import check_checkpoint

    report = check_checkpoint(path, dtype=options.dtype, **options.draft_options)
    unused = f"; {len(report.unused_tensors):,} without a use" if report.unused_tensors else ""
    return f"{report.num_tensors:,} tensors as expected, {format_size(report.num_bytes)}{unused}"


def _layers(kinds: tuple[str, ...]) -> str:
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    return f"{len(kinds)} ({counts})"


def _break_even(num_tokens: float | None) -> str:
    return "(no KV)" if num_tokens is None else f"{num_tokens:,.0f} tokens of KV"
