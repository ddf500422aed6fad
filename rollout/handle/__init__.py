"""What a training loop holds: servers and deployments seen from outside, Ray or not.

Every method starts its call and returns a ``Pending`` at once; nothing blocks until that is
waited for.  The same classes stand in front of objects in this process and of Ray actors; only
the ``Caller`` differs.
"""

from __future__ import annotations

from rollout.handle.calling import Caller
from rollout.handle.deployment import DeploymentHandle
from rollout.handle.server import ServerHandle
from rollout.handle.window import OffloadWindow

__all__ = ["Caller", "DeploymentHandle", "OffloadWindow", "ServerHandle"]
