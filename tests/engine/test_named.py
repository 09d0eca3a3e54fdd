"""Conversations by name or prompt: saved over restarts, loaded ahead, pinned, forgotten; faults too."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from array import array
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.engines import collect
from tests.engine.replicas import (
    UNIT,
    Answered,
    Kept,
    Replica,
    bound,
    file_store,
    memory_store,
    replica,
    words,
)
from typer.testing import CliRunner

from milepost.cli.cache import app as cache_commands
from milepost.core.hashing import CacheDomain, KeyChain
from milepost.core.transfers import StoredCheckpoint
from milepost.engine import manifests
from milepost.engine.explain import ReuseExplainer
from milepost.engine.manifests import MAX_NAMES, NAME, NAME_REASONS, StoresUnavailable, checked_name
from milepost.engine.named import NamedConversations, common_prefix, usable
from milepost.engine.named_messages import Meant
from milepost.engine.tokenizer import Tokenizer
from milepost.errors import RequestError, StoreError
from milepost.models.loading import LoadedModel
from milepost.stores.faulty import Faults, FaultyStore
from milepost.stores.folder import LEDGER_NAME
from milepost.stores.port import SegmentHeader
from milepost.stores.segment_format import decode

T = TypeVar("T")
OPEN = CacheDomain()


def run(action: Callable[[], Awaitable[T]]) -> T:
    async def main() -> T:
        return await action()

    return asyncio.run(main())


class Caller:
    """What one tenant asks one replica."""

    def __init__(self, model: LoadedModel, there: Replica, domain: CacheDomain = OPEN) -> None:
        self.named = NamedConversations(there.engine, model.geometry(UNIT), 4096)
        self.domain = domain

    def meant(self, what: str | list[int], public: int | None = None) -> Meant:
        if isinstance(what, str):
            return Meant(self.domain, what)
        return Meant(self.domain, None, array("I", what), public)

    def save(self, name: str, prompt: list[int] | None = None, *, public: int | None = None, **options: Any):
        meant = self.meant(name if prompt is None else prompt, public)
        return run(lambda: self.named.save(meant, name, **options))

    def load(self, what: str | list[int], **options: Any):
        return run(lambda: self.named.load(self.meant(what), **options))

    def pin(self, what: str | list[int], seconds: float = 100.0) -> int:
        return run(lambda: self.named.pin(self.meant(what), seconds))

    def unpin(self, what: str | list[int]) -> int:
        return run(lambda: self.named.unpin(self.meant(what)))

    def forget(self, what: str | list[int], **options: Any):
        return run(lambda: self.named.forget(self.meant(what), **options))

    def names(self) -> list[str]:
        return [entry.name for entry in run(lambda: self.named.names(self.domain))]


def stored_headers(folder: Path) -> list[SegmentHeader]:
    """Of all objects in the folder of a file store."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != LEDGER_NAME]
    return [decode(path.read_bytes()).header for path in files]


def stored_reasons(folder: Path) -> list[str]:
    return sorted(header.reason for header in stored_headers(folder))


# ------------------------------------------------------------------ save, restart, load
@pytest.mark.parametrize("num_tokens", [64, 65, 300])
def test_a_saved_conversation_is_a_plain_hit_after_a_restart_and_a_load(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path, num_tokens: int
) -> None:
    prompt = words(num_tokens, num_tokens)
    with replica(model, tokenizer, file_store(tmp_path)) as first:
        answer = first.ask(prompt, 40)
        history = prompt + answer.tokens[:-1]
        saved = Caller(model, first).save("chat", history)
        assert saved.saved_tokens == saved.cached_tokens == len(history) // UNIT * UNIT
        assert saved.num_segments >= 1 and saved.num_bytes > 0
    following = history + words(5, 9)
    with replica(model, tokenizer) as cold:
        expected = cold.ask(following)
    with replica(model, tokenizer, file_store(tmp_path)) as second:
        caller = Caller(model, second)
        assert caller.names() == ["chat"]
        loaded = caller.load("chat")
        assert loaded.cached_tokens == saved.saved_tokens
        assert (loaded.note.outcome, loaded.note.tier) == ("loaded", "file")
        assert loaded.note.num_tokens == saved.saved_tokens
        resumed = second.ask(following)
        assert resumed.same_as(expected)
        assert resumed.reuse.load is None or resumed.reuse.load.num_tokens == 0
        assert resumed.reuse.num_computed_tokens <= bound(len(history), len(following))
        assert caller.load("chat").note.outcome == "cached"
        assert second.engine.tiering is not None
        assert second.engine.tiering.prefetch_outcomes == {"loaded": 1}
        assert second.engine.tiering.num_loaded_tokens == 0


