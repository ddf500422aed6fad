"""A worker of agents as an actor, which Ray starts again in its place.

In a module of its own, so that its process imports little.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from contextlib import closing
from dataclasses import replace

from engines.plain_json import WRONG_FORM, read_json
from engines.process.background import Then, keep_thread
from engines.process.own_files import OwnFolder
from engines.protocol import Endpoint
from rollout.agents.worker.host import AgentsHost
from rollout.agents.worker.settings import WorkerSettings
from rollout.core.errors import ActorLost, ConfigError
from rollout.router.http.fast_json import dumps
from rollout.runtime.worker_process import is_own_process, tune_worker

logger = logging.getLogger(__name__)

_MOST_RECORD_BYTES = 4096
# The kernel closes the sockets of a process that ends in any order.
_BIND_WITHIN_S = 5.0
_BIND_AGAIN_S = 0.005


class AgentsActor(AgentsHost):
    """An ``AgentsHost`` that writes down, beside its folder, where it serves and for which router.

    One that Ray has started again finds that there, and serves at the address of the lost one.

    Args:
        launch: of its server; what a worker of another one has written is not its own.
    """

    def __init__(self, settings: WorkerSettings, *, launch: str) -> None:
        super().__init__(settings, owns_process=is_own_process())
        self._launch = launch
        self._endpoint: Endpoint | None = None
        self._begins_again = False
        if is_own_process():
            tune_worker()
        if is_own_process() and (served := self._read_record()) is not None:
            port, router_url = served
            config = settings.config.model_copy(update={"port": port})
            self._settings = replace(settings, config=config)
            self._begins_again = True
            # Ray may not carry out a call that an actor makes to itself while it starts.
            keep_thread(
                lambda: asyncio.run(self._serve_again(router_url)),
                "the start of a worker of agents",
                Then.PROCESS_ENDS,
            )

    async def start(self, router_url: str, listener: socket.socket | None = None) -> Endpoint:
        """See ``AgentsHost``; a repeated call returns the same.

        Raises:
            ActorLost: its process was lost, and another one begins.
        """
        if self._begins_again:
            raise ActorLost("this worker of agents begins again", may_have_executed=False)
        if self._endpoint is None:
            self._endpoint = await super().start(router_url, listener)
            self._write_record(self._endpoint.port, router_url)
        return self._endpoint

    async def _serve_again(self, router_url: str) -> None:
        clock = asyncio.get_running_loop().time
        until_s = clock() + _BIND_WITHIN_S
        while self._endpoint is None:
            try:
                self._endpoint = await super().start(router_url)
            except ConfigError:
                if clock() > until_s:
                    raise
                await asyncio.sleep(_BIND_AGAIN_S)
        self._begins_again = False
        logger.warning("a worker of agents serves at %s again", self._endpoint.url)

    def _read_record(self) -> tuple[int, str] | None:
        """Port and router of the lost one, or None if there is none."""
        folder, name = os.path.split(self._settings.folder)
        try:
            with closing(OwnFolder.open(folder)) as own:
                record = read_json(own.read(f"{name}.json", _MOST_RECORD_BYTES))
            served = int(record["port"]), str(record["router_url"])
            return served if record["launch"] == self._launch else None
        except (OSError, *WRONG_FORM):
            return None

    def _write_record(self, port: int, router_url: str) -> None:
        folder, name = os.path.split(self._settings.folder)
        record = {"launch": self._launch, "port": port, "router_url": router_url}
        with closing(OwnFolder.open(folder)) as own:
            own.replace(f"{name}.json", dumps(record))
