"""A step over vLLM: its calls in order, and what its foolish replies would have hidden."""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engines.fake import FakeEngine
from engines.fake.engine.fake_weights import DEFAULT_TENSORS
from engines.fake.http_fake import HttpFakeLauncher, ServedFake
from engines.fake.launcher import make_engine
from engines.launch import EngineSpec
from engines.protocol import Endpoint, WorkerType
from engines.protocol.errors import EngineUnreachable
from rollout.config import RolloutConfig
from rollout.control.server.gate_control import member
from rollout.core.errors import LifecycleError, PhaseFailed
from rollout.rules.lifecycle import Command
from rollout.runtime.local import launch_local
from tests.support.builders import make_group, push, write_checkpoint
from tests.support.vllm_stub.asking import endless
from tests.support.vllm_stub.stub import StubVllm
from tests.support.vllm_stub.wire import ServedStubs, StubLauncher

STEP = [
    "pause_generation",
    "flush_cache",
    "release_memory_occupation",
    "resume_memory_occupation",
    "is_paused",
    "begin_weight_update",
    "update_weight_version",
    "update_weights_from_tensor",
    "update_weights_from_tensor",
    "end_weight_update",
    "flush_cache",
    "weight_version",
    "weights_checker",
    "resume_memory_occupation",
    # Awake, the server has resumed by itself.
    "pause_generation",
    "continue_generation",
]


async def test_a_step_pauses_again_before_it_continues() -> None:
    group, launcher = make_group(2, launcher=StubLauncher())
    await group.start()
    engines = [launcher["main-0"], launcher["main-1"]]
    before = [len(engine.calls) for engine in engines]
    for command in (
        Command.PAUSE_GENERATION,
        Command.FLUSH_CACHE,
        Command.RELEASE_MEMORY_OCCUPATION,
        Command.ONLOAD_WEIGHTS,
    ):
        await group.run(command)
    await group.run(Command.UPDATE_WEIGHTS, push=push(1, num_buckets=2))
    await group.run(Command.VERIFY, version=1)
    await group.run(Command.ONLOAD_KV)
    assert all(engine.paused for engine in engines)
    await group.run(Command.CONTINUE_GENERATION)
    for engine, num in zip(engines, before, strict=True):
        assert engine.operations()[num:] == STEP
        assert not engine.weights_are_garbage
        assert engine.paused is None


async def test_a_named_transport_that_vllm_does_not_take_is_refused_at_the_start() -> None:
    group, _ = make_group(1, transport="cuda_ipc", launcher=StubLauncher())
    refusal = "weights.transport = cuda_ipc does not reach engine main-0: "
    with pytest.raises(PhaseFailed, match=refusal):
        await group.start()


async def test_a_push_is_refused_before_the_pause() -> None:
    group, launcher = make_group(1, launcher=StubLauncher())
    await group.start()
    before = len(launcher["main-0"].calls)
    with pytest.raises(LifecycleError, match="update_weights"):
        await group.run(Command.UPDATE_WEIGHTS, push=push(1))
    assert len(launcher["main-0"].calls) == before


async def test_an_engine_that_somebody_resumes_in_a_push_dies_and_is_fenced() -> None:
    """Only the router's gate keeps requests from it; this one is sent past the router."""
    group, launcher = make_group(2, launcher=StubLauncher())
    await group.start()
    for command in (Command.PAUSE_GENERATION, Command.FLUSH_CACHE):
        await group.run(command)
    engine = launcher["main-0"]
    assert isinstance(engine, StubVllm)
    gate = engine.hold("update_weights_from_tensor")
    pushing = asyncio.create_task(group.run(Command.UPDATE_WEIGHTS, push=push(1)))
    await gate.entered.wait()
    await engine.answer("/resume", {})
    with pytest.raises(EngineUnreachable, match="a request runs while a weight update is open"):
        await engine.answer("/inference/v1/generate", endless())
    gate.open()
    lost, left = (await pushing).engines
    assert (lost.engine_id, left.failure) == ("main-0", "")
    assert "a request runs while a weight update is open" in lost.failure
    await group.run(Command.VERIFY, version=1)
    assert launcher["main-1"].weights.digests != launcher["main-0"].weights.digests


async def test_weights_that_sleep_at_level_2_are_not_served_without_a_push() -> None:
    """vLLM itself answers every call of this with 200, and serves garbage."""
    group, launcher = make_group(1, launcher=StubLauncher())
    await group.start()
    for command in (
        Command.PAUSE_GENERATION,
        Command.FLUSH_CACHE,
        Command.RELEASE_MEMORY_OCCUPATION,
        Command.ONLOAD_WEIGHTS,
    ):
        await group.run(command)
    with pytest.raises(Exception, match="verify"):
        await group.run(Command.VERIFY, version=0)
    assert launcher["main-0"].paused is not None


