"""What can be read from the router over HTTP.

Nothing here changes the gate or the membership: those are method calls of ``RouterHost``, so
whoever reaches the port can generate and abort, not steer.  An engine's own control endpoints
(pause, release, weights) are not passed on.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from engines.errors import EngineUnreachable
from rollout.router.control import ControlClient
from rollout.router.metrics import exposition
from rollout.router.proxy import Proxy
from rollout.routing import Member, MemberState

logger = logging.getLogger(__name__)

_CAN_ANSWER = (MemberState.SERVING, MemberState.DRAINING, MemberState.ASLEEP)
_MAX_FIGURES_BYTES = 256 << 10
_CAN_HOLD_REQUESTS = (MemberState.SERVING, MemberState.DRAINING)


def control_app(proxy: Proxy, control: ControlClient) -> FastAPI:
    """Health, engines, model info and aborts; its lifespan is that of the connections."""
    gate = proxy.gate

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        proxy.open()
        await control.open()
        try:
            yield
        finally:
            await control.aclose()
            proxy.close()

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
        why = "" if gate.members.can_serve else gate.members.why_none_serves()
        return JSONResponse({**stats, "why": why}, 503, {"retry-after": "2"})

    @app.get("/engines")
    async def engines() -> dict[str, Any]:
        """Gate, membership with states and load, and how requests ended."""
        return {**gate.stats(), **proxy.stats()}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(exposition(proxy), media_type="text/plain; version=0.0.4")

    @app.post("/figures")
    async def figures(request: Request) -> JSONResponse:
        """What a driver tells of a step, for whoever looks at the server."""
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > _MAX_FIGURES_BYTES:
                message = f"figures are at most {_MAX_FIGURES_BYTES} bytes"
                return JSONResponse({"error": {"type": "too_large", "message": message}}, 413)
        try:
            proxy.figures.put(json.loads(body))
        except ValueError as error:
            return JSONResponse({"error": {"type": "bad_request", "message": str(error)}}, 400)
        return JSONResponse({"kept": True})

    @app.get("/sessions/{session_id}")
    async def session(session_id: str) -> JSONResponse:
        """The recorded turns of a session, oldest first."""
        turns = proxy.recordings.get(session_id)
        if turns is None:
            return _no_session(session_id)
        return JSONResponse({"session_id": session_id, "turns": turns})

    @app.delete("/sessions/{session_id}")
    async def delete_session(session_id: str) -> JSONResponse:
        """Forget the recorded turns of a session."""
        if not proxy.recordings.delete(session_id):
            return _no_session(session_id)
        return JSONResponse({"session_id": session_id})

    async def pass_on(request: Request) -> Response:
        members = [member for member in gate.members if member.state in _CAN_ANSWER]
        members.sort(key=lambda member: _CAN_ANSWER.index(member.state))
        for member in members[:2]:
            try:
                reply = await control.ask(member, "GET", request.url.path)
            except EngineUnreachable as error:
                logger.warning("engine %s: %s: %s", member.engine_id, request.url.path, error)
                continue
            response = Response(reply.body, reply.status)
            length = (b"content-length", str(len(reply.body)).encode())
            response.raw_headers = [*reply.headers, length]
            return response
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
        if rid or is_for_all:
            gate.mark_aborted(None if is_for_all else rid)
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


def _no_session(session_id: str) -> JSONResponse:
    message = f"nothing is recorded of session {session_id}"
    return JSONResponse({"error": {"type": "not_found", "message": message}}, 404)


async def _abort_on(control: ControlClient, member: Member, body: bytes) -> tuple[str, str]:
    """The engine's id, and why it did not take the abort; empty if it did."""
    try:
        reply = await control.ask(member, "POST", "/abort_request", body)
    except EngineUnreachable as error:
        logger.warning("engine %s: /abort_request: %s", member.engine_id, error)
        return member.engine_id, str(error)
    return member.engine_id, "" if reply.status < 400 else f"HTTP {reply.status}"
