"""Ports for engines, bound until they are used, and who listens at one since.

A reservation is a bound socket, so no other reservation and no other program gets the same port
while it lasts.  The default range lies above Ray's worker ports (10002-19999) and below Linux's
ephemeral range (32768 up), where an outgoing connection could take a port between release and use.
Any program can take it then, so nothing is sent before the kernel has named who listens.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import socket
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from engines.protocol.errors import PortTaken

logger = logging.getLogger(__name__)

LOW, HIGH = 20000, 29999
_LISTENS = "0A"
_Address = IPv4Address | IPv6Address


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
    """A socket bound to the port, or None where it is in use."""
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


@dataclass(frozen=True, slots=True)
class Listening:
    """Who takes the connections to an address.

    Attributes:
        is_ours: processes of ours do, and no others.
        stranger: another process that does, or empty if there is none.
    """

    is_ours: bool = False
    stranger: str = ""


def who_listens(host: str, port: int, pids: Callable[[], Collection[int]]) -> Listening:
    """Who would get a connection from here to ``host`` and ``port``, as the kernel says.

    A socket that several programs share (``SO_REUSEPORT``) is a stranger's.  Where the kernel
    shows no sockets, or not those of an engine's own process, a warning says so and the listener
    passes for ours: another user cannot bring that about.

    Args:
        pids: our processes at this moment.
    """
    found = Listening()
    # A process that was born between the two lists would pass for a stranger: looked at twice.
    for _ in range(2):
        try:
            sockets = _listeners(host, port)
        except OSError as error:
            logger.warning("who listens at %s:%d is not known: %s", host, port, error)
            return Listening(is_ours=True)
        ours = set(pids()) if sockets else set()
        foreign = _not_of(sockets, ours) if sockets else {}
        found = Listening(bool(sockets) and not foreign, _holder(foreign))
        if not found.stranger:
            break
    return found


def _not_of(sockets: dict[int, int], pids: Collection[int]) -> dict[int, int]:
    """The sockets among these that none of the processes holds."""
    foreign = dict(sockets)
    for pid in pids:
        try:
            for inode in _held_by(pid):
                foreign.pop(inode, None)
        except PermissionError:  # it is not dumpable, or has another user's rights
            for inode, uid in list(foreign.items()):
                if uid == _user_of(pid):
                    logger.warning("the sockets of process %d of an engine are not shown", pid)
                    del foreign[inode]
    return foreign


def _holder(sockets: dict[int, int]) -> str:
    """The process that has one of these sockets, as text, or empty for no socket."""
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if sockets else ():
        with suppress(OSError):
            if not sockets.keys().isdisjoint(_held_by(pid)):
                return f"process {pid} ({_name_of(pid)})"
    return next((f"a process of user {uid}" for uid in sockets.values()), "")


def _name_of(pid: int) -> str:
    name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def _user_of(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("Uid:"):
                return int(line.split()[2])
    return -1


def _held_by(pid: int) -> Iterator[int]:
    """Inodes of the sockets that a process holds; none if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError, ProcessLookupError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    yield int(target[8:-1])


def _listeners(host: str, port: int) -> dict[int, int]:
    """Sockets that listen there, also at all addresses: inode -> user.

    Those of this process's network: an engine in another one cannot be reached from here.
    """
    wanted = {
        ip_address(str(found[4][0]).partition("%")[0])
        for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    }
    rows = Path("/proc/net/tcp").read_text().splitlines()[1:]
    with suppress(FileNotFoundError):  # IPv6 is off
        rows += Path("/proc/net/tcp6").read_text().splitlines()[1:]
    ending = f":{port:04X}"
    sockets: dict[int, int] = {}
    for row in rows:
        _, local, _, state, _, _, _, user, _, inode, *_ = row.split()
        if state == _LISTENS and local.endswith(ending):
            address = _read_address(local.removesuffix(ending))
            if address.is_unspecified or any(
                here.is_unspecified or here == address for here in wanted
            ):
                sockets[int(inode)] = int(user)
    return sockets


def _read_address(text: str) -> _Address:
    """An address as the kernel lists it: words of four bytes, each in the machine's order."""
    words = (bytes.fromhex(text[at : at + 8]) for at in range(0, len(text), 8))
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    address = ip_address(packed)
    return getattr(address, "ipv4_mapped", None) or address
