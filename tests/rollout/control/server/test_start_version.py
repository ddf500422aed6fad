"""Engines that already hold weights of some version, because somebody else launched them."""

from pathlib import Path
from typing import Any

import pytest

from engines.fake import FakeEngine
from engines.fake.http_fake import HttpFakeLauncher
from engines.protocol import Endpoint
from engines.protocol.spec import EngineSpec
from rollout.core.errors import WeightMismatch
from rollout.runtime.local import launch_local
from tests.support.builders import make_server, push
from tests.support.served_fakes import config


def versioned(**versions: str) -> Any:
    def make(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
        version = versions.get(spec.engine_id.replace("-", "_"), "7")
        return FakeEngine(spec.engine_id, endpoint=endpoint, weight_version=version)

    return make


async def test_the_version_that_all_engines_have_is_adopted(tmp_path: Path) -> None:
    bench = make_server(tmp_path)
    bench.launcher._make = versioned()
    status = await bench.server.start(7)
    assert status.weight_version == 7
    assert bench.router.gates[-1] == {"state": "open", "weight_version": 7}
    await bench.server.offload()
    with pytest.raises(WeightMismatch, match="7 is not newer than 7"):
        await bench.server.push(push(7))
    await bench.server.push(push(8))
    assert (await bench.server.status()).weight_version == 8
    await bench.server.stop()


async def test_different_versions_are_refused_with_the_way_out(tmp_path: Path) -> None:
    bench = make_server(tmp_path)
    bench.launcher._make = versioned(apart_0="0", shared_0="0")
    with pytest.raises(WeightMismatch, match=r"shared-1 starts at weight version 7, not 0") as no:
        await bench.server.start()
    assert "/update_weight_version" in str(no.value)
    assert all(process.is_stopped for process in bench.launcher.processes.values())


@pytest.mark.parametrize(("version", "needed"), [(0, 8), (6, 8), (7, None), (8, 8), (9, 9)])
async def test_a_version_that_nobody_expected_serves_only_after_a_push(
    tmp_path: Path, version: int, needed: int | None
) -> None:
    bench = make_server(tmp_path)
    bench.launcher._make = versioned()
    status = await bench.server.start(version)
    assert status.weight_version == 7
    if needed is None:
        assert status.gate == "open"
    else:
        assert status.gate == "closed"
        reason = bench.router.gates[-1]["reason"]
        assert "launch with expect_version=7 if these are right" in reason
        await bench.server.offload()
        await bench.server.push(push(needed))
        assert (await bench.server.status()).gate == "open"
    await bench.server.stop()


@pytest.mark.parametrize("update", ["frozen", "lora", "partial"])
async def test_weights_that_no_push_replaces_serve_with_a_warning(
    tmp_path: Path, update: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make_server(
        tmp_path, {"main": {"num_engines": 2, "needs_offload": False}}, update=update
    )
    bench.launcher._make = versioned()
    assert (await bench.server.start()).gate == "open"
    assert "check that they are right" in caplog.text
    await bench.server.stop()


async def test_a_name_of_somebody_is_not_called_0(tmp_path: Path) -> None:
    bench = make_server(tmp_path)
    bench.launcher._make = versioned(shared_0="0", shared_1="step-1200", apart_0="0")
    with pytest.raises(WeightMismatch, match=r"shared-1 .* None, not 0.*somebody has named"):
        await bench.server.start()


@pytest.mark.torch
def test_a_handle_counts_on_from_the_adopted_version(tmp_path: Path) -> None:
    launcher = HttpFakeLauncher(versioned())
    handle = launch_local(config(tmp_path, {"main": {}}), launcher=launcher)
    try:
        with pytest.raises(WeightMismatch, match="the push lacks"):
            handle["policy"].phases.make_push({})
        assert handle["policy"].weight_version == 7
    finally:
        handle.stop()
