"""A batch whose call ends before it has returned is the next call's: cancelled at any await."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import pytest

from rollout.core.samples import Sample
from rollout.driver.driver import Driver
from rollout.driver.stream import journal
from rollout.driver.stream.journal import JournalFiles
from tests.support.driving import SAMPLING, always, driving, engines, numbers, source
from tests.support.fake_generation_client import FakeGenerationClient
from tests.support.virtual_time import pass_time, virtual_time
from tests.support.waits import forever

BATCH: dict[str, Any] = {"num_groups": 2, "group_size": 2, "sampling": SAMPLING}


def at_once(work: Callable[[], Any], name: str) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(work())
    return future


async def here(work: Callable[..., Any], *args: Any) -> Any:
    return work(*args)


async def turns(num: int, result: Any = None) -> Any:
    """Wait for so many turns of the event loop."""
    for _ in range(num):
        await asyncio.sleep(0)
    return result


@pytest.mark.parametrize("has_journal", [True, False])
@pytest.mark.parametrize("next_step", [0, 1])
@virtual_time
async def test_a_call_that_is_cancelled_behind_its_last_sample_loses_nothing(
    next_step: int, has_journal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "in_own_thread", at_once)
    monkeypatch.setattr(asyncio, "to_thread", here)
    folder = tmp_path if has_journal else None
    async with driving(engines(0.01), always(1.0), journal=folder) as (driver, client):
        data, is_slow = source(8), True

        async def slow_metrics() -> Mapping[str, float]:
            if is_slow:
                await pass_time(5.0)
            return {}

        monkeypatch.setattr(client, "server_metrics", slow_metrics)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0):
                await driver.rollout(0, data, **BATCH)
        is_slow = False
        assert numbers(await driver.rollout(next_step, data, **BATCH)) == [1, 2]
        assert numbers(await driver.rollout(next_step + 1, data, **BATCH)) == [3, 4]
        stream = driver.stream_of(data)
        assert stream.auditor.findings(stream.pending) == []
    assert len(client.requests) == 8


@pytest.mark.parametrize("next_step", [0, 1])
async def test_a_call_that_is_cancelled_while_the_journal_is_written_loses_nothing(
    next_step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one of a new driver, which reads what was written meanwhile."""
    write, answers, asked = JournalFiles.write, threading.Event(), threading.Event()

    def write_slowly(files: JournalFiles, lines: Any) -> None:
        if any(b'"delivered":[0,1]' in line for line, _ in lines):
            asked.set()
            assert answers.wait(10)
        write(files, lines)

    monkeypatch.setattr(JournalFiles, "write", write_slowly)
    monkeypatch.setattr(journal, "_WITHIN_S", 20.0)
    of_driver: dict[str, Any] = {"journal": tmp_path, "reward": always(1.0)}
    async with driving(engines(0.001), **of_driver) as (driver, _):
        data = source(12)
        call = asyncio.create_task(driver.rollout(0, data, **BATCH))
        assert await asyncio.to_thread(asked.wait, 10)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        answers.set()
        made = [await driver.rollout(next_step, data, **BATCH)]
        made.append(await driver.rollout(next_step + 1, data, **BATCH))
        assert list(map(numbers, made)) == [[1, 2], [3, 4]]
        stream = driver.stream_of(data)
        assert stream.auditor.findings(stream.pending) == []
    for begin in (next_step, next_step + 1, next_step + 2):
        async with driving(engines(0.001), **of_driver) as (driver, _):
            data = source(12)
            again = [await driver.rollout(step, data, **BATCH) for step in range(begin, 4)]
        expected = [[1, 2], [3, 4], [5, 6], [7, 8]][begin - next_step :]
        assert list(map(numbers, again)) == expected[: len(again)]


@pytest.mark.parametrize("has_journal", [True, False])
def test_a_call_that_is_cancelled_in_any_turn_of_the_loop_loses_nothing(
    has_journal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "in_own_thread", at_once)
    monkeypatch.setattr(asyncio, "to_thread", here)
    was_cancelled = list[bool]()

    async def reward(sample: Sample) -> float:
        return await turns(3) or 1.0

    @virtual_time
    async def cancel_after(num_turns: int) -> None:
        folder = tmp_path / str(num_turns) if has_journal else None
        async with driving(engines(0.0), reward, journal=folder) as (driver, client):
            monkeypatch.setattr(client, "server_metrics", lambda: turns(3, {}))
            data = source(8)
            call = asyncio.create_task(driver.rollout(0, data, **BATCH))
            await turns(num_turns)
            call.cancel()
            await asyncio.wait([call])
            was_cancelled.append(call.cancelled())
            trained = [] if call.cancelled() else numbers(call.result())
            trained += numbers(await driver.rollout(1, data, **BATCH))
            trained += numbers(await driver.rollout(2, data, **BATCH))
            assert trained == list(range(1, len(trained) + 1))
            stream = driver.stream_of(data)
            assert stream.auditor.findings(stream.pending) == []
        if has_journal:
            async with driving(engines(0.0), reward, journal=folder) as (driver, _):
                trained += numbers(await driver.rollout(3, source(8), **BATCH))
                assert trained == list(range(1, len(trained) + 1))

    num_turns = 0
    while not was_cancelled or was_cancelled[-1]:
        cancel_after(num_turns)
        num_turns += 1
    assert num_turns > 10


def test_a_pending_that_is_cancelled_behind_its_last_sample_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_waiting, client = threading.Event(), FakeGenerationClient(engines(0.001))
    real_metrics = client.server_metrics

    async def slow_metrics() -> Mapping[str, float]:
        if not is_waiting.is_set():
            is_waiting.set()
            await forever()
        return await real_metrics()

    monkeypatch.setattr(client, "server_metrics", slow_metrics)
    with Driver("http://nowhere", client=client, adapt_every_s=None) as driver:
        data = source(8)
        pending = driver.rollout(0, data, **BATCH)
        assert is_waiting.wait(10)
        pending.cancel()
        with pytest.raises(CancelledError):
            pending.result(10)
        assert numbers(driver.rollout(0, data, **BATCH).result(10)) == [1, 2]
