"""A fake engine behind SGLang's HTTP protocol, for tests across processes.

``HttpFakeLauncher`` serves each fake from the event loop that launches it, so it runs wherever
an engine would be launched: in this process or in an actor.  ``/fake/...`` is the test's side:
hold an operation at a gate, wait until it is there, open it, make it fail, plan a fault, kill,
freeze and thaw it, see what was called.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from inspect import isawaitable
from typing import Any

from aiohttp import web

from engines.fake.engine.fake_engine import FakeEngine
from engines.fake.engine.fake_sampling import why_unknown
from engines.fake.engine.fake_weights import digest_of
from engines.fake.engine.faults import CallGate, parse_fault
from engines.fake.launcher import FakeRunningEngine, Make, make_engine
from engines.http.key_check import Refusal, check, new_access
from engines.process.background import start_task
from engines.protocol import (
    NO_ACCESS,
    PROCESS_HEADER,
    Endpoint,
    EngineAccess,
    GenerateReply,
    GpuId,
    MemoryTag,
    PauseMode,
    PromptImage,
    SamplingParams,
)
from engines.protocol.errors import EngineError, EngineRejected, EngineUnreachable
from engines.protocol.spec import EngineSpec

# SGLang wants a body, if only an empty object, for all that it is posted but these.
_NEED_NO_BODY = frozenset({"/flush_cache", "/weights_checker"})
# How soon an engine notices that the client of a request has left; SGLang takes up to 4.
_LOOK_S = 0.5
_TEXTS = frozenset({"stop", "stop_regex"})

Handler = Callable[[Mapping[str, Any]], Any]


class HttpFakeLauncher:
    """``launch.EngineLauncher`` of fake engines that listen on a port of their own.

    Args:
        make: makes the engine of a spec; a function of a module, so that it can be sent to an
            actor.
    """

    def __init__(self, make: Make = make_engine) -> None:
        self._make = make

    async def launch(self, spec: EngineSpec) -> ServedFake:
        """Start it; its endpoint is known only then."""
        access = access_for(spec)
        served = FakeHttpApp(access)
        runner = web.AppRunner(served.app, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, spec.host, 0).start()
            endpoint = Endpoint(spec.host, runner.addresses[0][1])
            served.engine = self._make(spec, endpoint)
        except BaseException:
            await runner.cleanup()
            raise
        return ServedFake(served.engine, runner, access, spec.gpu_ids)


class ServedFake(FakeRunningEngine):
    """The process a served fake seems to run in."""

    def __init__(
        self,
        engine: FakeEngine,
        runner: web.AppRunner,
        access: EngineAccess,
        gpu_ids: Sequence[GpuId],
    ) -> None:
        super().__init__(engine, engine.endpoint.port, gpu_ids)
        self.access = access
        self._runner = runner

    async def stop(self, grace_s: float) -> bool:
        was_killed = await super().stop(grace_s)
        await self._runner.cleanup()
        return was_killed

    async def kill(self) -> None:
        await super().kill()
        await self._runner.cleanup()


def key_check(access: EngineAccess, names: Callable[[], Collection[str]]) -> Any:
    """Middleware that carries out what ``key_check.check`` admits, and what is a test's.

    Args:
        names: of the engine's process, besides that in ``access``.
    """

    @web.middleware
    async def checked(request: web.Request, handler: Any) -> web.StreamResponse:
        headers = request.headers
        key, process = headers.get("Authorization", ""), headers.get(PROCESS_HEADER, "")
        try:
            if not request.path.startswith("/fake/"):
                check(access, request.path, key, process, names())
        except Refusal as refusal:
            return web.Response(
                status=refusal.status, body=refusal.body, content_type="application/json"
            )
        response: web.StreamResponse = await handler(request)
        return response

    return checked


def access_for(spec: EngineSpec) -> EngineAccess:
    """Its keys, as ``LocalLauncher`` makes them, with a name of its process."""
    access = new_access() if spec.access is None else spec.access
    return access.of(secrets.token_hex(8), run=spec.run)


class FakeHttpApp:
    """The routes of one engine.

    Args:
        access: its keys, and its process.
    """

    engine: FakeEngine

    def __init__(self, access: EngineAccess = NO_ACCESS) -> None:
        check_keys = key_check(access, lambda: [self.engine.start])
        self.app = web.Application(client_max_size=2**30, middlewares=[check_keys])
        self._testers = testers = TestersRoutes(self)
        queries = {**self._queries(), "/fake/requests": lambda b: testers.requests}
        commands = {**self._commands(), **testers.commands()}
        self.app.add_routes([web.get(path, self._serve(act)) for path, act in queries.items()])
        self.app.add_routes([web.post(path, self._serve(act)) for path, act in commands.items()])

    def _queries(self) -> dict[str, Handler]:
        return {
            "/model_info": self._model_info,
            "/server_info": self._server_info,
            "/v1/loads": self._loads,
            "/openapi.json": self._openapi,
            "/weights_manifest": self._manifest,
            "/ready": lambda b: self._probe(self.engine.is_ready()),
            "/health": lambda b: self._probe(self.engine.is_healthy()),
            "/health_generate": lambda b: self._probe(self.engine.is_healthy()),
        }

    def _commands(self) -> dict[str, Handler]:
        return {
            "/pause_generation": lambda b: self.engine.pause_generation(
                PauseMode(b.get("mode", "abort"))
            ),
            "/continue_generation": lambda b: self.engine.continue_generation(),
            "/flush_cache": lambda b: self.engine.flush_cache(_seconds(b.get("timeout"))),
            "/abort_request": self._abort,
            "/release_memory_occupation": lambda b: self.engine.release_memory_occupation(_tags(b)),
            "/resume_memory_occupation": lambda b: self.engine.resume_memory_occupation(_tags(b)),
            "/begin_weight_update": lambda b: self.engine.begin_weight_update(),
            "/end_weight_update": lambda b: self.engine.end_weight_update(),
            "/update_weights_from_tensor": lambda b: self.engine.update_weights_from_tensor(**b),
            "/update_weights_from_distributed": lambda b: (
                self.engine.update_weights_from_distributed(**b)
            ),
            "/update_weights_from_disk": self._update_from_disk,
            "/update_weight_version": self._update_version,
            "/init_weights_update_group": lambda b: self.engine.init_weights_update_group(**b),
            "/destroy_weights_update_group": lambda b: self.engine.destroy_weights_update_group(
                **b
            ),
            "/load_lora_adapter": lambda b: self.engine.load_lora_adapter(
                b["lora_name"], b["lora_path"]
            ),
            "/load_lora_adapter_from_tensors": lambda b: self.engine.load_lora_adapter_from_tensors(
                b["lora_name"], b["config_dict"], b["serialized_named_tensors"]
            ),
            "/unload_lora_adapter": lambda b: self.engine.unload_lora_adapter(b["lora_name"]),
            "/weights_checker": self._check_weights,
            "/generate": self._generate,
        }

    def _serve(self, act: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def serve(request: web.Request) -> web.StreamResponse:
            arrived = time.monotonic()
            if not request.can_read_body and _wants_body(request):
                return web.Response(status=400, text="a JSON body is needed, if only {}")
            body = await request.json() if request.can_read_body else {}
            try:
                if request.path == "/generate" and body.get("stream"):
                    return await self._stream(request, body)
                if request.path == "/generate":
                    answer = await _while_connected(request, act(body))
                else:
                    answer = act({**request.query, **body})
                    if isawaitable(answer):
                        answer = await answer
            except EngineRejected as error:
                return web.Response(status=error.status or 400, text=error.body)
            except EngineError:
                return _broken(request)
            finally:
                self._testers.requests.append((request.path, arrived, time.monotonic()))
            return web.json_response({"success": True} if answer in (None, True) else answer)

        return serve

    # Queries

    async def _probe(self, probing: Awaitable[bool]) -> None:
        if not await probing:
            raise EngineRejected("the probe failed", status=503)

    async def _model_info(self, body: Mapping[str, Any]) -> Any:
        info = await self.engine.model_info()
        return {
            **info.raw,
            "model_path": info.model_path,
            "weight_version": info.weight_version,
        }

    async def _server_info(self, body: Mapping[str, Any]) -> Any:
        info = await self.engine.server_info()
        return {
            **info.raw,
            "version": info.version,
            "engine": info.engine,
            "enable_memory_saver": info.enable_memory_saver,
            "enable_weights_cpu_backup": info.enable_weights_cpu_backup,
            "released_tags": None if info.released is None else sorted(info.released),
            "weights_update_groups": None
            if info.update_groups is None
            else sorted(info.update_groups),
            "fingerprints": info.fingerprints,
            "process_start": info.start,
        }

    async def _loads(self, body: Mapping[str, Any]) -> Any:
        return {"loads": [asdict(await self.engine.loads())]}

    async def _openapi(self, body: Mapping[str, Any]) -> Any:
        return {"paths": {path: {} for path in await self.engine.endpoints()}}

    async def _manifest(self, body: Mapping[str, Any]) -> Any:
        return [asdict(tensor) for tensor in await self.engine.weights_manifest()]

    async def _check_weights(self, body: Mapping[str, Any]) -> Any:
        report = await self.engine.weights_checker(body.get("action", "checksum"))
        return {
            "success": True,
            "per_engine_checksum": report.checksum,
            "ranks": [{"checksums": dict(rank)} for rank in report.tensors],
        }

    async def _abort(self, body: Mapping[str, Any]) -> None:
        """Ends nothing for an order that names nothing."""
        if body.get("abort_all"):
            await self.engine.abort_request()
        elif rid := body.get("rid"):
            await self.engine.abort_request(rid)

    async def _update_from_disk(self, body: Mapping[str, Any]) -> None:
        await self.engine.update_weights_from_disk(
            body["model_path"],
            flush_cache=body.get("flush_cache", True),
            weight_version=body.get("weight_version"),
        )

    async def _update_version(self, body: Mapping[str, Any]) -> None:
        await self.engine.update_weight_version(
            body["new_version"], abort_all_requests=body.get("abort_all_requests", True)
        )

    async def _generate(self, body: Mapping[str, Any]) -> Any:
        """A list of completions, as SGLang's, for ``n`` above 1, each with an id of its own."""
        arguments = _generate_arguments(body)
        num = arguments["sampling_params"].n
        if num <= 1:
            return await self._completion(body, arguments)
        single = {"sampling_params": replace(arguments["sampling_params"], n=1), "rid": None}
        return await asyncio.gather(
            *(self._completion(body, arguments | single) for _ in range(num))
        )

    async def _completion(self, body: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
        reply = await self.engine.generate(
            **arguments,
            logprob_start_len=body.get("logprob_start_len"),
            lora_path=body.get("lora_path"),
            extra_key=body.get("extra_key"),
            image=_image_of(body),
        )
        return _generate_answer(reply)

    async def _stream(self, request: web.Request, body: Mapping[str, Any]) -> web.StreamResponse:
        """Server-sent events: all so far each time, and ``[DONE]``; a broken engine just ends."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        arguments = _generate_arguments(body)
        if arguments["sampling_params"].n > 1:
            why = "a fake streams one completion"
            raise EngineRejected(why, status=400, body=why)
        stream = self.engine.stream_generate(**arguments)
        try:
            async with aclosing(stream):
                async for reply in stream:
                    if not response.prepared:
                        await response.prepare(request)
                    data = json.dumps(_generate_answer(reply)).encode()
                    await response.write(b"data: " + data + b"\n\n")
        except EngineRejected as error:
            # What SGLang finds wrong only when it has begun to answer is an event of the stream.
            if not response.prepared:
                await response.prepare(request)
            data = json.dumps({"error": {"message": error.body, "code": error.status}}).encode()
            await response.write(b"data: " + data + b"\n\n")
        if not response.prepared:
            await response.prepare(request)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


class TestersRoutes:
    """What a test sets and sees of a served fake.

    Attributes:
        requests: path, when it came, when it was answered: seconds that processes of a machine
            share.
    """

    def __init__(self, served: FakeHttpApp) -> None:
        self.requests: list[tuple[str, float, float]] = []
        self._served = served
        self._gates: dict[str, CallGate] = {}

    def commands(self) -> dict[str, Handler]:
        return {
            "/fake/hold": self._hold,
            "/fake/entered": lambda b: self._gates[b["operation"]].entered.wait(),
            "/fake/open": lambda b: self._gates[b["operation"]].open(),
            "/fake/fail": self._fail,
            "/fake/fault": self._plan,
            "/fake/kill": lambda b: self._served.engine.die("killed by hand"),
            "/fake/freeze": lambda b: self._served.engine.freeze(),
            "/fake/thaw": lambda b: self._served.engine.thaw(),
        }

    def _hold(self, body: Mapping[str, Any]) -> None:
        self._gates[body["operation"]] = self._served.engine.hold(body["operation"])

    def _fail(self, body: Mapping[str, Any]) -> None:
        operation, text = body["operation"], body["body"]
        error = EngineRejected(text, engine=self._served.engine.engine_id, status=400, body=text)
        self._served.engine.fail_next(operation, error)

    def _plan(self, body: Mapping[str, Any]) -> None:
        """``{"fault": "release_memory_occupation#2:die@after"}``; a wrong one is a 400."""
        try:
            parse_fault(body["fault"]).add_to(self._served.engine.faults)
        except ValueError as error:
            raise EngineRejected(str(error), status=400, body=str(error)) from None


def _wants_body(request: web.Request) -> bool:
    path = request.path
    needs_none = path in _NEED_NO_BODY or path.startswith("/fake/")
    return request.method == "POST" and not needs_none


def _broken(request: web.Request) -> web.Response:
    """Break the connection as a dead engine's breaks."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=500)


async def _while_connected(request: web.Request, work: Awaitable[Any]) -> Any:
    """``work``, given up when the client of ``request`` has left."""
    task = start_task(work, "call")
    try:
        while not (await asyncio.wait({task}, timeout=_LOOK_S))[0]:
            if request.transport is None or request.transport.is_closing():
                break
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not task.done():
        task.cancel()
        raise EngineUnreachable("the client has left")
    return task.result()


def _generate_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """Raises EngineRejected for what is no sampling parameter.  As SGLang it passes over an unknown
    field of ``body`` in silence, and null is a parameter's default."""
    sampling = body.get("sampling_params") or {}
    if why := why_unknown(sampling):
        raise EngineRejected(why, status=400, body=why)
    known: dict[str, Any] = {
        name: (value,) if name in _TEXTS and isinstance(value, str) else value
        for name, value in sampling.items()
        if name != "stream_interval" and value is not None
    }
    return {
        "input_ids": body.get("input_ids"),
        "text": body.get("text"),
        "sampling_params": replace(SamplingParams(), **known),
        "rid": body.get("rid"),
        "return_logprob": body.get("return_logprob", False),
    }


def _image_of(body: Mapping[str, Any]) -> PromptImage | None:
    data, digests = body.get("image_data"), body.get("mm_hashes")
    return PromptImage(data[0], (digests or [digest_of(data[0])])[0]) if data else None


def _seconds(text: str | None) -> float | None:
    return None if text is None else float(text)


def _tags(body: Mapping[str, Any]) -> list[MemoryTag]:
    return [MemoryTag(tag) for tag in body.get("tags") or ()]


def _generate_answer(reply: GenerateReply) -> dict[str, Any]:
    reason = reply.finish_reason
    meta: dict[str, Any] = {
        "id": reply.rid,
        "prompt_tokens": reply.prompt_tokens,
        "cached_tokens": reply.cached_tokens,
        "completion_tokens": reply.completion_tokens,
        "finish_reason": reason
        and {"type": reason.kind, "matched": reason.matched, "message": reason.message},
        "weight_version": reply.weight_version,
        "weight_versions": [asdict(span) for span in reply.weight_versions],
    }
    if reply.output_logprobs is not None:
        pairs = zip(reply.output_logprobs, reply.output_ids, strict=True)
        # SGLang's JSON writer has no NaN and sends null for it.
        meta["output_token_logprobs"] = [
            [None if math.isnan(logprob) else logprob, token, None] for logprob, token in pairs
        ]
    if reply.input_logprobs is not None:
        meta["input_token_logprobs"] = [[value, 0, None] for value in (None, *reply.input_logprobs)]
    return {"text": reply.text, "output_ids": list(reply.output_ids), "meta_info": meta}
