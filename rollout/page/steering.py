"""What the page can do besides showing: the log of an engine, fencing one, ending all.

Always true: nothing changes for who does not show the control key; who is refused learns why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from rollout.errors import ConfigError
from rollout.fanout import describe
from rollout.page.access import Access
from rollout.page.observatory import Observatory
from rollout.page.opening import problem

_LOG_S = 10.0


@dataclass(frozen=True, slots=True)
class Steering:
    """What the page can do to the server.

    Attributes:
        fence: takes an engine out and ends it; recovery brings it back.
        log_tail: the end of an engine's log.
        stop: begins to stop router and engines, and the page.
    """

    fence: Callable[[str, str], Awaitable[None]]
    log_tail: Callable[[str], Awaitable[str]]
    stop: Callable[[], None]


def steered(observatory: Observatory, access: Access, steering: Steering) -> APIRouter:
    """What asks the server for more than it shows, or changes it."""
    routes = APIRouter()

    @routes.get("/api/engines/{engine_id}/log")
    async def log(engine_id: str) -> JSONResponse:
        """The end of an engine's log."""
        try:
            async with asyncio.timeout(_LOG_S):
                tail = await steering.log_tail(engine_id)
        except (ConfigError, KeyError) as reason:
            return problem(404, "not_found", str(reason))
        except Exception as error:  # its owner cannot be asked: that is the answer
            return problem(502, "unavailable", f"no log: {describe(error)}")
        return JSONResponse({"engine_id": engine_id, "tail": tail})

    @routes.post("/api/fence/{engine_id}")
    async def fence(engine_id: str, request: Request) -> JSONResponse:
        """Take an engine out and end it."""
        if not access.may_steer(request.headers):
            return _may_not_steer(access)
        known = [one["engine_id"] for one in observatory.snapshot().get("engines", ())]
        if engine_id not in known:
            return problem(404, "not_found", f"no engine {engine_id}; known: {', '.join(known)}")
        await steering.fence(engine_id, "fenced by hand, from the page")
        return JSONResponse({"fenced": engine_id})

    @routes.post("/api/stop")
    async def stop(request: Request) -> JSONResponse:
        """Stop router, engines and this page."""
        if not access.may_steer(request.headers):
            return _may_not_steer(access)
        steering.stop()
        return JSONResponse({"stopping": True}, 202)

    return routes


def _may_not_steer(access: Access) -> JSONResponse:
    if not access.can_steer:
        return problem(403, "read_only", "the page is read-only: page.control_key is not set")
    return problem(403, "forbidden", "this needs the control key: Authorization: Bearer <key>")
