"""The order of messages in a push by a trainer's ranks; ``messages`` has all of them.

    every rank -> rank 0      Ready, with what rank 0 needs to plan        round 0
    rank 0     -> every rank  PushPlan
    every rank -> rank 0      Fits: its tensors fit the plan               round 1
    rank 0     -> every rank  MakeBucket                                   before each bucket
    every rank -> rank 0      its Share of the bucket                      rounds 2, 3, ...
    rank 0     -> every rank  FreeMemory, if a rank has ``before_kv``      after the last bucket
    every rank -> rank 0      MemoryFreed: its ``before_kv`` has run       the last round
    rank 0     -> every rank  Done with the report, or Stop with an error

An offload by all ranks has only round 0 and the last message of rank 0.

Rank 0 sends ``Wait`` while it waits, so that the other ranks notice its end.

Always true:

- a rank makes a bucket, which is a collective, only after rank 0 has asked for it, and rank 0 asks
  only after every rank has reported the bucket before;
- a rank that waits for rank 0 too long takes the place of its next message, so that rank 0 cannot
  go on alone;
- ``before_kv`` runs after the engines have verified the weights, and they resume the KV caches
  after it has run on every rank;
- of the tensors that several ranks have whole, a sample is equal on them, before a bucket is made;
  of an iterator's, one of each bucket, before the engines get it;
- all ranks end with the same report or the same error; the error of a single rank is its own;
- a rank that waits ends within ``timeout_s`` of the last message of the rank it waits for, and the
  error names that rank; also in a gather, unless the trainer's own generator gathers.

The functions are generators: they yield what is to be done, and get its result.  ``link`` does it
with a store of torch.distributed; the tests do it in virtual time, with faults at every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from rollout.core.errors import RankFailure, RolloutError, WeightMismatch
from rollout.core.types import StepReport
from rollout.weights.ranks.messages import (
    Answer,
    Done,
    EnginesNotNeeded,
    ErrorText,
    Failed,
    Fits,
    FreeMemory,
    MakeBucket,
    Message,
    Order,
    PushPlan,
    Ready,
    Share,
    Stop,
    Wait,
)

T = TypeVar("T")

# While rank 0 waits, it says so this often within the others' deadline.
_SIGNS_OF_LIFE = 4
# In the errors of gloo and NCCL.
_LOST = ("connection closed by peer", "connection reset by peer", "remote process exited")
# A rank that is late has at most these messages of rank 0 to read.
_MOST_UNREAD = 4 * _SIGNS_OF_LIFE


@dataclass(frozen=True, slots=True)
class Put:
    """Store a message."""

    key: str
    message: Message


@dataclass(frozen=True, slots=True)
class Claim:
    """Store a message if the key has none; the result is the message that it has then."""

    key: str
    message: Message


@dataclass(frozen=True, slots=True)
class Get:
    """Wait for messages; the result is one for each key, None for one that did not come."""

    keys: tuple[str, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove messages that nothing reads any more."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """On rank 0: decide on the push.  The result is the plan, or None after ``timeout_s``: the same
    again waits for it."""

    readies: Sequence[Ready]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Begin:
    """On rank 0: begin the push on the server."""


@dataclass(frozen=True, slots=True)
class Offer:
    """On rank 0: give the engines a bucket, of which all ranks have made their shares."""

    index: int
    shares: Sequence[Share]


@dataclass(frozen=True, slots=True)
class AwaitEngines:
    """On rank 0: wait until the engines want a bucket; or, if ``index`` is None, until the push has
    ended.  The result: None after ``timeout_s``; else True, or the report at the end."""

    index: int | None
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Finish:
    """On rank 0: make the engines serve, after ``before_kv`` has run on all ranks."""


@dataclass(frozen=True, slots=True)
class Offload:
    """On rank 0: begin to free the engines' memory; no rank needs the engines any more."""


Asked = PushPlan | MakeBucket | FreeMemory
"""An order that every rank carries out and answers."""
Step = Put | Claim | Get | Delete | Plan | Begin | Offer | AwaitEngines | Finish | Offload | Asked
Steps = Generator[Step, Any, T]


