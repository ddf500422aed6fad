"""The actors of a server's routers: one serves, the other one stands by.

In a module of its own, so that a process which Ray restarts imports little.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Future
from importlib import import_module
from typing import Any

import ray
from engines.protocol import Endpoint

from rollout.config import RouterConfig
from rollout.core.errors import ConfigError
from rollout.core.pending import in_own_thread
from rollout.router.host import RouterHost
from rollout.router.state_file import StateFile
from rollout.runtime.worker_process import (
    is_own_process,
    keep_freed_memory,
    keep_what_is_loaded,
    switch_threads_often,
)

logger = logging.getLogger(__name__)

# The kernel closes the sockets of a process that ends in any order.
_BIND_WITHIN_S = 5.0
_BIND_AGAIN_S = 0.005
_START_AGAIN_S = 0.05


class RouterActor(RouterHost):
    """A ``RouterHost``: HTTP in its own thread, control through actor calls.

    It serves while it has the lock of the state file.

    Args:
        number: its own, of all routers of the server.
        state: of them all.
        server: namespace and name of their server's actor.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        run: str,
        number: int,
        state: StateFile,
        server: tuple[str, str],
    ) -> None:
        super().__init__(config, run=run)
        self._number = number
        self._state = state
        self._server = server
        if is_own_process():
            keep_what_is_loaded()
            switch_threads_often()
            keep_freed_memory()
            is_new = not ray.get_runtime_context().was_current_actor_reconstructed
            if number or not is_new:
                self.why_not_serving = "it stands by"
                # Ray may not carry out a call that an actor makes to itself while it starts.
                in_own_thread(self._stand_by, "router-standby")

    async def start(self) -> Endpoint:
        if is_own_process():
            self._state.lock()
        endpoint = await super().start()
        if is_own_process():
            self._state.port = endpoint.port
        return endpoint

    def _stand_by(self) -> None:
        """Wait until no other router serves, and serve in the place of the lost one."""
        namespace, name = self._server
        server = in_own_thread(lambda: ray.get_actor(name, namespace=namespace), "router-server")
        import_module("rollout.router.control_api")  # ``start`` imports it, and would take longer
        while not self._state.port:  # the first router has not started so far
            time.sleep(_START_AGAIN_S)
        self._state.lock()
        asyncio.run(self._serve_instead(server))

    async def _serve_instead(self, server: Future[Any]) -> None:
        """Serve on the port of the lost one.

        The gate stays closed until the server has reported its state.
        """
        self._config = self._config.model_copy(update={"port": self._state.port})
        endpoint = await self._start_soon()
        call = (await asyncio.wrap_future(server)).router_serves
        told = await call.options(max_task_retries=-1).remote(self._number)
        await self.begin_as(*told)
        logger.warning("router %d serves at %s in the place of a lost one", self._number, endpoint)

    async def _start_soon(self) -> Endpoint:
        clock = asyncio.get_running_loop().time
        until_s = clock() + _BIND_WITHIN_S
        while True:
            try:
                return await super().start()
            except ConfigError:
                if clock() > until_s:
                    raise
            await asyncio.sleep(_BIND_AGAIN_S)
