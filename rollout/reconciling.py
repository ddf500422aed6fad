"""After a crash: what of a run is still there, what of it can be used, and ending the rest.

Always true: looking changes nothing; a process is ended only by its identity and only when the
driver of the run is known to be gone; what a command may have left half done is never made to
serve, for nobody knows which of its calls arrived.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from engines.client import EngineClient
from engines.errors import EngineError
from engines.identity import boot_id, end, is_of_this_boot, is_running, pids_of, resident_bytes
from engines.protocol import Endpoint, ProcessIdentity
from rollout.errors import RolloutError
from rollout.journal import EngineEntry, Record
from rollout.lifecycle import Phase

_LOOK_S = 5.0
_CONTINUE_S = 30.0
_END_S = 20.0
# Nothing is released in these, and to be continued twice does an engine no harm.
_CAN_GO_ON = {Phase.SERVING.value, Phase.PAUSED.value, Phase.FLUSHED.value}
_HARMLESS = {"", "pause", "flush", "continue"}


class Remains(StrEnum):
    """What is left of an engine."""

    RUNS = "runs"
    ENDED = "ended"
    EARLIER_BOOT = "ended: the machine was restarted"
    ELSEWHERE = "on another machine"
    NOT_OURS = "not ours"


@dataclass(frozen=True, slots=True)
class EngineFound:
    """One engine of a record, and what is found of it.

    Attributes:
        says: what it answers now; why not, if it does not.
        is_ready: it takes requests.
        pids: its processes on this machine.
    """

    entry: EngineEntry
    remains: Remains
    says: str
    is_ready: bool = False
    weight_version: str = ""
    pids: tuple[int, ...] = ()
    resident_bytes: int = 0

    @property
    def is_attached(self) -> bool:
        return not self.entry.processes


@dataclass(frozen=True, slots=True)
class Found:
    """One server of a run.

    Attributes:
        driver: what is left of the process that launched it.
        engines: none where it was stopped in order.
    """

    record: Record
    driver: Remains
    engines: tuple[EngineFound, ...]


def remains_of(identity: ProcessIdentity) -> Remains:
    """What is left of one process."""
    if identity.host != socket.gethostname():
        return Remains.ELSEWHERE
    if not is_of_this_boot(identity):
        return Remains.EARLIER_BOOT
    return Remains.RUNS if is_running(identity) or pids_of(identity) else Remains.ENDED


async def look(record: Record) -> Found:
    """Find out what is left of a server; changes nothing."""
    engines: Sequence[EngineFound] = ()
    if not record.is_ended:
        engines = await asyncio.gather(*(_look_at(one) for one in record.engines))
    return Found(record, remains_of(record.driver), tuple(engines))


async def _look_at(entry: EngineEntry) -> EngineFound:
    remains, pids, held = Remains.NOT_OURS, [], 0
    if entry.processes:
        each = [remains_of(one) for one in entry.processes]
        # Of an engine over several nodes, the one that still runs is the news.
        remains = next((one for one in Remains if one in each), Remains.ENDED)
        pids = [pid for one in entry.processes for pid in pids_of(one)]
        held = resident_bytes(entry.processes)
    found = EngineFound(entry, remains, "", pids=tuple(pids), resident_bytes=held)
    client = EngineClient(Endpoint.of_url(entry.url), engine_id=entry.engine_id)
    try:
        async with asyncio.timeout(_LOOK_S):
            version = await client.weight_version()
            is_ready = await client.is_ready()
        says = "takes requests" if is_ready else "answers, and takes no requests"
        return replace(found, says=says, is_ready=is_ready, weight_version=version)
    except TimeoutError:
        return replace(found, says=f"does not answer within {_LOOK_S:g} s")
    except EngineError as error:
        return replace(found, says=str(error))
    finally:
        await client.aclose()


def must_be_over(found: Sequence[Found]) -> None:
    """Refuse to touch a run that may still be driven.

    Raises:
        RolloutError: its driver runs, or runs where it cannot be seen from here.
    """
    for one in found:
        driver = one.record.driver
        if one.driver is Remains.RUNS:
            raise RolloutError(
                f"run {one.record.run_id}: its driver, process {driver.pid}, still runs and drives "
                "these engines; end it first (rollout stop)"
            )
        if one.driver is Remains.ELSEWHERE:
            raise RolloutError(
                f"run {one.record.run_id} was driven on {driver.host}, and this is "
                f"{socket.gethostname()}; do this there"
            )


async def clean_up(found: Sequence[Found]) -> list[str]:
    """End what is left of the engines that the run has launched; who was ended.

    Attached engines are let be: whoever launched them is to end them.

    Raises:
        RolloutError: the run may still be driven.
        EngineHung: a process survives SIGKILL.
    """
    must_be_over(found)
    ended = []
    for one in found:
        for engine in one.engines:
            for identity in engine.entry.processes:
                num = await asyncio.to_thread(end, identity, _END_S)
                if num:
                    ended.append(f"{engine.entry.engine_id} ({num} processes)")
    return ended


def why_not_usable(record: Record, engine: EngineFound) -> str:
    """Why an engine cannot be made to serve as it is; empty if it can."""
    if not engine.weight_version:
        return engine.says
    if engine.entry.fenced_because:
        return f"it was fenced: {engine.entry.fenced_because}"
    phase = record.phases.get(engine.entry.group, "")
    if record.doing not in _HARMLESS:
        return f"the driver was lost in the middle of {record.doing}: nobody knows what it did"
    if phase not in _CAN_GO_ON:
        return f"its group is {phase}: its memory is released, or its weights are not proved"
    if engine.weight_version != str(record.weight_version):
        return (
            f"it holds weight version {engine.weight_version!r}, and {record.weight_version} was "
            "published last"
        )
    return ""


async def adopt(found: Sequence[Found]) -> list[EngineFound]:
    """Let the engines that run on and can be used take requests again; those that do.

    Raises:
        RolloutError: the run may still be driven.
    """
    must_be_over(found)
    usable = [
        engine
        for one in found
        for engine in one.engines
        if engine.remains in (Remains.NOT_OURS, Remains.RUNS)
        and not why_not_usable(one.record, engine)
    ]
    return [again for engine in usable if (again := await _go_on(engine)).is_ready]


async def _go_on(engine: EngineFound) -> EngineFound:
    if not engine.is_ready:
        client = EngineClient(Endpoint.of_url(engine.entry.url), engine_id=engine.entry.engine_id)
        try:
            async with asyncio.timeout(_CONTINUE_S):
                await client.continue_generation()
        except (EngineError, TimeoutError) as error:
            return replace(engine, says=f"it cannot be continued: {error}")
        finally:
            await client.aclose()
    return await _look_at(engine.entry)


def is_stale(record: Record) -> bool:
    """It was written before this machine was last switched on."""
    driver = record.driver
    return driver.host == socket.gethostname() and driver.boot_id != boot_id()
