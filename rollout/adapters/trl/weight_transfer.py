"""Weights of TRL's ``AsyncGRPOTrainer``: its ``WeightTransferProtocol``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from engines.tensors.collective.new_group import unsplit
from rollout.adapters.trl.requests import check_policy
from rollout.core.errors import LifecycleError

if TYPE_CHECKING:
    from rollout.runtime.handle import ServerHandle
    from rollout.runtime.handle.pusher import Pusher


class WeightTransfer:
    """What ``AsyncGRPOTrainer(weight_transfer=...)`` takes.

    TRL calls it on its main process alone, which gathers the weights of all ranks while it iterates
    over them.  Requests wait at the gate from TRL's ``pause`` until the new weights are verified.

    Args:
        policy: the handle of the server.

    Raises:
        TypeError: it is none.
    """

    def __init__(self, policy: ServerHandle) -> None:
        check_policy(policy)
        self._policy = policy
        self._pusher: Pusher | None = None

    def init_weight_transfer(self) -> None:
        """Prepare for pushes from this process.

        Raises:
            LifecycleError: that was done before, and ``destroy`` was not called.
        """
        if self._pusher is not None:
            raise LifecycleError(
                "init_weight_transfer was called before; call destroy first",
                command="init_weight_transfer",
            )
        self._pusher = self._policy.pusher(_own_group())

    def pause(self) -> None:
        """Close the gate; the engines stop.

        Raises:
            LifecycleError: the engines' memory is released.
        """
        self._policy.phases.pause_generation().result()

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Push new weights, bucket by bucket, and serve them.

        Args:
            iterator: names and whole tensors.

        Raises:
            LifecycleError: ``init_weight_transfer`` was not called.
            WeightMismatch: they do not fit the model.
        """
        if self._pusher is None:
            raise LifecycleError("send_weights before init_weight_transfer", command="send_weights")
        self._pusher.push(iterator)

    def resume(self) -> None:
        """Check that the engines serve.

        Raises:
            LifecycleError: they do not.
        """
        status = self._policy.status().result()
        if status.gate != "open":
            raise LifecycleError(
                f"the engines do not serve: the gate is {status.gate}, the phase {status.phase}; "
                "send_weights must succeed first",
                command="resume",
                phase=status.phase,
            )

    def destroy(self) -> None:
        """Free the shared memory of pushes; again, it does nothing."""
        if self._pusher is not None:
            self._pusher.close()
            self._pusher = None


def _own_group() -> Any:
    """A process group of this process alone, or None without torch.distributed."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    # The other ranks are not here: they take part in TRL's gathers, not in the push.
    with unsplit(dist.get_backend()):
        return dist.new_group([dist.get_rank()], use_local_synchronization=True)
