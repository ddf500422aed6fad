"""The store of one server: writes pushes in the background, the latest first.

Always true: a push never waits for the store; at most one push waits to be written, the latest; the
files of one that was taken stay until it is written, also when its trainer has ended; after
``max_failures`` failures in a row the store switches itself off and reports why; ``stop`` frees all
memory; no error of the store reaches the server.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from engines.process.background import Then, keep_task, keep_thread
from engines.process.locks import Hold
from engines.protocol.plain_text import describe
from rollout.config import WeightUpdate
from rollout.core.errors import WeightsUnavailable
from rollout.core.fanout import wait_all
from rollout.core.types import StoreStatus
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.routes.buffers import hold_pools
from rollout.weights.store.agents import Agents, StoreTerms
from rollout.weights.store.coordinator import Coordinator
from rollout.weights.store.delta_chain import DeltaChain
from rollout.weights.store.layout.commit import Write
from rollout.weights.store.layout.record import StoreRecord
from rollout.weights.store.node.writer import AGENT_ERRORS, TensorContent
from rollout.weights.store.push_reader import TrainerLeft, tensors_of

logger = logging.getLogger(__name__)

# Other processes have priority: nothing waits for the store.
_NICENESS = 10
_CLOSE_TIMEOUT_S = 20.0
# In the background; a push that misses it is not stored.
_WRITE_TIMEOUT_S = 600.0

T = TypeVar("T")


@dataclass(slots=True)
class _Outcomes:
    """What has become of the pushes that were offered.

    Attributes:
        num_failures: in a row.
        num_dropped: a later push came first.
        write_s: seconds of the last write that succeeded.
        reason: why the last write failed, or why the store is off.
    """

    max_failures: int
    kept: Write | None = None
    num_failures: int = 0
    num_dropped: int = 0
    write_s: float = 0.0
    reason: str = ""
    is_off: bool = False

    def succeeded(self, write: Write, elapsed_s: float) -> None:
        self.kept, self.write_s, self.num_failures, self.reason = write, elapsed_s, 0, ""
        logger.info("store: %s kept in %.2f s", write, elapsed_s)

    def failed(self, reason: str) -> None:
        self.num_failures += 1
        self.reason = reason
        logger.warning("store: %s", reason)
        if self.num_failures >= self.max_failures:
            self.switch_off(f"switched off after {self.num_failures} failures; last: {reason}")

    def trainer_left(self, push: WeightPush, error: TrainerLeft) -> None:
        """Its last push could not be read in time: no failure of the store."""
        stays = "no other is" if self.kept is None else f"version {self.kept.version} stays"
        self.reason = f"weight version {push.version} is not kept, {stays}: {describe(error)}"
        logger.warning("store: %s", self.reason)

    def switch_off(self, reason: str) -> None:
        self.is_off, self.reason = True, reason
        logger.error("store: %s", reason)


@dataclass(frozen=True, slots=True)
class _Taken:
    """A push with the folders that its files are in, which do not go with its trainer."""

    push: WeightPush
    holds: Sequence[Hold]

    @classmethod
    def of(cls, push: WeightPush) -> _Taken:
        paths = [
            bucket["path"]
            for bucket in push.buckets
            if isinstance(bucket, Mapping) and "path" in bucket
        ]
        return cls(push, hold_pools(paths))

    def release(self) -> None:
        for hold in self.holds:
            hold.release()


class WeightStore:
    """Keeps what a server has published.

    Args:
        update: the contents of a push that does not declare them.
    """

    def __init__(
        self, terms: StoreTerms, agents: Agents, update: WeightUpdate = WeightUpdate.FULL
    ) -> None:
        self._update = update
        self._terms = terms
        self._agents = agents
        self._coordinator: Coordinator | None = None
        self._next: _Taken | None = None
        self._dropped: list[_Taken] = []
        self._chain = DeltaChain()
        self._reads: int | None = None
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self._outcomes = _Outcomes(terms.config.max_failures)

    # -- start and stop ---------------------------------------------------------------------

    async def start(self) -> None:
        """Start to write the offered pushes."""
        if self._task is not None:
            return
        try:
            self._coordinator = await asyncio.to_thread(self._terms.coordinator, self._agents)
        except AGENT_ERRORS as error:
            self._outcomes.switch_off(f"could not begin: {describe(error)}")
            return
        self._task = keep_task(self._write_offered, "store:write", Then.STARTS_AGAIN)

    async def stop(self) -> None:
        """Stop, and free the memory on every reachable node."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await wait_all([task])
        self._drop()
        await self._release_dropped()
        if self._coordinator is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await asyncio.to_thread(self._coordinator.close)
        except Exception as error:  # the agents end with the server
            logger.error("store: its memory is freed when its agents end: %s", describe(error))

    # -- pushes ----------------------------------------------------------------------------

    def offer(self, push: WeightPush) -> None:
        """Write this push when the store is free, unless a later one comes first.

        Partial pushes and adapters are ignored: the store keeps full weights.  So are pushes whose
        buckets are gone or have payloads by name: the trainer offers copies of them.
        """
        is_whole = push.contents_under(self._update) is WeightUpdate.FULL and not push.routes
        if self._outcomes.is_off or self._task is None or not is_whole or not push.buckets:
            return
        if self._drop():
            self._outcomes.num_dropped += 1
        self._next, self._chain = _Taken.of(push), self._chain.then(push)
        self._idle.clear()
        self._wake.set()

    def make_way(self) -> int | None:
        """A later push begins: drop the one that waits.  Returns the version that is read now."""
        if self._drop():
            self._outcomes.num_dropped += 1
            self._wake.set()
        return self._reads

    def _drop(self) -> bool:
        """Do not write the push that waits; whether there was one."""
        if self._next is None:
            return False
        self._dropped.append(self._next)
        self._next = None
        return True

    async def _release_dropped(self) -> None:
        """Leave their files to their trainers, or remove them: which may take long."""
        while self._dropped:
            await asyncio.to_thread(self._dropped.pop().release)

    async def why_not_kept(self, version: int, timeout_s: float) -> str:
        """Why the last write has failed, or is late.

        Args:
            timeout_s: how long a write of this version, which waits or has begun, is awaited.
        """
        waiting = None if self._next is None else self._next.push.version
        if version in (self._reads, waiting):
            try:
                async with asyncio.timeout(timeout_s):
                    await self.is_idle()
            except TimeoutError:
                return f"the store still writes it after {timeout_s:g} s"
        done = self._outcomes
        return "" if done.kept is not None and done.kept.version == version else done.reason

    async def is_idle(self) -> None:
        """Returns when no push is being written or waits."""
        await self._idle.wait()

    async def _write_offered(self) -> None:
        self._wake.set()  # a push may wait since an error ended this
        while True:
            await self._wake.wait()
            self._wake.clear()
            taken, self._next = self._next, None
            if taken is not None:
                self._dropped.append(taken)
                await self._write(taken.push)
            await self._release_dropped()
            if self._next is None:
                self._idle.set()

    async def _write(self, push: WeightPush) -> None:
        started = asyncio.get_running_loop().time()
        limit = asyncio.timeout(_WRITE_TIMEOUT_S)
        self._reads = push.version
        try:
            async with limit:
                record = await self._in_thread(push)
        except TrainerLeft as error:
            self._outcomes.trainer_left(push, error)
            self._chain = DeltaChain()
            return
        except Exception as error:  # it must not reach the server
            why = (
                f"it took longer than {_WRITE_TIMEOUT_S:g} s"
                if limit.expired()
                else describe(error)
            )
            self._outcomes.failed(f"weight version {push.version} is not kept: {why}")
            self._chain = DeltaChain()
            if self._outcomes.is_off:
                self._drop()
            return
        finally:
            self._reads = None
        self._chain = self._chain.since(push.version)
        self._outcomes.succeeded(record.write, asyncio.get_running_loop().time() - started)

    async def _in_thread(self, push: WeightPush) -> StoreRecord:
        """Write in a thread, because it blocks; buckets are awaited on this loop."""
        assert self._coordinator is not None
        coordinator = self._coordinator
        buckets = _AwaitedBuckets(push.buckets, asyncio.get_running_loop())
        fingerprints, chain = push.manifest.fingerprints, self._chain

        def write() -> StoreRecord:
            with suppress(OSError):  # of this thread alone, on Linux
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
            return coordinator.write(
                push.version, push.manifest, buckets.one_by_one(), fingerprints, chain.after
            )

        return await _in_own_thread(write, buckets.give_up)

    # -- status ------------------------------------------------------------------------------

    async def status(self) -> StoreStatus:
        """State of the store, with the bytes on each node."""
        nodes: dict[str, int] = {}
        if self._coordinator is not None and self._task is not None:
            try:
                nodes = await asyncio.to_thread(self._coordinator.num_bytes)
            except Exception as error:  # it must not reach the server
                logger.warning("store: its bytes are not known: %s", describe(error))
        done = self._outcomes
        return StoreStatus(
            is_on=not done.is_off and self._task is not None,
            reason=done.reason,
            version=done.kept.version if done.kept else None,
            node_bytes=nodes,
            write_s=done.write_s,
            num_dropped=done.num_dropped,
            sent_bytes=self._coordinator.sent_bytes if self._coordinator else 0,
        )


