"""Engines over several nodes: one path on all of them, all or none, and nothing left behind."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.protocol import ServerInfo
from engines.protocol.errors import EngineRejected
from rollout.config import StoreConfig
from rollout.core.errors import WeightsUnavailable
from rollout.core.types import EngineSlot, NodeShare
from rollout.weights.store.agents import StoreTerms
from rollout.weights.store.node.assembly import AssembledFolder
from rollout.weights.store.node.base_folder import Leftovers, locked
from rollout.weights.store.restore import StoreSource
from rollout.weights.store.transfer.unit_client import AgentClient
from tests.support.store_worlds import Served, World, contents, read_folder


class WideEngine:
    """Its ranks read the path they get; the test inspects the folders meanwhile."""

    def __init__(self, world: World, *, refuses: bool = False) -> None:
        self._world = world
        self._refuses = refuses
        self.loaded: list[dict[str, bytes]] = []
        self.folders: list[str] = []

    async def server_info(self) -> ServerInfo:
        return ServerInfo("0.5.23", "sglang", False, False)

    async def update_weights_from_disk(
        self, model_path: str, *, flush_cache: bool = True, weight_version: str | None = None
    ) -> None:
        self.folders = [str(path) for path in folders(self._world.base)]
        if self._refuses:
            raise EngineRejected("a rank cannot read it", status=400, body="no")
        self.loaded.append(read_folder(Path(model_path), self._world.manifest))


class _Agents:
    def __init__(self, agents: Any) -> None:
        self._agents = agents

    def agents(self) -> Any:
        return self._agents


@pytest.fixture
def world(shared_memory: Path) -> Iterator[World]:
    world = World(shared_memory / "base")
    world.write(1)
    yield world
    assert not links(world.base)
    world.close()


def slot_on(*nodes: str) -> EngineSlot:
    more = tuple(NodeShare(node, (), ()) for node in nodes[1:])
    return EngineSlot("main-0", "main", 0, nodes[0], more=more)


def restore(world: World, engine: Any, *nodes: str, agents: Any = None, version: int = 1) -> bool:
    terms = StoreTerms(StoreConfig(unit_bytes=600), "run", "")
    source = StoreSource(terms, _Agents(agents or world.nodes), "")
    return bool(asyncio.run(source.restore(engine, version, slot_on(*nodes))))


def folders(base: Path) -> list[Path]:
    return sorted(base.glob("run/*/assembled/*"))


def links(base: Path) -> list[Path]:
    return [path for path in base.rglob("*") if path.is_symlink()]


def test_every_node_has_the_version_at_one_path_and_gives_it_back(world: World) -> None:
    engine = WideEngine(world)
    assert restore(world, engine, "node-0", "node-2")
    assert engine.loaded == [contents(world.manifest, 1)]
    of_nodes = [Path(folder).relative_to(world.base / "run").parts[0] for folder in engine.folders]
    assert of_nodes == ["node-0", "node-2"]
    assert not folders(world.base)


def test_all_nodes_give_it_back_also_when_the_engine_refuses(world: World) -> None:
    engine = WideEngine(world, refuses=True)
    assert not restore(world, engine, "node-0", "node-1")
    assert len(engine.folders) == 2
    assert not folders(world.base)
    world.write(2)
    world.write(3)  # no slot is held any more


def test_a_version_that_does_not_count_is_not_given(world: World) -> None:
    world.write(2)
    engine = WideEngine(world)
    assert not restore(world, engine, "node-0", "node-1", version=1)
    assert restore(world, engine, "node-0", "node-1", version=2)
    assert engine.loaded == [contents(world.manifest, 2)]


@pytest.mark.parametrize("dead", ["node-0", "node-1", "elsewhere"])
def test_one_node_that_cannot_means_none(
    world: World, dead: str, caplog: pytest.LogCaptureFixture
) -> None:
    if dead in world.nodes:
        world.nodes[dead].kill()
    nodes = ["node-0", dead if dead == "elsewhere" else "node-1"]
    engine = WideEngine(world)
    assert not restore(world, engine, *nodes)
    assert not engine.loaded
    assert f"cannot be had on every node ({dead}: " in caplog.text
    assert not folders(world.base)


def test_a_node_without_room_means_none(world: World, caplog: pytest.LogCaptureFixture) -> None:
    node = world.nodes["node-1"]
    node.kill()
    node.settings = replace(node.settings, spare_bytes=1 << 60)
    node.start()
    engine = WideEngine(world)
    assert not restore(world, engine, "node-0", "node-1")
    assert not engine.loaded
    assert "node-1: no room for" in caplog.text
    assert not folders(world.base)


def test_a_unit_that_is_damaged_on_one_node_is_mended_there(world: World) -> None:
    record = world.coordinator.record_of(1)
    (written,) = world.base.glob("run/node-1/slot?/committed.json")
    with written.with_name("seg_000.safetensors").open("r+b") as stream:
        stream.seek(record.segments_of("node-1")[0].num_bytes - 1)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))
    made = world.coordinator.assemble(record, ["node-0", "node-1"])
    assert any("is damaged" in told for told in made.folders["node-1"].troubles)
    for folder in folders(world.base):
        assert read_folder(folder, world.manifest) == contents(world.manifest, 1)
    assert not world.coordinator.give_back(made)


def test_paths_that_differ_are_refused(shared_memory: Path) -> None:
    served = Served(shared_memory, shares_files=True)
    served.world.write(1)
    record = served.world.coordinator.record_of(1)
    with pytest.raises(WeightsUnavailable, match="its path is not the same there"):
        served.world.coordinator.assemble(record, ["node-0", "node-1"])
    assert not links(shared_memory)
    served.close()


def test_it_works_through_the_doors(shared_memory: Path) -> None:
    served = Served(shared_memory / "base", shares_files=True, same_base=True)
    served.world.write(1)
    nodes = list(served.servers)
    made = served.world.coordinator.assemble(served.world.coordinator.record_of(1), nodes)
    assert read_folder(Path(made.path), served.world.manifest) == contents(served.world.manifest, 1)
    assert len(folders(shared_memory / "base")) == 3
    assert not served.world.coordinator.give_back(made)
    assert not folders(shared_memory / "base")
    assert not links(shared_memory / "base")
    served.close()


class Late:
    """An agent whose reply is lost after it has assembled."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def assemble(self, *args: Any) -> AssembledFolder:
        self._node.assemble(*args)
        raise TimeoutError("no answer within 300 s")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


