"""What is read of a request, and which requests have their replies read as tokens (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from engines.protocol.logprob_kind import LogprobKind, LogprobRule
from rollout.router.continuation.body_names import names_in, outline_of
from rollout.router.continuation.contracts import (
    NOT_GIVEN,
    Texts,
    read_contract,
)
from rollout.router.continuation.dialects.table import ROUTES, served
from rollout.router.continuation.fast_path import PromptIds
from rollout.router.continuation.fatal_values import BOUNDED, why_fatal
from rollout.router.continuation.forms import read_object
from rollout.router.continuation.forwarded_reply import ForwardedReply
from rollout.router.continuation.named_weights import NOT_NAMED, NamedWeights, read_named
from rollout.router.continuation.reply import Reply
from rollout.router.http.fast_json import JsonText, dumps, loads
from rollout.router.http.head_cache import RequestHead
from rollout.router.http.request import (
    FOUND_NAMES,
    BodyFields,
    find_field,
    in_utf8,
    may_want_prompt_logprobs,
    read_fields,
)
from rollout.router.http.routes import KEYED_PATHS
from rollout.router.proxy.context import Proxy
from rollout.router.proxy.token_reader import TokenReader
from rollout.rules.contract import FIELDS, NO_CONTRACT, Contract

WITH_BODY = (b"POST", b"PUT")
FAILOVER_INTERVAL = 32
"""Tokens between two saved states of a request that can fail over; the tokens since the last one
are generated again.  It is longer for a long request that is not streamed: its state is saved at
most 64 times."""
_LONG = 1 << 16
_FIELDS = frozenset(field.encode() for field in FIELDS)
_STOP_IDS = b"stop_token_ids"
_LACKING = (
    "not all engines that serve here have %s; send /generate, which engines of both kinds take"
)
_UNREAD = (
    "vLLM engines take /generate with one prompt and n=1, fields of the documented types, and a "
    "body of at most router.max_read_bytes"
)
_NO_MASKS = (
    "return_sampling_mask: an engine that serves here returns none; embedded engines do, SGLang "
    "from 0.5.23 on, and vLLM from 0.32 on with return-sampling-mask: true in its options (on GPUs)"
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the router reads of the bodies on one route, by its settings and engines.

    Attributes:
        is_lacking: some engines do not have the route.
        is_translated: some of them get other bodies than the client's.
        is_kept: tokens are kept; without it, only log-probs of the prompt are.
        names_weights: a body may name its weights.
        max_bytes: a longer body is not read.
        vocabulary: tokens of the engines' model; 0 if they are not known.
        lacks_masks: one of them returns no sampling masks.
    """

    path: str
    dialects: frozenset[str] = frozenset()
    interval: int = 1
    is_generating: bool = False
    is_lacking: bool = False
    is_translated: bool = False
    is_kept: bool = False
    has_prefill: bool = False
    names_weights: bool = False
    max_bytes: int = 0
    vocabulary: int = 0
    lacks_masks: bool = False


class ReadBody(NamedTuple):
    """What was read of a body.

    Attributes:
        reply: its reply's tokens are read; None: it is passed on as it is.
        why_not: why the engines that serve here cannot take it.
        fields: of the router, which it has or needs.
        contract: what its tokens have to fulfil.
        is_stream_checked: its reply is not read as tokens, and its versions are checked; whether
            it is a stream.  None: it is passed on as it is.
    """

    named: NamedWeights
    reply: Reply | None
    why_not: str
    fields: BodyFields
    lacks_route: bool = False
    contract: Contract = NO_CONTRACT
    is_stream_checked: bool | None = None


def wanted_of(proxy: Proxy, head: RequestHead) -> Wanted:
    """What is read of the body of a request."""
    config, gate = proxy.config, proxy.gate
    keeps = config.token_failover
    return _wanted(
        head.route.path,
        gate.members.dialects,
        FAILOVER_INTERVAL,
        config.max_read_bytes,
        gate.adapters is not None and head.method in WITH_BODY,
        keeps == "on" or (keeps == "asked" and head.asks_failover),
        bool(gate.members.prefill.members),
        gate.members.vocabulary,
        gate.members.lacks_masks,
    )


@lru_cache(256)  # asked for each request, of few settings
def _wanted(
    path: str,
    dialects: frozenset[str],
    interval: int,
    max_bytes: int,
    names_weights: bool,
    is_asked: bool,
    has_prefill: bool,
    vocabulary: int,
    lacks_masks: bool,
) -> Wanted:
    where = served(path, dialects)
    if where is None:
        return Wanted(path, names_weights=names_weights, max_bytes=max_bytes)
    return Wanted(
        path,
        dialects,
        interval,
        is_generating=True,
        is_lacking=where.is_lacking,
        is_translated=where.is_translated,
        is_kept=where.is_translated or is_asked,
        has_prefill=has_prefill,
        names_weights=names_weights,
        max_bytes=max_bytes,
        vocabulary=vocabulary,
        lacks_masks=lacks_masks,
    )


