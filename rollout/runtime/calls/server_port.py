"""The server of a handle, as a push sees it: ``rollout.weights.ranks.trainer_rank.ServerPort``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from rollout.config import ServerConfig
from rollout.control.server.server import RolloutServer
from rollout.core.pending import Pending
from rollout.core.types import EngineStatus, ServerStatus, StepReport
from rollout.observability.timeline.span import Span
from rollout.rules.fingerprint_check import method_of_push
from rollout.rules.lifecycle import Command
from rollout.rules.probe import Logprobs
from rollout.runtime.calls.caller import Caller
from rollout.weights.format.manifest import Manifest
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.routes.route import EnginePlace


class ServerCalls:
    """Calls a server through the caller of its handle.

    Attributes:
        logprobs: those that the trainer's model has after the next push; see
            ``WeightChecks.expect``.
    """

    def __init__(self, config: ServerConfig, caller: Caller) -> None:
        self.config = config
        self.caller = caller
        self.logprobs: Logprobs = ()

    @property
    def own_host(self) -> str:
        return self.caller.own_host()

    @property
    def own_node(self) -> str:
        return self.caller.own_node()

    @cached_property
    def expected(self) -> Manifest | None:
        return self.caller.call(RolloutServer.expected_manifest).result()

    def status(self) -> ServerStatus:
        return self.caller.call(RolloutServer.status).result()

    def places(self, status: ServerStatus) -> list[EnginePlace]:
        return engine_places(status, self.caller)

    def has_far_engines(self) -> bool:
        """Whether an engine that gets a push is on another host than this process."""
        return any(place.node != self.own_node for place in self.places(self.status()))

    def fingerprint_method(self, *, writes_files: bool) -> str:
        if not self.config.verify.fingerprints:
            return ""
        methods = self.caller.call(RolloutServer.fingerprint_methods).result()
        has_store = self.config.weights.store is not None
        return method_of_push(methods, has_store=has_store, writes_files=writes_files)

    def make_way_in_store(self, folder: str) -> int | None:
        return self.caller.call(RolloutServer.make_way_in_store, folder).result()

    def shipped(self, push: WeightPush) -> WeightPush:
        """The push as the server gets it, with the log-probs that are expected of it."""
        logprobs, self.logprobs = self.logprobs, ()
        return self.caller.ship(replace(push, canary=logprobs) if logprobs else push)

    def push(self, push: WeightPush, until: Command) -> Pending[StepReport]:
        return self.caller.call(RolloutServer.push, self.shipped(push), until)

    def serve(self) -> Pending[StepReport]:
        return self.caller.call(RolloutServer.serve)

    def offload(self) -> Pending[StepReport]:
        """Begin an offload."""
        return self.caller.call(RolloutServer.offload)

    def offer_to_store(self, push: WeightPush) -> Pending[None]:
        return self.caller.call(RolloutServer.offer_to_store, push)

    def record_push(self, spans: Sequence[Span]) -> Pending[None]:
        return self.caller.call(RolloutServer.record_push, spans)


def engine_places(status: ServerStatus, caller: Caller) -> list[EnginePlace]:
    """Places of the engines that get a push; fenced engines get none."""
    return [
        _place(engine, caller)
        for group in status.groups
        for engine in group.engines
        if not engine.fence_reason
    ]


def _place(engine: EngineStatus, caller: Caller) -> EnginePlace:
    is_on_one_host = len({process.host for process in engine.processes}) <= 1
    node = caller.node_of(engine.node_id, engine.endpoint.host) if is_on_one_host else ""
    is_known = engine.is_verified and not engine.is_stale
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
        encodings=engine.encodings,
        is_compared=bool(engine.fingerprints),
        weight_version=engine.weight_version if is_known else None,
    )
