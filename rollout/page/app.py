"""What the page shows, over HTTP: the page itself, its data, changes as they happen, metrics.

Always true: nothing is answered to who may not look, nothing changes for who may not steer; what
is answered never holds a key.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse, StreamingResponse

from rollout.errors import ConfigError
from rollout.fanout import describe
from rollout.page.access import COOKIE, Access
from rollout.page.exposition import merge
from rollout.page.feed import Feed
from rollout.page.observatory import Observatory
from rollout.page.scraping import Target, scrape
from rollout.page.tallies import exposition
from rollout.timeline.span import Kind

_STATIC = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/lanes.js": ("lanes.js", "text/javascript; charset=utf-8"),
    "/curves.js": ("curves.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_OPEN_PATHS = frozenset({"/health", "/key"})
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_FRESH_S = 0.5
_LOG_S = 10.0
_MAX_KEY_BYTES = 4 << 10
_DRAWN = frozenset({Kind.PHASE, Kind.ENGINE, Kind.EVENT})


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
            return _refused(request.url.path)
        response = await go_on(request)
        response.headers.update(_HEADERS)
        return response

    for path, (name, media_type) in _STATIC.items():
        app.add_api_route(path, _static(name, media_type), methods=["GET"])

    @app.get("/health")
    async def health() -> dict[str, str]:
        """200 for as long as the page runs."""
        return {"status": "ok"}

    @app.post("/key")
    async def key(request: Request) -> Response:
        """A key typed into the page becomes a cookie that no script and no other site can use."""
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _MAX_KEY_BYTES:
                return _refused("/")
        given = parse_qs(body.decode(errors="replace")).get("key", [""])[0]
        headers = {"authorization": f"Bearer {given}", "host": request.headers.get("host", "")}
        if not access.may_look(headers):
            return _refused("/")
        answer = RedirectResponse("/", 303)
        answer.set_cookie(COOKIE, given, httponly=True, samesite="strict")
        return answer

    @app.get("/api/state")
    async def state(fresh: bool = False) -> dict[str, Any]:
        """Where everything is; ``fresh=1`` asks the server anew in any case."""
        await observatory.refresh(0.0 if fresh else _FRESH_S)
        return {"run_id": run_id, "can_steer": access.can_steer, **observatory.snapshot()}

    @app.get("/api/spans")
    async def spans(since: int = 0, calls: bool = False, fresh: bool = False) -> dict[str, Any]:
        """What has ended, in the order of its end."""
        await observatory.refresh(0.0 if fresh else _FRESH_S)
        kinds = _DRAWN | {Kind.CALL} if calls else _DRAWN
        told = [one.to_dict() for one in observatory.spans(since, kinds)]
        return {"cursor": observatory.num_spans, "spans": told}

    @app.get("/api/steps/{number}")
    async def step(number: int) -> JSONResponse:
        """One step, with every call in it."""
        told = observatory.step(number)
        if told is None:
            return _error(404, "not_found", f"step {number} is not known (any more)")
        return JSONResponse(told)

    @app.get("/api/changes")
    async def changes() -> StreamingResponse:
        """Server-sent events: ``state`` at first, then what differs."""
        return StreamingResponse(
            _events(feed, run_id, access.can_steer), media_type="text/event-stream"
        )

    @app.get("/metrics")
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

    @app.get("/api/engines/{engine_id}/log")
    async def log(engine_id: str) -> JSONResponse:
        """The end of an engine's log."""
        try:
            async with asyncio.timeout(_LOG_S):
                tail = await steering.log_tail(engine_id)
        except (ConfigError, KeyError) as error:
            return _error(404, "not_found", str(error))
        except Exception as error:  # its owner cannot be asked: that is the answer
            return _error(502, "unavailable", f"no log: {describe(error)}")
        return JSONResponse({"engine_id": engine_id, "tail": tail})

    @app.post("/api/fence/{engine_id}")
    async def fence(engine_id: str, request: Request) -> JSONResponse:
        """Take an engine out and end it."""
        if not access.may_steer(request.headers):
            return _may_not_steer(access)
        known = [one["engine_id"] for one in observatory.snapshot().get("engines", ())]
        if engine_id not in known:
            return _error(404, "not_found", f"no engine {engine_id}; known: {', '.join(known)}")
        await steering.fence(engine_id, "fenced by hand, from the page")
        return JSONResponse({"fenced": engine_id})

    @app.post("/api/stop")
    async def stop(request: Request) -> JSONResponse:
        """Stop router, engines and this page."""
        if not access.may_steer(request.headers):
            return _may_not_steer(access)
        steering.stop()
        return JSONResponse({"stopping": True}, 202)

    return app


async def _events(feed: Feed, run_id: str, can_steer: bool) -> AsyncIterator[str]:
    async with feed.subscribed() as changes:
        yield _sse("hello", {"run_id": run_id, "can_steer": can_steer})
        async for name, told in changes:
            yield _sse(name, told)


def _sse(name: str, told: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(told, separators=(',', ':'))}\n\n"


def _static(name: str, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def serve() -> Response:
        content = await asyncio.to_thread((files("rollout.page") / "static" / name).read_bytes)
        return Response(content, media_type=media_type)

    return serve


def _refused(path: str) -> Response:
    if path == "/":
        content = (files("rollout.page") / "static" / "key.html").read_bytes()
        return Response(content, 401, headers=_HEADERS, media_type="text/html; charset=utf-8")
    return _error(
        401, "unauthorized", "this needs the page's key: Authorization: Bearer <key>", _HEADERS
    )


def _may_not_steer(access: Access) -> JSONResponse:
    if not access.can_steer:
        return _error(403, "read_only", "the page is read-only: page.control_key is not set")
    return _error(403, "forbidden", "this needs the control key: Authorization: Bearer <key>")


def _error(
    status: int, kind: str, message: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    return JSONResponse({"error": {"type": kind, "message": message}}, status, headers)
