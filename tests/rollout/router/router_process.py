"""A router in a process of its own, which measures itself: ``python -m ...router_process CONFIG``.

It reads one JSON list per line, a command and its arguments, and writes one JSON value for each.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from engines.protocol import Endpoint
from rollout.agents.chats import ChatSessions
from rollout.agents.model.call_forms import BY_NAME
from rollout.agents.model.families import reader_of
from rollout.router import Backend, RouterHost
from rollout.runtime.worker_process import collect_in_sweeps
from tests.rollout.router.conftest import router_config

# clock: it measures its memory again and again.

ROOT = Path(__file__).parents[3]
_TICK_S = 0.002
_SAMPLE_S = 0.01


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


def _use_form(chats: ChatSessions, name: str) -> None:
    """Read the tool calls of answers in this form from now on."""
    model = chats._model.model
    assert model is not None
    reader = reader_of(model.chat, BY_NAME[name], model.reader.thinking)
    chats._model.model = replace(model, reader=reader)


async def main() -> None:
    host = RouterHost(router_config(**json.loads(sys.argv[1])))
    endpoint = await host.start()
    collect_in_sweeps()  # as the router's actor does
    watch, memory = LoopWatch(), Memory()
    await host._on_loop(watch.start)
    sampling = asyncio.ensure_future(memory.sample())

    async def carry_out(command: str, *arguments: Any) -> Any:
        if command == "gate":
            state, *more = arguments
            return await host.set_gate(state, **{"weight_version": 1} | dict(*more))
        if command == "members":
            epoch, ports = arguments
            members = [Backend(f"e-{n}", Endpoint("127.0.0.1", port)) for n, port in ports]
            return await host.set_members(epoch, members)
        if command == "form":
            return await host._on_loop(
                lambda: _use_form(host._thread._server.config.app.state.chats, *arguments)
            )
        if command == "stats":
            return await host.stats()
        if command == "garbage":
            return gc.collect()
        if command == "num_objects":  # that were made and not freed since the last collection
            return gc.get_count()[0]
        if command == "make_garbage":
            for _ in range(*arguments):
                knot: list[Any] = []
                knot.append(knot)
            return None
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
        print(json.dumps(await carry_out(*json.loads(line)), default=str), flush=True)
    sampling.cancel()
    with suppress(asyncio.CancelledError):
        await sampling
    await host.stop(0.0)


class RouterProcess:
    """The other side: starts it, and calls it."""

    def __init__(self, **config: Any) -> None:
        self._config = json.dumps(config)
        self.endpoint = Endpoint("127.0.0.1", 1)

    async def __aenter__(self) -> RouterProcess:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.rollout.router.router_process", self._config),
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
        return json.loads(await asyncio.wait_for(self._process.stdout.readline(), 60))


if __name__ == "__main__":
    asyncio.run(main())
