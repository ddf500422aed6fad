"""A server that watches over its engines: fakes, virtual time, and the real code between them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.fake import FakeEngine, FakeLauncher
from engines.fake.engine.faults import CallGate
from engines.fake.launcher import make_engine
from engines.launch import EngineSpec
from engines.protocol import Endpoint, MemoryTag
from engines.protocol.errors import EngineHung, EngineNotReady, EngineUnreachable
from rollout.control.group.health_probe import EngineProbe, GroupProbe
from rollout.control.recovery.health_tracker import GroupTerms
from rollout.control.recovery.monitor import RecoveryMonitor
from rollout.control.server import server as server_module
from rollout.core.command_lock import CommandLock
from rollout.core.errors import LifecycleError, PhaseFailed
from rollout.core.types import EngineStatus
from rollout.rules.health import ProbeResult, RecoveryState, engines_in
from rollout.rules.lifecycle import Command, Phase
from tests.support.builders import RecordingRouter, ServerBench, make_server, push, server_config
from tests.support.virtual_time import pass_time, virtual_time

HEALTH = {
    "probe_interval_s": 1.0,
    "probe_timeout_s": 0.5,
    "probes_to_dead": 3,
    "backoff_s": 10.0,
    "max_restarts": 3,
}
LATE = EngineHung("no answer")
ONE = {"main": {"num_engines": 1, "needs_offload": False}}
TWO = {"main": {"num_engines": 2}}
KEEPING = {"main": {"num_engines": 2, "needs_offload": False}}


@asynccontextmanager
async def watched(
    folder: Path, groups: Mapping[str, Any] = TWO, *, update: str = "full", **more: Any
) -> AsyncIterator[ServerBench]:
    """A server that serves and watches its engines."""
    server = {name: more.pop(name, None) for name in ("verify", "launcher")}
    bench = make_server(folder, groups, update=update, health=HEALTH | more, **server)
    await bench.server.start()
    try:
        yield bench
    finally:
        await bench.server.stop()


async def engine(bench: ServerBench, engine_id: str) -> EngineStatus:
    status = await bench.server.status()
    every = (one for group in status.groups for one in group.engines)
    return next(one for one in every if one.engine_id == engine_id)


async def until(is_so: Callable[[], Any], timeout_s: float = 200.0) -> None:
    """Virtual seconds pass until ``is_so``."""
    async with asyncio.timeout(timeout_s):
        while not is_so():
            await pass_time(0.05)


def launches(bench: ServerBench, engine_id: str) -> int:
    return sum(spec.engine_id == engine_id for spec in bench.launcher.specs)


def state(bench: ServerBench, engine_id: str) -> str:
    return bench.router.states[engine_id]


def fail_probes(bench: ServerBench, engine_id: str, num: int) -> None:
    for _ in range(num):
        bench[engine_id].fail_next("is_ready", LATE)


# -- dead or alive ------------------------------------------------------------------------------


@virtual_time
async def test_one_failed_probe_changes_nothing(tmp_path: Path) -> None:
    async with watched(tmp_path) as bench:
        fail_probes(bench, "main-0", 1)
        await pass_time(20)
        assert launches(bench, "main-0") == 1
        assert bench.router.epochs == [1]


@virtual_time
async def test_flapping_probes_do_not_kill(tmp_path: Path) -> None:
    async with watched(tmp_path) as bench:
        for _ in range(10):
            fail_probes(bench, "main-0", 2)
            await pass_time(4)
        assert launches(bench, "main-0") == 1
        assert not bench["main-0"].is_dead


@virtual_time
async def test_a_suspect_gets_no_new_requests_and_comes_back_with_its_answer(
    tmp_path: Path,
) -> None:
    async with watched(tmp_path) as bench:
        fail_probes(bench, "main-0", 2)
        await until(lambda: state(bench, "main-0") == "draining")
        assert state(bench, "main-1") == "serving"
        await until(lambda: state(bench, "main-0") == "serving")
        assert launches(bench, "main-0") == 1


@virtual_time
async def test_an_engine_that_hangs_is_found_killed_and_replaced(tmp_path: Path) -> None:
    async with watched(tmp_path) as bench:
        frozen = bench["main-0"]
        frozen.hold("is_ready")
        await until(lambda: launches(bench, "main-0") == 2)
        assert frozen.death_reason == "killed"
        assert bench["main-0"] is not frozen


@virtual_time
async def test_when_all_are_late_at_once_nobody_is_killed_soon(tmp_path: Path) -> None:
    async with watched(tmp_path) as bench:
        fail_probes(bench, "main-0", 5)
        fail_probes(bench, "main-1", 5)
        await pass_time(20)
        assert set(bench.router.states.values()) == {"serving"}
        assert len(bench.launcher.specs) == 2


@virtual_time
async def test_a_busy_engine_is_not_dead(tmp_path: Path) -> None:
    async with watched(tmp_path) as bench:
        gate = bench["main-0"].hold("generate")
        busy = asyncio.create_task(bench["main-0"].generate(input_ids=[1]))
        await pass_time(60)
        gate.open()
        assert (await busy).output_ids
        assert launches(bench, "main-0") == 1


@virtual_time
async def test_an_offloaded_engine_is_neither_probed_nor_killed(tmp_path: Path) -> None:
    async with watched(tmp_path) as bench:
        await bench.server.offload()
        for one in bench.engines:
            one.calls.clear()
            one.hold("is_ready")
        await pass_time(600)
        assert [one.operations() for one in bench.engines] == [[], []]
        await bench.server.push(push(1))
        assert len(bench.launcher.specs) == 2


@virtual_time
async def test_a_paused_engine_need_not_be_ready(tmp_path: Path) -> None:
    async with watched(tmp_path) as bench:
        await bench.server.run(Command.PAUSE_GENERATION)
        await pass_time(60)
        assert "is_ready" in bench["main-0"].operations()
        assert len(bench.launcher.specs) == 2


# -- out of routing -----------------------------------------------------------------------------


@virtual_time
async def test_a_dead_engine_leaves_routing_before_it_is_killed_or_replaced(
    tmp_path: Path,
) -> None:
    async with watched(tmp_path) as bench:
        launch = bench.launcher.hold("main-0")
        bench["main-0"].die("out of memory")
        await launch.entered.wait()
        assert state(bench, "main-0") in ("dead", "fenced")
        assert state(bench, "main-1") == "serving"
        launch.open()


@virtual_time
async def test_what_the_router_reports_is_looked_at_at_once(tmp_path: Path) -> None:
    async with watched(tmp_path, probe_interval_s=1000.0) as bench:
        await pass_time(1)
        bench["main-0"].die("killed by the kernel")
        bench.router.fail("main-0")
        await until(lambda: launches(bench, "main-0") == 2, timeout_s=1)


@virtual_time
async def test_an_engine_whose_connection_broke_comes_back_after_probe_and_weight_check(
    tmp_path: Path,
) -> None:
    async with watched(tmp_path) as bench:
        bench["main-0"].calls.clear()
        bench.router.fail("main-0")
        await until(lambda: state(bench, "main-0") == "serving")
        assert bench["main-0"].operations()[:2] == ["is_ready", "weight_version"]
        assert launches(bench, "main-0") == 1


@virtual_time
async def test_an_engine_that_came_back_with_other_weights_is_replaced(tmp_path: Path) -> None:
    async with watched(tmp_path) as bench:
        await bench["main-0"].update_weight_version("77")
        bench.router.fail("main-0")
        await until(lambda: launches(bench, "main-0") == 2)


@virtual_time
async def test_an_engine_that_answers_probes_and_loses_requests_is_replaced(
    tmp_path: Path,
) -> None:
    async with watched(tmp_path) as bench:
        for _ in range(3):
            await until(lambda: state(bench, "main-0") == "serving")
            bench.router.fail("main-0")
            await pass_time(2)
        await until(lambda: launches(bench, "main-0") == 2)


# -- the restart --------------------------------------------------------------------------------


@virtual_time
async def test_at_version_0_a_restarted_engine_joins_at_once(tmp_path: Path) -> None:
    async with watched(tmp_path) as bench:
        bench["main-0"].die("segfault")
        await until(lambda: launches(bench, "main-0") == 2)
        await until(lambda: state(bench, "main-0") == "serving", timeout_s=1)
        assert (await engine(bench, "main-0")).weight_version == 0


@virtual_time
async def test_at_version_0_requests_are_held_until_a_restarted_engine_is_verified(
    tmp_path: Path,
) -> None:
    gates: list[CallGate] = []

    def make(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
        made = make_engine(spec, endpoint)
        gates.append(made.hold("weights_checker"))
        return made

    async with watched(tmp_path, ONE, launcher=FakeLauncher(make)) as bench:
        bench["main-0"].die("segfault")
        await until(lambda: len(gates) == 2)
        await gates[1].entered.wait()
        await bench.server.publish_members()  # as each round of probes may do
        assert (await bench.server.status()).gate == "holding"
        (restarted,) = bench.router.members
        assert (restarted.state, restarted.may_return) == ("fenced", True)
        gates[1].open()
        await until(lambda: state(bench, "main-0") == "serving")
        assert (await bench.server.status()).gate == "open"


@virtual_time
async def test_no_request_waits_for_a_restarted_engine_that_only_a_push_makes_serve(
    tmp_path: Path,
) -> None:
    async with watched(tmp_path, ONE, update="lora") as bench:
        await bench.server.push(push(1))
        bench["main-0"].die("segfault")
        await until(lambda: launches(bench, "main-0") == 2)
        await until(lambda: not bench.router.members[0].may_return, timeout_s=10)
        assert state(bench, "main-0") == "fenced"


@virtual_time
async def test_a_stale_engine_is_never_in_routing_before_it_is_verified(tmp_path: Path) -> None:
    async with watched(tmp_path) as bench:
        await bench.server.push(push(1))
        bench["main-0"].die("segfault")
        await until(lambda: launches(bench, "main-0") == 2)
        await pass_time(100)
        assert state(bench, "main-0") == "fenced"
        assert (await engine(bench, "main-0")).is_stale
        gate = bench["main-0"].hold("weight_version")
        updating = asyncio.create_task(bench.server.push(push(2)))
        await gate.entered.wait()
        assert state(bench, "main-0") == "fenced"
        gate.open()
        await updating
        assert state(bench, "main-0") == "serving"
        assert (await engine(bench, "main-0")).weight_version == 2


@virtual_time
async def test_a_restarted_engine_joins_at_the_next_step_of_a_group_that_offloads(
    tmp_path: Path,
) -> None:
    async with watched(tmp_path) as bench:
        await bench.server.push(push(1))
        bench["main-0"].die("segfault")
        await until(lambda: launches(bench, "main-0") == 2)
        await bench.server.offload()
        assert bench["main-0"].released
        await bench.server.push(push(2))
        assert bench.router.states == {"main-0": "serving", "main-1": "serving"}
        await pass_time(50)
        assert bench.router.states == {"main-0": "serving", "main-1": "serving"}


@pytest.mark.parametrize("update", ["partial", "lora"])
def test_a_push_of_some_tensors_does_not_make_a_stale_engine_whole(tmp_path, update) -> None:
    names = ("lm_head.weight",)

    @virtual_time
    async def run() -> None:
        async with watched(tmp_path, update=update) as bench:
            await bench.server.push(push(1, names))
            bench["main-0"].die("segfault")
            await until(lambda: launches(bench, "main-0") == 2)
            await bench.server.offload()
            await bench.server.push(push(2, names))
            assert state(bench, "main-0") == "fenced"
            assert (await engine(bench, "main-0")).state == "stale"
            assert state(bench, "main-1") == "serving"
            await bench.server.offload()
            await bench.server.serve()
            assert launches(bench, "main-0") == 2

    run()


def save(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")


@virtual_time
async def test_saved_weights_of_the_published_version_make_it_serve_without_a_push(
    tmp_path: Path,
) -> None:
    path, by_version = tmp_path / "saved", {"by": "version"}
    more = {"weights_path": str(path / "{version}"), "verify": by_version}
    async with watched(tmp_path, **more) as bench:
        await bench.server.push(push(1))
        bench["main-0"].die("segfault")
        await until(lambda: launches(bench, "main-0") == 2)
        await pass_time(5)
        assert state(bench, "main-0") == "fenced"
        save(path / "1")
        await until(lambda: state(bench, "main-0") == "serving", timeout_s=60)
        assert (await engine(bench, "main-0")).weight_version == 1


@virtual_time
async def test_saved_weights_that_differ_from_what_the_others_hold_are_not_served(
    tmp_path: Path,
) -> None:
    path = tmp_path / "saved"
    save(path / "1")
    async with watched(tmp_path, weights_path=str(path / "{version}")) as bench:
        await bench.server.push(push(1))
        bench["main-0"].die("segfault")
        async with asyncio.timeout(200):
            why = "differs from that of an engine"
            while why not in (await engine(bench, "main-0")).fence_reason:
                await pass_time(0.05)
        assert state(bench, "main-0") == "fenced"


@virtual_time
async def test_the_second_restart_in_a_row_waits_for_the_backoff(tmp_path: Path) -> None:
    async with watched(tmp_path) as bench:
        bench.launcher.fail_next("main-0", EngineNotReady("no such device"))
        bench["main-0"].die("segfault")
        clock = asyncio.get_running_loop().time
        await until(lambda: launches(bench, "main-0") == 2)
        failed_at = clock()
        await until(lambda: launches(bench, "main-0") == 3)
        assert 9.9 <= clock() - failed_at < 11.5
        await until(lambda: state(bench, "main-0") == "serving")


@virtual_time
async def test_past_the_cap_the_engine_stays_fenced_and_says_so(tmp_path: Path) -> None:
    async with watched(tmp_path, max_backoff_s=10.0) as bench:
        bench["main-0"].die("segfault")
        for wanted in (2, 3, 4):
            await until(lambda wanted=wanted: launches(bench, "main-0") == wanted)
            bench["main-0"].die("again")
        await pass_time(500)
        assert launches(bench, "main-0") == 4
        assert "given up after 3 restarts" in (await engine(bench, "main-0")).fence_reason
        assert state(bench, "main-1") == "serving"


@virtual_time
async def test_the_place_is_used_again_only_when_the_kill_is_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(tmp_path) as bench:
        process = bench.launcher.processes["main-0"]

        async def survive() -> None:
            raise EngineHung("a process is still there 10 s after SIGKILL")

        with monkeypatch.context() as patch:
            patch.setattr(process, "kill", survive)
            bench["main-0"].hold("is_ready")
            await until(lambda: state(bench, "main-0") == "fenced")
            await pass_time(5)
            assert launches(bench, "main-0") == 1
        await until(lambda: launches(bench, "main-0") == 2)
        assert process.num_kills >= 1


@virtual_time
async def test_an_engine_that_failed_a_command_is_replaced(tmp_path: Path) -> None:
    async with watched(tmp_path) as bench:
        bench["main-0"].fail_next("flush_cache", EngineUnreachable("reset"))
        await bench.server.push(push(1))
        assert state(bench, "main-0") == "fenced"
        await until(lambda: launches(bench, "main-0") == 2)
        await bench.server.push(push(2))
        assert state(bench, "main-0") == "serving"


@virtual_time
async def test_several_restart_side_by_side(tmp_path: Path) -> None:
    async with watched(tmp_path, {"main": {"num_engines": 4}}) as bench:
        gates = [bench.launcher.hold(f"main-{index}") for index in (1, 2, 3)]
        for index in (1, 2, 3):
            bench[f"main-{index}"].die("power")
        await asyncio.gather(*(gate.entered.wait() for gate in gates))
        assert state(bench, "main-0") == "serving"
        for gate in gates:
            gate.open()
        await until(lambda: set(bench.router.states.values()) == {"serving"})


class AttachedGroup:
    """A group over one engine of somebody else's, which is away until ``is_back``."""

    def __init__(self) -> None:
        self.is_back = True
        self.is_fenced = False
        self.num_tries = 0

    async def probe(self, budget_s: float, distrusted: Any = ()) -> GroupProbe:
        finding = ProbeResult.ANSWERED if self.is_back else ProbeResult.EXITED
        found = EngineProbe("main-0", ProbeResult.FENCED if self.is_fenced else finding, "away")
        return GroupProbe(True, (found,))

    async def fence(self, engine_id: str, reason: str) -> None:
        self.is_fenced = True

    async def boot(self, engine_id: str, *, memory_is_free: bool = False) -> bool:
        self.num_tries += 1
        if not self.is_back:
            await pass_time(1000)
        return True

    async def admit(self, engine_id: str) -> bool:
        self.is_fenced = False
        return True

    async def readmit(self, engine_id: str, version: int) -> bool:
        return True


