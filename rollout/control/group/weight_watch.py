"""Looks for weights of attached engines that another program has changed, beside the commands.

Always true:
- a check runs only while the group serves, and a command waits for its end: SGLang ends if it has
  to check its weights after a release.  So what a check finds is about the weights that were
  verified, and counts only until the next command;
- a check that fails shows nothing;
- the checks of an engine take at most 1 % of the time: SGLang hashes all weights at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial

from engines.process.background import Then, keep_task
from engines.protocol.plain_text import describe
from rollout.control.engine.probe import Probe
from rollout.control.engine.state import EngineState
from rollout.control.group.command_runner import CommandRunner, now
from rollout.control.group.engine_set import EngineSet
from rollout.control.group.health_probe import EngineProbe
from rollout.core.errors import LifecycleError
from rollout.core.fanout import wait_all
from rollout.rules.fingerprint_check import first_difference
from rollout.rules.health import ProbeResult, check_again_s
from rollout.rules.lifecycle import Phase

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Check:
    """The last check of an engine.

    Attributes:
        member: the engine; another one may come to its slot.
        num_commands: of its group, when it began; one that waits for its end has been counted.
        why: what is wrong with its weights, or empty if nothing is, or if that is not known.
        again_s: when the next one may begin.
    """

    member: EngineState
    num_commands: int = 0
    task: asyncio.Task[None] | None = None
    why: str = ""
    again_s: float = 0.0


class WeightWatch:
    """The checks of the engines of one group.

    Args:
        exclusive: keeps commands out meanwhile.
        budget_s: deadline for a check.
    """

    def __init__(
        self,
        engines: EngineSet,
        commands: CommandRunner,
        probe: Probe,
        exclusive: Callable[[], AbstractAsyncContextManager[None]],
        budget_s: float,
    ) -> None:
        self._exclusive = exclusive
        self._budget_s = budget_s
        self._engines = engines
        self._commands = commands
        self._probe = probe
        self._checks: dict[str, _Check] = {}

    def watch(self, probes: Sequence[EngineProbe]) -> tuple[EngineProbe, ...]:
        """Begin the checks that are due, of engines that passed their probe.

        Returns:
            The probes, with what the last checks have found.
        """
        if self._commands.phase is not Phase.SERVING or self._commands.turn.locked():
            return tuple(probes)
        return tuple(map(self._with_finding, probes))

    async def aclose(self) -> None:
        """End the checks under way."""
        tasks = [check.task for check in self._checks.values() if check.task is not None]
        self._checks.clear()
        for task in tasks:
            task.cancel()
        await wait_all(tasks)

    def _with_finding(self, probe: EngineProbe) -> EngineProbe:
        member = self._engines.get(probe.engine_id)
        if member is None or probe.result is not ProbeResult.ANSWERED or member.is_stale:
            return probe
        check = self._checks.get(probe.engine_id)
        if check is None or check.member is not member:
            check = self._checks[probe.engine_id] = _Check(member)
        if check.task is not None and not check.task.done():
            return probe
        if check.why and check.num_commands == self._commands.num_commands:
            return replace(probe, result=ProbeResult.CHANGED, reason=check.why)
        check.why = ""
        if now() >= check.again_s:
            name = f"weights:{probe.engine_id}"
            check.task = keep_task(partial(self._run, check), name, Then.IS_OVER)
        return probe

    async def _run(self, check: _Check) -> None:
        member = check.member
        async with self._exclusive():
            serves = self._commands.phase is Phase.SERVING and not member.fence_reason
            if not (serves and _is_comparable(member)):
                return  # a command, or a recovery, came first
            began_s, check.num_commands = now(), self._commands.num_commands
            try:
                async with asyncio.timeout(self._budget_s):
                    check.why = await self._why_changed(member)
            except Exception as error:  # the probes decide whether it is dead
                why = describe(error) or f"no answer within {self._budget_s:g} s"
                logger.warning("engine %s: its weights were not checked: %s", member.engine_id, why)
            finally:
                check.again_s = check_again_s(now(), now() - began_s)

    async def _why_changed(self, member: EngineState) -> str:
        version, record = member.weight_version, member.record
        try:
            report = await member.fingerprints()
        except LifecycleError as error:  # of an adapter
            return f"{error}: {_BY_OTHERS}"
        if report is not None and record is None:
            member.record = report  # its group was lost, and with it what was known
        if report is not None and record is not None:
            name = first_difference(record, report)
            what = f"tensor {name!r} is not what it was when weight version {version} was verified"
            return f"{what}: {_BY_OTHERS}" if name else ""
        if why := await self._probe.why_changed(member):
            return f"at weight version {version}, {why}: {_BY_OTHERS}"
        return ""


_BY_OTHERS = "another program has changed its weights"


def _is_comparable(member: EngineState) -> bool:
    """Whether its weights are verified, and can be compared with what they were."""
    if member.changed or member.is_stale or member.needs_logprob_check:
        return False
    return member.is_verified and (member.has_checker or bool(member.canary))
