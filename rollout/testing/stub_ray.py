"""A stub of the module ``ray``, so that code written for Ray runs in millisecond tests.

    with stub_ray.installed() as stub:
        from rollout.actors.launch import launch_ray
        ...

Inside the block ``import ray`` gives the stub, and ``rollout.actors`` is imported anew upon it;
afterwards both are as they were.  It keeps Ray's failure semantics, not its speed or its whole
interface: ``stub_refs``, ``stub_actors`` and ``stub_cluster`` say which.  The tests of
``rollout.actors`` run over stub and real Ray alike, which is what keeps it honest.
"""

from __future__ import annotations

import concurrent.futures
import gc
import inspect
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from rollout.testing import stub_errors
from rollout.testing.stub_actors import PLACE, Actor, Call
from rollout.testing.stub_cluster import Cluster, PlacementGroup
from rollout.testing.stub_refs import CURRENT, Live, ObjectRef, Parcel


@contextmanager
def installed(
    nodes: Sequence[Mapping[str, float]] = ({"CPU": 64.0},), *, seed: int = 0
) -> Iterator[StubRay]:
    """Put the stub where ``import`` finds it; at the end, stop it and restore what was there.

    Args:
        nodes: resources of each machine, resource -> amount.
        seed: of the order in which calls start, and of what is placed where.
    """
    stub = StubRay(nodes, seed)
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_bound_to_ray(name)}
    sys.modules.update(stub.modules())
    try:
        yield stub
    finally:
        stub.shutdown()
        for name in [name for name in sys.modules if _is_bound_to_ray(name)]:
            del sys.modules[name]
        sys.modules.update(hidden)
        rollout = sys.modules["rollout"]
        if "rollout.actors" in hidden:
            rollout.actors = hidden["rollout.actors"]  # type: ignore[attr-defined]
        elif hasattr(rollout, "actors"):
            del rollout.actors


def _is_bound_to_ray(module: str) -> bool:
    return module.split(".")[0] == "ray" or module.split(".")[:2] == ["rollout", "actors"]


class StubRay:
    """The functions of the module, and what tests may look at."""

    def __init__(self, nodes: Sequence[Mapping[str, float]], seed: int) -> None:
        self._nodes = nodes
        self._seed = seed
        self._cluster: Cluster | None = None
        self.init_options: dict[str, Any] = {}

    # For tests

    @property
    def cluster(self) -> Cluster:
        if self._cluster is None:
            raise RuntimeError("ray is not initialized: the stub does not do that by itself")
        return self._cluster

    def live_actors(self) -> list[str]:
        """Class names of the actors that live."""
        return [one.kind.__name__ for one in self._cluster.actors] if self._cluster else []

    # ray

    def init(self, address: str | None = None, namespace: str = "default", **options: Any) -> None:
        if self._cluster is not None:
            raise RuntimeError("Maybe you called ray.init twice by accident?")
        self.init_options = {"address": address, "namespace": namespace, **options}
        self._cluster = Cluster(self._nodes, self._seed, namespace)

    def is_initialized(self) -> bool:
        return self._cluster is not None

    def shutdown(self) -> None:
        if self._cluster is None:
            return
        self._cluster.shutdown()
        self._cluster = None
        # What a killed process held open the system closes without a word.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()

    def remote(self, *args: Any, **options: Any) -> Any:
        if args:
            return _Remote(self, args[0], {})
        return lambda target: _Remote(self, target, options)

    def put(self, value: Any) -> ObjectRef:
        ref = ObjectRef()
        ref.settle(Parcel(value).open)
        return ref

    def get(self, refs: Any, *, timeout: float | None = None) -> Any:
        """Of a list, all answers; the first failure is raised while the others run on."""
        if isinstance(refs, ObjectRef):
            future = refs.future()
            if not concurrent.futures.wait([future], timeout).done:
                raise stub_errors.GetTimeoutError("Get timed out: some object(s) not ready.")
            return future.result()
        return [self.get(ref, timeout=timeout) for ref in refs]

    def wait(
        self, refs: Sequence[ObjectRef], *, num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[ObjectRef], list[ObjectRef]]:
        deadline = None if timeout is None else time.monotonic() + timeout
        futures = {ref.future(): ref for ref in refs}
        waiting = set(futures)
        while len(futures) - len(waiting) < min(num_returns, len(refs)):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            done, waiting = concurrent.futures.wait(waiting, left, "FIRST_COMPLETED")
            if not done:
                break
        ready = [ref for future, ref in futures.items() if future not in waiting][:num_returns]
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

    def nodes(self) -> list[dict[str, Any]]:
        # Nodes of a simulated cluster share one address.
        return [
            {
                "NodeID": one.node_id,
                "Alive": one.is_alive,
                "NodeManagerAddress": "127.0.0.1",
                "Resources": dict(one.resources),
            }
            for one in self.cluster.nodes
        ]

    def cluster_resources(self) -> dict[str, float]:
        return _sum([one.resources for one in self.cluster.nodes if one.is_alive])

    def available_resources(self) -> dict[str, float]:
        return _sum([one.free for one in self.cluster.nodes if one.is_alive])

    def get_gpu_ids(self) -> list[int]:
        place = PLACE.get()
        return list(place[1]) if place else []

    def get_runtime_context(self) -> RuntimeContext:
        place, actor = PLACE.get(), CURRENT.get()
        return RuntimeContext(
            place[0] if place else self.cluster.nodes[0].node_id,
            self.cluster.namespace,
            actor.full_name[1] if actor and actor.full_name else None,
        )

    # ray.util.placement_group

    def placement_group(
        self, bundles: Sequence[Mapping[str, float]], strategy: str = "PACK", **options: Any
    ) -> PlacementGroup:
        return self.cluster.reserve(PlacementGroup(bundles, strategy))

    def remove_placement_group(self, group: PlacementGroup) -> None:
        self.cluster.release(group)

    def placement_group_table(self, group: PlacementGroup) -> dict[str, Any]:
        return {
            "bundles": dict(enumerate(group.bundle_specs)),
            "bundles_to_node_id": {
                index: node_id for index, (node_id, _) in enumerate(group.places)
            },
            "strategy": group.strategy,
            "state": _state_of(group),
        }

    def modules(self) -> dict[str, ModuleType]:
        """The stub as modules, by name."""
        of_groups = ("placement_group", "remove_placement_group", "placement_group_table")
        of_tests = ("cluster", "live_actors", "modules")
        strategies = (PlacementGroupSchedulingStrategy, NodeAffinitySchedulingStrategy)
        contents: dict[str, dict[str, Any]] = {
            "ray": {
                name: getattr(self, name)
                for name in vars(StubRay)
                if not name.startswith("_") and name not in of_groups + of_tests
            }
            | {"ObjectRef": ObjectRef},
            "ray.exceptions": {
                name: one for name, one in vars(stub_errors).items() if isinstance(one, type)
            },
            "ray.util": {"get_node_ip_address": lambda: "127.0.0.1"},
            "ray.util.placement_group": {name: getattr(self, name) for name in of_groups}
            | {"PlacementGroup": PlacementGroup},
            "ray.util.scheduling_strategies": {one.__name__: one for one in strategies},
        }
        modules = {name: ModuleType(name, __doc__) for name in contents}
        for name, module in modules.items():
            vars(module).update(contents[name])
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(modules[parent], child, module)
        # In Ray too, the function hides the module of its name.
        vars(modules["ray.util"]).update(contents["ray.util.placement_group"])
        return modules