class Groups:
    def __init__(self, main: AttachedGroup) -> None:
        self.groups = {"main": main}
        self.lost: dict[str, Any] = {}


class AnyServer:
    base_version = 3

    def phases(self) -> dict[str, Phase]:
        return {"main": Phase.SERVING}

    async def publish_members(self) -> None: ...


@virtual_time
async def test_an_attached_engine_is_waited_for_without_end_and_without_holding_the_lock() -> None:
    group, lock = AttachedGroup(), CommandLock(60.0)
    recovery = RecoveryMonitor(
        "policy",
        server_config({"main": {}}, health={**HEALTH, "max_backoff_s": 20.0}),
        Groups(group),
        {"main": GroupTerms(needs_offload=False, min_engines=1, has_processes=False)},
        AnyServer(),
        RecordingRouter().failures,
        lock,
    )
    recovery.start({"main": ["main-0"]})
    await pass_time(1)
    group.is_back = False
    await pass_time(1000)
    assert group.num_tries > 20
    clock = asyncio.get_running_loop().time
    asked_at = clock()
    async with lock.held("offload"):
        assert clock() - asked_at <= 1.0
    group.is_back = True
    await until(lambda: not group.is_fenced)
    await recovery.stop()


class LentGroup(AttachedGroup):
    """Its memory is the trainer's, which its server does not know yet."""

    async def boot(self, engine_id: str, *, memory_is_free: bool = False) -> bool:
        self.num_tries += 1
        await asyncio.sleep(0)
        return False