class _AwaitedBuckets:
    """The buckets of a push for a thread, awaited one by one on the loop."""

    def __init__(self, buckets: Sequence[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._buckets = buckets
        self._loop = loop
        self._awaited: Future[Any] | None = None
        self._is_over = False

    def one_by_one(self) -> Iterator[Iterator[tuple[str, TensorContent]]]:
        if not self._buckets:
            raise WeightsUnavailable("this push has no copy of its tensors that could be kept")
        for bucket in self._buckets:
            yield self._tensors(self._ready(bucket))

    def _tensors(self, payload: Any) -> Iterator[tuple[str, TensorContent]]:
        for name, content in tensors_of(payload):
            self._check()
            yield name, content

    def _ready(self, bucket: Any) -> Any:
        if isinstance(bucket, bytes | Mapping):
            return bucket
        self._awaited = asyncio.run_coroutine_threadsafe(_await(bucket), self._loop)
        self._check()
        try:
            return self._awaited.result()
        except Exception as error:
            # Of Ray, which need not be installed: the object went with the process that made it.
            if type(error).__name__ == "OwnerDiedError":
                raise TrainerLeft("the trainer that pushed it has ended") from error
            raise

    def _check(self) -> None:
        if self._is_over:
            raise WeightsUnavailable("the write was cancelled")

    def give_up(self) -> None:
        """Make the thread end soon."""
        self._is_over = True
        if self._awaited is not None:
            self._awaited.cancel()


async def _await(bucket: Awaitable[Any]) -> Any:
    return await bucket


async def _in_own_thread(work: Callable[[], T], give_up: Callable[[], None]) -> T:
    """Run ``work`` in a new thread: a pool's thread would keep the niceness.

    When cancelled it waits for the thread to end, so that two writes never overlap.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            value = work()
        except StopIteration as error:  # a future of asyncio would never end by it
            loop.call_soon_threadsafe(done.set_exception, RuntimeError(repr(error)))
        except BaseException as error:
            loop.call_soon_threadsafe(done.set_exception, error)
        else:
            loop.call_soon_threadsafe(done.set_result, value)

    thread = keep_thread(run, "store-write", Then.IS_OVER)
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        give_up()
        await asyncio.to_thread(thread.join)
        await asyncio.wait([done])
        done.exception()  # retrieved, or asyncio would log it
        raise
