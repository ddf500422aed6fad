"""Stub engines: ``python -m benchmarks.router.stub NUM`` prints their ports as one JSON line.

A further argument is the folder that they name as their model's.

A stop string of the request names the reply, because routers rewrite other fields: ``kind=small``
(2 KB), ``fresh`` (2 KB, each head with a header of its own), ``medium`` (64 KB), ``large`` (1 MB),
``sse`` (100 events), ``long`` (2 KB after half a second), ``many`` (2 KB after four seconds);
``turn`` and ``turn_sse`` are as short as ``small`` and ``sse`` in tokens, and have log-probs;
``inference`` is ``turn`` in the form of vLLM's ``/inference/v1/generate``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import sys

import httptools
import uvloop

NUM_EVENTS = 100
NUM_TOKENS = 16
_KIND = re.compile(rb"kind=(\w+)")
_numbers = itertools.count()
_STREAM = re.compile(rb'"stream": ?true')
_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
_EVENTS = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_PADDING = {"small": 2 << 10, "medium": 64 << 10, "large": 1 << 20, "turn": 0}
_DELAY_S = {"long": 0.5, "many": 4.0}
_MODEL = sys.argv[2] if len(sys.argv) > 2 else "stub"
_INFO = {
    "model_path": _MODEL,
    "served_model_name": "stub",
    "is_generation": True,
    "status": "ok",
    "data": [{"id": "stub", "object": "model", "root": _MODEL}],
}


def _reply(
    num_tokens: int, num_bytes: int, *, is_over: bool = True, has_logprobs: bool = False
) -> dict[str, object]:
    ids = list(range(100, 100 + num_tokens))
    meta: dict[str, object] = {
        "id": "stub",
        "finish_reason": {"type": "length", "length": num_tokens} if is_over else None,
        "prompt_tokens": 340,
        "completion_tokens": num_tokens,
        "cached_tokens": 0,
        "weight_version": "1",
    }
    if has_logprobs:
        meta["output_token_logprobs"] = [[-0.5, one, None] for one in ids]
    payload: dict[str, object] = {"text": "", "output_ids": ids, "meta_info": meta}
    missing = max(1, num_bytes - len(json.dumps(payload)))
    payload["text"] = "x" * (4 * num_tokens if has_logprobs else missing)
    return payload


def _event(payload: object) -> bytes:
    event = b"data: " + (payload if isinstance(payload, bytes) else json.dumps(payload).encode())
    return b"%x\r\n%s\n\n\r\n" % (len(event) + 2, event)


_PAYLOADS = {
    kind: _reply(NUM_TOKENS, size, has_logprobs=kind == "turn") for kind, size in _PADDING.items()
}
WHOLE = {
    kind: _JSON % (len(body), body)
    for kind, payload in _PAYLOADS.items()
    for body in [json.dumps(payload).encode()]
}
_CHOICE = {
    "index": 0,
    "token_ids": list(range(100, 100 + NUM_TOKENS)),
    "logprobs": {
        "content": [
            {"token": f"token_id:{one}", "logprob": -0.5, "bytes": None, "top_logprobs": []}
            for one in range(100, 100 + NUM_TOKENS)
        ]
    },
    "finish_reason": "length",
}
_INFERENCE = json.dumps({"request_id": "stub", "choices": [_CHOICE]}).encode()
WHOLE["inference"] = _JSON % (len(_INFERENCE), _INFERENCE)
_END = _event(b"[DONE]") + b"0\r\n\r\n"
EVENTS = {
    kind: [
        *(
            _event(_reply(num, 300, is_over=num == NUM_EVENTS, has_logprobs=kind == "turn_sse"))
            for num in range(1, NUM_EVENTS + 1)
        ),
        _END,
    ]
    for kind in ("sse", "turn_sse")
}
STREAMED = {kind: _EVENTS + _event(payload) + _END for kind, payload in _PAYLOADS.items()}


class Engine(asyncio.Protocol):
    """One connection; a body may have a length or come in chunks."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body.clear()

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        self._serve(b"".join(self._body))

    def _serve(self, request: bytes) -> None:
        kind = _KIND.search(request)
        if kind is None:
            body = json.dumps(_INFO).encode()
            self._write(_JSON % (len(body), body))
            return
        name = kind[1].decode()
        if (events := EVENTS.get(name)) is not None:
            self._write(_EVENTS + events[0])
            self._next_event(events, 1)
            return
        whole = STREAMED if _STREAM.search(request) else WHOLE
        if name == "fresh":
            line = b"\r\nx-reply: %d\r\n" % next(_numbers)
            self._write(whole["small"].replace(b"\r\n", line, 1))
            return
        delay_s = _DELAY_S.get(name)
        if delay_s is None:
            self._write(whole[name])
        else:
            asyncio.get_running_loop().call_later(delay_s, self._write, whole["small"])

    def _next_event(self, events: list[bytes], number: int) -> None:
        self._write(events[number])
        if number + 1 < len(events):
            asyncio.get_running_loop().call_soon(self._next_event, events, number + 1)

    def _write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)  # type: ignore[attr-defined]


async def serve(num: int) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Engine, "127.0.0.1", 0, backlog=4096) for _ in range(num)]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
