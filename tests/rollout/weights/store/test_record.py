"""Records are read back as written or not at all; which write counts."""

import random

import pytest

from rollout.core.errors import WeightsUnavailable
from rollout.core.machine import Room, why_no_room
from rollout.weights.store.layout.commit import NodeState, Write, current_write, nodes_to_commit
from rollout.weights.store.layout.placement import assign_replicas, make_units
from rollout.weights.store.layout.record import StoreRecord, dump, load
from tests.support.store_worlds import moe_manifest

FIRST, SECOND = Write(1, 7, "a"), Write(2, 7, "b")
GIB = 1 << 30


def record() -> StoreRecord:
    units = make_units(moe_manifest(), 600)
    fingerprints = {name: f"xxh3:{index}" for index, name in enumerate(moe_manifest().tensors)}
    return StoreRecord(
        "run", FIRST, units, assign_replicas(units, ["a", "b"], 1), 2000, fingerprints
    )


def test_a_record_comes_back_as_it_was() -> None:
    assert load(dump(record())) == record()


def test_a_record_with_any_byte_changed_or_missing_is_refused() -> None:
    data = dump(record())
    chance = random.Random(0)
    for _ in range(300):
        at = chance.randrange(len(data))
        changed = bytearray(data)
        changed[at] ^= 1 << chance.randrange(8)
        for damaged in (bytes(changed), data[:at]):
            with pytest.raises(WeightsUnavailable, match="slotA is damaged"):
                load(damaged, where="slotA")


def test_what_one_node_has_committed_counts_everywhere() -> None:
    states = {
        "a": NodeState(SECOND, frozenset({FIRST, SECOND})),
        "b": NodeState(FIRST, frozenset({FIRST, SECOND})),
        "c": NodeState(FIRST, frozenset({FIRST})),
    }
    assert current_write(states) == SECOND
    assert nodes_to_commit(states) == ["b"]


def test_what_is_sealed_everywhere_and_committed_nowhere_does_not_count() -> None:
    sealed = frozenset({FIRST, SECOND})
    assert current_write({"a": NodeState(FIRST, sealed), "b": NodeState(FIRST, sealed)}) == FIRST
    assert current_write({"a": NodeState(None, sealed)}) is None
    assert current_write({}) is None


@pytest.mark.parametrize(
    ("room", "said"),
    [
        (Room("/dev/shm", 8 * GIB, 8 * GIB, 8 * GIB), ""),
        (Room("/dev/shm", 8 * GIB, 8 * GIB, None), ""),
        (Room("/dev/shm", 64 << 20, 8 * GIB), "/dev/shm has 64 MiB free and 4.00 GiB are needed"),
        (Room("/dev/shm", 8 * GIB, 4 * GIB), "memory of the node: 4.00 GiB available, 4.00 GiB"),
        (
            Room("/dev/shm", 8 * GIB, 8 * GIB, 4 * GIB),
            "memory of the control group: 4.00 GiB available",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_limit(room: Room, said: str) -> None:
    found = why_no_room(4 * GIB, room, spare_bytes=GIB)
    assert found.startswith(said)
    assert bool(found) == bool(said)
