"""``check_push_path``: what is sent, and that weights which differ never serve."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.fake import FakeEngine, FakeTensor, pack_tensors
from engines.fake.engine.fake_weights import DEFAULT_TENSORS, fingerprint_of
from engines.fake.engine.faults import die, hang, lose, reject
from engines.launch import EngineSpec
from engines.protocol import Endpoint
from rollout.core.errors import LifecycleError, PhaseFailed, WeightMismatch
from rollout.rules.lifecycle import Command
from rollout.runtime.local import launch_local
from rollout.weights.push.weight_push import WeightPush
from tests.support.builders import (
    TENSOR_NAMES,
    ServerBench,
    make_server,
    manifest,
    push,
    server_config,
    started_server,
)
from tests.support.served_fakes import launched
from tests.support.virtual_time import pass_time, virtual_time

ONE = {"main": {"num_engines": 1, "needs_offload": False}}
TWO = {"main": {"num_engines": 2}}


def same(version: int = 1, swapped: Sequence[str] = ()) -> WeightPush:
    """The weights that fakes load; the contents of ``swapped`` are exchanged."""
    source = dict(zip(swapped, reversed(swapped), strict=True))
    tensors = {
        one.name: FakeTensor(
            one.shape, fingerprint=fingerprint_of(("checkpoint", source.get(one.name, one.name)))
        )
        for one in DEFAULT_TENSORS
    }
    return WeightPush(version, manifest(), [pack_tensors(tensors)])


SWAPPED = same(1, (TENSOR_NAMES[0], TENSOR_NAMES[2]))


def checks(engine: FakeEngine) -> list[str]:
    return [
        call.arguments["action"] for call in engine.calls if call.operation == "weights_checker"
    ]


def states(bench: ServerBench) -> set[str]:
    return {
        one.fence_reason and "fenced"
        for group in bench.groups.values()
        for one in group._engines.members()
    }


async def test_a_right_path_is_proved_and_serves_under_the_new_version(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, TWO)
    report = await bench.server.check_push_path(same())
    for engine in bench.engines:
        asked = ["checksum", "snapshot", "reset_tensors", "compare", "checksum", "checksum"]
        assert checks(engine) == asked
        assert not engine.weights_are_garbage
        assert await engine.weight_version() == "1"
    assert (bench.router.gate, bench.server.weight_version) == ("open", 1)
    assert {phase.command for phase in report.reports} >= {"snapshot", "update_weights", "verify"}
    await bench.server.push(push(2))
    await bench.server.stop()


async def test_weights_that_differ_never_serve_and_are_named(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, TWO)
    with pytest.raises(PhaseFailed) as caught:
        await bench.server.check_push_path(SWAPPED)
    for name in (TENSOR_NAMES[0], TENSOR_NAMES[2]):
        assert name in str(caught.value)
    assert TENSOR_NAMES[1] not in str(caught.value)
    assert states(bench) == {"fenced"}
    assert all(engine.is_dead for engine in bench.engines)
    assert bench.router.gate == "closed"
    assert bench.server.weight_version == 0
    await bench.server.stop()


async def test_a_rank_whose_comparison_is_not_answered_never_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's first rank answers a comparison for all."""
    monkeypatch.setattr(FakeEngine, "_compare", lambda self: None)
    bench = await started_server(tmp_path, TWO)
    message = f"tensor '{TENSOR_NAMES[2]}' is not what it was before the push"
    with pytest.raises(PhaseFailed, match=message):
        await bench.server.check_push_path(SWAPPED)
    assert states(bench) == {"fenced"}
    assert bench.router.gate == "closed"
    await bench.server.stop()


@pytest.mark.parametrize("fault", [die(), lose(), lose(executed=True), reject(500), hang()])
@pytest.mark.parametrize("action", ["reset_tensors", "update_weights_from_tensor", "compare"])
@virtual_time
async def test_an_engine_that_fails_after_the_snapshot_is_fenced_and_the_other_serves(
    tmp_path: Path, action: str, fault: Any
) -> None:
    bench = await started_server(tmp_path, TWO)
    nth = {"reset_tensors": 3, "compare": 4}.get(action, 1)
    operation = "weights_checker" if nth > 1 else action
    bench["main-0"].faults.strike(operation, fault, nth=nth)
    await bench.server.check_push_path(same())
    assert bench["main-0"].is_dead
    assert bench.router.states["main-1"] == "serving"
    await bench.server.stop()


async def lost_bucket() -> bytes:
    raise OSError("the trainer is gone")


