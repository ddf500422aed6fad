"""A router in a process of its own, which measures itself: ``python -m ... CONFIG``."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from typing import Any

from engines.protocol import Endpoint
from rollout.router import Backend, RouterHost
from rollout.runtime.worker_process import collect_in_sweeps
from tests.rollout.router.conftest import router_config
from tests.support.watched_process import LoopWatch, WatchedProcess, answer_commands


async def main() -> None:
    host = RouterHost(router_config(**json.loads(sys.argv[1])))
    endpoint = await host.start()
    collect_in_sweeps()  # as the router's actor does
    watch = LoopWatch()
    await host._on_loop(watch.start)

    async def carry_out(command: str, *arguments: Any) -> Any:
        if command == "gate":
            state, *more = arguments
            return await host.set_gate(state, **{"weight_version": 1} | dict(*more))
        if command == "members":
            epoch, ports = arguments
            members = [Backend(f"e-{n}", Endpoint("127.0.0.1", port)) for n, port in ports]
            return await host.set_members(epoch, members)
        if command == "stats":
            return await host.stats()
        if command == "garbage":
            return gc.collect()
        if command == "num_objects":  # that were made and not freed since the last collection
            return gc.get_count()[0]
        assert command == "make_garbage"
        for _ in range(*arguments):
            knot: list[Any] = []
            knot.append(knot)
        return None

    await answer_commands(endpoint, watch, carry_out)
    await host.stop(0.0)


class RouterProcess(WatchedProcess):
    """The other side: starts it, and calls it."""

    def __init__(self, **config: Any) -> None:
        super().__init__("tests.rollout.router.router_process", config)


if __name__ == "__main__":
    asyncio.run(main())
