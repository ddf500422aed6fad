"""A worker of agents as a child of this process, where there is no Ray.

Always true: the socket that clients connect to is bound here, so a worker that is started again
serves at the same address, and connections wait for it meanwhile; the worker ends with this
process, however that ends, and is no zombie.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from asyncio.subprocess import Process
from contextlib import suppress
from functools import partial
from typing import Any

from engines.process.background import Then, keep_task
from engines.process.process_identity import identify
from engines.protocol import Endpoint
from engines.protocol.spec import inherited_environment
from rollout.agents.worker.host import AGENTS
from rollout.agents.worker.settings import WorkerSettings
from rollout.core.errors import RolloutError
from rollout.core.fanout import wait_all
from rollout.core.http_thread import bind

_PROGRAM = ("-m", "rollout.runtime.agents_program")
_STDERR = 2


class AgentsProcess:
    """Starts one worker, and starts it again whenever it ends; see ``AgentsHost``.

    Args:
        program: what the interpreter runs.
    """

    def __init__(self, settings: WorkerSettings, program: tuple[str, ...] = _PROGRAM) -> None:
        self._settings = settings
        self._program = program
        self._name = f"worker {settings.number} of agents"
        self._listener: socket.socket | None = None
        self._process: Process | None = None
        self._keeping: asyncio.Task[None] | None = None

    async def start(self, router_url: str) -> Endpoint:
        """Bind and return where; the worker begins to serve there when it has started.

        Raises:
            ConfigError: host and port cannot be bound.
        """
        config = self._settings.config
        self._listener = bind(config.host, config.port, what=AGENTS)
        keep = partial(self._run, self._listener, router_url)
        self._keeping = keep_task(keep, self._name, Then.STARTS_AGAIN)
        return Endpoint(config.host, self._listener.getsockname()[1])

    async def stop(self, budget_s: float) -> None:
        """Let turns end up to the budget, then kill it."""
        if self._keeping is None or self._listener is None:
            return
        self._keeping.cancel()
        await wait_all([self._keeping])
        self._listener.close()
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), budget_s)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def stats(self) -> dict[str, Any]:
        """Its process, or None while there is none."""
        process = self._process
        if process is None or process.returncode is not None:
            return {"process": None}
        return {"process": identify(process.pid)}

    async def _run(self, listener: socket.socket, router_url: str) -> None:
        """Start it, and wait for its end.

        Raises:
            RolloutError: it has ended.
        """
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        process = self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", *self._program),
            *(str(listener.fileno()), str(os.getpid()), router_url),
            stdin=asyncio.subprocess.PIPE,
            stdout=_STDERR,
            env={**inherited_environment(os.environ), "PYTHONPATH": path},
            pass_fds=[listener.fileno()],
            start_new_session=True,  # what a terminal sends is for its owner
        )
        assert process.stdin is not None
        process.stdin.write(self._settings.to_json() + b"\n")
        with suppress(ConnectionError):  # it has ended already
            await process.stdin.drain()
        status = await process.wait()
        raise RolloutError(f"{self._name} ended with status {status}; its address is the same")
