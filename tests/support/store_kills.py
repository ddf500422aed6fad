"""Kill processes of the store at any byte of a write: ``python -m tests.support.store_kills``.

A separate program, because it forks: it must have no other threads then.
"""

import os
import random
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engines.tensors.file_mapping import FileMapping
from rollout.weights.store.node.files import Files, PendingCopy
from tests.support.store_worlds import World, copy_one_by_one, moe_manifest

MANIFEST = moe_manifest(num_layers=1, num_experts=3)
# A rename writes none, but a kill may come before each; the last ones say that the version counts:
# there every second kill is to come.
RENAME_BYTES = 100
LAST_BYTES = 250


class Budget:
    """Bytes that may be written; at the next one the process is killed by the kernel."""

    def __init__(self, num_bytes: int) -> None:
        self.left = num_bytes

    def spend(self, data: Any, put: Callable[[Any], None]) -> None:
        if len(data) > self.left:
            put(memoryview(data)[: self.left])
            os.kill(os.getpid(), signal.SIGKILL)
        put(data)
        self.left -= len(data)


class CountedFiles(Files):
    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def put(self, region: FileMapping, offset: int, data: memoryview) -> None:
        self._budget.spend(data, lambda some: Files.put(self, region, offset, some))

    def copy(self, incoming: Sequence[PendingCopy]) -> list[str]:
        return copy_one_by_one(incoming, lambda copy, data: self._budget.spend(data, copy))

    def write(self, path: Path, data: Any) -> None:
        self._budget.spend(data, lambda some: Files.write(self, path, some))

    def write_at(self, path: Path, offset: int, data: Any) -> None:
        self._budget.spend(data, lambda some: Files.write_at(self, path, offset, some))

    def rename(self, old: Path, new: Path) -> None:
        self._budget.spend(bytes(RENAME_BYTES), lambda some: None)
        Files.rename(self, old, new)


def write(made: World, version: int, budget: Budget) -> None:
    """Agents, writer and coordinator are all in this process, and die together."""
    files = CountedFiles(budget)
    for node in made.nodes.values():
        node.start()
        assert node.agent is not None
        node.agent.files = node.agent.mapped_files._files = files
    made.new_coordinator()
    made.write(version)


def was_killed_while_writing(made: World, version: int, num_bytes: int) -> bool:
    child = os.fork()
    if not child:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        write(made, version, Budget(num_bytes))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


def kill_all(made: World) -> None:
    for node in made.nodes.values():
        node.kill()


def kill_often(base: Path, num_kills: int, seed: int) -> None:
    chance = random.Random(seed)
    num_nodes = 1 + seed % 2
    made = World(base, num_nodes, manifest=MANIFEST, replicas=1, unit_bytes=400, segment_bytes=900)
    budget = Budget(1 << 40)
    write(made, 1, budget)
    num_bytes = (1 << 40) - budget.left
    kept, version, num_killed, num_new = 1, 1, 0, 0
    while num_killed < num_kills:
        version += 1
        kill_all(made)
        near_the_end = num_bytes - chance.randrange(LAST_BYTES)
        at = near_the_end if version % 2 else chance.randrange(num_bytes)
        was_killed = was_killed_while_writing(made, version, at)
        num_killed += was_killed
        for node in made.nodes.values():
            node.start()
        made.new_coordinator()
        restored = made.restorable(range(kept, version + 1))
        assert restored in ([kept], [version]), (restored, kept, version)
        assert was_killed or restored == [version]
        num_new += was_killed and restored == [version]
        kept = restored[0]
    made.close()
    print(f"{num_killed} kills, {num_new} of them after the commit")
    # A single node writes nothing after it has committed.
    assert num_new < num_kills
    assert num_new or num_nodes == 1


if __name__ == "__main__":
    kill_often(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
