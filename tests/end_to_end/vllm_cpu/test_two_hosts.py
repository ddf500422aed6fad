"""Real vLLM on two addresses of a Ray cluster: pushed to, asked, and closed to strangers."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import psutil
import pytest

from engines.http.key_check import OPEN_PATHS
from rollout.core.types import EngineStatus
from tests.support.engine_keys import Keys
from tests.support.load import PROMPTS
from tests.support.ray_worlds import NUM_CPUS, RayWorld
from tests.support.real_policy import one_engine, real_config

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

# More than half of what the first node has, and all that the other has: no node has room for both.
CPUS = NUM_CPUS // 2 + 1
# So many threads would starve the machine: the engine's cores are only those of Ray's books.
THREADS = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# Else gloo listens where the name of the host leads.
INTERFACE = {"GLOO_SOCKET_IFNAME": "lo"}
OTHER = "127.0.0.2"


def listening(engine: EngineStatus) -> set[tuple[str, int]]:
    """TCP addresses at which its processes listen."""
    assert engine.pid is not None
    process = psutil.Process(engine.pid)
    found = set()
    for member in (process, *process.children(recursive=True)):
        for connection in member.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                found.add((connection.laddr.ip, connection.laddr.port))
    return found


def test_engines_of_two_hosts_are_pushed_to_and_listen_nowhere_without_a_key(
    ray_cluster: RayWorld, models: list[Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    group = one_engine("vllm", cpus=CPUS, env=THREADS | INTERFACE) | {"num_engines": 2}
    config = real_config(models[0], tmp_path, {"main": group}, agents={"workers": 0})
    with ray_cluster.more_nodes(1, OTHER, CPU=CPUS):
        handle = ray_cluster.load("launch").launch_ray(config)
        try:
            policy = handle["policy"]
            engines = list(policy.status().result(60).groups[0].engines)
            hosts = {engine.endpoint.host for engine in engines}
            assert len(hosts) == 2
            assert OTHER in hosts
            policy.offload().result(120)
            policy.push(load_file(models[1] / "model.safetensors")).result(120)
            replies = [policy.generate(prompt) for prompt in PROMPTS[:8]]
            versions = {span.version for one in replies for span in one.result(120).weight_versions}
            assert versions == {"1"}
            for engine in engines:
                check_closed(engine)
                reachable = {address for address in listening(engine) if address[0] != "127.0.0.1"}
                assert reachable <= {(engine.endpoint.host, engine.endpoint.port)}
        finally:
            handle.stop()


def check_closed(engine: EngineStatus) -> None:
    """Only its own address takes calls, and none without a key."""
    with httpx.Client(base_url=engine.endpoint.url, timeout=60, trust_env=False) as client:
        paths = set(client.get("/openapi.json", auth=Keys(engine)).json()["paths"])
        assert {"/pause", "/update_weights", "/collective_rpc", "/inference/v1/generate"} <= paths
        assert "/health" in paths
        for path in paths - OPEN_PATHS:
            assert client.post(path, json={}).status_code == 401, path
    host = "127.0.0.1" if engine.endpoint.host == OTHER else OTHER
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, engine.endpoint.port), 5)
