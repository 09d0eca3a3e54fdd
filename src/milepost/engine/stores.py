"""Connects an engine to the stores and event subscribers its options name."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from milepost.config import read_secret
from milepost.core.geometry import CacheGeometry
from milepost.core.ports import RecordAccess
from milepost.core.scheduler import Scheduler
from milepost.engine.engine import Engine
from milepost.engine.kv_events import KvEventLog, KvEventSource
from milepost.engine.kv_publisher import KvEventsConfig, ZmqPublisher, parse_kv_events_config
from milepost.engine.peer_source import CacheSource
from milepost.engine.roles import ALWAYS, BOTH, check_role, load_policy_of
from milepost.engine.segments import SegmentCodec
from milepost.errors import ConfigError, StoreError
from milepost.stores.address import (
    StoreAddress,
    check_places,
    has_control_characters,
    open_stores,
    parse_addresses,
)
from milepost.stores.folder import SegmentFolder
from milepost.stores.inspection import open_folder, scan
from milepost.stores.peer_nixl import READ_AREA_BYTES
from milepost.stores.peer_options import PeerServing, bound, parse_serving
from milepost.stores.peer_protocol import MAX_HEAD_BYTES
from milepost.stores.segment_format import Identity
from milepost.stores.tiers import Tiers

if TYPE_CHECKING:
    from milepost.models.loading import LoadedModel

log = logging.getLogger("milepost.engine")

PERSIST_TIER = "persist"
DEFAULT_PERSIST_BYTES = 50 << 30
MIN_PERSIST_BYTES = 1 << 20
"""Less holds no segment of any model: a slip of the unit, which would cost what an existing folder holds."""
MAX_LOAD_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """What lies beyond the process's memory.

    Attributes:
        kv_stores: addresses, fastest first; see `stores.address`.
        persist: folder of a file tier behind them; None = none.
        persist_bytes: its budget.
        load_policy: "auto" = load where that is sooner than computing; "always"; None = by the role.
        load_seconds: longest that a request is held for stores, see `Tiering`; None = by the policy.
        role: see `roles`.
        serve_kv: where peers get what is cached here; see `stores.peer_options.parse_serving`.
        peer_token_file: the secret of replicas that pull from each other.
        verify_weights: hash every byte of the weights into the fingerprint, not samples.
        kv_events_config: JSON; see `kv_publisher.KvEventsConfig`.
    """

    kv_stores: tuple[str, ...] = ()
    persist: Path | None = None
    persist_bytes: int = DEFAULT_PERSIST_BYTES
    load_policy: str | None = None
    verify_weights: bool = False
    kv_events_config: str | None = None
    role: str = BOTH
    serve_kv: str | None = None
    peer_token_file: Path | None = None
    load_seconds: float | None = None

    def addresses(self) -> list[StoreAddress]:
        """
        Raises:
            ConfigError: an address that cannot work.
        """
        addresses = [self._with_token(address) for address in parse_addresses(self.kv_stores)]
        if self.persist is not None:
            if has_control_characters(str(self.persist)):
                raise ConfigError("persist", "the folder's name has a control character; name another folder")
            folder = self.persist.expanduser().absolute()
            if folder == Path(folder.anchor):
                raise ConfigError("persist", f"{folder} is the root of the file system; name a folder")
            if self.persist_bytes < MIN_PERSIST_BYTES:
                raise ConfigError(
                    "persist_bytes",
                    f"{self.persist_bytes} bytes hold no segment, and what is in the folder would go to keep "
                    f"the bound; give at least {MIN_PERSIST_BYTES >> 20}MiB",
                )
            if any(address.name == PERSIST_TIER for address in addresses):
                raise ConfigError("kv_store", f"the name {PERSIST_TIER!r} is that of --persist")
            addresses.append(
                StoreAddress("file", f"file://{folder}", str(folder), self.persist_bytes, PERSIST_TIER)
            )
        check_places(addresses)
        return addresses

    def _with_token(self, address: StoreAddress) -> StoreAddress:
        if address.kind != "peer" or self.peer_token_file is None:
            return address
        return replace(address, options={"token_file": str(self.peer_token_file), **address.options})

    def serving(self) -> PeerServing | None:
        """
        Raises:
            ConfigError: `serve_kv` or its secret cannot work.
        """
        if self.serve_kv is None:
            return None
        file = self.peer_token_file
        return parse_serving(self.serve_kv, None if file is None else read_secret(file, "peer_token_file"))

    def events(self) -> KvEventsConfig | None:
        """
        Raises:
            ConfigError: a config that cannot work.
        """
        if self.kv_events_config is None:
            return None
        config = parse_kv_events_config(self.kv_events_config)
        return config if config.enable_kv_cache_events else None

    def memory_bytes(self) -> int:
        """What stores in memory, and bytes on their way from and to peers, may take of this process.

        Raises:
            ConfigError: an option that cannot work.
        """
        serving = self.serving()
        addresses = self.addresses()
        staged = sum(READ_AREA_BYTES for address in addresses if address.kind == "peer")
        kept = sum(address.budget_bytes or 0 for address in addresses if address.kind == "memory")
        return kept + staged + (0 if serving is None else serving.area_bytes)

    def check(self) -> None:
        """
        Raises:
            ConfigError, StoreError: an option that cannot work, a folder that cannot be used or an endpoint
                that cannot be bound, before anything is loaded.
        """
        for address in self.addresses():
            if address.kind == "file":
                try:
                    SegmentFolder(address.path).close()
                except StoreError as error:
                    raise StoreError(f"store {address.name}: {error}") from error
        events = self.events()
        if events is not None:
            ZmqPublisher(events).close()
        serving = self.serving()
        check_role(self.role, self.addresses(), serves_peers=serving is not None)
        load_policy_of(self.role, self.load_policy)
        if self.load_seconds is not None and not 0 < self.load_seconds <= MAX_LOAD_SECONDS:
            raise ConfigError(
                "kv_load_seconds",
                f"must be above 0 and at most {MAX_LOAD_SECONDS:g}, not {self.load_seconds:g}",
            )
        if serving is not None:
            bound(serving).close()


@dataclass(frozen=True, slots=True)
class PeerOffer:
    """What peers can be given, and how."""

    source: CacheSource
    serving: PeerServing


def connect_stores(
    engine: Engine,
    scheduler: Scheduler,
    options: StoreOptions,
    directory: Path,
    model: LoadedModel,
    geometry: CacheGeometry,
    records: RecordAccess,
    exactness: str,
) -> PeerOffer | None:
    """Give `engine` its tiers, before it starts; returns what peers can be given, if they are to get it.

    Raises:
        ConfigError, StoreError: an address that is wrong, or a store that cannot be used.
    """
    addresses, serving = options.addresses(), options.serving()
    if not addresses and serving is None:
        return None
    from milepost.models.identity import fingerprint

    identity = Identity(
        fingerprint(
            directory,
            model.layout,
            dtype=model.dtype,
            numerics=model.numerics,
            exactness=exactness,
            full=options.verify_weights,
            drafter=None if model.drafter is None else model.drafter.directory,
        ),
        (geometry.rank, geometry.world_size),
    )
    codec = SegmentCodec(geometry, records, identity.fingerprint, time.time)
    if addresses:
        tiers = Tiers(open_stores(addresses, identity))
        policy = load_policy_of(options.role, options.load_policy)
        engine.use_tiers(tiers, codec, always_loads=policy == ALWAYS, max_load_seconds=options.load_seconds)
        log.info(
            "stores, fastest first: %s; fingerprint %s", ", ".join(tiers.names), identity.fingerprint[:16]
        )
        for address in addresses:
            if address.kind == "file":
                log.info("store %s: %s", address.name, found_text(Path(address.path), identity.fingerprint))
    if serving is None:
        return None
    largest = serving.area_bytes - MAX_HEAD_BYTES
    return PeerOffer(CacheSource(engine, scheduler, geometry, codec, largest), serving)


def found_text(folder: Path, fingerprint: str) -> str:
    """What a folder of segments holds for the model of `fingerprint`, and for others."""
    try:
        opened = open_folder(folder)
        try:
            files = scan(opened)
        finally:
            opened.close()
    except (OSError, StoreError) as error:  # busy, or on a full disk: no reason not to start
        return f"what {folder} holds was not counted: {error}"
    mine = [file.num_bytes for file in files if file.path.startswith(f"{fingerprint}/")]
    text = f"found {_count_text(len(mine), sum(mine))} of this model in {folder}"
    others = len(files) - len(mine)
    if others:
        num_bytes = sum(file.num_bytes for file in files) - sum(mine)
        text += f", and {_count_text(others, num_bytes)} of other models or settings, which it cannot use"
    return text


def _count_text(num_segments: int, num_bytes: int) -> str:
    if not num_segments:
        return "no segments"
    noun = "segment" if num_segments == 1 else "segments"
    return f"{num_segments:,} {noun} ({num_bytes / (1 << 20):,.1f} MiB)"


def connect_events(engine: Engine, options: StoreOptions, match_unit: int) -> ZmqPublisher | None:
    """Announce what `engine` caches, before it starts; the caller closes the publisher.

    Raises:
        ConfigError: a wrong config, or an address that cannot be bound.
    """
    config = options.events()
    if config is None:
        return None
    publisher = ZmqPublisher(config)
    engine.use_events(KvEventSource(KvEventLog(match_unit), publisher.publish, time.time))
    log.info("cache events: %s", publisher.endpoint)
    return publisher
