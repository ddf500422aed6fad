"""A push on its way into one node's files: by one call for many tensors, or piece by piece."""

from pathlib import Path

import pytest

from engines.tensors.fingerprint import host_fingerprint
from rollout.core.errors import WeightMismatch, WeightsUnavailable
from rollout.weights.format.manifest import Manifest, TensorSpec
from rollout.weights.format.pushed_files import FileBytes
from rollout.weights.store.coordinator import Coordinator
from rollout.weights.store.node import writer
from rollout.weights.store.node.agent import AgentSettings, StoreAgent
from rollout.weights.store.node.files import Files, PendingCopy
from rollout.weights.store.node.writer import MemoryBytes
from tests.support.store_worlds import contents, moe_manifest, read_folder

MANIFEST = moe_manifest()


class NotedFiles(Files):
    """How many tensors each call copies."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.fails = False

    def copy(self, incoming: list[PendingCopy]) -> list[str]:
        if self.fails:
            raise OSError(5, "Input/output error")
        self.batches.append(len(incoming))
        return super().copy(incoming)


class Store:
    """Of one node."""

    def __init__(self, base: Path, manifest: Manifest = MANIFEST) -> None:
        self.files = NotedFiles()
        self.manifest = manifest
        self.agent = StoreAgent(
            AgentSettings("here", str(base / "base"), "run", spare_bytes=0), self.files
        )
        self.coordinator = Coordinator(
            "run", {"here": self.agent}, replicas=1, unit_bytes=400, segment_bytes=900
        )

    def kept(self, version: int) -> dict[str, bytes]:
        assembled = self.coordinator.assemble(self.coordinator.record_of(version), ["here"])
        try:
            return read_folder(Path(assembled.path), self.manifest)
        finally:
            self.coordinator.give_back(assembled)


@pytest.fixture
def store(shared_memory: Path) -> Store:
    return Store(shared_memory)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_what_is_in_memory_is_kept_with_its_fingerprint(store: Store, kind: type) -> None:
    wanted = contents(MANIFEST, 1)
    record = store.coordinator.write(1, MANIFEST, [[(n, kind(one)) for n, one in wanted.items()]])
    assert store.kept(1) == wanted
    assert record.fingerprints == {
        name: host_fingerprint(name, spec.dtype, spec.shape, wanted[name])
        for name, spec in MANIFEST.tensors.items()
    }
    # Python does not expose the address of read-only memory.
    assert sum(store.files.batches) == (0 if kind is memoryview else len(wanted))
    store.coordinator.close()


def test_buckets_are_copied_before_the_next_is_asked_for(store: Store) -> None:
    wanted = list(contents(MANIFEST, 1).items())
    asked = []

    def buckets():  # type: ignore[no-untyped-def]
        for first in range(0, len(wanted), 5):
            part = [(name, bytearray(one)) for name, one in wanted[first : first + 5]]
            yield part
            asked.append(sum(store.files.batches))
            for _, one in part:
                one[:] = bytes(len(one))  # the sender uses the memory again

    store.coordinator.write(1, MANIFEST, buckets())
    assert asked == [min(first + 5, len(wanted)) for first in range(0, len(wanted), 5)]
    assert store.kept(1) == dict(wanted)
    store.coordinator.close()


def test_large_buckets_are_copied_in_several_calls(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_BATCH_BYTES", 1000)
    wanted = contents(MANIFEST, 1)
    store.coordinator.write(1, MANIFEST, [wanted.items()])
    assert len(store.files.batches) > 3
    assert sum(store.files.batches) == len(wanted)
    assert store.kept(1) == wanted
    store.coordinator.close()


def test_memory_and_files_in_one_bucket(store: Store, tmp_path: Path) -> None:
    wanted = contents(MANIFEST, 1)
    path = tmp_path / "pushed"
    path.write_bytes(b"".join(wanted.values()))
    bucket: list[tuple[str, bytes | FileBytes]] = []
    with path.open("rb") as file:
        offset = 0
        for index, (name, one) in enumerate(wanted.items()):
            its = FileBytes(file.fileno(), offset, len(one))
            bucket.append((name, its if index % 2 else one))
            offset += len(one)
        store.coordinator.write(1, MANIFEST, [bucket])
    assert sum(store.files.batches) == (len(wanted) + 1) // 2
    assert store.kept(1) == wanted
    store.coordinator.close()


@pytest.mark.parametrize("apart", [False, True])
def test_a_tensor_that_comes_twice_is_refused(store: Store, apart: bool) -> None:
    first, *rest = contents(MANIFEST, 1).items()
    buckets = [[first], [first, *rest]] if apart else [[first, first, *rest]]
    with pytest.raises(WeightMismatch, match="comes twice"):
        store.coordinator.write(1, MANIFEST, buckets)
    store.coordinator.close()


def test_a_copy_that_fails_is_a_write_that_fails(store: Store) -> None:
    store.files.fails = True
    with pytest.raises(WeightsUnavailable, match="Input/output error"):
        store.coordinator.write(1, MANIFEST, [contents(MANIFEST, 1).items()])
    store.files.fails = False
    wanted = contents(MANIFEST, 2)
    store.coordinator.write(2, MANIFEST, [wanted.items()])
    assert store.kept(2) == wanted
    store.coordinator.close()


def test_empty_tensors_have_no_address(shared_memory: Path) -> None:
    manifest = Manifest.of(
        [TensorSpec("none", "float32", (0, 3)), TensorSpec("some", "float32", (3,))]
    )
    store = Store(shared_memory, manifest)
    store.coordinator.write(1, manifest, [[("none", bytearray()), ("some", bytearray(12))]])
    assert store.kept(1) == {"none": b"", "some": bytes(12)}
    store.coordinator.close()


def test_an_address_is_that_of_the_first_byte() -> None:
    data = bytearray(b"0123456789")
    whole, part = MemoryBytes.of(data), MemoryBytes.of(memoryview(data)[4:])
    assert part.address == whole.address + 4
    assert MemoryBytes.of(bytes(data)).address
    assert not MemoryBytes.of(memoryview(bytes(data))).address


def test_a_file_that_must_be_shorter_gives_way_to_a_new_one(shared_memory: Path) -> None:
    """An engine may still have the old one mapped, and would not survive that it is cut."""
    files, path = Files(), shared_memory / "segment"
    files.allocate(path, 8192)
    region = files.map(path)
    files.put(region, 0, memoryview(b"old"))
    files.allocate(path, 4096)
    assert path.stat().st_size == 4096
    assert bytes(region.view[:3]) == b"old"
    assert bytes(region.view[8191:]) == b"\0"
    region.close()
    path.unlink()
