"""Routers in Python: ``python -m benchmarks.router.serve NAME PORT...`` prints its own port.

``ours`` is the router with its defaults; ``ours_failover`` also keeps every token, so that another
engine can continue a request; ``fastapi_httpx`` is a plain proxy.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import sys
from collections.abc import AsyncIterator

import httpx
import uvicorn
import uvloop
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from engines.protocol import Endpoint
from rollout.config import RouterConfig
from rollout.router import Backend, RouterHost
from rollout.runtime.worker_process import collect_in_sweeps, keep_freed_memory


async def serve_ours(ports: list[int], *, has_failover: bool) -> None:
    keep_freed_memory()  # as the router's actor does
    config = RouterConfig.model_validate({"token_failover": "on"} if has_failover else {})
    host = RouterHost(config)
    endpoint = await host.start()
    members = [Backend(f"e-{n}", Endpoint("127.0.0.1", port)) for n, port in enumerate(ports)]
    await host.set_members(1, members)
    await host.set_gate("open", weight_version=1)
    collect_in_sweeps()  # as the router's actor does: a collection would be the slowest request
    print(json.dumps(endpoint.port), flush=True)
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
    name, *ports = sys.argv[1:]
    engines = [int(port) for port in ports]
    if name != "fastapi_httpx":
        uvloop.run(serve_ours(engines, has_failover=name == "ours_failover"))
        return
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    print(json.dumps(listener.getsockname()[1]), flush=True)
    config = uvicorn.Config(fastapi_httpx(engines), log_level="warning", access_log=False)
    asyncio.run(uvicorn.Server(config).serve([listener]))


if __name__ == "__main__":
    main()
