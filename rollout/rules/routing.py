"""The backends of the router, and how many live requests each of them has.

Always true: the load of an engine is the size of the set of its live requests, never a separate
counter.  Candidates are kept sorted by load, so the cost of finding the least loaded one does not
depend on the number of engines.

The policies that choose an engine are in ``load_balancing``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar
from zlib import crc32

from engines.kinds import kind_of
from engines.protocol import NO_ACCESS, Endpoint, EngineAccess, WorkerType
from engines.protocol.kind import Kind
from engines.protocol.logprob_kind import BEFORE_CUTS, LogprobRule

DEFAULT_BOOTSTRAP_PORT = 8998
"""SGLang's own."""
JUST_STARTED = "the router has just started"
"""Why a gate is shut that the server has not opened so far; a request may be sent again soon."""


class BackendState(StrEnum):
    """Whether an engine gets requests, and if not, why."""

    SERVING = "serving"
    DRAINING = "draining"
    ASLEEP = "asleep"
    FENCED = "fenced"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Backend:
    """One engine behind the router.

    Attributes:
        reason: why it is not serving, or empty if it is.
        may_return: when it is lost, recovery may bring it back without any command.
        kind: a name of ``engines.kinds``.
        needs_names: it gets only requests that name their weight version to its prefix cache.
        logprobs: at which step of sampling it takes its log-probs.
        vocabulary: tokens of its model; 0 if they are not known.
        access: what calls to it carry.  The control key is for aborts, which SGLang takes with that
            alone.
        bootstrap_port: port at which decode engines reach it, if it is a prefill engine.
    """

    engine_id: str
    endpoint: Endpoint
    state: BackendState = BackendState.SERVING
    worker_type: WorkerType = WorkerType.REGULAR
    reason: str = ""
    bootstrap_port: int = DEFAULT_BOOTSTRAP_PORT
    may_return: bool = False
    kind: str = "sglang"
    needs_names: bool = False
    logprobs: LogprobRule = BEFORE_CUTS
    vocabulary: int = 0
    access: EngineAccess = NO_ACCESS

    @property
    def of_kind(self) -> Kind:
        """What is true of all engines of its kind."""
        return kind_of(self.kind)

    @property
    def is_choosable(self) -> bool:
        """Whether a request can be sent to it alone.  Prefill and decode engines work in pairs."""
        return self.state is BackendState.SERVING and self.worker_type is WorkerType.REGULAR


@dataclass(frozen=True, slots=True)
class Hint:
    """The properties of a request that a policy may use, besides load.

    Attributes:
        affinity: requests with the same one prefer the same engine, or empty for none.
        prompt: the first bytes of the prompt as they are in the body.
        num_bytes: size of the body; most of it is the prompt.
    """

    affinity: str = ""
    prompt: bytes = b""
    now_s: float = 0.0
    num_bytes: int = 0


NO_HINT = Hint()


