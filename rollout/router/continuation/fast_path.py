"""Requests and replies of ``/generate`` whose long parts are not parsed: fast, and fenced in here.

The prompt's token ids and the text of a reply are most of their bytes, and the router needs them
only if an engine is lost.  So they are found as bytes, and the rest is parsed; the other fields of
a body are read once for many requests; events with all tokens so far are put off unread, or only
what is new in their lists is parsed.

Always true: what is found is what a JSON parser would find.  In any other case there are no parts,
and all of it is parsed (``tests/rollout/router/continuation/test_fast_path.py``).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson

from engines.http.reply_check import (
    SAMPLING_MASK,
    check_experts,
    check_ids,
    check_masks,
    check_pairs,
    check_tokens,
    check_versions,
)
from engines.protocol.logprob_kind import LogprobKind, LogprobRule
from rollout.router.continuation.core import UNUSABLE, Payload
from rollout.router.continuation.forms import read_object, token_ids_of
from rollout.router.continuation.reply import END, Reply
from rollout.router.http.fast_json import Data, JsonText, dumps, loads
from rollout.router.http.request import wants_prompt_logprobs

Event = tuple[bytes, int, int]
"""An event stands in these bytes, from the one position to the other."""
PER_TOKEN = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
OF_MASKS = (SAMPLING_MASK, "output_token_sampling_logprobs")
"""The same, if masks are requested."""
FROM_FIRST = (
    "prompt_tokens",
    "cached_tokens",
    "input_token_logprobs",
    "input_top_logprobs",
)
_ADDED = ("weight_versions", "num_failovers", "num_recomputed_tokens", "logprob_kind")
# Of the events that are not parsed the last ones are kept: one of them may end at a safe token.
_NUM_UNREAD = 4
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
_END_OF_LIST = ord("]")
_OUTPUT_IDS = b'"output_ids"'
_READ = frozenset({"text", "output_ids", "meta_info", "error"})
_TEXT = re.compile(rb'\s*\{\s*"text"\s*:\s*"')
_IDS_AND_META = re.compile(rb'"\s*,\s*"output_ids"\s*:\s*\[([^\]]*)\]\s*,\s*"meta_info"\s*:\s*\{')
_UNFINISHED = re.compile(rb'"finish_reason"\s*:\s*null')
_IDS, _LOGPROBS = b'"output_ids":[', b'"output_token_logprobs":['
# Lists in the order in which engines write them, and what ends one that is not empty.
_GROWING = {_IDS: b"]", _LOGPROBS: b"]]"}
_LONG_EVENT = 1 << 13
_LONG_OF_STREAM = 1 << 11
_PIECE = 1 << 16
_IN_NUMBER = b"0123456789.-+eE"
_BRACKET_AND_NULL = bytes.maketrans(b"[n", b" 0")
_PLAIN_LOGPROB = b"[,,null],"
_END_OF_PLAIN = b",null]]"


class PromptIds(JsonText):
    """The token ids of a prompt, as they stand in the body; parsed when they are needed.

    Args:
        data: the ids without their brackets.
    """

    __slots__ = ("_values",)

    def __init__(self, data: bytes, values: list[int] | None = None) -> None:
        super().__init__(data, b"[%s]")
        self._values = values

    def __reduce__(self) -> tuple[Any, ...]:
        return PromptIds, (self.data,)

    def __iter__(self) -> Iterator[int]:
        return iter(self.values)

    @classmethod
    def of(cls, values: list[int]) -> PromptIds:
        return cls(dumps(values)[1:-1], values)

    def __len__(self) -> int:
        return self.data.count(b",") + 1

    @property
    def values(self) -> list[int]:
        """The ids.

        Raises:
            ValueError: they are not written as JSON.
        """
        if self._values is None:
            data = self.json
            # orjson rounds what has more than 64 bits to a float.
            self._values = token_ids_of(orjson.loads(data)) or json.loads(data)
        return self._values

    def in_body(self, fields: bytes, more: list[int]) -> bytes:
        """A body of these ids, then ``more``, and the other ``fields``, which are an object."""
        end = b"," + dumps(more)[1:-1] if more else b""
        comma = b"" if fields == b"{}" else b","
        return b"".join((b'{"input_ids":[', self.data, end, b"]", comma, fields[1:]))


@dataclass(slots=True)
class BodyParts:
    """A body whose prompt is one flat list of ids.

    Attributes:
        fields: the body with marks for its token ids and its own id; equal for many requests.
        rid: its own id, or None if it has none, or one with escapes.
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
    """The parts, or None if it has no such prompt.  ``read_fields`` has to find its marks."""
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
    """The marked fields of a body without its token ids, or None if a mark is not where it
    belongs."""
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
        logprobs: of its tokens, or None if they are in ``meta``, or there are none.
        meta: its ``meta_info``.
    """

    num_ids: int
    logprobs: GrownList | None
    meta: dict[str, Any]
    _ids: bytes
    _data: bytes
    _begin: int
    _meta_begin: int
    _end: int

    @property
    def ids(self) -> list[int]:
        """Its token ids.

        Raises:
            ValueError: they are not written as JSON.
        """
        ids: list[int] = orjson.loads(b"[%s]" % self._ids)
        return ids

    def has_ids(self, ids: list[Any]) -> bool:
        """Whether its ids are written as these would be, so that they need no parsing."""
        return dumps(ids)[1:-1] == self._ids

    def with_meta(self, more: Payload, old_id: str = "", new_id: str = "") -> list[Data]:
        """The event with ``more`` fields in its ``meta_info``, in parts.

        Args:
            old_id: an id there, instead of which ``new_id`` is written, or empty for none.
        """
        at, end, data = self._meta_begin, self._end, memoryview(self._data)
        comma = b"," if self.meta else b""
        parts: list[Data] = [data[self._begin : at], dumps(more)[1:-1] + comma]
        is_renamed = old_id and old_id != new_id
        quoted = dumps(old_id) if is_renamed else b""
        if not is_renamed or (found := self._data.find(quoted, at, end)) < 0:
            return [*parts, data[at:end]]
        return [*parts, data[at:found], dumps(new_id), data[found + len(quoted) : end]]


def split_event(data: bytes, begin: int = 0, end: int = END) -> EventParts | None:
    """The event, of which text and ids are not parsed, or None if it is not as SGLang writes it."""
    at = _end_of_text(data, begin, end)
    found = _IDS_AND_META.match(data, at, end) if at >= 0 else None
    if found is None or not _is_flat(found[1]):
        return None
    ids, at = found[1], found.end()
    others, logprobs = _without_logprobs(data[at:end])
    try:
        rest = orjson.loads(b'{"%d":{%s' % (_MARK, others))
    except orjson.JSONDecodeError:
        return None
    meta = rest.pop(str(_MARK))
    if not isinstance(meta, dict) or not rest.keys().isdisjoint(_READ):
        return None
    if logprobs is not None and meta.pop(PER_TOKEN[0], None) != _MARK:
        return None
    num_ids = ids.count(b",") + 1 if ids.strip(_SPACE) else 0
    return EventParts(num_ids, logprobs, meta, ids, data, begin, at, end)


def _without_logprobs(data: bytes) -> tuple[bytes, GrownList | None]:
    """A long reply, or its end, with a mark for its log-probs, and these if all are numbers."""
    begin = data.find(_LOGPROBS) + len(_LOGPROBS)
    if len(data) < _LONG_EVENT or begin < len(_LOGPROBS):
        return data, None
    end = data.find(_END_OF_PLAIN, begin) + len(_END_OF_PLAIN) - 1
    text = data[begin:end]
    form = text.translate(None, _IN_NUMBER) + b","
    num = len(form) // len(_PLAIN_LOGPROB)
    if form != _PLAIN_LOGPROB * num:
        return data, None
    return b"%s%s%s" % (data[: begin - 1], _MARK_BYTES, data[end + 1 :]), GrownList(text, num)


def loads_reply(data: bytes) -> Any:
    """What a parser gives of a complete reply; its log-probs are parsed when they are iterated.

    Raises:
        ValueError: it is not JSON.
    """
    others, logprobs = _without_logprobs(data)
    if logprobs is not None:
        with suppress(*UNUSABLE):
            payload = orjson.loads(others)
            if payload["meta_info"][PER_TOKEN[0]] == _MARK:
                payload["meta_info"][PER_TOKEN[0]] = logprobs
                return payload
    return loads(data)


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


class GrownList(JsonText, Sequence[Any]):
    """A list that is written as it stands in an event, and parsed when it is needed.

    Making, writing and freeing a small list for each token would hold up other requests.  While
    it is iterated, other threads run between its pieces.

    Args:
        data: its entries, without the brackets.
        new: the last of the entries, as far as they are parsed.
    """

    __slots__ = ("_new", "_num")

    def __init__(self, data: bytes, num: int, new: Sequence[Any] = ()) -> None:
        self.data, self.around = data, b"[%s]"  # it is made for each event
        self._num = num
        self._new = new

    def __reduce__(self) -> tuple[Any, ...]:
        return GrownList, (self.data, self._num, self._new)

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: Any) -> Any:
        return orjson.loads(self.json)[index]

    def __iter__(self) -> Iterator[Any]:
        data, begin, end = self.data, 0, -1
        while end < len(data):
            end = data.find(b"],[", begin + _PIECE) + 1 or len(data)
            try:
                piece = orjson.loads(b"[%s]" % data[begin:end])
            except orjson.JSONDecodeError:  # these brackets were within an entry
                end = len(data)
                piece = orjson.loads(b"[%s]" % data[begin:])
            yield from piece
            begin = end + 1

    def __eq__(self, other: object) -> bool:
        return bool(self[:] == other)

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Sequence[Any]) -> list[Any]:
        return [*self, *other]

    def __radd__(self, other: Sequence[Any]) -> list[Any]:
        return [*other, *self]

    def since(self, begin: int) -> Sequence[Any]:
        """The entries from that index on."""
        begin_of_new = self._num - len(self._new)
        if begin >= begin_of_new:
            return self._new[begin - begin_of_new :]
        entries: list[Any] = self[begin:]
        return entries

    def flat(self) -> tuple[list[Any], list[Any]]:
        """The log-probs and the ids of entries such as ``[-0.5, 17, null]``, all of which have
        this form; no list is made for each.

        Raises:
            ValueError: a number is not written as JSON.
        """
        numbers = self.data.translate(_BRACKET_AND_NULL, b"]ul")  # of null, 0 is left
        values = orjson.loads(b"[%s]" % numbers)
        return values[::3], values[1::3]

    def grown(self, data: bytes, new: list[Any]) -> GrownList:
        """This one with ``new`` entries behind the others."""
        return GrownList(data, self._num + len(new), new)


_NO_LOGPROBS = GrownList(b"", 0)


class GrowingLists:
    """Events that have all tokens so far: of their lists only what is new is parsed.

    A stream of 8192 tokens with log-probs takes 34 ms of CPU so, and its longest event 0.5 ms;
    where each event is parsed whole, it takes 824 ms and 48 ms.

    Attributes:
        num_same: how many tokens stand in the last event as in the one before: their ids, and
            their log-probs if they are a ``GrownList``.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[bytes, Any]] = {}
        self.num_same = 0

    def loads(self, event: bytes) -> Any:
        """What a parser gives.

        Raises:
            ValueError: it is not JSON.
        """
        try:
            return self._read(event)
        except UNUSABLE:
            self.num_same = 0
            return loads(event)

    def _read(self, event: bytes) -> Payload:
        """The same; raises as ``UNUSABLE`` has if a list is not where it belongs."""
        others: list[bytes] = []
        begin, found, same = 0, {}, []
        for name, last in _GROWING.items():
            at = event.find(name, begin) + len(name)
            if at < len(name):
                continue
            text, values, num = self._grown(event, at, name, last)
            found[name] = text, values
            same.append(num)
            others += event[begin : at - 1], _MARK_BYTES
            begin = at + len(text) + 1
        payload: Payload = orjson.loads(b"".join((*others, event[begin:])))
        for name, (_, values) in found.items():
            holder = payload["meta_info"] if name == _LOGPROBS else payload
            key = name[1:-3].decode()
            if holder[key] != _MARK:
                raise ValueError(f"{key} is at another place")
            holder[key] = values
        self._known, self.num_same = found, min(same) if _IDS in found else 0
        return payload

    def _grown(self, event: bytes, at: int, name: bytes, last: bytes) -> tuple[bytes, Any, int]:
        """The list that begins there: its text without the brackets, its entries, and how many of
        them are known."""
        empty: Any = _NO_LOGPROBS if name == _LOGPROBS else ()
        known, values = self._known.get(name, (b"", empty))
        begin = at + len(known)
        if not event.startswith(known, at) or event[begin] not in b",]":
            known, values, begin = b"", empty, at
        end = at
        if event[at] != _END_OF_LIST:
            end = event.index(last, max(at, begin - 1)) + len(last) - 1
        new = event[begin:end]
        more = orjson.loads(b"[%s]" % (new[1:] if known else new))
        if new and not more:
            raise ValueError("a comma without a value")
        text, num = event[at:end], len(values)
        return text, values.grown(text, more) if name == _LOGPROBS else [*values, *more], num