async def test_a_push_that_breaks_off_after_the_reset_fences_all(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, TWO)
    with pytest.raises(PhaseFailed, match="the trainer is gone"):
        await bench.server.check_push_path(replace(same(), buckets=[lost_bucket()]))
    assert all(engine.is_dead for engine in bench.engines)
    await bench.server.stop()


async def test_after_a_failed_check_the_engines_come_back_with_their_checkpoint(
    tmp_path: Path,
) -> None:
    bench = await started_server(tmp_path, ONE, health={"backoff_s": 1e-6})
    with pytest.raises(PhaseFailed):
        await bench.server.check_push_path(SWAPPED)
    await bench.server._recovery.probe_once()
    await bench.server._recovery.recover()
    await bench.server.check_push_path(same())
    assert (bench.router.gate, bench.server.weight_version) == ("open", 1)
    await bench.server.stop()


GROUPS = [ONE, TWO, {"main": {"num_engines": 2, "needs_offload": False}}]


@pytest.mark.parametrize(
    ("remedy", "wait_s"),
    [
        ("serve", 30),
        *((name, wait_s) for name in ("repeat", "setting", "push") for wait_s in (0, 30)),
    ],
)
@pytest.mark.parametrize("groups", GROUPS)
@virtual_time
async def test_what_the_error_of_a_failed_check_names_leads_out(
    tmp_path: Path, groups: Any, remedy: str, wait_s: float
) -> None:
    """At once, and after recovery has restarted the engines."""
    bench = make_server(tmp_path, groups, health={"probe_interval_s": 1.0, "probe_timeout_s": 0.5})
    server = (first_proved(bench) if remedy == "setting" else bench).server
    await server.start()
    with pytest.raises(
        PhaseFailed, match=r"weights differ .* repeat the call.*serve\(\) serves it"
    ):
        await (server.push if remedy == "setting" else server.check_push_path)(SWAPPED)
    await pass_time(wait_s)
    if remedy == "repeat":
        await server.check_push_path(same())
    elif remedy == "serve":
        await server.serve()
    else:
        await server.push(same() if remedy == "setting" else push(1))
    status = await server.status()
    assert (status.gate, status.weight_version) == ("open", 0 if remedy == "serve" else 1)
    assert set(bench.router.states.values()) == {"serving"}
    assert not any(engine.weights_are_garbage for engine in bench.engines)
    await server.stop()


async def test_without_recovery_the_error_says_that_only_a_launch_leads_out(
    tmp_path: Path,
) -> None:
    bench = await started_server(tmp_path, ONE, health={"recover": False})
    with pytest.raises(PhaseFailed, match=r"health\.recover is false.*launch again"):
        await bench.server.check_push_path(SWAPPED)
    await bench.server.stop()


async def test_a_cancelled_proof_comes_to_its_end(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, ONE)
    gate = bench["main-0"].hold("update_weights_from_tensor")
    proving = asyncio.create_task(bench.server.check_push_path(SWAPPED))
    await gate.entered.wait()
    proving.cancel()
    assert bench["main-0"].weights_are_garbage
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await proving
    assert checks(bench["main-0"])[-1] == "compare"
    assert bench["main-0"].is_dead
    await bench.server.stop()


async def test_between_reset_and_comparison_an_engine_reports_no_version(tmp_path: Path) -> None:
    """What a launch finds that attaches to it after a crash."""
    bench = await started_server(tmp_path, ONE)
    engine = bench["main-0"]
    gate = engine.hold("weights_checker")
    proving = asyncio.create_task(bench.server.check_push_path(same()))
    await gate.entered.wait()
    gate.open()
    versions = set()
    original = engine.weights_checker

    async def seen(action: str = "checksum") -> Any:
        versions.add((action, engine._version))
        return await original(action)

    engine.weights_checker = seen  # type: ignore[method-assign]
    await proving
    assert ("reset_tensors", "unverified-1") in versions
    assert ("compare", "unverified-1") in versions
    assert engine._version == "1"
    await bench.server.stop()


async def test_an_engine_that_was_left_in_a_proof_is_not_taken_for_any_version(
    tmp_path: Path,
) -> None:
    bench = make_server(tmp_path, ONE)
    bench.launcher._make = lambda spec, endpoint: FakeEngine(
        spec.engine_id, endpoint=endpoint, weight_version="unverified-1"
    )
    with pytest.raises(WeightMismatch, match=r"starts at weight version None.*ended early"):
        await bench.server.start()


# -- refused before anything is changed ---------------------------------------------------------


