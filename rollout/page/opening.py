"""The door of the page: the page itself, the key that opens it, and how somebody is refused.

Always true: what is open to everybody tells nothing of a run; a key goes into a cookie that no
script and no other site can use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from importlib.resources import files
from urllib.parse import parse_qs

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse

from rollout.page.access import COOKIE, Access

_STATIC = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/lanes.js": ("lanes.js", "text/javascript; charset=utf-8"),
    "/curves.js": ("curves.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_MAX_KEY_BYTES = 4 << 10


def opening(access: Access) -> APIRouter:
    """The page's files, whether it runs, and its key."""
    routes = APIRouter()
    for path, (name, media_type) in _STATIC.items():
        routes.add_api_route(path, _static(name, media_type), methods=["GET"])

    @routes.get("/health")
    async def health() -> dict[str, str]:
        """200 for as long as the page runs."""
        return {"status": "ok"}

    @routes.post("/key")
    async def key(request: Request) -> Response:
        """A key typed into the page becomes a cookie that no script and no other site can use."""
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _MAX_KEY_BYTES:
                return refused("/")
        given = parse_qs(body.decode(errors="replace")).get("key", [""])[0]
        headers = {"authorization": f"Bearer {given}", "host": request.headers.get("host", "")}
        if not access.may_look(headers):
            return refused("/")
        answer = RedirectResponse("/", 303)
        answer.set_cookie(COOKIE, given, httponly=True, samesite="strict")
        return answer

    return routes


def _static(name: str, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def serve() -> Response:
        content = await asyncio.to_thread((files("rollout.page") / "static" / name).read_bytes)
        return Response(content, media_type=media_type)

    return serve


def refused(path: str) -> Response:
    """The page that asks for the key, or, for data, an error."""
    if path == "/":
        content = (files("rollout.page") / "static" / "key.html").read_bytes()
        return Response(content, 401, headers=HEADERS, media_type="text/html; charset=utf-8")
    return problem(
        401, "unauthorized", "this needs the page's key: Authorization: Bearer <key>", HEADERS
    )


def problem(
    status: int, kind: str, message: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    """Every error of the page in one form."""
    return JSONResponse({"error": {"type": kind, "message": message}}, status, headers)
