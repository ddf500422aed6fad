"""Launches one engine on a slot, queries its features, and admits it if they fit.

Always true: an engine that is not admitted is ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from engines.http.call import Deadlines
from engines.kinds import KINDS, kind_of
from engines.launch import AttachedEngine, EngineLauncher, EngineSpec, RunningEngine, claimed
from engines.protocol import Endpoint, Engine, MemoryTag, ServerInfo
from engines.protocol.errors import EngineError
from engines.protocol.features import Features, read_features
from engines.protocol.kind import Kind
from engines.protocol.logprob_kind import LogprobRule
from engines.protocol.plain_text import describe
from engines.protocol.spec import normalized
from rollout.config import (
    Drain,
    EngineConfig,
    GroupConfig,
    HealthConfig,
    LifecycleConfig,
    WeightUpdate,
)
from rollout.config.compatibility import (
    Conflicts,
    of_attached_model,
    of_embeddings,
    of_engine,
    of_old_state,
    of_pushes,
    of_stages,
)
from rollout.control.engine.claim import Claim
from rollout.control.engine.drafts import DraftRecord, read_drafts
from rollout.control.engine.group_settings import GroupSettings
from rollout.control.engine.memory import size_of_weights
from rollout.control.engine.probe import Probe, record_logprobs
from rollout.control.engine.state import EngineState
from rollout.core.errors import ConfigError
from rollout.core.types import EngineSlot
from rollout.rules.deadlines import kill_timeout_s, start_timeout_s
from rollout.rules.health import why_other_process
from rollout.rules.release_policy import draft_text
from rollout.weights.format.checkpoint_config import read_generation_config
from rollout.weights.format.encoder_tensors import pushed_encoder
from rollout.weights.format.tied_head import tied_head

logger = logging.getLogger(__name__)

Connect = Callable[[Endpoint, str], Engine]


def connect_http(
    budgets: LifecycleConfig,
    health: HealthConfig,
    kind: str = "sglang",
    *,
    weights_cpu_backup: bool = False,
) -> Connect:
    """The client for engines over HTTP; its deadlines are those of the phases.

    Args:
        kind: of the engines.
        weights_cpu_backup: the weights must survive a release.
    """
    deadlines = Deadlines(
        control_s=budgets.command_timeout_s,
        pause_s=budgets.command_timeout_s,
        memory_s=budgets.memory_timeout_s,
        update_s=budgets.update_timeout_s,
        ready_s=health.probe_timeout_s,
    )

    def connect(endpoint: Endpoint, engine_id: str) -> Engine:
        return kind_of(kind).client(
            endpoint,
            engine_id=engine_id,
            deadlines=deadlines,
            weights_cpu_backup=weights_cpu_backup,
        )

    return connect


class Starter:
    """Starts the engines of one group."""

    def __init__(
        self,
        settings: GroupSettings,
        launcher: EngineLauncher,
        connect: Connect,
        *,
        probe: Probe,
        memory_saver: bool,
        weights_cpu_backup: bool,
    ) -> None:
        self._probe = probe
        self._settings = settings
        self._launcher = launcher
        self._connect = connect
        self._memory_saver = memory_saver
        self._weights_cpu_backup = weights_cpu_backup

    async def start(self, slot: EngineSlot, process_name: str = "") -> EngineState:
        """Launch the engine of a slot, and check that it fits its group.

        Args:
            process_name: as in ``EngineState``.
        """
        process = await self._launcher.launch(self.spec(slot, process_name))
        try:
            member = await self.admit(slot, process, is_new=True)
            member.process_name = process_name
        except BaseException:
            await process.kill()
            raise
        try:
            if self._settings.group.engine.is_attached:
                await self._note_weights(member)
            return member
        except BaseException:
            await process.kill()
            await member.engine.aclose()
            raise

    async def admit(
        self,
        slot: EngineSlot,
        process: RunningEngine,
        *,
        is_asleep: bool = False,
        is_new: bool = False,
    ) -> EngineState:
        """Query an engine's features, and admit it.

        Args:
            is_asleep: its weights may be released though it does not report that.
            is_new: it has just started, and generates.

        Raises:
            ConfigError: it does not fit its group.
        """
        if isinstance(process, AttachedEngine) and process.detached is None:  # of a lost group
            process.detached = await claimed(partial(self._claim, slot))
        engine = self._reach(process, slot.engine_id)
        try:
            member = await self._admit(slot, process, engine, is_asleep)
            if is_new:
                await self._probe.plant(member)
            # It has no adapter yet.
            if self._weights_cpu_backup and self._probe.is_only_check_for(member):
                record_logprobs(member, await self._probe.logprobs(member))
            return member
        except BaseException:
            await engine.aclose()
            raise

    def _claim(self, slot: EngineSlot) -> Callable[[], None]:
        """Claim an attached engine for this group; returns what ends that.

        Raises:
            ConfigError: another run uses it, and ``takeover`` is false.
        """
        settings = self._settings
        claim = Claim(
            Endpoint.of_url(settings.group.engine.urls[slot.index]),
            slot.engine_id,
            f"{settings.log_dir}/{settings.name}",
            settings.path,
            takeover=settings.group.engine.takeover,
        )
        return claim.release

    async def why_runs(self, old: EngineState) -> str:
        """Why an attached engine has not ended, which only its owner may do."""
        if not await old.process.is_alive():
            return ""
        engine = self._reach(old.process, old.engine_id)
        try:
            if why_other_process(old.start, await engine.process_start()):
                return ""
        except EngineError as error:
            return f"it does not report which process it is: {describe(error)}"
        finally:
            await engine.aclose()
        return "it still runs"

    def _reach(self, process: RunningEngine, engine_id: str) -> Engine:
        """A client of an engine, with its keys."""
        engine = self._connect(process.endpoint, engine_id)
        engine.authorize(process.access)
        return engine

    def unknown(self, slot: EngineSlot, process: RunningEngine, reason: str) -> EngineState:
        """The state of an engine about which nothing is known; it is fenced for ``reason``."""
        return EngineState(
            slot=slot,
            process=process,
            engine=self._reach(process, slot.engine_id),
            has_session=False,
            weight_version=None,
            is_verified=False,
            fence_reason=reason,
        )

    async def _admit(
        self, slot: EngineSlot, process: RunningEngine, engine: Engine, is_asleep: bool
    ) -> EngineState:
        settings = self._settings
        info, endpoints = await engine.server_info(), await engine.endpoints()
        features = read_features(info, endpoints, KINDS.get(info.engine))
        self._check(slot.engine_id, features)
        kind = KINDS.get(info.engine, settings.group.engine.of_kind)
        self._check_old_state(slot.engine_id, info, kind)
        self._check_stages(slot.engine_id, info, kind)
        version = await engine.weight_version()
        if settings.group.engine.is_attached:
            model = await engine.model_info()
            if version == "0":
                self._refuse(of_attached_model(slot.engine_id, model, settings.model_path))
            if settings.group.engine.may_keep_embeddings:
                encoder = self._pushed_encoder()
                self._refuse(
                    of_embeddings(slot.engine_id, settings.group.engine, info, model, encoder)
                )
        by_fingerprint = settings.verify.by == "fingerprint"
        member = EngineState(
            slot=slot,
            process=process,
            engine=engine,
            has_session=features.has_weight_session,
            num_payloads=features.num_payloads,
            why_no_groups=features.why_no_groups,
            why_no_handles=features.why_no_handles,
            encodings=features.encodings,
            weight_version=int(version) if version.isdigit() else None,
            has_checker=by_fingerprint and "/weights_checker" in endpoints,
            compares_weights="/weights_checker" in endpoints,
            fingerprint_method=info.fingerprints,
            needs_names=kind.old_state.needs_names(
                {**info.raw, **normalized(settings.group.engine.options)}
            ),
            logprobs=self._logprob_rule(slot.engine_id, info, kind),
            bootstrap_port=int(info.raw.get("disaggregation_bootstrap_port") or 0),
            moves_experts=features.moves_experts,
            reports_memory=bool(info.resident_bytes),
            reports_groups=info.update_groups is not None,
            tensors=tuple(await engine.weights_manifest())
            if "/weights_manifest" in endpoints
            else (),
            start=info.start if settings.group.engine.is_attached else "",
        )
        if features.draft:
            member.drafts = DraftRecord(features.draft, member.weight_version)
            await read_drafts([member])
            if settings.group.engine.is_attached:
                logger.info("engine %s: %s", slot.engine_id, self._draft_text(features, kind))
        # The first call that changes an attached engine is for the process that was admitted.
        engine.authorize(member.access)
        is_retracting = settings.lifecycle.drain is Drain.RETRACT
        has_weights = not is_asleep and MemoryTag.WEIGHTS not in (info.released or ())
        has_ranks = features.num_payloads > 1
        if has_weights and (self._weights_cpu_backup or is_retracting or has_ranks):
            # Some weights must survive a release, or must change on all ranks with the first push:
            # the current ones are the reference.  A drain by retracting must know before the first
            # pause whether the checker refuses.
            member.record = await member.fingerprints()
        return member

    async def _note_weights(self, member: EngineState) -> None:
        """Note what the weights of an attached engine are, so that a change by others is seen.

        Here it serves: SGLang ends if it has to check its weights after a release.
        """
        if member.record is None:
            member.record = await member.fingerprints()
        if self._probe.is_only_check_for(member):
            record_logprobs(member, await self._probe.logprobs(member))

    def _check(self, engine_id: str, features: Features) -> None:
        settings = self._settings
        self._refuse(
            of_engine(
                engine_id,
                features,
                settings.group,
                settings.lifecycle.drain,
                memory_saver=self._memory_saver,
                weights_cpu_backup=self._weights_cpu_backup,
            )
        )
        drain = settings.lifecycle.drain
        ways = settings.transport, drain, settings.encoding
        self._refuse(of_pushes(engine_id, features, settings.update, *ways))

    def _draft_text(self, features: Features, kind: Kind) -> str:
        settings = self._settings
        whole = "weights_cpu_backup" if self._weights_cpu_backup else ""
        backup = (features.draft_backup or whole) if self._memory_saver else None
        return draft_text(kind, features.draft, settings.update, backup)

    def _logprob_rule(self, engine_id: str, info: ServerInfo, kind: Kind) -> LogprobRule:
        settings = self._settings
        try:
            return kind.logprob_rule(info.raw, settings.group.engine.env, read_generation_config)
        except ValueError as error:
            raise ConfigError(f"{settings.path}.engine: engine {engine_id}: {error}") from None

    def _check_old_state(self, engine_id: str, info: ServerInfo, kind: Kind) -> None:
        if self._settings.update is not WeightUpdate.FROZEN:
            keeps = not self._pushed_encoder()
            self._refuse(of_old_state(engine_id, kind, info, keeps_embeddings=keeps))

    def _check_stages(self, engine_id: str, info: ServerInfo, kind: Kind) -> None:
        settings, num_stages = self._settings, int(info.raw.get("pp_size") or 1)
        if num_stages > 1:
            tied = tied_head(settings.model_path, settings.update, settings.not_pushed)
            where = f"engine: engine {engine_id}"
            self._refuse(of_stages(kind, num_stages, settings.update, tied, where))

    def _pushed_encoder(self) -> str:
        settings = self._settings
        return pushed_encoder(settings.model_path, settings.update, settings.not_pushed)

    def _refuse(self, conflicts: Conflicts) -> None:
        for setting, why in conflicts:
            raise ConfigError(f"{self._settings.path}.{setting}: {why}")

    def spec(self, slot: EngineSlot, process_name: str = "") -> EngineSpec:
        """What is launched on a slot; ``process_name`` as in ``EngineState``."""
        settings = self._settings
        urls = settings.group.engine.urls
        return replace(
            configured_spec(
                settings.model_path, settings.group, settings.update, settings.not_pushed
            ),
            engine_id=process_name or slot.engine_id,
            log_path=str(Path(settings.log_dir) / f"{process_name or slot.engine_id}.log"),
            gpu_ids=slot.gpu_ids,
            num_cpus=slot.num_cpus,
            memory_saver=self._memory_saver,
            weights_cpu_backup=self._weights_cpu_backup,
            url=urls[slot.index] if urls else "",
            run=settings.run_id,
            claim=partial(self._claim, slot) if urls else None,
        )


def start_deadline_s(model_path: str, engine: EngineConfig) -> float:
    """Seconds until an engine with this checkpoint must report ready."""
    return start_timeout_s(engine, size_of_weights(model_path))


def configured_spec(
    model_path: str, group: GroupConfig, update: WeightUpdate, not_pushed: Sequence[str]
) -> EngineSpec:
    """The part of an engine's specification that settings decide alone."""
    config = group.engine
    keeps = config.of_kind.old_state
    may_keep = bool(keeps.embeddings_variable or keeps.refused_for_embeddings)
    return EngineSpec(
        engine_id="engine-0",
        kind=config.kind.value,
        model_path=model_path,
        log_path="",
        num_cpus=config.cpus,
        memory_saver=group.needs_offload,
        keeps_embeddings=may_keep and not pushed_encoder(model_path, update, not_pushed),
        start_timeout_s=start_deadline_s(model_path, config),
        kill_timeout_s=kill_timeout_s(config),
        options=config.options,
        env=config.env,
        worker_type=group.worker_type,
        python=config.python,
        access=config.access,
    )
