"""A stub of vLLM: a fake engine that is called by vLLM's paths, and answers with recorded replies.

Errors are recorded too.  What ends vLLM or fools its callers does so here.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engines.fake import FakeEngine
from engines.fake.engine.fake_sampling import Drawing
from engines.fake.engine.fake_weights import FatalCall, tensors_in_file, unpack_tensors
from engines.fake.engine.request import FakeRequest
from engines.protocol import MemoryTag, PauseMode
from engines.protocol.errors import EngineRejected
from engines.tensors.flattened_bucket import lay_out
from engines.vllm import routes
from engines.vllm.features import PROCESSED, parse_version
from tests.support.vllm_stub.forms import (
    CHAT,
    COMPLETIONS,
    NO_TOKEN,
    Form,
    Refused,
    recorded,
    status_of,
    text_of,
)

Json = dict[str, Any]
Asked = Mapping[str, Any]
_ASLEEP = {
    "weights": {MemoryTag.WEIGHTS},
    # Its CUDA graphs have no tag; what they hold counts as the KV cache's here.
    "kv_cache": {MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH},
}
_UPDATES = {"path": "from_disk", "broadcast": "from_distributed"}


class StubVllm(FakeEngine):
    """One server.  Its calls have the names of ``protocol.Engine``, by which faults are planned.

    Attributes:
        vllm_version: that it reports.
        without: paths that it does not serve.
        has_plugin: this package's plugin is in its workers.
        num_ranks: tensor-parallel ranks that it reports.
        logprobs_mode: as vLLM's option of this name.
        returns_masks: it was started with vLLM's option of sampling masks.
        has_core: its engine core lives.
        level: of the last sleep that did anything.
    """

    vllm_version = "0.32.0"
    without: frozenset[str] = frozenset()
    has_plugin = has_core = True
    returns_masks = False
    num_ranks = 1
    logprobs_mode = PROCESSED
    level = 0

    def lose_core(self) -> None:
        """As when the system kills its engine core: the API server answers each generation with an
        error, also those in flight.  The real one ends some seconds later."""
        self.has_core = False
        self._notify()

    async def answer(self, path: str, asked: Asked) -> Any:
        """The reply of a path to its query and body, as one mapping.

        Raises:
            EngineRejected: vLLM answers with an error status, and this body.
            EngineUnreachable: it is dead, or is killed by this.
        """
        name = "on" + path.removesuffix(".json").replace("/", "_")
        act = None if path in self.without else getattr(self, name, None)
        if act is None:
            raise self._refused("unknown_path")
        return await act(asked)

    def _refused(self, name: str, why: str = "") -> EngineRejected:
        """The recorded error of this name, or one like it."""
        reply = recorded(name)
        if why:
            reply["error"]["message"] = f"Call to collective_rpc method failed: {why}"
        return self._rejected(name, json.dumps(reply) if reply else "", status_of(name))

    # Questions

    async def on_version(self, asked: Asked) -> Any:
        return recorded("version") | {"version": self.vllm_version}

    async def on_server_info(self, asked: Asked) -> Any:
        async with self._call("server_info"):
            config: Json = (reply := recorded("server_info"))["vllm_config"]
            model = {"model": self._model_path, "logprobs_mode": self.logprobs_mode}
            model |= {"return_sampling_mask": self.returns_masks}
            config["model_config"] |= model | {"enable_sleep_mode": self.settings.memory_saver}
            config["instance_id"] = str(self.random_seed)
            config["parallel_config"]["tensor_parallel_size"] = self.num_ranks
            if not self.has_plugin:
                config["weight_transfer_config"]["backend"] = "nccl"
            return reply

    async def on_openapi(self, asked: Asked) -> Any:
        return {"paths": dict.fromkeys(recorded("openapi")["paths"].keys() - self.without)}

    async def on_health(self, asked: Asked) -> Any:
        async with self._call("is_ready"):
            if not self.has_core:
                raise self._refused("dead_health")
            return recorded("health")

    async def on_is_paused(self, asked: Asked) -> Any:
        async with self._call("is_paused"):
            return {"is_paused": self.paused is not None}

    async def on_weight_info(self, asked: Asked) -> Any:
        return {"weight_version": await self.weight_version()}

    async def on_metrics(self, asked: Asked) -> Any:
        async with self._call("loads"):
            values = len(self.in_flight), self.num_held, self.num_output_tokens
            lines = [line.rpartition(" ")[0] for line in recorded("metrics").split("\n")]
            return "\n".join(f"{line} {one}.0" for line, one in zip(lines, values, strict=True))

    async def on_v1_models(self, asked: Asked) -> Any:
        (reply := recorded("models"))["data"][0]["root"] = self._model_path
        return reply

    async def on_tokenize(self, asked: Asked) -> Any:
        return recorded("tokenize") | {"tokens": list(str(asked["prompt"]).encode())}

    # Pauses and memory

    async def on_pause(self, asked: Asked) -> Any:
        mode = _pause_mode(asked)
        async with self._call("pause_generation", mode=mode):
            await self._enter(mode)
        return recorded("pause")

    async def _enter(self, pause: PauseMode) -> None:
        self.paused = pause
        self._notify()
        if pause is PauseMode.ABORT:
            self._abort("")
            await self._until(lambda: not self.in_flight)
        self.is_cache_stale = self.is_cache_stale and pause is PauseMode.IN_PLACE

    async def on_resume(self, asked: Asked) -> Any:
        await self.continue_generation()
        return recorded("resume")

    async def on_reset_prefix_cache(self, asked: Asked) -> Any:
        async with self._call("flush_cache"):
            if self._num_holding_kv and asked.get("reset_running_requests") != "true":
                return recorded("reset_refused")
            self.is_cache_stale = False
            return recorded("reset")

    async def on_abort_requests(self, asked: Asked) -> Any:
        ids = asked.get("request_ids")
        async with self._call("abort_request", rid=ids):
            live = [
                request
                for rid, request in self.in_flight.items()
                if not ids or routes.REQUEST_PREFIX + rid in ids
            ]
            for request in live:
                request.is_aborted = True
            self._notify()
        return recorded("abort") | {"aborted": len(live)}

    def _abort_if_live(self, rid: str) -> None:
        """It forgets the id of a stream that has ended."""

    async def on_sleep(self, asked: Asked) -> Any:
        level, tags = int(asked.get("level", 1)), tuple(MemoryTag)
        async with self._call("release_memory_occupation", tags=tags, level=level):
            await self._enter(_pause_mode(asked))
            # A second sleep is a line in the log, whatever its level.
            if MemoryTag.WEIGHTS not in self.released:
                self.released |= set(tags)
                self.level = level
        return recorded("sleep") | {"level": level}

    async def on_release_kv_cache_memory(self, asked: Asked) -> Any:
        tags = _ASLEEP["kv_cache"]
        async with self._call("release_memory_occupation", tags=tuple(tags)):
            if self.paused is None or self.in_flight:
                raise self._refused("kv_unpaused")
            if self.released:
                raise self._refused("kv_asleep")
            self.released |= tags
        return recorded("release_kv")

    async def on_wake_up(self, asked: Asked) -> Any:
        """Of a tag that is awake it is a line in the log."""
        names = [asked["tags"]] if asked.get("tags") else list(_ASLEEP)
        tags = {tag for name in names for tag in _ASLEEP[name]}
        async with self._call("resume_memory_occupation", tags=tuple(tags)):
            if tags <= self.released:
                self.released -= tags
                if MemoryTag.WEIGHTS in tags and self.level > 1 and self.settings.memory_saver:
                    self.weights.lose()
            if not self.released:
                self.paused = None
                self._notify()
            return recorded("wake_weights" if self.released else "wake_kv") | {"tags": names}

    # Weights

    async def on_start_weight_update(self, asked: Asked) -> Any:
        async with self._call("begin_weight_update"):
            if self.is_updating:
                raise self._refused("start_twice")
            if MemoryTag.WEIGHTS in self.released:
                raise self._refused("start_asleep")
            self.is_updating = True
        return recorded("start")

    async def on_update_weights(self, asked: Asked) -> Any:
        """What the push does not name keeps its contents, and nothing says so."""
        info = asked["update_info"]
        by = next((_UPDATES[one] for one in info if one in _UPDATES), "from_tensor")
        async with self._call(f"update_weights_{by}"):
            self._require_weights("update")
            if not self.is_updating:
                raise self._refused("update_unopened")
            try:
                self.load(info)
            except FatalCall as error:  # half of the push stays
                self.is_updating = False
                raise self._refused("update_unknown", str(error)) from None
        return recorded("update")

    def load(self, info: Asked) -> None:
        """Raises FatalCall for what the plugin refuses."""
        if "path" in info:
            self.weights.load_path(info["path"])
            return
        broadcast, known = info.get("broadcast"), self.weights.tensors
        pairs = self._broadcast(broadcast) if broadcast else _tensors_of(info["content"])
        for name in (name for name, _ in pairs if name not in known):
            some = f"it has {len(known)}, for example {next(iter(known))!r}"
            raise FatalCall(f"the model has no tensor {name!r}; {some}")
        self.weights.write(pairs)

    def _broadcast(self, bucket: Asked) -> list[tuple[str, Any]]:
        """No numbers are sent to a stub: the name of the group stands for the contents."""
        names, group_name = bucket["names"], bucket["group_name"]
        try:
            lay_out(names, bucket["dtypes"], bucket["shapes"])
        except ValueError as error:
            raise FatalCall(f"{error}; nothing was updated") from None
        if group_name not in self.groups:
            raise FatalCall(_error_in("left_twice", group_name))
        return [(name, f"{name}@{group_name}") for name in names]

    async def on_finish_weight_update(self, asked: Asked) -> Any:
        async with self._call("end_weight_update"):
            if not self.is_updating:
                raise self._refused("finish_unopened")
            self._require_weights("finish an update")
            self.is_updating = False
            self._version = asked.get("weight_version") or self._version
            self.is_cache_stale = True
        return recorded("finish")

    async def on_update_weight_version(self, asked: Asked) -> Any:
        await self.update_weight_version(asked["new_version"])
        return recorded("set_version") | {"new_version": asked["new_version"]}

    async def on_weight_checker(self, asked: Asked) -> Any:
        if asked["action"] == "reset":
            await self.weights_checker("reset_tensors")
            return recorded("reset_weights")
        (tensors,) = (await self.weights_checker()).tensors
        (first,) = recorded("checksums")["checksums"]
        rank = first.rpartition(":")[0]
        return {"checksums": {f"{rank}:{name}": tensors[name] for name in tensors}}

    # Our plugin

    async def on_collective_rpc(self, asked: Asked) -> Any:
        method = asked["method"]
        act = getattr(self, method, None) if self.has_plugin else None
        if act is None:
            raise self._refused("no_such_method", f"Method {method!r} is not implemented.")
        return {"results": [await act(**asked.get("kwargs", {}))]}

    async def rollout_fingerprints(self) -> Any:
        (tensors,) = (await self.weights_checker()).tensors
        return _of_worker("rollout_fingerprints") | {"checksums": dict(tensors)}

    async def rollout_manifest(self) -> Any:
        return [
            {"name": one.name, "dtype": one.dtype, "shape": one.shape, "is_tied": one.is_tied}
            for one in await self.weights_manifest()
        ]

    async def rollout_state(self) -> Any:
        settings, held = self.settings, self.bytes_by_tag()
        tells = settings.reports_released
        counts = settings.memory_saver and (settings.reports_memory or tells)
        by_tag = {name: sum(held[tag] for tag in tags) for name, tags in _ASLEEP.items()}
        return _of_worker("rollout_state") | {
            "released": sorted(self.released & _ASLEEP.keys()) if tells else [],
            "resident_bytes": by_tag if counts else {},
            "fingerprints": settings.fingerprints,
            "encodings": [],  # as where vLLM has cast the checkpoint
            "groups": sorted(self.groups),
        }

    async def rollout_join_group(self, *, group_name: str, **where: Any) -> Any:
        async with self._call("init_weights_update_group", group_name=group_name):
            is_new = group_name not in self.groups
            self.groups.add(group_name)
        return {"error": "" if is_new else _error_in("joined_twice", group_name)}

    async def rollout_leave_group(self, *, group_name: str) -> Any:
        async with self._call("destroy_weights_update_group", group_name=group_name):
            is_in = group_name in self.groups
            self.groups.discard(group_name)
        return {"error": "" if is_in else _error_in("left_twice", group_name)}

    async def rollout_receive_bucket(self, **bucket: Any) -> Any:
        """An update whose error is the worker's answer."""
        try:
            await self.on_update_weights({"update_info": {"broadcast": bucket}})
        except EngineRejected as error:
            return {"error": error.body.partition("method failed: ")[2].partition('", "')[0]}
        return {"error": ""}

    # Generation

    async def on_inference_v1_generate(self, asked: Asked) -> Any:
        return await self._generate(asked, routes.GENERATE)

    async def on_v1_completions(self, asked: Asked) -> Any:
        return await self._generate(asked, COMPLETIONS)

    async def on_v1_chat_completions(self, asked: Asked) -> Any:
        return await self._generate(asked, CHAT)

    async def _generate(self, asked: Asked, path: str) -> Any:
        form = self._form(asked, path)
        start = 0 if form.wants_prompt else None
        return form.whole(await self.generate(**form.arguments(), logprob_start_len=start))

    async def stream(self, asked: Asked, path: str = routes.GENERATE) -> AsyncGenerator[Any, None]:
        """The events of a streamed completion: each has only what is new."""
        form, sent = self._form(asked, path), 0
        try:
            async for reply in self.stream_generate(**form.arguments()):
                for event in form.begin(reply) if not sent else ():
                    yield event
                yield form.event(reply, sent)
                sent = len(reply.output_ids)
        except EngineRejected as error:
            if not sent:
                raise
            yield json.loads(error.body)
            return
        for event in form.end(reply):
            yield event

    def _form(self, asked: Asked, path: str) -> Form:
        is_new = (parse_version(self.vllm_version) or (0, 0)) >= (0, 33)
        if self.paused is PauseMode.ABORT and is_new:  # read in its wheel
            raise self._rejected("generate", "the server is paused", 503)
        try:
            return Form(path, asked, self.logprobs_mode, returns_masks=self.returns_masks)
        except Refused as error:
            refused = self._bad_request(error.why) if error.why else self._refused(str(error))
            raise refused from None

    def _bad_request(self, why: str) -> EngineRejected:
        reply = recorded(NO_TOKEN)
        reply["error"]["message"] = why
        return self._rejected("generate", json.dumps(reply), status_of(NO_TOKEN))

    def _admit(self, request: FakeRequest) -> None:
        if request.rid in self.in_flight:  # another request of the same name is one of its own
            request.rid = f"{request.rid}-{self._num_requests}"
        request.text_of = text_of
        try:
            super()._admit(request)
        except EngineRejected as error:
            raise self._bad_request(error.body) from None

    def _drawing(self, request: FakeRequest) -> Drawing:
        eos = self.settings.eos_token_id
        return Drawing(request.sampling, eos, prompt=request.input_ids, always_stops=True)

    async def _step(self, request: FakeRequest) -> None:
        num = len(request.output_ids)
        await super()._step(request)
        if not self.has_core:
            raise self._refused("dead")
        # The layers that a session loads are elsewhere meanwhile.
        is_idle = not self.is_updating or len(request.output_ids) == num
        self._assert(is_idle, "a request runs while a weight update is open")


def _pause_mode(asked: Asked) -> PauseMode:
    """What SGLang calls it; ``wait``, which has no end, is never sent."""
    clears = asked.get("clear_cache") != "false"
    kept = PauseMode.RETRACT if clears else PauseMode.IN_PLACE
    return {"abort": PauseMode.ABORT, "keep": kept}[asked.get("mode", "abort")]


def _of_worker(name: str) -> Json:
    (worker,) = recorded(name)["results"]
    return dict(worker)


def _error_in(name: str, group_name: str) -> str:
    return str(_of_worker(name)["error"]).replace("'g'", repr(group_name))


def _tensors_of(content: str) -> list[tuple[str, Any]]:
    """Tensors of a safetensors file; or of fakes, which no such file holds."""
    data = base64.b64decode(content)
    if data.startswith(b"\x80"):  # a pickle
        return unpack_tensors(content)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "content.safetensors"
        file.write_bytes(data)
        return list(tensors_in_file(file))
