"""What can be read from the router over HTTP.

Nothing here changes the gate or the membership: those are method calls of ``RouterHost``, so
whoever reaches the port can generate and abort, not steer.  An engine's own control endpoints
(pause, release, weights) are not passed on.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse

from rollout.router.asking import asking
from rollout.router.control import ControlClient
from rollout.router.metrics import exposition
from rollout.router.proxy import Proxy

_MAX_FIGURES_BYTES = 256 << 10


def control_app(proxy: Proxy, control: ControlClient) -> FastAPI:
    """Health, engines, figures, sessions, model info and aborts.

    Its lifespan is that of the connections.
    """

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
    for routes in (_looking(proxy), _figures(proxy), _sessions(proxy), asking(proxy.gate, control)):
        app.include_router(routes)
    return app


def _looking(proxy: Proxy) -> APIRouter:
    """What the router is and does."""
    routes, gate = APIRouter(), proxy.gate

    @routes.get("/health")
    async def health() -> dict[str, str]:
        """200 for as long as the router runs."""
        return {"status": "ok"}

    @routes.get("/ready")
    async def ready() -> JSONResponse:
        """200 when a request sent now would go to an engine at once."""
        stats = gate.stats()["gate"]
        if gate.is_ready:
            return JSONResponse(stats)
        why = "" if gate.members.can_serve else gate.members.why_none_serves()
        return JSONResponse({**stats, "why": why}, 503, {"retry-after": "2"})

    @routes.get("/engines")
    async def engines() -> dict[str, Any]:
        """Gate, membership with states and load, and how requests ended."""
        return {**gate.stats(), **proxy.stats()}

    @routes.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(exposition(proxy), media_type="text/plain; version=0.0.4")

    return routes


def _figures(proxy: Proxy) -> APIRouter:
    """What drivers tell."""
    routes = APIRouter()

    @routes.post("/figures")
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

    return routes


def _sessions(proxy: Proxy) -> APIRouter:
    """What was recorded of them."""
    routes = APIRouter()

    @routes.get("/sessions/{session_id}")
    async def session(session_id: str) -> JSONResponse:
        """The recorded turns of a session, oldest first."""
        turns = proxy.recordings.get(session_id)
        if turns is None:
            return _no_session(session_id)
        return JSONResponse({"session_id": session_id, "turns": turns})

    @routes.delete("/sessions/{session_id}")
    async def delete_session(session_id: str) -> JSONResponse:
        """Forget the recorded turns of a session."""
        if not proxy.recordings.delete(session_id):
            return _no_session(session_id)
        return JSONResponse({"session_id": session_id})

    return routes


def _no_session(session_id: str) -> JSONResponse:
    message = f"nothing is recorded of session {session_id}"
    return JSONResponse({"error": {"type": "not_found", "message": message}}, 404)
