"""Which headers pass through, in both directions.  Names are lower case, as ASGI has them."""

from __future__ import annotations

from collections.abc import Iterable

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
_WITHOUT_BODY = frozenset({204, 304})


def _named_by_connection(headers: Iterable[tuple[bytes, bytes]]) -> set[bytes]:
    return {
        token.strip().lower()
        for name, value in headers
        if name == b"connection"
        for token in value.split(b",")
    }


def to_engine(headers: Headers) -> Headers:
    """What an engine gets of a client's headers; host and length are the transport's."""
    dropped = HOP_BY_HOP | _SET_ANEW | _named_by_connection(headers)
    return [(name, value) for name, value in headers if name not in dropped]


def to_client(
    headers: Iterable[tuple[bytes, bytes]],
    status: int,
    engine_id: str,
    weight_version: int | None,
) -> Headers:
    """What a client gets of an engine's headers, and who answered with which weights."""
    lowered = [(name.lower(), value) for name, value in headers]
    dropped = HOP_BY_HOP | _OURS | _named_by_connection(lowered)
    is_chunked = any(name == b"transfer-encoding" for name, _ in lowered)
    if is_chunked or status in _WITHOUT_BODY:
        dropped |= {b"content-length"}
    kept = [(name, value) for name, value in lowered if name not in dropped]
    kept.append((b"x-engine-id", engine_id.encode()))
    if weight_version is not None:
        kept.append((b"x-weight-version", str(weight_version).encode()))
    return kept
