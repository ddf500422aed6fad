"""The handle of all servers of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.config import RolloutConfig
from rollout.control.deployment import Deployment
from rollout.core.errors import ConfigError
from rollout.core.pending import LoopThread, Pending, PendingWithTurn
from rollout.core.types import ServerStatus, StepReport, TrainerSlot
from rollout.runtime.handle.offload_window import WITHOUT_KV, BeforeKv, check_before_kv
from rollout.runtime.handle.run_handle import RunHandle
from rollout.runtime.handle.server_handle import ServerHandle
from rollout.weights.push.shm_buffers import remove_leftovers
from rollout.weights.push.weight_push import WeightPush

if TYPE_CHECKING:
    from rollout.weights.tensors import NamedTensors


class DeploymentHandle(RunHandle):
    """All servers of a run, by name; a context manager that stops them at its end.

    A pickled one is a ``RunHandle``: only the launching process can stop the run.

    Args:
        on_close: cleans up the rest of the launch, after the servers have stopped.
        placement_group, trainer_slots: see the properties.
    """

    def __init__(
        self,
        config: RolloutConfig,
        servers: Mapping[str, ServerHandle],
        deployment: Deployment,
        loop: LoopThread,
        on_close: Callable[[], None] = lambda: None,
        placement_group: Any = None,
        trainer_slots: Sequence[TrainerSlot] = (),
    ) -> None:
        super().__init__(servers)
        self.config = config
        self._placement_group = placement_group
        self._trainer_slots = tuple(trainer_slots)
        self._deployment = deployment
        self._loop = loop
        self._on_close = on_close
        self._closed = False

    @property
    def placement_group(self) -> Any:
        """Ray's placement group with the engines; None without Ray."""
        return self._placement_group

    @property
    def trainer_slots(self) -> tuple[TrainerSlot, ...]:
        """The GPUs that the trainer shares, in the order of its ranks.

        With Ray, place rank ``slot.rank`` in bundle ``slot.bundle_index`` of ``placement_group``.
        """
        return self._trainer_slots

    def start(self) -> Pending[dict[str, ServerStatus]]:
        """Start all servers."""
        return self._loop.submit(self._deployment.start())

    def started(self) -> DeploymentHandle:
        """Start all servers and return this handle; if one fails to start, stop everything."""
        for root in {server.weights.shared_memory_path for server in self.config.servers.values()}:
            remove_leftovers(Path(root))
        try:
            self.start().result()
        except BaseException:
            self.stop()
            raise
        return self

    def offload(self) -> Pending[dict[str, StepReport]]:
        """Offload all servers as one transaction."""
        return self._loop.submit(self._deployment.offload())

    def onload(
        self,
        weights: Mapping[str, NamedTensors | WeightPush] | None = None,
        *,
        before_kv: BeforeKv | None = None,
    ) -> Pending[dict[str, StepReport]]:
        """Onload all servers as one transaction, pushing ``weights`` by server name.

        Args:
            before_kv: called when the weights of all servers are verified; see
                ``ServerHandle.onload``.
        """
        check_before_kv(before_kv)
        if not isinstance(weights, Mapping | None):
            raise ConfigError(
                f"onload(weights) takes tensors by server name, not a {type(weights).__name__}"
            )
        for name in weights or {}:
            if name not in self._servers:
                known = ", ".join(self._servers)
                raise ConfigError(f"no server {name!r} to push weights to; known: {known}")
        pushes = {
            name: self._servers[name].prepare(tensors) for name, tensors in (weights or {}).items()
        }

        def end_pushes() -> None:
            for name, push in pushes.items():
                self._servers[name].end_push(push)

        if before_kv is None:
            return self._loop.submit(self._deployment.onload(pushes)).then(end_pushes)
        return PendingWithTurn(
            self._loop.submit(self._deployment.onload_verified(pushes)).then(end_pushes),
            before_kv,
            lambda: self._loop.submit(self._deployment.onload({})),
            lambda first, second: {name: first[name].merged(second[name]) for name in first},
            WITHOUT_KV,
        )

    def status(self) -> Pending[dict[str, ServerStatus]]:
        """Status of every server."""
        return self._loop.submit(self._deployment.status())

    def stop(self) -> None:
        """Stop everything that ``launch`` started, and wait until it has ended."""
        if self._closed:
            return
        self._closed = True
        try:
            self._loop.submit(self._deployment.stop()).result()
        finally:
            for server in self._servers.values():
                server.close()
            self._on_close()
            self._loop.close()

    def __enter__(self) -> DeploymentHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
