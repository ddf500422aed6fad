"""What can be read from the router over HTTP.

Nothing here changes the gate or the membership: those are method calls of ``RouterHost``, so a
client that reaches the port can generate and abort, but not control the router.  An engine's own
control endpoints (pause, release, weights) are not forwarded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from engines.plain_json import WRONG_FORM, read_json
from engines.process.background import Then, keep_task
from engines.protocol.adapter_names import adapter_of, resolved
from rollout.core.errors import ConfigError
from rollout.router.continuation.named_weights import MAX_NAME_CHARACTERS
from rollout.router.engine_queries import (
    EngineQueryClient,
    add_engine_queries,
    error_reply,
    tokenizer_folder,
)
from rollout.router.gate.gate import Gate
from rollout.router.http.routes import PINS_PATH
from rollout.router.metrics import metrics_text
from rollout.router.pins import Pins
from rollout.router.proxy.context import Proxy
from rollout.router.tokenizer_file import load_tokenizer
from rollout.rules.routing import JUST_STARTED, BackendState

logger = logging.getLogger(__name__)

_MAX_FIGURES_BYTES = 256 << 10
_ENGINE_TIMEOUT_S = 10.0
_LOAD_AGAIN_S = 60.0


def control_app(proxy: Proxy, *, connect_timeout_s: float) -> FastAPI:
    """Health, engines, step metrics, pins, model info and aborts.

    Its lifespan opens and closes the connections to engines.
    """
    client = EngineQueryClient(
        connect_timeout_s=connect_timeout_s, total_timeout_s=_ENGINE_TIMEOUT_S
    )

    async def find_folder() -> str:
        return proxy.config.tokenizer_path or await tokenizer_folder(proxy.gate, client)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        anyio.current_time()  # imports, for 20 ms, what the first streamed response needs
        proxy.open()
        await client.open()
        loading = keep_task(
            partial(_load_decode, proxy, find_folder), "router-tokenizer", Then.STARTS_AGAIN
        )
        try:
            yield
        finally:
            loading.cancel()
            await client.aclose()
            proxy.close()

    # A redirect would be made of the Host header, which is the client's.
    app = FastAPI(title="ray-rollout router", lifespan=lifespan, redirect_slashes=False)
    _add_state(app, proxy)
    _add_step_metrics(app, proxy)
    _add_workers(app, proxy.gate)
    _add_pins(app, proxy.gate)
    _add_no_sessions(app)
    add_engine_queries(app, proxy.gate, client)
    return app


async def _load_decode(proxy: Proxy, find_folder: Callable[[], Awaitable[str]]) -> None:
    """Load the tokenizer when the first reply is read as tokens.

    Without it, fewer tokens of a lost engine are known to end with their text, and are kept.
    """
    while proxy.decode is None:
        await proxy.reads_tokens.wait()
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, await find_folder())
            proxy.decode = tokenizer.decode
        except ConfigError as error:
            logger.info("replies are read without the tokenizer: %s", error)
            await asyncio.sleep(_LOAD_AGAIN_S)
            proxy.reads_tokens.clear()


def _add_state(app: FastAPI, proxy: Proxy) -> None:
    """Health, readiness, engines and metrics of the router."""
    gate = proxy.gate

    @app.get("/health")
    async def health() -> dict[str, str]:
        """200 while the router runs."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """200 if a request sent now would go to an engine at once."""
        stats = gate.stats()["gate"]
        if gate.is_ready:
            return JSONResponse(stats)
        why = "" if gate.members.can_serve else gate.members.why_none_serves()
        return JSONResponse({**stats, "why": why}, 503, {"retry-after": "2"})

    @app.get("/engines")
    async def engines() -> dict[str, Any]:
        """Gate, engines with their states and load, and counts of how requests ended."""
        of_server = proxy.step_metrics.of_server
        return {**gate.stats(), **proxy.stats(), "server_metrics": of_server}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(metrics_text(proxy), media_type="text/plain; version=0.0.4")


def _add_workers(app: FastAPI, gate: Gate) -> None:
    """The engines as SGLang's model gateway lists them, for trainers that were made for it."""

    def refused(what: str) -> JSONResponse:
        message = (
            f"{what}: this router's engines are those of its configuration; name engines that run "
            "already in engine.urls of a group and launch again"
        )
        return error_reply(409, "conflict", message)

    def all_workers() -> list[dict[str, Any]]:
        return [
            {
                "id": member.engine_id,
                "url": member.endpoint.url,
                "model_id": "unknown",  # as the gateway has it for a router of one model
                "worker_type": member.worker_type.value,
                "is_healthy": member.state is BackendState.SERVING,
                "load": gate.num_on(member.engine_id),
                "connection_mode": "http",
            }
            for member in gate.members
        ]

    @app.get("/workers")
    async def workers() -> dict[str, Any]:
        """All engines; those that do not serve now are not healthy."""
        listed = all_workers()
        return {"workers": listed, "total": len(listed)}

    @app.get("/workers/{worker_id}")
    async def worker(worker_id: str) -> JSONResponse:
        """One engine."""
        for listed in all_workers():
            if listed["id"] == worker_id:
                return JSONResponse(listed)
        return error_reply(404, "not_found", "there is no such engine; GET /workers lists them")

    @app.post("/workers")
    async def add_worker(request: Request) -> JSONResponse:
        """Nothing is added: an engine that is here already is named, any other is refused."""
        try:
            url = read_json(await request.body())["url"]
        except WRONG_FORM:
            return error_reply(400, "bad_request", "the body must be an object with url")
        for listed in all_workers():
            if isinstance(url, str) and listed["url"] == url.rstrip("/"):
                accepted = {"status": "accepted", "worker_id": listed["id"], "url": listed["url"]}
                return JSONResponse(accepted)
        return refused("no engine is added while the router runs")

    @app.delete("/workers/{worker_id}")
    async def remove_worker(worker_id: str) -> JSONResponse:
        """Nothing is removed."""
        return refused("no engine is removed while the router runs")


