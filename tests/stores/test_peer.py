"""The side that asks a peer, and peers that are wrong, hostile, slow or gone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.stores.segments import (
    BROKEN,
    IDENTITY,
    LATE,
    LEFT_ALONE,
    SECONDS,
    chain,
    key_of,
    keys,
    payload,
    segment,
)

from milepost.errors import StoreError
from milepost.stores import outcomes as oc
from milepost.stores.guard import GuardedStore
from milepost.stores.objects import Deadline
from milepost.stores.peer import PeerStore
from milepost.stores.peer_bulk import NoBulk, proof_of
from milepost.stores.peer_connection import PeerConnections
from milepost.stores.peer_protocol import FRAME, MAX_HEAD_BYTES, Ask, Hello
from milepost.stores.segment_format import Identity, encode_head, head_of

KEYS = [key_of("first"), key_of("second")]
Talk = Callable[[socket.socket], None]


class Peer:
    """Something that listens, and talks to everybody who comes as it is told."""

    def __init__(self, talk: Talk) -> None:
        self.talk = talk
        self.num_connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                self.talk(connection)
            except OSError:
                pass

    def close(self) -> None:
        self._listener.close()
        # A thread in accept() keeps the socket: wake it up.
        with socket.socket() as waker:
            waker.connect_ex(("127.0.0.1", self.port))
        self._thread.join(5)


def request_of(connection: socket.socket) -> bytes:
    """Head and body of the next request; empty at the end."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(65536)
        if not part:
            return b""
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def whole(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def always(answer: bytes) -> Talk:
    """The same to every request."""

    def talk(connection: socket.socket) -> None:
        while request_of(connection):
            connection.sendall(answer)

    return talk


@contextmanager
def store_of(
    talk: Talk, *, silence_seconds: float = 5.0, max_object_bytes: int = 1 << 20
) -> Iterator[tuple[PeerStore, Peer]]:
    peer = Peer(talk)
    connections = PeerConnections(
        "127.0.0.1", peer.port, secret="s", silence_seconds=silence_seconds, clock=time.monotonic
    )
    store = PeerStore(connections, IDENTITY, max_object_bytes=max_object_bytes)
    yield store, peer
    store.close()
    peer.close()


def frames(*objects: bytes | None) -> bytes:
    return b"".join(FRAME.pack(0) if each is None else FRAME.pack(len(each)) + each for each in objects)


def object_of(stored) -> bytes:
    return encode_head(stored) + payload(stored)


# ---------------------------------------------------------------- hostile answers


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    answer=st.one_of(
        st.binary(max_size=300),
        st.builds(
            whole, st.binary(max_size=300), st.sampled_from(["200 OK", "409 Conflict", "503 no", "302 x"])
        ),
        st.builds(lambda objects: whole(frames(*objects)), st.lists(st.none() | st.binary(max_size=700))),
        st.builds(
            lambda sizes: whole(b"".join(map(FRAME.pack, sizes))),
            st.lists(st.integers(0, 2**64 - 1), min_size=1),
        ),
        st.builds(
            lambda heads: whole(msgspec.msgpack.encode(heads)), st.lists(st.none() | st.binary(max_size=600))
        ),
        st.sampled_from(
            [
                b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n",
                b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-5\r\n",
                b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n8\r\n\x01",
                b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\nabc",
                b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999\r\n\r\nabc",
                b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n",
                b"HTTP/1.1 " + b"2" * 70000,
                b"HTTP/1.1 100 Continue\r\n\r\n" * 50,
            ]
        ),
    )
)
def test_whatever_a_peer_answers_is_a_miss_or_an_error_of_the_store(answer: bytes) -> None:
    def talk(connection: socket.socket) -> None:
        request_of(connection)
        connection.sendall(answer)

    with store_of(talk, silence_seconds=2.0) as (store, _):
        for call in (store.lookup, store.load):
            try:
                assert call(KEYS, deadline_seconds=3.0) == [None, None]
            except StoreError:
                continue


def test_a_flood_of_headers_ends_at_the_deadline() -> None:
    def talk(connection: socket.socket) -> None:
        request_of(connection)
        while True:
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")

    with store_of(talk) as (store, _):
        begin = time.monotonic()
        with pytest.raises(StoreError):
            store.lookup(KEYS, deadline_seconds=0.2)
        assert time.monotonic() - begin < 5


