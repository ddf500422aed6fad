"""What vLLM's server and its engine core import, for a fork server in its interpreter.

The server spawns the core when it has threads, so it cannot fork it.  What it and the core spawn is
forked by a process that was forked while it had one thread: the start method ``forkserver`` of
Python, with the environment of the process that spawns.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from functools import partial
from multiprocessing import connection, forkserver, resource_tracker, spawn, util
from multiprocessing.context import BaseContext
from typing import Any
from unittest.mock import patch

import setproctitle
import vllm.entrypoints.launchers.api_server.entry
import vllm.v1.engine.core
import vllm.v1.worker.cpu_worker

from tests.support.forking import program

get_context = multiprocessing.get_context
get_preparation_data = spawn.get_preparation_data
prepare = spawn.prepare
spawnv_passfds = util.spawnv_passfds


def start_fork_server() -> None:
    multiprocessing.get_context = other_context
    spawn.get_preparation_data = data_with_environment
    spawn.prepare = prepare_environment
    resource_tracker.ensure_running()
    forkserver.set_forkserver_preload([])
    address = f"\0fork-server-{os.getpid()}"  # no file, which would be left by a kill
    with (
        patch.object(util, "spawnv_passfds", fork_server),
        patch.object(connection, "arbitrary_address", return_value=address),
    ):
        forkserver.ensure_running()


def fork_server(path: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """In place of ``spawnv_passfds``: the pid of one that has imported all that this one has."""
    if pid := os.fork():
        return pid
    try:
        util.spawnv_passfds = spawnv_passfds
        # The core asks this server for its workers, too, and shall start none.
        forkserver._forkserver.ensure_running = resource_tracker.ensure_running
        for number in descriptors:
            os.set_inheritable(number, True)
        serve = partial(forkserver.main, *descriptors, preload=[])
        program.become(list(map(os.fsdecode, arguments)), dict(os.environ), serve)
    finally:
        os._exit(127)


def other_context(method: str | None = None) -> BaseContext:
    return get_context("forkserver" if method == "spawn" else method)


def data_with_environment(name: str) -> dict[str, Any]:
    return {**get_preparation_data(name), "environment": dict(os.environ)}


def prepare_environment(data: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(data["environment"])
    prepare(data)


program.PREPARATIONS.append(start_fork_server)

__all__ = ["setproctitle", "vllm"]
