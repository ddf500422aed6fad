"""The generation thread: transformers' continuous batching, with commands run between steps.

Always true: the scheduler, the KV cache and the weights are touched only by this thread, so
every command sees a whole step before it and none during it.  The event loop posts commands
and receives reports; there is no lock.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import FIFOScheduler
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engines.embedded.core.config import EmbeddedConfig
from engines.embedded.core.errors import EngineFailed
from engines.embedded.generation import attention
from engines.embedded.generation.expert_recorder import ExpertRecorder
from engines.embedded.generation.generation import Generation
from engines.embedded.generation.kv_cache import RegionCache
from engines.embedded.generation.sampler import Runner
from engines.embedded.memory.regions import Memory
from engines.embedded.weights.lora_adapters import Adapter

_make_generation_config: Any = GenerationConfig  # untyped in transformers
T = TypeVar("T")
PAGE_SIZE = 16
_MAX_BATCH_TOKENS = 2048


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


@dataclass(repr=False)
class BatchState(RequestState):
    """transformers' ``RequestState`` with our stop rules: one generation's place in the batch.

    Recreated when its KV is dropped (a retract, or a full cache), then with the completion so far
    as part of the prompt.
    """

    generation: Generation = None  # type: ignore[assignment]
    step_report: BatchStep = None  # type: ignore[assignment]

    @classmethod
    def start(cls, generation: Generation, step_report: BatchStep) -> BatchState:
        return cls(
            request_id=generation.rid,
            initial_tokens=generation.prompt_ids + generation.output_ids,
            max_new_tokens=None,
            generation=generation,
            step_report=step_report,
        )

    def update_and_check_completion(self, token_id: int, logprob: float | None) -> bool:
        self.generated_tokens.append(token_id)
        self.tokens_to_process = [token_id]
        is_last = self.generation.refusal is not None or self.generation.add(
            token_id, logprob or 0.0, self.step_report.weight_version
        )
        self.step_report.num_output_tokens += 1
        if is_last:
            self.status = RequestStatus.FINISHED
        if is_last or self.generation.is_streamed:
            self.step_report.touched.append(self.generation)
        return is_last

    def create_equivalent_initial_request(self) -> BatchState:
        return BatchState.start(self.generation, self.step_report)

    def to_generation_output(self) -> Generation:
        return self.generation


class Batcher(ContinuousBatchingManager):
    """Runs one model.

    Attributes:
        is_frozen: no step is taken; commands are still run.
        on_idle: called on the generation thread whenever nothing is in flight.
        failure: what ended the generation thread; None while it lives.
        step_report: what changed since the last report.
        experts: what the model's routers choose.
    """

    def __init__(
        self,
        model: Any,
        memory: Memory,
        config: EmbeddedConfig,
        deliver: Callable[[list[Generation]], None],
        plan_adapters: Callable[[Iterable[tuple[Adapter | None, int]]], None],
    ) -> None:
        self._plan_adapters = plan_adapters
        self._memory = memory
        self.step_report = BatchStep(config.weight_version)
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._posted: deque[Callable[[], None]] = deque()
        self.is_frozen = False
        self.on_idle: Callable[[], None] = lambda: None
        self.failure: BaseException | None = None
        self.experts = ExpertRecorder(model)
        super().__init__(
            model=model,
            generation_config=_make_generation_config(do_sample=False, eos_token_id=-1),
            continuous_batching_config=_batching_config(config),
        )
        self.output_router: Any = _Failures(self.step_report)
        self.batch_processor: Any = self._create_batch_processor()

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Use our attention, except for models with sliding windows, which keep ``sdpa``."""
        text_config = model.config.get_text_config()
        layer_types = getattr(text_config, "layer_types", None) or ["full_attention"]
        has_window = getattr(text_config, "layer_types", None) is None and getattr(
            text_config, "sliding_window", None
        )
        if has_window or any(kind != "full_attention" for kind in layer_types):
            super().switch_to_cb_friendly_attn(model, auto_switch_to_flash)
            return
        ALL_ATTENTION_FUNCTIONS.register(attention.NAME, attention.forward)
        model.set_attn_implementation(attention.NAME)

    # Called by other threads.

    def post(self, command: Callable[[], None]) -> None:
        """Have the generation thread run ``command`` before its next step."""
        self._posted.append(command)
        self._wake_up_loop.set()

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
        return len(self.batch_processor.scheduler.active_requests)

    @property
    def num_waiting(self) -> int:
        return len(self.batch_processor.scheduler.waiting_requests)

    def admit(self, generation: Generation) -> None:
        if self.failure is not None:
            generation.abort(f"the engine failed: {self.failure}")
            self.step_report.touched.append(generation)
            return
        self.batch_processor.scheduler.add_waiting_request(
            BatchState.start(generation, self.step_report)
        )

    @property
    def can_score(self) -> bool:
        """Whether ``score`` is right: our attention alone does without a cache."""
        return bool(self.model.config._attn_implementation == attention.NAME)

    def score(self, generation: Generation) -> None:
        """Log-probabilities of a prompt's tokens, each after those before it, in a pass of its own:
        the batch computes what comes after a prompt, and none of it for tokens in the cache."""
        ids, start = generation.prompt_ids, generation.logprob_start_len
        self._plan_adapters([(generation.adapter, len(ids))])
        tokens = torch.tensor([ids], device=self._memory.device)
        model: Any = self.model
        with torch.inference_mode():
            logits = model(input_ids=tokens, use_cache=False).logits[0, start:-1].float()
            wanted = tokens[0, start + 1 :].unsqueeze(1)
            chosen = logits.gather(1, wanted).squeeze(1) - logits.logsumexp(dim=-1)
        generation.input_logprobs = [
            value if math.isfinite(value) else None for value in chosen.tolist()
        ]

    def abort(self, rid: str | None, message: str) -> None:
        """End one request, or with None all, with the tokens they have."""
        scheduler = self.batch_processor.scheduler
        rids = [*scheduler.active_requests, *scheduler.waiting_requests] if rid is None else [rid]
        for request_id in rids:
            scheduler.set_request_cancellation(request_id)
        for state in scheduler.clear_cancelled_requests():
            state.generation.abort(message)
            self.step_report.touched.append(state.generation)
        scheduler.block_new_requests = False

    def retract(self) -> None:
        """Put all running requests back in the queue and drop their KV."""
        scheduler = self.batch_processor.scheduler
        states = [*scheduler.active_requests.values(), *scheduler.waiting_requests.values()]
        self.batch_processor.cache.free_all_requests()
        scheduler.reset()
        for state in states:
            scheduler.add_waiting_request(state.create_equivalent_initial_request())

    def flush(self) -> None:
        """Drop every cached prefix.  No request may hold KV."""
        self.batch_processor.cache.reset()

    def report(self) -> None:
        """Report to the event loop what has changed."""
        if self.step_report.touched:
            touched, self.step_report.touched = self.step_report.touched, []
            self._loop.call_soon_threadsafe(self._deliver, touched)

    def used_tokens(self) -> int:
        """Tokens of the KV cache that requests hold now."""
        tables = self.batch_processor.cache.cache_allocators.values()
        return max(
            PAGE_SIZE * sum(len(blocks) for blocks in list(table.block_table.values()))
            for table in tables
        )

    def _generation_loop_body(self, batch_processor: Any, bootstrapping: bool) -> bool:
        while self._posted:
            self._posted.popleft()()
        if self.background_thread_status.local_status >= BackgroundThreadStatus.HARD_STOP:
            return False
        if not self.is_frozen and batch_processor.prepare_next_batch():
            self._step(batch_processor)
            self.report()
            return True
        self.report()
        is_idle = not batch_processor.has_pending_requests()
        if is_idle:
            self.on_idle()
        # A queue that could not be scheduled is tried again; an idle one waits to be woken.
        self._wake_up_loop.wait(None if is_idle or self.is_frozen else 0.02)
        self._wake_up_loop.clear()
        return True

    def _step(self, processor: Any) -> None:
        cache = processor.cache
        batch = processor.inputs_and_outputs.requests_in_batch
        if cache.is_bucketed:
            cache.plan_step(batch)
        self._plan_adapters(
            (request.state.generation.adapter, request.query_length) for request in batch
        )
        self.experts.begin(batch)
        # transformers has a stream of its own for the pass, which waits for no other: neither for
        # the plan and its own copies of the inputs, nor for what a command has queued.  It has
        # finished when ``_generation_step`` returns.
        self._memory.finish_work()
        with torch.inference_mode():
            processor._generation_step(self.model)
        self.experts.end(batch)
        if cache.prefix_hits:
            for request in batch:
                generation = request.state.generation
                hits = cache.prefix_hits.pop(generation.rid, 0)
                if hits and not generation.output_ids:
                    generation.cached_tokens = hits
        processor.update_batch()

    def _run_generation_loop(self) -> None:
        super()._run_generation_loop()
        self.failure = self.background_thread_status.fatal_error or RuntimeError("stopped")
        while self._posted:
            self._posted.popleft()()
        self.report()

    def _generation_of(self, rid: str) -> Generation | None:
        scheduler = self.batch_processor.scheduler
        state = scheduler.active_requests.get(rid) or scheduler.waiting_requests.get(rid)
        return None if state is None else state.generation

    def _create_batch_processor(self) -> Any:
        if self.batch_processor is not None:
            return self.batch_processor
        model: Any = self.model
        config: Any = self.continuous_batching_config
        text_config = model.config.get_text_config()
        cache = RegionCache(
            self._memory,
            config=text_config,
            continuous_batching_config=config,
            distributed_helper=self.distributed_helper,
            dtype=model.dtype,
            model_supports_logits_to_keep=model._supports_logits_to_keep(),
        )
        cache.generation_of = self._generation_of
        scheduler = FIFOScheduler(cache, config.safety_margin, config.max_requests_per_batch)
        processor = ContinuousBatchProcessor(
            cache=cache,
            config=text_config,
            generation_config=self.generation_config,
            continuous_batching_config=config,
            logit_processor=self.logit_processor,
            input_queue=self.input_queue,
            cancel_queue=self.cancel_queue,
            output_router=self.output_router,
            background_thread_status=self.background_thread_status,
            model_device=self._memory.device,
            model_dtype=model.dtype,
            scheduler=scheduler,
            distributed_helper=self.distributed_helper,
        )
        processor.model_runner = Runner(
            logit_processor=self.logit_processor,
            cb_config=config,
            inputs_and_outputs=processor.inputs_and_outputs,
            cache=cache,
            do_sample=False,
            return_logprobs=True,
        )
        return processor


class _Failures:
    """Replaces transformers' output router.  Ours go by the step report; the rest are
    requests that failed with the generation thread: they end as aborted."""

    def __init__(self, step_report: BatchStep) -> None:
        self._step_report = step_report

    def deliver_batch(self, outputs: list[Generation]) -> None:
        """Nothing: each is in the step report already."""

    def fail_and_deliver(self, state: Any, error: Exception) -> None:
        state.generation.abort(f"the engine failed: {error}")
        self._step_report.touched.append(state.generation)


def _batching_config(config: EmbeddedConfig) -> ContinuousBatchingConfig:
    """Synchronous steps without CUDA graphs: sampling here is per request, in Python."""
    return ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=-(-config.max_total_tokens // PAGE_SIZE),
        max_batch_tokens=max(_MAX_BATCH_TOKENS, config.max_running_requests),
        max_requests_per_batch=config.max_running_requests,
        max_blocks_per_request=0,
        max_memory_percent=1.0,
        allow_block_sharing=True,
        use_async_batching=False,
        use_cuda_graph=False,
        return_logprobs=True,
        seed=0,
    )
