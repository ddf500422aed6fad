"""Choosing an engine for a request.

Pure: values in, a choice out; no await, clock or socket.  How many requests an engine has is
always computed from the set of live requests, never counted up and down beside it, so it cannot
drift.  Another policy is another class with ``choose``.

Bounded load: a policy with a preference (session, prefix) keeps to it only while the preferred
engine has less than its share of all requests, with some slack; so no engine ever drowns because
many sessions or prompts happen to prefer it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from random import Random
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
Load = Callable[[str], int]


class Policy(Protocol):
    """A way to choose.  ``candidates`` is never empty; ``load`` gives an engine's live requests.

    Attributes:
        wants_session: ``Hint.session`` is looked at; without it nobody need find it out.
        wants_prompt: the same for ``Hint.prompt``.
    """

    @property
    def wants_session(self) -> bool: ...
    @property
    def wants_prompt(self) -> bool: ...
    def choose(self, candidates: Sequence[Member], load: Load, hint: Hint = NO_HINT) -> Member: ...


class _Policy:
    wants_session = False
    wants_prompt = False


class LeastInFlight(_Policy):
    """The engine with the fewest live requests; among equals, the next one in turn.

    Without the turn, the first of several idle engines would get every request of a quiet hour.
    """

    def __init__(self) -> None:
        self._last = ""

    def choose(self, candidates: Sequence[Member], load: Load, hint: Hint = NO_HINT) -> Member:
        best = least_in_flight(candidates, load, _after(candidates, self._last))
        self._last = best.engine_id
        return best


def _after(candidates: Sequence[Member], last: str) -> int:
    """The index that follows ``last``; 0 if it is not among them."""
    for index, member in enumerate(candidates):
        if member.engine_id == last:
            return index + 1
    return 0


def least_in_flight(candidates: Sequence[Member], load: Load, start: int) -> Member:
    """The least loaded of ``candidates``; of equals the first at or after ``start``, cyclically."""
    num = len(candidates)
    best = candidates[start % num]
    best_load = load(best.engine_id)
    for step in range(1, num):
        if best_load == 0:
            break
        member = candidates[(start + step) % num]
        member_load = load(member.engine_id)
        if member_load < best_load:
            best, best_load = member, member_load
    return best


class RoundRobin(_Policy):
    """Each engine in turn, whatever its load."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, candidates: Sequence[Member], load: Load, hint: Hint = NO_HINT) -> Member:
        chosen = candidates[_after(candidates, self._last) % len(candidates)]
        self._last = chosen.engine_id
        return chosen


class PowerOfTwo(_Policy):
    """The less loaded of two engines drawn by chance; of equals the first drawn."""

    def __init__(self, random: Random | None = None) -> None:
        self._random = random or Random()

    def choose(self, candidates: Sequence[Member], load: Load, hint: Hint = NO_HINT) -> Member:
        if len(candidates) == 1:
            return candidates[0]
        one, other = self._random.sample(candidates, 2)
        return other if load(other.engine_id) < load(one.engine_id) else one


def load_bound(candidates: Sequence[Member], load: Load, *, slack: float, at_least: int) -> int:
    """An engine with fewer live requests than this may be preferred."""
    total = sum(load(member.engine_id) for member in candidates)
    return max(at_least, math.ceil(slack * (total + 1) / len(candidates)))


