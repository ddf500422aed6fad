"""``python -m engines.fake --port 30001 --fault pause_generation:hang``: one fake engine."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from aiohttp import web

from engines.fake.engine.fake_caches import caches_with
from engines.fake.engine.fake_engine import FakeEngine
from engines.fake.engine.fake_weights import checkpoint_tensors, checkpoint_vocabulary
from engines.fake.engine.faults import FaultSpec, parse_fault
from engines.fake.http_fake import FakeHttpApp
from engines.fake.nodes import Nodes, follower_app
from engines.http.key_check import access_of
from engines.process.background import start_task
from engines.protocol import Endpoint

# Broken calls must get their error before the process ends.
_GOODBYE_S = 0.05


class _Engine(FakeEngine):
    """Says in the log what ends it, before a call breaks: its caller may then kill the process."""

    def die(self, reason: str) -> None:
        if not self.is_dead:
            print(f"{self.engine_id} ended: {reason}", file=sys.stderr, flush=True)
        super().die(reason)


def main(arguments: list[str] | None = None) -> int:
    """Serve until it is stopped, or until a call has ended it: status 1 then."""
    parser = argparse.ArgumentParser(prog="python -m engines.fake", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--fault", type=_switch, action="append", default=[], metavar="SWITCH")
    parser.add_argument("--token-s", type=float, default=0.0, help="seconds each token takes")
    parser.add_argument("--drain-s", type=float, default=0.0, help="seconds an abort takes")
    parser.add_argument("--model-path", default="/models/fake")
    parser.add_argument("--weight-version", default="0")
    parser.add_argument("--no-memory-saver", action="store_true")
    parser.add_argument("--weights-cpu-backup", action="store_true")
    parser.add_argument("--reports-manifest", action="store_true", help="list the tensors")
    for name in ("--prefix-cache", "--image-cache", "--weight-copies"):
        parser.add_argument(name, action="store_true", help="as of SGLang")
    for name in ("--storage-cache", "--shared-image-store"):
        parser.add_argument(name, nargs="?", const="shared", default="", help="its name")
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--dist-init-addr", default="", help="where the nodes meet")
    options = parser.parse_args(arguments)
    engine = _Engine(
        f"fake-{options.port}",
        endpoint=Endpoint(options.host, options.port),
        model_path=options.model_path,
        tensors=checkpoint_tensors(options.model_path),
        vocab_size=checkpoint_vocabulary(options.model_path, default=1000),
        weight_version=options.weight_version,
        memory_saver=not options.no_memory_saver,
        weights_cpu_backup=options.weights_cpu_backup,
        token_s=options.token_s,
        drain_s=options.drain_s,
        reports_manifest=options.reports_manifest,
        caches=caches_with(vars(options), os.environ),
    )
    for switch in options.fault:
        switch.add_to(engine.faults)
    try:
        asyncio.run(_serve(engine, options.nnodes, options.node_rank, options.dist_init_addr))
    except KeyboardInterrupt:
        return 0
    return 1


def _switch(text: str) -> FaultSpec:
    try:
        return parse_fault(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


async def _serve(engine: FakeEngine, num_nodes: int, rank: int, address: str) -> None:
    nodes = Nodes(num_nodes, rank, address)
    await nodes.meet()
    fake = FakeHttpApp(access_of(os.environ))
    fake.engine = engine
    app = follower_app() if rank else fake.app
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, engine.endpoint.host, engine.endpoint.port).start()
        print(f"{engine.engine_id} listens on {engine.endpoint.url}", flush=True)
        await _wait_for_end(engine, nodes)
        await asyncio.sleep(_GOODBYE_S)
    finally:
        await runner.cleanup()


async def _wait_for_end(engine: FakeEngine, nodes: Nodes) -> None:
    ends = [start_task(engine.died(), "died"), start_task(nodes.lost(), "lost")]
    done, running = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for task in running:
        task.cancel()
    engine.die(done.pop().result())


if __name__ == "__main__":
    raise SystemExit(main())
