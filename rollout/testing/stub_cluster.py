"""The cluster of the stub ``ray``: its nodes, what is placed on them, its actors by name.

Always true: bundles of a group that wait for a place get one all together, or none does.

Not here: resources of actors outside a placement group.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.testing.stub_actors import Actor, Placed
from rollout.testing.stub_errors import ActorAlreadyExistsError
from rollout.testing.stub_refs import Live, Parcel


class PlacementGroup(Live):
    """Bundles, granted all together or pending."""

    def __init__(self, bundles: Sequence[Mapping[str, float]], strategy: str) -> None:
        self.bundle_specs = [dict(one) for one in bundles]
        self.strategy = strategy
        self.places: list[Placed] = []
        self.granted = threading.Event()

    def wait(self, timeout_seconds: float = 30) -> bool:
        return self.granted.wait(timeout_seconds)


@dataclass
class Node:
    """One machine: what it has in all, what is free."""

    node_id: str
    resources: dict[str, float]
    free: dict[str, float]
    free_gpu_ids: list[int]
    is_alive: bool = True


class Cluster:
    """What one ``ray.init`` started.

    Attributes:
        actors: all that live.
        nodes: all there ever were.
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
        for one in nodes:
            self.add_node(one)

    def add_node(self, resources: Mapping[str, float]) -> str:
        """One more machine; bundles that wait for a place may get theirs there."""
        num_gpus = int(resources.get("GPU", 0))
        node = Node(
            f"{len(self.nodes):x}".rjust(56, "0"),
            dict(resources),
            dict(resources),
            self._random.sample(range(num_gpus), num_gpus),
        )
        with self._lock:
            self.nodes.append(node)
            self._grant()
        return node.node_id

    def lose_node(self, node_id: str) -> None:
        """A machine is gone, with its actors; Ray gives its bundles another place, or none yet."""
        with self._lock:
            node = next(one for one in self.nodes if one.node_id == node_id)
            node.is_alive = False
            lost = [one for one in self.actors if one.place[0] == node_id]
            for group in self._groups:
                group.places = [("", ()) if one[0] == node_id else one for one in group.places]
            self._grant()
        for actor in lost:
            actor.die("The actor died because its node has died.")

    def is_alive(self, node_id: str) -> bool:
        return any(one.node_id == node_id and one.is_alive for one in self.nodes)

    def create(self, kind: type, parcel: Parcel, options: Mapping[str, Any]) -> Actor:
        with self._lock:
            name = self.full_name(options)
            if name and self.find(*name):
                raise ActorAlreadyExistsError(
                    f"The name {name[1]} (namespace={name[0]}) is already taken."
                )
            actor = Actor(
                kind,
                parcel,
                options,
                full_name=name,
                place=self.place(options),
                seed=f"{self.seed}/{len(self.actors)}",
                forget=self.forget,
            )
            self.actors.append(actor)
            actor.start()
        return actor

    def full_name(self, options: Mapping[str, Any]) -> tuple[str, str] | None:
        """Namespace and name, if it has one."""
        name = options.get("name")
        return (options.get("namespace") or self.namespace, name) if name else None

    def find(self, namespace: str, name: str) -> Actor | None:
        with self._lock:
            return next((one for one in self.actors if one.full_name == (namespace, name)), None)

    def forget(self, actor: Actor) -> None:
        with self._lock:
            if actor in self.actors:
                self.actors.remove(actor)
                self._ended.append(actor)
            orphans = [one for one in self.actors if one.creator is actor]
        for one in orphans:
            one.die("The actor is dead because its owner has died.")

    def shutdown(self) -> None:
        for one in list(self.actors):
            one.die("The driver has exited.")
        for one in self._ended:
            one.join()

    # -- placement --------------------------------------------------------------------------

    def place(self, options: Mapping[str, Any]) -> Placed:
        """Where an actor or a task with these options runs."""
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
        """Free its bundles, for groups that wait; its actors die with it."""
        with self._lock:
            self._groups.remove(group)
            for (node_id, gpu_ids), bundle in zip(group.places, group.bundle_specs, strict=False):
                if not node_id:  # it lost its place
                    continue
                node = next(one for one in self.nodes if one.node_id == node_id)
                node.free_gpu_ids.extend(gpu_ids)
                for name, amount in bundle.items():
                    node.free[name] += amount
            self._grant()
            lost = [one for one in self.actors if one.group is group]
        for actor in lost:
            actor.die("Its placement group was removed.")

    def _grant(self) -> None:
        for group in self._groups:
            places = self._try_place(group)
            if places is not None:
                group.places = places
                group.granted.set()

    def _try_place(self, group: PlacementGroup) -> list[Placed] | None:
        """Where its bundles are, those without a place given one; None if not all can be."""
        before = [(dict(one.free), list(one.free_gpu_ids)) for one in self.nodes]
        places = list(group.places) or [("", ())] * len(group.bundle_specs)
        for index, bundle in enumerate(group.bundle_specs):
            if places[index][0]:
                continue
            used = [node_id for node_id, _ in places] if group.strategy == "PACK" else []
            node = self._node_for(bundle, used)
            if node is None:
                for one, (free, gpu_ids) in zip(self.nodes, before, strict=True):
                    one.free, one.free_gpu_ids = free, gpu_ids
                return None
            for name, amount in bundle.items():
                node.free[name] -= amount
            gpu_ids = [node.free_gpu_ids.pop() for _ in range(int(bundle.get("GPU", 0)))]
            places[index] = (node.node_id, tuple(gpu_ids))
        return places

    def _node_for(self, bundle: Mapping[str, float], used: Sequence[str]) -> Node | None:
        """Any node with room, one of ``used`` if it can be: Ray promises no more."""
        fitting = [
            one
            for one in self.nodes
            if one.is_alive
            and all(one.free.get(name, 0.0) >= amount for name, amount in bundle.items())
        ]
        preferred = [one for one in fitting if one.node_id in used] or fitting
        return self._random.choice(preferred) if preferred else None
