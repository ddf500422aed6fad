"""The engines of one group: started, admitted, fenced, ended.

Always true: an engine is in the roster only after it has shown that it is what the configuration
needs; a fenced engine has been killed, or its kill has been tried and its failure told; after
``stop`` nothing that was launched here runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines.client import Deadlines, EngineClient
from engines.features import read_features
from engines.launch import EngineLauncher, EngineSpec, RunningEngine
from engines.protocol import Endpoint, Engine, MemoryTag, WeightsReport
from rollout.admission import unfit
from rollout.config import EngineKind, GroupConfig, HealthConfig, LifecycleConfig, WeightUpdate
from rollout.errors import ConfigError, EngineFailure, LifecycleError, PhaseFailed
from rollout.fanout import Answer, describe, fan_out, settle
from rollout.types import EngineSlot

logger = logging.getLogger(__name__)

# Together less than what the server grants a group on top of a phase's own budget.
_TAIL_TIMEOUT_S = 5.0
_KILL_TIMEOUT_S = 20.0

Connect = Callable[[Endpoint, str], Engine]


def connect_http(budgets: LifecycleConfig, health: HealthConfig | None = None) -> Connect:
    """The client every real engine is driven with; its deadlines are those of the phases."""
    probe = {} if health is None else {"ready_s": health.probe_timeout_s}
    deadlines = Deadlines(
        control_s=min(budgets.verify_timeout_s, budgets.continue_timeout_s),
        pause_s=budgets.pause_timeout_s,
        memory_s=max(budgets.release_timeout_s, budgets.resume_timeout_s),
        update_s=budgets.update_timeout_s,
        **probe,
    )

    def connect(endpoint: Endpoint, engine_id: str) -> Engine:
        return EngineClient(endpoint, engine_id=engine_id, deadlines=deadlines)

    return connect


@dataclass(slots=True)
class Member:
    """One engine and all that is known of it.

    Attributes:
        num_payloads: copies of a payload it wants, one per tensor-parallel rank.
        is_proved: its weights were verified after they were last changed.
        record: its fingerprints when it was last proved; None where none were taken.
        changed: names of the tensors that were pushed since the record.
        has_checker: it can tell fingerprints of its weights, and is asked for them.
        tells_memory: it can tell how much memory each tag has.
        is_stale: it was started again and lacks what was pushed before: it goes through every
            phase with the others, but no request may reach it.
        is_gone: fenced, it has been ended for certain.
    """

    slot: EngineSlot
    process: RunningEngine
    engine: Engine
    has_session: bool
    weight_version: int | None
    num_payloads: int = 1
    released: set[MemoryTag] = field(default_factory=set)
    is_proved: bool = True
    fenced_because: str = ""
    has_checker: bool = False
    tells_memory: bool = False
    record: WeightsReport | None = None
    changed: frozenset[str] = frozenset()
    is_stale: bool = False
    is_gone: bool = False

    @property
    def engine_id(self) -> str:
        return self.slot.engine_id

    async def fingerprints(self) -> WeightsReport | None:
        """Of its weights as they are now; None where it cannot tell."""
        return await self.engine.weights_checker() if self.has_checker else None

    async def memory_by_tag(self) -> Mapping[str, int]:
        """What it says of its memory now; empty where it cannot tell."""
        return (await self.engine.server_info()).resident_bytes if self.tells_memory else {}

    def prove(self, report: WeightsReport | None) -> None:
        """Its weights are as they should be, and this is what they look like."""
        self.is_proved = True
        self.record = report
        self.changed = frozenset()


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The slice of a server's configuration that one group needs.

    Attributes:
        path: dotted path of the group's settings, for messages.
        log_dir: folder its engines log into.
    """

    name: str
    path: str
    model_path: str
    log_dir: str
    group: GroupConfig
    update: WeightUpdate
    lifecycle: LifecycleConfig
    health: HealthConfig = field(default_factory=HealthConfig)