def test_bytes_that_come_one_by_one_end_at_the_deadline() -> None:
    data = whole(frames(object_of(segment("slow"))))

    def talk(connection: socket.socket) -> None:
        request_of(connection)
        for index in range(len(data)):
            connection.sendall(data[index : index + 1])
            time.sleep(0.01)

    with store_of(talk) as (store, _):
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            store.load(KEYS, deadline_seconds=0.2)
        assert time.monotonic() - begin < 5


def test_silence_ends_a_call_long_before_its_deadline() -> None:
    def talk(connection: socket.socket) -> None:
        request_of(connection)
        time.sleep(20)

    with store_of(talk, silence_seconds=0.1) as (store, _):
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            store.load(KEYS, deadline_seconds=1000.0)
        assert time.monotonic() - begin < 10


def test_a_segment_that_is_too_long_is_not_even_read() -> None:
    with store_of(always(whole(frames(bytes(5000)))), max_object_bytes=4999) as (store, _):
        with pytest.raises(StoreError, match="5000 bytes"):
            store.load(KEYS, deadline_seconds=SECONDS)


def test_more_than_was_asked_for_is_an_error() -> None:
    sound = segment("sound")
    answer = whole(frames(object_of(sound), None, None))
    with store_of(always(answer)) as (store, peer):
        # What was asked for came, and counts; the connection is not used again.
        loaded = store.load([sound.header.key, KEYS[0]], deadline_seconds=SECONDS)
        assert payload(loaded[0]) == payload(sound) and loaded[1] is None
        store.load([sound.header.key, KEYS[0]], deadline_seconds=SECONDS)
        assert peer.num_connections == 2
    heads = msgspec.msgpack.encode([head_of(sound.header)] * 3)
    with store_of(always(whole(heads))) as (store, _):
        with pytest.raises(StoreError, match="3 heads to 2 keys"):
            store.lookup(KEYS, deadline_seconds=SECONDS)
    with store_of(always(whole(bytes(3 * MAX_HEAD_BYTES)))) as (store, _):
        with pytest.raises(StoreError, match="more than"):
            store.lookup(KEYS, deadline_seconds=SECONDS)


def test_a_head_without_the_payload_s_digest_makes_no_segment() -> None:
    """A lookup's head is not enough to load with."""
    found = segment("found")
    answer = whole(frames(head_of(found.header) + payload(found)))
    with store_of(always(answer)) as (store, _):
        assert store.load([found.header.key], deadline_seconds=SECONDS) == [None]
        assert store.outcomes.get(oc.LOAD, oc.CORRUPT) == 1


# ---------------------------------------------------------------- peers that go


