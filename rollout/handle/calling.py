"""How a handle reaches what it stands for, here or in an actor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rollout.deployment import ServerPort
from rollout.pending import Pending
from rollout.types import ServerStatus
from rollout.weights.manifest import Manifest
from rollout.weights.push import WeightPush


class Caller(Protocol):
    """How a handle reaches its object: the one difference between in-process and Ray."""

    def call(self, method: Callable[..., Any], *args: Any) -> Pending[Any]:
        """Start ``method(*args)``; returns at once."""
        ...

    def ship(self, push: WeightPush) -> WeightPush:
        """Put the payload of a push where the server can reach it cheaply."""
        ...

    def is_here(self, node_id: str, host: str) -> bool:
        """Whether an engine on this node, listening there, runs on this process's host."""
        ...

    def own_host(self) -> str:
        """Address of this machine that the server can reach."""
        ...


class Around:
    """What pushes must know of the server."""

    def __init__(self, target: ServerPort, caller: Caller) -> None:
        self._target = target
        self._caller = caller
        self.is_here = caller.is_here
        self.own_host = caller.own_host

    def expected_manifest(self) -> Manifest | None:
        manifest: Manifest | None = self._caller.call(self._target.expected_manifest).result()
        return manifest

    def status(self) -> ServerStatus:
        status: ServerStatus = self._caller.call(self._target.status).result()
        return status
