"""After a crash: lists the processes of a run that still exist, and ends leftover engines.

Always true: ``inspect`` changes nothing.  A process is ended only by its identity, and only if the
driver of the run is known to be gone.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from engines.http.client import EngineClient
from engines.process.engine_records import end_and_clear
from engines.process.process_identity import (
    is_of_this_boot,
    is_running,
    is_visible,
    pids_of,
    resident_bytes,
)
from engines.protocol import Endpoint, EngineAccess, ProcessIdentity
from engines.protocol.errors import EngineError
from rollout.control.server.journal import EngineEntry, JournalRecord
from rollout.core.errors import RolloutError

_INSPECT_TIMEOUT_S = 5.0
# As for an engine on GPUs: the journal does not say what it runs on.
_END_TIMEOUT_S = 150.0


class ProcessState(StrEnum):
    """Whether a process of the run still exists."""

    RUNS = "runs"
    ENDED = "ended"
    EARLIER_BOOT = "ended: the machine was restarted"
    ELSEWHERE = "on another machine, or in another container"
    NOT_OURS = "not ours"


@dataclass(frozen=True, slots=True)
class FoundEngine:
    """One engine of a record, and its current state.

    Attributes:
        reply: what it replies now, or why it does not reply.
        pids: its processes on this machine.
    """

    entry: EngineEntry
    state: ProcessState
    reply: str
    is_ready: bool = False
    weight_version: str = ""
    pids: tuple[int, ...] = ()
    resident_bytes: int = 0


@dataclass(frozen=True, slots=True)
class FoundServer:
    """One server of a run.

    Attributes:
        driver: state of the process that launched it.
        engines: empty if the server was stopped in order.
    """

    record: JournalRecord
    driver: ProcessState
    engines: tuple[FoundEngine, ...]


def process_state(identity: ProcessIdentity) -> ProcessState:
    """Whether one process still exists."""
    if identity.host != socket.gethostname():
        return ProcessState.ELSEWHERE
    if not is_of_this_boot(identity):
        return ProcessState.EARLIER_BOOT
    if not is_visible(identity):
        return ProcessState.ELSEWHERE
    return ProcessState.RUNS if is_running(identity) or pids_of(identity) else ProcessState.ENDED


async def inspect(record: JournalRecord) -> FoundServer:
    """Inspect all engines of a server; changes nothing."""
    engines: Sequence[FoundEngine] = ()
    if not record.is_ended:
        engines = await asyncio.gather(*(_inspect_engine(entry) for entry in record.engines))
    return FoundServer(record, process_state(record.driver), tuple(engines))


async def _inspect_engine(entry: EngineEntry) -> FoundEngine:
    state, pids, held = ProcessState.NOT_OURS, [], 0
    if entry.processes:
        states = [process_state(identity) for identity in entry.processes]
        # An engine over several nodes counts as running if one of its processes runs.
        state = next((each for each in ProcessState if each in states), ProcessState.ENDED)
        pids = [pid for identity in entry.processes for pid in pids_of(identity)]
        held = resident_bytes(entry.processes)
    found = FoundEngine(entry, state, "", pids=tuple(pids), resident_bytes=held)
    client = EngineClient(Endpoint.of_url(entry.url), engine_id=entry.engine_id)
    client.authorize(EngineAccess(entry.key))
    try:
        async with asyncio.timeout(_INSPECT_TIMEOUT_S):
            version = await client.weight_version()
            is_ready = await client.is_ready()
        reply = "takes requests" if is_ready else "answers, and takes no requests"
        return replace(found, reply=reply, is_ready=is_ready, weight_version=version)
    except TimeoutError:
        return replace(found, reply=f"does not answer within {_INSPECT_TIMEOUT_S:g} s")
    except EngineError as error:
        return replace(found, reply=str(error))
    finally:
        await client.aclose()


def check_driver_gone(found: Sequence[FoundServer]) -> None:
    """Refuse to change a run whose driver may still run.

    Raises:
        RolloutError: its driver runs, or was on another machine or in another container, where it
            cannot be checked.
    """
    for server in found:
        driver = server.record.driver
        if server.driver is ProcessState.RUNS:
            raise RolloutError(
                f"run {server.record.run_id}: its driver, process {driver.pid}, still runs and "
                "drives these engines; end it first (rollout stop)"
            )
        if server.driver is ProcessState.ELSEWHERE:
            raise RolloutError(
                f"run {server.record.run_id} was driven on {driver.host}, and this is "
                f"{socket.gethostname()}, or another container on it; do this there"
            )


async def clean_up(found: Sequence[FoundServer]) -> list[str]:
    """End the leftover engines that the run launched; returns those that were ended.

    Attached engines keep running: the run did not launch them.

    Raises:
        RolloutError: the driver of the run may still run.
        EngineHung: a process survives SIGKILL.
    """
    check_driver_gone(found)
    ended = []
    for server in found:
        for engine in server.engines:
            for identity in engine.entry.processes:
                num = await asyncio.to_thread(end_and_clear, identity, _END_TIMEOUT_S)
                if num:
                    ended.append(f"{engine.entry.engine_id} ({num} processes)")
    return ended
