"""The main loop of an engine process: load, serve until a signal, end every request, exit."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import signal
import socket
import time
from pathlib import Path

import torch
import uvicorn
import uvloop

from engines.embedded.core.config import EmbeddedConfig
from engines.embedded.core.model_config import read_model_config
from engines.embedded.generation.tokenization import TextCodec, load_text
from engines.embedded.memory.regions import Memory
from engines.embedded.model.decoder import Decoder
from engines.embedded.server.app import make_app
from engines.embedded.server.embedded_engine import EmbeddedEngine
from engines.embedded.server.info_api import PROCESS_START
from engines.embedded.weights.model_loading import load_model
from engines.http.key_check import KeyCheck, access_of
from engines.http.uvicorn_server import HttpServer

_logger = logging.getLogger(__name__)
_GRACE_S = 2.0


def serve(config: EmbeddedConfig, listener: socket.socket) -> None:
    """Blocks until SIGTERM or SIGINT, then exits the process with status 0."""
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    began = time.monotonic()
    torch.set_num_threads(config.num_threads)
    if config.random_seed is not None:
        random.seed(config.random_seed)
    model, text, memory = load(config)

    async def run() -> None:
        engine = EmbeddedEngine(config, model, text, memory)
        settings = uvicorn.Config(
            KeyCheck(make_app(engine), access_of(os.environ), [PROCESS_START]),
            log_level=config.log_level if config.log_level == "debug" else "warning",
            access_log=False,
            lifespan="off",
            http="httptools",
            ws="none",
            loop="uvloop",
            backlog=4096,
            timeout_keep_alive=75,
        )
        # No connection stays open for an answer that a paused engine never gives.
        server = HttpServer(settings, on_stopping=engine.end_requests)
        for sig in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(sig, server.stop, _GRACE_S)
        gc.freeze()  # and none later: collecting all this would make one step slow
        gc.enable()
        host, port = listener.getsockname()[:2]
        load_s = time.monotonic() - began
        _logger.info("serving %s at %s:%s after %.1f s", config.model_path, host, port, load_s)
        await server.serve(sockets=[listener])
        engine.stop(_GRACE_S)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    logging.shutdown()
    # A thread in a long step or in a rendezvous cannot be joined, and nothing is left to save.
    os._exit(0)


def load(config: EmbeddedConfig) -> tuple[Decoder, TextCodec, Memory]:
    """Load what ``config`` names; ``OSError`` or ``ValueError`` where it is no such model."""
    model_config = read_model_config(config.model_path)
    memory = Memory(
        _device(config.device),
        saver=config.enable_memory_saver,
        weights_backup=config.enable_weights_cpu_backup,
    )
    model = load_model(model_config, config.model_path, config.dtype, memory)
    text = load_text(Path(config.model_path), model_config.eos_ids, model_config.vocab_size)
    return model, text, memory


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
