"""CPU seconds of driver and router for 1000 samples over HTTP, with 2048 in flight.

The router runs as it ships, in a thread of this process, so that the process's CPU time is that
of both; the engines are stubs in another process that answer with 1 KB after a second.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benchmarks.rollout.modes import Run, stepping
from engines.protocol import Endpoint, GenerateReply
from rollout.config import RouterConfig
from rollout.driver.door import Ask
from rollout.driver.http_door import HttpDoor
from rollout.router import Member, RouterHost

IN_FLIGHT = 2048
NUM_ENGINES = 8


class CountingDoor(HttpDoor):
    """The door as it is, and how many replies came through it."""

    num_replies = 0

    async def generate(self, ask: Ask) -> GenerateReply:
        reply = await super().generate(ask)
        self.num_replies += 1
        return reply


@asynccontextmanager
async def router() -> AsyncIterator[str]:
    """A router over stub engines; its URL."""
    stubs = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.rollout.stub",
        str(NUM_ENGINES),
        stdout=asyncio.subprocess.PIPE,
    )
    assert stubs.stdout is not None
    host = RouterHost(RouterConfig(max_connections=4 * IN_FLIGHT, connect_timeout_s=60.0))
    try:
        ports = json.loads(await stubs.stdout.readline())
        url = (await host.start()).url
        members = [Member(f"e-{n}", Endpoint("127.0.0.1", port)) for n, port in enumerate(ports)]
        await host.set_members(1, members)
        await host.set_gate("open", weight_version=1)
        yield url
    finally:
        await host.stop(1.0)
        stubs.terminate()
        await stubs.wait()


async def cpu_s_per_1k(mode: str, num_steps: int) -> float:
    """Seconds of CPU for each 1000 samples, after a batch that opens the connections.

    Args:
        num_steps: batches, each of as many samples as are in flight.
    """
    group_size = 8
    run = Run(num_steps, num_groups=IN_FLIGHT // group_size, group_size=group_size)
    async with router() as url:
        door = CountingDoor(url, timeout_s=300.0)
        try:
            async with stepping(mode, run, door, IN_FLIGHT) as step:
                await step(0)
                began_s, before = time.process_time(), door.num_replies
                for number in range(num_steps):
                    await step(1 + number)
                spent_s = time.process_time() - began_s
        finally:
            await door.close()
    # Not by what was delivered: a mode may deliver what it made before the clock started.
    return spent_s * 1000 / (door.num_replies - before)
