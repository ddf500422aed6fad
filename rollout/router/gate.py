"""The door of the router: who is let in, who waits, who is sent away.

Always true:
- A request is on an engine only between its admission and ``leave``; it ends exactly once.
- Nobody is admitted unless the gate is open and an engine serves.  Choice, weight version and
  admission are one step: no other event comes between them.
- Whoever waits is admitted in order of arrival, refused with a reason, or leaves by itself.
- While the gate is open nobody waits.

No await and no sleep in here.  All calls come from one thread (the router's event loop); time
comes in as ``clock`` and, for deadlines, as the event ``expire``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from engines.protocol import WorkerType
from rollout.choosing import LeastInFlight
from rollout.router.membership import Membership
from rollout.routing import NO_HINT, Candidates, Hint, InFlight, Member, Policy


class GateState(StrEnum):
    """Open admits, holding parks, closed refuses."""

    OPEN = "open"
    HOLDING = "holding"
    CLOSED = "closed"


@dataclass(eq=False, slots=True)
class Admission:
    """The right of one request to be on one engine, until ``Gate.leave``.

    Attributes:
        epoch: epoch of the membership it was admitted under.
        weight_version: what the engines held at that moment; None where nobody said.
        partner: the prefill engine, where ``member`` is a decode engine.
        is_aborted: somebody asked for its end.
        on_cut: called, with the reason, if its engine is lost to a newer membership.
    """

    member: Member
    epoch: int
    weight_version: int | None
    rid: str
    partner: Member | None = None
    is_aborted: bool = False
    on_cut: Callable[[str], None] | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was not admitted; goes to the client as 503, or 499 if it was aborted."""

    message: str
    gate: GateState
    reason: str = ""
    phase: str = ""
    retry_after_s: int = 2
    is_abort: bool = False


@dataclass(eq=False, slots=True)
class Waiter:
    """A parked request.  ``on_decision`` is called once, unless it leaves before."""

    rid: str
    num_bytes: int
    not_on: str
    since_s: float
    hint: Hint = NO_HINT
    decision: Admission | Refusal | None = None
    on_decision: Callable[[Admission | Refusal], None] | None = None


@dataclass(frozen=True, slots=True)
class ConnectionFailure:
    """A request lost its engine; told to whoever can probe and fence it.

    Attributes:
        has_left_routing: the engine was serving and is ``dead`` from now on.
        num_failures: failed connections of this engine so far.
    """

    engine_id: str
    operation: str
    message: str
    has_left_routing: bool
    num_failures: int


