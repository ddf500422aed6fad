"""One generation request, and what the router writes into its body without decoding it.

- ``rid``, unless the client gave one: 32 hex digits.  SGLang aborts by prefix, so all ids
  must have one width, or aborting one request ends others.
- ``extra_key``, unless the client gave one: the weight version.  It is part of SGLang's prefix
  cache key, so that cached KV of two versions never mixes.

Both are put at the front of the JSON object.  A client's own key is searched for as text, and the
body is parsed only if that text is found, and not as the first or the last member.  If a client
spells its key with escapes, so that the text is not found, its value still wins: JSON parsers keep
the last of equal keys.  For a vLLM engine the two are called ``request_id`` and ``cache_salt``.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import orjson

from engines.protocol import Endpoint
from rollout.router.http.head_cache import RequestHead
from rollout.router.http.headers import Headers
from rollout.router.http.routes import COMPLETION_PATHS, GENERATE_PATH, VLLM_GENERATE_PATH

MAX_PARSED_BYTES = 1 << 20
MAX_SESSION_CHARACTERS = 256
_OPENS = re.compile(rb"\s*\{")
_CLOSES = re.compile(rb"\s*\}")
_LONGEST_PLAIN_VALUE = 256
_random = random.Random(random.SystemRandom().getrandbits(256))
_NOTHING: Mapping[str, str | int] = {}
_NAMES, _VLLM_NAMES = ("rid", "extra_key"), ("request_id", "cache_salt")
_PROMPT = re.compile(rb'"(?:input_ids|text|prompt|messages)"\s*:\s*')
_MAX_PROMPT_BYTES = 1 << 16


def session_of(body: bytes, headers: Headers) -> str:
    """The session id of a request, from a header or its body; empty if it has none.

    Ids are kept, so one of more than ``MAX_SESSION_CHARACTERS`` counts as none.
    """
    session: object = next(
        (value.decode("latin-1") for name, value in headers if name == b"x-session-id"), None
    )
    if session is None:
        session = find_field(body, "session_id")[1]
    is_id = isinstance(session, str) and len(session) <= MAX_SESSION_CHARACTERS
    return str(session) if is_id else ""


def prompt_of(body: bytes) -> bytes:
    """The beginning of the prompt, as it is written in the body."""
    found = _PROMPT.search(body)
    return body[found.end() : found.end() + _MAX_PROMPT_BYTES] if found else b""


def may_want_prompt_logprobs(body: bytes) -> bool:
    """Whether the body may request log-probs of its prompt; if so, it has to be parsed."""
    return b'"logprob_start_len"' in body


def wants_prompt_logprobs(raw: Mapping[str, object]) -> bool:
    """Whether a ``/generate`` body requests log-probs of its prompt."""
    start = raw.get("logprob_start_len")
    return bool(raw.get("return_logprob")) and isinstance(start, int) and start >= 0


@dataclass(slots=True)
class Request:
    """A complete request.

    Attributes:
        rid: its id, where it is known.
        adds_rid: the router chose the id and writes it into the body.
        adds_extra_key: the router writes the weight version into the body.
    """

    head: RequestHead
    body: bytes
    rid: str = ""
    adds_rid: bool = False
    adds_extra_key: bool = False

    def body_for(
        self,
        weight_version: int | None,
        more: Mapping[str, str | int] = _NOTHING,
        *,
        is_vllm: bool = False,
    ) -> bytes:
        """The body for an engine that holds this weight version, with ``more`` fields."""
        rid, extra_key = _VLLM_NAMES if is_vllm else _NAMES
        values: dict[str, str | int] = {**more} if more else {}
        if self.adds_rid:
            values[rid] = self.rid
        if self.adds_extra_key and weight_version is not None:
            values[extra_key] = f"v{weight_version}"
        return inject_fields(self.body, **values)

    def parts_for(
        self,
        endpoint: Endpoint,
        weight_version: int | None,
        more: Mapping[str, str | int] = _NOTHING,
        *,
        is_vllm: bool = False,
    ) -> list[bytes]:
        """What is written on the connection to an engine, with ``more`` fields in the body."""
        body = self.body_for(weight_version, more, is_vllm=is_vllm)
        is_translated = is_vllm and self.head.route.path == GENERATE_PATH
        target = VLLM_GENERATE_PATH.encode() if is_translated else b""
        head = self.head.for_engine(endpoint, len(body), target)
        return [head, body] if body else [head]


def read_request(head: RequestHead, body: bytes) -> Request:
    """The request for an engine, and which fields the router adds to it."""
    request = Request(head, body)
    is_completion = head.route.path in COMPLETION_PATHS and head.method == b"POST"
    if is_completion and is_json_object(body):
        is_vllm = head.route.path == VLLM_GENERATE_PATH
        own_rid, own_extra_key = _VLLM_NAMES if is_vllm else _NAMES
        has_rid, rid = find_field(body, own_rid)
        request.adds_rid = not has_rid
        request.rid = rid if isinstance(rid, str) else "" if has_rid else new_rid()
        request.adds_extra_key = not find_field(body, own_extra_key)[0]
    return request


def new_rid() -> str:
    return f"{_random.getrandbits(128):032x}"


def is_json_object(body: bytes) -> bool:
    """The body looks like a JSON object."""
    return _OPENS.match(body) is not None


def find_field(body: bytes, key: str) -> tuple[bool, object]:
    """Whether the object has ``key``, and its value where that is known.

    A body too long to parse that has the key's text somewhere counts as having the key.
    """
    quoted, first, last = _patterns(key)
    at = body.find(quoted)
    if at < 0:
        return False, None
    if body.find(quoted, at + 1) < 0:  # only here, so no later one can take its place
        found = first.match(body)
        if found is None and len(body) - at <= _LONGEST_PLAIN_VALUE:
            found = last.match(body, at)
        if found is not None:
            return True, found[1].decode()
    if len(body) > MAX_PARSED_BYTES:
        return True, None
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return True, None
    return key in parsed, parsed.get(key)


@lru_cache
def _patterns(key: str) -> tuple[bytes, re.Pattern[bytes], re.Pattern[bytes]]:
    """The key's text; the key as first member; the key as last one, before the outermost end."""
    pair = rf'"{key}"\s*:\s*"([ !#-\[\]-~]*)"'
    return (
        f'"{key}"'.encode(),
        re.compile(rf"\s*\{{\s*{pair}\s*[,}}]".encode()),
        re.compile(rf"{pair}\s*\}}\s*\Z".encode()),
    )


def inject_fields(body: bytes, **values: str | int) -> bytes:
    """``body`` with ``values`` as its first members."""
    opening = _OPENS.match(body)
    if not values or opening is None:
        return body
    front = orjson.dumps(values)[:-1]
    comma = b"" if _CLOSES.match(body, opening.end()) else b","
    return b"".join((front, comma, body[opening.end() :]))
