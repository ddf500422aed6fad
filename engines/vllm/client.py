"""vLLM's HTTP control endpoints as ``protocol.Engine``.

Facts of 0.32.0, as ``docs/how-to/vllm.md`` lists them.  No policy: a call that kills the server is
sent like any other.  No state: ``calls`` has the server's report, ``Pauses`` the pause, ``Pushes``
the session of a push, ``WeightChecks`` the snapshot.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Unpack

from engines.http.call import Deadlines
from engines.http.http_calls import DEFAULT_DEADLINES, Wire
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
    TensorInfo,
    WeightsReport,
)
from engines.protocol.errors import EngineHung
from engines.protocol.sampling_params import DEFAULT_SAMPLING
from engines.protocol.types import GenerateArguments, UpdateGroup
from engines.vllm import routes, vllm_json
from engines.vllm.calls import VllmCalls
from engines.vllm.pauses import Memory, Pauses
from engines.vllm.pushes import Pushes, WeightChecks
from engines.vllm.server_report import METHODS_OF_PLUGIN, has_plugin, known_paths
from engines.vllm.update_info import update_info

# Greedy, and without temperature 0: a server that returns sampling masks refuses that.
_GREEDY: dict[str, Any] = {"temperature": 1.0, "top_k": 1}
_ONE_TOKEN = SamplingParams(max_new_tokens=1, **_GREEDY)


class VllmClient:
    """``protocol.Engine`` of a vLLM server; as ``HttpCalls`` it belongs to one event loop.

    Args:
        engine_id: names the engine in errors; its URL does where there is none.
        weights_cpu_backup: a release keeps a host copy of the weights.
        wire: carries the requests; HTTP without one.

    Attributes:
        calls: what it sends with; its deadlines may be replaced.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        engine_id: str = "",
        deadlines: Deadlines = DEFAULT_DEADLINES,
        weights_cpu_backup: bool = False,
        wire: Wire | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.calls = calls = VllmCalls(
            endpoint, engine_id=engine_id, deadlines=deadlines, wire=wire
        )
        self._pauses = Pauses(calls)
        self._memory = Memory(calls, self._pauses, weights_cpu_backup=weights_cpu_backup)
        self._pushes = Pushes(calls, self._pauses)
        self._checks = WeightChecks(calls)

    @property
    def deadlines(self) -> Deadlines:
        return self.calls.deadlines

    def authorize(self, access: EngineAccess) -> None:
        """From now on calls carry this."""
        self.calls.authorize(access)

    async def aclose(self) -> None:
        await self.calls.aclose()

    # Requests in flight

    async def pause_generation(self, mode: PauseMode = PauseMode.ABORT) -> None:
        await self._pauses.pause("pause_generation", mode)

    async def continue_generation(self) -> None:
        await self._pauses.resume("continue_generation")

    async def flush_cache(self, timeout_s: float | None = None) -> None:
        """Empties the prefix cache; repeated up to ``timeout_s``, until no request holds it."""
        await self._pauses.flush("flush_cache", timeout_s or 0.0)

    async def abort_request(self, rid: str | None = None) -> None:
        """Aborts all requests, or the one whose id is ``rid``."""
        body = {} if rid is None else {"request_ids": [routes.REQUEST_PREFIX + rid]}
        await self.calls.post("abort_request", routes.ABORT, body, self.deadlines.control_s)

    # Memory

    async def release_memory_occupation(self, tags: Sequence[MemoryTag]) -> None:
        await self._memory.release("release_memory_occupation", tags)

    async def resume_memory_occupation(self, tags: Sequence[MemoryTag]) -> None:
        await self._memory.resume("resume_memory_occupation", tags)

    # Weights

    async def begin_weight_update(self) -> None:
        await self._pushes.begin("begin_weight_update")

    async def end_weight_update(self) -> None:
        await self._pushes.end("end_weight_update")

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
            raise self.calls.call(operation, 0.0).rejected(
                "was not sent", status=400, body=str(error)
            ) from None
        await self._pushes.update(operation, info, flushes=flush_cache, version=weight_version)

    async def _info_of(self, payloads: Sequence[str]) -> Mapping[str, Any]:
        return await asyncio.to_thread(update_info, payloads)

    async def update_weights_from_disk(
        self, model_path: str, *, flush_cache: bool = True, weight_version: str | None = None
    ) -> None:
        await self._pushes.update_from_files(
            "update_weights_from_disk", model_path, flushes=flush_cache, version=weight_version
        )

    async def init_weights_update_group(self, **group: Unpack[UpdateGroup]) -> None:
        await self.calls.act("init_weights_update_group", "join", group, self.deadlines.group_s)

    async def destroy_weights_update_group(self, group_name: str) -> None:
        operation, group = "destroy_weights_update_group", {"group_name": group_name}
        await self.calls.act(operation, "leave", group, self.deadlines.group_s)

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
        bucket = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "load_format": load_format,
        }
        operation = "update_weights_from_distributed"
        await self._pushes.receive(operation, bucket, flushes=flush_cache, version=weight_version)

    async def update_weight_version(
        self, version: str, *, abort_all_requests: bool = False
    ) -> None:
        if abort_all_requests:
            await self.abort_request()
        operation, body = "update_weight_version", {"new_version": version}
        await self.calls.post(operation, routes.SET_VERSION, body, self.deadlines.control_s)

    async def weight_version(self) -> str:
        return await self.calls.weight_version()

    async def weights_checker(self, action: str = "checksum") -> WeightsReport:
        return await self._checks.check("weights_checker", action)

    async def weights_manifest(self) -> tuple[TensorInfo, ...]:
        """The engine's tensors; only the plugin lists them."""
        method = METHODS_OF_PLUGIN["manifest"]
        return await self.calls.rpc("weights_manifest", method, vllm_json.read_manifest)

    # LoRA

    async def load_lora_adapter(self, name: str, path: str) -> None:
        body = {"lora_name": name, "lora_path": path}
        await self.calls.post("load_lora_adapter", routes.LOAD_LORA, body, self.deadlines.update_s)

    async def load_lora_adapter_from_tensors(
        self, name: str, config: Mapping[str, Any], serialized_named_tensors: Sequence[str]
    ) -> Mapping[str, str]:
        why = "vLLM loads adapters from a folder only; push full weights, or use SGLang"
        call = self.calls.call("load_lora_adapter_from_tensors", 0.0)
        raise call.rejected("is not supported", status=HTTPStatus.NOT_IMPLEMENTED, body=why)

    async def unload_lora_adapter(self, name: str) -> None:
        body = {"lora_name": name}
        await self.calls.post(
            "unload_lora_adapter", routes.UNLOAD_LORA, body, self.deadlines.update_s
        )

    # Queries

    async def server_info(self) -> ServerInfo:
        return await self.calls.server_info()

    async def process_start(self) -> str:
        """From its front end, which answers while a worker computes."""
        return await self.calls.process_start()

    async def model_info(self) -> ModelInfo:
        info = await self.calls.known_info()
        return ModelInfo(info.raw["model_path"], await self.weight_version())

    async def loads(self) -> Loads:
        call = self.calls.call("loads", self.deadlines.control_s)
        answer = await call.send(self.calls.control.get(routes.METRICS))
        return call.read_text(answer, vllm_json.read_loads)

    async def endpoints(self) -> frozenset[str]:
        """The paths it serves, and SGLang's names of those that do the same."""
        paths = await self._paths("endpoints")
        return known_paths(paths, has_plugin=has_plugin(await self.calls.known_info()))

    async def _paths(self, operation: str) -> frozenset[str]:
        return await self.calls.ask(
            operation, routes.OPENAPI, lambda answer: frozenset(answer["paths"])
        )

    async def is_ready(self) -> bool:
        """Whether it takes new requests: up and not paused.  Cheap."""
        if not await self.calls.probe("is_ready", routes.HEALTH, self.deadlines.ready_s):
            return False
        return not await self._pauses.is_paused("is_ready", self.deadlines.ready_s)

    async def is_healthy(self) -> bool:
        """Whether it generates.  ``/health`` is green while the scheduler hangs, so it requests
        a token, unless the server is paused."""
        if not await self.calls.probe("is_healthy", routes.HEALTH, self.deadlines.health_s):
            return False
        if await self._pauses.is_paused("is_healthy", self.deadlines.ready_s):
            return True
        call = self.calls.call("is_healthy", self.deadlines.health_s)
        body = vllm_json.generate_body([1], _ONE_TOKEN)
        try:
            await call.send(self.calls.probes.post(routes.GENERATE, call.encoded(body)))
        except EngineHung:
            # A pause may have come between.
            return await self._pauses.is_paused("is_healthy", self.deadlines.ready_s)
        return True

    # Generation

    async def generate(
        self,
        *,
        logprob_start_len: int | None = None,
        lora_path: str | None = None,
        extra_key: str | None = None,
        image: PromptImage | None = None,
        **request: Unpack[GenerateArguments],
    ) -> GenerateReply:
        """One completion.

        Raises:
            ValueError: not exactly one of ``input_ids`` and ``text``, more than one completion, or
                a sampling parameter that vLLM does not have.
        """
        sampling = request.get("sampling_params", DEFAULT_SAMPLING)
        has_output = sampling.max_new_tokens != 0
        if not has_output:  # vLLM refuses a request for no tokens
            request["sampling_params"] = replace(sampling, max_new_tokens=1, min_new_tokens=0)
        wants_prompt = bool(request.get("return_logprob")) and (logprob_start_len or 0) >= 0
        start = logprob_start_len if wants_prompt else None
        prompt, body = await self._request(
            wants_prompt=start is not None, lora_path=lora_path, **request
        )
        if image is not None:
            why = "its route of token ids takes no image"
            raise self.calls.call("generate", 0.0).rejected(
                "is not supported", status=501, body=why
            )
        if extra_key is not None:
            body["cache_salt"] = extra_key
        call, answer = await self.calls.post(
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
        async with aclosing(self.calls.stream(routes.GENERATE, body, reader.add)) as events:
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
        if sampling_params.temperature == 0.0 and await self._returns_masks():
            sampling_params = replace(sampling_params, **_GREEDY)
        body = vllm_json.generate_body(
            ids,
            sampling_params,
            rid=rid,
            return_logprob=return_logprob,
            wants_prompt=wants_prompt,
            model=lora_path,
        )
        return ids, body

    async def _returns_masks(self) -> bool:
        return bool((await self.calls.known_info()).raw["return_sampling_mask"])

    async def _tokens(self, text: str | None) -> list[int]:
        call, answer = await self.calls.post(
            "generate", routes.TOKENIZE, {"prompt": text}, self.deadlines.control_s
        )
        return call.read(answer, lambda reply: list(reply["tokens"]))
