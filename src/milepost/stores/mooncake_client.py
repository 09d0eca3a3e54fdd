"""A client of a Mooncake Store and its memory: connecting without harm, and finding a lost master again."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from milepost.errors import StoreError
from milepost.stores.buffers import address_of, new_buffer
from milepost.stores.master_watch import MasterWatch
from milepost.stores.objects import Clock, Deadline, StoreTimeoutError
from milepost.stores.segment_format import HEAD_UNIT_BYTES

logger = logging.getLogger(__name__)

DEFAULT_PORT = 50051
HEADS_AT_ONCE = 1024
MAX_LONG_HEAD_BYTES = 256 << 10
_PROBE_SECONDS = 10.0
_RECONNECT_SECONDS = 15.0
_CLOSE_SECONDS = 3.0
_PROBE = """
import os, sys
from mooncake.store import MooncakeDistributedStore
code = MooncakeDistributedStore().setup(sys.argv[1], "P2PHANDSHAKE", 0, 1 << 24, "tcp", "", sys.argv[2])
os._exit(0 if code == 0 else 1)
"""


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """Attributes:
    master: host:port of the master.
    segment_bytes: memory this process gives to the pool; 0 = none.
    buffer_bytes: memory through which objects come and go; the largest object is half of it.
    protocol: tcp or rdma.
    devices: names of RDMA devices.
    host: address others reach this process at; empty = the one that faces the master. With `ssd_path` it
        needs a fixed port.
    num_replicas: copies of each object, in different processes.
    ssd_path: a folder where the pool's objects of this process survive it; empty = none.
    ssd_bytes: of that folder.
    """

    master: str
    segment_bytes: int
    buffer_bytes: int = 256 << 20
    protocol: str = "tcp"
    devices: str = ""
    host: str = ""
    num_replicas: int = 1
    ssd_path: str = ""
    ssd_bytes: int = 0

    @property
    def largest_object_bytes(self) -> int:
        return self.buffer_bytes // 2


class Region:
    """Registered memory that one call at a time uses."""

    def __init__(self, client: Any, num_bytes: int) -> None:
        self.view = new_buffer(num_bytes)
        self.address = address_of(self.view)
        self._lock = threading.Lock()
        if client.register_buffer(self.address, num_bytes) != 0:
            raise StoreError(f"Mooncake did not register a buffer of {num_bytes} bytes")

    @contextmanager
    def held(self, deadline: Deadline) -> Iterator[None]:
        """Raises:
        StoreTimeoutError: another call holds it.
        """
        if not self._lock.acquire(timeout=deadline.remaining_seconds):
            raise StoreTimeoutError("another transfer takes too long")
        try:
            yield
        finally:
            self._lock.release()


class MooncakeConnection:
    """One client of the pool, with its registered memory.

    Connecting blocks the whole interpreter for 90 seconds where no master answers, so a child process tries
    it first. A master that is not there is looked for again in the background. A call to a master that died
    takes four seconds and more, so nothing is called while it is not there.
    """

    def __init__(self, options: MooncakeOptions, clock: Clock = time.monotonic) -> None:
        self.options = options
        self._clock = clock
        self._condition = threading.Condition()
        self._num_users = 0
        self._next_attempt = 0.0
        self._is_connecting = False
        self._client: Any = None
        self._closed = False
        self._host = options.host or _address_facing(options.master)
        self._watch = MasterWatch(options.master, clock)
        self._prepare_environment()
        # Before anything is connected: a missing package is an error at start.
        from mooncake import store

        self._module = store
        self._connect()

    def _prepare_environment(self) -> None:
        options = self.options
        # Read by the library when it is loaded or connects.
        os.environ.setdefault("MC_TCP_BIND_ADDRESS", self._host.partition(":")[0])
        os.environ.setdefault("GLOG_minloglevel", "3")
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        if options.ssd_path:
            os.makedirs(options.ssd_path, mode=0o700, exist_ok=True)
            limit = str(options.ssd_bytes)
            for name, value in {
                "HEARTBEAT_INTERVAL_SECONDS": "1",
                "LOCAL_BUFFER_SIZE_BYTES": str(128 << 20),
                "STORAGE_BACKEND_DESCRIPTOR": "file_per_key_storage_backend",
                "BUCKET_EVICTION_POLICY": "lru",
                "BUCKET_MAX_TOTAL_SIZE": limit,
                "TOTAL_SIZE_LIMIT_BYTES": limit,
            }.items():
                os.environ.setdefault(f"MOONCAKE_OFFLOAD_{name}", value)

    @contextmanager
    def use(self) -> Iterator[Any]:
        """The client, which is not closed before the caller is done.

        Raises:
            StoreError: not connected at present, or the master died.
        """
        with self._condition:
            if self._client is None:
                is_due = self._clock() >= self._next_attempt and not self._is_connecting
                if is_due and not self._closed:
                    self._is_connecting = True
                    threading.Thread(target=self._reconnect, name="mooncake-connect", daemon=True).start()
                raise StoreError(f"no Mooncake master at {self.options.master}")
            client = self._client
            self._num_users += 1
        try:
            self.check_master()
            yield client
        finally:
            with self._condition:
                self._num_users -= 1
                self._condition.notify_all()

    def check_master(self) -> None:
        """Raises:
        StoreError: the master is not there.
        """
        if not self._watch.is_there():
            raise StoreError(f"the Mooncake master at {self.options.master} is gone")

    def _reconnect(self) -> None:
        """One at a time: a second client would take the place of one in use."""
        try:
            self._connect()
        except Exception as error:
            logger.warning("connecting to Mooncake at %s failed: %s", self.options.master, error)
        finally:
            with self._condition:
                self._is_connecting = False
                self._next_attempt = self._clock() + _RECONNECT_SECONDS

    def _connect(self) -> None:
        if self._closed:
            return
        if not self._master_answers():
            logger.warning("no Mooncake master at %s; it is looked for again", self.options.master)
            return
        options = self.options
        client = self._module.MooncakeDistributedStore()
        if options.ssd_path:
            code = client.setup(
                {
                    "local_hostname": self._host,
                    "metadata_server": "P2PHANDSHAKE",
                    "global_segment_size": str(options.segment_bytes),
                    "local_buffer_size": str(options.buffer_bytes),
                    "protocol": options.protocol,
                    "rdma_devices": options.devices,
                    "master_server_addr": options.master,
                    "enable_ssd_offload": "true",
                    "ssd_offload_path": options.ssd_path,
                }
            )
        else:
            code = client.setup(
                self._host,
                "P2PHANDSHAKE",
                options.segment_bytes,
                options.buffer_bytes,
                options.protocol,
                options.devices,
                options.master,
            )
        if code != 0:
            logger.warning("Mooncake did not connect to %s: error %d", options.master, code)
            return
        config = self._module.ReplicateConfig()
        config.replica_num = options.num_replicas
        half = options.largest_object_bytes
        try:
            self.heads = Region(client, HEADS_AT_ONCE * HEAD_UNIT_BYTES + MAX_LONG_HEAD_BYTES)
            self.loads = Region(client, half)
            self.saves = Region(client, half)
        except StoreError:
            client.close()
            raise
        self.replication = config
        with self._condition:
            if not self._closed:
                self._client = client
                return
        client.close()

    def _master_answers(self) -> bool:
        host, _, port = self.options.master.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=2.0):
                pass
        except OSError:
            return False
        # A master that accepts and says nothing would hold the interpreter's lock.
        command = [sys.executable, "-c", _PROBE, self._host.partition(":")[0], self.options.master]
        try:
            quiet = subprocess.DEVNULL
            return not subprocess.call(command, stdout=quiet, stderr=quiet, timeout=_PROBE_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            return False

    def close(self) -> None:
        """A client that is closed under a call takes the process along, so one with a call that hangs is
        left open."""
        with self._condition:
            self._closed = True
            client, self._client = self._client, None
            is_idle = self._condition.wait_for(lambda: not self._num_users, _CLOSE_SECONDS)
        self._watch.close()
        if client is not None and is_idle:
            client.close()
        elif client is not None:
            logger.warning("a call to Mooncake hangs; its client is left open")
            _abandoned.append(client)


_abandoned: list[Any] = []
"""Clients with a call that hangs: their end would be that of the process."""


def _address_facing(master: str) -> str:
    """The address of this machine on the way to `master`; nothing is sent."""
    host, _, port = master.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise StoreError(f"Mooncake master {master}: {error}") from error
