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
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/chat/completions/derender",
        "/v1/chat/completions/render",
        "/v1/classify",
        "/v1/completions",
        "/v1/completions/derender",
        "/v1/completions/render",
        "/v1/decisions",
        "/v1/detokenize",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/messages/render",
        "/v1/rerank",
        "/v1/responses",
        "/v1/responses/render",
        "/v1/score",
        "/v1/systemone",
        "/v1/tokenize",
    }
)
"""Paths that go through the gate: what SGLang and vLLM serve to clients without keeping state.

Engines have others below ``/v1/`` that are not a client's, as vLLM's ``/v1/load_lora_adapter``, and
reply to paths that they do not have with redirects to their own address.
"""
_MODELS_PATH = "/v1/models"
PINS_PATH = "/pins"


def is_generation(path: str) -> bool:
    return path in GENERATION_PATHS


def _is_unknown(path: str) -> bool:
    """Whether a client of OpenAI's protocol may take the path for one of an engine."""
    is_ours = path in GENERATION_PATHS or path == _MODELS_PATH
    return path.startswith("/v1/") and not is_ours


COMPLETION_PATHS = frozenset(
    {GENERATE_PATH, VLLM_GENERATE_PATH, "/v1/completions", "/v1/chat/completions"}
)
"""Paths whose requests get fields of the router, and can continue on another engine."""

KEYED_PATHS = COMPLETION_PATHS | {"/v1/responses", "/invocations"}
"""Paths at which engines take a key of cached prefixes."""


NAMING_PATHS = (COMPLETION_PATHS - {VLLM_GENERATE_PATH}) | {
    "/encode",
    "/classify",
    "/invocations",
    "/v1/embeddings",
}
"""Paths whose requests name the LoRA adapter that answers them, as SGLang 0.5.23 reads them."""

WHOLE_JSON_PATHS = frozenset(
    {
        "/encode",
        "/classify",
        "/invocations",
        "/vertex_generate",
        "/v1/chat/completions/batch",
        "/v1/classify",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/rerank",
        "/v1/responses",
        "/v1/score",
    }
)
"""Other paths whose replies, where they are not streamed, are one JSON value of the model."""

TOKENIZER_PATHS = frozenset(
    {
        "/tokenize",
        "/detokenize",
        "/v1/tokenize",
        "/v1/detokenize",
        "/v1/messages/count_tokens",
    }
)
"""Paths that need no weights."""

_MAX_KNOWN_BYTES = 512


@dataclass(frozen=True, slots=True)
class Route:
    """The target of a request.

    Attributes:
        target: path and query, as the client sent them.
        problem: why it is not forwarded, or empty if it is.
        status: HTTP status of the refusal.
    """

    target: bytes
    path: str
    is_generation: bool
    problem: str = ""
    status: int = 400


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
    if _is_unknown(path):
        known = path.rstrip("/")
        instead = f"; send it to {known}" if is_generation(known) else ""
        return Route(url, path, True, f"the router has no path {path:.200}{instead}", 404)
    if not is_generation(path):
        return Route(url, path, False)
    target = parsed.path + b"?" + parsed.query if parsed.query else parsed.path
    return Route(target, path, True)


# Clients choose URLs, so what is kept of them is bounded in bytes too.
_known_route = lru_cache(1024)(_read_route)
