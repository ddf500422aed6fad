"""Prefill and decode engines: one request, two engines that meet by themselves.

Both get the body with the same bootstrap fields; the decode engine fetches the prompt's KV from
the prefill engine at that place and answers the client.  The field names are those of SGLang
0.5.23 (``GenerateReqInput`` and its OpenAI protocol); its own router stamps them the same way.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from rollout.router.upstream import ReplyHead, Sending
from rollout.routing import Member


def bootstrap_fields(prefill: Member) -> dict[str, str | int]:
    """Where the two meet; the room is new for every attempt."""
    return {
        "bootstrap_host": prefill.endpoint.host,
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": secrets.randbelow(1 << 63),
    }


class PrefillSide:
    """Takes the prefill engine's answer, of which nothing is passed on."""

    is_decoding = False

    def __init__(
        self, on_lost: Callable[[str], None], on_no_connection: Callable[[str], None]
    ) -> None:
        self.upstream: Sending | None = None
        self._on_lost = on_lost
        self._on_no_connection = on_no_connection

    def drop(self) -> None:
        if self.upstream is not None:
            self.upstream.drop()
            self.upstream = None

    def on_reply(self, head: ReplyHead, is_alone: bool) -> None:
        """The decode engine tells the client how it went."""

    def on_reply_data(self, data: bytes, is_end: bool) -> None:
        """Likewise."""

    def on_upstream_lost(self, why: str) -> None:
        self._on_lost(why)

    def on_no_connection(self, why: str) -> None:
        self._on_no_connection(why)

    def may_reconnect(self) -> bool:
        return False