def read_body(wanted: Wanted, body: bytes, *, is_post: bool = True, texts: Texts = ()) -> ReadBody:
    """Read a body.

    Args:
        texts: fields of the contract that are headers.
    """
    named, found = NOT_NAMED if is_post else NamedWeights(), NOT_GIVEN
    text = in_utf8(body) if is_post and wanted.path in KEYED_PATHS else body
    outline = outline_of(text)
    names = names_in(outline)
    if texts or not names.isdisjoint(_FIELDS):
        found = read_contract(wanted.path, texts, text, wanted.max_bytes)
    changed = None if text is body else text
    if found.body is not None:
        changed = body = text = found.body
    if wanted.names_weights:
        named = read_named(wanted.path, body, wanted.max_bytes)
    why_not, contract, reply, is_stream = found.problem, found.contract, None, None
    if wanted.is_generating and not (why_not or names.isdisjoint(BOUNDED)):
        # The outline may lack a long list of such ids.
        why_not = why_fatal(text if _STOP_IDS in names else outline, wanted.vocabulary)
    is_checked = contract is not NO_CONTRACT and contract.has_versions
    if not (named.problem or why_not):
        reply, why_not = _read_reply(wanted, body, is_checked=is_checked)
        if is_checked and reply is None and not why_not:
            is_stream, why_not = _read_stream(contract, body)
    if is_post:
        fields = read_fields(wanted.path, text, changed=changed, names=names)
    else:
        fields = BodyFields(changed, names=names)
    lacks_route = wanted.is_lacking and not found.problem
    return ReadBody(named, reply, why_not, fields, lacks_route, contract, is_stream)


def _read_stream(contract: Contract, body: bytes) -> tuple[bool | None, str]:
    """Whether the reply to a body that is not read as tokens is a stream; or why it cannot be
    checked."""
    raw = read_object(body)
    if raw is None:
        return None, f"{contract.words}: the body is no JSON object that the router can read"
    return bool(raw.get("stream")), ""


def _read_reply(wanted: Wanted, body: bytes, *, is_checked: bool) -> tuple[Reply | None, str]:
    """The reply, if it is read as tokens; ``is_checked``: for the versions of these."""
    if not wanted.is_generating:
        return None, ""
    if wanted.is_lacking:
        return None, _LACKING % wanted.path
    is_kept = wanted.is_kept or is_checked
    if not is_kept and not (wanted.has_prefill and may_want_prompt_logprobs(body)):
        return None, ""
    reply = None
    if len(body) <= wanted.max_bytes:
        reply = ROUTES[wanted.path].reply(body, wanted.interval, wanted.dialects)
    if wanted.is_translated and (
        why := _UNREAD if reply is None else reply.why_not_taken(wanted.dialects)
    ):
        return None, why
    if reply is not None and reply.wants_masks and wanted.lacks_masks:
        return None, _NO_MASKS
    has_reader = reply is not None and (is_kept or reply.lacks_prompt_logprobs)
    return (reply if has_reader else None), ""


def read_long_body(wanted: Wanted, body: bytes, is_post: bool, texts: Texts = ()) -> ReadBody:
    """The same in another process: what is long in it stays JSON, and is not made again here."""
    read = read_body(wanted, body, is_post=is_post, texts=texts)
    if read.reply is not None:
        raw, prompt = read.reply.raw, read.reply.prompt
        read.reply.raw = {name: _shortened(value) for name, value in raw.items()}
        if isinstance(prompt, list):
            read.reply.prompt = PromptIds.of(prompt)
        del read.reply.route
    whole = body if read.fields.body is None else read.fields.body
    fields = read.fields._replace(keys={name: find_field(whole, name) for name in FOUND_NAMES})
    return read._replace(fields=fields)


def _shortened(value: Any) -> Any:
    if not isinstance(value, str | list) or len(text := dumps(value)) < _LONG:
        return value
    return JsonText(text)


def read_checked(body: bytes, *, is_streamed: bool) -> TokenReader:
    """The reader of replies that are not continued, whose weight versions are checked."""
    return TokenReader(ForwardedReply(body, is_streamed=is_streamed))


def read_for_adapter(body: bytes, named: NamedWeights) -> TokenReader:
    """The reader of replies of adapters, which get the versions of those."""
    return TokenReader(ForwardedReply(body, is_streamed=named.is_streamed))


def kind_of_unread(
    path: str,
    body: bytes,
    rule: LogprobRule,
    max_bytes: int,
    names: frozenset[bytes] | None = None,
) -> LogprobKind | None:
    """The kind of an engine's log-probs for a body that is passed on as it is.

    It is parsed only if it has a sampling parameter on which the kind depends.

    Args:
        names: that the body has, if it was searched.

    Returns:
        None if the body says nothing of it, or has over ``max_bytes`` and would have to be parsed.
    """
    if path not in ROUTES:
        return None
    deciding, neutral = _undecided(path, rule)
    if deciding.isdisjoint(names_in(outline_of(body)) if names is None else names):
        return neutral
    try:
        raw = loads(body) if len(body) <= max_bytes else None
    except ValueError:  # the engine refuses it
        return None
    return ROUTES[path].kind_of(raw, rule) if isinstance(raw, dict) else None


@lru_cache(64)
def _undecided(path: str, rule: LogprobRule) -> tuple[frozenset[bytes], LogprobKind | None]:
    """What a body has that decides on the kind, and the kind where it has nothing of that."""
    names = frozenset(name.encode() for name in rule.names)
    return names, ROUTES[path].kind_of({}, rule)
