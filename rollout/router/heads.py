"""Heads as they were read, and those that came before, which are not parsed again.

Training asks thousands of times with the same head, and engines answer so, but for the length.

Always true: what is known of a head was read by httptools from the same bytes, but for the digits
of its length, which is the only framing that a known head has.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from engines.protocol import Endpoint
from rollout.router.headers import (
    Headers,
    header_lines,
    host_line,
    kept_for_client,
    signature_lines,
    status_line,
    to_engine,
)

if TYPE_CHECKING:
    from rollout.router.message import Route

MAX_KNOWN_HEADS = 1024
MAX_SEEN_ONCE = 4096
_MAX_KNOWN_BYTES = 1 << 12
_MAX_DIGITS = 9
_LENGTH = b"\r\ncontent-length: "
_END_OF_NAME = b"ength: "
_SWITCHED_ON = frozenset({b"on", b"1", b"true"})

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class RequestHead:
    """The head of a request for an engine.

    Attributes:
        headers: names in lower case, without the client's key.
        is_admitted: the client has the key.
        is_last: the connection closes after the answer.
    """

    method: bytes
    route: Route
    headers: Headers
    is_admitted: bool = True
    is_last: bool = False
    is_http_1_0: bool = False
    expects_continue: bool = False
    _switches: frozenset[bytes] | None = field(default=None, init=False)
    _lines: bytes | None = field(default=None, init=False)

    @property
    def switched_on(self) -> frozenset[bytes]:
        """Headers by which the client has switched something on."""
        if self._switches is None:
            self._switches = frozenset(
                name for name, value in self.headers if value.lower() in _SWITCHED_ON
            )
        return self._switches

    def for_engine(self, endpoint: Endpoint, num_bytes: int) -> bytes:
        """What an engine gets, before a body of so many bytes."""
        method = self.method
        if self._lines is None:
            self._lines = header_lines(to_engine(self.headers))
        has_length = num_bytes or method == b"POST" or method == b"PUT"
        length = b"content-length: %d\r\n\r\n" % num_bytes if has_length else b"\r\n"
        return b"".join((method, b" ", self.route.target, host_line(endpoint), self._lines, length))


@dataclass(eq=False, slots=True)
class ReplyHead:
    """The head of an engine's answer.

    Attributes:
        headers: names in lower case, without the length, which is told beside.
        is_chunked: what follows is in chunks, unless the sender is decoding.
        is_until_close: no length and no chunks: the body ends with the connection.
    """

    status: int
    headers: Headers
    is_chunked: bool = False
    is_until_close: bool = False
    _lines: bytes = field(default=b"", init=False)

    def for_client(
        self, engine_id: str, weight_version: int | None, length: bytes, *extra: bytes
    ) -> bytes:
        """What a client gets; ``length`` in digits or nothing, ``extra`` are whole lines."""
        if not self._lines:
            kept = kept_for_client(self.headers)
            self._lines = status_line(self.status) + header_lines(kept)
        signed = signature_lines(engine_id, weight_version)
        if length:
            extra = (b"content-length: ", length, b"\r\n", *extra)
        return b"".join((self._lines, signed, *extra, b"\r\n"))


class KnownHeads(Generic[T]):
    """What was read in heads, by ``known_by``.

    A head that comes once is not kept: many have an id of their own, and to keep those for nothing
    costs more than to parse them.
    """

    def __init__(self) -> None:
        self._once: set[int] = set()
        # A plain dict would look for its oldest among all that were forgotten.
        self._heads: OrderedDict[bytes, T] = OrderedDict()
        self.get = self._heads.get

    def learn(self, key: bytes, head: T) -> None:
        """Remember what httptools has read in the head of this key, if it is not the first time."""
        if hash(key) not in self._once:
            if len(self._once) >= MAX_SEEN_ONCE:
                self._once.clear()
            self._once.add(hash(key))
            return
        end = key.find(_END_OF_NAME) + len(_END_OF_NAME)
        if key[max(0, end - len(_LENGTH)) : end].lower() != _LENGTH:
            return  # the digits that are not in the key were of another header
        if len(self._heads) >= MAX_KNOWN_HEADS:
            self._heads.popitem(last=False)
        self._heads[key] = head


def known_by(data: bytes) -> tuple[bytes, bytes, int]:
    """The head that ``data`` begins with, less the digits of its length; those; where it ends.

    An empty key, if the head is not whole, is long or may have no length.
    """
    end = data.find(b"\r\n\r\n", 0, _MAX_KNOWN_BYTES)
    first = data.find(_END_OF_NAME, 0, end) + len(_END_OF_NAME)
    if end < 0 or first < len(_END_OF_NAME):
        return b"", b"", 0
    last = data.find(b"\r\n", first)
    digits = data[first:last]
    if not digits.isdigit() or len(digits) > _MAX_DIGITS:
        return b"", b"", 0
    return data[:first] + data[last:end], digits, end + 4