@dataclass(frozen=True)
class RuntimeContext:
    """Where the caller runs."""

    node_id: str
    namespace: str
    actor_name: str | None

    def get_node_id(self) -> str:
        return self.node_id

    def get_actor_name(self) -> str | None:
        return self.actor_name


@dataclass(frozen=True)
class PlacementGroupSchedulingStrategy:
    """Run in that bundle."""

    placement_group: PlacementGroup
    placement_group_bundle_index: int = -1
    placement_group_capture_child_tasks: bool | None = None


@dataclass(frozen=True)
class NodeAffinitySchedulingStrategy:
    """Run on that node."""

    node_id: str
    soft: bool


class _Remote(Live):
    """A class or a function made remote."""

    def __init__(self, ray: StubRay, target: Any, options: Mapping[str, Any]) -> None:
        self._ray = ray
        self._target = target
        self._options = dict(options)

    def options(self, **options: Any) -> _Remote:
        return _Remote(self._ray, self._target, self._options | options)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        cluster = self._ray.cluster
        inspect.signature(self._target).bind(*args, **kwargs)
        parcel = Parcel((list(args), kwargs))
        if isinstance(self._target, type):
            return ActorHandle(cluster.create(self._target, parcel, self._options))
        ref = ObjectRef()
        place = cluster.place(self._options)
        if not cluster.is_alive(place[0]):
            ref.fail(stub_errors.TaskUnschedulableError("The node doesn't exist any more."))
            return ref

        def run() -> None:
            PLACE.set(place)
            try:
                given, named = parcel.open()
                given = [self._ray.get(one) if isinstance(one, ObjectRef) else one for one in given]
                ref.settle(Parcel(self._target(*given, **named)).open)
            except BaseException as error:  # whatever it is, the caller gets it
                ref.fail_in_task(error)

        threading.Thread(target=run, name=self._target.__name__, daemon=True).start()
        return ref


class ActorHandle(Live):
    """An actor from outside."""

    def __init__(self, actor: Actor) -> None:
        self.stub_actor = actor

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
        return self._actor.submit(Call(self._name, Parcel((list(args), kwargs))))


def _state_of(group: PlacementGroup) -> str:
    if not group.granted.is_set():
        return "PENDING"
    return "CREATED" if all(node_id for node_id, _ in group.places) else "RESCHEDULING"


def _sum(all_resources: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for resources in all_resources:
        for name, amount in resources.items():
            total[name] = total.get(name, 0.0) + amount
    return {name: amount for name, amount in total.items() if amount}
