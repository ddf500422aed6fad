"""Which requests may view the page, and which may control the server.

Always true: without a key only this machine can view the page; without a control key no request
can control the server.  Keys are compared in constant time.  A reply to a request without a key
contains nothing about the run; the login keeps the key in a cookie that no script and no other site
can use.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from importlib.resources import files
from urllib.parse import parse_qs

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse

from rollout.config.base import host_of, is_loopback

STATIC = files("rollout.observability.page") / "static"
_COOKIE = "rollout_key"
_MAX_KEY_BYTES = 4 << 10


class Access:
    """The two keys of a page.

    Args:
        key: grants the page and its data, or empty if no key is needed.
        control_key: grants the page and the actions that change the server, or empty for no
            actions.
        host: the address that the page is bound to.  On loopback, a request with another ``Host``
            is refused: a browser sends one only if another site has redirected it (DNS rebinding).
    """

    def __init__(self, *, key: str, control_key: str, host: str) -> None:
        self._key = key.encode()
        self._control_key = control_key.encode()
        self._is_loopback = is_loopback(host)
        self.has_control_key = bool(control_key)

    def may_view(self, headers: Mapping[str, str]) -> bool:
        """Whether a request with these headers may read the page and its data."""
        if not self._key:
            return not self._is_loopback or is_loopback(host_of(headers.get("host", "")))
        given = _given(headers)
        # Both are always compared, so that the time of the reply reveals nothing.
        is_key, is_control = self._is(given, self._key), self._is(given, self._control_key)
        return is_key or is_control

    def may_control(self, headers: Mapping[str, str]) -> bool:
        """Whether it may change the server; a cookie is not enough, other sites could use it."""
        given = _bearer(headers)
        return self.has_control_key and self._is(given, self._control_key)

    @staticmethod
    def _is(given: bytes, key: bytes) -> bool:
        return bool(key) and hmac.compare_digest(given, key)


def _bearer(headers: Mapping[str, str]) -> bytes:
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip().encode() if kind.lower() == "bearer" else b""


def _given(headers: Mapping[str, str]) -> bytes:
    if key := _bearer(headers):
        return key
    try:
        cookie = SimpleCookie(headers.get("cookie", "")).get(_COOKIE)
    except CookieError:
        return b""
    return cookie.value.encode() if cookie else b""


def login_routes(access: Access) -> APIRouter:
    """The route that the login form posts its key to."""
    routes = APIRouter()

    @routes.post("/key")
    async def key(request: Request) -> Response:
        """Check the key from the login form and set it as a cookie."""
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _MAX_KEY_BYTES:
                return key_required("/")
        given = parse_qs(body.decode(errors="replace")).get("key", [""])[0]
        headers = {"authorization": f"Bearer {given}", "host": request.headers.get("host", "")}
        if not access.may_view(headers):
            return key_required("/")
        response = RedirectResponse("/", 303)
        response.set_cookie(_COOKIE, given, httponly=True, samesite="strict")
        return response

    return routes


def key_required(path: str) -> Response:
    """401: the login form for the page itself, an error in JSON for anything else."""
    if path == "/":
        return HTMLResponse((STATIC / "key.html").read_bytes(), 401)
    return error_response(
        401, "unauthorized", "this needs the page's key: Authorization: Bearer <key>"
    )


def error_response(status: int, kind: str, message: str) -> JSONResponse:
    """An error in the one format that all routes use."""
    return JSONResponse({"error": {"type": kind, "message": message}}, status)
