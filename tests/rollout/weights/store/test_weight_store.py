"""What a server has pushed is kept in the background: the latest, and never in anybody's way."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout.config import StoreConfig, WeightUpdate
from rollout.weights.format.manifest import Manifest
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.routes.by_value import ByValue
from rollout.weights.routes.route import EngineRoute
from rollout.weights.store.agents import LocalAgents, StoreTerms
from rollout.weights.store.store import WeightStore
from tests.support.store_worlds import contents, moe_manifest

pytestmark = pytest.mark.embedded

MANIFEST = moe_manifest(1, 3)


def bucket(version: int) -> bytes:
    import torch

    from rollout.weights.tensors.payload import flattened_bucket

    pairs = [
        (
            name,
            torch.frombuffer(bytearray(content), dtype=getattr(torch, spec.dtype)).view(spec.shape),
        )
        for (name, content), spec in zip(
            contents(MANIFEST, version).items(), MANIFEST.tensors.values(), strict=True
        )
    ]
    return flattened_bucket(pairs)


def push(version: int, *buckets: Any, **more: Any) -> WeightPush:
    return WeightPush(version, MANIFEST, buckets or (bucket(version),), **more)


@asynccontextmanager
async def kept_in(base: Path, **config: Any) -> AsyncIterator[WeightStore]:
    settings = StoreConfig(path=str(base), spare_bytes=0, unit_bytes=600, **config)
    terms = StoreTerms.of(settings, "run", "policy")
    store = WeightStore(terms, LocalAgents(terms, ["a", "b"]))
    await store.start()
    try:
        yield store
    finally:
        await store.stop()
    assert await asyncio.to_thread(os.listdir, base) == []


class Gated:
    """A requested bucket, which the test delivers later."""

    def __init__(self, content: bytes) -> None:
        self.asked = asyncio.Event()
        self.opened = asyncio.Event()
        self._content = content

    def __await__(self) -> Generator[Any, None, bytes]:
        return self._wait().__await__()

    async def _wait(self) -> bytes:
        self.asked.set()
        await self.opened.wait()
        return self._content


async def test_a_push_is_kept_and_its_memory_given_back_at_the_end(shared_memory: Path) -> None:
    async with kept_in(shared_memory) as store:
        store.offer(push(1))
        await store.is_idle()
        status = await store.status()
        assert (status.is_on, status.version, status.reason) == (True, 1, "")
        assert set(status.node_bytes) == {"a", "b"}
        assert min(status.node_bytes.values()) > 0


async def test_of_pushes_that_come_while_one_is_written_only_the_last_is_kept(
    shared_memory: Path,
) -> None:
    async with kept_in(shared_memory) as store:
        gate = Gated(bucket(1))
        store.offer(push(1, gate))
        await gate.asked.wait()
        for version in (2, 3, 4):
            store.offer(push(version))
        gate.opened.set()
        await store.is_idle()
        status = await store.status()
        assert (status.version, status.num_dropped) == (4, 2)


async def test_it_switches_itself_off_after_so_many_failures_and_says_why(
    shared_memory: Path,
) -> None:
    async with kept_in(shared_memory, max_failures=2) as store:
        for version in (1, 2):
            store.offer(push(version, {"names": ["a"]}))
            await store.is_idle()
        status = await store.status()
        assert not status.is_on
        assert "switched off after 2 failures" in status.reason
        assert "has no tensors in it" in status.reason
        store.offer(push(3))
        await store.is_idle()
        assert (await store.status()).version is None


async def test_what_was_overwritten_while_it_was_read_is_not_kept(shared_memory: Path) -> None:
    async with kept_in(shared_memory) as store:
        store.offer(push(1))
        await store.is_idle()
        wrong = Manifest(MANIFEST.tensors, dict.fromkeys(MANIFEST.tensors, "xxh3:00"))
        store.offer(WeightPush(2, wrong, (bucket(2),)))
        await store.is_idle()
        status = await store.status()
        assert status.version == 1
        assert "changed between its push and its copy" in status.reason


async def test_an_adapter_is_not_taken_for_the_model(shared_memory: Path) -> None:
    async with kept_in(shared_memory) as store:
        store.offer(push(1, contents=WeightUpdate.LORA))
        await store.is_idle()
        assert (await store.status()).version is None


async def test_a_push_with_several_payloads_is_left_to_its_copies(shared_memory: Path) -> None:
    routes = {"engine": EngineRoute("by_value delta", ByValue())}
    async with kept_in(shared_memory) as store:
        store.offer(push(1, {"by_value delta": bucket(1)}, routes=routes))
        await store.is_idle()
        status = await store.status()
        assert (status.version, status.reason) == (None, "")
        store.offer(push(1))
        await store.is_idle()
        assert (await store.status()).version == 1


class SlowToEnd(threading.Thread):
    """The writing thread ends when it is waited for, as on a busy machine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._may_end = threading.Event()

    def run(self) -> None:
        super().run()
        if self.name == "store-write":
            self._may_end.wait(60)

    def join(self, timeout: float | None = None) -> None:
        self._may_end.set()
        super().join(timeout)


async def test_a_stop_in_the_middle_of_a_write_leaves_no_thread_and_no_byte(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "Thread", SlowToEnd)
    async with kept_in(shared_memory) as store:
        gate = Gated(b"")
        store.offer(push(1, gate))
        await gate.asked.wait()
    assert not any(one.name == "store-write" for one in threading.enumerate())


async def test_a_folder_that_cannot_be_made_switches_it_off_and_nothing_else(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    terms = StoreTerms.of(StoreConfig(path=str(tmp_path / "file")), "run", "policy")
    store = WeightStore(terms, LocalAgents(terms, ["a"]))
    await store.start()
    status = await store.status()
    assert not status.is_on
    assert "could not begin" in status.reason
    store.offer(push(1))
    await store.stop()


async def test_a_later_push_takes_the_place_of_the_one_that_waits(tmp_path: Path) -> None:
    held = Gated(bucket(1))
    async with kept_in(tmp_path) as store:
        assert store.make_way() is None
        store.offer(push(1, held))
        await held.asked.wait()
        store.offer(push(2))
        assert store.make_way() == 1, "the store reads version 1, and nobody may write over it"
        held.opened.set()
        await store.is_idle()
        status = await store.status()
        assert (status.version, status.num_dropped) == (1, 1)
        assert store.make_way() is None


async def test_a_push_whose_buckets_are_gone_is_no_failure(tmp_path: Path) -> None:
    async with kept_in(tmp_path) as store:
        store.offer(WeightPush(1, MANIFEST))
        await store.is_idle()
        status = await store.status()
        assert (status.version, status.reason) == (None, "")


async def test_a_write_is_awaited_by_who_needs_its_version(shared_memory: Path) -> None:
    async with kept_in(shared_memory) as store:
        gate = Gated(bucket(1))
        store.offer(push(1, gate))
        await gate.asked.wait()
        assert await store.why_not_kept(7, 60.0) == ""  # it is not written: no wait
        assert await store.why_not_kept(1, 0.01) == "the store still writes it after 0.01 s"
        store.offer(push(2))
        waiting = asyncio.create_task(store.why_not_kept(2, 60.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        gate.opened.set()
        assert await waiting == ""
        assert (await store.status()).version == 2


async def test_who_needs_a_version_hears_why_it_was_not_written(shared_memory: Path) -> None:
    async with kept_in(shared_memory) as store:
        store.offer(push(1, {"names": ["a"]}))
        why = await store.why_not_kept(1, 60.0)
        assert "weight version 1 is not kept" in why
        assert "has no tensors in it" in why
