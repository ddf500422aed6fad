"""The actors of a server's routers: one serves, the other one stands by.

In a module of its own, so that a process which Ray restarts imports little.
"""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from concurrent.futures import Future
from functools import partial
from importlib import import_module
from typing import Any

import ray
from engines.protocol import Endpoint

from rollout.config import RouterConfig
from rollout.core.errors import ConfigError
from rollout.core.pending import in_own_thread
from rollout.router.host import RouterHost
from rollout.router.state.state_file import StateFile
from rollout.runtime.worker_process import (
    collect_in_sweeps,
    is_own_process,
    keep_freed_memory,
    switch_threads_often,
)

logger = logging.getLogger(__name__)

# The kernel closes the sockets of a process that ends in any order.
_BIND_WITHIN_S = 5.0
_BIND_AGAIN_S = 0.005
_START_AGAIN_S = 0.05


def was_restarted() -> bool:
    """Whether Ray has started this actor again."""
    with warnings.catch_warnings():  # Ray itself calls what it deprecates
        warnings.simplefilter("ignore")
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


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
        self._state = state if is_own_process() and state.is_there else None
        super().__init__(config, run=run, state=self._state)
        self._number = number
        self._server = server
        if is_own_process():
            collect_in_sweeps()
            switch_threads_often()
            keep_freed_memory()
            if self._state is not None and (number or was_restarted()):
                self.why_not_serving = "it stands by"
                # Ray may not carry out a call that an actor makes to itself while it starts.
                stand_by = partial(self._stand_by, self._state)
                in_own_thread(stand_by, "router-standby")

    async def start(self) -> Endpoint:
        if self._state is not None:
            self._state.lock()
        endpoint = await super().start()
        if self._state is not None:
            self._state.port = endpoint.port
        return endpoint

    def _stand_by(self, state: StateFile) -> None:
        """Wait until no other router serves, and serve in the place of the lost one."""
        namespace, name = self._server
        server = in_own_thread(lambda: ray.get_actor(name, namespace=namespace), "router-server")
        import_module("rollout.router.control_api")  # ``start`` imports it, and would take longer
        while not state.port:  # the first router has not started so far
            time.sleep(_START_AGAIN_S)
        state.lock()
        asyncio.run(self._serve_instead(state.port, server))

    async def _serve_instead(self, port: int, server: Future[Any]) -> None:
        """Serve on the port of the lost one.

        The gate stays closed until the server has reported its state.
        """
        self._config = self._config.model_copy(update={"port": port})
        endpoint = await self._start_soon()
        call = (await asyncio.wrap_future(server)).router_serves
        state = await call.options(max_task_retries=-1).remote(self._number)
        await self.begin_as(*state)
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