@pytest.mark.parametrize("num_bytes", [0, 3, 8, 100, 600, 2000, 3500])
def test_a_peer_that_dies_in_the_middle_leaves_what_came_before(num_bytes: int) -> None:
    first, second = chain("dying", 2)
    data = frames(object_of(first), object_of(second))
    num_first = 8 + len(object_of(first))

    def talk(connection: socket.socket) -> None:
        request_of(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        part = data[: num_first + num_bytes]
        connection.sendall(f"{len(data):x}\r\n".encode() + part)
        # As after SIGKILL: no end, and a reset.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    with store_of(talk) as (store, _):
        loaded = store.load(keys([first, second]), deadline_seconds=SECONDS)
        if loaded[0] is not None:  # a reset may overtake what was sent
            assert payload(loaded[0]) == payload(first)
        assert loaded[1] == BROKEN
        assert store.outcomes.get(oc.LOAD, oc.ERROR) == 1


def test_an_answer_that_ends_between_two_segments_is_a_timeout() -> None:
    first, second = chain("late", 2)
    with store_of(always(whole(frames(object_of(first))))) as (store, _):
        loaded = store.load(keys([first, second]), deadline_seconds=SECONDS)
        assert payload(loaded[0]) == payload(first) and loaded[1] == LATE
        assert store.outcomes.get(oc.LOAD, oc.TIMEOUT) == 1


def test_a_connection_that_the_peer_closed_meanwhile_is_replaced() -> None:
    sound = segment("again")
    answer = whole(frames(object_of(sound)))

    def talk(connection: socket.socket) -> None:
        request_of(connection)
        connection.sendall(answer)
        time.sleep(0.05)

    with store_of(talk) as (store, peer):
        for _ in range(3):
            assert store.load([sound.header.key], deadline_seconds=SECONDS)[0] is not None
            time.sleep(0.1)
        assert peer.num_connections == 3


def test_a_peer_that_is_not_there_opens_the_breaker_and_is_found_when_it_comes() -> None:
    sound = segment("there")
    with store_of(always(whole(frames(object_of(sound))))) as (store, peer):
        guarded = GuardedStore(store)
        port = peer.port
        peer.close()
        for _ in range(3):
            assert guarded.load([sound.header.key], deadline_seconds=1.0) == [BROKEN]
        assert guarded.breaker.is_open
        begin = time.monotonic()
        assert guarded.load([sound.header.key], deadline_seconds=1.0) == [LEFT_ALONE]
        assert time.monotonic() - begin < 0.5
        assert guarded.outcomes.get(oc.LOAD, oc.BREAKER_OPEN) == 1
        assert port == peer.port


# ---------------------------------------------------------------- the rest


def test_another_model_is_foreign_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with store_of(always(whole(b"this replica is another one", "409 Conflict"))) as (store, _):
        for _ in range(2):
            assert store.lookup(KEYS, deadline_seconds=SECONDS) == [None, None]
            assert store.load(KEYS, deadline_seconds=SECONDS) == [None, None]
        assert store.outcomes.get(oc.LOOKUP, oc.FOREIGN) == 4
        assert store.outcomes.get(oc.LOAD, oc.FOREIGN) == 4
    assert sum("another model" in record.message for record in caplog.records) == 1


def test_a_wrong_secret_is_an_error_that_says_so() -> None:
    with store_of(always(whole(b"the secret is not the one", "401 Unauthorized"))) as (store, _):
        with pytest.raises(StoreError, match="401: the secret is not"):
            store.lookup(KEYS, deadline_seconds=SECONDS)


def test_it_is_never_written_to() -> None:
    with store_of(always(b"")) as (store, peer):
        assert not store.takes_saves and not GuardedStore(store).takes_saves
        assert store.save([segment("new")], deadline_seconds=SECONDS) == [False]
        assert store.remove(KEYS, deadline_seconds=SECONDS) == 0
        assert store.followers(KEYS, deadline_seconds=SECONDS) == []
        assert peer.num_connections == 0


def test_what_is_asked_follows_the_protocol() -> None:
    asked: list[bytes] = []

    def talk(connection: socket.socket) -> None:
        while request := request_of(connection):
            asked.append(request)
            connection.sendall(whole(msgspec.msgpack.encode([None] * 2)))

    with store_of(talk) as (store, _):
        store.lookup(KEYS, deadline_seconds=SECONDS)
    head, _, body = asked[0].partition(b"\r\n\r\n")
    assert b"POST /kv/lookup HTTP/1.1" in head and b"Authorization: Bearer s" in head
    ask = msgspec.msgpack.decode(body, type=Ask)
    assert ask.problem is None and ask.keys == KEYS and 0 < ask.seconds <= SECONDS
    assert Identity(ask.fingerprint, ask.shard) == IDENTITY
    for change in (
        {"version": 2}, {"keys": [b"short"]}, {"keys": [KEYS[0]] * 5000}, {"seconds": -1.0},
        {"seconds": float("nan")}, {"transport": "pigeon"},
    ):  # fmt: skip
        assert msgspec.structs.replace(ask, **change).problem is not None


def test_no_bulk_is_never_ready() -> None:
    bulk = NoBulk()
    bulk.connect(lambda: pytest.fail("there is no need to ask"))
    assert not bulk.is_ready
    with pytest.raises(AssertionError):
        bulk.read("x", 0, 1, 1, Deadline(1, time.monotonic))
    bulk.close()


def test_a_proof_covers_every_field_and_the_secret() -> None:
    hello = Hello(1, "instance", b"metadata", 4096, 8192)
    proofs = {proof_of(hello, secret) for secret in (None, "one", "two")}
    for change in ({"instance": "i"}, {"nixl": b"other"}, {"address": 1}, {"num_bytes": 1}):
        proofs.add(proof_of(msgspec.structs.replace(hello, **change), "one"))
    assert len(proofs) == 7