class Gate:
    """State, membership, live requests and waiters of one router.

    Args:
        max_held: requests that may wait; one more is refused.
        max_held_bytes: bodies of waiting requests together.
        on_idle: called whenever the last live request of an engine ends.
    """

    def __init__(
        self,
        *,
        max_held: int = 4096,
        max_held_bytes: int = 1 << 30,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_failure: Callable[[ConnectionFailure], None] = lambda failure: None,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self.in_flight: InFlight[Admission] = InFlight()
        self.prefilling: InFlight[Admission] = InFlight()
        self.members = Membership(self.in_flight, self.prefilling)
        self.state = GateState.CLOSED
        self.reason = "the router has just started"
        self.phase = ""
        self.weight_version: int | None = None
        self._since_s = clock()
        self._spent_s = dict.fromkeys(GateState, 0.0)
        self._waiters: dict[Waiter, None] = {}
        self._held_bytes = 0
        self._max_held = max_held
        self._max_held_bytes = max_held_bytes
        self.policy: Policy = policy or LeastInFlight()
        self._decode_policy = LeastInFlight()
        self._clock = clock
        self._on_failure = on_failure
        self._on_idle = on_idle
        self._num_admitted = 0
        self._num_refused = 0

    # -- what the lifecycle does ------------------------------------------------------------

    def set_state(
        self,
        state: GateState,
        *,
        reason: str = "",
        phase: str = "",
        weight_version: int | None = None,
    ) -> None:
        """Open, hold or close.  ``weight_version`` None leaves the version as it is."""
        if state is not self.state:
            now_s = self._clock()
            self._spent_s[self.state] += now_s - self._since_s
            self._since_s = now_s
        self.state = state
        self.reason = reason
        self.phase = phase
        if weight_version is not None:
            self.weight_version = weight_version
        if state is not GateState.HOLDING:
            self._decide_all()

    def set_members(self, epoch: int, members: Sequence[Member]) -> bool:
        """Take over a full set of engines; False if its epoch is not newer.

        Requests on engines that are gone, dead or fenced now are cut.  Draining and sleeping
        ones finish what they have.
        """
        if not self.members.replace(epoch, members):
            return False
        for admission in list(self.in_flight):
            why = self.members.why_lost(admission.member)
            if not why and admission.partner is not None:
                why = self.members.why_lost(admission.partner)
            if why and admission.on_cut is not None:
                admission.on_cut(why)
        return True

    def still_serves(self, admission: Admission) -> bool:
        """Its engine is the one it was admitted to, and would be chosen today."""
        return self.members.serves_since(admission.member) <= admission.epoch

    def _decide_all(self) -> None:
        waiters, self._waiters, self._held_bytes = list(self._waiters), {}, 0
        for waiter in waiters:
            _tell(waiter, self._admit_or_refuse(waiter.rid, waiter.not_on, waiter.hint))

    # -- what a request does ----------------------------------------------------------------

    def enter(
        self, *, rid: str = "", num_bytes: int = 0, not_on: str = "", hint: Hint = NO_HINT
    ) -> Admission | Refusal | Waiter:
        """Ask to be let in.  ``not_on`` names an engine that must not be chosen."""
        if self.state is not GateState.HOLDING:
            return self._admit_or_refuse(rid, not_on, hint)
        if len(self._waiters) >= self._max_held:
            return self._refuse(f"{len(self._waiters)} requests are already held")
        if self._held_bytes + num_bytes > self._max_held_bytes:
            return self._refuse(f"held requests already take {self._held_bytes} bytes")
        waiter = Waiter(rid, num_bytes, not_on, self._clock(), hint)
        self._waiters[waiter] = None
        self._held_bytes += num_bytes
        return waiter

    def would_refuse(self) -> Refusal | None:
        """The refusal a request would get now, so that its body need not be read first."""
        if self.state is GateState.OPEN and self.members.can_serve:
            return None
        if self.state is GateState.HOLDING and len(self._waiters) < self._max_held:
            return None
        decision = self.enter()
        return decision if isinstance(decision, Refusal) else None

    def expire(self, waiter: Waiter) -> None:
        """The deadline of ``waiter`` has come."""
        if self._unpark(waiter):
            held_s = self._clock() - waiter.since_s
            _tell(waiter, self._refuse(f"held for {held_s:.0f} s and not released"))

    def leave(self, request: Admission | Waiter) -> None:
        """The request has ended, however it did.  Once more does no harm."""
        if isinstance(request, Waiter):
            self._unpark(request)
            if isinstance(request.decision, Admission):
                self.leave(request.decision)
            return
        partner, engine_id = request.partner, request.member.engine_id
        if partner is not None:
            self.prefilling.discard(partner.engine_id, request)
        if self.in_flight.discard(engine_id, request) and (
            self.num_on(engine_id) == 0 or (partner and self.num_on(partner.engine_id) == 0)
        ):
            self._on_idle()

    def num_on(self, engine_id: str) -> int:
        """Live requests of one engine, whichever part of them it has."""
        return self.in_flight.num(engine_id) + self.prefilling.num(engine_id)

    def report_failure(
        self, admission: Admission, operation: str, message: str, *, is_partner: bool = False
    ) -> ConnectionFailure:
        """The connection of ``admission`` failed: its engine gets no more requests."""
        member = admission.partner if is_partner and admission.partner else admission.member
        engine_id = member.engine_id
        has_left = self.members.fail(engine_id, admission.epoch, message)
        failure = ConnectionFailure(
            engine_id, operation, message, has_left, self.members.num_failures(engine_id)
        )
        self._on_failure(failure)
        return failure

    # -- aborts -----------------------------------------------------------------------------

    def abort_held(self, rid: str | None) -> int:
        """Refuse the waiters with this rid, or all for None; how many there were."""
        waiters = [waiter for waiter in self._waiters if rid is None or waiter.rid == rid]
        for waiter in waiters:
            self._unpark(waiter)
            self._num_refused += 1
            _tell(
                waiter,
                Refusal("aborted while held", self.state, self.reason, self.phase, is_abort=True),
            )
        return len(waiters)

    def mark_aborted(self, rid: str | None) -> None:
        """Remember that these live requests, or all for None, are wanted no more."""
        for admission in self.in_flight:
            if rid is None or admission.rid == rid:
                admission.is_aborted = True

    def holders(self, rid: str) -> list[Member]:
        """The engines that have a live request with exactly this rid."""
        return [
            member
            for admission in self.in_flight
            if admission.rid == rid
            for member in (admission.member, admission.partner)
            if member is not None
        ]

    # -- what can be seen -------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self.state is GateState.OPEN and self.members.can_serve

    @property
    def num_held(self) -> int:
        return len(self._waiters)

    def seconds_by_state(self) -> dict[str, float]:
        """How long the gate has been in each state so far."""
        spent_s = {state.value: spent for state, spent in self._spent_s.items()}
        spent_s[self.state.value] += self._clock() - self._since_s
        return spent_s

    def stats(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return {
            "gate": {
                "state": self.state.value,
                "reason": self.reason,
                "phase": self.phase,
                "weight_version": self.weight_version,
                "in_state_s": round(self._clock() - self._since_s, 3),
                "num_held": len(self._waiters),
                "held_bytes": self._held_bytes,
            },
            "epoch": self.members.epoch,
            "num_in_flight": len(self.in_flight),
            "num_admitted": self._num_admitted,
            "num_refused": self._num_refused,
            "engines": [
                {
                    "engine_id": member.engine_id,
                    "url": member.endpoint.url,
                    "worker_type": member.worker_type.value,
                    "state": member.state.value,
                    "because": member.because,
                    "num_in_flight": self.num_on(member.engine_id),
                    "num_failures": self.members.num_failures(member.engine_id),
                }
                for member in self.members
            ],
        }

    # -- within -----------------------------------------------------------------------------

    def _admit_or_refuse(self, rid: str, not_on: str, hint: Hint) -> Admission | Refusal:
        if self.state is GateState.CLOSED:
            return self._refuse("the router is closed")
        members = self.members
        member = _choose(self.policy, members.choosable, not_on, hint)
        partner = None
        if member is None:
            # What a prompt or session left in a cache is on the prefill engine.
            member = _choose(self._decode_policy, members.decode, not_on, NO_HINT)
            partner = _choose(self.policy, members.prefill, not_on, hint)
        if member is None or (partner is None and member.worker_type is WorkerType.DECODE):
            return self._refuse(f"no engine serves: {members.why_none_serves()}")
        admission = Admission(member, members.epoch, self.weight_version, rid, partner)
        self.in_flight.add(member.engine_id, admission)
        if partner is not None:
            self.prefilling.add(partner.engine_id, admission)
        self._num_admitted += 1
        return admission

    def _refuse(self, message: str) -> Refusal:
        self._num_refused += 1
        return Refusal(message, self.state, self.reason, self.phase)

    def _unpark(self, waiter: Waiter) -> bool:
        if waiter not in self._waiters:
            return False
        del self._waiters[waiter]
        self._held_bytes -= waiter.num_bytes
        return True


def _tell(waiter: Waiter, decision: Admission | Refusal) -> None:
    waiter.decision = decision
    if waiter.on_decision is not None:
        waiter.on_decision(decision)


def _choose(policy: Policy, candidates: Candidates, not_on: str, hint: Hint) -> Member | None:
    if not_on:
        candidates = candidates.without(not_on)
    return policy.choose(candidates, hint) if candidates.members else None
