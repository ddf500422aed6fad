"""Prefill and decode engines: one request, two engines that meet by themselves.

Both get the body with the same bootstrap fields; the decode engine fetches the prompt's KV from
the prefill engine at that place and answers the client.  The field names are those of SGLang
0.5.23 (``GenerateReqInput`` and its OpenAI protocol); its own router stamps them the same way.
Log-probs of the prompt are known to the prefill engine only: who asks for them gets them out of its
answer, put before those that the decode engine tells (none, in that version).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from rollout.router.fast_json import loads
from rollout.router.heads import ReplyHead
from rollout.router.upstream import Sending
from rollout.routing import Member

PromptLogprobs = Mapping[str, list[Any]]
"""Of a prompt's tokens, by the name that ``/generate`` gives them."""

OF_PROMPT = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")


def bootstrap_fields(prefill: Member) -> dict[str, str | int]:
    """Where the two meet; the room is new for every attempt."""
    return {
        "bootstrap_host": prefill.endpoint.host,
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": secrets.randbelow(1 << 63),
    }


def read_prompt_logprobs(answer: bytes) -> PromptLogprobs:
    """Those that a prefill engine told, in one answer or in events.

    Raises:
        ValueError: there are none.
    """
    for line in reversed(answer.splitlines()):
        text = line.removeprefix(b"data:").strip()
        if not text or text == b"[DONE]":
            continue
        meta = loads(text).get("meta_info") or {}
        if told := {name: meta[name] for name in OF_PROMPT if meta.get(name) is not None}:
            return told
    raise ValueError("no log-probs of the prompt")


class PrefillSide:
    """Takes the prefill engine's answer, of which at most the prompt's log-probs are passed on.

    Args:
        on_prompt: gets them; None where nobody asked.
    """

    def __init__(
        self,
        on_lost: Callable[[str], None],
        on_no_connection: Callable[[str], None],
        on_prompt: Callable[[PromptLogprobs], None] | None = None,
    ) -> None:
        self.upstream: Sending | None = None
        self.is_decoding = on_prompt is not None
        self._on_lost = on_lost
        self._on_no_connection = on_no_connection
        self._on_prompt = on_prompt
        self._parts: list[bytes] = []

    def drop(self) -> None:
        if self.upstream is not None:
            self.upstream.drop()
            self.upstream = None

    def on_reply(self, head: ReplyHead, length: bytes, is_alone: bool) -> None:
        """The decode engine tells the client how it went."""

    def on_reply_data(self, data: bytes, is_end: bool) -> None:
        if self._on_prompt is None:
            return
        self._parts.append(data)
        if is_end:
            try:
                told = read_prompt_logprobs(b"".join(self._parts))
            except (ValueError, AttributeError) as error:
                self._on_lost(f"sent an answer that cannot be used: {error}")
            else:
                self._on_prompt(told)

    def on_upstream_lost(self, why: str) -> None:
        self._on_lost(why)

    def on_no_connection(self, why: str) -> None:
        self._on_no_connection(why)

    def may_reconnect(self) -> bool:
        return False