def _add_step_metrics(app: FastAPI, proxy: Proxy) -> None:
    @app.post("/figures")
    async def figures(request: Request) -> JSONResponse:
        """Keep the metrics of a driver's step, to be shown with the server."""
        body = await request.body()
        if len(body) > _MAX_FIGURES_BYTES:
            message = f"figures are at most {_MAX_FIGURES_BYTES} bytes"
            return error_reply(413, "too_large", message)
        try:
            proxy.step_metrics.put(read_json(body), len(body))
        except ValueError as error:
            return error_reply(400, "bad_request", str(error))
        return JSONResponse({"kept": True})


def _add_pins(app: FastAPI, gate: Gate) -> None:
    pins = Pins(gate)

    @app.post(PINS_PATH)
    async def pin(request: Request) -> Response:
        """Keep the version of an adapter that answers now while the connection is open.

        Its only line names the version as ``lora_path`` takes it; null for the base, which has one
        version at a time and is not pinned.  Adapters are pushed meanwhile, and requests that name
        the version are answered by it.  A client that is lost has half a minute to pin it
        again; one that needs it no more deletes ``pin_id``.
        """
        if gate.reason == JUST_STARTED:  # it does not know which versions there are
            return error_reply(503, "unavailable", JUST_STARTED, {"retry-after": "2"})
        try:
            wanted = read_json(await request.body())["lora_path"]
        except WRONG_FORM:
            return error_reply(400, "bad_request", "the body must be an object with lora_path")
        if not (isinstance(wanted, str) and len(wanted) <= MAX_NAME_CHARACTERS):
            message = f"lora_path must be a text of at most {MAX_NAME_CHARACTERS} characters"
            return error_reply(400, "bad_request", message)
        adapters = gate.adapters or {}
        names = resolved((wanted,), adapters)
        if adapter_of(names[0] or "") not in adapters:  # it has no further versions
            return JSONResponse({"lora_path": names[0], "is_pinned": False})
        return StreamingResponse(pins.open(names), media_type="application/x-ndjson")

    @app.delete(f"{PINS_PATH}/{{pin_id}}")
    async def unpin(pin_id: str) -> JSONResponse:
        """Keep the version no longer for this pin."""
        if not pins.close(pin_id):
            return error_reply(404, "not_found", "there is no such pin")
        return JSONResponse({"pin_id": pin_id})


def _add_no_sessions(app: FastAPI) -> None:
    @app.api_route(
        "/sessions/{path:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False
    )
    async def sessions(path: str) -> JSONResponse:
        """404: sessions are served by the agents' program, at other addresses."""
        message = (
            "the router has no sessions: policy.session(...).base_url, or agents in rollout "
            "status, has the address of a session"
        )
        return error_reply(404, "not_found", message)
