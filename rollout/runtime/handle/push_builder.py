"""Builds pushes from a trainer's tensors, and frees their resources afterwards.

Always true: tensors are checked against the model's own list before anything is copied.  The
resources of a push in this process (slots, sockets, threads, a broadcast group) are freed when its
call ends, before the caller gets the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any

from rollout.config import ServerConfig, Transport, WeightsConfig, WeightUpdate
from rollout.control.server.server import RolloutServer
from rollout.core.errors import WeightMismatch, WeightsUnavailable
from rollout.core.optional_deps import optional_import
from rollout.core.os_errors import naming_setting
from rollout.core.pending import Pending
from rollout.core.types import ServerStatus, StepReport
from rollout.rules.fingerprint_check import method_of_push
from rollout.runtime.calls.caller import Caller
from rollout.runtime.handle.load_costs import LoadCosts
from rollout.weights.format.manifest import Manifest, check_contents
from rollout.weights.push.held_buffers import StoreCopies
from rollout.weights.push.shm_buffers import ShmBufferPool, why_no_room
from rollout.weights.push.transport_choice import choose_transport
from rollout.weights.push.weight_push import WeightPush, default_contents

if TYPE_CHECKING:
    from rollout.weights.tensors import (
        CopiedWeights,
        KeptGroup,
        NamedTensors,
        NameMap,
        OutgoingPush,
        PushPlanCache,
        PushSender,
        TrainerWeights,
    )
    from rollout.weights.tensors.tensor_sources import BucketsOfTensors


def _torch() -> AbstractContextManager[None]:
    return optional_import("embedded", "pushing weights needs torch, which is not installed")


def check_name_map(name_map: object) -> None:
    """Raise WeightMismatch unless it is None or can be called."""
    if name_map is not None and not callable(name_map):
        raise WeightMismatch(f"name_map is a function, not a {type(name_map).__name__}")


class PushBuilder:
    """Builds the pushes of one server, and tracks the open ones."""

    def __init__(self, config: ServerConfig, caller: Caller) -> None:
        self._config = config
        self._caller = caller
        self._open: dict[int, OutgoingPush] = {}
        self._last: OutgoingPush | None = None
        self._copied: dict[int, CopiedWeights] = {}
        self._copies: StoreCopies | None = None
        self._pool: ShmBufferPool | None = None
        self._kept: KeptGroup | None = None
        self._expected: Manifest | None = None
        self._has_expected = False
        self._plans: PushPlanCache | None = None
        self._loads = LoadCosts(config)
        # The last manifest that fits the model, and what it was checked as.
        self._checked: tuple[Manifest | None, WeightUpdate | None] = None, None

    # -- build ------------------------------------------------------------------------------

    def full(
        self,
        named_tensors: NamedTensors,
        version: int,
        *,
        name_map: NameMap | None = None,
        may_stream: bool,
        contents: WeightUpdate | None = None,
    ) -> WeightPush:
        """A push of the model's own tensors: all, or some with ``update: partial``.

        Raises:
            WeightMismatch: they do not fit the model.
        """
        with _torch():
            from rollout.weights.tensors import TrainerWeights
        check_name_map(name_map)
        expected = self._expected_manifest()
        weights = TrainerWeights(
            named_tensors,
            bucket_bytes=self._config.weights.bucket_bytes,
            expected=expected,
            name_map=name_map,
            plans=self._kept_plans(),
        )
        update = contents or default_contents(self._config.weights.update)
        self._check(weights.manifest, expected, update)
        transport = self._transport(weights)
        at_once = self._loads.is_at_once(transport)
        sender = self._sender()
        with naming_path(self._config.weights, transport):
            streams = sender.streams(transport, may_stream=may_stream, at_once=at_once)
            sent: BucketsOfTensors = weights
            if streams and keeps_copies(self._config.weights, update):
                sent = self._copied[version] = self._with_copies(weights, version, sender.pool)
            outgoing = sender.send(
                sent, version, transport, contents, may_stream=may_stream, at_once=at_once
            )
        return self._opened(outgoing)

    def _with_copies(
        self, weights: TrainerWeights, version: int, pool: ShmBufferPool
    ) -> CopiedWeights:
        from rollout.weights.tensors import CopiedWeights

        if self._copies is None:
            self._copies = StoreCopies(pool)
        reads = version_in_store(self._caller, pool)
        return CopiedWeights(weights, self._copies.begin(version, reads))

    def adapter(
        self, named_tensors: NamedTensors, config: Mapping[str, Any], version: int
    ) -> WeightPush:
        """A push of a LoRA adapter under ``weights.adapter``'s name, by value.

        Raises:
            WeightMismatch: it does not fit the model, the server takes no adapters, or no engine
                honours a field of its config.
        """
        with _torch():
            from rollout.weights.tensors.adapters import make_adapter_push

        settings = self._config.weights
        if settings.update is not WeightUpdate.LORA:
            raise WeightMismatch(f"weights.update is {settings.update}: adapters need lora")
        if not isinstance(config, Mapping):
            raise WeightMismatch(
                f"an adapter's config is the mapping in adapter_config.json, or PEFT's "
                f"config.to_dict(), not {config!r:.80}"
            )
        return make_adapter_push(
            named_tensors,
            config,
            name=settings.adapter,
            version=version,
            base=self._expected_manifest(),
            kinds={group.engine.kind for group in self._config.groups.values()},
        )

    def base_differs(self, named_tensors: NamedTensors) -> bool:
        """Whether these weights differ from the checkpoint that the engines load."""
        with _torch():
            from rollout.weights.tensors.adapters import differs_from_checkpoint

        return differs_from_checkpoint(
            named_tensors, self._config.model_path, self._expected_manifest()
        )

    def _check(self, manifest: Manifest, expected: Manifest | None, contents: WeightUpdate) -> None:
        last, last_contents = self._checked
        if manifest is not last or contents is not last_contents:
            check_contents(manifest, expected, self._config.weights, contents)
            self._checked = manifest, contents

    def _kept_plans(self) -> PushPlanCache:
        if self._plans is None:
            from rollout.weights.tensors import PushPlanCache

            self._plans = PushPlanCache()
        return self._plans

    def _expected_manifest(self) -> Manifest | None:
        if not self._has_expected:
            self._expected = self._caller.call(RolloutServer.expected_manifest).result()
            self._has_expected = True
        return self._expected

    def _transport(self, weights: TrainerWeights) -> Transport:
        wanted = self._config.weights.transport
        if wanted not in (Transport.AUTO, Transport.SHARED_MEMORY, Transport.CUDA_IPC):
            return wanted
        status = self._caller.call(RolloutServer.status).result()
        remote = remote_engines(status, self._caller)
        return choose_transport(wanted, remote, self._why_no_room(weights))

    def _why_no_room(self, weights: TrainerWeights) -> str:
        more = weights.num_bytes - (self._pool.num_bytes() if self._pool else 0)
        root = self._config.weights.shared_memory_path
        try:
            return why_no_room(max(0, more), root)
        except OSError as error:
            return f"{root}: {error.strerror}"

    def _sender(self) -> PushSender:
        from rollout.weights.tensors import KeptGroup

        if self._pool is None:
            self._pool = ShmBufferPool(self._config.weights.shared_memory_path)
        if self._kept is None:
            self._kept = KeptGroup()
        method = fingerprint_method(self._config, self._caller)
        return make_sender(self._config, self._caller, self._pool, self._kept, fingerprints=method)

    # -- end --------------------------------------------------------------------------------

    def _opened(self, outgoing: OutgoingPush) -> WeightPush:
        self.end(outgoing.push.version)  # a push that was built and never sent
        self._open[outgoing.push.version] = outgoing
        return outgoing.push

    def ended_with(self, pending: Pending[StepReport], push: WeightPush) -> Pending[StepReport]:
        """The same call; when it ends, the push's resources are freed."""
        return pending.then(lambda: self._ended(pending, push.version))

    def _ended(self, pending: Pending[StepReport], version: int) -> None:
        self.end(version)
        weights = self._copied.pop(version, None)
        if weights is None:
            return
        with suppress(Exception):  # a failed push is not kept
            pending.result(0)
            if (push := weights.copied.push(version)) is not None:
                self._caller.call(RolloutServer.offer_to_store, push)

    def end(self, version: int) -> None:
        """Free the resources of the push of this version, if there is one."""
        outgoing = self._open.pop(version, None)
        is_read_later = self._config.weights.store is not None and version not in self._copied
        if outgoing is not None and is_read_later:
            # The store reads a push after it serves, so keep it until the next push.
            outgoing, self._last = self._last, outgoing
        if outgoing is not None:
            outgoing.close()

    def close(self) -> None:
        """End all pushes, leave the broadcast group, and remove all files."""
        for version in list(self._open):
            self.end(version)
        if self._last is not None:
            self._last.close()
            self._last = None
        if self._kept is not None:
            self._kept.close()
            self._kept = None
        if self._pool is not None:
            self._pool.close()


