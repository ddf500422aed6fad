"""The pushes of one process to one server: made here, and freed when their call ends.

Always true: tensors are checked against the model's own list before anything is copied.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING

from rollout.config import ServerConfig
from rollout.core.optional_deps import optional_import
from rollout.runtime.calls.caller import Caller
from rollout.runtime.calls.making import making
from rollout.runtime.calls.server_port import ServerCalls
from rollout.weights.push.push import Push, PushRequest
from rollout.weights.push.weight_push import WeightPush

if TYPE_CHECKING:
    from rollout.weights.ranks.trainer_rank import TrainerRank
    from rollout.weights.routes.trainer_groups import IdleGroup
    from rollout.weights.tensors import NamedTensors, NameMap


def needs_torch() -> AbstractContextManager[None]:
    """A block whose imports need torch."""
    return optional_import("embedded", "pushing weights needs torch, which is not installed")


class ServerPushes:
    """The pushes of this process to one server; pickled, it has none of them.

    Attributes:
        server: the calls of a push to it.
    """

    def __init__(self, config: ServerConfig, caller: Caller) -> None:
        self._config = config
        self._caller = caller
        self.server = ServerCalls(config, caller)
        self._open: list[Push] = []
        self._rank: TrainerRank | None = None
        self._idle_group: IdleGroup | None = None

    def __reduce__(self) -> tuple[type[ServerPushes], tuple[ServerConfig, Caller]]:
        return ServerPushes, (self._config, self._caller)

    @property
    def idle_group(self) -> IdleGroup:
        """The broadcast group of this process, also for its pushers; needs torch."""
        from rollout.weights.routes.trainer_groups import IdleGroup

        with making():
            if self._idle_group is None:
                self._idle_group = IdleGroup()
            return self._idle_group

    def push_of(
        self,
        weights: NamedTensors | Push | WeightPush,
        version: int | None = None,
        name_map: NameMap | None = None,
    ) -> Push:
        """The existing push, or a new one of tensors that do not change until it has ended."""
        if isinstance(weights, Push):
            return weights
        if isinstance(weights, WeightPush):
            return Push(weights)
        return self.make(PushRequest(weights, version, name_map), may_stream=True)

    def make(self, request: PushRequest, *, may_stream: bool = False) -> Push:
        """A push of tensors.

        Args:
            may_stream: the tensors do not change until it has ended; else it is a copy of them.

        Raises:
            WeightMismatch: they do not fit the model.
        """
        with needs_torch():
            import_module("torch")  # what follows may have been loaded without it
            from rollout.weights.ranks.leader import push_of_one_rank
            from rollout.weights.ranks.trainer_rank import TrainerRank
        with making():
            if self._rank is None:
                self._rank = TrainerRank(self._config, idle_group=self.idle_group)
            rank = self._rank
        self._open = [push for push in self._open if not push.is_closed]
        push = push_of_one_rank(rank, self.server, request, may_stream=may_stream)
        self._open.append(push)
        return push

    def close(self) -> None:
        """Close all pushes, leave the broadcast group, and remove all files."""
        while self._open:
            self._open.pop().close()
        if self._rank is not None:
            self._rank.close()
            self._rank = None
        if self._idle_group is not None:
            self._idle_group.close()
            self._idle_group = None
