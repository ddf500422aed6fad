"""How a handle calls its server, in this process or in an actor."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from rollout.control.server.server import RolloutServer
from rollout.core.pending import Pending
from rollout.weights.push.weight_push import WeightPush

P = ParamSpec("P")
T = TypeVar("T")


class Caller(Protocol):
    """How a handle calls its server; differs between in-process and Ray."""

    def call(
        self,
        method: Callable[Concatenate[RolloutServer, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Pending[T]:
        """Start this method of the server; returns immediately."""
        ...

    def ship(self, push: WeightPush) -> WeightPush:
        """Put the payload of a push where the server can read it cheaply."""
        ...

    def is_here(self, node_id: str, host: str) -> bool:
        """Whether an engine on ``node_id``, listening on ``host``, runs on this machine."""
        ...

    def own_host(self) -> str:
        """Address of this machine that the server can reach."""
        ...
