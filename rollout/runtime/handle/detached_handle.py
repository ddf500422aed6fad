"""The handle of all servers of a run that outlives the training script."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rollout.config import RolloutConfig
from rollout.control.deployment import Deployment
from rollout.core.pending import LoopThread, Pending
from rollout.core.types import ServerStatus, TrainerSlot
from rollout.runtime.handle.deployment_handle import DeploymentHandle
from rollout.runtime.handle.server_handle import ServerHandle


class DetachedLaunch(Protocol):
    """What owns the run in place of the script."""

    def ready(self) -> Pending[dict[str, ServerStatus]]: ...
    def stop(self) -> None: ...


class DetachedHandle(DeploymentHandle):
    """All servers of a detached run, by name; ``rollout.connect`` makes another one.

    The run goes on when a ``with`` block of this handle ends, and when this process does.  ``stop``
    ends it, from any process.

    Args:
        launch: the owner of the run.
    """

    def __init__(
        self,
        config: RolloutConfig,
        servers: Mapping[str, ServerHandle],
        deployment: Deployment,
        launch: DetachedLaunch,
        placement_group: Any = None,
        trainer_slots: Sequence[TrainerSlot] = (),
    ) -> None:
        super().__init__(
            config,
            servers,
            deployment,
            LoopThread("deployment"),
            placement_group=placement_group,
            trainer_slots=trainer_slots,
        )
        self._launch = launch

    def ready(self) -> Pending[dict[str, ServerStatus]]:
        """The launch, also of another process; see ``DeploymentHandle.ready``."""
        return self._launch.ready()

    def started(self, *, wait: bool = True) -> DeploymentHandle:
        """Wait until the servers have started; see ``DeploymentHandle.started``."""
        if wait:
            self.ready().result()
        return self

    def stop(self) -> None:
        """End the run: all that its launch has started, whichever process launched it.

        Actors of a trainer that use the placement group of the run go on, and the group with them.
        """
        try:
            self._launch.stop()
        finally:
            self.close()

    def close(self) -> None:
        """End the handle, and leave the run as it is."""
        if self._closed:
            return
        self._closed = True
        for server in self._servers.values():
            server.close()
        self._loop.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)
