"""A kind of engine of its own, made of a row and a program: what a new kind needs at least.

    python -m tests.support.toy_kind PORT MODEL

Its server has its weights under no number when it starts, so the launcher has to give them one.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from engines.fake.engine.fake_engine import FakeEngine
from engines.fake.http_fake import FakeHttpApp
from engines.http.client import EngineClient
from engines.http.key_check import access_of
from engines.http.sglang_json import read_loads
from engines.protocol import Endpoint
from engines.protocol.kind import Kind
from engines.protocol.spec import EngineSpec, Invocation

SIZES = {"token_s": 0.001, "vocab_size": 259, "context_length": 4096}


def _invocation(spec: EngineSpec, endpoint: Endpoint, inherited: Mapping[str, str]) -> Invocation:
    program = (sys.executable, "-m", "tests.support.toy_kind", str(endpoint.port), spec.model_path)
    return Invocation(program, {**inherited, **spec.env})


def _client(endpoint: Endpoint, *, weights_cpu_backup: bool = False, **how: Any) -> EngineClient:
    return EngineClient(endpoint, **how)


TOY = Kind(
    name="toy",
    title="the toy",
    client=_client,
    invocation=_invocation,
    is_numbered_at_start=False,
    read_loads=lambda reply: read_loads(json.loads(reply)),
)


async def _serve(port: int, model_path: str) -> None:
    served = FakeHttpApp(access_of(os.environ))
    here = Endpoint("127.0.0.1", port)
    served.engine = FakeEngine(
        "toy-0", endpoint=here, model_path=model_path, weight_version="default", **SIZES
    )
    runner = web.AppRunner(served.app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, here.host, here.port).start()
    await served.engine.died()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), sys.argv[2]))
