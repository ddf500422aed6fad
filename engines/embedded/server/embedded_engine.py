"""The engine as the HTTP side sees it: one coroutine per command.

Always true: a request id is live at most once; commands run on the generation thread
(``gate``), in the order in which they were posted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from engines.embedded.core.config import EmbeddedConfig
from engines.embedded.core.errors import EngineFailed, Invalid
from engines.embedded.generation.batcher import Batcher
from engines.embedded.generation.generation import Generation
from engines.embedded.generation.pause_gate import IdleJob, PauseGate
from engines.embedded.generation.tokenization import TextCodec
from engines.embedded.memory.mapped_files import MappedFiles
from engines.embedded.memory.regions import Memory
from engines.embedded.model.decoder import Decoder
from engines.embedded.weights.broadcast_receiver import BroadcastReceiver
from engines.embedded.weights.lora_adapters import Adapters
from engines.embedded.weights.model_weights import ModelWeights
from engines.process.background import in_own_thread
from engines.protocol import encoded_from


class EmbeddedEngine:
    """One model being served.

    Attributes:
        model_path: where its weights were read last, which SGLang reports, too.
        live: requests without a complete reply yet, by id.
        context_length: longest prompt plus completion, in tokens.
    """

    def __init__(
        self, config: EmbeddedConfig, model: Decoder, text: TextCodec, memory: Memory
    ) -> None:
        self.config = config
        self.model_path = config.model_path
        self.model = model
        self.text = text
        self.memory = memory
        self.adapters = Adapters(
            model,
            is_enabled=config.enable_lora,
            max_rank=config.max_lora_rank,
            is_on_gpu=memory.is_on_gpu,
        )
        self.weights = ModelWeights(model, self.adapters.fingerprints, is_on_gpu=memory.is_on_gpu)
        self.weights.version = lambda: encoded_from(self.weight_version)
        self.mapped = MappedFiles()
        self.receiver = BroadcastReceiver(self.weights, memory.device)
        self.live: dict[str, Generation] = {}
        longest = model.config.max_position_embeddings
        self.context_length = min(
            config.context_length or longest, longest, config.max_total_tokens
        )
        self.batcher = Batcher(model, memory, config, self._deliver, self.adapters.plan_step)
        self.gate = PauseGate(self.batcher, memory, is_saver_enabled=config.enable_memory_saver)
        self.batcher.start()

    @property
    def weight_version(self) -> str:
        return self.batcher.step_report.weight_version

    @property
    def is_ready(self) -> bool:
        return self.gate.paused is None and not self.memory.released and self.is_alive

    @property
    def is_alive(self) -> bool:
        return self.batcher.failure is None and self.batcher.is_running()

    def stop(self, grace_s: float) -> None:
        """End every request, then the generation thread, if its step ends in time."""
        if self.is_alive:
            self.end_requests()
            self.batcher.stop(grace_s)

    # Requests.

    def end_requests(self) -> None:
        """Abort every request, held ones too."""
        self.batcher.post(lambda: self.gate.abort_all(and_held=True))

    def submit(self, generations: Sequence[Generation]) -> None:
        """Start these generations; each ``wait`` returns when there is progress."""
        if not self.is_alive:
            raise EngineFailed(f"the generation thread has ended: {self.batcher.failure}")
        new = {generation.rid: generation for generation in generations}
        if twice := self.live.keys() & new.keys():
            raise Invalid(f"Duplicate request ID detected: {', '.join(sorted(twice))}")
        if len(new) < len(generations):
            raise Invalid("Duplicate request IDs within the batch")
        self.live.update(new)
        for generation in generations:
            self.batcher.post(lambda generation=generation: self.gate.admit(generation))  # type: ignore[misc]

    def drop(self, generations: Sequence[Generation]) -> None:
        """Abort these: their client has gone."""
        for generation in generations:
            if not generation.is_over:
                self.batcher.post(lambda rid=generation.rid: self.gate.abort(rid))  # type: ignore[misc]

    def _deliver(self, touched: list[Generation]) -> None:
        for generation in touched:
            if generation.is_over:
                self.live.pop(generation.rid, None)
            generation.wake()

    # Commands.

    async def run(self, command: Callable[[], Any]) -> Any:
        """Run ``command`` on the generation thread, between two steps."""
        return await self.batcher.call(command)

    async def flush(self, timeout_s: float) -> None:
        if timeout_s > 0:
            await self._when_idle(self.gate.flush, timeout_s=timeout_s)
        else:
            await self.run(self.gate.flush)

    async def _when_idle(self, command: Callable[[], Any], timeout_s: float | None) -> None:
        """Run ``command`` when nothing is in flight; with a timeout new requests still come in."""
        future: Future[None] = Future()
        job = IdleJob(lambda: self.batcher.complete(future, command), closes_gate=timeout_s is None)
        await self.run(lambda: self.gate.when_idle(job))
        try:
            await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
        except TimeoutError:
            num_in_flight = await self.run(lambda: self.gate.situation().num_in_flight)
            raise Invalid(
                f"Flush cache failed: {num_in_flight} requests are in flight after {timeout_s:g} s."
            ) from None
        finally:
            self.batcher.post(lambda: self.gate.cancel(job))

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
            await self.run(self.gate.abort_all)
        if self.gate.paused is None:
            await self._when_idle(change, timeout_s=None)
        else:
            await self.run(change)

    async def run_blocking(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` that may block for long (a rendezvous, a broadcast) on its own daemon
        thread, so that it cannot delay the end of the process."""
        return await asyncio.wrap_future(in_own_thread(work, "aside"))
