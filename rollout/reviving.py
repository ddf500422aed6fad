"""Another group in the place of one whose actor is lost.

Always true: engines that may be amidst a command are not taken over; they are ended first.
"""

from __future__ import annotations

import asyncio

from rollout.errors import ActorLost
from rollout.group_view import GroupView
from rollout.ports import Remaker

# An actor starts, looks at its engines and ends those it cannot take over.
_TIMEOUT_S = 120.0


async def revive_group(
    name: str, view: GroupView, remaker: Remaker | None, version: int | None
) -> None:
    """Make it, start it, and let the server's view have it.

    Args:
        version: what its engines hold if every command to them has ended; None ends them all, and
            recovery starts them again.

    Raises:
        ActorLost: nobody can make another.
    """
    if remaker is None:
        raise ActorLost(f"group {name} is lost; stop this deployment and launch it again")
    known = view.last_known(name)
    async with asyncio.timeout(_TIMEOUT_S):
        group = await remaker.group(name, known, version)
        view.is_now(name, group, await group.start())
