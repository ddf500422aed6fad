"""The groups of a server: their phases and their last known status.

Always true: a lost group does not hide the others.  It is shown with its last known status, and all
its engines as fenced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from engines.protocol import ProcessIdentity
from engines.protocol.plain_text import describe
from rollout.config import GroupConfig, ServerConfig
from rollout.control.group.engine_recovery import LostState
from rollout.control.group.server_group import ServerGroup
from rollout.control.server.journal import JournalRecord
from rollout.core.errors import ActorLost, ConfigError
from rollout.core.fanout import barrier
from rollout.core.types import GroupStatus
from rollout.rules.deadlines import group_margin_s
from rollout.rules.lifecycle import Command, GroupTraits, Phase, groups_that_need
from rollout.rules.release_policy import group_traits

_STATUS_TIMEOUT_S = 15.0
# An actor starts and inspects its engines; then it ends those that it cannot reuse.
_REPLACE_TIMEOUT_S = 90.0

logger = logging.getLogger(__name__)


class ActorFactory(Protocol):
    """Replaces the actors of a server."""

    def make_group(self, name: str, lost: LostState) -> Awaitable[ServerGroup]:
        """A group in the place of a lost one; see ``ServerGroup.take_over``."""
        ...

    def end_router(self, process: ProcessIdentity) -> None:
        """Kill this process of the router, if it lives; another one starts in its place."""
        ...


def lost_groups(record: JournalRecord, groups: Mapping[str, GroupConfig]) -> dict[str, LostState]:
    """The groups of a lost server, by its record."""
    lost: dict[str, LostState] = {}
    for name, group in groups.items():
        phase = record.phases[name]
        entries = [engine for engine in record.engines if engine.group == name]
        known = GroupStatus(
            name,
            group.worker_type,
            phase,
            group.needs_offload,
            tuple(entry.status(phase) for entry in entries if not entry.is_asleep),
            kind=group.engine.kind.value,
            asleep=tuple(entry.status("asleep") for entry in entries if entry.is_asleep),
            python=group.engine.python,
        )
        command = record.unfinished.get(name)
        lost[name] = LostState(known, Command(command) if command else None, record.base_version)
    return lost


class GroupRegistry:
    """The groups of one server.

    Attributes:
        phases: the phase of each group.
        traits: the traits of each group, for the lifecycle table.
        lost: groups whose actor was seen to have died; another one may have replaced it.
    """

    def __init__(self, name: str, config: ServerConfig, groups: Mapping[str, ServerGroup]) -> None:
        self.groups = dict(groups)
        self.phases = dict.fromkeys(self.groups, Phase.STARTING)
        self.traits: dict[str, GroupTraits] = {
            group: group_traits(
                f"servers.{name}.groups.{group}",
                config.groups[group],
                config.weights.update,
                config.weights.not_pushed,
            )
            for group in self.groups
        }
        self._configs = config.groups
        self._margins_s = {
            group: group_margin_s(config.groups[group].engine) for group in self.groups
        }
        self.lost: dict[str, ServerGroup] = {}
        self._last_known: dict[str, GroupStatus] = {}

    async def statuses(self) -> dict[str, GroupStatus]:
        """The status of each group; a lost group is shown as last known, fenced."""
        return await barrier(
            {name: self._status(name, group) for name, group in self.groups.items()}
        )

    async def _status(self, name: str, group: ServerGroup) -> GroupStatus:
        try:
            async with asyncio.timeout(_STATUS_TIMEOUT_S):
                status = await group.status()
        except Exception as error:  # a lost group must not hide the others
            if isinstance(error, ActorLost) and error.is_dead:
                self.lost[name] = group
            known = self._last_known.get(name)
            if known is None:
                raise
            # Commands have changed its phase since it was read.
            self._last_known[name] = known = self.last_known(name)
            return _as_lost(known, describe(error))
        self._last_known[name] = status
        return status

    async def pushed_fingerprints(self) -> dict[str, str]:
        """Fingerprints of the tensors of the last push, from the first group that knows them."""
        for group in self.groups.values():
            with suppress(Exception):  # a lost group must not hide the others
                async with asyncio.timeout(_STATUS_TIMEOUT_S):
                    if fingerprints := await group.pushed_fingerprints():
                        return fingerprints
        return {}

    def last_known(self, name: str) -> GroupStatus:
        """The last known status of a group, in the last phase that it completed.

        Raises:
            KeyError: its status was never read.
        """
        return replace(self._last_known[name], phase=self.phases[name].value)

    def all_last_known(self) -> list[GroupStatus]:
        """The last known status of all groups."""
        return list(self._last_known.values())

    async def start(
        self, lost: JournalRecord | None, factory: ActorFactory | None
    ) -> dict[str, GroupStatus]:
        """Start all groups.

        Args:
            lost: of the lost server whose engines they take over; if the actor of one of them is
                lost meanwhile, another group takes its place.
        """
        states = {} if lost is None else lost_groups(lost, self._configs)
        statuses = await barrier(
            {name: self._start(name, states.get(name), factory) for name in self.groups}
        )
        self._last_known.update(statuses)
        self.use_last_known_phases()
        return statuses

    async def _start(
        self, name: str, lost: LostState | None, factory: ActorFactory | None
    ) -> GroupStatus:
        try:
            return await self.groups[name].start()
        except ActorLost as error:
            if lost is None or factory is None or not error.is_dead:
                raise
            logger.warning("group %s is lost while it starts: %s", name, describe(error))
            return await self._start_another(name, lost, factory)

    async def _start_another(
        self, name: str, lost: LostState, factory: ActorFactory
    ) -> GroupStatus:
        async with asyncio.timeout(_REPLACE_TIMEOUT_S + self._margins_s[name]):
            group = await factory.make_group(name, lost)
            status = await group.start()
        self.groups[name] = group
        return status

    async def replace_lost(
        self, name: str, factory: ActorFactory | None, unfinished: Command | None, version: int
    ) -> None:
        """Create and start a group in the place of a lost one; see ``ServerGroup.take_over``.

        Raises:
            ActorLost: there is no factory.
        """
        if factory is None:
            raise ActorLost(f"group {name} is lost; stop this deployment and launch it again")
        lost = LostState(self.last_known(name), unfinished, version)
        status = await self._start_another(name, lost, factory)
        self._last_known[name] = status
        self.phases[name] = Phase(status.phase)

    async def refresh_phases(self) -> None:
        """Read the phases from the groups: a late command may have changed one."""
        for name, status in (await self.statuses()).items():
            self.phases[name] = Phase(status.phase)

    def use_last_known_phases(self) -> None:
        """Set the phases to those of the last known statuses."""
        self.phases.update({name: Phase(status.phase) for name, status in self._last_known.items()})

    def fenced(self) -> dict[str, str]:
        """Engines known to be fenced, and why."""
        return {
            engine.engine_id: engine.fence_reason
            for status in self._last_known.values()
            for engine in status.engines
            if engine.fence_reason
        }

    def that_need(self, command: Command) -> list[str]:
        """The groups that still need ``command``."""
        return groups_that_need(command, self.phases, self.traits)

    def may_continue_late(self) -> list[str]:
        """The groups that a lost ``continue_generation`` may still reach: a release skips them."""
        return [
            name
            for name, phase in self.phases.items()
            if phase is Phase.VERIFIED and not self.traits[name].needs_offload
        ]

    def group_of(self, engine_id: str) -> str:
        """The last known group of an engine.

        Raises:
            ConfigError: no group has it.
        """
        for name, status in self._last_known.items():
            if any(engine.engine_id == engine_id for engine in status.engines):
                return name
        known = [
            engine.engine_id for status in self._last_known.values() for engine in status.engines
        ]
        raise ConfigError(f"no engine {engine_id!r}; known: {', '.join(known) or 'none yet'}")

    def offloading(self) -> list[str]:
        """The groups that share their memory with the trainer."""
        return [name for name, traits in self.traits.items() if traits.needs_offload]


def _as_lost(status: GroupStatus, error: str) -> GroupStatus:
    reason = f"its group cannot be reached: {error}"
    engines = (
        replace(engine, state="fenced", fence_reason=engine.fence_reason or reason)
        for engine in status.engines
    )
    return replace(status, engines=tuple(engines))
