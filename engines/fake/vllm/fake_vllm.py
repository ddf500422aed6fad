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

import base64
import binascii
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engines.fake.engine.fake_engine import FakeEngine
from engines.fake.engine.fake_weights import FatalCall, tensors_in_file, unpack_tensors
from engines.fake.engine.request import FakeRequest
from engines.fake.vllm.forms import FORMS, BadRequest, Form
from engines.protocol import MemoryTag, PauseMode
from engines.protocol.errors import EngineRejected
from engines.tensors.flattened_bucket import FLATTENED_BUCKET, lay_out
from engines.vllm import routes
from engines.vllm.features import parse_version

Json = dict[str, Any]
Arguments = Mapping[str, Any]
_REFUSES_IN_PAUSE = (0, 33)
_ASLEEP = {
    "weights": {MemoryTag.WEIGHTS},
    # Its CUDA graphs have no tag; what they hold counts as the KV cache's here.
    "kv_cache": {MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH},
}
_OPERATIONS = {
    "path": "update_weights_from_disk",
    "broadcast": "update_weights_from_distributed",
}
"""The call that a bucket is, by what the plugin's ``update_info`` has; else it is by tensor."""
_RANK = "dp0:pp0:pcp0:tp0:"
_PICKLE = b"\x80"
CORE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
TEXT = "text"
"""The only entry of an answer that is plain text."""


