"""Requests and events of ``/generate`` in parts, so that their long parts are not parsed (pure).

The prompt's token ids and the text of a reply are most of their bytes, and the router needs them
only if an engine is lost.  Here they are found as bytes, and the rest is parsed.

Always true: what is found is what a JSON parser would find.  In any other case there are no parts,
and the caller parses all of it.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from typing import Any

import orjson

from rollout.router.http.fast_json import Data, dumps
from rollout.router.transcripts.request_body import read_object, token_ids_of
from rollout.router.transcripts.transcript import END, Payload

_INPUT_IDS = b'"input_ids"'
_IN_IDS = b"0123456789, \t\r\n"
_SPACE = b" \t\r\n"
_RID = re.compile(rb'"rid"\s*:\s*"([ !#-\[\]-~]*)"')
# In place of ids.  That no client can know it shows that its own text was replaced.
_MARK = random.SystemRandom().randrange(10**16, 10**17)
_MARK_BYTES = b"%d" % _MARK
_RID_MARK = f"rid-{_MARK}"
_MARKED_RID = b'"rid":"%s"' % _RID_MARK.encode()
_BACKSLASH = ord("\\")
_OUTPUT_IDS = b'"output_ids"'
_READ = frozenset({"text", "output_ids", "meta_info", "error"})
_TEXT = re.compile(rb'\s*\{\s*"text"\s*:\s*"')
_IDS_AND_META = re.compile(
    rb'"\s*,\s*"output_ids"\s*:\s*\[([0-9, \t\r\n]*)\]\s*,\s*"meta_info"\s*:\s*\{'
)
_UNFINISHED = re.compile(rb'"finish_reason"\s*:\s*null')


class PromptIds:
    """The token ids of a prompt, as they stand in the body; parsed when they are needed.

    Args:
        data: the ids without their brackets.
    """

    __slots__ = ("_data", "_values")

    def __init__(self, data: bytes, values: list[int] | None = None) -> None:
        self._data = data
        self._values = values

    @classmethod
    def of(cls, values: list[int]) -> PromptIds:
        return cls(dumps(values)[1:-1], values)

    def __len__(self) -> int:
        return self._data.count(b",") + 1

    @property
    def values(self) -> list[int]:
        """The ids.

        Raises:
            ValueError: they are not written as JSON.
        """
        if self._values is None:
            data = b"[%s]" % self._data
            # orjson rounds what has more than 64 bits to a float.
            self._values = token_ids_of(orjson.loads(data)) or json.loads(data)
        return self._values

    def in_body(self, fields: bytes, more: list[int]) -> bytes:
        """A body of these ids, then ``more``, and the other ``fields``, which are an object."""
        end = b"," + dumps(more)[1:-1] if more else b""
        comma = b"" if fields == b"{}" else b","
        return b"".join((b'{"input_ids":[', self._data, end, b"]", comma, fields[1:]))


@dataclass(slots=True)
class BodyParts:
    """A body whose prompt is one flat list of ids.

    Attributes:
        fields: the body with marks for its token ids and its own id; equal for many requests.
        rid: its own id; None if it has none, or one with escapes.
    """

    fields: bytes
    prompt: PromptIds
    rid: bytes | None

    def with_rid(self, fields: bytes) -> bytes:
        """``fields`` with the id instead of its mark."""
        if self.rid is None:
            return fields
        return fields.replace(_MARKED_RID, b'"rid":"%s"' % self.rid, 1)


def split_body(body: bytes) -> BodyParts | None:
    """The parts; None if it has no such prompt.  ``read_fields`` has to find its marks."""
    name = body.find(_INPUT_IDS)
    begin = body.find(b"[", name) + 1
    end = body.find(b"]", begin)
    if name < 0 or not begin or end < 0:
        return None
    ids = body[begin:end]
    between = body[name + len(_INPUT_IDS) : begin - 1]
    if between.strip(_SPACE) != b":" or not _is_flat(ids) or not ids.strip(_SPACE):
        return None
    fields = b"%s%s%s" % (body[: begin - 1], _MARK_BYTES, body[end + 1 :])
    found = _RID.search(fields)
    if found is None:
        return BodyParts(fields, PromptIds(ids), None)
    fields = b"".join((fields[: found.start()], _MARKED_RID, fields[found.end() :]))
    return BodyParts(fields, PromptIds(ids), found[1])


def read_fields(fields: bytes) -> Payload | None:
    """The marked fields of a body without its token ids; None if a mark is not where it belongs."""
    raw = read_object(fields)
    if raw is None or raw.pop("input_ids", None) != _MARK:
        return None
    is_rid_marked = _MARKED_RID in fields
    return raw if (raw.get("rid") == _RID_MARK) == is_rid_marked else None


def _is_flat(ids: bytes) -> bool:
    """It has nothing but whole numbers; if they are no list, the engine says so."""
    return not ids.translate(None, _IN_IDS)


@dataclass(slots=True)
class EventParts:
    """An event of SGLang's ``/generate``.

    Attributes:
        num_ids: how many token ids it has.
        meta: its ``meta_info``.
    """

    num_ids: int
    meta: dict[str, Any]
    _data: bytes
    _begin: int
    _meta_begin: int
    _end: int

    def with_meta(self, more: Payload) -> list[Data]:
        """The event with ``more`` fields in its ``meta_info``, in parts."""
        at, data = self._meta_begin, memoryview(self._data)
        comma = b"," if self.meta else b""
        return [data[self._begin : at], dumps(more)[1:-1] + comma, data[at : self._end]]


def split_event(data: bytes, begin: int = 0, end: int = END) -> EventParts | None:
    """The event, of which text and ids are not parsed; None if it is not as SGLang writes it."""
    at = _end_of_text(data, begin, end)
    found = _IDS_AND_META.match(data, at, end) if at >= 0 else None
    if found is None:
        return None
    ids, at = found[1], found.end()
    try:
        rest = orjson.loads(b'{"%d":{%s' % (_MARK, data[at:end]))
    except orjson.JSONDecodeError:
        return None
    meta = rest.pop(str(_MARK))
    if not isinstance(meta, dict) or not rest.keys().isdisjoint(_READ):
        return None
    num_ids = ids.count(b",") + 1 if ids.strip(_SPACE) else 0
    return EventParts(num_ids, meta, data, begin, at, end)


def is_unfinished(data: bytes, begin: int = 0, end: int = END) -> bool:
    """Whether the event is neither the last one nor an error; if not, it has to be parsed.

    Behind the text there is one finish reason, and no key that is spelled with escapes.
    """
    at = _end_of_text(data, begin, end)
    if at < 0 or data.find(b"\\", at, end) >= 0 or not _UNFINISHED.search(data, at, end):
        return False
    strings = data[at + 1 : end].split(b'"')[1::2]
    return strings.count(b"finish_reason") == 1 and b"error" not in strings


def _end_of_text(data: bytes, begin: int, end: int) -> int:
    """Where the text ends, with which an event begins, in front of its ids; -1 if it has none."""
    if (found := _TEXT.match(data, begin, end)) is None:
        return -1
    begin = found.end()
    at = data.find(b'"', begin, end)
    if at < 0 or data[at - 1] != _BACKSLASH:
        return at
    at = data.rfind(b'"', begin, max(0, data.find(_OUTPUT_IDS, begin, end)))
    text = data[begin : at + 1].replace(b"\\\\", b"")
    # Only its end is a quote without a backslash.
    return at if text.count(b'"') == text.count(b'\\"') + 1 else -1
