"""The words that a trainer's ranks exchange in a push.

    every rank -> rank 0      ready, with what rank 0 needs to plan       round 0
    rank 0     -> every rank  the plan
    every rank -> rank 0      its tensors fit the plan                    round 1
    rank 0     -> every rank  go                                          before each bucket
    every rank -> rank 0      what it made of the bucket                  rounds 2, 3, ...
    rank 0     -> every rank  broadcast, if a rank of another host sends  when the engines wait
    every rank -> rank 0      what became of its broadcast                a round of its own
    rank 0     -> every rank  turn, if a rank has ``before_kv``           after the last bucket
    every rank -> rank 0      its ``before_kv`` has run                   the last round
    rank 0     -> every rank  done with the report, or stop with an error

An offload by all ranks has only round 0 and the last word of rank 0.

Rank 0 says ``wait`` while it waits, so that the other ranks notice its end.

Always true:

- a rank makes a bucket, which is a collective, only after rank 0 has sent go, and rank 0 sends go
  only after every rank has reported the bucket before;
- a rank that waits for rank 0 too long takes the place of its next word, so that rank 0 cannot go
  on alone;
- ``before_kv`` runs after the engines have verified the weights, and they resume the KV caches
  after it has run on every rank;
- all ranks end with the same report or the same error;
- a rank that waits ends within ``timeout_s`` of the last word of the rank it waits for, and the
  error names that rank; also in a gather, unless the trainer's own generator gathers.

The functions are generators: they yield what is to be done, and get its result.  ``rank_link`` does
it with a store of torch.distributed; the tests do it in virtual time, with faults at every step.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from engines.protocol.plain_text import describe
from rollout.core import errors
from rollout.core.errors import RankFailure, RolloutError

T = TypeVar("T")

# While rank 0 waits, it says so this often within the others' deadline.
_SIGNS_OF_LIFE = 4
# A rank that is late has at most these words of rank 0 to read.
_MOST_UNREAD = 4 * _SIGNS_OF_LIFE


@dataclass(frozen=True, slots=True)
class Put:
    """Store a word."""

    key: str
    word: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Claim:
    """Store a word if the key has none; the result is the word that it has then."""

    key: str
    word: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Get:
    """Wait for words; the result is one for each key, None for one that did not come."""

    keys: tuple[str, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove words that nothing reads any more."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """On rank 0: decide on the push; the result, a word, goes to all ranks.

    Attributes:
        words: of the ranks, in order.
    """

    words: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Check this rank's tensors against the plan; nothing is gathered."""

    plan: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Begin:
    """On rank 0: begin the push on the server."""


@dataclass(frozen=True, slots=True)
class Make:
    """Gather the next bucket with all ranks and make this rank's part; the result is a word."""

    index: int


@dataclass(frozen=True, slots=True)
class Offer:
    """On rank 0: give the engines a bucket, from the words of all ranks."""

    index: int
    words: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class AwaitEngines:
    """On rank 0: wait until the engines want a bucket; or, if ``index`` is None, until the push has
    ended.  The result: None after ``timeout_s``, else a word, which is the report at the end.  A
    word with ``broadcast`` is for all ranks, and the wait goes on after ``Answer``.
    """

    index: int | None
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Join a group with the engines, or send in it, if ``task`` is this rank's; a word results."""

    task: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """On rank 0: what all ranks reported of a broadcast."""

    words: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class TakeTurn:
    """Run this rank's ``before_kv``, if it has one; the result is a word."""


@dataclass(frozen=True, slots=True)
class Finish:
    """On rank 0: make the engines serve, after all ranks had their turn."""


@dataclass(frozen=True, slots=True)
class Offload:
    """On rank 0: begin to free the engines' memory; no rank needs the engines any more."""


