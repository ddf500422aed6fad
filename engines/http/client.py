"""SGLang's HTTP control protocol: one method per endpoint.

No policy: nothing is retried, and a call that kills the engine is sent like any other.  Every
call ends within its deadline, with a reply or with an ``EngineError`` that names engine, operation
and elapsed time.  The only file that knows endpoint paths.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Unpack

from engines.http import sglang_json
from engines.http.call import Deadlines, EngineCall
from engines.http.connections import HttpReply
from engines.http.http_calls import DEFAULT_DEADLINES, HttpCalls
from engines.plain_json import read_json
from engines.protocol import (
    Endpoint,
    EngineAccess,
    GenerateReply,
    Loads,
    MemoryTag,
    ModelInfo,
    PauseMode,
    PromptImage,
    ServerInfo,
    TensorInfo,
    WeightsReport,
)
from engines.protocol.errors import EngineError, EngineHung
from engines.protocol.types import GenerateArguments, UpdateGroup


class EngineClient:
    """``protocol.Engine`` over HTTP; as ``HttpCalls`` it belongs to one event loop.

    Attributes:
        calls: what it sends with; its deadlines may be replaced.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        engine_id: str = "",
        deadlines: Deadlines = DEFAULT_DEADLINES,
    ) -> None:
        self.endpoint = endpoint
        self.calls = HttpCalls(endpoint, engine_id=engine_id, deadlines=deadlines)
        self._num_answers_late: int | None = None

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
        await self._order("pause_generation", {"mode": mode}, self.deadlines.pause_s)

    async def continue_generation(self) -> None:
        await self._order("continue_generation", {}, self.deadlines.control_s)

    async def flush_cache(self, timeout_s: float | None = None) -> None:
        """Empties the prefix cache.  The engine waits up to ``timeout_s`` to become idle first."""
        budget_s = (timeout_s or 0.0) + self.deadlines.flush_margin_s
        query = "" if timeout_s is None else f"?timeout={timeout_s:g}"
        await self._order("flush_cache", {}, budget_s, query=query)

    async def abort_request(self, rid: str | None = None) -> None:
        """Aborts all requests, or those whose id *starts with* ``rid``."""
        body = {"abort_all": True} if rid is None else {"rid": rid}
        await self._order("abort_request", body, self.deadlines.control_s)

    # Memory

    async def release_memory_occupation(self, tags: Sequence[MemoryTag]) -> None:
        body = {"tags": list(tags)}
        call = await self._order("release_memory_occupation", body, self.deadlines.memory_s)
        await self._wait_for_ranks(call)

    async def resume_memory_occupation(self, tags: Sequence[MemoryTag]) -> None:
        body = {"tags": list(tags)}
        await self._order("resume_memory_occupation", body, self.deadlines.memory_s)

    # Weights

    async def begin_weight_update(self) -> None:
        await self._change("begin_weight_update", {}, self.deadlines.control_s)

    async def end_weight_update(self) -> None:
        await self._change("end_weight_update", {}, self.deadlines.update_s)

    async def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[str],
        *,
        load_format: str | None = None,
        flush_cache: bool = True,
        weight_version: str | None = None,
    ) -> None:
        body = {
            "serialized_named_tensors": list(serialized_named_tensors),
            "flush_cache": flush_cache,
            **_given(load_format=load_format, weight_version=weight_version),
        }
        await self._change("update_weights_from_tensor", body, self.deadlines.update_s)

    async def init_weights_update_group(self, **group: Unpack[UpdateGroup]) -> None:
        await self._change("init_weights_update_group", group, self.deadlines.group_s)

    async def destroy_weights_update_group(self, group_name: str) -> None:
        body = {"group_name": group_name}
        await self._change("destroy_weights_update_group", body, self.deadlines.group_s)

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
        body = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "flush_cache": flush_cache,
            **_given(load_format=load_format, weight_version=weight_version),
        }
        await self._change("update_weights_from_distributed", body, self.deadlines.update_s)

    async def update_weights_from_disk(
        self, model_path: str, *, flush_cache: bool = True, weight_version: str | None = None
    ) -> None:
        body = {
            "model_path": model_path,
            # Otherwise SGLang takes its own, and an engine started with "dummy" would fail.
            "load_format": "auto",
            "flush_cache": flush_cache,
            **_given(weight_version=weight_version),
        }
        call, _ = await self._change("update_weights_from_disk", body, self.deadlines.update_s)
        await self._wait_for_ranks(call)

    async def update_weight_version(
        self, version: str, *, abort_all_requests: bool = False
    ) -> None:
        body = {"new_version": version, "abort_all_requests": abort_all_requests}
        await self._change("update_weight_version", body, self.deadlines.control_s)

    async def weight_version(self) -> str:
        return (await self.model_info()).weight_version

    async def weights_checker(self, action: str = "checksum") -> WeightsReport:
        call, answer = await self._change(
            "weights_checker", {"action": action}, self.deadlines.check_s
        )
        return call.read(answer, sglang_json.read_weights_report)

    async def weights_manifest(self) -> tuple[TensorInfo, ...]:
        """The engine's tensors.  Only the embedded engine lists them."""
        return await self.calls.ask(
            "weights_manifest", "/weights_manifest", sglang_json.read_weights_manifest
        )

    # LoRA

    async def load_lora_adapter(self, name: str, path: str) -> None:
        body = {"lora_name": name, "lora_path": path}
        await self._change("load_lora_adapter", body, self.deadlines.update_s)

    async def load_lora_adapter_from_tensors(
        self, name: str, config: Mapping[str, Any], serialized_named_tensors: Sequence[str]
    ) -> Mapping[str, str]:
        body = {
            "lora_name": name,
            "config_dict": dict(config),
            "serialized_named_tensors": list(serialized_named_tensors),
        }
        operation = "load_lora_adapter_from_tensors"
        call, answer = await self._change(operation, body, self.deadlines.update_s)
        # SGLang reports none.
        return call.read(answer, lambda reply: dict(reply.get("fingerprints") or {}))

    async def unload_lora_adapter(self, name: str) -> None:
        await self._change("unload_lora_adapter", {"lora_name": name}, self.deadlines.update_s)

    # Queries

    async def model_info(self) -> ModelInfo:
        return await self.calls.ask("model_info", "/model_info", sglang_json.read_model_info)

    async def server_info(self) -> ServerInfo:
        return await self._server_info(self.calls.call("server_info", self.deadlines.control_s))

    async def _server_info(self, call: EngineCall) -> ServerInfo:
        answer = await call.send(self.calls.control.get("/server_info"))
        info = call.read(answer, sglang_json.read_server_info)
        self._num_answers_late = info.num_answers_late
        return info

    async def process_start(self) -> str:
        return (await self.server_info()).start

    async def loads(self) -> Loads:
        return await self.calls.ask("loads", "/v1/loads", sglang_json.read_loads)

    async def endpoints(self) -> frozenset[str]:
        """The paths it serves: older engines lack some, ``/begin_weight_update`` among them."""
        return await self.calls.ask("endpoints", "/openapi.json", lambda a: frozenset(a["paths"]))

    async def is_ready(self) -> bool:
        """Whether it takes new requests: up, healthy and not paused.  Cheap."""
        return await self.calls.probe("is_ready", "/ready", self.deadlines.ready_s)

    async def is_healthy(self) -> bool:
        """Whether it generates.  On SGLang a real request: not while it is paused."""
        return await self.calls.probe("is_healthy", "/health", self.deadlines.health_s)

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

        Args:
            extra_key: only prefixes that were cached with this key are used.
            image: for the placeholder of one image in ``input_ids``.
            logprob_start_len: with ``return_logprob``, from which prompt token on it also
                returns the log-probabilities of the prompt.
            lora_path: name of a loaded adapter.

        Raises:
            ValueError: not exactly one of ``input_ids`` and ``text``, or more than one completion
                requested.
        """
        body = sglang_json.generate_body(**request)
        given = {"lora_path": lora_path, "extra_key": extra_key}
        body |= _given(logprob_start_len=logprob_start_len, **given)
        if image is not None:
            body |= {"image_data": [image.data]}
            body |= {"mm_hashes": [image.digest]} if image.digest else {}
        call, answer = await self.calls.post(
            "generate", "/generate", body, self.deadlines.generate_s
        )
        return call.read(answer, sglang_json.read_generate)

    def stream_generate(
        self, **request: Unpack[GenerateArguments]
    ) -> AsyncGenerator[GenerateReply, None]:
        """One completion as it grows; each reply holds all tokens so far.

        Closing the generator early closes the connection, upon which the engine aborts.
        An engine started with ``--incremental-streaming-output`` is not understood.
        """
        body = sglang_json.generate_body(**request)
        return self.calls.stream("/generate", body, sglang_json.read_generate)

    # How a call is made

    async def _wait_for_ranks(self, call: EngineCall) -> None:
        """Wait, within the deadline of a call, until all ranks have done it.

        SGLang's first answers for all; the others may still read the files, or hold the memory.

        Raises:
            EngineUnreachable: whether they have is unknown.
        """
        num_asked = 0
        try:
            while self._num_answers_late is None or num_asked < self._num_answers_late:
                await self._server_info(call.then("wait_for_ranks"))
                num_asked += 1
        except EngineHung:
            raise
        except EngineError as error:
            raise call.unreachable(f"was done by the first rank; of the others: {error}") from error

    async def _order(
        self, operation: str, body: Mapping[str, Any], budget_s: float, *, query: str = ""
    ) -> EngineCall:
        """POSTs where any 2xx means done: the replies are empty, text, or unused JSON."""
        call, answer = await self.calls.post(operation, f"/{operation}{query}", body, budget_s)
        with suppress(ValueError):
            reply = read_json(answer.body)
            if isinstance(reply, dict) and reply.get("success") is False:
                raise call.rejected("failed", status=answer.status, body=answer.text)
        return call

    async def _change(
        self, operation: str, body: Mapping[str, Any], budget_s: float
    ) -> tuple[EngineCall, HttpReply]:
        """POSTs where only ``{"success": true}`` means done."""
        call, answer = await self.calls.post(operation, f"/{operation}", body, budget_s)
        if call.read(answer, lambda reply: reply["success"]) is not True:
            raise call.rejected("failed", status=answer.status, body=answer.text)
        return call, answer


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
