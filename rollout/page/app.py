"""What the page shows, over HTTP: the page itself, its data, changes as they happen, metrics.

Always true: nothing is answered to who may not look, nothing changes for who may not steer; what
is answered never holds a key.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from rollout.page.access import Access
from rollout.page.exposition import merge
from rollout.page.feed import Feed
from rollout.page.observatory import Observatory
from rollout.page.opening import HEADERS, opening, problem, refused
from rollout.page.scraping import Target, scrape
from rollout.page.steering import Steering, steered
from rollout.page.tallies import exposition
from rollout.timeline.span import Kind

_OPEN_PATHS = frozenset({"/health", "/key"})
_FRESH_S = 0.5
_DRAWN = frozenset({Kind.PHASE, Kind.ENGINE, Kind.EVENT})


def page_app(
    observatory: Observatory,
    feed: Feed,
    access: Access,
    *,
    steering: Steering,
    router_key: str,
    run_id: str,
) -> FastAPI:
    """The page of one server."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await feed.start()
        try:
            yield
        finally:
            await feed.stop()

    app = FastAPI(
        title="ray-rollout", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )

    @app.middleware("http")
    async def guard(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        if request.url.path not in _OPEN_PATHS and not access.may_look(request.headers):
            return refused(request.url.path)
        response = await go_on(request)
        response.headers.update(HEADERS)
        return response

    for routes in (
        opening(access),
        _looking(observatory, feed, run_id, access.can_steer),
        _measuring(observatory, router_key),
        steered(observatory, access, steering),
    ):
        app.include_router(routes)
    return app


def _looking(observatory: Observatory, feed: Feed, run_id: str, can_steer: bool) -> APIRouter:
    """What is known of the server, as data."""
    routes = APIRouter()

    @routes.get("/api/state")
    async def state(fresh: bool = False) -> dict[str, Any]:
        """Where everything is; ``fresh=1`` asks the server anew in any case."""
        await observatory.refresh(0.0 if fresh else _FRESH_S)
        return {"run_id": run_id, "can_steer": can_steer, **observatory.snapshot()}

    @routes.get("/api/spans")
    async def spans(since: int = 0, calls: bool = False, fresh: bool = False) -> dict[str, Any]:
        """What has ended, in the order of its end."""
        await observatory.refresh(0.0 if fresh else _FRESH_S)
        kinds = _DRAWN | {Kind.CALL} if calls else _DRAWN
        told = [one.to_dict() for one in observatory.spans(since, kinds)]
        return {"cursor": observatory.num_spans, "spans": told}

    @routes.get("/api/steps/{number}")
    async def step(number: int) -> JSONResponse:
        """One step, with every call in it."""
        told = observatory.step(number)
        if told is None:
            return problem(404, "not_found", f"step {number} is not known (any more)")
        return JSONResponse(told)

    @routes.get("/api/changes")
    async def changes() -> StreamingResponse:
        """Server-sent events: ``state`` at first, then what differs."""
        return StreamingResponse(_events(feed, run_id, can_steer), media_type="text/event-stream")

    return routes


def _measuring(observatory: Observatory, router_key: str) -> APIRouter:
    """What Prometheus asks for."""
    routes = APIRouter()

    @routes.get("/metrics")
    async def metrics(engines: bool = True) -> Response:
        """All metrics of server, driver, store, router and, unless ``engines=0``, engines."""
        await observatory.refresh()
        now = observatory.snapshot()
        server = {"server": now.get("server", "")}
        targets = []
        if now.get("router_url"):
            targets.append(Target(f"{now['router_url']}/metrics", server, router_key))
        if engines:
            targets += [
                Target(f"{one['url']}/metrics", server | {"engine": one["engine_id"]})
                for one in now.get("engines", ())
                if one["state"] != "fenced"
            ]
        pages = [(server, exposition(observatory.tallies, now)), *await scrape(targets)]
        return Response(merge(pages), media_type="text/plain; version=0.0.4; charset=utf-8")

    return routes


async def _events(feed: Feed, run_id: str, can_steer: bool) -> AsyncIterator[str]:
    async with feed.subscribed() as changes:
        yield _sse("hello", {"run_id": run_id, "can_steer": can_steer})
        async for name, told in changes:
            yield _sse(name, told)


def _sse(name: str, told: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(told, separators=(',', ':'))}\n\n"
