"""Calls of Ray actors: by a training loop, a server or a command line.

Every call is submitted immediately.  Its result can be awaited, and raises the actor's own error,
without Ray's wrappers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import ray

from rollout.control.group.server_group import ServerGroup
from rollout.control.server.agents_client import Worker
from rollout.control.server.server import RolloutServer
from rollout.core.pending import Pending
from rollout.router.host import RouterHost
from rollout.runtime.ray.remote_call import RemoteCall, method_in_trace, peel
from rollout.weights.push.weight_push import WeightPush

P = ParamSpec("P")
T = TypeVar("T")

_GROUP_LOST = "with health.recover another replaces it; then call again"
_SERVER_LOST = "it cannot go on; stop this deployment, launch it again"
# Ray repeats those that a server which starts again has lost: they do nothing twice.  A push is not
# among them: what its sender streams comes once.
_REPEATED = (
    *("status", "observe", "config", "expected_manifest", "fingerprint_methods", "log_tail"),
    *("offload", "serve", "check_can_restore", "advance", "make_idle", "run"),
)


class RemoteActor:
    """Has the methods of its actor; each submits its call and returns a ``RemoteCall``.

    Args:
        name: names the actor in errors.
        if_dead: the consequence of the actor's death, and what to do.
    """

    def __init__(self, actor: Any, name: str, if_dead: str = "") -> None:
        self._actor = actor
        self._name = name
        self._if_dead = if_dead

    def __getattr__(self, method: str) -> Callable[..., RemoteCall[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self._submit, method)

    def _submit(self, method: str, *args: Any, **kwargs: Any) -> RemoteCall[Any]:
        object_ref = getattr(self._actor, method).remote(*args, **kwargs)
        return RemoteCall(object_ref, self._name, self._if_dead)


class RemoteGroup(RemoteActor):
    """A ``ServerGroupActor``."""

    def __init__(self, actor: Any, name: str) -> None:
        super().__init__(actor, name, _GROUP_LOST)

    def _submit(self, method: str, *args: Any, **kwargs: Any) -> RemoteCall[Any]:
        call, args = method_in_trace(self._actor, method, args)
        return RemoteCall(call.remote(*args, **kwargs), self._name, self._if_dead)


class RemoteServer(RemoteActor):
    """A ``RolloutServerActor``."""

    def __init__(self, actor: Any, name: str) -> None:
        super().__init__(actor, name, _SERVER_LOST)

    def stop(self) -> RemoteCall[None]:
        """Stop the server, and end the actors it created."""
        return self._submit("end")

    def _submit(self, method: str, *args: Any, **kwargs: Any) -> RemoteCall[Any]:
        call, args = method_in_trace(self._actor, method, args, **_options(method))
        return RemoteCall(call.remote(*args, **kwargs), self._name, self._if_dead)


def _options(method: str) -> dict[str, Any]:
    return {"max_task_retries": -1} if method in _REPEATED else {}


def remote_server(actor: Any, name: str) -> RolloutServer:
    """A ``RolloutServerActor`` as a deployment sees it."""
    return cast("RolloutServer", RemoteServer(actor, name))


def remote_group(actor: Any, name: str) -> ServerGroup:
    """A ``ServerGroupActor`` as its server sees it."""
    return cast("ServerGroup", RemoteGroup(actor, name))


def remote_router(actor: Any, name: str) -> RouterHost:
    """A ``RouterActor`` as its server sees it."""
    return cast("RouterHost", RemoteActor(actor, name))


def remote_worker(actor: Any, name: str) -> Worker:
    """An ``AgentsActor`` as its server sees it."""
    return cast("Worker", RemoteActor(actor, name))


class RayCaller:
    """Calls a ``RolloutServerActor`` for a handle; a call is submitted immediately.

    Args:
        name: names the actor in errors.
    """

    backend = "ray"

    def __init__(self, actor: Any, name: str) -> None:
        self._actor = actor
        self._name = name

    def call(
        self,
        method: Callable[Concatenate[RolloutServer, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Pending[T]:
        name = method.__name__
        call, values = method_in_trace(self._actor, name, args, **_options(name))
        object_ref = call.remote(*values, **kwargs)
        return Pending(
            object_ref.future(),
            object_ref=object_ref,
            translate=lambda error: peel(error, self._name, _SERVER_LOST),
        )

    def ship(self, push: WeightPush) -> WeightPush:
        """Put buckets into the object store, one by one, so that no process holds them all."""
        buckets: tuple[Any, ...] = tuple(_put(bucket) for bucket in push.buckets)
        return replace(push, buckets=buckets)

    def node_of(self, node_id: str, host: str) -> str:
        return node_id

    def own_node(self) -> str:
        own: str = ray.get_runtime_context().get_node_id()
        return own

    def own_host(self) -> str:
        address: str = ray.util.get_node_ip_address()
        return address


def _put(bucket: Any) -> Any:
    parts = bucket.values() if isinstance(bucket, Mapping) else [bucket]
    return ray.put(bucket) if any(isinstance(part, bytes) for part in parts) else bucket