def test_a_name_follows_its_conversation(model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path) -> None:
    history = words(1, 100)
    with replica(model, tokenizer, file_store(tmp_path)) as first:
        caller = Caller(model, first)
        for turn in range(4):
            first.ask(history, 1)
            assert caller.save("chat", history).saved_tokens == len(history) // UNIT * UNIT
            history = history + words(turn, 70)
        assert caller.save("chat").saved_tokens == 310 // UNIT * UNIT, "saved again as it is"
        first.ask(words(2, 50), 1)
        caller.save("Another:1", words(2, 50))
        assert caller.names() == ["Another:1", "chat"]
    with replica(model, tokenizer, file_store(tmp_path)) as second:
        assert Caller(model, second).load("chat").cached_tokens == 310 // UNIT * UNIT


def test_load_by_prompt_needs_no_name_and_takes_what_there_is(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with replica(model, tokenizer, file_store(tmp_path)) as first:
        first.ask(words(1, 200), 1)
    with replica(model, tokenizer, file_store(tmp_path)) as second:
        caller = Caller(model, second)
        assert caller.load(words(1, 200) + words(2, 100)).cached_tokens == 192
        nothing = caller.load(words(3, 100))
        assert (nothing.cached_tokens, nothing.note.outcome) == (0, "not_found")


def test_a_save_brings_back_what_a_store_has_lost(model: LoadedModel, tokenizer: Tokenizer) -> None:
    store = memory_store()
    with replica(model, tokenizer, store) as there:
        there.ask(words(1, 200), 1)
        there.settle()
        assert store.used_bytes
        for node in list(there.scheduler.cache.tree.state_nodes.values()):
            store.remove([node.key], deadline_seconds=1.0)
        assert Caller(model, there).save("chat", words(1, 200)).saved_tokens == 192
        assert there.engine.reset_prefix_cache().result(10)
        assert there.ask(words(1, 200), 1).load.num_tokens == 192


def test_the_commands_for_folders_know_names(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = tmp_path / "kv"
    with replica(model, tokenizer, file_store(folder)) as there:
        there.ask(words(1, 200), 1)
        Caller(model, there).save("chat", words(1, 200))
    commands = CliRunner()
    listed = json.loads(commands.invoke(cache_commands, ["ls", str(folder), "--json"]).stdout)
    assert {"manifest", "names"} <= {each["reason"] for each in listed}
    (row,) = json.loads(commands.invoke(cache_commands, ["stat", str(folder), "--json"]).stdout)["models"]
    assert (row["tokens"], row["longest_prefix"], row["unusable"], row["unreadable"]) == (192, 192, 0, 0)
    assert commands.invoke(cache_commands, ["verify", str(folder)]).exit_code == 0
    assert commands.invoke(cache_commands, ["gc", str(folder)]).exit_code == 0
    with replica(model, tokenizer, file_store(folder)) as again:
        assert Caller(model, again).names() == ["chat"]


def test_every_tier_gets_it(model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path) -> None:
    fast = memory_store()
    with replica(model, tokenizer, fast, file_store(tmp_path)) as first:
        first.ask(words(1, 200), 1)
        first.settle()
        assert first.tiers is not None and first.tiers.flush(10)
        for path in tmp_path.rglob("*"):
            if path.is_file() and path.name != LEDGER_NAME:
                path.unlink()  # the disk lost everything, and memory did not
        saved = Caller(model, first).save("chat", words(1, 200))
        assert saved.tokens_by_store == {"memory": 192, "file": 192}
    with replica(model, tokenizer, file_store(tmp_path)) as second:
        assert Caller(model, second).load("chat").cached_tokens == 192


def test_each_store_is_told_apart(model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path) -> None:
    class Full(Kept):
        def save(self, segments: Any, *, deadline_seconds: float) -> list[bool]:
            names = [segment.header.reason in NAME_REASONS for segment in segments]
            kept = [segment for segment, is_name in zip(segments, names, strict=True) if is_name]
            self._store.save(kept, deadline_seconds=deadline_seconds)
            return names

    with replica(model, tokenizer, memory_store(), Full(file_store(tmp_path))) as there:  # type: ignore[arg-type]
        there.ask(words(1, 200), 1)
        saved = Caller(model, there).save("chat", words(1, 200))
        assert saved.tokens_by_store == {"memory": 192, "file": 0}
        assert saved.saved_tokens == 192


@given(st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=40))
def test_the_common_prefix(head: bytes, left: bytes, right: bytes) -> None:
    left, right = head + left, head + right
    expected = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )
    assert common_prefix(left, right) == expected