@dataclass(slots=True)
class PushRound:
    """One push of one rank, or one offload.

    Attributes:
        name: of the push, the same on all ranks and never used again.
        timeout_s: see the module.
        call: what all ranks call.
    """

    name: str
    rank: int
    num_ranks: int
    timeout_s: float
    call: str = "push"
    _num_sent: int = 0
    _round: int = 0

    # -- rank 0 -----------------------------------------------------------------------------

    def lead(self, own: Ready | EnginesNotNeeded) -> Steps[StepReport]:
        """Rank 0's part, for which the other ranks ``follow``; the result is the report.

        Raises:
            RolloutError: the push or the offload has failed, on all ranks.
        """
        try:
            report = yield from self._push(own) if isinstance(own, Ready) else self._offload(own)
        except (Exception, KeyboardInterrupt) as error:
            # If the others have stopped already, their error is raised.
            yield from self._send(Stop(ErrorText.of(error)))
            raise
        yield from self._send(Done(report))
        return report

    def _offload(self, own: EnginesNotNeeded) -> Steps[StepReport]:
        yield from self._collect(own)
        yield Offload()
        report: StepReport = yield from self._await_engines(None)
        return report

    def _push(self, ready: Ready) -> Steps[StepReport]:
        plan = yield from self._planned((yield from self._collect(ready)))
        yield from self._send(plan)
        check_replicas((yield from self._collect((yield from self._own(plan)))))
        if plan.is_copied:
            yield from self._copies()
        # Where a generator's tensors are is known with its first bucket.
        is_streamed = plan.from_iterator and not plan.is_copied
        made = (yield from self._bucket(0)) if is_streamed else None
        yield Begin()
        index, is_last = 0, plan.is_copied
        while not is_last:
            yield from self._await_engines(index)
            shares = made or (yield from self._bucket(index))
            yield Offer(index, shares)
            is_last, made = shares[0].is_last, None
            index += 1
        report: StepReport = yield from self._await_engines(None)
        if plan.has_before_kv:
            yield from self._ask(FreeMemory(), "before_kv")
            yield Finish()
            report = yield from self._await_engines(None)
        return report

    def _planned(self, readies: Sequence[Ready]) -> Steps[PushPlan]:
        """The plan; the server's answers to rank 0 may take long."""
        while True:
            plan: PushPlan | None = yield Plan(readies, self.timeout_s / _SIGNS_OF_LIFE)
            if plan is not None:
                return plan
            yield from self._send(Wait())

    def _copies(self) -> Steps[None]:
        """All buckets, before the engines are called."""
        for index in count():
            shares = yield from self._bucket(index)
            yield Offer(index, shares)
            if shares[0].is_last:
                return

    def _bucket(self, index: int) -> Steps[list[Share]]:
        """What all ranks made of a bucket."""
        shares = yield from self._ask(MakeBucket(index), f"bucket {index}")
        check_replicas(shares)
        return shares

    def _ask(self, asked: Asked, what: str) -> Steps[list[Any]]:
        """The answers of all ranks; ``what`` they are about."""
        yield from self._send(asked)
        return (yield from self._collect((yield from self._own(asked)), what))

    def _collect(self, own: Answer, what: str = "") -> Steps[list[Any]]:
        """The answers of all ranks in the next round; ``what`` they are about.

        It waits for all of them, also after an error: where one rank has died in a collective, the
        others report errors, and only the silent one is the cause.  If a gather of rank 0 was late,
        it waits only for the rest of the time; if the connection to a rank broke, only until the
        others have had time to report that too.
        """
        keys = tuple(self._key(self._round, rank) for rank in range(1, self.num_ranks))
        if has_waited := isinstance(own, Failed) and own.has_waited:
            yield from self._send(Wait())
        others: list[Answer | None] = []
        for _ in range(1 if has_waited else _SIGNS_OF_LIFE):
            others = yield Get(keys, self.timeout_s / _SIGNS_OF_LIFE)
            if all(answer is not None for answer in others):
                break
            yield from self._send(Wait())
            if any(
                isinstance(answer, Failed) and answer.has_lost_rank for answer in (own, *others)
            ):
                break
        answers = [own, *others]
        reported = [answer.error.error() for answer in answers if isinstance(answer, Failed)]
        if missing := [rank for rank, answer in enumerate(answers) if answer is None]:
            raise self._silent(missing, what or f"at the begin of the {self.call}", reported)
        if reported:
            raise reported[0]
        yield Delete(keys)
        self._round += 1
        return answers

    def _await_engines(self, index: int | None) -> Steps[Any]:
        """True, or the report if ``index`` is None."""
        while True:
            event = yield AwaitEngines(index, self.timeout_s / _SIGNS_OF_LIFE)
            if event is not None:
                return event
            yield from self._send(Wait())

    def _send(self, order: Order) -> Steps[None]:
        stored = yield Claim(self._sent(self._num_sent), order)
        self._num_sent += 1
        # A rank has stopped the push, because this one was silent.
        if isinstance(stored, Stop) and stored != order:
            raise stored.error.error()
        if self._num_sent > _MOST_UNREAD:
            yield Delete((self._sent(self._num_sent - _MOST_UNREAD - 1),))

    def keys_left(self) -> tuple[str, ...]:
        """On rank 0, after the push: the keys that may still have a message."""
        first = max(0, self._num_sent - _MOST_UNREAD)
        sent = [self._sent(number) for number in range(first, self._num_sent)]
        rounds = (self._round, self._round + 1)
        reported = [self._key(index, rank) for index in rounds for rank in range(1, self.num_ranks)]
        return (*sent, *reported)

    def leave(self, error: BaseException) -> Steps[None]:
        """Report, in the place of this call, that the rank has failed outside of it."""
        text = ErrorText.of(error, f"rank {self.rank} has left: ")
        if self.rank:
            yield Put(self._key(0, self.rank), Failed(text))
        else:
            yield Claim(self._sent(0), Stop(text))

    # -- the other ranks --------------------------------------------------------------------

    def follow(self, own: Answer) -> Steps[StepReport]:
        """The part of a rank other than 0, which begins with its first message; the result is the
        report.

        Raises:
            RolloutError: the push has failed, on all ranks.
        """
        for index in count():
            yield Put(self._key(index, self.rank), own)
            order = yield from self._listen(own)
            if isinstance(order, Done):
                return order.report
            own = yield from self._own(order)
        raise AssertionError("unreachable")

    def _own(self, asked: Asked) -> Steps[Answer]:
        """This rank's answer; its error is one, too, unless it is the only rank."""
        try:
            answer: Answer = yield asked
        except Exception as error:
            if self.num_ranks == 1 and not isinstance(error, RankFailure):
                raise
            text = ErrorText.of(error, f"rank {self.rank}: ")
            has_lost = any(words in str(error).lower() for words in _LOST)
            return Failed(text, isinstance(error, TimeoutError), has_lost)
        return answer

    def _listen(self, own: Answer) -> Steps[Any]:
        """Rank 0's next message that is not ``Wait``, after this rank's own.

        If this rank has failed, that is why rank 0 is silent: it waits in a gather for this rank.
        But if a gather of this rank was late, rank 0 has had most of its time.
        """
        is_late = isinstance(own, Failed) and own.has_waited
        timeout_s = self.timeout_s / _SIGNS_OF_LIFE if is_late else self.timeout_s
        while True:
            key = self._sent(self._num_sent)
            (order,) = yield Get((key,), timeout_s)
            timeout_s = self.timeout_s
            if order is None:
                text = ErrorText.of(self._rank_0_is_silent())
                if isinstance(own, Failed) and not is_late:
                    text = own.error
                try:
                    order = yield Claim(key, Stop(text))
                except TimeoutError:  # rank 0 is frozen, and finds the message when it goes on
                    raise text.error() from None
            self._num_sent += 1
            if isinstance(order, Stop):
                raise order.error.error()
            if not isinstance(order, Wait):
                return order

    def _rank_0_is_silent(self) -> RankFailure:
        return RankFailure(
            f"rank 0 has sent nothing within {self.timeout_s:g} s: it has ended, hangs, or did "
            f"not call {self.call}",
            ranks=(0,),
        )

    def _silent(
        self, ranks: Sequence[int], what: str, reported: Sequence[RolloutError]
    ) -> RankFailure:
        return RankFailure(
            f"rank {_listed(ranks)} did not report {what} within {self.timeout_s:g} s: it has "
            f"ended, hangs, or did not call {self.call}"
            + "".join(f"; {error}" for error in reported[:4]),
            ranks=ranks,
        )

    def _key(self, index: int, rank: int) -> str:
        return f"{self.name}/{index}/{rank}"

    def _sent(self, number: int) -> str:
        return f"{self.name}/sent/{number}"


def check_replicas(answers: Sequence[Fits | Share]) -> None:
    """Check that ranks which have the same tensor, or shard of one, have the same values.

    Raises:
        WeightMismatch: they have not; names the tensor, and the ranks that differ from most.
    """
    for name in dict.fromkeys(name for answer in answers for name in answer.digests):
        found = {
            rank: answer.digests[name]
            for rank, answer in enumerate(answers)
            if name in answer.digests
        }
        most, _ = Counter(found.values()).most_common(1)[0]
        if odd := [rank for rank, digest in found.items() if digest != most]:
            others = [rank for rank, digest in found.items() if digest == most]
            raise WeightMismatch(
                f"rank {_listed(odd)} has other values of tensor {name!r} than rank "
                f"{_listed(others)}: a replica is out of step, and a push would mix them; make "
                "them equal first, for example with a broadcast from one rank",
                tensor=name.split(" shard ")[0],
            )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if ranks[8:] else "")


def gather_timeout_s(timeout_s: float) -> float:
    """How long a rank waits in a gather, so that all know the silent rank within ``timeout_s``."""
    return timeout_s * (1 - 1 / _SIGNS_OF_LIFE)
