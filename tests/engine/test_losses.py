"""Stores that lost what they had, by hand or by accident: what is still in memory is saved again."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.engine.replicas import UNIT, Kept, Replica, bound, file_store, memory_store, replica, words

from milepost.engine import tiering_limits as limits
from milepost.engine.tokenizer import Tokenizer
from milepost.models.loading import LoadedModel
from milepost.stores.memory import MemoryStore
from milepost.stores.port import StoredSegment


def settled(here: Replica) -> None:
    """Losses are found behind a save, and what follows from them is another one."""
    assert here.tiers is not None
    for _ in range(3):
        here.settle()
        here.tiers.flush(10)
        here.engine.look(lambda scheduler, now: None).result(10)


def test_a_removed_folder_is_filled_again_by_the_next_turn(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    history = words(1, 200)
    with replica(model, tokenizer, file_store(tmp_path / "store")) as first:
        history += first.ask(history, 40).tokens + words(2, 40)
        settled(first)
        shutil.rmtree(tmp_path / "store")
        history += first.ask(history, 40).tokens
        settled(first)
        assert first.engine.tiering is not None
        assert first.engine.tiering.saves.num_lost > 0
    following = history + words(3, 9)
    with replica(model, tokenizer, file_store(tmp_path / "store")) as second:
        resumed = second.ask(following)
    with replica(model, tokenizer) as cold:
        assert resumed.same_as(cold.ask(following))
    assert resumed.load.outcome == "loaded"
    assert resumed.reuse.num_computed_tokens <= bound(len(history) - 1, len(following))


def test_only_the_store_that_lost_it_is_filled_again(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    history = words(1, 300)
    memory = Kept(memory_store())
    with replica(model, tokenizer, memory, file_store(tmp_path / "store")) as here:
        history += here.ask(history, 2).tokens + words(2, 70)
        settled(here)
        shutil.rmtree(tmp_path / "store")
        here.ask(history, 2)
        settled(here)
        assert here.tiers is not None
        in_memory, on_disk = here.tiers.counters()
        assert on_disk.outcomes["save", "saved"] > in_memory.outcomes["save", "saved"] // 2
    with replica(model, tokenizer, file_store(tmp_path / "store")) as second:
        assert second.ask(history, 2).reuse.num_computed_tokens <= bound(len(history), len(history))


def test_what_could_not_be_loaded_is_saved_again_once_it_is_computed(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    prompt = words(1, 300)
    with replica(model, tokenizer, file_store(tmp_path / "store")) as here:
        here.ask(prompt, 2)
        settled(here)
        assert here.engine.reset_prefix_cache().result(10)
        objects = [
            path for path in (tmp_path / "store").rglob("*") if path.is_file() and len(path.name) == 64
        ]
        assert objects
        for path in objects:
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        again = here.ask(prompt, 2)
        assert again.load.outcome == "failed" and again.reuse.num_cached_tokens == 0
        settled(here)
    with replica(model, tokenizer, file_store(tmp_path / "store")) as second:
        resumed = second.ask(prompt, 2)
    assert resumed.same_as(again)
    assert resumed.load.outcome == "loaded"
    assert resumed.reuse.num_computed_tokens <= bound(len(prompt), len(prompt))


class Forgetful(MemoryStore):
    """Loses at once what nothing builds on yet; counts how often each segment was brought."""

    def __init__(self) -> None:
        from tests.engine.replicas import FINGERPRINT

        from milepost.stores.segment_format import Identity

        super().__init__(Identity(FINGERPRINT), budget_bytes=1 << 30)
        self.times: Counter[bytes] = Counter()

    def save(self, segments: Sequence[StoredSegment], *, deadline_seconds: float) -> list[bool]:
        self.times.update(segment.header.key for segment in segments)
        saved = super().save(segments, deadline_seconds=deadline_seconds)
        self.remove([segment.header.key for segment in segments], deadline_seconds=1)
        return saved


def test_a_store_that_keeps_nothing_is_not_written_to_for_ever(
    model: LoadedModel, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Forgetful()
    history = words(1, 200)
    with replica(model, tokenizer, store) as here:
        for turn in range(6):
            history += here.ask(history, 2).tokens + words(turn, UNIT + 8)
            settled(here)
        assert here.engine.tiering is not None and here.engine.tiering.saves.num_lost > 1
        assert max(store.times.values()) <= 3
        monkeypatch.setattr(limits, "LOSS_PAUSE_SECONDS", 0.0)
        before = store.times.total()
        here.ask(history, 2)
        settled(here)
        # One path, once more.
        assert before < store.times.total() <= before + 3 * len(store.times)
