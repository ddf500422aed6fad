"""Which engines may get requests: the full set of engines of an epoch.

Always true: the set is the one of the newest epoch, except that an engine whose connection failed
since then is ``dead``.  Only the owner of the epochs (the rollout server) brings a dead engine
back: after a probe and a weight check it pushes a newer set in which the engine serves.  A late
set (its epoch is not newer than the current one) changes nothing.

An engine that serves and only sends errors stays a member, and is avoided for a while.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engines.protocol import WorkerType
from rollout.router.gate.avoidance import ErrorSeries
from rollout.rules.routing import Backend, BackendState, Candidates, InFlight

_LOST = frozenset({BackendState.DEAD, BackendState.FENCED})


@dataclass(slots=True)
class _Entry:
    member: Backend
    serving_since: float
    num_failures: int = 0


class Membership:
    """The engines, their states and how often their connections failed.

    Args:
        in_flight: live requests of the candidates for whole requests and for decoding.
        prefilling: the same for prefill engines.

    Attributes:
        of_each_rule: of the engines that answer, one for each rule of log-probs.
        can_serve: an engine serves, or a pair of prefill and decode engines.
        may_return: recovery may bring back one of the engines that do not serve.
        dialects: of the engines' routes that generate.
        lacks_masks: one of them returns no sampling masks.
        vocabulary: tokens of their model; 0 if they are not known.
        errors: of the engines whose last reply was an error of their own, by id.
        avoided: engines that get requests only where no other can take them.
    """

    of_each_rule: tuple[Backend, ...]
    choosable: Candidates
    prefill: Candidates
    decode: Candidates
    can_serve: bool
    may_return: bool
    dialects: frozenset[str]
    lacks_masks: bool
    vocabulary: int
    errors: dict[str, ErrorSeries]
    avoided: frozenset[str]

    def __init__(self, in_flight: InFlight[Any], prefilling: InFlight[Any]) -> None:
        self.epoch = -1
        self._in_flight = in_flight
        self._prefilling = prefilling
        self._entries: dict[str, _Entry] = {}
        self.errors = {}
        self.avoided = frozenset()
        self._refresh_candidates()

    def replace(self, epoch: int, members: Sequence[Backend]) -> bool:
        """Use this full set from now on; False if its epoch is not newer.

        Raises:
            ValueError: two members have the same engine id.
        """
        if epoch <= self.epoch:
            return False
        entries: dict[str, _Entry] = {}
        for member in members:
            if member.engine_id in entries:
                raise ValueError(f"engine {member.engine_id} is in the set of epoch {epoch} twice")
            entries[member.engine_id] = self._successor(member, epoch)
        self.epoch = epoch
        self._entries = entries
        # One that served without a break has the errors that it had.
        since = {engine_id: entry.serving_since for engine_id, entry in entries.items()}
        self.errors = {
            engine_id: found
            for engine_id, found in self.errors.items()
            if since.get(engine_id, epoch) < epoch
        }
        self.avoided &= self.errors.keys()
        self._refresh_candidates()
        return True

    def _successor(self, member: Backend, epoch: int) -> _Entry:
        is_serving = member.state is BackendState.SERVING
        since = min(epoch, self.serves_since(member)) if is_serving else epoch
        return _Entry(member, since, self.num_failures(member.engine_id))

    def fail(self, engine_id: str, epoch: int, reason: str, *, leaves_routing: bool = True) -> bool:
        """Count a failed connection of a request admitted at ``epoch``; True if that made it dead.

        A request admitted before a restart is no evidence about the restarted engine: it is
        counted, and the engine stays.  So it does without ``leaves_routing``.
        """
        entry = self._entries.get(engine_id)
        if entry is None:
            return False
        entry.num_failures += 1
        if (
            not leaves_routing
            or epoch < entry.serving_since
            or entry.member.state is not BackendState.SERVING
        ):
            return False
        entry.member = replace(entry.member, state=BackendState.DEAD, reason=reason)
        self._refresh_candidates()
        return True

    def add_error(self, engine_id: str, now_s: float) -> bool:
        """Count a reply that is an error of the engine's own; True if it is avoided from now on."""
        if not self.errors.setdefault(engine_id, ErrorSeries()).add(now_s):
            return False
        self.avoid_at(now_s)
        return engine_id in self.avoided

    def end_errors(self, engine_id: str) -> None:
        """The engine has sent a reply that is no error."""
        if self.errors.pop(engine_id, None) is not None and engine_id in self.avoided:
            self.avoided -= {engine_id}
            self._refresh_candidates()

    def avoid_at(self, now_s: float) -> None:
        """Avoid the engines that are to be avoided at this time."""
        avoided = frozenset(
            engine_id for engine_id, found in self.errors.items() if found.is_avoided(now_s)
        )
        serving = (backend.engine_id for backend in self if backend.state is BackendState.SERVING)
        if avoided.issuperset(serving):  # then the requests may be the cause
            self.errors.clear()
            avoided = frozenset()
        if avoided != self.avoided:
            self.avoided = avoided
            self._refresh_candidates()

    def why_lost(self, member: Backend) -> str:
        """Why this engine cannot finish its requests."""
        entry = self._entry_of(member)
        if entry is None:
            return "taken out of the membership"
        if entry.member.state in _LOST:
            return f"is {_describe(entry.member)}"
        return ""

    def serves_since(self, member: Backend) -> float:
        """The epoch since which this engine has served without a break; infinite if it does not."""
        entry = self._entry_of(member)
        if entry is None or entry.member.state is not BackendState.SERVING:
            return float("inf")
        return entry.serving_since

    def _entry_of(self, member: Backend) -> _Entry | None:
        """The entry with its id, if that is at the same endpoint."""
        entry = self._entries.get(member.engine_id)
        return entry if entry is not None and entry.member.endpoint == member.endpoint else None

    def _refresh_candidates(self) -> None:
        serving = [member for member in self if member.state is BackendState.SERVING]
        self.choosable, self.decode = self._in_flight.offer(
            [member for member in serving if member.is_choosable],
            [member for member in serving if member.worker_type is WorkerType.DECODE],
            avoided=self.avoided,
        )
        (self.prefill,) = self._prefilling.offer(
            [member for member in serving if member.worker_type is WorkerType.PREFILL]
        )
        answering = (each for each in serving if each.worker_type is not WorkerType.PREFILL)
        self.of_each_rule = tuple({member.logprobs: member for member in answering}.values())
        self.dialects = frozenset(member.of_kind.dialect for member in self)
        self.lacks_masks = not all(member.logprobs.has_masks for member in self)
        self.vocabulary = min((each.vocabulary for each in self if each.vocabulary), default=0)
        has_pair = self.prefill.members and self.decode.members
        self.can_serve = bool(self.choosable.members or has_pair)
        self.may_return = any(
            member.may_return for member in self if member.state is not BackendState.SERVING
        )

    def __iter__(self) -> Iterator[Backend]:
        return (entry.member for entry in self._entries.values())

    def num_failures(self, engine_id: str) -> int:
        entry = self._entries.get(engine_id)
        return entry.num_failures if entry is not None else 0

    def why_none_serves(self) -> str:
        """The engines and their states, for an error message."""
        if not self._entries:
            return "the router has no engines"
        words = [f"{member.engine_id} is {_describe(member)}" for member in self]
        shown = "; ".join(words[:8])
        return f"{shown}; and {len(words) - 8} more" if len(words) > 8 else shown


def _describe(member: Backend) -> str:
    if member.state is BackendState.SERVING:
        return f"a {member.worker_type.value} engine"
    reason = f" ({member.reason})" if member.reason else ""
    return f"{member.state.value}{reason}"
