"""Which headers pass through, in both directions, and heads as bytes.  Names are lower case."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from http import HTTPStatus

from engines.protocol import Endpoint

Headers = list[tuple[bytes, bytes]]

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
_SET_ANEW = frozenset({b"host", b"content-length", b"expect"})
_OURS = frozenset({b"x-engine-id", b"x-weight-version"})
_NOT_TO_ENGINE = HOP_BY_HOP | _SET_ANEW
_NOT_TO_CLIENT = HOP_BY_HOP | _OURS
_WITHOUT_BODY = frozenset({204, 304})
_PLAIN_CONNECTION = frozenset({b"keep-alive", b"close"})
_NOTHING: frozenset[bytes] = frozenset()


def _named_by_connection(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    named = _NOTHING
    for name, value in headers:  # mostly there is none: a comprehension would cost more
        if name == b"connection" and value.lower() not in _PLAIN_CONNECTION:
            named |= {token.strip().lower() for token in value.split(b",")}
    return named


def to_engine(headers: Headers) -> Headers:
    """What an engine gets of a client's headers; host and length are the transport's."""
    dropped = _NOT_TO_ENGINE
    if named := _named_by_connection(headers):
        dropped = dropped | named
    return [header for header in headers if header[0] not in dropped]


def to_client(
    headers: Headers,
    status: int,
    engine_id: str,
    weight_version: int | None,
) -> Headers:
    """What a client gets of an engine's headers, and who answered with which weights."""
    dropped = _NOT_TO_CLIENT
    if named := _named_by_connection(headers):
        dropped = dropped | named
    kept, has_length = [], status not in _WITHOUT_BODY
    for header in headers:
        if header[0] not in dropped:
            kept.append(header)
        elif header[0] == b"transfer-encoding":
            has_length = False
    if not has_length:
        kept = [header for header in kept if header[0] != b"content-length"]
    kept += signature(engine_id, weight_version)
    return kept


@lru_cache(4096)
def signature(engine_id: str, weight_version: int | None) -> tuple[tuple[bytes, bytes], ...]:
    who = (b"x-engine-id", engine_id.encode())
    if weight_version is None:
        return (who,)
    return who, (b"x-weight-version", str(weight_version).encode())


def request_head(
    method: bytes, target: bytes, endpoint: Endpoint, headers: Headers, num_bytes: int
) -> bytes:
    """The head of a request to an engine; ``headers`` are those of ``to_engine``."""
    parts = [method, b" ", target, _host_line(endpoint)]
    for name, value in headers:
        parts += name, b": ", value, b"\r\n"
    if num_bytes or method == b"POST" or method == b"PUT":
        parts.append(b"content-length: %d\r\n\r\n" % num_bytes)
    else:
        parts.append(b"\r\n")
    return b"".join(parts)


@lru_cache(4096)
def _host_line(endpoint: Endpoint) -> bytes:
    host = endpoint.url.removeprefix("http://")
    return f" HTTP/1.1\r\nhost: {host}\r\n".encode()


def reply_head(status: int, headers: Headers, *extra: bytes) -> bytes:
    """The head of an answer; ``extra`` are whole lines."""
    parts = [_status_line(status)]
    for name, value in headers:
        parts += name, b": ", value, b"\r\n"
    parts += extra
    parts.append(b"\r\n")
    return b"".join(parts)


@lru_cache(1024)
def _status_line(status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Client Closed Request" if status == 499 else ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()
