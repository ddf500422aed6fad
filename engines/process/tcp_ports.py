"""Ports for engines, bound until they are used.

A reservation is a bound socket, so no other reservation and no other program gets the same port
while it lasts.  The default range lies above Ray's worker ports (10002-19999) and below Linux's
ephemeral range (32768 up), where an outgoing connection could take a port between release and use.
"""

from __future__ import annotations

import errno
import random
import socket

from engines.protocol.errors import PortTaken

LOW, HIGH = 20000, 29999


class PortReservation:
    """A port of ``host`` that is ours until ``release``: just before its user starts."""

    def __init__(self, bound: socket.socket, host: str) -> None:
        self._reserved = bound
        self.host = host
        self.port: int = bound.getsockname()[1]

    def release(self) -> None:
        self._reserved.close()

    def __enter__(self) -> PortReservation:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def reserve_port(
    host: str = "127.0.0.1", port: int | None = None, low: int = LOW, high: int = HIGH
) -> PortReservation:
    """Reserves ``port``, or some free port from ``low`` to ``high``, both included.

    The search starts at random, so that processes that search together rarely meet.  ``host`` is
    the address the engine will listen on.

    Raises:
        PortTaken: ``port`` is in use, or the whole range is.
        OSError: ``host`` is no address of this machine, or ``port`` may not be bound.
    """
    if port is not None:
        # An engine restarted on its old port finds closed connections there (TIME_WAIT, up to a
        # minute).  SO_REUSEADDR gets such a port.  Two sockets that have it may share a port
        # unless one listens, so this one listens.
        bound = _bind(host, port) or _bind(host, port, reuse=True)
        if bound is None:
            raise PortTaken(
                f"port {port} on {host} is taken; `ss -tanp | grep :{port}` shows by whom. "
                f"Free it, choose another, or leave the port out to get a free one",
                port=port,
            )
        return PortReservation(bound, host)
    num_ports = high - low + 1
    start = random.randrange(num_ports)
    for offset in range(num_ports):
        bound = _bind(host, low + (start + offset) % num_ports)
        if bound is not None:
            return PortReservation(bound, host)
    raise PortTaken(f"all ports from {low} to {high} on {host} are taken; widen the range")


def _bind(host: str, port: int, *, reuse: bool = False) -> socket.socket | None:
    """A socket bound to the port; None where it is in use."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if reuse:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        if reuse:
            bound.listen(1)
    except OSError as error:
        bound.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return bound