def test_a_segment_is_usable_if_its_whole_path_is_there() -> None:
    offers = [StoredCheckpoint(*bounds, 1, "end") for bounds in ((0, 32), (32, 96), (64, 128), (128, 160))]
    assert usable(offers) == {32, 96}
    assert usable(offers[1:]) == set()


# ------------------------------------------------------------------ what is refused
def test_without_stores_it_says_which_flag_is_missing(model: LoadedModel, tokenizer: Tokenizer) -> None:
    with replica(model, tokenizer) as there:
        caller = Caller(model, there)
        there.ask(words(1, 100), 1)
        for action in (lambda: caller.save("chat", words(1, 100)), lambda: caller.load("chat")):
            with pytest.raises(RequestError, match="--persist.*--kv-store") as raised:
                action()
            assert (raised.value.code, raised.value.status) == ("no_store", 400)
        assert caller.names() == []
        assert caller.pin(words(1, 100)) == 96
        assert caller.forget(words(1, 100)).num_checkpoints >= 1
        assert not there.scheduler.cache.tree.index


def test_unknown_names_and_prompts_that_are_not_cached(model: LoadedModel, tokenizer: Tokenizer) -> None:
    with replica(model, tokenizer, memory_store()) as there:
        caller = Caller(model, there)
        for action in (caller.load, caller.pin, caller.unpin, caller.forget, caller.save):
            with pytest.raises(RequestError, match="no conversation named 'nobody'") as raised:
                action("nobody")
            assert (raised.value.param, raised.value.status) == ("name", 404)
        for action in (lambda: caller.save("chat", words(1, 100)), lambda: caller.pin(words(1, 100))):
            with pytest.raises(RequestError, match="send it as a request first") as raised:
                action()
            assert (raised.value.code, raised.value.status) == ("not_cached", 404)
        with pytest.raises(RequestError, match="more than fit"):
            caller.load(words(1, 4096))
        assert caller.names() == []


@pytest.mark.parametrize("name", ["", "a b", "a/b", "ä", "x" * 129, "a\n", "%2e", "a?b", ".", ".."])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(RequestError) as raised:
        checked_name(name)
    assert raised.value.param == "name"
    assert not NAME.fullmatch(name)


def test_there_is_a_bound_on_names(
    model: LoadedModel, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "MAX_NAMES", 3)
    assert MAX_NAMES == 1024
    with replica(model, tokenizer, memory_store()) as there:
        caller = Caller(model, there)
        there.ask(words(1, 100), 1)
        for name in "abc":
            caller.save(name, words(1, 100))
        with pytest.raises(RequestError, match="3 names already"):
            caller.save("d", words(1, 100))
        caller.save("b", words(1, 100))
        caller.forget("a")
        caller.save("d", words(1, 100))
        assert caller.names() == ["b", "c", "d"]


