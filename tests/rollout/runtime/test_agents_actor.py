"""A worker of agents that Ray starts again: it serves as the lost one of its launch did."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.process.locks import make_held
from rollout.agents.worker.settings import WorkerSettings
from rollout.config import AgentsConfig
from rollout.core.errors import ActorLost, RolloutError
from rollout.runtime import agents_actor
from rollout.runtime.agents_actor import AgentsActor
from tests.support.waits import until

ROUTER = "http://127.0.0.1:9"


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerSettings]:
    monkeypatch.setattr(agents_actor, "is_own_process", lambda: True)
    hold = make_held(tmp_path / "agents")
    yield WorkerSettings(AgentsConfig(host="127.0.0.1"), 0, 1, str(tmp_path / "agents" / "0"))
    hold.release()
    assert not (tmp_path / "agents").exists()


async def has_begun(worker: AgentsActor) -> bool:
    try:
        await worker.start("http://another:1")
    except ActorLost:  # it begins again
        return False
    return True


async def test_the_next_one_serves_where_the_lost_one_did(settings: WorkerSettings) -> None:
    lost = AgentsActor(settings, launch="a")
    endpoint = await lost.start(ROUTER)
    assert await lost.start(ROUTER) == endpoint
    await lost.stop(0.0)
    with socket.create_server(endpoint):  # the kernel frees it a moment later
        following = AgentsActor(settings, launch="a")
        assert not await has_begun(following)
    begun: bool = await until(lambda: has_begun(following))
    assert begun
    assert await following.start(ROUTER) == endpoint
    assert (await following.stats())["process"] is not None
    await following.stop(0.0)


async def test_one_of_another_launch_begins_when_it_is_called(settings: WorkerSettings) -> None:
    """A killed launch has left its folder; the server removes it before it calls."""
    lost = AgentsActor(settings, launch="a")
    endpoint = await lost.start(ROUTER)
    await lost.stop(0.0)
    other = AgentsActor(settings, launch="b")
    with pytest.raises(RolloutError, match="worker 0 of agents is not running"):
        await other.stats()
    with socket.create_server(endpoint):
        assert await other.start(ROUTER) != endpoint
    await other.stop(0.0)


@pytest.mark.parametrize("record", ["", "[]", "{}", '{"port": "x"}'])
async def test_a_damaged_record_is_none(settings: WorkerSettings, record: str) -> None:
    Path(settings.folder).with_suffix(".json").write_text(record)
    worker = AgentsActor(settings, launch="a")
    assert (await worker.start(ROUTER)).port > 0
    await worker.stop(0.0)
