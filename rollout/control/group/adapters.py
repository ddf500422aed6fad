"""The versions of LoRA adapters on the engines of one group: staged, verified, unloaded.

Always true: a version that was staged is on every engine that serves, verified by its fingerprints
or by log-probs; else it is on none.  An engine that comes later gets all of them before it serves.
Engines generate meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from engines.protocol.errors import EngineRejected
from rollout.control.engine.group_settings import GroupSettings
from rollout.control.engine.probe import Probe, check_expected
from rollout.control.engine.state import EngineState
from rollout.control.group.engine_set import EngineSet, format_failures
from rollout.core.errors import EngineFailure, PhaseFailed, WeightMismatch
from rollout.core.fanout import EngineReply, fan_out
from rollout.rules.fingerprint_check import Verification, why_not_as_sent
from rollout.rules.lifecycle import STAGE
from rollout.weights.push.stream_reader import StaticBuckets
from rollout.weights.push.weight_push import PushTarget, WeightPush
from rollout.weights.routes.adapter import AsAdapter

logger = logging.getLogger(__name__)


class GroupAdapters:
    """Loads versions of adapters into the engines of one group."""

    def __init__(self, settings: GroupSettings, engines: EngineSet, probe: Probe) -> None:
        self._settings = settings
        self._engines = engines
        self._probe = probe
        self._budget_s = settings.lifecycle.update_timeout_s
        self._pushes: dict[str, WeightPush] = {}

    def know(self, pushes: Sequence[WeightPush]) -> None:
        """These are on the engines of the group that this one replaces."""
        self._pushes = {push.engine_adapter: push for push in pushes}

    async def stage(self, push: WeightPush) -> dict[str, EngineReply[Verification]]:
        """Load a version into all engines that serve, and verify it; or into none.

        Raises:
            WeightMismatch: all engines refuse it.
            PhaseFailed: an engine failed, or has not loaded what was sent.
        """
        name = push.engine_adapter
        if push.canary and self._probe.prompts:
            check_expected(push.canary, self._probe.prompts)
        members = self._serving()
        answers = await self._on(members, partial(self._load, push=push))
        loaded = [member for member in members if answers[member.engine_id].failure is None]
        if len(loaded) == len(members) and self._needs_logprobs(push, loaded):
            check = self._probe.verify_adapter
            answers |= await check(loaded, name, push.canary, self._budget_s)
        failures = [answer.failure for answer in answers.values() if answer.failure is not None]
        if failures:
            await self._unload(members, [name])
            raise self._error(name, failures, len(members))
        self._pushes[name] = push
        return answers

    async def unload(self, names: Collection[str]) -> None:
        """Unload versions that nothing uses, wherever they are."""
        for name in names:
            self._pushes.pop(name, None)
        await self._unload(self._serving(), names)

    async def complete(self, member: EngineState) -> None:
        """Load what the others have into an engine that comes to them, and unload the rest.

        Raises:
            WeightMismatch: it has loaded something else.
            EngineRejected, EngineUnreachable: it cannot.
        """
        await _unload_from(member, [name for name in member.adapters if name not in self._pushes])
        for name, push in self._pushes.items():
            if name not in member.adapters:
                await self._load(member, push=push)

    async def _load(self, member: EngineState, *, push: WeightPush) -> Verification:
        route, target = push.route, PushTarget(member.engine, member.num_payloads)
        assert isinstance(route, AsAdapter)
        async for payload, _ in StaticBuckets(push.buckets):
            reported = await route.load(target, route.pack(payload), push.version)
        sent = push.manifest.fingerprints
        if why := why_not_as_sent(push.adapter, reported, sent):
            raise WeightMismatch(f"engine {member.engine_id}: {why}", engine_id=member.engine_id)
        member.adapters[push.engine_adapter] = reported
        return Verification("fingerprint" if reported else "version")

    def _needs_logprobs(self, push: WeightPush, members: Sequence[EngineState]) -> bool:
        is_reported = all(member.adapters[push.engine_adapter] for member in members)
        return bool(self._probe.prompts) and not (is_reported and not push.canary)

    async def _unload(self, members: Sequence[EngineState], names: Collection[str]) -> None:
        answers = await self._on(members, partial(_unload_from, names=names))
        for answer in answers.values():
            if answer.failure is not None:
                logger.warning("%s: it keeps %s", answer.failure, ", ".join(names))

    def _serving(self) -> list[EngineState]:
        return [member for member in self._engines.unfenced() if not member.is_stale]

    async def _on(
        self, members: Sequence[EngineState], work: Callable[[EngineState], Awaitable[Any]]
    ) -> dict[str, EngineReply[Any]]:
        calls = {member.engine_id: partial(work, member) for member in members}
        return await fan_out(calls, operation=STAGE, budget_s=self._budget_s)

    def _error(self, name: str, failures: Sequence[EngineFailure], num: int) -> Exception:
        group = self._settings.name
        if len(failures) == num and all(
            isinstance(failure.__cause__, EngineRejected) for failure in failures
        ):
            return WeightMismatch(f"no engine of group {group} takes adapter {name}: {failures[0]}")
        text = format_failures(STAGE, group, failures)
        return PhaseFailed(
            f"{text}; adapter {name} serves nowhere, and what served before serves on",
            phase=STAGE,
            failures=failures,
        )


async def _unload_from(member: EngineState, names: Collection[str]) -> None:
    for name in names:
        with suppress(EngineRejected):  # it never got it
            await member.engine.unload_lora_adapter(name)
        member.adapters.pop(name, None)
        member.canary = {key: answer for key, answer in member.canary.items() if key != name}
