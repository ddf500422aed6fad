"""No work of the store beside its caller ends unseen: it goes on, or its error is reported."""

from __future__ import annotations

import ast
import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.config import StoreConfig
from rollout.core.errors import WeightsUnavailable
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.store import store as module
from rollout.weights.store.agents import LocalAgents, StoreTerms
from rollout.weights.store.coordinator import Coordinator
from rollout.weights.store.store import WeightStore
from tests.support.processes import wait_until
from tests.support.store_worlds import Served, contents, moe_manifest

ROOT = Path(__file__).parents[4]
PLACES = (
    *(ROOT / "rollout/weights/store").rglob("*.py"),
    ROOT / "rollout/runtime/ray/store_agents.py",
)
STARTERS = {"keep_task", "keep_thread", "in_own_thread", "start_task", "start_timer", "Listener"}
# Everything that the store starts beside its caller: what follows an error, and the test of that.
WORK = {
    "self._write_offered": ("STARTS_AGAIN", "test_the_task_that_writes_goes_on_after_any_error"),
    "run": ("IS_OVER", "test_an_error_of_the_writing_thread_is_the_reason_of_the_store"),
    "self._serve": ("", "test_an_error_of_a_call_ends_its_connection_alone"),
    "read": ("", "test_memory_is_not_used_again_when_the_library_itself_breaks"),
    "work": ("STARTS_AGAIN", "test_an_actor_has_ended_for_good_when_it_was_missed_often_enough"),
}
MANIFEST = moe_manifest(1, 3)
CANNOT_START = RuntimeError("can't start new thread")


def started() -> Iterator[tuple[str, str]]:
    """What is started, and what follows if it fails; of a result or a connection nothing."""
    for path in PLACES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in STARTERS:
                given = list(map(ast.unparse, node.args))
                yield given[0], next((arg[5:] for arg in given if arg.startswith("Then.")), "")


def test_each_work_is_in_the_table_with_what_follows_and_its_test() -> None:
    assert dict(started()) == {what: then for what, (then, _) in WORK.items()}
    tests = "".join(path.read_text() for path in (ROOT / "tests/rollout").rglob("test_*.py"))
    for _, name in WORK.values():
        assert f"def {name}(" in tests


def push(version: int) -> WeightPush:
    return WeightPush(version, MANIFEST, [{"path": str(version)}])


@pytest.fixture
def store(shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> WeightStore:
    """Each bucket has all tensors of its version."""
    monkeypatch.setattr(
        module, "tensors_of", lambda one: contents(MANIFEST, int(one["path"])).items()
    )
    settings = StoreConfig(path=str(shared_memory), spare_bytes=0, unit_bytes=600)
    terms = StoreTerms.of(settings, "run", "policy")
    return WeightStore(terms, LocalAgents(terms, ["a", "b"]))


async def test_the_task_that_writes_goes_on_after_any_error(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors = [CANNOT_START, KeyError("x"), asyncio.CancelledError()]
    release = store._release_dropped

    async def fail() -> None:
        if errors:
            raise errors.pop()
        await release()

    monkeypatch.setattr(store, "_release_dropped", fail)
    await store.start()
    store.offer(push(1))
    async with asyncio.timeout(30):
        await store.is_idle()
    assert not errors
    assert caplog.text.count("store:write failed with") == 3
    status = await store.status()
    assert (status.is_on, status.version, status.reason) == (True, 1, "")
    store.offer(push(2))
    await store.is_idle()
    assert (await store.status()).version == 2
    await store.stop()


@pytest.mark.parametrize(
    ("where", "error", "reason"),
    [
        ((module, "keep_thread"), CANNOT_START, "can't start new thread"),
        ((Coordinator, "write"), CANNOT_START, "can't start new thread"),
        ((Coordinator, "write"), StopIteration(), "StopIteration()"),
    ],
    ids=["before it begins", "in it", "that no future takes"],
)
async def test_an_error_of_the_writing_thread_is_the_reason_of_the_store(
    where: tuple[Any, str],
    error: Exception,
    reason: str,
    store: WeightStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    await store.start()
    with monkeypatch.context() as patch:
        patch.setattr(*where, fail)
        store.offer(push(1))
        async with asyncio.timeout(30):
            await store.is_idle()
    status = await store.status()
    assert (status.is_on, status.version) == (True, None)
    assert f"weight version 1 is not kept: {reason}" in status.reason
    store.offer(push(2))
    await store.is_idle()
    assert (await store.status()).version == 2
    await store.stop()


@pytest.mark.parametrize("error", [CANNOT_START, KeyError("value")], ids=repr)
async def test_a_status_is_had_whatever_the_nodes_reply(
    error: Exception,
    store: WeightStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(_: Any) -> None:
        raise error

    await store.start()
    with monkeypatch.context() as patch:
        patch.setattr(Coordinator, "num_bytes", fail)
        status = await store.status()
    assert (status.is_on, status.node_bytes) == (True, {})
    assert "store: its bytes are not known" in caplog.text
    await store.stop()


def test_an_error_of_a_call_ends_its_connection_alone(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = Served(shared_memory, shares_files=True)
    served.world.write(1)
    agent = served.servers["node-1"].agent
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(agent, "state", lambda: 1 // 0)
        with pytest.raises((OSError, WeightsUnavailable)):
            served.clients["node-1"].state()
        assert wait_until(lambda: "a connection ended: integer division" in caplog.text, 10)
        served.world.write(2)  # its replicas are enough
    assert served.world.restore(2, "node-1") == contents(served.world.manifest, 2)
    served.world.write(3)
    assert served.clients["node-1"].state().committed == served.world.coordinator.current_write()
    served.close()
