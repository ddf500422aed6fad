"""Which paths go through the gate to an engine, and the target of a request."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote

import httptools

GENERATE_PATH, VLLM_GENERATE_PATH = "/generate", "/inference/v1/generate"
GENERATION_PATHS = frozenset(
    {
        GENERATE_PATH,
        VLLM_GENERATE_PATH,
        "/encode",
        "/classify",
        "/invocations",
        "/vertex_generate",
        "/tokenize",
        "/detokenize",
    }
)
"""Paths that go through the gate, besides all below ``/v1/`` except ``/v1/models``."""


def is_generation(path: str) -> bool:
    return path in GENERATION_PATHS or (path.startswith("/v1/") and path != "/v1/models")


def is_session_chat(path: str) -> bool:
    """Whether the path is below the base URL of a session, ``/sessions/{id}/v1``."""
    return path.startswith("/sessions/") and "/v1/" in path


COMPLETION_PATHS = frozenset(
    {GENERATE_PATH, VLLM_GENERATE_PATH, "/v1/completions", "/v1/chat/completions"}
)
"""Paths whose requests get fields of the router, and can continue on another engine."""

KEYED_PATHS = COMPLETION_PATHS | {"/v1/responses", "/invocations"}
"""Paths at which engines take a key of cached prefixes."""


_MAX_KNOWN_BYTES = 512


@dataclass(frozen=True, slots=True)
class Route:
    """The target of a request.

    Attributes:
        target: path and query, as the client sent them.
        problem: why it is not forwarded; empty if it is.
    """

    target: bytes
    path: str
    is_generation: bool
    problem: str = ""


def route_of(url: bytes) -> Route:
    """Parse a request's target."""
    return _known_route(url) if len(url) <= _MAX_KNOWN_BYTES else _read_route(url)


def _read_route(url: bytes) -> Route:
    try:
        parsed = httptools.parse_url(url)
        path = unquote(parsed.path.decode("ascii"))
        (parsed.query or b"").decode("ascii")
    except (httptools.HttpParserInvalidURLError, UnicodeDecodeError, AttributeError):
        return Route(url, "", True, "path and query must be percent-encoded")
    if not is_generation(path):
        return Route(url, path, False)
    problem = "path must not contain .." if ".." in path.split("/") else ""
    target = parsed.path + b"?" + parsed.query if parsed.query else parsed.path
    return Route(target, path, True, problem)


# Clients choose URLs, so what is kept of them is bounded in bytes too.
_known_route = lru_cache(1024)(_read_route)
