"""The life of an engine process: load, serve until a signal, end every request, exit."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import uvicorn
import uvloop

from engines.embedded.app import make_app
from engines.embedded.config import EngineConfig
from engines.embedded.engine import Engine
from engines.embedded.loading import load

_logger = logging.getLogger(__name__)
_GRACE_S = 2.0


class Server(uvicorn.Server):
    """Ends the engine's requests as soon as a signal comes, so that no connection stays open
    for an answer (a paused engine would never give it)."""

    engine: Engine

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's own, does not raise the signal again after a clean end."""
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, self.handle_exit, sig, None)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.engine.batcher.post(lambda: self.engine.gate.abort_all(and_held=True))
        super().handle_exit(sig, frame)


def serve(config: EngineConfig, listener: socket.socket) -> None:
    """Blocks until SIGTERM or SIGINT, then leaves the process with status 0."""
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    began = time.monotonic()
    torch.set_num_threads(config.num_threads)
    if config.random_seed is not None:
        random.seed(config.random_seed)
    model, text, memory = load(config)

    async def run() -> None:
        engine = Engine(config, model, text, memory)
        settings = uvicorn.Config(
            make_app(engine),
            log_level=config.log_level if config.log_level == "debug" else "warning",
            access_log=False,
            lifespan="off",
            http="httptools",
            loop="uvloop",
            backlog=4096,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(_GRACE_S),
        )
        server = Server(settings)
        server.engine = engine
        gc.freeze()  # nor is there any later: a collection of all this is a step that takes longer
        gc.enable()
        host, port = listener.getsockname()[:2]
        _logger.info(
            "serving %s at %s:%s after %.1f s",
            config.model_path,
            host,
            port,
            time.monotonic() - began,
        )
        await server.serve(sockets=[listener])
        engine.stop(_GRACE_S)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    logging.shutdown()
    # A thread in a long step or in a rendezvous cannot be joined, and nothing is left to save.
    os._exit(0)
