"""The generation thread: continuous batching, with commands run between steps.

Always true: the scheduler, the KV cache and the weights are touched only by this thread, so
every command sees a whole step before it and none during it.  The event loop posts commands
and receives reports; there is no lock.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

import torch

from engines.embedded.core.config import EmbeddedConfig
from engines.embedded.core.errors import EngineFailed
from engines.embedded.generation.expert_recorder import record_experts
from engines.embedded.generation.generation import Generation
from engines.embedded.generation.kv_cache import KvCache, fresh_step
from engines.embedded.generation.pages import PAGE_SIZE, Pages
from engines.embedded.generation.sampler import sample
from engines.embedded.generation.scheduler import Part, Scheduler
from engines.embedded.memory.regions import Memory
from engines.embedded.model.decoder import Decoder
from engines.embedded.weights.lora_adapters import Adapter
from engines.process.background import Then, keep_thread

T = TypeVar("T")
_MOST_STEP_TOKENS = 2048


@dataclass(slots=True)
class BatchStep:
    """What the generation thread reports to the event loop after each step.

    Attributes:
        weight_version: the version that produces new tokens.
        touched: generations that ended, and streamed ones that grew, since the last report.
        num_output_tokens: all that were generated so far.
    """

    weight_version: str
    touched: list[Generation] = field(default_factory=list)
    num_output_tokens: int = 0


class Batcher:
    """Runs one model.

    Attributes:
        is_frozen: no step is taken; commands are still run.
        on_idle: called on the generation thread whenever nothing is in flight.
        failure: what ended the generation thread, or None while it lives.
        step_report: what changed since the last report.
    """

    def __init__(
        self,
        model: Decoder,
        memory: Memory,
        config: EmbeddedConfig,
        deliver: Callable[[list[Generation]], None],
        plan_adapters: Callable[[Iterable[tuple[Adapter | None, int]]], None],
    ) -> None:
        self._model = model
        self._memory = memory
        self._plan_adapters = plan_adapters
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._posted: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._is_stopping = False
        self._thread: threading.Thread | None = None
        self.step_report = BatchStep(config.weight_version)
        self.is_frozen = False
        self.on_idle: Callable[[], None] = lambda: None
        self.failure: BaseException | None = None
        num_pages = -(-config.max_total_tokens // PAGE_SIZE)
        self._cache = KvCache(model, memory, num_pages)
        self._scheduler = Scheduler(
            Pages(num_pages),
            max_requests=config.max_running_requests,
            max_tokens=max(_MOST_STEP_TOKENS, config.max_running_requests),
        )

    # Called by other threads.

    def start(self) -> None:
        self._thread = keep_thread(self._run, "generation", Then.IS_OVER)

    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def stop(self, timeout_s: float) -> None:
        """End the thread after what is posted and its present step, if these end in time."""
        self._is_stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def post(self, command: Callable[[], None]) -> None:
        """Have the generation thread run ``command`` before its next step."""
        self._posted.append(command)
        self._wake.set()

    def call(self, command: Callable[[], T]) -> Awaitable[T]:
        """``post``, and return the result."""
        if self.failure is not None or not self.is_running():
            raise EngineFailed(f"the generation thread has ended: {self.failure}")
        future: Future[T] = Future()
        self.post(lambda: self.complete(future, command))
        return asyncio.wrap_future(future)

    # Called only by the generation thread.

    def complete(self, future: Future[T], command: Callable[[], T]) -> None:
        """Put the result of ``command`` into ``future``, unless its caller has cancelled it."""
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = command()
            # After the reply a trainer may free the memory that was copied from.
            self._memory.finish_work()
        except BaseException as error:  # any error belongs to the caller
            self.report()
            future.set_exception(error)
        else:
            self.report()
            future.set_result(result)

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    def admit(self, generation: Generation) -> None:
        if self.failure is not None:
            generation.abort(f"the engine failed: {self.failure}")
            self.step_report.touched.append(generation)
            return
        self._scheduler.add(generation)

    def score(self, generation: Generation) -> None:
        """Log-probabilities of a prompt's tokens, each after those before it, in a pass of its own:
        the batch computes what comes after a prompt, and none of it for tokens in the cache."""
        ids, start = generation.prompt_ids, generation.logprob_start_len
        self._plan_adapters([(generation.adapter, len(ids))])
        step = fresh_step(ids, self._model, self._memory.device)
        with torch.inference_mode():
            logits = self._model(step, slice(start, -1)).float()
            wanted = step.tokens[start + 1 :].unsqueeze(1)
            chosen = logits.gather(1, wanted).squeeze(1) - logits.logsumexp(dim=-1)
        generation.input_logprobs = [
            value if math.isfinite(value) else None for value in chosen.tolist()
        ]

    def abort(self, rid: str | None, message: str) -> None:
        """End one request, or with None all, with the tokens they have."""
        for request_id in self._scheduler.rids() if rid is None else [rid]:
            generation = self._scheduler.remove(request_id)
            if generation is not None:
                generation.abort(message)
                self.step_report.touched.append(generation)

    def retract(self) -> None:
        """Put all running requests back in the queue and drop their KV."""
        self._scheduler.retract()

    def flush(self) -> None:
        """Drop every cached prefix.  No request may hold KV."""
        self._scheduler.pages.forget()

    def report(self) -> None:
        """Report to the event loop what has changed."""
        if self.step_report.touched:
            touched, self.step_report.touched = self.step_report.touched, []
            self._loop.call_soon_threadsafe(self._deliver, touched)

    def used_tokens(self) -> int:
        """Tokens of the KV cache that requests hold now."""
        return PAGE_SIZE * self._scheduler.pages.num_used

    def _run(self) -> None:
        try:
            while self._run_posted() and not self._is_stopping:
                parts = [] if self.is_frozen else self._scheduler.next_step()
                if parts:
                    self._step(parts)
                elif not self._scheduler.num_in_flight:
                    self.on_idle()
                self.report()
                if not parts and (self.is_frozen or not self._scheduler.num_in_flight):
                    self._wake.wait()
                    self._wake.clear()
            self.failure = RuntimeError("stopped")
        except BaseException as error:
            self.failure = error
            raise  # it is logged where the thread was started
        finally:
            self.abort(None, f"the engine failed: {self.failure}")
            self._run_posted()
            self.report()

    def _run_posted(self) -> bool:
        while self._posted:
            self._posted.popleft()()
        return True

    def _step(self, parts: list[Part]) -> None:
        generations = [part.sequence.generation for part in parts]
        step = self._cache.step(parts)
        if any(generation.wants_experts for generation in generations):
            step.experts = []
        self._plan_adapters((part.sequence.generation.adapter, part.num_tokens) for part in parts)
        self._memory.finish_work()
        growing = [part for part in parts if part.is_last]
        ends = accumulate(part.num_tokens for part in parts)
        rows = [end - 1 for part, end in zip(parts, ends, strict=True) if part.is_last]
        with torch.inference_mode():
            logits = self._model(step, torch.tensor(rows, device=self._memory.device)).float()
            tokens, logprobs = sample(logits, [part.sequence.generation for part in growing])
            drawn = tokens.tolist()
            values = [0.0] * len(drawn) if logprobs is None else logprobs.tolist()
        if step.experts:
            record_experts(parts, step.experts)
        for part in parts:
            self._scheduler.advance(part)
        for part, token_id, logprob in zip(growing, drawn, values, strict=True):
            self._add(part, token_id, logprob)

    def _add(self, part: Part, token_id: int, logprob: float) -> None:
        """Give a sequence its next token."""
        generation, report = part.sequence.generation, self.step_report
        part.sequence.ids.append(token_id)
        is_last = generation.refusal is not None or generation.add(
            token_id, logprob, report.weight_version
        )
        report.num_output_tokens += 1
        if is_last:
            self._scheduler.remove(generation.rid)
        if is_last or generation.is_streamed:
            report.touched.append(generation)
