"""One generation request, kept until its answer has begun, and where each path goes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote

import httptools

from engines.protocol import Endpoint
from rollout.router import stamp
from rollout.router.headers import Headers
from rollout.router.heads import RequestHead

GENERATION_PATHS = frozenset(
    {
        "/generate",
        "/encode",
        "/classify",
        "/invocations",
        "/vertex_generate",
        "/tokenize",
        "/detokenize",
    }
)
"""Paths that go through the gate, with all below ``/v1/`` but ``/v1/models``."""


def is_generation(path: str) -> bool:
    return path in GENERATION_PATHS or (path.startswith("/v1/") and path != "/v1/models")


COMPLETION_PATHS = frozenset({"/generate", "/v1/completions", "/v1/chat/completions"})
"""Paths whose requests are stamped, and can go on elsewhere by token."""

_NOTHING: Mapping[str, str | int] = {}
_PROMPT = re.compile(rb'"(?:input_ids|text|prompt|messages)"\s*:\s*')
_MAX_PROMPT_BYTES = 1 << 16


def session_of(body: bytes, headers: Headers) -> str:
    """The session a request says it belongs to, in a header or in its body; or nothing."""
    for name, value in headers:
        if name == b"x-session-id":
            return value.decode("latin-1")
    session = stamp.find(body, "session_id")[1]
    return session if isinstance(session, str) else ""


def prompt_of(body: bytes) -> bytes:
    """The beginning of the prompt, as the body spells it."""
    found = _PROMPT.search(body)
    return body[found.end() : found.end() + _MAX_PROMPT_BYTES] if found else b""


def may_want_prompt_logprobs(body: bytes) -> bool:
    """It is worth reading a body to see whether it asks for log-probs of its prompt."""
    return b'"logprob_start_len"' in body


def asks_prompt_logprobs(raw: Mapping[str, object]) -> bool:
    """A ``/generate`` body asks for log-probs of its prompt."""
    start = raw.get("logprob_start_len")
    return bool(raw.get("return_logprob")) and isinstance(start, int) and start >= 0


@dataclass(frozen=True, slots=True)
class Route:
    """What the target of a request says.

    Attributes:
        target: path and query, as the client sent them.
        problem: why it is not passed on; empty if it is.
    """

    target: bytes
    path: str
    is_generation: bool
    problem: str = ""


@lru_cache(4096)
def route_of(url: bytes) -> Route:
    """Read a request's target."""
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


@dataclass(slots=True)
class Request:
    """A whole request.

    Attributes:
        rid: its id, where it is known.
        is_rid_ours: the router gave it that id and has to write it in.
        is_extra_key_ours: the router writes the weight version in.
    """

    head: RequestHead
    body: bytes
    rid: str = ""
    is_rid_ours: bool = False
    is_extra_key_ours: bool = False

    def body_under(
        self, weight_version: int | None, more: Mapping[str, str | int] = _NOTHING
    ) -> bytes:
        """The body an engine gets when admitted under this weight version."""
        values: dict[str, str | int] = {**more} if more else {}
        if self.is_rid_ours:
            values["rid"] = self.rid
        if self.is_extra_key_ours and weight_version is not None:
            values["extra_key"] = f"v{weight_version}"
        return stamp.stamp(self.body, **values)

    def parts_for(
        self,
        endpoint: Endpoint,
        weight_version: int | None,
        more: Mapping[str, str | int] = _NOTHING,
    ) -> list[bytes]:
        """What is written on the connection to an engine, with ``more`` in the body."""
        body = self.body_under(weight_version, more)
        head = self.head.for_engine(endpoint, len(body))
        return [head, body] if body else [head]


def read_request(head: RequestHead, body: bytes) -> Request:
    """The request for an engine, with what is to be stamped on it."""
    request = Request(head, body)
    is_completion = head.route.path in COMPLETION_PATHS and head.method == b"POST"
    if is_completion and stamp.is_stampable(body):
        has_rid, rid = stamp.find(body, "rid")
        request.is_rid_ours = not has_rid
        request.rid = rid if isinstance(rid, str) else "" if has_rid else stamp.new_rid()
        request.is_extra_key_ours = not stamp.find(body, "extra_key")[0]
    return request
