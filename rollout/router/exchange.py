"""The client's side of one request: read it whole, answer it, notice when the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from rollout.router.headers import Headers

CUT_EXTENSION = "rollout.cut"
"""ASGI extension of ``RouterProtocol``: ``close`` and ``abort`` of the client's connection."""


class Client:
    """Whoever sent one request.

    From ``watch`` on, the task that serves the request is cancelled when the client leaves.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._extensions: dict[str, Any] = scope.get("extensions") or {}
        self._watcher: asyncio.Task[None] | None = None
        self._is_done = False
        self._is_event_stream = False
        self._last_chunk = b""
        self.has_left = False
        self.has_started = False

    async def read_body(self) -> bytes | None:
        """The request's whole body; None if the client left meanwhile."""
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            body: bytes = message.get("body", b"")
            return body
        parts = []
        while message["type"] == "http.request":
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                return b"".join(parts)
            message = await self._receive()
        self.has_left = True
        return None

    def watch(self) -> None:
        """Cancel the current task once the client has left."""
        task = asyncio.current_task()
        assert task is not None
        self._watcher = asyncio.create_task(self._wait_until_left(task.cancel))

    async def _wait_until_left(self, cancel: Callable[[], bool]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._is_done:
            self.has_left = True
            cancel()

    def unwatch(self) -> None:
        self._is_done = True
        if self._watcher is not None:
            self._watcher.cancel()

    async def start(self, status: int, headers: Headers) -> None:
        fields = dict(headers)
        self._is_event_stream = (
            fields.get(b"content-type", b"").startswith(b"text/event-stream")
            and b"content-length" not in fields
            and b"content-encoding" not in fields
        )
        self.has_started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, chunk: bytes, *, is_last: bool = False) -> None:
        if is_last:
            self._is_done = True
        elif self._is_event_stream:
            self._last_chunk = chunk
        await self._send({"type": "http.response.body", "body": chunk, "more_body": not is_last})

    async def answer(self, status: int, payload: dict[str, Any], headers: Headers) -> None:
        """A whole JSON answer of the router itself."""
        body = json.dumps(payload).encode()
        await self.start(
            status,
            [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                *headers,
            ],
        )
        await self.write(body, is_last=True)

    async def break_off(self, payload: dict[str, Any]) -> None:
        """End a reply that has begun and cannot be completed.

        An event stream that stands between two events gets one more that tells why, as SGLang
        does.  Anything else is cut, so that no client takes it for whole.
        """
        is_between_events = self._last_chunk[-2:] == b"\n\n" or self._last_chunk[-4:] == b"\r\n\r\n"
        if self._is_event_stream and (is_between_events or not self._last_chunk):
            await self.write(b"data: " + json.dumps(payload).encode() + b"\n\n", is_last=True)
        else:
            await self.cut()

    async def cut(self, *, is_flushed: bool = True) -> None:
        """Close the connection; returns when it is closed.

        ``is_flushed`` first waits until the client has taken what it was already sent.
        """
        self._is_done = True
        close = self._extensions.get(CUT_EXTENSION, {}).get("close" if is_flushed else "abort")
        if close is not None and self._watcher is not None:
            close()
            await asyncio.wait({self._watcher})
