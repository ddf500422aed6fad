"""Several servers on the same GPUs: one transaction, whatever happens in its middle."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from engines.protocol.errors import EngineUnreachable
from rollout.control.deployment import Deployment
from rollout.core.errors import ActorLost, LifecycleError, PhaseFailed
from tests.support.builders import ServerBench, push, started_server
from tests.support.virtual_time import virtual_time


class Pair:
    """A policy that is pushed and a frozen reference, on the same GPUs."""

    def __init__(self, policy: ServerBench, reference: ServerBench) -> None:
        self.policy, self.reference = policy, reference
        self.deployment = Deployment({"policy": policy.server, "reference": reference.server})

    @property
    def engines(self) -> list:
        return self.policy.engines + self.reference.engines

    def got(self, operation: str) -> set[str]:
        return {engine.engine_id for engine in self.engines if operation in engine.operations()}

    async def phases(self) -> dict[str, str]:
        return {name: one.phase for name, one in (await self.deployment.status()).items()}


async def pair(folder: Path, **lifecycle: str) -> Pair:
    for name in ("policy", "reference"):
        (folder / name).mkdir()
    policy = await started_server(
        folder / "policy", {"actor": {"min_engines": 0}}, lifecycle=lifecycle
    )
    reference = await started_server(folder / "reference", {"judge": {}}, update="frozen")
    return Pair(policy, reference)


BOTH = {"actor-0", "judge-0"}


@pytest.mark.parametrize(
    ("held", "next_one"),
    [
        ("pause_generation", "flush_cache"),
        ("flush_cache", "release_memory_occupation"),
    ],
)
async def test_no_server_goes_ahead_of_the_slowest(
    tmp_path: Path, held: str, next_one: str
) -> None:
    servers = await pair(tmp_path)
    gate = servers.reference["judge-0"].hold(held)
    offloading = asyncio.create_task(servers.deployment.offload())
    await gate.entered.wait()
    for _ in range(50):
        await asyncio.sleep(0)
    assert servers.got(held) == BOTH
    assert servers.got(next_one) == set()
    gate.open()
    await offloading
    assert await servers.phases() == dict.fromkeys(("policy", "reference"), "offloaded")


async def test_none_serves_before_every_one_can(tmp_path: Path) -> None:
    servers = await pair(tmp_path)
    await servers.deployment.offload()
    gate = servers.reference["judge-0"].hold("weight_version")
    onloading = asyncio.create_task(servers.deployment.serve({"policy": push(1)}))
    await gate.entered.wait()
    for _ in range(50):
        await asyncio.sleep(0)
    assert servers.got("continue_generation") == set()
    assert servers.policy.router.gate != "open"
    gate.open()
    reports = await onloading
    assert {name: report.weight_version for name, report in reports.items()} == {
        "policy": 1,
        "reference": 0,
    }
    assert (servers.policy.router.gate, servers.reference.router.gate) == ("open", "open")
    assert not any(engine.weights_are_garbage for engine in servers.engines)


async def test_a_transition_repeated_sends_nothing(tmp_path: Path) -> None:
    servers = await pair(tmp_path)
    await servers.deployment.offload()
    before = [engine.operations() for engine in servers.engines]
    await servers.deployment.offload()
    assert [engine.operations() for engine in servers.engines] == before
    await servers.deployment.serve({"policy": push(1)})
    before = [engine.operations() for engine in servers.engines]
    await servers.deployment.serve({})
    assert [engine.operations() for engine in servers.engines] == before
    assert not any(engine.is_dead for engine in servers.engines)


async def test_an_offload_that_failed_on_one_server_can_be_taken_up_again(tmp_path: Path) -> None:
    servers = await pair(tmp_path, on_failure="raise")
    servers.policy["actor-0"].fail_next("flush_cache", EngineUnreachable("connection broke"))
    with pytest.raises(PhaseFailed, match="actor-0: flush"):
        await servers.deployment.offload()
    assert servers.got("release_memory_occupation") == set()
    # The one that did its part has no requests either that wait for the rest.
    assert (servers.policy.router.gate, servers.reference.router.gate) == ("closed", "closed")
    await servers.deployment.offload()
    assert await servers.phases() == dict.fromkeys(("policy", "reference"), "offloaded")
    assert servers.reference["judge-0"].operations().count("flush_cache") == 1


async def test_a_push_for_a_server_that_is_not_there_is_refused_before_anything(
    tmp_path: Path,
) -> None:
    servers = await pair(tmp_path)
    await servers.deployment.offload()
    with pytest.raises(ValueError, match=r"no server 'polcy'.* known: policy, reference"):
        await servers.deployment.serve({"polcy": push(1)})
    assert servers.got("resume_memory_occupation") == set()


async def test_a_push_that_is_missing_for_one_server_is_refused_before_memory_is_resumed(
    tmp_path: Path,
) -> None:
    servers = await pair(tmp_path)
    await servers.deployment.offload()
    with pytest.raises(LifecycleError, match="discarded the weights of group actor"):
        await servers.deployment.serve({})
    assert servers.got("resume_memory_occupation") == set()
    assert await servers.phases() == dict.fromkeys(("policy", "reference"), "offloaded")


async def test_one_transaction_waits_for_the_one_before_it(tmp_path: Path) -> None:
    servers = await pair(tmp_path)
    gate = servers.reference["judge-0"].hold("flush_cache")
    offloading = asyncio.create_task(servers.deployment.offload())
    await gate.entered.wait()
    onloading = asyncio.create_task(servers.deployment.serve({"policy": push(1)}))
    for _ in range(50):
        await asyncio.sleep(0)
    assert servers.got("begin_weight_update") == set()
    gate.open()
    await offloading
    await onloading
    assert await servers.phases() == dict.fromkeys(("policy", "reference"), "serving")
    assert servers.got("release_memory_occupation") == BOTH


@pytest.mark.parametrize("operation", ["pause_generation", "flush_cache"])
async def test_after_an_offload_that_failed_on_one_server_all_can_be_given_weights_and_serve(
    tmp_path: Path, operation: str
) -> None:
    servers = await pair(tmp_path, on_failure="raise")
    servers.reference["judge-0"].fail_next(operation, EngineUnreachable("connection broke"))
    servers.reference.server._recovery.probe_soon()
    with pytest.raises(PhaseFailed, match="judge-0"):
        await servers.deployment.offload()
    with pytest.raises(PhaseFailed, match="no engine can serve: engine judge-0"):
        await servers.deployment.serve({"policy": push(1)})
    assert servers.reference.router.gate == "closed"
    await servers.reference.server.remove_engine("judge-0")
    await servers.reference.server.add_engine("judge-0")
    await servers.deployment.serve({})
    assert (servers.policy.router.gate, servers.reference.router.gate) == ("open", "open")


async def test_stop_ends_the_engines_of_every_server(tmp_path: Path) -> None:
    servers = await pair(tmp_path)
    await servers.deployment.stop()
    assert all(process.is_stopped for process in servers.policy.launcher.processes.values())
    assert all(process.is_stopped for process in servers.reference.launcher.processes.values())


class StoppedServer:
    """A ``RolloutServer`` whose stop ends as the test chooses."""

    def __init__(self, ending: Exception | None = None, *, hangs: bool = False) -> None:
        self.ending, self.hangs = ending, hangs
        self.is_stopped = False

    async def stop(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if self.ending is not None:
            raise self.ending
        self.is_stopped = True


@virtual_time
async def test_a_stop_ends_in_time_and_says_which_servers_are_lost_or_hang(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lost, hung, well = StoppedServer(ActorLost("gone")), StoppedServer(hangs=True), StoppedServer()
    servers = {"lost": lost, "hung": hung, "well": well}
    with caplog.at_level(logging.ERROR):
        await Deployment(servers, stop_budget_s=60.0).stop()
    assert well.is_stopped
    assert "server lost did not stop by itself: gone" in caplog.text
    assert "server hung did not stop by itself: TimeoutError" in caplog.text
    assert asyncio.get_running_loop().time() == 60.0
