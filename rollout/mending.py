"""What recovery does to the engines of one group.

Always true: an engine is started again, or proved, only while no command runs; it may be looked at
and fenced at any time, for that must work while a command hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from engines.protocol import MemoryTag, WeightsReport
from rollout.errors import EngineFailure
from rollout.group_commands import GroupCommands
from rollout.health import LOOKS
from rollout.hearing import Hearing
from rollout.leading import adopt, walk
from rollout.lifecycle import Phase
from rollout.member import Member
from rollout.roster import Roster
from rollout.watching import GroupProbe, probe_all
from rollout.weights.source import WeightSource


class Mending:
    """The part of a group that watches its engines and puts new ones in the place of dead ones.

    Args:
        commands: whoever commands the engines.
        tags: what the group releases when it is offloaded; empty if it keeps its GPUs.
        sources: of weights for a restarted engine, in the order in which they are tried.
        hearing: asks for what fingerprints leave open.
    """

    def __init__(
        self,
        roster: Roster,
        commands: GroupCommands,
        tags: Sequence[MemoryTag],
        sources: Sequence[WeightSource],
        hearing: Hearing,
    ) -> None:
        self._roster = roster
        self._commands = commands
        self.tags = tags
        self._sources = sources
        self._hearing = hearing
        self._num_going_on = 0
        self._door = asyncio.Lock()

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        """No command meanwhile, but others may be mended too: the first takes the turn for all."""
        async with self._door:
            if not self._num_going_on:
                await self._commands.turn.acquire()
            self._num_going_on += 1
        try:
            yield
        finally:
            self._num_going_on -= 1
            if not self._num_going_on:
                self._commands.turn.release()

    async def probe(self, phase: Phase, budget_s: float, distrusted: Sequence[str]) -> GroupProbe:
        """Look at all engines, in the way that makes sense in ``phase``.

        Args:
            distrusted: engines that must also still hold the weights they should.
        """
        num_commands, was_commanded = self._commands.num_commands, self._is_commanded()
        found = await probe_all(self._roster.members(), LOOKS[phase], budget_s, distrusted)
        is_steady = num_commands == self._commands.num_commands and not was_commanded
        return GroupProbe(is_steady, found)

    def _is_commanded(self) -> bool:
        return self._commands.turn.locked() and not self._num_going_on

    async def fence(self, engine_id: str, reason: str) -> None:
        """Take an engine out of everything and end its process, whatever it is doing."""
        member = self._roster[engine_id]
        if member.fenced_because:
            member.fenced_because = reason
            return
        failure = EngineFailure(reason, engine_id=engine_id, operation="fence")
        await self._roster.fence([failure])

    async def restart(self, engine_id: str, phase: Phase) -> None:
        """Start a fenced engine again in its place and lead it to ``phase``."""
        await self._roster.replace(engine_id, lambda member: walk(member, phase, self.tags))

    async def adopt(self, engine_id: str, version: int) -> bool:
        """Let a stale engine serve again if it holds ``version`` or can be given it."""
        member = self._roster[engine_id]
        if member.fenced_because or not member.is_stale:
            return not member.fenced_because

        async def ask(left_open: str) -> str:
            self._hearing.owe(member, left_open)
            if not member.owes_canary or self._commands.phase is not Phase.SERVING:
                return ""  # nobody can be asked, or it is asked with the others when they go on
            peers = [one for one in self._roster.unfenced() if one.is_proved_at(version)]
            return await self._hearing.why_unlike(member, peers)

        return await adopt(member, version, self._sources, self._proof_of(version, member), ask)

    def _proof_of(self, version: int, asked: Member) -> WeightsReport | None:
        """Fingerprints of an engine that was proved at ``version``; ``asked`` itself, if it was."""
        proofs = (
            member.record
            for member in (*self._roster.unfenced(), asked)
            if member.weight_version == version
            and (member.is_proved or member is asked)
            and not member.changed
        )
        return next(proofs, None)
