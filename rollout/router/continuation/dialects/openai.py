"""OpenAI's routes: ``/v1/completions`` and ``/v1/chat/completions``.

A completion continues from its token ids, which every engine streams on request.  Of a chat vLLM
alone does, so there it continues exactly, and the next engine's prompt must be that of the first
with the ids since then; otherwise the request fails.  SGLang has the ids of a chat in the last
chunk of a stream, so there a chat starts over while its client has nothing of it.

Of a request that cannot continue on another engine (tools, grammars, several completions) no reply
is read: it is forwarded as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from engines.http.reply_check import check_columns, check_ids, check_logprobs
from rollout.router.continuation.core import (
    Payload,
    finish_of,
    span_payloads,
    version_spans,
)
from rollout.router.continuation.dialects.sglang import may_be_ahead
from rollout.router.continuation.forms import (
    Form,
    has_forms,
    is_count,
    is_flag,
    is_object,
    is_positive,
    is_stop,
    or_none,
    read_object,
    token_ids_of,
)
from rollout.router.continuation.parameters import (
    CARRIED,
    NotCarried,
    is_forwarded,
    not_carried,
)
from rollout.router.continuation.reply import EngineDialect, Reply
from rollout.router.http.fast_json import dumps
from rollout.rules.continuation import Part, check_budget

_DEFAULT_TOKENS = 16  # OpenAI's default for /v1/completions
_NO_IDS = NotCarried("chat_without_ids", "not all engines name the token ids of a chat")
_REASONING = NotCarried("reasoning", "its reasoning is separated from its text")
# Switches that keep a stop string in the text.
_SGLANG_TRIM, _VLLM_TRIM = "no_stop_trim", "include_stop_str_in_output"
_FORMS = {
    "stream": is_flag,
    "stream_options": or_none(is_object),
    "stop": or_none(is_stop),
    "min_tokens": is_count,
    "no_stop_trim": is_flag,
    "continue_final_message": is_flag,
    "return_token_ids": is_flag,
}
_CHAT_FORMS = {
    **_FORMS,
    "max_tokens": or_none(is_positive),
    "max_completion_tokens": or_none(is_positive),
    "logprobs": is_flag,
}
_COMPLETION_FORMS = {
    **_FORMS,
    "max_tokens": is_positive,
    # SGLang ignores it here, and the embedded engine does not.
    "max_completion_tokens": lambda value: value is None,
    "logprobs": or_none(is_count),
}


# -- from the client ------------------------------------------------------------------------


def read_completion(body: bytes, interval: int, dialects: frozenset[str]) -> Reply | None:
    """The reply to a completion, or None if it cannot continue on another engine."""
    raw = read_object(body)
    if raw is None or not _can_be_continued(raw, _COMPLETION_FORMS):
        return None
    prompt = raw.get("prompt")
    if not isinstance(prompt, str) and token_ids_of(prompt) is None:
        return None
    column = "" if raw.get("logprobs") is None else "token_logprobs"
    budget, ids = raw.get("max_tokens", _DEFAULT_TOKENS), token_ids_of(prompt)
    return _reply_to(raw, budget, column, ids, not_carried(raw, dialects))


def read_chat(body: bytes, interval: int, dialects: frozenset[str]) -> Reply | None:
    """The reply to a chat, or None if it cannot continue on another engine, or not all engines give
    the ids that it wants."""
    raw = read_object(body)
    if raw is None or not _can_be_continued(raw, _CHAT_FORMS) or not _is_plain_chat(raw):
        return None
    has_ids = all(CHAT_ENGINES[dialect].gives_ids for dialect in dialects)
    if raw.get("return_token_ids") and not has_ids:
        return None
    why_not = _why_not(raw["messages"], raw, dialects) if has_ids else _NO_IDS
    budget = raw.get("max_completion_tokens") or raw.get("max_tokens")
    reply = _reply_to(raw, budget, "content" if raw.get("logprobs") else "", why_not=why_not)
    # SGLang streams no log-probs of tokens without text, and such a chat never continues.
    is_lossy = bool(raw.get("logprobs")) and not has_ids
    reply.wants_whole_reply = is_lossy and not reply.is_streamed
    return reply


def _reply_to(
    raw: Payload,
    budget: int | None,
    column: str,
    prompt: list[int] | None = None,
    why_not: NotCarried = CARRIED,
) -> Reply:
    return Reply(
        raw,
        prompt=prompt,
        budget=budget,
        min_tokens=raw.get("min_tokens"),
        stop=raw.get("stop"),
        # SGLang streams the beginning of a stop string before it trims it, so we trim.
        trims=bool(raw.get("stop")) and not raw.get("no_stop_trim"),
        column=column,
        why_not=why_not,
    )


def _why_not(messages: list[Payload], raw: Payload, dialects: frozenset[str]) -> NotCarried:
    """Why vLLM, which gives the ids of a chat, does not take or give them here."""
    if any(not isinstance(message.get("content"), str | None) for message in messages):
        return NotCarried("images", "it has images, which another engine gets with a whole chat")
    if raw.get("include_reasoning") is False:
        return _REASONING
    return not_carried(raw, dialects)


def _can_be_continued(raw: Payload, forms: Mapping[str, Form]) -> bool:
    """Whether another engine can continue a part of its completion."""
    if not has_forms(raw, forms):
        return False
    # With both we could not distinguish what to trim from what to keep.
    ends_in_two_ways = raw.get("stop_token_ids") or raw.get("skip_special_tokens") is False
    return not (is_forwarded(raw) or (raw.get("stop") and ends_in_two_ways))


def _is_plain_chat(raw: Payload) -> bool:
    """Whether its limits agree, and engines read its last message as its client means it."""
    limits = {raw.get("max_tokens"), raw.get("max_completion_tokens")} - {None}
    messages = raw.get("messages")
    if len(limits) > 1 or not isinstance(messages, list):
        return False
    if not messages or any(
        not isinstance(message, dict) or message.get("tools") for message in messages
    ):
        return False
    last = messages[-1]
    if last.get("role") != "assistant":
        return True
    # SGLang reads it as the user's, unless it has to continue it.
    return bool(raw.get("continue_final_message")) and isinstance(last.get("content"), str)


# -- to and from an engine ------------------------------------------------------------------


def _body_after(reply: Reply, trim: str) -> Payload:
    """What every body has; ``trim`` is the name of the switch that keeps stop strings."""
    raw = {**reply.raw, "stream": not reply.wants_whole_reply}
    options = raw.pop("stream_options", None) or {}
    if raw["stream"]:
        raw["stream_options"] = {**options, "include_usage": True, "continuous_usage_stats": True}
    if reply.trims:
        raw[trim] = True
    if trim is _VLLM_TRIM:
        reply.draw_on(raw, "seed")
    reply.lower_limits(raw, "max_tokens", "max_completion_tokens", least="min_tokens")
    return raw


def _completion_after(reply: Reply, trim: str) -> bytes:
    raw = _body_after(reply, trim)
    raw["return_token_ids"] = True
    if reply.base.num:
        raw["prompt"] = [*reply.prompt, *reply.base.ids]
    return dumps(raw)


def _sglang_chat_after(reply: Reply) -> bytes:
    raw = _body_after(reply, _SGLANG_TRIM)
    if reply.base.num:  # of vLLM, and SGLang serves here since then
        raw["input_ids"] = [*reply.prompt, *reply.base.ids]
    return dumps(raw)


def _vllm_chat_after(reply: Reply) -> bytes:
    raw = _body_after(reply, _VLLM_TRIM)
    if not reply.why_not:
        raw["return_token_ids"] = True
    if raw.get("continue_final_message"):
        raw["add_generation_prompt"] = False  # vLLM refuses both
    if reply.base.num:  # vLLM 0.32 takes these ids instead of the messages, without a connector too
        ids = {"prompt_token_ids": [*reply.prompt, *reply.base.ids]}
        raw["kv_transfer_params"] = {**(raw.get("kv_transfer_params") or {}), **ids}
    return dumps(raw)


def _event(reply: Reply, event: Payload, *, is_chat: bool) -> None:
    reply.head = reply.head or {
        "id": reply.own_id(event.get("id")),
        **{name: event.get(name) for name in ("created", "model")},
    }
    if event.get("usage"):
        reply.last = event["usage"]
        reply.first = reply.first or reply.last
        if is_chat and reply.is_finished:  # it counts tokens without text too
            _count(reply, is_chat=True)
    if event.get("prompt_token_ids") is not None:  # of a chat
        reply.add_prompt(list(event["prompt_token_ids"]))
    for choice in event.get("choices") or []:
        _take(reply, choice, is_chat=is_chat)


def _take(reply: Reply, choice: Payload, *, is_chat: bool) -> None:
    delta = choice.get("delta") or choice.get("message") or {}
    text = (delta.get("content") if is_chat else choice.get("text")) or ""
    if thought := delta.get("reasoning_content") or delta.get("reasoning"):  # vLLM's word
        if reply.base.num:
            raise ValueError("reasoning comes after text that was continued")
        reply.reasoning += thought
        reply.not_carried = _REASONING
    if choice.get("prompt_token_ids") is not None and reply.prompt is None:
        reply.prompt = list(choice["prompt_token_ids"])
    ids = choice.get("token_ids") or []
    columns = {
        name: values
        for name, values in (choice.get("logprobs") or {}).items()
        if isinstance(values, list)
    }
    if columns:
        check_logprobs(columns.get("token_logprobs", ()))
        check_logprobs([token.get("logprob") for token in columns.get("content", ())])
    if "text_offset" in columns:  # in the whole text; SGLang does not know it, and sends -1
        before = len(reply.base.text)
        columns["text_offset"] = [
            offset if offset < 0 else offset + before for offset in columns["text_offset"]
        ]
    check_ids(ids, reply.vocabulary)
    reply.add(text, ids, columns)
    _count(reply, is_chat=is_chat)
    _check_logprobs_of_ids(reply, is_chat=is_chat, is_end=bool(choice.get("finish_reason")))
    finish: Payload | None = None
    if kind := choice.get("finish_reason"):
        matched = choice.get("matched_stop", choice.get("stop_reason"))  # vLLM's word
        finish = {"type": finish_of(kind), "matched": matched}
        if is_chat and reply.base.num and reply.raw.get("return_token_ids"):
            _check_ids(reply.now)
        if reply.trims:
            reply.trim(matched)
    if finish or text or ids or any(columns.values()):
        # Of several tokens the last may have no text so far.
        has_grown = bool(text or reply.reasoning) and len(ids) <= 1
        within = is_chat and _ends_within_character(reply.now.columns.get("content", []))
        is_sglang = reply.engine is COMPLETION_ENGINES["sglang"]
        is_ahead = is_sglang and may_be_ahead(text)
        reply.settle(finish, new=text, has_grown=has_grown and not within and not is_ahead)


def _check_logprobs_of_ids(reply: Reply, *, is_chat: bool, is_end: bool) -> None:
    """Check that each token has a log-prob, where the engine gives the ids of all.

    Of a chat an engine may hold back a token with its log-prob until the text is complete.
    """
    ids, column = reply.now.ids, reply.column
    logprobs = reply.now.columns.get(column, ())
    is_whole = is_end or (bool(logprobs) and not is_chat)
    if ids and column and is_whole and reply.engine.gives_ids:
        check_columns({column: logprobs}, len(ids))


def _count(reply: Reply, *, is_chat: bool) -> None:
    """Count the tokens of this engine: of a chat some may come without their ids."""
    now = reply.now
    if is_chat:
        now.num = max(len(now.ids), reply.last.get("completion_tokens") or 0)
        check_budget(reply.num, reply.budget)
    now.spans = version_spans((), str(reply.version), now.num)


def _check_ids(now: Part) -> None:
    if len(now.ids) != now.num:
        raise ValueError(f"{len(now.ids)} token ids for {now.num} tokens")


def _ends_within_character(entries: list[Payload]) -> bool:
    """Whether the last log-prob of a chat is of a token without text."""
    return len(entries) > 0 and (entries[-1].get("token") or "\ufffd").endswith("\ufffd")


_completion_event = partial(_event, is_chat=False)
_chat_event = partial(_event, is_chat=True)
COMPLETION_ENGINES: Mapping[str, EngineDialect] = {
    "sglang": EngineDialect(partial(_completion_after, trim=_SGLANG_TRIM), _completion_event),
    "vllm": EngineDialect(partial(_completion_after, trim=_VLLM_TRIM), _completion_event),
}
CHAT_ENGINES: Mapping[str, EngineDialect] = {
    "sglang": EngineDialect(_sglang_chat_after, _chat_event, gives_ids=False),
    "vllm": EngineDialect(_vllm_chat_after, _chat_event),
}


# -- to the client --------------------------------------------------------------------------


def completion_chunks(reply: Reply) -> list[Payload]:
    """What is new of a completion."""
    is_first, new = not reply.has_shown, reply.show_new()
    chunks: list[Payload] = []
    if new.text or new.ids or any(new.columns.values()):
        choice = {"text": new.text, **_of_tokens(reply, new)}
        if "token_ids" in choice and is_first:
            choice["prompt_token_ids"] = reply.prompt
        chunks.append(_completion_chunk(reply, choice))
    return chunks + _end(reply, {"text": ""}, _completion_chunk)


def chat_chunks(reply: Reply) -> list[Payload]:
    """What is new of a chat."""
    chunks: list[Payload] = []
    if not reply.has_begun:
        reply.has_begun = True
        begun = _chat_chunk(reply, {"delta": {"role": "assistant", "content": ""}})
        chunks.append(begun | _prompt_of_chat(reply))
    if thought := reply.show_reasoning():
        chunks.append(_chat_chunk(reply, {"delta": {"reasoning_content": thought}}))
    new = reply.show_new()
    if new.text or new.ids or any(new.columns.values()):
        choice = {"delta": {"content": new.text}, **_of_tokens(reply, new)}
        chunks.append(_chat_chunk(reply, choice))
    return chunks + _end(reply, {"delta": {}}, _chat_chunk)


def _end(reply: Reply, empty: Payload, chunk: Any) -> list[Payload]:
    """The last chunks, if the reply has ended."""
    if not reply.is_finished:
        return []
    chunks = [chunk(reply, {**empty, **_finish(reply)}) | {"metadata": _metadata(reply)}]
    if (reply.raw.get("stream_options") or {}).get("include_usage"):
        chunks.append({**chunk(reply, None), "usage": _usage(reply)})
    return chunks


def _chunk(reply: Reply, choice: Payload | None, *, kind: str) -> Payload:
    rest = {"index": 0, "logprobs": None, "finish_reason": None}
    choices = [] if choice is None else [{**rest, **choice}]
    return {**reply.head, "object": kind, "choices": choices}


_completion_chunk = partial(_chunk, kind="text_completion")
_chat_chunk = partial(_chunk, kind="chat.completion.chunk")


def whole_completion(reply: Reply) -> Payload:
    whole = reply.all()
    choice = {"index": 0, "text": whole.text, **_of_tokens(reply, whole), **_finish(reply)}
    if reply.raw.get("return_token_ids"):
        choice["prompt_token_ids"] = reply.prompt
    return _whole(reply, choice, "text_completion")


def whole_chat(reply: Reply) -> Payload:
    whole = reply.all()
    message = {
        "content": whole.text,
        "role": "assistant",
        "reasoning_content": reply.reasoning or None,
    }
    choice = {"index": 0, "message": message, **_of_tokens(reply, whole), **_finish(reply)}
    return _whole(reply, choice, "chat.completion") | _prompt_of_chat(reply)


def _whole(reply: Reply, choice: Payload, kind: str) -> Payload:
    return {
        **reply.head,
        "object": kind,
        "choices": [choice],
        "usage": _usage(reply),
        "metadata": _metadata(reply),
    }


def _of_tokens(reply: Reply, part: Part) -> Payload:
    wanted = reply.raw.get("logprobs")
    has_logprobs = wanted is not None and wanted is not False
    fields: Payload = {"logprobs": part.columns if has_logprobs else None}
    return {"token_ids": part.ids, **fields} if reply.raw.get("return_token_ids") else fields


def _finish(reply: Reply) -> Payload:
    finish = reply.finish or {}
    return {"finish_reason": finish.get("type"), "matched_stop": finish.get("matched")}


def _prompt_of_chat(reply: Reply) -> Payload:
    return {"prompt_token_ids": reply.prompt} if reply.raw.get("return_token_ids") else {}


def _metadata(reply: Reply) -> Payload:
    message = (reply.finish or {}).get("message")
    return ({"abort_message": message} if message else {}) | {
        "weight_version": str(reply.version),
        "weight_versions": span_payloads(reply.all().spans),
        "num_failovers": reply.num_failovers,
        "num_recomputed_tokens": reply.num_recomputed,
    }


def _usage(reply: Reply) -> Payload:
    done = reply.num
    prompt = reply.first.get("prompt_tokens") or 0
    counts = {"prompt_tokens": prompt, "completion_tokens": done, "total_tokens": prompt + done}
    return {**reply.last, **counts}
