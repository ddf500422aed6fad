"""A release or resume whose answer was lost: looked at, gone on with, or ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.fake import FakeEngine, FakeLauncher, faults
from engines.launch import EngineSpec
from engines.protocol import Endpoint, MemoryTag
from engines.protocol.errors import EngineHung, EngineRejected, EngineUnreachable
from rollout.control.engine.memory import CallOutcome, is_lost, release_outcome, resume_outcome
from rollout.control.group.server_group import ServerGroup
from rollout.core.errors import PhaseFailed
from rollout.rules.lifecycle import Command
from tests.support.builders import push, started_group

W, KV = MemoryTag.WEIGHTS, MemoryTag.KV_CACHE
RELEASE, RESUME = "release_memory_occupation", "resume_memory_occupation"
MIB = 2**20


def telling(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
    return FakeEngine(spec.engine_id, endpoint=endpoint, reports_released=True)


async def flushed(launcher: FakeLauncher, model_path: str = "/x") -> tuple[ServerGroup, FakeEngine]:
    group, (engine,) = await started_group(1, launcher=launcher, model_path=model_path)
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    return group, engine


@pytest.mark.parametrize(
    ("released", "freed", "least", "outcome"),
    [
        ({"weights", "kv_cache"}, 0, 9, CallOutcome.DONE),  # its own word comes first
        (set(), 99, 9, CallOutcome.NOT_DONE),
        ({"weights"}, 99, 9, CallOutcome.UNCERTAIN),
        (None, 9, 9, CallOutcome.DONE),
        (None, 8, 9, CallOutcome.UNCERTAIN),
        (None, None, 9, CallOutcome.UNCERTAIN),
        (None, 99, 0, CallOutcome.UNCERTAIN),
    ],
)
def test_the_outcome_of_a_release(
    released: set[str] | None, freed: int | None, least: int, outcome: CallOutcome
) -> None:
    assert release_outcome([W, KV], released, freed, least) is outcome


@pytest.mark.parametrize(
    ("released", "outcome"),
    [
        (set(), CallOutcome.DONE),
        ({"weights", "kv_cache"}, CallOutcome.NOT_DONE),
        ({"kv_cache"}, CallOutcome.UNCERTAIN),
        (None, CallOutcome.UNCERTAIN),
    ],
)
def test_the_outcome_of_a_resume(released: set[str] | None, outcome: CallOutcome) -> None:
    assert resume_outcome([W, KV], released) is outcome


def test_what_is_known_not_to_have_been_done_is_not_lost() -> None:
    assert is_lost(EngineUnreachable("reset"))
    assert not is_lost(EngineUnreachable("refused", maybe_executed=False))
    assert is_lost(EngineRejected("bad gateway", status=502))
    assert not is_lost(EngineRejected("no", status=409))
    assert not is_lost(EngineHung("no answer"))  # no time is left to look


@pytest.mark.parametrize("fault", [faults.lose(executed=True), faults.lose(), faults.reject()])
@pytest.mark.parametrize("operation", [RELEASE, RESUME])
async def test_a_lost_answer_is_checked_and_the_engine_goes_on(
    operation: str, fault: faults.Fault
) -> None:
    group, engine = await flushed(FakeLauncher(telling))
    engine.faults.strike(operation, fault)
    await group.run(Command.RELEASE_MEMORY_OCCUPATION)
    assert engine.released == set(MemoryTag)
    await group.run(Command.ONLOAD_WEIGHTS)
    assert MemoryTag.WEIGHTS not in engine.released
    await group.run(Command.UPDATE_WEIGHTS, push=push(1))
    await group.run(Command.VERIFY, version=1)
    await group.run(Command.ONLOAD_KV)
    await group.run(Command.CONTINUE_GENERATION)
    assert [one.state for one in (await group.status()).engines] == ["serving"]
    # Once more if it was not done, and only then.
    ordinary = 1 if operation == RELEASE else 2
    assert engine.operations().count(operation) == ordinary + (fault.moment == "before")


async def test_memory_that_came_free_decides_what_no_engine_reports(
    tmp_path: Path,
) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(400 * MIB)

    def big(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
        return FakeEngine(spec.engine_id, endpoint=endpoint, memory_bytes=600 * MIB)

    group, engine = await flushed(FakeLauncher(big), str(tmp_path))
    engine.faults.strike(RELEASE, faults.lose(executed=True))
    report = await group.run(Command.RELEASE_MEMORY_OCCUPATION)
    assert report.freed_bytes == 600 * MIB
    assert engine.operations().count(RELEASE) == 1

    group, engine = await flushed(FakeLauncher(big), str(tmp_path))
    engine.faults.strike(RELEASE, faults.lose())
    with pytest.raises(PhaseFailed, match="its answer was lost"):
        await group.run(Command.RELEASE_MEMORY_OCCUPATION)
    assert engine.operations().count(RELEASE) == 1
    assert engine.death_reason == "killed"


async def test_an_engine_that_died_of_it_fails_with_its_own_error() -> None:
    group, engine = await flushed(FakeLauncher(telling))
    engine.faults.strike(RELEASE, faults.die())
    with pytest.raises(PhaseFailed, match="a planned death in release_memory_occupation"):
        await group.run(Command.RELEASE_MEMORY_OCCUPATION)
