"""The messages of a push's ranks, in virtual time: faults at every step of every rank.

A simulated collective ends when all ranks have joined it, or fails for all when one has died.  A
rank waits in it as long as ``gather_timeout_s`` says; one that joins later finds its peers.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest

from rollout.config import WeightUpdate
from rollout.core.errors import RankFailure, RolloutError, WeightMismatch
from rollout.core.types import StepReport
from rollout.weights.ranks.delivery import Delivery
from rollout.weights.ranks.link import RankLink
from rollout.weights.ranks.messages import (
    EnginesNotNeeded,
    ErrorText,
    Failed,
    Fits,
    FreeMemory,
    MakeBucket,
    MemoryFreed,
    Message,
    PushPlan,
    Ready,
    Share,
)
from rollout.weights.ranks.protocol import (
    AwaitEngines,
    Begin,
    Claim,
    Delete,
    Finish,
    Get,
    Offer,
    Offload,
    Plan,
    PushRound,
    Put,
    Steps,
    gather_timeout_s,
)
from rollout.weights.routes.route import PushTerms
from tests.support.thread_ranks import Messages

TIMEOUT_S = 30.0
NUM_BUCKETS = 3
GATHER_S = 0.5
APPLY_S = 2.0
TURN_S = 3.0
REPORT = StepReport(weight_version=7)


def ready(rank: int, *, has_before_kv: bool = False) -> Ready:
    return Ready("", None, has_before_kv, f"node {rank}", "", 1 << 30)


def plan(**more: Any) -> PushPlan:
    decided: dict[str, Any] = {
        "from_iterator": False,
        "delivery": Delivery.STREAMED,
        "has_before_kv": False,
        **more,
    }
    return PushPlan(
        PushTerms(1),
        WeightUpdate.FULL,
        is_serving=False,
        routes=(),
        bucket_bytes=1,
        **decided,
    )


class Died(Exception):
    """The end of a simulated process."""


@dataclass
class Fault:
    """What happens to one rank before its step number ``step``."""

    rank: int
    step: int
    kind: str
    late_s: float = 0.0


@dataclass
class Rank:
    number: int
    steps: Steps[StepReport]
    num_steps: int = 0
    result: Any = None
    ended_s: float | None = None
    has_died: bool = False


@dataclass
class World:
    """All ranks of one push, the store between them, and the engines behind rank 0."""

    num_ranks: int
    fault: Fault | None = None
    engine_error: tuple[str, RolloutError] | None = None
    apply_s: float = APPLY_S
    has_before_kv: bool = True
    had_turn: set[int] = field(default_factory=set)
    failed_turn: bool = False
    has_finished: bool = False
    is_streamed: bool = False
    # All buckets are made before the engines are called.
    is_copied: bool = False
    # When a rank shows that it has other values than the others, and which.
    shows_odd: str = ""
    odd_rank: int = -1
    call: str = "push"
    order: list[str] = field(default_factory=list)
    messages: dict[str, Message] = field(default_factory=dict)
    # Of the server, before it answers rank 0.
    plan_s: float = 0.2
    waiting: dict[int, tuple[Get, float]] = field(default_factory=dict)
    gathering: dict[int, tuple[int, float]] = field(default_factory=dict)
    joined: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    applied_s: list[float] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self._queue: list[tuple[float, int, int, Any]] = []
        self._order = itertools.count()
        self._planned_s = 0.0
        self.rounds = [
            PushRound("p", rank, self.num_ranks, TIMEOUT_S, self.call)
            for rank in range(self.num_ranks)
        ]
        self.ranks = [
            Rank(rank, (one.follow if rank else one.lead)(self._first(rank)))
            for rank, one in enumerate(self.rounds)
        ]

    def _first(self, rank: int) -> Ready | EnginesNotNeeded:
        return ready(rank) if self.call == "push" else EnginesNotNeeded()

    def run(self) -> None:
        for rank in self.ranks:
            self._later(0.0, rank, None)
        while self._queue:
            self.now, _, number, value = heapq.heappop(self._queue)
            if not callable(value):
                self._resume(self.ranks[number], value)
            elif (result := value()) is not _STILL:
                self._resume(self.ranks[number], result)
        assert not self.waiting
        assert not self.gathering

    def _later(self, seconds: float, rank: Rank, value: Any) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), rank.number, value))

    def _resume(self, rank: Rank, value: Any) -> None:
        if rank.has_died or rank.ended_s is not None:
            return
        try:
            if isinstance(value, BaseException):
                step = rank.steps.throw(value)
            else:
                step = rank.steps.send(value)
        except StopIteration as ended:
            rank.result, rank.ended_s = ended.value, self.now
            return
        except RolloutError as error:
            rank.result, rank.ended_s = error, self.now
            return
        rank.num_steps += 1
        fault = self.fault
        if fault is not None and (fault.rank, fault.step) == (rank.number, rank.num_steps):
            if fault.kind == "dies":
                self._die(rank)
                return
            if fault.kind == "late":
                self._later(fault.late_s, rank, lambda: self._begin(rank, step))
                return
            if fault.kind == "raises" and isinstance(step, PushPlan | FreeMemory):
                self.failed_turn = isinstance(step, FreeMemory)
                self._later(0.1, rank, ValueError("a bad name map"))
                return
            if fault.kind == "raises" and isinstance(step, MakeBucket):
                # Its own code, after the collective.
                self._gather(rank, step, ValueError("a bad name map"))
                return
        if self._begin(rank, step) is not _STILL:
            raise AssertionError(step)

    def _die(self, rank: Rank) -> None:
        rank.has_died = True
        # A backend that notices: gloo.
        for number in list(self.gathering):
            del self.gathering[number]
            self._later(0.1, self.ranks[number], RuntimeError("connection closed by peer"))
        if rank.number == 0:
            for number in list(self.waiting):
                del self.waiting[number]
                self._later(0.0, self.ranks[number], RankFailure("rank 0 has ended", ranks=(0,)))

    def _begin(self, rank: Rank, step: Any) -> Any:
        leader_has_died = self.ranks[0].has_died
        match step:
            case Put() | Claim() | Get() if leader_has_died:
                self._later(0.0, rank, RankFailure("rank 0 has ended", ranks=(0,)))
            case Put(key, message) | Claim(key, message):
                stored = self.messages.get(key, message) if isinstance(step, Claim) else message
                self.messages[key] = stored
                self._later(0.001, rank, stored)
                for number, (get, _) in list(self.waiting.items()):
                    if all(wanted in self.messages for wanted in get.keys):
                        del self.waiting[number]
                        self._later(
                            0.001,
                            self.ranks[number],
                            [self.messages[wanted] for wanted in get.keys],
                        )
            case Get(keys, timeout_s):
                if all(key in self.messages for key in keys):
                    self._later(0.001, rank, [self.messages[key] for key in keys])
                else:
                    entry = (step, self.now)
                    self.waiting[rank.number] = entry
                    self._later(timeout_s, rank, lambda: self._timed_out(rank, entry))
            case Delete(keys):
                for key in keys:
                    self.messages.pop(key, None)
                self._later(0.0, rank, None)
            case MakeBucket():
                self._gather(rank, step)
            case PushPlan():
                self._later(0.1, rank, Fits(self._digests(rank.number, "plan")))
            case FreeMemory():
                assert len(self.applied_s) == NUM_BUCKETS
                assert self.applied_s[-1] <= self.now, "before the weights are verified"
                self.had_turn.add(rank.number)
                self._later(TURN_S, rank, MemoryFreed())
            case Finish():
                assert len(self.had_turn) == self.num_ranks, "a rank still holds the memory"
                self.has_finished = True
                self._later(0.1, rank, self._engines_say("finish"))
            case Offload():
                assert len(self.messages.keys() & {"p/0/1", "p/0/2"}) == 0, "they were read"
                self.order.append("offload")
                self.applied_s.append(self.now + self.apply_s)
                self._later(0.1, rank, self._engines_say("begin"))
            case Begin():
                self.order.append("begin")
                self._later(0.1, rank, self._engines_say("begin"))
            case Plan(readies, timeout_s):
                assert [one.node for one in readies] == [f"node {n}" for n in self._numbers]
                self._planned_s = self._planned_s or self.now + self.plan_s
                made = plan(
                    from_iterator=self.is_streamed,
                    delivery=Delivery.COPIED if self.is_copied else Delivery.STREAMED,
                    has_before_kv=self.has_before_kv,
                )
                is_late = self._planned_s > self.now + timeout_s
                left_s = timeout_s if is_late else max(0.0, self._planned_s - self.now)
                self._later(left_s, rank, None if is_late else self._engines_say("plan") or made)
            case Offer(index, shares):
                assert [share.num_bytes for share in shares] == self._numbers
                assert index == len(self.applied_s)
                self.applied_s.append(self.now + self.apply_s)
                self._later(0.0, rank, self._engines_say(f"offer {index}"))
            case AwaitEngines(index, timeout_s):
                error = self._engines_say("end" if index is None else f"await {index}")
                done = {None: self.applied_s[-1:], 0: [], 1: []}.get(
                    index, self.applied_s[: (index or 0) - 1][-1:]
                )
                ready_s = max(0.0, *(at - self.now for at in done)) if done else 0.0
                if ready_s <= timeout_s:
                    self._later(ready_s, rank, error or (REPORT if index is None else True))
                else:
                    self._later(timeout_s, rank, None)
        return _STILL

    def _timed_out(self, rank: Rank, entry: tuple[Get, float]) -> Any:
        if self.waiting.get(rank.number) is not entry:
            return _STILL
        del self.waiting[rank.number]
        return [self.messages.get(key) for key in entry[0].keys]

    @property
    def _numbers(self) -> list[int]:
        return list(range(self.num_ranks))

    def _gather(self, rank: Rank, step: MakeBucket, error: Exception | None = None) -> None:
        if any(other.has_died for other in self.ranks):
            self._later(0.1, rank, RuntimeError("connection closed by peer"))
            return
        entry = self.gathering[rank.number] = step.index, self.now
        self.joined[step.index].add(rank.number)
        self.order.append(f"bucket {step.index}")
        rank.result = error
        self._later(gather_timeout_s(TIMEOUT_S), rank, lambda: self._gather_late(rank, entry))
        if len(self.joined[step.index]) == self.num_ranks:
            assert len({index for index, _ in self.gathering.values()}) == 1
            for number in self.gathering:
                own = self.ranks[number].result
                digests = self._digests(number, f"bucket {step.index}")
                share = Share("", step.index == NUM_BUCKETS - 1, num_bytes=number, digests=digests)
                self._later(GATHER_S, self.ranks[number], own or share)
            self.gathering.clear()

    def _digests(self, number: int, when: str) -> dict[str, str]:
        is_odd = (self.shows_odd, self.odd_rank) == (when, number)
        return {f"{when}'s": "sums:other" if is_odd else "sums:same"}

    def _gather_late(self, rank: Rank, entry: tuple[int, float]) -> Any:
        if self.gathering.get(rank.number) is not entry:
            return _STILL
        del self.gathering[rank.number]
        return TimeoutError("a gather was not done")

    def _engines_say(self, when: str) -> RolloutError | None:
        return self.engine_error[1] if self.engine_error and self.engine_error[0] == when else None


_STILL = object()


def results(world: World) -> list[Any]:
    """The same text for the same report or error, of the ranks that live."""
    return [
        f"{type(rank.result).__name__}: {rank.result}"
        if isinstance(rank.result, Exception)
        else rank.result
        for rank in world.ranks
        if not rank.has_died
    ]


def check(world: World, within_s: float) -> None:
    """All ranks that live have ended in time, with one result."""
    for rank in world.ranks:
        assert rank.has_died or rank.ended_s is not None, f"rank {rank.number} waits for ever"
        assert rank.has_died or (rank.ended_s is not None and rank.ended_s <= within_s), (
            rank.number,
            rank.ended_s,
        )
    assert len({str(result) for result in results(world)}) == 1, results(world)


def undisturbed(num_ranks: int, call: str = "push") -> World:
    world = World(num_ranks, call=call)
    world.run()
    return world


@pytest.mark.parametrize("has_before_kv", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_push_without_faults_ends_with_the_report_on_all_ranks(
    num_ranks: int, has_before_kv: bool
) -> None:
    world = World(num_ranks, has_before_kv=has_before_kv)
    world.run()
    assert world.had_turn == (set(range(num_ranks)) if has_before_kv else set())
    assert world.has_finished is has_before_kv
    check(world, within_s=20)
    assert results(world) == [REPORT] * num_ranks
    left = {key for one in world.rounds[:1] for key in one.keys_left()}
    assert world.messages.keys() <= left


@pytest.mark.parametrize("is_streamed", [False, True])
def test_only_a_generators_first_bucket_is_made_before_the_push_begins(is_streamed: bool) -> None:
    world = World(2, is_streamed=is_streamed)
    world.run()
    check(world, within_s=20)
    before = world.order[: world.order.index("begin")]
    assert before == (["bucket 0"] * 2 if is_streamed else [])


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("shows_odd", ["plan", "bucket 0", "bucket 1"])
@pytest.mark.parametrize("odd_rank", range(3))
def test_a_replica_out_of_step_ends_the_push_on_all_ranks(
    odd_rank: int, shows_odd: str, is_streamed: bool
) -> None:
    world = World(3, shows_odd=shows_odd, odd_rank=odd_rank, is_streamed=is_streamed)
    world.run()
    check(world, within_s=20)
    others = ", ".join(str(rank) for rank in range(3) if rank != odd_rank)
    message = f'rank {odd_rank} has other values of tensor "{shows_odd}\'s" than rank {others}:'
    assert {type(rank.result) for rank in world.ranks} == {WeightMismatch}
    assert message in str(world.ranks[0].result)
    # No bucket with it reaches an engine, and none at all where it is known before.
    num_given = max(0, int(shows_odd.removeprefix("bucket ") or 0)) if "bucket" in shows_odd else 0
    assert len(world.applied_s) <= num_given
    if shows_odd == "plan" or (is_streamed and shows_odd == "bucket 0"):
        assert "begin" not in world.order


def copied(num_ranks: int, fault: Fault | None = None, *, is_streamed: bool = False) -> World:
    world = World(num_ranks, fault, is_streamed=is_streamed, is_copied=True)
    world.run()
    return world


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_all_buckets_of_a_copied_push_are_made_before_the_push_begins(
    num_ranks: int, is_streamed: bool
) -> None:
    world = copied(num_ranks, is_streamed=is_streamed)
    check(world, within_s=20)
    assert results(world) == [REPORT] * num_ranks
    made = [f"bucket {index}" for index in range(NUM_BUCKETS) for _ in range(num_ranks)]
    assert world.order == [*made, "begin"]
    assert world.had_turn == set(range(num_ranks))


@pytest.mark.parametrize("kind", ["dies", "raises"])
@pytest.mark.parametrize("rank", range(3))
def test_a_copied_push_that_loses_a_rank_ends_on_all_others(rank: int, kind: str) -> None:
    for step in range(1, copied(3).ranks[rank].num_steps + 1):
        world = copied(3, Fault(rank, step, kind))
        check(world, within_s=20 + TIMEOUT_S)
        for result in results(world):
            assert result == REPORT or "rank" in str(result), step


def faults(kind: str, late_s: float = 0.0, call: str = "push") -> list[Fault]:
    return [
        Fault(rank.number, step, kind, late_s)
        for rank in undisturbed(3, call).ranks
        for step in range(1, rank.num_steps + 1)
    ]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("fault", faults("dies"), ids=str)
def test_a_rank_that_dies_anywhere_ends_the_push_on_all_others(
    fault: Fault, is_streamed: bool
) -> None:
    world = World(3, fault, is_streamed=is_streamed)
    world.run()
    check(world, within_s=20 + TIMEOUT_S)
    for result in results(world):
        assert result == REPORT or "rank" in str(result)
    if fault.rank == 0:
        assert all("rank 0" in str(result) or result == REPORT for result in results(world))


@pytest.mark.parametrize("fault", faults("late", 15.0), ids=str)
def test_a_rank_that_is_late_but_in_time_ends_no_push(fault: Fault) -> None:
    world = World(3, fault)
    world.run()
    check(world, within_s=40)
    assert results(world) == [REPORT] * 3


@pytest.mark.parametrize("fault", faults("late", 200.0), ids=str)
def test_a_rank_that_is_too_late_gets_the_error_of_the_others(fault: Fault) -> None:
    world = World(3, fault)
    world.run()
    late = world.ranks[fault.rank]
    assert late.ended_s is not None
    # The others do not wait for it, also not in a gather.
    assert all(one.ended_s and one.ended_s <= 20 + TIMEOUT_S for one in world.ranks if one != late)
    texts = {str(result) for result in results(world)}
    assert all(f"rank {fault.rank}" in text or text == str(REPORT) for text in texts), texts


@pytest.mark.parametrize("fault", faults("raises"), ids=str)
def test_a_rank_whose_code_raises_is_named_on_all_ranks(fault: Fault) -> None:
    world = World(3, fault)
    world.run()
    check(world, within_s=20)
    assert not (world.failed_turn and world.has_finished), "the KV caches were resumed all the same"
    if not any(result == REPORT for result in results(world)):
        assert all("a bad name map" in str(result) for result in results(world))


@pytest.mark.parametrize(
    "when", ["plan", "begin", "await 0", "await 1", "await 2", "offer 1", "end", "finish"]
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_error_of_the_engines_reaches_all_ranks(when: str, is_streamed: bool) -> None:
    error = WeightMismatch("tensor 'a' has shape [2]", tensor="a")
    world = World(3, engine_error=(when, error), is_streamed=is_streamed)
    world.run()
    check(world, within_s=20)
    assert all("tensor 'a' has shape [2]" in str(result) for result in results(world))
    assert all(rank.result.tensor == "a" for rank in world.ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_an_offload_ends_with_the_report_on_all_ranks(num_ranks: int) -> None:
    world = undisturbed(num_ranks, "offload")
    check(world, within_s=5)
    assert world.order == ["offload"]
    assert results(world) == [REPORT] * num_ranks


@pytest.mark.parametrize("fault", faults("dies", call="offload"), ids=str)
def test_a_rank_that_dies_ends_the_offload_on_all_others(fault: Fault) -> None:
    world = World(3, fault, call="offload")
    world.run()
    check(world, within_s=5 + TIMEOUT_S)
    for result in results(world):
        assert result == REPORT or f"rank {fault.rank}" in str(result)
    if fault.rank and fault.step == 1:
        assert not world.order, "that rank had not called it, and may have needed the engines"


@pytest.mark.parametrize("fault", faults("late", 200.0, "offload"), ids=str)
def test_a_rank_that_is_late_for_an_offload_is_named_on_all(fault: Fault) -> None:
    world = World(3, fault, call="offload")
    world.run()
    for rank in world.ranks:
        assert rank.ended_s is not None
        assert rank.number == fault.rank or rank.ended_s <= 5 + TIMEOUT_S
    texts = {str(result) for result in results(world)}
    assert all(f"rank {fault.rank}" in text or text == str(REPORT) for text in texts), texts
    if fault.rank and fault.step == 1:
        assert not world.order
        assert all("did not call offload" in text for text in texts), texts


@pytest.mark.parametrize("when", ["begin", "end"])
def test_an_error_of_an_offload_reaches_all_ranks(when: str) -> None:
    error = WeightMismatch("no backup", tensor="a")
    world = World(3, engine_error=(when, error), call="offload")
    world.run()
    check(world, within_s=5)
    assert all("no backup" in str(result) for result in results(world))


@pytest.mark.parametrize("call", ["push", "offload"])
def test_slow_engines_hold_all_ranks_without_an_error(call: str) -> None:
    world = World(3, apply_s=20 * TIMEOUT_S, call=call)
    world.run()
    assert results(world) == [REPORT] * 3


def test_a_server_that_answers_late_holds_all_ranks_without_an_error() -> None:
    world = World(3, plan_s=20 * TIMEOUT_S)
    world.run()
    assert results(world) == [REPORT] * 3


def test_the_error_of_a_single_rank_is_its_own() -> None:
    world = World(1, Fault(0, 5, "raises"))
    with pytest.raises(ValueError, match=r"^a bad name map$"):
        world.run()


def test_an_error_keeps_its_type_and_fields() -> None:
    error = ErrorText.of(WeightMismatch("no", tensor="w", engine_id="e"), "rank 3: ").error()
    assert (type(error), str(error), error.tensor) == (WeightMismatch, "rank 3: no", "w")  # type: ignore[attr-defined]
    foreign = ErrorText.of(KeyError("x"), "rank 1: ").error()
    assert isinstance(foreign, RankFailure)
    assert str(foreign).startswith("rank 1: KeyError")


def test_a_rank_that_has_failed_stops_a_silent_rank_0_with_its_own_error() -> None:
    """Rank 0 waits for it in a gather, so that it says nothing."""
    steps = PushRound("p", 1, 2, TIMEOUT_S).follow(ready(1))
    assert isinstance(next(steps), Put)
    assert isinstance(steps.send(None), Get)
    assert isinstance(steps.send([plan()]), PushPlan)
    assert isinstance(steps.send(Fits()), Put)
    assert isinstance(steps.send(None), Get)
    assert isinstance(steps.send([MakeBucket(0)]), MakeBucket)
    assert isinstance(steps.throw(ValueError("no weights")), Put)
    assert isinstance(steps.send(None), Get)
    claim = steps.send([None])
    assert isinstance(claim, Claim)
    with pytest.raises(RankFailure, match=r"^rank 1: ValueError: no weights"):
        steps.send(claim.message)


def test_a_broken_connection_shortens_the_wait_for_the_rank_that_has_ended() -> None:
    """Ranks 0 and 1 lose rank 2 in a gather; it reports nothing."""
    steps = PushRound("p", 0, 3, TIMEOUT_S)._collect(
        Failed(ErrorText("RankFailure", "lost"), has_lost_rank=True), "bucket 0"
    )
    get = next(steps)
    assert isinstance(get, Get)
    assert get.timeout_s == TIMEOUT_S / 4
    lost = Failed(ErrorText("RankFailure", "rank 1: Connection reset by peer"), has_lost_rank=True)
    claim = steps.send([lost, None])
    assert isinstance(claim, Claim)
    with pytest.raises(RankFailure, match=r"^rank 2 did not report bucket 0 .*rank 1: Connection"):
        steps.send(claim.message)


def test_an_error_of_gloo_about_a_lost_rank_is_known_as_one() -> None:
    for text, is_lost in [
        ("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234", True),
        ("Connection reset by peer", True),
        ("CUDA out of memory", False),
    ]:
        steps = PushRound("p", 1, 2, TIMEOUT_S)._own(MakeBucket(0))
        next(steps)
        with pytest.raises(StopIteration) as ended:
            steps.throw(RuntimeError(text))
        assert ended.value.value.has_lost_rank is is_lost


@pytest.mark.parametrize("call", ["push", "offload"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_has_left_ends_the_next_call_of_the_others_at_once(
    rank: int, call: str
) -> None:
    messages = Messages()
    links = [RankLink(number, 2, messages) for number in range(2)]
    gone = PushRound(f"{call}-1", rank, 2, 600.0, call)
    links[rank].run(gone.leave(ValueError("a bad batch")), lambda step: None)
    other = 1 - rank
    round_ = PushRound(f"{call}-1", other, 2, 600.0, call)
    own = ready(other) if call == "push" else EnginesNotNeeded()
    steps = round_.follow(own) if other else round_.lead(own)
    with pytest.raises(RankFailure, match=f"^rank {rank} has left: ValueError: a bad batch"):
        links[other].run(steps, lambda step: pytest.fail(f"{step} was carried out"))
