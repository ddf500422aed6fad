"""Stub engines with 1 KB replies: ``python -m benchmarks.rollout.stub NUM DELAY_S``.

The program prints their ports as one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import ClassVar

import uvloop

NUM_TOKENS = 16
REPLY_BYTES = 1024
_RID = re.compile(rb'"rid": ?"([^"]*)"')
_LENGTH = re.compile(rb"(?i)content-length: *(\d+)")


def reply_body(reason: str) -> bytes:
    ids = list(range(100, 100 + NUM_TOKENS))
    body = {
        "text": "",
        "output_ids": ids,
        "meta_info": {
            "id": "stub",
            "finish_reason": {"type": reason},
            "completion_tokens": NUM_TOKENS,
            "weight_version": "1",
            "output_token_logprobs": [[-0.125, token, None] for token in ids],
        },
    }
    body["text"] = "x" * (REPLY_BYTES - len(json.dumps(body)))
    return json.dumps(body).encode()


def http_reply(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


GENERATED, ABORTED = http_reply(reply_body("stop")), http_reply(reply_body("abort"))
EMPTY = http_reply(b"{}")


class Engine(asyncio.Protocol):
    """One connection, one request at a time."""

    delay_s: ClassVar[float]
    waiting: ClassVar[dict[bytes, tuple[asyncio.TimerHandle, Engine]]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(self._buffer, 0, end)
        if len(self._buffer) < end + 4 + (int(length[1]) if length else 0):
            return
        request, self._buffer = self._buffer, b""
        rid = (_RID.findall(request, end) or [b""])[-1]  # the router's is behind the client's
        if request.startswith(b"POST /generate"):
            timer = asyncio.get_running_loop().call_later(self.delay_s, self._finish, rid)
            self.waiting[rid] = timer, self
            return
        for other, (timer, engine) in list(self.waiting.items()):
            if other.startswith(rid):
                timer.cancel()
                del self.waiting[other]
                engine.write(ABORTED)
        self.write(EMPTY)

    def _finish(self, rid: bytes) -> None:
        del self.waiting[rid]
        self.write(GENERATED)

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)  # type: ignore[attr-defined]


async def serve(num: int, delay_s: float) -> None:
    Engine.delay_s = delay_s
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Engine, "127.0.0.1", 0, backlog=4096) for _ in range(num)]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2])))
