"""Engines alike in every setting, and the one lifecycle they go through together.

Always true:
- the group is in one phase, and only a command that the table allows is sent to any engine;
- a command goes to every engine that is not fenced, and returns after all have answered;
- an engine that fails a command is fenced and its process killed, so that it can neither serve
  nor hold memory the trainer is about to use;
- what each engine has released is recorded per memory tag, and nothing is released or resumed
  twice: SGLang dies of that;
- no engine generates with memory released, or with weights that changed and were not verified;
- the phase is where all engines are that are not fenced, also after a command that failed;
- a release says that it is done only when fenced engines are known to be gone.

``ServerGroup`` knows nothing of Ray; every method is a coroutine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.launch import EngineLauncher
from engines.protocol import MemoryTag, PauseMode, WeightsReport
from rollout import lifecycle
from rollout.config import WeightUpdate
from rollout.errors import LifecycleError, PhaseFailed
from rollout.fanout import Answer, fan_out, finish
from rollout.lifecycle import Command, Phase
from rollout.mending import Mending
from rollout.policy import group_traits, least_freed_bytes, release_policy
from rollout.roster import Connect, GroupSettings, Member, Roster, calling, connect_http, told
from rollout.types import EngineReport, EngineSlot, EngineStatus, GroupStatus, PhaseReport
from rollout.verification import ALL_TENSORS, Evidence, judge
from rollout.watching import GroupProbe
from rollout.weights.push import PushTarget, WeightPush, push_weights

logger = logging.getLogger(__name__)


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
        self._policy = release_policy(settings.path, settings.group, settings.update)
        self._traits = group_traits(settings.path, settings.group, settings.update)
        self._roster = Roster(
            settings,
            slots,
            launcher,
            connect or connect_http(settings.lifecycle, settings.health),
            memory_saver=self._traits.needs_offload,
            weights_cpu_backup=self._policy.weights_cpu_backup,
        )
        self._checkpoint_bytes = _size_of_weights(settings.model_path)
        self._phase = Phase.SERVING
        self._last_order = 0
        # Whoever gave up on a command may send the next while it still runs.
        self._turn = asyncio.Lock()
        self._mending = Mending(
            self._roster,
            self._turn,
            self._policy.tags if self._traits.needs_offload else (),
            settings.health,
        )

    # -- start and stop ---------------------------------------------------------------------

    async def start(self) -> GroupStatus:
        """Launch all engines and check that they are what the configuration needs.

        Raises:
            PhaseFailed: an engine did not start; the ones that did are stopped again.
        """
        await self._roster.start()
        return await self.status()

    async def stop(self) -> None:
        """End all engines: a bounded polite try, then the kill."""
        await self._roster.stop()

    # -- the lifecycle, in the order of a step ----------------------------------------------

    async def pause(self, order: int | None = None) -> PhaseReport:
        """End all generation; requests in flight are answered as aborted with their tokens."""

        async def pause(member: Member) -> None:
            await member.engine.pause_generation(PauseMode.ABORT)

        return await self._command(
            Command.PAUSE, pause, self._settings.lifecycle.pause_timeout_s, order
        )

    async def flush(self, order: int | None = None) -> PhaseReport:
        """Wait, inside each engine, until nothing is in flight, and drop its prefix cache."""
        budget_s = self._settings.lifecycle.flush_timeout_s

        async def flush(member: Member) -> None:
            # The engine's own wait ends a little earlier, so that it says why it is late.
            await member.engine.flush_cache(timeout_s=max(budget_s - 2.0, budget_s / 2))

        return await self._command(Command.FLUSH, flush, budget_s, order)

    async def release(self, order: int | None = None) -> PhaseReport:
        """Give the memory back, and measure that it came free."""

        async def release(member: Member) -> int:
            tags = [tag for tag in self._policy.tags if tag not in member.released]
            if not tags:
                return 0
            by_tag = await member.memory_by_tag()
            before = await member.process.resident_bytes()
            await member.engine.release_memory_occupation(tags)
            member.released.update(tags)
            if not self._policy.weights_cpu_backup and MemoryTag.WEIGHTS in tags:
                member.weight_version = None
            after = await member.process.resident_bytes()
            if before is None or after is None:
                return 0
            least = least_freed_bytes(tags, by_tag, self._checkpoint_bytes)
            if before - after < least:
                raise LifecycleError(
                    f"release of {', '.join(tags)} freed {_mib(before - after)}, at least "
                    f"{_mib(least)} must come free; it still holds {_mib(after)}"
                )
            return max(0, before - after)

        report = await self._command(
            Command.RELEASE, release, self._settings.lifecycle.release_timeout_s, order
        )
        await self._roster.confirm_gone()
        return report

    async def resume_weights(self, order: int | None = None) -> PhaseReport:
        """Take the memory of the weights back; its contents are not trusted yet."""
        return await self._resume(Command.RESUME_WEIGHTS, (MemoryTag.WEIGHTS,), order)

    async def update_weights(self, push: WeightPush, order: int | None = None) -> PhaseReport:
        """Give every engine the new weights."""
        self._check_order(order)
        async with self._turn:
            return await self._update_weights(push)

    async def _update_weights(self, push: WeightPush) -> PhaseReport:
        command = Command.UPDATE_WEIGHTS
        started = _now()
        target = lifecycle.next_phase(self._phase, command, self._traits)
        self._refuse(command, self._without_weights())
        members = self._roster.unfenced()
        for member in members:
            member.weight_version = None
            member.is_proved = False
            member.changed |= self._changed_by(push)
        answers = await push_weights(
            push,
            {
                member.engine_id: PushTarget(member.engine, member.num_payloads, member.has_session)
                for member in members
            },
            budget_s=self._settings.lifecycle.update_timeout_s,
        )
        is_whole = self._settings.update is WeightUpdate.FULL
        for member in members:
            if answers[member.engine_id].failure is None and (is_whole or not member.is_stale):
                member.weight_version, member.is_stale = push.version, False
        return await finish(self._conclude(command, target, answers, started))

    def _changed_by(self, push: WeightPush) -> frozenset[str]:
        is_full = self._settings.update is WeightUpdate.FULL
        return ALL_TENSORS if is_full else frozenset(push.manifest.tensors)

    async def verify(self, version: int, order: int | None = None) -> PhaseReport:
        """Prove that every engine holds ``version``: it says so, and its weights do.

        The fingerprints of what must not have changed are compared with the engine's own, those
        of what was pushed with the other engines'.
        """

        async def verify(member: Member) -> WeightsReport | None:
            if member.is_stale:
                return None  # it goes along, and serves nothing
            if member.weight_version != version:
                holds = "no whole version" if member.weight_version is None else "another one"
                raise LifecycleError(f"weight version {version} never reached it; it holds {holds}")
            held = await member.engine.weight_version()
            if held != str(version):
                raise LifecycleError(f"it reports weight version {held!r}, not '{version}'")
            return await member.fingerprints()

        def compare(answers: dict[str, Answer[Any]]) -> dict[str, Answer[Any]]:
            reports = {name: one.value for name, one in answers.items() if one.failure is None}
            wrong = judge(
                {
                    name: Evidence(report, self._roster[name].record, self._roster[name].changed)
                    for name, report in reports.items()
                    if report is not None
                }
            )
            for name, report in reports.items():
                if name in wrong:
                    answers[name] = answers[name].refused("verify", name, wrong[name])
                elif not self._roster[name].is_stale:
                    self._roster[name].prove(report)
            return answers

        def nobody_holds_it() -> str:
            held = {member.weight_version for member in self._roster.unfenced()}
            return f"weight version {version} reached no engine" if version not in held else ""

        return await self._command(
            Command.VERIFY,
            verify,
            self._settings.lifecycle.verify_timeout_s,
            order,
            why_not=nobody_holds_it,
            review=compare,
        )

    async def resume_kv(self, order: int | None = None) -> PhaseReport:
        """Take the memory of KV cache and CUDA graphs back."""
        return await self._resume(
            Command.RESUME_KV, (MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH), order
        )

    async def continue_generation(self, order: int | None = None) -> PhaseReport:
        """Let the engines generate again."""

        async def go_on(member: Member) -> None:
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
        for member in self._roster.unfenced():
            if member.released:
                return f"engine {member.engine_id} has {_tags(member)} released"
            if not member.is_proved and not member.is_stale:
                return f"the weights of engine {member.engine_id} were not verified"
        return ""

    def _without_weights(self) -> str:
        for member in self._roster.unfenced():
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
                state=self._state_of(member),
                weight_version=member.weight_version,
                released=tuple(sorted(member.released)),
                node_id=member.slot.node_id,
                pid=member.process.pid,
                resident_bytes=await member.process.resident_bytes(),
                fenced_because=member.fenced_because,
                is_stale=member.is_stale,
            )
            for member in self._roster.members()
        ]
        return GroupStatus(
            name=self.name,
            worker_type=self._settings.group.worker_type,
            phase=self._phase.value,
            needs_offload=self._traits.needs_offload,
            engines=tuple(engines),
        )

    def _state_of(self, member: Member) -> str:
        if member.fenced_because:
            return "fenced"
        return "stale" if member.is_stale else self._phase.value

    # -- failing and coming back ------------------------------------------------------------

    async def probe(self, budget_s: float, distrusted: Sequence[str] = ()) -> GroupProbe:
        """Look at all engines, in the way that makes sense in this phase."""
        return await self._mending.probe(self._phase, budget_s, distrusted)

    async def fence(self, engine_id: str, reason: str) -> None:
        """Take an engine out of everything and end its process, also while a command hangs on it.

        One that is fenced already only gets the new reason.
        """
        await self._mending.fence(engine_id, reason)

    async def restart(self, engine_id: str) -> None:
        """Start a fenced engine again in its place and lead it to this phase; it is stale then.

        Raises:
            EngineFailure: what was there may not be gone, or it did not start; it stays fenced.
        """
        async with self._mending.going_on():
            await self._mending.restart(engine_id, self._phase)

    async def adopt(self, engine_id: str, version: int) -> bool:
        """Let a stale engine serve again if it holds ``version`` or can be given it; True if so.

        Raises:
            WeightMismatch: it says that it holds them, and does not.
        """
        async with self._mending.going_on():
            return await self._mending.adopt(engine_id, version)

    # -- how a command is carried out -------------------------------------------------------

    async def _command(
        self,
        command: Command,
        act: Callable[[Member], Awaitable[Any]],
        budget_s: float,
        order: int | None,
        **more: Any,
    ) -> PhaseReport:
        self._check_order(order)
        async with self._turn:
            return await self._carry_out(command, act, budget_s, **more)

    async def _carry_out(
        self,
        command: Command,
        act: Callable[[Member], Awaitable[Any]],
        budget_s: float,
        *,
        why_not: Callable[[], str] = str,
        review: Callable[[dict[str, Answer[Any]]], dict[str, Answer[Any]]] = dict,
    ) -> PhaseReport:
        started = _now()
        if lifecycle.is_repeat(self._phase, command):
            return self._report(command, {}, started)
        target = lifecycle.next_phase(self._phase, command, self._traits)
        self._refuse(command, why_not())

        async def carry_out() -> PhaseReport:
            answers = await fan_out(
                {member.engine_id: calling(act, member) for member in self._roster.unfenced()},
                operation=command.value,
                budget_s=budget_s,
            )
            if len(self._roster):  # it was not stopped meanwhile
                answers = review(answers)
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
        async def resume(member: Member) -> None:
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
        if answers and not len(self._roster):
            raise PhaseFailed(
                f"group {self.name}: {command} ended because the group was stopped",
                phase=command.value,
                failures=failures,
            )
        await self._roster.fence(failures)
        left = len(self._roster.unfenced())
        if left:  # and they have all done it
            self._phase = target
        if left < self._min_engines() or (failures and self._raises()):
            raise PhaseFailed(
                f"{told(command.value, self.name, failures)}; {left} of {len(self._roster)} "
                f"engines left, {self._min_engines()} needed; the group is {self._phase}",
                phase=command.value,
                failures=failures,
            )
        self._phase = target
        report = self._report(command, answers, started)
        logger.info("group %s: %s -> %s in %.3f s", self.name, command, target, report.elapsed_s)
        return report

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
        self._mending.num_commands += 1
        if order is None:
            return
        if order <= self._last_order:
            raise LifecycleError(
                f"group {self.name}: command {order} came after command {self._last_order}"
            )
        self._last_order = order

    def _raises(self) -> bool:
        return self._settings.lifecycle.on_failure == "raise"

    def _min_engines(self) -> int:
        wanted = self._settings.group.min_engines
        if wanted is not None:
            return wanted
        return len(self._roster) if self._raises() else min(1, len(self._roster))


def _size_of_weights(model_path: str) -> int:
    return sum(file.stat().st_size for file in Path(model_path).glob("*.safetensors"))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"


def _now() -> float:
    return asyncio.get_running_loop().time()


def _tags(member: Member) -> str:
    return ", ".join(sorted(member.released))


__all__ = ["GroupSettings", "ServerGroup"]
