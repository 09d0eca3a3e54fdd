"""NIXL as the way of bulk bytes between peers (extra `nixl`): one side registers its staging area, the other
reads it (one-sided, over shared memory, TCP or RDMA, as UCX finds best).

NIXL moves bytes and nothing else: what is where, whether it is whole and who may ask is said over the
connection. UCX's ports ask nobody for a secret and listen on all interfaces unless `UCX_NET_DEVICES` names
one; peers that talk over loopback confine it to that. A read that was given up may still write: its memory is
not used again before NIXL says that it has ended.
"""

from __future__ import annotations

import hmac
import importlib
import ipaddress
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from milepost.errors import StoreError
from milepost.stores.buffers import address_of, copy_into, new_buffer
from milepost.stores.objects import Clock, Deadline, StoreTimeoutError
from milepost.stores.peer_bulk import proof_of
from milepost.stores.peer_protocol import PROTOCOL_VERSION, Hello
from milepost.stores.staging import StagingArea

logger = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
"""Read at once."""
READ_AREA_BYTES = 16 * PIECE_BYTES
_RETRY_SECONDS = 10.0
"""A peer that has no NIXL, or whose area could not be read, is asked again so much later."""
_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 0.00005, 0.002
_DEVICES = "UCX_NET_DEVICES"


