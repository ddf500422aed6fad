"""The store keeps the last push of a trainer that ends right after it, or says that it has left."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from rollout.config import StoreConfig
from rollout.weights.format.manifest import Manifest, TensorSpec
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.routes.buffers import ShmBufferPool
from rollout.weights.store.agents import LocalAgents, StoreTerms
from rollout.weights.store.store import WeightStore
from rollout.weights.tensors.payload import flattened_bucket

pytestmark = pytest.mark.embedded
MANIFEST = Manifest.of([TensorSpec(f"w{number}", "float32", (64,)) for number in range(5)])
# Two buckets, or one folder of links to both; it ends by a line of its input.
TRAINER = """
import json, os, sys
from pathlib import Path
from rollout.weights.format.manifest import TensorSpec
from rollout.weights.routes.buffers import PushBuffers, ShmBufferPool
root, other = sys.argv[1:]
pools = [ShmBufferPool(root), ShmBufferPool(root)]
paths = []
for number, pool in enumerate(pools):
    specs = [TensorSpec(f"w{2 * number + one}", "float32", (64,)) for one in range(2)]
    layout = pool.layouts.of(specs)
    buffer = pool.take(layout.num_bytes)
    buffer.write_header(layout.header)
    paths.append(str(buffer.folder))
if other == "joined":
    paths = [str(PushBuffers(pools[0]).joined(list(map(Path, paths))))]
print(json.dumps(paths), flush=True)
match input():
    case "close":
        for pool in pools:
            pool.close()
        print("closed", flush=True)
        input()
    case "kill":
        os.kill(os.getpid(), 9)
"""


class Trainer:
    """A process that has pushed."""

    def __init__(self, root: Path, how: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(root), how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.paths: list[str] = json.loads(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def ends(self, how: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{how}\n")
        self.process.stdin.flush()
        if how == "close":
            assert self._line() == "closed\n"
        else:
            self.process.wait(30)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()


def last_bucket() -> bytes:
    """The one that comes by value."""
    return flattened_bucket([("w4", torch.ones(64))])


class Gated:
    """A bucket by value, whose bytes come when the test lets them."""

    def __init__(self) -> None:
        self.asked, self.opened = asyncio.Event(), asyncio.Event()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        self.asked.set()
        await self.opened.wait()
        return last_bucket()


@pytest.fixture
def root(shared_memory: Path) -> Iterator[Path]:
    folder = shared_memory / "pushes"
    folder.mkdir()
    yield folder
    assert os.listdir(folder) == []


@asynccontextmanager
async def kept_in(base: Path, **config: Any) -> AsyncIterator[WeightStore]:
    folder = base / "store"
    folder.mkdir()
    settings = StoreConfig(path=str(folder), spare_bytes=0, unit_bytes=600, **config)
    terms = StoreTerms.of(settings, "run", "policy")
    store = WeightStore(terms, LocalAgents(terms, ["a"]))
    await store.start()
    try:
        yield store
    finally:
        await store.stop()
    assert os.listdir(folder) == []


def push(version: int, paths: Sequence[str], last: Any = None) -> WeightPush:
    first = last or last_bucket()
    return WeightPush(version, MANIFEST, [first, *({"path": path} for path in paths)])


ENDS = ["close", "exit", "kill"]


@pytest.mark.parametrize("layout", ["", "joined"])
@pytest.mark.parametrize("end", ENDS)
async def test_a_trainer_that_ends_while_the_store_reads_loses_nothing(
    shared_memory: Path, root: Path, end: str, layout: str
) -> None:
    async with kept_in(shared_memory) as store:
        with Trainer(root, layout) as trainer:
            held = Gated()
            store.offer(push(1, trainer.paths, held))
            await held.asked.wait()
            trainer.ends(end)
            ShmBufferPool(root).close()  # another trainer begins, and removes leftovers
            held.opened.set()
            await store.is_idle()
            status = await store.status()
            assert (status.version, status.reason) == (1, "")
            assert os.listdir(root) == []


@pytest.mark.parametrize("end", ENDS)
async def test_files_that_are_not_read_any_more_go_with_their_trainer(
    shared_memory: Path, root: Path, end: str
) -> None:
    async with kept_in(shared_memory) as store:
        with Trainer(root) as trainer:
            store.offer(push(1, trainer.paths))
            await store.is_idle()
            assert len(os.listdir(root)) == 2, "the trainer writes its next push into them"
            trainer.ends(end)
            assert len(os.listdir(root)) == (2 if end == "kill" else 0)
            ShmBufferPool(root).close()


async def test_a_push_that_waits_and_is_dropped_leaves_nothing(
    shared_memory: Path, root: Path
) -> None:
    async with kept_in(shared_memory) as store:
        with Trainer(root) as trainer:
            store.offer(push(1, trainer.paths))
            trainer.ends("exit")
            store.make_way()
            await store.is_idle()
            assert (await store.status()).num_dropped == 1


async def test_a_stop_in_a_write_leaves_nothing_of_a_trainer_that_has_ended(
    shared_memory: Path, root: Path
) -> None:
    async with kept_in(shared_memory) as store:
        with Trainer(root) as trainer:
            held = Gated()
            store.offer(push(1, trainer.paths, held))
            await held.asked.wait()
            trainer.ends("exit")
            assert len(os.listdir(root)) == 2


class Lost:
    """An object of Ray whose owner has ended."""

    def __await__(self) -> Generator[Any, None, Any]:
        exceptions = pytest.importorskip("ray.exceptions")
        raise exceptions.OwnerDiedError("00", None, "")
        yield


@pytest.mark.parametrize("what", ["files", "object"])
async def test_a_trainer_that_ended_before_is_named_and_is_no_failure_of_the_store(
    shared_memory: Path, root: Path, what: str
) -> None:
    async with kept_in(shared_memory, max_failures=2) as store:
        with Trainer(root) as trainer:
            store.offer(push(1, trainer.paths))
            await store.is_idle()
            trainer.ends("exit")
        for version in (2, 3, 4):
            store.offer(push(version, trainer.paths, Lost() if what == "object" else None))
            await store.is_idle()
            status = await store.status()
            assert (status.is_on, status.version) == (True, 1)
            assert status.reason.startswith(f"weight version {version} is not kept, ")
            assert "version 1 stays: the trainer that pushed it has ended" in status.reason
            assert "missing" not in status.reason


async def test_the_first_push_of_a_trainer_that_ended_leaves_nothing_kept(
    shared_memory: Path, root: Path
) -> None:
    async with kept_in(shared_memory) as store:
        gone = str(root / "rollout-push-1-0" / "000001")
        store.offer(push(1, [gone]))
        await store.is_idle()
        assert "is not kept, no other is: the trainer" in (await store.status()).reason


async def test_a_checkpoint_that_was_removed_is_a_failure_and_no_ended_trainer(
    shared_memory: Path, tmp_path: Path
) -> None:
    async with kept_in(shared_memory, max_failures=1) as store:
        store.offer(push(1, [str(tmp_path / "step-1")]))
        await store.is_idle()
        status = await store.status()
        assert not status.is_on
        assert f"the pushed folder {tmp_path / 'step-1'} is gone" in status.reason
