"""The store as a source for restarted engines: every failure is a reason for the next source."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from engines.protocol import FINGERPRINTS, ServerInfo
from engines.protocol.errors import EngineRejected
from engines.tensors.fingerprint import head_of, host_fingerprint
from rollout.config import StoreConfig
from rollout.core.types import EngineSlot
from rollout.weights.store.agents import StoreTerms
from rollout.weights.store.layout.placement import node_bytes
from rollout.weights.store.node import assembly
from rollout.weights.store.restore import StoreSource
from rollout.weights.store.weight_source import DiskSource
from tests.support.store_worlds import World, contents, flip, moe_manifest, read_folder, slot_of


class LoadingEngine:
    """Reads the folder it loads, or refuses; with ``proves`` it verifies the bytes."""

    def __init__(self, world: World, refuses: int = 0, *, proves: bool = False) -> None:
        self._world = world
        self._refuses = refuses
        self._proves = proves
        self.num_proved = 0
        self.loaded: list[tuple[str | None, dict[str, bytes]]] = []

    async def update_weights_from_disk(
        self, model_path: str, *, flush_cache: bool = True, weight_version: str | None = None
    ) -> None:
        if self._refuses:
            self._refuses -= 1
            raise EngineRejected("it does not want to", status=400, body="no")
        found = read_folder(Path(model_path), self._world.manifest)
        if (expected := Path(model_path) / FINGERPRINTS).exists():
            self._verify(found, json.loads(expected.read_bytes()))
        self.loaded.append((weight_version, found))

    def _verify(self, found: dict[str, bytes], expected: dict[str, str]) -> None:
        assert self._proves, "it was left to an engine that does not do it"
        self.num_proved += 1
        for name, content in found.items():
            spec = self._world.manifest.tensors[name]
            if host_fingerprint(name, spec.dtype, spec.shape, content) != expected[name]:
                raise EngineRejected(f"{name!r} is damaged", status=400, body="")

    async def server_info(self) -> ServerInfo:
        raw = {"proves_loads": True} if self._proves else {}
        return ServerInfo("1", "embedded", True, True, raw=raw)


class _Agents:
    def __init__(self, world: World) -> None:
        self._world = world

    def agents(self) -> Any:
        return self._world.nodes


@pytest.fixture
def world(shared_memory: Path) -> World:
    world = World(shared_memory / "base")
    world.write(1)
    return world


def source_of(world: World, **config: int) -> StoreSource:
    terms = StoreTerms(StoreConfig(unit_bytes=600, **config), "run", "")
    return StoreSource(terms, _Agents(world), str(world.base))


def restore(source: StoreSource, engine: Any, version: int, node: str = "node-0") -> bool:
    slot = EngineSlot("main-0", "main", 0, node)
    return asyncio.run(source.restore(engine, version, slot))


def test_an_engine_is_given_the_version_that_counts_and_no_other(world: World) -> None:
    engine = LoadingEngine(world)
    assert restore(source_of(world), engine, 1)
    assert engine.loaded == [("1", contents(world.manifest, 1))]
    assert not restore(source_of(world), engine, 2)
    assert not restore(source_of(world), engine, 0)
    assert len(engine.loaded) == 1
    world.close()


def test_it_is_known_before_a_load_whether_the_store_has_a_version(world: World) -> None:
    source = source_of(world, max_failures=1)
    assert asyncio.run(source.why_lacks(1)) == ""
    for version in (0, 2):
        why = asyncio.run(source.why_lacks(version))
        assert why == f"the store keeps weight version 1 (write 1), not weight version {version}"
    for node in world.nodes.values():
        node.kill()
    assert "keeps nothing, not weight version 1" in asyncio.run(source.why_lacks(1))
    for node in world.nodes.values():
        node.start()
    assert not restore(source, LoadingEngine(world, refuses=1), 1)
    assert asyncio.run(source.why_lacks(1)) == "the store has failed 1 times in a row"
    world.close()


def test_a_restore_that_is_cancelled_in_its_assembly_leaves_no_folder(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_end = threading.Event(), threading.Event()
    assemble = assembly.Assembler.assemble

    def slowly(*args: Any) -> assembly.AssembledFolder:
        began.set()
        assert may_end.wait(30)
        return assemble(*args)

    monkeypatch.setattr(assembly.Assembler, "assemble", slowly)
    engine = LoadingEngine(world)

    async def cancel() -> None:
        slot = EngineSlot("main-0", "main", 0, "node-0")
        restoring = asyncio.create_task(source_of(world).restore(engine, 1, slot))  # type: ignore[arg-type]
        assert await asyncio.to_thread(began.wait, 30)
        restoring.cancel()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await restoring

    asyncio.run(cancel())
    assert not engine.loaded
    assert not list(world.base.glob("run/*/assembled/*"))
    world.close()


@pytest.mark.parametrize("only", [None, 1])
def test_it_is_known_before_a_load_whether_a_checkpoint_is_there(
    tmp_path: Path, only: int | None
) -> None:
    source = DiskSource(str(tmp_path / "{version}"), only)
    (tmp_path / "1").mkdir()
    assert asyncio.run(source.why_lacks(1)) == f"{tmp_path}/1 is no checkpoint"
    (tmp_path / "1" / "config.json").touch()
    assert asyncio.run(source.why_lacks(1)) == ""
    why = asyncio.run(source.why_lacks(2))
    found = "is no checkpoint" if only is None else "has weight version 1 only"
    assert why == f"{tmp_path}/2 {found}"


def test_what_was_assembled_is_given_back_also_when_the_engine_refuses(world: World) -> None:
    assert not restore(source_of(world), LoadingEngine(world, refuses=1), 1)
    assert not list(world.base.glob("run/*/assembled/*"))
    world.write(2)
    world.write(3)
    world.close()


@pytest.mark.parametrize("node", ["node-1", "elsewhere"])
def test_a_dead_agent_or_a_node_without_one_is_no_error(world: World, node: str) -> None:
    world.nodes["node-1"].kill()
    engine = LoadingEngine(world)
    assert not restore(source_of(world), engine, 1, node)
    assert engine.loaded == []
    world.close()


def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that agents hash from now on."""
    names: list[str] = []

    def noted(name: str, *rest: Any) -> bytes:
        names.append(name)
        return head_of(name, *rest)

    monkeypatch.setattr(assembly, "head_of", noted)
    return names


