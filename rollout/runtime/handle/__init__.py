"""The handles of a training loop: servers and deployments, with or without Ray.

Every method starts its call and returns a ``Pending`` immediately.  The same classes work for
servers in this process and for Ray actors; only the ``Caller`` differs.
"""

from __future__ import annotations

from rollout.runtime.calls.caller import Caller
from rollout.runtime.handle.deployment_handle import DeploymentHandle
from rollout.runtime.handle.offload_window import OffloadWindow
from rollout.runtime.handle.run_handle import RunHandle
from rollout.runtime.handle.server_handle import ServerHandle

__all__ = ["Caller", "DeploymentHandle", "OffloadWindow", "RunHandle", "ServerHandle"]
