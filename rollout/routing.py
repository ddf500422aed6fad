"""Choosing an engine for a request.

Pure: values in, a choice out; no await, clock or socket.  How many requests an engine has is
always computed from the set of live requests, never counted up and down beside it, so it cannot
drift.  Another policy is another class with ``choose``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    """

    engine_id: str
    endpoint: Endpoint
    state: MemberState = MemberState.SERVING
    worker_type: WorkerType = WorkerType.REGULAR
    because: str = ""

    @property
    def is_choosable(self) -> bool:
        """A plain request can be sent to it.  Prefill and decode engines only work in pairs."""
        return self.state is MemberState.SERVING and self.worker_type is WorkerType.REGULAR


class Policy(Protocol):
    """A way to choose.  ``candidates`` is never empty; ``load`` gives an engine's live requests."""

    def choose(self, candidates: Sequence[Member], load: Callable[[str], int]) -> Member: ...


class LeastInFlight:
    """The engine with the fewest live requests; among equals, the next one in turn.

    Without the turn, the first of several idle engines would get every request of a quiet hour.
    """

    def __init__(self) -> None:
        self._last = ""

    def choose(self, candidates: Sequence[Member], load: Callable[[str], int]) -> Member:
        start = 0
        for index, member in enumerate(candidates):
            if member.engine_id == self._last:
                start = index + 1
                break
        best = least_in_flight(candidates, load, start)
        self._last = best.engine_id
        return best


def least_in_flight(candidates: Sequence[Member], load: Callable[[str], int], start: int) -> Member:
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