class Candidates:
    """Engines that can be chosen; the cost of a lookup does not depend on their number.

    They are sorted by load (number of live requests), and engines of equal load by turn: the engine
    whose load was read last comes last, so idle engines take turns.  Code that changes a load adds
    the engine to ``changed``; the order is updated at the next lookup.

    Args:
        members: the engines, with distinct ids.
        load: returns the load of an engine, by id.
        turns: ids in the order of their earlier turns; engines that are missing come first.
        avoided: engines that are candidates only where there is no other.

    Attributes:
        members: in the order of the membership.
        changed: ids of engines whose load may have changed since the last lookup.
    """

    def __init__(
        self,
        members: Iterable[Backend],
        load: Callable[[str], int],
        turns: Iterable[str] = (),
        avoided: Iterable[Backend] = (),
    ) -> None:
        self._avoided = tuple(avoided)
        self.members = tuple(members) or self._avoided
        self.load = load
        self.changed: dict[str, None] = {}
        self._places = {member.engine_id: place for place, member in enumerate(self.members)}
        turn_of = {engine_id: turn for turn, engine_id in enumerate(turns)}
        by_turn = sorted(self.members, key=lambda member: turn_of.get(member.engine_id, -1))
        self._loads = {member.engine_id: load(member.engine_id) for member in by_turn}
        self._total = sum(self._loads.values())
        self._least = min(self._loads.values(), default=0)
        self._by_load: dict[int, OrderedDict[str, Backend]] = {}
        for member in by_turn:
            num = self._loads[member.engine_id]
            self._by_load.setdefault(num, OrderedDict())[member.engine_id] = member

    def least(self) -> Backend:
        """The engine with the lowest load; among equals, the next in turn."""
        if self.changed:
            self._sort()
        return next(iter(self._by_load[self._least].values()))

    @property
    def total(self) -> int:
        """The sum of all loads."""
        if self.changed:
            self._sort()
        return self._total

    def get(self, engine_id: str) -> Backend | None:
        """The engine with this id, or None if it is not a candidate."""
        place = self._places.get(engine_id)
        return None if place is None else self.members[place]

    def without(self, engine_id: str) -> Candidates:
        """A copy without one engine; later changes of loads do not reach the copy."""
        if engine_id not in self._places:
            return self
        return self.only(lambda member: member.engine_id != engine_id)

    def only(self, fits: Callable[[Backend], bool]) -> Candidates:
        """A copy of the engines that fit; later changes of loads do not reach the copy."""
        members, avoided = filter(fits, self.members), filter(fits, self._avoided)
        return Candidates(members, self.load, self.turns(), avoided)

    def turns(self) -> list[str]:
        """The ids, by load and then by turn."""
        return [engine_id for _, ids in sorted(self.by_load().items()) for engine_id in ids]

    def by_load(self) -> dict[int, list[str]]:
        """For each load, the ids of the engines that have it, by turn."""
        if self.changed:
            self._sort()
        return {num: list(equals) for num, equals in self._by_load.items() if equals}

    def _sort(self) -> None:
        """Move the changed engines to their new position."""
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
            self._least += 1  # in total, at most once for each request


class RoutingPolicy(Protocol):
    """The interface of a routing policy.

    ``choose`` gets at least one candidate and must return one of them::

        class FillOneByOne:
            wants_affinity = wants_prompt = False

            def choose(self, candidates, hint=NO_HINT):
                return max(candidates.members, key=lambda member: candidates.load(member.engine_id))

    Attributes:
        wants_affinity: the policy uses ``Hint.affinity``; otherwise the router does not parse it.
        wants_prompt: the same for ``Hint.prompt``.
    """

    @property
    def wants_affinity(self) -> bool: ...
    @property
    def wants_prompt(self) -> bool: ...
    def choose(self, candidates: Candidates, hint: Hint = NO_HINT) -> Backend: ...


T = TypeVar("T")


class InFlight(Generic[T]):
    """The live requests of every engine.

    ``add`` and ``discard`` are idempotent.
    """

    def __init__(self) -> None:
        self._live: dict[str, set[T]] = {}
        self._changed: dict[str, dict[str, None]] = {}
        self._offered: tuple[Candidates, ...] = ()

    def offer(
        self, *groups: Sequence[Backend], avoided: Collection[str] = ()
    ) -> tuple[Candidates, ...]:
        """Candidates for each group; their loads are kept up to date until the next call.

        No engine may be in two groups.

        Args:
            avoided: ids of engines that are candidates only where their group has no other.
        """
        turns = [engine_id for before in self._offered for engine_id in before.turns()]
        self._offered = tuple(
            Candidates(
                (member for member in group if member.engine_id not in avoided),
                self.num,
                turns,
                (member for member in group if member.engine_id in avoided),
            )
            for group in groups
        )
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
        """Remove ``request``; False if it was not live."""
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
        """Engines with live requests, and their number."""
        return {engine_id: len(live) for engine_id, live in self._live.items()}

    def __iter__(self) -> Iterator[T]:
        for live in self._live.values():
            yield from live

    def __len__(self) -> int:
        return sum(map(len, self._live.values()))

    def __bool__(self) -> bool:
        return bool(self._live)


def worker_of(session_id: str, num_workers: int) -> int:
    """The number of the worker of agents that has a session, from 0.

    Any process with the session's id and the number of workers finds the same one.
    """
    return crc32(session_id.encode("utf-8", "surrogatepass")) % num_workers
