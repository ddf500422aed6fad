"""How a push is driven: by the protocol of all ranks, or by the stream of one process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import count
from typing import Any

from pydantic import TypeAdapter

from rollout.config import WeightsConfig, WeightUpdate
from rollout.core.errors import RolloutError, WeightMismatch
from rollout.core.pending import Pending
from rollout.core.types import StepReport
from rollout.rules.lifecycle import Command
from rollout.weights.push.weight_push import WeightPush, default_contents
from rollout.weights.ranks.follower import Follower
from rollout.weights.ranks.leader import Leader
from rollout.weights.ranks.messages import PushPlan, Ready, Share, decode, encode
from rollout.weights.ranks.outgoing import BucketHandover, OfferedBucket
from rollout.weights.ranks.protocol import (
    Answer,
    AwaitEngines,
    Begin,
    Broadcast,
    Finish,
    Make,
    Offer,
    Offload,
    Plan,
    Prepare,
    Step,
    TakeTurn,
)
from rollout.weights.ranks.trainer_rank import ServerPort, TrainerRank
from rollout.weights.routes.cuda_ipc import gpu_with
from rollout.weights.tensors.adapters import AdapterSource
from rollout.weights.tensors.push_plan import Dtype, NameMap
from rollout.weights.tensors.sources import (
    NamedTensors,
    Pairs,
    PlannedSource,
    StreamedSource,
    TensorList,
)

logger = logging.getLogger(__name__)

_REPORT = TypeAdapter(StepReport)
_RECORD_S = 5.0


def follower_of(
    rank: TrainerRank,
    server: ServerPort,
    named_tensors: NamedTensors,
    resources: ExitStack,
    *,
    name_map: NameMap | None = None,
    dtype: Dtype | None = None,
    adapter: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
) -> Follower:
    """The part of one rank in a push of these tensors.

    Args:
        adapter: of a LoRA adapter, its configuration.
        timeout_s: for each gather and broadcast with other ranks; None for a single process,
            which has no shards.
    """

    def open_source(tensors: TensorList | None) -> PlannedSource | StreamedSource:
        shared: Any = {"name_map": name_map, "dtype": dtype, "gather_timeout_s": timeout_s}
        planned: Any = {
            "tensors": tensors,
            "plans": rank.plans,
            "is_on_all_ranks": rank.num_ranks > 1,
            **shared,
        }
        if adapter is not None:
            kinds = {group.engine.kind for group in rank.config.groups.values()}
            return AdapterSource(
                named_tensors, adapter, base=server.expected, kinds=kinds, **planned
            )
        if isinstance(named_tensors, Iterator):
            return StreamedSource(named_tensors, expected=server.expected, **shared)
        return PlannedSource(named_tensors, expected=server.expected, **planned)

    return Follower(
        rank,
        server,
        open_source,
        resources,
        gpu=gpu_with(named_tensors),
        timeout_s=timeout_s or rank.config.weights.group_timeout_s,
    )


def contents_of(
    config: WeightsConfig, adapter: Mapping[str, Any] | None, *, is_base: bool
) -> WeightUpdate:
    """The part of the model that is pushed.

    Args:
        adapter: of a LoRA adapter, its configuration.
        is_base: all base weights, also where ``update`` is ``lora``.

    Raises:
        WeightMismatch: the server takes no adapters, or this is no adapter's configuration.
    """
    if adapter is None:
        return WeightUpdate.FULL if is_base else default_contents(config.update)
    if config.update is not WeightUpdate.LORA:
        raise WeightMismatch(f"weights.update is {config.update}: adapters need lora")
    if is_base or not isinstance(adapter, Mapping):
        found = "with is_base" if is_base else f"not {adapter!r:.80}"
        raise WeightMismatch(
            "an adapter's config is the mapping in adapter_config.json, or PEFT's "
            f"config.to_dict(), {found}"
        )
    return WeightUpdate.LORA


# -- one process ------------------------------------------------------------------------------


class LocalPush:
    """A push from one process, ready for its server.

    Attributes:
        push: what the server gets.
    """

    def __init__(
        self,
        rank: TrainerRank,
        server: ServerPort,
        named_tensors: NamedTensors,
        version: int | None,
        *,
        name_map: NameMap | None = None,
        adapter: Mapping[str, Any] | None = None,
        is_base: bool = False,
        may_stream: bool,
    ) -> None:
        contents = contents_of(rank.config.weights, adapter, is_base=is_base)
        if isinstance(named_tensors, Iterator):
            named_tensors = list(named_tensors)
        self._server = server
        self._resources = ExitStack()
        follower = follower_of(
            rank, server, named_tensors, self._resources, name_map=name_map, adapter=adapter
        )
        streams = may_stream and rank.config.weights.stream
        self._leader = Leader(server, follower, contents, may_stream=may_stream, streams=streams)
        try:
            plan = self._leader.decide([follower.ready(version)])
            follower.prepare(plan)
            self.push = self._copied() if plan.is_copied else self._streamed()
        except BaseException:
            self.close()
            raise

    def _copied(self) -> WeightPush:
        follower = self._leader.follower
        for index in count():
            share, pairs = follower.make(index)
            self._leader.copy([share], pairs)
            del pairs
            if share.is_last:
                break
        return self._leader.copied_push()

    def _streamed(self) -> WeightPush:
        return self._leader.streamed_push(_made(self._leader))

    def close(self) -> None:
        """Free what it holds in this process, in any state."""
        self._resources.close()

    def ended(self, pending: Pending[StepReport]) -> None:
        """Its call has ended."""
        self.close()
        if self._leader.kept is not None:
            with suppress(Exception):  # a failed push is not kept
                pending.result(0)
                if (push := self._leader.kept.push(self.push.version)) is not None:
                    self._server.offer_to_store(push)


def _made(leader: Leader) -> Iterator[OfferedBucket]:
    """The buckets of one process, each made when the stream asks for it."""
    for index in count():
        share, pairs = leader.follower.make(index)
        bucket = leader.join([share], pairs)
        del pairs
        yield bucket
        del bucket
        if share.is_last:
            return


# -- all ranks --------------------------------------------------------------------------------


class RankPush:
    """What one rank does in a push of all ranks, besides exchanging messages.

    Args:
        leader: on rank 0.
        with_expected: adds the log-probs that the engines are compared with.
        checks_path: the engines compare what they held before with what they get.
        timeout_s: after a failure, for the server to end the push.
    """

    def __init__(
        self,
        follower: Follower,
        server: ServerPort,
        before_kv: Callable[[], object] | None,
        leader: Leader | None,
        with_expected: Callable[[WeightPush], WeightPush],
        timeout_s: float,
        *,
        checks_path: bool = False,
    ) -> None:
        self._follower = follower
        self._checks_path = checks_path
        self._server = server
        self._before_kv = before_kv
        self._leader = leader
        self._with_expected = with_expected
        self._timeout_s = timeout_s
        self._handover: BucketHandover[OfferedBucket] = BucketHandover()
        self._pairs: Pairs | None = None
        self._pending: Pending[StepReport] | None = None
        self._verified: StepReport | None = None

    def do(self, step: Step) -> Any:
        """Carry out one step."""
        match step:
            case Plan(words):
                return encode(self._led.decide([decode(Ready, word) for word in words]))
            case Prepare(plan):
                self._follower.prepare(decode(PushPlan, plan))
                return {}
            case Begin():
                return self._begin()
            case Make(index):
                return self._make(index)
            case Offer(_, words):
                return self._offer([decode(Share, word) for word in words])
            case AwaitEngines(index, timeout_s):
                return self._await_engines(index, timeout_s)
            case Broadcast(task):
                sender = self._follower.sender
                return {} if sender is None else sender.carry_out(task)
            case Answer(words):
                return self._handover.answer(words)
            case TakeTurn():
                self._follower.run(self._before_kv)
                return {}
            case Finish():
                return self._finish()
        raise AssertionError(step)

    def close(self) -> None:
        """Free what the push holds, also after a failure."""
        self._pairs = None
        self._handover.close()
        self._follower.resources.close()

    def keep(self) -> None:
        """After the push: leave this rank's copies to the store, and figures to the timeline."""
        self._follower.keep()
        if self._leader is None:
            return
        version, kept = self._leader.plan.terms.version, self._leader.kept
        if kept is not None and (push := kept.push(version)) is not None:
            try:
                self._server.offer_to_store(push).result()
            except RolloutError as error:
                logger.warning("store: weight version %d is not kept: %s", version, error)
        recorded = self._server.record_push(self._follower.figures.spans(version))
        with suppress(Exception):  # the weights are pushed: it succeeds without its spans
            recorded.result(_RECORD_S)

    @property
    def _led(self) -> Leader:
        assert self._leader is not None
        return self._leader

    def _make(self, index: int) -> Mapping[str, Any]:
        share, pairs = self._follower.make(index)
        if self._leader is not None:
            self._pairs = pairs
        return encode(share)

    def _offer(self, shares: Sequence[Share]) -> None:
        pairs, self._pairs = self._pairs, None
        assert pairs is not None
        if self._led.plan.is_copied:
            self._led.copy(shares, pairs)
        else:
            self._handover.put(self._led.join(shares, pairs))

    def _begin(self) -> None:
        leader = self._led
        plan = leader.plan
        # Before the next push, and after the stream is closed, which ends a push that has failed.
        self._follower.resources.callback(self._await_end)
        push = leader.copied_push() if plan.is_copied else leader.streamed_push(self._handover)
        push = replace(self._with_expected(push), checks_path=self._checks_path)
        until = Command.VERIFY if plan.has_turn and not plan.is_serving else Command.CONTINUE
        pending = self._server.serve_weights(push, until)
        self._pending = pending.then(self._handover.close)

    def _await_engines(self, index: int | None, timeout_s: float) -> Mapping[str, Any] | None:
        assert self._pending is not None
        figures = self._follower.figures
        if index is not None and self._handover.is_wanted(index, timeout_s):
            figures.wanted(time.monotonic())
            return {}
        if index is None:
            self._handover.await_end(timeout_s)
        if (task := self._handover.take_task()) is not None:
            return {"broadcast": task}
        if not self._handover.is_over:
            return None
        report = reported(self._pending, timeout_s)
        if report is None:
            return None
        if index is not None:
            raise RolloutError(f"the server ended the push before bucket {index}: {report}")
        figures.wanted(self._handover.over_s)
        if self._verified is not None:
            report = self._verified.merged(report)
        routes = "+".join(sorted({one.transport for one in self._led.plan.routes}))
        return word_of(replace(report, push_stages=figures.stages(routes)))

    def _finish(self) -> None:
        """Resume what waited until all ranks had freed memory."""
        assert self._pending is not None
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
                report = reported(self._pending, timeout_s)
                return None if report is None else word_of(report)
        raise AssertionError(step)


def reported(pending: Pending[StepReport], timeout_s: float) -> StepReport | None:
    """The report of a call; None if there is none yet."""
    try:
        return pending.result(timeout_s)
    except TimeoutError:
        if pending.done():
            raise
        return None


def word_of(report: StepReport) -> dict[str, Any]:
    """A report for the other ranks."""
    word: dict[str, Any] = _REPORT.dump_python(report, mode="json")
    return word


def report_of(word: Mapping[str, Any]) -> StepReport:
    """The report of ``word_of``."""
    return _REPORT.validate_python(word)