Step = (
    Put
    | Claim
    | Get
    | Delete
    | Plan
    | Prepare
    | Begin
    | Make
    | Offer
    | AwaitEngines
    | Broadcast
    | Answer
    | TakeTurn
    | Finish
    | Offload
)
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
    _num_said: int = 0
    _round: int = 0

    # -- rank 0 -----------------------------------------------------------------------------

    def lead(self, ready: Mapping[str, Any]) -> Steps[Mapping[str, Any]]:
        """Rank 0's part; the result is the report.

        Raises:
            RolloutError: the push has failed, on all ranks.
        """
        return (yield from self._led(self._push(ready)))

    def lead_offload(self) -> Steps[Mapping[str, Any]]:
        """Rank 0's part of an offload, for which the other ranks ``follow``; the result is the
        report.

        Raises:
            RolloutError: the offload has failed, on all ranks.
        """
        return (yield from self._led(self._offload()))

    def _led(self, steps: Steps[Mapping[str, Any]]) -> Steps[Mapping[str, Any]]:
        """The result of rank 0's own steps, of which all ranks hear."""
        try:
            report = yield from steps
        except (Exception, KeyboardInterrupt) as error:
            # If the others have stopped already, their error is raised.
            yield from self._say({"word": "stop", "error": error_to_word(error)})
            raise
        yield from self._say({"word": "done", "report": report})
        return report

    def _offload(self) -> Steps[Mapping[str, Any]]:
        yield from self._collect({})
        yield Offload()
        return (yield from self._await_engines(None))

    def _push(self, ready: Mapping[str, Any]) -> Steps[Mapping[str, Any]]:
        words = yield from self._collect(ready)
        plan = yield Plan(words)
        yield from self._say({**plan, "word": "plan"})
        yield from self._collect((yield from self._own(Prepare(plan))))
        if is_copied := plan.get("is_copied"):
            yield from self._copies()
        # Where a generator's tensors are is known with its first bucket.
        is_streamed = plan.get("is_streamed") and not is_copied
        made = (yield from self._bucket(0)) if is_streamed else None
        yield Begin()
        index, is_last = 0, bool(is_copied)
        while not is_last:
            yield from self._await_engines(index)
            words = made or (yield from self._bucket(index))
            yield Offer(index, words)
            is_last, made = bool(words[0]["is_last"]), None
            index += 1
        report: Mapping[str, Any] = yield from self._await_engines(None)
        if plan.get("has_turn"):
            yield from self._say({"word": "turn"})
            yield from self._collect((yield from self._own(TakeTurn())), "before_kv")
            yield Finish()
            report = yield from self._await_engines(None)
        return report

    def _copies(self) -> Steps[None]:
        """All buckets, before the engines are called."""
        for index in count():
            words = yield from self._bucket(index)
            yield Offer(index, words)
            if words[0]["is_last"]:
                return

    def _bucket(self, index: int) -> Steps[list[Mapping[str, Any]]]:
        """What all ranks made of a bucket."""
        yield from self._say({"word": "go", "index": index})
        own = yield from self._own(Make(index))
        return (yield from self._collect(own, f"bucket {index}"))

    def _broadcast(self, task: Mapping[str, Any]) -> Steps[None]:
        yield from self._say({"word": "broadcast", "task": task})
        own = yield from self._own(Broadcast(task))
        yield Answer((yield from self._collect(own, "a broadcast")))

    def _collect(self, own: Mapping[str, Any], what: str = "") -> Steps[list[Mapping[str, Any]]]:
        """The words of all ranks in the next round; ``what`` they are about.

        It waits for all of them, also after an error: where one rank has died in a collective, the
        others report errors, and only the silent one is the cause.  If a gather of rank 0 was late,
        it waits only for the rest of the time.
        """
        keys = tuple(self._key(self._round, rank) for rank in range(1, self.num_ranks))
        if has_waited := own.get("has_waited"):
            yield from self._say({"word": "wait"})
        found: list[Mapping[str, Any] | None] = []
        for _ in range(1 if has_waited else _SIGNS_OF_LIFE):
            found = yield Get(keys, self.timeout_s / _SIGNS_OF_LIFE)
            if all(word is not None for word in found):
                break
            yield from self._say({"word": "wait"})
        words = [own, *found]
        reported = [error_of(word["error"]) for word in words if word and "error" in word]
        if missing := [rank for rank, word in enumerate(words) if word is None]:
            raise self._silent(missing, what or f"at the begin of the {self.call}", reported)
        if reported:
            raise reported[0]
        yield Delete(keys)
        self._round += 1
        return [word for word in words if word is not None]

    def _await_engines(self, index: int | None) -> Steps[Mapping[str, Any]]:
        while True:
            word = yield AwaitEngines(index, self.timeout_s / _SIGNS_OF_LIFE)
            if word is None:
                yield from self._say({"word": "wait"})
            elif "broadcast" in word:
                yield from self._broadcast(word["broadcast"])
            else:
                return dict(word)

    def _say(self, word: Mapping[str, Any]) -> Steps[None]:
        stored = yield Claim(self._said(self._num_said), word)
        self._num_said += 1
        if stored != word:  # a rank has stopped the push, because this one was silent
            raise error_of(stored["error"])
        if self._num_said > _MOST_UNREAD:
            yield Delete((self._said(self._num_said - _MOST_UNREAD - 1),))

    def words_left(self) -> tuple[str, ...]:
        """On rank 0, after the push: the keys that may still have a word."""
        first = max(0, self._num_said - _MOST_UNREAD)
        said = [self._said(number) for number in range(first, self._num_said)]
        rounds = (self._round, self._round + 1)
        reported = [self._key(index, rank) for index in rounds for rank in range(1, self.num_ranks)]
        return (*said, *reported)

    # -- the other ranks --------------------------------------------------------------------

    def follow(self, ready: Mapping[str, Any]) -> Steps[Mapping[str, Any]]:
        """The part of a rank other than 0; the result is the report.

        Raises:
            RolloutError: the push has failed, on all ranks.
        """
        own = ready
        for index in range(1 << 62):
            yield Put(self._key(index, self.rank), own)
            word = yield from self._listen(own)
            if word["word"] == "done":
                report: Mapping[str, Any] = word["report"]
                return report
            own = yield from self._own(_asked(word))
        raise AssertionError("unreachable")

    def _own(self, step: Prepare | Make | Broadcast | TakeTurn) -> Steps[Mapping[str, Any]]:
        """This rank's part of a round; its error is a word too."""
        try:
            word: Mapping[str, Any] = yield step
        except Exception as error:
            word = {"error": error_to_word(error, f"rank {self.rank}: ")}
            return {**word, "has_waited": True} if isinstance(error, TimeoutError) else word
        return word

    def _listen(self, own: Mapping[str, Any]) -> Steps[Mapping[str, Any]]:
        """Rank 0's next word that is not ``wait``, after this rank's own.

        If this rank has failed, that is why rank 0 is silent: it waits in a gather for this rank.
        But if a gather of this rank was late, rank 0 has had most of its time.
        """
        is_late = "has_waited" in own
        timeout_s = self.timeout_s / _SIGNS_OF_LIFE if is_late else self.timeout_s
        while True:
            key = self._said(self._num_said)
            (word,) = yield Get((key,), timeout_s)
            timeout_s = self.timeout_s
            if word is None:
                silent = error_to_word(self._rank_0_is_silent())
                error = silent if is_late else own.get("error", silent)
                try:
                    word = yield Claim(key, {"word": "stop", "error": error})
                except TimeoutError:  # rank 0 is frozen, and finds the word when it goes on
                    raise error_of(error) from None
            self._num_said += 1
            if word["word"] == "stop":
                raise error_of(word["error"])
            if word["word"] != "wait":
                return dict(word)

    def _rank_0_is_silent(self) -> RankFailure:
        return RankFailure(
            f"rank 0 has sent nothing within {self.timeout_s:g} s: it has ended, hangs, or did "
            f"not call {self.call}",
            ranks=(0,),
        )

    def _silent(
        self, ranks: Sequence[int], what: str, reported: Sequence[RolloutError]
    ) -> RankFailure:
        names = ", ".join(map(str, ranks[:8])) + (
            f" and {len(ranks) - 8} more" if ranks[8:] else ""
        )
        return RankFailure(
            f"rank {names} did not report {what} within {self.timeout_s:g} s: it has ended, hangs, "
            f"or did not call {self.call}" + "".join(f"; {error}" for error in reported[:4]),
            ranks=ranks,
        )

    def _key(self, index: int, rank: int) -> str:
        return f"{self.name}/{index}/{rank}"

    def _said(self, number: int) -> str:
        return f"{self.name}/said/{number}"


