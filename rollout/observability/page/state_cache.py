"""The last known state of one server, refreshed on request, for page, metrics and ``doctor``.

Always true: refreshes run one at a time; if the server does not answer, the last state is kept and
marked as such.  It is used on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from engines.protocol.plain_text import describe
from rollout.core.types import EngineStatus, GroupStatus, ServerStatus
from rollout.observability.page.engine_loads import EngineLoads, load_targets
from rollout.observability.page.run_history import RunHistory
from rollout.observability.server_snapshot import ServerSnapshot
from rollout.observability.timeline.span import Cursor, Kind, Span
from rollout.rules.diagnosis import diagnose

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
REWARD = "rollout/reward/mean"
# Seconds between two refreshes while no client is connected to the page.
IDLE_S = 10.0

Observe = Callable[[Mapping[str, Cursor]], Awaitable[ServerSnapshot]]


class StateCache:
    """Calls ``observe`` and keeps its results.

    Args:
        observe: returns the server's state, and its timelines after the given cursors, by source.
        on_figures: called once with the figures of each step that a driver reports.
        reports: for which a process before this one has called it.
        loads: where the engines' queues and tokens per second are, or None without them.

    Attributes:
        history: what the server has done.
    """

    def __init__(
        self,
        observe: Observe,
        *,
        on_figures: Callable[[Mapping[str, Any]], None] = lambda figures: None,
        reports: Sequence[Mapping[str, Any]] = (),
        loads: EngineLoads | None = None,
    ) -> None:
        self.history = RunHistory(reports)
        self._observe = observe
        self._loads = loads
        self._on_figures = on_figures
        self._cursors: dict[str, Cursor] = {}
        self._running: tuple[Span, ...] = ()
        self._last: ServerSnapshot | None = None
        self._answered_s = 0.0
        self._trouble = "not queried yet"
        self._refreshing = asyncio.Lock()

    # -- refreshing -------------------------------------------------------------------------

    async def refresh(self, max_age_s: float = 0.0) -> None:
        """Query the server, unless the state is younger than ``max_age_s``."""
        async with self._refreshing:
            if time.time() - self._answered_s < max_age_s:
                return
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    snapshot = await self._observe(dict(self._cursors))
            except Exception as error:  # the last state stays, with this error
                self._trouble = describe(error)
                return
            self._store(snapshot)

    def request_loads(self) -> None:
        """Request the loads of the serving engines in the background."""
        if self._loads is not None and self._last is not None:
            self._loads.request_soon(load_targets(self._last.status))

    async def aclose(self) -> None:
        """End what runs in the background."""
        if self._loads is not None:
            await self._loads.aclose()

    def _store(self, snapshot: ServerSnapshot) -> None:
        self._last, self._answered_s = snapshot, time.time()
        self._trouble = "; ".join(snapshot.troubles)
        new: list[Span] = []
        running: list[Span] = []
        for source, excerpt in snapshot.timelines.items():
            self._cursors[source] = excerpt.cursor
            new += excerpt.spans
            running += excerpt.running
        self._running = tuple(sorted(running, key=lambda span: span.start_s))
        self.history.take_spans(new)
        for figures in self.history.take_figures(snapshot.router.get("figures", ())):
            self._on_figures(figures)

    # -- reading ----------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """The whole state, ready for JSON."""
        now_s = time.time()
        state: dict[str, Any] = {
            "now_s": round(now_s, 3),
            # The last answer is no older than two idle intervals and one timeout.
            "is_answering": now_s - self._answered_s < 2 * IDLE_S + _TIMEOUT_S,
            "answered_s": round(self._answered_s, 3),
            "trouble": self._trouble,
            "running": [span.to_dict() for span in self._running],
            **self.history.to_dict(),
        }
        if self._last is not None:
            state |= self._server_dict(self._last.status, self._last.router)
        state["findings"] = [
            asdict(finding) | {"severity": finding.severity.name.lower()}
            for finding in diagnose(state)
        ]
        return state

    @property
    def status(self) -> ServerStatus | None:
        """The last status of the server, or None before the first."""
        return self._last.status if self._last is not None else None

    def engine_ids(self) -> list[str]:
        """The engines of the last state."""
        groups = self._last.status.groups if self._last is not None else ()
        return [engine.engine_id for group in groups for engine in group.engines]

    def summary(self) -> dict[str, Any]:
        """The server in a few values, for the pages of other servers."""
        now = self.snapshot()
        engines, figures = now.get("engines", ()), now["figures"]
        rewards = [report for report in figures if REWARD in report["metrics"]]
        return {
            "server": now.get("server", ""),
            "is_answering": now["is_answering"],
            "phase": now.get("phase", "unknown"),
            "gate": now.get("gate", {}).get("state", ""),
            "weight_version": now.get("weight_version"),
            "num_engines": len(engines),
            "num_serving": sum(engine["state"] == "serving" for engine in engines),
            "num_in_flight": now.get("router", {}).get("num_in_flight", 0),
            "step": figures[-1]["step"] if figures else None,
            "reward": rewards[-1]["metrics"][REWARD] if rewards else None,
            "severity": now["findings"][0]["severity"],
            "finding": now["findings"][0]["what"],
        }

    def _server_dict(self, status: ServerStatus, router: Mapping[str, Any]) -> dict[str, Any]:
        routed = {engine["engine_id"]: engine for engine in router.get("engines", ())}
        doing = {span.engine_id: span for span in self._running if span.kind is Kind.ENGINE}
        calling = {span.engine_id: span for span in self._running if span.kind is Kind.CALL}
        return {
            "server": status.name,
            "phase": status.phase,
            "weight_version": status.weight_version,
            "base_version": status.base_version,
            "router_url": status.router_url,
            "agents_urls": list(status.agents_urls),
            "gate": {"state": status.gate, **router.get("gate", {})},
            "lock_owner": status.lock_owner,
            "router": {
                name: value for name, value in router.items() if isinstance(value, int | float)
            },
            "groups": [_group_dict(group) for group in status.groups],
            "engines": [
                self._engine_dict(group, engine, routed, doing, calling)
                for group in status.groups
                for engine in group.engines
            ],
            "store": _store_dict(status),
            "unchanged": None
            if status.unchanged is None
            else [asdict(found) for found in status.unchanged],
        }

    def _engine_dict(
        self,
        group: GroupStatus,
        engine: EngineStatus,
        routed: Mapping[str, Mapping[str, Any]],
        doing: Mapping[str, Span],
        calling: Mapping[str, Span],
    ) -> dict[str, Any]:
        in_router = routed.get(engine.engine_id, {})
        error = self.history.errors.get(engine.engine_id)
        load = self._loads.get(engine.engine_id) if self._loads is not None else None
        return {
            "engine_id": engine.engine_id,
            "group": group.name,
            "state": engine.state,
            "weight_version": engine.weight_version,
            "url": engine.endpoint.url,
            "node_id": engine.node_id,
            "pid": engine.pid,
            "resident_bytes": engine.resident_bytes,
            "num_gpus": engine.num_gpus,
            "gpus": [
                {
                    "uuid": gpu.uuid,
                    "used_bytes": gpu.used_bytes,
                    "total_bytes": gpu.total_bytes,
                    "busy_percent": gpu.busy_percent,
                }
                for gpu in engine.gpus
            ],
            "released": list(engine.released),
            "is_stale": engine.is_stale,
            "fence_reason": engine.fence_reason,
            "standby": engine.standby,
            "drafts": None if engine.drafts is None else asdict(engine.drafts),
            "routing": in_router.get("state", ""),
            "reason": in_router.get("reason", ""),
            "num_in_flight": in_router.get("num_in_flight", 0),
            "num_failures": in_router.get("num_failures", 0),
            # The queue within the engine; requests that wait at the gate are the router's.
            "num_waiting": load.num_waiting if load else None,
            "tokens_per_s": load.tokens_per_s if load else None,
            "doing": _running_dict(doing.get(engine.engine_id)),
            "calling": _running_dict(calling.get(engine.engine_id)),
            "last_error": None
            if error is None
            else {"name": error.name, "said": error.said, "at_s": error.end_s},
        }


def _running_dict(span: Span | None) -> dict[str, Any] | None:
    if span is None:
        return None
    return {"name": span.name, "start_s": round(span.start_s, 3), "budget_s": span.budget_s}


def _group_dict(group: GroupStatus) -> dict[str, Any]:
    return {
        "name": group.name,
        "worker_type": group.worker_type.value,
        "phase": group.phase,
        "needs_offload": group.needs_offload,
        "kind": group.kind,
        "python": group.python,
    }


def _store_dict(status: ServerStatus) -> dict[str, Any] | None:
    """The state of the weight store, and how far it is behind, or None without a store."""
    store = status.store
    if store is None:
        return None
    values = asdict(store)
    values["bytes"] = sum(values.pop("node_bytes").values())
    # Without a stored version, the lag is the number of pushes so far.
    values["lag"] = max(0, status.base_version - (store.version or 0))
    return values
