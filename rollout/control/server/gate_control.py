"""Controls the router of a server: the gate, and which engines get requests.

Always true: an engine that has released memory, is paused, is not verified or has other weights
than the published ones gets no requests, whatever else is recorded of it.  An older list of members
never replaces a newer one.  ``state`` is open only after the router confirmed it, and shut as soon
as the router may be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from engines.protocol import WorkerType
from engines.protocol.adapter_names import table_of
from rollout.config import ServerConfig, WeightUpdate
from rollout.control.engine.group_settings import fewest_engines
from rollout.control.recovery.monitor import RecoveryMonitor
from rollout.control.server.group_registry import GroupRegistry
from rollout.control.server.router_client import RouterClient
from rollout.core.errors import PhaseFailed, PhaseTimeout
from rollout.core.fanout import run_to_completion
from rollout.core.types import EngineStatus, GroupStatus
from rollout.observability.timeline.analysis import step_metrics, steps
from rollout.observability.timeline.recorder import Timeline
from rollout.observability.timeline.span import START
from rollout.rules.health import Liveness
from rollout.rules.lifecycle import why_none_serves, why_unfit
from rollout.rules.routing import DEFAULT_BOOTSTRAP_PORT, Backend, BackendState
from rollout.weights.format.checkpoint_config import read_checkpoint_config, vocabulary_of
from rollout.weights.push.push_version import LastPush

RESTARTS = "server/restarts"
"""The metric of how often engines were started again."""

Out = Mapping[str, tuple[Liveness, str]]
"""Engines without requests, also if their group reports them as serving, and why."""


class Published(Protocol):
    """A server, by what it has published."""

    @property
    def base_version(self) -> int: ...


class GateControl:
    """The gate and the members of one server.

    Args:
        recovery: decides which engines are out of routing; gets what was published.
        published: has the weight version that engines report.

    Attributes:
        state: open, holding or closed, as the lifecycle has set it.
        paused_s: of the step that has ended last; see ``Step``.
        leaving: engines about to be removed: they only finish their requests.
        epoch: number of the members that were published last.
    """

    def __init__(
        self,
        router: RouterClient,
        registry: GroupRegistry,
        recovery: RecoveryMonitor,
        config: ServerConfig,
        timeline: Timeline,
        published: Published,
    ) -> None:
        self._published = published
        self.state = "closed"
        self.paused_s = 0.0
        self.leaving: set[str] = set()
        self._waits_for_recovery = False
        self._router = router
        self._registry = registry
        self._recovery = recovery
        self._config = config
        self._timeline = timeline
        self._vocabulary = vocabulary_of(read_checkpoint_config(config.model_path))
        self._publishing = asyncio.Lock()
        self.epoch = 0
        self._cursor = START

    @property
    def shown_state(self) -> str:
        """What requests meet: an open gate holds while recovery brings back the only engines."""
        return "holding" if self.state == "open" and self._waits_for_recovery else self.state

    @property
    def router_url(self) -> str:
        """Base URL of the router, or empty if it does not run."""
        return self._router.url

    async def why_none_serves(self, weight_version: int) -> str:
        """Why no engine could serve if the gate opened now."""
        statuses = (await self._registry.statuses()).values()
        return why_none_serves(statuses, weight_version, self._config.weights.update)

    async def open(self, served: LastPush, of_push: Mapping[str, float]) -> None:
        """Open the gate to these weights.

        Args:
            of_push: metrics of the push, which go to drivers with those of the step.

        Raises:
            PhaseFailed: no engine holds the weights, or a group has too few engines; the gate
                stays as it is.
        """
        statuses = await self.publish_members()
        weights, weight_version = self._config.weights, served.version
        if why := why_none_serves(statuses.values(), served.base_version, weights.update):
            raise PhaseFailed(f"the gate stays {self.state}: {why}", phase="continue_generation")
        candidates = [
            engine
            for group in statuses.values()
            for engine in group.engines
            if not (engine.fence_reason or engine.is_stale)
        ]
        unfit = [
            (engine.engine_id, why_unfit(engine, served.base_version)) for engine in candidates
        ]
        if unfit and all(why for _, why in unfit):
            reasons = "; ".join(f"engine {name}: {why}" for name, why in unfit)
            raise PhaseFailed(
                f"the gate stays {self.state}: no engine may serve: {reasons}",
                phase="continue_generation",
            )
        for name, group in statuses.items():
            num_left = sum(not engine.fence_reason for engine in group.engines)
            budgets = self._config.lifecycle
            fewest = fewest_engines(self._config.groups[name], budgets, len(group.engines))
            if num_left < fewest:
                fenced = "; ".join(filter(None, (engine.fence_reason for engine in group.engines)))
                raise PhaseFailed(
                    f"group {name}: {num_left} of {len(group.engines)} engines left, {fewest} "
                    f"needed; the gate stays {self.state}: {fenced}",
                    phase="continue_generation",
                )
        lora: dict[str, Any] = {}
        if weights.update is WeightUpdate.LORA:
            table = table_of(served.adapters, weights.adapters[0])
            lora = {"adapters": table, "base_version": served.base_version}
        metrics = self._metrics_of_step() | {"server/weight_version": float(weight_version)}
        metrics |= of_push
        await self._router.set_gate("open", weight_version=weight_version, metrics=metrics, **lora)
        self.state = "open"
        self._timeline.event("gate", f"open at weight version {weight_version}")

    def _metrics_of_step(self) -> dict[str, float]:
        """Metrics of the step boundary that ends now, or of the last one; no times at the start."""
        excerpt = self._timeline.since(self._cursor)
        self.paused_s = 0.0
        # In the place of a lost server there has been none so far: the router has those of before.
        metrics = dict(self._router.metrics) if self._cursor == START else {}
        if ended := steps(excerpt.spans):
            self._cursor = excerpt.cursor
            metrics = step_metrics(ended[-1])
            self.paused_s = ended[-1].paused_s
        return metrics | {RESTARTS: float(self._recovery.tracker.num_restarts)}

    async def shut(
        self, state: str, reason: str, phase: str, *, needs_push: int | None = None
    ) -> None:
        """Hold requests, or reject them with 503 and the reason.

        Args:
            needs_push: only a push of this weight version or a newer one opens it.
        """
        more = {} if needs_push is None else {"needs_push": needs_push}
        self.state = state
        await run_to_completion(self._router.set_gate(state, reason=reason, phase=phase, **more))
        self._timeline.event("gate", f"{state}: {reason}")

    async def drain(self, timeout_s: float, engine_id: str = "") -> str:
        """Wait until the requests in flight, of all engines or of one, have finished.

        Returns:
            The engines that still have requests after ``timeout_s``, or empty if none.
        """
        try:
            await self._router.drained(timeout_s, engine_id)
        except PhaseTimeout as error:
            return str(error)
        return ""

    async def publish_members(self) -> Mapping[str, GroupStatus]:
        """Send the router the current members; returns the status of each group."""
        async with self._publishing:  # or an older list could get a newer epoch
            statuses = await self._registry.statuses()
            routing = out, returning = self._recovery.routing()
            self.epoch += 1
            version = self._published.base_version
            members = [
                replace(
                    self._member(status.worker_type, engine, out, version),
                    may_return=may_return(engine, returning, version),
                    kind=status.kind,
                    vocabulary=self._vocabulary,
                )
                for status in statuses.values()
                for engine in status.engines
            ]
            await self._router.set_members(self.epoch, members)
            self._recovery.published = routing
            self._note_waiting(members)
            return statuses

    def _note_waiting(self, members: Sequence[Backend]) -> None:
        """Record whether an open gate holds now, as the router decides it too."""
        states = {member.state for member in members}
        is_waiting = BackendState.SERVING not in states and any(
            member.may_return for member in members
        )
        if self.state == "open" and is_waiting != self._waits_for_recovery:
            text = "holding: recovery brings engines back" if is_waiting else "open again"
            self._timeline.event("gate", text)
        self._waits_for_recovery = is_waiting

    def _member(
        self, worker_type: WorkerType, engine: EngineStatus, out: Out, version: int
    ) -> Backend:
        made = member(worker_type, engine, out, version)
        if engine.engine_id in self.leaving and made.state is BackendState.SERVING:
            return replace(made, state=BackendState.DRAINING, reason="it is being removed")
        return made


def may_return(engine: EngineStatus, returning: Collection[str], version: int) -> bool:
    """Whether recovery may make it serve without a command; what is paused needs one."""
    is_other = bool(engine.fence_reason or engine.is_stale)
    return engine.engine_id in returning and (is_other or not why_unfit(engine, version))


def member(worker_type: WorkerType, engine: EngineStatus, out: Out, version: int) -> Backend:
    """The router's view of an engine.

    Args:
        version: the published one.
    """
    state, reason = BackendState.SERVING, ""
    if engine.fence_reason:
        state, reason = BackendState.FENCED, engine.fence_reason
    elif engine.is_stale:
        state, reason = BackendState.FENCED, "it restarted and lacks the published weights"
    elif engine.engine_id in out:
        liveness, reason = out[engine.engine_id]
        state = BackendState.DEAD if liveness is Liveness.DEAD else BackendState.DRAINING
    elif why := why_unfit(engine, version):
        # Requests that it holds in a pause are finished later; without its memory it has none.
        state = BackendState.ASLEEP if engine.released else BackendState.DRAINING
        reason = why
    return Backend(
        engine.engine_id,
        engine.endpoint,
        state,
        worker_type,
        reason=reason,
        needs_names=engine.needs_names,
        logprobs=engine.logprobs,
        bootstrap_port=engine.bootstrap_port or DEFAULT_BOOTSTRAP_PORT,
        access=engine.access,
    )
