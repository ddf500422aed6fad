"""The gate of the router: which requests are admitted, held or refused.

Always true:
- A request is on an engine only between its admission and ``leave``; it ends exactly once.
- No request is admitted unless the gate is open and an engine serves.  Choice, weight version and
  admission are one step: no other event comes between them.
- A held request is admitted, refused with a reason, or its client leaves.  Of those that may be
  admitted the one that came first is the next, also among those that waited for a weight version.
- While the gate is open a request is held only behind others that were, until its turn comes, or
  for a weight version that its contract wants and that is not served so far.  No other request
  waits behind such a one.
- What would answer an admitted request fits its contract, and its engine gives the log-probs that
  the request requires.
- What is decided for many requests is carried out for some of them at a time, and by one caller:
  what a request does then leads to no decision about another one within it.
- A gate that was opened holds while no engine serves and recovery may bring one back.
- An error in the callback of one request reaches neither the caller nor another request.

There is no await and no sleep here.  All calls come from one thread (the router's event loop); time
comes in as ``clock`` and, for deadlines, as the event ``expire``.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from engines.protocol import WorkerType
from engines.protocol.adapter_names import UNNAMED, Names, newest_version, resolved
from engines.protocol.plain_text import describe, one_line
from rollout.router.gate.aborts import AbortedRequests, AbortOrder
from rollout.router.gate.avoidance import AVOIDED_S
from rollout.router.gate.membership import Membership
from rollout.rules.contract import NO_CONTRACT, Contract, Fit
from rollout.rules.load_balancing import LeastInFlight
from rollout.rules.routing import (
    JUST_STARTED,
    NO_HINT,
    Backend,
    Candidates,
    Hint,
    InFlight,
    RoutingPolicy,
)

logger = logging.getLogger(__name__)

# In bytes of a body: a request costs as much as the copies of so many.
_WORK_PER_REQUEST = 64 << 10
_WORK_AT_ONCE = 1 << 19


class GateState(StrEnum):
    """Open admits, holding keeps requests waiting, closed refuses."""

    OPEN = "open"
    HOLDING = "holding"
    CLOSED = "closed"


@dataclass(eq=False, slots=True)
class Admission:
    """The right of one request to be on one engine, until ``Gate.leave``.

    Attributes:
        epoch: epoch of the membership it was admitted under.
        weight_version: version of the weights that answer it, or None if it is unknown.
        names: names of the weights that answer its prompts, as engines know them; None is the base.
        partner: the prefill engine, where ``member`` is a decode engine.
        sent_as: its id at the engine.
        prompts: ids of its prompts, if each has one -> their ids at the engine.
        on_evicted: called with the reason if a newer membership takes its engine away.
        on_aborted: called when its end was requested.
    """

    member: Backend
    epoch: int
    weight_version: int | None
    rid: str
    partner: Backend | None = None
    names: Names = (None,)
    sent_as: str = ""
    prompts: Mapping[str, str] | None = None
    on_evicted: Callable[[str], None] | None = None
    on_aborted: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was not admitted; the client gets 503, 499 if it was aborted, 500 if the
    router failed, 409 if no weights that it gets fit its contract, or 400 if no engine gives the
    log-probs that it requires.

    Attributes:
        needs_push: see ``Gate``.
        unmet: its contract wants another weight version than ``weight_version``: one that is
            ``past``, or that is ``late``.
        unfit: the engines that would have taken it and do not give what it requires.
    """

    message: str
    gate: GateState
    reason: str = ""
    phase: str = ""
    retry_after_s: int = 2
    is_abort: bool = False
    is_router_error: bool = False
    needs_push: int | None = None
    unmet: str = ""
    weight_version: int | None = None
    unfit: tuple[Backend, ...] = ()


