"""Which key a call needs, and who is refused: for the engines whose HTTP side is ours, and clients.

Always true:

- a path that is not known needs the key of control calls, so a new one is closed;
- a wrong key takes as long as the right one, and no answer has a part of a key;
- what a health probe needs is open, and has no body.

``KeyCheck`` imports only the standard library and ``engines.protocol``: vLLM loads it by its name.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from typing import Any

from engines.protocol import PROCESS_HEADER, EngineAccess

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
"""They are open with SGLang and vLLM too.  SGLang also leaves open what begins like them, and
``/metrics``."""
SAMPLING_KEY, CONTROL_KEY = "ENGINE_SAMPLING_KEY", "ENGINE_CONTROL_KEY"
"""Variables of an engine that is launched here.  A command line could be read by everybody."""
GUARD_TOKEN = "ENGINE_GUARD_TOKEN"
"""Variable with the guard's token; ``engines.process.guard`` sets it."""

# Of SGLang, the embedded engine and vLLM.  Their control calls have other names.
_SAMPLING = frozenset(
    {
        "/classify",
        "/detokenize",
        "/encode",
        "/generate",
        "/get_model_info",
        "/get_server_info",
        "/get_world_size",
        "/health_generate",
        "/invocations",
        "/is_paused",
        "/load",
        "/metrics",
        "/model_info",
        "/openapi.json",
        "/pooling",
        "/rerank",
        "/score",
        "/server_info",
        "/tokenize",
        "/version",
        "/vertex_generate",
        "/weight_info",
        "/weights_manifest",
    }
)
_SAMPLING_BELOW = ("/v1/", "/v2/", "/inference/")
_CONTROL_BELOW = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def is_control(path: str) -> bool:
    """Whether a call of this path, without its query, changes the engine."""
    if path in _SAMPLING or path in OPEN_PATHS:
        return False
    return not path.startswith(_SAMPLING_BELOW) or path in _CONTROL_BELOW


def new_access() -> EngineAccess:
    """Keys that no other engine has, and no later launch of this one."""
    return EngineAccess(secrets.token_urlsafe(), secrets.token_urlsafe())


def key_variables(access: EngineAccess) -> dict[str, str]:
    """The variables by which an engine that is launched gets its keys."""
    keys = {SAMPLING_KEY: access.sampling, CONTROL_KEY: access.control}
    return {name: key for name, key in keys.items() if key}


def access_of(environ: Mapping[str, str]) -> EngineAccess:
    """What those variables, and the guard's, give to the engine."""
    return EngineAccess(
        environ.get(SAMPLING_KEY, ""),
        environ.get(CONTROL_KEY, ""),
        process=environ.get(GUARD_TOKEN, ""),
    )


class Refusal(Exception):
    """A call is not carried out.

    Attributes:
        status: of the answer.
    """

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self._kind = kind

    @property
    def body(self) -> bytes:
        """JSON like that of OpenAI's errors."""
        error = {"message": str(self), "type": self._kind, "code": self.status}
        return json.dumps({"error": error}).encode()


def check(
    access: EngineAccess, path: str, key: str, process: str, names: Collection[str] = ()
) -> None:
    """Check a call before it is carried out.

    Args:
        access: of the engine.
        key: the call's header ``Authorization``, or empty for none.
        process: its ``PROCESS_HEADER``, or empty for none.
        names: of this process, besides ``access.process``.

    Raises:
        Refusal: the key is missing or wrong, or the call is for another process.
    """
    if path in OPEN_PATHS:
        return
    needs_control = is_control(path)
    keys = {access.control or access.sampling} | (set() if needs_control else {access.sampling})
    keys.discard("")
    if keys and not any(_is_right(key, expected) for expected in keys):
        message = (
            f"{path} needs the engine's {'control' if needs_control else 'sampling'} key, as "
            "Authorization: Bearer KEY; clients send requests to the router, which has it"
        )
        raise Refusal(401, "authentication_error", message)
    run, _, meant = process.partition("/")
    known = {name for name in (access.process, *names) if name}
    if needs_control and meant and known and meant not in known:
        message = (
            f"{path} of run {run or 'without a name'} is for process {meant}, and this is "
            f"{' or '.join(sorted(known))}: another engine has its address"
        )
        raise Refusal(409, "other_process", message)


def _is_right(given: str, key: str) -> bool:
    scheme, _, value = given.partition(" ")
    is_equal = hmac.compare_digest(value.encode(), key.encode())
    return is_equal and scheme.lower() == "bearer"


class KeyCheck:
    """ASGI middleware: carries out only calls that ``check`` admits.

    Args:
        access: of the engine; by default that of its environment.
        names: of this process, besides the guard's token.
    """

    def __init__(
        self, app: App, access: EngineAccess | None = None, names: Collection[str] = ()
    ) -> None:
        self._app = app
        self._access = access_of(os.environ) if access is None else access
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):  # the start and the end of the server
            return await self._app(scope, receive, send)
        headers = scope["headers"]
        key, process = (_only(headers, name) for name in ("authorization", PROCESS_HEADER.lower()))
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        try:
            check(self._access, path, key, process, [*self._names, *_names_of_vllm(scope)])
        except Refusal as refusal:
            return await _refuse(scope, send, refusal)
        return await self._app(scope, receive, send)


def _only(headers: Collection[tuple[bytes, bytes]], name: str) -> str:
    """The value of a header, or empty if it is there twice, for then it is no one's."""
    values = [value for found, value in headers if found == name.encode()]
    return values[0].decode("latin-1") if len(values) == 1 else ""


def _names_of_vllm(scope: Scope) -> list[str]:
    """The names of a vLLM server, which ``engines.vllm.server_report`` reads from its report."""
    config = getattr(getattr(scope.get("app"), "state", None), "vllm_config", None)
    name = getattr(config, "instance_id", "")
    return [f"instance_id {name}"] if name else []


async def _refuse(scope: Scope, send: Send, refusal: Refusal) -> None:
    if scope["type"] == "websocket":
        return await send({"type": "websocket.close", "code": 1008})
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(refusal.body)),
    ]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    # The body has not been read, and may be long.
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": refusal.body})
    return None
