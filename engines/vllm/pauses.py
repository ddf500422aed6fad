"""Pauses of a vLLM server, and the memory that it gives back in them.

Always true:

- the server stays paused until ``continue_generation``: vLLM resumes by itself when the last memory
  is awake, so the client pauses it again before that call returns;
- weights are woken before the KV cache, so that only verified weights can be behind that moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from urllib.parse import urlencode

from engines.http.base_client import DEFAULT_DEADLINES, Wire
from engines.http.call import Deadlines
from engines.protocol import Endpoint, MemoryTag, PauseMode
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


class VllmPauses(VllmCalls):
    """Requests in flight, and memory.

    Args:
        weights_cpu_backup: a release keeps a host copy of the weights (sleep level 1, not 2).
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        engine_id: str = "",
        deadlines: Deadlines = DEFAULT_DEADLINES,
        weights_cpu_backup: bool = False,
        wire: Wire | None = None,
    ) -> None:
        super().__init__(endpoint, engine_id=engine_id, deadlines=deadlines, wire=wire)
        self._level = 1 if weights_cpu_backup else 2
        self._pause_mode = PauseMode.ABORT
        self._is_own_pause = False  # of a push whose caller has not paused

    async def pause_generation(self, mode: PauseMode = PauseMode.ABORT) -> None:
        await self._pause("pause_generation", mode)
        self._is_own_pause = False

    async def _pause(self, operation: str, mode: PauseMode) -> None:
        query = urlencode(_PAUSE[mode])
        await self._post(operation, f"{routes.PAUSE}?{query}", {}, self.deadlines.pause_s)
        self._pause_mode = mode

    async def continue_generation(self) -> None:
        await self._continue("continue_generation")

    async def _continue(self, operation: str) -> None:
        await self._post(operation, routes.RESUME, {}, self.deadlines.control_s)
        self._is_own_pause = False

    async def flush_cache(self, timeout_s: float | None = None) -> None:
        """Empties the prefix cache; repeated up to ``timeout_s``, until no request holds it."""
        await self._flush("flush_cache", timeout_s or 0.0)

    async def _flush(self, operation: str, patience_s: float) -> None:
        call = self._call(operation, patience_s + self.deadlines.flush_margin_s)
        is_retracted = self._pause_mode is PauseMode.RETRACT
        query = "?reset_running_requests=true" if is_retracted else ""
        while True:
            answer = await call.send(self._control.post(routes.RESET_CACHE + query, b"{}"))
            if call.read(answer, lambda reply: reply["success"]) is True:
                return
            if call.elapsed_s >= patience_s:
                raise call.rejected("failed", status=400, body="requests still hold the cache")
            await asyncio.sleep(_RETRY_S)

    async def abort_request(self, rid: str | None = None) -> None:
        """Aborts all requests, or the one whose id is ``rid``."""
        body = {} if rid is None else {"request_ids": [routes.REQUEST_PREFIX + rid]}
        await self._post("abort_request", routes.ABORT, body, self.deadlines.control_s)

    # Memory

    async def release_memory_occupation(self, tags: Sequence[MemoryTag]) -> None:
        """Weights and KV cache together, or the KV cache alone.  vLLM has no CUDA graphs to give.

        A second release does nothing there and is answered with 200.
        """
        operation = "release_memory_occupation"
        wanted = [tag for tag in _MEMORY if tag in tags or not tags]
        if MemoryTag.WEIGHTS in wanted:
            keeps = self._pause_mode is not PauseMode.ABORT
            query = urlencode({"level": self._level, "mode": "keep" if keeps else "abort"})
            await self._post(operation, f"{routes.SLEEP}?{query}", {}, self.deadlines.memory_s)
        elif wanted:
            await self._post(operation, routes.RELEASE_KV, {}, self.deadlines.memory_s)

    async def resume_memory_occupation(self, tags: Sequence[MemoryTag]) -> None:
        """Weights first.  The server is paused afterwards, as it was before."""
        operation = "resume_memory_occupation"
        for tag in [tag for tag in _MEMORY if tag in tags or not tags]:
            path = f"{routes.WAKE_UP}?{urlencode({'tags': tag})}"
            call, answer = await self._post(operation, path, {}, self.deadlines.memory_s)
            if call.read(answer, lambda reply: reply["status"]) == "awake":
                await self._pause_again(operation)

    async def _pause_again(self, operation: str) -> None:
        """vLLM has resumed by itself.  Nothing is ended by this pause, and no cache cleared."""
        path = f"{routes.PAUSE}?{urlencode(_PAUSE[PauseMode.IN_PLACE])}"
        await self._post(operation, path, {}, self.deadlines.pause_s)

    async def _is_paused(self, operation: str, budget_s: float) -> bool:
        call = self._call(operation, budget_s)
        async with call.bounded():
            answer = await self._probes.get(routes.IS_PAUSED)
        call.accept(answer)
        return call.read(answer, lambda reply: reply["is_paused"]) is True
