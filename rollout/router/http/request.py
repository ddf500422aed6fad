"""One generation request, and what the router writes into its body without decoding it.

- ``rid``: 32 hex digits, others each time the request is sent to an engine.  Engines know an id
  longer than its reply (SGLang aborts that of a stream 2 s after its end), and SGLang aborts by
  prefix, so all ids must have one width.  The client's own id stays with the router.
- ``extra_key``: run and weight version, then the client's own key.  It is part of SGLang's prefix
  cache key, also in stores that outlive a run, so cached KV of two runs or versions never mixes.

A client's own field is searched for as text, and the body is parsed only if that text is found, and
not as the first or the last member.  JSON parsers keep the last of equal keys: both are put at the
end, so that ours win however the client's are spelled.  A client's key that is spelled with escapes
is not found, and separates nothing.
Kinds of engines have other names for the two.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from json import detect_encoding
from typing import NamedTuple

import orjson

from engines.kinds import kind_of
from engines.protocol import Endpoint
from engines.protocol.kind import Kind
from rollout.router.http.fast_json import Data
from rollout.router.http.head_cache import RequestHead, kept_affinity
from rollout.router.http.routes import (
    COMPLETION_PATHS,
    GENERATE_PATH,
    KEYED_PATHS,
    VLLM_GENERATE_PATH,
)

MAX_PARSED_BYTES = 1 << 20
AFFINITY = "affinity"
_AFFINITY = AFFINITY.encode()
KEY_NAMES = ("extra_key", "cache_salt")
FOUND_NAMES = (*KEY_NAMES, AFFINITY)
"""Names of members whose values are found with the body."""
MAX_KEY_CHARACTERS = 128
"""vLLM takes no longer ``cache_salt``, and none with a slash."""
_OPENS = re.compile(rb"\s*\{")
_CLOSES = re.compile(rb"\s*\}")
_LONGEST_PLAIN_VALUE = 256
_LEAST_UNCOPIED = 1 << 16
_SPACE = b" \t\r\n"
_PLAIN = b'{"'
_random = random.Random(random.SystemRandom().getrandbits(256))
_NOTHING: Mapping[str, str | int] = {}
_ABSENT = (False, None)
_NO_KEYS: Mapping[str, tuple[bool, object]] = {}
_SGLANG = kind_of("sglang")
_PROMPT = re.compile(rb'"(?:input_ids|text|prompt|messages)"\s*:\s*')
_MAX_PROMPT_BYTES = 1 << 16


def affinity_in(request: Request) -> str:
    """What names the requests that prefer one engine, from the body, or empty for none."""
    if request.names is not None and _AFFINITY not in request.names:
        return ""
    keys = request.fields.keys
    affinity = (keys[AFFINITY] if keys else find_field(request.body, AFFINITY))[1]
    return kept_affinity(affinity) if isinstance(affinity, str) else ""


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


class BodyFields(NamedTuple):
    """The fields of a body that are the router's.

    Attributes:
        body: the whole of it; None: it is the client's.
        rid: its id, or empty where each of its prompts has one.
        adds_rid: the router chose that.
        rids: its client's ids of its prompts, if it gave a list.
        takes_rid: the router writes the ids for an engine into the body.
        adds_extra_key: the router writes the namespace of its cached prefix into the body.
        keys: what ``find_field`` gives for ``FOUND_NAMES``, where the body is too long to search.
        names: of members that the body may have; None: it was not searched.
    """

    body: bytes | None = None
    rid: str = ""
    adds_rid: bool = False
    rids: tuple[str, ...] = ()
    takes_rid: bool = False
    adds_extra_key: bool = False
    keys: Mapping[str, tuple[bool, object]] = _NO_KEYS
    names: frozenset[bytes] | None = None


@dataclass(slots=True)
class Request:
    """A complete request.

    Attributes:
        last: members of the router behind the client's, which JSON parsers read instead of those.
        sent_as: its id at the engine that it was sent to last; of several prompts with ids one
            for each.
        names: of members that its client's body may have; None: that was not searched.
        unread: lines of headers that the router passes on.
    """

    head: RequestHead
    body: bytes
    fields: BodyFields
    last: bytes = b""
    sent_as: str | tuple[str, ...] = ""
    names: frozenset[bytes] | None = None
    unread: bytes = b""

    @property
    def rid(self) -> str:
        return self.fields.rid

    def name_for_engine(self) -> None:
        """Give it an id that no engine knows, before it is sent to one."""
        fields = self.fields
        if fields.rids:
            self.sent_as = tuple(new_rid() for _ in fields.rids)
        elif fields.takes_rid:
            self.sent_as = new_rid() if self.sent_as or not fields.adds_rid else fields.rid

    def body_for(
        self,
        namespace: str,
        more: Mapping[str, str | int] = _NOTHING,
        kind: Kind = _SGLANG,
    ) -> list[Data]:
        """The body for an engine, in this namespace of cached prefixes, with ``more`` fields; in
        parts, since a long one is not copied.
        """
        rid, extra_key = kind.body_names
        first, last, keys = orjson.dumps(more)[1:-1] if more else b"", self.last, self.fields.keys
        if self.fields.adds_extra_key:
            if keys:
                own = keys["extra_key" if self._is_translated(kind) else extra_key]
            elif not self._may_have(extra_key, kind):
                own = _ABSENT
            else:
                own = find_field(self.body, extra_key)
            last = _joined(last, _key_member(extra_key, namespace, *own))
        if self.sent_as:
            last = _joined(last, b'"%s":%s' % (rid.encode(), orjson.dumps(self.sent_as)))
        return inject_members(self.body, first, last)

    def _may_have(self, name: str, kind: Kind) -> bool:
        """Whether the body for an engine may have this member, other than from the router."""
        return self.names is None or name.encode() in self.names or self._is_translated(kind)

    def _is_translated(self, kind: Kind) -> bool:
        return self.head.route.path == GENERATE_PATH != kind.generate_path

    def parts_for(
        self,
        endpoint: Endpoint,
        namespace: str,
        more: Mapping[str, str | int] = _NOTHING,
        kind: Kind = _SGLANG,
        key: str = "",
    ) -> list[Data]:
        """What is written on the connection to an engine, with ``more`` fields in the body."""
        body = self.body_for(namespace, more, kind)
        target = kind.generate_path.encode() if self._is_translated(kind) else b""
        num_bytes = sum(map(len, body))
        return [self.head.for_engine(endpoint, num_bytes, target, key, self.unread), *body]


def read_fields(
    path: str,
    body: bytes,
    *,
    changed: bytes | None = None,
    names: frozenset[bytes] | None = None,
) -> BodyFields:
    """The fields of the router that the body of a POST has or needs.

    Args:
        body: in UTF-8.
        changed: the same, if its client sent another one.
        names: that it has.
    """
    if path not in KEYED_PATHS or not is_json_object(body):
        return BodyFields(changed, names=names)
    if path not in COMPLETION_PATHS:
        return BodyFields(changed, adds_extra_key=True, names=names)
    name = "request_id" if path == VLLM_GENERATE_PATH else "rid"
    rid = find_field(body, name)[1] if names is None or name.encode() in names else None
    if rid is None or rid is UNKNOWN or rid == "":
        chosen = new_rid()
        return BodyFields(
            changed, chosen, adds_rid=True, takes_rid=True, adds_extra_key=True, names=names
        )
    if isinstance(rid, str):
        return BodyFields(changed, rid, takes_rid=True, adds_extra_key=True, names=names)
    ids = rid if isinstance(rid, list) else []
    rids = tuple(ids) if all(isinstance(each, str) for each in ids) else ()
    return BodyFields(changed, rids=rids, takes_rid=bool(rids), adds_extra_key=True, names=names)


def in_utf8(body: bytes) -> bytes:
    """JSON in UTF-16 or UTF-32, or with a byte-order mark, which vLLM takes too, without it."""
    if body.startswith(_PLAIN) or (is_json_object(body) and b"\0" not in body[:4]):
        return body
    try:
        return body.decode(detect_encoding(body), "surrogatepass").encode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return body


def _joined(members: bytes, more: bytes) -> bytes:
    return b"%s,%s" % (members, more) if members else more


def _key_member(name: str, namespace: str, has_own: bool, own: object) -> bytes:
    """The last member of a body, which names its cached prefixes: the client's key inside ours."""
    if not has_own or not own:
        return _plain_member(name, namespace)
    key: str | list[str]
    if own is UNKNOWN:  # so this request shares with no other
        key = _inside(namespace, new_rid())
    elif isinstance(own, list):  # one for each prompt of the body
        key = [_inside(namespace, name) for name in own]
    else:
        key = _inside(namespace, own)
    return json.dumps({name: key}).encode()[1:-1]


