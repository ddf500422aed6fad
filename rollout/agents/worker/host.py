"""One worker of a server's agents, in a thread of its own."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import uvloop

from engines.http.uvicorn_server import HttpServer, traffic_config
from engines.process.background import Then
from engines.process.locks import Hold, held
from engines.process.own_files import make_folders
from engines.process.process_identity import identify
from engines.protocol import Endpoint
from rollout.agents.failures import MOST_AT_ONCE
from rollout.agents.worker.settings import WorkerSettings
from rollout.config import ServerConfig
from rollout.core.errors import PhaseTimeout, RolloutError
from rollout.core.http_thread import HttpThread
from rollout.router.http.engine_pool import check_file_descriptors

AGENTS = "agents"
"""Names the workers in errors, and is the slice of the configuration with their port."""
_STOP_GRACE_S = 5.0


def worker_settings(server: ServerConfig, folder: Path) -> tuple[WorkerSettings, ...]:
    """The settings of all workers of a server.

    Args:
        folder: of the server's agents.
    """
    agents, router = server.agents, server.router
    of_all = {
        "host": server.agents_host,
        "tokenizer_path": agents.tokenizer_path or router.tokenizer_path,
    }
    return tuple(
        WorkerSettings(
            agents.model_copy(
                update={**of_all, "port": agents.ports[number] if agents.port else 0}
            ),
            number,
            agents.workers,
            str(folder / str(number)),
            router.client_key,
            router.control_key,
            router.max_read_bytes,
            router.request_timeout_s,
        )
        for number in range(agents.workers)
    )


class AgentsHost:
    """Starts and stops one worker.

    Args:
        owns_process: it ends its process if it fails after it has started.
    """

    def __init__(self, settings: WorkerSettings, *, owns_process: bool = False) -> None:
        self._settings = settings
        self._hold: Hold | None = None
        self._thread = HttpThread(AGENTS, loop_factory=uvloop.new_event_loop)
        if owns_process:
            self._thread.then = Then.PROCESS_ENDS

    async def start(self, router_url: str, listener: socket.socket | None = None) -> Endpoint:
        """Serve, and return where.

        Args:
            router_url: of the router that turns are sent to.
            listener: where it serves, if that is bound already.

        Raises:
            ConfigError: host and port cannot be bound.
            RolloutError: it could not start, or was started before.
        """
        config, folder = self._settings.config, self._settings.folder
        self._hold = held(Path(folder).parent)  # so that no other launch removes it
        make_folders(folder)
        return await self._thread.start(
            config.host, config.port, lambda: self._make_server(router_url), listener=listener
        )

    async def stop(self, budget_s: float) -> None:
        """Refuse what is new, let turns end up to the budget, cut the rest.

        Raises:
            PhaseTimeout: its thread did not end.
        """
        timeout_s = budget_s + _STOP_GRACE_S
        try:
            await self._thread.stop(budget_s, timeout_s=timeout_s)
        except TimeoutError:
            raise PhaseTimeout(
                f"worker {self._settings.number} of agents did not stop within {timeout_s:.0f} s",
                phase="stop",
                budget_s=budget_s,
            ) from None
        if self._hold is not None:
            self._hold.release()

    async def stats(self) -> dict[str, Any]:
        """Its process."""
        if not self._thread.is_running:
            raise RolloutError(f"worker {self._settings.number} of agents is not running")
        return {"process": identify(os.getpid())}

    def _make_server(self, router_url: str) -> HttpServer:
        # Here, because FastAPI takes a quarter of the time of ``import rollout``.
        from rollout.agents.worker.app import agents_app

        # A chat has a connection to its client and one to the router.
        connections = check_file_descriptors(MOST_AT_ONCE, is_default=True)
        return HttpServer(
            traffic_config(
                agents_app(self._settings, router_url),
                limit_concurrency=connections.clients,  # beyond it: 503, and closed
            )
        )