class Roster:
    """All engines of a group, by engine id, in the order of their slots."""

    def __init__(
        self,
        settings: GroupSettings,
        slots: Sequence[EngineSlot],
        launcher: EngineLauncher,
        connect: Connect,
        *,
        memory_saver: bool,
        weights_cpu_backup: bool,
    ) -> None:
        self._settings = settings
        self._slots = tuple(slots)
        self._launcher = launcher
        self._connect = connect
        self._memory_saver = memory_saver
        self._weights_cpu_backup = weights_cpu_backup
        self._members: dict[str, Member] = {}
        self._launching: set[asyncio.Task[None]] = set()
        self._is_stopped = False

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, engine_id: str) -> Member:
        return self._members[engine_id]

    def members(self) -> list[Member]:
        return list(self._members.values())

    def unfenced(self) -> list[Member]:
        return [member for member in self._members.values() if not member.fenced_because]

    async def start(self) -> None:
        """Launch all engines and check that they are what the configuration needs.

        Raises:
            PhaseFailed: an engine did not start; the ones that did are stopped again.
        """
        self._is_stopped = False
        budget_s = self._settings.group.engine.start_timeout_s + 30.0
        try:
            answers = await fan_out(
                {slot.engine_id: self._starter(slot) for slot in self._slots},
                operation="start",
                budget_s=budget_s,
            )
            if self._is_stopped:
                raise PhaseFailed(
                    f"group {self._settings.name}: stopped while it started", phase="start"
                )
            failures = [one.failure for one in answers.values() if one.failure is not None]
            if failures:
                raise PhaseFailed(
                    told("start", self._settings.name, failures), phase="start", failures=failures
                )
        except BaseException:
            await self.stop()
            raise
        self._members = {slot.engine_id: self._members[slot.engine_id] for slot in self._slots}

    async def replace(self, engine_id: str, lead: Callable[[Member], Awaitable[None]]) -> Member:
        """Start a fenced engine again in its place; the new one is stale.

        Args:
            lead: leads the new engine to where the others are, before it is one of them.

        Raises:
            EngineFailure: the old one cannot be shown to be gone, or the new one did not start;
                the place stays fenced.
        """
        old = self._members[engine_id]
        if self._is_stopped or not old.fenced_because:
            raise LifecycleError(f"engine {engine_id} is not fenced, or its group was stopped")
        budget_s = self._settings.group.engine.start_timeout_s + _KILL_TIMEOUT_S
        started = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(budget_s):
                if self._settings.group.engine.kind is EngineKind.ATTACHED:
                    await _confirm_ended_by_others(old)
                await _confirm_gone(old)
                await self._starter(old.slot, lead)()
        except Exception as error:
            raise EngineFailure(
                f"engine {engine_id}: restart failed: {describe(error)}",
                engine_id=engine_id,
                operation="restart",
                elapsed_s=asyncio.get_running_loop().time() - started,
            ) from error
        return self._members[engine_id]

    def _starter(
        self, slot: EngineSlot, lead: Callable[[Member], Awaitable[None]] | None = None
    ) -> Callable[[], Awaitable[None]]:
        async def start() -> None:
            # A task of its own, so that a stop need not wait until the start is over.
            task = asyncio.create_task(self._launch(slot, lead), name=f"launch:{slot.engine_id}")
            self._launching.add(task)
            task.add_done_callback(self._launching.discard)
            await task

        return start

    async def _launch(
        self, slot: EngineSlot, lead: Callable[[Member], Awaitable[None]] | None
    ) -> None:
        process = await self._launcher.launch(self._spec(slot))
        engine = self._connect(process.endpoint, slot.engine_id)
        try:
            member = await self._admit(slot, process, engine)
            if lead is not None:
                member.is_stale, member.is_proved = True, False
                await lead(member)
            self._members[slot.engine_id] = member
        except BaseException:
            await process.kill()
            await engine.aclose()
            raise

    async def _admit(self, slot: EngineSlot, process: RunningEngine, engine: Engine) -> Member:
        info, endpoints = await engine.server_info(), await engine.endpoints()
        features = read_features(info, endpoints)
        if why := unfit(
            features,
            self._settings.group,
            self._settings.update,
            memory_saver=self._memory_saver,
            weights_cpu_backup=self._weights_cpu_backup,
        ):
            raise ConfigError(self._settings.path + why.replace("{engine}", slot.engine_id))
        version = await engine.weight_version()
        by_fingerprint = self._settings.lifecycle.verify_by == "fingerprint"
        member = Member(
            slot=slot,
            process=process,
            engine=engine,
            has_session=features.has_weight_session,
            num_payloads=features.num_payloads,
            weight_version=int(version) if version.isdigit() else None,
            has_checker=by_fingerprint and "/weights_checker" in endpoints,
            tells_memory=bool(info.resident_bytes),
        )
        if self._weights_cpu_backup:
            # Some of these weights must outlive a release: what they are now is what to expect.
            member.record = await member.fingerprints()
        return member

    def _spec(self, slot: EngineSlot) -> EngineSpec:
        config = self._settings.group.engine
        return EngineSpec(
            engine_id=slot.engine_id,
            kind=config.kind.value,
            model_path=self._settings.model_path,
            log_path=str(Path(self._settings.log_dir) / f"{slot.engine_id}.log"),
            gpu_ids=slot.gpu_ids,
            num_cpus=slot.num_cpus,
            memory_saver=self._memory_saver,
            weights_cpu_backup=self._weights_cpu_backup,
            start_timeout_s=config.start_timeout_s,
            options=config.options,
            env=config.env,
            worker_type=self._settings.group.worker_type,
            python=config.python,
            url=config.urls[slot.index] if config.urls else "",
        )

    async def stop(self) -> None:
        """End all engines: a bounded polite try, then the kill."""
        grace_s = self._settings.lifecycle.stop_timeout_s
        self._is_stopped = True
        launching = list(self._launching)
        for task in launching:
            task.cancel()
        await settle(launching)
        members = list(self._members.values())
        self._members = {}

        async def end(member: Member) -> None:
            try:
                if await member.process.stop(grace_s):
                    logger.warning("engine %s had to be killed", member.engine_id)
            finally:
                await member.engine.aclose()

        answers = await fan_out(
            {member.engine_id: calling(end, member) for member in members},
            operation="stop",
            budget_s=grace_s + 30.0,
        )
        _log_failures(answers)

    async def fence(self, failures: Sequence[EngineFailure]) -> None:
        """Keep these engines out of everything and end their processes."""
        for failure in failures:
            self._members[failure.engine_id].fenced_because = str(failure)

        async def end(member: Member) -> None:
            logger.error("fenced: %s\n%s", member.fenced_because, await _tail(member.process))
            try:
                await member.process.kill()
                member.is_gone = True
            finally:
                await member.engine.aclose()

        answers = await fan_out(
            {one.engine_id: calling(end, self._members[one.engine_id]) for one in failures},
            operation="kill",
            budget_s=_KILL_TIMEOUT_S,
        )
        _log_failures(answers)  # the fence stands all the same

    async def confirm_gone(self) -> None:
        """Make sure that no fenced engine still holds memory; end those whose kill failed.

        Raises:
            PhaseFailed: naming the engines that may still hold theirs.
        """
        answers = await fan_out(
            {
                member.engine_id: calling(_confirm_gone, member)
                for member in self._members.values()
                if member.fenced_because and not member.is_gone
            },
            operation="kill",
            budget_s=_KILL_TIMEOUT_S,
        )
        failures = [one.failure for one in answers.values() if one.failure is not None]
        if failures:
            raise PhaseFailed(
                f"{told('kill', self._settings.name, failures)}; its memory may not be free",
                phase="release",
                failures=failures,
            )


