"""From a trainer's tensors to pushes that a handle can send, and the end of what they hold here.

Always true: a push is made against the model's own list of tensors, so what does not fit is
refused before anything is copied; what a push holds in this process (slots, sockets, threads, a
group) is let go when its call has ended, before its caller learns of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from rollout.config import ServerConfig, Transport, WeightUpdate
from rollout.errors import WeightMismatch
from rollout.pending import Pending
from rollout.types import ServerStatus, StepReport
from rollout.weights.adapter import check_adapter
from rollout.weights.choice import choose_transport
from rollout.weights.manifest import Manifest, check_push
from rollout.weights.push import WeightPush
from rollout.weights.slots import SlotPool, why_no_room

if TYPE_CHECKING:
    from rollout.weights.tensors import (
        KeptGroup,
        NamedTensors,
        NameMap,
        Outgoing,
        Plans,
        Weights,
    )


class Surroundings(Protocol):
    """What must be known of a server to push to it."""

    def expected_manifest(self) -> Manifest | None: ...
    def status(self) -> ServerStatus: ...

    def is_here(self, node_id: str, host: str) -> bool:
        """Whether an engine runs on this host."""
        ...

    def own_host(self) -> str:
        """Address of this machine that the server's groups can reach."""
        ...


class Pushes:
    """The pushes of one server."""

    def __init__(self, config: ServerConfig, around: Surroundings) -> None:
        self._config = config
        self._around = around
        self._open: dict[int, Outgoing] = {}
        self._last: Outgoing | None = None
        self._pool: SlotPool | None = None
        self._kept: KeptGroup | None = None
        self._expected: Manifest | None = None
        self._has_expected = False
        self._plans: Plans | None = None
        # What was found to fit the model last, and whether it is all of it.
        self._fitting: tuple[Manifest, bool] | None = None

    # -- making -----------------------------------------------------------------------------

    def full(
        self,
        named_tensors: NamedTensors,
        version: int,
        *,
        name_map: NameMap | None = None,
        may_stream: bool,
        contents: WeightUpdate | None = None,
    ) -> WeightPush:
        """A push of the model's own tensors: all, or with ``update: partial`` some of them.

        Raises:
            WeightMismatch: they do not fit the model.
        """
        from rollout.weights.tensors import Weights

        expected = self._expected_manifest()
        weights = Weights(
            named_tensors,
            bucket_bytes=self._config.weights.bucket_bytes,
            expected=expected,
            name_map=name_map,
            plans=self._kept_plans(),
        )
        update = contents or self._config.weights.update
        if expected is not None and update is not WeightUpdate.FROZEN:
            self._check(weights.manifest, expected, is_full=update is WeightUpdate.FULL)
        transport = self._transport(weights)
        outgoing = self._sender().send(weights, version, transport, contents, may_stream=may_stream)
        return self._opened(outgoing)

    def adapter(
        self, named_tensors: NamedTensors, config: Mapping[str, Any], version: int
    ) -> WeightPush:
        """A push of a LoRA adapter under ``weights.adapter``'s name, by value.

        Raises:
            WeightMismatch: it does not fit the model, or the server takes no adapters.
        """
        from rollout.weights.tensors.adapters import make_adapter_push, own_manifest

        settings = self._config.weights
        if settings.update is not WeightUpdate.LORA:
            raise WeightMismatch(f"weights.update is {settings.update}: adapters need lora")
        push = make_adapter_push(named_tensors, config, name=settings.adapter, version=version)
        check_adapter(config, own_manifest(push, settings.adapter), self._expected_manifest())
        return push

    def base_differs(self, named_tensors: NamedTensors) -> bool:
        """Whether these are other weights than those of the checkpoint the engines start from."""
        from rollout.weights.tensors.adapters import differs_from_checkpoint

        return differs_from_checkpoint(
            named_tensors, self._config.model_path, self._expected_manifest()
        )

    def _check(self, manifest: Manifest, expected: Manifest, *, is_full: bool) -> None:
        if self._fitting is None or self._fitting[0] is not manifest or is_full > self._fitting[1]:
            check_push(manifest, expected, must_be_complete=is_full)
            self._fitting = manifest, is_full

    def _kept_plans(self) -> Plans:
        if self._plans is None:
            from rollout.weights.tensors import Plans

            self._plans = Plans()
        return self._plans

    def _expected_manifest(self) -> Manifest | None:
        if not self._has_expected:
            self._expected = self._around.expected_manifest()
            self._has_expected = True
        return self._expected

    def _transport(self, weights: Weights) -> Transport:
        wanted = self._config.weights.transport
        if wanted not in (Transport.AUTO, Transport.SHARED_MEMORY, Transport.CUDA_IPC):
            return wanted
        engines = [one for group in self._around.status().groups for one in group.engines]
        remote = [
            one.engine_id
            for one in engines
            if not one.fenced_because and not self._around.is_here(one.node_id, one.endpoint.host)
        ]
        return choose_transport(wanted, remote, self._why_no_room(weights))

    def _why_no_room(self, weights: Weights) -> str:
        more = weights.num_bytes - (self._pool.num_bytes() if self._pool else 0)
        root = self._config.weights.shared_memory_path
        try:
            return why_no_room(max(0, more), root)
        except OSError as error:
            return f"{root}: {error.strerror}"

    def _sender(self) -> Any:
        from rollout.weights.tensors import KeptGroup, Sender

        if self._pool is None:
            self._pool = SlotPool(self._config.weights.shared_memory_path)
        if self._kept is None:
            self._kept = KeptGroup()
        return Sender(
            self._config.weights,
            self._pool,
            host=self._around.own_host(),
            timeout_s=self._config.lifecycle.update_timeout_s,
            model_path=self._config.model_path,
            kept=self._kept,
        )

    # -- ending -----------------------------------------------------------------------------

    def _opened(self, outgoing: Outgoing) -> WeightPush:
        self.end(outgoing.push.version)  # one that was made and never sent
        self._open[outgoing.push.version] = outgoing
        return outgoing.push

    def ended_with(self, pending: Pending[StepReport], push: WeightPush) -> Pending[StepReport]:
        """The same call; when it ends, so does what the push holds here."""
        return pending.then(lambda: self.end(push.version))

    def end(self, version: int) -> None:
        """Let go of what the push of this version holds, if there is such a push."""
        outgoing = self._open.pop(version, None)
        if outgoing is not None and self._config.weights.store is not None:
            # The store reads what was pushed after it serves: until the next has been pushed.
            outgoing, self._last = self._last, outgoing
        if outgoing is not None:
            outgoing.close()

    def close(self) -> None:
        """End all pushes, leave the group that was kept, and remove all files."""
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
