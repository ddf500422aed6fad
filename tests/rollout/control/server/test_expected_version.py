"""A launch that expects a version: nothing serves before a push of it, whatever is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

import rollout
from engines.fake.http_fake import HttpFakeLauncher
from engines.protocol.errors import EngineUnreachable
from rollout.control.deployment import Deployment
from rollout.core.errors import PhaseFailed, RolloutError, WeightMismatch
from rollout.rules.lifecycle import Command
from rollout.runtime.local import launch_local
from tests.support.builders import ServerBench, make_server, push
from tests.support.served_fakes import config

EXPECTED = r"expects weight version 57 or a newer one, and the engines hold 0"


async def expecting(folder: Path, version: int = 57, **more: Any) -> ServerBench:
    bench = make_server(folder, {"main": {"num_engines": 2}}, **more)
    await bench.server.start(version)
    return bench


async def assert_shut(bench: ServerBench) -> None:
    status = await bench.server.status()
    assert status.gate in ("closed", "holding")
    assert "open" not in [gate["state"] for gate in bench.router.gates]


async def test_the_gate_says_what_it_waits_for_and_opens_with_the_push(tmp_path: Path) -> None:
    bench = await expecting(tmp_path)
    await assert_shut(bench)
    assert bench.router.gate == "closed"
    assert "expects weight version 57" in bench.router.gates[-1]["reason"]
    assert bench.router.gates[-1]["needs_push"] == 57
    await bench.server.push(push(57))
    assert bench.router.gates[-1] == {"state": "open", "weight_version": 57}
    await bench.server.push(push(58))
    await bench.server.stop()


async def test_an_older_push_is_refused_and_nothing_is_sent(tmp_path: Path) -> None:
    bench = await expecting(tmp_path)
    with pytest.raises(WeightMismatch, match=f"weight version 1 is too old: .*{EXPECTED}"):
        await bench.server.push(push(1))
    assert not any("update" in name for one in bench.engines for name in one.operations())
    await assert_shut(bench)
    await bench.server.stop()


@pytest.mark.parametrize("command", ["serve", "offload and serve", "phases", "failed push"])
async def test_no_command_opens_it_without_the_push(tmp_path: Path, command: str) -> None:
    bench = await expecting(tmp_path)
    server = bench.server
    if command == "serve":
        with pytest.raises(PhaseFailed, match=EXPECTED):
            await server.serve()
    elif command == "offload and serve":
        await server.offload()
        with pytest.raises(RolloutError):
            await server.serve()
    elif command == "phases":
        await server.run(Command.PAUSE_GENERATION)
        with pytest.raises(PhaseFailed, match=EXPECTED):
            await server.run(Command.CONTINUE_GENERATION)
    else:
        for engine in bench.engines:
            engine.fail_next("update_weights_from_tensor", EngineUnreachable("connection broke"))
        with pytest.raises(PhaseFailed):
            await server.push(push(57))
    await assert_shut(bench)
    # Behind a step that is half done, a push may be under way.
    is_between_steps = command == "serve"
    assert bench.router.gates[-1].get("needs_push") == (57 if is_between_steps else None)
    assert not any("continue_generation" in one.operations() for one in bench.engines)
    await server.stop()


async def test_a_whole_step_of_a_trainer_that_continues(tmp_path: Path) -> None:
    bench = await expecting(tmp_path)
    await bench.server.offload()
    assert bench.router.gate == "holding"  # requests wait for the push
    await bench.server.push(push(58))
    assert bench.router.gates[-1] == {"state": "open", "weight_version": 58}
    await bench.server.stop()


async def test_only_servers_that_get_pushes_wait(tmp_path: Path) -> None:
    for name in ("policy", "judge"):
        (tmp_path / name).mkdir()
    policy = make_server(tmp_path / "policy", {"main": {}})
    judge = make_server(tmp_path / "judge", {"main": {}}, update="frozen")
    servers = {"policy": policy.server, "judge": judge.server}
    deployment = Deployment(servers, stacked=["policy"], expect_version=3)
    statuses = await deployment.start()
    assert {name: one.gate for name, one in statuses.items()} == {
        "policy": "holding",
        "judge": "open",
    }
    assert "open" not in [gate["state"] for gate in policy.router.gates]
    await deployment.serve({"policy": push(3)})
    assert policy.router.gates[-1] == {"state": "open", "weight_version": 3}
    await deployment.stop()


def test_requests_get_the_reason_until_the_push(tmp_path: Path) -> None:
    settings = config(tmp_path, {"main": {}})
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
    with launch_local(settings, launcher=HttpFakeLauncher(), expect_version=57) as deployment:
        policy = deployment["policy"]
        reply = httpx.post(f"{policy.url}/generate", json=body, timeout=30, trust_env=False)
        assert reply.status_code == 503
        refusal = reply.json()["error"]
        assert "expects weight version 57" in refusal["reason"]
        assert (refusal["gate"], refusal["needs_push"]) == ("closed", 57)
        policy.push(push(57)).result(60)
        reply = httpx.post(f"{policy.url}/generate", json=body, timeout=30, trust_env=False)
        assert reply.json()["meta_info"]["weight_version"] == "57"


@pytest.mark.parametrize("version", [-1, "57", None])
def test_a_wrong_version_is_named(tmp_path: Path, version: Any) -> None:
    with pytest.raises(ValueError, match=r"expect_version = .*a weight version, from 0"):
        rollout.launch(config(tmp_path, {"main": {}}), expect_version=version)