def keeps_copies(weights: WeightsConfig, contents: WeightUpdate) -> bool:
    """Whether the store keeps a push of this part of the model."""
    return weights.store is not None and contents is WeightUpdate.FULL


def version_in_store(caller: Caller, pool: ShmBufferPool) -> int | None:
    """Before a push whose copies lie in this pool: the version whose copies the store reads now.

    Raises:
        ConfigError: the server does not see the pool.
    """
    folder = str(pool.made_folder())
    return caller.call(RolloutServer.make_way_in_store, folder).result()


def naming_path(weights: WeightsConfig, transport: Transport) -> AbstractContextManager[None]:
    """A block in which an OSError names the setting of the path that this transport uses."""
    if transport is Transport.DISK:
        return naming_setting("weights.disk_path", weights.disk_path or "", WeightsUnavailable)
    return naming_setting(
        "weights.shared_memory_path", weights.shared_memory_path, WeightsUnavailable
    )


def make_sender(
    config: ServerConfig,
    caller: Caller,
    pool: ShmBufferPool,
    kept: KeptGroup,
    *,
    fingerprints: str,
) -> PushSender:
    """What sends the pushes of this process to a server; see ``PushSender``."""
    from rollout.weights.tensors import NcclTerms, PushSender

    return PushSender(
        config.weights,
        pool,
        host=caller.own_host(),
        timeout_s=config.lifecycle.update_timeout_s,
        model_path=config.model_path,
        kept=kept,
        nccl=NcclTerms(config.why_no_nccl, config.nccl_cumem),
        fingerprints=fingerprints,
    )


def remote_engines(status: ServerStatus, caller: Caller) -> list[str]:
    """Ids of the engines that do not run on this host; fenced ones get no push."""
    own = caller.own_node()
    return [
        engine.engine_id
        for group in status.groups
        for engine in group.engines
        if not engine.fence_reason and caller.node_of(engine.node_id, engine.endpoint.host) != own
    ]


def fingerprint_method(config: ServerConfig, caller: Caller) -> str:
    """The method of the fingerprints that a push takes now; empty takes none."""
    if not config.weights.fingerprint:
        return ""
    methods = caller.call(RolloutServer.fingerprint_methods).result()
    return method_of_push(methods, has_store=config.weights.store is not None)