@virtual_time
async def test_a_boot_that_its_group_refuses_is_tried_once_a_probe() -> None:
    group = LentGroup()
    recovery = RecoveryMonitor(
        "policy",
        server_config({"main": {}}, health=HEALTH),
        Groups(group),
        {"main": GroupTerms(needs_offload=True, min_engines=1)},
        AnyServer(),
        RecordingRouter().failures,
        CommandLock(60.0),
    )
    recovery.start({"main": ["main-0"]})
    group.is_back = False
    await pass_time(20)
    assert 10 < group.num_tries <= 21
    await recovery.stop()


# -- recovery and transitions -------------------------------------------------------------------


@virtual_time
async def test_recovery_waits_for_a_running_transition(tmp_path: Path) -> None:
    async with watched(tmp_path) as bench:
        gate = bench["main-1"].hold("pause_generation")
        updating = asyncio.create_task(bench.server.push(push(1)))
        await gate.entered.wait()
        bench["main-0"].die("segfault")
        await pass_time(20)
        assert launches(bench, "main-0") == 1
        gate.open()
        await updating
        await until(lambda: launches(bench, "main-0") == 2)


@virtual_time
async def test_no_step_waits_for_a_boot(tmp_path: Path) -> None:
    async with watched(tmp_path, KEEPING) as bench:
        launch = bench.launcher.hold("main-0")
        bench["main-0"].die("segfault")
        await launch.entered.wait()
        started = asyncio.get_running_loop().time()
        for version in range(1, 4):
            await bench.server.offload()
            await bench.server.push(push(version))
        assert asyncio.get_running_loop().time() - started < 1
        assert (await engine(bench, "main-0")).state == "booting"
        launch.open()
        await bench.server.offload()
        await bench.server.push(push(4))
        await until(lambda: launches(bench, "main-0") == 2)
        await bench.server.push(push(5))
        assert (await engine(bench, "main-0")).weight_version == 5
        assert state(bench, "main-0") == "serving"


