"""The side that gives to peers, and clients that are wrong, hostile, slow or gone."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.stores.harness import MemorySource, PeerHarness
from tests.stores.segments import (
    FINGERPRINT,
    IDENTITY,
    OTHER_FINGERPRINT,
    SECONDS,
    chain,
    key_of,
    keys,
    payload,
)

from milepost.server import peer_app
from milepost.server.app import bind
from milepost.server.peer_app import PeerApp, PeerServer
from milepost.stores import outcomes as oc
from milepost.stores.peer import PeerStore
from milepost.stores.peer_connection import PeerConnections
from milepost.stores.peer_protocol import FRAME, HELLO, LOAD, LOOKUP, RELEASE, Ask, Release
from milepost.stores.segment_format import Identity, decode
from milepost.stores.staging import StagingArea

SECRET = "a secret without spaces".replace(" ", "-")
AREA_BYTES = 1 << 20


class Served:
    """A serving side with a small area, and raw requests to it."""

    def __init__(self, *, secret: str | None = SECRET, area_bytes: int = AREA_BYTES) -> None:
        self.source = MemorySource(IDENTITY)
        self.area = StagingArea(area_bytes)
        self.app = PeerApp(self.source, self.area, secret=secret)
        self.server = PeerServer(self.app, bind("127.0.0.1", 0))
        self.server.start()
        self.secret = secret

    def fill(self, *segments) -> None:
        assert all(self.source.memory.save(list(segments), deadline_seconds=SECONDS))

    def post(
        self, path: str, body: bytes, secret: str | None = SECRET, method: str = "POST"
    ) -> tuple[int, bytes]:
        host, port = self.server.address
        connection = http.client.HTTPConnection(host, port, timeout=SECONDS)
        headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, content

    def store(self, secret: str | None = SECRET, identity: Identity = IDENTITY) -> PeerStore:
        connections = PeerConnections(
            *self.server.address, secret=secret, silence_seconds=5.0, clock=time.monotonic
        )
        return PeerStore(connections, identity)


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.server.close()


def ask(**changes: object) -> bytes:
    made = Ask(1, FINGERPRINT, (0, 1), [key_of("x")], 5.0)
    return msgspec.msgpack.encode(msgspec.structs.replace(made, **changes))


def request_head(path: str, num_bytes: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nauthorization: bearer {SECRET}\r\ncontent-length: {num_bytes}\r\n\r\n"
    ).encode()


# ---------------------------------------------------------------- who may ask


@pytest.mark.parametrize("secret", [None, "", "wrong", SECRET + "x", SECRET[:-1], "\xff"])
@pytest.mark.parametrize("path", [HELLO, LOOKUP, LOAD, RELEASE, "/other"])
def test_nothing_is_said_without_the_secret(served: Served, secret: str | None, path: str) -> None:
    status, content = served.post(path, ask(), secret)
    assert status == 401 and FINGERPRINT[:8].encode() not in content
    assert served.app.counts.num_refused == 1


def test_without_a_secret_whoever_reaches_it_may_ask() -> None:
    open_to_all = Served(secret=None)
    assert open_to_all.post(LOOKUP, ask(), None)[0] == 200
    assert open_to_all.post(LOOKUP, ask(), "anything")[0] == 200
    open_to_all.server.close()


def test_paths_and_methods(served: Served) -> None:
    assert served.post("/v1/models", b"")[0] == 404
    assert served.post("/kv/lookup/../load", ask())[0] == 404
    assert served.post(LOOKUP, b"", method="GET")[0] == 405


@pytest.mark.parametrize(
    "change",
    [{"fingerprint": OTHER_FINGERPRINT}, {"shard": (1, 2)}, {"shard": (0, 2)}],
    ids=["fingerprint", "rank", "world"],
)
@pytest.mark.parametrize("path", [HELLO, LOOKUP, LOAD])
def test_another_identity_is_refused(served: Served, path: str, change: dict[str, object]) -> None:
    assert served.post(path, ask(**change))[0] == 409


# ---------------------------------------------------------------- hostile clients


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from([HELLO, LOOKUP, LOAD, RELEASE]),
    body=st.one_of(
        st.binary(max_size=400),
        st.builds(
            ask,
            version=st.integers(-1, 2),
            keys=st.lists(st.binary(max_size=40), max_size=5),
            seconds=st.floats(),
            transport=st.sampled_from(["wire", "nixl", "", "x" * 50]),
            fingerprint=st.sampled_from([FINGERPRINT, "", "z" * 200]),
        ),
        st.recursive(
            st.none() | st.integers(-(2**31), 2**31) | st.text(max_size=5) | st.binary(max_size=40),
            lambda inner: (
                st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
            ),
            max_leaves=10,
        ).map(msgspec.msgpack.encode),
        st.builds(lambda n: msgspec.msgpack.encode(Release(n)), st.integers(-(2**63), 2**63 - 1)),
    ),
)
def test_whatever_is_sent_gets_an_answer_and_harms_nobody(served: Served, path: str, body: bytes) -> None:
    status, _ = served.post(path, body)
    assert status in (200, 400, 409)
    assert served.app.staged_bytes == 0
    assert served.post(LOOKUP, ask())[0] == 200


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(min_size=1, max_size=400))
def test_bytes_that_are_no_http_cost_their_own_connection(served: Served, data: bytes) -> None:
    with socket.create_connection(served.server.address) as connection:
        connection.settimeout(SECONDS)
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        try:
            while connection.recv(4096):
                continue
        except ConnectionError:
            return
    assert served.post(LOOKUP, ask())[0] == 200


def test_a_body_that_is_too_long_or_does_not_come(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert served.post(LOOKUP, bytes(1 << 19))[0] == 413
    monkeypatch.setattr(peer_app, "BODY_SECONDS", 0.1)
    with socket.create_connection(served.server.address) as connection:
        head = request_head(LOOKUP, 9)
        connection.sendall(head + b"abc")
        connection.settimeout(SECONDS)
        assert b" 408 " in connection.recv(4096)


# ---------------------------------------------------------------- what is on its way


def test_a_path_that_is_larger_than_the_area_comes_in_turns(served: Served) -> None:
    segments = chain("long", 12, record_bytes=100_000)
    served.fill(*segments)
    loaded = served.store().load(keys(segments), deadline_seconds=SECONDS)
    assert [payload(each) for each in loaded] == [payload(each) for each in segments]
    assert served.app.staged_bytes == 0 and served.source.num_reading == 0


def test_what_is_larger_than_the_area_is_not_here(served: Served) -> None:
    (small, large), key = chain("small", 2), key_of("none")
    (large,) = chain("large", 1, record_bytes=AREA_BYTES)
    served.fill(small, large)
    loaded = served.store().load([large.header.key, key, small.header.key], deadline_seconds=SECONDS)
    assert loaded[:2] == [None, None] and payload(loaded[2]) == payload(small)


def test_a_peer_that_takes_nothing_holds_its_place_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_app, "SEND_SECONDS", 0.2)
    slow = Served(area_bytes=64 << 20)
    segments = chain("slow", 3, record_bytes=6_000_000)
    slow.fill(*segments)
    body = ask(keys=keys(segments), seconds=30.0)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(slow.server.address)
        head = request_head(LOAD, len(body))
        connection.sendall(head + body)
        end = time.monotonic() + SECONDS
        while not slow.app.counts.num_segments["wire"]:
            assert time.monotonic() < end
            time.sleep(0.001)
        while slow.app.staged_bytes:
            assert time.monotonic() < end
            time.sleep(0.005)
    # Others were served all the time.
    assert slow.post(LOOKUP, ask())[0] == 200
    slow.server.close()


def test_a_peer_that_leaves_in_the_middle_gives_its_place_back(served: Served) -> None:
    segments = chain("left", 4, record_bytes=200_000)
    served.fill(*segments)
    body = ask(keys=keys(segments), seconds=30.0)
    for _ in range(5):
        with socket.create_connection(served.server.address) as connection:
            head = request_head(LOAD, len(body))
            connection.sendall(head + body)
            connection.recv(1000)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    end = time.monotonic() + SECONDS
    while served.app.staged_bytes:
        assert time.monotonic() < end
        time.sleep(0.002)
    loaded = served.store().load(keys(segments), deadline_seconds=SECONDS)
    assert all(each is not None for each in loaded)


def test_many_peers_at_once_share_a_small_area(served: Served) -> None:
    from concurrent.futures import ThreadPoolExecutor

    segments = chain("shared", 6, record_bytes=150_000)
    served.fill(*segments)
    store = served.store()

    def load(_: int) -> list[bytes | None]:
        return [payload(each) for each in store.load(keys(segments), deadline_seconds=SECONDS)]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(load, range(16))) == [[payload(each) for each in segments]] * 16
    assert served.app.staged_bytes == 0


class _Stage:
    """As if NIXL were here; what it would read is read from the area."""

    def __init__(self, area: StagingArea) -> None:
        from milepost.stores.peer_protocol import Hello

        self.hello = Hello(1, "instance", b"metadata", 0, area.num_bytes)


def test_what_is_lent_is_given_back_by_release_or_by_time() -> None:
    now = [0.0]
    area = StagingArea(AREA_BYTES)
    source = MemorySource(IDENTITY)
    app = PeerApp(
        source,
        area,
        secret=None,
        stage=_Stage(area),
        clock=lambda: now[0],
        lease_seconds=15.0,  # type: ignore[arg-type]
    )
    server = PeerServer(app, bind("127.0.0.1", 0))
    server.start()
    host, port = server.address

    def post(path: str, body: bytes) -> bytes:
        connection = http.client.HTTPConnection(host, port, timeout=SECONDS)
        connection.request("POST", path, body)
        answer = connection.getresponse()
        assert answer.status == 200
        return answer.read()

    segments = chain("lent", 6, record_bytes=100_000)
    source.memory.save(segments, deadline_seconds=SECONDS)
    wanted = [key_of("none"), *keys(segments)]
    staged = msgspec.msgpack.decode(post(LOAD, ask(keys=wanted, transport="nixl", seconds=20.0)))
    assert staged["instance"] == "instance" and staged["objects"][0] is None
    places = staged["objects"][1:]
    assert 1 < len(places) < 6, "as many as fit"
    for (offset, size), each in zip(places, segments, strict=False):
        assert payload(decode(bytes(area.view[offset : offset + size]))) == payload(each)
    used = app.staged_bytes
    assert used
    assert msgspec.msgpack.decode(post(RELEASE, msgspec.msgpack.encode(Release(staged["lease"]))))
    assert app.staged_bytes == 0
    assert not msgspec.msgpack.decode(post(RELEASE, msgspec.msgpack.encode(Release(staged["lease"]))))
    post(LOAD, ask(keys=wanted, transport="nixl", seconds=20.0))
    assert app.staged_bytes == used
    now[0] = 15.0
    post(LOAD, ask(keys=[key_of("none")], transport="nixl", seconds=20.0))
    assert app.staged_bytes == 0 and app.counts.num_late_leases == 1
    server.close()


def test_a_source_that_cannot_answer_is_an_error_of_the_store(served: Served) -> None:
    from milepost.errors import StoreError

    def fail(*_: object, **__: object) -> None:
        raise StoreError("the engine has stopped")

    served.source.heads = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(StoreError, match="503: the engine has stopped"):
        served.store().lookup([key_of("x")], deadline_seconds=SECONDS)


def test_a_frame_says_its_length(served: Served) -> None:
    (one,) = chain("one", 1)
    served.fill(one)
    status, content = served.post(LOAD, ask(keys=[key_of("none"), one.header.key]))
    assert status == 200 and content[:8] == bytes(8)
    (length,) = FRAME.unpack(content[8:16])
    assert payload(decode(content[16:])) == payload(one) and length == len(content) - 16


def test_the_harness_counts_one_way_only() -> None:
    harness = PeerHarness()
    store = harness.open()
    (one,) = chain("counted", 1)
    store.save([one], deadline_seconds=SECONDS)
    store.load([one.header.key], deadline_seconds=SECONDS)
    assert store.outcomes.get(oc.LOAD, oc.CORRUPT) == 0
    harness.close()
