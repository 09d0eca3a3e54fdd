"""Stores by address: `file:///var/cache/milepost?bytes=50GiB`, `memory://?bytes=8GiB`, `redis://host:6379/0`."""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from milepost.config import install_command, parse_size, read_secret
from milepost.errors import ConfigError, StoreError
from milepost.stores.port import SegmentStore
from milepost.stores.segment_format import Identity

logger = logging.getLogger(__name__)

OPTION = "kv_store"
SHARED_KINDS = ("redis", "mooncake", "file", "peer")
"""What one replica has or saves there, another one can load."""
DEFAULT_BYTES = {"memory": 1 << 30, "file": 50 << 30, "redis": 8 << 30, "mooncake": 1 << 30}
"""Budget of a store whose address names none."""
ALIASES = {"rediss": "redis"}
NETWORK_KINDS = ("redis", "mooncake", "peer")
_COMMON = ("bytes", "name")
_WITHOUT_BYTES = ("peer",)
_REDIS_PORT = 6379


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A parsed address.

    Attributes:
        kind: which store, a key of `_OPENERS`.
        text: the address without its options; credentials included, so never log it.
        path: of the address, decoded.
        budget_bytes: None where the store has no budget of its own.
        name: of the tier.
        options: what else the query says.
    """

    kind: str
    text: str
    path: str
    budget_bytes: int | None
    name: str
    options: Mapping[str, str] = field(default_factory=dict)


def parse_addresses(texts: Sequence[str]) -> list[StoreAddress]:
    """All addresses, with names that differ.

    Raises:
        ConfigError: one is wrong; says what and what would be right.
    """
    addresses = [parse_address(text) for text in texts]
    names = [address.name for address in addresses]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(OPTION, f"two stores are called {name!r}; tell them apart with ?name=")
    return addresses


def has_control_characters(text: str) -> bool:
    return any(character < " " or character == "\x7f" for character in text)


def check_places(addresses: Sequence[StoreAddress]) -> None:
    """
    Raises:
        ConfigError: two of them are one and the same place; names both, and their budgets.
    """
    seen: dict[tuple[object, ...], StoreAddress] = {}
    for address in addresses:
        if address.kind == "memory":
            continue
        first = seen.setdefault(_place(address), address)
        if first is not address:
            raise ConfigError(
                OPTION,
                f"stores {_described(first)} and {_described(address)} are one and the same place: give it "
                "once, with one budget",
            )


def _place(address: StoreAddress) -> tuple[object, ...]:
    if address.kind == "file":
        # A folder may be reached over links and mounts.
        path = os.path.realpath(address.path)
        with contextlib.suppress(OSError):
            found = os.stat(path)
            return address.kind, found.st_dev, found.st_ino
        return address.kind, path
    parts = urlsplit(address.text)
    database = int(address.path.strip("/") or 0) if address.kind == "redis" else 0
    return address.kind, parts.hostname, parts.port or _default_port(address.kind), database


def _default_port(kind: str) -> int:
    from milepost.stores import mooncake_client, peer

    return {"mooncake": mooncake_client.DEFAULT_PORT, "peer": peer.DEFAULT_PORT}.get(kind, _REDIS_PORT)


def _described(address: StoreAddress) -> str:
    budget = "" if address.budget_bytes is None else f", {address.budget_bytes:,} bytes"
    return f"{address.name!r} ({_shown(address.text)}{budget})"


def parse_address(text: str) -> StoreAddress:
    """
    Raises:
        ConfigError: an unknown scheme or option (the nearest one is named), a missing path or host, or a size
            that is none.
    """
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        # What is not read as a host may be a password: no part of it is repeated.
        raise ConfigError(
            OPTION,
            "an address has no host and port that can be read; ports are 1 to 65535, IPv6 hosts stand in [], "
            "and a password's / @ : are written %2F %40 %3A",
        ) from None
    if has_control_characters(unquote(text)):
        raise ConfigError(
            OPTION, "an address has a control character, like %00; no folder or name can have one"
        )
    kind = ALIASES.get(parts.scheme, parts.scheme)
    if kind not in _OPENERS:
        raise ConfigError(
            OPTION, f"{_shown(text)!r} has no known scheme; use {', '.join(f'{k}://' for k in _OPENERS)}"
        )
    common = [option for option in _COMMON if option != "bytes" or kind not in _WITHOUT_BYTES]
    known = (*common, *_EXTRA_OPTIONS.get(kind, ()))
    options: dict[str, str] = {}
    for key, value in parse_qsl(parts.query, keep_blank_values=True):
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(OPTION, f"{kind}:// has no option {key!r}; {hint}")
        if key in options:
            raise ConfigError(OPTION, f"{_shown(text)!r} gives {key!r} twice")
        options[key] = value
    path = unquote(parts.path)
    if kind == "file" and (parts.netloc or not path.startswith("/") or path == "/"):
        raise ConfigError(OPTION, f"{text!r} needs an absolute path, like file:///var/cache/milepost")
    if kind in NETWORK_KINDS and not parts.hostname:
        raise ConfigError(OPTION, f"{_shown(text)!r} needs a host, like {kind}://127.0.0.1")
    if port == 0:
        raise ConfigError(OPTION, f"{_shown(text)!r} needs a port from 1 to 65535")
    if kind == "redis" and not (path.strip("/").isdecimal() or path in ("", "/")):
        raise ConfigError(
            OPTION, "redis:// ends with the number of a database, like redis://127.0.0.1:6379/0"
        )
    if kind == "peer" and (path not in ("", "/") or "@" in parts.netloc):
        raise ConfigError(
            OPTION,
            "peer:// is followed by host and port only; the secret is in a file that token_file= or "
            "--peer-token-file names",
        )
    if kind == "memory" and (parts.netloc or path):
        raise ConfigError(
            OPTION, f"{text!r} has a place; memory:// takes options only, like memory://?bytes=8GiB"
        )
    size = options.pop("bytes", None)
    budget_bytes = parse_size(size, OPTION) if size is not None else DEFAULT_BYTES.get(kind)
    # A client of a Mooncake pool need not give it memory.
    if budget_bytes is not None and budget_bytes < (0 if kind == "mooncake" else 1):
        raise ConfigError(OPTION, f"bytes must be positive, not {size}")
    name = options.pop("name", kind)
    plain = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
    return StoreAddress(kind, plain, path, budget_bytes, name, options)


def _shown(text: str) -> str:
    """An address for a message: without a password."""
    parts = urlsplit(text)
    if parts.password is None:
        return text
    return urlunsplit(parts._replace(netloc=f"{parts.hostname}"))


def open_stores(addresses: Sequence[StoreAddress], identity: Identity) -> list[SegmentStore]:
    """The stores, in their order.

    Raises:
        StoreError: one cannot be used; those opened before are closed.
    """
    stores: list[SegmentStore] = []
    try:
        for address in addresses:
            try:
                stores.append(_OPENERS[address.kind](address, identity))
            except StoreError as error:
                raise StoreError(f"store {address.name}: {error}") from error
    except BaseException:
        for store in stores:
            store.close()
        raise
    return stores


def _open_memory(address: StoreAddress, identity: Identity) -> SegmentStore:
    from milepost.stores.memory import MemoryStore

    return MemoryStore(identity, budget_bytes=address.budget_bytes or 1, name=address.name)


def _open_file(address: StoreAddress, identity: Identity) -> SegmentStore:
    from milepost.stores.file import FSYNC_POLICIES, FileStore

    fsync = address.options.get("fsync", "never")
    policies = {str(policy): policy for policy in FSYNC_POLICIES}
    if fsync not in policies:
        raise ConfigError(OPTION, f"fsync must be one of {', '.join(FSYNC_POLICIES)}, not {fsync!r}")
    return FileStore(
        address.path,
        identity,
        budget_bytes=address.budget_bytes or 1,
        fsync=policies[fsync],
        name=address.name,
    )


def _open_redis(address: StoreAddress, identity: Identity) -> SegmentStore:
    try:
        from milepost.stores.redis import RedisStore

        return RedisStore(address.text, identity, budget_bytes=address.budget_bytes or 1, name=address.name)
    except ImportError:
        raise StoreError(f"redis:// needs a client; install it with: {install_command('redis')}") from None


def _open_mooncake(address: StoreAddress, identity: Identity) -> SegmentStore:
    from milepost.stores.mooncake import MooncakeStore
    from milepost.stores.mooncake_client import DEFAULT_PORT, MooncakeConnection, MooncakeOptions

    said = address.options
    parts = urlsplit(address.text)
    protocol = said.get("protocol", "tcp")
    if protocol not in ("tcp", "rdma"):
        raise ConfigError(OPTION, f"protocol must be tcp or rdma, not {protocol!r}")
    options = MooncakeOptions(
        master=f"{parts.hostname}:{parts.port or DEFAULT_PORT}",
        segment_bytes=address.budget_bytes or 0,
        buffer_bytes=parse_size(said.get("buffer", "256MiB"), OPTION),
        protocol=protocol,
        devices=said.get("devices", ""),
        host=said.get("host", ""),
        num_replicas=_count(said.get("replicas", "1"), "replicas"),
        ssd_path=said.get("ssd", ""),
        ssd_bytes=parse_size(said.get("ssd_bytes", "50GiB"), OPTION),
    )
    try:
        return MooncakeStore(MooncakeConnection(options), identity, name=address.name)
    except ImportError as error:
        raise StoreError(
            "mooncake:// needs a client and the system library libibverbs1; "
            f"install them with: apt install libibverbs1; {install_command('mooncake')} ({error})"
        ) from None


def _open_peer(address: StoreAddress, identity: Identity) -> SegmentStore:
    from milepost.stores.peer import DEFAULT_PORT, PeerStore
    from milepost.stores.peer_bulk import BulkReader
    from milepost.stores.peer_connection import PeerConnections
    from milepost.stores.peer_nixl import NixlReader
    from milepost.stores.peer_options import AUTO, nixl_hint, parse_taking
    from milepost.stores.peer_protocol import WIRE

    parts = urlsplit(address.text)
    taking = parse_taking(address.options, OPTION)
    host = parts.hostname or ""
    token_file = address.options.get("token_file")
    secret = None if token_file is None else read_secret(Path(token_file), OPTION)
    silence, clock = taking.silence_seconds, time.monotonic
    connections = PeerConnections(
        host, parts.port or DEFAULT_PORT, secret=secret, silence_seconds=silence, clock=clock
    )
    bulk: BulkReader | None = None
    if taking.transport != WIRE:
        try:
            bulk = NixlReader(host, secret, name=address.name, silence_seconds=silence)
        except (ImportError, StoreError) as error:
            if taking.transport != AUTO:
                raise nixl_hint(error) from None
    logger.info(
        "store %s: segments of %s:%d over %s", address.name, host, parts.port or DEFAULT_PORT,
        "its connection" if bulk is None else "NIXL if it has that, else over its connection",
    )  # fmt: skip
    return PeerStore(
        connections, identity, bulk=bulk, max_object_bytes=taking.max_object_bytes, name=address.name
    )


def _count(text: str, option: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(OPTION, f"{option} is a number from 1 on, not {text!r}")
    return int(text)


_OPENERS: dict[str, Callable[[StoreAddress, Identity], SegmentStore]] = {
    "memory": _open_memory,
    "file": _open_file,
    "redis": _open_redis,
    "mooncake": _open_mooncake,
    "peer": _open_peer,
}
_EXTRA_OPTIONS = {
    "file": ("fsync",),
    "mooncake": ("buffer", "protocol", "devices", "host", "replicas", "ssd", "ssd_bytes"),
    "peer": ("token_file", "transport", "max_segment", "timeout"),
}
