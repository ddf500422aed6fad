"""vLLM's HTTP control endpoints as ``protocol.Engine``: adapters, queries and generation.

Facts of 0.32.0, as ``docs/how-to/vllm.md`` lists them.  Pauses and memory are in ``pauses``,
weights in ``pushes``.  No policy: a call that kills the server is sent like any other.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Unpack

from engines.protocol import GenerateReply, Loads, ModelInfo, PromptImage, SamplingParams
from engines.protocol.errors import EngineHung
from engines.protocol.sampling_params import DEFAULT_SAMPLING
from engines.protocol.types import GenerateArguments
from engines.vllm import routes, vllm_json
from engines.vllm.pushes import VllmPushes
from engines.vllm.server_report import has_plugin, known_paths

_ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0)


class VllmClient(VllmPushes):
    """``protocol.Engine`` of a vLLM server."""

    # LoRA

    async def load_lora_adapter(self, name: str, path: str) -> None:
        body = {"lora_name": name, "lora_path": path}
        await self._post("load_lora_adapter", routes.LOAD_LORA, body, self.deadlines.update_s)

    async def load_lora_adapter_from_tensors(
        self, name: str, config: Mapping[str, Any], serialized_named_tensors: Sequence[str]
    ) -> Mapping[str, str]:
        why = "vLLM loads adapters from a folder only; push full weights, or use SGLang"
        call = self._call("load_lora_adapter_from_tensors", 0.0)
        raise call.rejected("is not supported", status=HTTPStatus.NOT_IMPLEMENTED, body=why)

    async def unload_lora_adapter(self, name: str) -> None:
        body = {"lora_name": name}
        await self._post("unload_lora_adapter", routes.UNLOAD_LORA, body, self.deadlines.update_s)

    # Queries

    async def model_info(self) -> ModelInfo:
        info = await self._known_info()
        return ModelInfo(info.raw["model_path"], await self.weight_version())

    async def loads(self) -> Loads:
        call = self._call("loads", self.deadlines.control_s)
        answer = await call.send(self._control.get(routes.METRICS))
        return call.read_text(answer, vllm_json.read_loads)

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
            raise self._call("generate", 0.0).rejected("is not supported", status=501, body=why)
        if extra_key is not None:
            body["cache_salt"] = extra_key
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
