"""One fake vLLM: answers to the paths of vLLM 0.32.0, by the state of a fake engine.

Always true:
- a call that ends the real server ends this one: weights that sleep are updated or read, or a
  request runs while memory sleeps or an update is open;
- what fools a caller of the real one is answered with 200 here too: a second sleep, a wake of what
  is awake, a push that lacks tensors, a sleep of level 2 without a push after it.  The wake of the
  last memory resumes the server by itself.

The calls have the names of ``protocol.Engine``, so that faults are planned as for the other face.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from engines.fake.engine.request import FakeRequest
from engines.fake.vllm.forms import FORMS, BadRequest, Form
from engines.fake.vllm.weight_acts import Arguments, FakeVllmWeights, Json
from engines.protocol import MemoryTag, PauseMode
from engines.protocol.errors import EngineRejected
from engines.vllm import routes
from engines.vllm.features import PROCESSED, parse_version

Act = Callable[[Arguments], Awaitable[Json]]
Answer = Callable[["FakeVllm", Arguments], Json]
_REFUSES_IN_PAUSE = (0, 33)
_ASLEEP = {
    "weights": {MemoryTag.WEIGHTS},
    # Its CUDA graphs have no tag; what they hold counts as the KV cache's here.
    "kv_cache": {MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH},
}
CORE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
TEXT = "text"
"""The only entry of an answer that is plain text."""


class FakeVllm(FakeVllmWeights):
    """A fake engine behind vLLM's paths.

    Args:
        version: of vLLM.
        without: paths that it does not serve.
        state: as ``FakeVllmWeights`` takes it.

    Attributes:
        level: of the last sleep that did anything.
        has_core: its engine core lives.
        num_ranks: tensor-parallel ranks that it reports.
        logprobs_mode: as vLLM's option of this name.
    """

    num_ranks = 1
    logprobs_mode = PROCESSED

    def __init__(
        self,
        engine_id: str = "fake-0",
        *,
        version: str = "0.32.0",
        without: frozenset[str] = frozenset(),
        **state: Any,
    ) -> None:
        super().__init__(engine_id, **state)
        self.level = 0
        self.has_core = True
        self.vllm_version = version
        self._without = without
        self._acts = self._served()

    def _served(self) -> dict[str, Act]:
        asked = {path: partial(_answer, self, *question) for path, question in _QUESTIONS.items()}
        acts: dict[str, Act] = {
            **asked,
            routes.PAUSE: self._pause,
            routes.RESUME: self._resume,
            routes.SLEEP: self._sleep,
            routes.WAKE_UP: self._wake_up,
            routes.RELEASE_KV: self._release_kv,
            routes.RESET_CACHE: self._reset_cache,
            routes.ABORT: self._abort_requests,
            routes.START_UPDATE: self._start_update,
            routes.UPDATE: self._update,
            routes.FINISH_UPDATE: self._finish_update,
            routes.SET_VERSION: self._set_version,
            routes.CHECKER: self._check,
            routes.RPC: self._rpc,
            **{path: partial(self._generate, path) for path in FORMS},
            routes.LOAD_LORA: self._load_lora,
            routes.UNLOAD_LORA: self._unload_lora,
        }
        return {path: act for path, act in acts.items() if path not in self._without}

    def lose_core(self) -> None:
        """As when the system kills its engine core: the API server answers each generation with an
        error, also those in flight.  The real one ends some seconds later."""
        self.has_core = False
        self._notify()

    @property
    def paths(self) -> frozenset[str]:
        return frozenset(self._acts)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_acts"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._acts = self._served()

    async def answer(self, path: str, arguments: Arguments) -> Json:
        """The answer of a path to its query and body, as one mapping.

        Raises:
            EngineRejected: vLLM answers with an error status.
            EngineUnreachable: it is dead, or is killed by this.
        """
        act = self._acts.get(path)
        if act is None:
            raise self._rejected(path, '{"detail":"Not Found"}', 404)
        return await act(arguments)

    # Pauses

    async def _pause(self, arguments: Arguments) -> Json:
        mode, clears = arguments.get("mode", "abort"), arguments.get("clear_cache") != "false"
        async with self._call("pause_generation", mode=_pause_mode(mode, clears=clears)):
            await self._enter_pause(mode, clears=clears)
        return {"status": "paused"}

    async def _enter_pause(self, mode: str, *, clears: bool) -> None:
        """``wait`` has no deadline."""
        self.paused = _pause_mode(mode, clears=clears)
        self._notify()
        if mode == "abort":
            self._abort("")
        if mode != "keep":
            await self._until(lambda: not self.in_flight)
        if clears:
            self.is_cache_stale = False

    async def _resume(self, arguments: Arguments) -> Json:
        async with self._call("continue_generation"):
            self._open()
        return {"status": "resumed"}

    def _open(self) -> None:
        self.paused = None
        self._notify()

    async def _reset_cache(self, arguments: Arguments) -> Json:
        async with self._call("flush_cache"):
            is_held = self._num_holding_kv and arguments.get("reset_running_requests") != "true"
            if not is_held:
                self.is_cache_stale = False
            return {"success": not is_held}

    async def _abort_requests(self, arguments: Arguments) -> Json:
        ids = arguments.get("request_ids")
        async with self._call("abort_request", rid=ids):
            for rid, request in self.in_flight.items():
                if not ids or routes.REQUEST_PREFIX + rid in ids:
                    request.is_aborted = True
            self._notify()
        return {"status": "aborted"}

    # Memory

    async def _sleep(self, arguments: Arguments) -> Json:
        level, mode = int(arguments.get("level", 1)), arguments.get("mode", "abort")
        tags = tuple(MemoryTag)
        async with self._call("release_memory_occupation", tags=tags, level=level):
            await self._enter_pause(mode, clears=True)
            # A second sleep is a line in the log, whatever its level.
            if level and MemoryTag.WEIGHTS not in self.released:
                self.released |= set(tags)
                self.level = level
        return {"status": "sleeping", "level": level}

    async def _release_kv(self, arguments: Arguments) -> Json:
        operation, tags = "release_memory_occupation", _ASLEEP["kv_cache"]
        async with self._call(operation, tags=tuple(tags)):
            if self.paused is None or self.in_flight:
                raise self._rejected(operation, "requires a completed pause first", 500)
            if self.released:
                raise self._rejected(operation, "requires all executor memory to be resident", 500)
            self.released |= tags
        return {"status": "kv_cache_released"}

    async def _wake_up(self, arguments: Arguments) -> Json:
        names = [arguments["tags"]] if arguments.get("tags") else list(_ASLEEP)
        tags: set[MemoryTag] = set().union(*(_ASLEEP[name] for name in names))
        async with self._call("resume_memory_occupation", tags=tuple(tags)):
            if tags <= self.released:  # a tag that is awake is a line in the log
                self.released -= tags
                if MemoryTag.WEIGHTS in tags and self.level > 1 and self.settings.memory_saver:
                    self.weights.lose()
            if not self.released:
                self._open()
            return {"status": "sleeping" if self.released else "awake", "tags": names}

    # Generation

    async def _generate(self, path: str, arguments: Arguments) -> Json:
        form = FORMS[path](arguments, self.logprobs_mode)
        request = self._request(form)
        async with self._admitted(request):
            prompt_logprobs = _prompt_logprobs(self, request, arguments)
            while not request.is_over:
                await self._step(request)
            whole = form.whole(request)
        return whole | {"prompt_logprobs": prompt_logprobs}

    async def stream(
        self, arguments: Arguments, path: str = routes.GENERATE
    ) -> AsyncGenerator[Json, None]:
        """The events of a streamed completion: each has only what is new."""
        form = FORMS[path](arguments, self.logprobs_mode)
        request = self._request(form)
        async with self._admitted(request):
            for event in form.begin(request):
                yield event
            sent = 0
            while not request.is_over:
                try:
                    await self._step(request)
                except EngineRejected as error:  # its head is sent
                    what = {"type": "InternalServerError", "param": None, "code": error.status}
                    yield {"error": {"message": error.body, **what}}
                    return
                if len(request.output_ids) > sent or request.is_over:
                    yield form.event(request, sent)
                    sent = len(request.output_ids)
            for event in form.end(request):
                yield event

    def _request(self, form: Form) -> FakeRequest:
        version = parse_version(self.vllm_version) or (0, 0)
        if self.paused is PauseMode.ABORT and version >= _REFUSES_IN_PAUSE:
            raise self._rejected("generate", "the server is paused", 503)
        rid = form.raw.get("request_id") or ""
        if rid in self.in_flight:  # another request of the same name is one of its own
            rid = f"{rid}-{self._num_requests}"
        try:
            return form.request(rid)
        except BadRequest as error:
            raise self._rejected("generate", str(error)) from None

    async def _step(self, request: FakeRequest) -> None:
        num = len(request.output_ids)
        await super()._step(request)
        if not self.has_core:
            raise self._rejected("generate", CORE_DEAD, 500)
        # The layers that a session loads are elsewhere meanwhile.
        is_idle = not self.is_updating or len(request.output_ids) == num
        self._assert(is_idle, "a request runs while a weight update is open")


async def _answer(engine: FakeVllm, operation: str, answer: Answer, arguments: Arguments) -> Json:
    async with engine._call(operation):
        return answer(engine, arguments)


def _config(engine: FakeVllm, arguments: Arguments) -> Json:
    return {
        "vllm_config": {
            "model_config": {
                "model": engine._model_path,
                "enable_sleep_mode": engine.settings.memory_saver,
                "logprobs_mode": engine.logprobs_mode,
                "generation_config": "auto",
                "override_generation_config": {},
            },
            "parallel_config": {
                "tensor_parallel_size": engine.num_ranks,
                "pipeline_parallel_size": 1,
            },
            "weight_transfer_config": {
                "backend": routes.PLUGIN_BACKEND if engine.has_plugin else "nccl"
            },
        }
    }


def _models(engine: FakeVllm, arguments: Arguments) -> Json:
    name = engine._model_path
    return {"object": "list", "data": [{"id": name, "object": "model", "root": name}]}


def _health(engine: FakeVllm, arguments: Arguments) -> Json:
    """Green as long as its core lives."""
    if not engine.has_core:
        raise engine._rejected("is_ready", "", 503)
    return {}


def _metrics(engine: FakeVllm, arguments: Arguments) -> Json:
    gauges = {"running": len(engine.in_flight), "waiting": engine.num_held}
    lines = [f"vllm:num_requests_{name} {value}.0" for name, value in gauges.items()]
    lines.append(f"vllm:generation_tokens_total {engine.num_output_tokens}.0")
    return {TEXT: "\n".join(lines)}


_QUESTIONS: Mapping[str, tuple[str, Answer]] = {
    routes.IS_PAUSED: ("is_paused", lambda engine, _: {"is_paused": engine.paused is not None}),
    routes.WEIGHT_INFO: ("weight_version", lambda engine, _: {"weight_version": engine._version}),
    routes.WORLD_SIZE: ("world_size", lambda engine, _: {"world_size": 1}),
    routes.SERVER_INFO: ("server_info", _config),
    routes.VERSION: ("version", lambda engine, _: {"version": engine.vllm_version}),
    routes.OPENAPI: ("endpoints", lambda engine, _: {"paths": {path: {} for path in engine.paths}}),
    routes.HEALTH: ("is_ready", _health),
    routes.METRICS: ("loads", _metrics),
    routes.TOKENIZE: ("tokenize", lambda _, asked: {"tokens": list(str(asked["prompt"]).encode())}),
    routes.MODELS: ("models", _models),
}
"""The call that a path is, and its answer, which changes nothing."""


def _prompt_logprobs(engine: FakeVllm, request: FakeRequest, arguments: Arguments) -> Any:
    if "prompt_logprobs" not in arguments.get("sampling_params", {}):
        return None
    adapter = engine.adapters.get(arguments.get("model") or "", "")
    values, _ = engine.caches.logprobs(engine.weights, request.input_ids, 0, adapter=adapter)
    pairs = zip(request.input_ids[1:], values, strict=True)
    return [None, *({str(token): {"logprob": value}} for token, value in pairs)]


def _pause_mode(mode: str, *, clears: bool) -> PauseMode:
    """What the other face calls it: only ``keep`` freezes requests."""
    if mode != "keep":
        return PauseMode.ABORT
    return PauseMode.RETRACT if clears else PauseMode.IN_PLACE
