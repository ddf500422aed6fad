"""Which requests have their replies read as tokens, and by what (pure)."""

from __future__ import annotations

from rollout.router.continuation.dialects.table import served
from rollout.router.continuation.forwarded_reply import ForwardedReply
from rollout.router.continuation.named_weights import NamedWeights
from rollout.router.http import responses
from rollout.router.http.fast_json import loads
from rollout.router.http.head_cache import RequestHead
from rollout.router.http.request import may_want_prompt_logprobs
from rollout.router.proxy.context import Proxy
from rollout.router.proxy.token_reader import TokenReader

_FAIL_OVER = b"x-token-failover"
_LACKING = (
    "not all engines that serve here have %s; send /generate, which engines of both kinds take"
)
_UNREAD = (
    "vLLM engines take /generate with one prompt and n=1, fields of the documented types, and a "
    "body of at most router.max_read_bytes"
)


def read_tokens(
    proxy: Proxy, head: RequestHead, body: bytes
) -> TokenReader | responses.RouterResponse | None:
    """The reader of this request's replies; None if they are passed on as they are.

    Returns:
        The error response instead, where the engines that serve here cannot take the request.
    """
    config, members = proxy.config, proxy.gate.members
    if (where := served(head.route.path, members.dialects)) is None:
        return None
    if where.is_lacking:
        return responses.error(404, "not_found", _LACKING % head.route.path)
    is_asked = config.token_failover == "asked" and _FAIL_OVER in head.switched_on
    is_kept = where.is_translated or config.token_failover == "on" or is_asked
    if not is_kept and not (members.prefill.members and may_want_prompt_logprobs(body)):
        return None
    reply = None
    if len(body) <= config.max_read_bytes:
        reply = where.route.reply(body, config.failover_interval, members.dialects)
    if where.is_translated:
        why = _UNREAD if reply is None else reply.why_not_taken(members.dialects)
        if why:
            return responses.error(400, "bad_request", why)
    if reply is None or not (is_kept or reply.lacks_prompt_logprobs):
        return None
    reply.decode = proxy.decode
    return TokenReader(reply)


def read_forwarded(body: bytes) -> TokenReader:
    """The reader of replies that are not continued, for a client in this process."""
    is_streamed = bool(loads(body).get("stream"))
    return TokenReader(ForwardedReply(body, is_streamed=is_streamed))


def read_for_base(tokens: TokenReader | None, body: bytes, named: NamedWeights) -> TokenReader:
    """The reader of replies of the base under an adapter, which get the base's version.

    Args:
        tokens: the reader of this request's tokens, if they are read anyway.
    """
    if tokens is None:
        tokens = TokenReader(ForwardedReply(body, is_streamed=named.is_streamed))
    tokens.named = named
    return tokens
