"""A program under measurement, in a process of its own: how long its event loop makes others wait.

The process reads one JSON list per line, a command and its arguments, and writes one JSON value for
each; first it writes where it serves.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil

from engines.protocol import Endpoint

# clock: it measures its memory again and again.

ROOT = Path(__file__).parents[2]
_TICK_S = 0.002
_SAMPLE_S = 0.01
_WITHIN_S = 60.0

CarryOut = Callable[..., Awaitable[Any]]


class LoopWatch:
    """A heartbeat of an event loop.

    Attributes:
        longest_s: most CPU time of its thread from one beat to the next; other work on the machine
            does not count.
        longest_wait_s: most time that a beat was late, with what other threads kept from it.
    """

    def __init__(self) -> None:
        self.longest_s = self.longest_wait_s = 0.0
        self._last_s = self._due_s = 0.0

    def start(self) -> None:
        self._last_s, self._due_s = time.thread_time(), time.monotonic()
        self._tick(asyncio.get_running_loop())

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        used_s, now_s = time.thread_time(), time.monotonic()
        self.longest_s = max(self.longest_s, used_s - self._last_s)
        self.longest_wait_s = max(self.longest_wait_s, now_s - self._due_s)
        self._last_s, self._due_s = used_s, now_s + _TICK_S
        loop.call_later(_TICK_S, self._tick, loop)


class Memory:
    """The resident bytes of this process."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.most = 0

    def now(self) -> int:
        return int(self._process.memory_info().rss)

    async def sample(self) -> None:
        while True:
            self.most = max(self.most, self.now())
            await asyncio.sleep(_SAMPLE_S)


async def answer_commands(endpoint: Endpoint, watch: LoopWatch, carry_out: CarryOut) -> None:
    """Write where the program serves, and carry commands out until standard input ends.

    Args:
        carry_out: any command but ``measure``, with its arguments.
    """
    memory = Memory()
    sampling = asyncio.ensure_future(memory.sample())

    def measure() -> dict[str, float]:
        measured = {
            "longest_s": watch.longest_s,
            "longest_wait_s": watch.longest_wait_s,
            "most": memory.most,
            "now": memory.now(),
        }
        watch.longest_s, watch.longest_wait_s, memory.most = 0.0, 0.0, 0
        return measured

    print(json.dumps([endpoint.host, endpoint.port]), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        result = measure() if command == ["measure"] else await carry_out(*command)
        print(json.dumps(result, default=str), flush=True)
    sampling.cancel()
    with suppress(asyncio.CancelledError):
        await sampling


class WatchedProcess:
    """The other side: starts it, and calls it.

    Args:
        module: the program, which calls ``answer_commands``.
        config: its only argument, as JSON.
    """

    def __init__(self, module: str, config: Any) -> None:
        self._module = module
        self._config = json.dumps(config)
        self.endpoint = Endpoint("127.0.0.1", 1)

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", self._module, self._config),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
            limit=1 << 24,
        )
        self.endpoint = Endpoint(*await self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), 20)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
            raise

    async def call(self, *command: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        return await self._read()

    async def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(await asyncio.wait_for(self._process.stdout.readline(), _WITHIN_S))
