"""One fake engine: SGLang 0.5.23's control protocol over a few sets and flags.

Always true:
- a call that ends the real engine ends this one;
- a call returns or raises only when the engine has really done, or really not done, what it was
  asked, unless its answer was to be lost.

Not here: how long things take, HTTP, and what several ranks do.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from engines.fake.calls import Callee, Died, never
from engines.fake.requests import Request
from engines.fake.weights import DEFAULT_TENSORS, FakeWeights, Fatal, digest_of, unpack_tensors
from engines.protocol import (
    Endpoint,
    GenerateReply,
    Loads,
    MemoryTag,
    ModelInfo,
    PauseMode,
    SamplingParams,
    ServerInfo,
    TensorInfo,
    WeightsReport,
)

_DEFAULT_SAMPLING = SamplingParams()
_NOWHERE = Endpoint("127.0.0.1", 1)
_NEEDED_TO_GENERATE = frozenset({MemoryTag.WEIGHTS, MemoryTag.KV_CACHE})
_HEALTH_TIMEOUT_S = 20.0
_MANIFEST_PATHS = frozenset({"/weights_manifest"})
_SESSION_PATHS = frozenset({"/begin_weight_update", "/end_weight_update"})
_PATHS = frozenset(
    {"/generate", "/pause_generation", "/update_weights_from_tensor", "/weights_checker"}
)


class FakeEngine(Callee):
    """``protocol.Engine`` in memory.

    Args:
        tensors: the model's tensors.
        needs_session: weights are updated between begin and end only (SGLang 0.5.21 and later).
        token_s: seconds each token takes.
        drain_s: seconds until an aborted request has left.
        context_length: tokens a prompt must be shorter than; None takes any.
        tells_released: it says which tags are released, as the embedded engine does and SGLang
            does not.
        tells_manifest: it lists its tensors, as the embedded engine does and SGLang does not.

    Attributes, besides those of ``Callee``:
        released: tags whose memory is given back.
        paused: the mode of the pause; None while it serves.
        in_flight: admitted requests, by id.
        num_held: requests that arrived in a pause and got no answer yet.
        is_cache_stale: the prefix cache holds entries of older weights.
        num_closed: how often a client of it was closed.
    """

    def __init__(
        self,
        engine_id: str = "fake-0",
        *,
        endpoint: Endpoint = _NOWHERE,
        model_path: str = "/models/fake",
        tensors: Sequence[TensorInfo] = DEFAULT_TENSORS,
        weight_version: str = "0",
        memory_saver: bool = True,
        weights_cpu_backup: bool = False,
        needs_session: bool = True,
        token_s: float = 0.0,
        drain_s: float = 0.0,
        vocab_size: int = 1000,
        context_length: int | None = None,
        memory_bytes: int = 3_000,
        tells_manifest: bool = False,
        tells_released: bool = False,
    ) -> None:
        super().__init__(engine_id)
        self.endpoint = endpoint
        self.released: set[MemoryTag] = set()
        self.paused: PauseMode | None = None
        self.in_flight: dict[str, Request] = {}
        self.num_held = 0
        self.is_cache_stale = False
        self.num_closed = 0
        self.weights = FakeWeights.initial(tensors)
        self.adapters: dict[str, str] = {}
        self._version = weight_version
        self._model_path = model_path
        self._memory_saver = memory_saver
        self._backup = weights_cpu_backup
        self._needs_session = needs_session
        self._token_s = token_s
        self._drain_s = drain_s
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._memory_bytes = memory_bytes
        self._tells_manifest = tells_manifest
        self._tells_released = tells_released
        self._is_updating = False
        self._is_wedged = False
        self._groups: set[str] = set()
        self._snapshot: dict[str, str] = {}
        self._num_requests = 0
        self._loads_at_pause: Loads | None = None
        self._is_marked_unhealthy = False

    # For tests: facts out

    @property
    def weights_are_garbage(self) -> bool:
        """Whether any tensor's contents were lost and not written again."""
        return bool(self.weights.lost)

    @property
    def is_updating(self) -> bool:
        """Whether a weight update session is open."""
        return self._is_updating

    @property
    def resident_bytes(self) -> int:
        """Memory it holds: a third of the whole per tag."""
        if self.is_dead:
            return 0
        released = self.released if self._memory_saver else set()
        return self._memory_bytes - len(released) * (self._memory_bytes // len(MemoryTag))

    # Requests in flight

    async def pause_generation(self, mode: PauseMode = PauseMode.ABORT) -> None:
        async with self._call("pause_generation", mode=mode):
            if mode is PauseMode.ABORT and self.paused is PauseMode.IN_PLACE and self.in_flight:
                self._is_wedged = True
                await self._until(lambda: False)
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

    async def abort_request(self, rid: str | None = None) -> None:
        async with self._call("abort_request", rid=rid):
            self._abort(rid or "")

    # Memory

    async def release_memory_occupation(self, tags: Sequence[MemoryTag]) -> None:
        async with self._call("release_memory_occupation", tags=tuple(tags)):
            wanted = set(tags) or set(MemoryTag)
            if self._num_holding_kv:
                self._assert(False, f"release while {len(self.in_flight)} requests run")
            if self._memory_saver:
                self._assert(not wanted & self.released, "release of a tag twice")
                self.released |= wanted

    async def resume_memory_occupation(self, tags: Sequence[MemoryTag]) -> None:
        async with self._call("resume_memory_occupation", tags=tuple(tags)):
            wanted = set(tags) or set(MemoryTag)
            if self._memory_saver:
                self._assert(wanted <= self.released, "resume of a tag that is not released")
                self.released -= wanted
                if MemoryTag.WEIGHTS in wanted and not self._backup:
                    self.weights.lose()

    # Weights

    async def begin_weight_update(self) -> None:
        async with self._call("begin_weight_update"):
            if self._is_updating:
                raise self._rejected("begin_weight_update", "a weight update is already open")
            self._is_updating = True

    async def end_weight_update(self) -> None:
        async with self._call("end_weight_update"):
            if not self._is_updating:
                raise self._rejected("end_weight_update", "no weight update is open")
            self._is_updating = False

    async def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[str],
        *,
        load_format: str | None = None,
        flush_cache: bool = True,
        weight_version: str | None = None,
    ) -> None:
        operation = "update_weights_from_tensor"
        async with self._call(operation, flush_cache=flush_cache, weight_version=weight_version):
            self._require_session(operation)
            self._assert(bool(serialized_named_tensors), "too few payloads")
            pairs = unpack_tensors(serialized_named_tensors[0])
            await self._write(operation, pairs, flush_cache, weight_version)

    async def init_weights_update_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
    ) -> None:
        async with self._call("init_weights_update_group", group_name=group_name):
            self._groups.add(group_name)

    async def destroy_weights_update_group(self, group_name: str) -> None:
        async with self._call("destroy_weights_update_group", group_name=group_name):
            self._require_group("destroy_weights_update_group", group_name)
            self._groups.remove(group_name)

    async def update_weights_from_distributed(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        flush_cache: bool = True,
        weight_version: str | None = None,
    ) -> None:
        operation = "update_weights_from_distributed"
        async with self._call(operation, flush_cache=flush_cache, weight_version=weight_version):
            self._require_session(operation)
            self._require_group(operation, group_name)
            # No numbers travel to a fake: what came is told by its version.
            pairs = [(name, f"{name}@{weight_version}") for name in names]
            await self._write(operation, pairs, flush_cache, weight_version)

    async def update_weights_from_disk(
        self, model_path: str, *, flush_cache: bool = True, weight_version: str | None = None
    ) -> None:
        operation = "update_weights_from_disk"
        async with self._call(operation, model_path=model_path, weight_version=weight_version):
            await self._write(operation, [], flush_cache, weight_version)
            self.weights.load_path(model_path)
            self._model_path = model_path

    async def update_weights_from_peer(
        self, url: str, *, flush_cache: bool = True, weight_version: str | None = None
    ) -> None:
        """Refused, as by SGLang, which has no such endpoint."""
        async with self._call("update_weights_from_peer", url=url):
            raise self._rejected("update_weights_from_peer", "Not Found", 404)

    async def update_weight_version(
        self, version: str, *, abort_all_requests: bool = False
    ) -> None:
        async with self._call("update_weight_version", version=version):
            if abort_all_requests:
                self._abort("")
            self._version = version

    async def weight_version(self) -> str:
        async with self._call("weight_version"):
            return self._version

    async def weights_checker(self, action: str = "checksum") -> WeightsReport:
        async with self._call("weights_checker", action=action):
            self._require_weights("check weights")
            if action == "snapshot":
                self._snapshot = dict(self.weights.digests)
            elif action == "compare":
                if self._snapshot != self.weights.digests:
                    raise self._rejected("weights_checker", "weights differ from the snapshot")
            elif action == "reset_tensors":
                self.weights.lose()
            elif action == "checksum":
                return WeightsReport(self.weights.checksum(), (dict(self.weights.digests),))
            else:
                raise self._rejected("weights_checker", f"unknown action {action!r}")
            return WeightsReport(None)

    async def weights_manifest(self) -> tuple[TensorInfo, ...]:
        async with self._call("weights_manifest"):
            return tuple(self.weights.tensors.values())

    # LoRA

    async def load_lora_adapter(self, name: str, path: str) -> None:
        async with self._call("load_lora_adapter", name=name):
            self._load_adapter("load_lora_adapter", name, path)

    async def load_lora_adapter_from_tensors(
        self, name: str, config: Mapping[str, Any], serialized_named_tensors: Sequence[str]
    ) -> None:
        async with self._call("load_lora_adapter_from_tensors", name=name):
            content = digest_of(tuple(serialized_named_tensors))
            self._load_adapter("load_lora_adapter_from_tensors", name, content)

    async def unload_lora_adapter(self, name: str) -> None:
        async with self._call("unload_lora_adapter", name=name):
            if self.adapters.pop(name, None) is None:
                raise self._rejected("unload_lora_adapter", f"no adapter {name!r} is loaded")

    # Questions

    async def model_info(self) -> ModelInfo:
        async with self._call("model_info"):
            return ModelInfo(self._model_path, self._version)

    async def server_info(self) -> ServerInfo:
        async with self._call("server_info"):
            released = frozenset(self.released) if self._tells_released else None
            saver, backup = self._memory_saver, self._backup
            return ServerInfo("0.5.23", "fake", saver, backup, released=released)

    async def loads(self) -> Loads:
        async with self._call("loads"):
            return self._loads_at_pause if self.paused and self._loads_at_pause else self._loads()

    async def endpoints(self) -> frozenset[str]:
        async with self._call("endpoints"):
            paths = _PATHS | _MANIFEST_PATHS if self._tells_manifest else _PATHS
            return paths | _SESSION_PATHS if self._needs_session else paths

    async def is_ready(self) -> bool:
        async with self._call("is_ready"):
            return self.paused is None

    async def is_healthy(self) -> bool:
        """A real request: in a pause it waits and says no, and goes on saying no afterwards.

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
        input_ids: Sequence[int] | None = None,
        text: str | None = None,
        sampling_params: SamplingParams = _DEFAULT_SAMPLING,
        rid: str | None = None,
        return_logprob: bool = False,
        logprob_start_len: int | None = None,
        lora_path: str | None = None,
    ) -> GenerateReply:
        prompt = _prompt_ids(input_ids, text)
        if lora_path is not None and lora_path not in self.adapters:
            raise self._rejected("generate", f"no adapter {lora_path!r} is loaded")
        async with self._admitted(prompt, sampling_params, rid, return_logprob) as request:
            if return_logprob and logprob_start_len is not None and logprob_start_len >= 0:
                adapter = self.adapters.get(lora_path or "", "")
                request.input_logprobs = self.weights.logprobs(prompt[logprob_start_len:], adapter)
            while not request.is_over:
                await self._step(request)
            return request.reply()

    async def stream_generate(
        self,
        *,
        input_ids: Sequence[int] | None = None,
        text: str | None = None,
        sampling_params: SamplingParams = _DEFAULT_SAMPLING,
        rid: str | None = None,
        return_logprob: bool = False,
    ) -> AsyncGenerator[GenerateReply, None]:
        """One reply per token, and a last one that says why it ended."""
        prompt = _prompt_ids(input_ids, text)
        async with self._admitted(prompt, sampling_params, rid, return_logprob) as request:
            while not request.is_over:
                await self._step(request)
                yield request.reply()

    async def aclose(self) -> None:
        self.num_closed += 1

    # What refuses a call

    def _garble(self) -> None:
        self.weights.garble()

    def _is_stuck(self, operation: str) -> bool:
        return self._is_wedged and operation.endswith("_generation")

    def _require_session(self, operation: str) -> None:
        if self._needs_session and not self._is_updating:
            raise self._rejected(operation, "weights are updated only after begin_weight_update")

    def _require_group(self, operation: str, group_name: str) -> None:
        if group_name not in self._groups:
            raise self._rejected(operation, f"no weight update group {group_name!r}")

    def _require_weights(self, what: str) -> None:
        self._assert(MemoryTag.WEIGHTS not in self.released, f"{what} while weights are released")

    # What calls do

    @property
    def _num_holding_kv(self) -> int:
        return 0 if self.paused is PauseMode.RETRACT else len(self.in_flight)

    def _loads(self) -> Loads:
        return Loads(num_running_reqs=len(self.in_flight), num_waiting_reqs=self.num_held)

    def _abort(self, prefix: str) -> None:
        for rid, request in self.in_flight.items():
            if rid.startswith(prefix):
                request.is_aborted = True
        self._notify()

    def _load_adapter(self, operation: str, name: str, source: str) -> None:
        if name in self.adapters:
            raise self._rejected(operation, f"adapter {name!r} is already loaded")
        self._require_weights("load an adapter")
        self.adapters[name] = source

    async def _write(
        self,
        operation: str,
        pairs: Sequence[tuple[str, Any]],
        flush_cache: bool,
        weight_version: str | None,
    ) -> None:
        self._require_weights("update")
        # Not paused, an update waits for all requests in flight.
        await self._until(lambda: self.paused is not None or not self.in_flight)
        self.weights.write(pairs)
        self._version = weight_version or self._version
        self.is_cache_stale = not flush_cache
        if flush_cache and self._num_holding_kv:
            self.is_cache_stale = True
            raise self._rejected(operation, "weights changed, but the cache was not flushed")

    @asynccontextmanager
    async def _admitted(
        self, prompt: tuple[int, ...], sampling: SamplingParams, rid: str | None, logprobs: bool
    ) -> AsyncIterator[Request]:
        try:
            fault = await self._arrive("generate", {"rid": rid})
            await self._wait_for_continue()
            request = self._admit(prompt, sampling, rid, logprobs)
            request.fault = fault
            try:
                await self._pass_gate("generate", lambda: request.is_aborted)
                yield request
                if request.is_aborted and self._drain_s:
                    await self._until(never, self._drain_s)
            finally:
                del self.in_flight[request.rid]
                self._notify()
            self._is_marked_unhealthy = False
            if fault is not None and fault.executed:
                await self._strike("generate", fault)
        except Fatal as error:
            self.die(str(error))
            raise self._broken("generate") from None
        except Died:
            raise self._broken("generate") from None

    async def _wait_for_continue(self) -> None:
        self.num_held += 1
        try:
            await self._until(lambda: self.paused is None)
        finally:
            self.num_held -= 1

    def _admit(
        self, prompt: tuple[int, ...], sampling: SamplingParams, rid: str | None, logprobs: bool
    ) -> Request:
        self._num_requests += 1
        request = Request(
            rid or f"{self.engine_id}/{self._num_requests}", prompt, sampling, logprobs
        )
        if request.rid in self.in_flight:
            raise self._rejected("generate", f"request id {request.rid!r} is in flight")
        if self._context_length is not None and len(prompt) >= self._context_length:
            raise self._rejected(
                "generate", f"a prompt of {len(prompt)} tokens, of {self._context_length} there are"
            )
        self._assert(not self.released & _NEEDED_TO_GENERATE, "generate while memory is released")
        inside = all(0 <= token < self._vocab_size for token in prompt)
        self._assert(inside, "a token id outside the vocabulary")
        self.in_flight[request.rid] = request
        self._notify()
        return request

    async def _step(self, request: Request) -> None:
        """One token, or the end of the request."""
        fault = request.fault
        if fault is not None and fault.tokens == len(request.output_ids):
            request.fault = None
            await self._strike("generate", fault)
        frozen = (PauseMode.RETRACT, PauseMode.IN_PLACE)
        if self._token_s:
            await self._until(lambda: request.is_aborted, self._token_s)
        await self._until(lambda: request.is_aborted or self.paused not in frozen)
        if not request.is_aborted:
            shift = self.weights.num_losses if self.weights.lost else 0
            request.add_token(self._version, self._vocab_size, shift)


def _prompt_ids(input_ids: Sequence[int] | None, text: str | None) -> tuple[int, ...]:
    if (input_ids is None) == (text is None):
        raise ValueError("generate takes either input_ids or text")
    return tuple((text or "").encode()) if input_ids is None else tuple(input_ids)
