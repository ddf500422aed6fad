"""What a server knows of its groups.

Always true: a group that cannot be asked hides no other; it is shown as it was last known, with
all its engines fenced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from rollout.config import ServerConfig
from rollout.errors import ConfigError
from rollout.fanout import barrier, describe
from rollout.lifecycle import Command, Phase, Traits, before
from rollout.policy import group_traits
from rollout.ports import GroupPort
from rollout.types import GroupStatus

_LOOK_TIMEOUT_S = 15.0


class GroupView:
    """The groups of one server, where each of them is, and how it was when last looked at.

    Attributes:
        phases: where each group is.
        traits: how each goes through the lifecycle table.
    """

    def __init__(self, name: str, config: ServerConfig, groups: Mapping[str, GroupPort]) -> None:
        self.groups = dict(groups)
        self.phases = dict.fromkeys(self.groups, Phase.SERVING)
        self.traits: dict[str, Traits] = {
            group: group_traits(
                f"servers.{name}.groups.{group}", config.groups[group], config.weights.update
            )
            for group in self.groups
        }
        self._last_known: dict[str, GroupStatus] = {}

    async def look(self) -> dict[str, GroupStatus]:
        """The status of each group; one that cannot be asked is shown as last known, fenced."""
        return await barrier({name: self._look(name, one) for name, one in self.groups.items()})

    async def _look(self, name: str, group: GroupPort) -> GroupStatus:
        try:
            async with asyncio.timeout(_LOOK_TIMEOUT_S):
                status = await group.status()
        except Exception as error:  # a lost group must not hide the others
            known = self._last_known.get(name)
            if known is None:
                raise
            return _lost(known, describe(error))
        self._last_known[name] = status
        return status

    def last_known(self, name: str) -> GroupStatus:
        """A group as it was when last looked at, in the phase that it has reached for certain.

        Raises:
            KeyError: it was never looked at.
        """
        return replace(self._last_known[name], phase=self.phases[name].value)

    def all_last_known(self) -> list[GroupStatus]:
        """All groups that were ever looked at, as they were then."""
        return list(self._last_known.values())

    def is_now(self, name: str, group: GroupPort, status: GroupStatus) -> None:
        """Another group has taken the place of one that was lost."""
        self.groups[name] = group
        self._last_known[name] = status
        self.phases[name] = Phase(status.phase)

    async def look_at_phases(self) -> None:
        """Ask the groups where they are: one may have gone on by itself."""
        for name, status in (await self.look()).items():
            self.phases[name] = Phase(status.phase)

    def take_last_known_phases(self) -> None:
        """Believe what the groups said when they were last looked at."""
        self.phases.update({name: Phase(one.phase) for name, one in self._last_known.items()})

    def fenced(self) -> dict[str, str]:
        """Engines known to be fenced, and why."""
        return {
            engine.engine_id: engine.fenced_because
            for status in self._last_known.values()
            for engine in status.engines
            if engine.fenced_because
        }

    def before(self, command: Command) -> list[str]:
        """The groups that have ``command`` before them."""
        return before(command, self.phases, self.traits)

    def group_of(self, engine_id: str) -> str:
        """The group an engine was in when last looked at.

        Raises:
            ConfigError: no group has it.
        """
        for name, status in self._last_known.items():
            if any(engine.engine_id == engine_id for engine in status.engines):
                return name
        known = [e.engine_id for status in self._last_known.values() for e in status.engines]
        raise ConfigError(f"no engine {engine_id!r}; known: {', '.join(known) or 'none yet'}")

    def offloading(self) -> list[str]:
        """The groups that share their memory with the trainer."""
        return [name for name, one in self.traits.items() if one.needs_offload]


def _lost(status: GroupStatus, because: str) -> GroupStatus:
    reason = f"its group cannot be reached: {because}"
    engines = (
        replace(engine, state="fenced", fenced_because=engine.fenced_because or reason)
        for engine in status.engines
    )
    return replace(status, engines=tuple(engines))
