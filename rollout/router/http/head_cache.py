"""Heads of requests and replies, and a cache of heads, so that similar ones are parsed once.

Training sends thousands of requests whose heads differ only in the length and in headers that the
router passes on unread, such as an id of the request; and engines reply alike.

Always true: httptools has read a cached head from the same bytes, except for the digits of its
length, which is the only framing that a cached head has, and for plain lines of headers that are
not in ``headers.READ``.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from engines.protocol import Endpoint
from rollout.router.http.headers import (
    AFFINITIES,
    FAIL_OVER,
    Headers,
    cut_unread,
    engine_lines,
    header_lines,
    passed_to_client,
    status_line,
    to_engine,
)
from rollout.router.http.responses import RouterResponse
from rollout.router.http.routes import Route
from rollout.rules.contract import HEADERS

MAX_HEADS = 1024
MAX_SEEN_ONCE = 4096
MAX_AFFINITY_CHARACTERS = 256
_MAX_KNOWN_BYTES = 1 << 12
_MAX_KNOWN_HEADERS = 64  # as objects they take thirty times their bytes
_MAX_DIGITS = 9
_END = b"\r\n\r\n"
_LENGTH = b"\r\ncontent-length: "
_END_OF_NAME = b"ength: "
_CONTRACT = {header.encode(): field for field, header in HEADERS.items()}
_AFFINITIES = {header: place for place, header in enumerate(AFFINITIES)}
_SWITCHED_ON = frozenset({b"on", b"1", b"true"})

T = TypeVar("T")


def kept_affinity(affinity: str) -> str:
    """An affinity, or empty if it is too long to be kept."""
    return affinity if len(affinity) <= MAX_AFFINITY_CHARACTERS else ""


@dataclass(eq=False, slots=True)
class RequestHead:
    """What is read of the head of a request for an engine.

    Attributes:
        headers: headers that the router reads; names in lower case, without the client's key.
        refusal: the response to the request, if no engine gets it.
        is_last: the connection closes after the response.
        contract_texts: fields of the request's contract that are headers, with their values.
        affinity: affinity of the request, or None without such a header.
        asks_failover: its client wants its tokens kept.
    """

    method: bytes
    route: Route
    headers: Headers
    refusal: RouterResponse | None = None
    is_last: bool = False
    is_http_1_0: bool = False
    expects_continue: bool = False
    contract_texts: tuple[tuple[str, str], ...] = field(default=(), init=False)
    affinity: str | None = field(default=None, init=False)
    asks_failover: bool = field(default=False, init=False)
    _lines: bytes | None = field(default=None, init=False)
    _keyless: bytes | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        texts, best = [], len(AFFINITIES)
        for name, value in self.headers:
            if name in _AFFINITIES:
                if (place := _AFFINITIES[name]) < best:
                    best, self.affinity = place, kept_affinity(value.decode("latin-1"))
            elif name == FAIL_OVER:
                self.asks_failover |= value.lower() in _SWITCHED_ON
            elif name in _CONTRACT:
                texts.append((_CONTRACT[name], value.decode("latin-1")))
        self.contract_texts = tuple(texts)

    def for_engine(
        self,
        endpoint: Endpoint,
        num_bytes: int,
        target: bytes = b"",
        key: str = "",
        unread: bytes = b"",
    ) -> bytes:
        """The head for an engine, before a body of so many bytes.

        Args:
            unread: lines of other headers.
            target: path and query, where they are not the client's.
            key: key of the engine, in place of any that the client has sent.
        """
        method = self.method
        lines = self._keyless if key else self._lines
        if lines is None:
            lines = header_lines(to_engine(self.headers, keeps_key=not key))
            if key:
                self._keyless = lines
            else:
                self._lines = lines
        has_length = num_bytes or method == b"POST" or method == b"PUT"
        length = b"content-length: %d\r\n\r\n" % num_bytes if has_length else b"\r\n"
        target, engine = target or self.route.target, engine_lines(endpoint, key)
        return b"".join((method, b" ", target, engine, lines, unread, length))


@dataclass(eq=False, slots=True)
class ReplyHead:
    """What is read of the head of an engine's reply.

    Attributes:
        headers: headers that the router reads; names in lower case, without the length, which is
            passed separately.
        is_chunked: the body is in chunks, unless the handler is decoding.
        is_until_close: no length and no chunks: the body ends with the connection.
    """

    status: int
    headers: Headers
    is_chunked: bool = False
    is_until_close: bool = False
    _lines: bytes = field(default=b"", init=False)

    def for_client(self, signed: bytes, length: bytes, *extra: bytes) -> bytes:
        """The head for a client.

        Args:
            signed: lines that name the engine and its weights.
            length: in digits or empty.
            extra: complete lines, such as those of other headers.
        """
        if not self._lines:
            kept = passed_to_client(self.headers)
            self._lines = status_line(self.status) + header_lines(kept)
        if length:
            extra = (b"content-length: ", length, b"\r\n", *extra)
        return b"".join((self._lines, signed, *extra, b"\r\n"))


class Known(NamedTuple, Generic[T]):
    """What was read in a head, and the lines of headers that the router does not read."""

    head: T
    unread: bytes


class HeadCache(Generic[T]):
    """What was read in heads, by ``head_key``.

    A head is kept when it comes for the second time: many heads contain an id of their request,
    and to keep those costs more than to parse them.  So each is also kept without the lines that
    are not read.
    """

    def __init__(self) -> None:
        self._seen_once: set[int] = set()
        # In a plain dict, finding the oldest entry scans all removed ones.
        self._heads: OrderedDict[bytes, Known[T]] = OrderedDict()
        self.get = self._heads.get

    def similar(self, key: bytes) -> Known[T] | None:
        """What a head with other unread lines has shown of this one, with the lines of this."""
        bare, lines = cut_unread(key + _END)
        known = self._heads.get(bare)
        if known is None or not 0 < len(lines) <= _MAX_KNOWN_HEADERS:
            return None
        return Known(known.head, b"\r\n".join((*lines, b"")))

    def add(self, key: bytes, head: T, unread: Headers) -> None:
        """Keep what httptools has read in the head of this key, from the second time on."""
        if key.count(b"\n") > _MAX_KNOWN_HEADERS:
            return
        end = key.find(_END_OF_NAME) + len(_END_OF_NAME)
        if key[max(0, end - len(_LENGTH)) : end].lower() != _LENGTH:
            return  # the digits left out of the key belong to another header
        self._add(key, head, header_lines(unread))
        bare, lines = cut_unread(key + _END)
        if lines and len(lines) == len(unread):
            self._add(bare, head, b"")

    def _add(self, key: bytes, head: T, unread: bytes) -> None:
        if hash(key) not in self._seen_once:
            if len(self._seen_once) >= MAX_SEEN_ONCE:
                self._seen_once.clear()
            self._seen_once.add(hash(key))
            return
        if len(self._heads) >= MAX_HEADS:
            self._heads.popitem(last=False)
        self._heads[key] = Known(head, unread)


def head_key(data: bytes) -> tuple[bytes, bytes, int]:
    """The head at the start of ``data`` without the digits of its length; the digits; its end.

    The key is empty if the head is incomplete, is long or may have no length.
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
