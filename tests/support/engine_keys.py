"""The keys of engines that a test calls past the router."""

from __future__ import annotations

import urllib.request
from collections.abc import Generator
from typing import Any, Protocol

import httpx

from engines.http.client import EngineClient
from engines.http.key_check import is_control
from engines.protocol import NO_ACCESS, Endpoint, EngineAccess


class Reachable(Protocol):
    """An engine that runs, or its status."""

    @property
    def endpoint(self) -> Endpoint: ...
    @property
    def access(self) -> EngineAccess: ...


class Keyless:
    """An engine without keys that listens there."""

    access = NO_ACCESS

    def __init__(self, url: str) -> None:
        self.endpoint = Endpoint.of_url(url)


class Keys(httpx.Auth):
    """The key of each path of an engine, for ``auth=`` of httpx."""

    def __init__(self, engine: Reachable) -> None:
        self._access = engine.access

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        path = request.url.path
        request.headers.update(self._access.headers(is_control=is_control(path)))
        yield request


def request_to(engine: Reachable, path: str, body: bytes | None = None) -> urllib.request.Request:
    """A request for ``urlopen``, of JSON if it has a body."""
    headers = engine.access.headers(is_control=is_control(path))
    kind = {} if body is None else {"Content-Type": "application/json"}
    return urllib.request.Request(f"{engine.endpoint.url}{path}", body, headers | kind)


def client_of(engine: Reachable, made: Any = EngineClient, **settings: Any) -> Any:
    """A client of this class with the engine's keys."""
    client = made(engine.endpoint, **settings)
    client.authorize(engine.access)
    return client


def keys_of(engine: Reachable) -> dict[str, str]:
    """The settings of ``engine`` with which another run attaches it."""
    return {"key": engine.access.sampling, "control_key": engine.access.control}
