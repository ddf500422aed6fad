"""One fake engine: SGLang 0.5.23's control protocol over a few sets and flags.

Always true:
- a call that ends the real engine ends this one;
- a call returns or raises only when the engine has really done, or really not done, the call,
  unless its reply was planned to be lost.

Not here: how long things take, HTTP, and what several ranks do.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Unpack

from engines.fake.engine.calls import EngineDied, never
from engines.fake.engine.engine_state import FakeEngineState
from engines.fake.engine.fake_sampling import Drawing, why_refused
from engines.fake.engine.fake_weights import FatalCall
from engines.fake.engine.request import FakeRequest
from engines.protocol import (
    Endpoint,
    EngineAccess,
    GenerateReply,
    Loads,
    MemoryTag,
    ModelInfo,
    PauseMode,
    PromptImage,
    SamplingParams,
    ServerInfo,
)
from engines.protocol.sampling_params import DEFAULT_SAMPLING
from engines.protocol.types import GenerateArguments

_NOWHERE = Endpoint("127.0.0.1", 1)
_NEEDED_TO_GENERATE = frozenset({MemoryTag.WEIGHTS, MemoryTag.KV_CACHE})
_HEALTH_TIMEOUT_S = 20.0
_ABORTED_BEHIND_STREAM_S = 2.0
_PATHS = frozenset(
    {"/generate", "/pause_generation", "/update_weights_from_tensor", "/weights_checker"}
)


class FakeEngine(FakeEngineState):
    """``protocol.Engine`` in memory.

    Args:
        state: as ``FakeEngineState`` takes it.

    Attributes, besides those of ``FakeEngineState`` and ``CallHandler``:
        num_held: requests that arrived in a pause and got no answer yet.
        num_output_tokens: generated so far.
        num_drafted, num_accepted: as in ``Loads``, with a draft; nothing here drafts tokens.
        num_closed: how often a client of it was closed.
    """

    def __init__(
        self,
        engine_id: str = "fake-0",
        *,
        endpoint: Endpoint = _NOWHERE,
        **state: Any,
    ) -> None:
        super().__init__(engine_id, **state)
        self.endpoint = endpoint
        self.num_held = 0
        self.num_output_tokens = 0
        self.num_drafted = self.num_accepted = 0
        self.num_closed = 0
        self._num_requests = 0
        self._loads_at_pause: Loads | None = None
        self._is_marked_unhealthy = False

    def authorize(self, access: EngineAccess) -> None:
        """Nothing: no call comes to it by an address."""

    # Requests in flight

    async def pause_generation(self, mode: PauseMode = PauseMode.ABORT) -> None:
        async with self._call("pause_generation", mode=mode):
            if mode is PauseMode.ABORT and self.paused is PauseMode.IN_PLACE and self.in_flight:
                self._is_wedged = True
                await self._until(never)
            if self.paused is None:
                self._loads_at_pause = self._loads()
            self.paused = mode
            self._notify()
            if mode is PauseMode.ABORT:
                self._abort("")
                await self._until(lambda: not self.in_flight)

    async def continue_generation(self) -> None:
        async with self._call("continue_generation"):
            self.paused = None
            self._notify()

    async def flush_cache(self, timeout_s: float | None = None) -> None:
        async with self._call("flush_cache", timeout_s=timeout_s):
            if timeout_s is None:
                is_idle = not self._num_holding_kv
            else:
                is_idle = await self._until(lambda: not self.in_flight, timeout_s)
            if not is_idle:
                raise self._rejected(
                    "flush_cache", f"Flush cache failed: {len(self.in_flight)} requests in flight"
                )
            self.is_cache_stale = False
            self.caches.flush()

    async def abort_request(self, rid: str | None = None) -> None:
        async with self._call("abort_request", rid=rid):
            if rid is None:
                self._abort("")
            else:
                self._abort_if_live(rid)

    async def update_weight_version(
        self, version: str, *, abort_all_requests: bool = False
    ) -> None:
        async with self._call("update_weight_version", version=version):
            if abort_all_requests:
                self._abort("")
            self._version = version

    # Questions

    async def model_info(self) -> ModelInfo:
        async with self._call("model_info"):
            about = {"has_image_understanding": self.settings.understands_images}
            return ModelInfo(self._model_path, self._version, about)

    async def server_info(self) -> ServerInfo:
        async with self._call("server_info"):
            by_tag = self.bytes_by_tag() if self.settings.reports_memory else {}
            info = ServerInfo(
                "0.5.23",
                "fake",
                self.settings.memory_saver,
                self.settings.weights_cpu_backup,
                by_tag,
                fingerprints=self.settings.fingerprints,
                start=self.start,
                raw={
                    "shared_image_store": self.caches.shared_image_store,
                    "random_seed": self.random_seed,
                    **_drafting(self.settings.draft),
                },
            )
            if not self.settings.reports_released:
                return info
            released = frozenset(self.released)
            return replace(info, released=released, update_groups=frozenset(self.groups))

    @property
    def start(self) -> str:
        """What is of this process alone."""
        return f"random_seed {self.random_seed}"

    async def process_start(self) -> str:
        return (await self.server_info()).start

    async def loads(self) -> Loads:
        async with self._call("loads"):
            return self._loads_at_pause if self.paused and self._loads_at_pause else self._loads()

    async def endpoints(self) -> frozenset[str]:
        async with self._call("endpoints"):
            manifest = {"/weights_manifest"} if self.settings.reports_manifest else set()
            session = {"/begin_weight_update", "/end_weight_update"}
            return _PATHS | manifest | (session if self.settings.needs_session else set())

    async def is_ready(self) -> bool:
        async with self._call("is_ready"):
            return self.paused is None

    async def is_healthy(self) -> bool:
        """A real request: in a pause it waits and returns False, and still does so afterwards.

        Until the engine has completed a request of somebody else.
        """
        async with self._call("is_healthy"):
            if not await self._until(lambda: self.paused is None, _HEALTH_TIMEOUT_S):
                self._is_marked_unhealthy = True
            return not self._is_marked_unhealthy

    # Generation

    async def generate(
        self,
        *,
        logprob_start_len: int | None = None,
        lora_path: str | None = None,
        extra_key: str | None = None,
        image: PromptImage | None = None,
        **arguments: Unpack[GenerateArguments],
    ) -> GenerateReply:
        request = _request_of(**arguments)
        if lora_path is not None and lora_path not in self.adapters:
            raise self._rejected("generate", f"no adapter {lora_path!r} is loaded")
        async with self._admitted(request):
            if request.return_logprob and logprob_start_len is not None and logprob_start_len >= 0:
                request.input_logprobs, request.cached_tokens = self.caches.logprobs(
                    self.weights,
                    request.input_ids,
                    logprob_start_len,
                    adapter=self.adapters.get(lora_path or "", ""),
                    key=extra_key or "",
                    image=image,
                )
            while not request.is_over:
                await self._step(request)
            return request.reply()

    async def stream_generate(
        self, **arguments: Unpack[GenerateArguments]
    ) -> AsyncGenerator[GenerateReply, None]:
        """One reply per token, and a last one with the finish reason.

        As SGLang it aborts the id of a stream some time after the end, also if another has it then.
        """
        request = _request_of(**arguments)
        try:
            async with self._admitted(request):
                while not request.is_over:
                    await self._step(request)
                    yield request.reply()
        finally:
            later = asyncio.get_running_loop().call_later
            later(_ABORTED_BEHIND_STREAM_S, self._abort_if_live, request.rid)

    def _abort_if_live(self, rid: str) -> None:
        """Abort requests whose id begins with ``rid``, if ``rid`` is live, as SGLang does."""
        if rid in self.in_flight:
            self._abort(rid)

    async def aclose(self) -> None:
        self.num_closed += 1

    # What calls do

    def _loads(self) -> Loads:
        return Loads(
            num_running_reqs=len(self.in_flight),
            num_waiting_reqs=self.num_held,
            num_output_tokens=self.num_output_tokens,
            num_drafted=self.num_drafted if self.settings.draft else None,
            num_accepted=self.num_accepted,
        )

    def _abort(self, prefix: str) -> None:
        for rid, request in self.in_flight.items():
            if rid.startswith(prefix):
                request.is_aborted = True
        self._notify()

    @asynccontextmanager
    async def _admitted(self, request: FakeRequest) -> AsyncIterator[None]:
        try:
            fault = await self._arrive("generate", {"rid": request.rid or None})
            self.num_held += 1
            try:
                await self._until(lambda: self.paused is None)
            finally:
                self.num_held -= 1
            self._admit(request)
            request.fault = fault
            try:
                await self._pass_gate("generate", lambda: request.is_aborted)
                yield
                if request.is_aborted and self.settings.drain_s:
                    await self._until(never, self.settings.drain_s)
            finally:
                del self.in_flight[request.rid]
                self._notify()
            self._is_marked_unhealthy = False
            if fault is not None and fault.moment == "after":
                await self._strike("generate", fault)
        except FatalCall as error:
            self.die(str(error))
            raise self._broken("generate") from None
        except EngineDied:
            raise self._broken("generate") from None

    def _admit(self, request: FakeRequest) -> None:
        self._num_requests += 1
        request.rid = request.rid or f"{self.engine_id}/{self._num_requests}"
        prompt = request.input_ids
        if request.rid in self.in_flight:
            raise self._rejected("generate", f"request id {request.rid!r} is in flight")
        if self.settings.context_length is not None and len(prompt) >= self.settings.context_length:
            raise self._rejected(
                "generate",
                f"The input ({len(prompt)} tokens) is longer than the model's context length "
                f"({self.settings.context_length} tokens).",
            )
        if why := why_refused(request.sampling, self.settings.vocab_size):
            raise self._rejected("generate", why)
        request.drawing = self._drawing(request)
        self._assert(not self.released & _NEEDED_TO_GENERATE, "generate while memory is released")
        inside = all(0 <= token < self.settings.vocab_size for token in prompt)
        self._assert(inside, "a token id outside the vocabulary")
        self.in_flight[request.rid] = request
        self._notify()

    def _drawing(self, request: FakeRequest) -> Drawing:
        """How its tokens are drawn."""
        return Drawing(request.sampling, self.settings.eos_token_id)

    async def _step(self, request: FakeRequest) -> None:
        """One token, or the end of the request."""
        fault = request.fault
        if fault is not None and fault.moment == len(request.output_ids):
            request.fault = None
            await self._strike("generate", fault)
        if self.settings.token_s:
            await self._until(lambda: request.is_aborted, self.settings.token_s)
        else:  # a real engine's first token comes when its client has gone on to other work
            await asyncio.sleep(0)
        await self._until(lambda: self._goes_on(request))
        if not request.is_aborted:
            shift = self.weights.num_losses if self.weights.lost else 0
            request.logprob = math.nan if self.computes_nan else -1.0
            request.add_token(self._version, self.settings.vocab_size, shift)
            self.num_output_tokens += 1

    def _goes_on(self, request: FakeRequest) -> bool:
        """A pause in place keeps also who is aborted, since SGLang takes no step then."""
        is_retracted = self.paused is PauseMode.RETRACT and not request.is_aborted
        return self.paused is not PauseMode.IN_PLACE and not is_retracted


def _drafting(draft: str) -> dict[str, Any]:
    """What SGLang reports of its draft, with a copy of it over a release."""
    if not draft:
        return {}
    return {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": draft,
        "enable_draft_weights_cpu_backup": True,
    }


def _request_of(
    *,
    input_ids: Sequence[int] | None = None,
    text: str | None = None,
    sampling_params: SamplingParams = DEFAULT_SAMPLING,
    rid: str | None = None,
    return_logprob: bool = False,
) -> FakeRequest:
    if (input_ids is None) == (text is None):
        raise ValueError("generate takes either input_ids or text")
    if sampling_params.n != 1:
        raise ValueError(f"generate makes one completion, not n={sampling_params.n}: call it again")
    prompt = tuple((text or "").encode()) if input_ids is None else tuple(input_ids)
    return FakeRequest(rid or "", prompt, sampling_params, return_logprob)
