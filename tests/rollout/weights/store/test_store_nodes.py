"""A store over several nodes that loses one, is damaged, or is full: never a wrong version."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout.core.errors import WeightMismatch, WeightsUnavailable
from rollout.weights.store.node import base_folder
from rollout.weights.store.node.agent import AgentSettings, StoreAgent
from rollout.weights.store.node.assembly import AssemblyRequest
from rollout.weights.store.node.base_folder import locked, remove_if_empty
from rollout.weights.store.node.files import Files
from tests.support.store_worlds import Node, World, contents, flip, slot_of


@pytest.fixture
def made(shared_memory: Path) -> World:
    made = World(shared_memory / "base")
    made.write(1)
    made.write(2)
    return made


def test_what_was_written_last_is_restored_on_any_node(made: World) -> None:
    for node in made.nodes:
        assert made.restore(2, node) == contents(made.manifest, 2)
    with pytest.raises(
        WeightsUnavailable, match=r"keeps weight version 2 .*, not weight version 1"
    ):
        made.restore(1)
    made.close()


def test_each_node_keeps_its_subset_only(made: World) -> None:
    record = made.coordinator.record_of(2)
    shares = {
        node: sum(record.units[unit].num_bytes for unit in kept)
        for node, kept in record.kept.items()
    }
    assert sum(shares.values()) == 2 * record.num_bytes
    assert max(shares.values()) < 0.7 * record.num_bytes
    made.close()


@pytest.mark.parametrize("lost", ["node-0", "node-1", "node-2"])
def test_a_node_that_is_lost_is_made_up_for_by_the_replicas(made: World, lost: str) -> None:
    made.nodes[lost].kill()
    node = next(name for name in made.nodes if name != lost)
    assert made.restore(2, node) == contents(made.manifest, 2)
    made.write(3)
    assert made.restore(3, node) == contents(made.manifest, 3)
    made.nodes[lost].start()
    assert made.restore(3, lost) == contents(made.manifest, 3)
    made.close()


def test_two_lost_nodes_of_three_are_too_many_and_it_is_said_which_unit_is_lost(
    made: World,
) -> None:
    made.nodes["node-1"].kill()
    made.nodes["node-2"].kill()
    with pytest.raises(WeightsUnavailable, match=r"unit '.*' of weight version 2 .* cannot be had"):
        made.restore(2, "node-0")
    made.close()


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_version_counts_only_if_every_unit_of_it_was_sealed(
    replicas: int, shared_memory: Path
) -> None:
    made = World(shared_memory / "base", replicas=replicas)
    made.write(1)

    class CannotSeal:
        def __getattr__(self, name: str) -> Any:
            if name == "seal":
                raise ConnectionResetError("the node went down")
            return getattr(made.nodes["node-1"], name)

    made.new_coordinator({**made.nodes, "node-1": CannotSeal()})
    if replicas == 1:
        with pytest.raises(WeightsUnavailable, match="no node is left for unit"):
            made.write(2)
        assert made.restorable(range(4)) == [1]
    else:
        made.write(2)
        assert made.restorable(range(4)) == [2]
    made.close()


def test_a_flipped_bit_in_any_file_is_found_and_its_unit_comes_from_a_peer(made: World) -> None:
    folder = slot_of(made, "node-0")
    for segment in made.coordinator.record_of(2).segments_of("node-0"):
        flip(folder / segment.file, segment.num_bytes - 1)
        flip(folder / segment.file, len(segment.header))
    assembled = made.assemble(2)
    troubles = assembled.folders["node-0"].troubles
    assert troubles
    assert all("is damaged" in told for told in troubles)
    made.coordinator.give_back(assembled)
    assert made.restore(2, "node-0") == contents(made.manifest, 2)
    made.close()


def test_a_damaged_header_is_found_too(made: World) -> None:
    folder = slot_of(made, "node-0")
    flip(folder / "seg_000.safetensors", 20)
    assert made.restore(2, "node-0") == contents(made.manifest, 2)
    made.close()


def test_a_unit_that_is_damaged_on_its_way_from_one_peer_comes_from_the_other(
    shared_memory: Path,
) -> None:
    made = World(shared_memory / "base", 3, replicas=2)
    made.write(1)
    for node in ("node-1",):
        for segment in made.coordinator.record_of(1).segments_of(node):
            for offset in segment.units.values():
                flip(slot_of(made, node) / segment.file, offset)
    assert made.restore(1, "node-0") == contents(made.manifest, 1)
    made.close()


def test_a_unit_that_is_damaged_everywhere_is_not_served(made: World) -> None:
    for node in made.nodes:
        for segment in made.coordinator.record_of(2).segments_of(node):
            if 0 in segment.units:
                flip(slot_of(made, node) / segment.file, segment.units[0])
    with pytest.raises(WeightsUnavailable, match="damaged"):
        made.restore(2, "node-0")
    made.close()


def test_a_damaged_record_costs_one_node_and_not_the_store(made: World) -> None:
    flip(slot_of(made, "node-1") / "committed.json", 100)
    made.nodes["node-1"].kill()
    made.nodes["node-1"].start()
    assert made.restore(2, "node-1") == contents(made.manifest, 2)
    made.write(3)
    assert made.restorable(range(5)) == [3]
    made.close()


def test_a_segment_that_was_cut_counts_as_missing(made: World) -> None:
    os.truncate(slot_of(made, "node-1") / "seg_000.safetensors", 100)
    made.nodes["node-1"].kill()
    made.nodes["node-1"].start()
    assert made.restore(2, "node-1") == contents(made.manifest, 2)
    made.close()


def test_a_push_of_other_tensors_than_its_manifest_says_is_not_kept(made: World) -> None:
    wanted = contents(made.manifest, 3)
    first, *rest = wanted.items()
    for wrong, said in (
        (rest, "1 tensors are missing"),
        ([first, *wanted.items()], "comes twice"),
        ([("other", b""), *wanted.items()], "is not in the manifest"),
        ([(first[0], first[1][:-2]), *rest], "bytes, its shape makes"),
    ):
        with pytest.raises(WeightMismatch, match=said):
            made.coordinator.write(3, made.manifest, [wrong])
        assert made.restorable(range(5)) == [2]
    made.close()


class FullFiles(Files):
    """A tmpfs that is full."""

    def allocate(self, path: Path, num_bytes: int) -> None:
        raise OSError(28, "No space left on device", str(path))


def test_a_full_tmpfs_refuses_the_write_and_keeps_what_there_was(
    made: World, shared_memory: Path
) -> None:
    made.write(3)
    full = StoreAgent(AgentSettings("full", str(shared_memory / "base"), "run"), FullFiles())
    made.new_coordinator({"full": full})
    with pytest.raises(WeightsUnavailable, match="No space left on device"):
        made.write(4)
    # With others beside it, they take its share.
    made.new_coordinator({**made.nodes, "full": full})
    made.write(4)
    assert made.restorable(range(6)) == [4]
    made.close()


def test_more_than_the_node_has_is_refused_before_a_byte_is_taken(shared_memory: Path) -> None:
    made = World(shared_memory / "base", 0)
    settings = AgentSettings("node-0", str(shared_memory / "base"), "run", spare_bytes=1 << 60)
    made.nodes["node-0"] = Node(settings)
    made.new_coordinator()
    before = made.nodes["node-0"].num_bytes()
    # The log adds that the version is not kept.
    nothing_twice = (
        r"^no node can keep weight version 1 \(write 1\) \(node-0: cannot keep .* in each of "
    )
    with pytest.raises(WeightsUnavailable, match=nothing_twice + ".*must stay free"):
        made.write(1)
    assert made.nodes["node-0"].num_bytes() == before == 0
    made.close()


def test_a_slot_that_is_being_read_is_not_written_to(made: World) -> None:
    assembled = made.assemble(2)
    made.write(3)
    with pytest.raises(WeightsUnavailable, match="is being read"):
        made.nodes["node-0"].agent.begin(made.coordinator.record_of(3), None)
    made.coordinator.give_back(assembled)
    made.write(4)
    assert made.restorable(range(6)) == [4]
    made.close()


def test_engines_that_want_the_same_version_share_one_folder(made: World) -> None:
    one, other = made.assemble(2), made.assemble(2)
    assert one.path != other.path
    assert Path(one.path).resolve() == Path(other.path).resolve()
    made.coordinator.give_back(one)
    assert Path(other.path).is_dir()
    made.coordinator.give_back(other)
    assert not Path(other.path).exists()
    made.close()


def test_the_files_beside_the_weights_are_there_for_the_engine(made: World, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"old")
    record = made.coordinator.record_of(2)
    assembled = made.coordinator.assemble(record, ["node-0"], AssemblyRequest(str(tmp_path)))
    names = {path.name for path in Path(assembled.path).iterdir()}
    assert "config.json" in names
    assert "model.safetensors" not in names
    made.coordinator.give_back(assembled)
    made.close()


def test_memory_is_reused_from_the_third_version_on(made: World) -> None:
    inodes = {path: path.stat().st_ino for path in made.base.rglob("seg_*.safetensors")}
    made.write(3)
    made.write(4)
    assert {path: path.stat().st_ino for path in made.base.rglob("seg_*.safetensors")} == inodes
    made.close()


# -- what ended agents leave --------------------------------------------------------------------


def agent(base: Path, run: str, **options: Any) -> StoreAgent:
    return StoreAgent(AgentSettings("node-0", str(base), run, spare_bytes=0, **options))


HOLD = """
import sys
from rollout.weights.store.node.agent import AgentSettings, StoreAgent
agent = StoreAgent(AgentSettings("node-0", sys.argv[1], "killed", returns=sys.argv[2] == "returns"))
print("holds", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_run(base: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    """A process with an agent."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(base), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        yield process
        process.kill()


def runs(base: Path) -> list[str]:
    return sorted(path.name for path in base.iterdir() if path.is_dir())


def test_the_next_agent_of_a_node_removes_what_a_killed_run_left(shared_memory: Path) -> None:
    base = shared_memory / "base"
    with another_run(base, "ends") as process:
        while_it_lives = agent(base, "second")
        assert runs(base) == ["killed", "second"]
        process.kill()
        process.wait(30)
        third = agent(base, "third")
        assert runs(base) == ["second", "third"]
    for one in (while_it_lives, third):
        one.close(clear=True)
    assert not base.exists()


def test_an_agent_that_is_started_again_finds_its_files_for_a_while(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(base_folder.time, "monotonic", lambda: now_s)
    base = shared_memory / "base"
    made = World(shared_memory / "base", 1)
    with another_run(base, "returns") as process:
        process.kill()
        process.wait(30)
    made.write(1)
    now_s = 29.0
    made.write(2)
    back = agent(base, "killed", returns=True)
    now_s = 60.0
    made.write(3)
    assert runs(base) == ["killed", "run"]
    back.close(clear=False)
    made.write(4)
    now_s = 91.0
    made.write(5)
    assert runs(base) == ["run"]
    assert made.restorable(range(7)) == [5]
    made.close()


class GoneAgain(type(Path())):  # type: ignore[misc]
    """A folder that another agent removes between two steps of ``mkdir``."""

    num_left = 2

    def mkdir(self, *args: Any, **more: Any) -> None:
        if self.num_left:
            self.num_left -= 1
            raise FileExistsError(17, "File exists")
        super().mkdir(*args, **more)


def test_a_folder_that_is_removed_while_it_is_made_is_made_again(shared_memory: Path) -> None:
    base = GoneAgain(shared_memory / "base")
    with locked(base):
        assert base.num_left == 0
        assert base.is_dir()
    remove_if_empty(base)


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_what_is_no_folder_is_an_error(kind: str, shared_memory: Path) -> None:
    base = shared_memory / "base"
    if kind == "file":
        base.touch()
    else:
        base.symlink_to(shared_memory / "nowhere")
    what = {"file": "a file", "dangling link": "a link"}[kind]
    with pytest.raises(WeightsUnavailable, match=f"base is {what}"), locked(base):
        pass
    base.unlink()


def test_agents_that_begin_and_end_at_once_do_not_remove_each_other(shared_memory: Path) -> None:
    base = shared_memory / "base"
    failures: list[BaseException] = []

    def live(name: str) -> None:
        try:
            for _ in range(20):
                one = agent(base, name)
                assert one.settings.folder.is_dir()
                one.close(clear=True)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=live, args=(f"run-{index}",)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert not base.exists()
