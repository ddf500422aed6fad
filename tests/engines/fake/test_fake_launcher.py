"""Launched, measured, stopped and killed like a real engine's processes."""

import asyncio
from pathlib import Path

import pytest

from engines.fake import FakeEngine, FakeLauncher
from engines.launch import EngineLauncher, EngineSpec, RunningEngine
from engines.protocol import Engine, MemoryTag, PauseMode
from engines.protocol.errors import EngineNotReady, EngineUnreachable
from rollout.config import RolloutConfig
from rollout.core.errors import RolloutError
from rollout.runtime.local import launch_local
from tests.support.waits import until


def spec(engine_id: str = "main-0", **more) -> EngineSpec:
    return EngineSpec(engine_id, "embedded", "/models/tiny", "/logs/engine.log", **more)


async def test_the_fakes_are_what_the_protocols_ask_for() -> None:
    launcher: EngineLauncher = FakeLauncher()
    process: RunningEngine = await launcher.launch(spec())
    engine: Engine = FakeEngine()
    assert process.endpoint.url.startswith("http://127.0.0.1:")
    assert await engine.is_ready()


async def test_an_engine_is_made_as_its_spec_says() -> None:
    launcher = FakeLauncher()
    await launcher.launch(spec(weights_cpu_backup=True, weight_version=7))
    info = await launcher["main-0"].server_info()
    assert (info.enable_memory_saver, info.enable_weights_cpu_backup) == (True, True)
    assert await launcher["main-0"].weight_version() == "7"
    assert (await launcher["main-0"].model_info()).model_path == "/models/tiny"


async def test_each_engine_is_found_at_its_own_endpoint() -> None:
    launcher = FakeLauncher()
    one, other = [await launcher.launch(spec(name)) for name in ("a", "b")]
    assert one.pid != other.pid
    assert launcher.connect(one.endpoint, "a") is launcher["a"]
    assert launcher.connect(other.endpoint, "b") is launcher["b"]


async def test_released_memory_is_seen_from_outside() -> None:
    launcher = FakeLauncher()
    process = await launcher.launch(spec())
    before = await process.resident_bytes()
    await process.engine.release_memory_occupation([MemoryTag.KV_CACHE])
    assert await process.resident_bytes() == before - before // 3
    await process.kill()
    assert await process.resident_bytes() == 0


async def test_after_a_stop_it_is_gone_and_its_log_tells_what_it_did() -> None:
    process = await FakeLauncher().launch(spec())
    await process.engine.pause_generation()
    assert await process.is_alive()
    assert not await process.stop(10)
    assert not await process.is_alive()
    assert (await process.log_tail()).splitlines()[-1] == "ended: stopped"
    assert "pause_generation" in await process.log_tail()


async def test_frozen_requests_make_it_deaf_to_sigterm() -> None:
    process = await FakeLauncher().launch(spec())
    process.engine.hold("generate")
    asking = asyncio.create_task(process.engine.generate(input_ids=[1]))
    await until(lambda: len(process.engine.in_flight) == 1)
    await process.engine.pause_generation(PauseMode.RETRACT)
    assert await process.stop(10)
    with pytest.raises(EngineUnreachable, match="killed"):
        await asking


async def test_a_launch_can_be_made_to_fail_once() -> None:
    launcher = FakeLauncher()
    launcher.fail_next("main-0", EngineNotReady("out of memory"))
    with pytest.raises(EngineNotReady):
        await launcher.launch(spec())
    assert launcher.processes == {}
    assert await (await launcher.launch(spec())).is_alive()


async def test_a_launch_can_be_held() -> None:
    launcher = FakeLauncher()
    gate = launcher.hold("main-0")
    launching = asyncio.create_task(launcher.launch(spec()))
    await gate.entered.wait()
    assert launcher.processes == {}
    gate.open()
    assert (await launching).engine.engine_id == "main-0"


def test_the_log_of_a_process_says_which_tensor_ended_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its process is killed as soon as the push has failed; the log is there before."""
    torch = pytest.importorskip("torch")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")  # nothing to check the push against
    policy = {
        "model_path": str(tmp_path / "model"),
        "health": {"recover": False},
        "groups": {"main": {"engine": {"kind": "fake"}}},
    }
    config = RolloutConfig.from_dict(
        {"log_dir": str(tmp_path / "logs"), "servers": {"policy": policy}}
    )
    with launch_local(config) as deployment, pytest.raises(RolloutError):
        deployment["policy"].push({"lm_head.weight": torch.zeros(3, 5)}, 1).result(60)
    (fenced,) = [one.getMessage() for one in caplog.records if "fenced: " in one.getMessage()]
    assert "ended: tensor 'lm_head.weight' has shape [16, 8], and [3, 5] came" in fenced