def gather_timeout_s(timeout_s: float) -> float:
    """How long a rank waits in a gather, so that all know the silent rank within ``timeout_s``."""
    return timeout_s * (1 - 1 / _SIGNS_OF_LIFE)


def _asked(word: Mapping[str, Any]) -> Prepare | Make | Broadcast | TakeTurn:
    """What a word of rank 0 asks of another rank."""
    match word["word"]:
        case "plan":
            return Prepare(word)
        case "go":
            return Make(word["index"])
        case "broadcast":
            return Broadcast(word["task"])
    return TakeTurn()


def error_to_word(error: BaseException, prefix: str = "") -> dict[str, Any]:
    """An error for the other ranks; they may not unpickle what comes over the network."""
    kind = type(error) if isinstance(error, RolloutError) else RankFailure
    return {
        "type": kind.__name__,
        "message": prefix + describe(error, with_type=kind is not type(error)),
        "fields": {
            name: value
            for name, value in vars(error).items()
            if kind is type(error) and isinstance(value, str | int | float | bool)
        },
    }


def error_of(word: Mapping[str, Any]) -> RolloutError:
    """The error that a word describes."""
    kind = getattr(errors, str(word["type"]), RankFailure)
    if not (isinstance(kind, type) and issubclass(kind, RolloutError)):
        kind = RankFailure
    error: RolloutError = kind(str(word["message"]))
    for name, value in word["fields"].items():
        setattr(error, name, value)
    return error
