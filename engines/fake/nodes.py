"""The nodes of one fake engine: they meet before it answers, and none outlives another.

As with SGLang over several nodes: the first listens where they meet, only it takes requests, and
the loss of one node is the end of the engine.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from engines.process.background import start_task

_RETRY_S = 0.05


class Nodes:
    """This node's connections to the others.

    Args:
        num_nodes: of the engine; 1 needs no meeting.
        rank: of this node.
        address: ``host:port`` where they meet, on the node of rank 0.
    """

    def __init__(self, num_nodes: int, rank: int, address: str) -> None:
        self._num_others = num_nodes - 1 if rank == 0 else 1
        self._rank = rank
        host, _, port = address.rpartition(":")
        self._place = (host.strip("[]"), int(port or 0))
        self._met: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._have_met = asyncio.Event()

    async def meet(self) -> None:
        """Return when all nodes are there."""
        if self._rank:
            while True:
                try:
                    self._met.append(await asyncio.open_connection(*self._place))
                    return
                except OSError:  # the first node starts when it starts
                    await asyncio.sleep(_RETRY_S)
        if self._num_others:
            server = await asyncio.start_server(self._greet, *self._place)
            await self._have_met.wait()
            server.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._met.append((reader, writer))
        if len(self._met) == self._num_others:
            self._have_met.set()

    async def lost(self) -> str:
        """Wait until another node is lost; which end of the meeting this is."""
        if not self._met:
            await asyncio.Event().wait()
        reads = [start_task(reader.read(), "node") for reader, _ in self._met]
        try:
            await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for read in reads:
                read.cancel()
        return f"node {self._rank} lost another node of the engine"


def follower_app() -> web.Application:
    """What a node behind the first answers: that it lives."""

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", health)
    return app
