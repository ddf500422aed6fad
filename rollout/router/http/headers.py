"""Which headers are forwarded, in both directions, and heads as bytes.  Names are lower case."""

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
_REPLACED = frozenset({b"host", b"content-length", b"expect"})
_OURS = frozenset({b"x-engine-id", b"x-weight-version"})
_NOT_TO_ENGINE = HOP_BY_HOP | _REPLACED
# Engines redirect to their own address, where there is no gate and no key.
_NOT_TO_CLIENT = HOP_BY_HOP | _OURS | {b"location"}
_PLAIN_CONNECTION = frozenset({b"keep-alive", b"close"})


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


def to_engine(headers: Headers) -> Headers:
    """The client's headers that an engine gets; the router writes host and length itself."""
    return _without(headers, _NOT_TO_ENGINE)


def kept_for_client(headers: Headers) -> Headers:
    """The engine's headers that a client gets."""
    return _without(headers, _NOT_TO_CLIENT)


def to_client(headers: Headers, engine_id: str, weight_version: int | None) -> Headers:
    """The same, with the engine's id and its weight version."""
    return [*kept_for_client(headers), *signature(engine_id, weight_version)]


@lru_cache(4096)
def signature(engine_id: str, weight_version: int | None) -> tuple[tuple[bytes, bytes], ...]:
    who = (b"x-engine-id", engine_id.encode())
    if weight_version is None:
        return (who,)
    return who, (b"x-weight-version", str(weight_version).encode())


@lru_cache(4096)
def signature_lines(engine_id: str, weight_version: int | None) -> bytes:
    return header_lines(signature(engine_id, weight_version))


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join([b"%s: %s\r\n" % header for header in headers])


@lru_cache(4096)
def host_line(endpoint: Endpoint) -> bytes:
    host = endpoint.url.removeprefix("http://")
    return f" HTTP/1.1\r\nhost: {host}\r\n".encode()


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
