"""How the protocol of all ranks drives a push."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from engines.process.background import in_own_thread
from rollout.core.errors import RolloutError
from rollout.core.pending import Pending
from rollout.core.types import StepReport
from rollout.rules.lifecycle import Command
from rollout.weights.push.push import PushRequest
from rollout.weights.ranks.follower import Follower
from rollout.weights.ranks.leader import Leader
from rollout.weights.ranks.messages import (
    Fits,
    FreeMemory,
    MakeBucket,
    MemoryFreed,
    PushPlan,
    Ready,
    Share,
)
from rollout.weights.ranks.outgoing import BucketQueue, OfferedBucket
from rollout.weights.ranks.protocol import (
    AwaitEngines,
    Begin,
    Finish,
    Offer,
    Offload,
    Plan,
    Step,
    gather_timeout_s,
)
from rollout.weights.ranks.trainer_rank import ServerPort, TrainerRank
from rollout.weights.tensors.sources import Pairs

T = TypeVar("T")
logger = logging.getLogger(__name__)

_RECORD_S = _OFFER_S = 5.0


class RankPush:
    """One rank's part in a push of all ranks: a context manager, which frees what it holds.

    Args:
        before_kv: frees memory of this rank that the KV caches need.
        checks_path: the engines compare what they held before with what they get.
        timeout_s: for a rank that is silent; after a failure, for the server to end the push.

    Attributes:
        ready: the message with which it begins.

    Raises:
        WeightMismatch: it is an adapter, and no adapter of this server.
    """

    def __init__(
        self,
        rank: TrainerRank,
        server: ServerPort,
        request: PushRequest,
        *,
        before_kv: Callable[[], object] | None = None,
        checks_path: bool = False,
        timeout_s: float,
    ) -> None:
        contents = request.contents(rank.config.weights.update)
        self._follower = follower = Follower(rank, server, request, gather_timeout_s(timeout_s))
        self._leader = (
            None if rank.rank else Leader(server, follower, contents, may_stream=True, streams=True)
        )
        self._checks_path = checks_path
        self._server = server
        self._before_kv = before_kv
        self._timeout_s = timeout_s
        self._queue: BucketQueue[OfferedBucket] = BucketQueue()
        self._pairs: Pairs | None = None
        self._planning: Pending[PushPlan] | None = None
        self._pending: Pending[StepReport] | None = None
        self._verified: StepReport | None = None
        self._has_finished = False
        self.ready = follower.ready(has_before_kv=before_kv is not None)

    def do(self, step: Step) -> Any:
        """Carry out one step."""
        match step:
            case Plan(readies, timeout_s):
                return self._plan(readies, timeout_s)
            case PushPlan():
                self._follower.prepare(step)
                return Fits(self._follower.digests_of(step.compared))
            case Begin():
                return self._begin()
            case MakeBucket(index):
                return self._make(index)
            case Offer(_, shares):
                return self._offer(shares)
            case AwaitEngines(index, timeout_s):
                return self._await_engines(index, timeout_s)
            case FreeMemory():
                self._follower.run(self._before_kv)
                return MemoryFreed()
            case Finish():
                return self._finish()
        raise AssertionError(step)

    def close(self) -> None:
        """Free what the push holds, in any state."""
        self._pairs = None
        self._queue.close()
        self._follower.resources.close()

    def __enter__(self) -> RankPush:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def complete(self) -> None:
        """After the push: leave its figures to the timeline."""
        self._follower.shares.succeed()
        if self._leader is None:
            return
        recorded = self._leader.end.record()
        with suppress(Exception):  # the weights are pushed: it succeeds without its spans
            recorded.result(_RECORD_S)

    @property
    def _led(self) -> Leader:
        assert self._leader is not None
        return self._leader

    def _plan(self, readies: Sequence[Ready], timeout_s: float) -> PushPlan | None:
        """The plan, or None if the server has not answered yet."""
        if len(readies) == 1:
            return self._led.decide(readies)
        if self._planning is None:
            decide = partial(self._led.decide, readies)
            self._planning = Pending(in_own_thread(decide, "push-plan"))
        return reported(self._planning, timeout_s)

    def _make(self, index: int) -> Share:
        share, pairs = self._follower.make(index)
        if self._leader is not None:
            self._pairs = pairs
        return share

    def _offer(self, shares: Sequence[Share]) -> None:
        pairs, self._pairs = self._pairs, None
        assert pairs is not None
        if self._led.plan.is_copied:
            self._led.copy(shares, pairs)
        else:
            self._queue.put(self._led.join(shares, pairs))

    def _begin(self) -> None:
        leader = self._led
        plan = leader.plan
        # Before the next push, and after the stream is closed, which ends a push that has failed.
        self._follower.resources.callback(self._await_end)
        push = leader.copied_push() if plan.is_copied else leader.streamed_push(self._queue)
        until = (
            Command.VERIFY
            if plan.has_before_kv and not plan.is_serving
            else Command.CONTINUE_GENERATION
        )
        push = replace(push, checks_path=self._checks_path)
        pending = self._server.push(push, until)
        self._pending = pending.then(self._queue.close)

    def _await_engines(self, index: int | None, timeout_s: float) -> StepReport | bool | None:
        assert self._pending is not None
        figures = self._follower.figures
        if index is not None and self._queue.is_wanted(index, timeout_s):
            figures.wanted(time.monotonic())
            return True
        if index is None:
            self._queue.await_end(timeout_s)
        if not self._queue.is_over:
            return None
        report = reported(self._pending, timeout_s)
        if report is None:
            return None
        if index is not None:
            raise RolloutError(f"the server ended the push before bucket {index}: {report}")
        figures.wanted(self._queue.over_s)
        if self._has_finished or not self._led.plan.has_before_kv:
            self._offer_copies()
        if self._verified is not None:
            report = self._verified.merged(report)
        return replace(report, push_stages=figures.stages(self._led.end.routes))

    def _offer_copies(self) -> None:
        """Leave the copies of all ranks to the store, before a rank hears of the end: it may close
        its pusher then, and the store must hold its files before."""
        end = self._led.end
        try:
            offered = end.offer_copies()
            if offered is not None:
                offered.result(_OFFER_S)
        except (RolloutError, TimeoutError) as error:
            logger.warning("store: weight version %d is not kept: %s", end.version, error)

    def _finish(self) -> None:
        """Resume what waited until all ranks had freed memory."""
        assert self._pending is not None
        self._has_finished = True
        if not self._led.plan.is_serving:
            self._verified = self._pending.result(0)
            self._pending = self._server.serve()

    def _await_end(self) -> None:
        if self._pending is not None:
            with suppress(Exception):
                self._pending.result(self._timeout_s)


class RankOffload:
    """What rank 0 does in an offload by all ranks; the others only wait."""

    def __init__(self, begin: Callable[[], Pending[StepReport]]) -> None:
        self._begin = begin
        self._pending: Pending[StepReport] | None = None

    def do(self, step: Step) -> Any:
        """Carry out one step."""
        match step:
            case Offload():
                self._pending = self._begin()
                return None
            case AwaitEngines(_, timeout_s):
                assert self._pending is not None
                return reported(self._pending, timeout_s)
        raise AssertionError(step)


def reported(pending: Pending[T], timeout_s: float) -> T | None:
    """The result of a call, or None if there is none yet."""
    try:
        return pending.result(timeout_s)
    except TimeoutError:
        if pending.done():
            raise
        return None
