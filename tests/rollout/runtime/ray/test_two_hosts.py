"""vLLM on a cluster of two addresses: each engine at its node's, behind its keys, or refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from rollout.cli.main import app
from rollout.config import RolloutConfig
from rollout.core.errors import ConfigError
from rollout.core.types import EngineStatus
from rollout.runtime.handle import ServerHandle
from tests.support.engine_keys import Keys
from tests.support.ray_worlds import NUM_CPUS, World
from tests.support.served_fakes import TIMEOUT_S, config
from tests.support.vllm_stub.wire import ServedStubs

# More than half of what the first node has, and all that the other has: no node has room for both.
CPUS = NUM_CPUS // 2 + 1
OTHER = "127.0.0.2"
CONTROL = ("/pause", "/resume", "/sleep", "/wake_up", "/update_weights", "/collective_rpc")
SAMPLING = ("/inference/v1/generate", "/v1/completions")


def two_engines(folder: Path, **engine: Any) -> RolloutConfig:
    of_engine = {"kind": "vllm", "cpus": CPUS, "gpus": 0, **engine}
    return config(folder, {"main": {"num_engines": 2, "engine": of_engine}})


@contextmanager
def served(world: World, whole: RolloutConfig) -> Iterator[ServerHandle]:
    handle = world.load("launch").launch_ray(whole, launcher=ServedStubs())
    try:
        yield handle["policy"]
    finally:
        handle.stop()


def engines_of(policy: ServerHandle) -> list[EngineStatus]:
    return list(policy.status().result(TIMEOUT_S).groups[0].engines)


def status_of(engine: EngineStatus, path: str, auth: Any = None) -> int:
    url = f"{engine.endpoint.url}{path}"
    return httpx.post(url, json={}, auth=auth, timeout=TIMEOUT_S, trust_env=False).status_code


def test_each_engine_listens_at_its_node_and_takes_nothing_without_a_key(
    world: World, tmp_path: Path
) -> None:
    with (
        world.more_nodes(1, OTHER, CPU=CPUS),
        served(world, two_engines(tmp_path)) as policy,
    ):
        engines = engines_of(policy)
        addresses = {node["NodeManagerAddress"] for node in world.ray.nodes() if node["Alive"]}
        assert {engine.endpoint.host for engine in engines} == addresses
        assert OTHER in addresses
        assert len(addresses) == 2
        for engine in engines:
            for path in (*CONTROL, *SAMPLING, "/not-known-yet"):
                assert status_of(engine, path) == 401, path
            assert status_of(engine, "/health") != 401
            assert status_of(engine, "/reset_prefix_cache", Keys(engine)) == 200
        replies = [policy.generate([1, 2, 3]) for _ in range(8)]
        assert all(reply.result(TIMEOUT_S).output_ids for reply in replies)


def test_without_a_key_they_are_refused_before_they_are_placed(
    world: World, tmp_path: Path
) -> None:
    whole = two_engines(tmp_path, key=False)
    with (
        world.more_nodes(1, OTHER, CPU=CPUS),
        pytest.raises(ConfigError, match="no key of its own") as refused,
        served(world, whole),
    ):
        raise AssertionError("it was launched")
    assert refused.value.setting == "servers.policy.groups.main.engine.key"
    assert not world.live_actors()


def test_on_one_host_they_need_none(world: World, tmp_path: Path) -> None:
    whole = config(tmp_path, {"main": {"engine": {"kind": "vllm", "key": False, "gpus": 0}}})
    with served(world, whole) as policy:
        [engine] = engines_of(policy)
        assert engine.endpoint.host == "127.0.0.1"
        assert status_of(engine, "/reset_prefix_cache") == 200


@pytest.mark.parametrize(("key", "num"), [(False, 1), (True, 0)])
def test_validate_says_where_a_key_is_needed(tmp_path: Path, key: bool, num: int) -> None:
    whole = two_engines(tmp_path, key=key)
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(whole.model_dump(mode="json", exclude_unset=True)))
    result = CliRunner().invoke(app, ["validate", str(path), "--json"])
    notes = json.loads(result.output)["notes"]
    found = [note for note in notes if "with Ray and several hosts this is refused" in note]
    assert len(found) == num
