"""Messages between processes of a run, over TCP.

    listener -> {"library", "nonce"}              to each caller
    caller   -> {"library", "nonce", "digest"}
    listener -> {"digest"} or {"refused"}
    then, in both directions: a head, which is a JSON object, and the bytes of a body

Always true: the token is never sent; each side shows that it knows the token before the other
reads a message from it; another version of the library is refused in words.  Strangers can make a
listener keep ``MAX_STRANGERS`` connections, each with ``_MAX_GREETING`` bytes, for ``GREETING_S``.
They shut none out: a caller beyond waits for a second, and then has the place of the one that has
been a stranger for longest.
A head comes within the connection's timeout, and so does each piece of a body.  ``end``, in another
thread, ends every wait.  Nothing received is executed.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias

from engines.plain_json import read_json
from engines.process.background import Then, keep_thread
from engines.protocol.plain_text import describe
from rollout.core import VERSION

logger = logging.getLogger(__name__)

Address: TypeAlias = tuple[str, int]
Head: TypeAlias = dict[str, Any]

GREETING_S = 10.0
MAX_STRANGERS = 64
_PATIENCE_S = 1.0
"""In which a caller answers the greeting, also if a thousand of them come together."""
_MAX_GREETING = 1024
_MAX_HEAD = 64 << 20
_MAX_BODY = 1 << 40
_PIECE = 1 << 20
_RETRY_S = 1.0
_LENGTHS = struct.Struct("<IQ")


class Refused(ConnectionError):
    """The other side has another token, or another version of the library."""


class Connection:
    """One connection; one thread uses it at a time, and any thread may ``end`` it.

    Attributes:
        timeout_s: for a head, and for each piece of a body.
    """

    def __init__(self, opened: socket.socket, timeout_s: float) -> None:
        # The kernel's timeouts, not Python's: these would make the socket non-blocking, and each
        # piece of a body cost a poll.
        opened.settimeout(None)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = opened
        self._lock = threading.Lock()
        self.timeout_s = timeout_s

    def end(self) -> None:
        """End every wait on this connection, here and on the other side."""
        # Locked: a socket that is closed meanwhile gives its number to the next one.
        with self._lock, suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release it; no other thread may use it at this moment, but to ``end`` it."""
        with self._lock:
            self._socket.close()

    def has_ended(self) -> bool:
        """Whether the other side has ended a connection on which no reply is due."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    # -- sending ----------------------------------------------------------------------------

    def send(self, head: Mapping[str, Any], body: bytes | memoryview = b"") -> None:
        """Send a message."""
        self.announce(head, len(body))
        if len(body):
            self.write(body)

    def announce(self, head: Mapping[str, Any], num_bytes: int) -> None:
        """Send the head of a message; ``write`` or ``send_file`` send its body."""
        text = json.dumps(head).encode()
        self.write(_LENGTHS.pack(len(text), num_bytes) + text)

    def write(self, piece: bytes | memoryview) -> None:
        """Send the next bytes of a body."""
        with self._sending():
            self._socket.sendall(piece)

    def send_file(self, descriptor: int, offset: int, num_bytes: int) -> None:
        """Send a part of a file as the body, from the page cache."""
        end = offset + num_bytes
        with self._sending():
            while offset < end:
                sent = os.sendfile(self._socket.fileno(), descriptor, offset, end - offset)
                if not sent:
                    raise ConnectionError("the file ended early")
                offset += sent

    @contextmanager
    def _sending(self) -> Iterator[None]:
        self._wait_at_most(socket.SO_SNDTIMEO, self.timeout_s)
        try:
            yield
        except BlockingIOError:
            raise TimeoutError(f"nothing was taken within {self.timeout_s:g} s") from None

    # -- receiving --------------------------------------------------------------------------

    def receive(self, *, may_idle: bool = False) -> tuple[Head, int]:
        """The head of the next message, and the number of bytes of its body.

        Args:
            may_idle: the message may begin at any time; then it comes within the timeout.

        Raises:
            ConnectionError: the connection ended, or this is no message.
            TimeoutError: it did not come in time.
        """
        return self._receive(_MAX_HEAD, _MAX_BODY, may_idle=may_idle)

    def body(self, num_bytes: int, max_bytes: int = _MAX_BODY) -> bytes:
        """Receive a body into memory.

        Raises:
            ConnectionError: it is longer than ``max_bytes``, or ended early.
        """
        if num_bytes > max_bytes:
            raise ConnectionError(f"a body of {num_bytes} bytes is too long; at most {max_bytes}")
        data = bytearray(num_bytes)
        self.receive_into(memoryview(data))
        return bytes(data)

    def receive_into(self, view: memoryview) -> None:
        """Receive a body directly into its place."""
        while view:
            view = view[self._some(view, self.timeout_s) :]

    def _receive(self, max_head: int, max_body: int, *, may_idle: bool = False) -> tuple[Head, int]:
        lengths = memoryview(bytearray(_LENGTHS.size))
        begun = self._some(lengths, 0.0) if may_idle else 0
        deadline = time.monotonic() + self.timeout_s
        self._whole(lengths[begun:], deadline)
        num_head, num_body = _LENGTHS.unpack(lengths)
        if num_head > max_head or num_body > max_body:
            raise ConnectionError(f"a message of {num_head} + {num_body} bytes is not valid")
        text = bytearray()
        while len(text) < num_head:  # a length alone takes no memory
            piece = bytearray(min(num_head - len(text), _PIECE))
            self._whole(memoryview(piece), deadline)
            text += piece
        try:
            head = read_json(bytes(text))
        except ValueError as error:
            raise ConnectionError(f"the head is not valid: {describe(error)}") from None
        if not isinstance(head, dict):
            raise ConnectionError("the head is not a JSON object")
        return head, num_body

    def _whole(self, view: memoryview, deadline: float) -> None:
        while view:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"no whole message came within {self.timeout_s:g} s")
            view = view[self._some(view, left_s) :]

    def _some(self, view: memoryview, wait_s: float, flags: int = 0) -> int:
        self._wait_at_most(socket.SO_RCVTIMEO, wait_s)
        try:
            count = self._socket.recv_into(view, 0, flags)
        except BlockingIOError:
            raise TimeoutError(f"nothing came within {self.timeout_s:g} s") from None
        if not count:
            raise ConnectionError(f"the connection was closed; {len(view)} bytes are missing")
        return count

    def _wait_at_most(self, option: int, seconds: float) -> None:
        """Set a timeout of the kernel; 0 is none."""
        whole, part = divmod(seconds, 1)
        value = struct.pack("ll", int(whole), max(int(part * 1e6), int(0 < seconds < 1)))
        self._socket.setsockopt(socket.SOL_SOCKET, option, value)

    # -- greeting ---------------------------------------------------------------------------

    def _greet_caller(self, token: str) -> None:
        nonce = secrets.token_hex(16)
        self.send({"library": VERSION, "nonce": nonce})
        hello, _ = self._receive(_MAX_GREETING, 0)
        both = f"{nonce} {_text(hello, 'nonce')}"
        try:
            _check_version(hello)
            if not hmac.compare_digest(_text(hello, "digest"), _digest(token, "caller", both)):
                raise Refused("wrong token: it is of another run, or of an earlier launch")
        except Refused as refusal:
            self.send({"refused": str(refusal)})
            raise
        self.send({"digest": _digest(token, "listener", both)})

    def _greet_listener(self, token: str) -> None:
        hello, _ = self._receive(_MAX_GREETING, 0)
        _check_version(hello)
        nonce = secrets.token_hex(16)
        both = f"{_text(hello, 'nonce')} {nonce}"
        digest = _digest(token, "caller", both)
        self.send({"library": VERSION, "nonce": nonce, "digest": digest})
        reply, _ = self._receive(_MAX_GREETING, 0)
        if "refused" in reply:
            raise Refused(_text(reply, "refused"))
        if not hmac.compare_digest(_text(reply, "digest"), _digest(token, "listener", both)):
            raise Refused("another program listens there: it does not know the token")


def connect(address: Address, token: str, *, connect_s: float, timeout_s: float) -> Connection:
    """Connect to a listener.

    Args:
        connect_s: to reach it; the greeting then has ``timeout_s``.
        timeout_s: of the connection.

    Raises:
        Refused: it has another token, or another version of the library.
        OSError: it cannot be reached, or does not reply.
    """
    connection = Connection(socket.create_connection(address, connect_s), timeout_s)
    try:
        connection._greet_listener(token)
    except BaseException:
        connection.close()
        raise
    return connection


class Listener:
    """Accepts callers that know the token, and serves each in a thread of its own.

    Args:
        serve: called with each connection, which is closed when it returns or raises.
        name: of the threads, and in the log.
        host: address to bind, at a free port.
        timeout_s: of the connections.
    """

    def __init__(
        self,
        serve: Callable[[Connection], None],
        token: str,
        *,
        name: str,
        host: str = "127.0.0.1",
        timeout_s: float,
    ) -> None:
        self._serve = serve
        self._token = token
        self._name = name
        self._timeout_s = timeout_s
        self._strangers = threading.BoundedSemaphore(MAX_STRANGERS)
        self._lock = threading.Lock()
        self._served: dict[threading.Thread, Connection] = {}
        # Those that have not shown the token so far, the oldest first.
        # With when they came, the oldest first.
        self._unproved: dict[threading.Thread, tuple[Connection, float]] = {}
        self._is_closed = threading.Event()
        self._socket = socket.create_server((host, 0))
        self.address: Address = self._socket.getsockname()[:2]
        try:
            self._thread = keep_thread(self._accept, f"{name}-accept", Then.STARTS_AGAIN)
        except BaseException:
            self._socket.close()
            raise

    def stop_accepting(self) -> None:
        """Accept no more callers; those that are served go on."""
        with self._lock:
            self._is_closed.set()
        with suppress(OSError):  # wakes the thread that waits in accept
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(GREETING_S)
        self._socket.close()

    def close(self, wait_s: float = 0.0) -> None:
        """Accept no more callers, and end all connections.

        Args:
            wait_s: for each thread that serves one.
        """
        with self._lock:
            self._is_closed.set()
            served = dict(self._served)
            for connection in served.values():
                connection.end()
        self.stop_accepting()
        for thread in served:
            if thread is not threading.current_thread():
                thread.join(wait_s)

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._socket.accept()
                connection = Connection(accepted, GREETING_S)
            except OSError as error:
                if self._is_closed.wait(_RETRY_S):
                    return
                logger.warning("%s: a caller was not accepted: %s", self._name, describe(error))
                continue
            self._make_room()
            with self._lock:
                if self._is_closed.is_set():
                    connection.close()
                    return
                self._begin(connection)

    def _make_room(self) -> None:
        """Wait until one more may be a stranger; one that is slow goes for that."""
        while not self._strangers.acquire(blocking=False):
            now_s = time.monotonic()
            with self._lock:
                oldest, came_s = next(iter(self._unproved.values()), (None, now_s))
                if oldest is not None and now_s >= came_s + _PATIENCE_S:
                    oldest.end()
                    came_s = now_s
            if self._strangers.acquire(timeout=max(0.0, came_s + _PATIENCE_S - now_s)):
                return

    def _begin(self, connection: Connection) -> None:
        """Serve it in a thread; the caller holds the lock."""
        try:
            thread = keep_thread(partial(self._run, connection), self._name, Then.IS_OVER)
        except RuntimeError as error:  # the process has no more threads
            logger.warning("%s: a caller was not served: %s", self._name, describe(error))
            connection.close()
            self._strangers.release()
        else:
            # It waits for the lock before it forgets these.
            self._served[thread] = connection
            self._unproved[thread] = connection, time.monotonic()

    def _run(self, connection: Connection) -> None:
        try:
            try:
                connection._greet_caller(self._token)
            finally:
                with self._lock:
                    del self._unproved[threading.current_thread()]
                self._strangers.release()
            connection.timeout_s = self._timeout_s
            self._serve(connection)
        except Refused as error:
            logger.warning("%s: a caller was refused: %s", self._name, error)
        except OSError as error:
            logger.debug("%s: a connection ended: %s", self._name, describe(error))
        except Exception as error:  # what the caller sent has no such form
            logger.warning("%s: a connection ended: %s", self._name, describe(error))
        finally:
            connection.close()
            with self._lock:
                del self._served[threading.current_thread()]


def _check_version(hello: Head) -> None:
    theirs = _text(hello, "library")
    if theirs != VERSION:
        raise Refused(
            f"the other side has ray-rollout {theirs[:40]!r}, and this process {VERSION!r}: use "
            "the same version"
        )


def _digest(token: str, side: str, nonces: str) -> str:
    return hmac.new(token.encode(), f"{side} {nonces}".encode(), "sha256").hexdigest()


def _text(head: Head, field: str) -> str:
    """A field of a greeting; only ASCII can be compared in constant time."""
    value = head.get(field)
    if not isinstance(value, str) or not value.isascii():
        raise ConnectionError(f"this is no greeting: {field!r} is missing")
    return value
