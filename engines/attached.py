"""An engine that somebody else launched.

Always true: it is asked things and told to pause, release or take weights like any other, but it
is never ended from here: no signal, no shutdown call.  What it may still do when it has failed is
up to the router, which sends it nothing more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from engines.client import EngineClient
from engines.errors import EngineError, EngineNotReady
from engines.protocol import Endpoint, ProcessIdentity
from engines.spec import EngineSpec

logger = logging.getLogger(__name__)

_PROBE_INTERVAL_S = 0.5


class AttachedEngine:
    """``launch.RunningEngine`` without a process of ours."""

    node_id = ""
    node_ids: Sequence[str] = ()
    pid: int | None = None
    processes: Sequence[ProcessIdentity] = ()

    def __init__(self, endpoint: Endpoint, engine_id: str) -> None:
        self.endpoint = endpoint
        self._engine_id = engine_id

    async def resident_bytes(self) -> int | None:
        """Unknown: it may run on another machine."""
        return None

    async def is_alive(self) -> bool:
        """Whether anything listens there."""
        try:
            _, writer = await asyncio.open_connection(self.endpoint.host, self.endpoint.port)
        except OSError:
            return False
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        return True

    async def log_tail(self, lines: int = 20) -> str:
        return f"attached at {self.endpoint.url}; its log is with whoever launched it"

    async def stop(self, grace_s: float) -> bool:
        """Let go of it; it runs on."""
        logger.info("let go of attached engine %s", self._engine_id)
        return False

    async def kill(self) -> None:
        """Not ours to kill; who is fenced gets no more requests."""
        logger.warning("attached engine %s is not ours to kill; it runs on", self._engine_id)


async def attach(spec: EngineSpec) -> AttachedEngine:
    """Wait until the engine at ``spec.url`` takes requests, and give it a numbered version.

    Raises:
        EngineNotReady: it did not within ``spec.start_timeout_s``.
        ValueError: the URL is none of an engine.
    """
    endpoint = Endpoint.of_url(spec.url)
    client = EngineClient(endpoint, engine_id=spec.engine_id)
    last_answer = "it answers 503: paused, starting or unhealthy"
    try:
        async with asyncio.timeout(spec.start_timeout_s) as deadline:
            while True:
                try:
                    if await client.is_ready():
                        break
                except EngineError as error:
                    last_answer = str(error)
                await asyncio.sleep(_PROBE_INTERVAL_S)
            await _number_version(client, spec.weight_version)
    except TimeoutError:
        if not deadline.expired():
            raise
        raise EngineNotReady(
            f"engine {spec.engine_id} at {endpoint.url} was not ready after "
            f"{spec.start_timeout_s:g} s: {last_answer}",
            engine=spec.engine_id,
            operation="attach",
        ) from None
    finally:
        await client.aclose()
    return AttachedEngine(endpoint, spec.engine_id)


async def _number_version(client: EngineClient, version: int) -> None:
    """SGLang starts at ``default``; versions are compared as numbers here."""
    held = await client.weight_version()
    if not held.isdecimal():
        await client.update_weight_version(str(version))
        logger.info("%s: weight version %r is called %d now", client.engine_id, held, version)