@lru_cache(64)
def _plain_member(name: str, namespace: str) -> bytes:
    return json.dumps({name: namespace}).encode()[1:-1]


def _inside(namespace: str, own: object) -> str:
    text = own if isinstance(own, str) else json.dumps(own)
    key = f"{namespace}:{text}"
    if len(key) <= MAX_KEY_CHARACTERS:
        return key
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{namespace}:{digest[:32]}"


def new_rid() -> str:
    return f"{_random.getrandbits(128):032x}"


def is_json_object(body: bytes) -> bool:
    """The body looks like a JSON object."""
    return body.startswith(_PLAIN) or _OPENS.match(body) is not None


UNKNOWN: object = ...
"""The value of a field of a body that was not parsed; no JSON has it, in any process."""


def find_field(body: bytes, key: str) -> tuple[bool, object]:
    """Whether the object has ``key``, and its value, or ``UNKNOWN``.

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
        return True, UNKNOWN
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return True, UNKNOWN
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


def inject_members(body: bytes, first: bytes, last: bytes) -> list[Data]:
    """``body`` with ``first`` as its first members and ``last`` as its last; either may be empty.

    What is not an object is unchanged.
    """
    begin, end, has_own = 1, len(body) - 1, True
    if not (first or last):
        return [body] if body else []
    if not (body.startswith(_PLAIN) and body.endswith(b"}")):
        opening = _OPENS.match(body)
        if opening is None:
            return [body] if body else []
        begin, end = opening.end(), body.rstrip(_SPACE).rfind(b"}")
        has_own = _CLOSES.match(body, begin) is None
        if body[end + 1 :].strip(_SPACE):
            return [body]
    if has_own:
        first = first and first + b","
        last = last and b"," + last
    elif first and last:
        last = b"," + last
    if len(body) < _LEAST_UNCOPIED:
        return [b"".join((b"{", first, memoryview(body)[begin:end], last, b"}"))]
    return [b"{" + first, memoryview(body)[begin:end], last + b"}"]
