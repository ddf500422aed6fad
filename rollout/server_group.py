"""Engines alike in every setting, and the one lifecycle they go through together.

Always true:
- the group is in one phase, and only a command that the table allows is sent to any engine;
- a command goes to every engine that is not fenced, and returns after all have answered;
- an engine that fails a command is fenced and its process killed, so that it can neither serve
  nor hold memory the trainer is about to use;
- what each engine has released is recorded per memory tag, and nothing is released or resumed
  twice: SGLang dies of that;
- no engine generates with memory released, or with weights that changed and were not verified;
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
from rollout.fanout import Answer, describe, fan_out, finish, settle
from rollout.lifecycle import Command, Phase
from rollout.policy import group_traits, release_policy
from rollout.types import EngineReport, EngineSlot, EngineStatus, GroupStatus, PhaseReport
from rollout.weights.push import PushTarget, WeightPush, push_weights

logger = logging.getLogger(__name__)

# Together less than what the server grants a group on top of a phase's own budget.
_TAIL_TIMEOUT_S = 5.0
_KILL_TIMEOUT_S = 20.0

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
    """One engine and all that is known of it.

    Attributes:
        is_proved: its weights were verified after they were last changed.
    """

    slot: EngineSlot
    process: RunningEngine
    engine: Engine
    has_session: bool
    weight_version: int | None
    released: set[MemoryTag] = field(default_factory=set)
    is_proved: bool = True
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
        self._launching: set[asyncio.Task[None]] = set()
        self._is_stopped = False
        self._phase = Phase.SERVING
        self._last_order = 0

    # -- start and stop ---------------------------------------------------------------------

    async def start(self) -> GroupStatus:
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
                raise PhaseFailed(f"group {self.name}: stopped while it started", phase="start")
            failures = [one.failure for one in answers.values() if one.failure is not None]
            if failures:
                raise PhaseFailed(
                    _told("start", self.name, failures), phase="start", failures=failures
                )
        except BaseException:
            await self.stop()
            raise
        self._members = {slot.engine_id: self._members[slot.engine_id] for slot in self._slots}
        return await self.status()

    def _starter(self, slot: EngineSlot) -> Callable[[], Awaitable[None]]:
        async def start() -> None:
            # A task of its own, so that a stop need not wait until the start is over.
            task = asyncio.create_task(self._launch(slot), name=f"launch:{slot.engine_id}")
            self._launching.add(task)
            task.add_done_callback(self._launching.discard)
            await task

        return start

    async def _launch(self, slot: EngineSlot) -> None:
        process = await self._launcher.launch(self._spec(slot))
        engine = self._connect(process.endpoint, slot.engine_id)
        try:
            self._members[slot.engine_id] = await self._admit(slot, process, engine)
        except BaseException:
            await process.kill()
            await engine.aclose()
            raise

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
        self._is_stopped = True
        launching = list(self._launching)
        for task in launching:
            task.cancel()
        await settle(launching)
        members = list(self._members.values())
        self._members = {}

        async def end(member: _Member) -> None:
            try:
                if await member.process.stop(grace_s):
                    logger.warning("engine %s had to be killed", member.engine_id)
            finally:
                await member.engine.aclose()

        answers = await fan_out(
            {member.engine_id: _calling(end, member) for member in members},
            operation="stop",
            budget_s=grace_s + 30.0,
        )
        _log_failures(answers)

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
        self._refuse(command, self._without_weights())
        members = self._unfenced()
        for member in members:
            member.weight_version = None
            member.is_proved = False
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
        return await finish(self._conclude(command, target, answers, started))

    async def verify(self, version: int, order: int | None = None) -> PhaseReport:
        """Prove that every engine holds ``version``, by asking it."""

        async def verify(member: _Member) -> None:
            if member.weight_version != version:
                holds = "no whole version" if member.weight_version is None else "another one"
                raise LifecycleError(f"weight version {version} never reached it; it holds {holds}")
            held = await member.engine.weight_version()
            if held != str(version):
                raise LifecycleError(f"it reports weight version {held!r}, not '{version}'")
            member.is_proved = True

        def nobody_holds_it() -> str:
            held = {member.weight_version for member in self._unfenced()}
            return f"weight version {version} reached no engine" if version not in held else ""

        return await self._command(
            Command.VERIFY,
            verify,
            self._settings.lifecycle.verify_timeout_s,
            order,
            why_not=nobody_holds_it,
        )

    async def resume_kv(self, order: int | None = None) -> PhaseReport:
        """Take the memory of KV cache and CUDA graphs back."""
        return await self._resume(
            Command.RESUME_KV, (MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH), order
        )

    async def continue_generation(self, order: int | None = None) -> PhaseReport:
        """Let the engines generate again."""

        async def go_on(member: _Member) -> None:
            await member.engine.continue_generation()

        return await self._command(
            Command.CONTINUE,
            go_on,
            self._settings.lifecycle.continue_timeout_s,
            order,
            why_not=self._unfit_to_serve,
        )

    # A phase that failed half-way leaves engines apart from one another, which the table does
    # not show: these look at the engines themselves.

    def _unfit_to_serve(self) -> str:
        for member in self._unfenced():
            if member.released:
                return f"engine {member.engine_id} has {_tags(member)} released"
            if not member.is_proved:
                return f"the weights of engine {member.engine_id} were not verified"
        return ""

    def _without_weights(self) -> str:
        for member in self._unfenced():
            if MemoryTag.WEIGHTS in member.released:
                return f"engine {member.engine_id} has {_tags(member)} released"
        return ""

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
        *,
        why_not: Callable[[], str] = str,
    ) -> PhaseReport:
        started = _now()
        self._check_order(order)
        if lifecycle.is_repeat(self._phase, command):
            return self._report(command, {}, started)
        target = lifecycle.next_phase(self._phase, command, self._traits)
        self._refuse(command, why_not())

        async def carry_out() -> PhaseReport:
            answers = await fan_out(
                {member.engine_id: _calling(act, member) for member in self._unfenced()},
                operation=command.value,
                budget_s=budget_s,
            )
            return await self._conclude(command, target, answers, started)

        # Cancelled in between, the engines would be in a phase that the group knows nothing of.
        return await finish(carry_out())

    def _refuse(self, command: Command, why_not: str) -> None:
        if why_not:
            raise LifecycleError(
                f"group {self.name}: cannot {command} while {self._phase}: {why_not}",
                command=command,
                phase=self._phase,
            )

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
        if answers and not self._members:
            raise PhaseFailed(
                f"group {self.name}: {command} ended because the group was stopped",
                phase=command.value,
                failures=failures,
            )
        await self._fence(failures)
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

    async def _fence(self, failures: Sequence[EngineFailure]) -> None:
        for failure in failures:
            self._members[failure.engine_id].fenced_because = str(failure)

        async def end(member: _Member) -> None:
            logger.error("fenced: %s\n%s", member.fenced_because, await _tail(member.process))
            try:
                await member.process.kill()
            finally:
                await member.engine.aclose()

        answers = await fan_out(
            {one.engine_id: _calling(end, self._members[one.engine_id]) for one in failures},
            operation="kill",
            budget_s=_KILL_TIMEOUT_S,
        )
        _log_failures(answers)  # the fence stands all the same

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


def _tags(member: _Member) -> str:
    return ", ".join(sorted(member.released))


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


__all__ = ["Connect", "GroupSettings", "ServerGroup", "connect_http"]
