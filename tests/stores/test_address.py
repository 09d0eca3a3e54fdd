"""Addresses of stores: what they mean, and what is said about wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from milepost.errors import ConfigError, StoreError
from milepost.stores.address import check_places, open_stores, parse_address, parse_addresses
from milepost.stores.file import FileStore
from milepost.stores.memory import MemoryStore
from milepost.stores.segment_format import Identity

IDENTITY = Identity("ab" * 32)


def test_addresses_say_kind_place_and_size() -> None:
    address = parse_address("file:///var/cache/mile%20post?bytes=5GiB&fsync=rename")
    assert (address.kind, address.path) == ("file", "/var/cache/mile post")
    assert (address.budget_bytes, address.name) == (5 << 30, "file")
    assert address.options == {"fsync": "rename"}
    assert parse_address("memory://?bytes=1k").budget_bytes == 1024
    assert parse_address("memory://").budget_bytes == 1 << 30
    redis = parse_address("rediss://user:secret@cache:6380/2?bytes=1GiB&name=far")
    assert (redis.kind, redis.text, redis.name) == ("redis", "rediss://user:secret@cache:6380/2", "far")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("disk:///tmp/x", "no known scheme; use memory://, file://, redis://"),
        ("/tmp/x", "no known scheme"),
        ("file://tmp/x", "absolute path"),
        ("file:///", "absolute path"),
        ("file:relative", "absolute path"),
        ("file:///tmp/x?byts=1GiB", "did you mean 'bytes'"),
        ("memory://?fsync=always", "no option 'fsync'"),
        ("file:///tmp/x?bytes=many", "not a size"),
        ("memory://?bytes=0", "positive"),
        ("memory://?bytes=1k&bytes=2k", "twice"),
        ("redis:///0", "needs a host"),
        ("mooncake://?bytes=1GiB", "needs a host"),
        ("mooncake://h?replica=2", "did you mean 'replicas'"),
        ("redis://[::1", "host and port"),
        ("redis://host:abc/0", "1 to 65535"),
        ("mooncake://host:99999", "1 to 65535"),
        ("redis://host:0", "1 to 65535"),
        ("redis://host:6379/first", "number of a database"),
        ("memory://cache", "has a place"),
    ],
)
def test_a_wrong_address_is_explained(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        parse_address(text)
    assert raised.value.field == "kv_store"


@pytest.mark.parametrize(
    ("query", "message"),
    [("replicas=0", "number from 1 on"), ("protocol=udp", "tcp or rdma"), ("buffer=much", "not a size")],
)
def test_options_of_a_pool_are_checked_before_anything_is_loaded(query: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_stores([parse_address(f"mooncake://127.0.0.1?{query}")], IDENTITY)


def test_a_pool_needs_no_memory_of_ours() -> None:
    address = parse_address("mooncake://master:50051?bytes=0&replicas=2&ssd=/var/cache/pool")
    assert (address.kind, address.budget_bytes, address.options["ssd"]) == ("mooncake", 0, "/var/cache/pool")


@pytest.mark.parametrize(
    "text", ["radis://user:hunter2@host", "redis://user:hunter2/3@host/0", "redis://user:12/hunter2@host"]
)
def test_a_password_is_not_repeated_in_a_message(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_address(text)
    assert "hunter2" not in str(raised.value)


def test_two_tiers_need_two_names(tmp_path: Path) -> None:
    texts = [f"file://{tmp_path}/a", f"file://{tmp_path}/b"]
    with pytest.raises(ConfigError, match="name="):
        parse_addresses(texts)
    assert [a.name for a in parse_addresses([texts[0], texts[1] + "?name=b"])] == ["file", "b"]


@pytest.mark.parametrize(
    "text",
    [
        "file:///tmp/a%00b", "file:///tmp/a\0b", "file:///tmp/a%0Ab", "file:///tmp/a?name=%00",
        "memory://?name=a%0ab", "mooncake://host?ssd=/tmp/%00", "peer://host?token_file=/tmp/%00",
        "redis://ho%00st", "file:///tmp/a%7f",
    ],
)  # fmt: skip
def test_control_characters_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="control character|no host"):
        parse_address(text)


def test_one_place_is_given_once(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    once = f"file://{tmp_path}/a?bytes=1MiB"
    for again in (
        f"file://{tmp_path}/a?bytes=2MiB&name=b",
        f"file://{tmp_path}/a?bytes=1MiB&name=b",
        f"file://{tmp_path}/x/../a?name=b",
        f"file://{tmp_path}/a/?name=b",
        f"file://{tmp_path}/link?name=b",
    ):
        for exists in (False, True):
            if exists:
                (tmp_path / "a").mkdir(exist_ok=True)
            with pytest.raises(ConfigError) as refused:
                check_places(parse_addresses([once, again]))
            text = str(refused.value)
            assert "'file'" in text and "'b'" in text and "1,048,576 bytes" in text, text
            assert "bytes=2MiB" not in again or "2,097,152 bytes" in text
        (tmp_path / "a").rmdir()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("redis://host", "rediss://user:hunter2@HOST:6379/0?bytes=1GiB&name=b"),
        ("peer://host", "peer://host:9400?name=b"),
        ("mooncake://host", "mooncake://host:50051?name=b"),
    ],
)
def test_one_server_is_given_once(first: str, second: str) -> None:
    with pytest.raises(ConfigError, match="one and the same place") as refused:
        check_places(parse_addresses([first, second]))
    assert "hunter2" not in str(refused.value)


def test_places_that_differ(tmp_path: Path) -> None:
    check_places(
        parse_addresses(
            [
                "memory://", "memory://?name=b", f"file://{tmp_path}/a", f"file://{tmp_path}/b?name=c",
                "redis://host/0", "redis://host/1?name=d", "redis://host:6380?name=e", "peer://host",
                "peer://host:9401?name=f",
            ]
        )
    )  # fmt: skip


def test_stores_are_opened_in_order(tmp_path: Path) -> None:
    addresses = parse_addresses(["memory://?bytes=1MiB", f"file://{tmp_path}/segments?bytes=2MiB"])
    memory, file = open_stores(addresses, IDENTITY)
    assert isinstance(memory, MemoryStore) and memory.budget_bytes == 1 << 20
    assert isinstance(file, FileStore) and file.budget_bytes == 2 << 20
    memory.close()
    file.close()


def test_a_store_that_cannot_be_opened_closes_the_others(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    addresses = parse_addresses(["memory://", f"file://{tmp_path}/taken"])
    with pytest.raises(StoreError, match="store file: .*taken"):
        open_stores(addresses, IDENTITY)


def test_an_unknown_fsync_policy_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="always, rename, never"):
        open_stores([parse_address(f"file://{tmp_path}/x?fsync=sometimes")], IDENTITY)
