"""Where the engines of a server run, for ``carrier_choice``."""

from __future__ import annotations

from rollout.core.types import EngineStatus, ServerStatus
from rollout.runtime.calls.caller import Caller
from rollout.weights.ranks.carrier_choice import EnginePlace


def engine_places(status: ServerStatus, caller: Caller) -> list[EnginePlace]:
    """Of all engines that get a push; fenced ones get none."""
    return [
        _place(engine, caller)
        for group in status.groups
        for engine in group.engines
        if not engine.fence_reason
    ]


def _place(engine: EngineStatus, caller: Caller) -> EnginePlace:
    is_on_one_host = len({process.host for process in engine.processes}) <= 1
    node = caller.node_of(engine.node_id, engine.endpoint.host) if is_on_one_host else ""
    # Another machine cannot connect to an address that is this machine's own.
    is_reached = node == caller.own_node() or caller.own_host() != "127.0.0.1"
    return EnginePlace(
        engine.engine_id,
        node,
        tuple(gpu.uuid for gpu in engine.gpus),
        engine.num_payloads,
        is_reached=is_reached,
        why_no_groups=engine.why_no_groups,
        why_no_handles=engine.why_no_handles,
    )
