"""Sockets to listen on."""

from __future__ import annotations

import socket


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to the address; port 0 = any free one.

    Raises:
        OSError: the address is taken, or not this machine's.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener
