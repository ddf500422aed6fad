"""Servers in Python: ``python -m benchmarks.router.serve NAME PORT...`` prints its own port.

``ours`` is the router with its defaults; ``ours_failover`` also keeps every token, so that another
engine can continue a request; ``ours_vllm`` is in front of engines of this kind; ``fastapi_httpx``
is a plain proxy.  In front of a router,
``agents PORT FOLDER`` is a worker of our agents, and ``renderers PORT FOLDER`` its peer.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import uvicorn
import uvloop
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from engines.protocol import Endpoint
from rollout.config import AgentsConfig, RouterConfig
from rollout.router import Backend, RouterHost
from rollout.runtime.worker_process import collect_in_sweeps, keep_freed_memory, tune_worker
from tests.support.agent_workers import Worker


async def serve_ours(ports: list[int], name: str) -> None:
    keep_freed_memory()  # as the router's actor does
    config = RouterConfig.model_validate(
        {"token_failover": "on"} if name == "ours_failover" else {}
    )
    host = RouterHost(config)
    endpoint = await host.start()
    kind = "vllm" if name == "ours_vllm" else "sglang"
    members = [
        Backend(f"e-{n}", Endpoint("127.0.0.1", port), kind=kind) for n, port in enumerate(ports)
    ]
    await host.set_members(1, members)
    await host.set_gate("open", weight_version=1)
    collect_in_sweeps()  # as the router's actor does: a collection would be the slowest request
    print(json.dumps(endpoint.port), flush=True)
    await asyncio.Event().wait()


async def serve_agents(port: str, folder: str) -> None:
    tune_worker()
    with tempfile.TemporaryDirectory() as place:
        worker = Worker(AgentsConfig(tokenizer_path=folder, renderer="qwen3"), Path(place))
        url = await worker.start(f"http://127.0.0.1:{port}")
        print(json.dumps(urlsplit(url).port), flush=True)
        await asyncio.Event().wait()


def fastapi_httpx(ports: list[int]) -> FastAPI:
    """Round robin; streams event streams and buffers other replies."""
    app = FastAPI()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    client = httpx.AsyncClient(limits=limits, timeout=None)
    turns = itertools.cycle(ports)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        url = f"http://127.0.0.1:{next(turns)}/generate"
        body = await request.body()
        outgoing = client.build_request("POST", url, content=body)
        reply = await client.send(outgoing, stream=True)
        kind = reply.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            whole = await reply.aread()
            await reply.aclose()
            return Response(whole, reply.status_code, media_type=kind)

        async def events() -> AsyncIterator[bytes]:
            async for chunk in reply.aiter_raw():
                yield chunk
            await reply.aclose()

        return StreamingResponse(events(), reply.status_code, media_type=kind)

    return app


def main() -> None:
    name, *arguments = sys.argv[1:]
    if name == "agents":
        uvloop.run(serve_agents(*arguments))
    elif name == "renderers":
        from benchmarks.router.renderers_peer import renderers_peer

        serve_app(renderers_peer(f"http://127.0.0.1:{arguments[0]}", arguments[1]))
    elif name == "fastapi_httpx":
        serve_app(fastapi_httpx([int(port) for port in arguments]))
    else:
        ports = [int(port) for port in arguments]
        uvloop.run(serve_ours(ports, name))


def serve_app(app: FastAPI) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    print(json.dumps(listener.getsockname()[1]), flush=True)
    config = uvicorn.Config(app, log_level="warning", access_log=False)
    asyncio.run(uvicorn.Server(config).serve([listener]))


if __name__ == "__main__":
    main()