class FastReply(Reply):
    """A reply whose events are parsed only when an engine is lost, if its client wants it whole.

    The first events are parsed to see whether each has all tokens so far.  The last one is passed
    on as it came, if no other engine did a part.

    Attributes:
        fields: the body for the first engine, without its token ids.
        kinds: of log-probs, by rule; requests that differ only in their ids share them.
        num_same: of the event that was parsed last, as ``GrowingLists`` has it.
        per_token: lists of an event that have an entry for each token.
    """

    fields: bytes = b"{}"
    kinds: dict[LogprobRule, LogprobKind | None]
    num_same = 0
    per_token: tuple[str, ...] = PER_TOKEN

    # The current engine's events have all tokens so far.
    _is_cumulative = False
    _unread: tuple[Event, ...] = ()
    # Events before these were not kept.
    _has_gap = False
    # An event of the current engine was not parsed when it came.
    _has_put_off = False
    _lists: GrowingLists | None = None
    # Of the tokens in ``passed_on``.
    _passed_version: Any = None

    def of_request(self, parts: BodyParts) -> FastReply:
        """A new one for another request, which has these parts and the same other fields."""
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.begin()
        new.prompt = parts.prompt
        if parts.rid is not None:
            new.raw = {**self.raw, "rid": parts.rid.decode()}
            new.fields = parts.with_rid(self.fields)
        return new

    def kind_by(self, rule: LogprobRule) -> LogprobKind | None:
        if rule not in self.kinds:
            self.kinds[rule] = super().kind_by(rule)
        return self.kinds[rule]

    # -- from the engine --------------------------------------------------------------------

    def may_leave_out(self, data: bytes, begin: int, end: int) -> bool:
        if not (self._is_cumulative and is_unfinished(data, begin, end)):
            return False
        self._has_gap = self._has_put_off = True
        return True

    def take(self, data: bytes, begin: int = 0, end: int = END) -> Payload | None:
        if not self.passes_on:
            safe, has_gap, self._has_gap = self.safe_end, self._has_gap, False
            error = super().take(data, begin, end)
            if has_gap:  # its text may have grown in an event that was left out
                self.safe_end = safe
            return error
        is_put_off = self._is_cumulative and is_unfinished(data, begin, end)
        # The engine may be lost after its last event, before its reply has ended.
        if is_put_off or self._pass_on(data, begin, end):
            self._has_gap |= len(self._unread) == _NUM_UNREAD
            self._unread = (*self._unread[1 - _NUM_UNREAD :], (data, begin, end))
            self._has_put_off = True
            return None
        self.read_all()
        return super().take(data, begin, end)

    def _pass_on(self, data: bytes, begin: int, end: int) -> bool:
        """Make the reply of the last event without parsing all of it, if that is possible."""
        if self.num_failovers or self.engine.is_translated:
            return False
        parts = split_event(data, begin, end)
        if parts is None:
            return False
        meta, num, first = parts.meta, parts.num_ids, self.first
        reason = meta.get("finish_reason")
        if not isinstance(reason, dict) or meta.get("completion_tokens") != num:
            return False
        kind = reason.get("type")
        if not isinstance(kind, str) or kind == "abort":
            return False
        if kind == "length" and reason.get("length") != num:
            return False
        if not meta.keys().isdisjoint(_ADDED) or (self.budget is not None and num > self.budget):
            return False
        for name in self.per_token:
            if (values := meta.get(name)) is not None and len(values) != num:
                return False
        try:
            self._check(parts)
        except UNUSABLE:  # it is parsed, and refused with the reason
            return False
        if first and any(first[name] != meta.get(name) for name in FROM_FIRST if name in first):
            return False
        span = {"version": meta.get("weight_version"), "start": 0, "end": num}
        spans = [span] if num else []
        kind = {"logprob_kind": self.logprob_kind} if self.wants_logprobs else {}
        self.passed_on = parts.with_meta(
            {"weight_versions": spans, "num_failovers": 0, "num_recomputed_tokens": 0, **kind},
            self.sent_as,
            self.rid,
        )
        self.finish = reason
        self._passed_version = span["version"] if num else None
        self.versions_sent = None, self._passed_version
        return True

    def _check(self, parts: EventParts) -> None:
        """Check the tokens of an event of one engine alone; raises as ``UNUSABLE`` has."""
        meta = parts.meta
        if parts.logprobs is not None:
            logprobs, named = parts.logprobs.flat()
            ids = named if parts.has_ids(named) else parts.ids
            check_ids(ids, self.vocabulary)
            check_tokens(ids, logprobs, named)
        else:
            check_ids(ids := parts.ids, self.vocabulary)
            if pairs := meta.get(PER_TOKEN[0]):
                check_pairs(ids, pairs)
        if self.wants_masks:
            check_masks(ids, meta.get(SAMPLING_MASK), self.vocabulary)
        check_versions(meta.get("weight_version"), None, len(ids))
        experts = meta.get("routed_experts")
        if experts is not None and ids and not self.raw.get("routed_experts_start_len"):
            check_experts(experts, meta["prompt_tokens"] + len(ids) - 1)

    def parsed(self, event: bytes) -> Payload:
        payload: Payload
        if len(event) < _LONG_OF_STREAM:
            payload = loads(event)
        else:
            self._lists = self._lists or GrowingLists()
            payload = self._lists.loads(event)
            self.num_same = self._lists.num_same
        return payload

    def read_all(self) -> None:
        events, self._unread = self._unread, ()
        for data, begin, end in events:
            safe = self.safe_end
            self.absorb(self.parsed(data[begin:end]))
            if self._has_gap:  # its text may have grown in an event that was not kept
                self.safe_end, self._has_gap = safe, False

    def absorb(self, event: Payload) -> None:
        before, ids = self.now.num, event.get("output_ids") or []
        if self._has_put_off:
            reported = (event.get("meta_info") or {}).get("completion_tokens", len(ids))
            if 0 < len(ids) < reported:
                raise ValueError(f"{len(ids)} ids for {reported} tokens, after events with all ids")
        self.engine.event(self, event)
        self._is_cumulative = before > 0 and len(ids) == self.now.num

    @property
    def end_versions(self) -> tuple[str, str] | None:
        if self.passed_on is None:
            return super().end_versions
        return self._passed_version and (self._passed_version, self._passed_version)

    @property
    def has_tokens_of_engine(self) -> bool:
        return bool(self._unread) or super().has_tokens_of_engine

    def lose_engine(self) -> str:
        with suppress(*UNUSABLE):  # what cannot be read is not kept
            self.read_all()
        why = super().lose_engine()
        self._is_cumulative = self._has_gap = self._has_put_off = False
        self._unread, self.passed_on = (), None
        return why

    @property
    def lacks_prompt_logprobs(self) -> bool:
        return not self.prompt_logprobs and wants_prompt_logprobs(self.raw)
