"""From a slot to a member: one engine launched, asked what it is, and taken in if it fits.

Always true: an engine that is not taken in is ended.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from engines.client import EngineClient
from engines.deadlines import Deadlines
from engines.features import read_features
from engines.launch import EngineLauncher, EngineSpec, RunningEngine
from engines.protocol import Endpoint, Engine
from rollout.admission import unfit
from rollout.config import HealthConfig, LifecycleConfig
from rollout.errors import ConfigError
from rollout.group_settings import GroupSettings
from rollout.hearing import Hearing, keep
from rollout.member import Member
from rollout.types import EngineSlot

Connect = Callable[[Endpoint, str], Engine]


def connect_http(budgets: LifecycleConfig, health: HealthConfig | None = None) -> Connect:
    """The client every real engine is driven with; its deadlines are those of the phases."""
    probe = {} if health is None else {"ready_s": health.probe_timeout_s}
    deadlines = Deadlines(
        control_s=min(budgets.verify_timeout_s, budgets.continue_timeout_s),
        pause_s=budgets.pause_timeout_s,
        memory_s=max(budgets.release_timeout_s, budgets.resume_timeout_s),
        update_s=budgets.update_timeout_s,
        **probe,
    )

    def connect(endpoint: Endpoint, engine_id: str) -> Engine:
        return EngineClient(endpoint, engine_id=engine_id, deadlines=deadlines)

    return connect


Lead = Callable[[Member], Awaitable[None]]
"""Leads a new engine to where the others are, before it is one of them."""


class Starter:
    """Starts the engines of one group."""

    def __init__(
        self,
        settings: GroupSettings,
        launcher: EngineLauncher,
        connect: Connect,
        *,
        hearing: Hearing,
        memory_saver: bool,
        weights_cpu_backup: bool,
    ) -> None:
        self._hearing = hearing
        self._settings = settings
        self._launcher = launcher
        self._connect = connect
        self._memory_saver = memory_saver
        self._weights_cpu_backup = weights_cpu_backup

    async def start(self, slot: EngineSlot, lead: Lead | None = None) -> Member:
        """Launch the engine of a slot; with ``lead``, it is one among others and stale."""
        process = await self._launcher.launch(self._spec(slot))
        try:
            member = await self.admit(slot, process)
        except BaseException:
            await process.kill()
            raise
        if lead is None:
            return member
        try:
            member.is_stale, member.is_proved = True, False
            await lead(member)
            return member
        except BaseException:
            await process.kill()
            await member.engine.aclose()
            raise

    async def admit(self, slot: EngineSlot, process: RunningEngine) -> Member:
        """Ask an engine what it is, and take it in.

        Raises:
            ConfigError: it is not what its group needs.
        """
        engine = self._connect(process.endpoint, slot.engine_id)
        try:
            return await self._admit(slot, process, engine)
        except BaseException:
            await engine.aclose()
            raise

    def unknown(self, slot: EngineSlot, process: RunningEngine, because: str) -> Member:
        """An engine of which nothing is known but that it must not serve."""
        return Member(
            slot=slot,
            process=process,
            engine=self._connect(process.endpoint, slot.engine_id),
            has_session=False,
            weight_version=None,
            is_proved=False,
            fenced_because=because,
        )

    async def _admit(self, slot: EngineSlot, process: RunningEngine, engine: Engine) -> Member:
        info, endpoints = await engine.server_info(), await engine.endpoints()
        features = read_features(info, endpoints)
        if why := unfit(
            features,
            self._settings.group,
            self._settings.update,
            self._settings.lifecycle.drain,
            memory_saver=self._memory_saver,
            weights_cpu_backup=self._weights_cpu_backup,
        ):
            raise ConfigError(self._settings.path + why.replace("{engine}", slot.engine_id))
        version = await engine.weight_version()
        by_fingerprint = self._settings.lifecycle.verify_by == "fingerprint"
        member = Member(
            slot=slot,
            process=process,
            engine=engine,
            has_session=features.has_weight_session,
            num_payloads=features.num_payloads,
            takes_flat_broadcast=features.takes_flat_broadcast,
            weight_version=int(version) if version.isdigit() else None,
            base_version=int(version) if version.isdigit() else None,
            has_checker=by_fingerprint and "/weights_checker" in endpoints,
            gives_weights="/weights_content" in endpoints,
            tells_memory=bool(info.resident_bytes),
            tells_groups=info.update_groups is not None,
            tensors=tuple(await engine.weights_manifest())
            if "/weights_manifest" in endpoints
            else (),
        )
        if self._weights_cpu_backup:
            # Some of these weights must outlive a release: what they are now is what to expect.
            member.record = await member.fingerprints()
            if self._hearing.alone_proves(member):  # it has no adapter yet
                keep(member, await self._hearing.ask(member))
        return member

    def _spec(self, slot: EngineSlot) -> EngineSpec:
        config = self._settings.group.engine
        return EngineSpec(
            engine_id=slot.engine_id,
            kind=config.kind.value,
            model_path=self._settings.model_path,
            log_path=str(Path(self._settings.log_dir) / f"{slot.engine_id}.log"),
            gpu_ids=slot.gpu_ids,
            num_cpus=slot.num_cpus,
            memory_saver=self._memory_saver,
            weights_cpu_backup=self._weights_cpu_backup,
            start_timeout_s=config.start_timeout_s,
            options=config.options,
            env=config.env,
            worker_type=self._settings.group.worker_type,
            python=config.python,
            url=config.urls[slot.index] if config.urls else "",
        )
