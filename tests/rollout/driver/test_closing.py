"""A driver closes within five seconds, hides no error, and names what still runs.

Time is real here: what does not end is a thread, which ends as the test does.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rollout.core.errors import RolloutError
from rollout.core.samples import Sample
from rollout.driver import rewards
from rollout.driver.driver import Driver, RolloutDriver
from rollout.driver.stream import journal, loop_watch
from rollout.driver.stream.hooks import Hooks
from rollout.driver.stream.options import RolloutOptions
from tests.support.driving import SAMPLING, always, driving, engines, prompts, source
from tests.support.fake_generation_client import FakeGenerationClient
from tests.support.virtual_time import virtual_time
from tests.support.waits import until

pytestmark = pytest.mark.clock

BATCH: dict[str, Any] = {"group_size": 2, "sampling": SAMPLING}


class Gate:
    """Where code of the user waits until the test ends."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self._may_end = threading.Event()

    def wait(self, *of: object) -> float:
        self.has_begun.set()
        self._may_end.wait(60)
        return 1.0

    def open(self) -> None:
        self._may_end.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A gate that is open as the test ends, and with which no thread is left then."""
    before = set(threading.enumerate())
    found = Gate()
    yield found
    found.open()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), thread.name


def a_driver(reward: Any, **settings: Any) -> Driver:
    client = FakeGenerationClient(engines(0.001))
    return Driver("http://nowhere", reward, client=client, adapt_every_s=None, **settings)


@pytest.mark.parametrize("way", ["in a thread", "on the loop", "on_metrics"])
def test_close_waits_for_no_thread_of_the_user_and_hides_no_error(
    way: str, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    reward = {"in a thread": rewards.in_thread(gate.wait), "on the loop": gate.wait}.get(
        way, always(1.0)
    )
    on_metrics = gate.wait if way == "on_metrics" else None
    calls, began_s = [], list[float]()

    def train() -> None:
        with a_driver(reward, on_metrics=on_metrics) as driver:
            calls.append(driver.rollout(0, prompts(1), **BATCH))
            assert gate.has_begun.wait(10)
            began_s.append(time.monotonic())
            raise ValueError("of the trainer")

    with pytest.raises(ValueError, match="of the trainer"):
        train()
    assert time.monotonic() - began_s[0] < 10.0  # five, and what a busy machine adds
    (call,) = calls
    if way == "on_metrics":
        assert call.result(5)
        assert "on_metrics still runs as the driver is closed" in caplog.text
        return
    line = gate.wait.__func__.__code__.co_firstlineno + 2
    thread = "driver-worker_0" if way == "in a thread" else "driver"
    assert f"its thread {thread} still runs, at {__file__}:{line}" in caplog.text
    if way == "in a thread":
        with pytest.raises(RolloutError, match="driver was closed"):
            call.result(5)


class Broken(FakeGenerationClient):
    async def close(self) -> None:
        raise OSError("of close")


def test_an_error_of_close_is_raised_only_where_the_block_has_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = Broken(engines(0.001))
    with (
        pytest.raises(OSError, match="of close"),
        Driver("http://nowhere", client=client, adapt_every_s=None),
    ):
        pass
    with (
        pytest.raises(ValueError, match="of the trainer"),
        Driver("http://nowhere", client=client, adapt_every_s=None),
    ):
        raise ValueError("of the trainer")
    assert "driver: close failed, too" in caplog.text


@virtual_time
async def test_the_same_of_a_driver_of_coroutines() -> None:
    client = Broken(engines(0.001))
    with pytest.raises(OSError, match="of close"):
        async with RolloutDriver("http://nowhere", client=client):
            pass
    with pytest.raises(ValueError, match="of the trainer"):
        async with RolloutDriver("http://nowhere", client=client):
            raise ValueError("of the trainer")


@pytest.mark.parametrize("where", ["generate", "reward"])
@virtual_time
async def test_a_hook_that_swallows_its_cancel_delays_neither_the_call_nor_close(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    is_over, never = False, asyncio.Event()  # kept here: what waits for nothing else is collected

    async def stubborn(of: Any) -> float:
        if where == "generate":
            await of.generate()
        while not is_over:
            try:
                await never.wait()
            except asyncio.CancelledError:
                if where == "generate":
                    with pytest.raises(RolloutError, match="this sample has ended"):
                        await of.generate()
        return 1.0

    hooks = Hooks(**{where: stubborn, f"{where}_timeout_s": 3.0})
    loop = asyncio.get_running_loop()
    async with driving(engines(0.01), hooks=hooks) as (driver, client):
        options = RolloutOptions(max_failed_share=1.0)
        (group,) = await driver.rollout(0, prompts(1), options=options, **BATCH)
        assert loop.time() < 5.0
        assert all(f"{where} did not return within its limit of 3 s" in s.error for s in group)
        num_requests = len(client.requests)
        began_s = loop.time()
    assert loop.time() - began_s < 5.0
    assert len(client.requests) == num_requests == 2
    assert f"{where} goes on though it was cancelled, at {__file__}:" in caplog.text
    is_over = True
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def test_code_that_stops_the_driver_is_named_in_the_log_and_in_the_timeout(
    gate: Gate, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_watch, "_BEAT_S", 0.02)
    monkeypatch.setattr(loop_watch, "_LONG_S", 0.05)

    def is_long(sample: Sample) -> bool:
        return bool(gate.wait())

    with a_driver(always(1.0), hooks=Hooks(sample_filter=is_long)) as driver:
        call = driver.rollout(0, prompts(1), **BATCH)
        assert gate.has_begun.wait(10)
        end_s = time.monotonic() + 30
        while "sample filter has stopped the driver" not in caplog.text:
            assert time.monotonic() < end_s
            time.sleep(0.01)
        assert f", at {__file__}:" in caplog.text
        with pytest.raises(TimeoutError, match="sample filter has stopped the driver for"):
            call.result(0.1)
        gate.open()
        assert len(call.result(10)) == 1


async def test_metrics_that_take_their_time_stop_no_generation_and_stay_in_order(
    gate: Gate,
) -> None:
    seen = list[int]()

    def write(step: int, metrics: Mapping[str, float]) -> None:
        if step == 0:
            gate.wait()
        seen.append(step)

    async with driving(engines(0.001), always(1.0), on_metrics=write) as (driver, _):
        for step in range(3):
            async with asyncio.timeout(10):
                assert await driver.rollout(step, prompts(1), **BATCH)
        assert seen == []
        gate.open()
    assert seen == [0, 1, 2]


def test_a_journal_on_a_slow_disk_is_free_when_the_disk_has_answered(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_WITHIN_S", 0.1)
    sync = journal.os.fsync
    monkeypatch.setattr(journal.os, "fsync", lambda file: (gate.wait(), sync(file)))
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "journal")

    async def use(folder: Path) -> None:
        async with driving(engines(0.001), always(1.0), journal=folder) as (driver, _):
            data = source(3, name="rows")
            assert await driver.rollout(0, data, num_groups=1, **BATCH)

    asyncio.run(use(tmp_path / "journal"))
    with pytest.raises(RolloutError, match="another driver has it"):
        asyncio.run(use(link))
    gate.open()

    async def use_again() -> None:
        async def is_free() -> bool:
            with suppress(RolloutError):
                await use(link)
                return True
            return False

        await until(is_free)

    asyncio.run(use_again())