class FakeVllm(FakeEngine):
    """A fake engine behind vLLM's paths.

    Args:
        version: of vLLM.
        has_plugin: this package's plugin is in its workers.
        without: paths that it does not serve.
        state: as ``FakeEngine`` takes it.

    Attributes:
        level: of the last sleep that did anything.
        has_core: its engine core lives.
    """

    def __init__(
        self,
        engine_id: str = "fake-0",
        *,
        version: str = "0.32.0",
        has_plugin: bool = True,
        without: frozenset[str] = frozenset(),
        **state: Any,
    ) -> None:
        super().__init__(engine_id, **state)
        self.level = 0
        self.has_core = True
        self._vllm_version = version
        self._has_plugin = has_plugin
        self._without = without
        self._acts = self._served()

    def _served(self) -> dict[str, Callable[[Arguments], Awaitable[Json]]]:
        acts = self._all_acts().items()
        return {path: act for path, act in acts if path not in self._without}

    def _all_acts(self) -> dict[str, Callable[[Arguments], Awaitable[Json]]]:
        return {
            routes.PAUSE: self._pause,
            routes.RESUME: self._resume,
            routes.IS_PAUSED: self._is_paused,
            routes.SLEEP: self._sleep,
            routes.WAKE_UP: self._wake_up,
            routes.RELEASE_KV: self._release_kv,
            routes.RESET_CACHE: self._reset_cache,
            routes.ABORT: self._abort_requests,
            routes.START_UPDATE: self._start_update,
            routes.UPDATE: self._update,
            routes.FINISH_UPDATE: self._finish_update,
            routes.SET_VERSION: self._set_version,
            routes.WEIGHT_INFO: self._weight_info,
            routes.CHECKER: self._check,
            routes.WORLD_SIZE: self._world_size,
            routes.RPC: self._rpc,
            routes.SERVER_INFO: self._server_info,
            routes.VERSION: self._tell_version,
            routes.OPENAPI: self._openapi,
            routes.HEALTH: self._health,
            routes.METRICS: self._metrics,
            routes.TOKENIZE: self._tokenize,
            **{path: partial(self._generate, path) for path in FORMS},
            routes.MODELS: self._models,
            routes.LOAD_LORA: self._load_lora,
            routes.UNLOAD_LORA: self._unload_lora,
        }

    def lose_core(self) -> None:
        """As when the system kills its engine core: the API server answers each generation with an
        error, also those in flight.  The real one ends some seconds later."""
        self.has_core = False
        self._notify()

    @property
    def _counts_memory(self) -> bool:
        return self.settings.memory_saver and (
            self.settings.reports_memory or self.settings.reports_released
        )

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

    async def _is_paused(self, arguments: Arguments) -> Json:
        async with self._call("is_paused"):
            return {"is_paused": self.paused is not None}

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

    # Weights

    async def _start_update(self, arguments: Arguments) -> Json:
        operation = "begin_weight_update"
        async with self._call(operation):
            if self.is_updating:
                why = "start_weight_update called while a weight update is already active"
                raise self._rejected(operation, why, 500)
            self._require_weights("start an update")
            self.is_updating = True
        return {"message": "Weight update started"}

    async def _update(self, arguments: Arguments) -> Json:
        """What the push does not name keeps its contents, and nothing says so."""
        info = arguments["update_info"]
        by = info.keys() & _OPERATIONS.keys()
        operation = _OPERATIONS[by.pop()] if by else "update_weights_from_tensor"
        async with self._call(operation, weight_version=None):
            self._require_weights("update")
            if not self.is_updating:
                raise self._rejected(operation, "start_weight_update must be called before", 500)
            try:
                self._load(info)
            except FatalCall as error:  # half of the push stays
                self.is_updating = False
                raise self._rejected(operation, str(error), 500) from None
        return {"message": "Weights updated"}

    def _load(self, info: Arguments) -> None:
        """Raises FatalCall for what the plugin refuses."""
        if "path" in info:
            self.weights.load_path(info["path"])
            return
        broadcast = info.get("broadcast")
        pairs = self._broadcast(broadcast) if broadcast else _tensors_of(info["content"])
        if unknown := sorted(name for name, _ in pairs if name not in self.weights.tensors):
            raise FatalCall(f"the model has no tensor {unknown[0]}")
        self.weights.write(pairs)

    def _broadcast(self, bucket: Arguments) -> list[tuple[str, Any]]:
        """No numbers are sent to a fake: the name of the group stands for the contents."""
        names, group_name = bucket["names"], bucket["group_name"]
        if bucket["load_format"] == FLATTENED_BUCKET:
            try:
                lay_out(names, bucket["dtypes"], bucket["shapes"])
            except ValueError as error:
                raise FatalCall(str(error)) from None
        if why := self._why_outside(group_name):
            raise FatalCall(why)
        return [(name, f"{name}@{group_name}") for name in names]

    async def _finish_update(self, arguments: Arguments) -> Json:
        operation, version = "end_weight_update", arguments.get("weight_version")
        async with self._call(operation, weight_version=version):
            if not self.is_updating:
                raise self._rejected(operation, "no weight update is active", 500)
            self._require_weights("finish an update")
            self.is_updating = False
            self._version = version or self._version
            self.is_cache_stale = True
        return {"message": "Weight update finished"}

    async def _set_version(self, arguments: Arguments) -> Json:
        version = arguments["new_version"]
        async with self._call("update_weight_version", version=version):
            self._version = version
        return {"success": True, "new_version": version}

    async def _weight_info(self, arguments: Arguments) -> Json:
        async with self._call("weight_version"):
            return {"weight_version": self._version}

    async def _check(self, arguments: Arguments) -> Json:
        action = arguments["action"]
        async with self._call("weights_checker", action=action):
            self._require_weights("check weights")
            if action == "reset":
                self.weights.lose()
                return {"status": "reset"}
            return {"checksums": {_RANK + name: one for name, one in self.weights.digests.items()}}

    async def _rpc(self, arguments: Arguments) -> Json:
        method = arguments["method"]
        if method == "rollout_receive_bucket" and self._has_plugin:
            return await self._receive(arguments["kwargs"])
        methods: dict[str, tuple[str, Callable[..., Any]]] = {
            "rollout_fingerprints": ("weights_checker", self._tell_fingerprints),
            "rollout_manifest": ("weights_manifest", self._tell_manifest),
            "rollout_state": ("server_state", self._tell_state),
            "rollout_join_group": ("init_weights_update_group", self._join_group),
            "rollout_leave_group": ("destroy_weights_update_group", self._leave_group),
        }
        found = methods.get(method)
        if found is None or not self._has_plugin:
            raise self._rejected("collective_rpc", f"no method {method!r}", 500)
        operation, act = found
        given = arguments.get("kwargs", {})
        more = {name: given[name] for name in ("group_name",) if name in given}
        if operation == "weights_checker":
            more["action"] = "checksum"
        async with self._call(operation, **more):
            return {"results": [act(**given)]}

    async def _receive(self, bucket: Arguments) -> Json:
        """An update whose error is the worker's answer."""
        try:
            await self._update({"update_info": {"broadcast": bucket}})
        except EngineRejected as error:
            return {"results": [{"error": error.body or str(error)}]}
        return {"results": [{"error": ""}]}

    def _join_group(self, group_name: str, **where: Any) -> Json:
        if group_name in self.groups:
            return {"error": f"weight update group {group_name!r} exists already"}
        self.groups.add(group_name)
        return {"error": ""}

    def _leave_group(self, group_name: str) -> Json:
        if why := self._why_outside(group_name):
            return {"error": why}
        self.groups.remove(group_name)
        return {"error": ""}

    def _why_outside(self, group_name: str) -> str:
        return "" if group_name in self.groups else f"no weight update group {group_name!r}"

    def _tell_fingerprints(self) -> Any:
        self._require_weights("check weights")
        return {"checksums": dict(self.weights.digests), "num_bytes": 0}

    def _tell_manifest(self) -> Any:
        return [
            {"name": one.name, "dtype": one.dtype, "shape": one.shape, "is_tied": one.is_tied}
            for one in self.weights.tensors.values()
        ]

    def _tell_state(self) -> Any:
        return {
            "released": sorted(self.released) if self.settings.reports_released else [],
            "resident_bytes": self.bytes_by_tag() if self._counts_memory else {},
            "fingerprints": self.settings.fingerprints,
            "opens_handles": False,
            "groups": sorted(self.groups),
        }

    # Adapters

    async def _load_lora(self, arguments: Arguments) -> Json:
        operation = "load_lora_adapter"
        async with self._call(operation, name=arguments["lora_name"]):
            self._load_adapter(operation, arguments["lora_name"], arguments["lora_path"])
        return {}

    async def _unload_lora(self, arguments: Arguments) -> Json:
        operation, name = "unload_lora_adapter", arguments["lora_name"]
        async with self._call(operation, name=name):
            if self.adapters.pop(name, None) is None:
                raise self._rejected(operation, f"no adapter {name!r} is loaded", 404)
        return {}

    # Questions

    async def _server_info(self, arguments: Arguments) -> Json:
        async with self._call("server_info"):
            backend = routes.PLUGIN_BACKEND if self._has_plugin else "nccl"
            return {
                "vllm_config": {
                    "model_config": {
                        "model": self._model_path,
                        "enable_sleep_mode": self.settings.memory_saver,
                    },
                    "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
                    "weight_transfer_config": {"backend": backend},
                }
            }

    async def _tell_version(self, arguments: Arguments) -> Json:
        async with self._call("version"):
            return {"version": self._vllm_version}

    async def _openapi(self, arguments: Arguments) -> Json:
        async with self._call("endpoints"):
            return {"paths": {path: {} for path in self.paths}}

    async def _world_size(self, arguments: Arguments) -> Json:
        async with self._call("world_size"):
            return {"world_size": 1}

    async def _models(self, arguments: Arguments) -> Json:
        async with self._call("models"):
            name = self._model_path
            return {"object": "list", "data": [{"id": name, "object": "model", "root": name}]}

    async def _health(self, arguments: Arguments) -> Json:
        """Green as long as its core lives."""
        async with self._call("is_ready"):
            if not self.has_core:
                raise self._rejected("is_ready", "", 503)
            return {}

    async def _metrics(self, arguments: Arguments) -> Json:
        async with self._call("loads"):
            running, waiting = len(self.in_flight), self.num_held
            gauges = {"running": running, "waiting": waiting}
            lines = [f"vllm:num_requests_{name} {value}.0" for name, value in gauges.items()]
            lines.append(f"vllm:generation_tokens_total {self.num_output_tokens}.0")
            return {TEXT: "\n".join(lines)}

    async def _tokenize(self, arguments: Arguments) -> Json:
        async with self._call("tokenize"):
            return {"tokens": list(str(arguments["prompt"]).encode())}

    # Generation

    async def _generate(self, path: str, arguments: Arguments) -> Json:
        form = FORMS[path](arguments)
        request = self._request(form)
        async with self._admitted(request):
            prompt_logprobs = self._prompt_logprobs(request, arguments)
            while not request.is_over:
                await self._step(request)
            whole = form.whole(request)
        return whole | {"prompt_logprobs": prompt_logprobs}

    async def stream(
        self, arguments: Arguments, path: str = routes.GENERATE
    ) -> AsyncGenerator[Json, None]:
        """The events of a streamed completion: each has only what is new."""
        form = FORMS[path](arguments)
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
        version = parse_version(self._vllm_version) or (0, 0)
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

    def _prompt_logprobs(self, request: FakeRequest, arguments: Arguments) -> Any:
        if "prompt_logprobs" not in arguments.get("sampling_params", {}):
            return None
        adapter = self.adapters.get(arguments.get("model") or "", "")
        values = self.weights.logprobs(request.input_ids, adapter)
        pairs = zip(request.input_ids[1:], values, strict=True)
        return [None, *({str(token): {"logprob": value}} for token, value in pairs)]


def _pause_mode(mode: str, *, clears: bool) -> PauseMode:
    """What the other face calls it: only ``keep`` freezes requests."""
    if mode != "keep":
        return PauseMode.ABORT
    return PauseMode.RETRACT if clears else PauseMode.IN_PLACE


def _tensors_of(content: str) -> list[tuple[str, Any]]:
    """Tensors of a safetensors file; or of fakes, which no such file holds.

    Raises:
        FatalCall: it is neither.
    """
    try:
        data = base64.b64decode(content, validate=True)
    except binascii.Error as error:
        raise FatalCall(f"the content is not base64: {error}") from None
    if data.startswith(_PICKLE):
        return unpack_tensors(content)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "content.safetensors"
        file.write_bytes(data)
        return list(tensors_in_file(file))
