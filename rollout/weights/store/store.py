"""The store of one server: what was pushed is kept, in the background, latest first.

Always true: a push never waits for the store; at most one push waits to be kept, the latest; after
so many failures in a row the store has switched itself off and says why; ``stop`` gives all memory
back; nothing here ever raises into the server.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from rollout.config import WeightUpdate
from rollout.errors import WeightsUnavailable
from rollout.fanout import describe, settle
from rollout.types import StoreStatus
from rollout.weights.push import WeightPush
from rollout.weights.store.agents import Agents, StoreTerms
from rollout.weights.store.commit import Write
from rollout.weights.store.contents import tensors_of
from rollout.weights.store.coordinator import Coordinator
from rollout.weights.store.records import Record
from rollout.weights.store.writer import FAILURES, Content

logger = logging.getLogger(__name__)

# The rest of the machine goes first: nobody waits for the store.
_NICENESS = 10
_CLOSE_TIMEOUT_S = 20.0

T = TypeVar("T")


class WeightStore:
    """Keeps what a server has published.

    Args:
        update: what a push brings that does not say so itself.
    """

    def __init__(
        self, terms: StoreTerms, agents: Agents, update: WeightUpdate = WeightUpdate.FULL
    ) -> None:
        self._update = update
        self._terms = terms
        self._config = terms.config
        self._agents = agents
        self._coordinator: Coordinator | None = None
        self._next: WeightPush | None = None
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._kept: Write | None = None
        self._num_failures = 0
        self._num_dropped = 0
        self._write_s = 0.0
        self._because = ""
        self._is_off = False

    # -- start and stop ---------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to keep what is offered."""
        if self._tasks:
            return
        try:
            self._coordinator = await asyncio.to_thread(self._terms.coordinator, self._agents)
        except FAILURES as error:
            self._is_off, self._because = True, f"could not begin: {describe(error)}"
            logger.error("store: %s", self._because)
            return
        self._tasks = [
            asyncio.create_task(self._write_offered(), name="store:write"),
            asyncio.create_task(self._keep_lease(), name="store:lease"),
        ]

    async def stop(self) -> None:
        """End, and give the memory back on every node that can be reached."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await settle(tasks)
        if self._coordinator is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await asyncio.to_thread(self._coordinator.close)
        except Exception as error:  # the leases end by themselves
            logger.error("store: its memory is given back when its lease ends: %s", describe(error))

    # -- what was pushed --------------------------------------------------------------------

    def offer(self, push: WeightPush) -> None:
        """Keep this push when there is time, unless a later one comes first.

        One that brings an adapter only is passed over: it is the base under it that is kept.
        """
        is_whole = push.contents_under(self._update) is WeightUpdate.FULL
        if self._is_off or not self._tasks or not is_whole:
            return
        if self._next is not None:
            self._num_dropped += 1
        self._next = push
        self._idle.clear()
        self._wake.set()

    async def is_idle(self) -> None:
        """Returns when nothing is being written or waits to be."""
        await self._idle.wait()

    async def _write_offered(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            push, self._next = self._next, None
            if push is not None:
                await self._write(push)
            if self._next is None:
                self._idle.set()

    async def _write(self, push: WeightPush) -> None:
        started = asyncio.get_running_loop().time()
        limit = asyncio.timeout(self._config.write_timeout_s)
        try:
            async with limit:
                record = await self._in_thread(push)
        except Exception as error:  # serving must never notice
            why = (
                f"it took longer than {self._config.write_timeout_s:g} s"
                if limit.expired()
                else describe(error)
            )
            self._has_failed(f"weight version {push.version} is not kept: {why}")
            return
        self._write_s = asyncio.get_running_loop().time() - started
        self._kept, self._num_failures, self._because = record.write, 0, ""
        logger.info("store: %s kept in %.2f s", record.write, self._write_s)

    async def _in_thread(self, push: WeightPush) -> Record:
        """A write blocks, so it has a thread; the buckets it asks for come from this loop."""
        assert self._coordinator is not None
        coordinator = self._coordinator
        buckets = _Buckets(push.buckets, asyncio.get_running_loop())
        fingerprints = push.manifest.fingerprints

        def write() -> Record:
            with suppress(OSError):  # of this thread alone, on Linux
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
            return coordinator.write(push.version, push.manifest, buckets.in_turn(), fingerprints)

        return await _in_own_thread(write, buckets.give_up)

    def _has_failed(self, because: str) -> None:
        self._num_failures += 1
        self._because = because
        logger.warning("store: %s", because)
        if self._num_failures >= self._config.max_failures:
            self._is_off, self._next = True, None
            self._because = f"switched off after {self._num_failures} failures; last: {because}"
            logger.error("store: %s", self._because)

    # -- the rest -----------------------------------------------------------------------------

    async def _keep_lease(self) -> None:
        assert self._coordinator is not None
        while True:
            await asyncio.sleep(self._config.lease_s / 4)
            failed = await asyncio.to_thread(self._coordinator.renew)
            for node, why in failed.items():
                logger.warning("store: lease of node %s is not renewed: %s", node, why)

    async def status(self) -> StoreStatus:
        """What it is doing; asks the nodes how much they hold."""
        nodes: dict[str, int] = {}
        if self._coordinator is not None and self._tasks:
            nodes = await asyncio.to_thread(self._coordinator.num_bytes)
        return StoreStatus(
            is_on=not self._is_off and bool(self._tasks),
            because=self._because,
            version=self._kept.version if self._kept else None,
            is_writing=not self._idle.is_set(),
            node_bytes=nodes,
            write_s=self._write_s,
            num_dropped=self._num_dropped,
        )


class _Buckets:
    """The buckets of a push for a thread, each awaited on the loop when its turn comes."""

    def __init__(self, buckets: Sequence[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._buckets = buckets
        self._loop = loop
        self._awaited: Future[Any] | None = None
        self._is_over = False

    def in_turn(self) -> Iterator[Iterator[tuple[str, Content]]]:
        if not self._buckets:
            raise WeightsUnavailable("this push leaves no copy of its tensors to be kept")
        for bucket in self._buckets:
            yield self._tensors(self._ready(bucket))

    def _tensors(self, payload: Any) -> Iterator[tuple[str, Content]]:
        for name, content in tensors_of(payload):
            self._check()
            yield name, content

    def _ready(self, bucket: Any) -> Any:
        if isinstance(bucket, bytes | Mapping):
            return bucket
        self._awaited = asyncio.run_coroutine_threadsafe(_await(bucket), self._loop)
        self._check()
        return self._awaited.result()

    def _check(self) -> None:
        if self._is_over:
            raise WeightsUnavailable("the write was given up")

    def give_up(self) -> None:
        """The thread is to end soon."""
        self._is_over = True
        if self._awaited is not None:
            self._awaited.cancel()


async def _await(bucket: Awaitable[Any]) -> Any:
    return await bucket


async def _in_own_thread(work: Callable[[], T], give_up: Callable[[], None]) -> T:
    """Run ``work`` in a new thread, for the niceness of one in a pool would stay with it.

    When it is cancelled it waits for the thread to end: two writes would be one too many.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            value = work()
        except BaseException as error:
            loop.call_soon_threadsafe(done.set_exception, error)
        else:
            loop.call_soon_threadsafe(done.set_result, value)

    threading.Thread(target=run, name="store-write", daemon=True).start()
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        give_up()
        await asyncio.wait([done])
        done.exception()  # looked at, or asyncio would log it as forgotten
        raise
