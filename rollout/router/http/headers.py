"""Which heads are refused, which headers are forwarded, and heads as bytes.  Names are lower case.

Always true: a request that an engine or another proxy may read differently is refused, and so is a
head that would take much memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from http import HTTPStatus

from engines.protocol import Endpoint
from rollout.config.base import host_of, is_loopback
from rollout.rules.contract import HEADERS

Headers = list[tuple[bytes, bytes]]


def one_of(names: Iterable[bytes]) -> bytes:
    """A pattern of these names, by their first letters: twice as fast as a plain list."""
    by_letter: dict[bytes, list[bytes]] = {}
    for name in sorted(names):
        by_letter.setdefault(name[:1], []).append(re.escape(name[1:]))
    each = [b"%s(?:%s)" % (letter, b"|".join(rest)) for letter, rest in by_letter.items()]
    return b"(?=[%s])(?:%s)" % (b"".join(by_letter), b"|".join(each))


MAX_HEAD_BYTES = 1 << 16
MAX_HEADERS = 256
_VERSIONS = frozenset({"1.0", "1.1"})
_NOT_IN_HOST = re.compile(rb'[\s/?#@\\<>"]')
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_REPLACED = frozenset({b"host", b"content-length", b"expect"})
# A contract is kept by the router, and its names are those of an engine's replies.
_CONTRACT = frozenset(header.encode() for header in HEADERS.values())
_OURS = frozenset(
    {b"x-engine-id", b"x-weight-version", b"x-first-weight-version", b"x-logprob-kind"}
)
_NOT_TO_ENGINE = HOP_BY_HOP | _REPLACED | _CONTRACT
_NOT_TO_KEYED_ENGINE = _NOT_TO_ENGINE | {b"authorization"}
# Engines redirect to their own address, where there is no gate and no key.
_NOT_TO_CLIENT = HOP_BY_HOP | _OURS | {b"location"}
_PLAIN_CONNECTION = frozenset({b"keep-alive", b"close"})
AFFINITIES = (b"x-affinity", b"x-session-id", b"x-smg-routing-key")
"""Headers that name a request's affinity; the first of these that it has counts.  The last one is
that of SGLang's model gateway."""
FAIL_OVER = b"x-token-failover"
READ = (
    _NOT_TO_KEYED_ENGINE
    | _NOT_TO_CLIENT
    | {*AFFINITIES, FAIL_OVER, b"origin", b"content-type", b"content-encoding"}
)
"""Headers that the router reads or does not pass on.  Of all others it knows only their lines."""
_UNREAD_LINE = re.compile(
    rb"\r\n((?!(?i:%s):)[!#$%%&'*+.^_`|~0-9A-Za-z-]+: [ -~]*)(?=\r\n[^ \t])" % one_of(READ)
)


def split_unread(headers: Headers) -> tuple[Headers, Headers]:
    """The headers that the router reads, and those of which it passes the lines on.

    All are read if ``Connection`` names some, since these are not passed on.
    """
    read, unread = [], []
    for header in headers:
        name, value = header
        if name not in READ:
            unread.append(header)
            continue
        read.append(header)
        if name == b"connection" and value.lower() not in _PLAIN_CONNECTION:
            return headers, []
    return read, unread


def cut_unread(head: bytes) -> tuple[bytes, list[bytes]]:
    """A head without the plain lines of headers that are not read, and these lines."""
    parts = _UNREAD_LINE.split(head)
    return b"".join(parts[::2]), parts[1::2]


def _without(headers: Headers, dropped: frozenset[bytes]) -> Headers:
    """The headers that are neither in ``dropped`` nor named by ``Connection``."""
    named = [
        token.strip().lower()
        for name, value in headers
        if name == b"connection" and value.lower() not in _PLAIN_CONNECTION
        for token in value.split(b",")
    ]
    if named:
        dropped = dropped.union(named)
    return [header for header in headers if header[0] not in dropped]


def to_engine(headers: Headers, *, keeps_key: bool = True) -> Headers:
    """The client's headers that an engine gets; the router writes host and length itself.

    Args:
        keeps_key: also a key, which is for an engine that the router has none for.
    """
    return _without(headers, _NOT_TO_ENGINE if keeps_key else _NOT_TO_KEYED_ENGINE)


def passed_to_client(headers: Headers) -> Headers:
    """The engine's headers that a client gets."""
    return _without(headers, _NOT_TO_CLIENT)


