"""The cluster of the stub ``ray``: its nodes, placement groups, and actors by name.

Always true: the waiting bundles of a placement group are all granted together, or none is.

Not supported: resources of actors outside a placement group, and how much of a bundle its actors
take together.
"""

from __future__ import annotations

import random
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.testing.stub_actors import Actor, Location
from rollout.testing.stub_refs import ActorAlreadyExistsError, PassedAsIs, Pickled


class PlacementGroup(PassedAsIs):
    """Bundles, granted all together or pending."""

    def __init__(self, bundles: Sequence[Mapping[str, float]], strategy: str) -> None:
        self.bundle_specs = [dict(bundle) for bundle in bundles]
        self.strategy = strategy
        self.id = secrets.token_bytes(14)
        self.places: list[Location] = []
        self.granted = threading.Event()
        self.state = "PENDING"

    def wait(self, timeout_seconds: float = 30) -> bool:
        return self.granted.wait(timeout_seconds)


@dataclass
class Node:
    """One machine with its total and its free resources."""

    node_id: str
    resources: dict[str, float]
    free: dict[str, float]
    free_gpu_ids: list[int]
    address: str = "127.0.0.1"
    is_alive: bool = True


class Cluster:
    """The cluster that one ``ray.init`` started.

    Attributes:
        actors: all live actors.
        nodes: all nodes, including lost ones.
    """

    def __init__(self, nodes: Sequence[Mapping[str, float]], seed: int, namespace: str) -> None:
        self.seed = seed
        self.namespace = namespace
        self.actors: list[Actor] = []
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._ended: list[Actor] = []
        self._groups: list[PlacementGroup] = []
        self.nodes: list[Node] = []
        for resources in nodes:
            self.add_node(resources)

    def add_node(self, resources: Mapping[str, float], address: str = "127.0.0.1") -> str:
        """Add a machine; waiting bundles may be granted on it.  Returns its node id."""
        num_gpus = int(resources.get("GPU", 0))
        node = Node(
            f"{len(self.nodes):x}".rjust(56, "0"),
            dict(resources),
            dict(resources),
            self._random.sample(range(num_gpus), num_gpus),
            address,
        )
        with self._lock:
            self.nodes.append(node)
            self._grant()
        return node.node_id

    def lose_node(self, node_id: str) -> None:
        """Remove a machine with its actors; its bundles wait for another node with room."""
        with self._lock:
            node = next(node for node in self.nodes if node.node_id == node_id)
            node.is_alive = False
            lost = [actor for actor in self.actors if actor.place[0] == node_id]
            for group in self._groups:
                group.places = [
                    ("", ()) if place[0] == node_id else place for place in group.places
                ]
            self._grant()
        for actor in lost:
            actor.die("The actor died because its node has died.")

    def is_alive(self, node_id: str) -> bool:
        return any(node.node_id == node_id and node.is_alive for node in self.nodes)

    def create(self, kind: type, pickled: Pickled, options: Mapping[str, Any]) -> Actor:
        with self._lock:
            name, namespace = options.get("name"), options.get("namespace") or self.namespace
            if name and self.find(namespace, name):
                raise ActorAlreadyExistsError(
                    f"The name {name} (namespace={namespace}) is already taken."
                )
            actor = Actor(
                kind,
                pickled,
                options,
                full_name=(namespace, name) if name else None,
                place=self.place(options),
                seed=f"{self.seed}/{len(self.actors)}",
                forget=self.forget,
            )
            self.actors.append(actor)
            actor.start()
        return actor

    def find(self, namespace: str, name: str) -> Actor | None:
        with self._lock:
            return next(
                (actor for actor in self.actors if actor.full_name == (namespace, name)), None
            )

    def forget(self, actor: Actor) -> None:
        with self._lock:
            if actor in self.actors:
                self.actors.remove(actor)
                self._ended.append(actor)
            orphans = [other for other in self.actors if other.creator is actor]
        for orphan in orphans:
            orphan.die("The actor is dead because its owner has died.")

    def shutdown(self) -> None:
        for actor in list(self.actors):
            actor.die("The driver has exited.")
        for actor in self._ended:
            actor.join()

    # -- placement --------------------------------------------------------------------------

    def place(self, options: Mapping[str, Any]) -> Location:
        """The location of an actor or a task with these options."""
        strategy = options.get("scheduling_strategy")
        group = getattr(strategy, "placement_group", None)
        if group is not None:
            index = getattr(strategy, "placement_group_bundle_index", -1)
            node_id, gpu_ids = group.places[max(0, index)]
            return node_id, gpu_ids if options.get("num_gpus") else ()
        return getattr(strategy, "node_id", None) or self.nodes[0].node_id, ()

    def reserve(self, group: PlacementGroup) -> PlacementGroup:
        with self._lock:
            self._groups.append(group)
            self._grant()
        return group

    def release(self, group: PlacementGroup) -> None:
        """Free its bundles for waiting groups; its actors die."""
        with self._lock:
            self._groups.remove(group)
            group.state = "REMOVED"
            for (node_id, gpu_ids), bundle in zip(group.places, group.bundle_specs, strict=False):
                if not node_id:  # its node was lost
                    continue
                node = next(node for node in self.nodes if node.node_id == node_id)
                node.free_gpu_ids.extend(gpu_ids)
                for name, amount in bundle.items():
                    node.free[name] += amount
            self._grant()
            lost = [actor for actor in self.actors if actor.group is group]
        for actor in lost:
            actor.die("Its placement group was removed.")

    def bundle_resources(self, share_of_actor: float) -> dict[str, float]:
        """Ray's own resource of each placement group: 1000 per bundle, less what actors use."""
        with self._lock:
            return {
                f"bundle_group_{group.id.hex()}": 1000.0 * len(group.bundle_specs)
                - share_of_actor * sum(actor.group is group for actor in self.actors)
                for group in self._groups
            }

    def _grant(self) -> None:
        for group in self._groups:
            places = self._try_place(group)
            if places is not None:
                group.places = places
                group.state = "CREATED"
                group.granted.set()

    def _try_place(self, group: PlacementGroup) -> list[Location] | None:
        """Locations for all its bundles, or None if not all waiting bundles fit."""
        before = [(dict(node.free), list(node.free_gpu_ids)) for node in self.nodes]
        places = list(group.places) or [("", ())] * len(group.bundle_specs)
        for index, bundle in enumerate(group.bundle_specs):
            if places[index][0]:
                continue
            used = [node_id for node_id, _ in places] if group.strategy == "PACK" else []
            node = self._node_for(bundle, used)
            if node is None:
                for changed, (free, gpu_ids) in zip(self.nodes, before, strict=True):
                    changed.free, changed.free_gpu_ids = free, gpu_ids
                return None
            for name, amount in bundle.items():
                node.free[name] -= amount
            gpu_ids = [node.free_gpu_ids.pop() for _ in range(int(bundle.get("GPU", 0)))]
            places[index] = (node.node_id, tuple(gpu_ids))
        return places

    def _node_for(self, bundle: Mapping[str, float], used: Sequence[str]) -> Node | None:
        """A random node with room, from ``used`` if possible: Ray guarantees no more."""
        fitting = [
            node
            for node in self.nodes
            if node.is_alive
            and all(node.free.get(name, 0.0) >= amount for name, amount in bundle.items())
        ]
        preferred = [node for node in fitting if node.node_id in used] or fitting
        return self._random.choice(preferred) if preferred else None
