"""Pauses of a vLLM server, and the memory that it gives back in them.

Always true:

- the server stays paused until it is resumed here: vLLM resumes by itself when the last memory is
  awake, so it is paused again before that call returns;
- only a pause that a push has begun ends with that push;
- weights are woken before the KV cache, so that only verified weights can be behind that moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from urllib.parse import urlencode

from engines.protocol import MemoryTag, PauseMode
from engines.vllm import routes
from engines.vllm.calls import VllmCalls

_RETRY_S = 0.05
_PAUSE = {
    PauseMode.ABORT: {"mode": "abort"},
    # With the cache cleared, kept requests lose their blocks and are computed again: SGLang's
    # retraction.
    PauseMode.RETRACT: {"mode": "keep", "clear_cache": "true"},
    PauseMode.IN_PLACE: {"mode": "keep", "clear_cache": "false"},
}
_MEMORY = (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE)


class Pauses:
    """Pauses and resumes, and alone knows the mode of the pause and whether a push began it."""

    def __init__(self, calls: VllmCalls) -> None:
        self._calls = calls
        self._mode = PauseMode.ABORT
        self._is_of_push = False

    async def pause(self, operation: str, mode: PauseMode) -> None:
        await self._post_pause(operation, mode)
        self._mode, self._is_of_push = mode, False

    async def pause_for_push(self, operation: str) -> None:
        """Pause a server that serves; the pause ends with the push."""
        if not await self.is_paused(operation, self._calls.deadlines.control_s):
            await self.pause(operation, PauseMode.RETRACT)
            self._is_of_push = True

    async def pause_again(self, operation: str) -> None:
        """vLLM has resumed by itself.  Nothing is ended by this pause, and no cache cleared."""
        await self._post_pause(operation, PauseMode.IN_PLACE)

    async def resume(self, operation: str) -> None:
        await self._calls.post(operation, routes.RESUME, {}, self._calls.deadlines.control_s)
        self._is_of_push = False

    async def resume_after_push(self, operation: str) -> None:
        """End the pause that the push has begun, if it has."""
        if self._is_of_push:
            await self.resume(operation)

    async def flush(self, operation: str, patience_s: float) -> None:
        """Empty the prefix cache; repeated up to ``patience_s``, until no request holds it."""
        call = self._calls.call(operation, patience_s + self._calls.deadlines.flush_margin_s)
        query = "?reset_running_requests=true" if self._mode is PauseMode.RETRACT else ""
        while True:
            answer = await call.send(self._calls.control.post(routes.RESET_CACHE + query, b"{}"))
            if call.read(answer, lambda reply: reply["success"]) is True:
                return
            if call.elapsed_s >= patience_s:
                raise call.rejected("failed", status=400, body="requests still hold the cache")
            await asyncio.sleep(_RETRY_S)

    async def is_paused(self, operation: str, budget_s: float) -> bool:
        call = self._calls.call(operation, budget_s)
        async with call.bounded():
            answer = await self._calls.probes.get(routes.IS_PAUSED)
        call.accept(answer)
        return call.read(answer, lambda reply: reply["is_paused"]) is True

    @property
    def keeps_requests(self) -> bool:
        """Whether the last pause left requests in the server."""
        return self._mode is not PauseMode.ABORT

    async def _post_pause(self, operation: str, mode: PauseMode) -> None:
        path = _with_query(routes.PAUSE, _PAUSE[mode])
        await self._calls.post(operation, path, {}, self._calls.deadlines.pause_s)


class Memory:
    """Weights and KV cache of a paused server.

    Args:
        weights_cpu_backup: a release keeps a host copy of the weights (sleep level 1, not 2).
    """

    def __init__(self, calls: VllmCalls, pauses: Pauses, *, weights_cpu_backup: bool) -> None:
        self._calls = calls
        self._pauses = pauses
        self._level = "1" if weights_cpu_backup else "2"

    async def release(self, operation: str, tags: Sequence[MemoryTag]) -> None:
        """Weights and KV cache together, or the KV cache alone.  vLLM has no CUDA graphs to give.

        A second release does nothing there and is answered with 200.
        """
        deadline_s = self._calls.deadlines.memory_s
        wanted = _tags_in_order(tags)
        if MemoryTag.WEIGHTS in wanted:
            mode = "keep" if self._pauses.keeps_requests else "abort"
            path = _with_query(routes.SLEEP, {"level": self._level, "mode": mode})
            await self._calls.post(operation, path, {}, deadline_s)
        elif wanted:
            await self._calls.post(operation, routes.RELEASE_KV, {}, deadline_s)

    async def resume(self, operation: str, tags: Sequence[MemoryTag]) -> None:
        """Weights first.  The server is paused afterwards, as it was before."""
        for tag in _tags_in_order(tags):
            path = _with_query(routes.WAKE_UP, {"tags": tag})
            call, answer = await self._calls.post(
                operation, path, {}, self._calls.deadlines.memory_s
            )
            if call.read(answer, lambda reply: reply["status"]) == "awake":
                await self._pauses.pause_again(operation)


def _tags_in_order(tags: Sequence[MemoryTag]) -> list[MemoryTag]:
    """What vLLM has of these, weights first; no tag is all of them."""
    return [tag for tag in _MEMORY if tag in tags or not tags]


def _with_query(path: str, query: Mapping[str, str]) -> str:
    return f"{path}?{urlencode(query)}"