def is_loopback(host: str) -> bool:
    """Whether nobody outside of this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _nixl_api() -> Any:
    """Hosts with another CUDA have another package.

    Raises:
        ImportError: neither is installed.
    """
    try:
        return importlib.import_module("nixl_cu12._api")
    except ImportError:
        return importlib.import_module("nixl_cu13._api")


def new_agent(area: StagingArea, host: str) -> Any:
    """An agent with `area` registered.

    Args:
        host: over which the peers talk.

    Raises:
        ImportError: NIXL is not installed. StoreError: it does not work here.
    """
    if is_loopback(host):
        os.environ.setdefault(_DEVICES, "lo")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    nixl = _nixl_api()
    try:
        agent = nixl.nixl_agent(
            f"milepost-{uuid.uuid4()}",
            nixl.nixl_agent_config(
                backends=["UCX"], sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            ),
        )
        if "UCX" not in agent.backends:
            raise StoreError("NIXL has no UCX here")
        agent.register_memory([(address_of(area.view), area.num_bytes, 0, "")], "DRAM")
    except StoreError:
        raise
    except Exception as error:
        raise StoreError(f"NIXL does not work here: {error!r}") from error
    return agent


class NixlStage:
    """The staging area of this process, for peers to read as long as this object is kept.

    Raises (when made):
        ImportError, StoreError: see `new_agent`.
    """

    def __init__(self, area: StagingArea, host: str, secret: str | None, instance: str) -> None:
        self._agent = new_agent(area, host)
        self._area = area
        hello = Hello(
            PROTOCOL_VERSION,
            instance,
            bytes(self._agent.get_agent_metadata()),
            address_of(area.view),
            area.num_bytes,
        )
        self.hello = Hello(
            hello.version,
            hello.instance,
            hello.nixl,
            hello.address,
            hello.num_bytes,
            proof_of(hello, secret),
        )


class NixlReader:
    """Implements `peer_bulk.BulkReader`.

    Args:
        host: of the peer.
        name: of the tier, for the log.

    Attributes:
        num_read_bytes: that came this way.

    Raises (when made):
        ImportError, StoreError: see `new_agent`.
    """

    def __init__(
        self,
        host: str,
        secret: str | None,
        *,
        name: str,
        silence_seconds: float,
        clock: Clock = time.monotonic,
    ) -> None:
        self._area = StagingArea(READ_AREA_BYTES)
        self._agent = new_agent(self._area, host)
        self._secret = secret
        self._name = name
        self._silence_seconds = silence_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._is_closed = False
        self._peer: tuple[str, Hello] | None = None
        self._retry_at = 0.0
        self._abandoned: list[tuple[Any, int]] = []
        self.num_read_bytes = 0

    @property
    def is_ready(self) -> bool:
        return self._peer is not None

    def connect(self, ask: Callable[[], Hello]) -> None:
        # Reading goes on with the lock held by others; connecting takes many milliseconds.
        if self._peer is not None or self._clock() < self._retry_at or not self._connecting.acquire(False):
            return

        def work() -> None:
            try:
                self._retry_at = self._clock() + _RETRY_SECONDS
                self._connect(ask)
            except StoreError as error:
                logger.info("%s: segments come over the connection: %s", self._name, error)
            except Exception as error:
                logger.warning(
                    "%s: segments come over the connection, because NIXL does not reach the peer: %r",
                    self._name, error,
                )  # fmt: skip
            finally:
                self._connecting.release()

        threading.Thread(target=work, name=f"nixl-{self._name}", daemon=True).start()

    def _connect(self, ask: Callable[[], Hello]) -> None:
        hello = ask()
        if not hello.nixl:
            raise StoreError("the peer has no NIXL")
        if not hmac.compare_digest(hello.proof, proof_of(hello, self._secret)):
            raise StoreError("the peer does not know the secret")
        with self._lock:
            if self._is_closed:
                return
            self._peer = (_text(self._agent.add_remote_agent(hello.nixl)), hello)
        logger.info("%s: segments are read over NIXL", self._name)

    def read(
        self, instance: str, offset: int, num_bytes: int, max_bytes: int, deadline: Deadline
    ) -> memoryview:
        peer = self._peer
        if peer is None or peer[1].instance != instance:
            self._forget(peer)
            raise StoreError("the peer was started anew")
        if not 0 < num_bytes <= max_bytes or not 0 <= offset <= peer[1].num_bytes - num_bytes:
            raise StoreError(f"the peer stages {num_bytes} bytes at {offset} of {peer[1].num_bytes}")
        target = new_buffer(num_bytes)
        for first in range(0, num_bytes, PIECE_BYTES):
            piece = target[first : first + PIECE_BYTES]
            self._read_piece(peer, peer[1].address + offset + first, piece, deadline)
        return target.toreadonly()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self._forget(self._peer)

    # ------------------------------------------------------------ parts

    def _read_piece(
        self, peer: tuple[str, Hello], address: int, target: memoryview, deadline: Deadline
    ) -> None:
        self._collect()
        place = self._take(target.nbytes, deadline)
        handle: Any = None
        try:
            try:
                with self._lock:
                    handle, state = self._begin(peer[0], address, place, target.nbytes)
                state = self._wait(handle, state, deadline)
            except StoreError:
                raise
            except Exception as error:
                raise StoreError(f"NIXL could not read from the peer: {error!r}") from error
            if state != "DONE":
                raise StoreError(f"NIXL could not read from the peer: {state}")
            copy_into(target, self._area.view[place : place + target.nbytes])
            self.num_read_bytes += target.nbytes
        except StoreError:
            self._forget(peer)
            raise
        finally:
            self._abandoned.append((handle, place))
            self._collect()

    def _take(self, num_bytes: int, deadline: Deadline) -> int:
        while (place := self._area.take(num_bytes)) is None:
            if not self._area.wait_for_room(deadline, lambda: self._area.largest_hole >= num_bytes):
                raise StoreTimeoutError("no room to read into")
        return place

    def _begin(self, name: str, address: int, place: int, num_bytes: int) -> tuple[Any, str]:
        here = self._agent.get_xfer_descs([(address_of(self._area.view) + place, num_bytes, 0)], "DRAM")
        there = self._agent.get_xfer_descs([(address, num_bytes, 0)], "DRAM")
        handle = self._agent.initialize_xfer("READ", here, there, name)
        return handle, self._agent.transfer(handle)

    def _wait(self, handle: Any, state: str, deadline: Deadline) -> str:
        silent = Deadline(self._silence_seconds, self._clock)
        pause = _FIRST_POLL_SECONDS
        while state == "PROC":
            if deadline.passed or silent.passed:
                raise StoreTimeoutError("a read over NIXL does not end")
            time.sleep(pause)
            pause = min(2 * pause, _LAST_POLL_SECONDS)
            with self._lock:
                state = self._agent.check_xfer_state(handle)
        return state

    def _collect(self) -> None:
        """Release reads that have ended, and the memory they wrote to."""
        with self._lock:
            for entry in tuple(self._abandoned):
                handle, place = entry
                if handle is not None and not self._has_ended(handle):
                    continue
                self._abandoned.remove(entry)
                self._area.give_back(place)

    def _has_ended(self, handle: Any) -> bool:
        try:
            self._agent.release_xfer_handle(handle)
            return True
        except Exception as error:
            logger.debug("%s: a read that was given up has not ended: %r", self._name, error)
            return False

    def _forget(self, peer: tuple[str, Hello] | None) -> None:
        """Over the connection again, and later another attempt."""
        with self._lock:
            if peer is None or self._peer is not peer:
                return
            self._peer = None
            self._retry_at = self._clock() + _RETRY_SECONDS
            try:
                self._agent.remove_remote_agent(peer[0])
            except Exception as error:
                logger.debug("%s: %r", self._name, error)


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