async def _confirm_gone(member: Member) -> None:
    """Make sure that nothing is left of a fenced engine, so that its place can be used again."""
    try:
        async with asyncio.timeout(_KILL_TIMEOUT_S):
            await member.process.kill()
    except Exception:
        # Its owner may be lost, and then its guard has ended it: nobody listens there any more.
        if await _is_heard(member.process):
            raise
    held = await member.process.resident_bytes()
    if held:
        raise EngineFailure(
            f"engine {member.engine_id} was killed and still holds {held} bytes",
            engine_id=member.engine_id,
            operation="kill",
        )
    member.is_gone = True


async def _confirm_ended_by_others(member: Member) -> None:
    """An attached engine is not ours to kill, and what it holds after a failure nobody knows."""
    if await member.process.is_alive():
        raise EngineFailure(
            f"engine {member.engine_id} is attached and still runs; whoever launched it has to "
            "end it, and start it again, before it can serve",
            engine_id=member.engine_id,
            operation="restart",
        )


async def _is_heard(process: RunningEngine) -> bool:
    """Whether anything listens where the engine was."""
    try:
        _, writer = await asyncio.wait_for(
            asyncio.open_connection(process.endpoint.host, process.endpoint.port), _TAIL_TIMEOUT_S
        )
    except ConnectionRefusedError:
        return False
    except (OSError, TimeoutError):
        return True  # nobody says no: it may only be out of reach
    writer.close()
    return True


def calling(
    act: Callable[[Member], Awaitable[Any]], member: Member
) -> Callable[[], Awaitable[Any]]:
    """``act(member)``, to be started later."""
    return lambda: act(member)


def told(command: str, group: str, failures: Sequence[EngineFailure]) -> str:
    """Failures of one command in one line."""
    told = "; ".join(str(failure) for failure in failures) or "too few engines"
    return f"group {group}: {command} failed: {told}"


def _log_failures(answers: Mapping[str, Answer[Any]]) -> None:
    for answer in answers.values():
        if answer.failure is not None:
            logger.error("%s", answer.failure)


async def _tail(process: RunningEngine) -> str:
    try:
        async with asyncio.timeout(_TAIL_TIMEOUT_S):
            return await process.log_tail()
    except Exception as error:  # a missing log must not hide the failure it would explain
        return f"(no log: {describe(error)})"
