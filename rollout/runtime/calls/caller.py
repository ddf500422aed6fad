"""How a handle calls its server, in this process or in an actor."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from rollout.control.server.server import RolloutServer
from rollout.core.pending import Pending
from rollout.weights.push.weight_push import WeightPush

P = ParamSpec("P")
T = TypeVar("T")

LAUNCH_NODE = "local"
"""The machine that launched a run without Ray, where its own engines are."""


def node_without_ray(host: str) -> str:
    """The machine of an engine that listens on ``host``, which may be attached."""
    return LAUNCH_NODE if host in ("127.0.0.1", "localhost", "::1") else host


class Caller(Protocol):
    """How a handle calls its server; differs between in-process and Ray.

    Attributes:
        backend: ``local`` or ``ray``.
    """

    backend: str

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

    def node_of(self, node_id: str, host: str) -> str:
        """Names the machine of an engine on ``node_id``, listening on ``host``."""
        ...

    def own_node(self) -> str:
        """Names this machine; equal to ``node_of`` for the engines that run here."""
        ...

    def own_host(self) -> str:
        """Address of this machine that the server can reach."""
        ...
