"""CPU seconds of driver and router for 1000 samples over HTTP, with many in flight.

The router runs in a thread of this process, so that the CPU time of the process is that of both.
The engines are stubs in another process, which reply with 1 KB after a delay.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benchmarks.rollout.modes import Run, training
from engines.protocol import Endpoint, GenerateReply
from rollout.config import RouterConfig
from rollout.driver.client.generation_client import GenerationRequest
from rollout.driver.client.http_client import HttpGenerationClient
from rollout.router import Backend, RouterHost

NUM_ENGINES = 8


class CountingClient(HttpGenerationClient):
    """A client that counts its replies."""

    num_replies = 0

    async def generate(self, request: GenerationRequest) -> GenerateReply:
        reply = await super().generate(request)
        self.num_replies += 1
        return reply


@asynccontextmanager
async def router(in_flight: int, delay_s: float) -> AsyncIterator[str]:
    """The URL of a router over stub engines."""
    stubs = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.rollout.stub",
        *(str(NUM_ENGINES), str(delay_s)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert stubs.stdout is not None
    host = RouterHost(RouterConfig(max_connections=4 * in_flight, connect_timeout_s=60.0))
    try:
        ports = json.loads(await stubs.stdout.readline())
        url = (await host.start()).url
        members = [Backend(f"e-{n}", Endpoint("127.0.0.1", port)) for n, port in enumerate(ports)]
        await host.set_members(1, members)
        await host.set_gate("open", weight_version=1)
        yield url
    finally:
        await host.stop(1.0)
        stubs.terminate()
        await stubs.wait()


async def cpu_s_per_1k(mode: str, num_steps: int, in_flight: int, delay_s: float) -> float:
    """CPU seconds per 1000 samples, after a batch that opens the connections.

    Args:
        num_steps: batches, each of ``in_flight`` samples.
        delay_s: seconds until an engine replies.
    """
    group_size = 8
    run = Run(num_steps, num_groups=in_flight // group_size, group_size=group_size)
    async with router(in_flight, delay_s) as url:
        client = CountingClient(url, timeout_s=300.0)
        try:
            async with training(mode, run, client, in_flight) as step:
                await step(0)
                began_s, before = time.process_time(), client.num_replies
                for number in range(num_steps):
                    await step(1 + number)
                spent_s = time.process_time() - began_s
        finally:
            await client.close()
    # Not per delivered sample: a mode may deliver samples made before the clock started.
    return spent_s * 1000 / (client.num_replies - before)