def test_a_name_is_its_tenant_s(model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path) -> None:
    mine, theirs = CacheDomain(b"mine"), CacheDomain(b"theirs")
    with replica(model, tokenizer, file_store(tmp_path)) as there:
        for domain, seed in ((mine, 1), (theirs, 2)):
            there.ask(words(seed, 100), 1, domain=domain)
            Caller(model, there, domain).save("chat", words(seed, 100))
        stranger = Caller(model, there, CacheDomain(b"stranger"))
        for action in (stranger.load, stranger.pin, stranger.forget):
            with pytest.raises(RequestError, match="no conversation named"):
                action("chat")
        assert stranger.names() == []
        # The same tokens in another domain are another conversation, too.
        assert Caller(model, there, theirs).forget(words(1, 100)).num_checkpoints == 0
        assert Caller(model, there, theirs).forget("chat").num_checkpoints >= 1
        assert Caller(model, there, mine).load("chat").cached_tokens == 96
        assert Caller(model, there, mine).names() == ["chat"]
        assert there.ask(words(1, 100), 1, domain=mine).reuse.num_cached_tokens == 96


# ------------------------------------------------------------------ forget
def test_what_is_forgotten_is_in_no_memory_and_in_no_store(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    prompt = words(1, 200)
    store = memory_store()
    with replica(model, tokenizer, store, file_store(tmp_path)) as first:
        answer = first.ask(prompt, 100)
        caller = Caller(model, first)
        caller.save("chat", prompt)
        assert len(stored_reasons(tmp_path)) > 3
        gone = caller.forget("chat")
        assert (gone.num_tokens, gone.num_kept_tokens, gone.kept_for) == (192, 0, [])
        assert gone.num_checkpoints >= 3 and gone.num_segments >= 3
        assert not first.scheduler.cache.tree.index, "the answer goes on from the prompt: it went, too"
        assert set(stored_reasons(tmp_path)) == {"names"}
        assert caller.names() == []
        assert all(b"chat" not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
        again = first.ask(prompt, 100)
        assert again.reuse.num_cached_tokens == 0 and again.load.outcome == "not_found"
        assert again.same_as(answer)
        caller.forget(prompt)
    with replica(model, tokenizer, file_store(tmp_path)) as second:
        assert second.ask(prompt + answer.tokens, 1).reuse.num_cached_tokens == 0


def test_what_others_share_stays_in_memory_and_store(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    system = words(0, 128)
    mine, other = system + words(1, 100), system + words(2, 100)
    with replica(model, tokenizer, file_store(tmp_path)) as first:
        for prompt in (mine, other):
            first.ask(prompt, 1, wanted=[(128, "message")])
        caller = Caller(model, first)
        caller.save("mine", mine)
        gone = caller.forget("mine")
        assert (gone.num_tokens, gone.num_kept_tokens) == (224, 128)
        assert first.ask(mine, 1).reuse.num_cached_tokens == 128
        assert first.ask(other, 1).reuse.num_cached_tokens == 224
        caller.forget(mine)
    with replica(model, tokenizer, file_store(tmp_path)) as second:
        assert second.ask(mine, 1).reuse.num_cached_tokens == 128
        assert second.ask(other, 1).reuse.num_cached_tokens == 224


def test_what_only_a_store_knows_to_go_on_from_it_goes_too(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """After a restart nobody has the tokens of answers and later turns; stores know what these build on."""
    prompt, other = words(1, 100), words(2, 100)
    fast = Kept(memory_store())
    with replica(model, tokenizer, fast, file_store(tmp_path)) as first:  # type: ignore[arg-type]
        answer = first.ask(prompt, 150)
        first.ask(prompt + answer.tokens + words(3, 80), 40)
        first.ask(other, 80)
        Caller(model, first).save("chat", prompt)
    num_before = len(stored_reasons(tmp_path))
    with replica(model, tokenizer, fast, file_store(tmp_path)) as second:  # type: ignore[arg-type]
        gone = Caller(model, second).forget("chat")
        assert gone.num_checkpoints == 0 and gone.num_segments > 3
        num_names = -1 + 1  # no manifest, and the index in both its places
        assert len(stored_reasons(tmp_path)) == num_before - gone.num_segments + num_names
        assert second.ask(other, 1).reuse.num_cached_tokens == 96
        assert Caller(model, second).forget(other).num_segments >= 2
        assert set(stored_reasons(tmp_path)) == {"names"}
        assert len(fast._store._objects) == 2


def test_names_protect_what_they_stand_for_also_where_only_a_store_has_it(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    base = words(0, 128)
    chat = base + words(1, 100)
    with replica(model, tokenizer, file_store(tmp_path)) as first:
        caller = Caller(model, first)
        for name, prompt in (("base", base), ("chat", chat)):
            first.ask(prompt, 1)
            caller.save(name, prompt)
    with replica(model, tokenizer, file_store(tmp_path)) as second:
        caller = Caller(model, second)
        gone = caller.forget(chat)
        assert (gone.num_kept_tokens, gone.kept_for) == (224, ["chat"])
        gone = caller.forget("base")
        assert (gone.num_kept_tokens, gone.kept_for, gone.num_segments) == (128, ["chat"], 0)
        assert caller.names() == ["chat"]
        assert caller.load("chat").cached_tokens == 224
        gone = caller.forget("chat")
        assert (gone.num_kept_tokens, gone.kept_for) == (0, [])
        assert set(stored_reasons(tmp_path)) == {"names"}


def test_branches_behind_the_public_part_go_if_asked(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """A template that drops old thoughts leaves a branch at every turn: the whole conversation can go."""
    system, user = words(0, 64), words(1, 96)
    turns = [system + user + words(2, 60), system + user + words(3, 90)]
    foreign = system + words(9, 100)
    with replica(model, tokenizer, file_store(tmp_path)) as there:
        for prompt in (*turns, foreign):
            there.ask(prompt, 1, wanted=[(64, "message")])
        caller = Caller(model, there)
        caller.save("chat", turns[1], public=64)
        assert caller.forget(turns[1]).num_kept_tokens == len(turns[1]) // UNIT * UNIT
        gone = caller.forget("chat", with_branches=True)
        assert gone.num_kept_tokens == 64
        assert there.ask(turns[0], 1).reuse.num_cached_tokens == 64
        assert there.ask(foreign, 1).reuse.num_cached_tokens == 160
        with pytest.raises(RequestError, match="own part begins") as raised:
            caller.forget(turns[0], with_branches=True)
        assert raised.value.param == "branches"


def test_a_request_in_progress_is_not_disturbed(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    prompt = words(1, 200)
    with replica(model, tokenizer) as cold:
        expected = cold.ask(prompt, 120)
    with replica(model, tokenizer, file_store(tmp_path)) as there:
        there.ask(prompt, 1)
        caller = Caller(model, there)
        caller.save("chat", prompt)
        events = there.start(prompt, 120)
        while not there.scheduler.running:
            time.sleep(0.001)
        caller.forget("chat")
        assert Answered.of(collect(events)[1]).same_as(expected)
        assert caller.names() == []
        assert caller.forget(prompt).num_kept_tokens == 0
        assert not there.scheduler.cache.tree.index


def test_answers_that_explain_are_forgotten_too(tokenizer: Tokenizer) -> None:
    explainer = ReuseExplainer(tokenizer)
    other = CacheDomain(b"other")
    prompts = {"shared": 10, "inside": 20, "itself": 30, "longer": 40}
    for domain in (OPEN, other):
        for length in prompts.values():
            explainer.remember(domain, array("I", range(length)), array("I", [1]))
    explainer.remember(OPEN, array("I", [9] * 20), array("I", [1]))
    explainer.forget(OPEN, array("I", range(30)), 10)
    left = [(domain == OPEN, answer.num_prompt_tokens) for (domain, _), answer in explainer._answers.items()]
    assert sorted(left) == [(False, 10), (False, 20), (False, 30), (False, 40), (True, 10), (True, 20)]


# ------------------------------------------------------------------ pins and small memories
@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_pinned_conversation_outlives_others_within_the_budget(
    model: LoadedModel, tokenizer: Tokenizer, is_pinned: bool
) -> None:
    geometry = model.geometry(UNIT)
    cache_bytes = 2 * geometry.request_bytes(300) + 4 * geometry.checkpoint_bytes
    with replica(model, tokenizer, cache_bytes=cache_bytes) as small:
        caller = Caller(model, small)
        small.ask(words(0, 250), 1)
        assert caller.pin(words(0, 250)) == 224
        if not is_pinned:
            assert caller.unpin(words(0, 250)) == 224
            assert caller.unpin(words(0, 250)) == 0
        for seed in range(1, 8):
            small.ask(words(seed, 250), 1)
        assert (small.ask(words(0, 250), 1).reuse.num_cached_tokens == 224) == is_pinned
        assert small.scheduler.cache.memory.peak_committed_bytes <= cache_bytes


def test_loads_into_a_small_memory_stay_within_it(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    geometry = model.geometry(UNIT)
    with replica(model, tokenizer, file_store(tmp_path)) as first:
        for seed in range(5):
            first.ask(words(seed, 300), 1)
            Caller(model, first).save(f"chat-{seed}", words(seed, 300))
    cache_bytes = 2 * geometry.request_bytes(320)
    with replica(model, tokenizer, file_store(tmp_path), cache_bytes=cache_bytes) as small:
        caller = Caller(model, small)
        for seed in range(5):
            assert caller.load(f"chat-{seed}").cached_tokens == 288
            assert small.ask(words(seed, 300), 1).reuse.num_computed_tokens <= bound(300, 300)
        assert small.scheduler.cache.memory.peak_committed_bytes <= cache_bytes


# ------------------------------------------------------------------ stores that misbehave
class Gated(Kept):
    """A store whose saves and removals wait for a gate; `broken` ones fail."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.gates = {"save": threading.Event(), "remove": threading.Event()}
        self.broken: set[str] = set()
        for gate in self.gates.values():
            gate.set()

    def _pass(self, operation: str) -> None:
        self.gates[operation].wait(20)
        if operation in self.broken:
            raise StoreError("broken on purpose")

    def save(self, segments: Any, *, deadline_seconds: float) -> Any:
        self._pass("save")
        return self._store.save(segments, deadline_seconds=deadline_seconds)

    def remove(self, keys: Any, *, deadline_seconds: float) -> Any:
        self._pass("remove")
        return self._store.remove(keys, deadline_seconds=deadline_seconds)


def in_thread(action: Callable[[], T]) -> tuple[threading.Thread, list[T]]:
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(action()), daemon=True)
    thread.start()
    return thread, results


def test_a_store_that_hangs_delays_a_save_for_its_timeout_and_nobody_else(
    model: LoadedModel, tokenizer: Tokenizer
) -> None:
    store = Gated(memory_store())
    with replica(model, tokenizer, store) as there:  # type: ignore[arg-type]
        store.gates["save"].clear()
        there.ask(words(1, 200), 1)
        caller = Caller(model, there)
        begun = time.monotonic()
        with pytest.raises(StoresUnavailable, match="in time"):
            caller.save("chat", words(1, 200), timeout_seconds=0.2)
        assert 0.2 <= time.monotonic() - begun < 5
        assert there.ask(words(1, 200), 2).reuse.num_cached_tokens == 192
        store.gates["save"].set()
        assert caller.save("chat", words(1, 200)).saved_tokens == 192


def test_forget_waits_for_a_save_that_reads_and_then_removes_what_it_saved(
    model: LoadedModel, tokenizer: Tokenizer
) -> None:
    inner = memory_store()
    store = Gated(inner)
    with replica(model, tokenizer, store) as there:  # type: ignore[arg-type]
        store.gates["save"].clear()
        there.ask(words(1, 200), 1)
        caller = Caller(model, there)
        with pytest.raises(StoresUnavailable, match="does not end; nothing was removed"):
            caller.forget(words(1, 200), timeout_seconds=0.1)
        assert there.scheduler.cache.tree.index
        thread, results = in_thread(lambda: caller.forget(words(1, 200)))
        time.sleep(0.1)
        assert thread.is_alive()
        store.gates["save"].set()
        thread.join(20)
        assert results and results[0].num_checkpoints
        assert inner.used_bytes == 0
        assert there.ask(words(1, 200), 1).reuse.num_cached_tokens == 0


def test_while_a_prompt_is_being_removed_nobody_loads_it(model: LoadedModel, tokenizer: Tokenizer) -> None:
    store = Gated(memory_store())
    with replica(model, tokenizer, store) as there:  # type: ignore[arg-type]
        there.ask(words(1, 200), 1)
        there.settle()
        store.gates["remove"].clear()
        caller = Caller(model, there)
        thread, results = in_thread(lambda: caller.forget(words(1, 200)))
        while there.scheduler.cache.tree.index:
            time.sleep(0.001)
        assert there.ask(words(1, 200), 1).reuse.num_cached_tokens == 0
        assert caller.load(words(1, 300)).note.num_tokens == 0
        store.gates["remove"].set()
        thread.join(20)
        assert results and results[0].num_segments
        there.engine.fresh_stats().result(10)
        there.settle()
        assert there.engine.reset_prefix_cache().result(10)
        assert there.ask(words(1, 200), 1).load.num_tokens == 192, "what was computed meanwhile is saved"
        there.engine.fresh_stats().result(10)  # behind all that was asked for before
        assert not there.engine.tiering.saves._shunned  # type: ignore[union-attr]


def test_what_a_store_would_not_remove_goes_with_the_next_attempt(
    model: LoadedModel, tokenizer: Tokenizer
) -> None:
    inner = memory_store()
    store = Gated(inner)
    with replica(model, tokenizer, store) as there:  # type: ignore[arg-type]
        there.ask(words(1, 200), 60)
        caller = Caller(model, there)
        caller.save("chat", words(1, 200))
        there.settle()
        num_segments = len(inner._objects) - 2  # without the manifest and the index
        store.broken.add("remove")
        with pytest.raises(StoresUnavailable, match="not removed from memory"):
            caller.forget("chat")
        assert caller.names() == ["chat"], "so that it can be tried again"
        store.broken.clear()
        assert caller.forget("chat").num_segments == num_segments > 1
        assert caller.names() == []
        assert there.engine.reset_prefix_cache().result(10)
        names_only = inner.used_bytes
        assert 0 < names_only < 4096


def test_a_silent_store_is_not_taken_for_an_unknown_name(model: LoadedModel, tokenizer: Tokenizer) -> None:
    store = FaultyStore(memory_store(), Faults(), seed=0)
    with replica(model, tokenizer, store) as there:
        there.ask(words(1, 100), 1)
        caller = Caller(model, there)
        caller.save("chat", words(1, 100))
        store.set_faults(error=1.0)
        for _ in range(20):
            with pytest.raises((StoresUnavailable, RequestError)):
                caller.load("chat")
        with pytest.raises(StoresUnavailable, match="memory does not answer"):
            caller.load("chat")
        with pytest.raises(StoresUnavailable):
            caller.names()


def test_a_store_that_is_down_does_not_keep_names_from_the_others(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """And when it is back, its older version of a name does not count."""
    inner = Kept(memory_store())
    flaky = FaultyStore(inner, Faults(), seed=0)  # type: ignore[arg-type]
    with replica(model, tokenizer, flaky, file_store(tmp_path)) as there:
        caller = Caller(model, there)
        there.ask(words(1, 100), 1)
        caller.save("chat", words(1, 100))
        flaky.set_faults(error=1.0)
        there.ask(words(1, 100) + words(2, 100), 1)
        saved = caller.save("chat", words(1, 100) + words(2, 100))
        assert saved.tokens_by_store == {"memory": 0, "file": 192}
        there.ask(words(3, 100), 1)
        caller.save("new", words(3, 100))
    with replica(model, tokenizer, inner, file_store(tmp_path)) as there:  # type: ignore[arg-type]
        caller = Caller(model, there)
        assert caller.load("chat").cached_tokens == 192
        assert caller.load("new").cached_tokens == 96
        assert caller.names() == ["chat", "new"]


EVERY_FAULT = Faults(
    slow=0.1, error=0.05, torn=0.1, bit_flip=0.1, lost=0.1, full=0.1, foreign=0.1, slow_seconds=0.01
)


@pytest.mark.parametrize(("seed", "faults"), [(0, Faults()), (1, EVERY_FAULT), (2, EVERY_FAULT)])
def test_everything_at_once(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path, seed: int, faults: Faults
) -> None:
    """Requests, saves, loads, pins and forgets of overlapping prompts in a small memory: no wrong answer, and
    a sound core at the end (`replica` looks)."""
    rng = Random(seed)
    trunk = words(0, 96)
    prompts = [trunk[: rng.choice([0, 64, 96])] + words(n, rng.randrange(60, 250)) for n in range(6)]
    with replica(model, tokenizer) as cold:
        expected = [cold.ask(prompt, 3) for prompt in prompts]
    geometry = model.geometry(UNIT)
    stores = [FaultyStore(memory_store(), faults, seed=seed), file_store(tmp_path)]
    cache_bytes = 4 * geometry.request_bytes(350)
    with replica(model, tokenizer, *stores, cache_bytes=cache_bytes) as there:
        named = NamedConversations(there.engine, geometry, 4096)

        async def meddle(rng: Random) -> int:
            number = rng.randrange(len(prompts))
            name, meant = f"chat-{number}", Meant(OPEN, None, array("I", prompts[number]), 32)
            by_name = Meant(OPEN, name)
            choice = rng.randrange(6)
            try:
                if choice == 0:
                    await named.save(meant, name, timeout_seconds=2.0)
                elif choice == 1:
                    await named.load(rng.choice([meant, by_name]), timeout_seconds=2.0)
                elif choice == 2:
                    await named.forget(meant, with_branches=rng.random() < 0.5, timeout_seconds=2.0)
                elif choice == 3:
                    await named.forget(by_name, timeout_seconds=2.0)
                elif choice == 4:
                    await named.pin(meant, 0.05)
                else:
                    await named.unpin(by_name)
            except (RequestError, StoresUnavailable):
                return 0
            return 1

        async def all_the_time(seed: int) -> int:
            rng = Random(seed)
            return sum([await meddle(rng) for _ in range(25)])

        async def meddlers() -> list[int]:
            return await asyncio.gather(*(all_the_time(100 * seed + n) for n in range(4)))

        async def forget_everything() -> None:
            for number in range(len(prompts)):
                with suppress(RequestError):
                    await named.forget(Meant(OPEN, f"chat-{number}"))
            for _ in range(2):  # what others shared goes with the last of them
                for prompt in prompts:
                    await named.forget(Meant(OPEN, None, array("I", prompt)))

        thread, results = in_thread(lambda: asyncio.run(meddlers()))
        while thread.is_alive():
            numbers = [rng.randrange(len(prompts)) for _ in range(4)]
            running = [there.start(prompts[number], 3) for number in numbers]
            for number, events in zip(numbers, running, strict=True):
                assert Answered.of(collect(events)[1]).same_as(expected[number]), number
        assert results and sum(results[0]) > 20, results
        assert there.scheduler.cache.memory.peak_committed_bytes <= cache_bytes
        there.engine.fresh_stats().result(10)  # behind all that was asked for before
        assert not there.engine.tiering.saves._shunned  # type: ignore[union-attr]
        assert all(lookup.done is None for lookup in there.engine.tiering._lookups.values())  # type: ignore[union-attr]
        if faults == Faults():
            there.settle()
            asyncio.run(forget_everything())
            assert not there.scheduler.cache.tree.index
            chains = [KeyChain(array("I", prompt), OPEN, UNIT) for prompt in prompts]
            keys = {key for chain in chains for key in chain.extend(len(chain.tokens) // UNIT)}
            left = stored_headers(tmp_path)
            assert not keys & {header.key for header in left}
            assert "manifest" not in {header.reason for header in left}
            # What reaches across the end of a prompt and builds on nothing is known by its own key only.
            assert {header.start for header in left} <= {0}
