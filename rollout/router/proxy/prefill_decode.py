"""Prefill and decode engines: one request goes to both, and they connect to each other.

Both get the body with the same bootstrap fields; the decode engine fetches the prompt's KV from
the prefill engine and sends the reply.  The field names are those of SGLang
0.5.23 (``GenerateReqInput`` and its OpenAI protocol); its own router sets them the same way.
Only the prefill engine knows the log-probs of the prompt: a request for them gets them from its
reply, before those that the decode engine reports (none, in that version).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rollout.router.continuation.core import UNUSABLE
from rollout.router.http.engine_connection import SentRequest
from rollout.router.http.fast_json import loads
from rollout.router.http.head_cache import ReplyHead
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


class LossHandler(Protocol):
    """Takes the loss of an engine, as ``ReplyHandler.on_engine_lost`` does."""

    def __call__(self, why: str, *, was_sent: bool) -> None: ...


class PrefillReply:
    """Takes the prefill engine's reply, of which at most the prompt's log-probs are used.

    Args:
        on_prompt: gets them; None where they are not requested.
    """

    def __init__(
        self,
        on_lost: LossHandler,
        on_no_connection: Callable[[str], None],
        on_unusable: Callable[[str], None],
        on_router_error: Callable[[BaseException], None],
        on_prompt: Callable[[PromptLogprobs], None] | None = None,
    ) -> None:
        self.upstream: SentRequest | None = None
        self.is_decoding = on_prompt is not None
        self._on_lost = on_lost
        self._on_no_connection = on_no_connection
        self._on_unusable = on_unusable
        self._on_router_error = on_router_error
        self._on_prompt = on_prompt
        self._parts: list[bytes] = []

    def drop(self) -> None:
        if self.upstream is not None:
            self.upstream.drop()
            self.upstream = None

    def on_reply(self, head: ReplyHead, length: bytes, is_alone: bool) -> None:
        """Ignored: the response is the decode engine's."""

    def on_reply_data(self, data: bytes, is_end: bool) -> None:
        if self._on_prompt is None:
            return
        self._parts.append(data)
        if is_end:
            reply = b"".join(self._parts)
            try:
                logprobs = read_prompt_logprobs(reply)
            except UNUSABLE:  # such as a refusal of this request
                begin = reply[:200].decode("latin-1")
                self._on_unusable(f"sent no log-probs of the prompt: {begin}")
            else:
                self._on_prompt(logprobs)

    def on_engine_lost(self, why: str, *, was_sent: bool = True) -> None:
        self._on_lost(why, was_sent=was_sent)

    def on_no_connection(self, why: str) -> None:
        self._on_no_connection(why)

    def may_reconnect(self) -> bool:
        return False

    def on_router_error(self, error: BaseException) -> None:
        self._on_router_error(error)
