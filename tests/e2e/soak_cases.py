"""Eight clients, all tiers, a fault every few seconds: no wrong answer, nothing leaks. See test_soak.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace as changed
from pathlib import Path
from random import Random

import pytest
from tests.e2e.killing import folder_bytes
from tests.e2e.soak_reference import reference_process
from tests.e2e.soaking import slope_per_minute, soak
from tests.engine.replicas import FINGERPRINT, UNIT, file_store, memory_store, replica
from tests.stores.services import start_mooncake, start_redis

from milepost.cli.serve import share_heaps
from milepost.engine.serving import EMBEDDED_MODEL
from milepost.engine.tokenizer import Tokenizer
from milepost.models.loading import load_model
from milepost.stores.faulty import Faults, FaultyStore
from milepost.stores.port import SegmentStore
from milepost.stores.segment_format import Identity

MINUTES = float(os.environ.get("MILEPOST_SOAK_MINUTES") or 0.4)
SHARED = os.environ.get("MILEPOST_SOAK_SHARED", "").split()
"""Of redis and mooncake, those to have as further tiers."""
NONE = Faults()
KINDS = ("slow", "error", "torn", "bit_flip", "lost", "full", "foreign")


@contextmanager
def shared_stores(folder: Path) -> Iterator[list[SegmentStore]]:
    """Servers of their own and stores over them."""
    identity = Identity(FINGERPRINT)
    stores: list[SegmentStore] = []
    with ExitStack() as ending:
        for kind in SHARED:
            (folder / kind).mkdir()
            if kind == "redis":
                from milepost.stores.redis import RedisStore

                server = start_redis(folder / kind)
                ending.callback(server.kill)
                stores.append(
                    RedisStore(f"redis://127.0.0.1:{server.port}/0", identity, budget_bytes=32 << 20)
                )
            else:
                from milepost.stores.mooncake import MooncakeStore
                from milepost.stores.mooncake_client import MooncakeConnection, MooncakeOptions

                server = start_mooncake(folder / kind)
                ending.callback(server.kill)
                options = MooncakeOptions(f"127.0.0.1:{server.port}", 64 << 20, buffer_bytes=32 << 20)
                connection = MooncakeConnection(options)
                ending.callback(connection.close)
                stores.append(MooncakeStore(connection, identity))
        yield stores


@pytest.mark.timeout(7200)
def test_a_soak_over_all_tiers(tmp_path: Path) -> None:
    share_heaps()  # as a server does
    with shared_stores(tmp_path) as shared:
        run(tmp_path / "segments", shared)


def run(folder: Path, shared: list[SegmentStore]) -> None:
    seed = int(os.environ.get("MILEPOST_SEED") or 1)
    tokenizer, model = Tokenizer.from_directory(EMBEDDED_MODEL), load_model(EMBEDDED_MODEL)
    geometry = model.geometry(UNIT)
    inner = [memory_store(4 << 20), file_store(folder, 24 << 20), *shared]
    stores = [FaultyStore(store, NONE, seed=seed + number) for number, store in enumerate(inner)]

    def disturb(rng: Random) -> None:
        for store in stores:
            kind = rng.choice((*KINDS, ""))
            store.faults = changed(NONE, **{kind: rng.choice((0.2, 1.0))}) if kind else NONE

    cache_bytes = 9 * geometry.request_bytes(1000)
    with (
        replica(model, tokenizer, *stores, cache_bytes=cache_bytes) as served,
        reference_process(cache_bytes=64 << 20) as alone,
    ):
        report = soak(
            served,
            alone.ask,
            minutes=MINUTES,
            num_clients=8,
            seed=seed,
            disturb=disturb,
        )
        for store in stores:
            store.faults = NONE
        served.settle()
        stats = served.engine.fresh_stats().result(30)
        assert stats.num_running == stats.num_waiting == 0
        assert stats.running_state_bytes == 0
        assert stats.peak_committed_bytes <= cache_bytes
    later = [sample for sample in report.rss_samples if sample[0] > 300]
    slope = slope_per_minute(later) if later else None
    print(
        f"\n{' '.join(['memory', 'file', *SHARED])}: {report.num_turns} turns, "
        f"{report.num_loaded} with a load, {len(report.wrong)} wrong; "
        f"threads {min(report.thread_counts)} to {max(report.thread_counts)}, "
        f"files {min(report.file_counts)} to {max(report.file_counts)}; resident "
        f"{report.rss_samples[0][1] >> 20} to {report.rss_samples[-1][1] >> 20} MiB"
        + (f", {slope / 2**20:+.2f} MiB a minute after five" if slope is not None else "")
    )
    assert report.wrong == []
    assert report.num_turns > 20
    assert report.num_loaded > 0
    assert report.file_counts[-1] <= min(report.file_counts) + 8
    assert slope is None or slope <= 1 << 20
    assert folder_bytes(folder) <= 24 << 20