@virtual_time
async def test_a_boot_is_ended_before_the_trainer_gets_the_memory(tmp_path: Path) -> None:
    async with watched(tmp_path, max_restarts=1) as bench:
        launch = bench.launcher.hold("main-0")
        bench["main-0"].die("segfault")
        await launch.entered.wait()
        started = asyncio.get_running_loop().time()
        await bench.server.offload()
        assert asyncio.get_running_loop().time() - started < 1
        assert launch.num_waiting == 0
        assert (await engine(bench, "main-0")).state == "fenced"
        await pass_time(100)
        assert launches(bench, "main-0") == 2  # not a third while the trainer has the memory
        await bench.server.push(push(1))
        await until(lambda: launch.num_waiting == 1)  # the boot that was ended was no restart
        launch.open()
        await until(lambda: bench["main-0"].paused is None and not bench["main-0"].is_dead)
        assert launches(bench, "main-0") == 3


@virtual_time
async def test_an_engine_that_has_booted_is_released_with_the_others(tmp_path: Path) -> None:
    async with watched(tmp_path) as bench:
        launch = bench.launcher.hold("main-0")
        bench["main-0"].die("segfault")
        await launch.entered.wait()
        gate = bench["main-1"].hold("flush_cache")
        offloading = asyncio.create_task(bench.server.offload())
        await gate.entered.wait()
        launch.open()
        groups = bench.server._recovery.tracker.groups
        await until(lambda: engines_in(RecoveryState.BOOTED, groups()))
        gate.open()
        await offloading
        assert bench["main-0"].released == bench["main-1"].released == set(MemoryTag)
        assert launches(bench, "main-0") == 2


