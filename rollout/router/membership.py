"""Who may get requests: the full set of engines under an epoch.

Always true: the set is the one of the newest epoch pushed, except that an engine whose connection
failed since then is ``dead``.  Only the owner of the epochs (the rollout server) brings a dead
engine back, by pushing a newer set that says it serves; it does so after a probe and a weight
check.  A set that is late (an epoch not newer than the present one) changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engines.protocol import WorkerType
from rollout.routing import Candidates, InFlight, Member, MemberState

_LOST = frozenset({MemberState.DEAD, MemberState.FENCED})


@dataclass(slots=True)
class _Entry:
    member: Member
    serving_since: int
    num_failures: int = 0


class Membership:
    """The engines, their states and how often their connections failed.

    Args:
        in_flight: tells the candidates for whole requests, and for decoding, how many they have.
        prefilling: the same for prefill engines.

    Attributes:
        can_serve: there is an engine for a request, or a pair of them.
    """

    choosable: Candidates
    prefill: Candidates
    decode: Candidates
    can_serve: bool

    def __init__(self, in_flight: InFlight[Any], prefilling: InFlight[Any]) -> None:
        self.epoch = -1
        self._in_flight = in_flight
        self._prefilling = prefilling
        self._entries: dict[str, _Entry] = {}
        self._choose_again()

    def replace(self, epoch: int, members: Sequence[Member]) -> bool:
        """Take over a full set; False if it is not newer than the one there is.

        Raises:
            ValueError: two members have the same engine id.
        """
        if epoch <= self.epoch:
            return False
        entries: dict[str, _Entry] = {}
        for member in members:
            if member.engine_id in entries:
                raise ValueError(f"engine {member.engine_id} is in the set of epoch {epoch} twice")
            entries[member.engine_id] = self._succeed(member, epoch)
        self.epoch = epoch
        self._entries = entries
        self._choose_again()
        return True

    def _succeed(self, member: Member, epoch: int) -> _Entry:
        before = self._entries.get(member.engine_id)
        if before is None:
            return _Entry(member, epoch)
        has_served_on = (
            before.member.state is MemberState.SERVING
            and member.state is MemberState.SERVING
            and before.member.endpoint == member.endpoint
        )
        since = before.serving_since if has_served_on else epoch
        return _Entry(member, since, before.num_failures)

    def fail(self, engine_id: str, epoch: int, because: str) -> bool:
        """Count a failed connection of a request admitted at ``epoch``; True if it killed.

        A request admitted before the engine was restarted says nothing about the new one: it
        is counted and the engine stays.
        """
        entry = self._entries.get(engine_id)
        if entry is None:
            return False
        entry.num_failures += 1
        if epoch < entry.serving_since or entry.member.state is not MemberState.SERVING:
            return False
        entry.member = replace(entry.member, state=MemberState.DEAD, because=because)
        self._choose_again()
        return True

    def why_lost(self, member: Member) -> str:
        """Why nothing more can be expected of it; empty if it can finish what it has."""
        entry = self._entries.get(member.engine_id)
        if entry is None or entry.member.endpoint != member.endpoint:
            return "taken out of the membership"
        if entry.member.state in _LOST:
            return f"is {_state_words(entry.member)}"
        return ""

    def serves_since(self, member: Member) -> float:
        """The epoch since when this engine has served without a break; infinite if it does not."""
        entry = self._entries.get(member.engine_id)
        if (
            entry is None
            or entry.member.endpoint != member.endpoint
            or entry.member.state is not MemberState.SERVING
        ):
            return float("inf")
        return entry.serving_since

    def _choose_again(self) -> None:
        serving = [member for member in self if member.state is MemberState.SERVING]
        self.choosable, self.decode = self._in_flight.offer(
            [member for member in serving if member.is_choosable],
            [member for member in serving if member.worker_type is WorkerType.DECODE],
        )
        (self.prefill,) = self._prefilling.offer(
            [member for member in serving if member.worker_type is WorkerType.PREFILL]
        )
        has_pair = self.prefill.members and self.decode.members
        self.can_serve = bool(self.choosable.members or has_pair)

    def __iter__(self) -> Iterator[Member]:
        return (entry.member for entry in self._entries.values())

    def num_failures(self, engine_id: str) -> int:
        entry = self._entries.get(engine_id)
        return entry.num_failures if entry is not None else 0

    def why_none_serves(self) -> str:
        """For the client that has to be told."""
        if not self._entries:
            return "the router has been given no engines"
        words = [_words(member) for member in self]
        shown = "; ".join(words[:8])
        return f"{shown}; and {len(words) - 8} more" if len(words) > 8 else shown


def _words(member: Member) -> str:
    if member.state is MemberState.SERVING:
        state = f"a {member.worker_type.value} engine"
        return f"{member.engine_id} is {state}"
    return f"{member.engine_id} is {_state_words(member)}"


def _state_words(member: Member) -> str:
    because = f" ({member.because})" if member.because else ""
    return f"{member.state.value}{because}"