def test_an_engine_that_proves_what_it_loads_is_left_to_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, engine = hashed(monkeypatch), LoadingEngine(world, proves=True)
    local = world.coordinator.record_of(1).kept["node-0"]
    assert restore(source_of(world), engine, 1)
    assert engine.loaded == [("1", contents(world.manifest, 1))]
    assert engine.num_proved == 1
    units = world.coordinator.record_of(1).units
    here = {tensor.name for unit in local for tensor in units[unit].tensors}
    assert here.isdisjoint(names), "read twice"
    assert not list(world.base.glob("run/*/assembled/*"))
    assert restore(source_of(world), LoadingEngine(world), 1)
    assert here <= set(names), "an engine that proves nothing was given what nobody has proved"
    world.close()


def test_what_such_an_engine_finds_damaged_comes_from_another_node(shared_memory: Path) -> None:
    world = World(shared_memory / "base", replicas=2)
    world.write(1)
    segment = world.coordinator.record_of(1).segments_of("node-0")[0]
    flip(slot_of(world, "node-0") / segment.file, segment.num_bytes - 1)
    engine = LoadingEngine(world, proves=True)
    assert restore(source_of(world, max_failures=1), engine, 1)
    assert engine.loaded == [("1", contents(world.manifest, 1))]
    assert engine.num_proved == 1, "the second time all was proved before"
    assert not list(world.base.glob("run/*/assembled/*"))
    world.close()


def test_it_switches_itself_off_after_so_many_failures_in_a_row_and_says_so(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    source = source_of(world, max_failures=2)
    engine = LoadingEngine(world, refuses=3)
    assert not restore(source, engine, 1)
    assert not restore(source, engine, 7)  # it has no such version: that is no failure
    assert not restore(source, engine, 1)
    assert "no engine is restored from it any more, after 2 failures in a row" in caplog.text
    assert not restore(source, LoadingEngine(world), 1)
    world.close()


def test_a_success_between_failures_keeps_it_on(world: World) -> None:
    source = source_of(world, max_failures=2)
    for _ in range(3):
        assert not restore(source, LoadingEngine(world, refuses=1), 1)
        assert restore(source, LoadingEngine(world), 1)
    world.close()


def test_the_cost_of_a_node_is_what_it_then_takes(world: World) -> None:
    config = StoreConfig(unit_bytes=600, segment_bytes=2000)
    held = max(node.num_bytes() for node in world.nodes.values())
    # Records are beside the segments.
    assert node_bytes(world.manifest, config, 3) <= held
    assert held < node_bytes(world.manifest, config, 3) + 20_000
    world.close()


def test_more_nodes_cost_each_less() -> None:
    config = StoreConfig(unit_bytes=600, replicas=1)
    manifest = moe_manifest(4, 16)
    by_nodes = [node_bytes(manifest, config, number) for number in (1, 2, 4, 8)]
    assert by_nodes == sorted(by_nodes, reverse=True)
