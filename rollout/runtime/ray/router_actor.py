"""The actor of a server's router, which Ray starts again in its place.

In a module of its own, so that a process which Ray restarts imports little.
"""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import ray
from engines.process.background import Then, keep_thread
from engines.protocol import Endpoint

from rollout.config import RouterConfig
from rollout.core.errors import ConfigError
from rollout.router.host import RouterHost
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
_ASK_AGAIN_S = 0.1
_ANSWER_S = 15.0


def was_restarted() -> bool:
    """Whether Ray has started this actor again."""
    with warnings.catch_warnings():  # Ray itself calls what it deprecates
        warnings.simplefilter("ignore")
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


class RouterActor(RouterHost):
    """A ``RouterHost``: HTTP in its own thread, control through actor calls.

    One that Ray has started again serves at the address of the lost one, with a gate that refuses
    until the server has named gate and engines.

    Args:
        server: namespace and name of its server's actor.
    """

    def __init__(self, config: RouterConfig, *, run: str, server: tuple[str, str]) -> None:
        is_successor = is_own_process() and was_restarted()
        super().__init__(config, run=run)
        self._server = server
        if is_own_process():
            collect_in_sweeps()
            switch_threads_often()
            self._thread.then = Then.PROCESS_ENDS  # Ray starts another
            keep_freed_memory()
        if is_successor:
            self.why_not_serving = "it has just been started again"
            # Ray may not carry out a call that an actor makes to itself while it starts.
            keep_thread(self._begin_again, "the start of this router", Then.PROCESS_ENDS)

    def _begin_again(self) -> None:
        import_module("rollout.router.control_api")  # ``start`` imports it
        asyncio.run(self._serve_again())

    async def _serve_again(self) -> None:
        port, *begun = await self._ask_server()
        self._config = self._config.model_copy(update={"port": port})
        endpoint = await self._start_soon()
        await self.begin_as(*begun)
        logger.warning("the router serves at %s again", endpoint.url)

    async def _ask_server(self) -> Sequence[Any]:
        """Its ``router_serves``, however long it needs: without it no request may be let in."""
        namespace, name = self._server
        server: Any = await asyncio.to_thread(ray.get_actor, name, namespace=namespace)
        call = server.router_serves.options(max_task_retries=-1)
        while True:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    answer: Sequence[Any] = await call.remote()
            except TimeoutError:
                logger.warning("%s: server %s has not answered", self.why_not_serving, name)
                continue
            if answer[0]:
                return answer
            # A server that was lost, too, has not found its router so far.
            await asyncio.sleep(_ASK_AGAIN_S)

    async def _start_soon(self) -> Endpoint:
        clock = asyncio.get_running_loop().time
        until_s = clock() + _BIND_WITHIN_S
        while True:
            try:
                return await self.start()
            except ConfigError:
                if clock() > until_s:
                    raise
            await asyncio.sleep(_BIND_AGAIN_S)