@pytest.mark.parametrize("nodes", [("node-0", "node-1"), ("node-1",)])
def test_what_was_made_where_the_answer_was_lost_is_given_back_too(
    world: World, nodes: tuple[str, ...]
) -> None:
    agents = {**world.nodes, "node-1": Late(world.nodes["node-1"])}
    assert not restore(world, WideEngine(world), *nodes, agents=agents)
    assert not folders(world.base)


def test_two_wide_engines_share_the_folders_and_each_has_its_own_path(world: World) -> None:
    record, nodes = world.coordinator.record_of(1), ["node-0", "node-1"]
    one = world.coordinator.assemble(record, nodes)
    other = world.coordinator.assemble(record, nodes)
    assert one.path != other.path
    assert len(folders(world.base)) == 2
    world.coordinator.give_back(one)
    assert not Path(one.path).exists()
    assert read_folder(Path(other.path), world.manifest) == contents(world.manifest, 1)
    world.coordinator.give_back(other)
    assert not folders(world.base)


def test_an_agent_that_was_killed_takes_its_paths_away_when_it_is_back(world: World) -> None:
    record = world.coordinator.record_of(1)
    made = world.coordinator.assemble(record, ["node-0", "node-1"])
    assert links(world.base)
    for node in ("node-0", "node-1"):
        world.nodes[node].kill()
        world.nodes[node].start()
    assert not links(world.base)
    assert not folders(world.base)
    assert not world.coordinator.give_back(made)


def test_a_run_whose_agents_have_ended_leaves_no_path_behind(world: World) -> None:
    world.coordinator.assemble(world.coordinator.record_of(1), ["node-0", "node-1"])
    for node in world.nodes.values():
        node.kill()
    with locked(world.base):
        gone = Leftovers(world.base).sweep(return_s=0.0)
    assert gone == [f"run/node-{index}" for index in range(3)]
    assert not (world.base / "run").exists()
    for node in world.nodes.values():
        node.start()


# -- file systems of their own, as real nodes have them --------------------------------------

AGENT = """
import json, sys
from rollout.weights.store.node.agent import AgentSettings, StoreAgent
from rollout.weights.store.transfer.unit_server import AgentServer
server = AgentServer(StoreAgent(AgentSettings(sys.argv[1], sys.argv[2], "run", spare_bytes=0)))
print(json.dumps(server.address), flush=True)
sys.stdin.read()
"""


@contextmanager
def apart(node: str, base: Path) -> Iterator[tuple[AgentClient, int]]:
    """An agent with a tmpfs of its own at ``base``, and its pid."""
    mounted = 'mount -t tmpfs -o size=64m none "$1" && shift && exec "$@"'
    as_root = ["--map-root-user"] if os.getuid() else []
    command = ["unshare", *as_root, "--mount", "sh", "-c", mounted, "sh", str(base)]
    command += [sys.executable, "-c", AGENT, node, str(base / "store")]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            _, said = process.communicate()
            pytest.skip(f"needs mount namespaces: {said.strip()[-200:]}")
        client = AgentClient(node, tuple(json.loads(line)))
        try:
            yield client, process.pid
        finally:
            client.connections.disconnect()


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_each_node_reads_its_own_files_at_the_path_that_the_engine_is_told(
    shared_memory: Path,
) -> None:
    world = World(shared_memory / "none", 0)
    with apart("node-0", shared_memory) as one, apart("node-1", shared_memory) as other:
        agents = {"node-0": one[0], "node-1": other[0]}
        coordinator = world.new_coordinator(agents)
        world.write(1)
        made = coordinator.assemble(coordinator.record_of(1), list(agents))
        assert not Path(made.path).exists()  # nor is anything here
        for node, (_, pid) in {"node-0": one, "node-1": other}.items():
            root = f"/proc/{pid}/root"
            target = os.readlink(f"{root}{made.path}")
            assert f"/run/{node}/" in target
            found = read_folder(Path(f"{root}{target}"), world.manifest)
            assert found == contents(world.manifest, 1)
        assert not coordinator.give_back(made)
        for _, pid in (one, other):
            assert not os.path.lexists(f"/proc/{pid}/root{made.path}")
        coordinator.close()
