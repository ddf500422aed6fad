"""A release or resume whose answer was lost: looked at, gone on with, or ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.errors import EngineHung, EngineRejected, EngineUnreachable
from engines.fake import FakeEngine, FakeLauncher, faults
from engines.launch import EngineSpec
from engines.protocol import Endpoint, MemoryTag
from rollout.errors import PhaseFailed
from rollout.server_group import ServerGroup
from rollout.settling import Fate, fate_of_release, fate_of_resume, is_lost
from tests.support.builders import push, started_group

W, KV = MemoryTag.WEIGHTS, MemoryTag.KV_CACHE
RELEASE, RESUME = "release_memory_occupation", "resume_memory_occupation"
MIB = 2**20


def telling(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
    return FakeEngine(spec.engine_id, endpoint=endpoint, tells_released=True)


async def flushed(launcher: FakeLauncher, model_path: str = "/x") -> tuple[ServerGroup, FakeEngine]:
    group, (engine,) = await started_group(1, launcher=launcher, model_path=model_path)
    await group.pause()
    await group.flush()
    return group, engine


@pytest.mark.parametrize(
    ("released", "freed", "least", "fate"),
    [
        ({"weights", "kv_cache"}, 0, 9, Fate.DONE),  # its own word comes first
        (set(), 99, 9, Fate.NOT_DONE),
        ({"weights"}, 99, 9, Fate.UNCERTAIN),
        (None, 9, 9, Fate.DONE),
        (None, 8, 9, Fate.UNCERTAIN),
        (None, None, 9, Fate.UNCERTAIN),
        (None, 99, 0, Fate.UNCERTAIN),
    ],
)
def test_the_fate_of_a_release(
    released: set[str] | None, freed: int | None, least: int, fate: Fate
) -> None:
    assert fate_of_release([W, KV], released, freed, least) is fate


@pytest.mark.parametrize(
    ("released", "fate"),
    [
        (set(), Fate.DONE),
        ({"weights", "kv_cache"}, Fate.NOT_DONE),
        ({"kv_cache"}, Fate.UNCERTAIN),
        (None, Fate.UNCERTAIN),
    ],
)
def test_the_fate_of_a_resume(released: set[str] | None, fate: Fate) -> None:
    assert fate_of_resume([W, KV], released) is fate


def test_what_is_known_not_to_have_been_done_is_not_lost() -> None:
    assert is_lost(EngineUnreachable("reset"))
    assert not is_lost(EngineUnreachable("refused", maybe_executed=False))
    assert is_lost(EngineRejected("bad gateway", status=502))
    assert not is_lost(EngineRejected("no", status=409))
    assert not is_lost(EngineHung("no answer"))  # no time is left to look


@pytest.mark.parametrize("fault", [faults.lose(executed=True), faults.lose(), faults.reject()])
@pytest.mark.parametrize("operation", [RELEASE, RESUME])
async def test_a_lost_answer_is_settled_and_the_engine_goes_on(
    operation: str, fault: faults.Fault
) -> None:
    group, engine = await flushed(FakeLauncher(telling))
    engine.faults.strike(operation, fault)
    await group.release()
    assert engine.released == set(MemoryTag)
    await group.resume_weights()
    assert MemoryTag.WEIGHTS not in engine.released
    await group.update_weights(push(1))
    await group.verify(1)
    await group.resume_kv()
    await group.continue_generation()
    assert [one.state for one in (await group.status()).engines] == ["serving"]
    # Once more if it was not done, and only then.
    ordinary = 1 if operation == RELEASE else 2
    assert engine.operations().count(operation) == ordinary + (not fault.executed)


async def test_memory_that_came_free_settles_what_the_engine_does_not_tell(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(400 * MIB)

    def big(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
        return FakeEngine(spec.engine_id, endpoint=endpoint, memory_bytes=600 * MIB)

    group, engine = await flushed(FakeLauncher(big), str(tmp_path))
    engine.faults.strike(RELEASE, faults.lose(executed=True))
    report = await group.release()
    assert report.freed_bytes == 600 * MIB
    assert engine.operations().count(RELEASE) == 1

    group, engine = await flushed(FakeLauncher(big), str(tmp_path))
    engine.faults.strike(RELEASE, faults.lose())
    with pytest.raises(PhaseFailed, match="its answer was lost"):
        await group.release()
    assert engine.operations().count(RELEASE) == 1
    assert engine.dead_because == "killed"


async def test_an_engine_that_died_of_it_fails_with_its_own_error() -> None:
    group, engine = await flushed(FakeLauncher(telling))
    engine.faults.strike(RELEASE, faults.die())
    with pytest.raises(PhaseFailed, match="a planned death in release_memory_occupation"):
        await group.release()
