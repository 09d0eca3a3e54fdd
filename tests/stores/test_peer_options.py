"""Options of replicas that pull from each other: addresses, secrets, roles."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.stores.segments import IDENTITY

from milepost.config import read_secret
from milepost.errors import ConfigError, StoreError
from milepost.stores import peer_nixl
from milepost.stores.address import open_stores, parse_address
from milepost.stores.peer import PeerStore
from milepost.stores.peer_nixl import NixlReader, is_loopback
from milepost.stores.peer_options import DEFAULT_AREA_BYTES, PeerServing, bound, parse_serving, parse_taking

SECRET = "0123456789abcdef"


def secret_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "secret"
    path.write_text(text)
    path.chmod(mode)
    return path


# ---------------------------------------------------------------- secrets


def test_a_secret_is_one_line_that_nobody_guesses(tmp_path: Path) -> None:
    assert read_secret(secret_file(tmp_path, f"# of replicas\n\n{SECRET}\n"), "f") == SECRET
    for text, problem in (
        ("", "holds no key"),
        (f"{SECRET}\n{SECRET}\n", "2 lines"),
        ("short", "5 characters"),
        ("with spaces in between", "without spaces"),
        ("not ascii: é" * 3, "ASCII"),
    ):
        with pytest.raises(ConfigError, match=problem):
            read_secret(secret_file(tmp_path, text), "f")
    with pytest.raises(ConfigError, match="chmod 600"):
        read_secret(secret_file(tmp_path, SECRET, 0o640), "f")
    with pytest.raises(ConfigError, match="cannot read"):
        read_secret(tmp_path / "nowhere", "f")


# ---------------------------------------------------------------- giving


def test_where_to_serve() -> None:
    assert parse_serving("127.0.0.1:9400", None) == PeerServing("127.0.0.1", 9400)
    assert parse_serving("[::1]:9400", None).host == "::1"
    assert parse_serving("localhost:0", None).area_bytes == DEFAULT_AREA_BYTES
    serving = parse_serving("10.0.0.1:9400?bytes=1GiB&transport=wire", SECRET)
    assert (serving.area_bytes, serving.transport, serving.secret) == (1 << 30, "wire", SECRET)
    assert SECRET not in repr(serving)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not HOST:PORT"),
        ("9400", "not HOST:PORT"),
        ("host:port", "not HOST:PORT"),
        ("127.0.0.1:70000", "not HOST:PORT"),
        ("127.0.0.1:9400/path", "not HOST:PORT"),
        ("secret@127.0.0.1:9400", "not HOST:PORT"),
        ("127.0.0.1:9400?size=1", "no option 'size'"),
        ("127.0.0.1:9400?bytes=1KiB", "at least"),
        ("127.0.0.1:9400?bytes=many", "not a size"),
        ("127.0.0.1:9400?transport=pigeon", "transport must be one of"),
    ],
)
def test_what_is_no_place_to_serve(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        parse_serving(text, SECRET)
    assert raised.value.field == "serve_kv"


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "[::]", "example.org"])
def test_without_a_secret_only_this_machine_is_served(host: str) -> None:
    with pytest.raises(ConfigError, match="peer-token-file"):
        parse_serving(f"{host}:9400", None)
    assert parse_serving(f"{host}:9400", SECRET).port == 9400


def test_a_taken_port_is_named() -> None:
    with bound(PeerServing("127.0.0.1", 0)) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            bound(PeerServing("127.0.0.1", port))


def test_hosts_of_this_machine() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.1.2.3", "::1", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "example.org", ""]))


# ---------------------------------------------------------------- taking


def test_an_address_of_a_peer(tmp_path: Path) -> None:
    address = parse_address("peer://10.0.0.2:9500?transport=wire&timeout=0.5&max_segment=2GiB&name=other")
    assert (address.kind, address.name, address.budget_bytes) == ("peer", "other", None)
    taking = parse_taking(address.options, "kv_store")
    assert (taking.transport, taking.silence_seconds, taking.max_object_bytes) == ("wire", 0.5, 2 << 30)
    (store,) = open_stores([address], IDENTITY)
    assert isinstance(store, PeerStore) and store.name == "other" and not store.takes_saves
    store.close()
    path = secret_file(tmp_path, "short")
    with pytest.raises(ConfigError, match="characters"):
        open_stores([parse_address(f"peer://127.0.0.1?transport=wire&token_file={path}")], IDENTITY)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("peer://", "needs a host"),
        ("peer://host/path", "host and port only"),
        ("peer://:secret@host:1", "in a file"),
        ("peer://host?bytes=1GiB", "no option 'bytes'"),
        ("peer://host?token=x", "did you mean 'token_file'"),
        ("peer://host:0", "port from 1"),
    ],
)
def test_what_is_no_address_of_a_peer(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        parse_address(text)
    assert "secret@" not in str(raised.value)


@pytest.mark.parametrize(
    "options", [{"timeout": "0"}, {"timeout": "x"}, {"timeout": "61"}, {"transport": "x"}]
)
def test_options_of_an_address_that_cannot_work(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        parse_taking(options, "kv_store")


def test_without_nixl_bytes_come_over_the_connection_unless_it_is_insisted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(*_: object) -> None:
        raise ImportError("no module named nixl")

    monkeypatch.setattr(peer_nixl, "new_agent", missing)
    with pytest.raises(ImportError):
        NixlReader("127.0.0.1", None, name="x", silence_seconds=1.0)
    (store,) = open_stores([parse_address("peer://127.0.0.1:1")], IDENTITY)
    assert isinstance(store, PeerStore) and not store._bulk.is_ready
    store.close()
    with pytest.raises(StoreError, match=r"pip install .*nixl"):
        open_stores([parse_address("peer://127.0.0.1:1?transport=nixl")], IDENTITY)