def to_client(headers: Headers, engine_id: str, weight_version: int | None) -> Headers:
    """The same, with the engine's id and its weight version."""
    return [*passed_to_client(headers), *signature(engine_id, weight_version)]


@lru_cache(4096)
def signature(
    engine_id: str,
    weight_version: int | str | None,
    logprob_kind: str | None = None,
    first_version: str | None = None,
) -> tuple[tuple[bytes, bytes], ...]:
    named = {
        b"x-engine-id": engine_id,
        b"x-first-weight-version": first_version,
        b"x-weight-version": weight_version,
        b"x-logprob-kind": logprob_kind,
    }
    return tuple((name, str(value).encode()) for name, value in named.items() if value is not None)


@lru_cache(4096)
def signature_lines(
    engine_id: str,
    weight_version: int | str | None,
    logprob_kind: str | None = None,
    first_version: str | None = None,
) -> bytes:
    """Lines of a head that name the engine, and the versions of the first and the last token."""
    return header_lines(signature(engine_id, weight_version, logprob_kind, first_version))


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join([b"%s: %s\r\n" % header for header in headers])


@lru_cache(4096)
def engine_lines(endpoint: Endpoint, key: str) -> bytes:
    """The lines of a head that are equal in all requests to an engine; a key may be empty."""
    host = endpoint.url.removeprefix("http://")
    lines = f" HTTP/1.1\r\nhost: {host}\r\n"
    return (f"{lines}authorization: Bearer {key}\r\n" if key else lines).encode()


def reply_head(status: int, headers: Headers, *extra: bytes) -> bytes:
    """The head of a response; ``extra`` are complete lines."""
    return b"".join((status_line(status), header_lines(headers), *extra, b"\r\n"))


@lru_cache(1024)
def status_line(status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Client Closed Request" if status == 499 else ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


# -- heads that are refused ---------------------------------------------------------------------


class RefusedHead(Exception):
    """The head of a request is refused, and its connection closes."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def check_size(url: bytes, headers: Headers) -> None:
    """Check the bytes of a head.

    Raises:
        RefusedHead: it is too long.
    """
    if len(url) + sum(len(name) + len(value) + 4 for name, value in headers) > MAX_HEAD_BYTES:
        raise RefusedHead(f"the head is over {MAX_HEAD_BYTES} bytes", 431)


def check_head(version: str, headers: Headers) -> None:
    """Check what httptools has read; the names of ``headers`` are in lower case.

    Raises:
        RefusedHead: it is refused.
    """
    if version not in _VERSIONS:
        raise RefusedHead(f"HTTP/{version} is not served, only HTTP/1.1 and 1.0")
    if len(headers) > MAX_HEADERS:
        raise RefusedHead(f"the head has over {MAX_HEADERS} headers", 431)
    num_hosts, host, encodings = 0, b"", []
    for name, value in headers:
        if name == b"host":
            num_hosts, host = num_hosts + 1, value
        elif name == b"transfer-encoding":
            encodings.append(value.lower())
    if num_hosts != 1 and (num_hosts or version == "1.1"):
        raise RefusedHead(f"a request has one Host header, not {num_hosts}")
    if _NOT_IN_HOST.search(host):
        raise RefusedHead("the Host header is not a host")
    if encodings and version == "1.0":
        raise RefusedHead("HTTP/1.0 has no transfer encodings")
    if encodings and encodings != [b"chunked"]:
        raise RefusedHead("the only transfer encoding served is chunked", 501)


def check_site(headers: Headers, *, is_loopback_only: bool) -> None:
    """Check that no page of another site has sent a request that needs no key.

    Args:
        is_loopback_only: the router can be reached from this machine only, so another ``Host`` is
            that of a site whose name leads here (DNS rebinding).

    Raises:
        RefusedHead: one has, or may have.
    """
    host = origin = b""
    for name, value in headers:
        if name == b"host":
            host = value
        elif name == b"origin":
            origin = value
    hostname = host.decode("latin-1")
    if host and is_loopback_only and not _is_this_machine(hostname):
        raise RefusedHead(
            f"without a key the router serves this machine only, not the Host {hostname:.80}; "
            "set router.client_key",
            403,
        )
    if origin and origin.partition(b"://")[2] != host:
        raise RefusedHead(
            "without a key the router takes no requests of other sites' pages; "
            "set router.client_key",
            403,
        )


@lru_cache(64)
def _is_this_machine(netloc: str) -> bool:
    return is_loopback(host_of(netloc))
