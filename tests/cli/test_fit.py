"""What start-up and `info` say is true of the engine they describe."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.core.harness import Harness, numbered
from tests.engine.byte_worker import small_geometry
from tests.engine.tiny_tokenizer import write_model_directory
from tests.server.serving import serving_model

from milepost.cli.fit import fit_line, fit_of, interval_text, settings_line
from milepost.config import CacheConfig, SchedulerConfig
from milepost.core.chunking import effective_spacing
from milepost.core.geometry import AttentionGroupSpec, CacheGeometry, RecurrentGroupSpec
from milepost.core.scheduler import Scheduler
from milepost.engine.audit import AuditConfig
from milepost.engine.serving import ServingOptions
from milepost.server.options import ServerOptions


def geometry(alignment: int | None = 1) -> CacheGeometry:
    return CacheGeometry(
        16, (AttentionGroupSpec("mla", 256),), (RecurrentGroupSpec("kda", 300_000, alignment),)
    )


def test_the_smallest_prompt_that_can_hit() -> None:
    """One token more than the match unit hits when it comes again, one fewer never does."""
    harness = Harness()
    smallest = fit_of(harness.geometry, harness.cache.config, 100).smallest_hit_prompt
    assert smallest is not None
    for num_tokens, expected in ((smallest, True), (smallest - 1, False)):
        harness.serve(numbered(num_tokens, num_tokens))
        assert (harness.cached(harness.serve(numbered(num_tokens, num_tokens))) > 0) == expected


def test_so_many_tokens_of_prefixes_fit() -> None:
    """Prompts of one spacing each, until the first is evicted: about as many as promised."""
    harness = Harness(num_records=60, checkpoint_interval=16)
    fit = fit_of(harness.geometry, harness.cache.config, 200)
    assert (fit.cached_tokens, fit.num_checkpoints) == (12 * 16, 12)
    for seed in range(fit.num_checkpoints):
        harness.serve(numbered(16, seed), wanted=[(16, "history")])
    kept = sum(bool(harness.checkpoints(numbered(16, seed))) for seed in range(fit.num_checkpoints))
    # Each prompt leaves two states, `tail` and `end`, where the arithmetic counts one.
    assert fit.num_checkpoints // 2 <= kept <= fit.num_checkpoints


def test_the_longest_request_fits_as_often_as_said() -> None:
    """Without a cache to evict, that many run side by side and one more waits."""
    harness = Harness(num_records=60, enable_prefix_caching=False)
    longest = harness.geometry.max_tokens_for(harness.cache.config.cache_bytes)
    assert fit_of(harness.geometry, harness.cache.config, longest).num_longest_requests == 1
    fit = fit_of(harness.geometry, harness.cache.config, 20)
    for number in range(fit.num_longest_requests + 1):
        harness.add(numbered(17, number), 3)
    harness.step()
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (fit.num_longest_requests, 1)
    harness.run()
    assert all(request.num_preemptions == 0 for request in harness.requests.values())


@pytest.mark.parametrize("alignment", [1, 16, 48, None])
@pytest.mark.parametrize("asked", [None, 0, 32, 1024])
def test_the_interval_is_the_one_the_scheduler_uses(alignment: int | None, asked: int | None) -> None:
    sizes = geometry(alignment)
    cache = CacheConfig(64 << 20, 16, checkpoint_interval=asked)
    fit = fit_of(sizes, cache, 1000)
    scheduler = Scheduler(sizes, cache, SchedulerConfig())
    assert fit.checkpoint_interval == scheduler._spacing == effective_spacing(asked, sizes)
    text = interval_text(fit)
    if asked == 0:
        assert text == "off"
    else:
        assert text.startswith(f"{fit.checkpoint_interval} tokens")
        differs = fit.thinned_interval != fit.checkpoint_interval
        assert ("(while there is room)" in text) == differs


def test_lines_of_start_up(tmp_path: Path) -> None:
    directory = write_model_directory(tmp_path / "m")
    model, worker, _ = serving_model(directory, cache_bytes=8 << 20)
    line = settings_line(model, ServingOptions(), ServerOptions())
    fit = fit_of(small_geometry(), model.cache, model.max_model_len)
    for part in (
        "in force: prefix caching on", "match unit 16",
        f"checkpoints along prompts every {fit.checkpoint_interval} tokens",
        "along answers every 16 tokens (once half of the budget is used: one per 256 tokens and the last",
        "states per path without bound", "audited hits 0 %",
        "128 tokens per step", "32 requests at once", "any number of requests may wait", "no request timeout",
        "bodies up to 32.0 MiB", "20 s to drain", "no API key needed",
    ):  # fmt: skip
        assert part in line, part
    model.cache = CacheConfig(8 << 20, 16, max_states_per_path=3, decode_interval=0, checkpoint_interval=0)
    model.audit = AuditConfig(0.01)
    line = settings_line(model, ServingOptions(), ServerOptions())
    for part in (
        "checkpoints along prompts off", "states per path at most 3",
        "along answers every 16 tokens (once half of the budget is used: the last two)",
        "audited hits 1 % (bits must be equal)",
    ):  # fmt: skip
        assert part in line, part
    model.cache = CacheConfig(8 << 20, 16, shares_generated_tokens=False)
    assert "along answers off," in settings_line(model, ServingOptions(), ServerOptions())
    model.audit = AuditConfig(1.0, 0.001)
    assert "audited hits 100 % (logits may differ by 0.001)" in settings_line(
        model, ServingOptions(), ServerOptions()
    )
    model.cache = CacheConfig(8 << 20, 16, enable_prefix_caching=False)
    line = settings_line(model, ServingOptions(), ServerOptions())
    assert "prefix caching off" in line and "checkpoints" not in line and "audited" not in line
    keys = ServerOptions(api_keys=("first-secret", "second-secret"), request_timeout=60)
    line = settings_line(model, ServingOptions(max_queued_requests=7), keys)
    assert "7 requests may wait, request timeout 60 s" in line
    assert "2 API keys with a cache for each" in line and "secret" not in line
    text = fit_line(fit, CacheConfig(8 << 20, 16))
    assert f"about {fit.cached_tokens:,} tokens of prefixes with {fit.num_checkpoints:,} checkpoints" in text
    assert "smallest prompt that can hit: 17 tokens" in text
    worker.close()