@dataclass(eq=False, slots=True)
class Waiter:
    """A held request.  ``on_decision`` is called once, unless the request leaves before.

    Attributes:
        number: in the order of arrival.
    """

    rid: str
    num_bytes: int
    excluded_engine: str
    since_s: float
    hint: Hint = NO_HINT
    names: Names = UNNAMED
    prefers: Callable[[Backend], bool] | None = None
    contract: Contract = NO_CONTRACT
    requires: Callable[[Backend], bool] | None = None
    number: int = 0
    decision: Admission | Refusal | None = None
    on_decision: Callable[[Admission | Refusal], None] | None = None


@dataclass(frozen=True, slots=True)
class ConnectionFailure:
    """A request lost its engine; reported to the server, which probes and fences engines.

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

    Attributes:
        state: what a request meets.
        wanted: the state that the lifecycle set.
        needs_push: the gate is closed, and only a push of this weight version or a newer one opens
            it, or None where that is not all that is known.
        weight_version: version of the weights that engines serve, or None if it is unknown.
        base_version: version of the base under adapters; without adapters the same.
        adapters: from the names of clients to those of engines: which version of a LoRA adapter
            answers from now on, and under the empty name what answers a request without a name;
            None: the server takes none.
        pinned: the engines' names that requests and pins stay with, and how many do.
        call_soon: the event loop's, which calls the rest of the work later; None: all is done
            at once.

    Args:
        max_held: requests that may wait; one more is refused.
        max_held_bytes: bodies of waiting requests together.
        on_idle: called when the last live request of an engine ends.
    """

    def __init__(
        self,
        *,
        max_held: int = 4096,
        max_held_bytes: int = 1 << 30,
        policy: RoutingPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_failure: Callable[[ConnectionFailure], None] = lambda failure: None,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self.in_flight: InFlight[Admission] = InFlight()
        self.prefilling: InFlight[Admission] = InFlight()
        self.members = Membership(self.in_flight, self.prefilling)
        self.state = self.wanted = GateState.CLOSED
        self.reason = JUST_STARTED
        self.phase = ""
        self.needs_push: int | None = None
        self.weight_version: int | None = None
        self.base_version: int | None = None
        self.adapters: Mapping[str, str] | None = None
        self._unnamed = self._weights_of(UNNAMED)
        self.pinned: Counter[str] = Counter()
        self._since_s = clock()
        self._spent_s = dict.fromkeys(GateState, 0.0)
        self.call_soon: Callable[[Callable[[], None]], object] | None = None
        self._waiters: dict[Waiter, None] = {}
        self._later: dict[Waiter, None] = {}  # they wait for a weight version, at an open gate
        self._num_arrived = 0
        self._lost: deque[tuple[Admission, str]] = deque()  # to be evicted, and why
        self._is_carrying_out = False
        self._held_bytes = 0
        self._max_held = max_held
        self._max_held_bytes = max_held_bytes
        self.policy: RoutingPolicy = policy or LeastInFlight()
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
        needs_push: int | None = None,
        weight_version: int | None = None,
        base_version: int | None = None,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        """Open, hold or close.  Without ``weight_version`` the weights stay as they are.

        Args:
            needs_push: only for a gate that is closed.
            base_version: None for ``weight_version``.
        """
        self.wanted = state
        self.reason = reason
        self.phase = phase
        self.needs_push = needs_push
        if weight_version is not None:
            self.weight_version = weight_version
            self.base_version = weight_version if base_version is None else base_version
            self.adapters = adapters
            self._unnamed = self._weights_of(UNNAMED)
        self._settle()

    def version_for(self, names: Names) -> int | None:
        """The weight version that would answer a request with these names now."""
        return (self._unnamed if names == UNNAMED else self._weights_of(names))[1]

    def _line_up(self) -> None:
        """Let those that waited for a weight version take their turn, if it may be theirs."""
        if not self._later:
            return
        is_end = self.state is GateState.CLOSED or (
            self.state is GateState.OPEN and not self.members.can_serve
        )
        fits = [
            waiter
            for waiter in self._later
            if is_end or waiter.contract.fit(self.version_for(waiter.names)) is not Fit.LATER
        ]
        if fits:
            for waiter in fits:
                del self._later[waiter]
            in_order = sorted((*self._waiters, *fits), key=lambda waiter: waiter.number)
            self._waiters = dict.fromkeys(in_order)

    def _settle(self) -> None:
        """Set the state to what was wanted, or hold while recovery may bring an engine back."""
        state, members = self.wanted, self.members
        if state is GateState.OPEN:
            is_waiting = not members.can_serve and members.may_return
            state = GateState.HOLDING if is_waiting else state
            why = f"recovery brings engines back: {members.why_none_serves()}"
            self.reason = why if is_waiting else ""
        if state is not self.state:
            now_s = self._clock()
            self._spent_s[self.state] += now_s - self._since_s
            self._since_s = now_s
        self.state = state
        self._line_up()
        self._carry_out()

    def set_members(self, epoch: int, members: Sequence[Backend]) -> bool:
        """Use this full set of engines from now on; False if its epoch is not newer.

        Requests on engines that are removed, dead or fenced now are evicted.  Draining and
        sleeping engines finish their requests.
        """
        if not self.members.replace(epoch, members):
            return False
        for waiter in (*self._waiters, *self._later):
            waiter.excluded_engine = ""  # the newer set says which engines serve
        for admission in self.in_flight:
            why = self.members.why_lost(admission.member)
            if not why and admission.partner is not None:
                why = self.members.why_lost(admission.partner)
            if why:
                self._lost.append((admission, why))
        self._settle()
        return True

    def still_serves(self, admission: Admission) -> bool:
        """Its engine has served without a break since its admission."""
        return self.members.serves_since(admission.member) <= admission.epoch

    def _carry_out(self) -> None:
        """Evict who has lost an engine, and release who is held, unless the gate holds."""
        if self._is_carrying_out:
            return
        self._is_carrying_out, left = True, _WORK_AT_ONCE
        try:
            while self._lost or (self._waiters and self.state is not GateState.HOLDING):
                if left <= 0 and self.call_soon is not None:
                    self.call_soon(self._carry_out)
                    break
                left -= _WORK_PER_REQUEST
                if self._lost:
                    self._evict(*self._lost.popleft())
                else:
                    waiter = next(iter(self._waiters))
                    left -= waiter.num_bytes
                    self._release(waiter)
        finally:
            self._is_carrying_out = False

    def _evict(self, admission: Admission, why: str) -> None:
        if admission.on_evicted is not None:
            try:
                admission.on_evicted(why)
            except Exception:
                logger.exception("request %s failed as it was evicted", one_line(admission.rid))

    def _release(self, waiter: Waiter) -> None:
        self._remove_waiter(waiter)
        decision: Admission | Refusal | None
        try:
            decision = self._admit_or_refuse(
                waiter.rid,
                waiter.excluded_engine,
                waiter.hint,
                waiter.names,
                waiter.prefers,
                waiter.contract,
                waiter.requires,
            )
        except Exception as error:
            logger.exception("held request %s could not be admitted", one_line(waiter.rid))
            decision = Refusal(describe(error, with_type=True), self.state, is_router_error=True)
        if decision is None:
            self._later[waiter] = None
            self._held_bytes += waiter.num_bytes
        else:
            self._decide(waiter, decision)

    def _decide(self, waiter: Waiter, decision: Admission | Refusal) -> None:
        waiter.decision = decision
        if waiter.on_decision is not None:
            try:
                waiter.on_decision(decision)
            except Exception:
                logger.exception("held request %s failed as it was released", one_line(waiter.rid))
                self.leave(waiter)

    # -- what a request does ----------------------------------------------------------------

    def enter(
        self,
        *,
        rid: str = "",
        num_bytes: int = 0,
        excluded_engine: str = "",
        hint: Hint = NO_HINT,
        names: Names = UNNAMED,
        prefers: Callable[[Backend], bool] | None = None,
        contract: Contract = NO_CONTRACT,
        requires: Callable[[Backend], bool] | None = None,
    ) -> Admission | Refusal | Waiter:
        """Request admission.

        Args:
            excluded_engine: an engine that must not be chosen.
            names: names of the weights that shall answer, as the client or an admission has them.
            prefers: one of these engines is chosen, if there is any.
            contract: contract whose weight versions count here.
            requires: only these engines may be chosen, by their ``logprobs``.
        """
        is_later = False
        if self.state is not GateState.HOLDING and not self._waiters:
            decision = self._admit_or_refuse(
                rid, excluded_engine, hint, names, prefers, contract, requires
            )
            if decision is not None:
                return decision
            is_later = True
        elif contract is not NO_CONTRACT:
            served = self.version_for(names)
            if contract.fit(served) is Fit.NEVER:
                return self._refuse_version(contract, served)
        if self.num_held >= self._max_held:
            return self._refuse_more()
        if self._held_bytes + num_bytes > self._max_held_bytes:
            return self._refuse(f"held requests already take {self._held_bytes} bytes")
        now_s = self._clock()
        self._num_arrived += 1
        waiter = Waiter(
            rid,
            num_bytes,
            excluded_engine,
            now_s,
            hint,
            names,
            prefers,
            contract,
            requires,
            self._num_arrived,
        )
        (self._later if is_later else self._waiters)[waiter] = None
        self._held_bytes += num_bytes
        return waiter

    def would_refuse(self) -> Refusal | None:
        """The refusal that a request would get now, so its body need not be read first."""
        if self.state is GateState.OPEN and self.members.can_serve:
            return None
        if self.state is GateState.HOLDING and self.num_held < self._max_held:
            return None
        if self.state is GateState.HOLDING:
            return self._refuse_more()
        decision = self._admit_or_refuse("", "", NO_HINT, UNNAMED)
        return decision if isinstance(decision, Refusal) else None

    def expire(self, waiter: Waiter) -> None:
        """The deadline of ``waiter`` has passed."""
        if self._remove_waiter(waiter):
            held, served = self._clock() - waiter.since_s, self.version_for(waiter.names)
            if waiter.contract.fit(served) is Fit.LATER:
                refusal = self._refuse_version(waiter.contract, served, held)
            else:
                refusal = self._refuse(f"held for {held:.0f} s and not released")
            self._decide(waiter, refusal)

    def leave(self, request: Admission | Waiter) -> None:
        """Release a finished request.  Idempotent."""
        if isinstance(request, Waiter):
            self._remove_waiter(request)
            if isinstance(request.decision, Admission):
                self.leave(request.decision)
            return
        partner, engine_id = request.partner, request.member.engine_id
        if partner is not None:
            self.prefilling.discard(partner.engine_id, request)
        self.in_flight.discard(engine_id, request)
        if not self.in_flight.num(engine_id) or (partner and not self.num_on(partner.engine_id)):
            self._on_idle()

    def pin(self, names: Names) -> None:
        """A request, or a client between two of them, stays with these weights until ``unpin``."""
        if any(names):
            self.pinned.update(filter(None, names))

    def unpin(self, names: Names) -> None:
        """It has ended."""
        if any(names):
            self.pinned.subtract(filter(None, names))
            self.pinned = +self.pinned
            self._on_idle()

    def num_on(self, engine_id: str) -> int:
        """Live requests of one engine, whether it decodes or prefills them."""
        return self.in_flight.num(engine_id) + self.prefilling.num(engine_id)

    def report_failure(
        self,
        admission: Admission,
        operation: str,
        message: str,
        *,
        is_partner: bool = False,
        leaves_routing: bool = True,
    ) -> ConnectionFailure:
        """The connection of ``admission`` failed: its engine gets no more requests, unless the
        request may be the cause (``leaves_routing``)."""
        member = admission.partner if is_partner and admission.partner else admission.member
        engine_id = member.engine_id
        has_left = self.members.fail(
            engine_id, admission.epoch, message, leaves_routing=leaves_routing
        )
        if has_left:
            self._settle()
        failure = ConnectionFailure(
            engine_id, operation, message, has_left, self.members.num_failures(engine_id)
        )
        self._on_failure(failure)
        return failure

    def note_reply(self, admission: Admission, *, is_error: bool) -> None:
        """The engine of ``admission`` has begun to reply, or failed it with an error of its own.

        While the gate is not open, an error may be of the pause.
        """
        members, engine_id = self.members, admission.member.engine_id
        if not is_error:
            if members.errors:
                members.end_errors(engine_id)
        elif (
            self.state is GateState.OPEN
            and self.still_serves(admission)
            and members.add_error(engine_id, self._clock())
        ):
            logger.warning(
                "engine %s is avoided for %.0f s: its last %d replies were errors of its own",
                engine_id,
                AVOIDED_S,
                members.errors[engine_id].num,
            )

    # -- aborts -----------------------------------------------------------------------------

    def abort(self, order: AbortOrder) -> AbortedRequests:
        """End the held requests that an order names; those on engines are found, and know it."""
        found = AbortedRequests()
        held = (*self._waiters, *self._later)
        for waiter in [waiter for waiter in held if order.names(waiter.rid)]:
            self._remove_waiter(waiter)
            self._num_refused += 1
            found.num_held += 1
            self._decide(waiter, self.aborted("aborted while held"))
        for admission in list(self.in_flight):
            ids = _named_on_engine(admission, order)
            if not ids:
                continue
            found.num_on_engines += 1
            is_all_of_it = not admission.prompts or len(ids) == len(admission.prompts)
            for member in filter(None, (admission.member, admission.partner)):
                found.add(member, ids, is_left_to_it=not is_all_of_it)
            if is_all_of_it and admission.on_aborted is not None:
                admission.on_aborted()
        return found

    def aborted(self, message: str) -> Refusal:
        """What the client of an aborted request without tokens gets."""
        return Refusal(message, self.state, self.reason, self.phase, is_abort=True)

    # -- what can be seen -------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self.state is GateState.OPEN and self.members.can_serve

    @property
    def num_held(self) -> int:
        return len(self._waiters) + len(self._later)

    def seconds_by_state(self) -> dict[str, float]:
        """How long the gate has been in each state so far."""
        spent_s = {state.value: spent for state, spent in self._spent_s.items()}
        spent_s[self.state.value] += self._clock() - self._since_s
        return spent_s

    def stats(self) -> dict[str, Any]:
        """State, counts and engines, ready for JSON."""
        return {
            "gate": {
                "state": self.state.value,
                "reason": self.reason,
                "phase": self.phase,
                "needs_push": self.needs_push,
                "weight_version": self.weight_version,
                "base_version": self.base_version,
                "adapters": None if self.adapters is None else dict(self.adapters),
                "pinned": dict(self.pinned),
                "in_state_s": round(self._clock() - self._since_s, 3),
                "num_held": self.num_held,
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
                    "kind": member.kind,
                    "worker_type": member.worker_type.value,
                    "logprobs": asdict(member.logprobs),
                    "state": member.state.value,
                    "reason": member.reason,
                    "num_in_flight": self.num_on(member.engine_id),
                    "num_failures": self.members.num_failures(member.engine_id),
                    "is_avoided": member.engine_id in self.members.avoided,
                }
                for member in self.members
            ],
        }

    # -- within -----------------------------------------------------------------------------

    def _admit_or_refuse(
        self,
        rid: str,
        excluded_engine: str,
        hint: Hint,
        names: Names,
        prefers: Callable[[Backend], bool] | None = None,
        contract: Contract = NO_CONTRACT,
        requires: Callable[[Backend], bool] | None = None,
    ) -> Admission | Refusal | None:
        """None: it waits for a weight version."""
        if self.state is GateState.CLOSED:
            return self._refuse("the router is closed")
        members = self.members
        names, version = self._unnamed if names == UNNAMED else self._weights_of(names)
        if contract is not NO_CONTRACT and (fit := contract.fit(version)) is not Fit.NOW:
            if fit is Fit.NEVER:
                return self._refuse_version(contract, version)
            if members.can_serve:
                return None
        if members.avoided:
            members.avoid_at(self._clock())
        choosable, decode = members.choosable, members.decode
        # Engines mostly have one rule, and a choice must not cost more with their number.
        if requires is not None and not all(map(requires, members.of_each_rule)):
            choosable, decode = choosable.only(requires), decode.only(requires)
        member = _choose(self.policy, choosable, excluded_engine, hint, prefers)
        partner = None
        if member is None:
            # The cached prompts are on the prefill engine, so the policy chooses that.
            member = _choose(self._decode_policy, decode, excluded_engine, NO_HINT, prefers)
            partner = _choose(self.policy, members.prefill, excluded_engine, hint)
        if member is None or (partner is None and member.worker_type is WorkerType.DECODE):
            decoding = members.decode.members if members.prefill.members else ()
            able = (*members.choosable.members, *decoding)
            unfit = tuple(member for member in able if member.engine_id != excluded_engine)
            if requires is not None and unfit:
                names_of = ", ".join(member.engine_id for member in unfit[:8])
                return self._refuse(f"no engine fits of {names_of}", unfit=unfit)
            return self._refuse(f"no engine serves: {members.why_none_serves()}")
        admission = Admission(member, members.epoch, version, rid, partner, names)
        try:
            self.in_flight.add(member.engine_id, admission)
            if partner is not None:
                self.prefilling.add(partner.engine_id, admission)
        except Exception:
            self.leave(admission)
            raise
        self._num_admitted += 1
        return admission

    def _weights_of(self, names: Names) -> tuple[Names, int | None]:
        """What answers a request with these names now: the engines' names, and the version."""
        names = resolved(names, self.adapters or {})
        return names, newest_version(names, self.base_version)

    def _refuse(
        self,
        message: str,
        *,
        unmet: str = "",
        weight_version: int | None = None,
        unfit: tuple[Backend, ...] = (),
    ) -> Refusal:
        self._num_refused += 1
        return Refusal(
            message,
            self.state,
            self.reason,
            self.phase,
            needs_push=self.needs_push,
            unmet=unmet,
            weight_version=weight_version,
            unfit=unfit,
        )

    def _refuse_version(
        self, contract: Contract, served: int | None, held_s: float | None = None
    ) -> Refusal:
        """Another weight version answers than the contract wants."""
        unmet = "past" if held_s is None else "late"
        how = "is past" if held_s is None else f"was not served within {held_s:.0f} s"
        now = "no known one" if served is None else served
        message = f"{contract.words} {how}: weight version {now} is served"
        return self._refuse(message, unmet=unmet, weight_version=served)

    def _refuse_more(self) -> Refusal:
        return self._refuse(f"{self.num_held} requests are already held")

    def _remove_waiter(self, waiter: Waiter) -> bool:
        if waiter in self._waiters:
            del self._waiters[waiter]
        elif waiter in self._later:
            del self._later[waiter]
        else:
            return False
        self._held_bytes -= waiter.num_bytes
        return True


def _named_on_engine(admission: Admission, order: AbortOrder) -> list[str]:
    """The ids at its engine of what an order names of this request; none if that is nothing."""
    if admission.prompts:
        return [sent for rid, sent in admission.prompts.items() if order.names(rid)]
    # A client that gave no id knows the engine's, from the reply.
    is_named = order.names(admission.rid) or admission.sent_as in order.rids
    return [admission.sent_as] if is_named else []


def _choose(
    policy: RoutingPolicy,
    candidates: Candidates,
    excluded_engine: str,
    hint: Hint,
    prefers: Callable[[Backend], bool] | None = None,
) -> Backend | None:
    if excluded_engine:
        candidates = candidates.without(excluded_engine)
    if prefers is not None and (preferred := candidates.only(prefers)).members:
        candidates = preferred
    return policy.choose(candidates, hint) if candidates.members else None
