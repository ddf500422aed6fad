"""The trainer of a detached run is killed in each phase; the next serves again without a boot."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

import rollout
from rollout.cli.main import app
from rollout.control.server.journal import JournalRecord, read
from rollout.core.errors import ConfigError, LifecycleError
from rollout.core.types import TrainerSlot
from rollout.runtime.handle import DeploymentHandle
from tests.support.builders import write_checkpoint
from tests.support.processes import Program, program, shared_memory_of, wait_until
from tests.support.ray_worlds import RayWorld
from tests.support.served_fakes import SMALL_BUCKETS, engines_of

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(300)]

TIMEOUT_S = 60
ONE_TOKEN = rollout.SamplingParams(max_new_tokens=1)
LOAD = "update_weights_from_disk"
SHARED_MEMORY = Path("/dev/shm")
# Connects, or launches; serves, or pushes; then goes to the phase that a file names, and stays.
TRAINER = """
import json, sys, threading, time
from pathlib import Path
import ray
import torch
import rollout
from tests.support.processes import wait_until

folder, address, how, go = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
if how == "launch":
    config = rollout.RolloutConfig.from_dict(json.loads((folder / "config.json").read_text()))
    run = rollout.launch(config, backend="ray", detached=True)
else:
    began = time.monotonic()
    ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    joined = time.monotonic()
    run = rollout.connect(folder.name, backend="ray")
    connected = time.monotonic()
policy = run["policy"]
pusher = policy.pusher()
weights = {
    name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
    for name, spec in pusher.server.expected.tensors.items()
}
if how == "serve":
    policy.serve().result(60)
elif how == "push":
    policy.push(weights).result(60)
if how != "launch":
    served = time.monotonic()
    print(f"join {joined - began:.2f} s, connect {connected - joined:.2f} s", end=", ")
    print(f"{how} {served - connected:.2f} s")
print("trainer: serves", flush=True)
assert wait_until((folder / go).exists, 600)
phases = policy.phases

def update():
    return phases.update_weights(weights)

class OfRanks:
    def result(self, timeout_s):
        return pusher.push(weights)

onload = [phases.pause_generation, phases.flush_cache, phases.release_memory_occupation,
          phases.onload_weights]
steps = {
    "serving": [],
    "paused": onload[:1],
    "flushed": onload[:2],
    "offloaded": onload[:3],
    "weights_onloaded": onload,
    "weights_updated": [*onload, update],
    "in a push from a rank": [OfRanks],
    "verified": [*onload, update, phases.verify],
    "kv_onloaded": [*onload, update, phases.verify, phases.onload_kv],
    "transaction": [lambda: run.offload()],
}
for step in steps[(folder / go).read_text()]:
    step().result(60)
print("trainer: there", flush=True)
threading.Event().wait()
"""


# Launches a run again and again, each time with other settings; its errors, a line each.
REFUSED = """
import json, sys
import rollout

settings, cases = map(json.loads, sys.argv[1:])
for case in cases:
    detached, gpus = case.pop("detached", True), case.pop("gpus", 0)
    settings["servers"]["policy"]["groups"]["main"]["engine"]["gpus"] = gpus
    config = rollout.RolloutConfig.from_dict({**settings, **case})
    try:
        rollout.launch(config, backend="ray", detached=detached)
    except rollout.RolloutError as error:
        print(f"refused {type(error).__name__}: {error}", flush=True)
"""
# Is killed as soon as its run is placed, while the engines start.
KILLED_WHILE_IT_LAUNCHES = """
import json, os, signal, sys
import rollout