@virtual_time
async def test_a_removal_ends_the_boot_on_its_slot(tmp_path: Path) -> None:
    async with watched(tmp_path) as bench:
        launch = bench.launcher.hold("main-0")
        bench["main-0"].die("segfault")
        await launch.entered.wait()
        await bench.server.remove_engine("main-0")
        assert launch.num_waiting == 0
        launch.open()
        await pass_time(100)
        assert launches(bench, "main-0") == 2
        await bench.server.add_engine("main-0")
        assert launches(bench, "main-0") == 3


@virtual_time
async def test_a_command_that_waits_too_long_names_recovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "lock_timeout_s", lambda _: 3.0)
    async with watched(tmp_path) as bench:
        fence = asyncio.Event()

        async def slow(engine_id: str, reason: str) -> None:
            await fence.wait()

        bench.groups["main"].fence = slow
        bench["main-0"].die("segfault")
        await until(lambda: bench.server._lock.owner == "recover")
        with pytest.raises(LifecycleError, match="cannot offload: recover has been running"):
            await bench.server.offload()
        fence.set()


@virtual_time
async def test_another_engine_leaves_routing_while_one_is_being_restarted(tmp_path: Path) -> None:
    async with watched(tmp_path, {"main": {"num_engines": 3}}) as bench:
        launch = bench.launcher.hold("main-0")
        bench["main-0"].die("segfault")
        await launch.entered.wait()
        other = bench.launcher.hold("main-1")
        bench["main-1"].die("segfault")
        await other.entered.wait()  # two may boot at a time
        assert state(bench, "main-1") in ("dead", "fenced")
        other.open()
        await until(lambda: state(bench, "main-1") == "serving")
        launch.open()


