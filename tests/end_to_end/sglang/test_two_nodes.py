"""One real SGLang engine over two nodes of a simulated Ray cluster, placed by our placement.

A rank on each node, one engine to everybody else: offloaded, given new weights, asked, and gone as
a whole when one of its nodes is lost.  The second rank is late, and the first answers for both.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines.process.process_identity import is_running
from engines.protocol import MemoryTag
from rollout.core.types import EngineStatus
from rollout.runtime.handle import ServerHandle
from tests.support.late_ranks import late_ranks
from tests.support.load import PROMPTS
from tests.support.processes import shared_memory_of, wait_until
from tests.support.ray_worlds import NUM_CPUS, RayWorld
from tests.support.real_policy import one_engine, real_config
from tests.support.referee import Answer, Referee

pytestmark = [pytest.mark.sglang, pytest.mark.ray, pytest.mark.timeout(400)]

# More than half of the head has, and all that the other node has: no node has room for both ranks.
CPUS = NUM_CPUS // 2 + 1
# One is all there is, so three times as many probes may fail before it is called dead.
HEALTH = {"probe_interval_s": 0.5, "probe_timeout_s": 2.0, "probes_to_dead": 3}
SLACK_S = 30.0
# As much time as a folder has to disappear before the other rank has opened its files.
LATE_S = 3.0
SEEN_WITHIN_S = (
    3 * HEALTH["probes_to_dead"] * (HEALTH["probe_interval_s"] + HEALTH["probe_timeout_s"])
    + SLACK_S
)


def wide_engine(folder: Path) -> dict[str, Any]:
    # Cores by rank on a node: each rank is the first on its own, so both take core 0.
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", **late_ranks(folder / "late", LATE_S)}
    return one_engine(nodes=2, cpus=CPUS, options={"tp": 2}, env=env)


def the_engine(policy: ServerHandle) -> EngineStatus:
    ((engine,),) = (group.engines for group in policy.status().result(30).groups)
    return engine


def kept(policy: ServerHandle) -> int | None:
    store = policy.status().result(30).store
    assert store is not None
    return store.version


def is_back(policy: ServerHandle, killed: EngineStatus) -> bool:
    now = the_engine(policy)
    return now.state == "serving" and not set(now.processes) & set(killed.processes)


def answers(policy: ServerHandle) -> list[Answer]:
    found = []
    with httpx.Client(base_url=policy.url, timeout=60, trust_env=False) as client:
        for prompt in PROMPTS[:4]:
            sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
            body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
            reply = client.post("/generate", json=body)
            assert reply.status_code == 200, reply.text
            found.append(Answer.of(prompt, reply.json()))
    return found


def test_an_engine_over_two_nodes_goes_through_a_step_and_ends_with_one_of_them(
    ray_cluster: RayWorld, models: list[Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    config = real_config(models[0], tmp_path, {"main": wide_engine(tmp_path)}, health=HEALTH)
    referee = Referee(lambda version: models[version])
    with ray_cluster.more_nodes(1, CPU=CPUS) as (other,):
        handle = ray_cluster.load("launch").launch_ray(config)
        try:
            policy = handle["policy"]
            engine = the_engine(policy)
            assert len(engine.processes) == 2
            for version in (0, 1):
                if version:
                    report = policy.offload().result(60)
                    assert report.freed_bytes > 0
                    assert set(the_engine(policy).released) == set(MemoryTag)
                    policy.push(load_file(models[version] / "model.safetensors")).result(60)
                found = answers(policy)
                assert {span.version for one in found for span in one.spans} == {version}
                assert not referee.findings(found)
            assert referee.could_tell(found, models)

            files = {file for one in engine.processes for file in shared_memory_of(one.pid)}
            ray_cluster.lose_node(other)
            assert wait_until(lambda: bool(the_engine(policy).fence_reason), SEEN_WITHIN_S)
            assert wait_until(lambda: not any(map(is_running, engine.processes)), 30)
            assert files
            assert wait_until(lambda: not any(file.exists() for file in files), 30)
            # There is no place for it now, and no request is kept waiting for one.
            said = "the cluster has no room"
            assert wait_until(lambda: said in the_engine(policy).fence_reason, 60)
            body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
            reply = httpx.post(f"{policy.url}/generate", json=body, trust_env=False)
            assert reply.status_code == 503
        finally:
            handle.stop()


def test_killed_on_one_node_it_comes_back_from_the_store_with_what_was_pushed_last(
    ray_cluster: RayWorld, models: list[Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    weights = {"store": {"spare_bytes": 0, "replicas": 1, "unit_bytes": 50_000}}
    groups = {"main": wide_engine(tmp_path)}
    config = real_config(models[0], tmp_path, groups, health=HEALTH, weights=weights)
    referee = Referee(lambda version: models[version])
    with ray_cluster.more_nodes(1, CPU=CPUS):
        handle = ray_cluster.load("launch").launch_ray(config)
        try:
            policy = handle["policy"]
            policy.push(load_file(models[1] / "model.safetensors")).result(60)
            assert wait_until(lambda: kept(policy) == 1, 30)
            killed = the_engine(policy)
            os.kill(killed.processes[1].pid, signal.SIGKILL)
            assert wait_until(lambda: is_back(policy, killed), 180), the_engine(policy)
            found = answers(policy)
            assert {span.version for one in found for span in one.spans} == {1}
            assert not referee.findings(found)
            assert referee.could_tell(found, models)
        finally:
            handle.stop()
