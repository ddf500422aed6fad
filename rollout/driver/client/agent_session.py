"""The client's side of a session of chats.

Always true: the id says which worker of agents has the session; any process with the id and the
keys has the same one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import aiohttp

from engines.http.trace_context import trace_headers
from rollout.core.arguments import wrong
from rollout.core.errors import ConfigError, GenerationFailed, RolloutError
from rollout.core.pending import Pending
from rollout.core.samples import Sample
from rollout.driver.client.branch_samples import branch_samples
from rollout.driver.client.http_client import reconnecting
from rollout.rules.contract import NO_CONTRACT, Contract
from rollout.rules.routing import worker_of

_TIMEOUT = aiohttp.ClientTimeout(total=120.0)
_ID = re.compile(r"[A-Za-z0-9._-]{1,256}")


class AgentSession:
    """One conversation with an agent, with all of its branches.

    ``with policy.session() as session`` closes it at the end; ``async with``, too.

    Attributes:
        base_url: for OpenAI clients.
        api_key: for OpenAI clients, which refuse an empty one.
        default_headers: for OpenAI clients, which send them with each turn: the weight versions
            that its tokens may have, and the trace of the span in which the session was made.

    Args:
        urls: of all workers of its server's agents.
        submit: does work on the event loop of the clients.
        contract: what each turn fulfils.
    """

    def __init__(
        self,
        urls: Sequence[str],
        session_id: str,
        *,
        key: str,
        control_key: str,
        submit: Callable[[Coroutine[Any, Any, Any]], Pending[Any]],
        contract: Contract = NO_CONTRACT,
    ) -> None:
        if session_id and not _ID.fullmatch(session_id):
            raise wrong("session_id", session_id, "1 to 256 letters, digits or ._-")
        if not urls:
            raise ConfigError(
                "this server has no workers for sessions: set its agents.workers to 1 or more",
                setting="agents.workers",
                value=0,
            )
        self.session_id = session_id or os.urandom(8).hex()
        url = urls[worker_of(self.session_id, len(urls))]
        self._url = f"{url.rstrip('/')}/sessions/{self.session_id}"
        self.base_url = f"{self._url}/v1"
        self.api_key = key or "none"
        self.default_headers = contract.to_headers() | trace_headers()
        control = control_key or key
        self._headers = {"authorization": f"Bearer {control}"} if control else {}
        self._submit = submit
        self._is_closed = False

    def __repr__(self) -> str:
        return f"AgentSession({self.base_url!r})"

    def turns(self) -> Pending[list[dict[str, Any]]]:
        """All turns in the order in which they ended; none before the first one.

        Each has ``turn``, ``parent`` (None for a first turn), ``drift`` (``clean``, ``realigned``
        or ``forked``), ``first_difference`` (index of the first id that a new tokenisation of the
        messages would change), ``prompt_ids`` behind its parent's, ``output_ids``,
        ``output_logprobs``, ``logprob_kind``, ``weight_versions``, ``finish_reason``, ``text`` and,
        as base64, ``routed_experts`` behind its parent's (None unless requested).

        Raises:
            GenerationFailed: from ``result()`` or ``await``: its worker cannot be reached, or
                refuses.
            RolloutError: this session is closed.
        """
        self._check_open()
        return self._submit(self._turns())

    def samples(self) -> Pending[list[Sample]]:
        """A sample for each branch: exact ids, log-probs, versions and loss mask.

        The mask is 1 for tokens that an engine generated, each in one sample only; 0 for all other
        tokens.  ``metadata`` has the numbers of the branch's turns and the ``drift`` of each.

        Raises:
            GenerationFailed: from ``result()`` or ``await``: its worker cannot be reached, or
                refuses.
            RolloutError: this session is closed.
        """
        self._check_open()

        async def samples() -> list[Sample]:
            return branch_samples(self.session_id, await self._turns())

        return self._submit(samples())

    def close(self) -> Pending[None]:
        """Delete the session at its worker; nothing if it has none.  A later turn gets HTTP 410.

        Raises:
            GenerationFailed: from ``result()`` or ``await``: its worker cannot be reached, or
                refuses.
        """
        self._is_closed = True

        async def close() -> None:
            await self._request("DELETE", self._url)

        return self._submit(close())

    def __enter__(self) -> AgentSession:
        return self

    def __exit__(self, *error: object) -> None:
        self.close().result()

    async def __aenter__(self) -> AgentSession:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RolloutError(
                f"session {self.session_id} is closed, and its turns are deleted: read turns and "
                "samples before"
            )

    async def _turns(self) -> list[dict[str, Any]]:
        reply = await self._request("GET", self._url)
        return list(reply["turns"]) if reply else []

    async def _request(self, method: str, url: str) -> Any:
        """The worker's reply, or None if it has no such session."""

        async def request() -> Any:
            async with (
                aiohttp.ClientSession(timeout=_TIMEOUT, headers=self._headers) as client,
                client.request(method, url) as response,
            ):
                if response.status == 404:
                    return None
                if response.status != 200:
                    text = (await response.text())[:500]
                    raise GenerationFailed(f"{method} {url}: HTTP {response.status}: {text}")
                return await response.json()

        try:
            return await reconnecting(request)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise GenerationFailed(f"{method} {url}: {type(error).__name__}: {error}") from None
