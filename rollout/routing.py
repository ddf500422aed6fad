"""Whom a request can be sent to, and how many live requests each of them has.

Always true: how many requests an engine has is the size of the set of its live requests, never a
number counted beside it; candidates are moved from the size a set had to the size it has, so what
is least stands ready however many engines there are.

Pure: values in, a choice out; no await, clock or socket.  The ways to choose are in choosing.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from engines.protocol import Endpoint, WorkerType


class MemberState(StrEnum):
    """Why an engine gets requests, or why it does not."""

    SERVING = "serving"
    DRAINING = "draining"
    ASLEEP = "asleep"
    FENCED = "fenced"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Member:
    """One engine as the router sees it.

    Attributes:
        because: why it is not serving, in words; empty when it serves.
        bootstrap_port: where decode engines meet it, if it is a prefill engine.
    """

    engine_id: str
    endpoint: Endpoint
    state: MemberState = MemberState.SERVING
    worker_type: WorkerType = WorkerType.REGULAR
    because: str = ""
    bootstrap_port: int = 8998

    @property
    def is_choosable(self) -> bool:
        """A plain request can be sent to it.  Prefill and decode engines only work in pairs."""
        return self.state is MemberState.SERVING and self.worker_type is WorkerType.REGULAR


@dataclass(frozen=True, slots=True)
class Hint:
    """What a policy may go by, besides load.

    Attributes:
        session: the conversation this request belongs to.
        prompt: the beginning of the prompt as it stands in the body.
    """

    session: str = ""
    prompt: bytes = b""
    now_s: float = 0.0


NO_HINT = Hint()


class Candidates:
    """Engines that can be chosen; nothing here costs more when there are more of them.

    They are kept sorted by their numbers of live requests, and among equals by turn: whose
    number was looked at last comes last, so idle engines take turns.  Whatever changes the
    numbers names the engine in ``changed``; it is looked at when somebody wants to know.

    Args:
        members: each of another id.
        load: gives the live requests of an engine, by its id.
        turns: ids in the order of their turns so far; who is not among them comes first.

    Attributes:
        members: in the order of the membership.
        changed: ids of those whose number may be another than when it was last looked at.
    """

    def __init__(
        self,
        members: Iterable[Member],
        load: Callable[[str], int],
        turns: Iterable[str] = (),
    ) -> None:
        self.members = tuple(members)
        self.load = load
        self.changed: dict[str, None] = {}
        self._places = {member.engine_id: place for place, member in enumerate(self.members)}
        turn_of = {engine_id: turn for turn, engine_id in enumerate(turns)}
        by_turn = sorted(self.members, key=lambda member: turn_of.get(member.engine_id, -1))
        self._loads = {member.engine_id: load(member.engine_id) for member in by_turn}
        self._total = sum(self._loads.values())
        self._least = min(self._loads.values(), default=0)
        self._by_load: dict[int, OrderedDict[str, Member]] = {}
        for member in by_turn:
            num = self._loads[member.engine_id]
            self._by_load.setdefault(num, OrderedDict())[member.engine_id] = member

    def least(self) -> Member:
        """The one with the fewest live requests; of equals the next in turn."""
        if self.changed:
            self._sort()
        return next(iter(self._by_load[self._least].values()))

    @property
    def total(self) -> int:
        """Live requests of all of them."""
        if self.changed:
            self._sort()
        return self._total

    def get(self, engine_id: str) -> Member | None:
        """The one of this id, if it is among them."""
        place = self._places.get(engine_id)
        return None if place is None else self.members[place]

    def place(self, engine_id: str) -> int:
        """Where in ``members`` it is; -1 if it is not."""
        return self._places.get(engine_id, -1)

    def without(self, engine_id: str) -> Candidates:
        """The others as they are now; these are sorted anew, and no changes are told to them."""
        if engine_id not in self._places:
            return self
        others = (member for member in self.members if member.engine_id != engine_id)
        return Candidates(others, self.load, self.turns())

    def turns(self) -> list[str]:
        """Their ids, by live requests and then by turn."""
        return [engine_id for _, ids in sorted(self.by_load().items()) for engine_id in ids]

    def by_load(self) -> dict[int, list[str]]:
        """For each number of live requests, the ids of those that have as many, by turn."""
        if self.changed:
            self._sort()
        return {num: list(equals) for num, equals in self._by_load.items() if equals}

    def _sort(self) -> None:
        """Put those that changed where they belong."""
        by_load, loads, load = self._by_load, self._loads, self.load
        for engine_id in self.changed:
            before, now = loads[engine_id], load(engine_id)
            if now == before:
                by_load[before].move_to_end(engine_id)
                continue
            if now not in by_load:
                by_load[now] = OrderedDict()
            by_load[now][engine_id] = by_load[before].pop(engine_id)
            loads[engine_id] = now
            self._total += now - before
            if now < self._least:
                self._least = now
        self.changed.clear()
        while not by_load.get(self._least):
            self._least += 1  # never more often than requests have begun


class Policy(Protocol):
    """A way to choose.  Another one is another class with these three.

    ``choose`` is given at least one candidate, and what it returns must be one of them::

        class FillOneByOne:
            wants_session = wants_prompt = False

            def choose(self, candidates, hint=NO_HINT):
                return max(candidates.members, key=lambda one: candidates.load(one.engine_id))

    Attributes:
        wants_session: ``Hint.session`` is looked at; without it nobody need find it out.
        wants_prompt: the same for ``Hint.prompt``.
    """

    @property
    def wants_session(self) -> bool: ...
    @property
    def wants_prompt(self) -> bool: ...
    def choose(self, candidates: Candidates, hint: Hint = NO_HINT) -> Member: ...


T = TypeVar("T")


class InFlight(Generic[T]):
    """The live requests of every engine.

    Adding a live request again and discarding one that is not live change nothing, so whoever
    is unsure whether a request has ended may end it once more.
    """

    def __init__(self) -> None:
        self._live: dict[str, set[T]] = {}
        self._changed: dict[str, dict[str, None]] = {}
        self._offered: tuple[Candidates, ...] = ()

    def offer(self, *groups: Iterable[Member]) -> tuple[Candidates, ...]:
        """Each group as candidates that are told what changes here, until the next offer.

        No engine may be in two groups.
        """
        turns = [engine_id for before in self._offered for engine_id in before.turns()]
        self._offered = tuple(Candidates(group, self.num, turns) for group in groups)
        self._changed = {
            member.engine_id: candidates.changed
            for candidates in self._offered
            for member in candidates.members
        }
        return self._offered

    def add(self, engine_id: str, request: T) -> None:
        live = self._live.get(engine_id)
        if live is None:
            live = self._live[engine_id] = set()
        live.add(request)
        if (changed := self._changed.get(engine_id)) is not None:
            changed[engine_id] = None

    def discard(self, engine_id: str, request: T) -> bool:
        """End ``request``; False if it had already ended."""
        live = self._live.get(engine_id)
        if live is None or request not in live:
            return False
        live.remove(request)
        if not live:
            del self._live[engine_id]
        if (changed := self._changed.get(engine_id)) is not None:
            changed[engine_id] = None
        return True

    def num(self, engine_id: str) -> int:
        live = self._live.get(engine_id)
        return len(live) if live is not None else 0

    def by_engine(self) -> dict[str, int]:
        """Engines that have live requests, and how many."""
        return {engine_id: len(live) for engine_id, live in self._live.items()}

    def __iter__(self) -> Iterator[T]:
        for live in self._live.values():
            yield from live

    def __len__(self) -> int:
        return sum(map(len, self._live.values()))

    def __bool__(self) -> bool:
        return bool(self._live)
