"""SIGKILL at random moments costs nothing that was durable and changes no answer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.e2e.killing import run_kills
from tests.engine.replicas import replica

from milepost.engine.serving import EMBEDDED_MODEL
from milepost.engine.tokenizer import Tokenizer
from milepost.models.loading import load_model

NUM_KILLS = int(os.environ.get("MILEPOST_KILLS") or 6)
ROOMY, TIGHT = 64 << 20, 3 << 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("budget_bytes", "num_kills"), [(ROOMY, NUM_KILLS), (TIGHT, NUM_KILLS // 3)])
def test_killed_servers_go_on_from_their_folder(tmp_path: Path, budget_bytes: int, num_kills: int) -> None:
    """`make kill-test` kills fifty times; the full suite a few times. In the tight folder segments are
    evicted all the time, so that only answers and bytes are checked."""
    seed = int(os.environ.get("MILEPOST_SEED") or 1)
    tokenizer = Tokenizer.from_directory(EMBEDDED_MODEL)
    with replica(load_model(EMBEDDED_MODEL), tokenizer) as uninterrupted:
        report = run_kills(
            tmp_path / "persist",
            tmp_path / "log",
            lambda prompt, length: uninterrupted.ask(prompt, length).tokens,
            num_kills=num_kills,
            budget_bytes=budget_bytes,
            seed=seed,
        )
    print(
        f"\n{report.num_kills} kills, {report.num_turns} turns of up to {max(report.lengths)} tokens; "
        f"{report.num_resumed} first turns after a restart had something durable, "
        f"{report.num_resumed_tokens} tokens reused in them; at most {report.most_bytes:,} of "
        f"{budget_bytes:,} bytes on disk"
    )
    assert report.num_kills >= num_kills
    assert report.num_resumed >= num_kills // 3
