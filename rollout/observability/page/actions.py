"""Actions of the page: return an engine's log, fence an engine, stop the server.

Always true: a request without the control key changes nothing, and its reply names the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from engines.protocol.plain_text import describe
from rollout.core.errors import ConfigError
from rollout.observability.page.access import Access, error_response
from rollout.observability.page.state_cache import StateCache

_LOG_S = 10.0
_MAX_LOG_LINES = 500


@dataclass(frozen=True, slots=True)
class ServerActions:
    """Functions of the server that the page can call.

    Attributes:
        fence: takes an engine (id, reason) out of routing and kills it; recovery restarts it.
        log_tail: returns the last lines of an engine's log (id, number of lines).
        stop: begins to stop router, engines and the page.
    """

    fence: Callable[[str, str], Awaitable[None]]
    log_tail: Callable[[str, int], Awaitable[str]]
    stop: Callable[[], None]


def action_routes(cache: StateCache, access: Access, actions: ServerActions) -> APIRouter:
    """Routes for engine logs, for fencing and for stopping the server."""
    routes = APIRouter()

    @routes.get("/api/engines/{engine_id}/log")
    async def log(engine_id: str, lines: int = 20) -> JSONResponse:
        """The last lines of an engine's log, each cut to 300 characters."""
        try:
            async with asyncio.timeout(_LOG_S):
                tail = await actions.log_tail(engine_id, max(1, min(lines, _MAX_LOG_LINES)))
        except (ConfigError, KeyError) as reason:
            return error_response(404, "not_found", str(reason))
        except Exception as error:  # its owner does not answer: report that
            return error_response(502, "unavailable", f"no log: {describe(error)}")
        return JSONResponse({"engine_id": engine_id, "tail": tail})

    @routes.post("/api/fence/{engine_id}")
    async def fence(engine_id: str, request: Request) -> JSONResponse:
        if not access.may_control(request.headers):
            return _control_refused(access)
        if engine_id not in cache.engine_ids():
            await cache.refresh()  # it may be new
        known = cache.engine_ids()
        if engine_id not in known:
            return error_response(
                404, "not_found", f"no engine {engine_id}; known: {', '.join(known)}"
            )
        await actions.fence(engine_id, "fenced by hand, from the page")
        return JSONResponse({"fenced": engine_id})

    @routes.post("/api/stop")
    async def stop(request: Request) -> JSONResponse:
        if not access.may_control(request.headers):
            return _control_refused(access)
        actions.stop()
        return JSONResponse({"stopping": True}, 202)

    return routes


def _control_refused(access: Access) -> JSONResponse:
    if not access.has_control_key:
        return error_response(
            403, "read_only", "the page is read-only: page.control_key is not set"
        )
    return error_response(
        403, "forbidden", "this needs the control key: Authorization: Bearer <key>"
    )
