"""Prefill and decode engines: one request goes to both, and they connect to each other.

Both get the body with the same bootstrap fields; the decode engine fetches the prompt's KV from
the prefill engine and sends the reply.  The field names are those of SGLang
0.5.23 (``GenerateReqInput`` and its OpenAI protocol); its own router sets them the same way.
Only the prefill engine knows the log-probs of the prompt: a request for them gets them from its
reply, before those that the decode engine reports (none, in that version).  Other results of the
prompt are refused.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rollout.router.continuation.core import UNUSABLE
from rollout.router.http.engine_connection import SentRequest
from rollout.router.http.fast_json import loads
from rollout.router.http.head_cache import ReplyHead
from rollout.router.http.request import find_field
from rollout.rules.routing import Backend

PromptLogprobs = Mapping[str, list[Any]]
"""Log-probs of a prompt's tokens, by their field names in ``/generate``."""

PROMPT_LOGPROBS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")


def bootstrap_fields(prefill: Backend) -> dict[str, str | int]:
    """The address at which the two connect; the room is new for every attempt."""
    return {
        "bootstrap_host": prefill.endpoint.host,
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": secrets.randbelow(1 << 63),
    }


def why_not_together(body: bytes) -> str:
    """Why no pair can answer a request.

    The decode engine reports routed experts and echoed log-probs of prompt tokens that only the
    prefill engine computed: those at the same places of an earlier request.
    """
    if find_field(body, "return_routed_experts")[1]:
        what = "return_routed_experts"
    elif find_field(body, "echo")[1] and find_field(body, "logprobs")[1] is not None:
        what = "echo with logprobs"
    else:
        return ""
    return (
        f"{what}: prefill and decode engines answer this request together, and only the prefill "
        "engine computes the prompt; ask a server whose groups have regular engines"
    )


def read_prompt_logprobs(reply: bytes) -> PromptLogprobs:
    """The prompt's log-probs in a prefill engine's reply, complete or streamed.

    Raises:
        ValueError: there are none.
    """
    for line in reversed(reply.splitlines()):
        text = line.removeprefix(b"data:").strip()
        if not text or text == b"[DONE]":
            continue
        meta = loads(text).get("meta_info") or {}
        if found := {name: meta[name] for name in PROMPT_LOGPROBS if meta.get(name) is not None}:
            return found
    raise ValueError("the reply has no log-probs of the prompt")


class Prompt(NamedTuple):
    """The prefill engine has sent the log-probs of the prompt."""

    logprobs: PromptLogprobs


class Lost(NamedTuple):
    """The prefill engine is lost, as ``ReplyHandler.on_engine_lost`` says it."""

    why: str
    was_sent: bool


class NoConnection(NamedTuple):
    """This process cannot open another connection."""

    why: str


class NoPrompt(NamedTuple):
    """The prefill engine's reply has no log-probs of the prompt, though they are wanted."""

    why: str


PrefillEvent = Prompt | Lost | NoConnection | NoPrompt


class PrefillReply:
    """Takes the prefill engine's reply, of which at most the prompt's log-probs are used.

    Args:
        handle: takes what happens.
        on_router_error: takes an error of the router's own.
        wants_prompt: the log-probs of the prompt are used.
    """

    def __init__(
        self,
        handle: Callable[[PrefillEvent], None],
        on_router_error: Callable[[BaseException], None],
        *,
        wants_prompt: bool,
    ) -> None:
        self.upstream: SentRequest | None = None
        self.is_decoding = wants_prompt
        self.on_router_error = on_router_error
        self._handle = handle
        self._parts: list[bytes] = []

    def drop(self) -> None:
        if self.upstream is not None:
            self.upstream.drop()
            self.upstream = None

    def on_reply(self, head: ReplyHead, length: bytes, unread: bytes, is_alone: bool) -> None:
        """Ignored: the response is the decode engine's."""

    def on_reply_data(self, data: bytes, is_end: bool) -> None:
        if not self.is_decoding:
            return
        self._parts.append(data)
        if is_end:
            self._handle(_read_prompt(b"".join(self._parts)))

    def on_engine_lost(self, why: str, *, was_sent: bool = True) -> None:
        self._handle(Lost(why, was_sent))

    def on_no_connection(self, why: str) -> None:
        self._handle(NoConnection(why))

    def may_reconnect(self) -> bool:
        return False


def _read_prompt(reply: bytes) -> Prompt | NoPrompt:
    try:
        return Prompt(read_prompt_logprobs(reply))
    except UNUSABLE:  # such as a refusal of this request
        return NoPrompt(f"sent no log-probs of the prompt: {reply[:200].decode('latin-1')}")
