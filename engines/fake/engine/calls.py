"""How a fake engine handles a call: it arrives, waits, and may fail as planned.

Always true:
- a call to an engine that has died, or dies during the call, gets ``EngineUnreachable``;
- time passes only where the event loop's clock does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from engines.fake.engine.fake_weights import FatalCall
from engines.fake.engine.faults import CallGate, Fault, FaultKind, FaultPlan, RecordedCall, lose
from engines.protocol.errors import EngineRejected, EngineUnreachable


class EngineDied(Exception):
    """The engine ended while a call of it waited."""


class CallHandler:
    """Base of the fake engine: receives calls and applies faults; subclasses carry calls out.

    Attributes:
        faults: what goes wrong with which call; see ``engines/fake/README.md``.
        director: called for every call, after ``faults``; returns the fault that strikes it.  A
            test that explores orders of events decides here, and may let the call wait.
        is_frozen: nothing is answered, as after SIGSTOP.
        calls: every call that reached it, in order.
        death_reason: what ended it, or empty while it lives.
    """

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.calls: list[RecordedCall] = []
        self.death_reason = ""
        self.faults = FaultPlan()
        self.director: Callable[[RecordedCall], Awaitable[Fault | None]] | None = None
        self.is_frozen = False
        self._is_wedged = False  # pause and continue are never answered again
        self._changed = asyncio.Event()

    # For tests: faults in, facts out

    def hold(self, operation: str) -> CallGate:
        """Hold every call of ``operation`` before it does anything, until the gate is opened.

        A generation is held when it has been admitted: it counts as in flight.
        """
        gate = self.faults.gates[operation] = CallGate(self._notify)
        return gate

    def fail_next(self, operation: str, error: BaseException) -> None:
        """The next call of ``operation`` raises ``error`` and does nothing."""
        self.faults.strike(operation, Fault(FaultKind.REJECT, error=error))

    def lose_next_answer(self, operation: str) -> None:
        """The next call of ``operation`` takes effect, and its connection breaks."""
        self.faults.strike(operation, lose(executed=True))

    def freeze(self) -> None:
        """Stand still as under SIGSTOP: nothing is answered or done, until ``thaw`` or a kill."""
        self.is_frozen = True

    def thaw(self) -> None:
        """Go on as after SIGCONT."""
        self.is_frozen = False
        self._notify()

    def die(self, reason: str) -> None:
        """End it; calls that wait for an answer get a broken connection."""
        self.death_reason = self.death_reason or reason
        self._notify()

    async def died(self) -> str:
        """Wait until something has ended it; return the reason."""
        while not self.is_dead:
            await self._changed.wait()
        return self.death_reason

    @property
    def is_dead(self) -> bool:
        return bool(self.death_reason)

    def operations(self) -> list[str]:
        """Names of the calls it got, in order."""
        return [call.operation for call in self.calls]

    def _garble(self) -> None:
        """Corrupt the weights."""
        raise NotImplementedError

    # How a call is made

    def _call(self, operation: str, **arguments: Any) -> _ControlCall:
        return _ControlCall(self, operation, arguments)

    async def _arrive(self, operation: str, arguments: Mapping[str, Any]) -> Fault | None:
        """Record a call; the fault that strikes it later, if any."""
        call = RecordedCall(operation, arguments, asyncio.get_running_loop().time())
        self.calls.append(call)
        if self.is_dead:
            raise EngineUnreachable(
                f"engine {self.engine_id}: {operation} cannot connect: {self.death_reason}",
                engine=self.engine_id,
                operation=operation,
                maybe_executed=False,
            )
        fault = self.faults.for_call(operation)
        if self.director is not None:
            fault = await self.director(call) or fault
            if self.is_dead:
                raise self._broken(operation)
        if fault is not None and fault.moment == "before":
            await self._strike(operation, fault)
            return None
        if self.is_frozen:
            await self._until(always)
        return fault

    async def _strike(self, operation: str, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.REJECT:
                raise fault.error or self._rejected(operation, fault.body, fault.status)
            case FaultKind.LOSE:
                raise self._broken(operation)
            case FaultKind.DIE:
                raise FatalCall(f"a planned death in {operation}")
            case FaultKind.HANG:
                await self._until(never)
            case FaultKind.FREEZE:
                self.freeze()
                await self._until(always)
            case FaultKind.SLOW:
                await self._until(never, fault.seconds)
            case FaultKind.GARBLE:
                self._garble()

    async def _pass_gate(self, operation: str, is_over: Callable[[], bool] = bool) -> None:
        gate = self.faults.gates.get(operation)
        if gate is None or gate.is_open:
            return
        with gate.waiting():
            try:
                await self._until(lambda: gate.is_open or is_over())
            except EngineDied:
                raise self._broken(operation) from None

    async def _until(self, is_so: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until ``is_so``; False if it was not within ``timeout_s``."""
        if is_so() and not self.is_frozen and not self.is_dead:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                while not self.is_dead and (self.is_frozen or not is_so()):
                    await self._changed.wait()
        except TimeoutError:
            # A frozen engine notices only later that the time is over.
            while self.is_frozen and not self.is_dead:
                await self._changed.wait()
            return is_so()
        if self.is_dead:
            raise EngineDied
        return True

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # What ends or refuses a call

    def _assert(self, holds: bool, reason: str) -> None:
        if not holds:
            raise FatalCall(reason)

    def _broken(self, operation: str) -> EngineUnreachable:
        reason = self.death_reason or "its answer was lost"
        return EngineUnreachable(
            f"engine {self.engine_id}: {operation}: connection broke: {reason}",
            engine=self.engine_id,
            operation=operation,
        )

    def _rejected(self, operation: str, body: str, status: int = 400) -> EngineRejected:
        return EngineRejected(
            f"engine {self.engine_id}: {operation} answered {status}: {body}",
            engine=self.engine_id,
            operation=operation,
            status=status,
            body=body,
        )


class _ControlCall:
    """One control call from its arrival to its answer.

    A class, not a generator: explorers make millions of calls.
    """

    __slots__ = ("_arguments", "_engine", "_fault", "_operation")

    def __init__(self, engine: CallHandler, operation: str, arguments: Mapping[str, Any]) -> None:
        self._engine = engine
        self._operation = operation
        self._arguments = arguments
        self._fault: Fault | None = None

    async def __aenter__(self) -> None:
        engine, operation = self._engine, self._operation
        try:
            self._fault = await engine._arrive(operation, self._arguments)
            if engine.faults.gates:
                await engine._pass_gate(operation)
            if engine._is_wedged and operation.endswith("_generation"):
                await engine._until(never)
        except (FatalCall, EngineDied) as error:
            self._end(error)

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        if isinstance(error, FatalCall | EngineDied):
            self._end(error)
        if error is None and self._fault is not None:
            try:
                await self._engine._strike(self._operation, self._fault)
            except (FatalCall, EngineDied) as fatal:
                self._end(fatal)

    def _end(self, error: BaseException) -> None:
        if isinstance(error, FatalCall):
            self._engine.die(str(error))
        raise self._engine._broken(self._operation) from None


def always() -> bool:
    """Condition to wait for: only until the engine is thawed."""
    return True


def never() -> bool:
    """Condition to wait for: until the deadline, or forever."""
    return False
