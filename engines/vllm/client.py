"""vLLM's HTTP control endpoints as ``protocol.Engine``.

Facts of 0.32.0, as ``docs/how-to/vllm.md`` lists them.  Always true:

- the server stays paused until ``continue_generation``: vLLM resumes by itself when the last memory
  is awake, so the client pauses it again before that call returns;
- weights are woken before the KV cache, so that only verified weights can be behind that moment;
- a push is one session of vLLM, also if its buckets come from files: vLLM loads the parts of a
  layer together, and a layer that is split over two sessions would stay half old;
- no token is generated between a session's start and its end, which would end the server: a session
  that begins without a pause has one of its own, and a push that fails leaves the server paused.

No policy otherwise: a call that kills the server is sent like any other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Unpack
from urllib.parse import urlencode

from engines.http.base_client import Wire
from engines.http.call import Deadlines
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
from engines.protocol.errors import EngineHung, EngineRejected
from engines.protocol.plain_text import differing_text
from engines.protocol.sampling_params import DEFAULT_SAMPLING
from engines.protocol.types import GenerateArguments, UpdateGroup
from engines.vllm import routes, vllm_json
from engines.vllm.calls import VllmCalls
from engines.vllm.server_report import (
    METHODS_OF_PLUGIN,
    has_plugin,
    info_with_state,
    known_paths,
    read_server_info,
)
from engines.vllm.update_info import update_info

_DEFAULT_DEADLINES = Deadlines()
_RETRY_S = 0.05
_PAUSE = {
    PauseMode.ABORT: {"mode": "abort"},
    # With the cache cleared, kept requests lose their blocks and are computed again: SGLang's
    # retraction.
    PauseMode.RETRACT: {"mode": "keep", "clear_cache": "true"},
    PauseMode.IN_PLACE: {"mode": "keep", "clear_cache": "false"},
}
_MEMORY = (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE)
_ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0)


class VllmClient(VllmCalls):
    """``protocol.Engine`` of a vLLM server.  Belongs to the event loop that first uses it.

    Args:
        weights_cpu_backup: a release keeps a host copy of the weights (sleep level 1, not 2).
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        engine_id: str = "",
        deadlines: Deadlines = _DEFAULT_DEADLINES,
        weights_cpu_backup: bool = False,
        wire: Wire | None = None,
    ) -> None:
        super().__init__(endpoint, engine_id=engine_id, deadlines=deadlines, wire=wire)
        self._level = 1 if weights_cpu_backup else 2
        self._pause_mode = PauseMode.ABORT
        self._version: str | None = None  # of the push that is under way
        self._flushes = False  # its last bucket has come
        self._is_own_session = False  # of a push from files, whose caller opens none
        self._is_own_pause = False  # of a push whose caller has not paused
        self._baseline: WeightsReport | None = None
        self._info: ServerInfo | None = None

    # Requests in flight

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

    # Weights

    async def begin_weight_update(self) -> None:
        await self._start("begin_weight_update")

    async def _start(self, operation: str) -> None:
        if self._is_own_session:  # a push from files that was given up
            await self._finish(operation)
        if not await self._is_paused(operation, self.deadlines.control_s):
            await self._pause(operation, PauseMode.RETRACT)
            self._is_own_pause = True
        await self._post(operation, routes.START_UPDATE, {}, self.deadlines.update_s)
        self._version, self._flushes = None, False

    async def end_weight_update(self) -> None:
        await self._finish("end_weight_update")

    async def _finish(self, operation: str) -> None:
        """End the session; the version is published with it, and not before."""
        version, flushes = self._version, self._flushes
        self._version, self._flushes, self._is_own_session = None, False, False
        body = {} if version is None else {"weight_version": version}
        await self._post(operation, routes.FINISH_UPDATE, body, self.deadlines.update_s)
        if flushes:
            await self._flush(operation, 0.0)
        if self._is_own_pause and (flushes or version is not None):  # otherwise it was given up
            await self._continue(operation)

    async def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[str],
        *,
        load_format: str | None = None,
        flush_cache: bool = True,
        weight_version: str | None = None,
    ) -> None:
        operation = "update_weights_from_tensor"
        try:
            info = await self._info_of(serialized_named_tensors)
        except ValueError as error:
            raise self._call(operation, 0.0).rejected(
                "was not sent", status=400, body=str(error)
            ) from None
        await self._update(operation, info, flush_cache, weight_version)

    async def _info_of(self, payloads: Sequence[str]) -> Mapping[str, Any]:
        return await asyncio.to_thread(update_info, payloads)

    async def update_weights_from_disk(
        self, model_path: str, *, flush_cache: bool = True, weight_version: str | None = None
    ) -> None:
        """One bucket of a push from files, whose session opens here; the one that flushes ends it.

        So does an error.
        """
        operation = "update_weights_from_disk"
        if not self._is_own_session:
            await self._start(operation)
            self._is_own_session = True
        try:
            await self._update(operation, {"path": model_path}, flush_cache, weight_version)
        except EngineRejected:
            self._is_own_session = False  # vLLM has closed it
            raise
        if flush_cache:
            await self._finish(operation)

    async def _update(
        self, operation: str, info: Mapping[str, Any], flushes: bool, version: str | None
    ) -> None:
        await self._post(operation, routes.UPDATE, {"update_info": info}, self.deadlines.update_s)
        self._note_update(flushes, version)

    def _note_update(self, flushes: bool, version: str | None) -> None:
        self._flushes = self._flushes or flushes
        self._version = version or self._version

    async def init_weights_update_group(self, **group: Unpack[UpdateGroup]) -> None:
        await self._do("init_weights_update_group", "join", group, self.deadlines.group_s)

    async def destroy_weights_update_group(self, group_name: str) -> None:
        operation, group = "destroy_weights_update_group", {"group_name": group_name}
        await self._do(operation, "leave", group, self.deadlines.group_s)

    async def _do(
        self, operation: str, what: str, arguments: Mapping[str, Any], budget_s: float
    ) -> None:
        """Call a method of the plugin that returns its error."""
        method, read = METHODS_OF_PLUGIN[what], vllm_json.read_errors
        if errors := await self._rpc(operation, method, read, arguments, budget_s):
            raise self._call(operation, 0.0).rejected("failed", status=400, body="; ".join(errors))

    async def update_weights_from_distributed(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        load_format: str | None = None,
        flush_cache: bool = True,
        weight_version: str | None = None,
    ) -> None:
        """One bucket, which every worker receives from the group.  vLLM closes the session at an
        error."""
        bucket = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "load_format": load_format,
        }
        operation = "update_weights_from_distributed"
        await self._do(operation, "receive", bucket, self.deadlines.update_s)
        self._note_update(flush_cache, weight_version)

    async def update_weight_version(
        self, version: str, *, abort_all_requests: bool = False
    ) -> None:
        if abort_all_requests:
            await self.abort_request()
        body = {"new_version": version}
        await self._post(
            "update_weight_version", routes.SET_VERSION, body, self.deadlines.control_s
        )

    async def weight_version(self) -> str:
        return await self._ask(
            "weight_version", routes.WEIGHT_INFO, lambda answer: str(answer["weight_version"])
        )

    async def weights_checker(self, action: str = "checksum") -> WeightsReport:
        operation = "weights_checker"
        if action == "reset_tensors":
            body = {"action": "reset"}
            await self._post(operation, routes.CHECKER, body, self.deadlines.check_s)
            return WeightsReport(None)
        report = await self._checksums(operation)
        if action == "checksum":
            return report
        if action == "snapshot":
            self._baseline = report
        else:
            self._compare(operation, report)
        return WeightsReport(None)

    async def _checksums(self, operation: str) -> WeightsReport:
        if has_plugin(await self._known_info()):
            method = METHODS_OF_PLUGIN["fingerprints"]
            return await self._rpc(operation, method, vllm_json.read_fingerprints)
        call, answer = await self._post(
            operation, routes.CHECKER, {"action": "checksum"}, self.deadlines.check_s
        )
        return call.read(answer, vllm_json.read_checksums)

    def _compare(self, operation: str, report: WeightsReport) -> None:
        baseline, self._baseline = self._baseline, None
        call = self._call(operation, 0.0)
        if baseline is None:
            raise call.rejected("failed", status=400, body="no snapshot to compare with")
        different = [
            name
            for now, before in zip(report.tensors, baseline.tensors, strict=True)
            for name in now
            if now[name] != before.get(name)
        ]
        if different:
            raise call.rejected("failed", status=400, body=differing_text(different))

    async def weights_manifest(self) -> tuple[TensorInfo, ...]:
        """The engine's tensors; only the plugin lists them."""
        method = METHODS_OF_PLUGIN["manifest"]
        return await self._rpc("weights_manifest", method, vllm_json.read_manifest)

    # LoRA

    async def load_lora_adapter(self, name: str, path: str) -> None:
        body = {"lora_name": name, "lora_path": path}
        await self._post("load_lora_adapter", routes.LOAD_LORA, body, self.deadlines.update_s)

    async def load_lora_adapter_from_tensors(
        self, name: str, config: Mapping[str, Any], serialized_named_tensors: Sequence[str]
    ) -> None:
        raise self._unsupported(
            "load_lora_adapter_from_tensors",
            "vLLM loads adapters from a folder only; push full weights, or use SGLang",
        )

    async def unload_lora_adapter(self, name: str) -> None:
        body = {"lora_name": name}
        await self._post("unload_lora_adapter", routes.UNLOAD_LORA, body, self.deadlines.update_s)

    # Queries

    async def model_info(self) -> ModelInfo:
        info = await self._known_info()
        return ModelInfo(info.raw["model_path"], await self.weight_version())

    async def server_info(self) -> ServerInfo:
        version = await self._ask("server_info", routes.VERSION, lambda one: str(one["version"]))
        path = f"{routes.SERVER_INFO}?config_format=json"
        info = await self._ask(
            "server_info", path, lambda answer: read_server_info(version, answer)
        )
        if has_plugin(info):
            method = METHODS_OF_PLUGIN["state"]
            info = await self._rpc("server_info", method, info_with_state(info))
        self._info = info
        return info

    async def _known_info(self) -> ServerInfo:
        return self._info or await self.server_info()

    async def loads(self) -> Loads:
        call = self._call("loads", self.deadlines.control_s)
        return vllm_json.read_loads((await call.send(self._control.get(routes.METRICS))).text)

    async def endpoints(self) -> frozenset[str]:
        """The paths it serves, and SGLang's names of those that do the same."""
        paths = await self._paths("endpoints")
        return known_paths(paths, has_plugin=has_plugin(await self._known_info()))

    async def _paths(self, operation: str) -> frozenset[str]:
        return await self._ask(operation, routes.OPENAPI, lambda one: frozenset(one["paths"]))

    async def is_ready(self) -> bool:
        """Whether it takes new requests: up and not paused.  Cheap."""
        if not await self._probe("is_ready", routes.HEALTH, self.deadlines.ready_s):
            return False
        return not await self._is_paused("is_ready", self.deadlines.ready_s)

    async def is_healthy(self) -> bool:
        """Whether it generates.  ``/health`` is green while the scheduler hangs, so it requests
        a token, unless the server is paused."""
        if not await self._probe("is_healthy", routes.HEALTH, self.deadlines.health_s):
            return False
        if await self._is_paused("is_healthy", self.deadlines.ready_s):
            return True
        call = self._call("is_healthy", self.deadlines.health_s)
        body = vllm_json.generate_body([1], _ONE_TOKEN)
        try:
            await call.send(self._probes.post(routes.GENERATE, call.encoded(body)))
        except EngineHung:
            # A pause may have come between.
            return await self._is_paused("is_healthy", self.deadlines.ready_s)
        return True

    async def _is_paused(self, operation: str, budget_s: float) -> bool:
        call = self._call(operation, budget_s)
        async with call.bounded():
            answer = await self._probes.get(routes.IS_PAUSED)
        call.accept(answer)
        return call.read(answer, lambda reply: reply["is_paused"]) is True

    # Generation

    async def generate(
        self,
        *,
        logprob_start_len: int | None = None,
        lora_path: str | None = None,
        **request: Unpack[GenerateArguments],
    ) -> GenerateReply:
        """One completion.

        Raises:
            ValueError: not exactly one of ``input_ids`` and ``text``, more than one completion, or
                a sampling parameter that vLLM does not have.
        """
        sampling = request.get("sampling_params", DEFAULT_SAMPLING)
        has_output = sampling.max_new_tokens > 0
        if not has_output:  # vLLM refuses a request for no tokens
            request["sampling_params"] = replace(sampling, max_new_tokens=1, min_new_tokens=0)
        wants_prompt = bool(request.get("return_logprob")) and (logprob_start_len or 0) >= 0
        start = logprob_start_len if wants_prompt else None
        prompt, body = await self._request(
            wants_prompt=start is not None, lora_path=lora_path, **request
        )
        call, answer = await self._post(
            "generate", routes.GENERATE, body, self.deadlines.generate_s
        )
        reader = vllm_json.ReplyReader(prompt, prompt_from=start)
        call.read(answer, reader.add)
        reply = reader.reply()
        return reply if has_output else vllm_json.without_output(reply)

    async def stream_generate(
        self, **request: Unpack[GenerateArguments]
    ) -> AsyncGenerator[GenerateReply, None]:
        """One completion as it grows; each reply holds all tokens so far.

        Closing the generator early closes the connection, upon which the server aborts.
        """
        prompt, body = await self._request(**request)
        reader = vllm_json.ReplyReader(prompt)
        async with aclosing(self._stream(routes.GENERATE, body, reader.add)) as events:
            async for has_grown in events:
                if has_grown:
                    yield reader.reply()

    async def _request(
        self,
        *,
        input_ids: Sequence[int] | None = None,
        text: str | None = None,
        sampling_params: SamplingParams = DEFAULT_SAMPLING,
        rid: str | None = None,
        return_logprob: bool = False,
        wants_prompt: bool = False,
        lora_path: str | None = None,
    ) -> tuple[Sequence[int], dict[str, Any]]:
        """The prompt's ids, and the body."""
        if (input_ids is None) == (text is None):
            raise ValueError("generate takes either input_ids or text")
        ids = await self._tokens(text) if input_ids is None else input_ids
        body = vllm_json.generate_body(
            ids,
            sampling_params,
            rid=rid,
            return_logprob=return_logprob,
            wants_prompt=wants_prompt,
            model=lora_path,
        )
        return ids, body

    async def _tokens(self, text: str | None) -> list[int]:
        call, answer = await self._post(
            "generate", routes.TOKENIZE, {"prompt": text}, self.deadlines.control_s
        )
        return call.read(answer, lambda reply: list(reply["tokens"]))