config = rollout.RolloutConfig.from_dict(json.loads(sys.argv[1]))
rollout.launch(config, backend="ray", detached=True, wait=False)
os.kill(os.getpid(), signal.SIGKILL)
"""


class Trained:
    """A detached run, and the trainer that uses it now."""

    def __init__(self, world: RayWorld, folder: Path, **engine: Any) -> None:
        self.world, self.folder = world, folder
        self.num = 0
        self.trainer: Program | None = None
        folder.mkdir()
        group = {"num_engines": 2, "engine": {"kind": "fake", **engine}}
        policy = {"model_path": write_checkpoint(folder), "groups": {"main": group}}
        self.settings: dict[str, Any] = {
            "run_id": folder.name,
            "log_dir": str(folder.parent),
            "cluster": {"address": self.address},
            "servers": {"policy": {**policy, "agents": {"workers": 1}, **SMALL_BUCKETS}},
        }
        (folder / "config.json").write_text(json.dumps(self.settings))

    def launch_and_die(self) -> None:
        with program("-c", KILLED_WHILE_IT_LAUNCHES, json.dumps(self.settings)) as script:
            assert script.finish(TIMEOUT_S) == -signal.SIGKILL, script.output

    def refusals(self, *cases: Mapping[str, Any]) -> list[str]:
        """The errors of launches with these settings in place of those of the run."""
        with program("-c", REFUSED, json.dumps(self.settings), json.dumps(cases)) as script:
            assert script.finish(TIMEOUT_S) == 0, script.output
        lines = [line for line in script.output.splitlines() if line.startswith("refused ")]
        return [line.removeprefix("refused ") for line in lines]

    def owners(self) -> list[str]:
        """The ids of the detached runs of the cluster."""
        actors = self.world.ray.util.list_named_actors(all_namespaces=True)
        prefix = "owner-of-rollout-"
        names = [one["name"] for one in actors if one["name"].startswith(prefix)]
        return sorted(name.removeprefix(prefix) for name in names)

    @property
    def address(self) -> str:
        return str(self.world.ray.get_runtime_context().gcs_address)

    def start(self, how: str) -> Program:
        """A trainer, which gets the engines to serve."""
        assert self.trainer is None
        self.num += 1
        arguments = (str(self.folder), self.address, how, f"go-{self.num}")
        self.trainer = Program("-c", TRAINER, *arguments)
        self.trainer.wait_for("trainer: serves", 2 * TIMEOUT_S)
        return self.trainer

    def go(self, phase: str) -> None:
        part = self.folder / "go"
        part.write_text(phase)
        part.rename(self.folder / f"go-{self.num}")

    def reach(self, phase: str) -> None:
        self.go(phase)
        assert self.trainer is not None
        self.trainer.wait_for("trainer: there", TIMEOUT_S)

    def kill(self) -> int:
        """SIGKILL; its pid."""
        assert self.trainer is not None
        process, self.trainer = self.trainer.process, None
        process.kill()
        process.wait(10)
        return process.pid

    def connect(self) -> DeploymentHandle:
        run = rollout.connect(self.folder.name, backend="ray")
        assert isinstance(run, DeploymentHandle)
        return run

    def record(self) -> JournalRecord:
        return read(self.folder / "policy" / "journal.json")

    def pids(self) -> list[int]:
        return [process.pid for engine in self.record().engines for process in engine.processes]

    def stop(self) -> None:
        done = CliRunner().invoke(app, ["stop", self.folder.name, "--ray", "--yes", "--json"])
        assert done.exit_code == 0, (done.output, done.exception)
        assert json.loads(done.output) == {"stopped": ["policy"]}


def left_by(pid: int) -> list[Path]:
    """Buckets of a trainer in shared memory."""
    return list(SHARED_MEMORY.glob(f"rollout-push-{pid}-*"))


@pytest.fixture(scope="module")
def kept(ray_cluster: RayWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """A run whose engines keep a copy of released weights."""
    run = Trained(ray_cluster, tmp_path_factory.mktemp("runs") / "kept", weights_cpu_backup=True)
    run.start("launch")
    yield run
    if run.trainer is not None:
        run.trainer.close()
    run.stop()


@pytest.mark.parametrize(
    ("phase", "how"),
    [
        ("serving", "serve"),
        ("paused", "serve"),
        ("flushed", "serve"),
        ("offloaded", "serve"),
        ("weights_onloaded", "serve"),
        ("weights_updated", "serve"),
        ("verified", "serve"),
        ("kv_onloaded", "serve"),
        ("offloaded", "push"),
        ("verified", "push"),
        ("transaction", "serve"),
    ],
)
def test_a_trainer_killed_in_a_phase(kept: Trained, phase: str, how: str) -> None:
    engines = kept.pids()
    with kept.connect() as run:
        before = run["policy"].weight_version
    kept.reach(phase)
    killed = kept.kill()
    trainer = kept.start(how)
    print(f"{phase}, then {how}: {trainer.output}")
    assert kept.pids() == engines
    with kept.connect() as run:
        status = run["policy"].status().result(TIMEOUT_S)
        assert (status.phase, status.gate) == ("serving", "open")
        assert status.weight_version == before + (phase in PUSHED) + (how == "push")
        assert run["policy"].generate([1, 2], ONE_TOKEN).result(TIMEOUT_S).output_ids
    assert left_by(killed) == []


PUSHED = ("weights_updated", "verified", "kv_onloaded")


@pytest.mark.parametrize(
    ("how", "num_versions"), [("weights_updated", 2), ("in a push from a rank", 1)]
)
def test_a_trainer_killed_in_a_push(kept: Trained, how: str, num_versions: int) -> None:
    engines = kept.pids()
    with kept.connect() as run, engines_of(run["policy"]) as served:
        before = run["policy"].weight_version
        served["main-1"].hold(LOAD)
        kept.go(how)
        served["main-1"].wait_entered(LOAD)
        killed = kept.kill()
        assert left_by(killed)
        served["main-1"].open(LOAD)
        kept.start("push")
        assert kept.pids() == engines
        status = run["policy"].status().result(TIMEOUT_S)
        assert (status.phase, status.gate) == ("serving", "open")
        # The engines have got all of the first one, and half of the other, which has no number.
        assert status.weight_version == before + num_versions
    assert left_by(killed) == []


@pytest.mark.parametrize(
    ("phase", "operation"),
    [
        ("paused", "pause_generation"),
        ("offloaded", "release_memory_occupation"),
        ("weights_onloaded", "resume_memory_occupation"),
        ("verified", "weights_checker"),
    ],
)
def test_a_trainer_killed_while_a_command_runs(kept: Trained, phase: str, operation: str) -> None:
    engines = kept.pids()
    with kept.connect() as run, engines_of(run["policy"]) as served:
        served["main-0"].hold(operation)
        kept.go(phase)
        served["main-0"].wait_entered(operation)
        kept.kill()
        served["main-0"].open(operation)
        kept.start("serve")
        assert kept.pids() == engines
        status = run["policy"].status().result(TIMEOUT_S)
        assert (status.phase, status.gate) == ("serving", "open")


def test_a_server_lost_after_its_script_comes_back(ray_cluster: RayWorld, kept: Trained) -> None:
    """Ray has what it needs to start it again: the script that launched ended long ago."""
    engines, before = kept.pids(), kept.record().process
    kept.reach("paused")
    kept.kill()
    for lost in ("RouterActor", "AgentsActor", "RolloutServerActor"):
        ray_cluster.crash_newest(lost)
    assert wait_until(lambda: kept.record().process != before, TIMEOUT_S)
    kept.start("serve")
    assert kept.pids() == engines
    with kept.connect() as run:
        assert run["policy"].generate([1, 2], ONE_TOKEN).result(TIMEOUT_S).output_ids


def test_another_launch_of_the_run_is_refused(kept: Trained) -> None:
    way_out = r"rollout\.connect\('kept', backend='ray'\).*rollout stop kept --ray.*another run_id"
    refused = kept.refusals({}, {"detached": False}, {"run_id": "too-large", "gpus": 99})
    assert [text.partition(":")[0] for text in refused] == [
        "ConfigError",
        "ConfigError",
        "PlacementError",
    ]
    assert all(re.search(way_out, text) for text in refused[:2])
    assert "198 CPUs" in refused[2]
    assert kept.owners() == ["kept"]


def test_a_cluster_that_ends_with_the_script_is_refused(kept: Trained) -> None:
    config = rollout.RolloutConfig.from_dict({**kept.settings, "run_id": "other"})
    with pytest.raises(ConfigError, match=r"would end with this script.*ray start --head"):
        rollout.launch(config, backend="ray", detached=True)


def test_a_stop_ends_everything(ray_cluster: RayWorld, tmp_path: Path) -> None:
    actors_before = pids_of_actors(ray_cluster)
    run = Trained(ray_cluster, tmp_path / "gone", weights_cpu_backup=False, gpus=1)
    run.launch_and_die()
    with run.connect() as deployment:
        assert deployment.ready().result(TIMEOUT_S)["policy"].phase == "serving"
    run.start("serve")
    run.reach("offloaded")
    run.kill()
    engines = run.pids()
    with run.connect() as deployment:
        # No engine has weights any more, and only a push gives it some.
        with pytest.raises(LifecycleError, match="push"):
            deployment["policy"].serve().result(TIMEOUT_S)
        group, slots = deployment.placement_group, deployment.trainer_slots
    run.start("push")
    assert run.pids() == engines
    killed = run.kill()
    assert left_by(killed)
    # A rank of the next trainer, which has the GPU of an engine.
    assert [slot.engines[0].engine_id for slot in slots] == ["main-0", "main-1"]
    rank = rank_at(ray_cluster, group, slots[1])
    actors = pids_of_actors(ray_cluster) - actors_before
    assert len(actors) >= 7
    shared = shared_memory_of_run([*actors, *engines])

    run.stop()
    left = pids_of_actors(ray_cluster) - actors_before
    assert left == set(ray_cluster.pids("LaunchOwner")) - actors_before
    assert len(left) == 1
    ray_cluster.ray.kill(rank)
    assert wait_until(lambda: pids_of_actors(ray_cluster) == actors_before, TIMEOUT_S)
    assert ray_cluster.ray.util.placement_group_table(group)["state"] == "REMOVED"
    assert wait_until(lambda: not any(map(psutil.pid_exists, [*actors, *engines])), TIMEOUT_S)
    assert left_by(killed) == [path for path in shared if path.exists()] == []
    assert run.record().is_ended


def test_all_ends_with_the_owner(ray_cluster: RayWorld, tmp_path: Path) -> None:
    actors_before = pids_of_actors(ray_cluster)
    owners = set(ray_cluster.pids("LaunchOwner"))
    run = Trained(ray_cluster, tmp_path / "lost")
    run.start("launch")
    engines = run.pids()
    shared = shared_memory_of_run([*pids_of_actors(ray_cluster) - actors_before, *engines])
    (owner,) = set(ray_cluster.pids("LaunchOwner")) - owners
    os.kill(owner, signal.SIGKILL)
    assert wait_until(lambda: pids_of_actors(ray_cluster) == actors_before, TIMEOUT_S)
    assert wait_until(lambda: not any(map(psutil.pid_exists, engines)), TIMEOUT_S)
    run.kill()
    with pytest.raises(ConfigError, match="no server of run 'lost'"):
        run.connect()
    run.start("launch")  # under the same id
    run.kill()
    run.stop()
    assert [path for path in shared if path.exists()] == []


OF_A_RUN = (
    *("LaunchOwner", "RolloutServerActor", "ServerGroupActor", "RouterActor"),
    *("AgentsActor", "EngineActor"),
)


def pids_of_actors(world: RayWorld) -> set[int]:
    """The processes of the actors of runs."""
    return {pid for name in OF_A_RUN for pid in world.pids(name)}


def shared_memory_of_run(pids: Collection[int]) -> list[Path]:
    """What these processes have mapped, and the folders that their environment names; other tests
    have entries beside theirs."""
    mapped = {path for pid in pids for path in shared_memory_of(pid)}
    variables = (text for pid in pids for text in psutil.Process(pid).environ().values())
    named = {
        Path(name) for text in variables for name in re.findall(rf"{SHARED_MEMORY}/[\w-]+", text)
    }
    return sorted(path for path in mapped | named if path.name.startswith("rollout-"))


def rank_at(world: RayWorld, group: Any, slot: TrainerSlot) -> Any:
    """An actor of a trainer that has the GPU of this slot."""

    class Rank:
        def gpus(self) -> list[int]:
            return world.ray.get_gpu_ids()

    strategy = importlib.import_module("ray.util.scheduling_strategies")
    where = strategy.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=slot.bundle_index
    )
    rank = world.ray.remote(num_cpus=0, num_gpus=1)(Rank).options(scheduling_strategy=where)
    actor = rank.remote()
    assert world.ray.get(actor.gpus.remote(), timeout=TIMEOUT_S) == [slot.gpu_id]
    return actor
