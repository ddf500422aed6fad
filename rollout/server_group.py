"""Engines alike in every setting, and the one lifecycle they go through together.

Always true:
- the group is in one phase, and only a command that the table allows is sent to any engine;
- a command goes to every engine that is not fenced, and returns after all have answered;
- an engine that fails a command is fenced and its process killed, so that it can neither serve
  nor hold memory the trainer is about to use;
- what each engine has released is recorded per memory tag, and nothing is released or resumed
  twice: SGLang dies of that;
- the phase moves on only if enough engines are left; else it stays where it was.

``ServerGroup`` knows nothing of Ray; every method is a coroutine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines.client import Deadlines, EngineClient
from engines.launch import EngineLauncher, EngineSpec, RunningEngine
from engines.protocol import Endpoint, Engine, MemoryTag, PauseMode
from rollout import lifecycle
from rollout.config import GroupConfig, LifecycleConfig, WeightUpdate
from rollout.errors import ConfigError, EngineFailure, LifecycleError, PhaseFailed
from rollout.fanout import Answer, describe, fan_out
from rollout.lifecycle import Command, Phase
from rollout.policy import group_traits, release_policy
from rollout.types import EngineReport, EngineSlot, EngineStatus, GroupStatus, PhaseReport
from rollout.weights.push import PushTarget, WeightPush, push_weights

logger = logging.getLogger(__name__)

Connect = Callable[[Endpoint, str], Engine]


def connect_http(budgets: LifecycleConfig) -> Connect:
    """The client every real engine is driven with; its deadlines are those of the phases."""
    deadlines = Deadlines(
        control_s=min(budgets.verify_timeout_s, budgets.continue_timeout_s),
        pause_s=budgets.pause_timeout_s,
        memory_s=max(budgets.release_timeout_s, budgets.resume_timeout_s),
        update_s=budgets.update_timeout_s,
    )

    def connect(endpoint: Endpoint, engine_id: str) -> Engine:
        return EngineClient(endpoint, engine_id=engine_id, deadlines=deadlines)

    return connect


@dataclass(slots=True)
class _Member:
    """One engine and all that is known of it."""

    slot: EngineSlot
    process: RunningEngine
    engine: Engine
    has_session: bool
    weight_version: int | None
    released: set[MemoryTag] = field(default_factory=set)
    fenced_because: str = ""

    @property
    def engine_id(self) -> str:
        return self.slot.engine_id


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


class ServerGroup:
    """One lifecycle over several engines."""

    def __init__(
        self,
        settings: GroupSettings,
        slots: Sequence[EngineSlot],
        launcher: EngineLauncher,
        connect: Connect | None = None,
    ) -> None:
        """Decide the release policy; nothing is started.

        Raises:
            ConfigError: the group would lose weights on an offload that nothing brings back.
        """
        self.name = settings.name
        self._settings = settings
        self._slots = tuple(slots)
        self._launcher = launcher
        self._connect = connect or connect_http(settings.lifecycle)
        self._policy = release_policy(settings.path, settings.group, settings.update)
        self._traits = group_traits(settings.path, settings.group, settings.update)
        self._members: dict[str, _Member] = {}
        self._phase = Phase.SERVING
        self._last_order = 0

    # -- start and stop ---------------------------------------------------------------------

    async def start(self) -> GroupStatus:
        """Launch all engines and check that they are what the configuration needs.

        Raises:
            PhaseFailed: an engine did not start; the ones that did are stopped again.
        """
        budget_s = self._settings.group.engine.start_timeout_s + 30.0
        answers = await fan_out(
            {slot.engine_id: self._starter(slot) for slot in self._slots},
            operation="start",
            budget_s=budget_s,
        )
        for engine_id, answer in answers.items():
            if answer.value is not None:
                self._members[engine_id] = answer.value
        failures = [one.failure for one in answers.values() if one.failure is not None]
        if failures:
            await self.stop()
            raise PhaseFailed(_told("start", self.name, failures), phase="start", failures=failures)
        return await self.status()

    def _starter(self, slot: EngineSlot) -> Callable[[], Awaitable[_Member]]:
        async def start() -> _Member:
            process = await self._launcher.launch(self._spec(slot))
            engine = self._connect(process.endpoint, slot.engine_id)
            try:
                return await self._admit(slot, process, engine)
            except BaseException:
                await engine.aclose()
                await process.kill()
                raise

        return start

    async def _admit(self, slot: EngineSlot, process: RunningEngine, engine: Engine) -> _Member:
        info = await engine.server_info()
        if self._traits.needs_offload and not info.enable_memory_saver:
            raise ConfigError(
                f"{self._settings.path}.needs_offload: engine {slot.engine_id} runs without a "
                "memory saver, so a release would free nothing; start it with one, or set "
                "needs_offload to false"
            )
        version = await engine.weight_version()
        return _Member(
            slot=slot,
            process=process,
            engine=engine,
            has_session="/begin_weight_update" in await engine.endpoints(),
            weight_version=int(version) if version.isdigit() else None,
        )

    def _spec(self, slot: EngineSlot) -> EngineSpec:
        config = self._settings.group.engine
        return EngineSpec(
            engine_id=slot.engine_id,
            kind=config.kind.value,
            model_path=self._settings.model_path,
            log_path=str(Path(self._settings.log_dir) / f"{slot.engine_id}.log"),
            gpu_ids=slot.gpu_ids,
            num_cpus=slot.num_cpus,
            memory_saver=self._traits.needs_offload,
            weights_cpu_backup=self._policy.weights_cpu_backup,
            start_timeout_s=config.start_timeout_s,
            options=config.options,
            env=config.env,
        )

    async def stop(self) -> None:
        """End all engines: a bounded polite try, then the kill."""
        grace_s = self._settings.lifecycle.stop_timeout_s
        members = list(self._members.values())
        self._members = {}

        async def end(member: _Member) -> None:
            await member.engine.aclose()
            if await member.process.stop(grace_s):
                logger.warning("engine %s had to be killed", member.engine_id)

        await fan_out(
            {member.engine_id: _calling(end, member) for member in members},
            operation="stop",
            budget_s=grace_s + 30.0,
        )

    # -- the lifecycle, in the order of a step ----------------------------------------------

    async def pause(self, order: int | None = None) -> PhaseReport:
        """End all generation; requests in flight are answered as aborted with their tokens."""

        async def pause(member: _Member) -> None:
            await member.engine.pause_generation(PauseMode.ABORT)

        return await self._command(
            Command.PAUSE, pause, self._settings.lifecycle.pause_timeout_s, order
        )

    async def flush(self, order: int | None = None) -> PhaseReport:
        """Wait, inside each engine, until nothing is in flight, and drop its prefix cache."""
        budget_s = self._settings.lifecycle.flush_timeout_s

        async def flush(member: _Member) -> None:
            # The engine's own wait ends a little earlier, so that it says why it is late.
            await member.engine.flush_cache(timeout_s=max(budget_s - 2.0, budget_s / 2))

        return await self._command(Command.FLUSH, flush, budget_s, order)

    async def release(self, order: int | None = None) -> PhaseReport:
        """Give the memory back and measure how much came free."""

        async def release(member: _Member) -> int:
            tags = [tag for tag in self._policy.tags if tag not in member.released]
            before = await member.process.resident_bytes()
            if tags:
                await member.engine.release_memory_occupation(tags)
                member.released.update(tags)
                if not self._policy.weights_cpu_backup and MemoryTag.WEIGHTS in tags:
                    member.weight_version = None
            after = await member.process.resident_bytes()
            return max(0, before - after) if before is not None and after is not None else 0

        return await self._command(
            Command.RELEASE, release, self._settings.lifecycle.release_timeout_s, order
        )

    async def resume_weights(self, order: int | None = None) -> PhaseReport:
        """Take the memory of the weights back; its contents are not trusted yet."""
        return await self._resume(Command.RESUME_WEIGHTS, (MemoryTag.WEIGHTS,), order)

    async def update_weights(self, push: WeightPush, order: int | None = None) -> PhaseReport:
        """Give every engine the new weights."""
        command = Command.UPDATE_WEIGHTS
        started = _now()
        self._check_order(order)
        target = lifecycle.next_phase(self._phase, command, self._traits)
        members = self._unfenced()
        for member in members:
            member.weight_version = None
        answers = await push_weights(
            push,
            {
                member.engine_id: PushTarget(member.engine, 1, member.has_session)
                for member in members
            },
            budget_s=self._settings.lifecycle.update_timeout_s,
        )
        for member in members:
            if answers[member.engine_id].failure is None:
                member.weight_version = push.version
        return await self._conclude(command, target, answers, started)

    async def verify(self, version: int, order: int | None = None) -> PhaseReport:
        """Prove that every engine holds ``version``, by asking it."""

        async def verify(member: _Member) -> None:
            if member.weight_version != version:
                holds = "no whole version" if member.weight_version is None else "another one"
                raise LifecycleError(f"weight version {version} never reached it; it holds {holds}")
            held = await member.engine.weight_version()
            if held != str(version):
                raise LifecycleError(f"it reports weight version {held!r}, not '{version}'")

        return await self._command(
            Command.VERIFY, verify, self._settings.lifecycle.verify_timeout_s, order
        )

    async def resume_kv(self, order: int | None = None) -> PhaseReport:
        """Take the memory of KV cache and CUDA graphs back."""
        return await self._resume(
            Command.RESUME_KV, (MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH), order
        )

    async def continue_generation(self, order: int | None = None) -> PhaseReport:
        """Let the engines generate again."""

        async def go_on(member: _Member) -> None:
            if member.released:
                raise LifecycleError(f"{', '.join(sorted(member.released))} still released")
            await member.engine.continue_generation()

        return await self._command(
            Command.CONTINUE, go_on, self._settings.lifecycle.continue_timeout_s, order
        )

    # -- looking ----------------------------------------------------------------------------

    async def status(self) -> GroupStatus:
        """The group and its engines as they are known here; asks no engine anything."""
        engines = [
            EngineStatus(
                engine_id=member.engine_id,
                endpoint=member.process.endpoint,
                state="fenced" if member.fenced_because else self._phase.value,
                weight_version=member.weight_version,
                released=tuple(sorted(member.released)),
                node_id=member.slot.node_id,
                pid=member.process.pid,
                resident_bytes=await member.process.resident_bytes(),
                fenced_because=member.fenced_because,
            )
            for member in self._members.values()
        ]
        return GroupStatus(
            name=self.name,
            worker_type=self._settings.group.worker_type,
            phase=self._phase.value,
            needs_offload=self._traits.needs_offload,
            engines=tuple(engines),
        )

    # -- how a command is carried out -------------------------------------------------------

    async def _command(
        self,
        command: Command,
        act: Callable[[_Member], Awaitable[Any]],
        budget_s: float,
        order: int | None,
    ) -> PhaseReport:
        started = _now()
        self._check_order(order)
        if lifecycle.is_repeat(self._phase, command):
            return self._report(command, {}, started)
        target = lifecycle.next_phase(self._phase, command, self._traits)
        answers = await fan_out(
            {member.engine_id: _calling(act, member) for member in self._unfenced()},
            operation=command.value,
            budget_s=budget_s,
        )
        return await self._conclude(command, target, answers, started)

    async def _resume(
        self, command: Command, tags: Sequence[MemoryTag], order: int | None
    ) -> PhaseReport:
        async def resume(member: _Member) -> None:
            wanted = [tag for tag in tags if tag in member.released]
            if wanted:
                await member.engine.resume_memory_occupation(wanted)
                member.released.difference_update(wanted)

        return await self._command(
            command, resume, self._settings.lifecycle.resume_timeout_s, order
        )

    async def _conclude(
        self,
        command: Command,
        target: Phase,
        answers: Mapping[str, Answer[Any]],
        started: float,
    ) -> PhaseReport:
        failures = [one.failure for one in answers.values() if one.failure is not None]
        for failure in failures:
            await self._fence(self._members[failure.engine_id], str(failure))
        left = len(self._unfenced())
        if left < self._min_engines() or (failures and self._raises()):
            raise PhaseFailed(
                f"{_told(command.value, self.name, failures)}; {left} of {len(self._members)} "
                f"engines left, {self._min_engines()} needed; the group stays {self._phase}",
                phase=command.value,
                failures=failures,
            )
        self._phase = target
        report = self._report(command, answers, started)
        logger.info("group %s: %s -> %s in %.3f s", self.name, command, target, report.elapsed_s)
        return report

    async def _fence(self, member: _Member, reason: str) -> None:
        member.fenced_because = reason
        logger.error("fenced: %s\n%s", reason, await _tail(member.process))
        await member.engine.aclose()
        try:
            await member.process.kill()
        except Exception as error:  # the fence stands even if the kill must be told
            logger.error("engine %s could not be killed: %s", member.engine_id, describe(error))

    def _report(
        self, command: Command, answers: Mapping[str, Answer[Any]], started: float
    ) -> PhaseReport:
        return PhaseReport(
            group=self.name,
            command=command.value,
            phase=self._phase.value,
            elapsed_s=_now() - started,
            engines=tuple(
                EngineReport(
                    engine_id=engine_id,
                    elapsed_s=answer.elapsed_s,
                    failure=str(answer.failure or ""),
                    freed_bytes=answer.value if isinstance(answer.value, int) else 0,
                )
                for engine_id, answer in answers.items()
            ),
        )

    def _check_order(self, order: int | None) -> None:
        """Refuse a command older than one already seen: Ray does not keep the order of calls."""
        if order is None:
            return
        if order <= self._last_order:
            raise LifecycleError(
                f"group {self.name}: command {order} came after command {self._last_order}"
            )
        self._last_order = order

    def _unfenced(self) -> list[_Member]:
        return [member for member in self._members.values() if not member.fenced_because]

    def _raises(self) -> bool:
        return self._settings.lifecycle.on_failure == "raise"

    def _min_engines(self) -> int:
        wanted = self._settings.group.min_engines
        if wanted is not None:
            return wanted
        return len(self._members) if self._raises() else min(1, len(self._members))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _calling(
    act: Callable[[_Member], Awaitable[Any]], member: _Member
) -> Callable[[], Awaitable[Any]]:
    return lambda: act(member)


def _told(command: str, group: str, failures: Sequence[EngineFailure]) -> str:
    told = "; ".join(str(failure) for failure in failures) or "too few engines"
    return f"group {group}: {command} failed: {told}"


async def _tail(process: RunningEngine) -> str:
    try:
        return await process.log_tail()
    except Exception as error:  # a missing log must not hide the failure it would explain
        return f"(no log: {describe(error)})"


__all__ = ["Connect", "GroupSettings", "ServerGroup", "connect_http"]