class Sessions(_Policy):
    """All requests of a session to one engine, by consistent hashing with bounded load.

    A session stays where it began, also when engines are added.  While its engine cannot be
    chosen, its requests all go to the same other one, and come back with the engine.  Sessions
    unheard of for ``ttl_s``, and the oldest beyond ``max_sessions``, are forgotten.
    """

    wants_session = True
    _POINTS = 64

    def __init__(
        self,
        *,
        ttl_s: float = 3600.0,
        max_sessions: int = 100_000,
        slack: float = 1.25,
        at_least: int = 4,
    ) -> None:
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._slack = slack
        self._at_least = at_least
        self._homes: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._ring: list[tuple[int, int]] = []
        self._ring_of: tuple[str, ...] = ()
        self._rest = LeastInFlight()

    def choose(self, candidates: Sequence[Member], load: Load, hint: Hint = NO_HINT) -> Member:
        if not hint.session:
            return self._rest.choose(candidates, load)
        self._forget(hint.now_s)
        bound = load_bound(candidates, load, slack=self._slack, at_least=self._at_least)
        home = self._homes.get(hint.session, ("", 0.0))[0]
        at_home = next((one for one in candidates if one.engine_id == home), None)
        if at_home is not None and load(home) < bound:
            chosen = at_home
        else:
            chosen = self._walk(candidates, load, hint.session, bound, not_on=home)
        self._homes[hint.session] = (home or chosen.engine_id, hint.now_s)
        self._homes.move_to_end(hint.session)
        return chosen

    @property
    def num_sessions(self) -> int:
        return len(self._homes)

    def _forget(self, now_s: float) -> None:
        while self._homes:
            session, (_, seen_s) = next(iter(self._homes.items()))
            if len(self._homes) <= self._max_sessions and seen_s > now_s - self._ttl_s:
                return
            del self._homes[session]

    def _walk(
        self, candidates: Sequence[Member], load: Load, session: str, bound: int, not_on: str
    ) -> Member:
        ids = tuple(member.engine_id for member in candidates)
        if ids != self._ring_of:
            self._ring_of = ids
            self._ring = sorted(
                (_hash(f"{engine_id}#{point}".encode()), index)
                for index, engine_id in enumerate(ids)
                for point in range(self._POINTS)
            )
        start = bisect_right(self._ring, (_hash(session.encode()), len(ids)))
        for step in range(len(self._ring)):
            member = candidates[self._ring[(start + step) % len(self._ring)][1]]
            if member.engine_id != not_on and load(member.engine_id) < bound:
                return member
        return least_in_flight(candidates, load, 0)


class PrefixAffinity(_Policy):
    """The engine that has seen most of a prompt's beginning, with bounded load.

    The beginning is cut into blocks; each block's hash includes those before it, and the engine
    that last got a prompt with that beginning is remembered, for the ``max_blocks`` used last.
    Approximate: what engines really keep in their caches is not asked.
    """

    wants_prompt = True

    def __init__(
        self,
        *,
        block_bytes: int = 256,
        max_blocks: int = 100_000,
        slack: float = 1.25,
        at_least: int = 4,
    ) -> None:
        self._block_bytes = block_bytes
        self._max_blocks = max_blocks
        self._slack = slack
        self._at_least = at_least
        self._engines: OrderedDict[bytes, str] = OrderedDict()
        self._rest = LeastInFlight()

    def choose(self, candidates: Sequence[Member], load: Load, hint: Hint = NO_HINT) -> Member:
        blocks = self._blocks(hint.prompt)
        bound = load_bound(candidates, load, slack=self._slack, at_least=self._at_least)
        by_id = {member.engine_id: member for member in candidates}
        chosen = None
        for block in reversed(blocks):
            member = by_id.get(self._engines.get(block, ""))
            if member is not None and load(member.engine_id) < bound:
                chosen = member
                break
        chosen = chosen or self._rest.choose(candidates, load)
        for block in blocks:
            self._engines[block] = chosen.engine_id
            self._engines.move_to_end(block)
        while len(self._engines) > self._max_blocks:
            self._engines.popitem(last=False)
        return chosen

    def _blocks(self, prompt: bytes) -> list[bytes]:
        chain = blake2b(digest_size=8)
        blocks = []
        for start in range(0, len(prompt) - self._block_bytes + 1, self._block_bytes):
            chain.update(prompt[start : start + self._block_bytes])
            blocks.append(chain.digest())
        return blocks


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest())


def policy_of(name: str, *, session_ttl_s: float, max_sessions: int) -> Policy:
    """The policy of this name, as the configuration has it."""
    if name == "session":
        return Sessions(ttl_s=session_ttl_s, max_sessions=max_sessions)
    makers: dict[str, Callable[[], Policy]] = {
        "least_in_flight": LeastInFlight,
        "power_of_two": PowerOfTwo,
        "round_robin": RoundRobin,
        "prefix": PrefixAffinity,
    }
    return makers[name]()


T = TypeVar("T")


class InFlight(Generic[T]):
    """The live requests of every engine.

    Adding a live request again and discarding one that is not live change nothing, so whoever
    is unsure whether a request has ended may end it once more.
    """

    def __init__(self) -> None:
        self._live: dict[str, set[T]] = {}

    def add(self, engine_id: str, request: T) -> None:
        self._live.setdefault(engine_id, set()).add(request)

    def discard(self, engine_id: str, request: T) -> bool:
        """End ``request``; False if it had already ended."""
        live = self._live.get(engine_id)
        if live is None or request not in live:
            return False
        live.remove(request)
        if not live:
            del self._live[engine_id]
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
