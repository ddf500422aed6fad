"""``/generate``: its events have all tokens so far, or only the new ones.

Routed experts come from the engine that computed the token.  Where the lost engine did not report
them with its tokens (SGLang sends them at the end only), the request starts over.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from engines.http.reply_check import (
    SAMPLING_MASK,
    check_columns,
    check_experts,
    check_ids,
    check_masks,
    check_pairs,
    check_versions,
)
from rollout.router.continuation.core import (
    Payload,
    RefusedByEngine,
    span_payloads,
    version_spans,
)
from rollout.router.continuation.fast_path import (
    FROM_FIRST,
    OF_MASKS,
    PER_TOKEN,
    FastReply,
    GrownList,
    PromptIds,
    read_fields,
    split_body,
)
from rollout.router.continuation.forms import (
    has_forms,
    is_count,
    is_flag,
    is_object,
    is_stop,
    or_none,
    read_object,
    token_ids_of,
)
from rollout.router.continuation.parameters import NotCarried, is_forwarded, not_carried
from rollout.router.continuation.reply import EngineDialect, Reply
from rollout.router.http.fast_json import dumps
from rollout.rules.continuation import Part, check_budget

_DEFAULT_BUDGET = 128
# An engine's event has all tokens so far, so sending every event costs the square of their number.
_MAX_EVENTS = 64
# Requests of training differ in their token ids and their own id only.
_NUM_FORMS = 64
_MAX_FORM_BYTES = 4096
_UNLIMITED = 1 << 16
_READ = frozenset({"text", "output_ids", "meta_info"})
# SGLang's scheduler refuses some requests, on a stream as an abort.
_BAD_REQUEST = 400
_NUM_MASKS = "output_token_sampling_mask_length"
# What ``find_printable_text`` of SGLang 0.5.23 takes for Chinese.
_CHINESE = re.compile(
    "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002f800-\U0002fa1f]"
)
_FIRST_CHINESE = "\u3400"
_FORMS = {
    "sampling_params": or_none(is_object),
    "stream": is_flag,
    "return_logprob": or_none(is_flag),
    "logprob_start_len": or_none(lambda value: value == -1 or is_count(value)),
}
_SAMPLING_FORMS = {
    "n": lambda value: value == 1,
    "max_new_tokens": or_none(is_count),
    "min_new_tokens": or_none(is_count),
    "stop": or_none(is_stop),
}


# -- from the client ------------------------------------------------------------------------


def read(body: bytes, interval: int, dialects: frozenset[str]) -> FastReply | None:
    """The reply to a body, or None if it requests more than one completion."""
    if (parts := split_body(body)) is not None:
        is_short = len(parts.fields) <= _MAX_FORM_BYTES
        read_form = _read_form if is_short else _read_form.__wrapped__
        if (form := read_form(parts.fields, interval, dialects)) is not None:
            return form.of_request(parts)
    raw = read_object(body)
    if raw is None:
        return None
    ids = token_ids_of(raw.get("input_ids"))
    if ids is not None:
        del raw["input_ids"]
    return _reply_to(raw, None if ids is None else PromptIds.of(ids), interval, dialects)


@lru_cache(_NUM_FORMS)
def _read_form(fields: bytes, interval: int, dialects: frozenset[str]) -> FastReply | None:
    raw = read_fields(fields)
    return None if raw is None else _reply_to(raw, PromptIds(b""), interval, dialects)


def _reply_to(
    raw: Payload, prompt: PromptIds | None, interval: int, dialects: frozenset[str]
) -> FastReply | None:
    if not has_forms(raw, _FORMS):
        return None
    sampling = raw.get("sampling_params") or {}
    # SGLang refuses some on a stream, as which the router sends the request.
    if is_forwarded(sampling, on_generate=True) or is_forwarded(raw, on_generate=True):
        return None
    if not has_forms(sampling, _SAMPLING_FORMS):
        return None
    text = raw.get("text")
    has_prompt = isinstance(text, str) if prompt is None else text is None
    if not has_prompt or raw.get("input_ids") is not None:
        return None
    budget = sampling.get("max_new_tokens", _DEFAULT_BUDGET)
    reply = FastReply(
        raw,
        prompt=prompt,
        budget=budget,
        min_tokens=sampling.get("min_new_tokens"),
        stop=sampling.get("stop"),
        column="output_token_logprobs" if raw.get("return_logprob") else "",
        why_not=_why_not(raw, sampling, dialects, has_ids=prompt is not None),
    )
    if reply.wants_masks:
        reply.per_token = PER_TOKEN + OF_MASKS
    reply.passes_on = not reply.is_streamed and not reply.lacks_prompt_logprobs
    if not reply.is_streamed:
        interval = max(interval, (_UNLIMITED if budget is None else budget) // _MAX_EVENTS)
    sampling = {**sampling, "stream_interval": interval}
    reply.raw = {**raw, "stream": True, "sampling_params": sampling}
    reply.fields, reply.kinds = dumps(reply.raw), {}
    return reply


def _why_not(
    raw: Payload, sampling: Payload, dialects: frozenset[str], *, has_ids: bool
) -> NotCarried:
    if not has_ids:
        return NotCarried("prompt_unknown", "its prompt is text, whose token ids are not known")
    found = not_carried(sampling, dialects, is_sampling=True)
    return found if found.why else not_carried(raw, dialects)


def may_be_ahead(text: str) -> bool:
    """Whether SGLang may have shown it before it is complete: as a text that ends with a Chinese
    character, which it shows though the next one is incomplete."""
    last = text[-1:]
    return last >= _FIRST_CHINESE and _CHINESE.match(last) is not None


# -- to and from an engine ------------------------------------------------------------------


def fields_after(reply: Reply) -> Payload:
    """The fields of the next body except its token ids."""
    raw = reply.raw
    if not reply.base.num:
        return raw
    sampling = dict(raw["sampling_params"])
    reply.lower_limits(sampling, "max_new_tokens", least="min_new_tokens")
    starts = {"logprob_start_len": -1} if raw.get("logprob_start_len") is not None else {}
    return {**raw, **starts, "sampling_params": sampling}


def _body_after(reply: Reply) -> bytes:
    assert isinstance(reply, FastReply)
    reply.trims = False
    fields = dumps(fields_after(reply)) if reply.base.num else reply.fields
    return fields if reply.prompt is None else reply.prompt.in_body(fields, reply.base.ids)


def _event(reply: Reply, event: Payload) -> None:
    assert isinstance(reply, FastReply)
    num_same, reply.num_same = reply.num_same, 0
    meta: Payload = event.get("meta_info") or {}
    ids = list(event.get("output_ids") or [])
    reported = meta.get("completion_tokens", len(ids))
    before = reply.now
    columns = {
        name: values if type(values) is GrownList else list(values)
        for name in reply.per_token
        if (values := meta.get(name)) is not None
    }
    now = Part(event.get("text") or "", len(ids), ids, columns)
    is_only_new = len(before.ids) > 0 and 0 < len(ids) < reported == len(before.ids) + len(ids)
    if is_only_new:
        now.text, now.ids = before.text + now.text, before.ids + ids
        now.num = len(now.ids)
        for name, values in columns.items():
            if len(values) < now.num:
                columns[name] = before.columns.get(name, []) + values
    if reply.wants_masks and meta.get(SAMPLING_MASK) is None and before.num == now.num:
        # SGLang 0.5.23 leaves them out where it aborts.
        columns |= {name: before.columns[name] for name in OF_MASKS if name in before.columns}
    check_columns(columns, now.num)
    logprobs = columns.get(PER_TOKEN[0])
    if logprobs and type(logprobs) is not GrownList:
        num_same = 0
    # What stands as it did in the event before was checked with that.
    begin = before.num if is_only_new else min(before.num, num_same)
    finish = meta.get("finish_reason") or None
    if finish is not None and finish.get("status_code") == _BAD_REQUEST and not now.num:
        raise RefusedByEngine(str(finish.get("message")))
    new = now.ids[begin:] if begin else now.ids
    check_ids(new, reply.vocabulary)
    if logprobs or (finish is not None and reply.wants_logprobs):
        check_pairs(new, _since(logprobs or [], begin))
    masks = columns.get(SAMPLING_MASK)
    if reply.wants_masks and (
        masks is not None or (finish or {}).get("type") not in (None, "abort")
    ):
        check_masks(new, (masks or [])[begin:], reply.vocabulary)
    version, reported_spans = meta.get("weight_version"), meta.get("weight_versions")
    check_versions(version, reported_spans, now.num)
    now.spans = version_spans(reported_spans, version, now.num)
    reply.versions_sent = reported_spans, version
    check_budget(reply.base.num + now.num, reply.budget)
    # SGLang decodes so many tokens together, or joins several events in one.
    most = reply.raw["sampling_params"]["stream_interval"]
    has_grown = len(now.text) > len(before.text) and now.num - before.num <= most
    has_grown = (has_grown and not may_be_ahead(now.text)) or finish is not None
    reply.now, reply.last, reply.first = now, meta, reply.first or meta
    is_plain = event.keys() <= _READ
    reply.head = {} if is_plain else {name: event[name] for name in event if name not in _READ}
    reply.reported_experts = experts = meta.get("routed_experts")
    if experts is not None and now.num and not reply.raw.get("routed_experts_start_len"):
        num_prompt = len(reply.prompt) if reply.prompt is not None else meta["prompt_tokens"]
        check_experts(experts, num_prompt + reply.base.num + now.num - 1)
    reply.has_text = event.get("text") is not None  # else the engine has no tokenizer
    reply.settle(finish, new="", has_grown=has_grown)


def _since(values: GrownList | list[Any], begin: int) -> Sequence[Any]:
    return values.since(begin) if type(values) is GrownList else values[begin:]


ENGINE = EngineDialect(_body_after, _event)


# -- to the client --------------------------------------------------------------------------


def chunks(reply: Reply) -> list[Payload]:
    """One event; like SGLang's, it has everything so far."""
    return [_payload(reply, reply.show_all())]


