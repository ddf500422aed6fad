"""All servers of a run from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rollout.config import RolloutConfig
from rollout.deployment import Deployment
from rollout.handle.server import ServerHandle
from rollout.pending import LoopThread, Pending
from rollout.types import ServerStatus, StepReport
from rollout.weights.push import WeightPush

if TYPE_CHECKING:
    from rollout.weights.tensors import NamedTensors


class DeploymentHandle(Mapping[str, ServerHandle]):
    """All servers of a run, by name; a context manager that stops them at its end.

    Args:
        on_close: undoes what ``launch`` did besides the servers, after they have stopped.
        placement_group: Ray's, whose leading ``cluster.trainer_gpus`` bundles the trainer shares;
            None without Ray.
    """

    def __init__(
        self,
        config: RolloutConfig,
        servers: Mapping[str, ServerHandle],
        deployment: Deployment,
        loop: LoopThread,
        on_close: Callable[[], None] = lambda: None,
        placement_group: Any = None,
    ) -> None:
        self.config = config
        self.placement_group = placement_group
        self._servers = dict(servers)
        self._deployment = deployment
        self._loop = loop
        self._on_close = on_close
        self._closed = False

    def __getitem__(self, name: str) -> ServerHandle:
        return self._servers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._servers)

    def __len__(self) -> int:
        return len(self._servers)

    def start(self) -> Pending[dict[str, ServerStatus]]:
        """Start all servers."""
        return self._loop.submit(self._deployment.start())

    def started(self) -> DeploymentHandle:
        """Itself, with all servers started; if one does not start, everything is stopped."""
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
        self, weights: Mapping[str, NamedTensors | WeightPush] | None = None
    ) -> Pending[dict[str, StepReport]]:
        """Onload all servers as one transaction, pushing ``weights`` by server name."""
        pushes = {
            name: self._servers[name].prepare(tensors) for name, tensors in (weights or {}).items()
        }

        def end_pushes() -> None:
            for name, push in pushes.items():
                self._servers[name].end_push(push)

        return self._loop.submit(self._deployment.onload(pushes)).then(end_pushes)

    def status(self) -> Pending[dict[str, ServerStatus]]:
        """Where every server is."""
        return self._loop.submit(self._deployment.status())

    def stop(self) -> None:
        """Stop everything that ``launch`` started, and wait until it is gone."""
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