@virtual_time
async def test_nothing_is_restarted_while_the_trainer_has_the_memory(tmp_path: Path) -> None:
    async with watched(tmp_path) as bench:
        await bench.server.offload()
        bench["main-0"].die("killed by the kernel")
        await pass_time(100)
        assert launches(bench, "main-0") == 1
        assert (await engine(bench, "main-0")).fence_reason
        await bench.server.push(push(1))
        assert launches(bench, "main-0") == 1
        await until(lambda: launches(bench, "main-0") == 2)


@virtual_time
async def test_the_only_engine_of_a_group_comes_back_with_the_memory(tmp_path: Path) -> None:
    async with watched(tmp_path, {"main": {"num_engines": 1}}) as bench:
        await bench.server.offload()
        bench["main-0"].die("killed by the kernel")
        await pass_time(100)
        assert launches(bench, "main-0") == 1
        await bench.server.push(push(1))
        assert launches(bench, "main-0") == 2
        assert state(bench, "main-0") == "serving"
        assert not bench["main-0"].weights_are_garbage


@virtual_time
async def test_a_step_that_lost_its_only_engine_can_be_taken_up_again(tmp_path: Path) -> None:
    async with watched(tmp_path, {"main": {"num_engines": 1}}) as bench:
        bench["main-0"].fail_next("release_memory_occupation", EngineUnreachable("reset"))
        with pytest.raises(PhaseFailed):
            await bench.server.offload()
        await bench.server.offload()  # the engine was ended, and holds no memory
        assert launches(bench, "main-0") == 1
        await bench.server.push(push(1))
        assert launches(bench, "main-0") == 2
        assert state(bench, "main-0") == "serving"


@virtual_time
async def test_a_group_that_keeps_its_gpus_is_mended_while_the_trainer_trains(
    tmp_path: Path,
) -> None:
    groups = {"shared": {"num_engines": 1}, "apart": {"num_engines": 2, "needs_offload": False}}
    async with watched(tmp_path, groups) as bench:
        await bench.server.offload()
        bench["apart-0"].die("segfault")
        await until(lambda: launches(bench, "apart-0") == 2)
        assert bench["apart-0"].paused is not None
        await bench.server.push(push(1))
        assert set(bench.router.states.values()) == {"serving"}


