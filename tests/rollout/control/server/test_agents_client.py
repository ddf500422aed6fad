"""The workers of a server's agents: deadlines, their folder, and their place in a server's life."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engines.process.own_files import OwnFolder
from engines.protocol import Endpoint, ProcessIdentity
from rollout.control.server import agents_client
from rollout.control.server.agents_client import AgentsClient
from rollout.control.server.journal import ServerJournal, read
from rollout.core.errors import ActorLost, ConfigError, PhaseTimeout, RolloutError
from tests.support import builders
from tests.support.builders import RecordingRouter
from tests.support.virtual_time import pass_time, virtual_time
from tests.support.waits import forever

ROUTER = "http://127.0.0.1:30000"


@dataclass
class FakeWorker:
    """Answers with a port; notes its calls in ``seen``, which others may share."""

    port: int = 4000
    seen: list[str] = field(default_factory=list)
    start_errors: list[Exception] = field(default_factory=list)
    hangs: bool = False

    async def start(self, router_url: str) -> Endpoint:
        self.seen.append(f"start {self.port} for {router_url}")
        if self.start_errors:
            raise self.start_errors.pop(0)
        if self.hangs:
            await forever()
        return Endpoint("127.0.0.1", self.port)

    async def stop(self, budget_s: float) -> None:
        self.seen.append(f"stop {self.port}")
        if self.hangs:
            await forever()

    async def stats(self) -> dict[str, Any]:
        return {"process": None}


class SeenRouter(RecordingRouter):
    """Notes its start and its stop with those of the workers."""

    seen: list[str]

    async def start(self) -> Endpoint:
        self.seen.append("start router")
        return await super().start()

    async def stop(self, budget_s: float) -> None:
        self.seen.append(f"stop router within {budget_s:g} s")
        await super().stop(budget_s)


@virtual_time
async def test_all_start_in_a_new_folder_and_a_stop_removes_it(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "policy" / "agents"
    workers = [FakeWorker(4000), FakeWorker(4001)]
    client = AgentsClient("policy", workers, folder)
    await client.start(ROUTER)
    assert list(client.urls) == ["http://127.0.0.1:4000", "http://127.0.0.1:4001"]
    assert [one.seen for one in workers] == [[f"start {one.port} for {ROUTER}"] for one in workers]
    (folder / "0").mkdir()
    (folder / "0" / "s.jsonl").write_text("{}\n")
    await client.stop(5.0)
    assert not client.urls
    assert (folder.exists(), folder.parent.exists()) == (False, True)


@virtual_time
async def test_without_workers_there_is_no_folder(tmp_path: Path) -> None:
    client = AgentsClient("policy", (), tmp_path / "agents")
    await client.start(ROUTER)
    client.rejoin(())
    await client.stop(5.0)
    assert not client.urls
    assert not (tmp_path / "agents").exists()


@virtual_time
async def test_what_a_lost_launch_has_left_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "agents"
    of_a_lost_one = OwnFolder.make(str(folder))
    (folder / "0").mkdir()
    (folder / "0" / "old.jsonl").write_text("{}\n")
    client = AgentsClient("policy", [FakeWorker()], folder)
    starting = asyncio.create_task(client.start(ROUTER))
    await pass_time(1.0)
    assert not starting.done()  # a worker of the lost one lives
    of_a_lost_one.close()  # as the kernel does at its end
    await starting
    assert [one.name for one in folder.iterdir()] == [".held"]
    await client.stop(5.0)


@virtual_time
async def test_a_folder_that_is_not_ours_is_named_and_stays(tmp_path: Path) -> None:
    folder = tmp_path / "agents"
    folder.mkdir()
    (folder / "thesis.txt").touch()
    client = AgentsClient("policy", [FakeWorker()], folder)
    with pytest.raises(RolloutError, match=rf"{folder}, for the sessions of agents, is there"):
        await client.start(ROUTER)
    await client.stop(5.0)
    assert (folder / "thesis.txt").exists()


@virtual_time
async def test_a_start_that_a_lost_worker_had_is_repeated(tmp_path: Path) -> None:
    again = ActorLost("it starts again", may_have_executed=False)
    worker = FakeWorker(start_errors=[again, again])
    client = AgentsClient("policy", [worker], tmp_path / "agents")
    await client.start(ROUTER)
    assert len(worker.seen) == 3
    await client.stop(5.0)
    dead = FakeWorker(start_errors=[ActorLost("it is dead", is_dead=True)])
    client = AgentsClient("policy", [dead], tmp_path / "agents")
    with pytest.raises(ActorLost, match="it is dead"):
        await client.start(ROUTER)
    await client.stop(5.0)


@virtual_time
async def test_a_worker_that_does_not_answer_is_named(tmp_path: Path) -> None:
    workers = [FakeWorker(4000), FakeWorker(4001, hangs=True)]
    client = AgentsClient("policy", workers, tmp_path / "agents")
    late = "worker 1 of agents of server policy did not answer"
    with pytest.raises(PhaseTimeout, match=f"{late} start within 60 s"):
        await client.start(ROUTER)
    with pytest.raises(PhaseTimeout, match=f"{late} stop within 20 s"):
        await client.stop(5.0)
    assert not (tmp_path / "agents").exists()


@pytest.mark.parametrize(
    ("looks", "killed"),
    [
        ("...", 0),
        (".x.xx", 1),  # one answer that is late is none
        ("xxxx", 0),  # it has not begun to serve
        (".-xx", 0),  # it was lost, and another begins
        (".-.xx", 1),
        (".xx.xx", 2),
    ],
)
def test_only_one_that_has_answered_and_is_late_twice_is_killed(
    looks: str, killed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    process = ProcessIdentity(4242, 1, "here", "boot", "")
    done: list[Any] = []
    left = list(looks)

    class Served(FakeWorker):
        async def stats(self) -> dict[str, Any]:
            return {"process": process}

    async def look(client: Any, url: str) -> None:
        match left.pop(0) if left else "":
            case "x":
                raise TimeoutError
            case "-":
                raise aiohttp.ClientConnectionError("refused")
            case "":
                await forever()

    monkeypatch.setattr(agents_client, "_look_at", look)
    monkeypatch.setattr(agents_client, "_kill", done.append)

    @virtual_time
    async def watch() -> None:
        client = AgentsClient("policy", [Served()], tmp_path / "agents")
        await client.start(ROUTER)
        await pass_time(1000.0)
        await client.stop(5.0)

    watch()
    assert done == [process] * killed


# -- in the life of a server ----------------------------------------------------------------------


@virtual_time
async def test_a_server_starts_them_after_its_router_and_stops_them_before(tmp_path: Path) -> None:
    router = SeenRouter()
    router.seen = []
    workers = [FakeWorker(4000, router.seen), FakeWorker(4001, router.seen)]
    agents = AgentsClient("policy", workers, tmp_path / "agents")
    journal = ServerJournal.of(tmp_path / "journal.json", "run", "policy", "local")
    bench = builders.make_server(tmp_path, router=router, agents=agents, journal=journal)
    started = await bench.server.start()
    urls = ("http://127.0.0.1:4000", "http://127.0.0.1:4001")
    assert started.agents_urls == read(journal.path).agents_urls == urls
    await bench.server.stop()
    assert read(journal.path).agents_urls == ()
    assert router.seen == [
        "start router",
        f"start 4000 for {ROUTER}",
        f"start 4001 for {ROUTER}",
        "stop 4000",
        "stop 4001",
        "stop router within 15 s",
    ]


@virtual_time
async def test_a_server_whose_workers_do_not_start_stops_what_it_has_started(
    tmp_path: Path,
) -> None:
    worker = FakeWorker(start_errors=[ConfigError("agents cannot bind 127.0.0.1:4000")])
    agents = AgentsClient("policy", [worker], tmp_path / "agents")
    bench = builders.make_server(tmp_path, agents=agents)
    with pytest.raises(ConfigError, match="agents cannot bind"):
        await bench.server.start()
    assert bench.router.num_stops == 1
    assert not (tmp_path / "agents").exists()


@virtual_time
async def test_workers_that_hang_leave_the_router_the_rest_of_the_time(tmp_path: Path) -> None:
    router = SeenRouter()
    router.seen = []
    worker = FakeWorker()
    agents = AgentsClient("policy", [worker], tmp_path / "agents")
    bench = builders.make_server(tmp_path, router=router, agents=agents)
    await bench.server.start()
    worker.hangs = True
    await bench.server.stop()
    assert router.seen[-1].startswith("stop router within ")


@virtual_time
async def test_a_server_that_continues_a_lost_one_rejoins_them(tmp_path: Path) -> None:
    journal = ServerJournal.of(tmp_path / "journal.json", "run", "policy", "ray")
    worker = FakeWorker()
    agents = AgentsClient("policy", [worker], tmp_path / "agents")
    bench = builders.make_server(tmp_path, agents=agents, journal=journal)
    await bench.server.start()
    (tmp_path / "agents" / "0").mkdir()
    record = read(journal.path)
    other = AgentsClient("policy", [worker], tmp_path / "agents")
    other.rejoin(record.agents_urls)
    assert other.urls == ("http://127.0.0.1:4000",)
    assert (tmp_path / "agents" / "0").exists()
    assert len(worker.seen) == 1
    await other.stop(5.0)
    await bench.server.stop()


@virtual_time
async def test_workers_whose_folder_cannot_be_held_are_stopped_too(tmp_path: Path) -> None:
    """Some network file systems have no locks."""
    worker = FakeWorker()
    client = AgentsClient("policy", [worker], tmp_path / "nowhere")
    client.rejoin(["http://127.0.0.1:4000"])
    await client.stop(5.0)
    assert worker.seen == ["stop 4000"]
