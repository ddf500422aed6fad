"""Which heads of requests are refused before their route is read (pure).

Always true: a request that an engine or another proxy may read differently is refused, and so is a
head that would take much memory.
"""

from __future__ import annotations

import re

from rollout.router.http.headers import Headers

MAX_HEAD_BYTES = 1 << 16
MAX_HEADERS = 256
_VERSIONS = frozenset({"1.0", "1.1"})
_NOT_IN_HOST = re.compile(rb'[\s/?#@\\<>"]')


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
