"""The engine as the HTTP side sees it: one coroutine per thing it can be asked.

Always true: a request id is live at most once; what is asked here is carried out on the
generation thread (``gate``), in the order it was asked.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from engines.embedded.batcher import Batcher
from engines.embedded.config import EngineConfig
from engines.embedded.errors import Ended, Invalid
from engines.embedded.files import update_from_disk
from engines.embedded.gate import Gate, IdleJob
from engines.embedded.generation import Generation
from engines.embedded.groups import UpdateGroups
from engines.embedded.inbox import Inbox
from engines.embedded.lora import Adapters
from engines.embedded.mapped import MappedFiles
from engines.embedded.memory import Memory
from engines.embedded.state import Journal
from engines.embedded.text import Text
from engines.embedded.weights import Weights
from engines.protocol import PauseMode


class Engine:
    """One model being served.

    Attributes:
        live: requests that have no answer yet, by id.
        context_length: longest prompt plus completion, in tokens.
    """

    def __init__(self, config: EngineConfig, model: Any, text: Text, memory: Memory) -> None:
        self.config = config
        self.model = model
        self.text = text
        self.memory = memory
        self.adapters = Adapters(
            model, is_enabled=config.enable_lora, max_rank=config.max_lora_rank
        )
        self.weights = Weights(model, self.adapters.fingerprints)
        self.mapped = MappedFiles()
        self.groups = UpdateGroups(memory.device)
        self.inbox = Inbox(self.weights, memory.device)
        self.live: dict[str, Generation] = {}
        self.context_length = _context_length(config, model)
        self._journal = Journal(config.weight_version)
        self.batcher = Batcher(
            model, memory, config, self._journal, self._deliver, self.adapters.plan_step
        )
        self.gate = Gate(
            self.batcher, memory, self._journal, is_saver_enabled=config.enable_memory_saver
        )
        self.batcher.start()

    @property
    def weight_version(self) -> str:
        return self._journal.weight_version

    @property
    def is_ready(self) -> bool:
        return self.gate.paused is None and not self.memory.released and self.is_alive

    @property
    def is_alive(self) -> bool:
        return self.batcher.failure is None and self.batcher.is_running()

    def stop(self, grace_s: float) -> None:
        """End every request, then the generation thread, if its step ends in time."""
        if self.is_alive:
            self.batcher.post(lambda: self.gate.abort_all(and_held=True))
            self.batcher.stop(block=True, timeout=grace_s, hard_stop=True)

    # Requests.

    def submit(self, generations: Sequence[Generation]) -> None:
        """Have these answered; each ``wait`` returns as they get on."""
        if not self.is_alive:
            raise Ended(f"the generation thread has ended: {self.batcher.failure}")
        new = {generation.rid: generation for generation in generations}
        if twice := self.live.keys() & new.keys():
            raise Invalid(f"Duplicate request ID detected: {', '.join(sorted(twice))}")
        if len(new) < len(generations):
            raise Invalid("Duplicate request IDs within the batch")
        self.live.update(new)
        for generation in generations:
            self.batcher.post(lambda generation=generation: self.gate.admit(generation))  # type: ignore[misc]

    def drop(self, generations: Sequence[Generation]) -> None:
        """Nobody waits for these any more."""
        for generation in generations:
            if not generation.is_over:
                self.batcher.post(lambda rid=generation.rid: self.gate.abort(rid))  # type: ignore[misc]

    def _deliver(self, touched: list[Generation]) -> None:
        for generation in touched:
            if generation.is_over:
                self.live.pop(generation.rid, None)
            generation.wake()

    async def abort(self, rid: str | None, *, abort_all: bool) -> None:
        if abort_all:
            await self.batcher.call(self.gate.abort_all)
        elif rid:
            await self.batcher.call(lambda: self.gate.abort(rid))

    # Pauses and memory.

    async def pause(self, mode: PauseMode) -> None:
        await self.batcher.call(lambda: self.gate.pause(mode))

    async def resume(self) -> None:
        await self.batcher.call(self.gate.resume)

    async def flush(self, timeout_s: float) -> None:
        if timeout_s > 0:
            await self._when_idle(self.gate.flush, timeout_s=timeout_s)
        else:
            await self.batcher.call(self.gate.flush)

    async def run(self, command: Callable[[], Any]) -> Any:
        """Run ``command`` on the generation thread, between two steps."""
        return await self.batcher.call(command)

    async def _when_idle(self, command: Callable[[], Any], timeout_s: float | None) -> None:
        """Run ``command`` when nothing is in flight; with a timeout new requests still come in."""
        future: Future[None] = Future()

        job = IdleJob(lambda: self.batcher.settle(future, command), shuts_door=timeout_s is None)
        await self.batcher.call(lambda: self.gate.when_idle(job))
        try:
            await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
        except TimeoutError:
            num_in_flight = await self.batcher.call(lambda: self.gate.situation().num_in_flight)
            raise Invalid(
                f"Flush cache failed: {num_in_flight} requests are in flight after {timeout_s:g} s."
            ) from None
        finally:
            self.batcher.post(lambda: self.gate.cancel(job))

    # Weights.

    async def update(
        self,
        apply: Callable[[], Any],
        command: str,
        *,
        flush: bool,
        version: str | None,
        abort_all: bool = False,
    ) -> None:
        """Change the weights between two steps; unless paused, once all in flight have ended."""

        def change() -> None:
            self.gate.update(apply, command, flush=flush, version=version)

        if abort_all:
            await self.batcher.call(self.gate.abort_all)
        if self.gate.paused is None:
            await self._when_idle(change, timeout_s=None)
        else:
            await self.batcher.call(change)

    async def update_from_disk(self, path: str, **how: Any) -> None:
        await self.update(
            lambda: update_from_disk(self.weights, path, self.mapped),
            "update_weights_from_disk",
            **how,
        )

    async def set_version(self, version: str, *, abort_all: bool) -> None:
        def change() -> None:
            if abort_all:
                self.gate.abort_all()
            self._journal.weight_version = version

        await self.batcher.call(change)

    async def aside(self, work: Callable[[], Any]) -> Any:
        """Run something that may block for long (a rendezvous, a broadcast) on its own thread,
        a daemon, so that it cannot hold up the end of the process."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # it belongs to whoever asked
                future.set_exception(error)

        threading.Thread(target=run, daemon=True, name="aside").start()
        return await asyncio.wrap_future(future)


def _context_length(config: EngineConfig, model: Any) -> int:
    text_config = model.config.get_text_config()
    model_length = getattr(text_config, "max_position_embeddings", config.max_total_tokens)
    return min(config.context_length or model_length, model_length, config.max_total_tokens)
