"""Steps of a test that say how long a program kept its other clients waiting meanwhile.

Measured are the CPU of its event loop's thread between two beats, which other work on the machine
does not change; and how late a beat is, with all that other threads of the program keep from it.  A
process beside it measures how many times longer any work takes on this machine than on idle cores:
a beat may be late by as much more.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
from fastapi import FastAPI

from tests.rollout.router.stub_engine import chunk
from tests.support.watched_process import WatchedProcess

CPU_S = 0.05
WAIT_S = 0.05
_TIMEOUT = aiohttp.ClientTimeout(total=300)
# For each line it prints how many times longer than its CPU time its slowest work took.
BEAT = """
import select, sys, time
slowest = 1.0
while True:
    is_read = select.select([sys.stdin], [], [], 0.05)[0]
    begin, work = time.monotonic(), time.process_time() + 0.005
    while time.process_time() < work:
        pass
    slowest = max(slowest, (time.monotonic() - begin) / 0.005)
    if is_read:
        if not sys.stdin.readline():
            break
        print(slowest, flush=True)
        slowest = 1.0
"""


@dataclass
class Waits:
    """A program under measurement.

    Attributes:
        program: the one whose event loop is measured.
        beat: the process that measures the machine.
        most_wait_s: of others, on idle cores.
        slowness: how many times longer work took within the last step.
        events: what the engines answer.
        sent: methods and paths that were requested within a step.
        found: a line for each step.
        failed: the steps that made others wait for too long.
    """

    program: WatchedProcess
    client: aiohttp.ClientSession
    beat: asyncio.subprocess.Process
    most_wait_s: float = WAIT_S
    slowness: float = 1.0
    events: list[bytes] = field(default_factory=list)
    sent: set[tuple[str, str]] = field(default_factory=set)
    found: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    async def post(self, path: str, body: bytes | dict[str, Any]) -> int:
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        headers = {"content-type": "application/json", "x-token-failover": "on"}
        self.sent.add(("POST", path))
        async with self.client.post(path, data=io.BytesIO(data), headers=headers) as response:
            await response.read()
            return response.status

    async def get(self, path: str, method: str = "GET") -> int:
        self.sent.add((method, path))
        async with self.client.request(method, path) as response:
            await response.read()
            return response.status

    async def step(self, name: str, work: Awaitable[Any]) -> Any:
        """Do ``work``, and measure who waits for it."""
        await self._slowness()
        await self.program.call("measure")
        began_s = time.monotonic()
        result = await work
        took_s = time.monotonic() - began_s
        measured = await self.program.call("measure")
        cpu_s, wait_s = measured["longest_s"], measured["longest_wait_s"]
        slowness = self.slowness = await self._slowness()
        self.found.append(
            f"{name:32} wait {wait_s * 1e3:6.1f} ms, work takes {slowness:4.1f} times as long; "
            f"CPU {cpu_s * 1e3:5.1f} ms; took {took_s:5.2f} s; {result}"
        )
        print(self.found[-1], flush=True)
        if cpu_s > CPU_S or wait_s > self.most_wait_s * slowness:
            self.failed.append(self.found[-1])
        return result

    def unmeasured(self, app: FastAPI, others: Iterable[str] = ()) -> list[str]:
        """The routes, and other paths of POST, of which no step has measured who waits for them."""
        routes = [(route.methods, route.path_regex, route.path) for route in app.router.routes]  # type: ignore[attr-defined]
        routes += [({"POST"}, re.compile(re.escape(path)), path) for path in others]
        return [
            path
            for methods, pattern, path in routes
            if not any(method in methods and pattern.fullmatch(one) for method, one in self.sent)
        ]

    async def _slowness(self) -> float:
        assert self.beat.stdin is not None
        assert self.beat.stdout is not None
        self.beat.stdin.write(b"\n")
        return float(await self.beat.stdout.readline())


@asynccontextmanager
async def measuring(program: WatchedProcess, most_wait_s: float = WAIT_S) -> AsyncIterator[Waits]:
    """Steps of a program that serves; they are judged at the end."""
    pipe = asyncio.subprocess.PIPE
    beat = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", BEAT), stdin=pipe, stdout=pipe
    )
    try:
        connector = aiohttp.TCPConnector(limit=0)
        url = program.endpoint.url
        async with aiohttp.ClientSession(url, connector=connector, timeout=_TIMEOUT) as client:
            yield (it := Waits(program, client, beat, most_wait_s))
    finally:
        assert beat.stdin is not None
        beat.stdin.close()
        await beat.wait()
    assert it.failed == []


def events_of(text: str, num_events: int, ids: list[int] | None = None) -> list[bytes]:
    """An answer in so many events with all of it so far.

    Args:
        ids: its tokens; None for one of each character, all the same.
    """
    ids = [100] * len(text) if ids is None else ids
    sizes = [len(ids) * number // num_events for number in range(1, num_events + 1)]
    return [_event(text, ids[:size], size == len(ids)) for size in sizes]


def _event(text: str, ids: list[int], is_last: bool) -> bytes:
    meta = {
        "id": "r",
        "finish_reason": {"type": "length", "length": len(ids)} if is_last else None,
        "prompt_tokens": 3,
        "completion_tokens": len(ids),
        "weight_version": "1",
        "output_token_logprobs": [[-0.5, one, None] for one in ids],
    }
    payload = {"text": text, "output_ids": ids, "meta_info": meta}
    return chunk(b"data: " + orjson.dumps(payload) + b"\n\n")