def whole(reply: Reply) -> Payload:
    return _payload(reply, reply.all())


def _payload(reply: Reply, part: Part) -> Payload:
    first, last, finish = reply.first, reply.last, reply.finish
    meta = {**last, **{name: first[name] for name in FROM_FIRST if name in first}}
    if not last:  # an abort came before the current engine's first event
        meta |= {"id": reply.rid, "weight_version": str(reply.version)}
    if "id" in meta:
        meta["id"] = reply.own_id(meta["id"])
    meta["completion_tokens"] = len(part.ids)
    meta["finish_reason"] = finish
    if finish is not None and finish.get("type") == "length":
        meta["finish_reason"] = {**finish, "length": len(part.ids)}
    meta["weight_versions"] = span_payloads(part.spans)
    meta.update(part.columns)
    if _NUM_MASKS in meta:
        meta[_NUM_MASKS] = len(meta.get(SAMPLING_MASK) or ())
    if reply.is_finished or "routed_experts" in last:
        num = reply.num_computed(len(reply.now.ids))
        experts = reply.experts.whole(reply.reported_experts, num)
        meta |= {"routed_experts": experts} if experts else {}
    for name, values in reply.prompt_logprobs.items():
        meta[name] = [*values, *(meta.get(name) or [])]
    if reply.wants_logprobs:
        meta["logprob_kind"] = reply.logprob_kind
    meta["num_failovers"] = reply.num_failovers
    meta["num_recomputed_tokens"] = reply.num_recomputed
    return {**reply.head, "text": part.text, "output_ids": part.ids, "meta_info": meta}
