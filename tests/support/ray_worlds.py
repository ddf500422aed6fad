"""The two worlds that tests of actors run in: the stub of Ray, and Ray itself."""

import importlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from rollout.testing import stub_ray
from tests.support.processes import wait_until

NUM_CPUS, NUM_GPUS = 16, 4
# A node that crashed is called lost after two seconds, not fifteen; one that is only slow is not.
HEALTH_CHECKS = {
    "initial_delay_ms": "1000",
    "period_ms": "500",
    "timeout_ms": "10000",
    "failure_threshold": "3",
}
# What each cluster of a test has in its environment.
RAY_SETTINGS = {
    "RAY_memory_monitor_refresh_ms": "0",
    # Ray 2.60's own metrics have crashed a worker that started: SIGSEGV in ``AsyncMetricStorage``.
    "RAY_enable_open_telemetry": "0",
    # 15 by default: beside tests that compute, an actor would get a thirtieth of a core.
    "RAY_worker_niceness": "0",
}


def set_up_ray(patch: pytest.MonkeyPatch) -> None:
    """Prepare the environment of a cluster that is about to start."""
    for name, value in RAY_SETTINGS.items():
        patch.setenv(name, value)
    patch.delenv("RAY_ADDRESS", raising=False)


class World:
    """A running Ray, stub or not, and ``rollout.runtime.ray`` imported upon it."""

    def __init__(self) -> None:
        self.ray: Any = importlib.import_module("ray")

    def load(self, module: str) -> Any:
        """A module of ``rollout.runtime.ray``, bound to this world's Ray."""
        return importlib.import_module(f"rollout.runtime.ray.{module}")

    def live_actors(self) -> list[str]:
        """Class names of the actors that live."""
        raise NotImplementedError

    def crash_newest(self, class_name: str, while_still: Callable[[], None] = lambda: None) -> None:
        """End the newest actor of a class as a crash of its process would.

        Args:
            while_still: called before, while the actor reads and does nothing any more.
        """
        raise NotImplementedError

    def add_node(self, address: str = "", **resources: float) -> str:
        """One more node, with these resources; its id.

        Args:
            address: its own; by default that of the first node.
        """
        raise NotImplementedError

    def lose_node(self, node_id: str) -> None:
        """End a node that was added, as a crash of its machine would."""
        raise NotImplementedError

    def nodes(self) -> list[str]:
        """Ids of the nodes that live."""
        return [one["NodeID"] for one in self.ray.nodes() if one["Alive"]]

    @contextmanager
    def more_nodes(self, num: int, address: str = "", **resources: float) -> Iterator[list[str]]:
        """Some nodes alike, for the time of the block."""
        before = self.nodes()
        try:
            yield [self.add_node(address, **resources) for _ in range(num)]
        finally:
            for node_id in [one for one in self.nodes() if one not in before]:
                self.lose_node(node_id)
            # What is placed next must not be sent to them any more.
            assert wait_until(lambda: self.nodes() == before, 30)


class StubWorld(World):
    def __init__(self, stub: stub_ray.StubRay) -> None:
        super().__init__()
        self._stub = stub

    def live_actors(self) -> list[str]:
        return self._stub.live_actors()

    def crash_newest(self, class_name: str, while_still: Callable[[], None] = lambda: None) -> None:
        mine = [one for one in self._stub.cluster.actors if one.kind.__name__ == class_name]
        with mine[-1].standing_still():
            while_still()
            mine[-1].die("The actor is dead because its worker process has died.")

    def add_node(self, address: str = "", **resources: float) -> str:
        return self._stub.cluster.add_node(resources, address or "127.0.0.1")

    def lose_node(self, node_id: str) -> None:
        self._stub.cluster.lose_node(node_id)


class RayWorld(World):
    def __init__(self) -> None:
        super().__init__()
        self._added: dict[str, Any] = {}
        self._cluster: Any = None

    def add_node(self, address: str = "", **resources: float) -> str:
        if self._cluster is None:
            # Ray's own tool for simulated nodes, joined to the head that ``init`` has started.
            node = importlib.import_module("ray._private.worker").global_worker.node
            made = importlib.import_module("ray.cluster_utils").Cluster(shutdown_at_exit=False)
            made.head_node, made.redis_address = node, node.redis_address
            self._cluster = made
        node = self._cluster.add_node(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            object_store_memory=80 * 2**20,
            **({"node_ip_address": address} if address else {}),
        )
        self._added[node.node_id] = node
        return str(node.node_id)

    def added(self) -> set[str]:
        """Nodes that were added and live."""
        return set(self._added)

    def lose_node(self, node_id: str) -> None:
        self._cluster.remove_node(self._added.pop(node_id), allow_graceful=False)

    def live_actors(self) -> list[str]:
        return [actor["ActorClassName"] for actor in self._alive()]

    def crash_newest(self, class_name: str, while_still: Callable[[], None] = lambda: None) -> None:
        mine = [one for one in self._alive() if one["ActorClassName"] == class_name]
        pid = max(mine, key=lambda one: one["StartTime"])["Pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            while_still()
        finally:
            os.kill(pid, signal.SIGKILL)

    def pids(self, class_name: str) -> list[int]:
        """Of the processes of the live actors of a class, without those that start again."""
        mine = [one for one in self._alive() if one["ActorClassName"] == class_name]
        return sorted(one["Pid"] for one in mine if one["Pid"])

    def _alive(self) -> list[dict[str, Any]]:
        # The public ray.util.state asks the dashboard, which tests do without.
        state = importlib.import_module("ray._private.state")
        return [actor for actor in state.actors().values() if actor["State"] != "DEAD"]


@contextmanager
def stub_world(
    nodes: tuple[Mapping[str, float], ...] = ({"CPU": NUM_CPUS, "GPU": NUM_GPUS},), seed: int = 0
) -> Iterator[StubWorld]:
    with stub_ray.installed(nodes, seed=seed) as stub:
        world = StubWorld(stub)
        world.ray.init()
        yield world


@contextmanager
def ray_world() -> Iterator[RayWorld]:
    """A cluster of its own, in a folder of its own: the machine may have others."""
    pytest.importorskip("ray")
    # Short, because sockets are made in it and their paths are limited to 107 bytes.
    folder = tempfile.mkdtemp(prefix="rr")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        for name, value in HEALTH_CHECKS.items():
            patch.setenv(f"RAY_health_check_{name}", value)
        set_up_ray(patch)
        world = RayWorld()
        world.ray.init(
            address="local",
            include_dashboard=False,
            num_cpus=NUM_CPUS,
            num_gpus=NUM_GPUS,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
        )
        try:
            yield world
        finally:
            world.ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def actors_of_runs() -> list[str]:
    """Names of actors of this library in the cluster that this process is in."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized() or not hasattr(ray, "util"):
        return []
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    ours = ("rollout-", "engines-of-", "store-", "owner-of-")
    return [name for name in names if name.startswith(ours)]
