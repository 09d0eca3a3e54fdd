"""HTTP to a peer, where every byte has to come in time: by the deadline, and never after a long silence."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from milepost.errors import StoreError
from milepost.stores.objects import Clock, Deadline, StoreTimeoutError
from milepost.stores.peer_protocol import CONTENT_TYPE

_IDLE_SECONDS = 30.0
"""A connection that was not used for longer is not used again: the other side may be about to close it."""
_MAX_IDLE = 8
_READ_BYTES = 1 << 20


class PeerRefused(StoreError):
    """The peer answered, and did not do what was asked.

    Attributes:
        status: of its answer.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"the peer answers {status}: {reason}")
        self.status = status


class _TimedSocket(socket.socket):
    """Every call ends by the deadline of the request, or after so much silence."""

    deadline: Deadline
    silence_seconds: float

    def recv_into(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.settimeout(self._allowed_seconds())
        return super().recv_into(*args, **kwargs)

    def sendall(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.settimeout(self._allowed_seconds())
        return super().sendall(*args, **kwargs)

    def _allowed_seconds(self) -> float:
        remaining = self.deadline.remaining_seconds
        if remaining <= 0:
            raise TimeoutError("the deadline has passed")
        return min(remaining, self.silence_seconds)


class _Connection(http.client.HTTPConnection):
    """Attributes:
    used_at: when it was given back.
    """

    used_at = 0.0
    sock: _TimedSocket | None

    def __init__(self, host: str, port: int, silence_seconds: float) -> None:
        super().__init__(host, port)
        self._silence_seconds = silence_seconds
        self.deadline: Deadline | None = None

    def set_deadline(self, deadline: Deadline) -> None:
        self.deadline = deadline
        if self.sock is not None:
            self.sock.deadline = deadline

    def connect(self) -> None:
        error: OSError | None = None
        for family, kind, protocol, _, address in socket.getaddrinfo(
            self.host, self.port, type=socket.SOCK_STREAM
        ):
            made = _TimedSocket(family, kind, protocol)
            if self.deadline is None:
                raise AssertionError("a deadline is set before a request")
            made.deadline, made.silence_seconds = self.deadline, self._silence_seconds
            try:
                made.settimeout(made._allowed_seconds())
                made.connect(address)
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as failed:
                made.close()
                error = failed
                continue
            self.sock = made
            return
        raise error or OSError(f"{self.host} has no address")


class Answer:
    """The body of an answer, as it comes."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response

    def read_into(self, target: memoryview) -> None:
        """Fill `target`.

        Raises:
            EOFError: the body ends before.
        """
        done = 0
        while done < target.nbytes:
            count = self._response.readinto(target[done : done + _READ_BYTES])
            if not count:
                raise EOFError(f"the answer ends after {done} of {target.nbytes} bytes")
            done += count

    def read_all(self, max_bytes: int) -> bytes:
        """
        Raises:
            StoreError: it is longer.
        """
        data = self._response.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise StoreError(f"the peer's answer has more than {max_bytes} bytes")
        return data

    @property
    def is_at_end(self) -> bool:
        return self._response.isclosed()


class PeerConnections:
    """Connections to one peer, used by one call at a time.

    Args:
        secret: sent with every request; None = nothing is.
        silence_seconds: of the peer, in the middle of an answer, after which it is given up.
    """

    def __init__(
        self, host: str, port: int, *, secret: str | None, silence_seconds: float, clock: Clock
    ) -> None:
        self.host, self.port = host, port
        self._silence_seconds = silence_seconds
        self._clock = clock
        self._headers = {"Content-Type": CONTENT_TYPE}
        if secret is not None:
            self._headers["Authorization"] = f"Bearer {secret}"
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._is_closed = False

    @contextmanager
    def post(self, path: str, body: bytes, deadline: Deadline) -> Iterator[Answer]:
        """Ask; the answer is read within the context. What is not read costs the connection.

        Raises:
            StoreTimeoutError: not in time. PeerRefused: not status 200. StoreError: the connection broke.
        """
        connection, response = self._begin(path, body, deadline)
        is_sound = False
        try:
            with _named_errors():
                if response.status != 200:
                    reason = response.read(300).decode("utf-8", "replace")
                    raise PeerRefused(response.status, reason or response.reason)
                yield Answer(response)
            is_sound = response.isclosed() and not response.will_close
        finally:
            if is_sound:
                self._give_back(connection)
            else:
                response.close()
                connection.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _begin(
        self, path: str, body: bytes, deadline: Deadline
    ) -> tuple[_Connection, http.client.HTTPResponse]:
        while True:
            connection, is_used = self._take()
            connection.set_deadline(deadline)
            try:
                with _named_errors():
                    connection.request("POST", path, body, self._headers)
                    return connection, connection.getresponse()
            except BaseException as error:
                connection.close()
                # The other side closes connections that are idle, perhaps in this very moment.
                if not is_used or not isinstance(error.__cause__, ConnectionError):
                    raise

    def _take(self) -> tuple[_Connection, bool]:
        """A connection, and whether it was used before."""
        now = self._clock()
        with self._lock:
            if self._is_closed:
                raise StoreError("closed")
            while self._idle:
                connection = self._idle.pop()
                if now - connection.used_at < _IDLE_SECONDS:
                    return connection, True
                connection.close()
        return _Connection(self.host, self.port, self._silence_seconds), False

    def _give_back(self, connection: _Connection) -> None:
        connection.used_at = self._clock()
        with self._lock:
            if not self._is_closed and len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreTimeoutError(f"the peer is silent: {error}") from error
    except (OSError, EOFError, http.client.HTTPException, ValueError) as error:
        # ValueError: what http.client cannot read.
        text = f"{type(error).__name__}: {error}"[:200]
        raise StoreError(f"the connection to the peer broke: {text}") from error