class Forgetful(StubVllm):
    """Engine main-1 takes every tensor of a push but one, as vLLM does when a name is unknown to
    its loader."""

    def load(self, info: Mapping[str, Any]) -> None:
        name = DEFAULT_TENSORS[0].name
        before = self.weights.digests[name]
        super().load(info)
        if self.engine_id == "main-1":
            self.weights.digests[name] = before


def forgetful(spec: EngineSpec, endpoint: Endpoint) -> StubVllm:
    return Forgetful(spec.engine_id, endpoint=endpoint)


async def test_an_engine_that_lost_a_tensor_of_a_push_is_found() -> None:
    """vLLM keeps the old tensor and says nothing; the engines then differ."""
    group, _ = make_group(3, launcher=StubLauncher(forgetful), min_engines=3)
    await group.start()
    for command in (Command.PAUSE_GENERATION, Command.FLUSH_CACHE):
        await group.run(command)
    await group.run(Command.UPDATE_WEIGHTS, push=push(1))
    with pytest.raises(PhaseFailed, match=f"main-1.*{DEFAULT_TENSORS[0].name}"):
        await group.run(Command.VERIFY, version=1)


async def test_a_server_without_the_plugin_gets_no_pushes() -> None:
    launcher = StubLauncher(without_plugin)
    group, _ = make_group(1, launcher=launcher)
    with pytest.raises(Exception, match=r"backend is nccl.*rollout_shm"):
        await group.start()
    frozen, _ = make_group(1, launcher=StubLauncher(without_plugin), update="frozen")
    await frozen.start()


def without_plugin(spec: EngineSpec, endpoint: Endpoint) -> StubVllm:
    engine = StubVllm(spec.engine_id, endpoint=endpoint)
    engine.has_plugin = False
    return engine


def in_mode(mode: str) -> StubLauncher:
    """Servers whose ``--logprobs-mode`` somebody has chosen."""

    def make(spec: EngineSpec, endpoint: Endpoint) -> StubVllm:
        engine = StubVllm(spec.engine_id, endpoint=endpoint)
        engine.logprobs_mode = mode
        return engine

    return StubLauncher(make)


@pytest.mark.parametrize(
    ("mode", "kinds"),
    [("processed_logprobs", ["cut", "full"]), ("raw_logprobs", ["full", "raw"])],
)
async def test_the_router_gets_the_mode_that_a_server_reports(mode: str, kinds: list[str]) -> None:
    group, _ = make_group(1, launcher=in_mode(mode))
    await group.start()
    (engine,) = (await group.status()).engines
    rule = member(WorkerType.REGULAR, engine, {}, 0).logprobs
    assert [rule.kind_of(one) for one in ({"top_p": 0.5}, {"temperature": 0.3})] == kinds


async def test_a_server_without_log_probs_is_refused() -> None:
    group, _ = make_group(1, launcher=in_mode("raw_logits"))
    with pytest.raises(PhaseFailed, match="engine main-0: logprobs-mode is raw_logits"):
        await group.start()


class BothLauncher:
    """Fakes of the kind that a spec names."""

    def __init__(self) -> None:
        self.engines: dict[str, FakeEngine] = {}

    async def launch(self, spec: EngineSpec) -> ServedFake:
        launcher = ServedStubs() if spec.kind == "vllm" else HttpFakeLauncher(make_engine)
        running = await launcher.launch(spec)
        self.engines[spec.engine_id] = running.engine
        return running


def test_both_engines_serve_in_one_deployment_and_one_server(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    vllm: dict[str, Any] = {"engine": {"kind": "vllm", "gpus": 0, "python": sys.executable}}
    config = RolloutConfig.from_dict(
        {
            "log_dir": str(tmp_path),
            "servers": {
                "policy": {
                    "model_path": write_checkpoint(tmp_path / "model"),
                    "groups": {"main": vllm, "old": {"engine": {"kind": "fake"}}},
                },
                "judge": {
                    "model_path": write_checkpoint(tmp_path / "judge"),
                    "weights": {"update": "frozen"},
                    "groups": {"score": {"engine": {"kind": "fake"}}},
                },
            },
        }
    )
    launcher = BothLauncher()
    with launch_local(config, launcher=launcher) as deployment:  # type: ignore[arg-type]
        policy = deployment["policy"]
        tensors = {one.name: torch.randn(one.shape) for one in DEFAULT_TENSORS}
        policy.offload().result(30)
        policy.push(tensors, 1).result(30)
        assert {type(engine) for engine in launcher.engines.values()} == {FakeEngine, StubVllm}
        replies = [ask(policy.status().result(30).router_url) for _ in range(4)]
        assert {reply["meta_info"]["weight_version"] for reply in replies} == {"1"}
        served = {name for name, engine in launcher.engines.items() if engine._num_requests}
        assert {"main-0", "old-0"} <= {name.removeprefix("policy-") for name in served}


def ask(url: str) -> Any:
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.loads(reply.read())
