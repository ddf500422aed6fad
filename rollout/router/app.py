"""What can be read from the router over HTTP, and where each path goes.

Nothing here changes the gate or the membership: those are method calls of ``RouterHost``, so
whoever reaches the port can generate and abort, not steer.  An engine's own control endpoints
(pause, release, weights) are not passed on.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from engines.errors import EngineUnreachable
from rollout.router.gate import Gate
from rollout.router.headers import to_client, to_engine
from rollout.router.proxy import Proxy
from rollout.router.transport import Request as EngineRequest
from rollout.router.transport import Transport
from rollout.router.upstream import Upstream
from rollout.routing import Member, MemberState

logger = logging.getLogger(__name__)

GENERATION_PATHS = frozenset(
    {
        "/generate",
        "/encode",
        "/classify",
        "/invocations",
        "/vertex_generate",
        "/tokenize",
        "/detokenize",
    }
)
"""Paths that go through the gate, with all below ``/v1/`` but ``/v1/models``."""

_CAN_ANSWER = (MemberState.SERVING, MemberState.DRAINING, MemberState.ASLEEP)
_CAN_HOLD_REQUESTS = (MemberState.SERVING, MemberState.DRAINING)


def router_app(gate: Gate, proxy: Proxy, data: Upstream, control: Upstream) -> ASGIApp:
    """Generation to the proxy, everything else to the control app, both on one port."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await data.open()
        await control.open()
        try:
            yield
        finally:
            await control.aclose()
            await data.aclose()

    rest = control_app(gate, proxy.stats, control, lifespan)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_generation(scope["path"]):
            await proxy(scope, receive, send)
        else:
            await rest(scope, receive, send)

    return app


def is_generation(path: str) -> bool:
    return path in GENERATION_PATHS or (path.startswith("/v1/") and path != "/v1/models")


def control_app(
    gate: Gate,
    proxy_stats: Callable[[], dict[str, int]],
    control: Transport,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]],
) -> FastAPI:
    """Health, engines, model info and aborts."""
    app = FastAPI(title="ray-rollout router", lifespan=lifespan)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """200 for as long as the router runs."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """200 when a request sent now would go to an engine at once."""
        stats = gate.stats()["gate"]
        if gate.is_ready:
            return JSONResponse(stats)
        why = "" if gate.members.choosable else gate.members.why_none_serves()
        return JSONResponse({**stats, "why": why}, 503, {"retry-after": "2"})

    @app.get("/engines")
    async def engines() -> dict[str, Any]:
        """Gate, membership with states and load, and how requests ended."""
        return {**gate.stats(), **proxy_stats()}

    async def pass_on(request: Request) -> Response:
        members = [member for member in gate.members if member.state in _CAN_ANSWER]
        members.sort(key=lambda member: _CAN_ANSWER.index(member.state))
        for member in members[:2]:
            try:
                return await _ask(control, member, "GET", request.url.path, b"")
            except (EngineUnreachable, TimeoutError) as error:
                logger.warning("engine %s: %s: %s", member.engine_id, request.url.path, error)
        message = f"no engine answers: {gate.members.why_none_serves()}"
        error_body = {"error": {"type": "unavailable", "message": message}}
        return JSONResponse(error_body, 503, {"retry-after": "2"})

    for path in ("/model_info", "/get_model_info", "/v1/models"):
        app.add_api_route(path, pass_on, methods=["GET"])

    @app.post("/abort_request")
    async def abort_request(request: Request) -> JSONResponse:
        """Abort where the rid is known to be; else on every engine that may hold it."""
        body = await request.body()
        try:
            asked = json.loads(body or b"{}")
            rid, is_for_all = str(asked.get("rid") or ""), bool(asked.get("abort_all"))
        except (ValueError, AttributeError):
            message = "the body must be a JSON object with rid or abort_all"
            return JSONResponse({"error": {"type": "bad_request", "message": message}}, 400)
        num_held = gate.abort_held(None if is_for_all else rid) if rid or is_for_all else 0
        targets = gate.holders(rid) if rid and not is_for_all else []
        if is_for_all or not (targets or num_held):
            targets = [member for member in gate.members if member.state in _CAN_HOLD_REQUESTS]
        failed = dict(
            outcome
            for outcome in await asyncio.gather(
                *(_abort_on(control, member, body) for member in targets)
            )
            if outcome[1]
        )
        answer = {
            "engines": [member.engine_id for member in targets],
            "num_held": num_held,
            "failed": failed,
        }
        return JSONResponse(answer, 502 if failed else 200)

    return app


async def _abort_on(control: Transport, member: Member, body: bytes) -> tuple[str, str]:
    """The engine's id, and why it did not take the abort; empty if it did."""
    try:
        response = await _ask(control, member, "POST", "/abort_request", body)
    except (EngineUnreachable, TimeoutError) as error:
        logger.warning("engine %s: /abort_request: %s", member.engine_id, error)
        return member.engine_id, str(error)
    return member.engine_id, "" if response.status_code < 400 else f"HTTP {response.status_code}"


async def _ask(control: Transport, member: Member, method: str, path: str, body: bytes) -> Response:
    headers = to_engine([(b"content-type", b"application/json")] if body else [])
    request = EngineRequest(method, path, headers, body)
    reply = await control.send(member.engine_id, member.endpoint, request, body)
    try:
        parts = []
        while not reply.is_at_end:
            parts.append(await reply.read())
    finally:
        reply.close()
    response = Response(b"".join(parts), reply.status)
    response.raw_headers = [
        *to_client(
            [(name, value) for name, value in reply.headers if name.lower() != b"content-length"],
            reply.status,
            member.engine_id,
            None,
        ),
        (b"content-length", str(len(response.body)).encode()),
    ]
    return response
