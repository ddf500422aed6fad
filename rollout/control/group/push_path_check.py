"""Checks the push path of a group: a push of the weights that the engines hold changes nothing.

Always true:
- nothing is reset before every engine has copied its weights and can compare them;
- from the reset until its comparison has passed, an engine has no version, and reports a text that
  is none.  So it does not serve, whatever crashes;
- an engine for which anything fails after the reset is a failure of the command, and is fenced: a
  later push would not restore what this one missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from http import HTTPStatus

from engines.protocol import unverified_text
from engines.protocol.errors import EngineRejected
from rollout.control.engine.group_settings import GroupSettings
from rollout.control.engine.state import EngineState
from rollout.control.group.command_runner import left_until
from rollout.control.group.engine_set import EngineSet, as_failure
from rollout.control.group.weight_update import WeightUpdater
from rollout.core.errors import LifecycleError
from rollout.core.fanout import EngineReply, fan_out
from rollout.rules.fingerprint_check import first_difference
from rollout.rules.lifecycle import Command
from rollout.weights.push.weight_push import WeightPush

Replies = dict[str, EngineReply[None]]


async def take_snapshot(member: EngineState) -> None:
    """Let an engine copy its weights, after it has shown that it can compare them."""
    member.snapshot = await member.engine.weights_checker("checksum")
    await member.engine.weights_checker("snapshot")


def check_snapshots(replies: Mapping[str, EngineReply[None]], group: str) -> None:
    """Check that no engine refuses its snapshot.

    Raises:
        LifecycleError: one does; nothing was changed.
    """
    for reply in replies.values():
        cause = reply.failure and reply.failure.__cause__
        if isinstance(cause, EngineRejected) and cause.status == HTTPStatus.BAD_REQUEST:
            raise LifecycleError(
                f"group {group}: the push path cannot be checked: {cause}; nothing was changed",
                command=Command.SNAPSHOT,
            )


class PushPathCheck:
    """Sends the push whose path is checked to the engines of a group."""

    def __init__(self, settings: GroupSettings, engines: EngineSet, updater: WeightUpdater) -> None:
        self._settings = settings
        self._engines = engines
        self._updater = updater

    def why_not(self, version: int | None) -> str:
        """Why the engines cannot take a snapshot."""
        for member in self._engines.unfenced():
            if not member.compares_weights:
                return f"engine {member.engine_id} has no /weights_checker"
            if version is None or member.released or not member.is_verified_at(version):
                return f"engine {member.engine_id} does not hold verified weights {version}"
        return ""

    async def run(self, push: WeightPush, ends_s: float) -> Replies:
        """Reset the weights, push, and compare; replies by engine id.

        Args:
            ends_s: of the event loop's clock; each of the three has a third of the time until then.

        Raises:
            WeightMismatch: an engine has no such tensors; nothing was changed.
        """
        third_s = left_until(ends_s) / 3
        self._updater.check(push)
        members = self._engines.unfenced()
        self._updater.mark_changed(push)
        replies = await self._each(members, "reset_tensors", partial(_reset, push=push), third_s)
        pushed = await self._push(push, third_s)
        for member in members:
            member.weight_version = None  # not before it has compared
        # A stop empties the set of engines, so the push may have replies of none.
        done = {name for name, reply in pushed.items() if reply.failure is None}
        failed = {name: reply for name, reply in replies.items() if reply.failure is not None}
        whole = [member for member in members if member.engine_id in done - failed.keys()]
        compared = await self._each(whole, "compare", partial(_compare, push=push), third_s)
        return pushed | compared | failed  # of each engine, the first failure explains

    async def _push(self, push: WeightPush, budget_s: float) -> Replies:
        started = asyncio.get_running_loop().time()
        names = [member.engine_id for member in self._engines.unfenced()]
        try:
            return await self._updater.push(push, budget_s)
        except Exception as error:  # nothing restores what was reset
            return {
                name: EngineReply(0.0, failure=as_failure(error, name, "push", started))
                for name in names
            }

    async def _each(
        self,
        members: Iterable[EngineState],
        operation: str,
        call: Callable[[EngineState], Awaitable[None]],
        budget_s: float,
    ) -> Replies:
        return await fan_out(
            {member.engine_id: partial(call, member) for member in members},
            operation=operation,
            budget_s=budget_s,
        )


async def _reset(member: EngineState, push: WeightPush) -> None:
    # The version first: after a crash in between, the weights are right, and no launch trusts them.
    await member.engine.update_weight_version(unverified_text(push.version))
    await member.engine.weights_checker("reset_tensors")


async def _compare(member: EngineState, push: WeightPush) -> None:
    await member.engine.weights_checker("compare")
    # SGLang answers "compare" for its first rank alone, and "checksum" for all of a stage.
    before, member.snapshot = member.snapshot, None
    now = await member.engine.weights_checker("checksum")
    if before is not None and (name := first_difference(before, now)):
        raise LifecycleError(f"tensor {name!r} is not what it was before the push")
    await member.engine.update_weight_version(str(push.version))
    member.weight_version = push.version