async def test_a_checker_that_refuses_is_told_before_anything_is_changed(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, TWO)
    bench["main-1"].faults.strike("weights_checker", reject(400, "no ComparableWeight"))
    with pytest.raises(LifecycleError, match=r"no ComparableWeight; nothing was changed"):
        await bench.server.check_push_path(same())
    assert all("reset_tensors" not in checks(engine) for engine in bench.engines)
    assert states(bench) == {""}
    assert bench.router.gate == "open"
    await bench.server.stop()


class WithoutChecker(FakeEngine):
    async def endpoints(self) -> frozenset[str]:
        return await super().endpoints() - {"/weights_checker"}


async def test_an_engine_without_a_checker_is_told(tmp_path: Path) -> None:
    def make(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
        return WithoutChecker(spec.engine_id, endpoint=endpoint)

    bench = make_server(tmp_path, ONE)
    bench.launcher._make = make
    await bench.server.start()
    with pytest.raises(LifecycleError, match="engine main-0 has no /weights_checker"):
        await bench.server.check_push_path(same())
    assert bench.router.gate == "open"
    await bench.server.stop()


async def test_after_a_push_there_is_nothing_to_compare_with(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, ONE)
    await bench.server.push(push(1))
    with pytest.raises(LifecycleError, match="the engines hold pushed weights, version 1"):
        await bench.server.check_push_path(same(2))
    assert bench.router.gate == "open"
    await bench.server.stop()


async def test_only_pushes_of_all_weights_can_be_proved(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, ONE, update="partial")
    with pytest.raises(LifecycleError, match=r"weights\.update is partial"):
        await bench.server.check_push_path(same())
    await bench.server.stop()
    with pytest.raises(ValueError, match="check_first_push"):
        server_config(ONE).model_validate(
            {
                "model_path": "/nowhere",
                "groups": ONE,
                "weights": {"update": "lora", "check_first_push": True},
            }
        )


async def test_tensors_that_are_not_pushed_would_be_lost_so_it_is_refused(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, ONE, not_pushed=["lm_head.*"])
    with pytest.raises(LifecycleError, match=r"weights\.not_pushed do not come with a push"):
        await bench.server.check_push_path(push(1, TENSOR_NAMES[:2]))
    assert bench.router.gate == "open"
    await bench.server.stop()
    with pytest.raises(ValueError, match=r"leave out one of the two"):
        server_config(ONE).model_validate(
            {
                "model_path": "/nowhere",
                "groups": ONE,
                "weights": {"not_pushed": ["mtp.*"], "check_first_push": True},
            }
        )


# -- the setting, and HTTP ----------------------------------------------------------------------


def first_proved(bench: ServerBench) -> ServerBench:
    weights = bench.server._config.weights.model_copy(update={"check_first_push": True})
    bench.server._config = bench.server._config.model_copy(update={"weights": weights})
    return bench


async def test_with_the_setting_the_first_sync_is_a_proof_and_the_second_is_not(
    tmp_path: Path,
) -> None:
    bench = first_proved(await started_server(tmp_path, ONE))
    await bench.server.push(same(1))
    await bench.server.push(push(2))
    assert checks(bench["main-0"]).count("compare") == 1
    await bench.server.stop()


async def test_with_the_setting_an_offload_before_the_first_push_is_refused(
    tmp_path: Path,
) -> None:
    bench = first_proved(await started_server(tmp_path, TWO))
    offloads = (bench.server.offload, lambda: bench.server.advance(Command.PAUSE_GENERATION))
    for offload in offloads:
        with pytest.raises(LifecycleError, match="check_first_push is true"):
            await offload()
    assert (await bench.server.status()).gate == "open"
    # The single commands still get there; then the push is refused.
    await bench.server.run(Command.PAUSE_GENERATION)
    await bench.server.run(Command.FLUSH_CACHE)
    await bench.server.run(Command.RELEASE_MEMORY_OCCUPATION)
    with pytest.raises(WeightMismatch, match="check_first_push is true"):
        await bench.server.push(push(1))
    await bench.server.stop()


def test_over_http_a_swap_is_found_and_named(tmp_path: Path) -> None:
    with (
        launched(launch_local, tmp_path, ONE, health={"recover": False}) as deployment,
        pytest.raises(PhaseFailed, match=f"weights differ .*{TENSOR_NAMES[0]}"),
    ):
        deployment["policy"].checks.push_path(SWAPPED).result()
    with launched(launch_local, tmp_path / "right", ONE) as deployment:
        deployment["policy"].checks.push_path(same()).result()
        assert deployment["policy"].status().result().gate == "open"