@virtual_time
async def test_a_new_engine_is_led_to_where_the_others_are_in_an_onload(tmp_path: Path) -> None:
    async with watched(tmp_path, {"main": {"num_engines": 1}}) as bench:
        await bench.server.offload()
        await bench.server.run(Command.ONLOAD_WEIGHTS)
        bench["main-0"].die("segfault")
        await until(lambda: launches(bench, "main-0") == 2)
        assert bench["main-0"].released == {MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH}
        await bench.server.push(push(1))
        assert state(bench, "main-0") == "serving"


@virtual_time
async def test_a_late_answer_during_a_command_is_not_held_against_the_engine(
    tmp_path: Path,
) -> None:
    async with watched(tmp_path) as bench:
        gate = bench["main-1"].hold("pause_generation")
        updating = asyncio.create_task(bench.server.push(push(1)))
        await gate.entered.wait()
        fail_probes(bench, "main-0", 8)
        await pass_time(10)
        gate.open()
        await updating
        await pass_time(10)
        assert launches(bench, "main-0") == 1


@virtual_time
async def test_what_was_found_of_the_old_engine_is_not_held_against_the_new(
    tmp_path: Path,
) -> None:
    async with watched(tmp_path) as bench:
        launch = bench.launcher.hold("main-0")
        bench["main-0"].die("segfault")
        await launch.entered.wait()
        slow = bench["main-1"].hold("is_ready")
        await slow.entered.wait()  # main-0 has been looked at; the look is not over
        launch.open()
        await until(lambda: state(bench, "main-0") == "serving", timeout_s=0.4)
        assert slow.num_waiting == 1
        slow.open()
        await pass_time(20)
        assert launches(bench, "main-0") == 2


@virtual_time
async def test_an_older_view_of_the_engines_never_gets_a_newer_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(tmp_path, recover=False) as bench:
        group, waits = bench.groups["main"], [5.0, 0.0]
        look = group.status

        async def slow_answer() -> Any:
            seen = await look()
            await pass_time(waits.pop(0))
            return seen

        with monkeypatch.context() as patch:
            patch.setattr(group, "status", slow_answer)
            older = asyncio.create_task(bench.server.publish_members())
            await pass_time(1)
            await group.fence("main-0", "it was slow")
            await bench.server.publish_members()
            await older
        assert state(bench, "main-0") == "fenced"


# -- stop and mishaps ---------------------------------------------------------------------------


@virtual_time
async def test_stop_during_a_restart_leaves_nothing(tmp_path: Path) -> None:
    async with watched(tmp_path) as bench:
        launch = bench.launcher.hold("main-0")
        bench["main-0"].die("segfault")
        await launch.entered.wait()
        await bench.server.stop()
        assert launch.num_waiting == 0
        assert len(asyncio.all_tasks()) == 1
        launch.open()
        await pass_time(100)
        assert all(one.is_dead for one in bench.engines)


@virtual_time
async def test_a_bad_round_is_logged_and_the_next_one_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched(tmp_path) as bench:
        bench["main-0"].die("segfault")
        with monkeypatch.context() as patch:
            patch.setattr(bench.router, "set_members", _refuse)
            await until(lambda: "the router is not running" in caplog.text)
        assert "server policy: recovery: _watch failed" in caplog.text
        await until(lambda: launches(bench, "main-0") == 2)
        await until(lambda: state(bench, "main-0") == "serving")


async def _refuse(*args: Any) -> None:
    raise RuntimeError("the router is not running")


@virtual_time
async def test_a_group_that_cannot_be_asked_says_nothing_about_its_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(tmp_path) as bench:
        with monkeypatch.context() as patch:
            patch.setattr(bench.groups["main"], "probe", _refuse)
            await pass_time(60)
        assert set(bench.router.states.values()) == {"serving"}
        assert len(bench.launcher.specs) == 2


@virtual_time
async def test_without_recovery_a_failed_engine_stays_fenced(tmp_path: Path) -> None:
    async with watched(tmp_path, recover=False) as bench:
        bench["main-0"].fail_next("flush_cache", EngineUnreachable("reset"))
        await bench.server.push(push(1))
        await pass_time(500)
        assert launches(bench, "main-0") == 1
        assert len(asyncio.all_tasks()) == 1
