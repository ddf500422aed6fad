"""The two worlds that tests of actors run in: the stub of Ray, and Ray itself."""

import importlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from rollout.testing import stub_ray

NUM_CPUS, NUM_GPUS = 16, 4


class World:
    """A running Ray, stub or not, and ``rollout.actors`` imported upon it."""

    def __init__(self) -> None:
        self.ray: Any = importlib.import_module("ray")

    def load(self, module: str) -> Any:
        """A module of ``rollout.actors``, bound to this world's Ray."""
        return importlib.import_module(f"rollout.actors.{module}")

    def live_actors(self) -> list[str]:
        """Class names of the actors that live."""
        raise NotImplementedError

    def crash_newest(self, class_name: str) -> None:
        """End the newest actor of a class as a crash of its process would."""
        raise NotImplementedError


class StubWorld(World):
    def __init__(self, stub: stub_ray.StubRay) -> None:
        super().__init__()
        self._stub = stub

    def live_actors(self) -> list[str]:
        return self._stub.live_actors()

    def crash_newest(self, class_name: str) -> None:
        mine = [one for one in self._stub.cluster.actors if one.kind.__name__ == class_name]
        mine[-1].die("The actor is dead because its worker process has died.")


class RayWorld(World):
    def live_actors(self) -> list[str]:
        return [actor["ActorClassName"] for actor in self._alive()]

    def crash_newest(self, class_name: str) -> None:
        mine = [one for one in self._alive() if one["ActorClassName"] == class_name]
        os.kill(max(mine, key=lambda one: one["StartTime"])["Pid"], signal.SIGKILL)

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
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
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
