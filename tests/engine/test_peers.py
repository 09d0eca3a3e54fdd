"""Two engines with the embedded model, the second of which gets from the first one's cache."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from tests.engine.replicas import FINGERPRINT, UNIT, Kept, Replica, bound, memory_store, replica, words

from milepost.core.request import CacheDomain
from milepost.engine.peer_source import CacheSource
from milepost.engine.segments import SegmentCodec
from milepost.engine.tokenizer import Tokenizer
from milepost.errors import StoreError
from milepost.models.loading import LoadedModel
from milepost.server.app import bind
from milepost.server.peer_app import PeerApp, PeerServer
from milepost.stores.peer import PeerStore
from milepost.stores.peer_connection import PeerConnections
from milepost.stores.segment_format import Identity, decode_head
from milepost.stores.staging import StagingArea

SECRET = "secret-of-peers-in-tests"
LARGEST = 32 << 20


@contextmanager
def giving(here: Replica, model: LoadedModel, *, area_bytes: int = 8 << 20) -> Iterator[PeerServer]:
    """Serve what `here` has in its cache."""
    server = PeerServer(PeerApp(source_of(here, model), StagingArea(area_bytes), secret=SECRET), bind(port=0))
    server.start()
    try:
        yield server
    finally:
        server.close()
        assert server.app.staged_bytes == 0


def source_of(here: Replica, model: LoadedModel) -> CacheSource:
    geometry = model.geometry(UNIT)
    codec = SegmentCodec(geometry, here.engine._worker.pools, FINGERPRINT, time.time)  # type: ignore[attr-defined]
    return CacheSource(here.engine, here.scheduler, geometry, codec, LARGEST)


def peer_store(server: PeerServer, fingerprint: str = FINGERPRINT) -> PeerStore:
    connections = PeerConnections(*server.address, secret=SECRET, silence_seconds=20.0, clock=time.monotonic)
    return PeerStore(connections, Identity(fingerprint))


def pinned(here: Replica) -> int:
    return here.engine.look(lambda scheduler, now: len(scheduler.transfers.pinned())).result(20)


# ---------------------------------------------------------------- what comes


@pytest.mark.parametrize("num_tokens", [33, 64, 65, 300, 1700])
def test_the_second_replica_answers_the_next_turn_from_the_first_one_s_cache(
    model: LoadedModel, tokenizer: Tokenizer, num_tokens: int
) -> None:
    history = words(num_tokens, num_tokens)
    with replica(model, tokenizer) as first, giving(first, model) as server:
        history += first.ask(history, 40).tokens
        following = history + words(5, 9)
        with replica(model, tokenizer, peer_store(server)) as second:
            answer = second.ask(following, 20)
            assert answer.load.outcome == "loaded" and answer.load.tier == "peer"
            assert answer.reuse.num_computed_tokens <= bound(len(history) - 1, len(following))
            # And what it computed goes back, to the first one, which then computes next to nothing.
            with giving(second, model) as back:
                with replica(model, tokenizer, peer_store(back)) as third:
                    again = third.ask(following + answer.tokens + words(6, 40), 3)
        assert pinned(first) == 0
    with replica(model, tokenizer) as cold:
        assert answer.same_as(cold.ask(following, 20))
        assert again.same_as(cold.ask(following + answer.tokens + words(6, 40), 3))
    assert again.reuse.num_computed_tokens <= bound(len(following) + 19, len(following) + 60)


def test_eight_clients_while_the_first_replica_works(model: LoadedModel, tokenizer: Tokenizer) -> None:
    with replica(model, tokenizer) as first, giving(first, model) as server:
        prompts = [words(1, 200) + words(seed, 60) for seed in range(2, 10)]
        with replica(model, tokenizer, peer_store(server)) as second, ThreadPoolExecutor(8) as clients:
            for _ in range(2):
                computed = list(clients.map(lambda prompt: first.ask(prompt, 24), prompts))
                given = list(clients.map(lambda prompt: second.ask(prompt, 24), prompts))
                assert all(one.same_as(other) for one, other in zip(computed, given, strict=True))
                prompts = [p + a.tokens + words(99, 40) for p, a in zip(prompts, computed, strict=True)]
            assert second.engine.tiering is not None
            assert second.engine.tiering.num_loaded_tokens > 0
        assert pinned(first) == 0


def test_a_salt_separates_tenants_at_peers_too(model: LoadedModel, tokenizer: Tokenizer) -> None:
    mine, theirs = CacheDomain(b"mine"), CacheDomain(b"theirs")
    with replica(model, tokenizer) as first, giving(first, model) as server:
        first.ask(words(1, 200), domain=mine)
        with replica(model, tokenizer, peer_store(server)) as second:
            assert second.ask(words(1, 200), domain=theirs).reuse.num_cached_tokens == 0
            assert second.ask(words(1, 200)).reuse.num_cached_tokens == 0
            assert second.ask(words(1, 300), domain=mine).load.outcome == "loaded"


def test_another_model_gets_nothing(model: LoadedModel, tokenizer: Tokenizer) -> None:
    other = "cd" * 32
    with replica(model, tokenizer) as first, giving(first, model) as server:
        first.ask(words(1, 200))
        with replica(model, tokenizer, peer_store(server, other), fingerprint=other) as second:
            answer = second.ask(words(1, 200))
            assert second.tiers is not None
            assert second.tiers.counters()[0].outcomes["lookup", "foreign"] > 0
    assert answer.reuse.num_cached_tokens == 0 and answer.load.outcome == "not_found"


def test_what_comes_from_a_peer_is_saved_to_the_stores(model: LoadedModel, tokenizer: Tokenizer) -> None:
    kept = Kept(memory_store())
    with replica(model, tokenizer) as first, giving(first, model) as server:
        first.ask(words(1, 300), 1)
        with replica(model, tokenizer, kept, peer_store(server)) as second:  # type: ignore[arg-type]
            assert second.ask(words(1, 300), 1).load.tier == "peer"
            second.settle()
            assert second.tiers is not None and second.tiers.flush(10)
    with replica(model, tokenizer, kept) as third:  # type: ignore[arg-type]
        answer = third.ask(words(1, 300), 1)
        assert answer.load.outcome == "loaded" and answer.load.tier == "memory"


def test_a_replica_with_peers_only_saves_nothing(model: LoadedModel, tokenizer: Tokenizer) -> None:
    with replica(model, tokenizer) as first, giving(first, model) as server:
        with replica(model, tokenizer, peer_store(server)) as second:
            second.ask(words(1, 300), 40)
            tiering = second.engine.tiering
            assert tiering is not None and not tiering.tiers.takes_saves
            assert tiering.num_pending_saves == 0 and tiering.saves.num_unsaved == 0
            assert not any(operation == "save" for operation, _ in tiering.tier_counters()[0].outcomes)


# ---------------------------------------------------------------- what is offered


def test_only_checkpoints_are_offered_and_paths_in_pieces_that_are_worth_a_state(
    model: LoadedModel, tokenizer: Tokenizer
) -> None:
    coarse = model.geometry(UNIT).default_checkpoint_interval()
    with replica(model, tokenizer) as first:
        source = source_of(first, model)
        first.ask(words(1, 2100), 1)
        nodes = first.engine.look(
            lambda scheduler, now: sorted(scheduler.cache.tree.index.values(), key=lambda node: node.depth)
        ).result(20)
        heads = source.heads([node.key for node in nodes], deadline_seconds=20)
        offered = [node.depth for node, head in zip(nodes, heads, strict=True) if head is not None]
        assert offered == [node.depth for node in nodes if node.states is not None]
        assert 20 < len(offered) < len(nodes)
        headers = [decode_head(head).header for head in heads if head is not None]
        assert {header.start for header in headers} <= {0, *range(coarse, 2100, coarse)}
        assert source.heads([b"\0" * 32], deadline_seconds=20) == [None]


def test_a_segment_that_is_too_large_is_not_offered(model: LoadedModel, tokenizer: Tokenizer) -> None:
    with replica(model, tokenizer) as first:
        source = source_of(first, model)
        source._max_segment_bytes = 1000
        first.ask(words(1, 200), 1)
        keys = list(first.scheduler.cache.tree.state_nodes)
        assert set(source.heads(keys, deadline_seconds=20)) == {None}
        with source.reading(keys, LARGEST, deadline_seconds=20) as objects:
            assert set(objects) == {None}


def test_little_is_pinned_at_a_time(model: LoadedModel, tokenizer: Tokenizer) -> None:
    with replica(model, tokenizer) as first:
        source = source_of(first, model)
        first.ask(words(1, 2100), 1)
        nodes = sorted(first.scheduler.cache.tree.state_nodes.values(), key=lambda node: node.depth)
        keys = [node.key for node in nodes]
        with source.reading(keys, 1 << 20, deadline_seconds=20) as objects:
            sizes = [sum(memoryview(piece).nbytes for piece in each or ()) for each in objects]
            assert 1 < len(objects) < len(keys) and sum(sizes) <= (1 << 20) + 1024 * len(sizes)
            assert pinned(first) == len(objects)
        assert pinned(first) == 0
        with source.reading(keys, 1, deadline_seconds=20) as objects:
            assert len(objects) == 1 and objects[0] is not None
        assert pinned(first) == 0


# ---------------------------------------------------------------- at the same time


def test_a_path_that_is_being_read_is_neither_forgotten_nor_dropped_before_its_end(
    model: LoadedModel, tokenizer: Tokenizer
) -> None:
    with replica(model, tokenizer) as first:
        source = source_of(first, model)
        first.ask(words(1, 200), 1)
        node = max(first.scheduler.cache.tree.state_nodes.values(), key=lambda each: each.depth)
        request = _request(first, words(1, 200))
        with source.reading([node.key], LARGEST, deadline_seconds=20) as objects:
            before = [bytes(piece) for piece in objects[0] or ()]
            assert not first.engine.reset_prefix_cache().result(20)
            dropping = first.engine.act(lambda scheduler, now: first.engine._condemn(request, UNIT))
            time.sleep(0.05)
            assert not dropping.done(), "the engine waits for whoever copies"
            assert [bytes(piece) for piece in objects[0] or ()] == before
        assert dropping.result(20) > 0
        assert pinned(first) == 0
        assert source.heads([node.key], deadline_seconds=20) == [None]


def _request(here: Replica, prompt: Sequence[int]):
    """A request whose path is that of `prompt`."""
    from milepost.core.hashing import KeyChain
    from milepost.core.plan import SamplingParams
    from milepost.core.request import Request

    request = Request(-1, list(prompt), SamplingParams(temperature=0.0), max_tokens=1)
    request.chain = KeyChain(request.tokens, request.domain, UNIT)
    request.chain.extend(len(prompt) // UNIT)
    return request


def test_a_peer_that_is_too_late_leaves_nothing_pinned(model: LoadedModel, tokenizer: Tokenizer) -> None:
    with replica(model, tokenizer) as first:
        source = source_of(first, model)
        first.ask(words(1, 200), 1)
        keys = list(first.scheduler.cache.tree.state_nodes)
        gate = threading.Event()
        first.engine.act(lambda scheduler, now: gate.wait(20))
        with pytest.raises(TimeoutError):
            with source.reading(keys, LARGEST, deadline_seconds=0.02):
                raise AssertionError("the engine was not there")
        with pytest.raises(TimeoutError):
            source.heads(keys, deadline_seconds=0.0)
        gate.set()
        # The engine pins, finds nobody, and unpins.
        pinned(first)
        assert pinned(first) == 0


def test_a_replica_that_has_ended_gives_nothing(model: LoadedModel, tokenizer: Tokenizer) -> None:
    with replica(model, tokenizer) as first:
        source = source_of(first, model)
        first.ask(words(1, 200), 1)
        keys = list(first.scheduler.cache.tree.state_nodes)
    with pytest.raises(StoreError, match="shutting down"):
        source.heads(keys, deadline_seconds=5)


def test_a_peer_that_ends_while_it_is_asked_costs_nothing_but_its_hits(
    model: LoadedModel, tokenizer: Tokenizer
) -> None:
    prompts = [words(seed, 400) for seed in range(6)]
    with replica(model, tokenizer) as first:
        with giving(first, model, area_bytes=1 << 20) as server:
            computed = [first.ask(prompt, 4) for prompt in prompts]
            store = peer_store(server)
            with replica(model, tokenizer, store) as second, ThreadPoolExecutor(6) as clients:
                answers = clients.map(lambda prompt: second.ask(prompt, 4), prompts)
                time.sleep(0.02)
                server.close()
                assert all(one.same_as(other) for one, other in zip(computed, answers, strict=True))
                assert second.ask(prompts[0] + words(9, 40), 2).reuse.num_cached_tokens > 0
