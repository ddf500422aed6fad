"""A stub of the module ``ray``, so that code written for Ray runs in millisecond tests.

    with stub_ray.installed() as stub:
        from rollout.runtime.ray.launch import launch_ray
        ...

Inside the block, ``import ray`` imports the stub, and ``rollout.runtime.ray`` is imported again
with it.  After the block both are restored.  The stub has Ray's failure semantics, but not its
speed or its whole interface: see ``stub_refs``, ``stub_actors`` and ``stub_cluster``.  The tests of
``rollout.runtime.ray`` run with the stub and with real Ray, so the two cannot drift apart.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import inspect
import re
import socket
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from engines.process.background import Then, keep_thread
from rollout.testing import stub_refs
from rollout.testing.stub_actors import PLACE, Actor, ActorCall, opened
from rollout.testing.stub_cluster import Cluster, PlacementGroup
from rollout.testing.stub_refs import ObjectRef, PassedAsIs, Pickled


@contextmanager
def installed(
    nodes: Sequence[Mapping[str, float]] = ({"CPU": 64.0},), *, seed: int = 0
) -> Iterator[StubRay]:
    """Replace the module ``ray`` by the stub; at the end, stop the stub and restore the module.

    Args:
        nodes: the resources of each machine, resource -> amount.
        seed: seed of the order in which calls start, and of placement.
    """
    stub = StubRay(nodes, seed)
    # The collection in ``shutdown`` then visits only what was made since: a suite of many tests has
    # a million objects, which would take half a second each time.
    gc.freeze()
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_bound_to_ray(name)}
    sys.modules.update(stub.modules())
    try:
        yield stub
    finally:
        stub.shutdown()
        gc.unfreeze()
        for name in [name for name in sys.modules if _is_bound_to_ray(name)]:
            del sys.modules[name]
        sys.modules.update(hidden)
        runtime = sys.modules["rollout.runtime"]
        if "rollout.runtime.ray" in hidden:
            runtime.ray = hidden["rollout.runtime.ray"]  # type: ignore[attr-defined]
        elif hasattr(runtime, "ray"):
            del runtime.ray


# What each actor in a placement group takes of its group's own resource.
_SHARE_OF_ACTOR = 0.001


def _is_bound_to_ray(module: str) -> bool:
    return module.split(".")[0] == "ray" or module.split(".")[:3] == ["rollout", "runtime", "ray"]


class StubRay:
    """The functions of the module ``ray``, and a few for tests."""

    def __init__(self, nodes: Sequence[Mapping[str, float]], seed: int) -> None:
        self._nodes = nodes
        self._seed = seed
        self._cluster: Cluster | None = None

    # For tests

    @property
    def cluster(self) -> Cluster:
        if self._cluster is None:
            raise RuntimeError("ray is not initialized: call ray.init() first")
        return self._cluster

    def live_actors(self) -> list[str]:
        """Class names of the live actors."""
        return [actor.kind.__name__ for actor in self._cluster.actors] if self._cluster else []

    # ray

    def init(self, address: str | None = None, namespace: str = "default", **options: Any) -> None:
        if self._cluster is not None:
            raise RuntimeError("Maybe you called ray.init twice by accident?")
        self._cluster = Cluster(self._nodes, self._seed, namespace)

    def is_initialized(self) -> bool:
        return self._cluster is not None

    def shutdown(self) -> None:
        if self._cluster is None:
            return
        self._cluster.shutdown()
        self._cluster = None
        # The system closes the sockets of a killed process without a warning.  Some are reachable
        # here, from a traceback or a thread, and would be collected in a later test.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
        for tracked in gc.get_objects():
            if type(tracked) is socket.socket and tracked.family == socket.AF_INET:
                tracked.close()

    def remote(self, *args: Any, **options: Any) -> Any:
        if args:
            return _Remote(self, args[0], {})
        return lambda target: _Remote(self, target, options)

    def put(self, value: Any) -> ObjectRef:
        ref = ObjectRef()
        ref.resolve(Pickled(value).load)
        return ref

    def get(self, refs: Any, *, timeout: float | None = None) -> Any:
        """The result, or a list of results; after an error, the other calls continue."""
        if isinstance(refs, ObjectRef):
            future = refs.future()
            if not concurrent.futures.wait([future], timeout).done:
                raise stub_refs.GetTimeoutError("Get timed out: some object(s) not ready.")
            return future.result()
        return [self.get(ref, timeout=timeout) for ref in refs]

    def wait(
        self, refs: Sequence[ObjectRef], *, num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[ObjectRef], list[ObjectRef]]:
        futures = {ref.future(): ref for ref in refs}
        with suppress(TimeoutError):
            completed = concurrent.futures.as_completed(futures, timeout)
            for _ in zip(range(num_returns), completed, strict=False):
                pass
        ready = [ref for future, ref in futures.items() if future.done()][:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    def kill(self, actor: ActorHandle, *, no_restart: bool = True) -> None:
        actor.stub_actor.die("The actor is dead because it was killed by `ray.kill`.")

    def cancel(self, ref: ObjectRef, *, force: bool = False, recursive: bool = True) -> None:
        ref.cancel()

    def get_actor(self, name: str, namespace: str | None = None) -> ActorHandle:
        found = self.cluster.find(namespace or self.cluster.namespace, name)
        if found is None:
            raise ValueError(f"Failed to look up actor with name {name!r}.")
        return ActorHandle(found)

    def _list_named_actors(self, all_namespaces: bool = False) -> list[dict[str, str]]:
        names = [actor.full_name for actor in list(self.cluster.actors) if actor.full_name]
        return [{"namespace": namespace, "name": name} for namespace, name in names]

    def nodes(self) -> list[dict[str, Any]]:
        # Nodes of a simulated cluster share one address, unless a test gives others.
        return [
            {
                "NodeID": node.node_id,
                "Alive": node.is_alive,
                "NodeManagerAddress": node.address,
                "Resources": dict(node.resources),
            }
            for node in self.cluster.nodes
        ]

    def cluster_resources(self) -> dict[str, float]:
        own = _sum([node.resources for node in self.cluster.nodes if node.is_alive])
        return own | self.cluster.bundle_resources(0.0)

    def available_resources(self) -> dict[str, float]:
        own = _sum([node.free for node in self.cluster.nodes if node.is_alive])
        return own | self.cluster.bundle_resources(_SHARE_OF_ACTOR)

    def get_gpu_ids(self) -> list[int]:
        place = PLACE.get()
        return list(place[1]) if place else []

    def get_runtime_context(self) -> RuntimeContext:
        place = PLACE.get()
        node_id = place[0] if place else self.cluster.nodes[0].node_id
        return RuntimeContext(node_id, self.cluster.namespace)

    def modules(self) -> dict[str, ModuleType]:
        """The modules that replace those of Ray, by name."""
        of_tests = ("cluster", "live_actors", "modules")
        of_groups = PlacementGroups(self)
        strategies = (PlacementGroupSchedulingStrategy, NodeAffinitySchedulingStrategy)
        contents: dict[str, dict[str, Any]] = {
            "ray": {
                name: getattr(self, name)
                for name in vars(StubRay)
                if not name.startswith("_") and name not in of_tests
            }
            | {"ObjectRef": ObjectRef},
            "ray.exceptions": {
                name: error
                for name, error in vars(stub_refs).items()
                if isinstance(error, type) and issubclass(error, stub_refs.RayError)
            },
            "ray.util": {
                "get_node_ip_address": lambda: "127.0.0.1",
                "list_named_actors": self._list_named_actors,
            },
            "ray.util.placement_group": {
                name: getattr(of_groups, name)
                for name in vars(PlacementGroups)
                if not name.startswith("_")
            }
            | {"PlacementGroup": PlacementGroup},
            "ray.util.scheduling_strategies": {kind.__name__: kind for kind in strategies},
        }
        modules = {name: ModuleType(name, __doc__) for name in contents}
        for name, module in modules.items():
            vars(module).update(contents[name])
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(modules[parent], child, module)
        # As in Ray, the function hides the module of the same name.
        vars(modules["ray.util"]).update(contents["ray.util.placement_group"])
        return modules


class PlacementGroups:
    """The functions of the module ``ray.util.placement_group``."""

    def __init__(self, ray: StubRay) -> None:
        self._ray = ray

    def placement_group(
        self, bundles: Sequence[Mapping[str, float]], strategy: str = "PACK", **options: Any
    ) -> PlacementGroup:
        return self._ray.cluster.reserve(PlacementGroup(bundles, strategy))

    def remove_placement_group(self, group: PlacementGroup) -> None:
        self._ray.cluster.release(group)

    def placement_group_table(self, group: PlacementGroup) -> dict[str, Any]:
        return {
            "state": group.state,
            "bundles": dict(enumerate(group.bundle_specs)),
            "bundles_to_node_id": {
                index: node_id for index, (node_id, _) in enumerate(group.places)
            },
        }


@dataclass(frozen=True)
class RuntimeContext:
    """The node and namespace of the caller."""

    node_id: str
    namespace: str
    was_current_actor_reconstructed: bool = False

    def get_node_id(self) -> str:
        return self.node_id


@dataclass(frozen=True)
class PlacementGroupSchedulingStrategy:
    """Run in a bundle of a placement group."""

    placement_group: PlacementGroup
    placement_group_bundle_index: int = -1
    placement_group_capture_child_tasks: bool | None = None


@dataclass(frozen=True)
class NodeAffinitySchedulingStrategy:
    """Run on a node.

    Raises:
        ValueError: no node can have this id.
    """

    node_id: str
    soft: bool

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9a-f]{56}", self.node_id):
            raise ValueError(f"Invalid node_id '{self.node_id}': it must be a valid hex string")


class _Remote(PassedAsIs):
    """A remote class or function."""

    def __init__(self, ray: StubRay, target: Any, options: Mapping[str, Any]) -> None:
        self._ray = ray
        self._target = target
        self._options = dict(options)

    def options(self, **options: Any) -> _Remote:
        return _Remote(self._ray, self._target, self._options | options)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        cluster = self._ray.cluster
        inspect.signature(self._target).bind(*args, **kwargs)
        pickled = Pickled((list(args), kwargs))
        if isinstance(self._target, type):
            return ActorHandle(cluster.create(self._target, pickled, self._options))
        ref = ObjectRef()
        place = cluster.place(self._options)
        if not cluster.is_alive(place[0]):
            ref.fail(stub_refs.TaskUnschedulableError("The node doesn't exist any more."))
            return ref

        def run() -> None:
            PLACE.set(place)
            try:
                given, named = asyncio.run(opened(pickled))
                ref.resolve(Pickled(self._target(*given, **named)).load)
            except BaseException as error:  # every error goes to the caller
                ref.fail_in_task(error)

        keep_thread(run, self._target.__name__, Then.IS_OVER)
        return ref


class ActorHandle(PassedAsIs):
    """The handle of an actor."""

    def __init__(self, actor: Actor) -> None:
        self.stub_actor = actor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorHandle) and other.stub_actor is self.stub_actor

    def __hash__(self) -> int:
        return id(self.stub_actor)

    def __getattr__(self, name: str) -> _Method:
        return _Method(self.stub_actor, name, getattr(self.stub_actor.kind, name))


class _Method:
    def __init__(self, actor: Actor, name: str, function: Any) -> None:
        self._actor = actor
        self._name = name
        self._signature = inspect.signature(function)

    def options(self, **options: Any) -> _Method:
        return self

    def remote(self, *args: Any, **kwargs: Any) -> ObjectRef:
        self._signature.bind(None, *args, **kwargs)
        return self._actor.submit(ActorCall(self._name, Pickled((list(args), kwargs))))


def _sum(all_resources: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for resources in all_resources for name in resources}
    totals = {name: sum(resources.get(name, 0.0) for resources in all_resources) for name in names}
    return {name: amount for name, amount in totals.items() if amount}
