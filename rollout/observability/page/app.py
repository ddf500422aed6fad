"""The HTTP application of the page: files, state, event stream, metrics, actions.

Always true: only a request that may view the page gets data, only one that may control the server
changes it; no reply contains a key.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from rollout.config.run_dir import RunFolder
from rollout.observability.page.access import (
    STATIC,
    Access,
    error_response,
    key_required,
    login_routes,
)
from rollout.observability.page.actions import ServerActions, action_routes
from rollout.observability.page.event_stream import DRAWN_KINDS, EventStream
from rollout.observability.page.metrics_route import metrics_routes
from rollout.observability.page.runs import RunsOfHost, run_routes
from rollout.observability.page.state_cache import StateCache
from rollout.observability.timeline.span import Cursor, Kind

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    **{f"/{name}.svg": (f"{name}.svg", "image/svg+xml") for name in ("icon", "icon-trouble")},
    **{
        f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8")
        for name in (
            *("page", "elements", "charts", "curves"),
            *("engines", "lanes", "reports", "log", "runs", "samples"),
        )
    },
}
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_OPEN_PATHS = frozenset({"/health", "/key"})
_FRESH_S = 0.5


def page_app(
    cache: StateCache,
    stream: EventStream,
    access: Access,
    *,
    actions: ServerActions,
    runs: RunsOfHost,
    router_key: str,
    run: RunFolder,
) -> FastAPI:
    """The page of one server; ``router_key`` is for its router's metrics."""

    hello = {
        "run_id": run.run_id,
        "folder": str(run.path),
        "can_steer": access.has_control_key,
    }

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with stream.running():
            yield

    app = FastAPI(
        title="ray-rollout", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )

    @app.middleware("http")
    async def guard(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        if request.url.path not in _OPEN_PATHS and not access.may_view(request.headers):
            response = key_required(request.url.path)
        else:
            response = await call_next(request)
        response.headers.update(_HEADERS)
        return response

    for routes in (
        _file_routes(),
        login_routes(access),
        _state_routes(cache, stream, hello),
        run_routes(runs),
        metrics_routes(cache, router_key),
        action_routes(cache, access, actions),
    ):
        app.include_router(routes)
    return app


def _file_routes() -> APIRouter:
    """The files of the page, and ``/health``, which replies 200 while the page runs."""
    routes = APIRouter()

    def add(path: str, name: str, media_type: str) -> None:
        @routes.get(path)
        def file() -> Response:
            return Response((STATIC / name).read_bytes(), media_type=media_type)

    for path, (name, media_type) in _FILES.items():
        add(path, name, media_type)

    @routes.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return routes


def _state_routes(cache: StateCache, stream: EventStream, hello: dict[str, Any]) -> APIRouter:
    """The state of the server as JSON and as an event stream."""
    routes = APIRouter()

    @routes.get("/api/state")
    async def state(fresh: bool = False) -> dict[str, Any]:
        """The state of server, groups and engines; ``fresh=1`` always queries the server."""
        await cache.refresh(0.0 if fresh else _FRESH_S)
        return {**hello, **cache.snapshot()}

    @routes.get("/api/summary")
    async def summary() -> dict[str, Any]:
        """The server in a few values, for the pages of other servers."""
        await cache.refresh(_FRESH_S)
        return cache.summary()

    @routes.get("/api/spans")
    async def spans(since: str = "", calls: bool = False, fresh: bool = False) -> dict[str, Any]:
        """Finished spans, in the order of their ends."""
        await cache.refresh(0.0 if fresh else _FRESH_S)
        kinds = DRAWN_KINDS | {Kind.CALL} if calls else DRAWN_KINDS
        found = [span.to_dict() for span in cache.history.spans_since(Cursor.of_text(since), kinds)]
        return {"cursor": str(cache.history.cursor), "spans": found}

    @routes.get("/api/steps/{number}")
    async def step(number: int) -> JSONResponse:
        """One step with all its calls."""
        found = cache.history.step(number)
        if found is None:
            return error_response(404, "not_found", f"step {number} does not exist or was dropped")
        return JSONResponse(found)

    @routes.get("/api/changes")
    async def changes() -> StreamingResponse:
        """Server-sent events: the whole ``state`` first, then its changes."""
        return StreamingResponse(_events(stream, hello), media_type="text/event-stream")

    return routes


async def _events(stream: EventStream, hello: dict[str, Any]) -> AsyncIterator[str]:
    def encode(name: str, values: Any) -> str:
        return f"event: {name}\ndata: {json.dumps(values, separators=(',', ':'))}\n\n"

    async with stream.subscribe() as changes:
        yield encode("hello", hello)
        async for name, values in changes:
            yield encode(name, values)
